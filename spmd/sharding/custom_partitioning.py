"""`custom_partitioning`: a function whose user says how it runs on the devices of a mesh.

A call is one equation, which holds the function's jaxpr and the user's callbacks. `partition/` asks
these when it writes the program of one device; everything else sees the jaxpr.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from spmd.base.context import attributed_to, state
from spmd.base.errors import (
    ArgumentError,
    DtypeError,
    PytreeError,
    ShapeError,
    ShardingError,
    UnexpectedTracerError,
)
from spmd.base.record import record
from spmd.base.source import current_source
from spmd.base.tree import TreeDef, tree_flatten, tree_map, tree_unflatten
from spmd.base.util import function_name, present_as
from spmd.core.aval import ShapedArray, ShapeDtypeStruct, is_arraylike, typeof
from spmd.core.call import call_primitive
from spmd.core.custom_common import Call, inline_transpose, positional, signature_of
from spmd.core.explicit import to_auto_if_array
from spmd.core.ir import ClosedJaxpr
from spmd.core.jvp import jvp_flat
from spmd.core.primitive import Dims
from spmd.core.rewrite import eval_closed
from spmd.core.trace import EVAL, Tracer
from spmd.core.vmap import BatchAxis, batch_flat
from spmd.lax.convert import convert_element_type
from spmd.sharding.abstract_mesh import NamedAxes
from spmd.sharding.explicit_types import Split, spec_of, split_of_spec
from spmd.sharding.named import NamedSharding
from spmd.sharding.sharding_rule import SdyShardingRule, dims_of_rule, parse_rule
from spmd.sharding.spec import Mesh

Avals = Sequence[ShapedArray]
Splits = Sequence[Split]


# ---- the decorator -----------------------------------------------------------------------------


class custom_partitioning:
    """Say how a function runs on the devices of a mesh, where the compiler splits a program.

    Outside of such programs the function runs as it is, and so it does under `grad` and `vmap`,
    which go through its own operations: give it derivatives of its own with `custom_vjp` around it,
    whose rules may call other functions with partitions of their own. `static_argnums` are the
    positions of arguments that are no arrays; callbacks get them first. Along `Explicit` axes the
    layouts of arguments and results are left to the compiler: results have no layout in their type.

    >>> @custom_partitioning
    ... def total(x):
    ...     return x.sum()
    >>> def partition(mesh, arg_shapes, result_shape):
    ...     (x,) = arg_shapes
    ...     axes = x.sharding.spec[0] or ()
    ...     lower_fn = lambda x: lax.psum(x.sum(), axes)
    ...     return mesh, lower_fn, result_shape.sharding, (x.sharding,)
    >>> _ = total.def_partition(partition, sharding_rule="i -> ", reduction_factors=("i",))
    >>> mesh = spmd.make_mesh((4,), ("x",), spmd.sharding.AxisType.Auto)
    >>> spmd.jit(total)(spmd.device_put(np.arange(8.0), spmd.NamedSharding(mesh, spmd.P("x"))))
    Array(28., dtype=float32)
    """

    def __init__(self, fun: Callable[..., Any], static_argnums: int | Sequence[int] = ()):
        present_as(self, fun)
        self.fun = fun
        static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
        self.static_argnums = static
        self._signature = signature_of(fun)
        self.partition: Callable[..., Any] | None = None
        self.infer_sharding_from_operands: Callable[..., Any] | None = None
        self.propagate_user_sharding: Callable[..., Any] | None = None
        self.sharding_rule: SdyShardingRule | Callable[..., Any] | None = None

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def def_partition(
        self,
        partition: Callable[..., Any],
        infer_sharding_from_operands: Callable[..., Any] | None = None,
        propagate_user_sharding: Callable[..., Any] | None = None,
        decode_shardings: bool = True,
        sharding_rule: Any = None,
        *,
        reduction_factors: Sequence[str] = (),
        need_replication_factors: Sequence[str] = (),
        permutation_factors: Sequence[str] = (),
        **factor_sizes: int,
    ) -> Callable[..., Any]:
        """Set how the function is partitioned; return `partition`.

        `partition(mesh, arg_shapes, result_shape)` returns `(mesh, lower_fn, result_shardings,
        arg_shardings)`. It gets `ShapeDtypeStruct`s of whole arrays with the `NamedSharding`s that
        the compiler suggests, in the structures of the arguments (a tuple) and of the result.
        Arguments are moved to `arg_shardings`; `lower_fn` is called with one device's parts, with
        the axes of the mesh in scope, and makes its parts of results that lie by
        `result_shardings`. **A result that is not split over an axis must be made equal along it**,
        as by `lax.psum`. Callbacks may be called several times.

        `sharding_rule` ties dims together: "i j, j k -> i k" gives each dim of each array a factor,
        dims of one factor are split alike. "..." stands for leading dims, and "(a b)" for a dim of
        two factors, of which the first may be split; sizes of factors that occur in brackets only
        are named arguments. `need_replication_factors` are not split. `reduction_factors` and
        `permutation_factors` may be, and `lower_fn` does what that takes. A rule may be a
        `SdyShardingRule`, or a function of `(mesh, arg_shapes, result_shapes)`, with lists, that
        returns a rule or a string, alone or with its named arguments as a dict. Without a rule,
        `infer_sharding_from_operands(mesh, arg_shapes, result_shape)` returns the shardings of the
        results, and `propagate_user_sharding(mesh, result_shape)` those to which the readers'
        are changed before `partition` sees them. Shardings always are `NamedSharding`s, so
        `decode_shardings` says nothing.

        Raises `ArgumentError` for what is no rule. Where a program is compiled, callbacks that
        return something else raise `ArgumentError`, `PytreeError`, `ShardingError`, `ShapeError`
        or `DtypeError`.
        """
        options: dict[str, Any] = {
            "reduction_factors": reduction_factors,
            "need_replication_factors": need_replication_factors,
            "permutation_factors": permutation_factors,
        }
        options = {name: value for name, value in options.items() if value} | factor_sizes
        if isinstance(sharding_rule, str):
            sharding_rule = parse_rule(sharding_rule, **options)
        elif options:
            raise ArgumentError(
                f"custom_partitioning({function_name(self.fun)}): {', '.join(options)} belong to a "
                f"sharding_rule that is a string, and it is {sharding_rule!r}"
            )
        self.partition = partition
        self.infer_sharding_from_operands = infer_sharding_from_operands
        self.propagate_user_sharding = propagate_user_sharding
        self.sharding_rule = sharding_rule
        return partition

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = function_name(self.fun)
        if self.partition is None:
            raise ArgumentError(
                f"{current_source()}: custom_partitioning: {name} has no partition; set one with "
                ".def_partition"
            )
        if state.trace is EVAL:
            return self.fun(*args, **kwargs)
        given = positional(self.fun, self._signature, args, kwargs)
        static = {i % len(given) for i in self.static_argnums}
        given = [x if i in static else tree_map(to_auto_if_array, x) for i, x in enumerate(given)]
        call = Call(self.fun, given, self.static_argnums)
        values = tuple(call.nondiff.values())
        _check_static(name, values)
        jaxpr, consts = call.stage()
        if consts:
            raise ArgumentError(
                f"{current_source()}: custom_partitioning: {name} closes over a traced value of "
                f"{typeof(consts[0]).short()}, which its partition would not get; pass that value "
                "as an argument instead"
            )
        assert call.out_tree is not None
        rules = Partitioning(
            name,
            self.partition,
            self.infer_sharding_from_operands,
            self.propagate_user_sharding,
            self.sharding_rule,
            values,
            call.in_tree,
            call.out_tree,
        )
        outs = custom_partitioning_p.bind(*call.flat, jaxpr=jaxpr, name=name, _rules=rules)
        return call.rebuild(outs)


def _check_static(name: str, values: Sequence[Any]) -> None:
    for value in tree_flatten(values)[0]:
        if isinstance(value, Tracer):
            raise UnexpectedTracerError(
                f"{current_source()}: custom_partitioning: {name} got a traced value of "
                f"{typeof(value).short()} as a static argument; static_argnums names arguments "
                "that are known when the program is traced"
            )


# ---- the callbacks -----------------------------------------------------------------------------


@record(eq=False)
class Lowered:
    """The answer of `partition`: how arguments and results are split, and the function of parts."""

    operands: list[Split]
    results: list[Split]
    run: Callable[..., list[Any]]


@record(eq=False)
class Partitioning:
    """The callbacks of one call, with the static arguments and the structures that they get."""

    name: str
    partition: Callable[..., Any]
    infer: Callable[..., Any] | None
    propagate_user: Callable[..., Any] | None
    rule: Any
    static: tuple[Any, ...]
    in_tree: TreeDef
    out_tree: TreeDef

    def dims(self, mesh: Mesh, operands: Avals, results: Avals) -> Dims | None:
        """The rule for operands and results of these types; None if there is none."""
        rule: Any = self.rule
        if rule is None:
            return None
        options: dict[str, Any] = {}
        if not isinstance(rule, SdyShardingRule):
            rule = rule(*self.static, mesh, *(_structs(avals) for avals in (operands, results)))
            if isinstance(rule, (tuple, list)) and len(rule) == 2:
                rule, options = rule
            if isinstance(rule, str):
                rule = parse_rule(rule, **options)
        if not isinstance(rule, SdyShardingRule):
            raise ArgumentError(
                f"{self._what()}: sharding_rule returned {rule!r}; return a string such as "
                "'i j -> i j', or a SdyShardingRule"
            )
        into, out = ([a.shape for a in avals] for avals in (operands, results))
        return dims_of_rule(rule, into, out, self._what())

    def inferred(
        self, mesh: Mesh, operands: Avals, splits: Splits, results: Avals, axes: Sequence[Any]
    ) -> list[Split]:
        """How results are split if operands are split so; of the mesh, `axes` may be used."""
        assert self.infer is not None
        given = tree_unflatten(self.in_tree, _structs(operands, mesh, splits))
        made = tree_unflatten(self.out_tree, _structs(results))
        found = self.infer(*self.static, mesh, given, made)
        what = "infer_sharding_from_operands returned"
        return self._splits(what, self.out_tree, found, mesh, results, axes)

    def wanted(
        self, mesh: Mesh, results: Avals, splits: Splits, axes: Sequence[Any]
    ) -> Sequence[Split]:
        """How results should be split if their readers want them split so."""
        if self.propagate_user is None:
            return splits
        given = tree_unflatten(self.out_tree, _structs(results, mesh, splits))
        found = self.propagate_user(*self.static, mesh, given)
        what = "propagate_user_sharding returned"
        return self._splits(what, self.out_tree, found, mesh, results, axes)

    def lowered(
        self,
        mesh: Mesh,
        operands: Avals,
        operand_splits: Splits,
        results: Avals,
        result_splits: Splits,
        axes: Sequence[Any],
    ) -> Lowered:
        """The answer of `partition` for operands and results that are split so."""
        given = tree_unflatten(self.in_tree, _structs(operands, mesh, operand_splits))
        made = tree_unflatten(self.out_tree, _structs(results, mesh, result_splits))
        found = self.partition(*self.static, mesh, given, made)
        if not isinstance(found, (tuple, list)) or len(found) != 4:
            raise ArgumentError(
                f"{self._what()}: partition returned {found!r}; return (mesh, lower_fn, "
                "result_shardings, arg_shardings)"
            )
        over, lower_fn, out, into = found
        if not isinstance(over, NamedAxes) or not mesh.has_grid_of(over):
            raise ShardingError(
                f"{self._what()}: partition returned the mesh {over!r}, but the program is over "
                f"{mesh!r}; return the mesh that it gets"
            )
        if not callable(lower_fn):
            raise ArgumentError(
                f"{self._what()}: partition returned {lower_fn!r} as lower_fn; return a function "
                "of one device's parts of the arguments"
            )
        what = "partition returned arg_shardings, which"
        ins = self._splits(what, self.in_tree, into, mesh, operands, axes)
        what = "partition returned result_shardings, which"
        outs = self._splits(what, self.out_tree, out, mesh, results, axes)
        parts = [
            aval.update(shape=NamedSharding(mesh, spec_of(split)).shard_shape(aval.shape))
            for aval, split in zip(results, outs, strict=True)
        ]
        return Lowered(ins, outs, functools.partial(self._run, lower_fn, parts))

    def _run(self, lower_fn: Callable[..., Any], parts: Avals, *args: Any) -> list[Any]:
        """One device's parts of the results, which must be like `parts`."""
        with attributed_to(None):
            out = lower_fn(*tree_unflatten(self.in_tree, args))
        found, tree = tree_flatten(out)
        if tree != self.out_tree:
            raise PytreeError(
                f"{self._what()}: lower_fn returned an output of structure {tree}, and the "
                f"function returns {self.out_tree}: they must be the same"
            )
        for k, (x, part) in enumerate(zip(found, parts, strict=True)):
            if not is_arraylike(x):
                raise ArgumentError(
                    f"{self._what()}: lower_fn returned {x!r} as output {k}, which is no array"
                )
            if typeof(x).shape != part.shape:
                raise ShapeError(
                    f"{self._what()}: lower_fn returned output {k} of shape {typeof(x).shape}, and "
                    f"one device's part by its result_sharding has shape {part.shape}.\nMake that "
                    "part in lower_fn, or return another sharding for it from partition."
                )
            if typeof(x).dtype != part.dtype:
                raise DtypeError(
                    f"{self._what()}: lower_fn returned output {k} of dtype {typeof(x).dtype}, and "
                    f"the function returns {part.dtype}; cast it with astype"
                )
        types = zip(found, parts, strict=True)
        return [convert_element_type(x, a.dtype, a.weak_type) for x, a in types]

    def _splits(
        self, what: str, tree: TreeDef, found: Any, mesh: Mesh, avals: Avals, axes: Sequence[Any]
    ) -> list[Split]:
        """The splits that a pytree of shardings says, which a callback returned."""
        what = f"{self._what()}: {what}"
        leaves = tree.flatten_up_to(found, what)
        for k, (leaf, aval) in enumerate(zip(leaves, avals, strict=True)):
            if not isinstance(leaf, NamedSharding):
                raise ShardingError(
                    f"{what} for array {k} {leaf!r}, which is no NamedSharding; return "
                    "NamedSharding(mesh, P(...))"
                )
            if not mesh.has_grid_of(leaf.mesh):
                raise ShardingError(
                    f"{what} for array {k} a sharding over {leaf.mesh!r}, but the program is over "
                    f"{mesh!r}; use the mesh that the callback gets"
                )
            spec = leaf.spec
            bad = [a for a in spec.all_axes() if a not in axes]
            if bad or spec.unreduced or spec.reduced:
                why = f"uses the manual axis {bad[0]!r}" if bad else "speaks of sums"
                raise ShardingError(
                    f"{what} for array {k} {spec}, which {why}; it may name the axes "
                    f"{tuple(axes)}, which split dims"
                )
            leaf.check(aval.shape, f"{what} for array {k} {spec}: it")
        return [split_of_spec(s.spec, a.ndim) for s, a in zip(leaves, avals, strict=True)]

    def _what(self) -> str:
        return f"custom_partitioning({self.name})"


def _structs(avals: Avals, mesh: Mesh | None = None, splits: Splits = ()) -> list[Any]:
    """The types of arrays as callbacks see them, with shardings if there is a mesh."""
    if mesh is None:
        return [ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    return [
        ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec_of(split)))
        for a, split in zip(avals, splits, strict=True)
    ]


# ---- rules -------------------------------------------------------------------------------------


def _jvp(primals: Any, tangents: Any, *, jaxpr: ClosedJaxpr, **_: Any) -> Any:
    return jvp_flat(functools.partial(eval_closed, jaxpr), primals, tangents)


def _batch(axis: BatchAxis, operands: Any, at: Any, *, jaxpr: ClosedJaxpr, **_: Any) -> Any:
    return batch_flat(functools.partial(eval_closed, jaxpr), axis, operands, at)


custom_partitioning_p = call_primitive(
    "custom_partitioning",
    jvp=_jvp,
    transpose=inline_transpose,
    batch=_batch,
    custom=True,
)
