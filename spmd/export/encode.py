"""Jaxprs, structures and constants as JSON, and back. No code is pickled, and reading runs none.

One equation is one JSON object, `{"do": "mul", "in": ["a", "b"], "out": [["c", ...]]}`, with its
params under "with". A tuple is a list; other values are objects with one key:

    {"dtype": "float32"}        {"enum": ["GatherScatterMode", "CLIP"]}
    {"jaxpr": {...}}            {"fields": "GatherDimensionNumbers", ...}
    {"spec": ["data", null]}    {"mesh": [["data", 4]], "devices": [0, 1, 2, 3]}

A mesh is written by its axes and the positions of its devices among all; the loader takes
its own devices at these positions.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.device import too_few_devices
from spmd.base.errors import ArgumentError, ShardingError
from spmd.base.key_dtypes import key_dtype_named
from spmd.base.tree import LEAF, NONE, TreeDef, tree_flatten
from spmd.core import custom_vmap, linear_call  # noqa: F401
from spmd.core.aval import ShapedArray
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var, letters
from spmd.core.primitive import all_primitives
from spmd.core.rewrite import inline_calls

# Files name primitives, so all are imported here, the rarely used ones too.
from spmd.lax import (  # noqa: F401
    _lazy_names,
    attention,
    linalg,
    special_hypergeometric,
    special_integrals,
    special_oscillating,
)
from spmd.lax.arithmetic import RoundingMethod
from spmd.lax.attention_blocks import Attention
from spmd.lax.conv_dims import ConvDimensionNumbers, Windows
from spmd.lax.dot import DimensionNumbers
from spmd.lax.keys import threefry, words  # noqa: F401
from spmd.lax.keys.rng import RandomAlgorithm
from spmd.lax.precision import DotAlgorithmPreset, Precision
from spmd.lax.windows import GatherDimensionNumbers, GatherScatterMode, ScatterDimensionNumbers
from spmd.sharding.abstract_mesh import AbstractMesh, AxisType, NamedAxes
from spmd.sharding.named import NamedSharding
from spmd.sharding.pmap import AutoAxis
from spmd.sharding.shard_map_rules import mesh_axes, shard_map_p
from spmd.sharding.spec import Mesh, PartitionSpec, Unconstrained, all_devices

# Params may hold these beside plain data. A file names them; reading a file makes no others.
_KINDS = (RoundingMethod, Precision, DotAlgorithmPreset, GatherScatterMode, RandomAlgorithm)
ENUMS = {kind.__name__: kind for kind in _KINDS}
RECORDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Attention,
        ConvDimensionNumbers,
        DimensionNumbers,
        GatherDimensionNumbers,
        ScatterDimensionNumbers,
        Windows,
    )
}
# Integer constants of at most so many elements, mostly indices, are written as numbers.
_FEW = 64
_DTYPES = {dtypes.long_name(d): d for d in (*dtypes.ANY, dtypes.float0)}


def dtype_named(name: str) -> np.dtype:
    """The dtype that a file calls `name`."""
    found = _DTYPES.get(name) or key_dtype_named(name)
    if found is None:
        raise ArgumentError(f"deserialize: the file has a dtype {name!r}, which is not known")
    return found


# ---- avals, constants --------------------------------------------------------------------------


def encode_aval(aval: ShapedArray) -> dict[str, Any]:
    """`{"dtype": ..., "shape": [...]}`, and `"weak": true` for a Python number.

    In the code of one device `"varies"` names the mesh axes over which the value differs; `"lies"`
    is the layout that its type has.
    """
    node: dict[str, Any] = {"dtype": dtypes.long_name(aval.dtype), "shape": list(aval.shape)}
    if aval.vma:
        node["varies"] = sorted(aval.vma)
    if aval.explicit is not None:
        node["lies"] = encode_lies(aval.explicit)
    return node | ({"weak": True} if aval.weak_type else {})


def decode_aval(node: dict[str, Any]) -> ShapedArray:
    """The aval that was written."""
    vma = frozenset(node.get("varies", ()))
    lies = [decode_param(part) for part in node.get("lies", ())]
    sharding = NamedSharding(*lies) if lies else None
    dtype = dtype_named(node["dtype"])
    return ShapedArray(tuple(node["shape"]), dtype, "weak" in node, vma, sharding)


def encode_lies(sharding: Any) -> list[Any] | None:
    """A sharding over a mesh as its mesh and its spec; None for any other, and for None."""
    if not isinstance(sharding, NamedSharding):
        return None
    if sharding.uneven:
        raise ArgumentError(
            f"export: {sharding} has parts of different sizes, which a file cannot hold"
        )
    where = f"the sharding {sharding}"
    return [encode_param(sharding.mesh, where), encode_param(sharding.spec, where)]


def lies_over(node: list[Any] | None, mesh: NamedAxes) -> NamedSharding | None:
    """The written sharding over a mesh of the same axes."""
    if node is None:
        return None
    written = {decode_param(name): size for name, size in node[0]["mesh"]}
    if written != dict(mesh.shape):
        raise ShardingError(
            f"export: the sharding is over a mesh with axes {written}, and {mesh} has "
            f"{dict(mesh.shape)}; give a mesh with the axes of the export"
        )
    return NamedSharding(mesh, decode_param(node[1]))


def encode_array(x: Any) -> dict[str, Any]:
    """A constant array by its bytes; a few integers by their values, which may be sizes."""
    array = np.asarray(x)
    node = {"dtype": dtypes.long_name(array.dtype), "shape": list(array.shape)}
    if array.dtype.kind in "iu" and array.size <= _FEW:
        return node | {"values": [int(n) for n in array.ravel()]}
    return node | {"base64": base64.b64encode(array.tobytes()).decode()}


def decode_array(node: dict[str, Any]) -> np.ndarray:
    """The constant array that was written."""
    dtype = dtype_named(node["dtype"])
    if dtype == dtypes.float0:
        return np.zeros(node["shape"], dtype)
    if "values" in node:
        return np.array(node["values"], dtype).reshape(node["shape"])
    return np.frombuffer(base64.b64decode(node["base64"]), dtype).reshape(node["shape"])


# ---- params ------------------------------------------------------------------------------------


def encode_param(value: Any, where: str) -> Any:
    """A parameter of an equation; an `ArgumentError` names a value that can't be written."""
    match value:
        case enum.Enum() if type(value).__name__ in ENUMS:
            return {"enum": [type(value).__name__, value.name]}
        case None | bool() | int() | str():
            return value
        case np.dtype():
            return {"dtype": dtypes.long_name(value)}
        case np.generic():
            return {"scalar": encode_number(value), "dtype": dtypes.long_name(value.dtype)}
        case float() | complex():
            return {"number": encode_number(value)}
        case ClosedJaxpr():
            return {"jaxpr": encode_jaxpr(value)}
        case Unconstrained():
            return {"unconstrained": True}
        case PartitionSpec():
            sets = {"unreduced": value.unreduced, "reduced": value.reduced}
            node = {"spec": [encode_param(e, where) for e in value]}
            return node | {name: sorted(axes) for name, axes in sets.items() if axes}
        case AutoAxis():
            return {"unnamed": _place_of(value)}
        case NamedAxes():
            return _encode_mesh(value, where)
        case tuple() if type(value) is tuple:
            return [encode_param(x, where) for x in value]
    if type(value).__name__ in RECORDS:
        fields = value._asdict() if hasattr(value, "_asdict") else _fields_of(value)
        return {"fields": type(value).__name__} | {
            k: encode_param(x, f"{where}.{k}") for k, x in fields.items()
        }
    what = f"the function {value.__name__}" if hasattr(value, "__name__") else f"a {type(value)}"
    raise ArgumentError(f"export: {where} is {what}, which can't be written to a file")


# The axes of the maps around the present equation, outermost first: an axis without a name is
# written by its place among them.
_around: list[tuple[Any, ...]] = []
_unnamed: dict[tuple[int, int], AutoAxis] = {}


@contextmanager
def _inside_map(params: dict[str, Any]) -> Iterator[None]:
    """Bring a map's axes into scope, for calls to be inlined, and for axes without a name."""
    _around.append(params["mesh"].axis_names)
    try:
        with mesh_axes(params["mesh"], params["kind"], params.get("manual")):
            yield
    finally:
        _around.pop()


def _place_of(axis: AutoAxis) -> list[int]:
    places = ((d, k) for d, names in enumerate(_around) for k, n in enumerate(names) if n is axis)
    return list(next(places))


def _encode_mesh(mesh: NamedAxes, where: str) -> dict[str, Any]:
    """A mesh by its axes, the types of those that are not Auto, and its devices' positions."""
    axes = [[encode_param(name, where), size] for name, size in mesh.shape.items()]
    node: dict[str, Any] = {"mesh": axes}
    if not mesh.has_only(AxisType.Auto):
        node["types"] = [kind.name for kind in mesh.axis_types]
    if isinstance(mesh, Mesh):
        devices = all_devices()
        node["devices"] = [devices.index(d) for d in mesh.flat_devices()]
    return node


def _decode_mesh(node: dict[str, Any]) -> NamedAxes:
    """The mesh of this program's devices at the positions that were written, or one without."""
    types = [AxisType[name] for name in node["types"]] if "types" in node else None
    names = [decode_param(name) for name, _ in node["mesh"]]
    sizes = [size for _, size in node["mesh"]]
    if "devices" not in node:
        return AbstractMesh(sizes, names, types)
    devices, wanted = all_devices(), max(node["devices"]) + 1
    if len(devices) < wanted:
        raise too_few_devices("calling the exported function", wanted, len(devices))
    grid = np.empty(len(node["devices"]), object)
    grid[:] = [devices[k] for k in node["devices"]]
    return Mesh(grid.reshape(sizes), names, types)


def count_devices(document: Any) -> int:
    """The number of devices that a written program needs, by the last position in its meshes."""
    if isinstance(document, list | tuple):
        return max(map(count_devices, document), default=1)
    if not isinstance(document, dict):
        return 1
    own = max(document["devices"]) + 1 if {"mesh", "devices"} <= document.keys() else 1
    return max([own, *map(count_devices, document.values())])


def _fields_of(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


def decode_param(node: Any) -> Any:
    """The parameter that was written."""
    if isinstance(node, list):
        return tuple(decode_param(x) for x in node)
    if not isinstance(node, dict):
        return node
    match next(iter(node)):
        case "enum":
            kind, name = node["enum"]
            return ENUMS[kind][name]
        case "dtype":
            return dtype_named(node["dtype"])
        case "scalar":
            return dtype_named(node["dtype"]).type(decode_number(node["scalar"]))
        case "number":
            return decode_number(node["number"])
        case "jaxpr":
            return decode_jaxpr(node["jaxpr"])
        case "unconstrained":
            return PartitionSpec.UNCONSTRAINED
        case "spec":
            sets = {name: set(node.get(name, ())) for name in ("unreduced", "reduced")}
            return PartitionSpec(*(decode_param(e) for e in node["spec"]), **sets)
        case "unnamed":
            return _unnamed.setdefault(tuple(node["unnamed"]), AutoAxis())
        case "mesh":
            return _decode_mesh(node)
        case "fields":
            kind = RECORDS[node["fields"]]
            return kind(**{k: decode_param(v) for k, v in node.items() if k != "fields"})
    raise ArgumentError(f"deserialize: the file has a parameter {node}, which is not known")


def encode_number(x: Any) -> Any:
    """A scalar: JSON's own numbers where they are exact, text for other values."""
    value = x.item() if isinstance(x, (np.generic, np.ndarray)) else x
    if isinstance(value, complex):
        return [encode_number(value.real), encode_number(value.imag)]
    if isinstance(value, (bool, int)):
        return value
    value = float(value)
    return value if math.isfinite(value) else repr(value)


def decode_number(node: Any) -> Any:
    """The scalar that was written."""
    if isinstance(node, list):
        return complex(*(decode_number(part) for part in node))
    return float(node) if isinstance(node, str) else node


# ---- jaxprs ------------------------------------------------------------------------------------


def encode_jaxpr(closed: ClosedJaxpr) -> dict[str, Any]:
    """A closed jaxpr, its calls replaced by their bodies."""
    closed = inline_calls(closed)
    names: dict[Var, str] = {}

    def define(var: Var) -> list[Any]:
        names[var] = letters(len(names))
        return [names[var], encode_aval(var.aval)]

    def read(atom: Atom) -> Any:
        if isinstance(atom, Literal):
            node = {"value": encode_number(atom.val), **encode_aval(atom.aval)}
            return {k: v for k, v in node.items() if k != "shape"}
        return names[atom]

    jaxpr = closed.jaxpr
    return {
        "name": jaxpr.name,
        "constants": [
            [*define(v), encode_array(c)]
            for v, c in zip(jaxpr.constvars, closed.consts, strict=True)
        ],
        "inputs": [define(v) for v in jaxpr.invars],
        "equations": [_encode_eqn(eqn, read, define) for eqn in jaxpr.eqns],
        "outputs": [read(v) for v in jaxpr.outvars],
    }


def _encode_eqn(eqn: Eqn, read: Callable, define: Callable) -> dict[str, Any]:
    where = f"the {eqn.prim.name} of {eqn.source}"
    if eqn.effects:
        raise ArgumentError(f"export: {where} has an effect, which a file can't hold")
    node = {"do": eqn.prim.name, "in": [read(a) for a in eqn.invars]}
    node["out"] = [define(v) for v in eqn.outvars]
    if eqn.params:
        is_map = eqn.prim is shard_map_p
        with _inside_map(eqn.params) if is_map else nullcontext():
            node["with"] = {
                k: encode_param(v, f"the parameter {k} of {where}") for k, v in eqn.params.items()
            }
    return node


def decode_jaxpr(node: dict[str, Any]) -> ClosedJaxpr:
    """The closed jaxpr that was written. Its primitives must exist here."""
    primitives = {p.name: p for p in all_primitives()}
    env: dict[str, Var] = {}

    def define(pair: Sequence[Any]) -> Var:
        env[pair[0]] = Var(decode_aval(pair[1]))
        return env[pair[0]]

    def read(atom: Any) -> Atom:
        if isinstance(atom, str):
            return env[atom]
        aval = ShapedArray((), dtype_named(atom["dtype"]), "weak" in atom)
        value: Any = np.asarray(decode_number(atom["value"])).astype(aval.dtype)[()]
        return Literal(value, aval)

    constvars = [define(c) for c in node["constants"]]
    consts = [decode_array(c[2]) for c in node["constants"]]
    invars = [define(v) for v in node["inputs"]]
    eqns: list[Eqn] = []
    for e in node["equations"]:
        if e["do"] not in primitives:
            raise ArgumentError(
                f"deserialize: the file uses the primitive {e['do']!r}, which does not exist here; "
                "import the module that makes it first, or update spmd"
            )
        params = {k: decode_param(v) for k, v in e.get("with", {}).items()}
        operands = tuple(read(a) for a in e["in"])
        eqns.append(Eqn(primitives[e["do"]], operands, tuple(map(define, e["out"])), params))
    outs = [read(v) for v in node["outputs"]]
    return ClosedJaxpr(Jaxpr(constvars, invars, eqns, outs, node["name"]), consts)


# ---- structures --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Registered:
    """A class of pytree nodes that files may name: how its aux data is written and read."""

    kind: type
    name: str
    to_bytes: Callable[[Any], bytes]
    from_bytes: Callable[[bytes], Any]


_registered: dict[str, Registered] = {}


def register_pytree_node_serialization(
    nodetype: type,
    *,
    serialized_name: str,
    serialize_auxdata: Callable[[Any], bytes],
    deserialize_auxdata: Callable[[bytes], Any],
    from_children: Callable[[Any, Any], Any] | None = None,
) -> type:
    """Let exported files hold a pytree class, by a name that the loading program registers too.

    `serialize_auxdata` writes what `tree_flatten` keeps beside the children, and
    `deserialize_auxdata` reads it. `from_children` is accepted for JAX's sake: objects are made by
    the function that the class was registered with.
    """
    entry = Registered(nodetype, serialized_name, serialize_auxdata, deserialize_auxdata)
    before = _registered.get(serialized_name)
    if before is not None:
        raise ArgumentError(
            f"register_pytree_node_serialization: {serialized_name!r} is {before.kind.__name__} "
            "already; choose another name"
        )
    for entry_of_kind in _registered.values():
        if entry_of_kind.kind is nodetype:
            raise ArgumentError(
                f"register_pytree_node_serialization: {nodetype.__name__} is registered already, "
                f"as {entry_of_kind.name!r}"
            )
    _registered[serialized_name] = entry
    return nodetype


def register_namedtuple_serialization(nodetype: Any, *, serialized_name: str) -> Any:
    """Let exported files hold a named tuple; its fields are the loading program's."""
    if not (isinstance(nodetype, type) and hasattr(nodetype, "_fields")):
        raise ArgumentError(
            f"register_namedtuple_serialization: {nodetype!r} is no named tuple; use "
            "register_pytree_node_serialization for other classes"
        )
    tree_flatten(nodetype(*nodetype._fields))  # the class is known once a tuple was flattened
    return register_pytree_node_serialization(
        nodetype,
        serialized_name=serialized_name,
        serialize_auxdata=lambda aux: b"",
        deserialize_auxdata=lambda data: None,
    )


def encode_tree(tree: TreeDef) -> Any:
    """A structure: `"*"` is a leaf."""
    if tree.kind is None:
        return "*"
    children = [encode_tree(c) for c in tree.parts]
    if tree.kind is type(None):
        return None
    if tree.kind in (tuple, list):
        return {tree.kind.__name__: children}
    if tree.kind is dict and all(type(key) in (str, int) for key in tree.aux):
        return {"dict": [[key, c] for key, c in zip(tree.aux, children, strict=True)]}
    for entry in _registered.values():
        if entry.kind is tree.kind:
            aux = base64.b64encode(entry.to_bytes(tree.aux)).decode()
            return {"node": entry.name, "aux": aux, "children": children}
    raise ArgumentError(
        f"serialize: the structure {tree} holds a {tree.kind.__name__} that files don't know (a "
        "dict must have text or integers as keys); register it with "
        "export.register_pytree_node_serialization or register_namedtuple_serialization"
    )


def decode_tree(node: Any) -> TreeDef:
    """The structure that was written."""
    if node == "*":
        return LEAF
    if node is None:
        return NONE
    if "dict" in node:
        keys = tuple(key for key, _ in node["dict"])
        return TreeDef(dict, keys, tuple(decode_tree(c) for _, c in node["dict"]))
    for kind in (tuple, list):
        if kind.__name__ in node:
            return TreeDef(kind, None, tuple(map(decode_tree, node[kind.__name__])))
    entry = _registered.get(node["node"])
    if entry is None:
        raise ArgumentError(
            f"deserialize: the file has a pytree class {node['node']!r}; register it with "
            "export.register_pytree_node_serialization first"
        )
    aux = entry.from_bytes(base64.b64decode(node["aux"]))
    return TreeDef(entry.kind, aux, tuple(map(decode_tree, node["children"])))
