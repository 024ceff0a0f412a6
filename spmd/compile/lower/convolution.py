"""Rules for convolutions: they become contractions over windows, products, or kernels.

The lhs is A, in place if it needs no padding, else in a padded copy with its dims in the order they
had; the rhs is B. Rows run over the batch and the windows, depth over the input features and the
taps, columns over the output features; all layouts are only strides. A dilated lhs is not spread
out: windows that begin at the same distance from an element (a *phase*) hit elements with the same
taps, so each phase is a contraction of its own that writes every n-th result. A convolution with
one output feature (per group) has no product in it, and is a kernel with a sum over the taps.

A convolution that is one contraction, and whose features come last, may have an epilogue: it is
done to rows of results that are in a cache. They are in memory then, where the epilogue's own
result may take their place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from spmd.base.record import record, replace
from spmd.compile.expressions.index_map import strides_of
from spmd.compile.expressions.scalar_ops import storage_dtype
from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.dtypes import DTYPES
from spmd.compile.kernel.ir import Kernel
from spmd.compile.kernel.matmul import (
    NO_EPILOGUE,
    Operand,
    Product,
    Result,
    argument_maps,
    product_dtype,
    store_epilogue,
)
from spmd.compile.kernel.window_contraction import Contraction, Dims, dims_of, lies_in_order
from spmd.compile.lower.epilogues import Follower, with_epilogue
from spmd.compile.lower.in_place import read_in_place
from spmd.compile.lower.kernels import launch
from spmd.compile.lower.lowering import Lowering, host, rule
from spmd.compile.lower.matmul import allows_tf32
from spmd.compile.lower.steps import Contract, Launch, Multiply, Ref
from spmd.core.aval import ShapedArray
from spmd.core.ir import Eqn
from spmd.lax.conv import windows_of
from spmd.lax.conv_dims import Windows

# Taps and input features up to which a kernel's sum is written out.
_UNROLLED = 32


@rule("conv_general_dilated")
def conv_general_dilated(lowering: Lowering, eqn: Eqn) -> None:
    """A convolution, phase by phase, after bringing operands to where they can be read."""
    lhs, rhs = (v.aval for v in eqn.invars)
    out = eqn.outvars[0].aval
    names = [storage_dtype(aval.dtype) for aval in (lhs, rhs, out)]
    if None in names or "bool" in names or not lhs.size or not rhs.size:
        host(lowering, eqn)
        return
    _Convolution(lowering, eqn).write()


def result_of(eqn: Eqn) -> tuple[Result, str] | None:
    """The layout of a convolution's result and its dtype; None if it can have no epilogue."""
    avals = (*(v.aval for v in eqn.invars), eqn.outvars[0].aval)
    names = [storage_dtype(aval.dtype) for aval in avals]
    numbers, ndim = eqn.params["dimension_numbers"], avals[0].ndim
    columns = avals[2].shape[numbers.out_spec[1]]
    grouped = eqn.params["feature_group_count"] * eqn.params["batch_group_count"] > 1
    lhs_dtype, _, out_dtype = names
    if lhs_dtype is None or out_dtype is None or not all(aval.size for aval in avals) or grouped:
        return None
    wide = product_dtype(lhs_dtype, out_dtype) if columns > 1 else None
    if wide is None or out_dtype != wide or numbers.out_spec[1] != ndim - 1:
        return None
    windows = windows_of(avals[1].shape, eqn.params)
    parts = [phases(windows, d, avals[2].shape[k]) for d, k in enumerate(numbers.out_spec[2:])]
    if any(len(p) > 1 or not p[0].taps for p in parts):
        return None
    lhs, out = (
        _laid_out(aval, spec)
        for aval, spec in ((avals[0], numbers.lhs_spec), (avals[2], numbers.out_spec))
    )
    strides = _packed(_widened(lhs[0], _pads(parts, lhs[0])), _order(lhs[1]))
    rows = _row_dims([p[0] for p in parts], lhs[0][0], strides, out[1])
    if not lies_in_order(rows, columns):
        return None
    return Result((rows.count, columns), (columns, 1), wide), wide


@with_epilogue("conv_general_dilated")
def convolve_with(follower: Follower) -> bool:
    """A convolution and the group that follows it."""
    found = result_of(follower.head)
    attached = None if found is None else follower.attach(*found, keep=False)
    if attached is None:
        return False
    epilogue, rest = attached
    if not follower.keeps:
        shared = _overwritable(epilogue, rest)
        if shared is not None:
            follower.lowering.targets[follower.result] = shared
    _Convolution(follower.lowering, follower.head, follower).write()
    return True


def _overwritable(epilogue: Kernel, rest: Sequence[Ref]) -> Ref | None:
    """The place of a result of an epilogue that may be written over the epilogue's operand."""
    maps = argument_maps(epilogue)
    for number, (ref, arg) in enumerate(zip(rest, epilogue.args[1:], strict=True), 1):
        like = (arg.dtype, maps[number]) == (epilogue.args[0].dtype, maps[0])
        if arg.role == "out" and like and 0 in read_in_place(epilogue, number):
            return ref
    return None


@record
class Array:
    """The layout of an operand or result: its sizes and strides in canonical order of dims."""

    ref: Ref
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements its memory has (all arrays here are contiguous in some order)."""
        return math.prod(self.shape)


# ---- phases ------------------------------------------------------------------------------------


@record
class Phase:
    """Along one spatial dim: the windows `first`, `first + period`, ... and their taps.

    Window q of the phase reads elements `start + q * stride + t * step` of the lhs for its taps
    `tap + t * tap_step`, with t below `taps`.
    """

    first: int
    period: int
    windows: int
    stride: int
    start: int
    step: int
    tap: int
    tap_step: int
    taps: int


def phases(windows: Windows, dim: int, count: int) -> list[Phase]:
    """The phases of the `count` windows along one dim."""
    base, stride = windows.base_dilation[dim], windows.strides[dim]
    dilation, low = windows.dilation[dim], windows.padding[dim][0]
    period = base // math.gcd(base, stride)
    tap_step = base // math.gcd(base, dilation)
    found = []
    for first in range(min(period, count)):
        hit = [
            k
            for k in range(windows.sizes[dim])
            if (first * stride + k * dilation - low) % base == 0
        ]
        tap = hit[0] if hit else 0
        found.append(
            Phase(
                first,
                period,
                -(-(count - first) // period),
                period * stride // base,
                (first * stride + tap * dilation - low) // base,
                tap_step * dilation // base,
                tap,
                tap_step,
                len(hit),
            )
        )
    return found


def reach(parts: Sequence[Phase], size: int) -> tuple[int, int]:
    """The number of elements before and behind a dim of the lhs that its windows reach."""
    parts = [p for p in parts if p.taps]
    low = min((p.start for p in parts), default=0)
    last = [p.start + (p.windows - 1) * p.stride + (p.taps - 1) * p.step for p in parts]
    return max(-low, 0), max(max(last, default=0) - size + 1, 0)


# ---- layouts -----------------------------------------------------------------------------------


def _laid_out(aval: ShapedArray, spec: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes and strides of an array in canonical order of dims."""
    strides = strides_of(aval.shape)
    return tuple(aval.shape[d] for d in spec), tuple(strides[d] for d in spec)


def _order(strides: Sequence[int]) -> list[int]:
    """Dims as they lie, the outermost first."""
    return sorted(range(len(strides)), key=lambda d: -strides[d])


def _packed(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides of an array whose dims lie in `order`."""
    strides = [0] * len(shape)
    for d, stride in zip(order, strides_of([shape[d] for d in order]), strict=True):
        strides[d] = stride
    return tuple(strides)


def _pads(parts: Sequence[Sequence[Phase]], shape: Sequence[int]) -> list[tuple[int, int]]:
    """How far windows reach beyond each dim of the lhs."""
    return [(0, 0), (0, 0), *(reach(p, n) for p, n in zip(parts, shape[2:], strict=True))]


def _widened(shape: Sequence[int], pads: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(low + size + high for size, (low, high) in zip(shape, pads, strict=True))


def _row_dims(
    combination: Sequence[Phase], images: int, a: Sequence[int], c: Sequence[int]
) -> Dims:
    """The rows of a phase with strides in lhs and result, those first that are far apart in lhs."""
    rows = [(images, a[0], c[0])]
    rows += [(p.windows, p.stride * a[d], p.period * c[d]) for d, p in enumerate(combination, 2)]
    return dims_of(sorted(rows, key=lambda dim: -dim[1]))


# ---- copies ------------------------------------------------------------------------------------


def copied(
    lowering: Lowering,
    source: Array,
    order: Sequence[int],
    dtype: str,
    pads: Sequence[tuple[int, int]] | None = None,
) -> Array:
    """A copy whose dims lie in `order`, converted, with zeros around."""
    pads = pads or [(0, 0)] * len(source.shape)
    shape = _widened(source.shape, pads)
    aval = ShapedArray(shape, DTYPES[dtype].numpy)
    target = Array(lowering.temp(aval), dtype, shape, _packed(shape, order))
    move(lowering, source, target, order, pads)
    return target


def move(
    lowering: Lowering,
    source: Array,
    target: Array,
    order: Sequence[int],
    pads: Sequence[tuple[int, int]],
) -> None:
    """Fill `target` with `source` and zeros around it, dims of the space in `order`."""
    b = Builder([target.shape[d] for d in order], ())
    args = b.arg(source.dtype, source.size), b.arg(target.dtype, target.size, "out")
    offset = -sum(low * s for (low, _), s in zip(pads, source.strides, strict=True))
    with b.row():
        guard = None
        for place, d in enumerate(order):
            low, high = pads[d]
            for amount, op, bound in ((low, "ge", low), (high, "lt", low + source.shape[d])):
                if amount:
                    test = b.op(op, b.iota(place, "i64"), b.const(bound, "i64"))
                    guard = test if guard is None else b.op("and", guard, test)
        value = b.load(args[0], [source.strides[d] for d in order], offset, guard=guard)
        value = b.convert(value, target.dtype)
        b.store(args[1], [target.strides[d] for d in order], value)
    name = "pad" if any(low or high for low, high in pads) else "repack"
    lowering.steps.append(Launch(b.build(), (source.ref, target.ref), name))


# ---- the whole ---------------------------------------------------------------------------------


class _Convolution:
    """One equation on its way to steps."""

    def __init__(self, lowering: Lowering, eqn: Eqn, follower: Follower | None = None):
        self.lowering = lowering
        self.eqn = eqn
        self.follower = follower
        numbers = eqn.params["dimension_numbers"]
        lhs, rhs, self.out = (
            self._array(ref, atom.aval, spec)
            for ref, atom, spec in (
                (lowering.ref(eqn.invars[0]), eqn.invars[0], numbers.lhs_spec),
                (lowering.ref(eqn.invars[1]), eqn.invars[1], numbers.rhs_spec),
                (lowering.place(eqn.outvars[0]), eqn.outvars[0], numbers.out_spec),
            )
        )
        self.lhs, self.rhs = lhs, rhs
        # TF32 has all numbers of 16-bit floats.
        self.tf32 = allows_tf32(eqn) or {lhs.dtype, rhs.dtype} <= {"bf16", "f16"}
        self.feature_groups = eqn.params["feature_group_count"]
        self.batch_groups = eqn.params["batch_group_count"]
        self.groups = self.feature_groups * self.batch_groups
        self.columns = self.out.shape[1] // self.groups
        windows = windows_of(eqn.invars[1].aval.shape, eqn.params)
        self.phases = [phases(windows, d, count) for d, count in enumerate(self.out.shape[2:])]
        self.low = [0] * len(self.phases)

    @staticmethod
    def _array(ref: Ref, aval: Any, spec: Sequence[int]) -> Array:
        dtype = storage_dtype(aval.dtype)
        assert dtype is not None
        return Array(ref, dtype, *_laid_out(aval, spec))

    def write(self) -> None:
        """All steps."""
        wide = product_dtype(self.lhs.dtype, self.out.dtype) if self.columns > 1 else None
        self.pad(wide or self.lhs.dtype)
        target = self.out
        if wide is not None:
            self.prepare(wide)
        for combination in itertools.product(*self.phases):
            if wide is not None:
                self.contract(combination, wide)
            else:
                self.loop_nest(combination)
        if self.out is not target:
            order = _order(target.strides)
            move(self.lowering, self.out, target, order, [(0, 0)] * len(order))

    def pad(self, dtype: str) -> None:
        """Bring the lhs to where windows that reach beyond it read zeros."""
        pads = _pads(self.phases, self.lhs.shape)
        if dtype == self.lhs.dtype and not any(low or high for low, high in pads):
            return
        self.lhs = copied(self.lowering, self.lhs, _order(self.lhs.strides), dtype, pads)
        self.low = [low for low, _ in pads[2:]]

    def prepare(self, dtype: str) -> None:
        """Make columns contiguous in the rhs and the result, and both of the dtype of the sums."""
        ndim = len(self.rhs.shape)
        features_last = (0, *range(2, ndim), 1)
        if self.rhs.dtype != dtype or (self.columns > 1 and self.rhs.strides[0] != 1):
            self.rhs = copied(self.lowering, self.rhs, (*range(2, ndim), 1, 0), dtype)
        if self.out.dtype != dtype or (self.columns > 1 and self.out.strides[1] != 1):
            shape = self.out.shape
            ref = self.lowering.temp(ShapedArray(shape, DTYPES[dtype].numpy))
            self.out = Array(ref, dtype, shape, _packed(shape, features_last))

    # ---- one phase ----

    def dims(self, combination: Sequence[Phase]) -> tuple[Dims, Dims]:
        """Rows and depth of a phase, those first that are far apart in the lhs."""
        a, b, c = self.lhs.strides, self.rhs.strides, self.out.strides
        depth = [(self.rhs.shape[1], a[1], b[1])]
        depth += [(p.taps, p.step * a[d], p.tap_step * b[d]) for d, p in enumerate(combination, 2)]
        depth.sort(key=lambda dim: -dim[1])
        rows = _row_dims(combination, self.lhs.shape[0] // self.batch_groups, a, c)
        return rows, dims_of(depth)

    def offsets(self, combination: Sequence[Phase]) -> tuple[int, int, int]:
        """The start of a phase in lhs, rhs and result, in elements."""
        a, b, c = self.lhs.strides, self.rhs.strides, self.out.strides
        taps = [p for p in combination if p.taps]
        if len(taps) < len(combination):  # reads nothing
            return 0, 0, sum(p.first * c[d] for d, p in enumerate(combination, 2))
        return (
            sum((p.start + self.low[d - 2]) * a[d] for d, p in enumerate(combination, 2)),
            sum(p.tap * b[d] for d, p in enumerate(combination, 2)),
            sum(p.first * c[d] for d, p in enumerate(combination, 2)),
        )

    def group_strides(self) -> tuple[int, int, int]:
        """From one group to the next in lhs, rhs and result."""
        if self.batch_groups > 1:
            first = self.lhs.strides[0] * (self.lhs.shape[0] // self.batch_groups)
        else:
            first = self.lhs.strides[1] * self.rhs.shape[1]
        return first, self.rhs.strides[0] * self.columns, self.out.strides[1] * self.columns

    def contract(self, combination: Sequence[Phase], dtype: str) -> None:
        """A phase as a contraction; as a product if rows and depth are one dim each."""
        rows, depth = self.dims(combination)
        nbytes = DTYPES[dtype].numpy.itemsize
        lhs_at, rhs_at, out_at = self.offsets(combination)
        refs = (
            self.lhs.ref.shifted(lhs_at * nbytes),
            self.rhs.ref.shifted(rhs_at * nbytes),
            self.out.ref.shifted(out_at * nbytes),
        )
        a, b, c = self.group_strides() if self.groups > 1 else (0, 0, 0)
        if len(rows.sizes) <= 1 and len(depth.sizes) <= 1:
            self.multiply(rows, depth, dtype, refs, (a, b, c))
            return
        groups = (self.groups, a, b, c)
        made = Contraction(dtype, rows, depth, self.columns, groups, tf32=self.tf32)
        if self.follower is not None:
            epilogue, rest = self.attached(rows, dtype, keep=False)
            made = replace(made, epilogue=epilogue)
            refs = (*refs, *rest)
        self.lowering.steps.append(Contract(made, refs, self.name, self.eqn.source))

    def attached(self, rows: Dims, dtype: str, keep: bool) -> tuple[Kernel, tuple[Ref, ...]]:
        """The epilogue, and its arguments behind the first."""
        assert self.follower is not None
        result = Result((rows.count, self.columns), (self.columns, 1), dtype)
        attached = self.follower.attach(result, dtype, keep)
        assert attached is not None, "`result_of` says what can be attached to"
        return attached

    @property
    def name(self) -> str:
        """The name of its step."""
        return "conv" if self.follower is None else self.follower.name("conv")

    def multiply(
        self, rows: Dims, depth: Dims, dtype: str, refs: Any, groups: Sequence[int]
    ) -> None:
        """A product of matrices: windows of one element, or as large as the lhs."""
        row, along = (
            (*d.sizes, *d.first, *d.second) if d.sizes else (1, 0, 0) for d in (rows, depth)
        )
        batch = (self.groups,) if self.groups > 1 else ()
        made = Product(
            m=row[0],
            n=self.columns,
            k=along[0],
            a=Operand(dtype, row[1], along[1], tuple(groups[:1]) if batch else ()),
            b=Operand(dtype, along[2], self.rhs.strides[0], tuple(groups[1:2]) if batch else ()),
            carried=dtype,
            epilogue=NO_EPILOGUE,
            batch=batch,
            tf32=self.tf32,
        )
        if self.follower is not None:
            epilogue, rest = self.attached(rows, dtype, self.follower.keeps)
            refs = (*refs[:2], *rest)
        else:
            strides = (*(groups[2:] if batch else ()), row[2], self.out.strides[1])
            epilogue = store_epilogue(batch, made.m, made.n, dtype, dtype, strides)
        made = replace(made, epilogue=epilogue)
        self.lowering.steps.append(Multiply(made, refs, self.name, self.eqn.source))

    # ---- kernels ----

    def loop_nest(self, combination: Sequence[Phase]) -> None:
        """A phase as a kernel: for each element of the result the sum over features and taps."""
        a, b, c = self.lhs.strides, self.rhs.strides, self.out.strides
        group_a, group_b, group_c = self.group_strides()
        # (size, stride in lhs, in rhs, in the result)
        outer = [
            (self.lhs.shape[0] // self.batch_groups, a[0], 0, c[0]),
            (self.groups, group_a, group_b, group_c),
            (self.columns, 0, b[0], c[1]),
        ]
        inner = [(self.rhs.shape[1], a[1], b[1])]
        for d, p in enumerate(combination, 2):
            outer.append((p.windows, p.stride * a[d], 0, p.period * c[d]))
            inner.append((p.taps, p.step * a[d], p.tap_step * b[d]))
        outer = sorted((dim for dim in outer if dim[0] != 1), key=lambda dim: -dim[3])
        inner = sorted((dim for dim in inner if dim[0] != 1), key=lambda dim: -dim[1])
        self.write_kernel(outer, inner, self.offsets(combination))

    def write_kernel(
        self, outer: Sequence[Any], inner: Sequence[Any], offsets: tuple[int, int, int]
    ) -> None:
        """The kernel of some outer dims and dims that are summed over."""
        taps = math.prod(dim[0] for dim in inner)
        unrolled = taps <= _UNROLLED
        builder = Builder([d[0] for d in outer], () if unrolled else [d[0] for d in inner])
        lhs, rhs = (builder.arg(x.dtype, x.size) for x in (self.lhs, self.rhs))
        # Several phases write one result, each a part of it.
        target = builder.arg(self.out.dtype, self.out.size, "out")
        carried = DTYPES[self.out.dtype].carrier

        def term(at: tuple[int, int], further: Sequence[Any]) -> int:
            values = (
                builder.load(lhs, [*(d[1] for d in outer), *(d[1] for d in further)], at[0]),
                builder.load(rhs, [*(d[2] for d in outer), *(d[2] for d in further)], at[1]),
            )
            return builder.op("mul", *(builder.convert(v, carried) for v in values))

        strides = [d[3] for d in outer]
        if unrolled:
            with builder.row():
                total = None
                for index in itertools.product(*(range(d[0]) for d in inner)):
                    at = tuple(
                        offsets[k] + sum(i * d[k + 1] for i, d in zip(index, inner, strict=True))
                        for k in range(2)
                    )
                    value = term((at[0], at[1]), ())
                    total = value if total is None else builder.op("add", total, value)
                total = builder.const(0, carried) if total is None else total
                found = builder.convert(total, self.out.dtype)
                builder.store(target, strides, found, offsets[2])
        else:
            with builder.row():
                total = builder.reduce("add", term(offsets[:2], inner))
            with builder.point():
                found = builder.convert(total, self.out.dtype)
                builder.store(target, strides, found, offsets[2])
        refs = (self.lhs.ref, self.rhs.ref, self.out.ref)
        launch(self.lowering, Launch(builder.build(), refs, "conv", self.eqn.source))
