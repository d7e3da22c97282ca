"""Carry labels from a coarse point cloud over to every vertex of a surface, and time it.

A network that segments shapes often sees a few thousand points only; its labels then have to reach every vertex of the
mesh. Each vertex takes the label of its nearest coarse point (k = 1), exactly. The script prints how long that takes on
every target that this machine has, beside SciPy's cKDTree, and writes a picture of the labels before and after.

    python examples/upsample_labels.py
    python examples/upsample_labels.py --mesh bunny.ply --points 2000 --output bunny.png

Without --mesh the surface is generated: a long-necked animal, labelled by parts of the body. A mesh of your own is
labelled by regions; if it has fewer vertices than asked for, more are drawn from its faces.
"""

import argparse
import importlib
import time
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numba import cuda
from PIL import Image
from scipy.spatial import cKDTree

import numbaknn as nk

# The generated animal, bone by bone: label, start, end, radius at the start, radius at the end. It looks along x, z is up.
BONES = [
    ("body", (-0.75, 0.0, 1.33), (0.50, 0.0, 1.40), 0.58, 0.50),
    ("neck", (0.66, 0.0, 1.56), (1.10, 0.0, 2.00), 0.36, 0.24),
    ("neck", (1.10, 0.0, 2.00), (1.38, 0.0, 2.48), 0.24, 0.18),
    ("neck", (1.38, 0.0, 2.48), (1.54, 0.0, 2.98), 0.18, 0.15),
    ("head", (1.60, 0.0, 3.14), (1.74, 0.0, 3.13), 0.20, 0.19),
    ("head", (1.74, 0.0, 3.10), (2.08, 0.0, 3.00), 0.185, 0.14),
    ("tail", (-1.25, 0.0, 1.32), (-1.95, 0.0, 1.00), 0.36, 0.21),
    ("tail", (-1.95, 0.0, 1.00), (-2.65, -0.12, 0.80), 0.21, 0.12),
    ("tail", (-2.65, -0.12, 0.80), (-3.45, -0.40, 0.86), 0.12, 0.04),
    ("left foreleg", (0.50, 0.34, 1.15), (0.66, 0.40, 0.36), 0.25, 0.17),
    ("left foreleg", (0.66, 0.40, 0.36), (0.70, 0.40, 0.20), 0.17, 0.18),
    ("right foreleg", (0.50, -0.34, 1.15), (0.38, -0.40, 0.36), 0.25, 0.17),
    ("right foreleg", (0.38, -0.40, 0.36), (0.42, -0.40, 0.20), 0.17, 0.18),
    ("left hind leg", (-0.85, 0.36, 1.10), (-1.08, 0.42, 0.36), 0.31, 0.18),
    ("left hind leg", (-1.08, 0.42, 0.36), (-1.04, 0.42, 0.20), 0.18, 0.19),
    ("right hind leg", (-0.85, -0.36, 1.10), (-0.74, -0.42, 0.36), 0.31, 0.18),
    ("right hind leg", (-0.74, -0.42, 0.36), (-0.70, -0.42, 0.20), 0.18, 0.19),
]
PARTS = list(dict.fromkeys(label for label, *_ in BONES))
BLEND = 0.06  # how softly the bones run into each other
BUMPS = 0.008  # height of the bumps of the skin

REGIONS = 8  # labels given to a mesh
PALETTE = ["#5b8db8", "#f2b44c", "#d9605a", "#6fb58a", "#9a7fb8", "#e58f65", "#57b5b9", "#d987a8"]
BARE = "#e4e4e0"  # the surface without labels
DPI = 150


def main():
    arguments = parse_arguments()
    rng = np.random.default_rng(arguments.seed)
    if arguments.mesh is None:
        vertices, labels, names = generate(arguments.vertices, rng)
        up = arguments.up or "z"
    else:
        vertices, faces = read_mesh(arguments.mesh)
        up = arguments.up or ("z" if faces is None else "y")
        vertices = fit_count(vertices, faces, arguments.vertices, rng)
        labels, names = regions(vertices, REGIONS), None
    if len(vertices) < 2:
        raise SystemExit("one vertex makes no surface")
    if arguments.points > len(vertices):
        raise SystemExit(
            f"--points must be at most the number of vertices, {len(vertices)}, came as {arguments.points}"
        )
    rows = rng.choice(len(vertices), arguments.points, replace=False)
    points, coarse_labels = vertices[rows], labels[rows]

    print(f"{len(points):,} labelled points -> {len(vertices):,} vertices, k=1\n")
    try:
        index = nk.GridIndex(points, target=arguments.target)
    except nk.NoDeviceError as error:
        raise SystemExit(f"--target cuda: {error}") from None
    print_times(points, vertices, arguments.repeats)
    print(f"\n--target {arguments.target} took {index}")
    carried = nk.interpolate(points, coarse_labels, vertices, target=arguments.target)
    print(f"{100 * np.mean(carried == labels):.1f} % of the vertices got their own label back")

    view = view_matrix(up, arguments.azimuth, arguments.elevation)
    draw(points @ view, coarse_labels, vertices @ view, carried, names, arguments.output)
    print(f"picture: {arguments.output} ({arguments.output.stat().st_size / 1000:.0f} kB)")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", type=Path, metavar="FILE", help="a surface of your own: .npy, .npz, .ply or .obj")
    parser.add_argument("--points", type=positive, default=8_000, help="coarse labelled points (%(default)s)")
    parser.add_argument("--vertices", type=positive, default=100_000, help="vertices to label (%(default)s)")
    parser.add_argument(
        "--target", choices=["auto", "cpu", "cuda"], default="auto", help="what carries the labels over"
    )
    parser.add_argument("--output", type=Path, default=Path("upsample_labels.png"), metavar="FILE.png")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=positive, default=9, help="timed runs a row (%(default)s)")
    parser.add_argument("--up", choices=["x", "y", "z"], help="axis that points up (z; y for a mesh with faces)")
    parser.add_argument("--azimuth", type=float, default=-56, help="of the viewer, in degrees (%(default)s)")
    parser.add_argument("--elevation", type=float, default=14, help="of the viewer, in degrees (%(default)s)")
    return parser.parse_args()


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, came as {text}")
    return number


# -- A surface ---------------------------------------------------------------------------------------------------------


def generate(count, rng):
    """Vertices spread evenly over the animal, the part of the body that each belongs to, and the names of the parts."""
    side = 0.32
    axes = [np.arange(low, high, side) for low, high in ((-4, 3), (-2, 2), (-1, 4))]
    cells = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)
    eighths = np.stack(np.meshgrid(*[[0, 1]] * 3, indexing="ij"), -1).reshape(-1, 3)
    for _ in range(4):  # keep the cells near the skin, then halve them
        cells = cells[np.abs(height_above_skin(cells + side / 2)) < side]
        side /= 2
        cells = (cells[:, None] + side * eighths).reshape(-1, 3)
    batches = []
    while sum(map(len, batches)) < count:
        batch = cells + side * rng.random(cells.shape)
        batches.append(batch[np.abs(height_above_skin(batch)) < side / 2])
    vertices = rng.permutation(np.concatenate(batches))[:count]
    for _ in range(3):  # Newton's method, down to the skin
        height, slope = height_above_skin(vertices), slope_of_skin(vertices)
        vertices = vertices - slope * (height / (slope**2).sum(1))[:, None]
    return vertices.astype(np.float32), part_distances(vertices).argmin(1), PARTS


def part_distances(places):
    """(places, parts): how far each place is outside the bones of each part."""
    distances = np.full((len(places), len(PARTS)), np.inf)
    for label, start, end, start_radius, end_radius in BONES:
        along = np.subtract(end, start)
        offset = places - start
        fraction = np.clip(offset @ along / (along @ along), 0, 1)
        distance = np.linalg.norm(offset - fraction[:, None] * along, axis=1)
        distance -= start_radius + fraction * (end_radius - start_radius)
        part = distances[:, PARTS.index(label)]
        np.minimum(part, distance, out=part)
    return distances


def height_above_skin(places):
    """Below zero inside. The smooth minimum of the distances to all parts, with bumps."""
    blended = -BLEND * np.log(np.exp(-part_distances(places) / BLEND).sum(1))
    return blended - BUMPS * np.prod(np.sin(17 * places), axis=1)


def slope_of_skin(places, step=1e-4):
    steps = step * np.eye(3)
    return np.stack([height_above_skin(places + s) - height_above_skin(places - s) for s in steps], 1) / (2 * step)


def read_mesh(path):
    """(vertices, faces) of a file; faces is None where there are none. Says what was taken."""
    if not path.exists():
        raise SystemExit(f"--mesh: {path} does not exist")
    kind = path.suffix.lower()
    if kind == ".npy":
        vertices, faces, what = np.load(path, allow_pickle=False), None, "array"
    elif kind == ".npz":
        vertices, faces, what = read_archive(path)
    elif kind in (".ply", ".obj"):
        vertices, faces = read_geometry(path)
        what = "vertices"
    else:
        raise SystemExit(f"--mesh must be a .npy, .npz, .ply or .obj file, came as {path}")
    if vertices.ndim != 2 or vertices.shape[1] != 3 or len(vertices) == 0 or vertices.dtype.kind not in "fiu":
        raise SystemExit(f"--mesh needs numbers of shape (rows, 3), {path} holds {vertices.dtype} {vertices.shape}")
    if not np.isfinite(vertices).all():
        raise SystemExit(f"--mesh needs finite vertices, {path} holds infinities or NaN")
    with_faces = "no faces" if faces is None else f"{len(faces):,} faces"
    print(f"{path}: {what} {vertices.shape} {vertices.dtype}, {with_faces}")
    return vertices, faces


def read_archive(path):
    """The largest member of real (rows, 3), and the faces that go with it by name: vertices_fine with faces_fine."""
    with np.load(path, allow_pickle=False) as archive:
        members = {name: archive[name] for name in archive.files}
    clouds = [n for n, a in members.items() if a.dtype.kind == "f" and a.ndim == 2 and a.shape[1] == 3]
    if not clouds:
        raise SystemExit(f"--mesh needs a member of reals of shape (rows, 3), {path} has {', '.join(members)}")
    name = max(clouds, key=lambda n: len(members[n]))
    return members[name], members.get(name.replace("vertices", "faces")) if "vertices" in name else None, name


def read_geometry(path):
    import trimesh

    geometry = trimesh.load(path, process=False)
    if isinstance(geometry, trimesh.Scene):
        geometry = geometry.to_mesh()
    return np.asarray(geometry.vertices), getattr(geometry, "faces", None)


def fit_count(vertices, faces, count, rng):
    """`count` vertices as float32 about the centre: a subset, or all and more from the faces, evenly by area."""
    vertices = vertices - vertices.mean(0, dtype=np.float64)  # before float32: map coordinates have large offsets
    if len(vertices) > count:
        vertices = vertices[rng.choice(len(vertices), count, replace=False)]
    elif len(vertices) < count and faces is not None:
        corner, *others = (vertices[column] for column in np.asarray(faces)[:, :3].T)
        sides = [other - corner for other in others]
        areas = np.linalg.norm(np.cross(*sides), axis=1)
        chosen = rng.choice(len(faces), count - len(vertices), p=areas / areas.sum())
        parts = rng.random((2, len(chosen), 1))
        parts = np.where(parts.sum(0) > 1, 1 - parts, parts)  # the far half of the parallelogram, folded back
        drawn = corner[chosen] + parts[0] * sides[0][chosen] + parts[1] * sides[1][chosen]
        vertices = np.concatenate([vertices, drawn])
    return np.ascontiguousarray(vertices, np.float32)


def regions(vertices, count):
    """Labels by the nearest of `count` seeds, each the vertex farthest from the seeds before."""
    seeds = [int(np.argmax((vertices**2).sum(1)))]
    distances = np.full(len(vertices), np.inf)
    while len(seeds) < count:
        distances = np.minimum(distances, np.linalg.norm(vertices - vertices[seeds[-1]], axis=1))
        seeds.append(int(distances.argmax()))
    return nk.knn(vertices[seeds], vertices)[1]


# -- Times -------------------------------------------------------------------------------------------------------------


def print_times(points, vertices, repeats):
    """The table: a row for each target of this machine, and SciPy's."""
    double_points, double_vertices = points.astype(np.float64), vertices.astype(np.float64)
    distances = distances_to(double_points, double_vertices, cKDTree(double_points).query(double_vertices)[1])
    print(f"{'ms, median of ' + str(repeats):<34}{'build':>9}{'query':>9}{'total':>9}{'agreement':>13}")
    for name, target, to_target, wait in targets():
        build, query, total = measure(
            lambda cloud, target=target: nk.GridIndex(cloud, target=target),
            lambda index, queries: index.query(queries),
            to_target(points),
            to_target(vertices),
            wait,
            repeats,
        )
        _, found = nk.knn(to_target(double_points), to_target(double_vertices), target=target)
        agreement = 100 * np.mean(distances_to(double_points, double_vertices, to_host(found)) == distances)
        print(f"{name:<34}{build:9.2f}{query:9.2f}{total:9.2f}{agreement:11.3f} %")
    build, query, total = measure(
        cKDTree, lambda tree, queries: tree.query(queries, workers=-1), points, vertices, do_nothing, repeats
    )
    print(f"{'SciPy cKDTree, all cores':<34}{build:9.2f}{query:9.2f}{total:9.2f}{'reference':>13}")
    print(
        "times: float32, but SciPy computes in float64; agreement: the share of vertices whose nearest point, searched in"
    )
    print("float64, is exactly as near as the one that SciPy finds")


def distances_to(points, vertices, indices):
    return np.linalg.norm(points[indices] - vertices, axis=1)


def targets():
    """(name, target, what brings an array there, what waits for the device) of each row."""
    yield "cpu", "cpu", np.asarray, do_nothing
    try:
        nk.GridIndex(np.zeros((1, 3), np.float32), target="cuda")
    except nk.NoDeviceError:
        return
    yield "cuda, host arrays", "cuda", np.asarray, cuda.synchronize
    for library in ("cupy", "torch"):
        try:
            module = importlib.import_module(library)
            to_device, wait = device_functions(module)
            wait()
        except Exception as error:  # not installed, or made for another CUDA version
            print(f"({library} not timed: {type(error).__name__})")
            continue
        yield f"cuda, device arrays ({library})", "cuda", to_device, wait


def device_functions(module):
    """How CuPy or PyTorch puts an array on the device, and waits for the device."""
    if module.__name__ == "cupy":
        return module.asarray, module.cuda.Device().synchronize
    return lambda array: module.from_numpy(array).cuda(), module.cuda.synchronize


def to_host(array):
    if isinstance(array, np.ndarray):
        return array
    return array.get() if hasattr(array, "get") else array.cpu().numpy()


def measure(build, query, points, vertices, wait, repeats):
    """Medians of build, query and both together, in milliseconds, after a run that is not counted."""
    times = np.empty((repeats + 1, 3))
    for row in times:
        wait()
        start = time.perf_counter()
        index = build(points)
        wait()
        built = time.perf_counter()
        query(index, vertices)
        wait()
        done = time.perf_counter()
        row[:] = built - start, done - built, done - start
    return 1000 * np.median(times[1:], axis=0)


def do_nothing():
    pass


# -- The picture -------------------------------------------------------------------------------------------------------


def draw(points, coarse_labels, vertices, labels, names, output):
    """The coarse labels on the bare surface, and the labels of all vertices, side by side.

    The coordinates are those of the viewer: right, up, and towards the eye.
    """
    light, spread = light_and_spread(vertices)
    palette = np.array([to_rgb(colour) for colour in PALETTE])
    bare = light[:, None] * np.array(to_rgb(BARE))
    coarse_spread = np.full(len(points), np.sqrt(len(vertices) / len(points)) * np.median(spread))

    width, height = np.ptp(vertices[:, :2], axis=0)
    figure_height = np.clip(5.8 * height / max(width, 1e-30), 2.5, 6.5) + 1
    figure = Figure(figsize=(12, figure_height), dpi=DPI, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.12)
    canvas = FigureCanvasAgg(figure)  # needs no display
    panels = figure.subplots(1, 2)
    if names:
        dots = [Line2D([], [], ls="", marker="o", ms=8, color=PALETTE[n]) for n in range(len(names))]
        figure.legend(dots, names, loc="outside lower center", ncols=len(names), frameon=False, handletextpad=0.1)
    both = np.concatenate([vertices, points + [0, 0, 2 * np.median(spread)]])  # dots lie on the surface, not in it
    both_colours = np.concatenate([bare, palette[coarse_labels]])
    both_spread = np.concatenate([1.1 * spread, 0.38 * coarse_spread])
    splat(panels[0], both, both_colours, both_spread, f"{len(points):,} labelled points")
    splat(panels[1], vertices, light[:, None] * palette[labels], 1.1 * spread, f"{len(vertices):,} labelled vertices")
    output.parent.mkdir(parents=True, exist_ok=True)
    canvas.draw()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())[:, :, :3])
    picture.quantize(256, kmeans=1).save(output, "PNG", optimize=True)  # a third of the size of full colour


def view_matrix(up, azimuth, elevation):
    """Columns: the directions that point right, up, and towards a viewer at these angles (degrees)."""
    turn, lift = np.radians([azimuth, elevation])
    right = [-np.sin(turn), np.cos(turn), 0]
    towards = [np.cos(lift) * np.cos(turn), np.cos(lift) * np.sin(turn), np.sin(lift)]
    matrix = np.stack([right, np.cross(towards, right), towards], 1)
    return np.roll(matrix, "xyz".index(up) - 2, axis=0)


def light_and_spread(vertices):
    """How brightly each vertex is lit, and how far apart the vertices around it are.

    The normal is the direction in which the nearest neighbours spread least.
    """
    k = min(12, max(len(vertices) - 1, 1))
    distances, neighbours = (a.reshape(-1, k) for a in nk.GridIndex(vertices).query(None, k))
    offsets = vertices[np.minimum(neighbours, len(vertices) - 1)] - vertices[:, None]
    normals = np.linalg.eigh(np.einsum("nki,nkj->nij", offsets, offsets))[1][:, :, 0]
    normals *= np.where(normals[:, 2:] < 0, -1, 1)  # towards the viewer
    lamp = np.array([-0.45, 0.65, 0.61])
    light = 0.62 + 0.46 * (0.5 + 0.5 * normals @ lamp) ** 1.5
    typical = np.median(distances[:, -1])
    return light, np.clip(distances[:, -1], typical / 2, typical * 2)


def splat(panel, places, colours, widths, title):
    """Dots of these widths, in the unit of the places, the nearest drawn last."""
    order = places[:, 2].argsort()
    low, high = places[:, :2].min(0), places[:, :2].max(0)
    margin = 0.03 * (high - low).max() or 1.0
    panel.set(xlim=(low[0] - margin, high[0] + margin), ylim=(low[1] - margin, high[1] + margin), aspect="equal")
    panel.set_title(title, fontsize=14)
    panel.axis("off")
    panel.figure.draw_without_rendering()  # lays the panel out
    points_a_unit = 72 / panel.figure.dpi * (panel.transData.transform((1, 0)) - panel.transData.transform((0, 0)))[0]
    sizes = (points_a_unit * widths[order]) ** 2
    panel.scatter(*places[order, :2].T, s=sizes, c=np.clip(colours[order], 0, 1), linewidths=0)


if __name__ == "__main__":
    main()
