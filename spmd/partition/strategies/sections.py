"""Sections: slices of one value that together are all of its rows, as the gates of an LSTM.

Where each is wanted split like the value, one exchange brings a device its rows of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from spmd.collectives.exchange import exchange
from spmd.collectives.rectangles import Copies, Copy, common
from spmd.core.aval import typeof
from spmd.core.ir import Eqn, Jaxpr
from spmd.lax.slicing import slice_in_dim, slice_p


def sections_of(jaxpr: Jaxpr) -> dict[int, list[int]]:
    """For each slice that is a section, all equations that are sections of its value, by number."""
    found: dict[Any, dict[int, int]] = {}
    for k, eqn in jaxpr.eqns_of(slice_p):
        if (cut := section(eqn)) is not None:
            d, start, size = cut
            found.setdefault((eqn.invars[0], d, size), {}).setdefault(start, k)
    made: dict[int, list[int]] = {}
    for (atom, d, size), starts in found.items():
        if len(starts) > 1 and sorted(starts) == list(range(0, atom.aval.shape[d], size)):
            numbers = [starts[start] for start in sorted(starts)]
            made.update(dict.fromkeys(numbers, numbers))
    return made


def section(eqn: Eqn) -> tuple[int, int, int] | None:
    """The dim along which a slice cuts, its first row and its number of rows; None if several."""
    params, shape = eqn.params, eqn.invars[0].aval.shape
    if set(params["strides"] or (1,)) != {1}:
        return None
    ends = list(zip(params["start_indices"], params["limit_indices"], strict=True))
    dims = [d for d, size in enumerate(shape) if ends[d] != (0, size)]
    if len(dims) != 1:
        return None
    start, stop = ends[dims[0]]
    size = stop - start
    return (dims[0], start, size) if size and shape[dims[0]] % size == start % size == 0 else None


def write_sections(
    x: Any, d: int, count: int, axes: tuple[Any, ...], sizes: Mapping[Any, int]
) -> list[Any]:
    """A device's parts of so many sections, from its part of the value, in order."""
    devices, shape = math.prod(sizes[a] for a in axes), typeof(x).shape
    own = shape[d]
    rows = own // count  # that a device gets of a section
    section_rows = rows * devices

    def along(rows: int, others: Sequence[int]) -> tuple[int, ...]:
        return (*others[:d], rows, *others[d + 1 :])

    zeros, copies = [0] * len(shape), []
    for target in range(devices):
        for k in range(count):
            first = k * section_rows + target * rows
            for source in range(devices):
                held = (source * own, (source + 1) * own)
                if (shared := common(((first, first + rows),), (held,))) is None:
                    continue
                ((low, high),) = shared
                begin, place = along(low - held[0], zeros), along(k * rows + low - first, zeros)
                copies.append(Copy(source, target, begin, place, along(high - low, shape)))
    made = exchange(x, axes, Copies(tuple(copies)), shape)
    return [slice_in_dim(made, k * rows, (k + 1) * rows, 1, d) for k in range(count)]
