"""Explicit mode's types: how the results of an equation are laid out, from the types of operands.

Most rules are the `Dims` that primitives have: dims with one label are split alike, a label that
only operands have is summed over. This module decides as JAX does where they leave the split open,
and where users expect a split of a dim that they never split. Nothing is gathered without a word:
an equation that would need it raises a `ShardingTypeError` which says how to write it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from spmd.base.errors import ShardingTypeError
from spmd.base.source import current_source
from spmd.collectives.member_dims import member_dims
from spmd.core.aval import ShapedArray
from spmd.core.primitive import Dims, Primitive, is_refused
from spmd.core.structural import reshape_p
from spmd.lax.array import rev_p
from spmd.lax.attention import attention_grad_p, attention_p, attention_tangent_p
from spmd.lax.concatenate import concatenate_p, split_p
from spmd.lax.conv import conv_general_dilated_p
from spmd.lax.dot import dot_general_p
from spmd.lax.dynamic import dynamic_slice_p, dynamic_update_slice_p
from spmd.lax.fft import fft_p
from spmd.lax.reduce import argmax_p, argmin_p
from spmd.lax.reduce_window import reduce_window_max_p, reduce_window_min_p, reduce_window_sum_p
from spmd.lax.reduce_window_select import select_and_gather_add_p, select_and_scatter_add_p
from spmd.lax.slicing import pad_p, slice_p
from spmd.sharding.abstract_mesh import AbstractMesh, AxisType
from spmd.sharding.named import NamedSharding
from spmd.sharding.spec import PartitionSpec
from spmd.sharding.unreduced_types import sets_of_results, speaks_of_sums

# For each dim of a value the axes that split it, major first.
Split = tuple[tuple[Any, ...], ...]
Avals = Sequence[ShapedArray]

# The dims of which a part is as large as before, or smaller, and which stay split where that fits.
_WINDOWS = (reduce_window_max_p, reduce_window_min_p, reduce_window_sum_p)
_RESIZES = (slice_p, dynamic_slice_p, pad_p, split_p, fft_p, *_WINDOWS)
# Their dims may be split although the parts of results are not made of those of operands alone.
_KEEPS = (rev_p, argmax_p, argmin_p)
_PRODUCTS = (dot_general_p, conv_general_dilated_p)
_ATTENTION = (attention_p, attention_tangent_p, attention_grad_p)


class _Equation:
    """The equation that is typed: its primitive, and the avals of operands and results."""

    def __init__(self, prim: Primitive, avals: Avals, outs: Avals, params: dict[str, Any]):
        self.prim = prim
        self.avals = avals
        self.outs = outs
        self.params = params
        self.splits = [split_of(a) for a in avals]

    def error(self, problem: str, advice: str = "") -> ShardingTypeError:
        """The error about the layouts of the operands."""
        given = ", ".join(a.short() for a in self.avals)
        fix = advice or (
            "Lay an operand out otherwise with reshard(x, P(...)), or let the compiler decide with "
            "auto_axes(f, out_sharding=P(...))"
        )
        return ShardingTypeError(
            f"{current_source()}: {self.prim.name} of {given}: {problem}.\n{fix}."
        )


def split_of(aval: ShapedArray) -> Split:
    """How the dims of a value are split, as its type says."""
    if aval.explicit is None:
        return ((),) * aval.ndim
    return split_of_spec(aval.explicit.spec, aval.ndim)


def split_of_spec(spec: PartitionSpec, ndim: int) -> Split:
    """How a spec splits the dims of a value."""
    return tuple(map(spec.axes_of, range(ndim)))


def spec_of(split: Sequence[Sequence[Any]], **sets: Any) -> PartitionSpec:
    """The spec, with an entry for each dim, that says how dims are split."""
    return PartitionSpec(*(tuple(axes) or None for axes in split), **sets)


def results(
    prim: Primitive, avals: Avals, outs: Avals, params: dict[str, Any]
) -> list[ShapedArray]:
    """The avals of an equation's results, with their shardings; see `core/explicit.py`."""
    eqn = _Equation(prim, avals, outs, params)
    mesh = _mesh_of(eqn)
    rule = _RULES.get(prim, _by_dims)
    splits = rule(eqn)
    sets = {}
    if any(a.explicit is not None and speaks_of_sums(a.explicit.spec) for a in avals):
        sets = sets_of_results(prim, avals, params, eqn.error)
    made = []
    for out, split in zip(outs, splits, strict=True):
        _check(eqn, mesh, out, split)
        sharding = NamedSharding(mesh, spec_of(split, **sets))
        is_manual = all(kind is AxisType.Manual for kind in mesh.axis_types)
        made.append(
            out.update(sharding=sharding.explicit_part(out.ndim) if is_manual else sharding)
        )
    return made


def _mesh_of(eqn: _Equation) -> AbstractMesh:
    """The mesh of the operands; the axes that are left to the compiler in one are so in all."""
    meshes = [a.explicit.mesh for a in eqn.avals if a.explicit is not None]
    first = meshes[0]
    for other in meshes:
        if other.shape_tuple != first.shape_tuple:
            raise eqn.error(f"operands lie over {first} and over {other}", _ONE_MESH)
        if sum(t.name == "Auto" for t in other.axis_types) > sum(
            t.name == "Auto" for t in first.axis_types
        ):
            first = other
    return first


_ONE_MESH = "Lay all operands out over one mesh: device_put(x, NamedSharding(mesh, spec))"


def _check(eqn: _Equation, mesh: AbstractMesh, out: ShapedArray, split: Split) -> None:
    """Raise if an axis splits two dims of a result, or one that it cannot."""
    seen: dict[Any, int] = {}
    for d, axes in enumerate(split):
        for axis in axes:
            if axis in seen:
                raise eqn.error(
                    f"the result {out.short()} would be split over {axis!r} along dim {seen[axis]} "
                    f"and along dim {d}, and an axis can split one dim",
                    _OUT_SHARDING if eqn.prim in _PRODUCTS else "",
                )
            seen[axis] = d
        parts = mesh.axis_size(axes)
        if out.shape[d] % parts:
            raise eqn.error(
                f"dim {d} of the result {out.short()} would be split over {_named(axes)} (size "
                f"{parts}), and {out.shape[d]} is not a multiple of {parts}"
            )


_OUT_SHARDING = (
    "Say how the result is to be laid out, e.g. with out_sharding=P(...), which numpy.dot, matmul, "
    "einsum, tensordot and lax.dot_general take"
)


def _named(axes: Sequence[Any]) -> str:
    return " and ".join(map(repr, axes))


# ---- by labels ---------------------------------------------------------------------------------


def _by_dims(eqn: _Equation) -> list[Split]:
    if not any(any(split) for split in eqn.splits):
        return [((),) * out.ndim for out in eqn.outs]
    bare = [a.strip_sharding() for a in eqn.avals]
    if is_refused(eqn.prim.dims):
        rule = member_dims(eqn.prim, bare, eqn.outs, eqn.params)
        if rule is not None:
            return _split_by(eqn, rule)
        raise eqn.error("no rule says how the results of split operands are laid out")
    return _split_by(eqn, eqn.prim.rule("dims")(*bare, **eqn.params))


def _split_by(eqn: _Equation, rule: Dims) -> list[Split]:
    """The splits of results by a rule; operands agree on the axes of each label."""
    known: dict[int, tuple[Any, ...]] = {}
    first: dict[int, tuple[int, int]] = {}
    shared = {label for labels in rule.results for label in labels}
    for k, d, label, axes in _split_dims(eqn, rule):
        is_whole = label < 0 or label in rule.whole or (label not in shared and not rule.reduces)
        if is_whole and eqn.prim not in _KEEPS:
            if eqn.avals[k].explicit.mesh.axis_size(axes) == 1:
                continue
            raise eqn.error(
                f"dim {d} of operand {k} is split over {_named(axes)} and must be whole"
            )
        if label in known and known[label] != axes:
            k0, d0 = first[label]
            raise eqn.error(
                f"dim {d0} of operand {k0} is split over {_named(known[label])}, dim {d} of "
                f"operand {k}, which goes with it, over {_named(axes)}"
            )
        if label in known and label not in shared and eqn.prim in _PRODUCTS:
            k0, d0 = first[label]
            raise eqn.error(
                f"dim {d0} of operand {k0} and dim {d} of operand {k} are summed over, and both "
                f"are split over {_named(axes)}: the result may be whole (all_reduce) or split "
                f"over {_named(axes)} (reduce_scatter, half the bytes), or the sum left for later "
                f"(unreduced, no bytes)",
                _OUT_SHARDING,
            )
        known.setdefault(label, axes)
        first.setdefault(label, (k, d))
    return [tuple(known.get(label, ()) for label in labels) for labels in rule.results]


def _split_dims(eqn: _Equation, rule: Dims) -> Iterator[tuple[int, int, int, tuple[Any, ...]]]:
    """Each dim that an operand is split along: operand, dim, label and axes."""
    for k, (labels, split) in enumerate(zip(rule.operands, eqn.splits, strict=True)):
        for d, (label, axes) in enumerate(zip(labels, split, strict=True)):
            if axes:
                yield k, d, label, axes


# ---- rules that dims do not say ----------------------------------------------------------------


def _resized(eqn: _Equation) -> list[Split]:
    """Dims stay split; `_check` says where a size does not fit."""
    return [eqn.splits[0] for _ in eqn.outs]


def _selected(eqn: _Equation) -> list[Split]:
    """The split of the array whose windows select; the other operand's is the same, or none."""
    other, own = eqn.splits
    if any(other) and other != own:
        raise eqn.error("the operands are split in different ways")
    return [own for _ in eqn.outs]


def _convolved(eqn: _Equation) -> list[Split]:
    """Batch and spatial dims stay split where a kernel is whole, and its features are not split."""
    (lhs, rhs), numbers = eqn.splits[:2], eqn.params["dimension_numbers"]
    if any(rhs) or lhs[numbers.lhs_spec[1]]:
        return _by_dims(eqn)
    made: list[Any] = [()] * eqn.outs[0].ndim
    for d, out in zip(numbers.lhs_spec, numbers.out_spec, strict=True):
        made[out] = lhs[d]
    return [tuple(made)]


def _updated(eqn: _Equation) -> list[Split]:
    """The operand's split; an update that is split otherwise would have to be moved."""
    operand, update = eqn.splits[:2]
    for d, (own, other) in enumerate(zip(operand, update, strict=True)):
        if other and other != own:
            raise eqn.error(
                f"dim {d} of the update is split over {_named(other)}, that of the operand over "
                f"{_named(own) or 'nothing'}"
            )
    return [operand]


def _concatenated(eqn: _Equation) -> list[Split]:
    """All operands are split alike, but for those that are not split at all."""
    found = eqn.splits[0]
    for split in eqn.splits:
        if not any(found):
            found = split
        if any(split) and split != found:
            raise eqn.error("the operands are split in different ways")
    return [found]


def _reshaped(eqn: _Equation) -> list[Split]:
    old, new = eqn.avals[0].shape, eqn.outs[0].shape
    sizes = eqn.avals[0].explicit.mesh.shape
    made: list[tuple[Any, ...]] = [()] * len(new)
    for ins, outs in _groups(old, new):
        split = [eqn.splits[0][d] for d in ins]
        if not any(split):
            continue
        into = _regrouped([old[d] for d in ins], split, [new[d] for d in outs], sizes)
        if into is None:
            raise eqn.error(
                f"dims {ins}, of sizes {[old[d] for d in ins]}, become dims {outs}, of sizes "
                f"{[new[d] for d in outs]}, and the blocks of the one are not blocks of the other",
                "Say how the result is to be laid out: reshape(x, shape, out_sharding=P(...))",
            )
        for d, axes in zip(outs, into, strict=True):
            made[d] = axes
    return [tuple(made)]


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The least groups of dims, of both shapes, of one number of elements; without sizes of 1."""
    if 0 in old:
        return
    ins = [d for d, size in enumerate(old) if size != 1]
    outs = [d for d, size in enumerate(new) if size != 1]
    while ins:
        left, right = [ins.pop(0)], [outs.pop(0)]
        while (a := math.prod(old[d] for d in left)) != (b := math.prod(new[d] for d in right)):
            if a < b:
                left.append(ins.pop(0))
            else:
                right.append(outs.pop(0))
        yield left, right


def _regrouped(
    old: Sequence[int], split: Sequence[tuple[Any, ...]], new: Sequence[int], sizes: dict[Any, int]
) -> list[tuple[Any, ...]] | None:
    """The axes of the new dims of a group; None if they cannot be split as the old ones were.

    Dims that are merged have all their axes, if those that are split come first.
    """
    if len(old) > 1 and len(new) > 1:
        return None
    if len(old) > 1:
        whole = split.index(()) if () in split else len(split)
        if any(split[whole:]):
            return None
        return [tuple(a for axes in split for a in axes)]
    left, made = list(split[0]), []
    for size in new:
        axes: list[Any] = []
        parts = 1
        while left and size % (parts * sizes[left[0]]) == 0:
            parts *= sizes[left[0]]
            axes.append(left.pop(0))
        made.append(tuple(axes))
        if left and parts != size:
            return None
    return None if left else made


def _attended(eqn: _Equation) -> list[Split]:
    """Batch and heads stay split; along the others rows depend on each other."""
    lead = eqn.splits[0][:2]
    for k, (aval, split) in enumerate(zip(eqn.avals, eqn.splits, strict=True)):
        for d, axes in enumerate(split):
            if axes and (d > 1 or axes != lead[d]):
                raise eqn.error(
                    f"dim {d} of operand {k}, {aval.short()}, is split otherwise than "
                    "dims 0 and 1, batch and heads, of the queries"
                )
    made = []
    for out in eqn.outs:
        fits = [out.ndim > d and out.shape[d] == eqn.avals[0].shape[d] for d in range(2)]
        made.append(tuple(lead[d] if d < 2 and fits[d] else () for d in range(out.ndim)))
    return made


_RULES: dict[Primitive, Callable[[_Equation], list[Split]]] = {
    concatenate_p: _concatenated,
    conv_general_dilated_p: _convolved,
    dynamic_update_slice_p: _updated,
    reshape_p: _reshaped,
    select_and_gather_add_p: _selected,
    select_and_scatter_add_p: _selected,
    **dict.fromkeys(_RESIZES, _resized),
    **dict.fromkeys(_ATTENTION, _attended),
}
