"""The machine code of every kernel, without a GPU: compiled to PTX for several GPUs, assembled for one of them."""

from __future__ import annotations

import ast
import importlib.util
import multiprocessing
import re
import shutil
import subprocess
from concurrent.futures import ProcessPoolExecutor
from itertools import cycle
from pathlib import Path

import kernel_table
import pytest
from numba import types

import numbaknn.kernels

# The oldest that numba-cuda knows, the newest, and one between them.
COMPUTE_CAPABILITIES = [(7, 5), (9, 0), (12, 0)]
ASSEMBLED = (9, 0)


def chosen(variants):
    """All variants in float32, and of each kernel the first in float64, or those that are there in float64 alone."""
    seen = set()
    for identifier, *rest in variants:
        variant, _, real = identifier.rpartition("-")
        kernel = variant.partition("[")[0]
        if real != "float64" or kernel not in seen or "float64" in variant:
            yield identifier, rest
        if real == "float64":
            seen.add(kernel)


# Those of one type of reals after one another: they call the same functions, which a process compiles once.
VARIANTS = dict(sorted(chosen(kernel_table.variants()), key=lambda variant: variant[0].rpartition("-")[2]))
NEIGHBORS = [
    name for name in VARIANTS if name.startswith(("knn_", "count_balls", "fill_balls", "list_", "long_list", "sort"))
]
# All variants are compiled for one compute capability, and one variant of each kernel for one of the others too, which take
# turns.
ONE_OF_EACH = {name.partition("[")[0].partition("-")[0]: name for name in reversed(VARIANTS)}
OTHERS = [capability for capability in COMPUTE_CAPABILITIES if capability != ASSEMBLED]
CAPABILITIES = {name: [ASSEMBLED] for name in VARIANTS}
for name, capability in zip(ONE_OF_EACH.values(), cycle(OTHERS)):
    CAPABILITIES[name].append(capability)


@pytest.fixture(scope="module")
def compiled():
    """A function (identifier, compute capability) -> PTX, each compiled once.

    In a process of its own: the compiler is asked for devices that aren't there, and nothing that other tests have done to
    numba's registries is in its way. One process, as most of the time goes into the functions that kernels call, and those
    are kept by the process that compiled them. What will be asked next is compiled meanwhile.
    """
    futures, names = {}, list(VARIANTS)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as compiler:

        def compile_ptx(identifier, capability=ASSEMBLED):
            place = names.index(identifier)
            for name in names[place : place + 2]:
                for wanted in CAPABILITIES[name]:
                    if (name, wanted) not in futures:
                        futures[name, wanted] = compiler.submit(kernel_table.compile_ptx, name, wanted)
            return futures[identifier, capability].result()

        yield compile_ptx


def find_ptxas():
    for package in ("nvidia.cuda_nvcc", "nvidia.cu13", "nvidia.cu12"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in spec.submodule_search_locations if spec else ():
            path = Path(folder, "bin", "ptxas")
            if path.exists():
                return str(path)
    return shutil.which("ptxas")


@pytest.fixture(scope="module")
def assembled(compiled, tmp_path_factory):
    """A function identifier -> (registers, {function: (stack frame, spill stores, spill loads)}, names of the entries)."""
    ptxas = find_ptxas()
    if ptxas is None:
        pytest.skip("no ptxas: it comes with nvidia-cuda-nvcc (the cu12 extra of numba-cuda) or with the CUDA toolkit")
    folder = tmp_path_factory.mktemp("ptx")
    done = {}

    def assemble(identifier):
        if identifier not in done:
            source = folder / "kernel.ptx"
            source.write_text(compiled(identifier))
            command = [
                ptxas,
                "-v",
                f"-arch=sm_{ASSEMBLED[0]}{ASSEMBLED[1]}",
                "-o",
                str(folder / "kernel.cubin"),
                source,
            ]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
            properties = re.findall(
                r"Function properties for (\S+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill",
                said,
            )
            entries = re.findall(r"Compiling entry function '(\S+)'", said)
            (registers,) = re.findall(r"Used (\d+) registers", said)
            done[identifier] = (
                int(registers),
                {name: tuple(map(int, numbers)) for name, *numbers in properties},
                entries,
            )
        return done[identifier]

    return assemble


def test_every_kernel_is_in_the_table():
    """A kernel is what bears @kernel in numbaknn/kernels, also inside of a function that makes it."""
    marked = set()
    for path in Path(numbaknn.kernels.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
                if any(re.match(r"(jit\.)?kernel\b", decorator) for decorator in decorators):
                    marked.add(node.name)
    assert marked == {identifier.partition("[")[0] for identifier in kernel_table.KERNELS}


@pytest.fixture(scope="module", params=VARIANTS)
def identifier(request):
    """A variant of a kernel. As it is of the module, all tests of one variant run after one another, in one process: it is
    compiled once."""
    return request.param


def test_no_spills_and_few_registers(assembled, identifier):
    entry, _, number = VARIANTS[identifier]
    registers, functions, entries = assembled(identifier)
    assert len(entries) == 1
    if not entry.calls:
        assert all(stores == loads == 0 for _, stores, loads in functions.values()), functions
        assert functions[entries[0]][0] == 0, "the kernel has a stack frame"
    assert registers <= entry.registers[number] + kernel_table.MARGIN


def test_accesses_of_128_bits(compiled, identifier):
    entry, real, _ = VARIANTS[identifier]
    lanes = "v4" if real == types.float32 else "v2"
    width = "f32|b32|u32" if real == types.float32 else "f64|b64|u64"
    ptx = compiled(identifier)
    loads = len(re.findall(rf"\bld(\.global)?(\.nc)?\.{lanes}\.({width})", ptx))
    stores = len(re.findall(rf"\bst(\.global)?\.{lanes}\.({width})", ptx))
    a_point = 1 if real == types.float32 else 2
    assert loads >= entry.loads * a_point
    assert stores >= entry.stores * a_point
    if entry.tile:
        check_products(ptx, identifier)


def check_products(ptx, identifier):
    """A step of the matrix product is products and sums, fused or not, and the fewest reads of shared memory for them."""
    entry, real, _ = VARIANTS[identifier]
    tile = entry.tile
    lanes, suffix, words = ("v4", "f32", 1) if real == types.float32 else ("v2", "f64", 2)
    quads = tile.depth * (tile.row_quads + tile.column_quads)
    assert len(re.findall(rf"\bld\.shared\.{lanes}\.{suffix}", ptx)) == quads * words
    assert not re.search(rf"\bld\.shared\.{suffix}", ptx)
    if "gelu" not in identifier:  # whose formula has some of its own
        for operation in ("fma",) if entry.fused else ("mul", "add"):
            found = len(re.findall(rf"\b{operation}\.rn\.{suffix}", ptx))
            assert found == tile.depth * 16 * tile.row_quads * tile.column_quads
    assert ".local" not in ptx


def check_compiled(ptx, identifier, capability):
    entry, _, _ = VARIANTS[identifier]
    assert re.search(rf"\.target sm_{capability[0]}{capability[1]}\b", ptx)
    if not entry.fused:
        assert not re.search(r"\bfma\.rn\.f(32|64)\b", ptx)
        # with .ftz subnormal numbers would count as zero
        assert ".ftz" not in ptx and ".approx" not in ptx
    if identifier in NEIGHBORS and not entry.calls:
        assert ".local" not in ptx


def test_compiles(compiled, identifier):
    for capability in CAPABILITIES[identifier]:
        check_compiled(compiled(identifier, capability), identifier, capability)
