"""Rules for windowed reductions and for the derivatives of pooling by maximum.

All are kernels over the windows. A few taps are written out, one load each; many are a sum (or
maximum) in the kernel. As for convolutions, a dilated operand is not spread out: windows that begin
at the same distance from an element form a phase, and phases of equal size are one kernel that
stores several results. Cotangents of selected elements are not scattered: each element looks at the
windows that it is in, which runs in parallel and adds in a fixed order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from spmd.base import dtypes
from spmd.compile.expressions.index_map import strides_of
from spmd.compile.expressions.scalar_ops import storage_dtype
from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.dtypes import DTYPES, kind
from spmd.compile.lower.convolution import Phase, phases
from spmd.compile.lower.kernels import launch
from spmd.compile.lower.lowering import Lowering, host, rule
from spmd.compile.lower.steps import Launch, Ref
from spmd.core.aval import ShapedArray
from spmd.core.ir import Eqn
from spmd.lax.conv_dims import Windows, pads_of_operand_gradient

# Taps up to which they are written out; a kernel that compares positions has no other form.
_UNROLLED = 32
_MOST_COMPARED = 256

_COMBINE = {
    "reduce_window_sum": ("add", lambda dtype: dtype.type(0)),
    "reduce_window_max": ("max", lambda dtype: dtypes.min_value(dtype)[()]),
    "reduce_window_min": ("min", lambda dtype: dtypes.max_value(dtype)[()]),
}
_SELECT = {
    "max": ("gt", _COMBINE["reduce_window_max"][1]),
    "min": ("lt", _COMBINE["reduce_window_min"][1]),
}


# ---- reading taps ------------------------------------------------------------------------------


class _Taps:
    """Reads the taps of the windows of one phase, in a kernel whose outer dims are the windows."""

    def __init__(self, builder: Builder, shape: Sequence[int], parts: Sequence[Phase]):
        self.builder = builder
        self.shape = tuple(shape)
        self.parts = parts
        self.strides = strides_of(self.shape)
        self.memo: dict[Any, int] = {}

    def __iter__(self) -> Any:
        """The taps, each one number per dim, in row-major order."""
        return itertools.product(*(range(p.taps) for p in self.parts))

    def number(self, tap: Sequence[int], sizes: Sequence[int], flipped: bool = False) -> int:
        """The row-major number of a tap in the whole window."""
        total = 0
        for t, p, size in zip(tap, self.parts, sizes, strict=True):
            k = p.tap + t * p.tap_step
            total = total * size + (size - 1 - k if flipped else k)
        return total

    def inside(self, tap: Sequence[int]) -> int | None:
        """Whether a tap is an element of the array: None if it always is."""
        guard = None
        for d, (t, p, size) in enumerate(zip(tap, self.parts, self.shape, strict=True)):
            first = p.start + t * p.step
            last = first + (p.windows - 1) * p.stride
            if first < 0:  # the first window that reaches the array
                guard = self._both(guard, self._compare("ge", d, -(first // p.stride)))
            if last >= size:  # the first that is beyond it
                guard = self._both(guard, self._compare("lt", d, -((first - size) // p.stride)))
        return guard

    def _compare(self, op: str, dim: int, bound: int) -> int:
        key = (op, dim, bound)
        if key not in self.memo:
            b = self.builder
            self.memo[key] = b.op(op, b.iota(dim, "i64"), b.const(bound, "i64"))
        return self.memo[key]

    def _both(self, a: int | None, b: int) -> int:
        if a is None:
            return b
        key = ("and", a, b)
        if key not in self.memo:
            self.memo[key] = self.builder.op("and", a, b)
        return self.memo[key]

    def load(self, arg: int, tap: Sequence[int], fill: int | None) -> int:
        """A tap of an argument of this shape, `fill` outside."""
        strides = [p.stride * s for p, s in zip(self.parts, self.strides, strict=True)]
        offset = sum(
            (p.start + t * p.step) * s
            for t, p, s in zip(tap, self.parts, self.strides, strict=True)
        )
        guard = self.inside(tap)
        key = (arg, offset, tuple(strides), guard, fill)
        if key not in self.memo:
            self.memo[key] = self.builder.load(
                arg, strides, offset, guard=guard, fill=fill if guard is not None else None
            )
        return self.memo[key]

    def reader(self, arg: int, fill: int) -> Callable[[Any], int]:
        """The function that loads a tap of an argument."""
        return lambda tap: self.load(arg, tap, fill)

    def counter(self, sizes: Sequence[int]) -> Callable[[Any], int]:
        """The function that makes the number of a tap."""
        return lambda tap: self.builder.const(self.number(tap, sizes), "i32")


def _by_space(windows: Windows, shape: Sequence[int]) -> dict[tuple[int, ...], list[Any]]:
    """The combinations of phases, by how many windows they have along each dim."""
    each = [phases(windows, d, count) for d, count in enumerate(shape)]
    found: dict[tuple[int, ...], list[Any]] = {}
    for combination in itertools.product(*each):
        found.setdefault(tuple(p.windows for p in combination), []).append(combination)
    return found


def _store(
    b: Builder, target: int, shape: Sequence[int], parts: Sequence[Phase], value: int
) -> None:
    """Write the results of a phase, which are every n-th."""
    strides = strides_of(shape)
    b.store(
        target,
        [p.period * s for p, s in zip(parts, strides, strict=True)],
        value,
        sum(p.first * s for p, s in zip(parts, strides, strict=True)),
    )


def _native(eqn: Eqn) -> bool:
    """Whether kernels know how to compare and add these dtypes."""
    names = [storage_dtype(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)]
    return all(name is not None and kind(name) in "iuf" for name in names)


# ---- reductions --------------------------------------------------------------------------------


@rule(*_COMBINE)
def reduce_window(lowering: Lowering, eqn: Eqn) -> None:
    """A kernel over the windows of each phase."""
    windows: Windows = eqn.params["windows"]
    (operand,), (out,) = eqn.invars, eqn.outvars
    if not _native(eqn) or not operand.aval.size:
        host(lowering, eqn)
        return
    combine, identity = _COMBINE[eqn.prim.name]
    refs = (lowering.ref(operand), lowering.place(out))
    for space, combinations in _by_space(windows, out.aval.shape).items():
        few = [c for c in combinations if math.prod(p.taps for p in c) <= _UNROLLED]
        many = [c for c in combinations if c not in few]
        ways = [(_written_out, few)] if few else []
        for write, chosen in (*ways, *((_reduced, c) for c in many)):
            kernel = write(space, chosen, eqn, combine, identity(operand.aval.dtype))
            launch(lowering, Launch(kernel, refs, eqn.prim.name, eqn.source))


def _written_out(space: Any, chosen: Any, eqn: Eqn, combine: str, identity: Any) -> Any:
    operand, out = eqn.invars[0].aval, eqn.outvars[0].aval
    dtype = need(operand)
    b = Builder(space, ())
    source, target = b.arg(dtype, operand.size), b.arg(dtype, out.size, "out")
    with b.row():
        fill = b.const(identity, dtype)
        for parts in chosen:
            taps, total = _Taps(b, operand.shape, parts), None
            for tap in taps:
                value = b.convert(taps.load(source, tap, fill), DTYPES[dtype].carrier)
                total = value if total is None else b.op(combine, total, value)
            found = fill if total is None else b.convert(total, dtype)
            _store(b, target, out.shape, parts, found)
    return b.build()


def _reduced(space: Any, parts: Any, eqn: Eqn, combine: str, identity: Any) -> Any:
    """Many taps: the inner dims of the kernel."""
    operand, out = eqn.invars[0].aval, eqn.outvars[0].aval
    dtype = need(operand)
    inner = [d for d, p in enumerate(parts) if p.taps > 1]
    strides = strides_of(operand.shape)
    b = Builder(space, [parts[d].taps for d in inner])
    source, target = b.arg(dtype, operand.size), b.arg(dtype, out.size, "out")
    with b.row():
        guard = None
        for d, (p, size) in enumerate(zip(parts, operand.shape, strict=True)):
            last = p.start + (p.windows - 1) * p.stride + (p.taps - 1) * p.step
            if p.start >= 0 and last < size:
                continue
            at = b.op("mul", b.iota(d, "i64"), b.const(p.stride, "i64"))
            at = b.op("add", at, b.const(p.start, "i64"))
            if d in inner:
                tap = b.iota(len(space) + inner.index(d), "i64")
                at = b.op("add", at, b.op("mul", tap, b.const(p.step, "i64")))
            for op, bound in (("ge", 0), ("lt", size)):
                test = b.op(op, at, b.const(bound, "i64"))
                guard = test if guard is None else b.op("and", guard, test)
        fill = b.const(identity, dtype) if guard is not None else None
        where = [p.stride * s for p, s in zip(parts, strides, strict=True)]
        where += [parts[d].step * strides[d] for d in inner]
        offset = sum(p.start * s for p, s in zip(parts, strides, strict=True))
        value = b.load(source, where, offset, guard=guard, fill=fill)
        total = b.reduce(combine, b.convert(value, DTYPES[dtype].carrier))
    with b.point():
        _store(b, target, out.shape, parts, b.convert(total, dtype))
    return b.build()


# ---- selections --------------------------------------------------------------------------------


def _select(
    taps: _Taps, operand: int, how: tuple[str, int], each: Callable[[Any], int], none: int
) -> int:
    """`each(tap)` of the tap that every window selects; `none` where it has no element."""
    b = taps.builder
    better, fill = how
    best = found = empty = None
    for tap in taps:
        inside = taps.inside(tap)
        value = taps.load(operand, tap, fill)
        if best is None or found is None:
            best = value
            found = each(tap)
            if inside is not None:
                found = b.op("select", inside, found, none)
                empty = b.op("not", inside)
            continue
        wins = b.op(better, value, best)
        if kind(b.dtype(value)) == "f":  # NaN wins against anything else
            is_nan = b.op("ne", value, value)
            wins = b.op("or", wins, b.op("and", is_nan, b.op("eq", best, best)))
        if empty is not None:
            first = empty if inside is None else b.op("and", empty, inside)
            wins = b.op("or", wins, first)
            if inside is None:
                empty = None
            else:
                empty = b.op("and", empty, b.op("not", inside))
        best = b.op("select", wins, value, best)
        found = b.op("select", wins, each(tap), found)
    return none if found is None else found


def _selectable(eqn: Eqn) -> bool:
    windows: Windows = eqn.params["windows"]
    return (
        _native(eqn)
        and math.prod(windows.sizes) <= _MOST_COMPARED
        and all(v.aval.size for v in eqn.invars)
    )


@rule("select_and_gather_add")
def select_and_gather_add(lowering: Lowering, eqn: Eqn) -> None:
    """A kernel over the windows that compares taps of the operand and keeps those of the other."""
    if not _selectable(eqn):
        host(lowering, eqn)
        return
    windows: Windows = eqn.params["windows"]
    (tangents, operand), (out,) = eqn.invars, eqn.outvars
    kept, compared = (need(v.aval) for v in (tangents, operand))
    better, identity = _SELECT[eqn.params["select"]]
    refs = (lowering.ref(tangents), lowering.ref(operand), lowering.place(out))
    for space, combinations in _by_space(windows, out.aval.shape).items():
        b = Builder(space, ())
        args = b.arg(kept, tangents.aval.size), b.arg(compared, operand.aval.size)
        target = b.arg(kept, out.aval.size, "out")
        with b.row():
            fill, zero = b.const(identity(operand.aval.dtype), compared), b.const(0, kept)
            for parts in combinations:
                taps = _Taps(b, operand.aval.shape, parts)
                each = taps.reader(args[0], zero)
                found = _select(taps, args[1], (better, fill), each, zero)
                _store(b, target, out.aval.shape, parts, found)
        lowering.steps.append(Launch(b.build(), refs, eqn.prim.name, eqn.source))


def need(aval: ShapedArray) -> str:
    """The kernel dtype of an array that has one."""
    dtype = storage_dtype(aval.dtype)
    assert dtype is not None
    return dtype


@rule("select_and_scatter_add")
def select_and_scatter_add(lowering: Lowering, eqn: Eqn) -> None:
    """Find the tap that each window selects; then for each element the windows that selected it."""
    if not _selectable(eqn):
        host(lowering, eqn)
        return
    windows: Windows = eqn.params["windows"]
    (source, operand), (out,) = eqn.invars, eqn.outvars
    counts = source.aval.shape
    chosen = lowering.temp(ShapedArray(counts, dtypes.int32))
    _write_selection(lowering, eqn, chosen)
    slid = Windows(
        windows.sizes,
        windows.base_dilation,
        pads_of_operand_gradient(windows, operand.aval.shape, counts),
        windows.strides,
        windows.dilation,
    )
    dtype = need(source.aval)
    refs = (lowering.ref(source), chosen, lowering.place(out))
    for space, combinations in _by_space(slid, out.aval.shape).items():
        b = Builder(space, ())
        args = b.arg(dtype, source.aval.size), b.arg("i32", source.aval.size)
        target = b.arg(dtype, out.aval.size, "out")
        with b.row():
            zero, nowhere = b.const(0, dtype), b.const(-1, "i32")
            for parts in combinations:
                taps, total = _Taps(b, counts, parts), None
                for tap in taps:
                    number = b.const(taps.number(tap, windows.sizes, flipped=True), "i32")
                    hit = b.op("eq", taps.load(args[1], tap, nowhere), number)
                    value = b.op("select", hit, taps.load(args[0], tap, zero), zero)
                    value = b.convert(value, DTYPES[dtype].carrier)
                    total = value if total is None else b.op("add", total, value)
                found = zero if total is None else b.convert(total, dtype)
                _store(b, target, out.aval.shape, parts, found)
        lowering.steps.append(Launch(b.build(), refs, eqn.prim.name, eqn.source))


def _write_selection(lowering: Lowering, eqn: Eqn, chosen: Ref) -> None:
    """The kernel that stores the number of the tap that each window selects, -1 for none."""
    windows: Windows = eqn.params["windows"]
    source, operand = eqn.invars
    compared = need(operand.aval)
    better, identity = _SELECT[eqn.params["select"]]
    for space, combinations in _by_space(windows, source.aval.shape).items():
        b = Builder(space, ())
        arg, target = b.arg(compared, operand.aval.size), b.arg("i32", source.aval.size, "out")
        with b.row():
            fill, none = b.const(identity(operand.aval.dtype), compared), b.const(-1, "i32")
            for parts in combinations:
                taps = _Taps(b, operand.aval.shape, parts)
                each = taps.counter(windows.sizes)
                found = _select(taps, arg, (better, fill), each, none)
                _store(b, target, source.aval.shape, parts, found)
        step = Launch(b.build(), (lowering.ref(operand), chosen), "select_window", eqn.source)
        lowering.steps.append(step)
