"""Shardings in types: what a value over the `Explicit` axes of a mesh says of its layout.

An aval's `sharding` is None unless the value is laid out over explicit axes. Then it has an
attribute `spec`: for each dim the axis that splits it, a tuple of axes, or None. `sharding/` knows
the rest, and sets the hooks when it makes the first such type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from spmd.base.errors import ArgumentError
from spmd.base.source import current_source
from spmd.core.aval import NO_AXES, ShapedArray, typeof
from spmd.core.axis import cast_to_vma
from spmd.core.primitive import Primitive
from spmd.core.trace import Tracer

Function = TypeVar("Function", bound=Callable[..., Any])


class ExplicitHooks:
    """The functions of `sharding/` for explicit shardings.

    `results` gives the avals of an equation's results, from those of its operands, which have
    shardings, and those that the results have without. `reshard` lays a value out by a sharding, or
    by what its user gave as one; `to_auto` leaves its layout to the compiler. `laid_out` calls a
    function with positional and named arguments and lays the result out. `match` gives a value the
    sharding of another's type. `without_dim` and `with_dim` give the sharding of a value that has
    lost or got a dim. `pcast` is that of `lax`, and `cast_aval` the type that such a cast makes.
    """

    results: Callable[[Primitive, Sequence[Any], Sequence[Any], dict[str, Any]], list[ShapedArray]]
    reshard: Callable[[Any, Any], Any]
    to_auto: Callable[[Any], Any]
    laid_out: Callable[[Callable[..., Any], Sequence[Any], dict[str, Any], Any], Any]
    match: Callable[[Any, Any], Any]
    pcast: Callable[[Any, Any, str], Any]
    cast_aval: Callable[[ShapedArray, Any, str, Any], ShapedArray]
    without_dim: Callable[[Any, int], Any]
    with_dim: Callable[[Any, int, Any], Any]
    # An array on a device, or laid out by a sharding: `device_put`.
    put: Callable[[Any, Any], Any]


hooks = ExplicitHooks()


def result_avals(
    prim: Primitive, avals: Sequence[ShapedArray], params: dict[str, Any]
) -> list[ShapedArray]:
    """The avals of a primitive's results; their `vma` is not filled in."""
    typed = False
    if prim.vma != "given":
        for aval in avals:
            if aval.explicit is not None:
                typed = True
    given = [a.strip_sharding() for a in avals] if typed else avals
    out = prim.abstract(*given, **params)
    outs = list(out) if prim.multiple else [out]
    return typed_results(prim, avals, outs, params) if typed else outs


def typed_results(
    prim: Primitive,
    avals: Sequence[ShapedArray],
    outs: Sequence[ShapedArray],
    params: dict[str, Any],
) -> list[ShapedArray]:
    """The avals of results with the shardings that those of the operands give them."""
    if all(a.explicit is None for a in avals):
        return list(outs)
    return hooks.results(prim, avals, outs, params)


def align_sums(
    axes: frozenset[Any], operands: Sequence[Any], avals: Sequence[ShapedArray]
) -> tuple[frozenset[Any], Sequence[Any]]:
    """The manual axes over which operands have to vary, and operands cast to be reduced alike.

    Beside terms of a sum the other operands stay as they are. Where one operand is reduced, the
    cotangents of those that are equal on all devices are unreduced until the cast's transpose.
    """
    sets = [a.manual_sets() for a in avals]
    terms = NO_AXES.union(*(unreduced for unreduced, _ in sets))
    reduced = NO_AXES.union(*(own for _, own in sets)) - axes
    if not reduced:
        return axes - terms, operands
    mesh = next(a.explicit.mesh for a, (_, own) in zip(avals, sets, strict=True) if own)
    aligned = []
    for x, aval, (_, own) in zip(operands, avals, sets, strict=True):
        missing = tuple(sorted(reduced - own, key=repr))
        if missing and isinstance(x, Tracer):
            x = hooks.match(x, hooks.cast_aval(aval, missing, "reduced", mesh).explicit)
        aligned.append(x)
    return axes - terms, aligned


def to_auto(x: Any) -> Any:
    """`x`, whose layout is left to the compiler from here on."""
    return x if typeof(x).explicit is None else hooks.to_auto(x)


def to_auto_if_array(x: Any) -> Any:
    """The same for an array or a tracer; anything else as it is."""
    return to_auto(x) if hasattr(x, "aval") else x


def match_sharding(x: Any, aval: ShapedArray) -> Any:
    """`x` laid out as the type of another value of its shape says."""
    have, want = typeof(x).explicit, aval.explicit
    if have == want:
        return x
    return hooks.to_auto(x) if want is None else hooks.match(x, want)


def match_type(x: Any, aval: ShapedArray) -> Any:
    """`x` varying over the axes of another value, and laid out as that if of the same shape."""
    have = typeof(x)
    x = cast_to_vma(x, aval.vma, have.vma)
    return match_sharding(x, aval) if have.shape == aval.shape else x


def laid_out(out_sharding: Any, f: Callable[..., Any], *operands: Any) -> Any:
    """`f(*operands)` laid out as `out_sharding` says, whatever the layouts of the operands."""
    return hooks.laid_out(f, operands, {}, out_sharding)


def sliced_aval(aval: ShapedArray, dim: int) -> ShapedArray:
    """The aval of a value without one of its dims."""
    bare = aval.update(shape=aval.shape[:dim] + aval.shape[dim + 1 :])
    if aval.explicit is None:
        return bare
    return bare.update(sharding=hooks.without_dim(aval.explicit, dim))


def stacked_aval(aval: ShapedArray, size: int, entry: Any = None) -> ShapedArray:
    """The aval of `size` values along a new first dim, split over the axes of `entry`."""
    bare = aval.update(shape=(size, *aval.shape))
    if aval.explicit is None:
        return bare
    return bare.update(sharding=hooks.with_dim(aval.explicit, 0, entry))


def joined_sharding(avals: Sequence[ShapedArray]) -> Any:
    """The sharding of some avals, of which those that split nothing give way; None if they differ.

    None, too, if none of them has one.
    """
    found: Any = None
    for aval in avals:
        if aval.explicit is None or aval.explicit == found:
            continue
        if found is None or not any(found.spec):
            found = aval.explicit
        elif any(aval.explicit.spec):
            return None
    return found


def lays_out_result(f: Function) -> Function:
    """Decorate a function that has a parameter `out_sharding`, which it does not look at.

    Given one, its result is laid out so, whatever the layouts of the operands. The parameter is
    given by name, or also by position if it is the last that may be.
    """
    code = f.__code__
    names = code.co_varnames[: code.co_argcount]
    last = len(names) - 1 if names[-1:] == ("out_sharding",) else None

    @functools.wraps(f)
    def call(*args: Any, out_sharding: Any = None, **kwargs: Any) -> Any:
        if last is not None and len(args) > last:
            args, out_sharding = args[:-1], args[-1]
        if out_sharding is None:
            return f(*args, **kwargs)
        if kwargs.get("device") is not None:
            raise ArgumentError(
                f"{current_source()}: {f.__name__}: device={kwargs['device']!r} and out_sharding="
                f"{out_sharding!r} both say where the result lies; give one of them"
            )
        return hooks.laid_out(f, args, kwargs, out_sharding)

    return call  # type: ignore[return-value]
