"""`custom_vjp`: a function with the user's own reverse derivative.

Linearizing it runs `fwd` and writes one opaque linear equation that holds the residuals;
transposing that equation runs `bwd`. It has no forward derivative, and says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from spmd.base import dtypes
from spmd.base.context import attributed_to, state
from spmd.base.errors import (
    ClosedOverError,
    GradError,
    MissingRuleError,
    PytreeError,
    RuleError,
)
from spmd.base.record import record
from spmd.base.source import current_source
from spmd.base.tree import (
    TreeDef,
    broadcast_prefix,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from spmd.base.util import api_boundary, function_name, split_list
from spmd.core.aval import ShapedArray, typeof
from spmd.core.axis import cast_to_vma, vma_hooks
from spmd.core.call import call_primitive, nonzero, spread
from spmd.core.custom_common import (
    Call,
    CustomFunction,
    P,
    R,
    SymbolicZero,
    check_closure,
    is_users,
    positional,
    shown,
    sorted_axes,
    varying_as,
)
from spmd.core.mutable.cells import Cell, put_cells, take_cells
from spmd.core.primitive import Linear, Primitive, Refused, Zero
from spmd.core.structural import reduce_sum
from spmd.core.trace import CONSTANTS, EVAL, Tracer, unchanged
from spmd.core.vmap import BatchAxis, batch_flat, batch_jaxpr, fronts, to_front


class custom_vjp(CustomFunction[P, R]):
    """Give `fun` its own reverse derivative, set with `defvjp(fwd, bwd)`.

    `fwd(*args)` returns (value, residuals), and `bwd(residuals, ct)` the tuple of the cotangents of
    the arguments, of their shapes and dtypes; `ct` has those of the value. Arguments
    `nondiff_argnums` or `nondiff_argnames` are not differentiated; `bwd` gets them first. A call
    without rules raises `GradError`, and so do rules that return another structure. Forward mode
    raises `RefusedError`.

    >>> @spmd.custom_vjp
    ... def f(x):
    ...     return x * x
    >>> f.defvjp(lambda x: (f(x), x), lambda x, ct: (10 * x * ct,))
    >>> spmd.grad(f)(3.0)
    Array(30., dtype=float32, weak_type=True)
    """

    fwd: Callable[..., Any] | None = None
    bwd: Callable[..., Any] | None = None

    def defvjp(
        self,
        fwd: Callable[..., Any],
        bwd: Callable[..., Any],
        symbolic_zeros: bool = False,
        optimize_remat: bool = False,
    ) -> None:
        """Set the rules: `fwd(*args) -> (out, residuals)`, `bwd(*nondiff, residuals, ct)`.

        With `symbolic_zeros` the leaves that `fwd` gets are `CustomVJPPrimal`s, which say whether
        an argument is differentiated, and cotangents that are zero are `SymbolicZero`s (both in
        `spmd.custom_derivatives`). `optimize_remat` changes nothing: values of `fwd` that
        `checkpoint` does not need are never computed.
        """
        del optimize_remat
        self.fwd, self.bwd, self.symbolic_zeros = fwd, bwd, symbolic_zeros

    @api_boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.fwd is None or self.bwd is None:
            raise MissingRuleError(
                f"custom_vjp: {function_name(self.fun)} has no rules; set them with .defvjp"
            )
        if state.trace is EVAL:
            return self.fun(*args, **kwargs)
        given = positional(self.fun, self._signature, args, kwargs)
        for k in self.nondiff_argnums:
            if any(isinstance(x, Tracer) for x in tree_leaves(given[k])):
                raise ClosedOverError(
                    f"{current_source()}: custom_vjp: argument {k} of {function_name(self.fun)} is "
                    "in nondiff_argnums, and a traced value: bwd would see it after its trace "
                    "ended. Leave it out of nondiff_argnums, and return None for it in bwd"
                )
        call = Call(self.fun, given, self.nondiff_argnums)
        rules = _VjpRules(call, self.fwd, self.bwd, self.symbolic_zeros)
        pair = {"_fwd": rules.forward, "_bwd": rules.backward}
        return self._bind(custom_vjp_call_p, call, pair)


@record
class CustomVJPPrimal:
    """A leaf of an argument of `fwd`, with `symbolic_zeros`: its value, and whether it moves."""

    value: Any
    perturbed: bool


class _VjpRules:
    """The user's fwd and bwd as functions of flat lists."""

    def __init__(
        self, call: Call, fwd: Callable[..., Any], bwd: Callable[..., Any], symbolic: bool
    ):
        self.call, self.fwd, self.bwd, self.symbolic = call, fwd, bwd, symbolic
        self.res_tree: TreeDef | None = None
        self.out_tree: TreeDef | None = None
        self.constants: list[bool] = []  # which residuals fwd gave as numbers, not as arrays
        self.cells: dict[int, Cell] = {}  # the mutable arrays among the residuals

    def forward(
        self, flat: Sequence[Any], perturbed: Sequence[bool]
    ) -> tuple[list[Any], list[Any]]:
        """(residuals, outs)."""
        call = self.call
        flat = list(map(unchanged, flat))
        if self.symbolic:
            flat = [CustomVJPPrimal(x, p) for x, p in zip(flat, perturbed, strict=True)]
        with attributed_to(None):
            pair = self.fwd(*call.place(call.unflatten(flat)))
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            raise GradError(
                f"the fwd rule of {call.name} must return a pair (out, residuals), got {pair!r}"
            )
        outs, self.out_tree = tree_flatten(pair[0])
        call.set_out_tree(self.out_tree, "fwd rule")
        residuals, self.res_tree = tree_flatten(pair[1])
        self.cells, residuals = take_cells(residuals)
        self.constants = [isinstance(x, CONSTANTS) for x in residuals]
        return residuals, outs

    def backward(self, residuals: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
        """One cotangent, or None, for each flat argument."""
        call = self.call
        assert self.res_tree is not None and self.out_tree is not None
        nondiff = [call.nondiff[i] for i in sorted(call.nondiff)]
        # A scalar array may have become a number on its way; what fwd gave as a number stays one.
        kept = zip(residuals, self.constants, strict=True)
        values = [x if c else unchanged(x) for x, c in kept]
        res = tree_unflatten(self.res_tree, put_cells(self.cells, values))
        avals = [ct.aval if isinstance(ct, Zero) else typeof(ct) for ct in cts]
        cts = [shown(ct, self.symbolic) for ct in cts]
        if state.axes:
            cts = [varying_as(ct, a) for ct, a in zip(cts, avals, strict=True)]
        with attributed_to(None):
            found = self.bwd(*nondiff, res, tree_unflatten(self.out_tree, cts))
        n = len(call.in_tree.parts)
        if not isinstance(found, (tuple, list)) or len(found) != n:
            raise GradError(
                f"the bwd rule of {call.name} must return a tuple of {n} cotangents, one for each "
                f"differentiable argument, got {found!r}"
            )
        flat: list[Any] = []
        for tree, ct in zip(call.in_tree.parts, found, strict=True):
            name = f"the cotangent that bwd of {call.name} returned"
            flat += _spread(tree, ct, name)
        flat = [
            None if isinstance(ct, SymbolicZero) else ct
            for k, ct in enumerate(flat)
            if k not in call.cells
        ]
        return [
            self._checked(k, ct, aval)
            for k, (ct, aval) in enumerate(zip(flat, call.avals, strict=True))
        ]

    def _checked(self, k: int, ct: Any, aval: ShapedArray) -> Any:
        """A cotangent of the shape of its argument, in the dtype of it."""
        want = aval.tangent()
        if ct is None or want.dtype == dtypes.float0:
            return ct
        got = typeof(ct)
        if got.shape != aval.shape:
            raise RuleError(
                f"the bwd rule of {self.call.name} returned a cotangent {got.strip_weak()} for "
                f"argument leaf {k}, which is {aval.strip_weak()}: the shape must be the same"
            )
        if got.dtype == want.dtype or got.weak_type:
            return ct
        if not dtypes.is_inexact(got.dtype) or dtypes.is_complex(got.dtype) != dtypes.is_complex(
            want.dtype
        ):
            raise RuleError(
                f"the bwd rule of {self.call.name} returned a cotangent {got.strip_weak()} for "
                f"argument leaf {k}, which is {aval.strip_weak()}: it must be of this dtype, or of "
                "a wider or narrower one (.astype converts)"
            )
        return ct.astype(want.dtype)


def _spread(tree: TreeDef, ct: Any, name: str) -> list[Any]:
    """A cotangent of an argument as one for each leaf; it may be a prefix of the argument's tree.

    A None stands for zeros. Raises the error of `TreeDef.flatten_up_to` for one that is no prefix.
    """
    if ct is None:
        return [None] * tree.num_leaves
    try:
        return tree.flatten_up_to(ct, name)
    except PytreeError:
        try:
            return broadcast_prefix(ct, tree.unflatten([object()] * tree.num_leaves), name)
        except Exception:  # as of a container that can't hold such leaves
            pass
        raise


def _custom_vjp_jvp(
    primals: Any, tangents: Any, *, num_consts: int, _fwd: Any, _bwd: Any, name: str, **_: Any
) -> Any:
    check_closure(name, tangents[:num_consts])
    residuals, outs = _fwd(primals[num_consts:], nonzero(tangents[num_consts:]))
    out_avals = tuple(typeof(x).tangent() for x in outs)
    flags = [a.dtype != dtypes.float0 for a in out_avals]
    given = [t for t in tangents[num_consts:] if not isinstance(t, Zero)]
    out_tangents = custom_lin_p.bind(
        *residuals,
        *given,
        num_res=len(residuals),
        in_nonzero=tuple(nonzero(tangents[num_consts:])),
        out_avals=out_avals,
        name=name,
        _bwd=_bwd,
    )
    kept = [t for t, f in zip(out_tangents, flags, strict=True) if f]
    return outs, spread(flags, kept, out_avals)


def _custom_vjp_batch(
    axis: BatchAxis,
    operands: Any,
    at: Any,
    *,
    jaxpr: Any,
    num_consts: int,
    _fwd: Any,
    _bwd: Any,
    name: str,
) -> Any:
    flags = [d is not None for d in at]
    batched, _ = batch_jaxpr(jaxpr, axis, flags, force_out=True)
    arg_flags = flags[num_consts:]
    res_dims: list[int | None] = []  # known once fwd has run
    outs = custom_vjp_call_p.bind(
        *fronts(axis, operands, at),
        jaxpr=batched,
        name=name,
        num_consts=num_consts,
        _fwd=_batched_fwd(_fwd, axis, arg_flags, res_dims),
        _bwd=_batched_bwd(_bwd, axis, arg_flags, res_dims),
    )
    return outs, [0] * len(outs)


def _batched_fwd(
    fwd: Callable[..., Any],
    axis: BatchAxis,
    arg_flags: Sequence[bool],
    res_dims: list[int | None],
) -> Callable[..., tuple[list[Any], list[Any]]]:
    """`fwd` of batched arguments; it notes in `res_dims` which residuals are batched."""

    def batched(args: Sequence[Any], perturbed: Sequence[bool]) -> tuple[list[Any], list[Any]]:
        counts: list[int] = []

        def flat(*xs: Any) -> list[Any]:
            residuals, outs = fwd(xs, perturbed)
            counts.append(len(residuals))
            return [*residuals, *outs]

        in_dims = [0 if f else None for f in arg_flags]
        found, dims = batch_flat(flat, axis, args, in_dims)
        # A residual that is one for all examples stays one: loops in bwd may test it.
        res_dims[:] = [None if d is None else 0 for d in dims[: counts[0]]]
        forced = [*res_dims, *(0 for _ in dims[counts[0] :])]
        found = [
            x if f is None else to_front(x, d, axis.size)
            for x, d, f in zip(found, dims, forced, strict=True)
        ]
        residuals, outs = split_list(found, counts)
        return residuals, outs

    return batched


def _batched_bwd(
    bwd: Callable[..., Any],
    axis: BatchAxis,
    arg_flags: Sequence[bool],
    res_dims: Sequence[int | None],
) -> Callable[..., list[Any]]:
    """`bwd` of batched residuals and cotangents."""

    @functools.wraps(bwd)
    def batched(residuals: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
        missing: list[bool] = []
        moved = nonzero(cts)
        avals = [ct.aval if isinstance(ct, Zero) else typeof(ct) for ct in cts]
        zeros = [a.update(shape=a.shape[1:]) for a in avals]

        def flat(*xs: Any) -> list[Any]:
            found = bwd(xs[: len(residuals)], spread(moved, xs[len(residuals) :], zeros))
            missing.extend(ct is None for ct in found)
            return [ct for ct in found if ct is not None]

        given = [*residuals, *(ct for ct in cts if not isinstance(ct, Zero))]
        in_dims = [*res_dims, *(0 for _ in given[len(residuals) :])]
        outs, dims = batch_flat(flat, axis, given, in_dims)
        pairs = iter(zip(outs, dims, strict=True))
        return [
            None if gone else _unbatch_ct(*next(pairs), batched_arg, axis)
            for gone, batched_arg in zip(missing, arg_flags, strict=True)
        ]

    return batched


def _unbatch_ct(ct: Any, dim: int | None, batched_arg: bool, axis: BatchAxis) -> Any:
    """A cotangent in the shape of its argument: summed where the argument was shared."""
    if batched_arg:
        return to_front(ct, dim, axis.size)
    return reduce_sum(to_front(ct, dim, axis.size), (0,))


# Its jaxpr could be transposed, but that would not be the derivative that its user gave.
_TRANSPOSE = (
    "a custom_vjp function cannot itself be transposed (by linear_transpose, or where the rule of "
    "a custom_jvp applies it to a tangent): bwd needs what fwd computes of a value; differentiate "
    "it with grad or vjp, or give both directions with custom_derivatives.linear_call"
)


def _text(eqn: Any, names: Any) -> tuple[str, dict[str, Any]]:
    params = eqn.params
    rules = getattr(params["_fwd"], "__self__", None)  # a batched one is a function
    return "custom_vjp_call", {
        "name": params["name"],
        "bwd": rules.bwd if rules else params["_bwd"],
        "call_jaxpr": params["jaxpr"],
        "fwd": rules.fwd if rules else params["_fwd"],
        "symbolic_zeros": rules.symbolic if rules else False,
    }


custom_vjp_call_p = call_primitive(
    "custom_vjp_call",
    text=_text,
    jvp=_custom_vjp_jvp,
    transpose=Refused(_TRANSPOSE),
    custom=True,
    batch=_custom_vjp_batch,
)

# The linear function whose transpose is the user's bwd.

_FORWARD = (
    "forward-mode differentiation (jvp, jacfwd) cannot be applied to a custom_vjp function; use "
    "reverse mode (grad, vjp, jacrev), or write the rule with custom_jvp"
)


def _custom_lin_transpose(
    cts: Any,
    *operands: Any,
    num_res: int,
    in_nonzero: Any,
    out_avals: Any,
    name: str,
    _bwd: Any,
) -> Any:
    residuals = operands[:num_res]
    is_strict = bool(state.axes) and _is_users(_bwd)
    if is_strict:
        cts = [
            ct if isinstance(ct, Zero) else varying_as(ct, a)
            for ct, a in zip(cts, out_avals, strict=True)
        ]
    found = _bwd(residuals, cts)
    avals: list[ShapedArray] = [x.aval for x in operands[num_res:] if isinstance(x, Linear)]
    kept = [ct for ct, nz in zip(found, in_nonzero, strict=True) if nz]
    if is_strict:
        for k, (ct, aval) in enumerate(zip(kept, avals, strict=True)):
            _check_varies(name, k, ct, aval)
    return [None] * num_res + [
        Zero(a) if ct is None else match_vma(ct, a) for ct, a in zip(kept, avals, strict=True)
    ]


def _is_users(bwd: Any) -> bool:
    """Whether flat `bwd` is a user's rule, which may be for several examples at once."""
    while hasattr(bwd, "__wrapped__"):
        bwd = bwd.__wrapped__
    rules = getattr(bwd, "__self__", None)
    return isinstance(rules, _VjpRules) and is_users(rules.bwd)


def _check_varies(name: str, k: int, ct: Any, aval: ShapedArray) -> None:
    """Raise if in a `shard_map` a cotangent varies over other axes than its argument."""
    if ct is None or isinstance(ct, Zero) or aval.explicit is not None:
        return
    got = typeof(ct)
    if got.vma == aval.vma or got.explicit is not None:
        return
    more, fewer = got.vma - aval.vma, aval.vma - got.vma
    advice = [f"lax.psum(ct, {sorted_axes(more)})"] * bool(more)
    advice += [f"lax.pcast(ct, {sorted_axes(fewer)}, to='varying')"] * bool(fewer)
    raise RuleError(
        f"the bwd rule of {name} returned a cotangent {got.short()} for differentiated argument "
        f"leaf {k}, which is {aval.short()}: both must vary over the same axes of the shard_map; "
        f"use {' and '.join(advice)} in it"
    )


def match_vma(ct: Any, aval: ShapedArray) -> Any:
    """A cotangent that varies where its argument does not is summed over those axes."""
    extra = tuple(sorted(typeof(ct).vma - aval.vma - aval.manual_sets()[1], key=str))
    return vma_hooks.total(ct, extra) if extra else cast_to_vma(ct, aval.vma, typeof(ct).vma)


custom_lin_p = Primitive(
    "custom_lin",
    abstract=lambda *avals, out_avals, **_: list(out_avals),
    impl=Refused(_FORWARD),
    jvp=Refused(_FORWARD),
    transpose=_custom_lin_transpose,
    batch=Refused("the linear part of a custom_vjp function cannot be batched; " + _FORWARD),
    dims=Refused(_FORWARD),
    multiple=True,
    vma="given",
)
