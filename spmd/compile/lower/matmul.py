"""Rules for products: `dot_general` becomes a `Product`, or a loop nest where it cannot.

A `dot_general` is a batch of products of matrices whose rows, columns and depth are groups of
operand dims. Groups that one stride walks through become one dim; a small kernel repacks the others
first. Transposes of operands cost nothing: they are strides. Products of complex numbers are
ordinary kernels that reduce over the depth, and so are those of integers on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from spmd.base.record import record, replace
from spmd.compile.expressions.expression import need_dtype, storage_dtype
from spmd.compile.expressions.index_map import strides_of
from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.dtypes import kind
from spmd.compile.kernel.ir import Kernel
from spmd.compile.kernel.matmul import (
    NO_EPILOGUE,
    Operand,
    Product,
    Result,
    product_dtype,
    store_epilogue,
)
from spmd.compile.lower.epilogues import Follower, with_epilogue
from spmd.compile.lower.kernels import launch
from spmd.compile.lower.lowering import Lowering, host, rule
from spmd.compile.lower.steps import Launch, Multiply, Ref
from spmd.core.aval import ShapedArray
from spmd.core.ir import Atom, Eqn
from spmd.lax.dot import DimensionNumbers

MAX_BATCH_DIMS = 3


@record
class Dim:
    """One dim of a product: its size, and the stride along it in each of some arrays."""

    size: int
    strides: tuple[int, ...]


def collapse(dims: Sequence[Dim]) -> list[Dim]:
    """Join neighbouring dims that every array walks through as one; drop those of size 1."""
    out: list[Dim] = []
    for d in dims:
        if d.size == 1:
            continue
        last = out[-1] if out else None
        if last is not None and all(
            a == b * d.size for a, b in zip(last.strides, d.strides, strict=True)
        ):
            out[-1] = Dim(last.size * d.size, d.strides)
        else:
            out.append(d)
    return out


@rule("dot_general")
def dot_general(lowering: Lowering, eqn: Eqn) -> None:
    """One product step, after repacking operands whose dims do not collapse."""
    out = eqn.outvars[0]
    view = view_product(eqn)
    if view is None:
        if not _loop_nest(lowering, eqn):
            host(lowering, eqn)
        return
    refs = view.operands(lowering)
    refs = (*refs, lowering.place(out))
    made = _stored(view.product, view.result)
    lowering.steps.append(Multiply(made, refs, "dot", eqn.source))


@lru_cache(maxsize=1024)
def _stored(made: Product, result: Result) -> Product:
    """A product whose epilogue only stores it; the layers of a network share one."""
    epilogue = store_epilogue(
        made.batch, made.m, made.n, made.carried, result.dtype, result.strides
    )
    return replace(made, epilogue=epilogue)


@lru_cache(maxsize=1024)
def _with_epilogue(made: Product, epilogue: Kernel) -> Product:
    """A product and its epilogue, as one object for all that are equal."""
    return replace(made, epilogue=epilogue)


@with_epilogue("dot_general")
def multiply_with(follower: Follower) -> bool:
    """A product and the group that follows it."""
    view = view_product(follower.head)
    assert view is not None, "the pass attaches to products only"
    found = follower.attach(view.result, view.product.carried, follower.keeps)
    if found is None:  # repacked operands may cut the result in other ways
        return False
    epilogue, rest = found
    refs = view.operands(follower.lowering)
    made = _with_epilogue(view.product, epilogue)
    step = Multiply(made, (*refs, *rest), follower.name("dot"), follower.source)
    follower.lowering.steps.append(step)
    return True


@record(frozen=False)
class View:
    """A `dot_general` as a product, still without epilogue, and where its result lies."""

    sides: tuple[_Side, _Side]
    product: Product
    result: Result

    def operands(self, lowering: Lowering) -> tuple[Ref, Ref]:
        """The places of A and B, after writing the steps that repack them."""
        left, right = (side.place(lowering) for side in self.sides)
        return left, right


def result_of(eqn: Eqn) -> tuple[Result, str] | None:
    """The layout of a product's result and the dtype of its sums; None if it is no product."""
    view = view_product(eqn)
    return None if view is None else (view.result, view.product.carried)


def view_product(eqn: Eqn) -> View | None:
    """How an equation is a product; None if its dtypes are not those of one."""
    lhs, rhs = eqn.invars
    how = eqn.params["dimension_numbers"], allows_tf32(eqn), sums_integers(eqn)
    found = _view_of(lhs.aval, rhs.aval, eqn.outvars[0].aval, *how)
    if found is None:
        return None
    left, right, product, result = found
    return View((_Side(lhs, left), _Side(rhs, right)), product, result)


def allows_tf32(eqn: Eqn) -> bool:
    """Whether the factors of a product or convolution may be rounded to TF32."""
    return getattr(eqn.params["precision"], "name", "") == "TF32_TF32_F32"


def sums_integers(eqn: Eqn) -> bool:
    """Whether a product of integers has tiles: a platform's pass has written their sums' dtype."""
    sums = getattr(eqn.params["precision"], "accumulation_type", None)
    return sums is not None and np.dtype(sums).kind in "iu"


@lru_cache(maxsize=1024)
def _view_of(
    lhs: ShapedArray,
    rhs: ShapedArray,
    out: ShapedArray,
    numbers: DimensionNumbers,
    tf32: bool,
    tiles_integers: bool,
) -> tuple[_Strides, _Strides, Product, Result] | None:
    """How operands of these types are multiplied, and how each is walked through."""
    source, result = (storage_dtype(aval.dtype) for aval in (lhs, out))
    carried = product_dtype(source, result, tiles_integers) if source and result else None
    if carried is None:
        return None
    sides = (_Strides(lhs), _Strides(rhs))
    free = [numbers.free(s, x.ndim) for s, x in enumerate((lhs, rhs))]
    orders = (
        (*numbers.batch[0], *free[0], *numbers.contract[0]),
        (*numbers.batch[1], *numbers.contract[1], *free[1]),
    )
    found = _collapsed(out, sides, numbers, free, carried)
    if found is None:
        for side, order in zip(sides, orders, strict=True):
            side.repack(order)
        found = _collapsed(out, sides, numbers, free, carried)
        assert found is not None, "repacked operands collapse"
    made, where = found
    return *sides, replace(made, tf32=True) if tf32 else made, where


class _Strides:
    """The strides of an operand by its original dims, and how it is repacked, if it is."""

    def __init__(self, aval: ShapedArray):
        self.shape = aval.shape
        self.dtype = need_dtype(aval.dtype)
        self.strides = strides_of(self.shape)
        self.order: tuple[int, ...] | None = None

    def repack(self, order: Sequence[int]) -> None:
        """Let the operand be copied so that its dims lie in the given order."""
        self.order = tuple(order)
        strides = [0] * len(order)
        for d, stride in zip(order, strides_of([self.shape[d] for d in order]), strict=True):
            strides[d] = stride
        self.strides = tuple(strides)


@record
class _Side:
    """One operand, and how it is walked through."""

    atom: Atom
    layout: _Strides

    def place(self, lowering: Lowering) -> Ref:
        """The place of the operand, after writing the step that repacks it."""
        aval, order, shape = self.atom.aval, self.layout.order, self.layout.shape
        if order is None:
            return lowering.ref(self.atom)
        dtype, before = self.layout.dtype, strides_of(shape)
        b = Builder([shape[d] for d in order], ())
        source, target = b.arg(dtype, aval.size), b.arg(dtype, aval.size, "out")
        with b.row():
            value = b.load(source, [before[d] for d in order])
            b.store(target, [self.layout.strides[d] for d in order], value)
        place = lowering.temp(aval)
        lowering.steps.append(Launch(b.build(), (lowering.ref(self.atom), place), "repack"))
        return place


def _collapsed(
    out: ShapedArray,
    sides: Sequence[_Strides],
    numbers: DimensionNumbers,
    free: Sequence[Sequence[int]],
    carried: str,
) -> tuple[Product, Result] | None:
    """The product and where its result lies, if all groups of dims collapse."""
    a, b = sides
    c_strides = strides_of(out.shape)
    batch_pairs = list(zip(*numbers.batch, strict=True))
    rows, columns = free
    count = len(batch_pairs)
    batch = collapse(
        [
            Dim(a.shape[i], (a.strides[i], b.strides[j], c_strides[k]))
            for k, (i, j) in enumerate(batch_pairs)
        ]
    )
    m = collapse(
        [Dim(a.shape[i], (a.strides[i], c_strides[count + k])) for k, i in enumerate(rows)]
    )
    first = count + len(rows)
    n = collapse(
        [Dim(b.shape[j], (b.strides[j], c_strides[first + k])) for k, j in enumerate(columns)]
    )
    depth = collapse(
        [
            Dim(a.shape[i], (a.strides[i], b.strides[j]))
            for i, j in zip(*numbers.contract, strict=True)
        ]
    )
    # Rows and columns that do not collapse are further batches, of which one operand has one only.
    while len(m) > 1:
        d = m.pop(0)
        batch.append(Dim(d.size, (d.strides[0], 0, d.strides[1])))
    while len(n) > 1:
        d = n.pop(0)
        batch.append(Dim(d.size, (0, d.strides[0], d.strides[1])))
    if len(batch) > MAX_BATCH_DIMS or len(depth) > 1:
        return None
    row, column, along = (group[0] if group else Dim(1, (0, 0)) for group in (m, n, depth))
    left, right = (
        Operand(side.dtype, *strides, tuple(d.strides[k] for d in batch))
        for k, (side, strides) in enumerate(
            ((a, (row.strides[0], along.strides[0])), (b, (along.strides[1], column.strides[0])))
        )
    )
    found = Product(
        m=row.size,
        n=column.size,
        k=along.size if math.prod(a.shape) and math.prod(b.shape) else 0,
        a=left,
        b=right,
        carried=carried,
        epilogue=NO_EPILOGUE,
        batch=tuple(d.size for d in batch),
    )
    strides = (*(d.strides[2] for d in batch), row.strides[1], column.strides[1])
    dtype = need_dtype(out.dtype)
    return found, Result((*found.batch, found.m, found.n), strides, dtype)


# ---- products that are loop nests ----------------------------------------------------------------


def _loop_nest(lowering: Lowering, eqn: Eqn) -> bool:
    """Write a product as a kernel that sums over the contracted dims; says whether it could."""
    (lhs, rhs), (out,) = eqn.invars, eqn.outvars
    numbers: DimensionNumbers = eqn.params["dimension_numbers"]
    source, result = (storage_dtype(v.aval.dtype) for v in (lhs, out))
    if source is None or result is None or "b" in (kind(source), kind(result)):
        return False
    shapes, strides = (
        [v.aval.shape for v in (lhs, rhs)],
        [strides_of(v.aval.shape) for v in eqn.invars],
    )
    free = [numbers.free(s, len(shape)) for s, shape in enumerate(shapes)]
    inner = [shapes[0][d] for d in numbers.contract[0]] or [1]
    b = Builder(out.aval.shape, inner)
    args = [b.arg(source, v.aval.size) for v in (lhs, rhs)]
    target = b.arg(result, out.aval.size, "out")
    none = [[0] * len(free[s]) for s in range(2)]
    maps = []
    for s in range(2):
        own = [strides[s][d] for d in free[s]]
        batch = [strides[s][d] for d in numbers.batch[s]]
        outer = [*batch, *(own if s == 0 else none[0]), *(own if s == 1 else none[1])]
        maps.append([*outer, *([strides[s][d] for d in numbers.contract[s]] or [0])])
    with b.row():
        values = [
            b.convert(b.load(arg, where), result) for arg, where in zip(args, maps, strict=True)
        ]
        total = b.reduce("add", b.op("mul", *values))
    with b.point():
        b.store(target, strides_of(out.aval.shape), total)
    refs = (*(lowering.ref(v) for v in eqn.invars), lowering.place(out))
    launch(lowering, Launch(b.build(), refs, "dot", eqn.source))
    return True
