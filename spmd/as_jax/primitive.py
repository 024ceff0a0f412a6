"""`jax.extend.core.Primitive`: a primitive of ours whose rules stand in JAX's tables.

JAX fills tables after a primitive is made: `primitive_jvps[p] = rule`. The slots of ours look them
up when they are asked. The conventions are the same: tangents may be `Zero`s, operands with respect
to which a primitive is transposed are `Linear`s (JAX: `UndefinedPrimal`), a dim that is not batched
is None. `mlir.lower_fun` gives a function as an expansion: the compiler sees its jaxpr in the
primitive's place. Code that writes MLIR has nothing to write to here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import spmd.core.primitive as core
from spmd.api.compiled import jit
from spmd.base.context import current_trace, state
from spmd.base.errors import RefusedError
from spmd.base.util import split_list
from spmd.core.aval import ShapedArray, typeof
from spmd.core.custom import custom_jvp, custom_jvp_call_p
from spmd.core.ir import ClosedJaxpr
from spmd.core.primitive import Refused
from spmd.core.stage import trace_to_jaxpr
from spmd.core.structural import zeros_like_aval
from spmd.core.trace import unchanged
from spmd.core.vmap import BatchAxis


class Rules(dict):
    """A table of JAX's, by primitive; of spmd's own primitives it gives the rules they have."""

    def __init__(self, of_ours: Callable[[core.Primitive], Any]):
        super().__init__()
        self._of_ours = of_ours

    def __missing__(self, prim: Any) -> Any:
        found = self.of_ours(prim)
        if found is None:
            raise KeyError(prim)
        return found

    def of_ours(self, prim: Any) -> Any:
        """The rule of a primitive of spmd, in JAX's form; None if there is none."""
        if issubclass(type(prim), Primitive) or not isinstance(prim, core.Primitive):
            return None
        return self._of_ours(prim)

    def __contains__(self, prim: Any) -> bool:
        return super().__contains__(prim) or self.of_ours(prim) is not None

    def get(self, prim: Any, default: Any = None) -> Any:
        return self[prim] if prim in self else default


def _own_jvp(prim: core.Primitive) -> Any:
    rule = prim.jvp
    if isinstance(rule, Refused):
        return None
    if rule is not core.linear:
        return rule

    def linear(primals: Any, tangents: Any, **params: Any) -> Any:
        given = [zeros_like_aval(t.aval) if isinstance(t, core.Zero) else t for t in tangents]
        return prim.bind(*primals, **params), prim.bind(*given, **params)

    return linear


def _own_transpose(prim: core.Primitive) -> Any:
    return None if isinstance(prim.transpose, Refused) else prim.transpose


def _own_batch(prim: core.Primitive) -> Any:
    if isinstance(prim.batch, Refused):
        return None
    return prim.batch


def _own_plain_batch(prim: core.Primitive) -> Any:
    rule = _own_batch(prim)
    if rule is None:
        return None

    def batch(operands: Any, dims: Any, **params: Any) -> Any:
        sizes = [typeof(x).shape[d] for x, d in zip(operands, dims, strict=True) if d is not None]
        return rule(BatchAxis(None, sizes[0]), operands, dims, **params)

    return batch


primitive_jvps = Rules(_own_jvp)
primitive_transposes = Rules(_own_transpose)
primitive_batchers = Rules(_own_plain_batch)
# By the arguments of their rules: what is known of the axis, or its size, its name and a None.
fancy_primitive_batchers = Rules(_own_batch)
axis_primitive_batchers = Rules(lambda prim: None)
lowerings: dict[core.Primitive, Any] = {}


class Lowered:
    """The result of `mlir.lower_fun`: a function whose jaxpr stands for a primitive."""

    def __init__(self, f: Callable[..., Any], multiple_results: bool):
        self.f = f
        self.multiple_results = multiple_results

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RefusedError(
            "mlir.lower_fun: its result is a rule to register with mlir.register_lowering; called "
            "from another rule it would write MLIR, which spmd does not compile"
        )

    def closed(self, avals: Sequence[ShapedArray], params: dict[str, Any]) -> ClosedJaxpr:
        """The jaxpr of the function at operands like these."""

        def flat(*args: Any) -> list[Any]:
            out = self.f(*args, **params)
            return list(out) if self.multiple_results else [out]

        return trace_to_jaxpr(flat, avals)


def _bind_with_trace(
    self: core.Primitive,
    trace: Any,
    operands: Sequence[Any],
    avals: Sequence[ShapedArray],
    params: dict[str, Any],
) -> Any:
    """Apply a primitive under a trace, as if that were the current one."""
    with current_trace(trace):
        if self is custom_jvp_call_p and "subfuns" in params:
            fun, rule = params["subfuns"]
            return _of_functions(fun, rule, params["symbolic_zeros"])(*operands)
        return trace.process(self, operands, params)


def _of_functions(fun: Any, rule: Any, symbolic_zeros: bool) -> Callable[..., list[Any]]:
    """A function of flat arguments, and its rule: JAX's traces hand both on untraced."""

    def jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        for store in rule.stores:  # the rule of a loop's body may be asked more than once
            store.reset()
        outs = rule.call_wrapped(*primals, *tangents)
        values, moves = split_list(outs, [len(outs) // 2])
        return values, moves

    def flat(*args: Any) -> list[Any]:
        return list(fun.call_wrapped(*args))

    made = custom_jvp(flat)
    made.defjvp(jvp, symbolic_zeros)
    return made


# Parameters of JAX's primitives that ours have not. None asks for nothing.
_ABSENT = {
    **dict.fromkeys(("broadcast_in_dim", "convert_element_type", "iota"), ("sharding",)),
    **dict.fromkeys(("conv_general_dilated", "dot_general", "reduce_sum"), ("out_sharding",)),
    **dict.fromkeys(
        "cbrt cos exp exp2 expm1 log log1p logistic rsqrt sin sqrt tan tanh".split(),
        ("accuracy",),
    ),
    "mul": ("out_dtype",),
    "reshape": ("dimensions", "sharding"),
}


def _accept_absent(prim: core.Primitive, absent: Sequence[str]) -> None:
    """Let `bind` of a primitive of ours take those parameters of JAX's that are None."""
    bind = prim.bind

    def bind_without(*operands: Any, **params: Any) -> Any:
        for name in absent:
            if params.get(name, absent) is None:
                del params[name]
        return bind(*operands, **params)

    prim.bind = bind_without  # type: ignore[method-assign]


for _prim in core.all_primitives():
    if _prim.name in _ABSENT:
        _accept_absent(_prim, _ABSENT[_prim.name])

# A library's trace hands primitives of ours to the trace below it.
core.Primitive.bind_with_trace = _bind_with_trace  # type: ignore[attr-defined]


class _AnyPrimitive(type):
    """JAX has one class of primitives: `isinstance(lax.add_p, Primitive)` is true."""

    def __instancecheck__(cls, value: Any) -> bool:
        return super().__instancecheck__(value) or (
            cls is Primitive and isinstance(value, core.Primitive)
        )


class Primitive(core.Primitive, metaclass=_AnyPrimitive):
    """An operation defined as JAX's are: `def_impl`, `def_abstract_eval`, and rules in tables."""

    call_primitive = False
    map_primitive = False

    def __init__(self, name: str):
        self._impl_rule: Callable[..., Any] | None = None
        self._abstract_rule: Callable[..., Any] | None = None
        self._has_effects = False
        self._expansions: dict[Any, ClosedJaxpr] = {}
        super().__init__(
            name,
            abstract=self._abstract,
            impl=Refused("it is expanded before it is compiled"),
            jvp=self._jvp,
            transpose=self._transpose,
            batch=self._batch,
            dims=Refused("it is expanded before it is partitioned"),
            expand=self._expand,
            effects=self._effects,
            eager=self.impl,
            listed=False,
        )
        self.is_plain = False

    @property
    def multiple_results(self) -> bool:
        """Whether `bind` returns a list of results."""
        return self.multiple

    @multiple_results.setter
    def multiple_results(self, value: bool) -> None:
        self.multiple = bool(value)

    # -- what JAX's programs call --

    def def_impl(self, impl: Callable[..., Any]) -> Callable[..., Any]:
        """Say how it is computed outside any transformation."""
        self._impl_rule = impl
        return impl

    def def_abstract_eval(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Say what avals the results have."""
        self._abstract_rule = rule
        return rule

    def def_effectful_abstract_eval(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Say what avals the results have, and which effects there are."""
        self._abstract_rule = lambda *avals, **params: rule(*avals, **params)[0]
        self._has_effects = True
        return rule

    def def_bind_with_trace(self, bind: Callable[..., Any]) -> Callable[..., Any]:
        """Say what `bind` does under each trace."""
        self.bind_with_trace = bind
        return bind

    def impl(self, *args: Any, **params: Any) -> Any:
        """Compute it with the function that was given to `def_impl`."""
        if self._impl_rule is None:
            raise NotImplementedError(f"Evaluation rule for '{self.name}' not implemented")
        return self._impl_rule(*map(unchanged, args), **params)

    def abstract_eval(self, *avals: Any, **params: Any) -> Any:
        """The avals of the results, and the effects."""
        return self._abstract(*avals, **params), self._effects(params)

    def bind(self, *operands: Any, **params: Any) -> Any:
        """Apply it under the current trace."""
        return self.bind_with_trace(state.trace, operands, list(map(typeof, operands)), params)

    # -- the slots --

    def _abstract(self, *avals: Any, **params: Any) -> Any:
        if self._abstract_rule is None:
            raise NotImplementedError(f"Abstract evaluation for '{self.name}' not implemented")
        return self._abstract_rule(*avals, **params)

    def _effects(self, params: dict[str, Any]) -> frozenset[str]:
        return frozenset([self.name]) if self._has_effects else core.no_effects(params)

    def _jvp(self, primals: Any, tangents: Any, **params: Any) -> Any:
        rule = primitive_jvps.get(self)
        if rule is None:
            raise NotImplementedError(f"Differentiation rule for '{self.name}' not implemented")
        return rule(list(map(unchanged, primals)), list(map(unchanged, tangents)), **params)

    def _transpose(self, ct: Any, *operands: Any, **params: Any) -> Any:
        operands = tuple(map(unchanged, operands))
        rule = primitive_transposes.get(self)
        if rule is None:
            raise NotImplementedError(f"Transpose rule (for reverse-mode differentiation) for "
                                      f"'{self.name}' not implemented")  # fmt: skip
        found = rule(ct, *operands, **params)
        return [None] * len(operands) if found is None or type(found) is core.Zero else found

    def _batch(self, axis: Any, operands: Any, dims: Any, **params: Any) -> Any:
        operands = list(map(unchanged, operands))
        rule = primitive_batchers.get(self)
        if rule is not None:
            return rule(operands, dims, **params)
        rule = fancy_primitive_batchers.get(self)
        if rule is not None:
            return rule(axis, operands, dims, **params)
        rule = axis_primitive_batchers.get(self)
        if rule is None:
            raise NotImplementedError(f"Batching rule for '{self.name}' not implemented")
        return rule(axis.size, axis.name, None, operands, dims, **params)

    def _expand(self, avals: Sequence[ShapedArray], params: dict[str, Any]) -> ClosedJaxpr:
        rule = lowerings.get(self)
        if not isinstance(rule, Lowered):
            what = "has no lowering" if rule is None else "is lowered by code that writes MLIR"
            raise RefusedError(
                f"{self.name} {what}; spmd compiles the function that "
                "mlir.register_lowering(prim, mlir.lower_fun(f)) gives"
            )
        try:
            key = tuple(avals), tuple(sorted(params.items()))
            found = self._expansions.get(key)
        except TypeError:  # parameters that can't be hashed or compared
            return rule.closed(avals, params)
        if found is None:
            found = self._expansions[key] = rule.closed(avals, params)
        return found


def apply_primitive(prim: core.Primitive, *args: Any, **params: Any) -> Any:
    """Compile one operation, and run it: an `impl` for primitives with a lowering."""
    return jit(lambda *xs: prim.bind(*xs, **params))(*args)
