"""Precompile what depends on the processor only into the disk cache.

The one idea: the native runtime and the code of matrix products, window contractions, reductions
and vector functions are compiled once on a machine, whatever it computes. `prepare` requests them
as programs do: sizes and layouts go through the planners, which name the code for these. So it
prepares the code that programs will look for, however the code generator changes.

A program still compiles its own kernels and the epilogues of its products.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import product as pairs

from spmd.base.errors import ArgumentError
from spmd.base.record import record
from spmd.compile.cpu.assemble.compile_callees import cpu_target
from spmd.compile.cpu.assemble.generic_kernels_ir import ELEMENTS
from spmd.compile.cpu.math.table import VECTOR_ELEMENTS, shared_functions
from spmd.compile.cpu.matmul.plan import plan_packing, plan_product, prefers_packed
from spmd.compile.cpu.matmul.window_plan import plan_contraction
from spmd.compile.cpu.sort.network import COLUMN_NETWORKS
from spmd.compile.cpu.sort.steps import sort_text
from spmd.compile.cpu.sort.value_steps import can_compress, values_text
from spmd.compile.dispatch import eager_kernels
from spmd.compile.kernel.matmul import Operand, Product, product_dtype, store_epilogue
from spmd.compile.kernel.window_contraction import Contraction, Dims
from spmd.compile.native.cpython.entry_point import entry_point_code
from spmd.compile.native.cpython.tree_walks import native_walks
from spmd.compile.native.llvm.compiler import host, loader
from spmd.compile.native.llvm.modules import symbols_of
from spmd.compile.native.llvm.object_cache import object_cache
from spmd.compile.native.llvm.shared_functions import called_by_text, shared_text
from spmd.compile.native.llvm.vectors import vectors
from spmd.compile.native.program.reduction_kernels import reduce_kernels
from spmd.compile.native.program.run_layout import PARTS
from spmd.compile.native.runtime.load import load_parts, runtime

# The dtypes of elements of products.
PRODUCTS = ("f32", "bf16", "f16", "f64")
WINDOWS = ("f32", "f64")
REDUCED = ("float32", "float64", "bfloat16", "int32")


@record
class Part:
    """A prepared part: its texts, how many of them had to be compiled, the seconds."""

    name: str
    texts: int
    compiled: int
    seconds: float


def prepare() -> Iterator[Part]:
    """Compile all that is not there yet, part by part; ArgumentError where it cannot be kept."""
    _need_folder()
    yield _part("runtime", _load_runtime)
    for dtype in PRODUCTS:
        yield _part(f"products of {dtype}", lambda dtype=dtype: _store(product_texts(dtype)))
    for dtype in WINDOWS:
        yield _part(f"windows of {dtype}", lambda dtype=dtype: _store(window_texts(dtype)))
    yield _part("functions", lambda: _store(function_texts()))
    yield _part("sorts", lambda: _store(sort_texts()))
    yield _part("reductions", _load_reductions)
    _need_folder()


def _need_folder() -> None:
    problem = object_cache.problem()
    if problem is not None:
        raise ArgumentError(
            f"prepare: {problem}. Name a folder of your own with SPMD_CACHE_DIR (or --cache-dir); "
            "programs find what is prepared if they run with the same one."
        )


def _part(name: str, make: Callable[[], int]) -> Part:
    start, before = time.perf_counter(), loader.compiled
    texts = make()
    return Part(name, texts, loader.compiled - before, time.perf_counter() - start)


def _store(texts: dict[str, None]) -> int:
    loader.store_texts(list(texts), optimize=True)
    return len(texts)


def _load_runtime() -> int:
    loaded = [
        load() for load in (runtime, native_walks, entry_point_code, eager_kernels.blocks_code)
    ]
    load_parts(PARTS)
    return len(loaded) + len(PARTS)


def _load_reductions() -> int:
    """Sums between devices, and those of eager arrays."""
    between = [(op, dtype, dtype, False) for op, dtype in pairs(("sum", "max"), REDUCED)]
    reduce_kernels(between)
    eager = list(pairs(("add", "max"), ELEMENTS, (True, False)))
    for op, dtype, along_rows in eager:
        eager_kernels.reducer_code(op, dtype, along_rows)
    return len(between) + len(eager)


def sort_texts() -> dict[str, None]:
    """The texts of sorting."""
    words = [sort_text(kept) for kept in (False, True)]
    rows = [values_text(*kind) for kind in pairs((32, 64), (0, *COLUMN_NETWORKS))]
    if can_compress():
        rows += [values_text(bits, cut=True) for bits in (32, 64)]
    found = dict.fromkeys((*words, *rows))
    for text in rows:
        found |= dict.fromkeys(_shared_by(text))
    return found


def _shared_by(text: str) -> Iterator[str]:
    """The texts of the shared functions that a text calls, and of those that they call."""
    for symbol in called_by_text(text):
        if symbol not in symbols_of(text):
            called = shared_text(symbol)
            yield called
            yield from _shared_by(called)


# ---- functions of vectors ----


def function_texts() -> dict[str, None]:
    """The texts of the functions that kernels share, for one, two and four registers of lanes."""
    target = cpu_target()
    texts: dict[str, None] = {}
    for element, nbytes in VECTOR_ELEMENTS.items():
        lanes = max(target.vector_bits // (8 * nbytes), 2)
        for width in (lanes, 2 * lanes, 4 * lanes):
            symbols = shared_functions(target, element, width)
            texts |= dict.fromkeys(map(shared_text, symbols))
    return texts


# ---- products ----------------------------------------------------------------------------------

# A tile's height depends on the rows, as long as they are few.
_ROWS = range(1, 57)
# Its width on the columns, in vectors, and on whether the last of these is whole.
_VECTORS = range(1, 16)
# And on whether a product is long, and its depth even.
_DEPTHS = (7, 1024)
# Sizes for the decisions about packing: sizes count little there, and layouts much.
_PACKED_SIZES = ((128, 128, 64), (512, 512, 512), (1024, 1024, 1024), (2048, 64, 512))


def product_texts(dtype: str) -> dict[str, None]:
    """The texts that products of two matrices of a dtype need, for usual sizes and any layout."""
    carried = product_dtype(dtype, dtype) or dtype
    lanes = vectors(carried, host().vector_bytes).lanes
    texts: dict[str, None] = {}
    columns = [v * lanes - less for v in _VECTORS for less in (0, lanes // 2)]
    # Tiles read operands stored in the dtype of the arithmetic; others are packed for them.
    sizes = pairs(_ROWS, columns, _DEPTHS) if dtype == carried else ()
    for m, n, k in sizes:
        texts |= dict.fromkeys(plan_product(_product(dtype, m, n, k)).texts)
        # Of one row, tiles multiply only operands stored by columns.
        if m == 1:
            texts |= dict.fromkeys(plan_product(_product(dtype, m, n, k, b_turned=True)).texts)
    for (m, n, k), a_turned, b_turned in pairs(_shapes(lanes), (False, True), (False, True)):
        made = _product(dtype, m, n, k, a_turned, b_turned)
        texts |= dict.fromkeys(plan_product(made).texts)
        for packed in (prefers_packed(made, rounds) for rounds in (1, 2)):
            if packed is None:
                continue
            reader, packing, _ = packed
            texts |= dict.fromkeys((*plan_product(reader).texts, *plan_packing(packing).texts))
    return texts


def _shapes(lanes: int) -> Iterator[tuple[int, int, int]]:
    """Sizes for which operands in any layout are looked at."""
    yield from _PACKED_SIZES
    for few in (1, 2, 3, 4, 8):
        yield from ((few, 8 * lanes, 512), (512, few, 512), (few, few, 512))


def _product(
    dtype: str, m: int, n: int, k: int, a_turned: bool = False, b_turned: bool = False
) -> Product:
    """A product whose operands lie in rows, or in columns."""
    a = Operand(dtype, *((1, m) if a_turned else (k, 1)))
    b = Operand(dtype, *((1, k) if b_turned else (n, 1)))
    carried = product_dtype(dtype, dtype) or dtype
    return Product(m, n, k, a, b, carried, store_epilogue((), m, n, carried, dtype, (n, 1)))


# ---- contractions over windows -----------------------------------------------------------------

_WINDOW_ROWS = (1, 4, 8, 12, 14, 56, 96, 112, 196, 784, 1024, 4096)


def window_texts(dtype: str) -> dict[str, None]:
    """The texts that contractions over windows of a dtype need."""
    lanes = vectors(dtype, host().vector_bytes).lanes
    texts: dict[str, None] = {}
    for rows, columns in pairs(_WINDOW_ROWS, (lanes // 2, 2 * lanes, 3 * lanes, 8 * lanes)):
        depth = 64
        made = Contraction(
            dtype, Dims((rows,), (depth,), (columns,)), Dims((depth,), (1,), (columns,)), columns
        )
        texts |= dict.fromkeys(plan_contraction(made).texts)
    return texts
