"""Constructors for families of primitives, so that a member costs a line or two of mathematics.

The common parts of a family are written here once: dtype and shape errors, weak types, the
batch rule, the `dims` rule, how tangents of several operands are added, how the cotangent of a
scalar operand is summed. A member brings its name, the dtypes it accepts, its meaning over NumPy
(`impl`) and its derivative.

`jvp` of an elementwise family is one function per operand, called with that operand's tangent as
`f(t, *operands, out, **params)`; None says that the operand has no derivative. `transpose` is
likewise one function per operand, called as `f(ct, *operands, **params)`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import (
    DtypeArgumentError,
    DtypeError,
    KeyOperationError,
    ShapeError,
    SpmdError,
)
from spmd.base.lazy_import import Deferred
from spmd.base.source import current_source
from spmd.core.aval import ShapedArray, typeof
from spmd.core.jvp import instantiate, zero_tangent
from spmd.core.primitive import (
    Dims,
    Linear,
    Primitive,
    Refused,
    Zero,
    dims,
    is_refused,
    linear,
    remembered,
)
from spmd.core.structural import (
    add_any,
    broadcast_in_dim,
    broadcast_leading,
    move_dim,
    reduced_shape,
    reduction_dims,
    unbroadcast,
)

# Few programs ask for a precision.
precisions = Deferred("spmd.lax.precision")

Rule: TypeAlias = Callable[..., Any]
DtypeSet: TypeAlias = Collection[np.dtype]

NARROW_FLOATS = (dtypes.bfloat16, np.dtype(np.float16))

# Dtypes that primitives accept. Structural ones also move typed keys.
BITS = frozenset((*dtypes.BOOL, *dtypes.INTEGER))
INTEGER = frozenset(dtypes.INTEGER)
# Those in which a number has as many bits as it is stored in.
WORDS = INTEGER - dtypes.SMALL
FLOAT = frozenset(dtypes.FLOATING)
COMPLEX = frozenset(dtypes.COMPLEX)
INEXACT = frozenset(dtypes.INEXACT)
REAL = frozenset((*dtypes.INTEGER, *dtypes.FLOATING))
NUMERIC = frozenset(dtypes.NUMERIC)
ORDERED = frozenset(dtypes.ORDERED)
ANY = frozenset(dtypes.ANY)


class _Movable(frozenset):
    """Numbers, and keys of any generator."""

    def __contains__(self, dtype: object) -> bool:
        return super().__contains__(dtype) or dtypes.is_key(dtype)


MOVABLE = _Movable(dtypes.ANY)

# A derivative that is zero everywhere (or where it exists), as those of `floor` and `sign`.
no_derivative = ()

# ---- errors ------------------------------------------------------------------------------------


def fail(error: type[SpmdError], text: str) -> NoReturn:
    """Raise a user's error that starts with the line of the user's program."""
    raise error(f"{current_source()}: {text}")


_GROUPS = (
    ("bool", dtypes.BOOL),
    ("signed integer", dtypes.SIGNED),
    ("unsigned integer", dtypes.UNSIGNED),
    ("floating", dtypes.FLOATING),
    ("complex", dtypes.COMPLEX),
)


def describe(accepted: DtypeSet) -> str:
    """`floating and complex`, for a set of dtypes."""
    names = [name for name, group in _GROUPS if group[0] in accepted]
    if "signed integer" in names and "unsigned integer" in names:
        names.remove("signed integer")
        names[names.index("unsigned integer")] = "integer"
    if len(names) < 3:
        return " and ".join(names)
    return ", ".join(names[:-1]) + " and " + names[-1]


def _advice(dtype: np.dtype, accepted: DtypeSet, argument: str) -> str:
    if dtypes.is_key(dtype):
        return "a key is opaque; random.key_data gives its bits"
    if dtypes.is_complex(dtype) and dtypes.float32 in accepted:
        return f"take {argument}.real, {argument}.imag or abs({argument})"
    for kind, example in (("float", dtypes.float32), ("int", dtypes.int32)):
        if example in accepted:
            return f"convert with {argument}.astype({kind})"
    if np.dtype(np.complex64) in accepted:
        return f"convert with {argument}.astype(complex)"
    return f"convert with {argument}.astype(bool)"


def check_dtype(name: str, argument: str, aval: ShapedArray, accepted: DtypeSet) -> None:
    """Raise the user's error if an operand's dtype is not among those accepted."""
    if aval.dtype not in accepted:
        advice = _advice(aval.dtype, accepted, argument)
        fail(
            KeyOperationError if dtypes.is_key(aval.dtype) else DtypeArgumentError,
            f"{name}: accepts {describe(accepted)} dtypes, got {aval} (argument {argument}); "
            f"{advice}",
        )


def check_same_dtype(name: str, arguments: Sequence[str], avals: Sequence[ShapedArray]) -> None:
    """Raise the user's error if operands have different dtypes."""
    first = avals[0]
    for argument, aval in zip(arguments, avals, strict=True):
        if aval.dtype != first.dtype:
            fail(
                DtypeError,
                f"{name}: dtypes must be equal, got {first} (argument {arguments[0]}) and {aval} "
                f"(argument {argument}); convert one with .astype, or use spmd.numpy, "
                "which promotes",
            )


def common_shape(
    name: str, arguments: Sequence[str], avals: Sequence[ShapedArray]
) -> tuple[int, ...]:
    """The one shape of all operands that are not rank 0; raises the user's error if they differ."""
    shape: tuple[int, ...] = ()
    owner = ""
    for argument, aval in zip(arguments, avals, strict=True):
        if not aval.shape or aval.shape == shape:
            continue
        if shape:
            fail(
                ShapeError,
                f"{name}: shapes must be equal (or scalar), got {shape} (argument {owner}) and "
                f"{aval.shape} (argument {argument}); lax does not broadcast, spmd.numpy does",
            )
        shape, owner = aval.shape, argument
    return shape


# ---- small helpers for rules -------------------------------------------------------------------


def const(like: Any, value: Any) -> Any:
    """A scalar of the dtype of `like`, that takes no part in its weak type."""
    dtype = typeof(like).dtype
    for kind in (float, int, complex):
        if dtype == dtypes.canonical(kind):
            return kind(value)
    return np.asarray(value, dtype)


def spread(x: Any, shape: tuple[int, ...]) -> Any:
    """`x`, repeated to `shape` if it is a scalar."""
    return x if typeof(x).shape == shape else broadcast_in_dim(x, shape, ())


def shifted(axes: Sequence[int], at: int) -> tuple[int, ...]:
    """Dims of an array, as dims of the one that has a new dim at `at`."""
    return tuple(d + (d >= at) for d in axes)


def nonlinear(name: str) -> Refused:
    """The refusal of a transpose rule."""
    return Refused(
        f"{name} is not linear, so it has no transpose; grad and vjp differentiate it with its jvp"
    )


def quiet(f: Rule | str, widen: bool = True) -> Rule:
    """An `impl` without NumPy's warnings, that computes narrow floats in float32.

    A string is the function of that name in the array module.
    """

    compute = _function_named(f) if isinstance(f, str) else f

    def impl(xp: Any, *arrays: Any, **params: Any) -> Any:
        narrow = None
        if widen:
            narrow = next((a.dtype for a in arrays if a.dtype in NARROW_FLOATS), None)
        with np.errstate(all="ignore"):
            if narrow is None:
                return xp.asarray(compute(xp, *arrays, **params))
            wide = [a.astype(np.float32) if a.dtype == narrow else a for a in arrays]
            out = xp.asarray(compute(xp, *wide, **params))
            return out.astype(narrow) if out.dtype == np.float32 else out

    return impl


def _function_named(name: str) -> Rule:
    return lambda xp, *arrays, **params: getattr(xp, name)(*arrays, **params)


# ---- elementwise: the rules that all share -----------------------------------------------------


def same_dtype(*avals: ShapedArray, **_: Any) -> np.dtype:
    """The result's dtype is the operands'."""
    return avals[0].dtype


def elementwise_dims(*avals: ShapedArray, **_: Any) -> Dims:
    """Every dim of the common shape is its own label; scalars have none."""
    ndim = max(a.ndim for a in avals)
    return dims([range(a.ndim) for a in avals], [range(ndim)])


def align_batch(
    axis: Any, operands: Sequence[Any], at: Sequence[int | None]
) -> tuple[list[Any], int]:
    """Operands of an elementwise primitive under vmap, brought to one shape; and the batch dim.

    The batch dim stays where the first batched array has it. A scalar of every example
    (one number each) is spread over that example's array; an unbatched scalar stays one.
    """
    avals = [typeof(x) for x in operands]
    arrays = [k for k, d in enumerate(at) if d is not None and avals[k].ndim > 1]
    whole = [k for k, d in enumerate(at) if d is None and avals[k].ndim > 0]
    if not arrays and not whole:
        return list(operands), 0
    to: Any = at[arrays[0]] if arrays else 0
    shape = avals[arrays[0]].shape if arrays else (axis.size, *avals[whole[0]].shape)
    out = []
    for x, d, aval in zip(operands, at, avals, strict=True):
        if d is None:
            out.append(broadcast_leading(x, axis.size, to) if aval.ndim else x)
        elif aval.ndim == 1:
            out.append(broadcast_in_dim(x, shape, (to,)))
        else:
            out.append(move_dim(x, d, to))
    return out, to


def elementwise_batch(prim: Primitive) -> Rule:
    """The batch rule of any elementwise primitive."""

    def batch(axis: Any, operands: Any, at: Any, **params: Any) -> Any:
        if len(operands) == 1:
            return prim.bind(*operands, **params), at[0]
        operands, to = align_batch(axis, operands, at)
        return prim.bind(*operands, **params), to

    return batch


def elementwise_jvp(prim: Primitive, rules: Sequence[Rule | None]) -> Rule:
    """A jvp rule from one derivative per operand."""

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        out = prim.bind(*primals, **params)
        aval = typeof(out)
        total = None
        for rule, t in zip(rules, tangents, strict=True) if rules else ():
            if rule is None or isinstance(t, Zero):
                continue
            term = spread(rule(t, *primals, out, **params), aval.shape)
            total = term if total is None else add_any(total, term)
        return out, zero_tangent(out) if total is None else total

    return jvp


def linear_in(prim: Callable[[], Primitive], *places: int) -> Rule:
    """The jvp rule of a primitive, which `prim` names, that is linear in some operands together."""

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        out = prim().bind(*primals, **params)
        if all(isinstance(tangents[k], Zero) for k in places):
            return out, zero_tangent(out)
        operands = [instantiate(tangents[k]) if k in places else x for k, x in enumerate(primals)]
        return out, prim().bind(*operands, **params)

    return jvp


def multilinear(prim: Callable[[], Primitive]) -> Rule:
    """The jvp rule of a primitive, which `prim` names, that is linear in each operand by itself."""

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        out = prim().bind(*primals, **params)
        terms = [
            prim().bind(*primals[:k], t, *primals[k + 1 :], **params)
            for k, t in enumerate(tangents)
            if not isinstance(t, Zero)
        ]
        return out, functools.reduce(add_any, terms)

    return jvp


def elementwise_transpose(rules: Sequence[Rule | None]) -> Rule:
    """A transpose rule from one per operand; cotangents of scalars are summed."""

    def transpose(ct: Any, *operands: Any, **params: Any) -> list[Any]:
        cts: list[Any] = []
        for rule, x in zip(rules, operands, strict=True):
            given = rule(ct, *operands, **params) if rule and isinstance(x, Linear) else None
            if given is not None and typeof(given).shape != x.aval.shape:
                given = unbroadcast(given, x.aval)
            cts.append(given)
        return cts

    return transpose


def elementwise(
    name: str,
    arguments: Sequence[str],
    *,
    accepts: DtypeSet | Sequence[DtypeSet],
    impl: Rule | str,
    jvp: Any = no_derivative,
    transpose: Sequence[Rule | None] | None = None,
    result: Rule = same_dtype,
    weak: bool = True,
    widen: bool = True,
    agree: bool = True,
) -> Primitive:
    """A primitive that computes each element of its result from one element of each operand.

    `accepts` is one set of dtypes, or one per argument; `result(*avals, **params)` the result's
    dtype; `weak` whether it is weakly typed when all operands are; `agree` whether operands must
    have one dtype; `widen` whether `impl` sees float32 in place of bfloat16 and float16.
    """
    per_argument = not isinstance(next(iter(accepts)), np.dtype)
    accepted: Any = accepts if per_argument else [accepts] * len(arguments)

    @remembered
    def abstract(*avals: ShapedArray, **params: Any) -> ShapedArray:
        for argument, aval, allowed in zip(arguments, avals, accepted, strict=True):
            check_dtype(name, argument, aval, allowed)
        if agree:
            check_same_dtype(name, arguments, avals)
        shape = common_shape(name, arguments, avals)
        is_weak = weak and all(a.weak_type for a in avals)
        return ShapedArray(shape, result(*avals, **params), is_weak)

    prim = Primitive(
        name,
        abstract=abstract,
        impl=quiet(impl, widen),
        jvp=linear,
        transpose=nonlinear(name) if transpose is None else elementwise_transpose(transpose),
        batch=Refused("is set below"),
        dims=elementwise_dims,
    )
    prim.batch = elementwise_batch(prim)
    if jvp is not linear:
        prim.jvp = jvp if callable(jvp) or is_refused(jvp) else elementwise_jvp(prim, jvp)
    return prim


# ---- the elementwise families ------------------------------------------------------------------


def unary(
    name: str,
    *,
    accepts: DtypeSet,
    impl: Rule | str | None = None,
    jvp: Any = no_derivative,
    transpose: Rule | None = None,
    **more: Any,
) -> Primitive:
    """An elementwise primitive of one operand. Its jvp is `lambda t, x, out: ...`.

    Without `impl` it is the NumPy function of the same name.
    """
    return elementwise(
        name,
        ("x",),
        accepts=accepts,
        impl=impl or name,
        jvp=jvp if jvp in (linear, no_derivative) else (jvp,),
        transpose=None if transpose is None else (transpose,),
        **more,
    )


def binary(
    name: str,
    *,
    accepts: DtypeSet | Sequence[DtypeSet],
    impl: Rule | str,
    jvp: Any = no_derivative,
    transpose: Sequence[Rule | None] | None = None,
    **more: Any,
) -> Primitive:
    """An elementwise primitive of two operands. Its jvps are `lambda t, x, y, out: ...`."""
    return elementwise(
        name, ("x", "y"), accepts=accepts, impl=impl, jvp=jvp, transpose=transpose, **more
    )


def comparison(name: str, *, accepts: DtypeSet, impl: Rule | str) -> Primitive:
    """An elementwise primitive that answers a question about two operands."""
    return elementwise(
        name, ("x", "y"), accepts=accepts, impl=impl, result=lambda x, y: dtypes.bool_
    )


# ---- reductions --------------------------------------------------------------------------------


def reduction(
    name: str,
    *,
    accepts: DtypeSet,
    impl: Rule,
    combine: str,
    jvp: Any = no_derivative,
    weak: bool = True,
) -> Primitive:
    """A primitive that combines all elements along `axes`, which disappear.

    Its jvp is `lambda t, x, out, axes: ...`; `impl(xp, x, axes)` gives the values; `combine` names
    the operator that joins the results of two parts.
    """

    @remembered
    def abstract(x: ShapedArray, *, axes: tuple[int, ...]) -> ShapedArray:
        check_dtype(name, "operand", x, accepts)
        return ShapedArray(reduced_shape(x, axes, name), x.dtype, weak and x.weak_type)

    def batch(axis: Any, operands: Any, at: Any, *, axes: tuple[int, ...]) -> Any:
        moved = shifted(axes, at[0])
        out_dim = at[0] - sum(d < at[0] for d in moved)
        return prim.bind(operands[0], axes=moved), out_dim

    def differentiate(primals: Any, tangents: Any, *, axes: tuple[int, ...]) -> Any:
        out = prim.bind(primals[0], axes=axes)
        if jvp == no_derivative or typeof(out).tangent().dtype == dtypes.float0:
            return out, zero_tangent(out)
        return out, jvp(tangents[0], primals[0], out, axes)

    prim = Primitive(
        name,
        abstract=abstract,
        impl=quiet(lambda xp, x, *, axes: impl(xp, x, axes)),
        jvp=differentiate,
        transpose=nonlinear(name),
        batch=batch,
        dims=reduction_dims(combine),
    )
    return prim
