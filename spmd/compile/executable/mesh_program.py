"""Programs over a mesh that `jit` runs: one `shard_map` equation, its arguments and results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from spmd.base.config import config
from spmd.compile.executable.executable import common_home
from spmd.compile.lazy import mesh_executable
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Literal, all_eqns
from spmd.sharding.array import Array, usable
from spmd.sharding.operand_layouts import check_on_devices
from spmd.sharding.spec import Mesh


class MeshProgram:
    """Runs one shard_map equation; call it with the flat list of arguments.

    `whole` is the program that was partitioned, if one was; `names` are those of arguments if the
    jaxpr has none.
    """

    is_map = True

    def __init__(
        self,
        closed: ClosedJaxpr,
        eqn: Eqn,
        donated: Sequence[bool],
        whole: ClosedJaxpr | None = None,
        names: Sequence[str] = (),
    ):
        jaxpr = closed.jaxpr
        self.whole = whole
        self.called, self.names = jaxpr.name, names or jaxpr.arg_names
        self.in_avals = tuple(closed.in_avals)
        self.out_avals = tuple(closed.out_avals)
        self.params: dict[str, Any] = eqn.params
        self.core = mesh_executable.mesh_executable(**eqn.params)
        if whole is not None:
            self.core.made_of(whole)
        arguments: dict[Any, int] = {v: k for k, v in enumerate(jaxpr.invars)}
        constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        # Each operand is an argument, by number, or a value.
        self._operands = [_operand(a, arguments, constants) for a in eqn.invars]
        # Of a map that is the program, what its body does not read may lie anywhere.
        body = eqn.params["jaxpr"].jaxpr
        read = {*body.outvars, *(a for e in body.eqns for a in e.invars)}
        self._is_placed = [whole is not None or v in read for v in body.invars]
        self._devices = tuple([d.id for d in self.core.mesh.flat_devices()])
        self._results = [eqn.outvars.index(v) for v in jaxpr.outvars]
        self.donated = self._usable(donated)
        # The results of each device that may be written over a donated argument: by output, which.
        self.takes = self._takes()

    def _usable(self, donated: Sequence[bool]) -> tuple[bool, ...]:
        """Which donated arguments the program reads, and a result may take the shards of."""
        if True not in donated:
            return (False,) * len(self.in_avals)
        rows = zip(self._operands, self.core.in_avals, strict=True)
        nbytes = {number: aval.nbytes for (number, _), aval in rows}
        ins = [nbytes.get(k, -1) for k in range(len(self.in_avals))]
        return usable(donated, ins, [self.core.out_avals[k].nbytes for k in self._results])

    def _takes(self) -> dict[int, int]:
        given = [number for number, _ in self._operands]
        # An argument that is an operand twice stays as it is.
        donated = [
            number is not None and self.donated[number] and given.count(number) == 1
            for number in given
        ]
        return self.core.takes_of(donated)

    @property
    def is_plain(self) -> bool:
        """Whether arguments and results are the equation's, in order."""
        arguments = [number for number, _ in self._operands]
        results = list(range(len(self.core.whole_avals)))
        return arguments == list(range(len(self.in_avals))) and self._results == results

    @property
    def input_shardings(self) -> list[Any]:
        """The sharding of each argument; None for one that the program does not read."""
        found: list[Any] = [None] * len(self.in_avals)
        for (number, _), sharding in zip(self._operands, self.core.in_shardings, strict=True):
            if number is not None:
                found[number] = sharding
        return found

    @property
    def output_shardings(self) -> list[Any]:
        """The sharding of each result."""
        return [self.core.out_shardings[k] for k in self._results]

    def __call__(self, leaves: Sequence[Any]) -> list[Array]:
        """Run on arguments of exactly the avals compiled for."""
        common_home(leaves, self.names, name=self.called)
        rows = zip(self._operands, self._is_placed, strict=True)
        given = [leaves[k] if k is not None and placed else None for (k, _), placed in rows]
        check_on_devices(self._devices, given, self._describe)
        operands = [value if number is None else leaves[number] for number, value in self._operands]
        whole = None
        if self.whole is not None and (config.debug_nans or config.debug_infs):
            whole = mesh_executable.Whole(self.whole, leaves)
        outs = mesh_executable.evaluate_map(self.params, operands, self.takes, self.core, whole)
        self.give_up(leaves)
        return [outs[k] for k in self._results]

    def _describe(self, k: int) -> tuple[str, str, str, str]:
        """The function, an operand by name, what runs on the devices, and the fix, for an error."""
        number, _ = self._operands[k]
        name = self.names[number] if number is not None and number < len(self.names) else ""
        given = name or "x"
        name = name or f"argument {number}"
        cause = f"shard_map({self.params['name']})"
        if self.whole is not None:
            devices = set(self._devices)
            rows = (
                (e, {d.id for d in e.params["mesh"].flat_devices()})
                for e in over_meshes(self.whole)
            )
            cause = next((cause_text(e) for e, own in rows if own == devices), "the program")
        return f"jit({self.called})", name, cause, f"device_put({given}, NamedSharding(mesh, spec))"

    def give_up(self, leaves: Sequence[Any]) -> None:
        """End the donated arguments; one that had to be cut for the devices stays."""
        is_one = self.core.mesh.size == 1
        for leaf, gone in zip(leaves, self.donated, strict=True):
            if gone and isinstance(leaf, Array) and (is_one or leaf.shards is not None):
                leaf.delete()

    def as_text(self) -> str:
        """The steps of the program that each device runs."""
        return str(self.core.schedule)


OVER_MESHES = frozenset(("sharding_constraint", "reshard", "shard_map"))


def over_meshes(closed: ClosedJaxpr) -> Iterator[Eqn]:
    """The equations of a program that name a mesh of devices, those inside of others too."""
    for eqn in all_eqns(closed):
        if eqn.prim.name in OVER_MESHES and isinstance(eqn.params["mesh"], Mesh):
            yield eqn


def cause_text(eqn: Eqn) -> str:
    """The words of users for an equation that names a mesh, and where they wrote it."""
    name = eqn.prim.name
    if name == "shard_map":
        name = f"shard_map({eqn.params['name']})"
    elif name == "sharding_constraint":
        name = "device_put" if eqn.params.get("moves", False) else "a sharding constraint"
    return f"{name} in it ({eqn.source})"


def _operand(
    atom: Atom, arguments: dict[Any, int], constants: dict[Any, Any]
) -> tuple[int | None, Any]:
    if isinstance(atom, Literal):
        return None, np.asarray(atom.val, atom.aval.dtype)
    return (arguments[atom], None) if atom in arguments else (None, constants[atom])
