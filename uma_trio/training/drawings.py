"""Pictures that the embedded model learns to see: some shapes of one kind and colour, on a plain background."""

from __future__ import annotations

from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

SHAPES: Final = ("circle", "square", "triangle", "cross")
PAINTS: Final = {
    "red": ((255, 0, 0), (215, 50, 45)),
    "green": ((0, 128, 0), (60, 185, 75)),
    "blue": ((0, 0, 255), (50, 95, 205)),
    "yellow": ((255, 255, 0), (240, 205, 40)),
    "orange": ((255, 165, 0), (240, 125, 25)),
    "purple": ((128, 0, 128), (145, 70, 190)),
    "black": ((0, 0, 0), (40, 40, 45)),
}
"""Each colour is one of those between two."""
MOST: Final = 4
"""Shapes of a picture."""
_GRIDS: Final = ((1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 3), (3, 2), (2, 3), (3, 3))
"""Columns and rows of cells that have at most one shape each."""

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@attrs.frozen
class Scene:
    """What is in a picture."""

    number: int
    """0 is a picture without any shape."""
    colour: str
    shape: str


def some_scene(rng: np.random.Generator) -> Scene:
    number = int(rng.choice(MOST + 1, p=(0.04, 0.33, 0.21, 0.21, 0.21)))
    return Scene(number, str(rng.choice([*PAINTS])), str(rng.choice(SHAPES)))


def draw(scene: Scene, rng: np.random.Generator, side: int) -> Pixels:
    """A picture of ``scene``, ``[side, side, 3]``: places, sizes, angles, shades and background are random."""
    picture = np.empty((side, side, 3), np.float32)
    picture[:] = _background(rng, is_light=scene.colour == "black")
    if not scene.number:
        picture += _nothing(rng, side)
    one, other = np.array(PAINTS[scene.colour], np.float32)
    paint = one + rng.random() * (other - one) + rng.uniform(-12, 12, 3)
    for x, y, radius in _places(scene.number, rng):
        inside = _coverage(scene.shape, side * x, side * y, side * radius, rng, side)[..., None]
        picture += inside * (paint.astype(np.float32) - picture)
    picture += rng.normal(0, rng.choice((0, 0, 4)), picture.shape).astype(np.float32)
    return picture.clip(0, 255).astype(np.uint8)


def _background(rng: np.random.Generator, *, is_light: bool) -> Floats:
    kind = rng.random()
    if kind < 0.5:
        return np.full(3, 255, np.float32)
    if kind < 0.85 or is_light:
        return rng.uniform(205, 255, 3).astype(np.float32)
    return (rng.uniform(0, 50) + rng.uniform(0, 12, 3)).astype(np.float32)


def _nothing(rng: np.random.Generator, side: int) -> Floats:
    """What makes a picture without shapes: nothing, noise or shades."""
    kind, at = rng.integers(3), np.linspace(-1, 1, side, dtype=np.float32)
    if kind == 0:
        return np.zeros((side, side, 3), np.float32)
    if kind == 1:
        return (rng.uniform(20, 120) * rng.standard_normal((side, side, 3))).astype(np.float32)
    slope = rng.uniform(-90, 90, (2, 3)).astype(np.float32)
    shades: Floats = at[:, None, None] * slope[0] + at[None, :, None] * slope[1]
    return shades


def _places(number: int, rng: np.random.Generator) -> list[tuple[float, float, float]]:
    """Centres and radii, as shares of the side; no shape touches another."""
    grids = [grid for grid in _GRIDS if grid[0] * grid[1] >= number]
    columns, rows = grids[rng.integers(len(grids))]
    largest = 0.45 / max(columns, rows)
    radius = rng.uniform(min(0.11, 0.7 * largest), largest)
    places = []
    for cell in rng.permutation(columns * rows)[:number]:
        own = radius * rng.uniform(0.85, 1.0)
        spare_x, spare_y = 0.48 / columns - own, 0.48 / rows - own
        x = (cell % columns + 0.5) / columns + rng.uniform(-spare_x, spare_x)
        y = (cell // columns + 0.5) / rows + rng.uniform(-spare_y, spare_y)
        places.append((float(x), float(y), float(own)))
    return places


def _coverage(shape: str, x: float, y: float, radius: float, rng: np.random.Generator, side: int) -> Floats:
    """How much of each pixel is inside a shape, ``[side, side]``."""
    across = np.arange(side, dtype=np.float32) + 0.5
    dx, dy = across[None, :] - np.float32(x), across[:, None] - np.float32(y)
    most = {"circle": 0.0, "square": 0.3, "triangle": 0.4, "cross": 0.2}[shape]
    angle = rng.choice((0.0, rng.uniform(-most, most)))
    cos, sin = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    u, v = cos * dx - sin * dy, sin * dx + cos * dy
    if shape == "circle":
        outside = np.hypot(u, v) - 0.9 * radius
    elif shape == "square":
        outside = np.maximum(abs(u), abs(v)) - 0.7 * radius
    elif shape == "triangle":
        outside = np.maximum(v, np.float32(0.866) * abs(u) - np.float32(0.5) * v) - 0.5 * radius
    else:
        long, short = 0.9 * radius, 0.28 * radius
        outside = np.minimum(np.maximum(abs(u) - long, abs(v) - short), np.maximum(abs(u) - short, abs(v) - long))
    return (0.5 - outside).clip(0, 1).astype(np.float32)
