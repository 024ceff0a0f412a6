"""The kind of program that a jaxpr becomes: one of a single device, or one over a mesh.

A program is over a mesh if an argument is laid out over one, if its user constrains a value to one,
or if there is a `shard_map` in it. It is partitioned then (`spmd/partition/`): its jaxpr becomes
one `shard_map` equation, and results stay where they are. A jaxpr that is one `shard_map` already
is compiled as it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from spmd.base.amounts import size_text
from spmd.base.config import config
from spmd.base.errors import ShardingError
from spmd.base.source import UNKNOWN, current_source
from spmd.base.util import collector_paused
from spmd.compile.executable.executable import Executable, common_home, compile_jaxpr
from spmd.compile.lazy import mesh_executable, partition, pipeline, unasked
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Literal, all_eqns
from spmd.sharding.abstract_mesh import AxisType
from spmd.sharding.array import Array
from spmd.sharding.named import NamedSharding, Sharding
from spmd.sharding.operand_layouts import Layouts, spec_over
from spmd.sharding.spec import Mesh, PartitionSpec


def compile_program(
    closed: ClosedJaxpr,
    donated: Sequence[bool] = (),
    optimised: ClosedJaxpr | None = None,
    layouts: Layouts | None = None,
    wanted: Sequence[Sharding | None] = (),
) -> Executable | MeshProgram:
    """The executable of a closed jaxpr, over a mesh if one has to do with it.

    `optimised` is the result of the passes, if they have run; `layouts` are those of the arguments,
    and `wanted` is what the user says of those of the results.
    """
    with collector_paused():
        names = closed.jaxpr.primitives
        if "shard_map" in names and _is_one_map(closed):
            flat = pipeline.inline_calls(closed)
            if not set(flat.jaxpr.outvars) - set(flat.eqns[0].outvars):
                return MeshProgram(flat, flat.eqns[0], donated)
        made = partitioned(closed, layouts, wanted=wanted)
        if made is not None:
            return MeshProgram(made, made.eqns[0], donated, closed)
        if "shard_map" in names:
            _check_no_partly_manual_map(closed)
        if layouts is not None and config.unasked_gathers != "allow":
            _tell_of_gathers(closed, layouts)
        return compile_jaxpr(closed, donated, optimised)


def _tell_of_gathers(closed: ClosedJaxpr, layouts: Layouts) -> None:
    """Tell of the arguments that a program of one device gathers, as `unasked_gathers` says."""
    rows = []
    for k, (sharding, aval) in enumerate(zip(layouts, closed.in_avals, strict=True)):
        if sharding is None:
            continue
        lacks = aval.nbytes - math.prod(sharding.shard_shape(aval.shape)) * aval.dtype.itemsize
        if lacks > config.unasked_gathers_from:
            names = closed.jaxpr.arg_names
            name = names[k] if k < len(names) else f"argument {k}"
            rows.append(f"{name} ({aval.short()}, laid out by {sharding.spec}): {size_text(lacks)}")
    if rows:
        source = next((e.source for e in closed.eqns if e.source is not UNKNOWN), current_source())
        text = "\n  ".join(rows)
        unasked.tell(
            f"{source}: {closed.jaxpr.name} is not partitioned, so its arguments are gathered on "
            f"one device, for which no sharding asks (config.unasked_gathers="
            f"{config.unasked_gathers!r}): there is a map over other devices or another "
            "mesh in it, or a callback that returns keys. Take that out of the jitted function\n  "
            f"{text}",
            source,
        )


def partitioned(
    closed: ClosedJaxpr,
    layouts: Layouts | None,
    plans: list[Any] | None = None,
    wanted: Sequence[Sharding | None] = (),
) -> ClosedJaxpr | None:
    """A program over a mesh as one `shard_map` equation; None if it is not over one.

    The partitioner's plan is added to `plans`. Results that lie as the user `wanted`, or else as an
    argument does, have its very spec.
    """
    mesh = mesh_of(closed, layouts or ())
    if mesh is None:
        return None
    given = layouts or [None] * len(closed.in_avals)
    specs = [None if s is None else spec_over(mesh, s) for s in given]
    uneven = any(s is not None and s.uneven for s in given)
    free = [None] * len(closed.out_avals)
    found = partition.partition(closed, mesh, specs, free, plans, uneven)
    return None if found is None else _with_specs_as_given(found, closed, mesh, specs, wanted)


def _with_specs_as_given(
    made: ClosedJaxpr,
    closed: ClosedJaxpr,
    mesh: Mesh,
    specs: Sequence[PartitionSpec | None],
    wanted: Sequence[Sharding | None],
) -> ClosedJaxpr:
    """The program with those specs of results that users have written, of several that say alike.

    Their layouts come first, then the specs of arguments that are read and have as many dims;
    where types say all, specs of results are in full.
    """
    (eqn,) = made.eqns
    outs, jaxpr = eqn.params["out_specs"], closed.jaxpr
    read: set[Any] = {*jaxpr.outvars, *(a for e in closed.eqns for a in e.invars)}
    pairs = zip(jaxpr.invars, specs, strict=True)
    given = [] if mesh.are_all_axes_explicit else [(v, s) for v, s in pairs if s and v in read]
    chosen = []
    for k, (spec, aval) in enumerate(zip(outs, closed.out_avals, strict=True)):
        asked = wanted[k] if wanted else None
        own = [asked.spec] if isinstance(asked, NamedSharding) and asked.mesh == mesh else []
        alike = (s for v, s in given if v.aval.ndim == aval.ndim)
        splits = spec.without_trailing()
        chosen.append(next((s for s in (*own, *alike) if s.without_trailing() == splits), spec))
    if tuple(chosen) == outs:
        return made
    eqn = eqn.replace(params={**eqn.params, "out_specs": tuple(chosen)})
    return ClosedJaxpr(made.jaxpr.replace(eqns=(eqn,)), made.consts)


def mesh_of(closed: ClosedJaxpr, layouts: Sequence[NamedSharding | None]) -> Mesh | None:
    """The mesh of a program: its first argument's, else that of its first map or constraint.

    Its axes have the types that those of arguments and results say.
    """
    mesh = next((s.mesh for s in layouts if s is not None), None) or _first_mesh(closed)
    if mesh is None:
        return None
    typed = [a.sharding.mesh for a in (*closed.out_avals, *closed.in_avals) if a.sharding]
    types = typed[0].axis_types if typed else (AxisType.Auto,) * len(mesh.axis_names)
    if types == mesh.axis_types or len(types) != len(mesh.axis_types):
        return mesh
    return mesh.update(axis_types=types)


def _first_mesh(closed: ClosedJaxpr) -> Mesh | None:
    if _OVER_MESHES.isdisjoint(closed.jaxpr.primitives):
        return None
    for eqn in all_eqns(closed):
        if eqn.prim.name in _OVER_MESHES and isinstance(eqn.params["mesh"], Mesh):
            return eqn.params["mesh"]
    return None


_OVER_MESHES = frozenset(("shard_map", "sharding_constraint", "reshard"))


def _check_no_partly_manual_map(closed: ClosedJaxpr) -> None:
    """Raise if a map leaves axes to the compiler in a program that is not partitioned."""
    for eqn in all_eqns(closed):
        if eqn.prim.name == "shard_map" and eqn.params.get("manual") is not None:
            raise ShardingError(
                f"{eqn.source}: shard_map({eqn.params['name']}): axis_names="
                f"{set(eqn.params['manual'])!r} leaves axes to the compiler, and there is other "
                "work in this program that is not partitioned: a map over other devices or another "
                "mesh, or a callback that returns keys. Take it out of the jitted function"
            )


def _is_one_map(closed: ClosedJaxpr) -> bool:
    """Whether all there is in a program, in calls or not, is one shard_map."""
    first = list(itertools.islice(_called(closed), 2))
    if len(first) != 1 or first[0].prim.name != "shard_map":
        return False
    return first[0].params.get("manual") is None


def _called(closed: ClosedJaxpr) -> Iterator[Eqn]:
    """The equations of a jaxpr and, in the place of calls, of their bodies."""
    for eqn in closed.eqns:
        inside = eqn.stands_for()
        if inside is None:
            yield eqn
        else:
            yield from _called(inside)


class MeshProgram:
    """Runs one shard_map equation; call it with the flat list of arguments.

    `whole` is the program that was partitioned, if one was.
    """

    is_map = True

    def __init__(
        self,
        closed: ClosedJaxpr,
        eqn: Eqn,
        donated: Sequence[bool],
        whole: ClosedJaxpr | None = None,
    ):
        jaxpr = closed.jaxpr
        self.whole = whole
        self.names = jaxpr.arg_names
        self.in_avals = tuple(closed.in_avals)
        self.out_avals = tuple(closed.out_avals)
        self.donated = tuple(donated) or (False,) * len(self.in_avals)
        self.params: dict[str, Any] = eqn.params
        self.core = mesh_executable.mesh_executable(**eqn.params)
        arguments: dict[Any, int] = {v: k for k, v in enumerate(jaxpr.invars)}
        constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        # Each operand is an argument, by number, or a value.
        self._operands = [_operand(a, arguments, constants) for a in eqn.invars]
        # The results of each device that may be written over a donated argument: by output, which.
        self.takes = self._takes()
        self._results = [eqn.outvars.index(v) for v in jaxpr.outvars]

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
        common_home(leaves, self.names)
        operands = [value if number is None else leaves[number] for number, value in self._operands]
        whole = None
        if self.whole is not None and (config.debug_nans or config.debug_infs):
            whole = mesh_executable.Whole(self.whole, leaves)
        outs = mesh_executable.evaluate_map(self.params, operands, self.takes, self.core, whole)
        for leaf, gone in zip(leaves, self.donated, strict=True):
            if gone and isinstance(leaf, Array):
                leaf.delete()
        return [outs[k] for k in self._results]

    def as_text(self) -> str:
        """The steps of the program that each device runs."""
        return str(self.core.schedule)


def _operand(
    atom: Atom, arguments: dict[Any, int], constants: dict[Any, Any]
) -> tuple[int | None, Any]:
    if isinstance(atom, Literal):
        return None, np.asarray(atom.val, atom.aval.dtype)
    return (arguments[atom], None) if atom in arguments else (None, constants[atom])
