"""Every CUDA kernel, the types it is compiled for, and what it may cost.

A signature follows from the names of a kernel's arguments: ARRAYS and SCALARS say what a name stands for in all kernels,
`own` of an entry what it stands for in that kernel alone. `REAL` is float32 in one variant of a kernel and float64 in the
other; a kernel without it has one variant.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from types import SimpleNamespace

import numba.cuda.dispatcher
import numpy as np
from numba import cuda, types

from numbaknn.kernels import (
    balls,
    batches,
    binning,
    copying,
    crowds,
    dense,
    downsampling,
    interpolation,
    lists,
    neighbors,
    ordering,
    rows,
    voxels,
)
from numbaknn.launch import has_device
from numbaknn.plans.dense import ROUNDED_TILES, TILES
from numbaknn.plans.neighbors import CROWD_CAPACITIES, crowd_blocks
from numbaknn.plans.rows import MOST_TURN, TURNS
from numbaknn.plans.voxels import FOLD_BLOCKS

REAL = "REAL"

ARRAYS = {
    REAL: "points queries coordinates table frame frames distances x mean inv_std weight bias scores y coords features "
    "pooled grid",
    types.int32: "shape shapes starts cells ranks sums marks crowded wanted places",
    types.int64: "bounds first indices counts firsts indptr lengths tile_sums totals borders query_borders given_borders "
    "edges boxes inverse large large_voxels first_stretches zeros nothings fitting histogram statuses tickets label_bounds "
    "label_frame best lacking",
    types.uint32: "words other_words words_in words_out order order_in order_out",
    types.float64: "means center",
    types.boolean: "flags",
}
SCALARS = {
    REAL: "limit shrink clip threshold",
    types.int64: "dimensions rows tile tiles most_cells query_count count point_count k columns width ball_count part_bits "
    "mantissa room stride depth clouds each query_each block_bits cells_a_point grids largest_unrefined missing edge_count "
    "parts batch channels voxels kind reduce window windows stretch stretches shift bits tile_bits chunk clouds_step "
    "rows_each length tiles splits ticket entries first_entry level slot slots column most_lanes",
    types.float64: "points_a_cell cell_size largest smallest eps voxel_size given_x given_y given_z side per_side reach "
    "origin_x origin_y origin_z nothing",
    types.boolean: "among_themselves bounded squared uniform rooted by_voxel as_they_come relative averaged first_of_all",
}


# Other versions of the compiler need a few more or fewer.
MARGIN = 6


@dataclass
class Entry:
    """A kernel.

    registers: as measured for sm_90 in float32 and in float64; MARGIN more are let pass. loads, stores: at least so many
    128-bit loads and stores. fused: whether products and sums of reals may be fused. reals: the types that it is compiled
    for. threads: the size of its blocks, if that is compiled in, or that and how many share a multiprocessor. own: see
    above. scalars: names of arguments that are a REAL scalar in this kernel alone. calls: whether it may call functions, for
    which it saves registers in memory. tile: of a matrix product.
    """

    kernel: object
    registers: tuple
    loads: int = 0
    stores: int = 0
    fused: bool = False
    reals: tuple = (types.float32, types.float64)
    threads: int | tuple | None = None
    own: dict = field(default_factory=dict)
    calls: bool = False
    scalars: str = ""
    tile: object = None


def strided(dtype, axes=2):
    return types.Array(dtype, axes, "A")


KERNELS = {
    "first_bad_row_kernel": Entry(binning.first_bad_row_kernel, (12, 14)),
    "clear_kernel": Entry(binning.clear_kernel, (30,)),
    "bounds_kernel": Entry(binning.bounds_kernel, (48, 77)),
    "lattice_kernel": Entry(binning.lattice_kernel, (19, 32)),
    "frame_kernel": Entry(binning.frame_kernel, (30, 32), fused=True),
    "cells_kernel": Entry(binning.cells_kernel, (20, 26)),
    "scan_tiles_kernel": Entry(binning.scan_tiles_kernel, (31,)),
    "scan_sums_kernel": Entry(binning.scan_sums_kernel, (32,)),
    "add_sums_kernel": Entry(binning.add_sums_kernel, (20,)),
    "scatter_kernel": Entry(binning.scatter_kernel, (16, 18), stores=1),
    "order_of_points_kernel": Entry(crowds.order_of_points_kernel, (32,), own={"order": types.int32}),
    "bounds_of_crowds_kernel": Entry(crowds.bounds_of_crowds_kernel, (40, 60), own={"order": types.int32}),
    "frames_of_crowds_kernel": Entry(crowds.frames_of_crowds_kernel, (38, 40), fused=True),
    "cells_of_crowds_kernel": Entry(crowds.cells_of_crowds_kernel, (40, 40)),
    "scan_tiles_of_crowds_kernel": Entry(crowds.scan_tiles_of_crowds_kernel, (32,)),
    "scan_sums_of_crowds_kernel": Entry(crowds.scan_sums_of_crowds_kernel, (32,)),
    "add_sums_of_crowds_kernel": Entry(crowds.add_sums_of_crowds_kernel, (34,)),
    "clear_places_kernel": Entry(ordering.clear_places_kernel, (12,)),
    "count_queries_kernel": Entry(ordering.count_queries_kernel, (40, 48), own={"stretches": types.int32}),
    "sum_places_kernel": Entry(ordering.sum_places_kernel, (32,)),
    "place_queries_kernel": Entry(
        ordering.place_queries_kernel, (20,), own={"order": types.int32, "stretches": types.int32}
    ),
    "pack_kernel": Entry(copying.pack_kernel, (18,), own={"source": strided(types.float16), "target": types.float32}),
    "pack_batch_kernel": Entry(
        copying.pack_batch_kernel, (26,), own={"source": strided(types.float16, 3), "target": types.float32}
    ),
    "convert_kernel": Entry(copying.convert_kernel, (12,), own={"source": types.float32, "target": types.float64}),
    "take_rows_kernel": Entry(
        copying.take_rows_kernel, (20,), own={"source": types.int64, "target": types.int64, "fill": types.int64}
    ),
    "interpolate_kernel": Entry(interpolation.interpolate_kernel, (42, 42), own={"values": types.float64}),
}
# One block of 1,024 threads in float32, where 64 registers a thread are all that there are, and of 512 in float64.
for threads, real, registers in ((1024, types.float32, (64, 64, 64)), (512, types.float64, (76, 95, 95))):
    KERNELS |= {
        f"build_kernel[{threads}, {dimensions}]": Entry(
            binning.build_kernel(threads, dimensions), (most,), fused=True, reals=(real,), threads=threads, calls=True
        )
        for dimensions, most in zip((1, 2, 3), registers)
    }
KNN_REGISTERS = {2: (77, 116), 4: (90, 128), 8: (94, 152), 16: (122, 191), 32: (165, 254)}
# What an eps and clouds in a batch add is the same for lists of all lengths: three of them show it.
EPS_REGISTERS = {1: (77, 115), 8: KNN_REGISTERS[8], 32: KNN_REGISTERS[32]}
for among_themselves in (False, True):
    for name, measured in (("knn_kernel", KNN_REGISTERS), ("knn_eps_kernel", EPS_REGISTERS)):
        KERNELS |= {
            f"{name}[{capacity}, {among_themselves}]": Entry(
                getattr(neighbors, name)(capacity, among_themselves), registers, loads=1, own={"order": types.int32}
            )
            for capacity, registers in measured.items()
        }
    kernel = neighbors.nearest_kernel(among_themselves)
    KERNELS[f"nearest_kernel[{among_themselves}]"] = Entry(kernel, (74, 108), loads=4)
KERNELS |= {
    f"knn_among_crowds_kernel[{slots}, {among_themselves}, {real}]": Entry(
        neighbors.knn_among_crowds_kernel(slots, blocks, among_themselves),
        (512 // blocks,),
        loads=1,
        scalars="shrink",
        own={"order": types.int32},
        calls=True,
        threads=(neighbors.CROWD_THREADS, blocks),
        reals=(real,),
    )
    for slots, among_themselves, real in [
        (1, True, types.float32),
        *((slots, False, types.float32) for slots in CROWD_CAPACITIES),
        (1, False, types.float64),
        (CROWD_CAPACITIES[-1], False, types.float64),
    ]
    for blocks in [crowd_blocks(slots, np.dtype(str(real)))]
}

LIST_BOUNDS = lists.MOST_THREADS, lists.CROWD_BLOCKS
KERNELS |= {
    "count_balls_kernel": Entry(balls.count_balls_kernel, (56, 76), loads=1),
    "fill_balls_kernel": Entry(balls.fill_balls_kernel, (54, 72), loads=1),
    **{
        f"{stage}_balls_among_crowds_kernel": Entry(
            getattr(balls, f"{stage}_balls_among_crowds_kernel"),
            (512 // balls.CROWD_BLOCKS,) * 2,
            loads=1,
            calls=True,
            threads=(balls.CROWD_THREADS, balls.CROWD_BLOCKS),
        )
        for stage in ("count", "fill")
    },
    "lengths_kernel": Entry(balls.lengths_kernel, (28,)),
    "sum_counts_kernel": Entry(balls.sum_counts_kernel, (32,)),
    "sum_tiles_kernel": Entry(balls.sum_tiles_kernel, (28,)),
    "add_tiles_kernel": Entry(balls.add_tiles_kernel, (20,)),
    "borders_kernel": Entry(balls.borders_kernel, (12,)),
    "long_list_kernel": Entry(lists.long_list_kernel, (64, 80), loads=1),
    "long_list_among_crowds_kernel": Entry(
        lists.long_list_among_crowds_kernel, (128, 128), loads=1, calls=True, threads=LIST_BOUNDS
    ),
}
# made for a type of reals each, as that of their shared memory is compiled in
MADE = {"list_kernel": (64, 78), "list_among_crowds_kernel": (128, 128), "sort_balls_kernel": (43, 39)}
KERNELS |= {
    f"{name}[{real}]": Entry(
        getattr(lists, name)(real),
        (registers,),
        loads=int(name.startswith("list")),
        reals=(real,),
        calls="among_crowds" in name,
        threads=LIST_BOUNDS if "among_crowds" in name else None,
    )
    for name, measured in MADE.items()
    for real, registers in zip((types.float32, types.float64), measured)
}
IN_CLOUDS_REGISTERS = {1: (102, 157), 8: (122, 166), 16: (145, 212), 32: (182,)}
for capacity, registers in IN_CLOUDS_REGISTERS.items():
    for among_themselves, shrinks in ((False, False), (True, True)):
        kernel = batches.knn_in_clouds_kernel(capacity, among_themselves, shrinks)
        KERNELS[f"knn_in_clouds_kernel[{capacity}, {among_themselves}, {shrinks}]"] = Entry(kernel, registers, loads=1)
KERNELS |= {
    f"knn_in_crowded_clouds_kernel[{slots}, {among_themselves}, {real}]": Entry(
        batches.knn_in_crowded_clouds_kernel(slots, blocks, among_themselves),
        (512 // blocks,),
        loads=1,
        scalars="shrink",
        own={"order": types.int32},
        calls=True,
        threads=(neighbors.CROWD_THREADS, blocks),
        reals=(real,),
    )
    for slots, among_themselves, real in [
        (1, True, types.float32),
        (1, False, types.float64),
        (CROWD_CAPACITIES[-1], False, types.float32),
    ]
    for blocks in [crowd_blocks(slots, np.dtype(str(real)))]
}
KERNELS |= {
    f"list_in_crowded_clouds_kernel[{real}]": Entry(
        batches.list_in_crowded_clouds_kernel(real),
        (128,),
        loads=1,
        reals=(real,),
        calls=True,
        threads=LIST_BOUNDS,
    )
    for real in (types.float32, types.float64)
}
KERNELS["long_list_in_crowded_clouds_kernel"] = Entry(
    batches.long_list_in_crowded_clouds_kernel, (128, 128), loads=1, calls=True, threads=LIST_BOUNDS
)
KERNELS |= {
    "count_queries_of_clouds_kernel": Entry(
        batches.count_queries_of_clouds_kernel, (40, 48), own={"stretches": types.int32}
    ),
    "clear_clouds_kernel": Entry(batches.clear_clouds_kernel, (32,)),
    "bounds_of_clouds_kernel": Entry(batches.bounds_of_clouds_kernel, (48, 77)),
    "lattices_of_clouds_kernel": Entry(batches.lattices_of_clouds_kernel, (32, 36)),
    "frames_of_clouds_kernel": Entry(batches.frames_of_clouds_kernel, (35, 36), fused=True),
    "cells_of_clouds_kernel": Entry(batches.cells_of_clouds_kernel, (40, 48)),
    "scan_all_cells_kernel": Entry(batches.scan_all_cells_kernel, (32,)),
    "add_to_all_cells_kernel": Entry(batches.add_to_all_cells_kernel, (20,)),
    "scatter_clouds_kernel": Entry(batches.scatter_clouds_kernel, (32, 32), stores=1),
    "long_list_in_clouds_kernel": Entry(batches.long_list_in_clouds_kernel, (110, 136), loads=1),
    "complete_edges_kernel": Entry(batches.complete_edges_kernel, (20,)),
    "count_edges_kernel": Entry(batches.count_edges_kernel, (14,)),
    "fill_edges_kernel": Entry(batches.fill_edges_kernel, (32,)),
}
KERNELS |= {
    f"list_in_clouds_kernel[{real}]": Entry(batches.list_in_clouds_kernel(real), (registers,), loads=1, reals=(real,))
    for real, registers in zip((types.float32, types.float64), (110, 134))
}

# Rows: by lanes, parts or quads a lane. What is unaligned is read element by element.
HALVES = {"x": types.int16}
WORDS = {"x": types.int32, "y": types.int32}
KERNELS |= {
    "row_score_kernel[1]": Entry(rows.row_major_kernel(1, True), (68, 124), loads=7),
    "row_score_kernel[4]": Entry(rows.row_major_kernel(4, True), (59, 96), loads=7),
    "row_score_kernel[32]": Entry(rows.row_major_kernel(32, True), (59, 96), loads=7),
    "row_score_kernel[256]": Entry(rows.row_major_kernel(256, True), (59, 96), loads=7),
    "row_score_kernel[8 unaligned]": Entry(rows.row_major_kernel(8, False), (93, 130)),
    "row_score_kernel[4 halves]": Entry(rows.row_major_kernel(4, True), (64,), loads=3, own=HALVES),
    "packed_score_kernel[4]": Entry(
        rows.packed_score_kernel(4, 1, 4, False, (128, 1)), (40, 76), loads=7, threads=(128, 1)
    ),
    "packed_score_kernel[32 x 2]": Entry(
        rows.packed_score_kernel(32, 2, 4, False, (128, 1)), (70, 120), loads=14, threads=(128, 1)
    ),
    "packed_score_kernel[4 turns]": Entry(
        rows.packed_score_kernel(4, 1, 4, True, (128, 1)), (66, 110), loads=11, threads=(128, 1)
    ),
    "feature_score_kernel[1]": Entry(rows.feature_major_kernel(1, 1, 128, 4, True, True, 0), (64, 94), loads=7),
    "feature_score_kernel[8]": Entry(rows.feature_major_kernel(8, 1, 32, 4, True, True, 0), (64, 124), loads=7),
    "feature_score_kernel[8 x 8]": Entry(rows.feature_major_kernel(8, 8, 32, 4, True, True, 0), (80, 148), loads=7),
    "feature_score_kernel[8 partly]": Entry(rows.feature_major_kernel(8, 1, 32, 4, True, False, 0), (64, 128), loads=8),
    "feature_score_kernel[8 x 8 unaligned]": Entry(rows.feature_major_kernel(8, 8, 32, 4, False, False, 0), (110, 168)),
    "layer_norm_kernel[32 x 4]": Entry(
        rows.layer_norm_kernel(32, 4, True, False), (48, 78), loads=12, stores=4, scalars="eps"
    ),
    "layer_norm_kernel[64 x 3]": Entry(
        rows.layer_norm_kernel(64, 3, True, True), (32, 65), loads=9, stores=3, scalars="eps"
    ),
    "layer_norm_kernel[32 x 6]": Entry(
        rows.layer_norm_kernel(32, 6, True, True), (46, 78), loads=18, stores=6, scalars="eps"
    ),
    "layer_norm_kernel[64 x 3 unaligned]": Entry(rows.layer_norm_kernel(64, 3, False, False), (46, 65), scalars="eps"),
    "wide_layer_norm_kernel": Entry(rows.wide_layer_norm_kernel(512, True), (42, 52), loads=5, stores=1, scalars="eps"),
    "transpose_kernel": Entry(
        rows.transpose_kernel(MOST_TURN, True), (48,), loads=4, stores=4, own=WORDS, threads=(256, 4)
    ),
    "transpose_kernel[narrow]": Entry(
        rows.transpose_kernel(TURNS[0][1], True), (48,), loads=4, stores=4, own=WORDS, threads=(256, 4)
    ),
    "transpose_kernel[unaligned]": Entry(rows.transpose_kernel(MOST_TURN, False), (64,), own=WORDS),
}

# Pooling: by where the weights are.
IN_POOLING = {
    **dict.fromkeys(("counts", "totals", "keys", "keys_after", "order", "order_after"), types.int32),
    "side": types.int64,
    **dict.fromkeys(("sums", "edges"), types.float64),
}


def pooling(kernel, registers, wide=False, halves=False, **options):
    """wide: keys for more than 2^31 voxels; halves: features as the bits of float16."""
    own = {**IN_POOLING, **({"keys": types.int64} if wide else {}), **({"features": types.int16} if halves else {})}
    return Entry(kernel, registers, own=own, **options)


LAYERS = {"no layer": voxels.NO_LAYER, "shared": voxels.LAYER_IN_SHARED, "global": voxels.LAYER_IN_GLOBAL}
POOL_REGISTERS = {"no layer": (80, 82), "shared": (72, 82), "global": (88, 80)}
FOLD_REGISTERS = {"shared": (78, 76), "global": (80, 78)}
KERNELS |= {
    "middle_sums_kernel": pooling(voxels.middle_sums_kernel, (32, 30)),
    "keys_kernel[pooling]": pooling(voxels.keys_kernel(256), (56, 56)),
    "keys_kernel[pooling, 64 bits]": pooling(voxels.keys_kernel(256), (56, 56), wide=True),
    "count_digits_kernel": pooling(voxels.count_digits_kernel, (30,)),
    "sum_digits_kernel": pooling(voxels.sum_digits_kernel, (30,)),
    "move_kernel": pooling(voxels.move_kernel(256), (38,)),
    "join_kernel": pooling(voxels.join_kernel, (39, 39)),
    "spread_kernel": pooling(voxels.spread_kernel(256, True), (48, 66), loads=4, stores=4),
    "spread_kernel[unaligned]": pooling(voxels.spread_kernel(256, False), (42, 58), loads=4),
    "pool_kernel[halves]": pooling(
        voxels.pool_kernel(256, voxels.NO_LAYER, False, True, True), (80,), stores=1, halves=True
    ),
    "pool_kernel[unaligned]": pooling(voxels.pool_kernel(256, voxels.LAYER_IN_SHARED, False, False, False), (72, 72)),
}
KERNELS |= {
    "fold_rows_kernel": pooling(
        voxels.fold_rows_kernel(256, FOLD_BLOCKS, False, True), (48, 48), loads=4, stores=1, threads=(256, FOLD_BLOCKS)
    ),
    "fold_rows_kernel[bias]": pooling(voxels.fold_rows_kernel(256, None, True, True), (64, 64), loads=4, stores=1),
    "fold_rows_kernel[unaligned]": pooling(voxels.fold_rows_kernel(256, None, True, False), (72, 72), stores=1),
    "fold_rows_kernel[64 bits]": pooling(voxels.fold_rows_kernel(256, None, False, True), (64, 64), wide=True),
    "fold_rows_kernel[halves]": pooling(voxels.fold_rows_kernel(256, None, False, True), (56,), stores=1, halves=True),
}
for name, layer in LAYERS.items():
    kernel = voxels.pool_kernel(256, layer, True, True, True)
    KERNELS[f"pool_kernel[{name}]"] = pooling(kernel, POOL_REGISTERS[name], loads=1, stores=2)
    if layer != voxels.NO_LAYER:
        kernel = voxels.fold_kernel(256, layer, True, True)
        KERNELS[f"fold_kernel[{name}]"] = pooling(kernel, FOLD_REGISTERS[name], loads=1, stores=1)
# Voxels: a frame is an array of integers here, and so is where voxels begin.
FRAME = {"frame": types.int64, "firsts": types.uint32}
LABELS = {**FRAME, "labels": types.int32, "reduced": types.int32}
VALUES = {**FRAME, "largest": types.boolean}
FLOATS = {**VALUES, "values": types.float32, "reduced": types.float32, "partials": types.float64}
INTEGERS = {**VALUES, "values": types.int32, "reduced": types.int64, "partials": types.int64, "nothing": types.int64}
DIGIT_BITS, SORT_THREADS, STRETCH = 8, 512, 4096
KERNELS |= {
    "prepare_voxels_kernel": Entry(downsampling.prepare_voxels_kernel, (32,)),
    "bounds_of_voxels_kernel": Entry(downsampling.bounds_of_voxels_kernel, (56, 82)),
    "first_misfit_kernel": Entry(downsampling.first_misfit_kernel, (14, 14)),
    "keys_kernel": Entry(downsampling.keys_kernel(DIGIT_BITS), (51, 51), own=FRAME),
    "sort_kernel": Entry(
        downsampling.sort_kernel(SORT_THREADS, DIGIT_BITS), (64,), own=FRAME, threads=(SORT_THREADS, 2)
    ),
    "sort_kernel[votes]": Entry(
        downsampling.sort_kernel(SORT_THREADS, DIGIT_BITS, True), (64,), own=FRAME, threads=(SORT_THREADS, 2)
    ),
    "heads_kernel": Entry(
        downsampling.heads_kernel(SORT_THREADS, STRETCH), (40,), own=FRAME, threads=(SORT_THREADS, 3)
    ),
    "inverse_kernel": Entry(downsampling.inverse_kernel, (14,), own=FRAME),
    "flip_kernel": Entry(downsampling.flip_kernel, (12,), own={"source": types.int64, "target": types.int64}),
    "label_bounds_kernel": Entry(downsampling.label_bounds_kernel, (32,), own=LABELS),
    "label_keys_kernel": Entry(downsampling.label_keys_kernel(DIGIT_BITS), (47,), own=LABELS),
    "count_labels_kernel": Entry(downsampling.count_labels_kernel, (30,), own=LABELS),
    "write_labels_kernel": Entry(downsampling.write_labels_kernel, (40,), own=LABELS),
    "write_length_kernel": Entry(downsampling.write_length_kernel, (8,), own={"length": types.int64}),
}
for kind, own, wide in (("floats", FLOATS, types.float64), ("integers", INTEGERS, types.int64)):
    KERNELS |= {
        f"reduce_voxels_kernel[{kind}]": Entry(downsampling.reduce_voxels_kernel(STRETCH), (56,), own=own),
        f"stretches_kernel[{kind}]": Entry(downsampling.stretches_kernel(wide, STRETCH), (77,), own=own),
        f"join_stretches_kernel[{kind}]": Entry(downsampling.join_stretches_kernel(STRETCH), (37,), own=own),
    }


# The matrix product, by tiles; what is unaligned is read element by element.
PRODUCT_REGISTERS = {types.float32: (161, 95, 89), types.float64: (152, 122)}


def product(tile, registers, real=types.float32, whole=True, biased=True, activated=False, rounded=False, **options):
    kernel = dense.linear_kernel(tile, whole, whole, biased, activated, rounded)
    quads = (tile.rows + tile.columns) * tile.depth // (4 * tile.threads)  # of both operands, a thread and step
    loads, stores = (quads, 4 * tile.row_quads * tile.column_quads) if whole else (0, 0)
    bounds = tile.threads, tile.blocks
    return Entry(kernel, (registers,), loads, stores, not rounded, (real,), bounds, tile=tile, **options)


for real, measured in PRODUCT_REGISTERS.items():
    for registers, (tile, _) in zip(measured, TILES[np.dtype(str(real))], strict=True):
        KERNELS[f"linear_kernel[{tile.rows} x {tile.columns}, {real}]"] = product(tile, registers, real)
tile = TILES[np.dtype(np.float32)][0][0]
KERNELS |= {
    "linear_kernel[gelu]": product(tile, 161, activated=True),
    "linear_kernel[no bias]": product(tile, 161, biased=False),
    "linear_kernel[unaligned]": product(tile, 161, whole=False),
    "linear_kernel[halves]": product(tile, 161, own={"x": types.int16, "weight": types.int16}),
}
KERNELS["linear_kernel[halves]"].loads = 0  # of 64 bits
# The layer of a pooling, of which nothing is fused.
ROUNDED_REGISTERS = {types.float32: (166, 104, 80), types.float64: (182, 108)}
for real, measured in ROUNDED_REGISTERS.items():
    for registers, (tile, _) in zip(measured, ROUNDED_TILES[np.dtype(str(real))], strict=True):
        name = f"linear_kernel[{tile.rows} x {tile.columns} rounded, {real}]"
        KERNELS[name] = product(tile, registers, real, rounded=True)
tile = ROUNDED_TILES[np.dtype(np.float32)][0][0]
KERNELS |= {
    "linear_kernel[unaligned, rounded]": product(tile, 166, whole=False, rounded=True),
    "linear_kernel[halves, rounded]": product(tile, 166, rounded=True, own={"x": types.int16}),
}
KERNELS["linear_kernel[halves, rounded]"].loads = 0


def signature(entry, real):
    """The types of a kernel's arguments for this type of reals."""
    named = {}
    for meaning, names in ARRAYS.items():
        named |= {name: types.Array(real if meaning == REAL else meaning, 1, "C") for name in names.split()}
    for meaning, names in SCALARS.items():
        named |= {name: real if meaning == REAL else meaning for name in names.split()}
    for name, meaning in entry.own.items():
        plain = name not in ("fill", "nothing", "largest", "side") and not isinstance(meaning, types.Array)
        named[name] = types.Array(meaning, 1, "C") if plain else meaning
    named |= dict.fromkeys(entry.scalars.split(), real)
    return tuple(named[name] for name in inspect.signature(entry.kernel.py_func).parameters)


def variants():
    """(identifier, entry, type of reals, number of the variant) of everything that is compiled."""
    for name, entry in KERNELS.items():
        for number, real in enumerate(entry.reals[: len(entry.registers)]):
            yield f"{name}-{real}", entry, real, number


def compile_ptx(identifier, capability):
    """The PTX of a variant for a compute capability."""
    if not has_device():
        # functions that a kernel calls are compiled for "the current device"; what they become is its PTX all the same
        device = SimpleNamespace(compute_capability=capability)
        numba.cuda.dispatcher.get_current_device = lambda: device
    entry, real = next((entry, real) for name, entry, real, _ in variants() if name == identifier)
    python, types_of_arguments = entry.kernel.py_func, signature(entry, real)
    ptx, _ = cuda.compile_ptx(python, types_of_arguments, cc=capability, launch_bounds=entry.threads)
    return ptx
