"""Segment a mesh by way of voxels: downsample it, label the voxels, carry the labels back to every vertex.

The first and the last stage of a segmentation pipeline. `voxel_downsample` turns the vertices into about 8,000 points, one
for every occupied voxel; a network would label these (here a rule does); `interpolate` gives every vertex the label of its
nearest point. The script says how long the stages take, how many vertices end up with the label that the rule gives
them directly, and how few of them lie in voxels with more than one label. It writes a picture of both stages.

    python examples/segment_mesh.py
    python examples/segment_mesh.py --mesh bunny.ply --voxels 2000 --output bunny.png

Without --mesh it takes a mesh of ../shared/data if that is there, or else the animal of upsample_labels.py, whose labels are
parts of the body; a mesh is labelled by regions.
"""

import argparse
import importlib
import time
from pathlib import Path

import numpy as np
from upsample_labels import (
    REGIONS,
    device_functions,
    do_nothing,
    draw,
    fit_count,
    generate,
    part_distances,
    positive,
    read_mesh,
    to_host,
    view_matrix,
)

import numbaknn as nk

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "mesh_scorpion.npz"


def main():
    arguments = parse_arguments()
    rng = np.random.default_rng(arguments.seed)
    mesh = arguments.mesh or (SHARED if SHARED.exists() else None)
    if mesh is None:
        vertices, _, names = generate(arguments.vertices, rng)
        rule = label_by_part
        up = arguments.up or "z"
    else:
        vertices, faces = read_mesh(mesh)
        vertices = fit_count(vertices, faces, arguments.vertices, rng)
        rule, names = regions_of(vertices), None
        up = arguments.up or ("z" if faces is None else "y")

    try:
        size = size_for(vertices, arguments.voxels, arguments.target)
    except nk.NoDeviceError as error:
        raise SystemExit(f"--target cuda: {error}") from None
    labels = rule(vertices)
    voxels = nk.voxel_downsample(vertices, size, labels, reduce="mode", target=arguments.target)
    coarse = rule(voxels.points)  # the network's turn
    carried = nk.interpolate(voxels.points, coarse, vertices, target=arguments.target)

    print(
        f"{len(vertices):,} vertices -> {len(voxels.points):,} voxels of {size:.4g}, {voxels.counts.max()} vertices at most"
    )
    print_times(vertices, size, coarse, arguments.repeats)
    mixed = np.mean(labels != voxels.features[voxels.inverse])
    print(
        f"\n{100 * np.mean(carried == labels):.1f} % of the vertices got the label that the rule gives them directly;"
    )
    print(f"{100 * mixed:.1f} % are in the minority of their voxel, whose most frequent label is another one")
    view = view_matrix(up, arguments.azimuth, arguments.elevation)
    draw(voxels.points @ view, coarse, vertices @ view, carried, names, arguments.output)
    print(f"picture: {arguments.output} ({arguments.output.stat().st_size / 1000:.0f} kB)")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", type=Path, metavar="FILE", help="a surface of your own: .npy, .npz, .ply or .obj")
    parser.add_argument("--vertices", type=positive, default=100_000, help="of the mesh (%(default)s)")
    parser.add_argument("--voxels", type=positive, default=8_000, help="about so many (%(default)s)")
    parser.add_argument("--target", choices=["auto", "cpu", "cuda"], default="auto", help="what does the work")
    parser.add_argument("--output", type=Path, default=Path("segment_mesh.png"), metavar="FILE.png")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=positive, default=9, help="timed runs a row (%(default)s)")
    parser.add_argument("--up", choices=["x", "y", "z"], help="axis that points up (z; y for a mesh with faces)")
    parser.add_argument("--azimuth", type=float, default=-56, help="of the viewer, in degrees (%(default)s)")
    parser.add_argument("--elevation", type=float, default=14, help="of the viewer, in degrees (%(default)s)")
    return parser.parse_args()


def label_by_part(places):
    return part_distances(places).argmin(1)


def regions_of(vertices):
    """A rule: the number of the nearest of some seeds, each of which is the vertex farthest from the seeds before."""
    seeds = [int(np.argmax((vertices**2).sum(1)))]
    distances = np.full(len(vertices), np.inf)
    while len(seeds) < REGIONS:
        distances = np.minimum(distances, np.linalg.norm(vertices - vertices[seeds[-1]], axis=1))
        seeds.append(int(distances.argmax()))
    return lambda places: nk.knn(vertices[seeds], places)[1]


def size_for(vertices, wanted, target):
    """The side of voxels of which about so many are occupied: by bisection, as larger voxels are fewer (nearly always)."""
    extent = float(np.ptp(vertices, axis=0).max()) or 1.0
    low, high = extent / 4096, 2 * extent
    for _ in range(20):
        middle = (low * high) ** 0.5
        if len(nk.voxel_downsample(vertices, middle, target=target).points) > wanted:
            low = middle
        else:
            high = middle
    return high


# -- Times -------------------------------------------------------------------------------------------------------------


def print_times(vertices, size, coarse, repeats):
    """The table: a row for each target of this machine, and one for NumPy."""
    print(f"\n{'ms, median of ' + str(repeats):<34}{'downsample':>12}{'upsample':>12}")
    for name, target, to_target, wait in targets():
        cloud, labels = to_target(vertices), to_target(coarse)
        points = nk.voxel_downsample(cloud, size, target=target).points
        down = median_time(lambda: nk.voxel_downsample(cloud, size, target=target), wait, repeats)  # noqa: B023, called here
        up = median_time(lambda: nk.interpolate(points, labels, cloud, target=target), wait, repeats)  # noqa: B023
        print(f"{name:<34}{down:12.2f}{up:12.2f}")
        same = np.array_equal(to_host(points), nk.voxel_downsample(vertices, size, target="cpu").points)
        assert same, f"{name} differs from the CPU"
    numpy_time = median_time(lambda: downsample_by_unique(vertices, size), do_nothing, min(repeats, 3))
    print(f"{'NumPy, unique of rows':<34}{numpy_time:12.2f}")


def targets():
    """(name, target, what brings an array there, what waits for the device) of each row."""
    yield "cpu", "cpu", np.asarray, do_nothing
    try:
        nk.voxel_downsample(np.zeros((1, 3), np.float32), 1.0, target="cuda")
    except nk.NoDeviceError:
        return
    yield "cuda, host arrays", "cuda", np.asarray, do_nothing
    for library in ("cupy", "torch"):
        try:
            module = importlib.import_module(library)
            to_device, wait = device_functions(module)
            wait()
        except Exception as error:  # not installed, or made for another CUDA version
            print(f"({library} not timed: {type(error).__name__})")
            continue
        yield f"cuda, device arrays ({library})", "cuda", to_device, wait


def downsample_by_unique(points, size):
    """What people write in NumPy."""
    keys = np.floor(points / size).astype(np.int64)
    _, inverse, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    sums = np.stack([np.bincount(inverse.ravel(), points[:, axis]) for axis in range(3)], 1)
    return sums / counts[:, None]


def median_time(call, wait, repeats):
    """In milliseconds, after a run that is not counted."""
    times = []
    for _ in range(repeats + 1):
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)
    return 1000 * float(np.median(times[1:]))


if __name__ == "__main__":
    main()
