"""psum, pmax, pmin and pmean: combine a value over every device along an axis."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import DtypeError
from spmd.base.source import current_source
from spmd.collectives.all_gather import all_gather
from spmd.collectives.axis import axis_index
from spmd.collectives.groups import (
    Groups,
    collective,
    group_size,
    in_groups,
    make_varying,
    map_leaves,
    names_of,
    normal_groups,
    out_of_groups,
    rows_of,
    stack_rows,
)
from spmd.core.aval import ShapedArray, typeof
from spmd.core.axis import vma_hooks
from spmd.core.ir import Eqn, Names
from spmd.core.jvp import instantiate
from spmd.core.primitive import Primitive, Refused, linear
from spmd.core.structural import broadcast_in_dim, reduce_sum
from spmd.core.trace import Tracer, unchanged
from spmd.lax.arithmetic import add, div, max, min, mul
from spmd.lax.array import full, full_like
from spmd.lax.convert import convert_element_type
from spmd.lax.dynamic import dynamic_index_in_dim
from spmd.lax.logic import eq, select
from spmd.lax.reduce import reduce_max, reduce_min

# ---- public functions --------------------------------------------------------------------------


def psum(x: Any, axis_name: Any, *, axis_index_groups: Any = None) -> Any:
    """Sum `x` over every device along a named axis.

    `x` is an array or a pytree of arrays. Per device, a leaf of shape `S` becomes `S`, equal on all
    devices of the axis; globally, `pmap` sees shape (n, *S) before and after. `axis_name` is a name
    or a tuple of names. `axis_index_groups`, a list of lists of positions, sums inside each group;
    these may have different sizes.
    The dtype stays, but booleans are counted as int32; 16-bit floats are summed in float32 and
    rounded once. A Python number gives its product with the number of devices.
    **Every device must reach the call**, or the others wait.

    Raises `AxisError` if the axis is not in scope, and `ArgumentError` if the groups do not name
    each position once.

    >>> spmd.pmap(lambda x: lax.psum(x, "i"), axis_name="i")(np.arange(4.0))
    Array([6., 6., 6., 6.], dtype=float32)
    >>> pairs = [[0, 1], [2, 3]]
    >>> f = lambda x: lax.psum(x, "i", axis_index_groups=pairs)
    >>> spmd.pmap(f, axis_name="i")(np.arange(4.0))
    Array([1., 1., 5., 5.], dtype=float32)
    """
    axes = names_of(axis_name)
    groups = normal_groups("psum", axes, axis_index_groups, any_size=True)
    is_even = _have_one_size(groups)

    def one(leaf: Any) -> Any:
        aval = typeof(leaf)
        if dtypes.is_bool(aval.dtype):
            leaf = convert_element_type(leaf, np.int32)
        if not isinstance(leaf, Tracer):
            if not is_even:
                return mul(leaf, convert_element_type(_own_size(axes, groups), typeof(leaf).dtype))
            return _constant_sum(leaf, group_size(axes, groups))
        if not is_even:
            return _in_any_groups(reduce_sum, 0, leaf, axes, groups)
        return psum_p.bind(make_varying(leaf, axes), axes=axes, groups=groups)

    return map_leaves(one, x)


def _constant_sum(x: Any, size: int) -> Any:
    """The sum of a constant that is equal on all devices; of `1` a Python int, the axis size."""
    # NumPy's float64 is a Python float too.
    if isinstance(x, (int, float, complex)) and not isinstance(x, np.generic):
        return x * size
    return mul(x, typeof(x).dtype.type(size))


def pmean(x: Any, axis_name: Any, *, axis_index_groups: Any = None) -> Any:
    """Average `x` over every device along a named axis.

    Per device, a leaf of `x` of shape `S` becomes `S`, equal on all devices. `axis_name` and
    `axis_index_groups` are those of `psum`. Integers and booleans give the default float dtype;
    floats keep their dtype. Raises the errors of `psum`: `AxisError` and `ArgumentError`.

    >>> spmd.pmap(lambda x: lax.pmean(x, "i"), axis_name="i")(np.arange(4))
    Array([1.5, 1.5, 1.5, 1.5], dtype=float32)
    """
    axes = names_of(axis_name)
    groups = normal_groups("pmean", axes, axis_index_groups, any_size=True)
    n = group_size(axes, groups) if _have_one_size(groups) else _own_size(axes, groups)

    def one(leaf: Any) -> Any:
        total = psum(leaf, axis_name, axis_index_groups=axis_index_groups)
        if isinstance(total, (int, float, complex)):
            # As weak as the number: it takes the dtype of other operands.
            return convert_element_type(total / n, dtypes.to_inexact(typeof(total).dtype), True)
        dtype = dtypes.to_inexact(typeof(total).dtype)
        count = np.asarray(n, dtype)[()] if isinstance(n, int) else convert_element_type(n, dtype)
        return div(convert_element_type(total, dtype), count)

    return map_leaves(one, x)


def pmax(x: Any, axis_name: Any, *, axis_index_groups: Any = None) -> Any:
    """Take the elementwise maximum of `x` over every device along a named axis.

    Per device, a leaf of `x` of shape `S` becomes `S`, equal on all devices; the dtype stays and
    NaN wins. `axis_name` and `axis_index_groups` are those of `psum`. The derivative is shared
    equally between the devices that hold the maximum. Raises `DtypeError` for complex numbers,
    which have no order, and otherwise the errors of `psum`: `AxisError` and `ArgumentError`.

    >>> spmd.pmap(lambda x: lax.pmax(x, "i"), axis_name="i")(np.array([3, 1, 4, 1]))
    Array([4, 4, 4, 4], dtype=int32)
    """
    return _extreme("pmax", pmax_p, x, axis_name, axis_index_groups)


def pmin(x: Any, axis_name: Any, *, axis_index_groups: Any = None) -> Any:
    """Take the elementwise minimum of `x` over every device along a named axis.

    Per device, a leaf of `x` of shape `S` becomes `S`, equal on all devices; the dtype stays and
    NaN wins. `axis_name` and `axis_index_groups` are those of `psum`. The derivative is shared
    equally between the devices that hold the minimum. Raises `DtypeError` for complex numbers,
    which have no order, and otherwise the errors of `psum`: `AxisError` and `ArgumentError`.

    >>> spmd.pmap(lambda x: lax.pmin(x, "i"), axis_name="i")(np.array([3, 1, 4, 1]))
    Array([1, 1, 1, 1], dtype=int32)
    """
    return _extreme("pmin", pmin_p, x, axis_name, axis_index_groups)


def _extreme(name: str, prim: Primitive, x: Any, axis_name: Any, index_groups: Any) -> Any:
    axes = names_of(axis_name)
    groups = normal_groups(name, axes, index_groups, any_size=True)
    is_even = _have_one_size(groups)
    reduce = reduce_max if prim is pmax_p else reduce_min
    last = dtypes.min_value if prim is pmax_p else dtypes.max_value

    def one(leaf: Any) -> Any:
        if dtypes.is_complex(typeof(leaf).dtype):
            raise DtypeError(f"{current_source()}: {name}: complex numbers have no order")
        if not isinstance(leaf, Tracer):
            return convert_element_type(unchanged(leaf), typeof(leaf).dtype)
        if not is_even:
            return _in_any_groups(reduce, last(typeof(leaf).dtype)[()], leaf, axes, groups)
        return prim.bind(make_varying(leaf, axes), axes=axes, groups=groups)

    return map_leaves(one, x)


# ---- groups of different sizes -----------------------------------------------------------------


def _have_one_size(groups: Groups | None) -> bool:
    return groups is None or len({len(group) for group in groups}) == 1


def _own(table: np.ndarray, axes: Sequence[Any]) -> Any:
    """This device's row of a table that all have."""
    return dynamic_index_in_dim(unchanged(table), axis_index(tuple(axes)), 0, keepdims=False)


def _own_size(axes: Sequence[Any], groups: Any) -> Any:
    """The size of this device's group."""
    sizes = {k: len(group) for group in groups for k in group}
    return _own(np.array([sizes[k] for k in range(len(sizes))], np.int32), axes)


def _in_any_groups(
    reduce: Callable[[Any, Any], Any], neutral: Any, x: Any, axes: Sequence[Any], groups: Any
) -> Any:
    """The reduction of the values of a device's group, among those of all devices."""
    n = sum(map(len, groups))
    table = np.zeros((n, n), bool)
    for group in groups:
        table[np.ix_(group, group)] = True
    rows = all_gather(x, tuple(axes))
    shape = typeof(rows).shape
    members = broadcast_in_dim(_own(table, axes), shape, (0,))
    return reduce(select(members, rows, full(shape, neutral, typeof(rows).dtype)), (0,))


# ---- rules -------------------------------------------------------------------------------------


def reduced_vma(avals: Sequence[ShapedArray], params: dict[str, Any]) -> frozenset[Any]:
    """A full reduction is equal on all devices; one in groups is not."""
    vma = avals[0].vma
    return vma if params["groups"] is not None else vma - frozenset(params["axes"])


def _batch(reduce: Callable[[Any, Any], Any], combine: Any, repeat: Any) -> Callable[..., Any]:
    def rule(axis: Any, operands: Any, at: Any, *, axes: Any, groups: Groups | None) -> Any:
        (x,), (dim,) = operands, at
        prim = rule.prim  # type: ignore[attr-defined]
        if axis.name not in axes:
            return prim.bind(x, axes=axes, groups=groups), dim
        if groups is not None:
            rows = rows_of(x, dim, axis.size)
            parts = [
                [functools.reduce(combine, part)] * len(part) for part in in_groups(rows, groups)
            ]
            return stack_rows(out_of_groups(parts, groups)), 0
        out = repeat(x, axis.size) if dim is None else reduce(x, (dim,))
        rest = tuple(a for a in axes if a != axis.name)
        return (prim.bind(out, axes=rest, groups=None) if rest else out), None

    return rule


def _members(ufunc: Any, wide: bool) -> Callable[..., list[Any]]:
    """Combine in member order; 16-bit floats are summed in float32 and rounded once."""

    def rule(operands: list[Any], **_: Any) -> list[Any]:
        dtype = operands[0].dtype
        narrow = wide and dtype in (dtypes.bfloat16, np.float16)
        total = functools.reduce(ufunc, [x.astype(np.float32) if narrow else x for x in operands])
        return [np.asarray(total, dtype)] * len(operands)

    return rule


def _psum_transpose(ct: Any, x: Any, *, axes: Any, groups: Groups | None) -> Any:
    known = tuple(a for a in axes if a in x.aval.vma)
    if groups is None and known:
        # In a typed shard_map ct is equal on all devices, so it is the cotangent of each operand.
        # Where the type says that devices hold terms of a sum, it is the cotangent of the sum.
        terms = x.aval.manual_sets()[0]
        typed = tuple(a for a in known if a not in terms)
        back = vma_hooks.cast(ct, typed) if typed else ct
        rest = tuple(a for a in axes if a not in known)
        return [psum_p.bind(back, axes=rest, groups=None) if rest else back]
    return [psum_p.bind(ct, axes=axes, groups=groups)]


def _extreme_jvp(prim_of: Callable[[], Primitive]) -> Callable[..., Any]:
    """The tangent of the largest element; shared equally where several devices hold it."""

    def rule(primals: Any, tangents: Any, *, axes: Any, groups: Groups | None) -> Any:
        (x,), (t,) = primals, tangents
        out = prim_of().bind(x, axes=axes, groups=groups)
        here = eq(x, out)
        one, zero = full_like(x, 1), full_like(x, 0)
        count = psum_p.bind(make_varying(select(here, one, zero), axes), axes=axes, groups=groups)
        mine = select(here, instantiate(t), zero)
        total = psum_p.bind(make_varying(mine, axes), axes=axes, groups=groups)
        return out, div(total, count)

    return rule


def _text(eqn: Eqn, names: Names) -> tuple[str, dict[str, Any]]:
    """The name and the parameters that the text of an equation shows, those of JAX.

    A sum of a value that varies over the axes is the same on all devices along them.
    """
    name, (axes, groups) = eqn.prim.name, (eqn.params["axes"], eqn.params["groups"])
    if name == "psum" and groups is None and eqn.invars[0].aval.vma:
        return "psum_invariant", {"axes": axes}
    return name, {"axes": axes, "axis_index_groups": groups}


def _reduction(name: str, batch: Any, members: Any, jvp: Any, transpose: Any) -> Primitive:
    prim = collective(
        name,
        abstract=lambda x, *, axes, groups: x.strip_weak(),
        jvp=jvp,
        transpose=transpose,
        batch=batch,
        vma=reduced_vma,
        members=members,
        text=_text,
    )
    batch.prim = prim
    return prim


_NOT_LINEAR = Refused("is not linear; differentiate it with grad, which uses its jvp")

psum_p = _reduction(
    "psum",
    _batch(reduce_sum, add, lambda x, n: mul(x, np.asarray(n, typeof(x).dtype)[()])),
    _members(np.add, wide=True),
    linear,
    _psum_transpose,
)
pmax_p = _reduction(
    "pmax",
    _batch(reduce_max, max, lambda x, n: x),
    _members(np.maximum, wide=False),
    _extreme_jvp(lambda: pmax_p),
    _NOT_LINEAR,
)
pmin_p = _reduction(
    "pmin",
    _batch(reduce_min, min, lambda x, n: x),
    _members(np.minimum, wide=False),
    _extreme_jvp(lambda: pmin_p),
    _NOT_LINEAR,
)


def _total(x: Any, axes: tuple[Any, ...]) -> Any:
    return psum_p.bind(x, axes=axes, groups=None)


vma_hooks.total = _total
