"""Primitives: one object holds everything the system knows about one operation.

Every rule is a required constructor argument: given, or `Refused("the sentence the user reads")`.

================ =============================================================================
slot             meaning
================ =============================================================================
``abstract``     ``(*avals, **params) -> aval`` (a list of avals if ``multiple``); raises the
                 user's shape and dtype errors. `vma` is filled in by the tracer.
``impl``         ``(xp, *arrays, **params) -> array(s)``: the meaning, over NumPy-like ``xp``.
``jvp``          ``(primals, tangents, **params) -> (out, tangent)``; a tangent may be a `Zero`.
                 The sentinel `linear` says: apply the primitive to the tangents.
``transpose``    ``(ct, *operands, **params) -> [cotangent or None, ...]``, where an operand with
                 respect to which it is transposed is a `Linear(aval)`.
``batch``        ``(axis, operands, dims, **params) -> (out, dim)``: ``dims[k]`` is the batched dim
                 of operand k or None; ``axis`` has ``name`` and ``size``. Lists if ``multiple``.
``dims``         ``(*avals, **params) -> Dims``: which operand dims become which result dims.
================ =============================================================================

Optional slots, for structural primitives (calls, control flow, collectives): ``linearize``
(``(trace, primals, tangents, **params) -> (outs, tangents)``, instead of jvp when linearizing),
``axes`` (the axis names a collective uses), ``vma`` (how it changes the varying axes; "given" when
``abstract`` already says so), ``effects``, ``inline`` (the closed jaxpr that a call stands for),
``custom`` (whether that call has rules of its user's, which the jaxpr alone would not have),
``known`` (``(unknown, params) -> (operands, results, params)``, for control flow: which results
depend on no operand marked unknown, and which operands and what params compute just these),
``dce`` (``(used, params) -> (operands, results, params)``, for control flow: what is left if only
the results marked used are),
``expand`` (``(avals, params) -> ClosedJaxpr`` of operands like these, which is compiled in its
place; transformations don't look inside),
``eager`` (``(*arrays, **params) -> array(s)``: what is done outside any transformation, on our
arrays; other primitives run their `impl` or a compiled program),
``members`` (a collective's meaning: ``(operands, **params) -> results``, one NumPy array for each
member of a group, in order),
``text`` (``(eqn, names) -> (name, params)``: what the text of an equation shows, if not these).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import spmd.base.context as context
from spmd.base.errors import InternalError, RefusedError
from spmd.base.record import record
from spmd.base.source import is_ours
from spmd.core.aval import ShapedArray, typeof

# ---- values of slots ---------------------------------------------------------------------------


@record
class Refused:
    """A rule that deliberately does not exist; `why` is the sentence that the user reads."""

    why: str


class _LinearRule:
    """The type of `linear`, the jvp rule of primitives that are linear in all their operands."""

    def __repr__(self) -> str:
        return "linear"


linear = _LinearRule()


@record
class Linear:
    """Stands for an operand with respect to which a primitive is being transposed."""

    aval: ShapedArray


@record
class Zero:
    """A tangent or cotangent known to be zero, without an array of zeros."""

    aval: ShapedArray

    @staticmethod
    def from_primal_value(x: Any) -> Zero:
        """The zero tangent of a value."""
        return Zero(typeof(x).tangent())


@record
class Dims:
    """How dims correspond: equal labels mean the same dim, split alike on all devices.

    `operands[k][d]` labels dim d of operand k, `results[k][d]` dim d of result k. A label that is
    in operands only is summed (or otherwise combined) over: `reduces` says with which operator
    ("add", "max", ...), None meaning that it must not be split. Labels in `whole` must not be
    split. A negative label is a dim that no other shares; it is never split, and `reduces` does not
    speak of it.
    """

    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    reduces: str | None = None
    whole: frozenset[int] = frozenset()


def dims(
    operands: Sequence[Sequence[int]],
    results: Sequence[Sequence[int]],
    reduces: str | None = None,
    whole: Sequence[int] = (),
) -> Dims:
    """Build a `Dims` from any sequences."""
    return Dims(
        tuple(map(tuple, operands)),
        tuple(map(tuple, results)),
        reduces,
        frozenset(whole),
    )


# ---- the primitive -----------------------------------------------------------------------------

_registry: dict[str, Primitive] = {}


def all_primitives() -> tuple[Primitive, ...]:
    """Every primitive that has been made, in order of creation."""
    return tuple(_registry.values())


def _no_axes(params: dict[str, Any]) -> tuple[Any, ...]:
    return ()


def no_effects(params: dict[str, Any]) -> frozenset[str]:
    """The `effects` of most primitives."""
    return frozenset()


def _made_by_our_modules() -> bool:
    """Whether one of spmd's modules is being imported, and no user's call runs."""
    frame: Any = sys._getframe(2)
    name = ""
    while frame is not None and is_ours(frame.f_code.co_filename):
        name = frame.f_code.co_name
        frame = frame.f_back
    return name == "<module>"


def remembered(rule: Callable[..., ShapedArray]) -> Callable[..., ShapedArray]:
    """An abstract rule that is asked once for each kind of operands and parameters.

    For rules that look at nothing else, not at settings either, and whose parameters mean the same
    if they are equal: integers, dtypes and tuples of them.
    """
    return functools.lru_cache(maxsize=4096)(rule)


class Primitive:
    """One operation with all its rules; see the module's table.

    `is_own` says that it is part of spmd, whose version then determines its meaning. A
    primitive that is not `listed` may have any name, as its name is a key of no table of ours.
    """

    def __init__(
        self,
        name: str,
        *,
        abstract: Callable[..., Any],
        impl: Callable[..., Any] | Refused,
        jvp: Callable[..., Any] | _LinearRule | Refused,
        transpose: Callable[..., Any] | Refused,
        batch: Callable[..., Any] | Refused,
        dims: Callable[..., Dims] | Refused,
        multiple: bool = False,
        linearize: Callable[..., Any] | None = None,
        inline: Callable[[dict[str, Any]], Any] | None = None,
        custom: bool = False,
        known: Callable[..., Any] | None = None,
        dce: Callable[..., Any] | None = None,
        expand: Callable[[Sequence[ShapedArray], dict[str, Any]], Any] | None = None,
        members: Callable[..., list[Any]] | None = None,
        axes: Callable[[dict[str, Any]], tuple[Any, ...]] = _no_axes,
        vma: Callable[..., Any] | str = "union",
        effects: Callable[[dict[str, Any]], frozenset[str]] = no_effects,
        eager: Callable[..., Any] | None = None,
        text: Callable[[Any, Any], tuple[str, dict[str, Any]]] | None = None,
        listed: bool = True,
    ):
        if listed and name in _registry:
            raise InternalError(f"primitive {name!r} is defined twice")
        self.name = name
        self.abstract = abstract
        self.impl = impl
        self.jvp = jvp
        self.transpose = transpose
        self.batch = batch
        self.dims = dims
        self.multiple = multiple
        self.linearize = linearize
        self.inline = inline
        self.custom = custom
        self.known = known
        self.dce = dce
        self.expand = expand
        self.members = members
        self.axes = axes
        self.vma = vma
        self.effects = effects
        self.eager = eager
        self.text = text
        # One result of what `abstract` says, and nothing else to ask about.
        self.is_plain = not multiple and vma == "union" and effects is no_effects
        self.is_own = listed and _made_by_our_modules()
        if listed:
            _registry[name] = self

    # Interpreters of jaxprs that were written for JAX read these.
    call_primitive = False

    @property
    def multiple_results(self) -> bool:
        """Whether `bind` returns a list of results."""
        return self.multiple

    def get_bind_params(self, params: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The functions and the parameters that `bind` takes for the parameters of an equation."""
        return [], params

    def bind(self, *operands: Any, **params: Any) -> Any:
        """Apply the primitive under the current trace."""
        return context.state.trace.process(self, operands, params)

    def stands_for(self, avals: Sequence[ShapedArray], params: dict[str, Any]) -> Any:
        """The closed jaxpr that is compiled in the primitive's place; None if it is no call."""
        if self.inline is not None:
            return self.inline(params)
        return None if self.expand is None else self.expand(avals, params)

    def rule(self, slot: str) -> Callable[..., Any]:
        """The rule in `slot`; raises a `RefusedError` with its sentence if there is none."""
        found = getattr(self, slot)
        if isinstance(found, Refused):
            raise RefusedError(f"{self.name}: {found.why}")
        return found

    def __repr__(self) -> str:
        return self.name


def shown_as(
    name: str, hidden: Sequence[str] = (), **more: Any
) -> Callable[[Any, Any], tuple[str, dict[str, Any]]]:
    """A `text` slot: JAX's name, without parameters that say nothing, and with those of JAX."""

    def text(eqn: Any, names: Any) -> tuple[str, dict[str, Any]]:
        shown = {k: v for k, v in eqn.params.items() if k not in hidden} | more
        return name, dict(sorted(shown.items()))

    return text


def is_refused(rule: Any) -> bool:
    """Whether a slot holds a refusal."""
    return isinstance(rule, Refused)


def internal_primitive(
    name: str, abstract: Callable[..., Any], impl: Callable[..., Any]
) -> Primitive:
    """A primitive that only passes write: it has a meaning, but no rules of transformations."""
    why = Refused(f"`{name}` exists only inside the compiler, below all transformations")
    return Primitive(
        name,
        abstract=abstract,
        impl=impl,
        jvp=why,
        transpose=why,
        batch=why,
        dims=why,
        multiple=True,
        vma="given",
    )
