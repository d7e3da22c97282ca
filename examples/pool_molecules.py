"""Turn molecules into grids, as networks of three-dimensional convolutions take them, and time it.

Every atom falls into a voxel around the middle of its molecule, in a channel of its element. Molecules differ in size, so a
batch is filled up with atoms at NaN, which are in no voxel. The script checks that every atom is found again, prints how
long a batch takes on every target that this machine has, beside the loop over channels that is usually written, and writes
a picture: the grids of some molecules seen from above.

    python examples/pool_molecules.py
    python examples/pool_molecules.py --batch 64 --grid-size 48 --voxel-size 0.25 --output grids.png

The molecules are those of `shared/data/molecules_small.npz`, beside the checkout or in it, or else of the G2 set that comes
with ase (`pip install ase`).
"""

import argparse
import importlib
import time
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import numbaknn as nk

SHOWN = ["CH3CH2OH", "CH3COOH", "C6H6", "C5H5N", "C4H4S", "BF3", "isobutane", "C60"]
SYMBOLS = {1: "H", 5: "B", 6: "C", 7: "N", 8: "O", 9: "F", 14: "Si", 16: "S"}
COLOURS = {
    1: "#b9bdc2",
    5: "#d987a8",
    6: "#3d4852",
    7: "#4a7fc1",
    8: "#d9605a",
    9: "#6fb58a",
    14: "#9a7fb8",
    16: "#f2b44c",
}
OTHER = "#57b5b9"
# Atoms nearer than this many angstroms are drawn with a bond between them, and those of hydrogen nearer than the other.
BOND, BOND_OF_HYDROGEN = 1.95, 1.25


def main():
    arguments = parse_arguments()
    names, molecules, source = read_molecules()
    elements = np.unique(np.concatenate([numbers for _, numbers in molecules]))
    print(f"{len(molecules)} molecules of {len(elements)} elements, {source}")
    coords, features = batch_of(molecules, elements)
    options = {"grid_size": arguments.grid_size, "voxel_size": arguments.voxel_size, "check_finite": False}
    grids = nk.voxel_pool(coords, features, **options, target=arguments.target)
    check(grids, molecules, elements)
    side = arguments.grid_size * arguments.voxel_size
    print(f"grids {grids.shape}, {side:g} angstroms wide: every atom is in the channel of its element\n")
    print_times(coords, features, arguments)
    shown = [names.index(name) for name in SHOWN if name in names] or range(min(8, len(names)))
    draw(shown, names, molecules, elements, grids, arguments)
    print(f"picture: {arguments.output} ({arguments.output.stat().st_size / 1000:.0f} kB)")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid-size", type=positive, default=32, help="voxels along each axis (%(default)s)")
    parser.add_argument("--voxel-size", type=float, default=0.25, help="in angstroms (%(default)s)")
    parser.add_argument("--batch", type=positive, default=16, help="molecules of a batch that is timed (%(default)s)")
    parser.add_argument("--channels", type=positive, default=32, help="of the layer that is timed (%(default)s)")
    parser.add_argument("--target", choices=["auto", "cpu", "cuda"], default="auto", help="what makes the grids")
    parser.add_argument("--repeats", type=positive, default=9, help="timed runs a row (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("pool_molecules.png"), metavar="FILE.png")
    return parser.parse_args()


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, came as {text}")
    return number


# -- Molecules -----------------------------------------------------------------------------------------------------------


def read_molecules():
    """(names, pairs of positions and atomic numbers, where they come from)."""
    root = Path(__file__).resolve().parents[1]
    for folder in (root.parent / "shared", root / "shared"):
        path = folder / "data" / "molecules_small.npz"
        if path.exists():
            with np.load(path, allow_pickle=False) as data:
                borders = data["offsets"][1:-1]
                pairs = zip(np.split(data["positions"], borders), np.split(data["numbers"], borders))
                return data["names"].tolist(), list(pairs), path
    try:
        from ase.build import molecule
        from ase.collections import g2
    except ImportError:
        raise SystemExit(
            "no shared/data/molecules_small.npz beside this checkout: python -m pip install ase, which brings molecules"
        ) from None
    names = [name for name in [*g2.names, "C60"] if len(molecule(name)) > 1]
    atoms = [molecule(name) for name in names]
    return names, [(a.positions.astype(np.float32), a.numbers) for a in atoms], "the G2 set of ase"


def batch_of(molecules, elements):
    """Coordinates (molecules, most atoms, 3) and features (molecules, most atoms, elements): one where an atom is of the
    element. What is missing is at NaN."""
    most = max(len(numbers) for _, numbers in molecules)
    coords = np.full((len(molecules), most, 3), np.nan, np.float32)
    features = np.zeros((len(molecules), most, len(elements)), np.float32)
    for (positions, numbers), rows, values in zip(molecules, coords, features):
        rows[: len(numbers)] = positions
        values[: len(numbers)] = numbers[:, None] == elements
    return coords, features


def check(grids, molecules, elements):
    """Every molecule has its atoms, each in the voxel and the channel in which NumPy finds it."""
    for grid, (_, numbers) in zip(np.asarray(grids), molecules):
        counts = grid.sum((1, 2, 3))
        if not np.array_equal(counts, (numbers[:, None] == elements).sum(0)):
            raise SystemExit(f"atoms were lost: {counts}")


# -- Times ---------------------------------------------------------------------------------------------------------------


def print_times(coords, features, arguments):
    """The table: a batch with a layer of weights on the way in."""
    which = np.arange(arguments.batch) % len(coords)
    coords, features = coords[which], features[which]
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(arguments.channels, features.shape[2])).astype(np.float32)
    options = {"grid_size": arguments.grid_size, "voxel_size": arguments.voxel_size, "check_finite": False}
    print(
        f"a batch of {len(coords)} molecules, {features.shape[2]} elements -> {len(weight)} channels, "
        f"{arguments.grid_size}^3 voxels"
    )
    print(f"{'ms, median of ' + str(arguments.repeats):<44}{'one call':>10}{'a plan':>10}")
    right = loop_over_channels(np, coords, features, weight, arguments)
    for name, target, to_target, wait in targets():
        given = [to_target(array) for array in (coords, features)]
        placed = to_target(weight)
        call = partial(nk.voxel_pool, *given, weight=placed, **options, target=target)
        plan = nk.plan(nk.voxel_pool, *given, weight=placed, **options, target=target)
        if not np.allclose(to_host(call()), right, atol=1e-4):
            raise SystemExit(f"{name}: not what the loop gives")
        times = [measure(run, wait, arguments.repeats) for run in (call, partial(plan, *given))]
        print(f"{name:<44}{times[0]:10.3f}{times[1]:10.3f}")
        if name != "cuda, host arrays":  # its loop is that of the CPU
            loop = partial(loop_over_channels, module_of(placed), *given, placed, arguments)
            print(f"{'  the loop over channels':<44}{measure(loop, wait, arguments.repeats):10.3f}")
    print()


def loop_over_channels(module, coords, features, weight, arguments):
    """As it is usually written: a layer, then an accumulation for each channel."""
    side = arguments.grid_size
    there = ~module.isnan(coords).any(-1)
    atoms = module.where(there[..., None], coords, 0 * features[..., :1])
    middle = atoms.sum(1) / there.sum(1)[:, None]
    x = (features @ weight.T) * there[..., None]
    place = (atoms - middle[:, None]) / arguments.voxel_size + side / 2
    if module.__name__ == "torch":
        place = place.long().clamp(0, side - 1)
        grid = module.zeros((len(x), x.shape[2], side, side, side), device=x.device)
        which = module.arange(len(x), device=x.device)[:, None].expand(x.shape[:2]).reshape(-1)
        i, j, k = place.reshape(-1, 3).unbind(1)
        for channel in range(x.shape[2]):
            grid[:, channel].index_put_((which, i, j, k), x[:, :, channel].reshape(-1), accumulate=True)
        return grid
    place = module.clip(place.astype(np.int64), 0, side - 1)
    grid = module.zeros((len(x), x.shape[2], side, side, side), np.float32)
    which = module.arange(len(x))[:, None]
    for channel in range(x.shape[2]):
        module.add.at(grid[:, channel], (which, *(place[..., axis] for axis in range(3))), x[:, :, channel])
    return grid


def targets():
    """(name, target, what brings an array there, what waits for the device) of each row."""
    yield "cpu", "cpu", np.asarray, do_nothing
    try:
        nk.voxel_pool(np.zeros((1, 3)), np.zeros((1, 1)), grid_size=1, target="cuda")
    except nk.NoDeviceError:
        return
    yield "cuda, host arrays", "cuda", np.array, do_nothing
    for library in ("cupy", "torch"):
        try:
            module = importlib.import_module(library)
            if library == "cupy":
                to_device, wait = module.asarray, module.cuda.Device().synchronize
            else:
                to_device, wait = lambda array, module=module: module.from_numpy(array).cuda(), module.cuda.synchronize
            wait()
        except Exception as error:  # not installed, or made for another CUDA version
            print(f"({library} not timed: {type(error).__name__})")
            continue
        yield f"cuda, device arrays ({library})", "cuda", to_device, wait


def module_of(array):
    """The library that an array is of."""
    return importlib.import_module(type(array).__module__.partition(".")[0])


def to_host(array):
    if isinstance(array, np.ndarray):
        return array
    return array.get() if hasattr(array, "get") else array.cpu().numpy()


def measure(run, wait, repeats):
    """The median in milliseconds, after two runs that are not counted."""
    times = np.empty(repeats + 2)
    for n in range(len(times)):
        start = time.perf_counter()
        run()
        wait()
        times[n] = time.perf_counter() - start
    return 1000 * np.median(times[2:])


def do_nothing():
    pass


# -- The picture ---------------------------------------------------------------------------------------------------------


def draw(shown, names, molecules, elements, grids, arguments):
    """The grids from above: a pixel is a column of voxels, coloured by the elements in it, with the atoms as they are."""
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(2.9 * columns, 3.05 * rows + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).reshape(-1)
    half = arguments.grid_size * arguments.voxel_size / 2
    palette = np.array([to_rgb(COLOURS.get(number, OTHER)) for number in elements])
    for panel in panels:
        panel.set_axis_off()
    for panel, which in zip(panels, shown):
        positions, numbers = molecules[which]
        axes = flattest(positions)
        counts = np.asarray(grids[which]).sum(1 + axes[2])  # elements, then the two other axes in their order
        if axes[0] < axes[1]:
            counts = counts.transpose(0, 2, 1)
        atoms = counts.sum(0)
        mixed = np.einsum("exy,ec->xyc", counts, palette) / np.maximum(atoms, 1)[..., None]
        strength = np.minimum(1, 0.45 + 0.25 * atoms)[..., None] * (atoms > 0)[..., None]
        image = 1 - strength * (1 - mixed)
        panel.imshow(image, origin="lower", extent=(-half, half, -half, half), interpolation="nearest")
        around = (positions - positions.mean(0))[:, axes[:2]]
        for a, b in bonds(positions, numbers):
            panel.plot(*around[[a, b]].T, color="#8a8f94", lw=0.8, zorder=2)
        colours = [COLOURS.get(int(number), OTHER) for number in numbers]
        panel.scatter(*around.T, s=14, c=colours, edgecolors="white", linewidths=0.6, zorder=3)
        panel.set_title(f"{names[which]}, {len(numbers)} atoms", fontsize=9, color="#404040")
        panel.set(xlim=(-half, half), ylim=(-half, half))
        panel.set_axis_on()
        panel.set(xticks=[], yticks=[])
        for spine in panel.spines.values():
            spine.set_color("#dcdcd8")
    seen = sorted({int(number) for which in shown for number in molecules[which][1]})
    handles = [
        Line2D([], [], ls="", marker="s", color=COLOURS.get(n, OTHER), label=SYMBOLS.get(n, str(n))) for n in seen
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.savefig(arguments.output, dpi=130)


def flattest(positions):
    """The axes of a molecule, that of its least extent last: from there it is seen."""
    return np.argsort(-np.ptp(positions, axis=0), kind="stable")


def bonds(positions, numbers):
    """Pairs of atoms that are drawn with a bond."""
    graph = nk.knn_graph(positions, min(4, len(positions) - 1), target="cpu")
    lengths = np.linalg.norm(positions[graph[0]] - positions[graph[1]], axis=1)
    most = np.where((numbers[graph] == 1).any(0), BOND_OF_HYDROGEN, BOND)
    return graph.T[(lengths < most) & (graph[0] < graph[1])]


if __name__ == "__main__":
    main()
