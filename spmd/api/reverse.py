"""Reverse mode for users: `vjp`, `grad`, `value_and_grad`, over pytrees, with clear errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, overload

import numpy as np

from spmd.api.compiled import jit
from spmd.api.flat import (
    FlatFunction,
    Residual,
    as_array,
    as_derivative,
    as_primal_type,
    check_cotangents,
    check_function,
    normal_argnums,
    partial_of,
    plain_argnums,
    refuse_reduce_axes,
)
from spmd.api.summed import warn_of_summed_loss
from spmd.base import dtypes
from spmd.base.context import state
from spmd.base.errors import GradError, PytreeError
from spmd.base.source import current_source
from spmd.base.tree import (
    tree_flatten,
    tree_leaves,
    tree_structure,
    tree_unflatten,
)
from spmd.base.util import api_boundary, described, function_name, wraps
from spmd.core.argument_names import (
    check_arrays,
    leaf_names,
    parameter_names,
)
from spmd.core.aval import is_arraylike, typeof
from spmd.core.axis import cast_to_vma
from spmd.core.ir import ClosedJaxpr
from spmd.core.jvp import instantiate
from spmd.core.linearize import linearize_flat
from spmd.core.primitive import Linear, Zero
from spmd.core.transpose import backward_pass
from spmd.sharding.array import from_numpy

P = ParamSpec("P")
R = TypeVar("R")


class _Pull:
    """The work of a pullback: cotangents of outputs to cotangents of inputs, by a linear jaxpr."""

    def __init__(self, flat_f: FlatFunction, avals: Any, nonzero: Any):
        self.__name__ = function_name(flat_f.f)
        self.flat_f = flat_f
        self.in_avals, self.out_avals = avals
        self.in_nonzero, self.out_nonzero = nonzero

    def flat(self, linear: ClosedJaxpr, cts: Sequence[Any]) -> list[Any]:
        """Cotangents of the flat inputs, from cotangents of the flat outputs."""
        given = [ct for ct, nz in zip(cts, self.out_nonzero, strict=False) if nz]
        given += [Zero(a) for a in linear.out_avals[len(given) :]]
        operands = [Linear(a) for a in linear.in_avals]
        found = iter(backward_pass(linear.jaxpr, linear.consts, operands, given))
        return [
            as_primal_type(instantiate(next(found) if nz else Zero(a.tangent())), a)
            for a, nz in zip(self.in_avals, self.in_nonzero, strict=True)
        ]

    def __call__(self, linear: ClosedJaxpr, ct: Any) -> Any:
        tree = self.flat_f.out_tree
        assert tree is not None
        cts, got = tree_flatten(ct)
        name = self.__name__
        if got != tree:
            raise PytreeError(
                f"{current_source()}: vjp({name}): the cotangent must have the structure of the "
                f"output, {tree}, got {got}"
            )
        check_cotangents(f"vjp({name})", self.out_avals, cts)
        args, _ = tree_unflatten(
            self.flat_f.in_tree, [as_derivative(x) for x in self.flat(linear, cts)]
        )
        return args


def pull_flat(pullback: Residual, cts: Sequence[Any]) -> list[Any]:
    """Cotangents of the flat inputs of a function, from those of its flat outputs."""
    return pullback.call.flat(pullback.closed, cts)  # type: ignore[attr-defined]


@overload
def vjp(
    fun: Callable[..., R],
    *primals: Any,
    has_aux: Literal[False] = False,
    reduce_axes: Sequence[Any] = (),
) -> tuple[R, Callable[[Any], tuple[Any, ...]]]: ...


@overload
def vjp(
    fun: Callable[..., Any],
    *primals: Any,
    has_aux: Literal[True],
    reduce_axes: Sequence[Any] = (),
) -> tuple[Any, Callable[[Any], tuple[Any, ...]], Any]: ...


@api_boundary
def vjp(
    fun: Callable[..., Any],
    *primals: Any,
    has_aux: bool = False,
    reduce_axes: Sequence[Any] = (),
) -> Any:
    """Evaluate `fun` and return the function that pulls cotangents back.

    The result is the pair (value, pullback); with `has_aux=True`, `fun` returns (value, aux) and
    the result is (value, pullback, aux). `pullback` takes a cotangent of the structure, shapes and
    dtypes of the value, and returns the tuple of the cotangents of `primals`, of their shapes and
    dtypes (float0 for integers and booleans). It is a pytree: jitted functions may return and take
    it. It raises `PytreeError` or `ShapeError` for a cotangent that does not match. `reduce_axes`
    must be empty, else a `RefusedError` is raised.

    >>> y, pullback = spmd.vjp(lambda x: x * x, 3.0)
    >>> pullback(1.0)
    (Array(6., dtype=float32, weak_type=True),)
    """
    refuse_reduce_axes("vjp", reduce_axes)
    outs, flat_f, pullback = vjp_flat(fun, primals, has_aux)
    value = flat_f.value(outs)
    return (value, pullback, flat_f.aux(outs)) if has_aux else (value, pullback)


def fwd_and_bwd(
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool = False,
    jitted: bool = True,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Make two functions of `fun`, its forward and its backward pass.

    `fwd(*args)` is `(out, pullback)`, and (out, pullback, aux) if `has_aux`; `bwd(pullback, ct)` is
    the tuple of cotangents of the arguments `argnums`, of their shapes and dtypes, or the one
    cotangent if `argnums` is an integer. Both are jitted if `jitted`. Calling them raises the
    errors of `vjp`: `PytreeError` and `ShapeError`.

    >>> fwd, bwd = spmd.fwd_and_bwd(lambda x, w: x * w, argnums=1)
    >>> y, pullback = fwd(3.0, 2.0)
    >>> bwd(pullback, 1.0)
    Array(3., dtype=float32, weak_type=True)
    """
    argnums = plain_argnums(argnums)
    numbers = (argnums,) if isinstance(argnums, int) else argnums

    def fwd(*args: Any) -> Any:
        at = tuple(n % len(args) for n in numbers)

        def chosen(*moving: Any) -> Any:
            given = dict(zip(at, moving, strict=True))
            return fun(*(given.get(k, x) for k, x in enumerate(args)))

        return vjp(chosen, *(args[n] for n in at), has_aux=has_aux)

    def bwd(pullback: Residual, ct: Any) -> Any:
        found = pullback(ct)
        return found[0] if isinstance(argnums, int) else found

    wraps(fun)(fwd)
    return (jit(fwd), jit(bwd)) if jitted else (fwd, bwd)


def vjp_flat(
    fun: Callable[..., Any], primals: Sequence[Any], has_aux: bool
) -> tuple[list[Any], FlatFunction, Residual]:
    flat, in_tree = tree_flatten((tuple(primals), {}))
    if not all(map(is_arraylike, flat)):
        check_arrays(f"vjp({function_name(fun)})", leaf_names(fun, primals), flat)
    flat_f = FlatFunction(fun, in_tree, has_aux)
    nonzero = [dtypes.is_inexact(typeof(x).dtype) for x in flat]
    # Residuals must not change when the caller writes to a NumPy array before pulling back.
    flat = [as_array(x) if nz else x for x, nz in zip(flat, nonzero, strict=True)]
    outs, linear, out_nonzero = linearize_flat(flat_f, flat, nonzero)
    outs = [as_array(x) for x in outs]
    avals = ([typeof(x) for x in flat], [typeof(x) for x in outs[: flat_f.num_out]])
    return outs, flat_f, Residual(_Pull(flat_f, avals, (nonzero, out_nonzero)), linear)


def grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
) -> Callable[P, Any]:
    """Make the function that computes the gradient of the scalar function `fun`.

    The gradient has the structure, shapes and dtypes of argument `argnums` (a tuple of them if
    `argnums` is a sequence). With `has_aux=True`, `fun` returns (value, aux) and the result is
    (gradient, aux). With `holomorphic=True`, arguments and value are complex. With
    `allow_int=True`, integer arguments get gradients of dtype float0. `reduce_axes` must be empty.

    Raises `GradError` if the value is not a real scalar, or if an argument is not of a floating
    dtype; `ArgumentError` if `fun` is no function or has no such argument; `RefusedError` for
    `reduce_axes`.

    >>> spmd.grad(lambda x: x * x)(3.0)
    Array(6., dtype=float32, weak_type=True)
    >>> spmd.grad(lambda w, x: (w * x).sum(), argnums=(0, 1))(2.0, np.ones(2))
    (Array(2., dtype=float32, weak_type=True), Array([2., 2.], dtype=float32))
    """
    both = value_and_grad(fun, argnums, has_aux, holomorphic, allow_int, reduce_axes)

    @api_boundary
    @described(fun, "The gradient of {0} with respect to argument(s) {1}.", argnums)
    def gradient(*args: P.args, **kwargs: P.kwargs) -> Any:
        value, found = both(*args, **kwargs)
        return (found, value[1]) if has_aux else found

    return gradient


def value_and_grad(
    fun: Callable[P, R],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
) -> Callable[P, tuple[R, Any]]:
    """Make the function that computes the value of the scalar function `fun`, and its gradient.

    The result is the pair (value, gradient), or ((value, aux), gradient) with `has_aux=True`.
    `argnums`, `holomorphic`, `allow_int`, `reduce_axes`, the gradient's shape and dtype, and the
    errors are those of `grad`: `GradError`, `ArgumentError` and `RefusedError`.

    >>> spmd.value_and_grad(lambda x: x * x)(3.0)
    (Array(9., dtype=float32, weak_type=True), Array(6., dtype=float32, weak_type=True))
    >>> (value, aux), slope = spmd.value_and_grad(lambda x: (x * x, -x), has_aux=True)(3.0)
    >>> value.item(), aux.item(), slope.item()
    (9.0, -3.0, 6.0)
    """
    check_function("grad", fun)
    refuse_reduce_axes("grad", reduce_axes)
    argnums = plain_argnums(argnums)

    @api_boundary
    @described(fun, "The value of {0}, and its gradient with respect to argument(s) {1}.", argnums)
    def both(*args: P.args, **kwargs: P.kwargs) -> Any:
        nums = normal_argnums(fun, argnums, len(args))
        some = [args[k] for k in nums]
        check_differentiable(fun, nums, args, holomorphic, allow_int)
        outs, flat_f, pullback = vjp_flat(partial_of(fun, nums, args, kwargs), some, has_aux)
        _check_scalar(fun, flat_f, outs, holomorphic)
        if state.axes:
            warn_of_summed_loss(function_name(fun), pullback.closed)
        aval = typeof(outs[0]).update(vma=())
        one = from_numpy(np.ones((), aval.dtype), aval, copy=False)
        if varies := typeof(outs[0]).vma:
            one = cast_to_vma(one, varies, aval.vma)
        found, _ = tree_unflatten(
            flat_f.in_tree, [as_derivative(x) for x in pull_flat(pullback, [one])]
        )
        gradient = found[0] if isinstance(argnums, int) else tuple(found)
        value = flat_f.value(outs)
        return ((value, flat_f.aux(outs)) if has_aux else value), gradient

    return both


def check_differentiable(
    fun: Any,
    nums: tuple[int, ...],
    args: Any,
    holomorphic: bool,
    allow_int: bool,
    what: str = "grad",
) -> None:
    """Refuse arguments of a dtype that has no derivative; `what` is the user's transformation."""

    def is_good(x: Any) -> bool:
        dtype = typeof(x).dtype
        good = dtypes.is_complex(dtype) if holomorphic else dtypes.is_inexact(dtype)
        return good or (allow_int and not dtypes.is_inexact(dtype))

    for k in nums:
        leaves = tree_leaves(args[k])
        if all([is_arraylike(x) and is_good(x) for x in leaves]):
            continue  # as almost always: names are made for errors only
        names = leaf_names(lambda x: x, [args[k]])
        parameter = parameter_names(fun, len(args))[k]
        named = [parameter + n.removeprefix("x") for n in names]
        check_arrays(f"{what}({function_name(fun)})", named, leaves)
        for name, x in zip(named, leaves, strict=True):
            dtype = typeof(x).dtype
            wanted = "a complex" if holomorphic else "a floating"
            if not is_good(x):
                raise GradError(
                    f"{current_source()}: {what}({function_name(fun)}): argument {name} has dtype "
                    f"{dtypes.long_name(dtype)}, and only {wanted} dtype can be differentiated. "
                    f"Convert it ({name}.astype(float)), choose other argnums, or allow_int=True."
                )


def _check_scalar(fun: Any, flat_f: FlatFunction, outs: list[Any], holomorphic: bool) -> None:
    """Raise a GradError unless the function returned one real (or holomorphic) floating scalar."""
    name = f"{current_source()}: grad({function_name(fun)})"
    if flat_f.num_out != 1 or flat_f.out_tree != tree_structure(0):
        tree = flat_f.out_tree
        if tree == tree_structure(None):
            advice = "it returned None: is its return statement missing?"
        elif flat_f.has_aux:
            advice = (
                f"with has_aux=True the first of its pair, but that is a pytree {tree}; "
                "are value and aux the other way round?"
            )
        elif tree is not None and tree.kind in (tuple, list) and len(tree.parts) == 2:
            advice = (
                f"got a pytree {tree}; for a pair (value, aux) say has_aux=True, for all "
                "derivatives use jacrev"
            )
        else:
            advice = f"got a pytree {tree}; use has_aux=True for extra outputs, or jacrev"
        raise GradError(f"{name}: the function must return one scalar, {advice}")
    aval = typeof(outs[0])
    if aval.shape:
        raise GradError(
            f"{name}: the function must return a scalar, got shape {aval.shape}; "
            "reduce it (.sum() or .mean()), or use jacrev"
        )
    if not dtypes.is_inexact(aval.dtype):
        raise GradError(
            f"{name}: the function returned dtype {aval.dtype}, which has no gradient; "
            "it must return a floating scalar"
        )
    check_field(name, outs, holomorphic)


def check_field(name: str, outs: Sequence[Any], holomorphic: bool) -> None:
    """Refuse results whose derivative would be that of a part of them only.

    A complex result has a derivative as a complex function or none; a real result has no
    derivative as a complex function.
    """
    for dtype in [typeof(x).dtype for x in outs]:
        if dtypes.is_complex(dtype) and not holomorphic:
            raise GradError(
                f"{name}: the function returned {dtype}; take the real part, "
                "or use holomorphic=True"
            )
        if holomorphic and not dtypes.is_complex(dtype):
            raise GradError(
                f"{name}: holomorphic=True is for functions that return complex numbers, and this "
                f"one returned {dtype}; without it the gradient of a real function is found"
            )
