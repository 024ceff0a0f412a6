"""Collectives that not all devices would reach, found while a program is traced.

A collective inside a branch or a loop is safe as long as all devices of its group take the branch,
and make as many rounds. The deciding value may vary over the axis for two reasons. If it follows
from `axis_index` and constants alone it is computed for every device: a difference is an error.
If it depends on data that is split over the axis, and that data does differ between devices now,
there is a warning: the deciding values may still be equal.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from spmd.base.errors import CollectiveError, CollectiveWarning
from spmd.base.record import field, record
from spmd.base.source import UNKNOWN, Source
from spmd.base.util import split_list
from spmd.collectives.groups import device_groups
from spmd.collectives.order_check import collectives, entry_of
from spmd.core.aval import ShapedArray
from spmd.core.call import impl_jaxpr
from spmd.core.ir import ClosedJaxpr, Eqn, Jaxpr, Literal, all_eqns, subjaxprs
from spmd.core.rewrite import dce
from spmd.sharding.lockstep_interpreter import Lockstep, Values

# Values that are computed at trace time are small: a position and arithmetic on it.
LARGEST_VALUE = 1024
MOST_ROUNDS = 10_000

# Collectives whose result is equal on all devices of the axis.
_EQUALISING = ("psum", "pmax", "pmin", "all_gather")


@record
class Given:
    """An input of a per-device program.

    `rows` are the local devices' shards, or None where that is not known; `must_tell` says that
    the type alone is reason enough for a warning.
    """

    axes: frozenset[Any]
    name: str
    rows: Sequence[np.ndarray] | None = None
    must_tell: bool = False

    @property
    def differs(self) -> bool:
        """Whether devices hold different values now."""
        if self.rows is None:
            return self.must_tell and bool(self.axes)
        first = self.rows[0].tobytes() if self.rows else b""
        return any(row.tobytes() != first for row in self.rows)


@record(eq=False)
class _Fact:
    """The facts about a value: the axes it may vary over, the inputs that make it vary, its line.

    `values()` is one value for each device; None where it follows from more than positions.
    """

    axes: frozenset[Any] = frozenset()
    inputs: frozenset[int] = frozenset()
    source: Source = UNKNOWN
    values: Callable[[], Values | None] = field(default=lambda: None)


def check_divergence(
    what: str, closed: ClosedJaxpr, sizes: dict[Any, int], inputs: Sequence[Given]
) -> None:
    """Raise or warn if a collective of a per-device program is not reached by all its devices."""
    walk = _Walk(what, Lockstep(sizes), inputs)
    facts = [
        _Fact(given.axes, frozenset([k]) if given.axes else frozenset())
        for k, given in enumerate(inputs)
    ]
    walk.run(closed.jaxpr, closed.consts, facts)


def is_suspect(closed: ClosedJaxpr) -> bool:
    """Whether a program has a branch or a loop of unknown length with a collective inside."""
    return any(
        eqn.prim.name in ("cond", "while")
        and any(_meets(inner) for _, inner in subjaxprs(eqn.params))
        for eqn in all_eqns(closed)
    )


def _meets(jaxpr: Jaxpr | ClosedJaxpr) -> bool:
    return next(collectives(jaxpr), None) is not None


class _Walk:
    """Follows a program with facts instead of values."""

    def __init__(self, what: str, lockstep: Lockstep, inputs: Sequence[Given], quiet: bool = False):
        self.what = what
        self.lockstep = lockstep
        self.inputs = inputs
        self.quiet = quiet  # a loop's body is looked at before all is known about its carry

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], facts: Sequence[_Fact]) -> list[_Fact]:
        """The facts of a jaxpr's outputs."""
        known: dict[Any, _Fact] = {}
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            known[var] = self._constant(value, var.aval)
        known.update(zip(jaxpr.invars, facts, strict=True))

        def read(atom: Any) -> _Fact:
            return self._constant(atom.val, atom.aval) if isinstance(atom, Literal) else known[atom]

        for eqn in jaxpr.eqns:
            outs = self.apply(eqn, [read(a) for a in eqn.invars])
            known.update(zip(eqn.outvars, outs, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def _constant(self, value: Any, aval: ShapedArray) -> _Fact:
        if aval.size > LARGEST_VALUE:
            return _Fact()
        return _Fact(values=lambda: self.lockstep.everywhere(np.asarray(value, aval.dtype)))

    def apply(self, eqn: Eqn, facts: list[_Fact]) -> list[_Fact]:
        """The facts of one equation's results."""
        rule = {"cond": self._cond, "while": self._while, "scan": self._scan}.get(eqn.prim.name)
        if rule is not None:
            return rule(eqn, facts)
        if eqn.prim.inline is not None:
            inner = eqn.prim.inline(eqn.params)
            return self.run(inner.jaxpr, inner.consts, facts)
        axes = frozenset().union(*(f.axes for f in facts))
        inputs = frozenset().union(*(f.inputs for f in facts))
        if eqn.prim.name == "axis_index":
            axes = frozenset([eqn.params["axis_name"]])
        elif eqn.prim.members is not None and eqn.prim.name != "pvary":
            over = frozenset(eqn.params["axes"])
            whole = eqn.prim.name in _EQUALISING and eqn.params.get("groups") is None
            axes = axes - over if whole else axes | over
        if not axes:
            inputs = frozenset()
        every = self._evaluation(eqn, facts)
        return [
            _Fact(axes, inputs, eqn.source, lambda k=k: _pick(every(), k))
            for k in range(len(eqn.outvars))
        ]

    def _evaluation(self, eqn: Eqn, facts: list[_Fact]) -> Callable[[], list[Values] | None]:
        """The results on all devices, worked out when they are asked for, once."""
        done: list[Any] = []

        def work() -> list[Values] | None:
            avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
            if eqn.effects or any(a.size > LARGEST_VALUE for a in avals):
                return None
            operands = [f.values() for f in facts]
            if any(x is None for x in operands):
                return None
            try:
                outs = self.lockstep.apply(eqn.prim, operands, eqn.params)  # type: ignore[arg-type]
            except Exception:  # then the value is unknown: no reason to stop a program
                return None
            return outs if eqn.prim.multiple else [outs]

        def every() -> list[Values] | None:
            if not done:
                done.append(work())
            return done[0]

        return every

    # -- control flow --

    def _cond(self, eqn: Eqn, facts: list[_Fact]) -> list[_Fact]:
        index, operands = facts[0], facts[1:]
        branches = eqn.params["branches"]
        rows = [self.run(b.jaxpr, b.consts, operands) for b in branches]
        if index.axes:
            found = [(k, e) for k, b in enumerate(branches) for e, _ in collectives(b)]
            last = len(branches) - 1
            self._judge(
                index,
                found,
                f"inside a branch of the cond at {eqn.source.short}",
                "take this branch",
                lambda: _clipped(index.values(), last),
            )
        return [_joined([index, *column]) for column in zip(*rows, strict=True)]

    def _while(self, eqn: Eqn, facts: list[_Fact]) -> list[_Fact]:
        params = eqn.params
        test, body = params["cond_jaxpr"], params["body_jaxpr"]
        c, b, carry = split_list(facts, [params["cond_nconsts"], params["body_nconsts"]])
        start = carry
        carry = self._settled(body, b, carry)
        (going,) = self.run(test.jaxpr, test.consts, [*c, *carry])
        if going.axes:
            found = [(None, e) for inner in (test, body) for e, _ in collectives(inner)]
            self._judge(
                going,
                found,
                f"inside the while_loop at {eqn.source.short}",
                "make another number of rounds",
                lambda: self._rounds(test, body, c, b, start),
            )
        return [_joined([going, f]) for f in carry]

    def _scan(self, eqn: Eqn, facts: list[_Fact]) -> list[_Fact]:
        params = eqn.params
        body = params["jaxpr"]
        consts, carry, xs = split_list(facts, [params["num_consts"], params["num_carry"]])
        rows = [_joined([x]) for x in xs]
        carry = self._settled(body, consts, carry, rows)
        outs = self.run(body.jaxpr, body.consts, [*consts, *carry, *rows])
        return [_joined([f]) for f in [*carry, *outs[len(carry) :]]]

    def _settled(
        self,
        body: ClosedJaxpr,
        consts: list[_Fact],
        carry: list[_Fact],
        rows: Sequence[_Fact] = (),
    ) -> list[_Fact]:
        """The facts about a loop's carry in every round; no value is computed for it."""
        carry = [_joined([f]) for f in carry]
        while True:
            quiet = _Walk(self.what, self.lockstep, self.inputs, quiet=True)
            outs = quiet.run(body.jaxpr, body.consts, [*consts, *carry, *rows])
            new = [_joined([f, o]) for f, o in zip(carry, outs, strict=False)]
            if [(f.axes, f.inputs) for f in new] == [(f.axes, f.inputs) for f in carry]:
                return new
            carry = new

    def _rounds(
        self,
        test: ClosedJaxpr,
        body: ClosedJaxpr,
        test_consts: list[_Fact],
        body_consts: list[_Fact],
        carry: list[_Fact],
    ) -> Values | None:
        """The number of rounds each device makes, where positions and constants decide it."""
        nc, nb = len(test_consts), len(body_consts)
        _, needed = dce(test.jaxpr, [True])
        used = needed[nc:]
        while True:  # the operands of the condition, and theirs
            small, reads = dce(body.jaxpr, used)
            wanted = [u or r for u, r in zip(used, reads[nb:], strict=True)]
            if wanted == used:
                break
            used = wanted
        if small.effects or _meets(small) or _meets(test):
            return None
        sliced = ClosedJaxpr(small, body.consts)
        out: Values = []
        for device in range(self.lockstep.count):
            tests = _values_at(test_consts, needed[:nc], device)
            consts = _values_at(body_consts, reads[:nb], device)
            state = _values_at(carry, used, device)
            if tests is None or consts is None or state is None:
                return None
            count = _simulate(test, sliced, tests, consts, state, used)
            if count is None:
                return None
            out.append(np.asarray(count))
        return out

    # -- findings --

    def _judge(
        self,
        decides: _Fact,
        found: Sequence[tuple[int | None, Eqn]],
        place: str,
        doing: str,
        choices: Callable[[], Values | None],
    ) -> None:
        """Raise or warn about the first collective that the value which decides may tear apart.

        `choices()` are the devices' branches; a collective of branch k needs all its devices there.
        """
        if self.quiet:
            return
        apart = [(k, e) for k, e in found if decides.axes & frozenset(e.params["axes"])]
        if not apart:
            return
        known = choices()
        if known is None:
            self._warn(decides, apart, place)
            return
        did = [int(x) for x in known]
        for k, eqn in apart:
            groups = device_groups(
                self.lockstep.sizes, eqn.params["axes"], eqn.params.get("groups")
            )
            for group in groups:
                chosen = [did[p] if k is None else int(did[p] == k) for p in group]
                if len(set(chosen)) > 1:
                    raise CollectiveError(self._text(eqn, place, decides, group, chosen, doing))

    def _text(
        self,
        eqn: Eqn,
        place: str,
        decides: _Fact,
        group: Sequence[int],
        chosen: list[int],
        doing: str,
    ) -> str:
        one = [p for p, c in zip(group, chosen, strict=True) if c == max(chosen)]
        rest = [p for p in group if p not in one]
        return (
            f"{self.what}: {entry_of(eqn)} is {place}, and devices at {self._places(one)} {doing} "
            f"while those at {self._places(rest)} do not: they would wait for each other.\n"
            f"{_advice(eqn, decides)}"
        )

    def _places(self, positions: Sequence[int]) -> str:
        places = [self.lockstep.positions[p] for p in positions]
        if len(self.lockstep.sizes) == 1:
            (name,) = self.lockstep.sizes
            return f"{name}=" + ", ".join(str(p[name]) for p in places)
        return "; ".join(", ".join(f"{n}={i}" for n, i in p.items()) for p in places)

    def _warn(self, decides: _Fact, apart: Sequence[tuple[Any, Eqn]], place: str) -> None:
        differing = [self.inputs[k] for k in sorted(decides.inputs) if self.inputs[k].differs]
        eqn = next((e for _, e in apart if e.params.get("groups") is None), None)
        if eqn is None or not differing:
            return
        names = ", ".join(given.name for given in differing[:4])
        names += f" and {len(differing) - 4} others" if len(differing) > 4 else ""
        verb = "differs" if len(differing) == 1 else "differ"
        text = (
            f"{self.what}: {entry_of(eqn)} is {place}, and what decides there is made from "
            f"{names}, which {verb} between devices. Devices that decide differently would wait "
            f"for each other.\n{_advice(eqn, decides)}"
        )
        warnings.warn_explicit(text, CollectiveWarning, eqn.source.file, eqn.source.line)


def _advice(eqn: Eqn, decides: _Fact) -> str:
    axis = eqn.params["axes"][0]
    made = f" (made at {decides.source.short})" if decides.source is not UNKNOWN else ""
    return (
        f"Let all devices decide alike: combine the predicate{made} over the axis first, e.g. "
        f"lax.pmax(predicate, {axis!r}); or call {eqn.prim.name} on all devices, outside, and "
        "choose among results with snp.where."
    )


def _pick(outs: list[Values] | None, k: int) -> Values | None:
    return None if outs is None else outs[k]


def _joined(facts: Sequence[_Fact]) -> _Fact:
    """The facts about a value that may be any of these, or is decided by them."""
    axes = frozenset().union(*(f.axes for f in facts))
    return _Fact(axes, frozenset().union(*(f.inputs for f in facts)), facts[-1].source)


def _clipped(values: Values | None, last: int) -> Values | None:
    if values is None:
        return None
    return [np.asarray(min(max(int(x), 0), last)) for x in values]


def _values_at(facts: list[_Fact], wanted: Sequence[bool], device: int) -> list[Any] | None:
    """The values of one device; zero for unwanted ones, None if one cannot be known."""
    out: list[Any] = []
    for fact, want in zip(facts, wanted, strict=True):
        values = fact.values() if want else None
        if want and values is None:
            return None
        out.append(None if values is None else values[device])
    return out


def _simulate(
    test: ClosedJaxpr,
    body: ClosedJaxpr,
    test_consts: list[Any],
    body_consts: list[Any],
    carry: list[Any],
    used: Sequence[bool],
) -> int | None:
    """The number of rounds of one device's loop, of whose carry only the used part is known."""

    def filled(values: list[Any], avals: Iterator[ShapedArray]) -> list[Any]:
        pairs = zip(values, avals, strict=True)
        return [np.zeros(a.shape, a.dtype) if x is None else x for x, a in pairs]

    nc, nb = len(test_consts), len(body_consts)
    tests = filled(test_consts, iter(test.in_avals[:nc]))
    consts = filled(body_consts, iter(body.in_avals[:nb]))
    state = filled(carry, iter(body.in_avals[nb:]))
    try:
        for count in range(MOST_ROUNDS):
            if not bool(impl_jaxpr(np, test, *tests, *state)[0]):
                return count
            found = iter(impl_jaxpr(np, body, *consts, *state))
            state = [next(found) if u else x for x, u in zip(state, used, strict=True)]
    except Exception:  # as above: not known
        return None
    return None
