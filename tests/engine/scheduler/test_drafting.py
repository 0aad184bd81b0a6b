"""The drafts of a step, and their accounting."""

from __future__ import annotations

from inferencecenter.engine.scheduler.speculation import ROW_COST, DraftPlanner, Drafts
from inferencecenter.engine.scheduler.state import DECODE_UNITS, EngineRequest
from tests.engine.scheduler.harness import N_CTX, Faults, SchedulerHarness

REPEATED = [1, 2, 3, 4, 5, 6] * 3


def new_request(slot: int, tokens: list[int]) -> EngineRequest:
    """Return a turn that decodes in a slot."""
    request = EngineRequest(
        turn_id=f"t{slot}",
        session_id=f"s{slot}",
        client_id="c",
        priority=1,
        arrival=slot,
        submitted_s=0.0,
        tokens=list(tokens),
    )
    request.slot = slot
    return request


def drafting(
    *,
    draft_tokens: int = 8,
    n_ctx: int = 4096,
    pass_tokens: int = 512,
    lookup: bool = True,
    draft_cost: float | None = None,
) -> DraftPlanner:
    """Return one with room."""
    return DraftPlanner(
        draft_tokens=draft_tokens, n_ctx=n_ctx, pass_tokens=pass_tokens, lookup=lookup, draft_cost=draft_cost
    )


def test_repeated_text_is_drafted() -> None:
    """The draft continues as the text did the last time."""
    (drafts,) = drafting().drafts([new_request(0, REPEATED)]).tokens.values()
    assert drafts == ([1, 2, 3, 4, 5, 6] * 2)[: len(drafts)] != []


def test_drafting_is_off_by_default() -> None:
    """No turn has an index either."""
    request = new_request(0, REPEATED)
    assert drafting(draft_tokens=0).drafts([request]) == Drafts()
    assert request.drafter is None


def test_drafts_end_with_the_context() -> None:
    """The last token of a full context is sampled, not decoded, so one position stays free."""
    n_tokens = len(REPEATED)
    for n_free, n_drafts in ((3, 2), (2, 1), (1, 0)):
        drafts = drafting(n_ctx=n_tokens + n_free).drafts([new_request(0, REPEATED)]).tokens
        assert sum(map(len, drafts.values())) == n_drafts


def test_drafts_fit_one_batch() -> None:
    """Tokens and drafts together do not exceed the batch size."""
    requests = [new_request(slot, REPEATED) for slot in (1, 0, 2)]
    for pass_tokens in range(3, 12):
        drafts = drafting(pass_tokens=pass_tokens).drafts(requests).tokens
        assert sum(map(len, drafts.values())) + len(requests) <= pass_tokens
    assert drafting(pass_tokens=3).drafts(requests) == Drafts()


def test_accepted_drafts_are_charged_to_the_client() -> None:
    """A turn takes fewer steps than it has tokens, and each of them is charged."""
    world = SchedulerHarness(slots=1, answer_tokens=40, draft_tokens=4)
    turn = world.add([1])
    other = world.add([2], client="d", answer_tokens=1)
    steps = world.run(100, until=lambda: turn.generated_tokens == 40)
    assert world.accepted_tokens > 10
    assert steps < 40
    assert turn.served == 40 * DECODE_UNITS + 1
    assert other.started


def test_quantum_counts_accepted_drafts() -> None:
    """A turn with more tokens per step uses up its quantum in fewer steps."""

    def steps_of_quantum(draft_tokens: int) -> int:
        world = SchedulerHarness(slots=1, answer_tokens=50, quantum_tokens=30, draft_tokens=draft_tokens)
        first = world.add([1])
        world.step()
        world.add([2], client="d", session="other")
        return world.run(100, until=lambda: first.preempted > 0)

    assert steps_of_quantum(4) < steps_of_quantum(0)


def test_answers_are_the_same_with_drafts() -> None:
    """This holds when slots are preempted, and when KV is lost because rejected drafts are removed."""

    def answers(*, draft: bool, faults: Faults, draft_cost: float | None = None) -> list[list[int]]:
        world = SchedulerHarness(slots=2, answer_tokens=30, quantum_tokens=5, draft_tokens=4, draft_cost=draft_cost)
        if not draft:
            world.scheduler._drafting = drafting(draft_tokens=0)
        requests = [world.add([n, n, n]) for n in range(4)]
        for step in range(300):
            world.step(faults if step % 5 == 0 else Faults())
        assert not world.scheduler.has_work
        assert (world.accepted_tokens > 0) is draft
        return [request.tokens for request in requests]

    plain = answers(draft=False, faults=Faults())
    assert [len(tokens) for tokens in plain] == [33] * 4
    assert answers(draft=True, faults=Faults()) == plain
    assert answers(draft=True, faults=Faults(cut=True)) == plain
    assert answers(draft=True, faults=Faults(), draft_cost=0.1) == plain
    assert answers(draft=True, faults=Faults(cut=True), draft_cost=0.1) == plain


def test_failed_truncation_costs_kv_but_no_token() -> None:
    """The turn is prefilled again and continues."""
    world = SchedulerHarness(slots=1, answer_tokens=N_CTX - 4, draft_tokens=4)
    turn = world.add([1])
    emptied = 0
    while world.scheduler.has_work:
        before = turn.kv_tokens
        world.step(Faults(cut=True))
        emptied += before > 0 and turn.kv_tokens == 0 and turn.slot is not None
    assert emptied > 0
    assert world.terminals == {turn.turn_id: 1}


def test_draft_model_is_used_if_the_text_has_no_draft() -> None:
    """It gets all tokens of that turn, and none of turns drafted from their text."""
    repeats, new = new_request(0, REPEATED), new_request(1, [1, 2, 3])
    drafts = drafting(draft_cost=0.02).drafts([new, repeats])
    assert drafts.tokens.keys() == {"t0"}
    (asked,) = drafts.requests.values()
    assert (asked.slot, asked.tokens, asked.client_id) == (1, [1, 2, 3], "c")
    assert 0 < asked.n_tokens == len(drafts.tokens["t0"])


def test_without_lookup_only_the_draft_model_drafts() -> None:
    """Repetitive text is drafted by it too."""
    drafts = drafting(lookup=False, draft_cost=0.1).drafts([new_request(0, REPEATED)])
    assert drafts.tokens == {}
    assert drafts.requests["t0"].tokens == REPEATED


def test_draft_model_is_not_used_without_a_gain() -> None:
    """It drafts nothing if it costs as much as it saves, or for a batch of many turns."""
    assert drafting(lookup=False, draft_cost=0.8).drafts([new_request(0, [1, 2, 3])]) == Drafts()
    many = [new_request(slot, [1, 2, 3]) for slot in range(8)]
    assert drafting(lookup=False, draft_cost=0.2).drafts(many) == Drafts()


def test_drafts_of_the_model_end_with_the_context() -> None:
    """Drafts from the text do, too."""
    for n_free, n_drafts in ((4, 2), (3, 2), (2, 1), (1, 0)):
        drafts = drafting(lookup=False, draft_cost=0.1, n_ctx=3 + n_free).drafts([new_request(0, [1, 2, 3])])
        assert sum(asked.n_tokens for asked in drafts.requests.values()) == n_drafts


def test_accepted_drafts_of_the_model_save_steps() -> None:
    """Before its first draft the model may have to prefill the text."""
    world = SchedulerHarness(slots=1, answer_tokens=40, draft_tokens=4, lookup=False, draft_cost=0.1)
    turn = world.add([1])
    steps = world.run(100, until=lambda: turn.generated_tokens == 40)
    assert world.accepted_tokens > 10
    assert steps < 35


def test_draft_cost_is_learned_while_one_turn_decodes() -> None:
    """All decodes of the harness take equally long, so that a further row costs next to nothing."""
    world = SchedulerHarness(slots=2, answer_tokens=30, draft_tokens=4)
    costs = world.scheduler._drafting._costs
    world.add([1])
    world.add([2], session="other")
    world.run(100, until=lambda: world.scheduler.running == 2)
    world.run(100, until=lambda: world.accepted_tokens > 4)
    assert world.scheduler.running == 2
    assert costs.row == ROW_COST
    world.run_to_end()
    world.add([3])
    world.run_to_end()
    assert costs.row < ROW_COST / 2
