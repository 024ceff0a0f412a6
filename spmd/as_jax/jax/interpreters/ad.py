"""`jax.interpreters.ad`: rules for derivatives of primitives, and the values that they see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmd.as_jax.primitive import Primitive, primitive_jvps, primitive_transposes
from spmd.as_jax.refuse import missing
from spmd.core.jvp import JVPTrace, JVPTracer, instantiate
from spmd.core.primitive import Linear as UndefinedPrimal
from spmd.core.primitive import Zero
from spmd.core.structural import add_any as add_jaxvals
from spmd.core.structural import add_any_p as add_jaxvals_p
from spmd.core.structural import zeros_like_aval
from spmd.core.transpose import add_cotangents as add_tangents

__all__ = [
    "JVPTrace",
    "JVPTracer",
    "UndefinedPrimal",
    "Zero",
    "add_jaxvals",
    "add_jaxvals_p",
    "add_tangents",
    "defbilinear",
    "defjvp",
    "defjvp2",
    "deflinear",
    "deflinear2",
    "get_primitive_transpose",
    "instantiate_zeros",
    "is_undefined_primal",
    "primitive_jvps",
    "primitive_transposes",
    "zeros_like_aval",
]
__getattr__ = missing("jax.interpreters.ad")

instantiate_zeros = instantiate


def is_undefined_primal(x: Any) -> bool:
    """Whether an operand is one with respect to which a primitive is transposed."""
    return isinstance(x, UndefinedPrimal)


def get_primitive_transpose(p: Any) -> Callable[..., Any]:
    """The transpose rule of a primitive; raises `NotImplementedError` if it has none."""
    rule = primitive_transposes.get(p)
    if rule is None:
        raise NotImplementedError(f"Transpose rule for '{p.name}' not implemented")
    return rule


def deflinear2(primitive: Primitive, transpose_rule: Callable[..., Any]) -> None:
    """Declare a primitive linear in all its operands; the rule gets cotangent and operands."""

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        out = primitive.bind(*primals, **params)
        if all(type(t) is Zero for t in tangents):
            return out, [
                Zero(a.aval.tangent()) for a in out
            ] if primitive.multiple else Zero.from_primal_value(out)
        return out, primitive.bind(*map(instantiate, tangents), **params)

    primitive_jvps[primitive] = jvp
    primitive_transposes[primitive] = transpose_rule


def deflinear(primitive: Primitive, transpose_rule: Callable[..., Any]) -> None:
    """Declare a primitive linear in all its operands; the rule gets the cotangent alone."""

    def rule(ct: Any, *operands: Any, **params: Any) -> Any:
        return [None] * len(operands) if type(ct) is Zero else transpose_rule(ct, **params)

    deflinear2(primitive, rule)


def defjvp(primitive: Primitive, *jvprules: Callable[..., Any] | None) -> None:
    """Give a primitive a rule for each operand: `rule(tangent, *primals, **params)`."""
    with_out = [None if r is None else _without_result(r) for r in jvprules]
    defjvp2(primitive, *with_out)


def _without_result(rule: Callable[..., Any]) -> Callable[..., Any]:
    return lambda t, out, *primals, **params: rule(t, *primals, **params)


def defjvp2(primitive: Primitive, *jvprules: Callable[..., Any] | None) -> None:
    """Like `defjvp`; the rules get the result too: `rule(tangent, result, *primals, **params)`."""

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        out = primitive.bind(*primals, **params)
        total: Any = Zero.from_primal_value(out)
        for rule, t in zip(jvprules, tangents, strict=True):
            if rule is not None and type(t) is not Zero:
                total = add_tangents(total, rule(t, out, *primals, **params))
        return out, total

    primitive_jvps[primitive] = jvp


def defbilinear(prim: Primitive, lhs_rule: Any, rhs_rule: Any) -> None:
    """Declare a primitive linear in each of two operands, with the transpose for each."""
    defjvp(
        prim,
        lambda t, x, y, **params: prim.bind(t, y, **params),
        lambda t, x, y, **params: prim.bind(x, t, **params),
    )

    def transpose(ct: Any, x: Any, y: Any, **params: Any) -> Any:
        if is_undefined_primal(x):
            return (Zero(x.aval) if type(ct) is Zero else lhs_rule(ct, x, y, **params)), None
        return None, Zero(y.aval) if type(ct) is Zero else rhs_rule(ct, x, y, **params)

    primitive_transposes[prim] = transpose
