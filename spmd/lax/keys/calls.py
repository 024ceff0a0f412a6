"""Calls and operations on arrays of keys, under `debug_key_reuse`: each is looked at as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmd.base.dtypes import is_key
from spmd.base.source import current_source
from spmd.core.aval import typeof
from spmd.core.ir import ClosedJaxpr, subjaxprs
from spmd.core.primitive import Primitive
from spmd.lax.keys.consumption import (
    check,
    is_looking,
    is_own,
    leave_alone,
    mark,
    note_of,
    note_use,
    unmarked,
)
from spmd.lax.keys.reuse import closed_signature, primitive_signature, used_constants
from spmd.lax.keys.uses import KeyReuseSignature, fit


def checked(
    operands: Sequence[Any],
    what: str,
    signature: Callable[[list[bool]], tuple[KeyReuseSignature, list[bool]]],
    call: Callable[[], Any],
    flat: Callable[[Any], Sequence[Any]],
) -> Any:
    """A call whose `signature` says what it does to its operands.

    `signature` is told which of them are a sampler's own, and tells the same of the results.
    """
    own = [is_own(x) for x in operands]
    (uses, out_own), constants = used_constants(lambda: signature(own))
    given = [(operands[s.idx], s.mask) for s in uses.sinks if s.idx < len(operands)]
    used = [*given, *constants]
    for key, mask in used:
        check(key, mask, what)
    outs = unmarked(call)
    for key, mask in used:
        note_use(key, mask, what)
    results = flat(outs)
    sources = {s.idx for s in uses.sources}
    forwards = {f.out_idx: f.in_idx for f in uses.forwards}
    for k, x in enumerate(results):
        if not is_key(typeof(x).dtype):
            continue
        if out_own[k]:
            leave_alone(x)
        elif k in forwards:
            start = forwards[k]
            found = note_of(operands[start]) if start < len(operands) else None
            if found is not None and found.used is not None:
                mark(x, fit(found.used, typeof(x).shape), found.by, found.line)
        elif k not in sources:
            mark(x, True, what, current_source())
    return outs


def checked_call(
    closed: ClosedJaxpr,
    leaves: Sequence[Any],
    what: str,
    call: Callable[[], Any],
    flat: Callable[[Any], Sequence[Any]],
) -> Any:
    """The call of a program: of its arguments and of the arrays that it closes over."""
    return checked(leaves, what, lambda own: closed_signature(closed, own), call, flat)


def evaluate_and_check(
    evaluate: Callable[..., Any], prim: Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> Any:
    """Apply a primitive to arrays, and look at what it does to keys among them."""
    if not is_looking() or prim.name in _MARKERS:
        return evaluate(prim, operands, params)
    # A jaxpr may close over keys.
    if not any(is_key(typeof(x).dtype) for x in operands) and not any(subjaxprs(params)):
        return evaluate(prim, operands, params)
    return checked(
        operands,
        prim.name,
        lambda own: primitive_signature(prim, operands, params, own),
        lambda: evaluate(prim, operands, params),
        lambda outs: outs if prim.multiple else [outs],
    )


# They look at keys themselves.
_MARKERS = frozenset({"random_draw", "random_clone", "consume", "assert_consumed_value"})


def looking(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """An evaluation of primitives that looks at keys."""
    return lambda prim, operands, params: evaluate_and_check(evaluate, prim, operands, params)
