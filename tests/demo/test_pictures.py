"""Pictures for the demo model: what they vary in, and what llama.cpp makes of their size."""

from __future__ import annotations

import numpy as np
import pytest

from tools.demo_model.pictures import COLORS, DIGITS, SHAPES, draw, draw_figure, letterbox


def test_picture_depends_on_its_seed_alone() -> None:
    """The same seed gives the same bytes, another one other bytes."""
    one, again, other = draw([7, 1]), draw([7, 1]), draw([7, 2])
    assert one.sentence == again.sentence
    np.testing.assert_array_equal(one.pixels, again.pixels)
    assert one.pixels.tobytes() != other.pixels.tobytes()


@pytest.mark.parametrize("figure", [*SHAPES, *DIGITS])
def test_figure_is_drawn_in_its_color(figure: str) -> None:
    """Each picture has pixels near the color's range, and a background that differs."""
    for number, color in enumerate(COLORS):
        picture = draw_figure(np.random.default_rng([9, number]), color, figure)
        low, high = np.array(COLORS[color]).T
        near = ((picture.pixels >= low - 45) & (picture.pixels <= high + 45)).all(-1)
        assert 0.005 < near.mean() < 0.8


def test_sentence_has_the_right_article() -> None:
    """Of nine colors one begins with a vowel."""
    rng = np.random.default_rng(1)
    assert draw_figure(rng, "orange", "7").sentence == "An orange 7."
    assert draw_figure(rng, "red", "circle").sentence == "A red circle."


@pytest.mark.parametrize(("height", "width"), [(40, 40), (96, 96), (20, 60), (75, 50)])
def test_letterbox_keeps_the_sides_in_proportion(height: int, width: int) -> None:
    """A plain picture keeps its color, with bars at the longer side's ends."""
    square = letterbox(np.full((height, width, 3), 200, np.uint8), 40)
    assert square.shape == (40, 40, 3)
    plain = (square == 200).all(-1)
    assert plain.any(1).sum() == np.ceil(40 * min(1, height / width))
    assert plain.any(0).sum() == np.ceil(40 * min(1, width / height))
