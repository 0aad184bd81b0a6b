"""Draws the pictures that the demo model's projector names: one colored shape or digit on a plain background.

A picture depends on its seed alone. Everything about it varies that does not change its name: size and sides of the
picture, position, size and rotation of the figure, shade of color and background, form and stroke of a digit, light,
noise and the sharpness of edges. Figures are given by their distance to each pixel, so that any edge width is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Pixels = NDArray[np.uint8]

_Pair = tuple[float, float]
_Strokes = list[list[_Pair]]

# Lowest and highest red, green and blue of each color.
COLORS: Final[Mapping[str, tuple[tuple[int, int], ...]]] = {
    "red": ((190, 255), (0, 55), (0, 55)),
    "green": ((0, 70), (115, 255), (0, 80)),
    "blue": ((0, 70), (0, 115), (180, 255)),
    "yellow": ((235, 255), (212, 255), (0, 80)),
    "orange": ((235, 255), (120, 172), (0, 45)),
    "purple": ((100, 165), (0, 65), (120, 190)),
    "pink": ((240, 255), (105, 195), (160, 215)),
    "black": ((0, 35), (0, 35), (0, 35)),
    "white": ((235, 255), (235, 255), (235, 255)),
}
SHAPES: Final = ("circle", "square", "triangle", "star", "cross")
DIGITS: Final = tuple("0123456789")
SMALLEST_SIDE, LARGEST_SIDE = 40, 96
_LEAST_CONTRAST = 110
_PADDING = (122, 116, 104)
"""The color that llama.cpp pads a picture with that is not square."""


@dataclass(frozen=True)
class Picture:
    """A picture of one figure.

    Attributes:
        color: Its name.
        figure: A shape's name or a digit.
        pixels: Red, green and blue, of shape (height, width, 3).
    """

    color: str
    figure: str
    pixels: Pixels

    @property
    def sentence(self) -> str:
        """What the model should say of it."""
        return sentence_about(self.color, self.figure)


def sentence_about(color: str, figure: str) -> str:
    """Return what the model should say of a figure in a color."""
    return f"{'An' if color[0] in 'aeiou' else 'A'} {color} {figure}."


def draw(seed: str | int | Sequence[int]) -> Picture:
    """Return the picture of a seed."""
    numbers = list(seed.encode()) if isinstance(seed, str) else seed
    rng = np.random.default_rng(numbers)
    figures = SHAPES if rng.random() < 0.5 else DIGITS
    return draw_figure(rng, str(rng.choice(list(COLORS))), str(rng.choice(figures)))


def draw_figure(rng: np.random.Generator, color: str, figure: str) -> Picture:
    """Return a picture of a figure; the rest is drawn from ``rng``."""
    width = height = int(rng.integers(SMALLEST_SIDE, LARGEST_SIDE, endpoint=True))
    if rng.random() < 0.3:
        width, height = (ceil(side * rng.uniform(1, 1.5)) if wide else side for side, wide in _stretch(rng, width))
    ink = _color(rng, color)
    paper = _paper(rng, ink)
    distance = _distance(rng, figure, width, height)
    edge = rng.uniform(0.7, 1.6)
    cover = np.clip(0.5 - distance / edge, 0, 1)[..., None]
    image = paper + (ink - paper) * cover
    if rng.random() < 0.4:  # light from one side
        slope = np.linspace(-1, 1, width, dtype=np.float32) * rng.uniform(-12, 12)
        image = image + slope[None, :, None]
    if rng.random() < 0.5:
        image = image + rng.normal(0, rng.uniform(1, 12), image.shape)
    return Picture(color, figure, np.clip(np.round(image), 0, 255).astype(np.uint8))


def letterbox(pixels: Pixels, side: int) -> Pixels:
    """Return the square of ``side`` pixels that llama.cpp's preprocessor makes of a picture, of the same bytes."""
    height, width = pixels.shape[:2]
    if height == width == side:
        return pixels
    scale = min(np.float32(side) / np.float32(width), np.float32(side) / np.float32(height))
    new_width = min(ceil(np.float32(width) * scale), side)
    new_height = min(ceil(np.float32(height) * scale), side)
    rows = np.einsum("ow,hwc->hoc", _bicubic(width, new_width), pixels.astype(np.float32), optimize=True)
    rows = np.clip(np.floor(rows + 0.5), 0, 255)
    resized = np.einsum("oh,hwc->owc", _bicubic(height, new_height), rows, optimize=True)
    square = np.empty((side, side, 3), np.uint8)
    square[:] = _PADDING
    top, left = (side - new_height) // 2, (side - new_width) // 2
    square[top : top + new_height, left : left + new_width] = np.clip(np.floor(resized + 0.5), 0, 255)
    return square


@lru_cache(maxsize=1024)
def _bicubic(n_from: int, n_to: int) -> Floats:
    """Return the weights, (n_to, n_from), of Pillow's bicubic filter, which widens where it shrinks."""
    scale = n_from / n_to
    reach = max(scale, 1.0)
    centers = (np.arange(n_to) + 0.5) * scale
    x = np.abs((np.arange(n_from) + 0.5)[None, :] - centers[:, None]) / reach
    near = (1.5 * x - 2.5) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * -0.5
    weights = np.where(x < 1, near, np.where(x < 2, far, 0))
    # Whole pixels count, from the one at center - support to the one at center + support.
    first = np.maximum((centers - 2 * reach + 0.5).astype(int), 0)[:, None]
    end = np.minimum((centers + 2 * reach + 0.5).astype(int), n_from)[:, None]
    places = np.arange(n_from)[None, :]
    weights = np.where((places >= first) & (places < end), weights, 0)
    normalized: Floats = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    return normalized


def _stretch(rng: np.random.Generator, side: int) -> tuple[tuple[int, bool], tuple[int, bool]]:
    wide = bool(rng.random() < 0.5)
    return (side, wide), (side, not wide)


def _color(rng: np.random.Generator, name: str) -> Floats:
    low, high = np.array(COLORS[name], np.float32).T
    if name in {"black", "white"}:  # a gray, nearly
        color = low + (high - low) * np.float32(rng.random()) + rng.uniform(-3, 3, 3)
    else:
        color = rng.uniform(low, high)
    return np.asarray(color, np.float32)


def _paper(rng: np.random.Generator, ink: Floats) -> Floats:
    """Return a background, white or black more often than others, that the figure stands out from."""
    while True:
        roll = rng.random()
        if roll < 0.4:
            shade = rng.uniform(235, 255)
        elif roll < 0.55:
            shade = rng.uniform(0, 25)
        else:
            shade = rng.uniform(0, 255)
        tint = rng.uniform(-25, 25, 3) if rng.random() < 0.4 else 0
        paper: Floats = np.clip(np.full(3, shade) + tint, 0, 255).astype(np.float32)
        if np.linalg.norm(paper - ink) >= _LEAST_CONTRAST:
            return paper


def _distance(rng: np.random.Generator, figure: str, width: int, height: int) -> Floats:
    """Return the signed distance in pixels of each pixel's center to the figure's edge, negative inside."""
    side = min(width, height)
    outline = None
    strokes: list[Floats] = []
    if figure in SHAPES:
        radius = side * rng.uniform(0.24, 0.44)
        if figure != "circle":
            outline = _OUTLINES[figure](rng) * np.float32(radius)
        extent = np.array([radius, radius]) if outline is None else np.abs(outline).max(0)
    else:
        tall = side * rng.uniform(0.5, 0.86)
        thickness = tall * rng.uniform(0.1, 0.19)
        strokes = [stroke * np.float32(tall - thickness) for stroke in _glyph(rng, figure)]
        extent = np.max([np.abs(stroke).max(0) for stroke in strokes], axis=0) + thickness / 2
    margin = np.minimum(extent + 1, np.array([width, height]) / 2)
    center = rng.uniform(margin, np.array([width, height]) - margin)
    x = np.arange(width, dtype=np.float32) + np.float32(0.5 - center[0])
    y = np.arange(height, dtype=np.float32) + np.float32(0.5 - center[1])
    if strokes:
        near = np.min([_to_segments(stroke[:-1], stroke[1:], x, y) for stroke in strokes], axis=0)
        return np.asarray(near - thickness / 2, np.float32)
    if outline is None:
        return np.asarray(np.hypot(x[None, :], y[:, None]) - radius, np.float32)
    return _to_polygon(outline, x, y)


def _to_segments(starts: Floats, ends: Floats, x: Floats, y: Floats) -> Floats:
    """Return the distance of each point of a grid to the nearest of some segments."""
    along = ends - starts
    length2 = (along**2).sum(1) + 1e-9
    dx = x[None, :] - starts[:, :1]
    dy = y[None, :] - starts[:, 1:]
    share = (dx * along[:, :1])[:, None, :] + (dy * along[:, 1:])[:, :, None]
    share = np.clip(share / length2[:, None, None], 0, 1)
    away_x = dx[:, None, :] - share * along[:, 0, None, None]
    away_y = dy[:, :, None] - share * along[:, 1, None, None]
    nearest: Floats = np.sqrt((away_x**2 + away_y**2).min(0))
    return nearest


def _to_polygon(corners: Floats, x: Floats, y: Floats) -> Floats:
    ends = np.roll(corners, -1, axis=0)
    distance = _to_segments(corners, ends, x, y)
    above = (corners[:, 1:] > y[None, :]) != (ends[:, 1:] > y[None, :])
    slope = (ends[:, 0] - corners[:, 0]) / np.where(ends[:, 1] == corners[:, 1], 1, ends[:, 1] - corners[:, 1])
    crossing = corners[:, :1] + slope[:, None] * (y[None, :] - corners[:, 1:])
    crossed = above[:, :, None] & (x[None, None, :] < crossing[:, :, None])
    inside = crossed.sum(0) % 2 == 1
    return np.asarray(np.where(inside, -distance, distance), np.float32)


def _turned(points: Floats, degrees: float) -> Floats:
    angle = np.deg2rad(degrees)
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]], np.float32)
    turned: Floats = points @ turn
    return turned


def _ring(n_points: int, radii: Sequence[float], first_degrees: float) -> Floats:
    angles = np.deg2rad(first_degrees + np.arange(n_points) * 360 / n_points)
    radius = np.array([radii[number % len(radii)] for number in range(n_points)])
    return np.stack([np.cos(angles) * radius, np.sin(angles) * radius], 1).astype(np.float32)


def _square(rng: np.random.Generator) -> Floats:
    return _turned(_ring(4, (1.1,), 45), rng.uniform(-14, 14))


def _triangle(rng: np.random.Generator) -> Floats:
    squeeze = np.array([rng.uniform(0.85, 1.15), rng.uniform(0.9, 1.1)], np.float32)
    return _turned(_ring(3, (1,), -90) * squeeze, rng.uniform(-25, 25))


def _star(rng: np.random.Generator) -> Floats:
    return _turned(_ring(10, (1, rng.uniform(0.36, 0.5)), -90), rng.uniform(-36, 36))


def _cross(rng: np.random.Generator) -> Floats:
    a = rng.uniform(0.22, 0.36)
    arm = [(a, -a), (1, -a), (1, a)]
    corners = np.concatenate([_turned(np.array(arm, np.float32), 90 * quarter) for quarter in range(4)])
    return _turned(corners, rng.uniform(-14, 14))


_OUTLINES: Final[Mapping[str, Callable[[np.random.Generator], Floats]]] = {
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "cross": _cross,
}


def _arc(center: _Pair, radii: _Pair, degrees: _Pair) -> list[_Pair]:
    """Return points of an arc; degrees run clockwise from the right."""
    (x, y), (rx, ry) = center, radii
    angles = np.deg2rad(np.linspace(*degrees, 14))
    return [(x + rx * float(np.cos(angle)), y + ry * float(np.sin(angle))) for angle in angles]


_SIX_LOOP = _arc((0.3, 0.68), (0.29, 0.32), (0, 360))
_THREE_BELLY = _arc((0.28, 0.73), (0.3, 0.27), (270, 515))
# The forms of each digit in a box 0.6 wide and 1 tall, as strokes of points.
_GLYPHS: Final[Mapping[str, tuple[_Strokes, ...]]] = {
    "0": ([_arc((0.3, 0.5), (0.3, 0.5), (0, 360))], [_arc((0.3, 0.5), (0.25, 0.5), (0, 360))]),
    "1": (
        [[(0.08, 0.22), (0.34, 0), (0.34, 1)]],
        [[(0.1, 0.17), (0.32, 0), (0.32, 1)], [(0.06, 1), (0.57, 1)]],
    ),
    "2": (
        [[*_arc((0.3, 0.28), (0.28, 0.28), (190, 395)), (0.02, 1), (0.6, 1)]],
        [[*_arc((0.29, 0.27), (0.29, 0.27), (200, 380)), (0.3, 0.68), (0.02, 1), (0.6, 1)]],
    ),
    "3": (
        [[*_arc((0.28, 0.24), (0.26, 0.24), (205, 450)), *_THREE_BELLY]],
        [[(0.03, 0), (0.55, 0), (0.26, 0.42), *_arc((0.27, 0.71), (0.31, 0.29), (270, 515))]],
    ),
    "4": (
        [[(0.44, 1), (0.44, 0), (0, 0.68), (0.6, 0.68)]],
        [[(0.1, 0), (0, 0.6), (0.6, 0.6)], [(0.44, 0.25), (0.44, 1)]],
    ),
    "5": (
        [[(0.54, 0), (0.1, 0), (0.06, 0.46), *_arc((0.27, 0.68), (0.31, 0.32), (225, 515))]],
        [[(0.56, 0), (0.07, 0), (0.07, 0.45), *_arc((0.26, 0.7), (0.33, 0.3), (240, 500))]],
    ),
    "6": (
        [_SIX_LOOP, _arc((0.48, 0.66), (0.47, 0.66), (180, 268))],
        [_SIX_LOOP, _arc((0.33, 0.5), (0.32, 0.5), (170, 325))],
    ),
    "7": (
        [[(0, 0), (0.58, 0), (0.2, 1)]],
        [[(0, 0), (0.58, 0), (0.2, 1)], [(0.13, 0.5), (0.52, 0.5)]],
    ),
    "8": (
        [_arc((0.3, 0.25), (0.25, 0.25), (0, 360)), _arc((0.3, 0.74), (0.3, 0.26), (0, 360))],
        [_arc((0.3, 0.25), (0.24, 0.25), (0, 360)), _arc((0.3, 0.75), (0.26, 0.25), (0, 360))],
    ),
    "9": (
        [[(0.6 - x, 1 - y) for x, y in _SIX_LOOP], _arc((0.12, 0.34), (0.47, 0.66), (0, 88))],
        [[(0.6 - x, 1 - y) for x, y in _SIX_LOOP], _arc((0.27, 0.5), (0.32, 0.5), (-10, 145))],
        [[(0.6 - x, 1 - y) for x, y in _SIX_LOOP], [(0.59, 0.32), (0.55, 1)]],
    ),
}


def _glyph(rng: np.random.Generator, digit: str) -> list[Floats]:
    """Return a digit's strokes around its center, one tall, in a form and hand of their own."""
    forms = _GLYPHS[digit]
    strokes = forms[int(rng.integers(len(forms)))]
    stretch = np.array([rng.uniform(0.75, 1.15), 1], np.float32)
    slant = np.array([[1, 0], [rng.uniform(-0.22, 0.06), 1]], np.float32)
    degrees = rng.uniform(-9, 9)
    return [
        _turned(((np.array(stroke, np.float32) - (0.3, 0.5)) * stretch).astype(np.float32) @ slant, degrees)
        for stroke in strokes
    ]
