"""Programs that call maps over a mesh, and do work around them, as one map.

A `jit` of a training step is often a `shard_map` that makes gradients and, around it, an update of
all weights. As a program of one device it would have to gather the map's results, and over
processes it could not. So the work around becomes part of the map: every device does it on whole
values, which all of them have. Shards that a map gives are gathered if the rest wants them whole;
each device cuts a shard of a whole value out for itself.

The one idea: a value of the program has *forms*, whole or cut by some spec, and each reader asks
for one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from spmd.collectives.all_gather import all_gather
from spmd.collectives.axis import axis_index
from spmd.compile.passes.inline_calls import inline_calls, write_body
from spmd.compile.passes.rewriter import JaxprBuilder, map_subjaxprs
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var, subjaxprs
from spmd.core.rewrite import close
from spmd.lax.dynamic import dynamic_slice
from spmd.sharding.shard_map_rules import mesh_axes, piece_aval, shard_map_p
from spmd.sharding.spec import Mesh, PartitionSpec

WHOLE = PartitionSpec()


def merge_shard_maps(closed: ClosedJaxpr) -> ClosedJaxpr | None:
    """A program with maps as one `shard_map`, its only equation, if it can be that.

    None if they are over several meshes or of `pmap`, and where the work around them has effects:
    these would happen once for each device.
    """
    flat = inline_calls(closed)
    maps = list(_maps(flat))
    mesh = maps[0].params["mesh"]
    if any(eqn.params["mesh"] != mesh or eqn.params["kind"] != "manual" for eqn in maps):
        return None
    if _acts_outside(flat):
        return None
    jaxpr = flat.jaxpr
    operands = (*jaxpr.constvars, *jaxpr.invars)
    body = _Body(mesh, jaxpr, operands)
    body.write()
    params = {
        "jaxpr": body.closed(jaxpr.name, jaxpr.arg_names),
        "mesh": mesh,
        "in_specs": tuple(body.in_specs),
        "out_specs": tuple(body.out_specs),
        "kind": "manual",
        "name": jaxpr.name,
    }
    outs = tuple(Var(v.aval) for v in jaxpr.outvars)
    eqn = Eqn(shard_map_p, operands, outs, params, jaxpr.effects, maps[0].source)
    return ClosedJaxpr(jaxpr.replace(eqns=(eqn,), outvars=outs), flat.consts)


# ---- the present program -----------------------------------------------------------------------


def _is_map(eqn: Eqn) -> bool:
    return eqn.prim is shard_map_p


def _maps(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[Eqn]:
    """The maps of a program, in control flow and calls too."""
    for eqn in jaxpr.eqns:
        if _is_map(eqn):
            yield eqn
        else:
            for _, inner in subjaxprs(eqn.params):
                yield from _maps(inner)


def _has_maps(jaxpr: Jaxpr | ClosedJaxpr) -> bool:
    return next(_maps(jaxpr), None) is not None


def _nests_maps(eqn: Eqn) -> bool:
    return any(_has_maps(inner) for _, inner in subjaxprs(eqn.params))


def _acts_outside(jaxpr: Jaxpr | ClosedJaxpr) -> bool:
    """Whether anything but a map has effects."""
    for eqn in jaxpr.eqns:
        if _is_map(eqn) or not eqn.effects:
            continue
        inside = [inner for _, inner in subjaxprs(eqn.params)]
        if not _nests_maps(eqn) or any(_acts_outside(inner) for inner in inside):
            return True
    return False


def _demands(jaxpr: Jaxpr) -> dict[Var, PartitionSpec]:
    """How each variable is wanted: by the one spec that all readers ask for, or whole."""
    wanted: dict[Var, PartitionSpec] = {}

    def want(atom: Atom, spec: PartitionSpec) -> None:
        if isinstance(atom, Var):
            wanted[atom] = spec if wanted.get(atom, spec) == spec else WHOLE

    for eqn in jaxpr.eqns:
        specs: Sequence[PartitionSpec] = [WHOLE] * len(eqn.invars)
        if _is_map(eqn):
            specs = [_normal(spec) for spec in eqn.params["in_specs"]]
        elif eqn.prim.name == "scan":
            specs = _scanned(eqn)
        for atom, spec in zip(eqn.invars, specs, strict=True):
            want(atom, spec)
    return wanted


def _scanned(eqn: Eqn) -> list[PartitionSpec]:
    """How a scan wants its operands: constants and slices as the body does, the carry whole."""
    body: ClosedJaxpr = eqn.params["jaxpr"]
    first = eqn.params["num_consts"]
    carry = range(first, first + eqn.params["num_carry"])
    wanted = _demands(body.jaxpr) if _has_maps(body) else {}
    found = [WHOLE if k in carry else wanted.get(v, WHOLE) for k, v in enumerate(body.jaxpr.invars)]
    return [
        PartitionSpec(None, *spec) if spec and k >= carry.stop else spec
        for k, spec in enumerate(found)
    ]


def _normal(spec: PartitionSpec) -> PartitionSpec:
    """The one way to write a spec."""
    entries: list[Any] = [spec.axes_of(d) for d in range(len(spec))]
    while entries and not entries[-1]:
        entries.pop()
    return PartitionSpec(
        *(None if not axes else axes[0] if len(axes) == 1 else axes for axes in entries)
    )


# ---- writing -----------------------------------------------------------------------------------


class _Body:
    """One jaxpr as each device runs it: maps are written out, the rest works on whole values.

    `inputs` are its variables that come from outside; of `kept`, by number, the whole is given.
    """

    def __init__(self, mesh: Mesh, jaxpr: Jaxpr, inputs: Sequence[Var], kept: Sequence[int] = ()):
        self.mesh, self.jaxpr = mesh, jaxpr
        self.writer = JaxprBuilder()
        self.forms: dict[Var, dict[PartitionSpec, Atom]] = {}
        wanted = _demands(jaxpr)
        self.in_specs = [WHOLE if k in kept else wanted.get(v, WHOLE) for k, v in enumerate(inputs)]
        self.invars: list[Var] = []
        for v, spec in zip(inputs, self.in_specs, strict=True):
            given = Var(piece_aval(v.aval, spec, mesh, "manual")) if spec else v
            self.invars.append(given)
            self.forms[v] = {spec: given}
        self.outvars: list[Atom] = []
        self.out_specs: list[PartitionSpec] = []

    def write(self, whole: bool = False) -> None:
        """All equations, and results in the form that is there, or all of them whole."""
        for eqn in self.jaxpr.eqns:
            if _is_map(eqn):
                self.map(eqn)
            elif _nests_maps(eqn):
                self.nest(eqn)
            else:
                self.plain(eqn, self.read_all(eqn.invars))
        for atom in self.jaxpr.outvars:
            forms = self.forms[atom] if isinstance(atom, Var) else {WHOLE: atom}
            spec = WHOLE if whole or WHOLE in forms else next(iter(forms))
            self.out_specs.append(spec)
            self.outvars.append(self.read(atom, spec))

    def closed(self, name: str, arg_names: tuple[str, ...] = ()) -> ClosedJaxpr:
        """The finished jaxpr."""
        made = self.writer.close(self.invars, self.outvars, name)
        return ClosedJaxpr(made.jaxpr.replace(arg_names=arg_names), made.consts)

    # ---- equations ----

    def map(self, eqn: Eqn) -> None:
        """The body of a map, on shards."""
        params = eqn.params
        ins, outs = ([_normal(s) for s in params[key]] for key in ("in_specs", "out_specs"))
        found = write_body(self.writer, params["jaxpr"], self.read_all(eqn.invars, ins))
        for v, spec, atom in zip(eqn.outvars, outs, found, strict=True):
            self.forms[v] = {spec: atom}

    def nest(self, eqn: Eqn) -> None:
        """Control flow with maps in it."""
        if eqn.prim.name != "scan":
            changed = map_subjaxprs(eqn, self.inside)
            self.plain(eqn, self.read_all(eqn.invars), changed)
            return
        params = eqn.params
        first = params["num_consts"]
        carry = range(first, first + params["num_carry"])
        body = self.inside(params["jaxpr"], carry)
        self.plain(eqn, self.read_all(eqn.invars, _scanned(eqn)), params | {"jaxpr": body})

    def inside(self, closed: ClosedJaxpr, kept: Sequence[int] | None = None) -> ClosedJaxpr:
        """A jaxpr of control flow; it gives whole results, and gets `kept` (or all) whole."""
        jaxpr = closed.jaxpr
        everything = range(len(jaxpr.invars))
        body = _Body(self.mesh, jaxpr, jaxpr.invars, everything if kept is None else kept)
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
            body.forms[var] = {WHOLE: body.writer.const(value, var.aval)}
        body.write(whole=True)
        return body.closed(jaxpr.name, jaxpr.arg_names)

    def plain(
        self, eqn: Eqn, operands: tuple[Atom, ...], params: dict[str, Any] | None = None
    ) -> None:
        """An equation on whole values."""
        if operands != eqn.invars or params is not None:
            eqn = eqn.replace(invars=operands, params=eqn.params if params is None else params)
        self.writer.eqns.append(eqn)
        for v in eqn.outvars:
            self.forms[v] = {WHOLE: v}

    # ---- forms ----

    def read_all(
        self, atoms: Sequence[Atom], specs: Sequence[PartitionSpec] | None = None
    ) -> tuple[Atom, ...]:
        """Some atoms, each cut by its spec, or all whole."""
        given = specs or [WHOLE] * len(atoms)
        return tuple(self.read(atom, spec) for atom, spec in zip(atoms, given, strict=True))

    def read(self, atom: Atom, spec: PartitionSpec) -> Atom:
        """An atom cut by a spec."""
        if isinstance(atom, Literal):
            return atom
        forms = self.forms[atom]
        if spec not in forms:
            if WHOLE not in forms:
                cut, shard = next(iter(forms.items()))
                forms[WHOLE] = self.moved(_gather, cut, shard)
            if spec:
                forms[spec] = self.moved(_cut, spec, forms[WHOLE])
        return forms[spec]

    def moved(self, move: Any, spec: PartitionSpec, atom: Atom) -> Atom:
        """The result of a function of a value, a spec and a mesh."""
        with mesh_axes(self.mesh, "manual"):
            made = close(lambda x: [move(x, spec, self.mesh)], [atom.aval], move.__name__)
        (found,) = write_body(self.writer, made, [atom])
        return found


def _gather(x: Any, spec: PartitionSpec, mesh: Mesh) -> Any:
    """The whole of a value of which each device has a shard."""
    for d in range(len(spec)):
        axes = spec.axes_of(d)
        if mesh.axis_size(axes) > 1:
            x = all_gather(x, axes, axis=d, tiled=True)
    return x


def _cut(x: Any, spec: PartitionSpec, mesh: Mesh) -> Any:
    """The shard that this device has of a value that all have."""
    counts = [mesh.axis_size(spec.axes_of(d)) for d in range(x.ndim)]
    if math.prod(counts) == 1:
        return x
    sizes = [size // count for size, count in zip(x.shape, counts, strict=True)]
    starts = [
        axis_index(spec.axes_of(d)) * size if count > 1 else 0
        for d, (size, count) in enumerate(zip(sizes, counts, strict=True))
    ]
    return dynamic_slice(x, starts, sizes)
