"""Derivatives of one's own, under the module name that JAX users import from."""

from __future__ import annotations

from typing import Any

from spmd.api.closure import closure_convert, custom_gradient
from spmd.base.tree import tree_map as _tree_map
from spmd.core.aval import typeof as _typeof
from spmd.core.custom import custom_jvp, custom_jvp_call_p
from spmd.core.custom_common import SymbolicZero
from spmd.core.custom_vjp import CustomVJPPrimal, custom_vjp, custom_vjp_call_p
from spmd.core.linear_call import linear_call

__all__ = [
    "CustomVJPPrimal",
    "SymbolicZero",
    "closure_convert",
    "custom_gradient",
    "custom_jvp",
    "custom_jvp_call_p",
    "custom_vjp",
    "custom_vjp_call_p",
    "custom_vjp_primal_tree_values",
    "linear_call",
    "zero_from_primal",
]


def custom_vjp_primal_tree_values(tree: Any) -> Any:
    """The values of a tree of `CustomVJPPrimal`s, as `fwd` gets it with `symbolic_zeros`."""
    return _tree_map(lambda leaf: leaf.value, tree)


def zero_from_primal(val: Any, symbolic_zeros: bool = False) -> Any:
    """The tangent zeros of a pytree of values: arrays, or with `symbolic_zeros` `SymbolicZero`s.

    >>> zero_from_primal(np.ones(2, np.float32))
    Array([0., 0.], dtype=float32)
    """

    def of_leaf(x: Any) -> Any:
        zero = SymbolicZero(_typeof(x).tangent())
        return zero if symbolic_zeros else zero.instantiate()

    return _tree_map(of_leaf, val)
