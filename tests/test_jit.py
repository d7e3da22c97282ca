"""How the package is put together and compiled: imports, caches, instructions and their twins."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np
import pytest
from numba import cuda

import numbaknn
from numbaknn import jit, lanes, topk
from numbaknn.launch import has_device

PACKAGE = Path(numbaknn.__file__).parent


def run_python(code, folder=None, **environment):
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", code]
    told = {**os.environ, **environment}
    told.setdefault("PYTHONPATH", str(folder or PACKAGE.parent))
    return subprocess.run(command, capture_output=True, text=True, check=True, env=told, cwd=folder).stdout.strip()


# -- Imports go downwards ------------------------------------------------------------------------------------------------

# From the top to the bottom. "plans.*" stands for all modules of that folder that have no place of their own.
RANKS = [
    {"__init__"},
    {"graphs"},
    {"neighbors", "downsampling", "voxels", "rows", "dense", "distributed"},
    {"tables"},
    {"planning"},
    {"plans.batches"},
    {"plans.balls", "plans.voxels"},
    {"plans.dense"},
    {"plans.*"},
    {"streaming"},
    {"arrays"},
    {"launch", "errors", "keeping", "memory"},
    {"kernels.batches", "loops.batches", "kernels.downsampling", "loops.downsampling"},
    {"kernels.binning", "loops.lists"},
    {"kernels.*", "loops.*"},
    {"lists"},
    {"balls"},
    {"search", "weights", "rowwise", "batches", "pooling", "keys", "runs", "activations"},
    {"crowds"},
    {"geometry", "topk", "block"},
    {"lanes"},
    {"jit"},
]

# arrays serves the public modules and the plans. What it may use of the kernels:
KERNELS_OF_ARRAYS = {"kernels.copying"}


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        yield name.removesuffix(".__init__"), path


def rank(name):
    named = name if any(name in names for names in RANKS) else name.partition(".")[0] + ".*"
    found = [place for place, names in enumerate(RANKS) if named in names]
    assert len(found) == 1, f"give {name} a place in RANKS"
    return found[0]


def imported(path):
    """The modules of the package that a file imports, anywhere in it."""
    names = {name for name, _ in modules()}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module == "numbaknn" or (node.module or "").startswith("numbaknn."):
                module = node.module.removeprefix("numbaknn").removeprefix(".")
                for alias in node.names:
                    within = f"{module}.{alias.name}".removeprefix(".")
                    yield within if within in names else module or "__init__"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "numbaknn":
                    yield alias.name.removeprefix("numbaknn").removeprefix(".") or "__init__"


@pytest.mark.parametrize("name, path", list(modules()), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_go_downwards(name, path):
    for other in imported(path):
        assert rank(other) > rank(name), f"{name} imports {other}"
        if name == "arrays" and other.startswith("kernels."):
            assert other in KERNELS_OF_ARRAYS


def test_the_import_test_sees_something():
    assert {"geometry", "lanes", "topk"} <= set(imported(PACKAGE / "search.py"))
    assert set(imported(PACKAGE / "lanes.py")) == {"jit"}


def test_import_is_quick():
    """The best of three, after one that fills the caches of the interpreter; without what others take of the cores."""
    code = "import time; start = time.process_time(); import numbaknn; print(time.process_time() - start)"
    run_python(code)
    assert min(float(run_python(code)) for _ in range(3)) < 1.5


def test_public_names():
    assert sorted(numbaknn.__all__) == list(numbaknn.__all__)
    assert all(hasattr(numbaknn, name) for name in numbaknn.__all__)
    assert all(getattr(numbaknn, name).__doc__ for name in numbaknn.__all__ if name != "__version__")


# -- The alias of NumPy that numba-cuda asks for -------------------------------------------------------------------------


def test_the_alias_is_taken_back():
    code = "import numpy; has = lambda: 'row_stack' in vars(numpy); print(has()); import numbaknn; print(has())"
    before, after = run_python(code).split()
    assert before == after


def test_the_alias_is_needed():
    """Fails when numba-cuda no longer names np.row_stack: jit.py need not lend it any more."""
    source = Path(importlib.util.find_spec("numba.cuda.np.arrayobj").origin).read_text()
    assert "np.row_stack" in source


# -- Caches --------------------------------------------------------------------------------------------------------------


def dispatchers(folder, kind):
    for path in sorted((PACKAGE / folder).glob("*.py")):
        module = importlib.import_module(f"numbaknn.{folder}.{path.stem}".removesuffix(".__init__"))
        for name, value in vars(module).items():
            here = isinstance(value, kind) and value.py_func.__module__ == module.__name__
            if here and not value.targetoptions.get("forceinline"):
                yield name, value


LOOPS = dict(dispatchers("loops", numba.core.dispatcher.Dispatcher))
KERNELS = dict(dispatchers("kernels", type(cuda.jit(lambda: None))))


def test_there_are_loops_and_kernels():
    assert {"knn_loop", "measure_points", "bin_points", "row_score_loop", "copy_pieces"} <= LOOPS.keys()
    assert {"scatter_kernel", "pack_kernel"} <= KERNELS.keys()


@pytest.mark.parametrize("function", [*LOOPS.values(), *KERNELS.values()], ids=[*LOOPS, *KERNELS])
def test_caches_bear_the_stamp_of_the_package(function):
    assert function._cache._cache_file._source_stamp == jit._PACKAGE_STAMP


TWO_AT_ONCE = """
import sys
import numpy as np
from numbaknn import jit
from numbaknn.loops import neighbors

def made(step):
    @jit.part_of_loop
    def moved(x):
        return x + step
    return moved

one, other = made(1), made(1000)
file = one._cache._cache_file
print(file._data_name(1), file._data_name(2), other._cache._cache_file._data_name(1))
"""


def test_processes_keep_what_they_compile_in_files_of_their_own(tmp_path):
    """Two that compile at once must never write to the same file, whatever the index said to them."""
    script = tmp_path / "two.py"
    script.write_text(TWO_AT_ONCE)
    environment = {**os.environ, "PYTHONPATH": str(Path(numbaknn.__file__).parent.parent)}
    run = lambda: subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True).stdout
    here, there = run().split(), run().split()
    assert len(here) == 3 and here[0] != here[1] and not set(here) & set(there)


def test_launch_bounds_tell_kernels_apart_on_disk():
    """They change what is compiled, and neither the bytecode nor what it closes over."""

    def kernel(x):
        x[0] = 1

    codegen = SimpleNamespace(magic_tuple=lambda: ())
    keys = {
        jit.kernel(bounds)(kernel)._cache._index_key((), codegen)
        for bounds in (None, 128, (128, 1), (128, 2), (256, 1))
    }
    assert len(keys) == 5


@pytest.mark.parametrize("compiler", [numba.njit(cache=True), cuda.jit(cache=True)], ids=["numba", "numba-cuda"])
def test_the_private_name_of_the_stamp(compiler):
    """The name that jit.py sets is one that the cache itself has."""
    from numbaknn.loops import binning

    function = compiler(binning.first_bad_row.py_func)
    assert function._cache._cache_file._source_stamp not in (None, jit._PACKAGE_STAMP)


@pytest.fixture
def copied_package(tmp_path):
    """A copy of the package without its caches, to be edited."""
    shutil.copytree(PACKAGE, tmp_path / "numbaknn", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_the_stamp_follows_every_source(copied_package):
    spec = importlib.util.spec_from_file_location("copied_jit", copied_package / "numbaknn" / "jit.py")
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    before = copied._stamp()
    assert before == copied._stamp() == copied._PACKAGE_STAMP
    path = copied_package / "numbaknn" / "geometry.py"
    path.write_text(path.read_text() + "\n")
    changed = copied._stamp()
    assert changed != before
    # a change of the same length, with the time put back
    (copied_package / "numbaknn" / "kernels" / "new.py").write_text("")
    os.utime(copied_package / "numbaknn" / "kernels" / "new.py", (2e9, 2e9))
    assert copied._stamp() != changed


def test_an_edited_formula_is_compiled_again(copied_package):
    """first_bad_row stands in one file and inlines is_finite of another."""
    code = (
        "import numpy as np; from numbaknn.loops.binning import first_bad_row as f; "
        "print(f(np.array([0.0, np.nan, 1.0]), 1, 3, 1), sum(f.stats.cache_hits.values()))"
    )
    assert run_python(code, copied_package) == "1 0"
    assert run_python(code, copied_package) == "1 1"
    path = copied_package / "numbaknn" / "geometry.py"
    text = path.read_text()
    formula = "abs(x) < infinity and abs(y) < infinity and abs(z) < infinity"
    assert formula in text
    path.write_text(text.replace(formula, "x == 7"))
    assert run_python(code, copied_package) == "0 0"


@pytest.mark.skipif(sys.platform != "linux", reason="the OpenMP of other systems has other settings")
@pytest.mark.parametrize("settings, told", [({}, jit.SPINS), ({"OMP_WAIT_POLICY": "ACTIVE"}, "-?[0-9]{5,}")])
def test_threads_sleep_soon(settings, told):
    """OpenMP says how it is set when it is loaded. The environment is left alone, the caller's settings count."""
    pytest.importorskip("numba.np.ufunc.omppool", reason="numba's threads are not OpenMP's here")
    code = "import os; before = dict(os.environ); import numbaknn; assert dict(os.environ) == before"
    cleared = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    cleared |= {"OMP_DISPLAY_ENV": "verbose", "PYTHONPATH": str(PACKAGE.parent), **settings}
    command = [sys.executable, "-c", code + "; from numba.np.ufunc import omppool"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=cleared).stderr
    assert re.search(rf"GOMP_SPINCOUNT = '{told}'", said), said


def test_second_process_compiles_nothing():
    """All that a call needs comes from the disk the second time, and the disk doesn't fill up."""
    code = """
import os, pathlib
import numpy as np
import numbaknn as nk
from numbaknn.loops import binning, dense, downsampling, interpolation, neighbors, rows, voxels
points = np.random.default_rng(0).random((50, 3))
nk.knn(points, points, k=3, target="cpu")
nk.interpolate(points, points, points, k=3, target="cpu")
nk.row_score(points, *points[:3], target="cpu")
nk.layer_norm(points, *points[:2], target="cpu")
nk.linear(points, points, points[:, 0], activation="gelu", target="cpu")
nk.voxel_pool(points, points, grid_size=4, target="cpu")
nk.voxel_downsample(points, 0.3, np.arange(50), reduce="mode", target="cpu")
functions = binning.measure_points, binning.bin_points, binning.first_bad_row, interpolation.interpolate_loop
functions += neighbors.knn_loop, rows.row_score_loop, rows.layer_norm_loop
functions += voxels.middles_loop, voxels.keys_loop, voxels.sort_loop, voxels.pool_loop
functions += downsampling.frame_loop, downsampling.keys_loop, downsampling.sort_loop, downsampling.heads_loop
functions += downsampling.reduce_loop, downsampling.modes_loop
functions += (dense.finish_loop,)
print(sum(sum(function.stats.cache_misses.values()) for function in functions))
cache = pathlib.Path(os.environ.get("NUMBA_CACHE_DIR", pathlib.Path(nk.__file__).parent))
print(len(list(cache.rglob(f"{os.getpid():x}-*.nbc"))))
"""
    run_python(code)
    assert run_python(code) == "0\n0"


# -- Instructions and their Python twins ---------------------------------------------------------------------------------

REALS = [np.float32, np.float64]
INTEGER = {np.float32: np.int32, np.float64: np.int64}


def patterns(rng, real, count=3000):
    """Reals of random bits: every exponent, subnormals, infinities, NaN; and the borders."""
    info = np.finfo(real)
    integer = INTEGER[real]
    some = rng.integers(np.iinfo(integer).min, np.iinfo(integer).max, count, integer, endpoint=True).view(real)
    borders = np.array([0, 1, 3, info.max, info.tiny, info.smallest_subnormal, np.inf, np.nan, 0.5, 1 / 3], real)
    return np.concatenate([some, borders, -borders, rng.normal(size=count).astype(real)])


def same_bits(have, want):
    """Equal bit for bit; any NaN is as good as another."""
    have, want = np.asarray(have), np.asarray(want)
    assert have.dtype == want.dtype
    if have.dtype.kind == "f":
        numbers = ~(np.isnan(have) & np.isnan(want))
        have, want = have[numbers].view(INTEGER[have.dtype.type]), want[numbers].view(INTEGER[want.dtype.type])
    np.testing.assert_array_equal(have, want)


def compiled_over(operation, arguments):
    """A compiled function (out, *columns) that fills out with operation(*row)."""
    names = ", ".join(f"column{n}" for n in range(arguments))
    row = ", ".join(f"column{n}[row]" for n in range(arguments))
    text = f"def fill(out, {names}):\n    for row in range(out.size):\n        out[row] = operation({row})\n"
    scope = {"operation": operation}
    exec(text, scope)
    return numba.njit(scope["fill"])


OF_TWO = [lanes.product, lanes.total, lanes.difference, lanes.clamped]
NAMES_OF_TWO = ["product", "total", "difference", "clamped"]


@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize("operation", OF_TWO, ids=NAMES_OF_TWO)
def test_products_and_sums(operation, real, rng):
    a, b = rng.permutation(patterns(rng, real)), rng.permutation(patterns(rng, real))
    b = np.abs(b) if operation is lanes.clamped else b
    out = np.empty_like(a)
    compiled_over(operation, 2)(out, a, b)
    same_bits(out, [operation.python_twin(x, y) for x, y in zip(a, b)])


@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize("length", [4, 16])
@pytest.mark.parametrize("operation", OF_TWO, ids=NAMES_OF_TWO)
def test_vectors_as_reals(operation, length, real, rng):
    """Element by element what the operation does to reals, and the same with a real in place of a vector."""
    slots = (0,) * length
    a, b = rng.permutation(patterns(rng, real))[:960], np.abs(rng.permutation(patterns(rng, real))[:960])

    @numba.njit
    def both(a, b, out, with_one):
        for first in range(0, a.size, length):
            left = lanes.load_vector(a, first, slots)
            lanes.store_vector(out, first, operation(left, lanes.load_vector(b, first, slots)))
            lanes.store_vector(with_one, first, operation(left, b[0]))

    out, with_one = np.empty_like(a), np.empty_like(a)
    both(a, b, out, with_one)
    same_bits(out, [operation.python_twin(x, y) for x, y in zip(a, b)])
    same_bits(with_one, [operation.python_twin(x, b[0]) for x in a])


@pytest.mark.parametrize("real", REALS)
def test_the_larger(real, rng):
    """As reals and as vectors; a NaN on either side stays, of equal ones it is the first."""
    a, b = rng.permutation(patterns(rng, real))[:960], rng.permutation(patterns(rng, real))[:960]
    a[:6], b[:6] = [0, -0.0, 1, np.nan, np.nan, np.inf], [-0.0, 0, np.nan, 1, np.nan, np.nan]
    out = np.empty_like(a)
    compiled_over(lanes.larger, 2)(out, a, b)
    same_bits(out, [lanes.larger.python_twin(x, y) for x, y in zip(a, b)])
    same_bits(out, lanes.larger.python_twin(a, b))
    same_bits(out[:6], np.array([0, -0.0, np.nan, np.nan, np.nan, np.nan], real))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(out, np.maximum(a, b))
    slots = (0,) * 4

    @numba.njit
    def by_vectors(a, b, out):
        for first in range(0, a.size, 4):
            larger = lanes.larger(lanes.load_vector(a, first, slots), lanes.load_vector(b, first, slots))
            lanes.store_vector(out, first, larger)

    vectors = np.empty_like(a)
    by_vectors(a, b, vectors)
    same_bits(vectors, out)


@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize("other", REALS)
def test_converted_vectors(real, other, rng):
    values = rng.permutation(patterns(rng, real))[:960]
    slots = (0,) * 16

    @numba.njit
    def convert(values, out):
        for first in range(0, values.size, 16):
            lanes.store_vector(out, first, lanes.converted(lanes.load_vector(values, first, slots), out[0]))

    out = np.empty(values.size, other)
    convert(values, out)
    with np.errstate(over="ignore"):
        same_bits(out, lanes.converted.python_twin(values, other(0)))
        same_bits(out, values.astype(other))


@pytest.mark.parametrize("real", REALS)
def test_joined(real, rng):
    columns = [rng.permutation(patterns(rng, real))[:100] for _ in range(4)]

    @numba.njit
    def join(a, b, c, d, out):
        for n in range(a.size):
            lanes.store_vector(out, 4 * n, lanes.joined(a[n], b[n], c[n], d[n]))

    out = np.empty(400, real)
    join(*columns, out)
    same_bits(out, np.concatenate([lanes.joined.python_twin(*row) for row in zip(*columns)]))


@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize("length", [4, 8, 16, 64])
def test_sums_of_vectors(length, real, rng):
    """The order of the additions is that of the twin, and the twin's is neighbours first."""
    slots = (0,) * length
    values = (rng.normal(size=640) * 10.0 ** rng.integers(-6, 6, 640)).astype(real)

    @numba.njit
    def sums(values, trees, quads, parts):
        for n in range(values.size // length):
            vector = lanes.load_vector(values, n * length, slots)
            trees[n] = lanes.sum_of(vector)
            lanes.store_vector(quads, 4 * n, lanes.sum_by_quads(vector))
            for place in range(4):
                parts[4 * n + place] = lanes.element(lanes.quad_of(vector, length // 4 - 1), place)

    count = 640 // length
    trees, quads, parts = np.empty(count, real), np.empty(4 * count, real), np.empty(4 * count, real)
    sums(values, trees, quads, parts)
    for n, vector in enumerate(values.reshape(count, length)):
        same_bits(trees[n], lanes.sum_of.python_twin(vector))
        same_bits(quads[4 * n : 4 * n + 4], lanes.sum_by_quads.python_twin(vector))
        last = lanes.quad_of.python_twin(vector, length // 4 - 1)
        same_bits(parts[4 * n : 4 * n + 4], [lanes.element.python_twin(last, place) for place in range(4)])
    four = real(1e8), real(1), real(-1e8), real(1)
    assert lanes.sum_of.python_twin(np.array(four)) == (four[0] + four[1]) + (four[2] + four[3])
    assert lanes.sum_by_quads.python_twin(np.full(8, -0.0, real)).tobytes() == bytes(4 * np.dtype(real).itemsize)


def test_zeros():
    @numba.njit
    def fill(out):
        lanes.store_vector(out, 1, lanes.zeros(out[0], (0, 0, 0, 0)))

    out = np.ones(6, np.float32)
    fill(out)
    np.testing.assert_array_equal(out, [1, 0, 0, 0, 0, 1])
    np.testing.assert_array_equal(lanes.zeros.python_twin(out[0], (0, 0, 0)), np.zeros(3, np.float32), strict=True)


@pytest.mark.parametrize("dtype", [*REALS, np.int16, np.int8], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("last", [0, 5, 9, 12, 23, 24, 33, 40])
def test_vectors_in_memory(last, dtype, rng):
    slots = (0,) * 16
    values = rng.integers(1, 100, 40).astype(dtype)

    @numba.njit
    def load(values, first, last, out):
        lanes.store_vector(out, 0, lanes.load_vector(values, first, slots))
        lanes.store_vector(out, 16, lanes.load_up_to(values, first, last, slots))
        lanes.store_vector(out, 32, lanes.load_spread(values, first, 3, last, slots))
        quads = lanes.load_quads_up_to(values, first, 2, 6, last - first, slots)
        lanes.store_vector(out, 48, quads)
        lanes.store_vector(out, 64, lanes.kept(quads, 2, 6, last - first))
        lanes.store_vector(out, 80, lanes.load_quads(values, first, 4, 8, last // 4 * 4 - first, slots))
        lanes.store_vector(out, 96, lanes.load_elements(values, first + 1, slots))
        lanes.store_spread(out, 112, 2, lanes.load_vector(values, first, slots))
        lanes.store_vector(out, 144, lanes.kept_else_minus_zero(quads, 2, 6, last - first))
        lanes.store_vector(out, 160, lanes.repeated(lanes.load_vector(values, first, slots[:4]), slots))

    first = 8
    out = np.zeros(176, dtype)
    load(values, first, last, out)
    quads = lanes.load_quads_up_to.python_twin(values, first, 2, 6, last - first, slots)
    right = [
        lanes.load_vector.python_twin(values, first, slots),
        lanes.load_up_to.python_twin(values, first, last, slots),
        lanes.load_spread.python_twin(values, first, 3, last, slots),
        quads,
        lanes.kept.python_twin(quads, 2, 6, last - first),
        lanes.load_quads.python_twin(values, first, 4, 8, last // 4 * 4 - first, slots),
        lanes.load_elements.python_twin(values, first + 1, slots),
        np.zeros(32, dtype),
        lanes.kept_else_minus_zero.python_twin(quads, 2, 6, last - first),
        lanes.repeated.python_twin(values[first : first + 4], slots),
    ]
    lanes.store_spread.python_twin(right[7], 0, 2, values[first : first + 16])
    np.testing.assert_array_equal(out, np.concatenate(right), strict=True)
    # and the twins against slices
    np.testing.assert_array_equal(right[0], values[first : first + 16])
    np.testing.assert_array_equal(right[6], values[first + 1 : first + 17])
    np.testing.assert_array_equal(right[7][0::2], values[first : first + 16])
    assert not right[7][1::2].any()
    behind = (2 + 6 * np.arange(4)[:, None] + np.arange(4)).ravel() >= last - first
    minus_zero = {np.int8: 0, np.int16: -(2**15)}.get(dtype, -0.0)
    np.testing.assert_array_equal(right[8][~behind], right[4][~behind])
    assert right[8][behind].tobytes() == np.full(behind.sum(), minus_zero, dtype).tobytes()
    np.testing.assert_array_equal(right[9].reshape(4, 4), [values[first : first + 4]] * 4)
    padded = np.concatenate([values[:last], np.zeros(100, dtype)])
    np.testing.assert_array_equal(right[1], padded[first : first + 16])
    np.testing.assert_array_equal(right[2], padded[first : first + 48 : 3])
    np.testing.assert_array_equal(quads, padded[(first + 2 + 6 * np.arange(4)[:, None] + np.arange(4)).ravel()])
    stored = np.zeros(20, dtype)
    lanes.store_vector.python_twin(stored, 2, right[0])
    np.testing.assert_array_equal(stored[2:18], right[0])


def test_halves():
    """Every one of them, as a vector and alone; NaN is NaN."""
    bits = np.arange(2**16, dtype=np.uint16).view(np.int16)
    slots = (0,) * 16

    @numba.njit
    def widen(bits, vectors, reals, example):
        for first in range(0, bits.size, 16):
            lanes.store_vector(vectors, first, lanes.real_of(lanes.load_vector(bits, first, slots), example))
        for n in range(bits.size):
            reals[n] = lanes.real_of(bits[n], example) + lanes.real_of(example, example)

    vectors, reals = np.empty(2**16, np.float32), np.empty(2**16, np.float32)
    widen(bits, vectors, reals, np.float32(0))
    with np.errstate(invalid="ignore"):  # NaN
        right = bits.view(np.float16).astype(np.float32)
        same_bits(vectors, right)
        same_bits(reals, right + np.float32(0))
        same_bits(lanes.real_of.python_twin(bits, right[0]), right)
    assert lanes.real_of.python_twin(right, right[0]) is right


def test_copies_of_bytes(rng):
    source = rng.integers(0, 256, 1000).astype(np.uint8)
    target, twin = np.zeros(1000, np.uint8), np.zeros(1000, np.uint8)

    @numba.njit
    def copy(target, source, count):
        lanes.copy_bytes(target, source, count)

    copy(target.ctypes.data + 3, source.ctypes.data + 7, 901)
    lanes.copy_bytes.python_twin(twin.ctypes.data + 3, source.ctypes.data + 7, 901)
    right = np.zeros(1000, np.uint8)
    right[3:904] = source[7:908]
    np.testing.assert_array_equal(target, right)
    np.testing.assert_array_equal(twin, right)


@pytest.mark.parametrize("real", REALS)
def test_roots(real, rng):
    values = np.abs(patterns(rng, real))
    out = np.empty_like(values)
    compiled_over(lanes.root, 1)(out, values)
    same_bits(out, np.array([lanes.root.python_twin(value) for value in values], real))
    with np.errstate(invalid="ignore"):
        same_bits(out, np.sqrt(values))


@pytest.mark.parametrize("real", REALS)
def test_bits(real, rng):
    values = patterns(rng, real)
    out = np.empty(values.shape, INTEGER[real])
    compiled_over(lanes.bits_of, 1)(out, values)
    same_bits(out, [lanes.bits_of.python_twin(value) for value in values])
    same_bits(out, values.view(INTEGER[real]))


@pytest.mark.parametrize("real", REALS)
def test_order_keys(real, rng):
    values = patterns(rng, real)
    values = values[~np.isnan(values)]
    keys = np.empty(values.shape, np.int64)
    compiled_over(lanes.order_key, 1)(keys, values)
    same_bits(keys, [lanes.order_key.python_twin(value) for value in values])
    order = np.argsort(keys, kind="stable")
    assert (values[order][1:] >= values[order][:-1]).all()
    back, example = np.empty_like(values), np.zeros_like(values)
    compiled_over(lanes.real_of_key, 2)(back, keys, example)
    same_bits(back, values)
    same_bits(back, [lanes.real_of_key.python_twin(key, real(0)) for key in keys])


@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize("source", [np.int32, np.int64, np.float32, np.float64, np.bool_], ids=lambda t: t.__name__)
def test_conversions(source, real, rng):
    values = rng.integers(-1000, 1000, 500).astype(source)
    example = np.zeros(500, real)
    out = np.empty(500, real)
    compiled_over(lanes.as_type_of, 2)(out, values, example)
    same_bits(out, [lanes.as_type_of.python_twin(value, real(0)) for value in values])


def test_hints_change_nothing():
    values = np.array([True, False, True])
    out = np.empty_like(values)
    compiled_over(lanes.rarely, 1)(out, values)
    np.testing.assert_array_equal(out, [lanes.rarely.python_twin(value) for value in values])


@pytest.mark.parametrize("real", REALS)
def test_packed_points(real, rng):
    count = 700
    coordinates = [rng.permutation(patterns(rng, real))[:count] for _ in range(3)]
    index = rng.integers(0, 2**31 - 1, count).astype(INTEGER[real])
    slots = rng.permutation(count)

    @numba.njit
    def store(table, slots, x, y, z, index):
        for n in range(slots.size):
            lanes.store_point(table, slots[n], x[n], y[n], z[n], index[n])

    @numba.njit
    def load(table, slots, x, y, z, index):
        for n in range(slots.size):
            x[n], y[n], z[n], index[n] = lanes.load_point(table, slots[n])

    table, twin = np.zeros(4 * count, real), np.zeros(4 * count, real)
    store(table, slots, *coordinates, index)
    for n in range(count):
        lanes.store_point.python_twin(twin, slots[n], *(c[n] for c in coordinates), index[n])
    np.testing.assert_array_equal(table.view(INTEGER[real]), twin.view(INTEGER[real]))
    loaded = [np.empty_like(column) for column in (*coordinates, index)]
    load(table, slots, *loaded)
    for n in range(0, count, 7):
        want = lanes.load_point.python_twin(table, slots[n])
        for have, right in zip((column[n] for column in loaded), want):
            same_bits(have.reshape(1), np.asarray(right).reshape(1))
    for have, right in zip(loaded, (*coordinates, index)):
        same_bits(have, right)


@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize("length", [1, 2, 8])
def test_lists(length, real, rng):
    """filled, insert and without_first: against their twins, and against sorting."""
    slots = (0,) * length
    missing, blocked = 500, length // 3

    @numba.njit
    def fill_and_insert(limit, squares, indices, lists, numbers, without):
        square_list = topk.filled(limit, limit * 0 - 2, blocked, slots)
        index_list = topk.filled(missing, -1, blocked, slots)
        for n in range(squares.size):
            if topk.before(squares[n], indices[n], square_list[-1], index_list[-1]):
                square_list, index_list = topk.insert(square_list, index_list, squares[n], indices[n])
        for slot in range(length):
            lists[slot], numbers[slot] = square_list[slot], index_list[slot]
        index_list = topk.without_first(index_list, 77)
        for slot in range(length):
            without[slot] = index_list[slot]

    for _ in range(20):
        squares = rng.integers(0, 12, 40).astype(real)
        squares[rng.integers(40, size=3)] = np.inf
        indices = rng.permutation(40)
        lists, numbers, without = np.empty(length, real), np.empty(length, np.int64), np.empty(length, np.int64)
        limit = real(9)
        fill_and_insert(limit, squares, indices, lists, numbers, without)

        square_list = topk.filled.python_twin(limit, real(-2), blocked, slots)
        index_list = topk.filled.python_twin(missing, -1, blocked, slots)
        before = topk.before.py_func
        for square, index in zip(squares, indices):
            if before(square, index, square_list[-1], index_list[-1]):
                square_list, index_list = topk.insert.python_twin(square_list, index_list, square, index)
        np.testing.assert_array_equal(lists, square_list)
        np.testing.assert_array_equal(numbers, index_list)
        np.testing.assert_array_equal(without, topk.without_first.python_twin(index_list, 77))

        pairs = [(square, index) for square, index in zip(squares, indices) if square <= limit]
        right = [(-2, -1)] * blocked + sorted(pairs + [(limit, missing)] * length)
        assert list(zip(lists, numbers)) == right[:length]


@jit.device
def after(state, item, others):
    """No two orders of the same items give the same."""
    return state * others[0] - item


def test_folds(rng):
    items = tuple(int(item) for item in rng.integers(100, size=5))

    @numba.njit
    def folded(state, items, others):
        return lanes.fold(after, state, items, others)

    right = 1000
    for item in items:
        right = right * 3 - item
    assert folded(1000, items, (3,)) == right
    assert lanes.fold.python_twin(after.py_func, 1000, items, (3,)) == right


@pytest.mark.parametrize("real", REALS)
def test_outer_products(real, rng):
    """One rounding a step, of which NumPy has no more than almost that in double precision; or two."""
    values = rng.permutation(patterns(rng, real))[:600]
    down, across, both = (0,) * 4, (0,) * 8, (0,) * 32

    @numba.njit
    def add(values, sums, rounded):
        for n in range(sums.size // 32):
            a, b = lanes.load_vector(values, 7 * n, down), lanes.load_vector(values, 5 * n, across)
            old = lanes.load_vector(sums, 32 * n, both)
            lanes.store_vector(sums, 32 * n, lanes.outer_added(old, a, b))
            lanes.store_vector(rounded, 32 * n, lanes.outer_total(old, a, b))

    before = (rng.normal(size=32 * 80) * 10.0 ** rng.integers(-20, 20, 32 * 80)).astype(real)
    after, twice = before.copy(), np.empty_like(before)
    add(values, after, twice)
    for n, (found, sums) in enumerate(zip(after.reshape(80, 32), before.reshape(80, 32))):
        a, b = values[7 * n : 7 * n + 4], values[5 * n : 5 * n + 8]
        same_bits(twice[32 * n : 32 * n + 32], lanes.outer_total.python_twin(sums, a, b))
        twin = lanes.outer_added.python_twin(sums, a, b)
        if real == np.float32:
            same_bits(found, twin)
        else:
            np.testing.assert_allclose(found, twin, rtol=1e-15)


def rounded(exact, real=np.float32):
    """A fraction as the real nearest to it, the even one of two."""
    guess = real(float(exact))
    near = [np.nextafter(guess, real(-np.inf)), guess, np.nextafter(guess, real(np.inf))]
    return min(near, key=lambda value: (abs(Fraction(float(value)) - exact), int(value.view(np.int32)) & 1))


def test_a_fused_product_and_sum_is_rounded_once(rng):
    """The twin against fractions; sums that nearly cancel and sums half-way between two reals are among them."""
    count = 3000
    a, b, c = ((rng.normal(size=count) * 2.0 ** rng.integers(-12, 12, count)).astype(np.float32) for _ in range(3))
    c[: count // 3] = -(a * b)[: count // 3]
    third = slice(count // 3, 2 * count // 3)
    a[third], b[third] = 1 + 2.0**-12, 1 + 2.0**-12
    c[third] = rng.integers(1, 2**24, count // 3).astype(np.float32) * np.float32(2.0**-22)
    found = lanes._fused(a, b, c)
    for have, *terms in zip(found, a, b, c):
        x, y, z = (Fraction(float(term)) for term in terms)
        assert have == rounded(x * y + z)


@jit.device
def squared(value):
    return value * value


@jit.device
def after_item(item, others):
    return item * others[0] + 1


def test_functions_of_each(rng):
    values, items = rng.normal(size=8), tuple(int(item) for item in rng.integers(100, size=5))

    @numba.njit
    def each(values, out):
        lanes.store_vector(out, 0, lanes.of_each(squared, lanes.load_vector(values, 0, (0,) * 8)))

    @numba.njit
    def mapped(items, others):
        return lanes.mapped(after_item, items, others)

    out = np.empty_like(values)
    each(values, out)
    same_bits(out, values * values)
    same_bits(lanes.of_each.python_twin(squared.py_func, values), values * values)
    right = tuple(3 * item + 1 for item in items)
    assert mapped(items, (3,)) == lanes.mapped.python_twin(after_item.py_func, items, (3,)) == right


def test_capacity():
    assert [topk.capacity(k) for k in range(1, 33)] == [1, 2, 4, 4, *[8] * 4, *[16] * 8, *[32] * 16]


def test_what_stays_apart_is_a_function_of_its_own():
    """Also where it is called by one that is inlined, whose wish it would take over."""

    @jit.device
    def far(x):
        lanes.stays_apart()
        return x * 3 + 1

    near = jit.device(lambda x: far(x) + 1)
    asked = numba.njit(lambda x: near(x))
    assert asked(2) == 8
    (text,) = asked.inspect_llvm().values()
    assert re.search(r"^define .*far", text, re.MULTILINE)
    assert lanes.stays_apart.python_twin() is None


def test_words_that_the_whole_device_sees():
    """Kernels alone use them: their twins, and what they become."""
    words = np.arange(4)
    lanes.store_now.python_twin(words, 2, 9)
    assert lanes.load_now.python_twin(words, 2) == 9
    words_type = numba.types.Array(numba.types.int64, 1, "C")

    def swap(words):
        lanes.store_now(words, 0, lanes.load_now(words, 1))

    if not has_device():
        device = SimpleNamespace(compute_capability=(9, 0))
        numba.cuda.dispatcher.get_current_device = lambda: device
    ptx, _ = cuda.compile_ptx(swap, (words_type,), cc=(9, 0))
    assert "ld.relaxed.gpu.s64" in ptx and "st.relaxed.gpu.s64" in ptx


def test_every_instruction_is_compared():
    """A new instruction wants a test above."""
    compared = (
        "product total root bits_of order_key real_of_key as_type_of rarely store_point load_point filled insert fold "
        "without_first "
    )
    compared += "difference clamped zeros sum_of sum_by_quads element quad_of load_vector store_vector load_spread "
    compared += "load_up_to load_quads load_quads_up_to kept real_of copy_bytes larger joined converted stays_apart"
    compared += " load_now store_now outer_added of_each mapped load_elements store_spread"
    compared += " outer_total kept_else_minus_zero repeated"
    there = {name for module in (lanes, topk) for name, value in vars(module).items() if hasattr(value, "python_twin")}
    assert there == set(compared.split())
