"""Functions of pytrees as functions of flat lists; the base of all transformations of the API."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import ArgumentError, GradError, RefusedError, ShapeError, VaryingTypeError
from spmd.base.source import current_source
from spmd.base.traceback_filter import simplify
from spmd.base.tree import (
    TreeDef,
    register_pytree_node,
    tree_flatten,
    tree_unflatten,
)
from spmd.base.util import function_name, handles, wraps
from spmd.core.aval import ShapedArray, is_arraylike, typeof
from spmd.core.ir import ClosedJaxpr, Jaxpr
from spmd.core.primitive import Zero
from spmd.lax.convert import convert_element_type
from spmd.sharding.array import array_of


class FlatFunction:
    """A function of pytrees as a function of flat lists; remembers its output's structure."""

    def __init__(self, f: Callable[..., Any], in_tree: TreeDef, has_aux: bool = False):
        self.f = f
        self.in_tree = in_tree
        self.has_aux = has_aux
        self.out_tree: TreeDef | None = None
        self.aux_tree: TreeDef | None = None
        # Leaves of aux that are no arrays pass by: they concern no transformation.
        self.aux_objects: dict[int, Any] = {}
        self.num_out = 0

    def __call__(self, *flat: Any) -> list[Any]:
        args, kwargs = tree_unflatten(self.in_tree, flat)
        out = self.f(*args, **kwargs)
        if self.has_aux:
            if not (isinstance(out, (tuple, list)) and len(out) == 2):
                raise GradError(
                    f"{function_name(self.f)}: has_aux=True needs a pair (value, aux), but the "
                    f"function returned {_in_words(out)}"
                )
            out, aux = out
            extra, self.aux_tree = tree_flatten(aux)
            self.aux_objects = {k: x for k, x in enumerate(extra) if not is_arraylike(x)}
            extra = [x for x in extra if is_arraylike(x)]
        else:
            extra = []
        leaves, self.out_tree = tree_flatten(out)
        check_outputs_are_arrays(self.f, [*leaves, *extra])
        self.num_out = len(leaves)
        return [*leaves, *extra]

    def value(self, outs: Sequence[Any]) -> Any:
        assert self.out_tree is not None
        return tree_unflatten(self.out_tree, outs[: self.num_out])

    def aux(self, outs: Sequence[Any]) -> Any:
        assert self.aux_tree is not None
        leaves = list(outs[self.num_out :])
        for place, x in self.aux_objects.items():  # in rising order of places
            leaves.insert(place, x)
        return tree_unflatten(self.aux_tree, leaves)


def _in_words(out: Any) -> str:
    """The value returned in place of a pair (value, aux), in words, and the fix, for an error."""
    if out is None:
        return "None; is its return statement missing?"
    if isinstance(out, (tuple, list)):
        return f"{len(out)} values; put all but the first into one: return value, (a, b)"
    if is_arraylike(out):
        return f"one array, {typeof(out).short()}; leave has_aux out, or return value, aux"
    return f"a {type(out).__name__}; write return value, aux"


def refuse_reduce_axes(what: str, reduce_axes: Sequence[Any]) -> None:
    """Raise for any axes: as in JAX, the parameter is there and takes none."""
    if reduce_axes:
        raise RefusedError(f"{what}: reduce_axes must be empty; sum gradients with lax.psum")


def check_function(transformation: str, fun: Any) -> None:
    """Raise an ArgumentError if what is to be transformed is no function."""
    if not callable(fun):
        raise ArgumentError(
            f"{current_source()}: {transformation}: {fun!r} of type {type(fun).__name__} "
            "is not a function"
        )


def check_cotangents(what: str, out_avals: Sequence[ShapedArray], cts: Sequence[Any]) -> None:
    """Raise a ShapeError if a cotangent has not the shape and dtype of its output."""
    for k, (x, aval) in enumerate(zip(cts, out_avals, strict=False)):
        want, have = aval.tangent(), typeof(x)
        if is_float0(want):
            continue
        if want.shape == have.shape and want.dtype == have.dtype:
            check_varies(f"{what}: cotangent leaf {k}", want, have)
            continue
        raise ShapeError(
            f"{current_source()}: {what}: cotangent leaf {k} must be "
            f"{want.dtype}{list(want.shape)} like the output, got {have.dtype}{list(have.shape)}"
        )


def check_varies(what: str, want: ShapedArray, have: ShapedArray) -> None:
    """Raise if a derivative varies over other manual axes than the value that it is of."""
    if want.vma == have.vma:
        return
    missing = tuple(sorted(want.vma - have.vma, key=str))
    fix = f"lax.pcast(x, {missing}, to='varying')" if missing else "lax.psum, which sums its terms"
    raise VaryingTypeError(
        f"{current_source()}: {what} must be {want.short()} like the value it is a derivative of, "
        f"got {have.short()}; use {fix}"
    )


def check_outputs_are_arrays(f: Callable[..., Any], leaves: Sequence[Any]) -> None:
    """Raise an ArgumentError if a transformed function returned something that is no array."""
    names = [f"output {k}" for k in range(len(leaves))]
    for name, x in zip(names, leaves, strict=True):
        try:
            typeof(x)
        except ArgumentError:
            raise ArgumentError(
                f"{function_name(f)} returned {x!r} of type {type(x).__name__} as {name}; "
                "a transformed function must return arrays, numbers or pytrees of them"
            ) from None


def as_array(x: Any) -> Any:
    """NumPy arrays and numbers as `Array`; arrays, tracers and float0 as they are."""
    if isinstance(x, (np.ndarray, np.generic, bool, int, float, complex)):
        return x if getattr(x, "dtype", None) == dtypes.float0 else array_of(x)
    return x


def as_derivative(t: Any) -> Any:
    """A tangent or cotangent as users get it: that of an integer is a NumPy array of float0."""
    aval = t.aval if isinstance(t, Zero) else typeof(t)
    if is_float0(aval):
        return np.zeros(aval.shape, dtypes.float0)
    return array_of(np.zeros(aval.shape, aval.dtype), aval) if isinstance(t, Zero) else as_array(t)


def is_float0(aval: ShapedArray) -> bool:
    """Whether a derivative of this type carries no information, as those of integers do."""
    return aval.dtype == dtypes.float0


def as_primal_type(ct: Any, aval: ShapedArray) -> Any:
    """A cotangent with the weak type of its primal, so that `x - lr * grad` keeps `x`'s type."""
    if not aval.weak_type or aval.dtype != typeof(ct).dtype:
        return ct
    return convert_element_type(ct, aval.dtype, weak_type=True)


def plain_argnums(argnums: Any) -> int | tuple[int, ...]:
    """An integer, or a tuple of them, of anything that stands for one."""
    try:
        return operator.index(argnums)
    except TypeError:
        return tuple(map(operator.index, argnums))


def normal_argnums(f: Any, argnums: int | tuple[int, ...], count: int) -> tuple[int, ...]:
    name = f"grad({function_name(f)})"
    if argnums == ():
        raise ArgumentError(f"{current_source()}: {name}: argnums=() names no argument")
    out: list[int] = []
    for k in (argnums,) if isinstance(argnums, int) else argnums:
        if not hasattr(k, "__index__") or not -count <= operator.index(k) < count:
            raise ArgumentError(
                f"{current_source()}: {name}: argnums={argnums} names positional "
                f"argument {k}, but the call has {count}"
            )
        if k % count in out:
            raise ArgumentError(
                f"{current_source()}: {name}: argnums={argnums} names argument {k % count} twice"
            )
        out.append(k % count)
    return tuple(out)


def partial_of(f: Callable[..., Any], argnums: tuple[int, ...], args: Sequence[Any], kwargs: Any):
    """`f` as a function of the arguments in `argnums` only."""

    @wraps(f)
    def rest(*some: Any) -> Any:
        full = list(args)
        for k, x in zip(argnums, some, strict=True):
            full[k] = x
        return f(*full, **kwargs)

    return rest


class Residual:
    """A function that holds arrays, `call(closed, *args)`: a pytree of the constants of `closed`.

    A jitted function may return it, and another may take it: `vjp`, `linearize` and
    `linear_transpose` make such functions.
    """

    def __init__(self, call: Callable[..., Any], closed: ClosedJaxpr, rest: _Rest | None = None):
        self.call = call
        self.closed = closed
        self.rest = rest

    @handles
    def __call__(self, *args: Any) -> Any:
        try:
            return self.call(self.closed, *args)
        except Exception as error:
            simplify(error)
            raise


class _Rest:
    """All of a `Residual` but its arrays; equal only to itself, as its program is."""

    __slots__ = ("call", "jaxpr")

    def __init__(self, call: Callable[..., Any], jaxpr: Jaxpr):
        self.call, self.jaxpr = call, jaxpr

    def __repr__(self) -> str:
        return function_name(self.call)


def _flatten(f: Residual) -> tuple[Sequence[Any], _Rest]:
    if f.rest is None:
        f.rest = _Rest(f.call, f.closed.jaxpr)
    return f.closed.consts, f.rest


def _unflatten(rest: _Rest, consts: Sequence[Any]) -> Residual:
    return Residual(rest.call, ClosedJaxpr(rest.jaxpr, tuple(consts)), rest)


register_pytree_node(Residual, _flatten, _unflatten)
