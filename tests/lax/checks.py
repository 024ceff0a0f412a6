"""Checks that every primitive passes: vmap equals a loop, derivatives equal finite differences."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.api.inspect import make_jaxpr
from spmd.api.vectorize import vmap
from spmd.core.rewrite import eval_closed
from spmd.testing import check_grads

EXAMPLES = 3


def as_list(out: Any) -> list[np.ndarray]:
    """The arrays of a result, one or several."""
    return [np.asarray(x) for x in (out if isinstance(out, (list, tuple)) else [out])]


def check_vmap(
    f: Callable[..., Any],
    make: Callable[[np.random.Generator], Sequence[np.ndarray]],
    seed: int = 0,
    exact: bool = True,
) -> None:
    """Compare `vmap(f)` with a loop over f for each non-empty set of batched operands."""
    rng = np.random.default_rng(seed)
    examples = [list(make(rng)) for _ in range(EXAMPLES)]
    for batched in itertools.product([False, True], repeat=len(examples[0])):
        if not any(batched):
            continue
        operands, in_axes = [], []
        for k, is_batched in enumerate(batched):
            columns = [example[k] for example in examples]
            at = int(rng.integers(0, columns[0].ndim + 1))
            operands.append(np.stack(columns, at) if is_batched else columns[0])
            in_axes.append(at if is_batched else None)
        found = as_list(vmap(f, in_axes=tuple(in_axes))(*operands))
        for e in range(EXAMPLES):
            args = [examples[e if b else 0][k] for k, b in enumerate(batched)]
            for whole, wanted in zip(found, as_list(f(*args)), strict=True):
                assert whole.dtype == wanted.dtype
                if exact:
                    np.testing.assert_array_equal(whole[e], wanted, err_msg=f"{batched}")
                else:
                    np.testing.assert_allclose(whole[e], wanted, rtol=1e-5, atol=1e-5)


def check_abstract(f: Callable[..., Any], *args: np.ndarray) -> None:
    """The shapes and dtypes that tracing predicts are those that evaluating gives."""
    predicted = make_jaxpr(f)(*args).out_avals
    found = as_list(f(*args))
    assert [(a.shape, a.dtype) for a in predicted] == [(x.shape, x.dtype) for x in found]


def primitives_of(f: Callable[..., Any], *args: Any) -> list[str]:
    """The names of the primitives that tracing f writes down."""
    return [eqn.prim.name for eqn in make_jaxpr(f)(*args).eqns]


def staged(f: Callable[..., Any]) -> Callable[..., Any]:
    """f, traced with all its arguments unknown and then evaluated."""

    def run(*args: Any) -> Any:
        outs = eval_closed(make_jaxpr(f)(*args), *args)
        return outs[0] if len(outs) == 1 else outs

    return run


def check_derivatives(f: Callable[..., Any], args: Sequence[np.ndarray]) -> None:
    """First and second derivatives, both modes, against finite differences in float32."""
    check_grads(f, args, order=2, atol=1e-2, rtol=1e-2)
