"""What is refused: the type of the error, the argument it names, what it says came; and nothing is done before."""

from __future__ import annotations

import re

import numpy as np
import pytest

import numbaknn
from numbaknn.launch import has_device
from numbaknn.plans import neighbors as plans

POINTS, QUERIES, VALUES = np.zeros((6, 3)), np.ones((4, 3)), np.arange(6.0)
NAN = np.array([[0, 0, 0], [1, np.nan, 2], [np.inf, 0, 0]])


@pytest.fixture
def no_work(monkeypatch):
    """No grid may be laid before the error is raised."""

    def work(*_, **__):
        raise AssertionError("a grid was laid")

    monkeypatch.setattr(plans.HostGrid, "__init__", work)
    monkeypatch.setattr(plans.DeviceGrid, "__init__", work)


before_any_work = pytest.mark.usefixtures("no_work")


def knn(**arguments):
    return numbaknn.knn(**{"points": POINTS, "queries": QUERIES, "target": "cpu", **arguments})


def build(**arguments):
    return numbaknn.GridIndex(**{"points": POINTS, "target": "cpu", **arguments})


def interpolate(**arguments):
    given = {"points": POINTS, "values": VALUES, "queries": QUERIES, "target": "cpu"}
    return numbaknn.interpolate(**{**given, **arguments})


# argument -> values with the error that each of them raises and what the message shows of it
SHAPES = [
    (np.zeros(3), ValueError, r"\(3,\).*{name}\[None\]"),
    (np.zeros(7), ValueError, r"\(7,\)"),
    (np.zeros(()), ValueError, r"\(\)"),
    (np.zeros((5, 4)), ValueError, r"\(5, 4\)"),
    (np.zeros((5, 0)), ValueError, r"\(5, 0\)"),
    (np.broadcast_to(np.int8(0), (2**31, 3)), ValueError, r"2\*\*31 - 1.*2147483648"),
]
THREE_AXES = [(np.zeros((2, 5, 3)), ValueError, r"\(2, 5, 3\)")]
KINDS = [
    (np.zeros((4, 3), complex), TypeError, "complex128"),
    (np.full((4, 3), "x"), TypeError, "<U1"),
    (np.full((4, 3), None), TypeError, "object"),
    (np.zeros((4, 3), "m8[s]"), TypeError, "timedelta64"),
    (np.zeros((4, 3), "i4,f4"), TypeError, "f0"),
    ([[1, 2], [3]], TypeError, "list"),
    ({1, 2}, (TypeError, ValueError), ""),
]
if np.dtype(np.longdouble).itemsize > 8:
    KINDS.append((np.zeros((4, 3), np.longdouble), TypeError, str(np.dtype(np.longdouble))))

LENGTHS = [
    (-1.0, ValueError, "-1.0"),
    (-np.inf, ValueError, "-inf"),
    (float("nan"), ValueError, "nan"),
    ("a", TypeError, "'a'"),
    ("1.5", TypeError, "'1.5'"),
    (None, TypeError, "None"),
    (1j, TypeError, "1j"),
    ([1.0], TypeError, r"\[1.0\]"),
]
K = [
    (0, ValueError, "0"),
    (-3, ValueError, "-3"),
    (2.0, TypeError, "2.0.*float"),
    (True, TypeError, "True"),
    (np.True_, TypeError, "True"),
    ("3", TypeError, "'3'.*str"),
    (None, TypeError, "None"),
    ([1, 2], TypeError, r"\[1, 2\]"),
]
FLAGS = [(1, TypeError, "1"), ("yes", TypeError, "'yes'"), (None, TypeError, "None")]
OPTIONS = {
    "k": K,
    "distance_upper_bound": LENGTHS,
    "eps": LENGTHS,
    "squared": FLAGS,
    "index_dtype": [
        ("int16", ValueError, "'int16'"),
        ("uint64", ValueError, "'uint64'"),
        (float, ValueError, "float"),
        ("nonsense", ValueError, "'nonsense'"),
        (None, ValueError, "None"),
    ],
    "check_finite": [("yes", ValueError, "'yes'"), (None, ValueError, "None"), (2, ValueError, "2")],
}
TARGETS = [("gpu", ValueError, "'gpu'"), (None, ValueError, "None"), (0, ValueError, "0")]
CELL_SIZES = [*LENGTHS[:6], (0, ValueError, "0"), (np.inf, ValueError, "inf")]
CELL_SIZES = [row for row in CELL_SIZES if row[0] is not None]  # None chooses

ONE_OR_MORE = [*SHAPES, *KINDS]  # three axes are a batch of clouds: tests/test_batches.py
CLOUD = [*SHAPES, *THREE_AXES, *KINDS]
CASES = [
    *((knn, "points", *row) for row in ONE_OR_MORE),
    *((knn, "queries", *row) for row in CLOUD),
    *((knn, name, *row) for name, rows in OPTIONS.items() for row in rows),
    *((knn, "target", *row) for row in TARGETS),
    *((build, "points", *row) for row in CLOUD),
    *((build, "cell_size", *row) for row in CELL_SIZES),
    *((build, "check_finite", *row) for row in OPTIONS["check_finite"]),
    *((build, "target", *row) for row in TARGETS),
    *((interpolate, name, *row) for name in ("points", "queries") for row in CLOUD),
    *((interpolate, "k", *row) for row in K),
    *((interpolate, "check_finite", *row) for row in OPTIONS["check_finite"]),
    *((interpolate, "target", *row) for row in TARGETS),
    (interpolate, "weights", "gaussian", ValueError, "'gaussian'"),
    (interpolate, "weights", None, ValueError, "None"),
    (interpolate, "weights", lambda d: d, ValueError, "function"),
    (interpolate, "values", np.zeros(5), ValueError, r"6.*\(5,\)"),
    (interpolate, "values", np.zeros((5, 6)), ValueError, r"6.*\(5, 6\)"),
    (interpolate, "values", 3.0, ValueError, r"\(\)"),
]


def identifiers(cases):
    """The arguments of a case, short: the function, the name, what is bad about it."""

    def short(part):
        if isinstance(part, np.ndarray):
            return f"{part.dtype.kind}{part.shape}"
        return getattr(part, "__name__", None) or str(part)[:20]

    return ["-".join(map(short, case[:-2])) for case in cases]


@before_any_work
@pytest.mark.parametrize("function, name, value, error, shown", CASES, ids=identifiers(CASES))
def test_one_bad_argument(function, name, value, error, shown):
    with pytest.raises(error, match=rf"(?s)^{name} must .*{shown.format(name=name)}"):
        function(**{name: value})


OF_A_QUERY = [(name, *row) for name, rows in OPTIONS.items() for row in rows]


@pytest.mark.parametrize("name, value, error, shown", OF_A_QUERY, ids=identifiers(OF_A_QUERY))
def test_one_bad_argument_of_a_query(name, value, error, shown):
    index = build()
    for queries in (QUERIES, None):
        with pytest.raises(error, match=rf"(?s)^{name} must .*{shown}"):
            index.query(queries, **{name: value})


OF_A_BALL = [
    *(("r", *row) for row in LENGTHS),
    *((name, *row) for name in ("return_sorted", "return_length") for row in FLAGS),
    *((name, *row) for name in ("index_dtype", "check_finite") for row in OPTIONS[name]),
]


@pytest.mark.parametrize("name, value, error, shown", OF_A_BALL, ids=identifiers(OF_A_BALL))
def test_one_bad_argument_of_a_ball(name, value, error, shown):
    index = build()
    for queries in (QUERIES, None):
        with pytest.raises(error, match=rf"(?s)^{name} must .*{shown}"):
            index.query_ball_point(queries, **{"r": 1.0, name: value})


@pytest.mark.parametrize("value, error, shown", CLOUD, ids=identifiers(CLOUD))
def test_bad_queries_of_an_index(value, error, shown):
    with pytest.raises(error, match=rf"(?s)^queries must .*{shown.format(name='queries')}"):
        build().query(value)
    with pytest.raises(error, match=rf"(?s)^queries must .*{shown.format(name='queries')}"):
        build().query_ball_point(value, 1.0)


@before_any_work
@pytest.mark.parametrize("k", [2**40, 2**60])
def test_more_neighbours_than_memory(k):
    """The arithmetic, before anything is allocated."""
    needed = f"{4 * k:,} x (8 + 8 bytes) = {64 * k:,} bytes"
    for function in (knn, interpolate, lambda k: numbaknn.plan(numbaknn.knn, POINTS, QUERIES, k=k, target="cpu")):
        with pytest.raises(
            MemoryError, match=rf"^k={k} neighbours of each of 4 queries: {re.escape(needed)}.*bytes free"
        ):
            function(k=k)


def test_other_dimensions():
    flat = np.zeros((4, 2))
    for function in (knn, interpolate):
        with pytest.raises(ValueError, match=r"^queries must have as many columns as points, 3, .*\(4, 2\)"):
            function(queries=flat)
    with pytest.raises(ValueError, match=r"^queries must have as many columns as points, 3, .*\(4, 2\)"):
        build().query(flat)


@before_any_work
@pytest.mark.parametrize("check", [True, "auto"])
def test_rows_that_are_not_finite(check):
    for function in (knn, interpolate):
        with pytest.raises(
            ValueError, match=r"^points must be finite, row 1 is \[1\.0, nan, 2\.0\].*check_finite=False"
        ):
            function(points=np.concatenate([NAN, NAN]), check_finite=check)
        with pytest.raises(ValueError, match=r"^queries must be finite, row 1 is \[1\.0, nan, 2\.0\]"):
            function(queries=NAN, check_finite=check)
    with pytest.raises(ValueError, match=r"^points must be finite, row 0 is \[inf, 0\.0, 0\.0\]"):
        build(points=NAN[2:], check_finite=check)


@before_any_work
@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("dtype", ["U3", complex, "i4,f4", "M8[s]"])
def test_values_that_have_no_mean(dtype, k):
    with pytest.raises(TypeError, match=rf"^values must be real numbers .*k={k}.*"):
        interpolate(values=np.zeros(6, dtype), k=k)


@before_any_work
def test_no_points_to_take_values_from():
    with pytest.raises(ValueError, match=r"^points must have at least one row"):
        interpolate(points=POINTS[:0], values=VALUES[:0])


@before_any_work
@pytest.mark.skipif(has_device(), reason="there is a CUDA device")
def test_no_device():
    for function in (knn, build, interpolate):
        with pytest.raises(numbaknn.NoDeviceError, match=r"target='cuda' needs a CUDA device") as caught:
            function(target="cuda")
        assert isinstance(caught.value, ValueError) and isinstance(caught.value, RuntimeError)


@pytest.mark.skipif(has_device(), reason="there is a CUDA device")
def test_auto_does_without_a_device():
    distances, indices = numbaknn.knn(POINTS, QUERIES)
    np.testing.assert_array_equal(distances, np.full(4, np.sqrt(3.0)))
    np.testing.assert_array_equal(indices, np.zeros(4))
    assert "target='cpu'" in repr(numbaknn.GridIndex(POINTS))


@before_any_work
def test_unknown_arguments():
    with pytest.raises(TypeError, match="workers"):
        knn(workers=2)
    with pytest.raises(TypeError, match="positional"):
        numbaknn.knn(POINTS, QUERIES, 1, np.inf)


def test_values_that_are_let_pass():
    """What looks odd and means something."""
    for options in (
        {"k": np.int16(2)},
        {"distance_upper_bound": np.float32(3)},
        {"distance_upper_bound": 3},
        {"distance_upper_bound": np.array(3.0)},
        {"eps": np.inf},
        {"squared": np.True_},
        {"index_dtype": np.dtype(np.int32)},
        {"check_finite": True},
    ):
        knn(**options)
        build().query(QUERIES, **options)


@before_any_work
def test_messages_are_sentences_without_a_traceback_of_their_own():
    """The error of a conversion is no cause to be shown: the message says all."""
    for function, name, value, error, _ in CASES:
        with pytest.raises(error) as caught:
            function(**{name: value})
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
        assert re.match(rf"{name} must (be|have|hold) .*\bcame\b", str(caught.value), re.DOTALL)
