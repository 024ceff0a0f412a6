"""Arguments and results over a program's devices in an order that its mesh cannot express.

The one idea: parts that lie in any order are one array of stacked parts, in the order of the mesh,
and an exchange, of which the program makes a layout over its mesh. Nothing else of it knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.base.device import Device
from spmd.base.record import record
from spmd.collectives.exchange import exchange
from spmd.collectives.rectangles import Copies, copies_between
from spmd.compile.executable.mesh_program import MeshProgram
from spmd.compile.executable.redistribute import rectangles
from spmd.core.aval import ShapedArray, typeof
from spmd.core.ir import Atom, ClosedJaxpr, Jaxpr, Var
from spmd.core.rewrite import close, eval_closed
from spmd.sharding.array import Array, alias, from_shards
from spmd.sharding.constraint import sharding_constraint_p
from spmd.sharding.explicit_layouts import reshard_p
from spmd.sharding.named import NamedSharding, Sharding
from spmd.sharding.operand_layouts import Layouts, is_reordered, similar_spec, spec_over
from spmd.sharding.shard_map_rules import untyped_map
from spmd.sharding.spec import Mesh, PartitionSpec


@record
class Ordered:
    """A program whose arguments and results are stacked where no spec says how their devices lie.

    For each argument and each result there is its sharding, if its devices have another order than
    those of the mesh, and how the program has it.
    """

    closed: ClosedJaxpr
    mesh: Mesh
    layouts: tuple[NamedSharding | None, ...]
    given: tuple[NamedSharding | None, ...]
    made: tuple[NamedSharding | None, ...]


def ordered(
    closed: ClosedJaxpr, mesh: Mesh, layouts: Layouts | None, wanted: Sequence[Sharding | None] = ()
) -> Ordered | None:
    """The program with stacked arguments and results; None if no device order needs that."""
    devices = mesh.flat_devices()
    known = layouts or (None,) * len(closed.in_avals)
    given = tuple([s if s is not None and _is_other(s, devices) else None for s in known])
    asked = wanted or [None] * len(closed.out_avals)
    said = [
        own if own is not None else _constraint_of(atom, closed.jaxpr)
        for own, atom in zip(asked, closed.jaxpr.outvars, strict=True)
    ]
    made = tuple([_over_another_grid(s, mesh) for s in said])
    if not any(given) and not any(made):
        return None
    specs = [None if s is None else spec_over(mesh, s) for s in given]

    def stacked(*args: Any) -> list[Any]:
        rows = zip(args, given, specs, closed.in_avals, strict=True)
        xs = [
            x if s is None or spec is not None else _unstacked(x, s, mesh, aval)
            for x, s, spec, aval in rows
        ]
        outs = zip(eval_closed(closed, *xs), made, strict=True)
        return [
            x if s is None or not is_reordered(mesh, s) else _stacked(x, s, mesh) for x, s in outs
        ]

    rows = list(zip(closed.in_avals, given, specs, strict=True))
    avals = [a if s is None or spec is not None else _stack_of(a, s) for a, s, spec in rows]
    jaxpr = closed.jaxpr
    flat = PartitionSpec(mesh.axis_names)
    lies = tuple(
        [
            own if s is None else NamedSharding(mesh, flat if spec is None else spec)
            for own, s, spec in zip(known, given, specs, strict=True)
        ]
    )
    return Ordered(close(stacked, avals, jaxpr.name, jaxpr.arg_names), mesh, lies, given, made)


def _is_other(sharding: NamedSharding, devices: list[Device]) -> bool:
    """Whether a sharding is over the same devices in another order."""
    mesh = sharding.mesh
    if not isinstance(mesh, Mesh) or mesh.flat_devices() == devices or sharding.uneven:
        return False
    return not sharding.spec.unreduced and set(mesh.flat_devices()) == set(devices)


def _over_another_grid(sharding: Sharding | None, mesh: Mesh) -> NamedSharding | None:
    """The sharding, if it says how devices hold parts of one size in another order or grid."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    spec, own = sharding.spec, sharding.mesh
    renamed = own.devices.shape == mesh.devices.shape and own.flat_devices() == mesh.flat_devices()
    if renamed or sharding.uneven or spec.unreduced:
        return None
    if PartitionSpec.UNCONSTRAINED in spec or set(own.flat_devices()) != set(mesh.flat_devices()):
        return None
    return sharding


_MAY_ORDER = frozenset((sharding_constraint_p.name, reshard_p.name))


def _constraint_of(atom: Atom, jaxpr: Jaxpr) -> NamedSharding | None:
    """The sharding in the constraint that makes a result, if one does."""
    while isinstance(atom, Var):
        eqn = next((e for e in jaxpr.eqns if atom in e.outvars), None)
        if eqn is None:
            return None
        if eqn.prim.name in _MAY_ORDER:
            return NamedSharding(eqn.params["mesh"], eqn.params["spec"])
        inside = eqn.stands_for()
        if inside is None:
            return None
        jaxpr, atom = inside.jaxpr, inside.jaxpr.outvars[eqn.outvars.index(atom)]
    return None


def _stack_of(aval: ShapedArray, sharding: NamedSharding) -> ShapedArray:
    first, *rest = sharding.shard_shape(aval.shape)
    return aval.strip_sharding().update(shape=(first * sharding.mesh.size, *rest))


def _copies(now: NamedSharding, then: NamedSharding, shape: Sequence[int], mesh: Mesh) -> Copies:
    devices = mesh.flat_devices()
    have, want = rectangles(now, shape), rectangles(then, shape)
    places = [d.process_index for d in devices]
    return copies_between([have[d] for d in devices], [want[d] for d in devices], places)


def _over(mesh: Mesh, sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """A layout over the mesh with parts of one size, as similar as can be."""
    spec = similar_spec(mesh, sharding)
    entries = [
        axes if axes and size % mesh.axis_size(axes) == 0 else None
        for size, axes in ((n, spec.axes_of(d)) for d, n in enumerate(shape))
    ]
    return NamedSharding(mesh, PartitionSpec(*entries))


def _unstacked(x: Any, sharding: NamedSharding, mesh: Mesh, aval: ShapedArray) -> Any:
    """An argument over the mesh, of its stacked parts."""
    lies = _over(mesh, sharding, aval.shape)
    copies, part = _copies(sharding, lies, aval.shape, mesh), lies.shard_shape(aval.shape)
    flat = PartitionSpec(mesh.axis_names)

    def move(own: Any) -> Any:
        return exchange(own, mesh.axis_names, copies, part)

    made = untyped_map(move, x, mesh, flat, lies.spec, "device_order")
    if aval.explicit is None:
        return made
    return reshard_p.bind(made, mesh=aval.explicit.mesh, spec=aval.explicit.spec)


def _stacked(x: Any, sharding: NamedSharding, mesh: Mesh) -> Any:
    """The stacked parts of a result over the mesh."""
    shape = typeof(x).shape
    lies = _over(mesh, sharding, shape)
    copies, part = _copies(lies, sharding, shape, mesh), sharding.shard_shape(shape)
    flat = PartitionSpec(mesh.axis_names)

    def move(own: Any) -> Any:
        return exchange(own, mesh.axis_names, copies, part)

    return untyped_map(move, x, mesh, lies.spec, flat, "device_order")


class OrderedProgram(MeshProgram):
    """Runs a program some of whose arguments or results lie in an order of their own."""

    def __init__(
        self, closed: ClosedJaxpr, found: Ordered, made: ClosedJaxpr, donated: Sequence[bool]
    ):
        self.found = found
        super().__init__(made, made.eqns[0], donated, found.closed)
        self.in_avals, self.out_avals = tuple(closed.in_avals), tuple(closed.out_avals)
        # A result that is not stacked has the sharding of its constraint, over the program's mesh.
        rows = zip(found.made, super().output_shardings, self.out_avals, strict=True)
        self.said = [
            s
            if s is not None and (is_reordered(found.mesh, s) or _lie_alike(s, own, aval.shape))
            else None
            for s, own, aval in rows
        ]

    @property
    def is_plain(self) -> bool:
        """Whether arguments and results are the equation's: they never are."""
        return False

    @property
    def input_shardings(self) -> list[Any]:
        """The sharding of each argument; None for one that the program does not read."""
        pairs = zip(self.found.given, super().input_shardings, strict=True)
        return [s if s is not None else own for s, own in pairs]

    @property
    def output_shardings(self) -> list[Any]:
        """The sharding of each result."""
        pairs = zip(self.said, super().output_shardings, strict=True)
        return [s if s is not None else own for s, own in pairs]

    def __call__(self, leaves: Sequence[Any]) -> list[Array]:
        """Run on arguments of exactly the avals compiled for."""
        found = self.found
        rows = zip(leaves, found.given, found.layouts, self.found.closed.in_avals, strict=True)
        outs = super().__call__(
            [
                x if s is None or then is None else _in_order(x, s, then, aval)
                for x, s, then, aval in rows
            ]
        )
        self.give_up(leaves)
        rows = zip(outs, self.said, self.out_avals, strict=True)
        return [x if s is None else _in_own_order(x, s, found.mesh, a) for x, s, a in rows]


def _lie_alike(one: NamedSharding, other: NamedSharding, shape: Sequence[int]) -> bool:
    """Whether two shardings give each device the same part."""
    return one.devices_indices_map(tuple(shape)) == other.devices_indices_map(tuple(shape))


def _in_order(x: Array, sharding: NamedSharding, then: NamedSharding, aval: ShapedArray) -> Array:
    """An array's parts as they are, in the order of another sharding's mesh."""
    x._check_alive()
    held = dict(zip(_local(sharding.mesh), x.shards or (), strict=True))
    return from_shards(aval, then, [alias(held[d]) for d in _local(then.mesh)])


def _in_own_order(x: Array, sharding: NamedSharding, mesh: Mesh, aval: ShapedArray) -> Array:
    """An array of stacked parts, in the order that its sharding says."""
    held = dict(zip(_local(mesh), x.shards or (), strict=True))
    shards = [held[d] for d in _local(sharding.mesh)]
    return from_shards(aval.strip_sharding(), sharding, shards)


def _local(mesh: Mesh) -> list[Device]:
    """The devices of this process, in the order of a mesh."""
    mine = set(mesh.local_devices)
    return [d for d in mesh.flat_devices() if d in mine]
