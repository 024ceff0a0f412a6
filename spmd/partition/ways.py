"""How an equation runs on parts: which axes split its dims, and what follows from that.

A way serves all equations of a kind whose operands and results are laid out alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from spmd.base.context import state
from spmd.core.aval import ShapedArray, typeof
from spmd.core.axis import cast_to_vma
from spmd.core.ir import Eqn, Var
from spmd.core.primitive import Dims
from spmd.core.stage import PYTHON_SCALARS, JaxprTrace, JaxprTracer, Known
from spmd.core.structural import broadcast_in_dim_p, permute_dims_p
from spmd.lax.convert import convert_element_type_p
from spmd.lax.scatter import scatter_add_p
from spmd.lax.sort import sort_p
from spmd.partition.cost import Choice
from spmd.partition.halos import HALO
from spmd.partition.kinds import Kind
from spmd.partition.moves import is_uneven
from spmd.partition.parts import split_by, writer_of
from spmd.partition.propagate import Axes, Cell, Split
from spmd.partition.rules import has_sizes, local_sizes
from spmd.partition.strategies.attention import ATTENTION, seconds_inside
from spmd.partition.strategies.ordering import PICKS
from spmd.partition.strategies.sorting import sort_seconds
from spmd.partition.values import (
    Form,
    Plain,
    Sizes,
    Value,
    literal,
    part_shape,
    tell_repeated,
    total_form,
)

# Seconds of the exchanges inside of an equation, for the choice of axes.
_INSIDE = {**dict.fromkeys(ATTENTION, seconds_inside), sort_p: sort_seconds}


class Way:
    """How an equation runs on parts: the axes that split its dims, and what follows from them.

    `forms` are those in which operands are read; `splits` are those of results, which are terms
    `over` some axes. A way `is_plain` if the equation only gets other parameters.
    """

    __slots__ = ("axes", "forms", "is_plain", "known", "made", "over", "params", "splits", "stays")

    def __init__(
        self,
        eqn: Eqn,
        kind: Kind,
        operands: Sequence[Value],
        cells: Sequence[Cell],
        sizes: Sizes,
    ):
        rule = kind.rule
        assert rule is not None
        self.axes = axes = _chosen(eqn, kind, rule, operands, cells, sizes)
        self.forms = [total_form(split_by(labels, axes)) for labels in rule.operands]
        self.splits = [split_by(labels, axes) for labels in rule.results]
        lacking = [_lacking(axes, labels) for labels in rule.results]
        self.over: Axes = tuple([a for a in lacking[0] if all([a in own for own in lacking])])
        self.made = [
            _form(rule, split, own) for split, own in zip(self.splits, lacking, strict=True)
        ]
        self.is_plain = self._is_plain(eqn, rule, sizes)
        # The parameters that are other ones on parts: sizes.
        self.params: dict[str, Any] | None = None
        if self.is_plain and has_sizes(eqn.prim):
            avals = [
                atom.aval.update(shape=part_shape(atom.aval.shape, form[0], sizes))
                for atom, form in zip(eqn.invars, self.forms, strict=True)
            ]
            shape = part_shape(eqn.outvars[0].aval.shape, self.splits[0], sizes)
            self.params = local_sizes(eqn, avals, rule, shape)
        self.known: Known = {}
        # Whether operands that have one form alone are read as they are.
        self.stays = self.is_plain
        for x, form in zip(operands, self.forms, strict=True):
            self.stays = self.stays and form[0] == x.cell.axes

    def _is_plain(self, eqn: Eqn, rule: Dims, sizes: Sizes) -> bool:
        if writer_of(eqn, rule, self.splits, sizes, self.axes) is not None:
            return False
        if not self.over:
            return True
        rows = zip(eqn.invars, self.forms, strict=True)
        has_padding = any(is_uneven(atom.aval.shape, form[0], sizes) for atom, form in rows)
        return not has_padding and eqn.prim not in PICKS and eqn.prim is not scatter_add_p

    def bound(self, eqn: Eqn, parts: Sequence[Any]) -> list[Any]:
        """A plain equation on parts, with what is known from those of its kind before."""
        params = eqn.params if self.params is None else eqn.params | self.params
        trace = state.trace
        if type(trace) is JaxprTrace:
            return trace.process_again(eqn.prim, parts, params, self.known)
        found = eqn.prim.bind(*parts, **params)
        return found if eqn.prim.multiple else [found]


# Of these, results have the operand's elements.
RENAMES = frozenset({convert_element_type_p, permute_dims_p})

# The keys of repeats: first a grid and four things that are known of the result, then operands.
REPEAT_FROM = 5


class Repeat:
    """How an equation is written again, where operands are plain and laid out as those before.

    Nothing moves, no cell changes: the equation of the `known` types is written on the very parts,
    and its result has one form. If it `renames` a value that is whole, that is its origin.
    """

    __slots__ = (
        "casts", "effects", "form", "params", "plain", "renames", "repeats", "sizes", "type",
        "union",
    )  # fmt: skip

    def __init__(
        self, eqn: Eqn, known: Any, form: Form, params: dict[str, Any] | None, sizes: Sizes
    ):
        (self.type,), self.effects, self.union, self.casts = known
        # The parameters that are other ones on parts.
        self.params, self.form, self.sizes = params, form, sizes
        self.plain = plain_as(form, self.type)
        self.repeats = eqn.prim is broadcast_in_dim_p
        self.renames = eqn.prim in RENAMES and not form[1]

    def write(
        self, eqn: Eqn, values: Mapping[Any, Value], cell: Cell, trace: JaxprTrace, source: Any
    ) -> Value:
        """The result of the equation; `values` are those of its operands."""
        ins: list[Any] = []
        for k, a in enumerate(eqn.invars):
            if type(a) is Var:
                x: Any = values[a].plain[1]  # type: ignore[index]
                if k in self.casts:
                    x = cast_to_vma(x, self.union, x.aval.vma)
                a = x._var if x._trace is trace else trace.atom(x)
            ins.append(a)
        params = eqn.params if self.params is None else eqn.params | self.params
        var = Var(self.type)
        trace.eqns.append(Eqn(eqn.prim, tuple(ins), (var,), params, self.effects, source))
        part = JaxprTracer(trace, self.type, var)
        made = Value(cell, {self.form: part})
        if self.plain is not None:
            made.plain = self.plain, part
        if self.repeats:
            a = eqn.invars[0]
            x = values[a] if type(a) is Var else literal(a)  # type: ignore[arg-type]
            tell_repeated(made, x, self.sizes)
        return made


def plain_as(form: Form, aval: ShapedArray) -> Plain | None:
    """How a value with this form alone is plain; None if it is not, as one that a device has."""
    split, over, how = form
    if not over:
        return split, aval
    return (split, aval, over) if how == "add" else None


def is_exact(atom: Any) -> bool:
    """Whether a literal is written again as it is."""
    value = atom.val
    return isinstance(value, _SCALARS) and typeof(value) is atom.aval


_SCALARS = (np.generic, *PYTHON_SCALARS)


def _lacking(axes: Mapping[int, Axes], labels: Sequence[int]) -> Axes:
    """The axes that split the dims of other labels."""
    lacking: Axes = ()
    for label in axes:
        if label not in labels:
            lacking += axes[label]
    return lacking


def _form(rule: Dims, split: Split, over: Axes) -> Form:
    """The form of a result that lacks the dims that the axes `over` split."""
    is_term = over and rule.reduces not in (None, "pick")
    return (split, over, rule.reduces or "") if is_term else total_form(split)


def _chosen(
    eqn: Eqn,
    kind: Kind,
    rule: Dims,
    operands: Sequence[Value],
    cells: Sequence[Cell],
    sizes: Sizes,
) -> dict[int, Axes]:
    """For each label of a rule the axes that split its dims."""
    agreed = agreed_axes(rule, [*(x.cell for x in operands), *cells], sizes)
    if agreed is not None:
        return agreed
    return Choice(
        eqn.prim,
        rule,
        [atom.aval for atom in eqn.invars],
        [v.aval for v in eqn.outvars],
        [x.cell.axes for x in operands],
        [cell.axes for cell in cells],
        _closed_labels(rule, cells),
        sizes,
        terms=cells[0].terms if cells else (),
        share=cells[0].sum.share if cells and cells[0].sum is not None else {},
        windows=kind.windows,
        edge=any([cell.edge for cell in cells]),
        free=[x.axes_whole() for x in operands],
        inside=partial(_INSIDE[eqn.prim], eqn) if eqn.prim in _INSIDE else None,
    ).axes()


def agreed_axes(rule: Dims, cells: Sequence[Cell], sizes: Sizes) -> dict[int, Axes] | None:
    """The axes of each label if nothing has to move for them, which none costs less than.

    None where costs have to decide.
    """
    sides = list(zip((*rule.operands, *rule.results), cells, strict=True))
    found: dict[int, Axes] = {}
    used: Axes = ()
    for labels, cell in sides:
        if not cell.is_split:
            continue
        for label, axes in zip(labels, cell.axes, strict=False):
            if not axes or label in found:
                continue
            if not 0 <= label < HALO or label in rule.whole:
                return None
            found[label] = axes
            for a in axes:
                if a in used or a not in sizes:
                    return None
                used += (a,)
    if not found:
        return found
    for labels in rule.results:
        if not found.keys() <= set(labels):
            return None
    for labels, cell in sides:
        if cell.axes != split_by(labels, found):
            return None
        if cell.is_split and is_uneven(cell.shape, cell.axes, sizes):
            return None
    return found


def _closed_labels(rule: Dims, cells: Sequence[Cell]) -> frozenset[int]:
    """The labels of those dims of results that have to be split as their cells say."""
    return frozenset(
        [
            label
            for cell, labels in zip(cells, rule.results, strict=True)
            for label, closed in zip(labels, cell.closed, strict=True)
            if closed
        ]
    )
