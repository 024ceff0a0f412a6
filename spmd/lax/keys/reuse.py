"""The uses of keys in programs: a walk over a jaxpr that finds each key's second use.

For each variable of keys the walk knows which of them were used. An equation uses keys (sinks),
makes new ones (sources) or hands them on (forwards); control flow does what its bodies do, and a
loop must not use a key twice that it does not make anew. An operation without a rule uses the
keys that it gets, and makes none that may be used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from spmd.base.dtypes import is_key
from spmd.base.errors import KeyReuseError
from spmd.core.aval import typeof
from spmd.core.call import derived
from spmd.core.explicit import result_avals
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var
from spmd.core.primitive import Primitive
from spmd.lax.keys.consumption import reused
from spmd.lax.keys.markers import check_consumed
from spmd.lax.keys.uses import Forward, KeyReuseSignature, Mask, Sink, Source, fit, simple

# The signature of an equation, and a flag of each result: whether it is a sampler's own matter.
Found = tuple[KeyReuseSignature, list[bool]]

_NONE = KeyReuseSignature()
_FORWARD = KeyReuseSignature(Forward(0, 0))
_SOURCE = KeyReuseSignature(Source(0))

# By primitive: what it does to keys.
SIGNATURES: dict[str, KeyReuseSignature] = {
    "assert_consumed_value": _FORWARD,
    "broadcast_in_dim": _FORWARD,
    "consume": KeyReuseSignature(Sink(0), Forward(0, 0)),
    "convert_element_type": _FORWARD,
    "copy": _FORWARD,
    "debug_callback": _NONE,
    "dynamic_slice": _FORWARD,
    "dynamic_update_slice": KeyReuseSignature(Sink(1), Forward(0, 0)),
    "eq": _NONE,
    "gather": _FORWARD,
    "key_bits": KeyReuseSignature(Sink(0)),
    "name": _FORWARD,
    "ne": _NONE,
    "pcast": _FORWARD,
    "permute_dims": _FORWARD,
    "pvary": _FORWARD,
    "random_clone": _SOURCE,
    "random_unwrap": _NONE,
    "random_wrap": _SOURCE,
    "reshape": _FORWARD,
    "reshard": _FORWARD,
    "rev": _FORWARD,
    "scatter": KeyReuseSignature(Sink(2), Forward(0, 0)),
    "sharding_constraint": _FORWARD,
    "squeeze": _FORWARD,
    "to_auto": _FORWARD,
}


def holds_keys(atom: Atom) -> bool:
    """Whether a variable is of typed keys."""
    return is_key(getattr(atom.aval, "dtype", None))


# ---- equations ---------------------------------------------------------------------------------


def equation_signature(eqn: Eqn, own: Sequence[bool]) -> Found:
    """Find the uses by an equation; `own` says which operands are a sampler's."""
    name = eqn.prim.name
    dynamic = _RULES.get(name)
    if dynamic is not None:
        return dynamic(eqn, own)
    closed = None if name in SIGNATURES else eqn.stands_for()
    if closed is not None:
        return closed_signature(closed, own)
    return SIGNATURES.get(name) or unknown_signature(eqn), _own_results(eqn, own)


def unknown_signature(eqn: Eqn) -> KeyReuseSignature:
    """All keys are used, and none are made."""
    return KeyReuseSignature(*[Sink(k) for k, x in enumerate(eqn.invars) if holds_keys(x)])


def _own_results(eqn: Eqn, own: Sequence[bool]) -> list[bool]:
    """Tell which results are a sampler's own: those made of its keys, words and numbers.

    A key that is chosen by a number belongs to whom it belonged to before.
    """
    if eqn.prim.name == "random_draw":
        return [True]
    if eqn.prim.name == "random_clone":
        return [False]
    keys = [o for o, x in zip(own, eqn.invars, strict=True) if holds_keys(x)]
    of_keys, of_any = all(keys) if keys else any(own), any(own)
    return [of_keys if holds_keys(x) else of_any for x in eqn.outvars]


def _slice(eqn: Eqn, own: Sequence[bool]) -> Found:
    aval, params = eqn.invars[0].aval, eqn.params
    bounds = params["start_indices"], params["limit_indices"]
    sizes = (*aval.shape, *bounds[0], *bounds[1])
    if not holds_keys(eqn.invars[0]) or not all(isinstance(n, (int, np.integer)) for n in sizes):
        return _FORWARD, _own_results(eqn, own)
    steps = params["strides"] or (1,) * aval.ndim
    mask = np.zeros(aval.shape, bool)
    mask[tuple(map(slice, *bounds, steps))] = True
    return KeyReuseSignature(Sink(0, mask), Source(0)), _own_results(eqn, own)


def _concatenate(eqn: Eqn, own: Sequence[bool]) -> Found:
    count = len(eqn.invars)
    if count == 1:
        return _FORWARD, _own_results(eqn, own)
    return KeyReuseSignature(*map(Sink, range(count)), Source(0)), _own_results(eqn, own)


def _split(eqn: Eqn, own: Sequence[bool]) -> Found:
    sources = map(Source, range(len(eqn.outvars)))
    return KeyReuseSignature(Sink(0), *sources), _own_results(eqn, own)


def _each(eqn: Eqn, own: Sequence[bool]) -> Found:
    """Each operand is a result."""
    return KeyReuseSignature(*[Forward(k, k) for k in range(len(own))]), list(own)


def _draw(eqn: Eqn, own: Sequence[bool]) -> Found:
    return KeyReuseSignature(Sink(0)) if eqn.params["sinks"] else _NONE, [True]


def _threefry(eqn: Eqn, own: Sequence[bool]) -> Found:
    """A program that was traced without `debug_key_reuse`: one counter is that of `fold_in`."""
    folds = eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape
    uses = _SOURCE if folds else KeyReuseSignature(Sink(0), Source(0))
    return uses, _own_results(eqn, own)


# ---- control flow ------------------------------------------------------------------------------


def _cond(eqn: Eqn, own: Sequence[bool]) -> Found:
    """A key is used if a branch uses it, and new if all branches make it."""
    found = [closed_signature(branch, own[1:]) for branch in eqn.params["branches"]]
    sinks: dict[int, list[Mask]] = {}
    for uses, _ in found:
        for sink in uses.sinks:
            sinks.setdefault(sink.idx, []).append(sink.mask)
    combined = [Sink(k + 1, _either(masks)) for k, masks in sinks.items()]
    sources = set.intersection(*[set(uses.sources) for uses, _ in found])
    forwards = set.intersection(*[set(uses.forwards) for uses, _ in found])
    handed_on = [Forward(f.in_idx + 1, f.out_idx) for f in forwards]
    results = [any(flags) for flags in zip(*[out for _, out in found], strict=True)]
    return KeyReuseSignature(*combined, *sources, *handed_on), results


def _either(masks: Sequence[Mask]) -> Mask:
    return simple(reduce(np.logical_or, masks))


def _settled(closed: ClosedJaxpr, own: list[bool], start: int, carry: int) -> Found:
    """Find the uses of a body, once it is known which of its carry are a sampler's."""
    while True:
        found = closed_signature(closed, own)
        grown = [a or b for a, b in zip(own[start : start + carry], found[1], strict=False)]
        if grown == own[start : start + carry]:
            return found
        own = [*own[:start], *grown, *own[start + carry :]]


def _scan(eqn: Eqn, own: Sequence[bool]) -> Found:
    consts, carry = eqn.params["num_consts"], eqn.params["num_carry"]
    uses, results = _settled(eqn.params["jaxpr"], list(own), consts, carry)
    sources = {s.idx for s in uses.sources if s.idx < carry}
    if _met.constants:
        raise KeyReuseError(_loop(eqn, "uses a key that it closes over, again in each step"))
    for sink in uses.sinks:
        if sink.idx < consts:
            raise KeyReuseError(_loop(eqn, "uses a key that it closes over, again in each step"))
        if sink.idx < consts + carry and sink.idx - consts not in sources:
            raise KeyReuseError(_loop(eqn, "uses a key of its carry, and returns no new one"))
    return uses, results


def _while(eqn: Eqn, own: Sequence[bool]) -> Found:
    params = eqn.params
    tests, steps = params["cond_nconsts"], params["body_nconsts"]
    both = tests + steps
    uses, results = _settled(params["body_jaxpr"], list(own[tests:]), steps, len(own) - both)
    test, _ = closed_signature(params["cond_jaxpr"], [*own[:tests], *results])
    sources = {s.idx for s in uses.sources}
    if _met.constants:
        raise KeyReuseError(_loop(eqn, "uses a key that it closes over, each time"))
    carried: list[set[int]] = []
    for what, found, count in ("condition", test, tests), ("body", uses, steps):
        if any(s.idx < count for s in found.sinks):
            raise KeyReuseError(_loop(eqn, f"uses a key that its {what} closes over, each time"))
        used = {s.idx - count for s in found.sinks}
        if not used <= sources:
            raise KeyReuseError(
                _loop(eqn, f"uses a key of its carry in its {what}, and its body makes no new one")
            )
        carried.append(used)
    if carried[0] & carried[1]:
        raise KeyReuseError(_loop(eqn, "uses one key of its carry in its condition and its body"))
    moved = [Sink(s.idx + tests, s.mask) for s in uses.sinks]
    handed_on = [Forward(f.in_idx + tests, f.out_idx) for f in uses.forwards]
    return KeyReuseSignature(*moved, *uses.sources, *handed_on), results


def _loop(eqn: Eqn, what: str) -> str:
    return (
        f"{eqn.source}: {eqn.prim.name}: the loop {what}; carry a key, split it in the body, draw "
        "with one half and return the other, or draw with random.fold_in(key, step)"
    )


def _map(eqn: Eqn, own: Sequence[bool]) -> Found:
    """A map does to the whole what it does to the part of one device."""
    found, results = jaxpr_signature(eqn.params["jaxpr"], own)
    whole = [Sink(s.idx) for s in found.sinks]
    return KeyReuseSignature(*whole, *[Source(s.idx) for s in found.sources]), results


def _checkpoint(eqn: Eqn, own: Sequence[bool]) -> Found:
    """The backward pass draws again what the forward pass drew."""
    if "_differentiated" in eqn.params:
        return _NONE, [False] * len(eqn.outvars)
    return closed_signature(eqn.params["jaxpr"], own)


_RULES: dict[str, Callable[[Eqn, Sequence[bool]], Found]] = {
    "checkpoint": _checkpoint,
    "concatenate": _concatenate,
    "cond": _cond,
    "optimization_barrier": _each,
    "random_draw": _draw,
    "scan": _scan,
    "shard_map": _map,
    "slice": _slice,
    "split": _split,
    "threefry2x32": _threefry,
    "while": _while,
}

# ---- programs ----------------------------------------------------------------------------------


class _Constant:
    """An array that a jaxpr closes over: the same one in all jaxprs."""

    __slots__ = ("array", "aval")

    def __init__(self, array: Any):
        self.array, self.aval = array, typeof(array)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Constant) and self.array is other.array

    def __hash__(self) -> int:
        return id(self.array)


class _Met:
    """The arrays whose keys the jaxprs of an equation use."""

    def __init__(self) -> None:
        self.constants: list[tuple[_Constant, Mask, str, Any]] = []


_met = _Met()


def closed_signature(closed: ClosedJaxpr, own: Sequence[bool]) -> Found:
    """Find the uses by a closed jaxpr; `own` says which of its inputs are a sampler's own."""
    flags = tuple(own[: len(closed.in_avals)])

    def walk() -> Any:
        made = _Walk(closed.jaxpr, flags, closed.consts)
        return made.signature(), made.own_results(), made.constants()

    uses, results, constants = derived(closed, ("key reuse", flags), walk)
    _met.constants.extend(constants)
    return uses, results


def used_constants(find: Callable[[], Found]) -> tuple[Found, list[tuple[Any, Mask]]]:
    """Return the result of `find`, and the closed-over arrays of which it uses keys."""
    before, _met.constants = _met.constants, []
    try:
        found = find()
        return found, [(c.array, mask) for c, mask, *_ in _met.constants]
    finally:
        _met.constants = before


def jaxpr_signature(jaxpr: Jaxpr | ClosedJaxpr, own: Sequence[bool] = ()) -> Found:
    """Find the uses by a jaxpr of its inputs, and after them of its constants."""
    if isinstance(jaxpr, ClosedJaxpr):
        return closed_signature(jaxpr, own)
    walk = _Walk(jaxpr, own)
    return walk.signature(), walk.own_results()


class _Walk:
    """Which keys a jaxpr has used, equation by equation."""

    def __init__(self, jaxpr: Jaxpr, own: Sequence[bool], consts: Sequence[Any] = ()):
        self.jaxpr = jaxpr
        self.used: dict[Any, Mask] = {}
        self.places: dict[Any, tuple[str, Any]] = {}
        self.forwards: dict[Any, Any] = {
            x: _Constant(c)
            for x, c in zip(jaxpr.constvars, consts, strict=False)
            if holds_keys(x) and not isinstance(c, np.ndarray)
        }
        self.own = {x for x, flag in zip(jaxpr.invars, own, strict=False) if flag}
        for eqn in jaxpr.eqns:
            self.equation(eqn)

    def own_results(self) -> list[bool]:
        return [self.is_own(x) for x in self.jaxpr.outvars]

    def constants(self) -> list[tuple[_Constant, Mask, str, Any]]:
        """The arrays that are closed over, here or inside, of which keys are used."""
        return [
            (x, mask, *self.places[x])
            for x, mask in self.used.items()
            if isinstance(x, _Constant) and np.any(mask)
        ]

    def is_own(self, x: Atom) -> bool:
        return isinstance(x, Var) and x in self.own

    def first(self, x: Any) -> Any:
        """The variable, or the array that is closed over, whose keys these are."""
        while x in self.forwards:
            x = self.forwards[x]
        return x

    def equation(self, eqn: Eqn) -> None:
        before, _met.constants = _met.constants, []
        try:
            uses, results = equation_signature(eqn, [self.is_own(x) for x in eqn.invars])
            met = _met.constants
        finally:
            _met.constants = before
        if eqn.prim.name == "assert_consumed_value":
            key = eqn.invars[0]
            used = fit(self.used.get(self.first(key), False), key.aval.shape)
            check_consumed(used, eqn.params["value"], eqn.source)
        for start, end in uses.forwards:
            if start < len(eqn.invars) and holds_keys(eqn.outvars[end]):
                self.forwards[eqn.outvars[end]] = eqn.invars[start]
        for sink in sorted(uses.sinks):
            self.sink(eqn, sink)
        for constant, mask, what, line in _latest(met):
            self.use(constant, mask, what, line)
        self.own.update(x for x, flag in zip(eqn.outvars, results, strict=True) if flag)
        sources = {s.idx for s in uses.sources}
        for k, x in enumerate(eqn.outvars):
            if holds_keys(x) and x not in self.forwards and x not in self.own and k not in sources:
                self.used[x] = True
                self.places[x] = eqn.prim.name, eqn.source

    def sink(self, eqn: Eqn, sink: Sink) -> None:
        if sink.idx >= len(eqn.invars):  # a constant of a call
            return
        x = eqn.invars[sink.idx]
        if not holds_keys(x) or self.is_own(x) or isinstance(x, Literal):
            return
        what = eqn.params["by"] if eqn.prim.name == "random_draw" else eqn.prim.name
        self.use(self.first(x), sink.mask, what, eqn.source)

    def use(self, x: Any, used: Mask, what: str, line: Any) -> None:
        """Note that keys of a variable, or of an array that is closed over, are used."""
        mask, before = fit(used, x.aval.shape), self.used.get(x, False)
        if np.any(np.logical_and(before, mask)):
            raise KeyReuseError(reused(line, what, *self.places[x]))
        self.used[x] = simple(np.logical_or(before, mask))
        self.places[x] = what, line

    def signature(self) -> KeyReuseSignature:
        inputs: list[Atom] = [*self.jaxpr.invars, *self.jaxpr.constvars]
        places = {self.first(x): k for k, x in enumerate(inputs)}
        found: list[Sink | Source | Forward] = []
        for x, k in places.items():
            if holds_keys(x) and np.any(self.used.get(x, False)):
                found.append(Sink(k, self.used[x]))
        for k, x in enumerate(self.jaxpr.outvars):
            if not holds_keys(x) or self.is_own(x):
                continue
            first = self.first(x)
            if first in places:
                found.append(Forward(places[first], k))
            elif not np.any(self.used.get(first, False)):
                found.append(Source(k))
        return KeyReuseSignature(*found)


def _latest(met: Sequence[tuple[_Constant, Mask, str, Any]]) -> list[Any]:
    """Of several branches each may use the same array, which is then used once."""
    found: dict[_Constant, tuple[_Constant, Mask, str, Any]] = {}
    for constant, mask, what, line in met:
        before = found.get(constant, (None, False))[1]
        found[constant] = constant, simple(np.logical_or(before, mask)), what, line
    return list(found.values())


def primitive_signature(
    prim: Primitive, operands: Sequence[Any], params: dict[str, Any], own: Sequence[bool]
) -> Found:
    """Find the uses of arrays of keys by a primitive."""
    avals = [typeof(x) for x in operands]
    outs = [Var(a) for a in result_avals(prim, avals, params)]
    return equation_signature(Eqn(prim, tuple(map(Var, avals)), tuple(outs), params), own)
