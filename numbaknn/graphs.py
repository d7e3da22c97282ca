"""Graphs of neighbours: `knn_graph`."""

from __future__ import annotations

from typing import Any

import numpy as np

from numbaknn import errors
from numbaknn.arrays import chosen_target, hand_back, working_dtype
from numbaknn.launch import read
from numbaknn.memory import check_fits
from numbaknn.neighbors import (
    Check,
    Target,
    _adopt_borders,
    _adopt_cloud,
    _check_finite,
    _flat_borders,
    _layout_of,
    _options,
    _uploaded,
    _workspace_library,
)
from numbaknn.plans.batches import DeviceEdges, HostEdges, Layout, host_grids, run_batch_once


def knn_graph(
    points: Any,
    k: int,
    *,
    offsets: Any = None,
    loop: bool = False,
    check_finite: Check = "auto",
    target: Target = "auto",
) -> Any:
    """The edges from the k nearest neighbours of every point to the point.

    Parameters
    ----------
    points : array (M, D), D in {1, 2, 3}
        As in `knn`.
    k : int, 1 or more
    offsets : integer array (B + 1,), optional
        Where several clouds begin and end (PyG's ``ptr``), as in `knn`. Edges stay within a cloud.
    loop : bool
        Whether a point is among its own neighbours. Otherwise it is left out, by its index, so that its duplicates stay in.
        With it, it counts as one of the k: it comes in the order of (distance, index) too, so that k duplicates of a lower
        index are before it.
    check_finite, target :
        As in `knn`. A point that is not finite has no edges.

    Returns
    -------
    array (2, E), int64
        Of the kind of `points` and on its device: the neighbours above the points, as in PyG's ``edge_index``, in the order
        of (point, distance, neighbour). Indices are rows of `points`. A neighbour that doesn't exist gives no edge, so E is
        below k M where a cloud has too few points. On a device the host waits once, to learn E.

    Raises
    ------
    ValueError, TypeError
        Before any work, naming the argument.
    MemoryError
        Before any work, if the edges, with the distances that they are found by, are more than the memory that is free.

    Examples
    --------
    >>> import numpy as np
    >>> import numbaknn as nk
    >>> nk.knn_graph(np.array([[0.0], [1.0], [3.0], [9.0]]), k=2, offsets=[0, 3, 4])
    array([[1, 2, 0, 2, 1, 0],
           [0, 0, 1, 1, 2, 2]])
    """
    points = _adopt_cloud("points", points)
    loop = errors.check_flag("loop", loop)
    options = _options(k, np.inf, 0, False, "int64", check_finite)
    target = chosen_target(target, points)
    rows, dimensions = points.shape
    borders = [] if offsets is None else [_adopt_borders("offsets", offsets, points, target, rows, "points")]
    layout = _layout_of(rows, borders[0]) if borders else Layout(1)
    dtype, library = working_dtype(points.dtype), points.library
    workspace = _workspace_library(points, target)
    for memory in {library, workspace}:
        check_fits(
            f"k={options.k} neighbours of each of {rows:,} points",
            rows * options.k,
            (dtype, *3 * [np.dtype(np.int64)]),
            memory,
        )
    stream = library.stream() if target == "cuda" else 0
    values = points.flat(dtype)
    if options.checks(points):
        _check_finite(points, values, stream)
    if rows == 0:
        return hand_back(library, library.empty((2, 0), np.int64)[0])
    asked = values, (rows, dimensions), dtype, layout, borders, options, loop
    if target == "cpu":
        edges = _edges_on_host(*asked)
        found, flat = library.empty((2, edges.count()), np.int64)
        edges.fill(flat, found.shape[1])
        return hand_back(library, found)
    edges, flat = _edges_on_device(points, *asked, workspace, stream)
    if points.on_device:
        return hand_back(library, edges)
    found, host = library.empty(edges.shape, np.int64)
    if host.size:
        host[:] = read(flat, stream)
    return hand_back(library, found)


def _edges_on_host(values, shape, dtype, layout, borders, options, loop):
    """The edges of flat points in host memory, not yet written."""
    rows, k = shape[0], options.k
    distances, indices = np.empty(rows * k, dtype), np.empty(rows * k, np.int64)
    own_borders = [adopted.flat(np.int64) for adopted in borders]
    # with a loop a point is asked as any query is, of its own cloud
    grids = host_grids(*shape, dtype, layout, 2 * own_borders).build(values)
    grids.query(values if loop else None, rows, options, distances, indices)
    return HostEdges(rows, k, indices, rows)


def _edges_on_device(points, values, shape, dtype, layout, borders, options, loop, library, stream):
    """The edges in memory of the device: an array of the library and the flat one."""
    rows, asked = shape[0], shape[0] * options.k
    if not points.on_device:
        values = _uploaded(values, stream)
    # the neighbours are found where they stay, if every point has k of them
    (whole, flat), (_, distances) = library.empty((2, asked), np.int64), library.empty((asked,), dtype)
    indices = flat.part(0, asked, np.int64)
    own_borders = 2 * [_flat_borders(adopted, library) for adopted in borders]
    queries, answer = values if loop else None, (distances, indices)
    run_batch_once(shape, layout, rows, options, dtype, library, values, queries, own_borders, answer, stream)
    edges = DeviceEdges(rows, options.k, indices, rows, library, stream)
    if edges.complete(flat):
        return whole, flat
    count = edges.count()
    found, flat = library.empty((2, count), np.int64)
    if count:
        edges.fill(flat, count)
    return found, flat
