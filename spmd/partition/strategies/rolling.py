"""Rolls: two slices of one value, joined in the other order, are its rows at another place.

Each device sends the rows that leave it, once. Taken for what they are written as, one slice would
be summed over all devices, and the other moved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from spmd.base.record import record
from spmd.collectives.ppermute import ppermute
from spmd.core.aval import typeof
from spmd.core.ir import Atom, Eqn, Jaxpr, Literal, Var
from spmd.core.structural import add_any_p
from spmd.lax.concatenate import concatenate, concatenate_p, split_p
from spmd.lax.slicing import pad_p, slice_in_dim, slice_p

Axes = tuple[Any, ...]
Sizes = Mapping[Any, int]


@record
class Roll:
    """Row r of a result is row `r - shift` of `operand`, counted round its dim `dim`."""

    operand: Var
    dim: int
    shift: int


# The operations that make a part of a roll.
_CUTS = (pad_p, slice_p, split_p)
_CUTS_AND_JOINS = frozenset((*_CUTS, concatenate_p, add_any_p))


def rolls_of(jaxpr: Jaxpr, uses: Mapping[Var, int]) -> dict[int, Roll | None]:
    """The equations that roll a value, by number; None for what only they read."""
    makers: dict[Any, int] = {}
    found: dict[int, Roll | None] = {}
    k = -1
    for eqn in jaxpr.eqns:
        k += 1
        prim = eqn.prim
        if prim not in _CUTS_AND_JOINS:
            continue
        if prim in _CUTS:
            for v in eqn.outvars:
                makers[v] = k
            continue
        if len(eqn.invars) != 2 or not all([atom in makers for atom in eqn.invars]):
            continue
        parts = [_Part(jaxpr, makers, atom) for atom in eqn.invars]
        roll = (_joined if eqn.prim is concatenate_p else _added)(eqn, parts)
        if roll is None:
            continue
        found[k] = roll
        for part in parts:
            # From the last maker on: what somebody else reads needs those before it.
            for n in part.made_by:
                outs = jaxpr.eqns[n].outvars
                readers = sum(n in other.made_by for other in parts)
                if len(outs) > readers or any(uses.get(v) != 1 for v in outs):
                    break
                found[n] = None
    return found


class _Part:
    """A slice of a value along one dim, with rows of zeros before or behind it.

    `rows` are its first row and the row behind its last; `low` and `high` count the zeros.
    `made_by` are the equations that make it, the last one first. The `value` is None for others.
    """

    def __init__(self, jaxpr: Jaxpr, makers: Mapping[Var, int], atom: Atom):
        self.value: Var | None = None
        self.dim, self.rows, self.low, self.high = 0, (0, 0), 0, 0
        self.made_by: list[int] = []
        eqn = self._maker(jaxpr, makers, atom)
        if eqn is not None and eqn.prim is pad_p:
            config = eqn.params["padding_config"]
            dims = [d for d, entry in enumerate(config) if entry != (0, 0, 0)]
            zero = eqn.invars[1]
            is_zero = isinstance(zero, Literal) and zero.val == 0
            if len(dims) != 1 or not is_zero or config[dims[0]][2] or min(config[dims[0]]) < 0:
                return
            self.dim = dims[0]
            self.low, self.high, _ = config[dims[0]]
            atom = eqn.invars[0]
            eqn = self._maker(jaxpr, makers, atom)
        found = None if eqn is None else _cut_out(eqn, atom)
        if eqn is None or found is None:
            return
        d, rows = found
        operand = eqn.invars[0]
        if isinstance(operand, Var) and (len(self.made_by) == 1 or d == self.dim):
            self.value, self.dim, self.rows = operand, d, rows

    def _maker(self, jaxpr: Jaxpr, makers: Mapping[Var, int], atom: Atom) -> Eqn | None:
        """The equation that makes a value, which is noted."""
        if not isinstance(atom, Var) or atom not in makers:
            return None
        self.made_by.append(makers[atom])
        return jaxpr.eqns[makers[atom]]


def _cut_out(eqn: Eqn, out: Atom) -> tuple[int, tuple[int, int]] | None:
    """The dim along which an equation cuts a value, and which rows `out` has of it."""
    params = eqn.params
    if eqn.prim is split_p:
        place = 0
        for size, var in zip(params["sizes"], eqn.outvars, strict=True):
            if var is out:
                return params["axis"], (place, place + size)
            place += size
    if eqn.prim is not slice_p or set(params["strides"] or (1,)) != {1}:
        return None
    pairs = list(zip(params["start_indices"], params["limit_indices"], strict=True))
    dims = [d for d, size in enumerate(eqn.invars[0].aval.shape) if pairs[d] != (0, size)]
    return (dims[0], pairs[dims[0]]) if len(dims) == 1 else None


def _pair(parts: Sequence[_Part]) -> tuple[_Part, _Part, int] | None:
    """The part with the first rows, the other, and how many rows both have; None if they do not."""
    first, last = sorted(parts, key=lambda part: part.rows)
    if first.value is None or first.value is not last.value or first.dim != last.dim:
        return None
    rows = first.value.aval.shape[first.dim]
    whole = first.rows[0] == 0 and first.rows[1] == last.rows[0] and last.rows[1] == rows
    return (first, last, rows) if whole else None


def _joined(eqn: Eqn, parts: Sequence[_Part]) -> Roll | None:
    found = _pair(parts)
    if found is None or found[0] is not parts[1] or eqn.params["dimension"] != parts[0].dim:
        return None
    first, last, rows = found
    if any((part.low, part.high) != (0, 0) for part in parts) or first.value is None:
        return None
    return Roll(first.value, first.dim, rows - last.rows[0])


def _added(eqn: Eqn, parts: Sequence[_Part]) -> Roll | None:
    """The derivative of a roll: each slice among zeros where the other has its rows."""
    found = _pair(parts)
    if found is None or found[0].value is None:
        return None
    first, last, rows = found
    cut = first.rows[1]
    if (first.low, first.high, last.low, last.high) != (rows - cut, 0, 0, cut):
        return None
    return Roll(found[0].value, first.dim, rows - cut)


def write_roll(x: Any, roll: Roll, axes: Axes, sizes: Sizes) -> Any:
    """A device's part of the result, from its part of the operand, whose dim some axes split."""
    d, own = roll.dim, typeof(x).shape[roll.dim]
    count = math.prod(sizes[a] for a in axes)
    distance, rest = divmod(roll.shift, own)

    def rows_of(device: int, start: int, stop: int) -> Any:
        """Some rows of the device that is so far before this one."""
        part = slice_in_dim(x, start, stop, 1, d)
        if device % count == 0:
            return part
        return ppermute(part, axes, [(k, (k + device) % count) for k in range(count)])

    parts = [rows_of(distance, 0, own - rest)]
    if rest:
        parts.insert(0, rows_of(distance + 1, own - rest, own))
    return parts[0] if len(parts) == 1 else concatenate(parts, d)
