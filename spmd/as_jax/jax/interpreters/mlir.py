"""`jax.interpreters.mlir`: `lower_fun`, whose functions are what is compiled, and refusals.

spmd has its own compiler. A rule that writes MLIR can be registered, so that libraries which have
one beside other rules can be imported; a program with such a primitive says that it can't be run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmd.as_jax.primitive import Lowered, Primitive, lowerings
from spmd.as_jax.refuse import refusing

LoweringRuleContext = Any
LoweringRule = Callable[..., Any]

_absent = refusing("jax.interpreters.mlir", "spmd does not compile MLIR; use mlir.lower_fun")


def __getattr__(name: str) -> Any:
    return _absent(name)


def lower_fun(fun: Callable[..., Any], multiple_results: bool = True) -> Lowered:
    """A rule that says: compile what this function does."""
    return Lowered(fun, multiple_results)


def register_lowering(
    prim: Primitive,
    rule: Any = None,
    platform: str | None = None,
    inline: bool = True,
    cacheable: bool = True,
) -> Any:
    """Say how a primitive is compiled; rules for other platforms than the CPU are not looked at."""
    if rule is None:
        return lambda rule: register_lowering(prim, rule, platform, inline, cacheable)
    if platform in (None, "cpu"):
        lowerings[prim] = rule
    return rule
