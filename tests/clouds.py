"""Clouds with names: families that are drawn, each for one thing that goes wrong, and the real data beside the repository.

A family is a function (rng, dtype) -> (points, queries). Coordinates are drawn in float64 and rounded to dtype last.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

COUNT = 300
ASKED = 90

FAMILIES = {}


def family(function):
    FAMILIES[function.__name__] = function
    return function


def around(rng, points, count=ASKED):
    """Queries of every kind: points themselves, near ones, in the box, outside of it, far away."""
    low, high = points.min(axis=0), points.max(axis=0)
    size = np.maximum(high - low, np.maximum(np.abs(high), 1e-3) * 1e-3)
    own = points[rng.integers(len(points), size=count)]
    near = own + rng.normal(size=own.shape) * size / 50
    inside = low + rng.random((count, points.shape[1])) * size
    outside = low + (3 * rng.random((count, points.shape[1])) - 1) * size
    far = low + rng.normal(size=(count, points.shape[1])) * size * 100
    part = -(-count // 5)
    return np.concatenate([own[:part], near[:part], inside[:part], outside[:part], far[:part]])[:count]


def drawn(rng, points, dtype):
    points = points.astype(dtype)
    return points, around(rng, points.astype(np.float64)).astype(dtype)


@family
def cube(rng, dtype):
    return drawn(rng, rng.random((COUNT, 3)), dtype)


@family
def surface(rng, dtype):
    points = rng.normal(size=(COUNT, 3))
    return drawn(rng, points / np.linalg.norm(points, axis=1, keepdims=True), dtype)


@family
def thick_surface(rng, dtype):
    """A shell, a fiftieth of its radius thick."""
    points = rng.normal(size=(COUNT, 3))
    shell = points / np.linalg.norm(points, axis=1, keepdims=True)
    return drawn(rng, shell * (1 + 0.02 * rng.random((COUNT, 1))), dtype)


@family
def contrast(rng, dtype):
    """Half of the points a thousand times as dense as the others."""
    points = rng.random((COUNT, 3))
    points[::2] = 0.4 + 0.1 * rng.random((len(points[::2]), 3))
    return drawn(rng, points, dtype)


@family
def lidar(rng, dtype):
    """Rings around a scanner, whose density falls with the square of the distance."""
    angles, distances = 2 * np.pi * rng.random(COUNT), 1 + 99 * rng.random(COUNT) ** 2
    heights = 0.3 * np.sin(distances) + 0.02 * rng.normal(size=COUNT)
    return drawn(rng, np.stack([distances * np.cos(angles), distances * np.sin(angles), heights], axis=1), dtype)


@family
def clusters(rng, dtype):
    centres = rng.random((6, 3)) * 100
    return drawn(rng, centres[rng.integers(6, size=COUNT)] + rng.normal(size=(COUNT, 3)) * 1e-3, dtype)


@family
def line(rng, dtype):
    """Along the diagonal: every cell off it is empty."""
    return drawn(rng, rng.random((COUNT, 1)) * np.ones(3), dtype)


@family
def plane(rng, dtype):
    """Tilted, so that no axis is flat."""
    return drawn(rng, rng.random((COUNT, 2)) @ np.array([[1.0, 0.3, 0.7], [-0.2, 1.0, 0.4]]), dtype)


@family
def all_equal(rng, dtype):
    return np.full((COUNT, 3), 0.3, dtype), around(rng, np.full((COUNT, 3), 0.3)).astype(dtype)


@family
def duplicates(rng, dtype):
    """Thirty places, ten points at each: the order of ties is the order of indices."""
    return drawn(rng, rng.random((30, 3))[rng.integers(30, size=COUNT)], dtype)


@family
def lattice(rng, dtype):
    """Squares are exact; most neighbours tie. Queries at nodes, at the middle of edges, faces and cells."""
    axis = np.arange(7.0)
    points = np.stack(np.meshgrid(axis, axis, axis), -1).reshape(-1, 3)
    queries = rng.integers(-2, 16, (ASKED, 3)) / 2
    return rng.permutation(points).astype(dtype), queries.astype(dtype)


@family
def outlier(rng, dtype):
    """One point so far away that all others share a corner of the box."""
    points = rng.random((COUNT, 3))
    points[COUNT // 3] = 1e6
    return drawn(rng, points, dtype)


@family
def two_sites(rng, dtype):
    """Two heaps and much emptiness; queries between them."""
    points = rng.random((COUNT, 3)) + 1e4 * rng.integers(2, size=(COUNT, 1))
    points, queries = drawn(rng, points, dtype)
    queries[::3] = (rng.random((len(queries[::3]), 3)) * 1e4).astype(dtype)
    return points, queries


@family
def walls(rng, dtype):
    """On walls between cells of side 0.1, which no float holds exactly, and one step of the precision off them."""

    def on_walls(count):
        values = (rng.integers(0, 8, (count, 3)) * 0.1).astype(dtype)
        up, down = np.nextafter(values, dtype(9)), np.nextafter(values, dtype(-9))
        return np.choose(rng.integers(3, size=(count, 3)), [values, up, down])

    return on_walls(COUNT), on_walls(ASKED)


@family
def flat(rng, dtype):
    """No extent along y."""
    return drawn(rng, rng.random((COUNT, 3)) * [1, 0, 1] + [0, 0.75, 0], dtype)


@family
def needle(rng, dtype):
    """No extent along x and y."""
    return drawn(rng, rng.random((COUNT, 3)) * [0, 0, 1] - [3, 2, 1], dtype)


@family
def one_point(rng, dtype):
    return drawn(rng, np.array([[1.0, 2.0, 3.0]]), dtype)


@family
def two_points(rng, dtype):
    return drawn(rng, np.array([[1.0, 2.0, 3.0], [-4.0, 2.0, 3.5]]), dtype)


@family
def offset_million(rng, dtype):
    """In float32 the spacing there is 1/16: many ties."""
    return drawn(rng, 1e6 + rng.random((COUNT, 3)) * 10, dtype)


@family
def tiny(rng, dtype):
    """An extent of 1e-30. In float32 every square underflows to 0, so that the lowest indices win."""
    return drawn(rng, rng.random((COUNT, 3)) * 1e-30, dtype)


@family
def subnormal(rng, dtype):
    """Coordinates below the smallest normal number."""
    return drawn(rng, rng.random((COUNT, 3)) * float(np.finfo(dtype).tiny), dtype)


@family
def huge(rng, dtype):
    """An extent of 1e30. In float32 every square overflows, so that the lowest indices win at distance inf."""
    return drawn(rng, (rng.random((COUNT, 3)) - 0.5) * 1e30, dtype)


@family
def some_overflow(rng, dtype):
    """About half of the squares overflow."""
    return drawn(rng, rng.random((COUNT, 3)) * 1.5 * float(np.finfo(dtype).max) ** 0.5, dtype)


@family
def some_underflow(rng, dtype):
    """Squares among the subnormal numbers, many 0."""
    return drawn(rng, rng.random((COUNT, 3)) * 4 * float(np.finfo(dtype).smallest_subnormal) ** 0.5, dtype)


@family
def extent_overflows(rng, dtype):
    """The differences of coordinates overflow, not only their squares."""
    most = float(np.finfo(dtype).max)
    points = (2 * rng.random((COUNT, 3)) - 1) * most
    points[: COUNT // 4] /= most
    queries = np.concatenate([points[: ASKED // 2], (2 * rng.random((ASKED // 2, 3)) - 1) * most])
    return points.astype(dtype), queries.astype(dtype)


@family
def signed_zeros(rng, dtype):
    values = np.array([-0.0, 0.0, 1.0, -1.0])
    return rng.choice(values, (COUNT, 3)).astype(dtype), rng.choice(values, (ASKED, 3)).astype(dtype)


@family
def one_dimension(rng, dtype):
    return drawn(rng, rng.normal(size=(COUNT, 1)), dtype)


@family
def one_dimension_ties(rng, dtype):
    return rng.integers(0, 40, (COUNT, 1)).astype(dtype), (rng.integers(-10, 100, (ASKED, 1)) / 2).astype(dtype)


@family
def two_dimensions(rng, dtype):
    return drawn(rng, rng.random((COUNT, 2)) * [3, 1], dtype)


@family
def two_dimensions_ties(rng, dtype):
    return rng.integers(0, 12, (COUNT, 2)).astype(dtype), (rng.integers(-4, 28, (ASKED, 2)) / 2).astype(dtype)


def draw(name, dtype=np.float32, points=None, queries=None):
    """(points, queries) of a family, the same ones at every call; cut to so many rows if given."""
    rng = np.random.default_rng(sum(map(ord, name)))
    drawn_points, drawn_queries = FAMILIES[name](rng, np.dtype(dtype).type)
    return drawn_points[:points], drawn_queries[:queries] if queries is None else spread(drawn_queries, queries)


def spread(rows, count):
    """So many rows, evenly out of all: every kind of query that `around` makes stays in."""
    return rows[np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int)]


def large_uniform(rng, count):
    return rng.random((count, 3), np.float32)


def large_surface(rng, count):
    """A bumpy sphere."""
    points = rng.normal(size=(count, 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    points *= 1 + 0.1 * np.sin(5 * points[:, :1]) * np.cos(4 * points[:, 1:2])
    return points.astype(np.float32)


def large_clusters(rng, count):
    """Two hundred clusters of very different width."""
    centres, widths = rng.random((200, 3)), 10.0 ** rng.uniform(-5, -2, 200)
    which = rng.integers(200, size=count)
    return (centres[which] + rng.normal(size=(count, 3)) * widths[which, None]).astype(np.float32)


LARGE = {"uniform": large_uniform, "surface": large_surface, "clusters": large_clusters}

# -- Real data ---------------------------------------------------------------------------------------------------------

_ROOT = Path(__file__).resolve().parent.parent


def shared(*parts):
    """A path in the folder `shared`, beside the repository or in it; skips the test where it is absent."""
    for folder in (_ROOT.parent / "shared", _ROOT / "shared"):
        path = folder.joinpath(*parts)
        if path.exists():
            return path
    pytest.skip(f"no shared/{'/'.join(parts)} beside the repository or in it")


# name -> (file, array of the points, array of the queries or None for the points themselves)
REAL = {
    "spot": ("mesh_spot.npz", "vertices", "vertices_fine"),
    "spot_fine": ("mesh_spot.npz", "vertices_fine", None),
    "blub": ("mesh_blub.npz", "vertices", None),
    "hammer": ("mesh_hammer.npz", "vertices", None),
    "scorpion": ("mesh_scorpion.npz", "vertices", None),
    "skull": ("mesh_skull.npz", "vertices", None),
    "jacksboro": ("grid_jacksboro.npz", "points", None),
    "lone_star": ("lidar_lone_star.npz", "points", None),
    "autzen": ("lidar_autzen.npz", "points", None),
    "sweep": ("lidar_sweep.npz", "points", None),
    "molecules": ("molecules_small.npz", "positions", None),
    "lysozyme": ("protein_1aki.npz", "positions", None),
    "amylase": ("protein_2d0f.npz", "positions", None),
    "antibody": ("protein_1igy.npz", "positions", None),
    "acetylcholine": ("protein_3wip.npz", "positions", None),
}


def real(name):
    """(points, queries or None) of a real cloud."""
    file, points, queries = REAL[name]
    with np.load(shared("data", file), allow_pickle=False) as arrays:
        return arrays[points], None if queries is None else arrays[queries]
