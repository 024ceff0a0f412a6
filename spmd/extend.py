"""What one needs to extend spmd: make a primitive, walk a jaxpr, write a transformation.

A re-export of the core's stable parts; `docs/` shows how to use them.
"""

# ruff: noqa: F401

from spmd.core.aval import ShapedArray, typeof
from spmd.core.ir import ClosedJaxpr, Eqn, Jaxpr, Literal, Var
from spmd.core.primitive import Dims, Linear, Primitive, Refused, Zero, dims, linear
from spmd.core.rewrite import eval_jaxpr
from spmd.core.stage import trace_to_jaxpr
from spmd.core.trace import Trace, Tracer, current_trace
