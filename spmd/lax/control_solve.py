"""`custom_linear_solve` and `custom_root`: solutions differentiated by the equation they solve.

How a solution was found does not matter for its derivative: with `A x = b` it is the solution of
`A dx = db - dA x`, with `f(x) = 0` that of the linearised equation (the implicit function theorem).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from spmd.base.errors import GradError, PytreeError, ShapeError
from spmd.base.source import current_source
from spmd.base.tree import TreeDef, tree_flatten, tree_unflatten
from spmd.base.util import api_boundary, split_list
from spmd.core.aval import ShapedArray, typeof
from spmd.core.call import derived, impl_jaxpr, nonzero
from spmd.core.custom import custom_jvp
from spmd.core.ir import ClosedJaxpr
from spmd.core.jvp import instantiate, jvp_flat, jvp_jaxpr, zero_tangent
from spmd.core.primitive import Primitive, Refused, Zero
from spmd.core.rewrite import close, eval_closed
from spmd.core.structural import is_linear, to_front
from spmd.core.transpose import transpose_jaxpr
from spmd.core.vmap import batch_jaxpr, fronts
from spmd.lax.arithmetic import neg, sub
from spmd.lax.control import Staged, inner_axes, inner_effects

# ---- custom_linear_solve -----------------------------------------------------------------------


@api_boundary
def custom_linear_solve(
    matvec: Callable[[Any], Any],
    b: Any,
    solve: Callable[[Callable[[Any], Any], Any], Any],
    transpose_solve: Callable[[Callable[[Any], Any], Any], Any] | None = None,
    symmetric: bool = False,
    has_aux: bool = False,
) -> Any:
    """Solve `matvec(x) == b` with `solve(matvec, b)`, differentiated by that equation.

    `matvec` is linear and keeps the structure, shapes and dtypes of the pytree `b`. `solve` need
    not be differentiable. Reverse mode needs `transpose_solve(vecmat, b)`, which gets the transpose
    of `matvec`; with `symmetric=True`, `solve` serves for both. With `has_aux=True` both return (x,
    aux), and so does this function.

    Raises `PytreeError` or `ShapeError` if a function returns another structure, shape or dtype,
    and `GradError` in reverse mode without a `transpose_solve`.

    >>> matvec = lambda x: 2.0 * x
    >>> lax.custom_linear_solve(matvec, 3.0, lambda matvec, b: b / matvec(1.0))
    Array(1.5, dtype=float32, weak_type=True)
    """
    flat, tree = tree_flatten(b)
    avals = [typeof(x).strip_weak() for x in flat]
    in_tree = tree_flatten((b,))[1]
    forward = Staged(matvec, in_tree, avals)
    _check_map("matvec", forward, tree, avals, 0)
    found = Staged(partial(solve, matvec), in_tree, avals)
    num_aux = _check_map("solve", found, tree, avals, int(has_aux))
    transpose_solve = solve if transpose_solve is None and symmetric else transpose_solve
    jaxprs: dict[str, Any] = {"matvec": forward.closed, "solve": found.closed}
    consts = [forward.consts, found.consts, [], []]
    if transpose_solve is not None:
        backward, vecmat = forward.closed, matvec
        if not symmetric:
            backward, vecmat = _transposed(forward, tree, len(avals))
        back = Staged(partial(transpose_solve, vecmat), in_tree, avals)
        _check_map("transpose_solve", back, tree, avals, int(has_aux))
        jaxprs |= {"vecmat": backward, "transpose_solve": back.closed}
        consts[2:] = [forward.consts, back.consts]
    else:
        jaxprs |= {"vecmat": None, "transpose_solve": None}
    outs = linear_solve_p.bind(
        *(c for group in consts for c in group),
        *flat,
        counts=tuple(map(len, consts)),
        num_aux=num_aux,
        **jaxprs,
    )
    assert found.out_tree is not None
    return tree_unflatten(found.out_tree, outs)


def _check_map(
    name: str, staged: Staged, tree: TreeDef, avals: Sequence[ShapedArray], has_aux: int
) -> int:
    """Raise the user's error if a map's result is not like b; gives the number of aux leaves."""
    out_tree, outs = staged.out_tree, list(staged.out_avals)
    assert out_tree is not None
    if has_aux:
        pair = tree_unflatten(out_tree, list(range(len(outs))))
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise PytreeError(
                f"{current_source()}: {name} must return (x, aux), as has_aux=True; got {out_tree}"
            )
        out_tree = tree_flatten(pair[0])[1]
    if out_tree != tree:
        raise PytreeError(
            f"{current_source()}: {name} must return the structure it is given, {tree}; it "
            f"returned {out_tree}"
        )
    for given, returned in zip(avals, outs, strict=False):
        if (given.shape, given.dtype) != (returned.shape, returned.dtype):
            raise ShapeError(
                f"{current_source()}: {name} must return the shapes and dtypes it is given; given "
                f"{given}, returned {returned}"
            )
    return len(outs) - len(avals)


def _transposed(forward: Staged, tree: TreeDef, count: int) -> tuple[ClosedJaxpr, Any]:
    """The transpose of a linear map: its jaxpr, and as a function of the user's pytree."""
    linear = [False] * len(forward.consts) + [True] * count
    jaxpr, _ = transpose_jaxpr(forward.closed, linear, [True] * count, force=True)

    def vecmat(x: Any) -> Any:
        return tree_unflatten(tree, eval_closed(jaxpr, *forward.consts, *tree_flatten(x)[0]))

    return jaxpr, vecmat


def _parts(operands: Sequence[Any], counts: Sequence[int]) -> list[Any]:
    """Operands: the constants of matvec, solve, vecmat, transpose_solve, and b."""
    return split_list(operands, list(counts))


def _abstract(*avals: ShapedArray, solve: ClosedJaxpr, counts: Any, **_: Any) -> list[ShapedArray]:
    """The results of solve; x is of a weak type where b is."""
    outs, b = [a.strip_weak() for a in solve.out_avals], avals[sum(counts) :]
    found, aux = outs[: len(b)], outs[len(b) :]
    return [*(x.update(weak_type=y.weak_type) for x, y in zip(found, b, strict=True)), *aux]


def _impl(xp: Any, *operands: Any, solve: ClosedJaxpr, counts: Any, **_: Any) -> Any:
    _, consts, _, _, b = _parts(operands, counts)
    return impl_jaxpr(xp, solve, *consts, *b)


def _expand(avals: Any, params: dict[str, Any]) -> ClosedJaxpr:
    """The compiled program: solve, of its own constants and b."""
    solve, counts = params["solve"], params["counts"]
    others = [params[n] for n in ("matvec", "solve", "vecmat", "transpose_solve")]
    pairs = zip(others, counts, strict=True)
    avals = [a for jaxpr, n in pairs if n for a in jaxpr.in_avals[:n]]
    avals += solve.in_avals[counts[1] :]

    def make() -> ClosedJaxpr:
        def flat(*args: Any) -> list[Any]:
            _, consts, _, _, b = _parts(args, counts)
            return eval_closed(solve, *consts, *b)

        return close(flat, avals, "custom_linear_solve")

    # One solve may stand beside maps whose constants are batched and others whose are not.
    return derived(solve, ("custom_linear_solve", counts, *avals), make)


def _jvp(primals: Any, tangents: Any, *, num_aux: int, **params: Any) -> Any:
    """dx solves `A dx = db - dA x`; auxiliary results have no derivative."""
    counts = params["counts"]
    outs = linear_solve_p.bind(*primals, num_aux=num_aux, **params)
    *_, b = _parts(primals, counts)
    moved, *_, db = _parts(tangents, counts)
    right = [instantiate(t) for t in db]
    x, aux = split_list(outs, [len(b)])
    if any(nonzero(moved)):
        flags = [*nonzero(moved), *([False] * len(x))]
        jvp, _ = jvp_jaxpr(params["matvec"], flags, True)
        given = [t for t in moved if not isinstance(t, Zero)]
        changes = eval_closed(jvp, *primals[: counts[0]], *x, *given)[len(x) :]
        right = [sub(t, c) for t, c in zip(right, changes, strict=True)]
    dx = linear_solve_p.bind(*primals[: sum(counts)], *right, num_aux=num_aux, **params)
    return outs, [*dx[: len(b)], *map(zero_tangent, aux)]


def _transpose(cts: Any, *operands: Any, counts: Any, num_aux: int, **jaxprs: Any) -> Any:
    if jaxprs["transpose_solve"] is None:
        raise GradError(
            f"{current_source()}: custom_linear_solve: reverse mode needs transpose_solve=..., or "
            "symmetric=True"
        )
    matvec, solve, vecmat, transpose_solve, b = _parts(operands, counts)
    if any(map(is_linear, (*matvec, *solve, *vecmat, *transpose_solve))):
        raise GradError(
            f"{current_source()}: custom_linear_solve is linear in b only, not in what its "
            "functions close over"
        )
    swapped = {
        "matvec": jaxprs["vecmat"],
        "vecmat": jaxprs["matvec"],
        "solve": jaxprs["transpose_solve"],
        "transpose_solve": jaxprs["solve"],
    }
    found = linear_solve_p.bind(
        *vecmat,
        *transpose_solve,
        *matvec,
        *solve,
        *(instantiate(ct) for ct in cts[: len(b)]),
        counts=(counts[2], counts[3], counts[0], counts[1]),
        num_aux=num_aux,
        **swapped,
    )
    return [*([None] * sum(counts)), *found[: len(b)]]


def _batch(axis: Any, operands: Any, at: Any, *, counts: Any, num_aux: int, **jaxprs: Any) -> Any:
    """Every x and b is batched, whichever constants are."""
    moved = fronts(axis, operands, at)
    start = sum(counts)
    b = [
        to_front(x, None, axis.size) if d is None else x
        for x, d in zip(moved[start:], at[start:], strict=True)
    ]
    flags = _parts([d is not None for d in at], counts)
    names = ("matvec", "solve", "vecmat", "transpose_solve")
    batched = {
        name: None
        if jaxprs[name] is None
        else batch_jaxpr(jaxprs[name], axis, [*flags[k], *([True] * len(b))], force_out=True)[0]
        for k, name in enumerate(names)
    }
    outs = linear_solve_p.bind(*moved[:start], *b, counts=counts, num_aux=num_aux, **batched)
    return outs, [0] * len(outs)


linear_solve_p = Primitive(
    "custom_linear_solve",
    abstract=_abstract,
    impl=_impl,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
    dims=Refused("custom_linear_solve is expanded before it is partitioned"),
    expand=_expand,
    multiple=True,
    axes=inner_axes("solve"),
    effects=inner_effects("solve"),
)

# ---- custom_root -------------------------------------------------------------------------------


@api_boundary
def custom_root(
    f: Callable[[Any], Any],
    initial_guess: Any,
    solve: Callable[[Callable[[Any], Any], Any], Any],
    tangent_solve: Callable[[Callable[[Any], Any], Any], Any],
    has_aux: bool = False,
) -> Any:
    """Find a root of `f` with `solve(f, initial_guess)`, differentiated by `f(root) == 0`.

    `f` returns the structure, shapes and dtypes of its argument. `tangent_solve(g, y)` solves `g(x)
    == y` for linear g; for reverse mode it must be linear in y. With `has_aux=True`, `solve`
    (root, aux), and so does this function. Values that `f` closes over have derivatives, the guess
    has none. Raises `PytreeError` or `ShapeError` if a function returns another structure, shape or
    dtype.

    >>> def root(a):
    ...     newton = lambda f, x: a**0.5
    ...     return lax.custom_root(lambda x: x * x - a, 1.0, newton, lambda g, y: y / g(1.0))
    >>> float(root(4.0)), float(spmd.grad(root)(4.0))
    (2.0, 0.25)
    """
    flat, tree = tree_flatten(initial_guess)
    avals = [typeof(x) for x in flat]
    in_tree = tree_flatten((initial_guess,))[1]
    equation = Staged(f, in_tree, avals)
    _check_map("f", equation, tree, avals, 0)
    found = Staged(partial(solve, f), in_tree, avals)
    num_aux = _check_map("solve", found, tree, avals, int(has_aux))
    # The rule lives as long as a program: it holds jaxprs, and no values that they close over.
    f_jaxpr, solve_jaxpr = equation.closed, found.closed

    @custom_jvp
    def root(constants: Any, others: Any, guess: Any) -> Any:
        return eval_closed(solve_jaxpr, *others, *guess)

    @root.defjvp
    def root_jvp(primals: Any, tangents: Any) -> Any:
        constants, moved = primals[0], tangents[0]
        outs = root(*primals)
        x, aux = split_list(outs, [len(avals)])

        def at_x(*xs: Any) -> Any:
            return eval_closed(f_jaxpr, *constants, *xs)

        def linearised(t: Any) -> Any:
            changes = jvp_flat(at_x, x, tree_flatten(t)[0])[1]
            return tree_unflatten(tree, [instantiate(c) for c in changes])

        changes = jvp_flat(lambda *cs: eval_closed(f_jaxpr, *cs, *x), constants, moved)[1]
        right = [neg(instantiate(c)) for c in changes]
        dx = tree_flatten(tangent_solve(linearised, tree_unflatten(tree, right)))[0]
        return outs, [*dx, *(instantiate(zero_tangent(y)) for y in aux)]

    outs = root(list(equation.consts), list(found.consts), flat)
    assert found.out_tree is not None and num_aux >= 0
    return tree_unflatten(found.out_tree, outs)
