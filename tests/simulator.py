"""CUDA kernels interpreted as Python by numba-cuda's simulator, in a process of their own.

The simulator is chosen by an environment variable that is read when numba is imported, so the tests, which run the CPU
loops, can't simulate anything themselves. They call the functions below through the fixture `simulated`; arrays and
exceptions are pickled on the way.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import sys
import threading
import warnings
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from numba import types
from numba.np.numpy_support import as_dtype

_lock = threading.Lock()

# (module, name, value): blocks so small that three of them meet on a few points, and clouds of more than SMALL_ROWS
# points built by many blocks. One place, as these names move.
SMALL_ROWS = 16
POINTS_A_THREAD = 8
# Points of a cloud that is pooled in one launch, and of a window of those that are more.
SMALL_POOL = 8
SMALL = [
    ("numbaknn.plans.neighbors", "BINNING_THREADS", 4),
    ("numbaknn.plans.neighbors", "QUERY_THREADS", 8),
    ("numbaknn.plans.neighbors", "ONE_BLOCK", 8),
    ("numbaknn.plans.neighbors", "MOST_BLOCKS", 3),
    ("numbaknn.plans.neighbors", "SCATTERING_THREADS", 4),
    (
        "numbaknn.plans.neighbors",
        "BUILDING_THREADS",
        {4: SMALL_ROWS // POINTS_A_THREAD, 8: SMALL_ROWS // POINTS_A_THREAD},
    ),
    ("numbaknn.plans.neighbors", "MOST_CELLS_A_POINT", 2),
    ("numbaknn.plans.neighbors", "LIST_THREADS", 4),
    ("numbaknn.kernels.lists", "ROW_LANES", 2),
    ("numbaknn.plans.balls", "BALL_THREADS", 4),
    ("numbaknn.plans.balls", "SCAN_THREADS", 4),
    ("numbaknn.plans.balls", "ONE_BLOCK", 4),
    ("numbaknn.plans.balls", "ENOUGH_THREADS", 64),
    ("numbaknn.plans.batches", "BINNING_THREADS", 4),
    ("numbaknn.plans.batches", "QUERY_THREADS", 8),
    ("numbaknn.plans.batches", "ONE_BLOCK", 4),
    ("numbaknn.plans.batches", "MOST_BLOCKS", 3),
    ("numbaknn.plans.batches", "SCAN_THREADS", 4),
    ("numbaknn.plans.batches", "LEAST_THREADS", 2),
    ("numbaknn.plans.batches", "BLOCKS", 12),
    ("numbaknn.plans.batches", "MOST_CELLS_A_POINT", 2),
    ("numbaknn.plans.batches", "LARGEST_UNREFINED", 60),
    ("numbaknn.plans.batches", "MOST_UNREFINED", 60),
    ("numbaknn.neighbors", "THREADS", 4),
    ("numbaknn.arrays", "THREADS", 4),
    ("numbaknn.plans.rows", "ROW_THREADS", 4),
    ("numbaknn.plans.rows", "COLUMN_THREADS", 2),
    ("numbaknn.plans.rows", "COLUMN_QUADS", 2),
    ("numbaknn.plans.rows", "NORM_THREADS", 4),
    # a block of a warp, as partial sums are exchanged between its 32 lanes
    ("numbaknn.plans.voxels", "POOL_THREADS", 32),
    ("numbaknn.plans.voxels", "SORT_THREADS", 4),
    ("numbaknn.plans.voxels", "SPREAD_THREADS", 4),
    ("numbaknn.plans.voxels", "SMALL_POINTS", SMALL_POOL),
    ("numbaknn.plans.voxels", "WINDOW", SMALL_POOL),
    ("numbaknn.plans.voxels", "TILE_ELEMENTS", 64),
    ("numbaknn.plans.voxels", "CHUNK_BYTES", 64),
    ("numbaknn.plans.voxels", "WEIGHT_BYTES", 640),
    ("numbaknn.plans.voxels", "MOST_BITS", 3),
    ("numbaknn.plans.voxels", "LEAST_STRETCH", 6),
    ("numbaknn.plans.voxels", "MOST_BLOCKS", 6),
    ("numbaknn.plans.voxels", "SPREAD_CHANNELS", 4),
    ("numbaknn.plans.voxels", "FOLD_STRETCH", 3),
    ("numbaknn.plans.downsampling", "DIGIT_BITS", 3),
    ("numbaknn.plans.downsampling", "SORT_THREADS", 8),
    ("numbaknn.plans.downsampling", "SLOTS", 8),
    ("numbaknn.plans.downsampling", "THREADS", 4),
    ("numbaknn.plans.downsampling", "BOUNDS_BLOCKS", 3),
    ("numbaknn.plans.downsampling", "KEYS_BLOCKS", 3),
    ("numbaknn.plans.downsampling", "MOST_LANES", 4),
    ("numbaknn.plans.downsampling", "REDUCE_THREADS", 4),
    ("numbaknn.plans.downsampling", "REDUCE_BLOCKS", 3),
    ("numbaknn.plans.downsampling", "STRETCH_THREADS", 4),
    ("numbaknn.plans.downsampling", "STRETCH", 32),
    ("numbaknn.plans.dense", "tile_for", lambda *shape: sys.modules["numbaknn.kernels.dense"].Tile(16, 32, 8, 1, 1, 1)),
    ("numbaknn.streaming", "CHUNK_BYTES", 600),
    ("numbaknn.streaming", "SLOTS", 2),
    ("numbaknn.streaming", "PIECE_BYTES", 64),
]


@contextlib.contextmanager
def start():
    """An executor with one process that simulates."""
    context = multiprocessing.get_context("spawn")
    before = os.environ.get("NUMBA_ENABLE_CUDASIM")
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
    try:
        executor = ProcessPoolExecutor(1, mp_context=context, initializer=_shrink)
        assert executor.submit(is_simulated).result()  # the process starts with the first call
    finally:
        if before is None:
            del os.environ["NUMBA_ENABLE_CUDASIM"]
        else:
            os.environ["NUMBA_ENABLE_CUDASIM"] = before
    with executor:
        yield executor


def _shared_array(self, shape, dtype, alignment=None):
    """An array in shared memory, the same for all threads of the block that come along this line.

    numba-cuda's own looks whether there is one and then makes it, so that two threads may get one each.
    """
    frame = sys._getframe(1)
    with _lock:
        if shape == 0:
            return _numba_shared_array(self, shape, dtype, alignment)
        dtype = as_dtype(dtype) if isinstance(dtype, types.Type) else dtype
        place = frame.f_code.co_filename, frame.f_lineno
        return self._allocations.setdefault(place, np.empty(shape, dtype))


def _shrink():
    global _numba_shared_array
    from numba.cuda.simulator.kernelapi import FakeCUDAShared

    import numbaknn  # noqa: F401, before its modules are looked at

    _numba_shared_array, FakeCUDAShared.array = FakeCUDAShared.array, _shared_array

    # simulated threads are NumPy scalars, which warn where hardware doesn't
    warnings.simplefilter("ignore", RuntimeWarning)
    # simulated threads are threads of Python, which wait for each other in turns of this length
    sys.setswitchinterval(1e-4)
    for module, name, value in SMALL:
        assert hasattr(sys.modules[module], name), f"{module}.{name} has moved: put its new place into SMALL"
        setattr(sys.modules[module], name, value)


# -- What runs over there ----------------------------------------------------------------------------------------------


def is_simulated():
    from numbaknn.jit import SIMULATED

    return SIMULATED


def set_small_rows(rows):
    """Clouds of up to so many points are built in one block."""
    threads = rows // POINTS_A_THREAD
    sys.modules["numbaknn.plans.neighbors"].BUILDING_THREADS = {4: threads, 8: threads}


def most_cells(rows):
    from numbaknn.plans import neighbors

    return neighbors.most_cells(rows)


def call(name, *args, **kwargs):
    """A function of the package on host arrays, target="cuda"."""
    import numbaknn

    return getattr(numbaknn, name)(*args, target="cuda", **kwargs)


def ask_index(points, questions, **build):
    """One index, many questions (queries, options): the answers."""
    import numbaknn

    index = numbaknn.GridIndex(points, target="cuda", **build)
    return [index.query(queries, **options) for queries, options in questions]


def bits_of_parts(count):
    from numbaknn.plans import balls

    return balls.part_bits_of(count)


def ask_balls(points, questions, **build):
    """One index, many balls (queries, r, options): the answers, as tuples or arrays of lengths."""
    import numbaknn

    index = numbaknn.GridIndex(points, target="cuda", **build)
    found = [index.query_ball_point(queries, r, **options) for queries, r, options in questions]
    return [tuple(balls) if isinstance(balls, numbaknn.Balls) else balls for balls in found]


def balls_on_device(points, queries, r, layout="c", **options):
    """The balls, and the lengths alone."""
    import numbaknn

    index = numbaknn.GridIndex(_place(points, layout))
    placed = _place(queries, layout)
    balls = index.query_ball_point(placed, r, **options)
    return [_returned(array) for array in (*balls, index.query_ball_point(placed, r, return_length=True))]


def set_list_bytes(count):
    """Longer lists than these bytes are sorted in the output, in place of shared memory; what it was before."""
    module = sys.modules["numbaknn.plans.neighbors"]
    before, module.LIST_BYTES = module.LIST_BYTES, count
    for other in ("balls", "batches"):
        sys.modules[f"numbaknn.plans.{other}"].LIST_BYTES = count
    return before


def set_most_kept_rows(rows):
    """No workspace is kept for batches of more points; the number before."""
    module = sys.modules["numbaknn.plans.batches"]
    before, module.MOST_KEPT_ROWS = module.MOST_KEPT_ROWS, rows
    return before


def _place(array, layout):
    """A simulated device array with the values of `array`."""
    from numba import cuda

    if array is None or layout == "host":
        return array
    if layout == "c":
        return cuda.to_device(np.ascontiguousarray(array))
    if layout == "fortran":
        return cuda.to_device(np.asfortranarray(array))
    if layout == "every other row":
        return cuda.to_device(np.repeat(array, 2, axis=0))[::2]
    if layout == "columns of a wider one":
        wide = np.zeros((array.shape[0], array.shape[1] + 3), array.dtype)
        wide[:, 1:-2] = array
        return cuda.to_device(wide)[:, 1:-2]
    raise ValueError(layout)


def _returned(array):
    """(the name of the type, the values)."""
    return type(array).__name__, array.copy_to_host() if hasattr(array, "copy_to_host") else array


def knn_on_device(points, queries, layout="c", **options):
    import numbaknn

    found = numbaknn.knn(_place(points, layout), _place(queries, layout), **options)
    return [_returned(array) for array in found]


def knn_mixed(points, queries, **options):
    """Points in host memory, queries on the device."""
    import numbaknn

    return numbaknn.knn(points, _place(queries, "c"), **options)


def index_on_device(points, queries, points_layout="c", queries_layout="c", build=None, **options):
    import numbaknn

    index = numbaknn.GridIndex(_place(points, points_layout), **(build or {}))
    return [_returned(array) for array in index.query(_place(queries, queries_layout), **options)]


def interpolate_on_device(points, values, queries, layout="c", values_layout="c", **options):
    import numbaknn

    places = _place(points, layout), _place(values, values_layout), _place(queries, layout)
    return _returned(numbaknn.interpolate(*places, **options))


def _values(arrays):
    return [_returned(array)[1] for array in arrays]


def planned_knn(draws, layout, **options):
    """The answers of one plan, made for the first of the draws, to all of them."""
    import numbaknn

    draws = [[_place(array, layout) for array in draw] for draw in draws]
    plan = numbaknn.plan(numbaknn.knn, *draws[0], target="cuda", **options)
    return [_values(plan(*draw, copy=bool(turn % 2))) for turn, draw in enumerate(draws)]


def batch_on_device(points, queries, layout="c", offsets=None, query_offsets=None, borders_layout="host", **options):
    """knn of several clouds in simulated device arrays; their borders there too, or in host memory."""
    import numbaknn

    borders = {"offsets": _place(offsets, borders_layout), "query_offsets": _place(query_offsets, borders_layout)}
    found = numbaknn.knn(_place(points, layout), _place(queries, layout), **borders, **options)
    return [_returned(array) for array in found]


def graph_on_device(points, k, layout="c", offsets=None, borders_layout="host", **options):
    import numbaknn

    offsets = _place(offsets, borders_layout)
    return _returned(numbaknn.knn_graph(_place(points, layout), k, offsets=offsets, **options))


def planned_queries(points, asked, layout, **options):
    """The answers of an index to each of the queries, all planned before the first one runs."""
    import numbaknn

    index = numbaknn.GridIndex(_place(points, layout), target="cuda")
    asked = [_place(queries, layout) for queries in asked]
    plans = [numbaknn.plan(index.query, queries, **options) for queries in asked]
    return [_values(plan(*([] if queries is None else [queries]))) for plan, queries in zip(plans, asked)]


def index_keeps_its_points(points, queries, **options):
    """The answer of an index whose device array is overwritten before it is asked."""
    import numbaknn

    array = _place(points, "c")
    index = numbaknn.GridIndex(array)
    array.copy_to_device(np.zeros_like(points))
    return _values(index.query(_place(queries, "c"), **options))


def rows_on_device(name, arrays, layout="c", **options):
    """An operation on a table in this layout on the device, and its parameters."""
    import numbaknn

    x, *parameters = arrays
    placed = [_place(x, layout), *(_place(parameter, "c") for parameter in parameters)]
    found = getattr(numbaknn, name)(*placed, **options)
    return [_returned(array) for array in (found if isinstance(found, tuple) else [found])]


def rows_of_operation(name, arguments, options, arrays, sizes, by_columns=False, dtypes=()):
    """What an operation of plans.rows with these options writes into flat outputs of these sizes, for a packed table."""
    from numba import cuda

    from numbaknn.arrays import NumbaDevice
    from numbaknn.plans import rows as plans

    x, *parameters = arrays
    operation = getattr(plans, name)(*arguments, **options)
    table = np.ascontiguousarray(x.T if by_columns else x)
    dtypes = dtypes or [x.dtype] * len(sizes)
    outputs = [cuda.device_array(size, dtype) for size, dtype in zip(sizes, dtypes)]
    placed = [cuda.to_device(array) for array in (table, *parameters)] + outputs
    flats = [NumbaDevice().flat(array, array.dtype) for array in placed]
    memory = plans.Memory(flats[0], by_columns, x.shape[0] if by_columns else x.shape[1])
    last = 1 + len(parameters)
    operation.launch(memory, len(x), flats[1:last], flats[last:]).run(0)
    return [array.copy_to_host() for array in outputs]


def turned_by(x, turn):
    """A table in Fortran order, flat, by blocks with this tile."""
    from numba import cuda

    from numbaknn.arrays import NumbaDevice
    from numbaknn.plans import rows as plans

    y = cuda.device_array(x.size, x.dtype)
    flat, turned = (NumbaDevice().flat(array, x.dtype) for array in (cuda.to_device(x), y))
    memory = plans.Memory(flat, False, x.shape[1])
    plans.turning_launch(memory, *x.shape, turned, plans.Turn(*turn)).run(0)
    return y.copy_to_host()


def product_in_tiles(x, weight, tile):
    """x times weight, turned, with blocks of this tile."""
    from numba import cuda

    from numbaknn.arrays import NumbaDevice
    from numbaknn.kernels.dense import Tile
    from numbaknn.plans.dense import Memory, Product

    (rows, depth), columns = x.shape, len(weight)
    operation = Product(rows, depth, columns, x.dtype, False, False, Tile(*tile))
    y = cuda.device_array(rows * columns, x.dtype)
    flats = [NumbaDevice().flat(array, x.dtype) for array in (cuda.to_device(x), cuda.to_device(weight), y)]
    operation.launch(Memory(flats[0], False, depth), rows, [flats[1], flats[1]], [flats[2]]).run(0)
    return y.copy_to_host().reshape(rows, columns)


def strides_on_device(x, layout):
    """Of a table that to_feature_major has turned."""
    import numbaknn

    turned = numbaknn.to_feature_major(_place(x, layout))
    return turned.strides, turned.copy_to_host()


def scores_into(arrays, layout, count):
    """The outputs that row_score was given, and whether it returned these very ones."""
    import numbaknn

    placed = [_place(array, layout) for array in arrays]
    out = _place(np.zeros(count, arrays[0].dtype), layout), _place(np.zeros(count, bool), layout)
    found = numbaknn.row_score(*placed, out=out, target="cuda")
    return _values(out), all(a is b for a, b in zip(found, out))


def planned_rows(name, draws, layouts, **options):
    """The answers of one plan, made for the first of the draws, to all of them, each table in a layout of its own."""
    import numbaknn

    placed = [
        [_place(x, layout), *(_place(parameter, "host" if layout == "host" else "c") for parameter in parameters)]
        for (x, *parameters), layout in zip(draws, layouts)
    ]
    plan = numbaknn.plan(getattr(numbaknn, name), *placed[0], target="cuda", **options)
    answers = []
    for turn, draw in enumerate(placed):
        found = plan(*draw, copy=bool(turn % 2))
        answers.append([array.copy() for array in _values(found if isinstance(found, tuple) else [found])])
    return answers, plan.launches


def stream_page_locked(name, arrays, **options):
    """An operation on host arrays of which the table is taken for page-locked, and how much was staged of it."""
    import numbaknn
    from numbaknn import launch, streaming

    staged, before = [], (launch.is_page_locked, streaming.copy_all)

    def copy_all(done, table=()):
        staged.append(len(table) > 0)
        before[1](done, table)

    launch.is_page_locked, streaming.copy_all = lambda first, last: True, copy_all
    try:
        found = getattr(numbaknn, name)(*arrays, target="cuda", **options)
    finally:
        launch.is_page_locked, streaming.copy_all = before
    return found, sum(staged), len(staged)


def rings(calls):
    """How many rings the pool has after these calls (arrays, options), and after one whose bar fails."""
    import numbaknn
    from numbaknn import streaming

    kept = []
    for arrays, options in calls:
        numbaknn.row_score(*arrays, target="cuda", **options)
        kept.append(len(streaming._pool._rings))
    return kept


def pool_both(coords, features, layout="c", **options):
    """voxel_pool of simulated device arrays in this layout, or of host arrays; and on the CPU with the same windows."""
    import numbaknn

    placed = {
        name: _placed_pool(value, layout if name in ("coords", "features") else "c" if layout != "host" else "host")
        for name, value in {"coords": coords, "features": features, **options}.items()
    }
    found = numbaknn.voxel_pool(**placed, target="cuda")
    return _returned(found), numbaknn.voxel_pool(coords, features, **options, target="cpu")


def pool_around(coords, features, center, **options):
    """voxel_pool around a point that lies on the device."""
    import numbaknn

    placed = [_place(array, "c") for array in (coords, features)]
    return _returned(numbaknn.voxel_pool(*placed, center=_place(center, "c"), **options))[1]


def pool_into(arrays, shape, dtype, **options):
    """The output that voxel_pool was given, and whether it returned this very one."""
    import numbaknn

    out = _place(np.full(shape, np.nan, dtype), "c")
    found = numbaknn.voxel_pool(**{name: _place(array, "c") for name, array in arrays.items()}, out=out, **options)
    return _returned(out)[1], found is out


def planned_pool(draws, layout, **options):
    """The answers of one plan, made for the first of the draws: to all of them with the layer of the first, then with their
    own; the number of launches; what the CPU says to the same."""
    import numbaknn

    placed = [{name: _placed_pool(array, layout) for name, array in draw.items()} for draw in draws]
    plan = numbaknn.plan(numbaknn.voxel_pool, **placed[0], target="cuda", **options)
    layer = {name: draws[0][name] for name in ("weight", "bias")}
    answers, right = [], []
    for turn, (there, here) in enumerate(zip(placed, draws)):
        found = plan(there["coords"], there["features"], copy=bool(turn % 2))
        answers.append(_returned(found)[1].copy())
        right.append(numbaknn.voxel_pool(**{**here, **layer}, target="cpu", **options))
        answers.append(_returned(plan(*there.values()))[1].copy())
        right.append(numbaknn.voxel_pool(**here, target="cpu", **options))
    return answers, plan.launches, right


def pool_variant(arrays, side, reduce, variant):
    """The grid of points, pooled with what measurements may choose, and the CPU's; the names of the kernels."""
    from numba import cuda

    import numbaknn
    from numbaknn.arrays import NumbaDevice
    from numbaknn.plans import voxels as plans
    from numbaknn.pooling import OF_POINTS, REDUCTIONS

    (batch, count, width), library = arrays["features"].shape, NumbaDevice()
    weight, bias = arrays.get("weight"), arrays.get("bias")
    channels, real = width if weight is None else len(weight), arrays["coords"].dtype
    middle, layer = (OF_POINTS, (0.0, 0.0, 0.0)), (weight is not None, bias is not None)
    what = batch, batch, count, width, channels, side, 1.0, *layer, middle, REDUCTIONS[reduce], real
    grid = cuda.to_device(np.full(batch * channels * side**3, np.nan, real))
    placed = [*(cuda.to_device(array.reshape(-1)) for array in arrays.values()), grid]
    flats = [library.flat(array, array.dtype) for array in placed]
    flats[1] = flats[1].viewed(np.int16) if flats[1].dtype == np.float16 else flats[1]
    pool = plans.DevicePool(plans.Pool(*what, **variant), flats, library)
    for launch in pool.launches:
        launch.run(0)
    names = [launch.kernel.__name__ for launch in pool.launches]
    found = grid.copy_to_host().reshape(batch, channels, side, side, side)
    return found, numbaknn.voxel_pool(**arrays, grid_size=side, reduce=reduce, target="cpu"), names


def set_key_dtype(dtype):
    """Keys of this dtype; None for what the grid asks for."""
    module = sys.modules["numbaknn.plans.voxels"]
    if dtype is None:
        module.Pool.key_dtype = module._key_dtype
    else:
        module._key_dtype = module.Pool.key_dtype
        module.Pool.key_dtype = np.dtype(dtype)


def _placed_pool(value, layout):
    if not isinstance(value, np.ndarray) or layout == "host":
        return value
    if value.ndim < 2 or layout == "c":
        return _place(value, "c")
    if layout == "fortran":
        return _place(value, layout)
    if layout == "every other row":
        from numba import cuda

        return cuda.to_device(np.repeat(value, 2, axis=-2))[..., ::2, :]
    raise ValueError(layout)


def run_case(path, name):
    """The complaints of a case of shared/cases about the CUDA target."""
    import numbaknn

    cases = load_cases(path)
    bench = cases.Host()
    bench.target = "cuda"
    return cases.run(numbaknn, next(case for case in cases.CASES if case.name == name), bench)


def load_cases(path):
    """The module at this path, under a name of its own."""
    name = "shared_cases"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def downsample(points, size, features=None, layout="host", features_layout="c", **options):
    """The voxels of a cloud on the simulated device: (names of the types, values), and the same on the CPU, where sums are
    taken in the same small stretches."""
    import numbaknn

    placed = None if features is None else _place(features, "host" if layout == "host" else features_layout)
    target = {"target": "cuda"} if layout == "host" else {}
    found = numbaknn.voxel_downsample(_place(points, layout), size, placed, **target, **options)
    right = numbaknn.voxel_downsample(points, size, features, target="cpu", **options)
    return [None if array is None else _returned(array) for array in found], tuple(right)


def planned_downsample(draws, size, layout, features_too=False, target="cuda", **options):
    """The rows that count of the answers of one plan, made for the first of the draws (points, features), to all of them,
    with their lengths; and the right answers."""
    import numbaknn

    used = 2 if features_too else 1
    placed = [[_place(array, layout) for array in draw[:used]] for draw in draws]
    points, *features = placed[0]
    plan = numbaknn.plan(numbaknn.voxel_downsample, points, size, *features, target=target, **options)
    answers, right = [], []
    for turn, (draw, arrays) in enumerate(zip(draws, placed)):
        found = plan(*arrays, copy=bool(turn % 2))
        points, features, counts, inverse, length = (None if a is None else _returned(a)[1].copy() for a in found)
        (length,) = length
        kept = max(length, 0)
        answers.append(
            (points[:kept], features if features is None else features[:kept], counts[:kept], inverse, length)
        )
        finite = np.isfinite(draw[0].astype(np.float64)).all(axis=1)
        rest = [array[finite] for array in draw[1:used]]
        right.append(tuple(numbaknn.voxel_downsample(draw[0][finite], size, *rest, target="cpu", **options)))
    return answers, right, (plan.launches, plan.device_bytes)


def ask_with_little_memory(free, points, queries, **options):
    """knn, an index, and an index about its own points, with host arrays, on a device that has so many bytes free; and how
    many queries each part has."""
    import numbaknn
    from numbaknn import arrays, memory
    from numbaknn.plans.neighbors import DeviceGrid

    before, parts = (memory.WORTH_ASKING, arrays.free_device_bytes, DeviceGrid.query), []

    def query(self, *arguments):
        parts.append(arguments[1])
        return before[2](self, *arguments)

    memory.WORTH_ASKING, arrays.free_device_bytes, DeviceGrid.query = 0, lambda: free, query
    try:
        one = numbaknn.knn(points, queries, target="cuda", **options)
        index = numbaknn.GridIndex(points, target="cuda")
        other, of_itself = index.query(queries, **options), index.query(None, **options)
    finally:
        memory.WORTH_ASKING, arrays.free_device_bytes, DeviceGrid.query = before
    return one, other, of_itself, parts


def set_worth_ordering(count):
    """So many queries among crowds are put in order; how many it took before."""
    neighbors = sys.modules["numbaknn.plans.neighbors"]
    before, neighbors.WORTH_ORDERING = neighbors.WORTH_ORDERING, count
    sys.modules["numbaknn.plans.batches"].WORTH_ORDERING = count
    return before


def set_of_downsampling(name, value):
    """Another value for a name of plans/downsampling.py; the one before. Launches that are kept are forgotten."""
    from numbaknn.plans import downsampling

    before = getattr(downsampling, name)
    setattr(downsampling, name, value)
    downsampling._kept._items.clear()
    return before
