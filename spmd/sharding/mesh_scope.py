"""`set_mesh`, `get_mesh` and their abstract relatives: the mesh that code inside need not name.

They read and write the one scope of `spec.py`; each thread has its own. `with mesh:` is weaker: it
is where specs without a mesh look if none is set.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from spmd.base.context import state
from spmd.base.errors import ArgumentError, ShardingError
from spmd.core import aval as avals
from spmd.core.aval import ShapedArray
from spmd.core.jvp import JVPTracer
from spmd.core.mutable.cells import AbstractRef, Cell, type_of_boxed
from spmd.core.trace import Tracer
from spmd.core.vmap import BatchTracer
from spmd.sharding.abstract_mesh import AbstractMesh, AxisType
from spmd.sharding.call_cache import is_evaluated
from spmd.sharding.constraint import note_mesh_read
from spmd.sharding.named import NamedSharding
from spmd.sharding.spec import Mesh, PartitionSpec, scope


class set_mesh:
    """Set the mesh that `shard_map` and bare `PartitionSpec`s refer to, and on which results lie.

    `set_mesh(mesh)` sets it for the rest of this thread, and `with set_mesh(mesh):` for a block;
    None is no mesh. Results of operations and jitted functions that would lie on one device lie on
    all of the mesh's, whole; they share their memory. `device_put` without a sharding leaves arrays
    on one device. Raises `ArgumentError` if
    `mesh` is no `Mesh`, and `ShardingError` if an axis is `Manual` or inside `jit` and other
    transformations.

    >>> with spmd.set_mesh(spmd.make_mesh((4,), ("x",))):
    ...     x = spmd.device_put(np.arange(8.0), spmd.P("x"))
    >>> x.addressable_shards[1].data
    Array([2., 3.], dtype=float32)
    """

    __slots__ = ("_before",)

    def __init__(self, mesh: Mesh | None):
        if mesh is not None and not isinstance(mesh, Mesh):
            raise ArgumentError(
                f"set_mesh: mesh must be a Mesh or None, got a {type(mesh).__name__}; "
                "make_mesh makes one"
            )
        _check_is_outside("set_mesh", "call it around the transformed function")
        if mesh is not None and AxisType.Manual in mesh.axis_types:
            raise ShardingError(
                f"set_mesh: {mesh} has a Manual axis; only shard_map makes axes manual, for the "
                "code inside it"
            )
        self._before = scope.enter(None if mesh is None or mesh.empty else mesh, places=True)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        scope.leave(self._before)


def get_mesh() -> Mesh:
    """Return the mesh that `set_mesh` has set, or one that is `empty`.

    It has devices, of which traced code knows nothing: raises `ShardingError` inside `jit` and
    other transformations, where `get_abstract_mesh` gives the axes.

    >>> with spmd.set_mesh(spmd.make_mesh((4,), ("x",))):
    ...     print(spmd.sharding.get_mesh())
    Mesh('x': 4, axis_types=(Explicit,))
    >>> spmd.sharding.get_mesh().empty
    True
    """
    _check_is_outside("get_mesh", "get_abstract_mesh() gives the axes there")
    return mesh_in_scope()


def mesh_in_scope() -> Mesh:
    """The mesh that `set_mesh` has set, or an empty one."""
    return _NO_MESH if scope.mesh is None else scope.mesh


class use_abstract_mesh:
    """Set the axes that `get_abstract_mesh` gives, for the length of a `with` block.

    `mesh` is an `AbstractMesh`, of as many devices as the mesh in scope, if there is one. A
    `shard_map` inside needs `mesh=`, unless these are the axes of the mesh in scope. Raises
    `ArgumentError` if `mesh` is something else, and `ShardingError` if its size differs.

    >>> with spmd.sharding.use_abstract_mesh(spmd.sharding.AbstractMesh((8,), ("x",))):
    ...     spmd.sharding.get_abstract_mesh().size
    8
    """

    __slots__ = ("_before", "mesh")

    def __init__(self, mesh: AbstractMesh):
        if not isinstance(mesh, AbstractMesh):
            raise ArgumentError(
                f"use_abstract_mesh: mesh must be an AbstractMesh, got a {type(mesh).__name__}; "
                "a Mesh has its own as mesh.abstract_mesh"
            )
        self.mesh = mesh

    def __enter__(self) -> None:
        around = _abstract_mesh_in_scope()
        if not around.empty and not self.mesh.empty and around.size != self.mesh.size:
            raise ShardingError(
                f"use_abstract_mesh: {self.mesh} has {self.mesh.size} devices, and the mesh in "
                f"scope, {around}, has {around.size}; both must have as many"
            )
        self._before = scope.enter(scope.mesh, self.mesh, places=True)

    def __exit__(self, *error: object) -> None:
        scope.leave(self._before)


def get_abstract_mesh() -> AbstractMesh:
    """Return the axes of the mesh in scope, or an `AbstractMesh` that is `empty`.

    It works in traced code too. Inside `shard_map` and `pmap` the axes of the map are `Manual`.

    >>> with spmd.set_mesh(spmd.make_mesh((2, 2), ("x", "y"))):
    ...     spmd.sharding.get_abstract_mesh()
    AbstractMesh('x': 2, 'y': 2, axis_types=(Explicit, Explicit))
    """
    mesh = _abstract_mesh_in_scope()
    note_mesh_read()
    mapped: dict[Any, int] = {f.name: f.size for f in state.axes if f.kind != "vmap"}
    if not mapped:
        return mesh
    if not mapped.keys() <= set(mesh.axis_names):  # a map over a mesh of its own
        return AbstractMesh(mapped.values(), mapped.keys(), [AxisType.Manual] * len(mapped))
    return mesh.update(axis_types=mesh.types_with(AxisType.Manual, tuple(mapped)))


def typeof(x: Any) -> Any:
    """Return the type of `x`: its shape, its dtype, and whether that is weak, and its layout.

    `x` is a number, a NumPy array, an `Array`, a `ShapeDtypeStruct` or a tracer; the weak type of a
    Python number gives way in promotion. `.sharding` is a `NamedSharding` over an abstract mesh:
    that of the array, empty for one that lies on one device; in traced code that of `set_mesh`,
    whose axes a `shard_map` makes `Manual`. Its spec names `Explicit` axes only, and `.vma` the
    axes of a `shard_map` over which the value varies. The type of a mutable array is an
    `AbstractRef` of that of its values. Raises `ArgumentError` for anything else.

    >>> spmd.typeof(1.0)
    ShapedArray(float32[], weak_type=True)
    >>> spmd.typeof(np.zeros((2, 3), np.int8))
    ShapedArray(int8[2,3])
    >>> mesh = spmd.make_mesh((4,), ("x",))
    >>> rows = spmd.device_put(np.ones((8, 2)), spmd.NamedSharding(mesh, spmd.P("x")))
    >>> spmd.typeof(rows).sharding.spec
    P('x', None)
    """
    if isinstance(x, Cell):
        return AbstractRef(x.aval)
    kind = type_of_boxed(x)
    if kind is not None:
        return kind
    aval = avals.typeof(x)
    while isinstance(x, JVPTracer | BatchTracer):  # over the mesh of the array that is in it
        x = x.val if isinstance(x, BatchTracer) else x.primal
    if aval.explicit is not None or isinstance(x, Tracer):
        return aval
    mesh = getattr(getattr(x, "sharding", None), "mesh", _NO_MESH).abstract_mesh
    # Types of values over the mesh in scope are those of tracers there.
    return aval if mesh is _abstract_mesh_in_scope() else aval.over(mesh)


def _unsaid(aval: ShapedArray) -> NamedSharding:
    """The sharding of a type that says nothing: over the mesh in scope, or over none."""
    return _replicated(get_abstract_mesh(), aval.ndim)


@functools.cache
def _replicated(mesh: AbstractMesh, ndim: int) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*[None] * ndim))


def _abstract_mesh_in_scope() -> AbstractMesh:
    if scope.abstract is not None:
        return scope.abstract
    return _NO_MESH.abstract_mesh if scope.mesh is None else scope.mesh.abstract_mesh


def _check_is_outside(what: str, advice: str) -> None:
    if not is_evaluated():
        raise ShardingError(
            f"{what} can only be used outside of jit and other transformations; {advice}"
        )


_NO_MESH = Mesh(np.empty((), dtype=object), ())
avals.set_views(_unsaid, _replicated)
