"""Matrix products as kernel steps: orientation, packing and blocking; compiled once per dtype.

The one idea: the caller describes C[b, i, j] = sum over k of A[b, i, k] B[b, k, j] by sizes and
strides, so transposes, broadcast batches and slices cost nothing, and gets one `KernelStep`. What
the kernel does with it is in `gemm_ir_loops`; here are only the decisions, all of them taken from
sizes and strides alone.

    product = Product(m=64, n=32, k=16, a=Operand(offset=..., row=16, column=1), ...)
    step = gemm_step(product, a_slot, b_slot, c_slot)       # None: not supported, use the fallback
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache

import numpy as np

from spmd.compile.cpu.gemm_ir import Shape
from spmd.compile.cpu.gemm_ir_loops import SIZES, gemm_text, gemv_symbol, product_symbol
from spmd.compile.cpu.loader import Host, available_cores, compile_texts, host
from spmd.compile.cpu.program import KernelStep, Slot

# Dtypes of A and B, and what C may be for each.
_RESULTS = {
    "float32": ("float32",),
    "float64": ("float64",),
    "bfloat16": ("bfloat16", "float32"),
    "float16": ("float16", "float32"),
}

# A panel of B of this depth (f32) stays in the L1 or L2 cache beside the tile it is used for.
_DEPTH_BYTES = 2048
# Rows of A per block, in register tiles: with the depth above a block fills half of a 1 MiB L2.
_BLOCK_TILES = 16
_BLOCK_COLUMNS = 1024
# A narrow result is rounded once, so its products are not cut along k; this bounds the scratch.
_SCRATCH_BYTES = 4 * 2**20
# Below this many multiply-adds a product is one unit: sharing it would cost more than it brings.
_SHARED_FROM = 2**17
# Estimates for the decision to use threads, per core.
_FLOPS_PER_NS = {64: 100.0, 32: 60.0, 16: 20.0}
_BYTES_PER_NS = 12.0


@dataclass(frozen=True, slots=True)
class Operand:
    """The layout of A, B or C: strides in elements, any sign, 0 for a broadcast dim."""

    row: int
    column: int
    batch: tuple[int, ...] = ()

    @property
    def transposed(self) -> Operand:
        """The layout with rows and columns exchanged."""
        return Operand(self.column, self.row, self.batch)


@dataclass(frozen=True, slots=True)
class Product:
    """C = A B with A of m x k, B of k x n, for each index of at most three batch dims."""

    m: int
    n: int
    k: int
    a: Operand
    b: Operand
    c: Operand
    source: np.dtype  # of A and B
    result: np.dtype  # of C
    batch: tuple[int, ...] = ()

    @property
    def transposed(self) -> Product:
        """The same product read as C^T = B^T A^T."""
        return dataclasses.replace(
            self,
            m=self.n,
            n=self.m,
            a=self.b.transposed,
            b=self.a.transposed,
            c=self.c.transposed,
        )

    @property
    def multiply_adds(self) -> int:
        """The work of one product of the batch."""
        return self.m * self.n * self.k


def supports(source: np.dtype, result: np.dtype) -> bool:
    """Whether there is a native product of these dtypes."""
    return result.name in _RESULTS.get(source.name, ())


def gemm_step(product: Product, a: Slot, b: Slot, c: Slot, name: str = "dot") -> KernelStep | None:
    """The step that computes a product, or None if its dtypes are not supported.

    The slots are the addresses of the elements [0, 0] (with negative strides not the lowest). C
    must not overlap A or B, and no two elements of C each other.
    """
    if not supports(product.source, product.result):
        return None
    if len(product.batch) > 3 or any(
        len(o.batch) != len(product.batch) for o in (product.a, product.b, product.c)
    ):
        raise ValueError(f"a product takes up to three batch dims, equally many each: {product}")
    shape = shape_for(product.source.name, product.result.name, host())
    oriented = orient(product)
    if oriented is not product:
        a, b = b, a
    plan = plan_product(oriented, shape)
    address = _addresses(shape)[plan.symbol]
    return KernelStep(
        address,
        (a, b, c),
        plan.units,
        plan.cost_ns,
        sizes=tuple(plan.sizes[key] for key in SIZES),
        scratch=plan.scratch,
        name=name,
    )


def shape_for(source: str, result: str, machine: Host) -> Shape:
    """The register tile for a processor."""
    # AVX-512 and NEON have 32 registers, the others 16: tile, one row of B, one element of A.
    rows = 12 if machine.vector_bytes == 64 else 6
    return Shape(source, result, machine.vector_bytes, rows)


@cache
def _addresses(shape: Shape) -> dict[str, int]:
    return compile_texts([gemm_text(shape)], optimize=True)


# ---- decisions -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """A product ready to run: the kernel, its run-time numbers and units."""

    symbol: str
    sizes: dict[str, int]
    units: int
    cost_ns: float
    scratch: int


def orient(product: Product) -> Product:
    """The product or its transpose: vectors want to run along the columns of C and of B."""
    p = product
    if p.n == 1 and p.m > 1:
        # A with contiguous rows is read row by row; otherwise as B^T, where it is contiguous.
        return p if p.a.column == 1 or p.a.row != 1 else p.transposed
    if p.m == 1 and p.n > 1:
        return p if p.b.column == 1 or p.b.row != 1 else p.transposed
    return p.transposed if p.c.row == 1 and p.c.column != 1 else p


def plan_product(p: Product, shape: Shape) -> Plan:
    """Choose packing and blocks for an oriented product."""
    batches = int(np.prod(p.batch, dtype=np.int64))
    if p.n == 1 and p.a.column == 1:
        return _plan_gemv(p, shape, batches)
    nr = {1: 8, 2: 4}.get(p.m, 2) * shape.lanes
    kc = _depth(p, shape)
    mc, nc = _blocks(p, shape, batches, nr)
    m_blocks, n_blocks = -(-p.m // mc), -(-p.n // nc)
    pack_b = shape.converts or p.b.column != 1 or (p.m > 4 * shape.rows and p.k * p.n > 2**16)
    pack_a = shape.converts or (min(nc, p.n) > 2 * nr and p.m >= shape.rows)
    direct = p.c.column == 1 and p.result.itemsize == shape.nbytes
    sizes = _sizes(p, shape)
    sizes |= {
        "mc": mc,
        "nc": nc,
        "kc": kc,
        "nr": nr,
        "pack_a": int(pack_a),
        "pack_b": int(pack_b),
        "direct_c": int(direct),
        "m_blocks": m_blocks,
        "n_blocks": n_blocks,
    }
    tall = -(-mc // shape.rows) * shape.rows if pack_a else 0
    scratch = kc * (nr + tall) * shape.nbytes
    unit_flops = 2.0 * min(mc, p.m) * min(nc, p.n) * p.k
    cost = max(unit_flops / _FLOPS_PER_NS[shape.vector_bytes], 5.0)
    return Plan(product_symbol(shape), sizes, m_blocks * n_blocks * batches, cost, scratch)


def _depth(p: Product, shape: Shape) -> int:
    """How much of k is done at a time."""
    if p.result.itemsize != shape.nbytes:
        return max(p.k, 1)
    most = _DEPTH_BYTES // shape.nbytes
    parts = -(-p.k // most) or 1
    return max(-(-p.k // parts), 1)


def _blocks(p: Product, shape: Shape, batches: int, nr: int) -> tuple[int, int]:
    """Rows and columns of a block: as large as the caches like, as small as the threads need."""
    tall = _BLOCK_TILES * shape.rows
    if p.result.itemsize != shape.nbytes:
        fits = _SCRATCH_BYTES // (max(p.k, 1) * shape.nbytes) // shape.rows * shape.rows
        tall = max(min(tall, fits), shape.rows)
    m_blocks, n_blocks = -(-p.m // tall) or 1, -(-p.n // _BLOCK_COLUMNS) or 1
    wanted = 4 * available_cores() if batches * p.multiply_adds >= _SHARED_FROM else 1

    def extent(size: int, blocks: int, step: int) -> int:
        return max(-(-size // (blocks * step)), 1) * step

    while m_blocks * n_blocks * batches < wanted:
        mc, nc = extent(p.m, m_blocks, shape.rows), extent(p.n, n_blocks, nr)
        # Wide blocks share the packing of A, tall ones that of B, which costs more.
        if nc > 4 * nr or (nc > nr and mc <= 4 * shape.rows):
            n_blocks *= 2
        elif mc > 4 * shape.rows:
            m_blocks *= 2
        else:
            break
    return extent(p.m, m_blocks, shape.rows), extent(p.n, n_blocks, nr)


def _plan_gemv(p: Product, shape: Shape, batches: int) -> Plan:
    row_ns = max(p.k * shape.source_bytes / _BYTES_PER_NS, 1.0)
    # Every unit copies x once, so a unit has enough rows to make that cheap.
    mc = max(int(20_000 / row_ns), 16)
    m_blocks = -(-p.m // mc) or 1
    sizes = _sizes(p, shape) | {"mc": mc, "m_blocks": m_blocks}
    cost = row_ns * min(mc, p.m)
    return Plan(gemv_symbol(shape), sizes, m_blocks * batches, cost, max(p.k, 1) * shape.nbytes)


def _sizes(p: Product, shape: Shape) -> dict[str, int]:
    """The run-time numbers that are given by the product itself."""
    sizes: dict[str, int] = dict.fromkeys(SIZES, 1)
    source, result = shape.source_bytes, shape.result_bytes
    sizes |= {"m": p.m, "n": p.n, "k": p.k}
    sizes |= {"a_row": p.a.row * source, "a_k": p.a.column * source}
    sizes |= {"b_k": p.b.row * source, "b_col": p.b.column * source}
    sizes |= {"c_row": p.c.row * result, "c_col": p.c.column * result}
    missing = 3 - len(p.batch)
    counts = (*(1,) * missing, *p.batch)
    sizes |= {"batch1": max(counts[1], 1), "batch2": max(counts[2], 1)}
    for letter, operand, nbytes in (("a", p.a, source), ("b", p.b, source), ("c", p.c, result)):
        strides = (*(0,) * missing, *operand.batch)
        for i, stride in enumerate(strides):
            sizes[f"{letter}_batch{i}"] = stride * nbytes
    return sizes
