"""Rolls and shifts: the rows of a value at another place.

Two slices of one value that are joined in the other order are a roll. The rows of a value but for
some, joined with as many new ones or padded with zeros, are a shift: a pipeline hands the states of
its stages on so. Each device sends the rows that leave it, once. Taken for what they are written
as, one slice would be summed over all devices, and the other moved; parts of the rows that a shift
keeps would have different sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spmd.base.record import record
from spmd.collectives.axis import axis_index
from spmd.collectives.ppermute import ppermute
from spmd.core.aval import typeof
from spmd.core.ir import Atom, Eqn, Jaxpr, Literal, Var
from spmd.core.structural import add_any_p
from spmd.lax.arithmetic import add
from spmd.lax.array import broadcasted_iota, full
from spmd.lax.concatenate import concatenate, concatenate_p, split_p
from spmd.lax.dynamic import dynamic_slice_in_dim
from spmd.lax.logic import eq, ge, lt, select
from spmd.lax.slicing import pad, pad_p, slice_in_dim, slice_p

Axes = tuple[Any, ...]
Sizes = Mapping[Any, int]


@record
class Roll:
    """Row r of a result is row `r - shift` of `operand`, counted round its dim `dim`.

    Of a shift by `count` rows those that are counted round are `new` ones instead: all are the
    literal if it is one. They are the last if it is `backward`, and else the first.
    """

    operand: Var
    dim: int
    shift: int
    new: Atom | None = None
    count: int = 0
    backward: bool = False


# The operations that make a part of a roll.
_CUTS = (pad_p, slice_p, split_p)


def rolls_of(
    jaxpr: Jaxpr, uses: Mapping[Var, int], sizes: Mapping[Any, int]
) -> dict[int, Roll | None]:
    """The equations that roll or shift a value, by number; None for what only they read.

    The `sizes` are those of the axes that may split values.
    """
    makers: dict[Any, int] = {}
    found: dict[int, Roll | None] = {}
    if jaxpr.by_primitive.keys().isdisjoint(_CUTS):
        return found
    for k, eqn in jaxpr.eqns_of(*_CUTS, concatenate_p, add_any_p):
        prim = eqn.prim
        if prim in _CUTS:
            for v in eqn.outvars:
                makers[v] = k
        if prim is pad_p:
            parts = [_Part(jaxpr, makers, eqn.outvars[0])]
            roll = _padded(eqn, parts[0], sizes)
        elif prim in _CUTS or len(eqn.invars) != 2:
            continue
        else:
            parts = [_Part(jaxpr, makers, atom) for atom in eqn.invars]
            roll = (_joined if prim is concatenate_p else _added)(eqn, parts)
            if roll is None and prim is concatenate_p:
                roll, parts = _shifted(eqn, parts, sizes)
        if roll is None:
            continue
        found[k] = roll
        for part in parts:
            # From the last maker on: what somebody else reads needs those before it.
            for n in part.made_by:
                if n == k:
                    continue
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


# New rows are so many that a device may have them all beside its own.
_SHARE = 4


def _shifted(
    eqn: Eqn, parts: list[_Part], sizes: Mapping[Any, int]
) -> tuple[Roll | None, list[_Part]]:
    """The rows of a value but for the first or the last ones, joined with as many."""
    for k, part in enumerate(parts):
        if eqn.params["dimension"] == part.dim and (part.low, part.high) == (0, 0):
            roll = _shift(part, eqn.invars[1 - k], k == 0, sizes)
            if roll is not None and eqn.invars[1 - k].aval.shape[part.dim] == roll.count:
                return roll, [part]
    return None, parts


def _padded(eqn: Eqn, part: _Part, sizes: Mapping[Any, int]) -> Roll | None:
    """The derivative of that: as many zeros in the place of rows."""
    if len(part.made_by) != 2 or (part.low and part.high):
        return None
    roll = _shift(part, eqn.invars[1], not part.low, sizes)
    return roll if roll is not None and part.low + part.high == roll.count else None


def _shift(part: _Part, new: Atom, backward: bool, sizes: Mapping[Any, int]) -> Roll | None:
    """A slice of a value's first or last rows with new ones before or behind it.

    None if axes can't split the rows evenly: slices of such stay in parts of different sizes.
    """
    if part.value is None or part.value.aval.explicit is not None:
        return None
    rows = part.value.aval.shape[part.dim]
    start, stop = part.rows
    count = rows - (stop - start)
    is_end = (start, stop) == ((count, rows) if backward else (0, rows - count))
    few = 0 < count and (count == 1 or count * _SHARE <= rows) and count < rows
    if not is_end or not few or any(rows % n for n in sizes.values()):
        return None
    return Roll(part.value, part.dim, rows - count if backward else count, new, count, backward)


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


def write_shift(
    x: Any, roll: Roll, axes: Axes, sizes: Sizes, new: Callable[[int | None], Any]
) -> Any:
    """A device's part of a shift. `new` gives the new rows, as the device of a number has them.

    If several devices have some of them, all devices have all: the number is None.
    """
    d, own = roll.dim, typeof(x).shape[roll.dim]
    devices = math.prod(sizes[a] for a in axes)
    if roll.count > own:
        return _among(write_roll(x, roll, axes, sizes), roll, axes, own * devices, new(None))
    end, last = (devices - 1 if roll.backward else 0), own - roll.count
    rows = new(end)
    if devices > 1:
        start = 0 if roll.backward else last
        steps = [(k + 1, k) if roll.backward else (k, k + 1) for k in range(devices - 1)]
        got = ppermute(slice_in_dim(x, start, start + roll.count, 1, d), axes, steps)
        rows = select(eq(axis_index(axes), np.int32(end)), rows, got)
    if not last:
        return rows
    if roll.backward:
        return concatenate([slice_in_dim(x, roll.count, own, 1, d), rows], d)
    return concatenate([rows, slice_in_dim(x, 0, last, 1, d)], d)


def _among(rolled: Any, roll: Roll, axes: Axes, size: int, rows: Any) -> Any:
    """The new rows of a shift among the others, of which there are so many in all parts."""
    d, aval = roll.dim, typeof(rolled)
    first = size - roll.count if roll.backward else 0
    around = [(first, size - first - roll.count, 0) if e == d else (0, 0, 0)
              for e in range(aval.ndim)]  # fmt: skip
    start = axis_index(axes) * np.int32(aval.shape[d])
    padded = pad(rows, np.zeros((), aval.dtype)[()], around)
    part = dynamic_slice_in_dim(padded, start, aval.shape[d], d)
    place = add(broadcasted_iota(np.int32, aval.shape, d), full(aval.shape, start))
    bound = full(aval.shape, first if roll.backward else roll.count, np.dtype(np.int32))
    return select(ge(place, bound) if roll.backward else lt(place, bound), part, rolled)
