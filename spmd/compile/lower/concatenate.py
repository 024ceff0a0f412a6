"""Concatenations: operands are written right where they belong in the result.

Before a body is written `hint_places` looks at its concatenations. An operand that nothing else
reads gets a *view*: its place inside the result. A contiguous view (along the first dim that is
longer than 1) is an ordinary place, which any step can write to. Into any other view only kernels
can write, by the strides of their stores. Operands without a view are copied there at the end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from spmd.base.record import record
from spmd.compile.expressions.index_map import strides_of
from spmd.compile.expressions.scalar_ops import storage_dtype
from spmd.compile.kernel.builder import Builder
from spmd.compile.lower.lowering import ALIASES, Lowering, hints, host, rule
from spmd.compile.lower.steps import Copy, Launch, Ref
from spmd.core.ir import Atom, Eqn, Var


@record
class View:
    """Some elements of the array at `ref`, which has `size` elements; strides in elements."""

    ref: Ref
    size: int
    offset: int
    strides: tuple[int, ...]


def parts_of(eqn: Eqn, place: Ref) -> list[View]:
    """The view of each operand of a concatenation whose result is at `place`."""
    (out,) = eqn.outvars
    strides = strides_of(out.aval.shape)
    along, start, views = eqn.params["dimension"], 0, []
    for operand in eqn.invars:
        views.append(View(place, out.aval.size, start * strides[along], strides))
        start += operand.aval.shape[along]
    return views


def contiguous_place(view: View, shape: Sequence[int], itemsize: int) -> Ref | None:
    """The place of a view whose elements follow each other in memory."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(view.strides), strict=True):
        if size != 1 and stride != expected:
            return None
        expected *= size
    return view.ref.shifted(view.offset * itemsize)


# ---- aiming ------------------------------------------------------------------------------------


# Steps that may write their result to any place, whatever else is in its buffer.
_WRITERS = frozenset(("fused", "dot_general", "concatenate"))


@hints("concatenate")
def hint_places(
    lowering: Lowering, eqn: Eqn, makers: dict[Var, Eqn], readers: Counter[Var]
) -> None:
    """Give the operands of a concatenation their places in its result, where that is possible."""
    (out,) = eqn.outvars
    if storage_dtype(out.aval.dtype) is None:
        return
    if out not in lowering.targets:
        lowering.targets[out] = lowering.temp(out.aval)
    for operand, view in zip(eqn.invars, parts_of(eqn, lowering.targets[out]), strict=True):
        _hint_operand(lowering, makers, readers, operand, view)


def _hint_operand(
    lowering: Lowering,
    makers: dict[Var, Eqn],
    readers: Counter[Var],
    operand: Atom,
    view: View,
) -> None:
    """Follow an operand through equations that only rename it, to the equation that makes it."""
    while isinstance(operand, Var) and operand in makers:
        maker, shape = makers[operand], operand.aval.shape
        if operand in lowering.targets or readers[operand] != 1 or not operand.aval.size:
            return
        if maker.prim.name in ALIASES:
            inside = _renamed(view, shape, maker.invars[0].aval.shape)
            if inside is None:
                return
            operand, view = maker.invars[0], inside
            continue
        whole = contiguous_place(view, shape, operand.aval.dtype.itemsize)
        if whole is not None and maker.prim.name in _WRITERS:
            lowering.targets[operand] = whole
        elif maker.prim.name == "fused":
            lowering.views[operand] = view
        return


def _renamed(view: View, shape: Sequence[int], to: Sequence[int]) -> View | None:
    """The view under another shape: of any, if it is contiguous, else without dims of size 1."""
    if contiguous_place(view, shape, 1) is not None:
        return View(view.ref, view.size, view.offset, strides_of(to))
    long = [stride for size, stride in zip(shape, view.strides, strict=True) if size != 1]
    if [s for s in shape if s != 1] != [s for s in to if s != 1]:
        return None
    kept = iter(long)
    strides = tuple(next(kept) if size != 1 else 1 for size in to)
    return View(view.ref, view.size, view.offset, strides)


# ---- the rule ----------------------------------------------------------------------------------


@rule("concatenate")
def concatenate(lowering: Lowering, eqn: Eqn) -> None:
    """Bring those operands to their places that are not there yet."""
    (out,) = eqn.outvars
    dtype = storage_dtype(out.aval.dtype)
    if dtype is None:
        host(lowering, eqn)
        return
    place = lowering.place(out)
    for operand, view in zip(eqn.invars, parts_of(eqn, place), strict=True):
        shape = operand.aval.shape
        if not operand.aval.size or (isinstance(operand, Var) and operand in lowering.written):
            continue
        source = lowering.ref(operand)
        whole = contiguous_place(view, shape, operand.aval.dtype.itemsize)
        if whole is None:
            lowering.steps.append(_copy_into(dtype, shape, source, view, eqn))
        elif whole != source:
            lowering.steps.append(Copy(whole, source, operand.aval.nbytes))


def _copy_into(dtype: str, shape: Sequence[int], source: Ref, view: View, eqn: Eqn) -> Launch:
    """A kernel that copies an array into a view."""
    b = Builder(shape, ())
    read, write = b.arg(dtype, math.prod(shape)), b.arg(dtype, view.size, "out")
    with b.row():
        b.store(write, view.strides, b.load(read, strides_of(shape)), view.offset)
    return Launch(b.build(), (source, view.ref), eqn.prim.name, eqn.source)


# ---- interior padding --------------------------------------------------------------------------


@rule("pad")
def pad(lowering: Lowering, eqn: Eqn) -> None:
    """Fill the result, then write the operand's elements to their places in it.

    Only padding between elements comes here; other padding is a read at an affine index and fuses.
    """
    operand, padding = eqn.invars
    (out,) = eqn.outvars
    dtype, config = storage_dtype(out.aval.dtype), eqn.params["padding_config"]
    if dtype is None:
        host(lowering, eqn)
        return
    value, source = lowering.ref(padding), lowering.ref(operand)
    place = lowering.place(out)
    b = Builder((out.aval.size,), ())
    number, target = b.arg(dtype, 1), b.arg(dtype, out.aval.size, "out")
    with b.row():
        b.store(target, (1,), b.load(number, (0,)))
    lowering.steps.append(Launch(b.build(), (value, place), "pad", eqn.source))
    # Negative padding cuts elements off: along each dim those from `first` on stay.
    kept, offset, start = [], 0, 0
    dims = zip(operand.aval.shape, out.aval.shape, config, strict=True)
    pitches, steps = strides_of(operand.aval.shape), strides_of(out.aval.shape)
    for (size, room, (low, _, between)), pitch, step in zip(dims, pitches, steps, strict=True):
        first = max(-(low // (between + 1)), 0)
        last = min((room - 1 - low) // (between + 1), size - 1)
        kept.append(last - first + 1)
        start += pitch * first
        offset += step * (low + first * (between + 1))
    if min(kept) <= 0:
        return
    strides = [step * (between + 1) for step, (_, _, between) in zip(steps, config, strict=True)]
    b = Builder(kept, ())
    given = b.arg(dtype, operand.aval.size)
    target = b.arg(dtype, out.aval.size, "inout")
    with b.row():
        b.store(target, strides, b.load(given, pitches, start), offset)
    lowering.steps.append(Launch(b.build(), (source, place), "pad", eqn.source))
