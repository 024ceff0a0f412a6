"""`sparsify`: functions of dense arrays that take sparse ones, and the operators of `BCOO`.

The function is traced with dense arrays of the same shapes; its jaxpr is then evaluated with the
rules below, each of which gets sparse arrays where the program has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import spmd.lax as lax
import spmd.numpy as snp
from spmd.api.flat import as_array
from spmd.base.errors import RefusedError
from spmd.base.tree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from spmd.base.util import wraps
from spmd.core.aval import ShapedArray, typeof
from spmd.core.ir import ClosedJaxpr, Jaxpr, Literal
from spmd.core.stage import trace_to_jaxpr
from spmd.experimental.sparse import products, shapes, windows
from spmd.experimental.sparse.base import JAXSparse
from spmd.experimental.sparse.bcoo import BCOO, bcoo_todense, full_buffers, like
from spmd.experimental.sparse.rows import BCSR

_rules: dict[str, Callable[..., Any]] = {}


def _is_sparse(x: Any) -> bool:
    return isinstance(x, JAXSparse)


def sparsify(f: Callable[..., Any], use_tracer: bool = False) -> Callable[..., Any]:
    """Make a function that does with sparse arguments what `f` does with dense ones.

    Arguments are pytrees of arrays, `BCOO` and `BCSR` arrays. Results stay sparse where an
    operation has a rule for it (products, sums of sparse arrays, functions that map 0 to 0, moves);
    another operation with a sparse operand raises a `RefusedError`. `use_tracer` has no effect.

    >>> from spmd.experimental import sparse
    >>> sparse.sparsify(lambda m, v: 2 * snp.sin(m) @ v)(sparse.eye(2), np.ones(2)).round(2)
    Array([1.68, 1.68], dtype=float32)
    """
    del use_tracer

    @wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs), is_leaf=_is_sparse)
        values = [x if _is_sparse(x) else snp.asarray(x) for x in leaves]
        avals = [ShapedArray(x.shape, x.dtype) if _is_sparse(x) else typeof(x) for x in values]
        out_tree: list[Any] = []

        def flat(*dense: Any) -> list[Any]:
            inner_args, inner_kwargs = tree_unflatten(tree, dense)
            outs, found = tree_flatten(f(*inner_args, **inner_kwargs))
            out_tree.append(found)
            return outs

        closed = trace_to_jaxpr(flat, avals)
        outs = _evaluate(closed.jaxpr, closed.consts, values)
        outs = [x if _is_sparse(x) else as_array(x) for x in outs]
        return tree_unflatten(out_tree[0], outs)

    return wrapped


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else values[x]

    for eqn in jaxpr.eqns:
        operands = [read(x) for x in eqn.invars]
        prim = eqn.primitive
        if any(map(_is_sparse, operands)):
            rule = _rules.get(prim.name)
            if rule is None:
                raise RefusedError(
                    f"sparse rule for {prim.name} is not implemented: it got "
                    f"{[x for x in operands if _is_sparse(x)]}; call todense() first"
                )
            outs = rule(prim, operands, dict(eqn.params))
        else:
            outs = prim.bind(*operands, **eqn.params)
        if not prim.multiple:
            outs = [outs]
        values.update(zip(eqn.outvars, outs, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _inner(closed: Any) -> Callable[..., list[Any]]:
    if isinstance(closed, ClosedJaxpr):
        return lambda *args: _evaluate(closed.jaxpr, closed.consts, args)
    return lambda *args: _evaluate(closed, (), args)


def _rule(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def keep(f: Callable[..., Any]) -> Callable[..., Any]:
        _rules.update(dict.fromkeys(names, f))
        return f

    return keep


def _bcoo(x: Any) -> Any:
    return x.to_bcoo() if isinstance(x, BCSR) else x


def _back(x: Any, *given: Any) -> Any:
    """A result in the format of the operand, if that format has the result's layout."""
    first = next(x for x in given if _is_sparse(x))
    fits = isinstance(x, BCOO) and x.n_sparse == 2
    return BCSR.from_bcoo(x) if isinstance(first, BCSR) and fits else x


# ---- elementwise -------------------------------------------------------------------------------


@_rule("abs", "asin", "asinh", "atan", "atanh", "cbrt", "ceil", "expm1", "floor", "log1p", "sign",
       "sin", "sinh", "sqrt", "square", "tan", "tanh", "is_finite_p", "round")  # fmt: skip
def _zero_stays_zero(prim: Any, operands: Any, params: Any) -> Any:
    (x,) = operands
    given, x = x, _bcoo(x)
    if not x.unique_indices:  # f(a + b) is not f(a) + f(b)
        x = x.sum_duplicates(nse=x.nse, remove_zeros=False)
    return _back(like(x, prim.bind(x.data, **params), x.indices), given)


@_rule("neg", "convert_element_type", "copy", "real", "imag", "conj", "copy_p", "reduce_precision")
def _linear(prim: Any, operands: Any, params: Any) -> Any:
    (x,) = operands
    given, x = x, _bcoo(x)
    return _back(like(x, prim.bind(x.data, **params), x.indices), given)


@_rule("integer_pow")
def _integer_pow(prim: Any, operands: Any, params: Any) -> Any:
    if params["y"] <= 0:
        raise RefusedError(f"integer_pow of a sparse array with y={params['y']} is dense")
    return _zero_stays_zero(prim, operands, params)


@_rule("mul")
def _mul(prim: Any, operands: Any, params: Any) -> Any:
    x, y = map(_bcoo, operands)
    if _is_sparse(x) and _is_sparse(y):
        rank = max(x.ndim, y.ndim)
        out = products.bcoo_multiply_sparse(
            products.broadcast_to_rank(x, rank), products.broadcast_to_rank(y, rank)
        )
    elif _is_sparse(x):
        out = like(x, products.bcoo_multiply_dense(x, y), x.indices)
    else:
        out = like(y, products.bcoo_multiply_dense(y, x), y.indices)
    return _back(out, *operands)


@_rule("div")
def _div(prim: Any, operands: Any, params: Any) -> Any:
    x, y = map(_bcoo, operands)
    if _is_sparse(y):
        raise RefusedError("a quotient by a sparse array divides by zeros; call todense() first")
    if np.ndim(y):
        return _back(like(x, products.bcoo_multiply_dense(x, 1 / y), x.indices), *operands)
    return _back(like(x, x.data / y, x.indices), *operands)


@_rule("add", "sub", "add_any")
def _add(prim: Any, operands: Any, params: Any) -> Any:
    x, y = map(_bcoo, operands)
    if not (_is_sparse(x) and _is_sparse(y)):
        if prim.name == "sub" or np.shape(x) != np.shape(y):
            raise RefusedError(
                f"{prim.name} of a sparse array and a dense one, or a number, is dense; call "
                "todense() first"
            )
        return prim.bind(*[v.todense() if _is_sparse(v) else v for v in (x, y)])
    if x.shape != y.shape or (x.n_batch, x.n_dense) != (y.n_batch, y.n_dense):
        raise RefusedError(f"a sum of sparse arrays needs one shape and one layout: {x}, {y}")
    (a, ia), (b, ib) = full_buffers(x), full_buffers(y)
    dtype = snp.promote_types(a.dtype, b.dtype)
    b = -b if prim.name == "sub" else b
    data = snp.concatenate([a.astype(dtype), b.astype(dtype)], axis=x.n_batch)
    indices = snp.concatenate([ia, ib.astype(ia.dtype)], axis=x.n_batch)
    total = BCOO.tree_unflatten((x._sparse_shape, False, False), (data, indices))
    if not math.prod(x._sparse_shape) >= total.nse:
        total = total.sum_duplicates(nse=math.prod(x._sparse_shape), remove_zeros=False)
    return _back(total, *operands)


# ---- products, reductions, moves ---------------------------------------------------------------


@_rule("dot_general")
def _dot_general(prim: Any, operands: Any, params: Any) -> Any:
    x, y = map(_bcoo, operands)
    out = products.bcoo_dot_general(x, y, dimension_numbers=params["dimension_numbers"])
    return _back(out, *operands) if _is_sparse(out) else out


def _moved(f: Callable[..., BCOO], **names: str) -> Callable[..., Any]:
    """A rule that calls `f` with an equation's parameters under its own names."""

    def rule(prim: Any, operands: Any, params: Any) -> Any:
        given = {mine: params[theirs] for mine, theirs in names.items()}
        return _back(f(_bcoo(operands[0]), **given), *operands)

    return rule


_rules["permute_dims"] = _moved(shapes.bcoo_transpose, permutation="permutation")
_rules["squeeze"] = _moved(shapes.bcoo_squeeze, dimensions="dimensions")
_rules["reshape"] = _moved(shapes.bcoo_reshape, new_sizes="new_sizes")
_rules["rev"] = _moved(shapes.bcoo_rev, dimensions="dimensions")
_rules["slice"] = _moved(
    shapes.bcoo_slice,
    start_indices="start_indices",
    limit_indices="limit_indices",
    strides="strides",
)
_rules["broadcast_in_dim"] = _moved(
    shapes.bcoo_broadcast_in_dim, shape="shape", broadcast_dimensions="broadcast_dimensions"
)


@_rule("reduce_sum")
def _reduce_sum(prim: Any, operands: Any, params: Any) -> Any:
    out = shapes.bcoo_reduce_sum(_bcoo(operands[0]), axes=params["axes"])
    return _back(out, *operands) if out.ndim else out.todense()


@_rule("concatenate")
def _concatenate(prim: Any, operands: Any, params: Any) -> Any:
    if not all(map(_is_sparse, operands)):
        raise RefusedError("concatenate of sparse and dense arrays; call todense() first")
    found = shapes.bcoo_concatenate(list(map(_bcoo, operands)), dimension=params["dimension"])
    return _back(found, *operands)


@_rule("dynamic_slice")
def _dynamic_slice(prim: Any, operands: Any, params: Any) -> Any:
    x, *starts = operands
    return _back(shapes.bcoo_dynamic_slice(_bcoo(x), starts, params["slice_sizes"]), x)


@_rule("gather")
def _gather(prim: Any, operands: Any, params: Any) -> Any:
    x, starts = operands
    found = windows.bcoo_gather(
        _bcoo(x), starts, params["dimension_numbers"], params["slice_sizes"]
    )
    return _back(found, x)


@_rule("conv_general_dilated")
def _convolution(prim: Any, operands: Any, params: Any) -> Any:
    lhs, rhs = (_bcoo(x) if _is_sparse(x) else x for x in operands)
    return _back(windows.bcoo_conv_general_dilated(lhs, rhs, **params), *operands)


# ---- calls and control flow --------------------------------------------------------------------


@_rule("jit", "custom_jvp_call", "custom_vjp_call", "checkpoint")
def _call(prim: Any, operands: Any, params: Any) -> Any:
    return _inner(params["jaxpr"])(*operands)


@_rule("cond")
def _cond(prim: Any, operands: Any, params: Any) -> Any:
    index, *rest = operands
    branches = params["branches"]
    return lax.switch(index, [lambda *xs, b=b: _inner(b)(*xs) for b in branches], *rest)


@_rule("while")
def _while(prim: Any, operands: Any, params: Any) -> Any:
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    n, m = params["cond_nconsts"], params["body_nconsts"]
    test, given, carry = operands[:n], operands[n : n + m], operands[n + m :]
    return lax.while_loop(
        lambda c: _inner(cond)(*test, *c)[0],
        lambda c: _alike(_inner(body)(*given, *c), c),
        list(carry),
    )


@_rule("scan")
def _scan(prim: Any, operands: Any, params: Any) -> Any:
    n, m = params["num_consts"], params["num_carry"]
    given, carry, xs = operands[:n], operands[n : n + m], operands[n + m :]

    def step(c: Any, x: Any) -> Any:
        outs = _inner(params["jaxpr"])(*given, *c, *x)
        return _alike(outs[:m], c), outs[m:]

    carry, ys = lax.scan(step, list(carry), list(xs), params["length"], params["reverse"])
    return [*carry, *ys]


def _alike(new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
    """A carry as it was: sparse arrays say the same of their indices."""
    out = []
    for a, b in zip(new, old, strict=True):
        if isinstance(a, BCOO) and isinstance(b, BCOO):
            _, aux = b.tree_flatten()
            a = BCOO.tree_unflatten(aux, (a.data, a.indices))
        out.append(a)
    return out


# ---- operators ---------------------------------------------------------------------------------


def _operator(f: Callable[..., Any], swapped: bool = False) -> Callable[..., Any]:
    def method(self: Any, other: Any) -> Any:
        return sparsify(f)(other, self) if swapped else sparsify(f)(self, other)

    return method


def _transposed(self: Any, axes: Any = None) -> Any:
    return shapes.bcoo_transpose(
        self, permutation=tuple(range(self.ndim))[::-1] if axes is None else axes
    )


def _transposed_rows(self: Any, *args: Any, **kwargs: Any) -> Any:
    return BCSR.from_bcoo(self.to_bcoo().transpose(*args, **kwargs))


def _total(self: Any, *args: Any, **kwargs: Any) -> Any:
    return sparsify(lambda x: x.sum(*args, **kwargs))(self)


def _reshaped(self: Any, *args: Any, **options: Any) -> Any:
    return sparsify(lambda x: x.reshape(*args, **options))(self)


def _part(self: Any, item: Any) -> Any:
    return sparsify(lambda x: x[item])(self)


def _absolute(self: Any) -> Any:
    return sparsify(snp.abs)(self)


for _kind in (BCOO, BCSR):
    for _name, _f in (
        ("matmul", snp.matmul), ("mul", snp.multiply), ("add", snp.add), ("sub", snp.subtract),
    ):  # fmt: skip
        setattr(_kind, f"__{_name}__", _operator(_f))
        setattr(_kind, f"__r{_name}__", _operator(_f, swapped=True))
    _kind.__truediv__ = _operator(snp.divide)  # type: ignore[attr-defined]
    _kind.__neg__ = sparsify(snp.negative)  # type: ignore[attr-defined]
    _kind.__abs__ = _absolute  # type: ignore[attr-defined]
    _kind.sum = _total  # type: ignore[attr-defined]
BCOO.transpose = _transposed  # type: ignore[method-assign]
BCOO.reshape = _reshaped  # type: ignore[attr-defined]
BCOO.__getitem__ = _part  # type: ignore[method-assign]
BCSR.transpose = _transposed_rows  # type: ignore[method-assign]
BCOO.__abstractmethods__ = BCSR.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


def todense(arr: Any) -> Any:
    """The dense array of a sparse one; a dense one as it is.

    >>> from spmd.experimental import sparse
    >>> sparse.todense(sparse.eye(2)).tolist(), float(sparse.todense(snp.ones(())))
    ([[1.0, 0.0], [0.0, 1.0]], 1.0)
    """
    return arr.todense() if _is_sparse(arr) else snp.asarray(arr)


def dense_of(tree: Any) -> Any:
    """A pytree with dense arrays in the place of sparse ones."""
    return tree_map(todense, tree, is_leaf=_is_sparse)


def has_sparse(tree: Any) -> bool:
    """Whether a pytree has sparse arrays."""
    return any(map(_is_sparse, tree_leaves(tree, is_leaf=_is_sparse)))


__all__ = ["bcoo_todense", "dense_of", "has_sparse", "sparsify", "todense"]
