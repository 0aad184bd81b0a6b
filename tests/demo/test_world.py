"""The held-out split and the ways a user may type."""

from random import Random

from tools.demo_model import world
from tools.demo_model.world import Draw


def test_held_out_is_a_fixed_property_of_the_value() -> None:
    """The same value is always on the same side, whatever its casing."""
    assert world.held_out("Ada") == world.held_out("ada")
    assert world.held_out((3, 4)) == world.held_out((3, 4))


def test_about_one_value_in_eight_is_held_out() -> None:
    """The held-out side is large enough to test on and small enough to train without."""
    share = sum(world.held_out(f"value {i}") for i in range(4000)) / 4000
    assert 0.1 < share < 0.15


def test_training_draws_never_make_up_a_held_out_name() -> None:
    """Every made-up name drawn for training is on the training side of the split."""
    draw = Draw(Random(1))
    made_up = [name for name in (world.name(draw) for _ in range(500)) if name not in world.NAMES]
    assert len(made_up) > 200
    assert not any(map(world.held_out, made_up))


def test_listed_words_can_be_held_out_too() -> None:
    """The first stages of training show no held-out name at all, listed or made up."""
    draw = Draw(Random(1), listed_held_out=True)
    assert not any(world.held_out(world.name(draw)) for _ in range(500))


def test_unseen_draws_make_only_held_out_names() -> None:
    """Every name drawn for evaluation is one training never makes."""
    draw = Draw(Random(1), unseen=True)
    assert all(world.held_out(world.name(draw)) for _ in range(500))


def test_names_are_an_open_set() -> None:
    """Names are made from syllables too, so that they cannot be learned by heart."""
    draw = Draw(Random(2))
    assert len({world.name(draw) for _ in range(2000)}) > 1000


def test_typed_text_varies_only_in_case_and_final_mark() -> None:
    """What a user says keeps its words however it is typed."""
    draw = Draw(Random(3))
    typed = {draw.say("My name is Ada.") for _ in range(200)}
    assert len(typed) > 2
    assert {text.lower().rstrip(".") for text in typed} == {"my name is ada"}
