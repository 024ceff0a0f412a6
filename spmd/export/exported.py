"""`export` and `Exported`: a jitted function with its shapes, apart from the code that made it.

The one idea: an `Exported` holds a document (`encode.py`), the program for all sizes of its
symbols. A call solves for the sizes, makes the program for them, and runs it under `jit`. The
same document goes to a file and comes back; nothing else of the function is kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from spmd.api.compiled import jit
from spmd.api.reverse import vjp as vjp_of
from spmd.base import dtypes
from spmd.base.config import config
from spmd.base.device import canonicalize_platform
from spmd.base.errors import (
    ArgumentError,
    DtypeArgumentError,
    PytreeError,
    RuleError,
    ShapeError,
)
from spmd.base.source import is_ours
from spmd.base.tree import (
    TreeDef,
    broadcast_prefix,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_structure,
    tree_unflatten,
)
from spmd.compile.dispatch.jit import JitFunction
from spmd.core.aval import ShapedArray, ShapeDtypeStruct, typeof
from spmd.core.check import check_jaxpr
from spmd.core.custom_vjp import custom_vjp
from spmd.core.rewrite import eval_closed
from spmd.export import encode, unify
from spmd.export.symbolic import (
    Constraint,
    DimExpr,
    Size,
    SymbolicScope,
    parse,
    solve,
    symbolic_shape,
)
from spmd.sharding.abstract_mesh import NamedAxes
from spmd.sharding.constraint import constrain
from spmd.sharding.explicit_layouts import to_auto_p
from spmd.sharding.named import NamedSharding

# The version that is written, and the oldest that is read. It grows when the meaning of a file
# changes; the primitives in a file say what else it needs.
maximum_supported_calling_convention_version = 1
minimum_supported_calling_convention_version = 1
_MAGIC = "spmd.export"


def default_export_platform() -> str:
    """Return the name of the platform in use, as `platforms=` of `export` takes it.

    >>> from spmd import export
    >>> export.default_export_platform()
    'cpu'
    """
    return canonicalize_platform(config.platform)


@dataclass(frozen=True)
class DisabledSafetyCheck:
    """A check that an exported function leaves out; `platform()` and `custom_call(name)` make one.

    Without that of the platform a call does not ask whether `platforms` of the export has the one
    in use. No program has custom calls here, so a check of those is only noted.
    """

    _name: str

    @classmethod
    def platform(cls) -> DisabledSafetyCheck:
        """Leave out the check that the function is exported for the platform in use."""
        return cls("platform")

    @classmethod
    def custom_call(cls, target_name: str) -> DisabledSafetyCheck:
        """Leave out the check of a custom call."""
        return cls(f"custom_call:{target_name}")

    def is_custom_call(self) -> str | None:
        """The name of the custom call that is not checked; None for another check."""
        kind, _, name = self._name.partition(":")
        return name if kind == "custom_call" else None

    def __str__(self) -> str:
        return self._name

    __repr__ = __str__


class _ExportedAval(ShapeDtypeStruct):
    """The type of an argument or a result, of which sizes may be symbolic: equal to an aval."""

    __slots__ = ()

    def __init__(self, info: ShapeDtypeStruct):
        super().__init__(info.shape, info.dtype, sharding=info.sharding, weak_type=info.weak_type)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ShapedArray):
            wanted = (other.shape, other.dtype, other.weak_type)
            return (self.shape, self.dtype, self.weak_type) == wanted
        return super().__eq__(other)

    __hash__ = ShapeDtypeStruct.__hash__

    def __repr__(self) -> str:
        sizes, weak = ",".join(map(str, self.shape)), ", weak_type=True" * self.weak_type
        return f"ShapedArray({dtypes.long_name(self.dtype)}[{sizes}]{weak})"


@dataclass(frozen=True, eq=False)
class Exported:
    """A function with its shapes, as `export` makes it and `deserialize` reads it.

    `in_avals` and `out_avals` are the flat arguments and results with their sizes, of which some
    may be symbolic, and their layouts along `Explicit` axes. `call` runs it; `serialize` writes it;
    `vjp` is its reverse derivative.
    """

    fun_name: str
    in_tree: TreeDef
    in_avals: tuple[ShapeDtypeStruct, ...]
    out_tree: TreeDef
    out_avals: tuple[ShapeDtypeStruct, ...]
    platforms: tuple[str, ...]
    document: dict[str, Any] = field(repr=False)
    _constraints: tuple[Constraint, ...] = field(repr=False, default=())
    _x64: bool = field(repr=False, default=False)
    _get_vjp: Callable[[], Exported] | None = field(repr=False, default=None)
    # For each argument and each result its sharding as it is written, or None.
    _in_lies: tuple[Any, ...] = field(repr=False, default=())
    _out_lies: tuple[Any, ...] = field(repr=False, default=())
    disabled_safety_checks: tuple[DisabledSafetyCheck, ...] = field(repr=False, default=())
    _programs: dict[Any, Any] = field(repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("in_avals", "out_avals"):
            object.__setattr__(self, name, tuple(map(_ExportedAval, getattr(self, name))))

    calling_convention_version = maximum_supported_calling_convention_version
    # Constants are written into the program.
    uses_global_constants = False
    # A program with effects can't be exported: Python functions are in no file.
    ordered_effects: ClassVar[tuple[Any, ...]] = ()
    unordered_effects: ClassVar[tuple[Any, ...]] = ()

    @property
    def module_kept_var_idx(self) -> tuple[int, ...]:
        """The positions of the flat arguments that the program takes: all."""
        return tuple(range(len(self.in_avals)))

    @property
    def mlir_module_serialized(self) -> bytes:
        """The program as bytes: its text."""
        return self.mlir_module().encode()

    def mlir_module(self) -> str:
        """The program as text: the document that `serialize` writes, as there is no MLIR here."""
        return pretty(self.document)

    @property
    def nr_devices(self) -> int:
        """The number of devices that a call needs: those up to the last that its meshes name."""
        return encode.count_devices([self.document, self._in_lies, self._out_lies])

    def in_shardings_jax(self, mesh: NamedAxes) -> tuple[NamedSharding | None, ...]:
        """The shardings of the flat arguments over `mesh`, which has the axes of the export's.

        None stands for an argument that was exported without a sharding.
        """
        return tuple(encode.lies_over(node, mesh) for node in self._in_lies)

    def out_shardings_jax(self, mesh: NamedAxes) -> tuple[NamedSharding | None, ...]:
        """The shardings of the flat results over `mesh`, where types or `out_shardings` say them.

        None stands for a result that the compiler lays out.
        """
        return tuple(encode.lies_over(node, mesh) for node in self._out_lies)

    # ---- running ----

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function; under any transformation too, with the derivative that was exported.

        Arguments that were exported with a sharding are laid out by it, over the devices at the
        same positions. Raises a `PytreeError`, `ShapeError` or `DtypeError` that names the argument
        if the arguments are not those of the export.
        """
        pairs, tree = tree_flatten_with_path((args, kwargs))
        if tree != self.in_tree:
            raise PytreeError(
                f"{self.fun_name}: exported for arguments {self.in_tree}, called with {tree}"
            )
        names = [_argument(path) for path, _ in pairs]
        leaves = [leaf for _, leaf in pairs]
        sizes = self._solve([typeof(x) for x in leaves], names)
        if config.enable_x64 != self._x64:
            raise ArgumentError(
                f"{self.fun_name}: exported with enable_x64={self._x64}, called with "
                f"enable_x64={config.enable_x64}; the dtypes of its program would differ"
            )
        self._check_platform()
        outs = self._program(sizes)(*leaves)
        return tree_unflatten(self.out_tree, outs)

    def _check_platform(self) -> None:
        used = canonicalize_platform(config.platform)
        left_out = DisabledSafetyCheck.platform() in self.disabled_safety_checks
        if used not in self.platforms and not left_out:
            raise ArgumentError(
                f"{self.fun_name}: exported for the platforms {self.platforms}, called on {used!r};"
                f" export it with platforms={(*self.platforms, used)}"
            )

    def _solve(self, avals: Sequence[ShapedArray], names: Sequence[str]) -> dict[str, int]:
        pairs: list[tuple[Size, int, str]] = []
        for given, wanted, name in zip(avals, self.in_avals, names, strict=True):
            what = f"{self.fun_name}: argument {name}"
            if given.dtype != wanted.dtype:
                raise DtypeArgumentError(
                    f"{what} is {given}, exported for {wanted}; convert it first"
                )
            if given.ndim != len(wanted.shape):
                raise ShapeError(f"{what} is {given}, exported for {wanted}")
            for d, (size, n) in enumerate(zip(wanted.shape, given.shape, strict=True)):
                pairs.append((size, n, f"{what}: dim {d} of {given}"))
        return solve(pairs, self._constraints)

    def closed_jaxpr(self, **sizes: int) -> Any:
        """The program for given sizes of the symbols, checked: a closed jaxpr."""
        closed = encode.decode_jaxpr(unify.specialise(self.document, sizes))
        check_jaxpr(closed, after=f"reading {self.fun_name}")
        return closed

    def _program(self, sizes: dict[str, int]) -> Any:
        """The compiled program for these sizes, with the exported derivative."""
        key = tuple(sorted(sizes.items()))
        if key not in self._programs:
            closed = self.closed_jaxpr(**sizes)

            lies = [node and NamedSharding(*encode.decode_param(node)) for node in self._in_lies]
            what = f"{self.fun_name}: exported argument"

            def run(*leaves: Any) -> list[Any]:
                placed = [
                    x if sharding is None else _laid_out(f"{what} {k}", x, sharding)
                    for k, (x, sharding) in enumerate(zip(leaves, lies, strict=True))
                ]
                return eval_closed(closed, *placed)

            run.__name__ = self.fun_name
            self._programs[key] = self._differentiable(jit(run))
        return self._programs[key]

    def _differentiable(self, run: Callable[..., Any]) -> Callable[..., Any]:
        with_rule = custom_vjp(run)

        def backward(leaves: Any, cts: Any) -> Any:
            return self.vjp().call(*leaves, *cts)

        def forward(*leaves: Any) -> Any:
            self._need_vjp()
            return run(*leaves), leaves

        with_rule.defvjp(forward, backward)
        return with_rule

    # ---- derivatives ----

    def has_vjp(self) -> bool:
        """Whether the reverse derivative is known: to be called, differentiated, or serialized."""
        return self._get_vjp is not None

    def _need_vjp(self) -> Callable[[], Exported]:
        if self._get_vjp is None:
            raise RuleError(
                f"{self.fun_name}: this exported function has no derivative; "
                "write the file with serialize(vjp_order=1), or 2 for the second derivative"
            )
        return self._get_vjp

    def vjp(self) -> Exported:
        """The exported reverse derivative: from flat arguments and result cotangents, in order, to
        the cotangents of the flat arguments."""
        return self._need_vjp()()

    # ---- writing ----

    def serialize(self, vjp_order: int = 0) -> bytearray:
        """The function as a file's bytes, with derivatives up to `vjp_order`."""
        body = pretty(self._as_json(vjp_order)).encode()
        checksum = hashlib.sha256(body).hexdigest()
        head = f"{_MAGIC} {self.calling_convention_version} sha256 {checksum}\n"
        return bytearray(head.encode() + body)

    def _as_json(self, vjp_order: int) -> dict[str, Any]:
        return {
            "function": self.fun_name,
            "arguments": _encode_infos(self.in_tree, self.in_avals, self._in_lies),
            "results": _encode_infos(self.out_tree, self.out_avals, self._out_lies),
            "constraints": [c.text for c in self._constraints],
            "enable_x64": self._x64,
            "platforms": list(self.platforms),
            "unchecked": [str(check) for check in self.disabled_safety_checks],
            "program": self.document,
            "vjp": self.vjp()._as_json(vjp_order - 1) if vjp_order > 0 else None,
        }

    def __str__(self) -> str:
        arguments = ", ".join(map(_describe, self.in_avals))
        results = ", ".join(map(_describe, self.out_avals))
        return f"Exported {self.fun_name}({arguments}) -> ({results})"


def _describe(info: ShapeDtypeStruct) -> str:
    return f"{dtypes.short_name(info.dtype)}[{','.join(map(str, info.shape))}]"


def _argument(path: tuple[Any, ...]) -> str:
    """A leaf of (args, kwargs) as the user would call it."""
    first = path[1]
    name = keystr(path[1:2]) if getattr(path[0], "idx", 0) == 0 else str(first.key)
    return f"{name}{keystr(path[2:])}"


# ---- making --------------------------------------------------------------------------------------


def export(
    fun_jit: Any, *, platforms: Sequence[str] | None = None, disabled_checks: Sequence[Any] = ()
) -> Callable[..., Exported]:
    """A function that exports a jitted function for given arguments, or their `ShapeDtypeStruct`s.

    Their shapes may hold symbolic sizes, from `symbolic_shape`. The function is then traced at some
    sizes of the symbols, and the programs must agree up to numbers that are polynomials of them:
    an `ArgumentError` names the first place where they don't. `platforms` says where the file may
    run; a program is compiled where it is loaded, so it serves "cpu" and "cuda" (or "gpu") alike.

    >>> from spmd import ShapeDtypeStruct, export, jit
    >>> shape = export.symbolic_shape("b, 2")
    >>> doubled = export.export(jit(lambda x: 2 * x))(ShapeDtypeStruct(shape, "float32"))
    >>> str(doubled)
    'Exported <lambda>(f32[b,2]) -> (f32[b,2])'
    """
    code = getattr(fun_jit, "__code__", None)
    if code is not None and is_ours(code.co_filename):
        fun_jit = jit(fun_jit)  # what JAX has as a jitted function: sin, softmax
    if not isinstance(fun_jit, JitFunction):
        raise ArgumentError(f"export: the function must be jitted, got {fun_jit!r}; use jit(f)")
    where = tuple(map(canonicalize_platform, platforms or ("cpu", "cuda")))
    unchecked = tuple(disabled_checks)
    for check in unchecked:
        if not isinstance(check, DisabledSafetyCheck):
            raise ArgumentError(
                f"export: disabled_checks has {check!r}; give DisabledSafetyChecks, such as "
                "export.DisabledSafetyCheck.platform()"
            )

    def do_export(*args: Any, **kwargs: Any) -> Exported:
        leaves, tree = tree_flatten((args, kwargs))
        made = _export(fun_jit, [info_of(x) for x in leaves], tree, where)
        return replace(made, disabled_safety_checks=unchecked)

    return do_export


def info_of(x: Any) -> ShapeDtypeStruct:
    """An argument's shape and dtype, of which sizes may be symbolic."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        weak, lies = getattr(x, "weak_type", False), getattr(x, "sharding", None)
        lies = lies if isinstance(lies, NamedSharding) else None
        return ShapeDtypeStruct(x.shape, dtypes.canonical(x.dtype), sharding=lies, weak_type=weak)
    aval = typeof(x)
    return ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def symbols_of(infos: Sequence[ShapeDtypeStruct]) -> tuple[str, ...]:
    """The names of all symbolic sizes, sorted."""
    sizes = (size for info in infos for size in info.shape if isinstance(size, DimExpr))
    return tuple(sorted({name for size in sizes for name in size.symbols()}))


def constraints_of(infos: Sequence[ShapeDtypeStruct]) -> tuple[Constraint, ...]:
    """The user's promises about the symbolic sizes."""
    sizes = (size for info in infos for size in info.shape if isinstance(size, DimExpr))
    scopes = list(dict.fromkeys(size.scope for size in sizes if size.scope is not None))
    if len(scopes) > 1:
        raise ArgumentError(
            f"export: the arguments have symbolic sizes of {len(scopes)} scopes, made at "
            f"{' and '.join(str(scope.place) for scope in scopes)}, so that equal names don't mean "
            "equal sizes; make them with symbolic_shape(..., scope=), or by symbolic_args_specs"
        )
    return scopes[0].constraints if scopes else ()


def info_at(info: ShapeDtypeStruct, sizes: dict[str, int]) -> ShapeDtypeStruct:
    """Shape and dtype where the symbols have these sizes."""
    shape = [s.evaluate(sizes) if isinstance(s, DimExpr) else s for s in info.shape]
    return info.update(shape=shape)


def _export(
    fun_jit: Any, infos: list[ShapeDtypeStruct], tree: TreeDef, platforms: tuple[str, ...]
) -> Exported:
    """Trace at several sizes of the symbols, and unify the written programs to one document."""
    symbols = symbols_of(infos)
    constraints = constraints_of(infos)
    name = fun_jit.__name__
    fixed = frozenset(s for info in infos for s in info.shape if not isinstance(s, DimExpr))
    samples = unify.choose_samples(symbols, constraints, fixed)
    if symbols:
        first = [info_at(info, samples[0]).shape for info in infos]
        pairs = zip(infos, first, strict=True)
        flat = [(s, n, name) for info, at in pairs for s, n in zip(info.shape, at, strict=True)]
        solve(flat, constraints)
    documents: list[Any] = []
    out_tree: TreeDef | None = None
    out_lies: tuple[Any, ...] = ()

    def trace_at(some: Sequence[dict[str, int]]) -> None:
        nonlocal out_tree, out_lies
        for sizes in some:
            args, kwargs = tree_unflatten(tree, [info_at(info, sizes) for info in infos])
            traced = fun_jit.trace(*args, **kwargs)
            if out_tree not in (None, traced.out_tree):
                raise ArgumentError(
                    f"export: the structure of the results of {name} depends on the symbolic "
                    f"sizes: {out_tree} and {traced.out_tree}"
                )
            out_tree = traced.out_tree
            encoded = encode.encode_jaxpr(traced.program)
            results = [encode.encode_aval(a) for a in traced.jaxpr.out_avals]
            out_lies = tuple(
                encode.encode_lies(s or a.explicit)
                for s, a in zip(traced.out_shardings, traced.jaxpr.out_avals, strict=True)
            )
            documents.append({"program": encoded, "results": results})

    trace_at(samples)
    assert out_tree is not None
    try:
        both = unify.Unifier(symbols, samples, name)(documents)
    except unify.NotPolynomial:
        more = unify.samples_of_remainders(samples, constraints, fixed)
        trace_at(more)
        unifier = unify.Unifier(symbols, [*samples, *more], name, divides=True)
        unifier.find_quotients(documents)
        both = unifier.with_quotients()(documents)
    out_avals = tuple(map(_decode_info, both["results"]))

    def get_vjp() -> Exported:
        return _export_vjp(fun_jit, infos, tree, out_avals, platforms)

    in_lies = tuple(encode.encode_lies(info.sharding) for info in infos)
    return Exported(
        name, tree, tuple(map(_typed, infos)), out_tree, out_avals, platforms, both["program"],
        constraints, config.enable_x64, get_vjp, in_lies, out_lies,
    )  # fmt: skip


def _laid_out(what: str, x: Any, sharding: NamedSharding) -> Any:
    """An argument as it is exported; its type has the layout that the exported type has."""
    if typeof(x).explicit is not None and sharding.explicit_part(x.ndim) is None:
        x = to_auto_p.bind(x, axes=None)
    return constrain(what, x, sharding)


def _typed(info: ShapeDtypeStruct) -> ShapeDtypeStruct:
    """The same with what the type says of the sharding: its part along `Explicit` axes."""
    lies = info.sharding
    return info if lies is None else info.update(sharding=lies.explicit_part(info.ndim))


def _export_vjp(
    fun_jit: Any,
    infos: list[ShapeDtypeStruct],
    tree: TreeDef,
    out_avals: tuple[ShapeDtypeStruct, ...],
    platforms: tuple[str, ...],
) -> Exported:
    def flat(*leaves: Any) -> list[Any]:
        args, kwargs = tree_unflatten(tree, leaves)
        return tree_flatten(fun_jit(*args, **kwargs))[0]

    def backward(*operands: Any) -> tuple[Any, ...]:
        _, pullback = vjp_of(flat, *operands[: len(infos)])
        return tuple(pullback(list(operands[len(infos) :])))

    backward.__name__ = f"vjp_{fun_jit.__name__}"
    cts = [
        ShapeDtypeStruct(o.shape, dtypes.tangent_dtype(o.dtype), weak_type=o.weak_type)
        for o in out_avals
    ]
    operands = [*infos, *cts]
    in_tree = tree_structure((tuple(range(len(operands))), {}))
    return _export(jit(backward), operands, in_tree, platforms)


def symbolic_args_specs(
    args: Any,
    shapes_specs: Any,
    constraints: Sequence[str] = (),
    scope: SymbolicScope | None = None,
) -> Any:
    """`ShapeDtypeStruct`s like `args`, with the shapes that a prefix tree of specs describes."""
    leaves, tree = tree_flatten(args)
    # A text says the shapes of all arrays below it; what is a sequence here may be a tuple there.
    if isinstance(args, tuple) and isinstance(shapes_specs, list):
        shapes_specs = tuple(shapes_specs)
    specs = broadcast_prefix(
        shapes_specs, args, "shapes_specs of symbolic_args_specs", lambda x: isinstance(x, str)
    )
    scope = scope or SymbolicScope(constraints)
    infos = [info_of(x) for x in leaves]
    made = [
        ShapeDtypeStruct(symbolic_shape(spec, scope=scope, like=info.shape), info.dtype)
        for spec, info in zip(specs, infos, strict=True)
    ]
    return tree_unflatten(tree, made)


# ---- files ---------------------------------------------------------------------------------------


def _encode_infos(
    tree: TreeDef, infos: Sequence[ShapeDtypeStruct], lies: Sequence[Any]
) -> list[Any]:
    """A structure and its leaves, each with the sharding that it is exported with."""
    return [encode.encode_tree(tree), *map(_encode_info, infos, lies)]


def _encode_info(info: ShapeDtypeStruct, lies: Any) -> dict[str, Any]:
    shape = [{"size": str(s)} if isinstance(s, DimExpr) else s for s in info.shape]
    node: dict[str, Any] = {"dtype": dtypes.long_name(info.dtype), "shape": shape}
    if info.sharding is not None:
        node["lies"] = encode.encode_lies(info.sharding)
    if lies is not None:
        node["placed"] = lies
    return node | ({"weak": True} if info.weak_type else {})


def _decode_info(node: dict[str, Any]) -> ShapeDtypeStruct:
    shape = [parse(s["size"]) if isinstance(s, dict) else s for s in node["shape"]]
    lies = NamedSharding(*encode.decode_param(node["lies"])) if "lies" in node else None
    dtype = encode.dtype_named(node["dtype"])
    return ShapeDtypeStruct(shape, dtype, sharding=lies, weak_type="weak" in node)


def pretty(node: Any, indent: int = 0) -> str:
    """JSON with short values on one line: an equation, an argument."""
    flat = json.dumps(node)
    if len(flat) + indent <= 120 or not isinstance(node, (dict, list)) or not node:
        return flat
    pad = " " * (indent + 2)
    if isinstance(node, dict):
        parts = [f"{pad}{json.dumps(k)}: {pretty(v, indent + 2)}" for k, v in node.items()]
        return "{\n" + ",\n".join(parts) + "\n" + " " * indent + "}"
    return "[\n" + ",\n".join(pad + pretty(v, indent + 2) for v in node) + "\n" + " " * indent + "]"


def deserialize(blob: bytes | bytearray) -> Exported:
    """The function that `Exported.serialize` wrote; its Python source is not needed.

    Raises an `ArgumentError` that says what is wrong with the bytes: not such a file, of a version
    that is not read here, damaged, or for primitives and pytree classes that don't exist here.
    """
    head, _, body = bytes(blob).partition(b"\n")
    words = head.decode("ascii", "replace").split()
    if len(words) != 4 or words[0] != _MAGIC or not words[1].isdigit():
        raise ArgumentError("deserialize: these are not the bytes of an exported function")
    oldest, newest = (
        minimum_supported_calling_convention_version,
        maximum_supported_calling_convention_version,
    )
    if not oldest <= int(words[1]) <= newest:
        raise ArgumentError(
            f"deserialize: the file has version {words[1]}; this spmd reads {oldest} to {newest}. "
            "Export it again, or load it with the spmd that wrote it"
        )
    if hashlib.sha256(body).hexdigest() != words[3]:
        raise ArgumentError("deserialize: the file is damaged (its checksum is another)")
    return _from_json(json.loads(body))


def _from_json(node: dict[str, Any]) -> Exported:
    derivative = node["vjp"]
    in_tree, *in_avals = node["arguments"]
    out_tree, *out_avals = node["results"]
    return Exported(
        node["function"],
        encode.decode_tree(in_tree),
        tuple(map(_decode_info, in_avals)),
        encode.decode_tree(out_tree),
        tuple(map(_decode_info, out_avals)),
        tuple(node["platforms"]),
        node["program"],
        tuple(Constraint(text) for text in node["constraints"]),
        node["enable_x64"],
        None if derivative is None else (lambda: _from_json(derivative)),
        tuple(info.get("placed") for info in in_avals),
        tuple(info.get("placed") for info in out_avals),
        tuple(map(DisabledSafetyCheck, node.get("unchecked", ()))),
    )
