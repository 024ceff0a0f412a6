"""Contractions over windows as kernel steps: tables, blocks and units, chosen from sizes alone.

    C[r, j] = sum over k of A[r, k] B[k, j],  A at row_a[r] + depth_a[k], B at depth_b[k] + j

Rows and depth are each the index space of some dims. Their innermost dims become tables inside the
step; dims that would make a table too long are a loop around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from spmd.base.record import record, replace
from spmd.compile.cpu.codegen.kernel import Rendered, render
from spmd.compile.cpu.matmul.window_ir import (
    ADDRESSES,
    HEADER,
    contract_symbol,
    contract_text,
    heights,
    panel_width,
    tile_symbol,
    tile_text,
)
from spmd.compile.kernel.dtypes import itemsize
from spmd.compile.kernel.matmul import argument_maps, block_epilogue
from spmd.compile.kernel.window_contraction import Contraction
from spmd.compile.native.llvm.compiler import Host, available_cores, host
from spmd.compile.native.llvm.vector_emitter import Target
from spmd.compile.native.llvm.vectors import Vectors, vectors
from spmd.compile.native.program.steps import KernelStep, Slot

# A panel of B this deep (f32), two vectors wide, is 24 KiB: it stays in L1 beside what is read of
# A. One of four is not deeper: what comes from L2 meanwhile is fetched in time.
_BLOCK_BYTES = 768
# The longest table inside a step: rows and depth of a 56 x 56 image and more.
LONGEST_TABLE = 4096
# Tiles of a unit, two vectors wide: enough that packing B for them costs a few percent.
UNIT_TILES = 16
# Below this many multiply-adds a contraction is not worth sharing.
_SHARED_FROM = 2**17
_FLOPS_PER_NS = {64: 100.0, 32: 60.0, 16: 20.0}


# ---- decisions ---------------------------------------------------------------------------------


@record
class Plan:
    """A contraction ready to be compiled: the kernel, its run-time numbers and tables, units."""

    symbol: str
    texts: tuple[str, ...]
    tiles: tuple[str, str]  # symbols of the narrow and the wide tile, the first of HEADER
    sizes: tuple[int, ...]
    units: int
    cost_ns: float
    scratch: int
    epilogues: tuple[Rendered, ...] = ()  # one or none
    offsets: tuple[int, ...] = ()  # bytes to add to the slots of its arguments behind C


def contract_step(
    plan: Plan, addresses: Mapping[str, int], slots: Sequence[Slot], name: str = "conv"
) -> KernelStep:
    """The step of a planned contraction whose texts are compiled. It must not write A or B."""
    after = [addresses[rendered.symbol] for rendered in plan.epilogues] or [0]
    others = zip(slots[3:], plan.offsets, strict=True)
    return KernelStep(
        addresses[plan.symbol],
        (*slots[:3], *(replace(slot, offset=slot.offset + by) for slot, by in others)),
        plan.units,
        plan.cost_ns,
        sizes=(*(addresses[tile] for tile in plan.tiles), *after, *plan.sizes),
        scratch=plan.scratch,
        name=name,
    )


def tiling(rows: int, around: int, multiply_adds: int, v: Vectors, width: int) -> tuple[int, int]:
    """The height of tiles and their number in a unit, for the earliest end of the busiest core.

    Neither changes a result. Short tiles wait for memory, which counts as three rows.
    """
    cores = available_cores() if multiply_adds >= _SHARED_FROM else 1

    def busiest(height: int) -> int:
        tiles = -(-rows // height)
        group = _group(tiles, around, cores, width)
        units = -(-tiles // group) * around
        return -(-units // cores) * group * (height + 3)

    height = min(heights(v, width), key=busiest)
    return height, _group(-(-rows // height), around, cores, width)


def plan_contraction(given: Contraction, machine: Host | None = None) -> Plan:
    """Choose tiles, blocks and units, and lay out the tables."""
    v = vectors(given.dtype, (machine or host()).vector_bytes)
    nbytes = v.nbytes
    outer_rows, rows = given.rows.split(LONGEST_TABLE)
    outer_depth, depth = given.depth.split(LONGEST_TABLE)
    members, *strides = given.batch
    around = outer_rows.count * members
    width = panel_width(v, given.columns)
    height, group = tiling(rows.count, around, given.multiply_adds * members, v, width)
    row_table = rows.offsets() * nbytes
    filled = -(-rows.count // height) * height
    # The last tile is filled up with its last row, which is computed again.
    row_table = row_table[np.minimum(np.arange(filled), rows.count - 1)]
    depth_table = depth.offsets() * nbytes
    panel = width * v.nbytes_of_vector
    after = _Epilogue(given, min(group * height, rows.count), machine or host())
    in_place = given.columns * nbytes == panel and _is_packed(depth_table[:, 1], panel)
    block = _block(depth.count, v)
    tiles = filled // height
    tables = {
        "rows": row_table,
        "outer_rows": outer_rows.offsets() * nbytes,
        "depth": depth_table,
        "outer_depth": outer_depth.offsets() * nbytes,
        "batch": np.arange(members)[:, None] * (np.array(strides, np.int64) * nbytes),
        "arguments": after.strides,
    }
    numbers = {
        "columns": given.columns,
        "panel": panel,
        "pack": int(not in_place),
        "tiles": tiles,
        "height": height,
        "group": group,
        "depth": depth.count,
        "block": block,
        "outer_depth": outer_depth.count,
        "outer_rows": outer_rows.count,
        "row_groups": -(-tiles // group),
        "inner_rows": rows.count,
        "row_bytes": given.columns * nbytes,
        "arguments": len(after.strides),
    }
    units = -(-tiles // group) * around
    flops = 2.0 * group * height * given.columns * given.depth.count
    cost = max(flops / _FLOPS_PER_NS[v.nbytes_of_vector], 5.0) + after.cost_ns
    widths = _widths(given.columns, v, width)
    texts = [contract_text(v), *(tile_text(v, height, n) for n in dict.fromkeys(widths))]
    symbols = tile_symbol(v, height, widths[0]), tile_symbol(v, height, widths[1])
    return Plan(
        contract_symbol(v),
        tuple(texts),
        symbols,
        _words(numbers, tables),
        units,
        cost,
        block * panel,
        after.rendered,
        after.offsets,
    )


class _Epilogue:
    """The kernel that runs on up to `rows` finished rows of a unit, if there is one."""

    def __init__(self, given: Contraction, rows: int, machine: Host):
        self.rendered: tuple[Rendered, ...] = ()
        self.offsets: tuple[int, ...] = ()
        self.strides = np.zeros(0, np.int64)
        self.cost_ns = 0.0
        if given.epilogue is None:
            return
        block = block_epilogue(given.epilogue, rows, given.columns, given.columns)
        made = render(block, Target.from_features(machine.features), tiles=False)
        assert made.units == rows, "each row of an epilogue is a unit"
        maps = argument_maps(given.epilogue)[1:]
        nbytes = [itemsize(arg.dtype) for arg in given.epilogue.args[1:]]
        self.rendered = (made,)
        self.offsets = tuple(m.offset * width for m, width in zip(maps, nbytes, strict=True))
        along = [m.strides[0] * width for m, width in zip(maps, nbytes, strict=True)]
        self.strides = np.array(along, np.int64)
        self.cost_ns = made.cost_ns * rows


def _widths(columns: int, v: Vectors, width: int) -> tuple[int, int]:
    """Vectors of the tiles for the last panel, if it is not full, and for full ones."""
    rest = columns % (width * v.lanes)
    last = -(-rest // v.lanes) or width
    return last, (width if columns >= width * v.lanes else last)


def _words(numbers: dict[str, int], tables: dict[str, np.ndarray]) -> tuple[int, ...]:
    at = len(HEADER)
    for name, table in tables.items():
        numbers[f"at_{name}"] = at
        at += table.size
    body = np.concatenate([table.reshape(-1) for table in tables.values()])
    return (*(numbers[name] for name in HEADER[ADDRESSES:]), *body.tolist())


def _is_packed(offsets: np.ndarray, panel: int) -> bool:
    return bool(np.array_equal(offsets - offsets[:1], np.arange(len(offsets)) * panel))


def _block(depth: int, v: Vectors) -> int:
    """Steps of the depth done at a time: equal parts of at most what stays in L1."""
    most = _BLOCK_BYTES // v.nbytes
    parts = -(-depth // most) or 1
    return max(-(-depth // parts), 1)


def _group(tiles: int, around: int, cores: int, width: int) -> int:
    """Tiles of a unit: fewer where there would not be enough units for the cores."""
    wanted = 4 * cores if cores > 1 else 1
    groups = max(-(-tiles // (UNIT_TILES * width // 2)), min(-(-wanted // around), tiles))
    return -(-tiles // groups)
