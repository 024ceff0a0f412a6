"""`jax.core`: avals, tracers, and the evaluation of jaxprs."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from spmd.api.settings import ensure_compile_time_eval
from spmd.as_jax.jax.api_util import DebugInfo
from spmd.as_jax.jax.extend.core import (
    DropVar,
    Effects,
    concrete_or_error,
    find_top_trace,
    gensym,
    get_opaque_trace_state,
    new_jaxpr_eqn,
    no_effects,
    take_current_trace,
    unsafe_get_axis_names_DO_NOT_USE,
    valid_jaxtype,
)
from spmd.as_jax.refuse import missing
from spmd.as_jax.trace import Trace, Tracer
from spmd.core.aval import ShapedArray, register_array_type, typeof
from spmd.core.ir import Literal, Var
from spmd.core.rewrite import eval_jaxpr as _eval_jaxpr
from spmd.core.trace import unchanged

__all__ = [
    "AbstractValue",
    "Atom",
    "DebugInfo",
    "DropVar",
    "Effects",
    "ParamDict",
    "ShapedArray",
    "Trace",
    "Tracer",
    "Value",
    "concrete_or_error",
    "ensure_compile_time_eval",
    "eval_context",
    "eval_jaxpr",
    "find_top_trace",
    "gensym",
    "get_aval",
    "get_opaque_trace_state",
    "is_constant_dim",
    "is_constant_shape",
    "new_jaxpr_eqn",
    "no_effects",
    "pytype_aval_mappings",
    "unsafe_get_axis_names_DO_NOT_USE",
    "valid_jaxtype",
]
_absent = missing("jax.core")

# Arrays are all the values that there are.
AbstractValue = ShapedArray


class _AvalMappings(dict):
    """How to read the aval of values of a class; what is written here spmd's operations read."""

    def __missing__(self, kind: type) -> Any:
        return typeof

    def __setitem__(self, kind: type, aval_of: Any) -> None:
        super().__setitem__(kind, aval_of)
        register_array_type(kind, aval_of)


pytype_aval_mappings = _AvalMappings()
Atom = Var | Literal
Value = Any
ParamDict = dict[str, Any]
get_aval = typeof


def eval_jaxpr(
    jaxpr: Any, consts: Any, *args: Any, propagate_source_info: bool = True
) -> list[Any]:
    """Run a jaxpr on values, under the current trace."""
    return list(map(unchanged, _eval_jaxpr(jaxpr, consts, *args)))


def is_constant_dim(size: Any) -> bool:
    """Whether a size of a dim is a number; symbolic ones are those of `jax.export`."""
    return isinstance(size, int | np.integer)


def is_constant_shape(shape: Sequence[Any]) -> bool:
    """Whether all sizes of a shape are numbers."""
    return all(map(is_constant_dim, shape))


# Most programs need none of them, and `export` is large.
_OF_EXPORT = {
    "InconclusiveDimensionOperation": ("errors", "InconclusiveDimensionOperation"),
    "is_symbolic_dim": ("export", "is_symbolic_dim"),
    "max_dim": ("export", "max_dim"),
    "min_dim": ("export", "min_dim"),
}


def __getattr__(name: str) -> Any:
    """The names of symbolic sizes, which are imported when they are asked for."""
    if name not in _OF_EXPORT:
        return _absent(name)
    module, own = _OF_EXPORT[name]
    return getattr(importlib.import_module(f"spmd.{module}"), own)


@contextlib.contextmanager
def eval_context() -> Iterator[None]:
    """In the block, operations are evaluated."""
    with take_current_trace():
        yield
