"""`jax.core`: avals, tracers, and the evaluation of jaxprs."""

from __future__ import annotations

from typing import Any

from spmd.api import ensure_compile_time_eval
from spmd.as_jax.refuse import missing
from spmd.core.aval import ShapedArray, register_array_type, typeof
from spmd.core.ir import Literal, Var
from spmd.core.rewrite import eval_jaxpr as _eval_jaxpr
from spmd.core.trace import Trace, Tracer, unchanged

__all__ = [
    "AbstractValue",
    "Atom",
    "ShapedArray",
    "Trace",
    "Tracer",
    "ensure_compile_time_eval",
    "eval_jaxpr",
    "get_aval",
    "pytype_aval_mappings",
]
__getattr__ = missing("jax.core")

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
get_aval = typeof


def eval_jaxpr(
    jaxpr: Any, consts: Any, *args: Any, propagate_source_info: bool = True
) -> list[Any]:
    """Run a jaxpr on values, under the current trace."""
    return list(map(unchanged, _eval_jaxpr(jaxpr, consts, *args)))
