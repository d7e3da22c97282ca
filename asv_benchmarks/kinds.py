"""Clouds of the kinds that people have, and of those that a grid isn't made for: functions of (count, rng) that return
float32 points."""

from __future__ import annotations

import numpy as np
from against_scipy import CLOUDS


def contrast(count, rng):
    """Half of the points a thousand times as dense as the others."""
    points = rng.random((count, 3), np.float32)
    points[::2] = np.float32(0.4) + np.float32(0.1) * rng.random((len(points[::2]), 3), np.float32)
    return points


def lidar(count, rng):
    """Rings around a scanner, whose density falls with the square of the distance."""
    angles, distances = 2 * np.pi * rng.random(count), 1 + 99 * rng.random(count) ** 2
    heights = 0.3 * np.sin(distances) + 0.02 * rng.normal(size=count)
    return np.stack([distances * np.cos(angles), distances * np.sin(angles), heights], axis=1).astype(np.float32)


def outlier(count, rng):
    """A cube, and one point at 1e6."""
    points = rng.random((count, 3), np.float32)
    points[count // 2] = 1e6
    return points


def sites(count, rng):
    """Two cubes, far apart."""
    points = rng.random((count, 3), np.float32)
    points[::2] += 1e4
    return points


def noise(count, rng):
    """Every thousandth point a thousand times as far away, and one farther still."""
    points = rng.random((count, 3), np.float32)
    points[::1_000] *= 1e3
    points[0] = 1e6
    return points


KINDS = {**CLOUDS, "contrast": contrast, "LiDAR": lidar, "outlier": outlier, "two sites": sites}
