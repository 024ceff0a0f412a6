"""All devices of a mesh, one equation at a time: the meaning of a per-device program.

A value is a list with one NumPy array for each local device. An ordinary equation is its `impl`,
run for each; a collective is its `members` function, run for each group. This is the oracle of
compiled multi-device programs, for `disable_jit`, and the fallback for programs that cannot be
compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.base.context import attributed_to
from spmd.base.errors import CollectiveError
from spmd.base.source import current_source
from spmd.base.util import split_list
from spmd.collectives.groups import device_groups
from spmd.collectives.order_check import describe
from spmd.core.aval import typeof
from spmd.core.ir import ClosedJaxpr, Literal, all_eqns, subjaxprs
from spmd.core.primitive import Primitive
from spmd.lax.callback import Place, at_place
from spmd.transport import world
from spmd.transport.origin import NOWHERE, Origin

Values = list[np.ndarray]  # one for each local device


class Lockstep:
    """The devices of a mesh, and which of them are here."""

    def __init__(
        self,
        sizes: dict[Any, int],
        processes: Sequence[int] | None = None,
        devices: Sequence[Any] = (),
    ):
        """`sizes` are the mesh axes; `processes[k]` is where position k lives (None: all here)."""
        self.sizes = dict(sizes)
        shape = tuple(sizes.values())
        self.count = int(np.prod(shape, dtype=np.int64))
        self.positions = [dict(zip(sizes, index, strict=True)) for index in np.ndindex(*shape)]
        mine = world.process_index() if processes is not None else 0
        self.processes = [mine] * self.count if processes is None else list(processes)
        self.local = [k for k, p in enumerate(self.processes) if p == mine]
        self.is_spread = len(set(self.processes)) > 1
        self.places = [
            Place(devices[k] if devices else k, tuple(self.positions[k].items()))
            for k in self.local
        ]

    # -- jaxprs --

    def run(self, closed: ClosedJaxpr, args: Sequence[Values]) -> list[Values]:
        """Evaluate a per-device jaxpr for all devices."""
        jaxpr = closed.jaxpr
        env: dict[Any, Values] = {}
        for var, x in zip(jaxpr.constvars, closed.consts, strict=True):
            env[var] = self.everywhere(np.asarray(x, dtype=var.aval.dtype))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Values:
            if isinstance(atom, Literal):
                return self.everywhere(np.asarray(atom.val, dtype=atom.aval.dtype))
            return env[atom]

        for eqn in jaxpr.eqns:
            with attributed_to(eqn.source):
                outs = self.apply(eqn.prim, [read(a) for a in eqn.invars], eqn.params)
            env.update(zip(eqn.outvars, outs if eqn.prim.multiple else [outs], strict=True))
        return [read(a) for a in jaxpr.outvars]

    def everywhere(self, x: np.ndarray) -> Values:
        """The same value on every local device."""
        return [x] * len(self.local)

    # -- one equation --

    def apply(self, prim: Primitive, operands: Sequence[Values], params: dict[str, Any]) -> Any:
        """The results of one primitive: `Values`, or a list of them if it has several results."""
        if prim.name == "axis_index":
            name = params["axis_name"]
            return [np.asarray(self.positions[k][name], np.int32) for k in self.local]
        if prim.name in ("pvary", "pcast", "unvary"):
            return operands[0]
        if prim.members is not None:
            return self._collective(prim, operands[0], params)
        if prim.inline is not None:
            return self.run(prim.inline(params), operands)
        if prim.name in _CONTROL and _has_collectives(params):
            return _CONTROL[prim.name](self, operands, **params)
        return self._each(prim, operands, params)

    def _each(self, prim: Primitive, operands: Sequence[Values], params: dict[str, Any]) -> Any:
        rule = prim.rule("impl")
        rows = []
        with np.errstate(all="ignore"):
            for j in range(len(self.local)):
                with at_place(self.places[j]):
                    rows.append(rule(np, *[x[j] for x in operands], **params))
        return [list(column) for column in zip(*rows, strict=True)] if prim.multiple else rows

    def _collective(self, prim: Primitive, x: Values, params: dict[str, Any]) -> Values:
        axes = params["axes"]
        groups = device_groups(self.sizes, axes, params.get("groups"))
        members = self._values_by_device(
            x, _origin(prim, x[0], params) if self.is_spread else NOWHERE
        )
        rest = {k: v for k, v in params.items() if k not in ("axes", "groups")}
        out: dict[int, np.ndarray] = {}
        here = set(self.local)
        assert prim.members is not None
        for group in groups:
            if here.intersection(group):
                found = prim.members([np.asarray(members[k]) for k in group], **rest)
                out.update(zip(group, found, strict=True))
        return [np.asarray(out[k]) for k in self.local]

    def _values_by_device(self, x: Values, origin: Origin) -> dict[int, np.ndarray]:
        """The values of all devices of the mesh, other processes' too."""
        mine = dict(zip(self.local, x, strict=True))
        if not self.is_spread:
            return mine
        out: dict[int, np.ndarray] = {}
        for part in world.world().all_gather_object(mine, origin):
            out.update(part)
        return out

    def same(self, what: str, values: Values) -> Any:
        """The value that all devices hold; raises if they differ, where collectives are inside."""
        line = current_source().short
        origin = Origin(f"the condition of {what} at {line}", source=line)
        by_device = self._values_by_device(values, origin)
        distinct = {x.item() for x in by_device.values()}
        if len(distinct) > 1:
            listed = ", ".join(f"device {k}: {x.item()}" for k, x in sorted(by_device.items()))
            raise CollectiveError(
                f"a collective inside {what} must be reached by all devices, but they disagree "
                f"about it: {listed}"
            )
        return distinct.pop()


def _origin(prim: Primitive, x: np.ndarray, params: dict[str, Any]) -> Origin:
    """The facts that ranks compare about one collective that runs by itself."""
    entry = describe(prim.name, typeof(x), params, current_source())
    return Origin(str(entry), source=entry.source, operand=entry.operand)


# ---- control flow that holds collectives -------------------------------------------------------


def _has_collectives(params: dict[str, Any]) -> bool:
    inner = (closed for _, closed in subjaxprs(params))
    return any(
        e.prim.members is not None or e.prim.name == "axis_index"
        for c in inner
        for e in all_eqns(c)
    )


def _cond(lockstep: Lockstep, operands: Sequence[Values], *, branches: Any) -> Any:
    index = int(lockstep.same("cond", operands[0]))
    return lockstep.run(branches[min(max(index, 0), len(branches) - 1)], operands[1:])


def _while(
    lockstep: Lockstep,
    operands: Sequence[Values],
    *,
    cond_jaxpr: ClosedJaxpr,
    cond_nconsts: int,
    body_jaxpr: ClosedJaxpr,
    body_nconsts: int,
) -> Any:
    c, b, carry = split_list(operands, [cond_nconsts, body_nconsts])
    while lockstep.same("while_loop", lockstep.run(cond_jaxpr, [*c, *carry])[0]):
        carry = lockstep.run(body_jaxpr, [*b, *carry])
    return carry


def _scan(
    lockstep: Lockstep,
    operands: Sequence[Values],
    *,
    jaxpr: ClosedJaxpr,
    length: int,
    reverse: bool,
    num_consts: int,
    num_carry: int,
    unroll: int,
) -> Any:
    consts, carry, xs = split_list(operands, [num_consts, num_carry])
    ys: list[list[Values]] = []
    for k in reversed(range(length)) if reverse else range(length):
        rows = [[np.asarray(x[k]) for x in column] for column in xs]
        outs = lockstep.run(jaxpr, [*consts, *carry, *rows])
        carry = outs[:num_carry]
        ys.append(outs[num_carry:])
    if reverse:
        ys.reverse()
    stacked = []
    for j, aval in enumerate(jaxpr.out_avals[num_carry:]):
        empty = np.empty((0, *aval.shape), aval.dtype)
        stacked.append(
            [np.stack([y[j][d] for y in ys]) if ys else empty for d in range(len(lockstep.local))]
        )
    return [*carry, *stacked]


_CONTROL = {"cond": _cond, "while": _while, "scan": _scan}
