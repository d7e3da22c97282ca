"""The right answers, slowly: brute force in NumPy. Shares no code with the package.

An answer is the k smallest pairs (square, index). `nearest` works the squares out in the precision of the input, rounding
by rounding, so that results can be compared bit for bit, or in float64 for what the roundings may not change.
`nearest_by_tree` gives the same bits for clouds that are too large for brute force: SciPy's k-d tree proposes, the
squares of its proposals decide.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

# Squares that are held at a time.
CHUNK = 1 << 22


def working_dtype(*arrays):
    """The precision of a computation: float16 counts in float32, integers in float64, mixtures as NumPy mixes them."""
    dtype = np.result_type(*(array.dtype for array in arrays))
    if dtype.kind in "iub":
        return np.dtype(np.float64)
    return np.dtype(np.float32) if dtype == np.float16 else dtype


def square_of(differences):
    """(dx*dx + dy*dy) + dz*dz over the last axis, each operation rounded by itself in the dtype of the differences."""
    with np.errstate(all="ignore"):
        square = differences[..., 0] * differences[..., 0]
        for axis in range(1, differences.shape[-1]):
            square = square + differences[..., axis] * differences[..., axis]
    return square


def squares(points, queries, dtype):
    """(Q, M) squares in dtype; NaN where the point or the query is not finite."""
    points, queries = points.astype(dtype), queries.astype(dtype)
    with np.errstate(all="ignore"):
        result = square_of(queries[:, None] - points[None])
    result[:, ~np.isfinite(points).all(axis=1)] = np.nan
    result[~np.isfinite(queries).all(axis=1)] = np.nan
    return result


def smallest_pairs(square, k):
    """(rows, ranks, columns) of the k smallest pairs (square, column) of each row; NaN is never among them."""
    if not square.size:
        return (np.empty(0, np.int64),) * 3
    kth = np.full(len(square), np.inf, square.dtype)
    if k < square.shape[1]:
        kth = np.partition(square, k - 1, axis=1)[:, k - 1]  # NaN sorts behind everything
        kth[np.isnan(kth)] = np.inf
    rows, columns = np.nonzero(square <= kth[:, None])
    order = np.lexsort((columns, square[rows, columns], rows))
    rows, columns = rows[order], columns[order]
    ranks = np.arange(len(rows)) - np.searchsorted(rows, rows)
    keep = ranks < k
    return rows[keep], ranks[keep], columns[keep]


def nearest(points, queries, k=1, *, distance_upper_bound=np.inf, squared=False, index_dtype=np.int64, arithmetic=None):
    """(distances, indices) as numbaknn.knn returns them; queries=None: as GridIndex.query(None) returns them.

    arithmetic: the dtype of the squares, that of the input unless given.
    """
    itself = queries is None
    queries = points if itself else queries
    dtype = working_dtype(points, queries)
    counted = np.dtype(arithmetic or dtype)
    distances = np.full((len(queries), k), np.inf, counted)
    indices = np.full((len(queries), k), len(points), index_dtype)
    step = max(1, CHUNK // max(1, len(points)))
    for first in range(0, len(queries), step):
        square = squares(points, queries[first : first + step], counted)
        if itself:
            part = np.arange(len(square))
            square[part, first + part] = np.nan
        if distance_upper_bound != np.inf:
            with np.errstate(all="ignore"):
                square[~(np.sqrt(square).astype(np.float64) < distance_upper_bound)] = np.nan
        rows, ranks, columns = smallest_pairs(square, k)
        value = square[rows, columns]
        distances[first + rows, ranks] = value if squared else np.sqrt(value)
        indices[first + rows, ranks] = columns
    distances = distances.astype(dtype)
    return (distances[:, 0], indices[:, 0]) if k == 1 else (distances, indices)


def within(points, queries, r, *, index_dtype=np.int64):
    """(indices, indptr, distances) as GridIndex.query_ball_point returns them sorted; queries=None: the points, each
    without itself."""
    itself = queries is None
    queries = points if itself else queries
    dtype = working_dtype(points, queries)
    indices, distances, lengths = [np.empty(0, index_dtype)], [np.empty(0, dtype)], [0]
    for row in range(len(queries)):
        square = squares(points, queries[row : row + 1], dtype)[0]
        if itself:
            square[row] = np.nan
        with np.errstate(all="ignore"):
            distance = np.sqrt(square)
            (inside,) = np.nonzero(distance.astype(np.float64) <= r)
        inside = inside[np.lexsort((inside, square[inside]))]
        indices.append(inside.astype(index_dtype))
        distances.append(distance[inside])
        lengths.append(len(inside))
    return np.concatenate(indices), np.cumsum(lengths), np.concatenate(distances)


def propose(points, queries, count):
    """What a k-d tree proposes: (its distances in float64, its indices), (Q, count)."""
    from scipy.spatial import cKDTree

    tree = cKDTree(points.astype(np.float64), balanced_tree=False, compact_nodes=False)
    distances, indices = tree.query(queries.astype(np.float64), k=range(1, count + 1), workers=-1)
    return distances, indices


def nearest_by_tree(points, queries, k, proposals):
    """(distances, indices) (Q, k) of the k smallest pairs, for finite points; queries=None: each point without itself.

    proposals: of `propose`, for more than k neighbours. Every point whose square in the input's precision is not above
    the k-th proposed is among the proposals if the last of them is farther than the k-th by more than all roundings; the
    few queries for which it is not get brute force.
    """
    itself = queries is None
    queries = points if itself else queries
    dtype = working_dtype(points, queries)
    away, columns = proposals
    rows = np.arange(len(queries))[:, None]
    with np.errstate(all="ignore"):
        padded = np.concatenate([points, np.full((1, points.shape[1]), np.nan, points.dtype)]).astype(dtype)
        square = square_of(queries.astype(dtype)[:, None] - padded[np.minimum(columns, len(points))])
    square[np.isnan(square)] = np.inf  # a place that the tree could not fill
    if itself:
        square[columns == rows] = np.inf
    order = np.lexsort((columns, square), axis=1)[:, :k]
    distances, indices = np.sqrt(square[rows, order]), columns[rows, order].astype(np.int64)
    margin = 1 + 16 * float(np.finfo(dtype).eps)
    sure = away[:, -1] > distances[:, -1].astype(np.float64) * margin + np.finfo(dtype).tiny ** 0.5
    doubtful = np.flatnonzero(~sure)
    if len(doubtful):
        different, which = np.unique(queries[doubtful], axis=0, return_inverse=True)
        found = nearest(points, different, k + itself)
        found = [array.reshape(len(different), k + itself)[which.reshape(-1)] for array in found]
        if itself:  # a point that is not in its own list is hidden behind k + 1 equal ones of lower index
            own = found[1] == doubtful[:, None]
            own[~own.any(axis=1), k] = True
            found = [array[~own].reshape(len(doubtful), k) for array in found]
        distances[doubtful], indices[doubtful] = found
    return distances, indices


def complaints(points, queries, k, distances, indices, distance_upper_bound=np.inf):
    """What is wrong with an answer by the properties that it must have, found in float64 with a tolerance of rounding.

    The properties: distances ascend; no index twice; the distance is that of the index; nothing nearer was missed; nothing
    farther was returned.
    """
    itself = queries is None
    queries = points if itself else queries
    distances, indices = np.asarray(distances).reshape(-1, k), np.asarray(indices).reshape(-1, k)
    eps = float(np.finfo(distances.dtype).eps)
    lost = 4 * float(np.finfo(distances.dtype).tiny) ** 0.5  # below this a square is subnormal or 0
    said = []
    with np.errstate(all="ignore"):
        if (distances[:, 1:] < distances[:, :-1]).any():
            said.append("distances do not ascend")
        for row, mine in enumerate(indices):
            mine = mine[mine < len(points)]
            if len(set(mine.tolist())) < len(mine):
                said.append(f"query {row}: an index twice")
            if itself and row in mine:
                said.append(f"query {row}: itself")
        true = np.sqrt(squares(points, queries, np.float64))
        if itself:
            np.fill_diagonal(true, np.nan)
        true[true >= distance_upper_bound * (1 + 8 * eps)] = np.nan
        padded = np.concatenate([true, np.full((len(true), 1), np.inf)], axis=1)
        picked = np.take_along_axis(padded, indices.astype(np.int64), axis=1)
        if not np.allclose(picked, distances, rtol=8 * eps, atol=lost):
            said.append("a distance is not that of its index")
        ordered = np.sort(true, axis=1)  # NaN last
        ordered = np.concatenate([ordered, np.full((len(true), k), np.nan)], axis=1)[:, :k]
        ordered[np.isnan(ordered)] = np.inf
        if (distances > ordered * (1 + 8 * eps) + lost).any():
            said.append("something nearer was missed")
        if (distances < ordered * (1 - 8 * eps) - lost).any():
            said.append("something farther was left out")
    return said


def weighted(points, values, queries, k, weights="distance"):
    """The mean of the k nearest values of each query by 1 / distance (an exact hit takes all) or alike, in float64."""
    distances, indices = nearest(points, queries, k, arithmetic=np.float64)
    distances, indices = distances.reshape(-1, k).astype(np.float64), indices.reshape(-1, k)
    there = indices < len(points)
    with np.errstate(all="ignore"):
        weight = 1 / distances
    hit = np.isinf(weight).any(axis=1)
    weight[hit] = np.isinf(weight[hit])
    if weights == "uniform":
        weight = np.ones_like(distances)
    weight[~there] = 0
    rows = values.reshape(len(values), -1).astype(np.float64)
    picked = rows[np.minimum(indices, len(points) - 1)]
    with np.errstate(all="ignore"):
        mean = (weight[..., None] * picked).sum(axis=1) / weight.sum(axis=1)[:, None]
    return mean.reshape(len(queries), *values.shape[1:])


def nearest_in_clouds(points, queries, offsets, query_offsets, k=1, **options):
    """(distances, indices) as numbaknn.knn returns them for clouds with these borders, cloud by cloud."""
    distances = np.empty((len(queries), k), working_dtype(points, queries))
    indices = np.empty((len(queries), k), options.get("index_dtype", np.int64))
    for first, last, begin, end in zip(offsets[:-1], offsets[1:], query_offsets[:-1], query_offsets[1:]):
        found, which = (a.reshape(-1, k) for a in nearest(points[first:last], queries[begin:end], k, **options))
        distances[begin:end] = found
        indices[begin:end] = np.where(which < last - first, which + first, len(points))
    return (distances[:, 0], indices[:, 0]) if k == 1 else (distances, indices)


def edges(points, k, offsets=None, loop=False):
    """(2, E) edges as numbaknn.knn_graph returns them."""
    offsets = [0, len(points)] if offsets is None else offsets
    found = []
    for first, last in pairwise(offsets):
        cloud = points[first:last]
        _, indices = nearest(cloud, cloud if loop else None, k)
        for row, which in enumerate(indices.reshape(-1, k)):
            found += [(index + first, row + first) for index in which if index < last - first]
    return np.array(found, np.int64).reshape(-1, 2).T


def pooled(coords, features, *, grid_size=32, voxel_size=1.0, weight=None, bias=None, center="mean", reduce="sum"):
    """The grid that numbaknn.voxel_pool returns, point by point in float64. A point that is not finite is left out."""
    alone = features.ndim == 2
    features = np.atleast_3d(features.astype(np.float64)) if features.ndim == 3 else features.astype(np.float64)[None]
    coords = np.broadcast_to(coords.astype(np.float64), (*features.shape[:2], 3))
    if weight is not None:
        features = features @ weight.astype(np.float64).T
    if bias is not None:
        features = features + bias.astype(np.float64)
    found = np.zeros((features.shape[0], features.shape[2], grid_size, grid_size, grid_size))
    merge = {"sum": np.sum, "mean": np.mean, "max": np.max}[reduce]
    for points, values, grid in zip(coords, features, found):
        there = np.isfinite(points).all(axis=1)
        points, values = points[there], values[there]
        if not len(points):
            continue
        middle = points.mean(axis=0) if isinstance(center, str) else np.zeros(3) if center is None else np.array(center)
        with np.errstate(over="ignore"):
            places = np.clip(np.trunc((points - middle) / voxel_size + grid_size / 2), 0, grid_size - 1).astype(int)
        members = {}
        for row, place in enumerate(map(tuple, places)):
            members.setdefault(place, []).append(row)
        for place, rows in members.items():
            grid[(slice(None), *place)] = merge(values[rows], axis=0)
    return found[0] if alone else found
