"""Eager evaluation: operations outside any transformation.

`evaluate` is the hook of `core/trace.py`. Calls of jaxprs run compiled; everything else runs the
primitive's `impl` over NumPy, or, where the operands are large enough for it to pay, a compiled
program of that one equation. An operation that our own code rounds (float functions, float sums,
products) runs code that serves all sizes (`eager_kernels.py`), so that a value never depends on how
often an operation was met; `disable_jit` asks for the plain definition, and runs `impl`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base import dtypes
from spmd.base.config import config
from spmd.base.context import busy, state
from spmd.base.device import Device, gpus, process_index
from spmd.base.errors import ShardingError
from spmd.base.transfers import HOST_TO_DEVICE, report_transfer
from spmd.base.tree import tree_flatten
from spmd.base.util import MISS
from spmd.compile.dispatch.signature import Split
from spmd.compile.executable.nan_check import check_operation
from spmd.compile.lazy import (
    eager_kernels,
    elementwise,
    executable,
    key_uses,
    mesh_executable,
    mesh_fast_call,
    redistribute,
    select,
    widen_small,
)
from spmd.core.aval import ShapedArray, typeof
from spmd.core.explicit import result_avals
from spmd.core.ir import ClosedJaxpr, Eqn, Jaxpr, Var
from spmd.core.primitive import Primitive
from spmd.core.rewrite import eval_closed
from spmd.core.trace import set_eager, to_numpy
from spmd.lax.convert import convert_element_type_p
from spmd.lax.dynamic import dynamic_slice_p
from spmd.lax.families import elementwise_dims
from spmd.lax.slicing import slice_p
from spmd.sharding.abstract_mesh import AxisType, meshes_of_types
from spmd.sharding.array import Array, alias, from_numpy, from_shards, note_made, shard_value
from spmd.sharding.call_cache import hook
from spmd.sharding.explicit_layouts import reshard_p
from spmd.sharding.named import NamedSharding
from spmd.sharding.operand_layouts import (
    Layouts,
    check_in_scope,
    check_on_devices,
    device_of,
    in_scope_mesh,
    layouts_of,
)
from spmd.sharding.shard_map_rules import check_devices_of_map, shard_map_p
from spmd.sharding.spec import Mesh, PartitionSpec

if TYPE_CHECKING:
    from spmd.compile.executable.executable import Executable
    from spmd.compile.executable.mesh_program import MeshProgram
    from spmd.sharding.call_cache import MappedCall

# From this many elements (of the largest operand) a compiled kernel beats NumPy, counting what the
# first use costs to compile; measured on elementwise chains and sums.
COMPILE_FROM_ELEMENTS = 1 << 16

# The start of a slice is a parameter: `x[k : k + n]` in a loop would compile a program for every k,
# where NumPy copies a view.
NEVER_COMPILED = frozenset({"slice", "pure_callback"})

# Float functions, sums and products of the sizes below go to `eager_kernels.py`. Operations that
# are rounded once, or not at all, have one possible result: NumPy's.
SIZE_GENERIC = frozenset(
    "exp exp2 expm1 log log1p sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh "
    "logistic rsqrt cbrt erf erfc erf_inv lgamma digamma pow integer_pow "
    "reduce_sum reduce_prod reduce_max reduce_min dot_general".split()
)

# Each call may have a function of its own, which a cache would keep alive.
NEVER_KEPT = frozenset({"pure_callback", "io_callback", "debug_callback"})

# These primitives lay a value out, and compute nothing.
_LAYOUTS = frozenset({"sharding_constraint", "reshard", "to_auto"})

# Results of these are typed by the mesh in scope even if one device has computed their operands.
_SPREADING = frozenset({"broadcast_in_dim", "concatenate", "conv_general_dilated", "gather"})

# Loops, and maps over some axes of a mesh, are compiled whole; the jaxpr in this parameter keeps
# their executables alive.
LOOP_BODIES = {"scan": "jaxpr", "while": "body_jaxpr", "shard_map": "jaxpr"}

_calls: weakref.WeakKeyDictionary[ClosedJaxpr, dict[Any, Executable | MeshProgram]]
_calls = weakref.WeakKeyDictionary()
_loops: weakref.WeakKeyDictionary[ClosedJaxpr, dict[Any, Executable | MeshProgram]]
_loops = weakref.WeakKeyDictionary()
# Operations on arrays over a mesh, by primitive, operands and layouts.
_mesh_operations: dict[Any, _MeshOperation] = {}
# From this call on an elementwise operation over a mesh is a program, not one call for each shard,
# and a program is called by a closure.
PROGRAM_FROM_CALL = 8


class _Signature:
    """The facts about a primitive at given avals and parameters."""

    __slots__ = ("entry_point", "executable", "expected", "is_large", "is_size_generic", "is_wide")

    def __init__(self, prim: Primitive, avals: Sequence[ShapedArray], params: dict[str, Any]):
        bare = [a.strip_sharding() for a in avals]
        self.expected: list[ShapedArray] = result_avals(prim, bare, params)
        # Few dtypes are small: the module that knows what becomes of them is loaded for these only.
        small = any(dtypes.is_small(a.dtype) for a in (*avals, *self.expected))
        self.is_wide = small and widen_small.is_widened(prim, avals, self.expected)
        large = any(a.size >= COMPILE_FROM_ELEMENTS for a in (*avals, *self.expected))
        refused = prim.name in NEVER_COMPILED or bool(prim.effects(params))
        self.is_large = large and not refused
        self.is_size_generic = (
            prim.name in SIZE_GENERIC
            and not large
            and all(dtypes.is_float(a.dtype) and a.size for a in (*avals, *self.expected))
        )
        self.executable: Executable | MeshProgram | None = None
        self.entry_point: Callable[..., Any] | None = None

    def prepare_size_generic(
        self, prim: Primitive, avals: Sequence[ShapedArray], params: dict[str, Any]
    ) -> None:
        """Make the program that serves all sizes, if there is one."""
        made = eager_kernels.program_of(_jaxpr_of_one(prim, avals, self.expected, params))
        self.is_size_generic = made is not None
        if made is not None:
            self.executable, self.entry_point = made, made.entry_point


_signatures: dict[Any, _Signature] = {}


def evaluate(prim: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Apply a primitive to concrete operands."""
    if busy and state.mesh is not None and not state.axes:
        return _in_scope(state.mesh, prim, operands, params)
    if prim is shard_map_p and "manual" not in params:
        if params["kind"] == "manual":
            check_devices_of_map(operands, params)
        return mesh_executable.evaluate_map(params, operands)
    if config.transfer_guard_host_to_device != "allow":
        _guard_transfers(prim, operands)
    if prim.inline is not None:
        return run_closed(prim.inline(params), operands)
    if prim.eager is not None:
        return prim.eager(*operands, **params)
    if prim.name in _LAYOUTS:
        outs = _laid_out(prim, operands[0], params)
        if outs is not None:
            return outs
    if prim.name in LOOP_BODIES:
        return run_loop(prim, operands, params)
    if prim.name == "cond":
        return run_branch(operands, params["branches"])
    avals = []
    device = None
    for x in operands:
        if type(x) is Array:
            avals.append(x.aval)
            if x._sharding is not None:
                if x.shards is not None:
                    outs = _over_mesh(prim, operands, params)
                    if outs is not None:
                        return outs if prim.multiple else outs[0]
                device = x._sharding
        else:
            avals.append(typeof(x))
    gpu = device_of(operands) if gpus.in_use else None
    if gpu is not None and prim.name not in NEVER_COMPILED and not prim.effects(params):
        outs = _on_gpu(prim, avals, operands, params, gpu)
        return outs if prim.multiple else outs[0]
    key = (prim, *avals, *params.items())
    known = _signatures.get(key)
    if known is None:
        known = _Signature(prim, avals, params)
        if prim.name not in NEVER_KEPT:
            _signatures[key] = known
    if known.is_wide:
        outs = _widened(prim, operands, known.expected, params)
        return outs if prim.multiple else outs[0]
    if known.is_size_generic and not config.disable_jit:
        if known.executable is None:
            known.prepare_size_generic(prim, avals, params)
        if known.entry_point is not None:
            out = known.entry_point(*operands)
            if out is not MISS:
                return out
        if known.executable is not None:
            return known.executable(operands)[0]
    if known.is_large:
        if known.executable is None:
            known.executable = _one_equation(prim, avals, known.expected, params)
        outs = known.executable(operands)
    else:
        outs = _by_impl(prim, operands, known.expected, params)
        if device is not None:
            executable.place(outs, executable.common_home(operands))
    return outs if prim.multiple else outs[0]


def _in_scope(mesh: Mesh, prim: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Apply a primitive while `set_mesh` has set a mesh, over which results lie then."""
    lays_out = prim.name in _LAYOUTS or prim is shard_map_p
    if not lays_out:
        check_in_scope(mesh, operands, lambda k: f"operand {k} of {prim.name}")
    state.mesh = None  # for what runs inside; `busy` counts scopes, not values
    try:
        outs = evaluate(prim, operands, params)
    finally:
        state.mesh = mesh
    if lays_out or (mesh.size == 1 and _stays(mesh, prim, operands)):
        return outs
    return in_scope_mesh(mesh, outs) if prim.multiple else in_scope_mesh(mesh, [outs])[0]


def _stays(mesh: Mesh, prim: Primitive, operands: Sequence[Any]) -> bool:
    """Whether a result stays on its device instead of lying over the mesh in scope, as in JAX."""
    if not any(type(x) is Array and x.shards is None and x._sharding is not None for x in operands):
        return False
    if AxisType.Explicit not in mesh.axis_types:
        return True
    combines = len(operands) > 1 and prim.dims is elementwise_dims and prim.name != "clamp"
    return not combines and prim.name not in _SPREADING


# Programs of one operation on a device that is no CPU.
_on_gpus: dict[Any, Executable | MeshProgram] = {}


def _on_gpu(
    prim: Primitive,
    avals: Sequence[ShapedArray],
    operands: Sequence[Any],
    params: dict[str, Any],
    device: Device,
) -> list[Any]:
    """Apply a primitive by a program of its own: there is no other code for the device."""
    key = (prim, *avals, *params.items(), device)
    program = _on_gpus.get(key)
    if program is None:
        expected = result_avals(prim, [a.strip_sharding() for a in avals], params)
        program = _on_gpus[key] = _one_equation(prim, avals, expected, params, device=device)
    return program(operands)


def _guard_transfers(prim: Primitive, operands: Sequence[Any]) -> None:
    """Report NumPy operands as implicit transfers; `device_put` and `asarray` are explicit ones."""
    level = config.transfer_guard_host_to_device
    arrays = [x for x in operands if isinstance(x, np.ndarray)]
    if not arrays or (prim is convert_element_type_p and not level.endswith("explicit")):
        return
    what = f"{prim.name}: a NumPy array ({typeof(arrays[0])}) is an operand"
    report_transfer(HOST_TO_DEVICE, what, "convert it with device_put")


def _laid_out(prim: Primitive, x: Any, params: dict[str, Any]) -> Array | None:
    """A value laid out by a constraint; None for an array that a program over its mesh moves."""
    now = x._sharding if type(x) is Array else None
    if prim.name == "to_auto":
        return _auto_alias(x, now, params["axes"]) if isinstance(now, NamedSharding) else x
    mesh = params["mesh"]
    if isinstance(now, NamedSharding) and now.mesh.has_grid_of(mesh):
        return None
    mesh = mesh if isinstance(mesh, Mesh) else meshes_of_types.get(mesh)
    if not isinstance(mesh, Mesh):
        raise ShardingError(
            f"{prim.name}: {params['mesh']} has no devices; give a sharding over a Mesh"
        )
    spec = params["spec"]
    if PartitionSpec.UNCONSTRAINED in spec:  # dims that are left to the compiler, and batched ones
        spec = spec.update([None if e is PartitionSpec.UNCONSTRAINED else e for e in spec])
    sharding = NamedSharding(
        mesh, spec.update(unreduced=frozenset()), uneven=params.get("uneven", False)
    )
    if not params.get("moves", False) and prim.name == "sharding_constraint":
        devices = tuple([d.id for d in mesh.flat_devices()])
        about = "with_sharding_constraint", "x", "the sharding", "device_put(x, sharding)"
        check_on_devices(devices, [x], lambda _: about)
    placed = redistribute.redistributed(x, sharding) if isinstance(x, Array) else None
    if placed is None:
        placed = shard_value(to_numpy(x), typeof(x).strip_sharding(), sharding, process_index())
    return reshard_p.bind(placed, mesh=mesh, spec=spec) if spec.unreduced else placed


def _auto_alias(x: Any, now: NamedSharding, axes: tuple[Any, ...] | None) -> Array:
    """The same array over a mesh some axes of which, or all, are `Auto`; its sum is made."""
    if now.spec.unreduced:
        x = reshard_p.bind(x, mesh=now.mesh, spec=now.spec.update(unreduced=frozenset()))
    mesh = now.mesh
    sharding = now.with_mesh(mesh.update(axis_types=mesh.types_with(AxisType.Auto, axes)))
    return from_shards(x.aval, sharding, [alias(s) for s in x.shards])


def run_closed(closed: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """Run a closed jaxpr compiled, remembering the executable with the jaxpr."""
    known = _calls.setdefault(closed, {})
    layouts, device = layouts_of(operands), device_of(operands)
    executable = known.get((layouts, device))
    if executable is None:
        made = select.compile_program(closed, layouts=layouts, device=device)
        executable = known[layouts, device] = made
    return executable(operands)


def run_loop(prim: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Run a loop compiled, remembering the executable with its body."""
    body = LOOP_BODIES[prim.name]
    known = _loops.setdefault(params[body], {})
    avals = [typeof(x) for x in operands]
    rest = tuple(sorted((k, v) for k, v in params.items() if type(v) is not ClosedJaxpr))
    key = (*avals, rest, device_of(operands), layouts_of(operands))
    executable = known.get(key)
    if executable is None:
        expected = result_avals(prim, avals, params)
        closed = _jaxpr_of_one(prim, avals, expected, params)
        executable = known[key] = select.compile_program(closed, layouts=key[-1], device=key[-2])
    return executable(operands)


def run_branch(operands: Sequence[Any], branches: Sequence[ClosedJaxpr]) -> list[Any]:
    """Evaluate the branch of a cond that its index names."""
    index = min(max(int(to_numpy(operands[0])), 0), len(branches) - 1)
    outs = eval_closed(branches[index], *operands[1:])
    return [x if isinstance(x, Array) else from_numpy(x) for x in outs]


def _widened(
    prim: Primitive,
    operands: Sequence[Any],
    expected: Sequence[ShapedArray],
    params: dict[str, Any],
) -> list[Any]:
    """Apply a primitive to operands of small dtypes in wider ones."""
    small = [dtypes.is_small(typeof(x).dtype) for x in operands]
    wide = [_converted(x, dtypes.wide_of) if s else x for x, s in zip(operands, small, strict=True)]
    outs = evaluate(prim, wide, widen_small.wide_params(params))
    found = outs if prim.multiple else [outs]
    return [
        x if x.aval.dtype == a.dtype else _converted(x, lambda _, to=a.dtype: to)
        for x, a in zip(found, expected, strict=True)
    ]


def _converted(x: Any, to: Callable[[np.dtype], np.dtype]) -> Any:
    """A value converted to the dtype that `to` maps its dtype to."""
    aval = typeof(x)
    return evaluate(convert_element_type_p, [x], widen_small.conversion(aval, to(aval.dtype)))


def _by_impl(
    prim: Primitive,
    operands: Sequence[Any],
    expected: Sequence[ShapedArray],
    params: dict[str, Any],
) -> list[Array]:
    values = [x._value if type(x) is Array else to_numpy(x) for x in operands]
    found = prim.rule("impl")(np, *values, **params)
    if not prim.multiple:
        found = [found]
    return [_wrap(x, a, values) for x, a in zip(found, expected, strict=True)]


def _wrap(value: Any, aval: ShapedArray, operands: Sequence[np.ndarray]) -> Array:
    """A result as an array: a fresh one is taken over, a view or an operand is copied."""
    if type(value) is not np.ndarray:
        value = np.asarray(value)
    elif value.base is not None or any(value is x for x in operands):
        return from_numpy(value, aval)
    if value.dtype != aval.dtype or not value.flags.c_contiguous:
        return from_numpy(value, aval)
    out = Array()
    try:
        # Four times faster than `__array_interface__`, but only for dtypes that buffers know.
        buffer: Any = value
        out.ptr = addressof(c_char.from_buffer(buffer))
    except (TypeError, ValueError):
        return from_numpy(value, aval, copy=False)
    value.setflags(write=False)
    out.aval = aval
    out.owner = out._numpy = value
    out.shards = out._sharding = None
    return out


def _over_mesh(
    prim: Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any] | None:
    """Apply a primitive to operands over a mesh; None if it has to have them whole, on one device.

    An elementwise one is applied shard by shard where all operands are laid out alike.
    """
    executable.common_home(operands, in_any_order=True)
    layouts = layouts_of(operands)
    if layouts is None or prim.name in NEVER_KEPT or prim.effects(params):
        made = _by_shard(prim, operands, params) if elementwise.is_elementwise(prim.name) else None
        return None if made is None else [made]
    if prim is slice_p and params["strides"] is None:
        # One program for all places: those of `x[k]` in a loop.
        starts = [np.int32(start) for start in params["start_indices"]]
        sizes = [b - a for a, b in zip(starts, params["limit_indices"], strict=True)]
        return [dynamic_slice_p.bind(*operands, *starts, slice_sizes=tuple(map(int, sizes)))]
    avals = [typeof(x) for x in operands]
    key = (prim, *avals, *params.items(), layouts)
    known = _mesh_operations.get(key)
    if known is None:
        known = _mesh_operations[key] = _MeshOperation()
    return known(prim, avals, operands, params, layouts)


class _MeshOperation:
    """A primitive on operands of given avals and layouts over a mesh."""

    __slots__ = ("calls", "closure", "program")

    def __init__(self) -> None:
        self.calls = 0
        self.program: Executable | MeshProgram | None = None
        self.closure: Callable[..., Any] | None = None

    def __call__(
        self,
        prim: Primitive,
        avals: Sequence[ShapedArray],
        operands: Sequence[Any],
        params: dict[str, Any],
        layouts: Layouts,
    ) -> list[Any]:
        if self.closure is not None:
            outs = self.closure(operands, {})
            if outs is not MISS:
                return outs
        self.calls += 1
        if self.calls < PROGRAM_FROM_CALL and elementwise.is_elementwise(prim.name):
            made = _by_shard(prim, operands, params)
            if made is not None:
                return [made]
        if self.program is None:
            expected = result_avals(prim, avals, params)
            self.program = _one_equation(prim, avals, expected, params, layouts)
        outs = self.program(operands)
        if self.calls == PROGRAM_FROM_CALL and self.program.is_map:
            leaves, tree = tree_flatten((tuple(operands), {}))
            split = Split(leaves, tree, (), ())
            out_tree = tree_flatten(list(range(len(outs))))[1]
            self.closure = mesh_fast_call.specialise_jitted(split, self.program, out_tree)
        return outs


def _by_shard(prim: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Apply an elementwise primitive shard by shard; None if operands are not sharded alike."""
    sharded: list[Any] = [x for x in operands if type(x) is Array and x.shards is not None]
    first = sharded[0]
    others = [x for x in operands if not (type(x) is Array and x.shards is not None)]
    alike = all(x.shape == first.shape and x._sharding == first._sharding for x in sharded)
    if not alike or any(typeof(x).shape for x in others):
        return None
    shards = []
    made: dict[Any, Array] = {}  # what devices whose shards are the same memory share
    for k in range(len(first.shards)):
        memory = tuple([(x.shards[k].ptr, id(x.shards[k].owner)) for x in sharded])
        if memory in made:
            shards.append(alias(made[memory]))
            shards[-1]._sharding = first.shards[k]._sharding
            continue
        given = [x.shards[k] if any(x is s for s in sharded) else x for x in operands]
        made[memory] = evaluate(prim, given, params)
        shards.append(made[memory])
    (aval,) = result_avals(prim, [typeof(x) for x in operands], params)
    return from_shards(aval, first._sharding.in_full(aval.ndim), shards)


def _one_equation(
    prim: Primitive,
    avals: Sequence[ShapedArray],
    expected: Sequence[ShapedArray],
    params: dict[str, Any],
    layouts: Layouts | None = None,
    device: Device | None = None,
) -> Executable | MeshProgram:
    """The executable of a program that is one equation; `device` is that of `device_of`."""
    closed = _jaxpr_of_one(prim, avals, expected, params)
    if layouts is None and device is None:
        return executable.compile_jaxpr(closed)
    return select.compile_program(closed, layouts=layouts, device=device)


def _jaxpr_of_one(
    prim: Primitive,
    avals: Sequence[ShapedArray],
    expected: Sequence[ShapedArray],
    params: dict[str, Any],
) -> ClosedJaxpr:
    """A jaxpr of one equation."""
    invars = [Var(a) for a in avals]
    outvars = [Var(a) for a in expected]
    eqn = Eqn(prim, tuple(invars), tuple(outvars), params, prim.effects(params))
    return ClosedJaxpr(Jaxpr((), invars, [eqn], outvars, prim.name))


def specialise_map(call: MappedCall) -> Callable[..., Any] | None:
    """A closure for repeated calls of a mapped function."""
    return mesh_fast_call.specialise(call)


def _forget_closures(_: Any) -> None:
    _mesh_operations.clear()


def _forget_programs(_: Any) -> None:
    _calls.clear()
    _loops.clear()


# Closures do not look at settings.
config.on_program_update(_forget_closures)
# A compiled program does not look at these settings again.
config.on_update("unasked_gathers", _forget_programs)
config.on_update("unasked_gathers_from", _forget_programs)


def _evaluate_and_look(prim: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """`evaluate`; a FloatingPointError for a NaN or infinity that the settings ask for."""
    outs = evaluate(prim, operands, params)
    # A constant that becomes an array is no result; a map looks for itself, with all ranks.
    if prim not in (convert_element_type_p, shard_map_p):
        check_operation(prim.name, outs if prim.multiple else [outs])
    return outs


def _noting_device(apply: Callable[..., Any]) -> Callable[..., Any]:
    """`apply`, whose results record the default device."""

    def evaluate_there(prim: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        outs = apply(prim, operands, params)
        note_made(outs if prim.multiple else [outs], operands)
        return outs

    return evaluate_there


def _follow_settings(_: Any) -> None:
    looks = config.debug_nans or config.debug_infs
    found = _evaluate_and_look if looks else evaluate
    if config.default_device is not None:
        found = _noting_device(found)
    set_eager(key_uses.looking(found) if config.debug_key_reuse else found)


for _name in ("debug_nans", "debug_infs", "debug_key_reuse", "default_device"):
    config.on_update(_name, _follow_settings)
_follow_settings(None)
hook.specialise = specialise_map
