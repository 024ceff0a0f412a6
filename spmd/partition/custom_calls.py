"""Functions with `custom_partitioning`: their user's callbacks say how they run on parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spmd.base.context import without_varying_checks
from spmd.core.ir import Eqn
from spmd.core.primitive import Dims
from spmd.partition.cost import Choice
from spmd.partition.propagate import Cell, Scope, Split, even
from spmd.partition.unasked import asked
from spmd.partition.values import Sizes, Value, total_form
from spmd.sharding.custom_partitioning import Partitioning

# Writes the equations of a scope on values, and gives its results.
Run = Callable[[Scope, Sequence[Value]], list[Value]]


def write_custom_call(
    run: Run, scope: Scope, k: int, eqn: Eqn, operands: Sequence[Value], sizes: Sizes
) -> list[Value]:
    """The results of the user's function of parts; its callbacks say how operands are split."""
    rules: Partitioning = eqn.params["_rules"]
    mesh, axes = scope.mesh, tuple(sizes)
    cells = [scope.cells[v] for v in eqn.outvars]
    given, made = [atom.aval for atom in eqn.invars], [v.aval for v in eqn.outvars]
    have = [even(x.cell, sizes).axes for x in operands]
    wanted: Sequence[Split] = [even(cell, sizes).axes for cell in cells]
    kind = scope.kinds.get(k)
    if kind is not None and kind.rule is not None:
        have, wanted = _by_rule(eqn, kind.rule, have, wanted, cells, sizes)
    else:
        wanted = rules.wanted(mesh, made, wanted, axes)
    lowered = rules.lowered(mesh, given, have, made, wanted, axes)
    with asked():
        parts = [x.read(split, sizes) for x, split in zip(operands, lowered.operands, strict=True)]
    with without_varying_checks():
        outs = lowered.run(*parts)
    for cell, split in zip(cells, lowered.results, strict=True):
        for d, own in enumerate(split):
            if cell.axes[d] != own:  # no result of a call is closed
                cell.put(d, own, f"the partition of {rules.name}")
    rows = zip(cells, lowered.results, outs, strict=True)
    return [Value(cell, {total_form(split): x}) for cell, split, x in rows]


def _by_rule(
    eqn: Eqn,
    rule: Dims,
    have: Sequence[Split],
    wanted: Sequence[Split],
    cells: Sequence[Cell],
    sizes: Sizes,
) -> tuple[list[Split], list[Split]]:
    """How a rule splits operands and results, from how they are and should be split.

    All labels count as closed: parts that a user's function sees have one size.
    """
    labels = frozenset(label for own in (*rule.operands, *rule.results) for label in own)
    avals = [atom.aval for atom in eqn.invars], [v.aval for v in eqn.outvars]
    terms = cells[0].terms if cells else ()
    choice = Choice(eqn.prim, rule, *avals, have, wanted, labels, sizes, terms=terms)
    axes = choice.axes()
    sides = rule.operands, rule.results
    ins, outs = ([tuple(axes.get(n, ()) for n in own) for own in side] for side in sides)
    return ins, outs
