"""The held-out split and the ways a user may type."""

from random import Random

from tools.demo_model import world
from tools.demo_model.world import Draw


def test_held_out_split_is_fixed() -> None:
    """A value is always on the same side, whatever its case."""
    assert world.held_out("Ada") == world.held_out("ada")
    assert world.held_out((3, 4)) == world.held_out((3, 4))


def test_about_one_value_in_eight_is_held_out() -> None:
    """The share of held-out values is between 10 % and 15 %."""
    share = sum(world.held_out(f"value {i}") for i in range(4000)) / 4000
    assert 0.1 < share < 0.15


def test_training_draws_no_held_out_invented_name() -> None:
    """Every invented name is on the training side."""
    draw = Draw(Random(1))
    made_up = [name for name in (world.name(draw) for _ in range(500)) if name not in world.NAMES]
    assert len(made_up) > 200
    assert not any(map(world.held_out, made_up))


def test_listed_names_can_be_held_out_too() -> None:
    """The first training stages show no held-out name at all."""
    draw = Draw(Random(1), listed_held_out=True)
    assert not any(world.held_out(world.name(draw)) for _ in range(500))


def test_evaluation_draws_only_held_out_names() -> None:
    """Training never draws them."""
    draw = Draw(Random(1), unseen=True)
    assert all(world.held_out(world.name(draw)) for _ in range(500))


def test_names_are_an_open_set() -> None:
    """Names are also made of syllables, so that they cannot be memorized."""
    draw = Draw(Random(2))
    assert len({world.name(draw) for _ in range(2000)}) > 1000


def test_typed_text_varies_only_in_case_and_final_mark() -> None:
    """The words of a message are kept."""
    draw = Draw(Random(3))
    typed = {draw.typed("My name is Ada.") for _ in range(200)}
    assert len(typed) > 2
    assert {text.lower().rstrip(".") for text in typed} == {"my name is ada"}
