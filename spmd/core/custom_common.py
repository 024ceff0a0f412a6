"""The base of `custom_jvp` and `custom_vjp`: one call of a function that has rules of its own.

Evaluated, a custom function is just the function. Differentiated on concrete values, it is its
rule, run at once: the rule may branch on values. Under any other trace it becomes one equation that
holds the function's jaxpr and the user's rules, which run when (and only when) it is
differentiated.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

from spmd.base import dtypes
from spmd.base.context import current_trace, state
from spmd.base.errors import ArgumentError, ClosedOverError, GradError, UnexpectedTracerError
from spmd.base.record import record
from spmd.base.source import current_source, is_ours
from spmd.base.tree import TreeDef, tree_flatten, tree_unflatten
from spmd.base.util import function_name, present_as, unzip2
from spmd.core.aval import HasAval, ShapedArray, typeof
from spmd.core.axis import cast_to_vma
from spmd.core.call import nonzero
from spmd.core.ir import ClosedJaxpr
from spmd.core.jvp import JVPTrace, instantiate
from spmd.core.linearize import MixedTrace
from spmd.core.mutable.cells import RowOfLoop, put_cells, take_cells
from spmd.core.primitive import Primitive, Zero
from spmd.core.rewrite import hoist_tracers
from spmd.core.stage import Debug, trace_to_jaxpr
from spmd.core.trace import EVAL, unchanged
from spmd.core.transpose import backward_pass

P = ParamSpec("P")
R = TypeVar("R")


def is_users(rule: Callable[..., Any]) -> bool:
    """Whether a rule is a user's own: rules of ours rely on casts where axes differ."""
    if not state.checks_varying:
        return False
    code = getattr(inspect.unwrap(rule), "__code__", None)
    return code is None or not is_ours(code.co_filename)


def sorted_axes(axes: frozenset[Any]) -> tuple[Any, ...]:
    """Axes in one order on all ranks."""
    return tuple(sorted(axes, key=str))


def varying_as(x: Any, aval: ShapedArray) -> Any:
    """A tangent or cotangent as a user's rule gets it: it varies over the axes of its value."""
    have = typeof(x)
    if isinstance(x, SymbolicZero) or have.dtype == dtypes.float0 or have.vma >= aval.vma:
        return x
    return x if aval.explicit is not None else cast_to_vma(x, have.vma | aval.vma, have.vma)


@record
class SymbolicZero(HasAval):
    """A tangent or cotangent that is known to be zero; rules with `symbolic_zeros` see it.

    It has a `shape` and a `dtype`, but no values; a rule may return it too.
    """

    aval: ShapedArray

    def instantiate(self) -> Any:
        """The zeros as an array."""
        return instantiate(Zero(self.aval))

    @staticmethod
    def from_primal_value(val: Any) -> SymbolicZero:
        """The tangent of a value that does not change."""
        return SymbolicZero(typeof(val).tangent())


def shown(t: Any, symbolic: bool) -> Any:
    """A tangent or cotangent as a user's rule takes it."""
    if symbolic and isinstance(t, Zero):
        return SymbolicZero(t.aval)
    # Literals of a jaxpr, and zeros of rank 0, are numbers: a rule gets arrays.
    return unchanged(instantiate(t))


def signature_of(f: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(f)
    except (TypeError, ValueError):
        return None


def nondiff_positions(
    f: Callable[..., Any],
    signature: inspect.Signature | None,
    argnums: Sequence[int],
    argnames: str | Sequence[str],
) -> tuple[int, ...]:
    """The positions of arguments that are not differentiated, given by number or by name."""
    names = (argnames,) if isinstance(argnames, str) else tuple(argnames)
    parameters = [] if signature is None else list(signature.parameters)
    for name in names:
        if name not in parameters:
            raise ArgumentError(
                f"{function_name(f)}: nondiff_argnames names {name!r}, but its parameters are "
                f"({', '.join(parameters)})"
            )
    return (*argnums, *(parameters.index(name) for name in names))


def _takes_exactly(signature: inspect.Signature, count: int) -> bool:
    """Whether a function has so many parameters, all of them positional."""
    kinds = [p.kind for p in signature.parameters.values()]
    return len(kinds) == count and all([kind in _POSITIONAL for kind in kinds])


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def positional(
    f: Callable[..., Any],
    signature: inspect.Signature | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[Any]:
    """Keyword arguments put into their positions, with defaults filled in."""
    if signature is None or (not kwargs and _takes_exactly(signature, len(args))):
        return list(args)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentError(f"{current_source()}: {function_name(f)}: {error}") from None
    bound.apply_defaults()
    if any(name in kwargs for name in bound.kwargs):
        names = ", ".join(bound.kwargs)
        raise ArgumentError(
            f"{function_name(f)}: keyword-only arguments ({names}) are not supported "
            "by functions with rules of their own; make them positional"
        )
    return list(bound.args)


class Call:
    """One call of a custom function, flat: arguments, the traced jaxpr, and the output's tree."""

    def __init__(self, f: Callable[..., Any], args: list[Any], nondiff: Sequence[int]):
        self.name = function_name(f)
        self.nondiff = {i % len(args): args[i] for i in nondiff}
        self.count = len(args)
        given = [x for i, x in enumerate(args) if i not in self.nondiff]
        leaves, self.in_tree = tree_flatten(tuple(given))
        # Mutable arrays are no values that are differentiated: the rules get them as they are.
        self.cells, self.flat = take_cells(leaves)
        if any(cell.is_row for cell in self.cells.values()):
            raise RowOfLoop(f"{self.name}: an argument is a row of a mutable array")
        self.avals = [typeof(x) for x in self.flat]
        self.out_tree: TreeDef | None = None
        self.f: Callable[..., Any] | None = f

    def place(self, given: Sequence[Any]) -> list[Any]:
        """Differentiable arguments back among the others."""
        rest = iter(given)
        return [self.nondiff[i] if i in self.nondiff else next(rest) for i in range(self.count)]

    def unflatten(self, flat: Sequence[Any]) -> Any:
        """The differentiable arguments of flat values, with the mutable arrays of the call."""
        return tree_unflatten(self.in_tree, put_cells(self.cells, flat))

    def run(self, *flat: Any) -> list[Any]:
        assert self.f is not None
        out = self.f(*self.place(self.unflatten(flat)))
        leaves, self.out_tree = tree_flatten(out)
        return leaves

    def stage(self) -> tuple[ClosedJaxpr, list[Any]]:
        source = current_source()
        return hoist_tracers(trace_to_jaxpr(self.run, self.avals, Debug(self.name, (), source)))

    def release(self) -> list[Any]:
        """The flat arguments, which this call forgets: rules hold it as long as their equation."""
        flat, self.flat, self.f = self.flat, [], None
        return flat

    def rebuild(self, outs: Sequence[Any]) -> Any:
        assert self.out_tree is not None
        return tree_unflatten(self.out_tree, outs)

    def set_out_tree(self, tree: TreeDef, rule: str) -> None:
        """Compare the structure that a rule returned with the function's, where it is known."""
        if self.out_tree is not None and tree != self.out_tree:
            raise GradError(
                f"the {rule} of {self.name} returned an output of structure {tree}, but "
                f"{self.name} returns {self.out_tree}: they must be the same"
            )
        self.out_tree = tree


class CustomFunction(Generic[P, R]):
    """A function with rules of its own: the base of `custom_jvp` and `custom_vjp`."""

    symbolic_zeros = False

    def __init__(
        self,
        fun: Callable[P, R],
        nondiff_argnums: Sequence[int] = (),
        nondiff_argnames: str | Sequence[str] = (),
    ):
        present_as(self, fun)
        self.fun = fun
        self._signature = signature_of(fun)
        self.nondiff_argnums = nondiff_positions(
            fun, self._signature, nondiff_argnums, nondiff_argnames
        )

    def __get__(self: Any, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def _bind(self, prim: Primitive, call: Call, rules: dict[str, Any]) -> Any:
        """One call with these rules: run at once, or as one equation of `prim`."""
        done, out = _differentiate_now(prim, self, call, rules)
        if done:
            call.release()
            return out
        jaxpr, consts = call.stage()
        how = {"jaxpr": jaxpr, "name": call.name, "num_consts": len(consts), **rules}
        return call.rebuild(prim.bind(*consts, *call.release(), **how))


def _differentiate_now(
    prim: Primitive, again: Any, call: Call, rules: dict[str, Any]
) -> tuple[bool, Any]:
    """Run a custom rule at once where a value is differentiated: (whether it was, the result).

    The function itself is not traced then, as in JAX. Not done if the function closes over a value
    being differentiated: staging reports that.
    """
    trace = bottom = state.trace
    while isinstance(bottom, (JVPTrace, MixedTrace)):
        bottom = bottom.parent
    if bottom is not EVAL and not isinstance(trace, JVPTrace):
        return False, None
    if isinstance(trace, MixedTrace):
        if any(trace.is_tangent(x) for x in call.flat):
            return False, None
        primals, tangents = call.flat, []
    else:
        primals, tangents = unzip2(trace.split(x) for x in call.flat)
    try:
        with current_trace(trace.parent):
            if not any(nonzero(tangents)):
                out = again(*call.place(call.unflatten(primals)))
                leaves, tree = tree_flatten(out)
                # Containers are made anew under the caller's trace, as in JAX: some look at it.
                with current_trace(trace):
                    return True, tree_unflatten(tree, leaves)
            assert isinstance(trace, JVPTrace)
            params = {"num_consts": 0, "name": call.name, **rules}
            outs, found = trace.differentiate(prim, primals, tangents, params)
    except UnexpectedTracerError:
        return False, None
    return True, call.rebuild([trace.join(x, t) for x, t in zip(outs, found, strict=True)])


def check_closure(name: str, tangents: Sequence[Any]) -> None:
    if any(not isinstance(t, Zero) for t in tangents):
        raise ClosedOverError(
            f"{current_source()}: {name} has a custom derivative and closes over a value that is "
            "being differentiated; pass that value as an argument instead"
        )


def inline_transpose(cts: Any, *operands: Any, jaxpr: ClosedJaxpr, **_: Any) -> Any:
    return backward_pass(jaxpr.jaxpr, jaxpr.consts, operands, cts)
