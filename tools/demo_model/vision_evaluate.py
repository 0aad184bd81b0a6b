"""Measures what the demo model sees: `python -m tools.demo_model.vision_evaluate PROJECTOR`.

Runs the bundled model and a projector through the engine's own parts on the CPU, greedily, on pictures that training
never shows. An answer passes when it is exactly the expected sentence.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from inferencecenter.demo import demo_model_path
from tools.demo_model import vision_corpus
from tools.demo_model.chatml import Message
from tools.demo_model.evaluate import Score
from tools.demo_model.pictures import draw
from tools.demo_model.seeing import SeeingModel
from tools.demo_model.vision_corpus import PICTURE_MARK
from tools.demo_model.world import Draw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tools.demo_model.pictures import Picture

SEED: Final = 1
FIRST_QUESTION: Final = "What is in the picture?"
RECALL_QUESTION: Final = "What was in the picture?"
NAMED: Final = "named, picture first"
RECALLED: Final = "recalled three turns later"
LEAST_SHARE: Final = 0.9
"""Of the pictures that have to be named, and recalled, for a projector to ship."""

Case = tuple[tuple[Message, ...], tuple["Picture", ...], str]
"""Messages with pictures, and the expected answer."""


def _user(content: str) -> Message:
    return Message("user", content)


def _named(draws: Draw, picture: Picture) -> Case:
    return (_user(PICTURE_MARK + FIRST_QUESTION),), (picture,), picture.sentence


def _named_before_picture(draws: Draw, picture: Picture) -> Case:
    return (_user(FIRST_QUESTION + PICTURE_MARK),), (picture,), picture.sentence


def _named_in_any_wording(draws: Draw, picture: Picture) -> Case:
    *messages, _ = vision_corpus.question_alone(draws, [picture.sentence])
    return tuple(messages), (picture,), picture.sentence


def _named_in_third_turn(draws: Draw, picture: Picture) -> Case:
    earlier = [message for turn in vision_corpus.small_turns(draws, 2) for message in turn.messages]
    return (*earlier, _user(PICTURE_MARK + FIRST_QUESTION)), (picture,), picture.sentence


def _named_after(n_pictures: int) -> Callable[[Draw, Picture], Case]:
    def made(draws: Draw, picture: Picture) -> Case:
        earlier = [draw([SEED, draws.number(0, 10**6), 2]) for _ in range(n_pictures)]
        asked = _user(PICTURE_MARK + FIRST_QUESTION)
        turns = [message for each in earlier for message in (asked, Message("assistant", each.sentence))]
        return (*turns, asked), (*earlier, picture), picture.sentence

    return made


def _recalled(draws: Draw, picture: Picture) -> Case:
    between = [message for turn in vision_corpus.small_turns(draws, 2) for message in turn.messages]
    shown = (_user(PICTURE_MARK + FIRST_QUESTION), Message("assistant", picture.sentence))
    return (*shown, *between, _user(RECALL_QUESTION)), (picture,), picture.sentence


def _small_turn_after_picture(draws: Draw, picture: Picture) -> Case:
    (turn,) = vision_corpus.small_turns(draws, 1)
    shown = (_user(PICTURE_MARK + FIRST_QUESTION), Message("assistant", picture.sentence))
    return (*shown, turn.messages[0]), (picture,), turn.messages[1].content


KINDS: Final[dict[str, Callable[[Draw, Picture], Case]]] = {
    NAMED: _named,
    "named, picture last": _named_before_picture,
    "named, any wording": _named_in_any_wording,
    "named in the third turn": _named_in_third_turn,
    "named, second picture": _named_after(1),
    "named, third picture": _named_after(2),
    RECALLED: _recalled,
    "small talk after a picture": _small_turn_after_picture,
}


def cases(kind: str, amount: int, *, seed: int = SEED) -> Iterator[Case]:
    """Yield cases of a kind; the pictures are the same for each."""
    draws = Draw(Random(f"{kind}:{seed}"))  # noqa: S311 (no secrets here)
    for number in range(amount):
        yield KINDS[kind](draws, draw([seed, number]))


def score(model: SeeingModel, kind: str, amount: int, failures: Console | None = None, *, seed: int = SEED) -> Score:
    """Return how many cases of a kind pass."""
    result = Score()
    for messages, pictures, expected in cases(kind, amount, seed=seed):
        answer = model.answer(messages, [each.pixels for each in pictures])
        result.total += 1
        result.passed += answer == expected
        if failures and answer != expected:
            failures.print(f"{kind}: {expected!r} wanted, {answer!r} said", markup=False)
    return result


def main(
    projector: Annotated[Path, typer.Argument(help="Projector file.")],
    *,
    amount: Annotated[int, typer.Option(help="Cases of each kind.")] = 500,
    seed: Annotated[int, typer.Option(help="Of pictures and conversations.")] = SEED,
    show_failures: Annotated[bool, typer.Option(help="Show wrong answers on stderr.")] = False,
) -> None:
    """Measures a projector on unseen pictures; exits with 1 if it should not ship."""
    failures = Console(stderr=True) if show_failures else None
    table = Table("question", "passed", "of", "share")
    with SeeingModel.load(demo_model_path(), projector) as model:
        scores: dict[str, Score] = {kind: score(model, kind, amount, failures, seed=seed) for kind in KINDS}
    for kind, each in scores.items():
        table.add_row(kind, str(each.passed), str(each.total), f"{each.share:.1%}")
    Console().print(table)
    if min(scores[NAMED].share, scores[RECALLED].share) < LEAST_SHARE:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
