"""The choice of axes for one equation, by the seconds that moves and work would take.

The constants are the same on all machines and ranks, so that every rank writes the same program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from spmd.base import dtypes
from spmd.core.aval import ShapedArray
from spmd.core.primitive import Dims, Primitive
from spmd.core.structural import reshape_p
from spmd.lax.conv import conv_general_dilated_p
from spmd.lax.dot import dot_general_p
from spmd.lax.sort import sort_p
from spmd.partition.halos import HALO, Windows, are_far
from spmd.partition.indexing import ROWS, SLICES
from spmd.partition.propagate import Axes, Split
from spmd.partition.rules import COMBINED, KEPT, may_be_uneven, may_split
from spmd.partition.seconds import BYTE, ELEMENT, EXCHANGE, MULTIPLY_ADD
from spmd.partition.shifts import rows_lacking
from spmd.partition.strategies.reshaping import lacking_share
from spmd.partition.strategies.sorting import SORT

# Seconds of the exchanges inside an equation, from the label that is split, the number of parts of
# its dims, and the number of parts of all other dims.
Inside = Callable[[int, int, int], float]


class Choice:
    """The equation whose axes are chosen: labels, sizes, and how operands and results are split.

    `have` are the splits of operands, `wanted` those that propagation decided for the results;
    `closed` are the labels of their dims that have to stay so, `terms` the axes along which readers
    want the terms of a sum, `share` the part of an all_reduce along an axis that is paid for here,
    where other terms of the same sum need it, too; `windows` are those of dims that halos may
    split. The results may be at an `edge` of the program. `free` are, for each operand, the axes
    along which every device has it whole already, and `inside` says what writing itself moves.
    """

    def __init__(
        self,
        prim: Primitive,
        rule: Dims,
        operands: Sequence[ShapedArray],
        results: Sequence[ShapedArray],
        have: Sequence[Split],
        wanted: Sequence[Split],
        closed: frozenset[int],
        sizes: Mapping[object, int],
        *,
        terms: Axes = (),
        share: Mapping[object, float] | None = None,
        windows: Windows | None = None,
        edge: bool = False,
        free: Sequence[frozenset[object]] = (),
        inside: Inside | None = None,
    ):
        self.rule = rule
        self.terms = terms
        self.share = share or {}
        self.prim = prim
        self.windows = {HALO + d: found for d, found in (windows or {}).items()}
        self.edge = edge
        self.inside = inside
        self.free = free or (frozenset(),) * len(operands)
        self.closed = closed
        self.sizes = sizes
        self.operands = list(zip(operands, rule.operands, have, strict=True))
        self.results = list(zip(results, rule.results, wanted, strict=True))
        self.extent: dict[int, list[int]] = {}
        for aval, labels, _ in (*self.operands, *self.results):
            for label, size in zip(labels, aval.shape, strict=True):
                self.extent.setdefault(label, []).append(size)
        self.shared = {label for labels in rule.results for label in labels}
        adds = rule.reduces in ("add", "max", "min")
        has_bools = any(dtypes.is_bool(aval.dtype) for aval in results)
        self.combines = rule.reduces in COMBINED and not (adds and has_bools)
        self.slices = prim in SLICES
        # A result that is larger than the operands together: these are moved before it is summed.
        # The labels of dims that no axis is known to split then may be gathered by readers.
        self.is_outer = prim is dot_general_p and results[0].size > sum(a.size for a in operands)
        self.handed: set[int] = set()
        self.work = self._work(prim)

    def _work(self, prim: Primitive) -> float:
        if prim in KEPT:
            (query, *_), (key, *_), *_ = self.operands
            return MULTIPLY_ADD * query.size * key.shape[2]
        if prim in (dot_general_p, conv_general_dilated_p):
            every = {label: max(found) for label, found in self.extent.items()}
            return MULTIPLY_ADD * math.prod(every.values())
        times = SORT if prim is sort_p else 1
        return (
            times
            * ELEMENT
            * max([a.size for a, _, _ in (*self.operands, *self.results)], default=0)
        )

    def axes(self) -> dict[int, Axes]:
        """For each label the axes that split its dims, no axis twice."""
        chosen: dict[int, set[object]] = {}
        for axis in self.sizes:
            labels = self._labels_with(axis)
            best = min(
                (None, *labels),
                key=lambda label: (self._seconds(axis, label, chosen), label is None),
                default=None,
            )
            if best is not None:
                chosen.setdefault(best, set()).add(axis)
        return {label: self._ordered(label, axes) for label, axes in chosen.items()}

    def _labels_with(self, axis: object) -> list[int]:
        """The labels of dims that an axis splits in an operand, or is to split in a result.

        Where it splits a dim that has to be whole, or that is sliced, those of the operand's other
        dims, too: the axis may be handed on to one of them.
        """
        found: dict[int, None] = {}
        for _, labels, split in (*self.results, *self.operands):
            for label, axes in zip(labels, split, strict=True):
                if axis in axes:
                    moves = self.slices or self.inside is not None
                    is_cut = label in self.windows or (label >= ROWS and moves)
                    fits = label in self.extent and self._fits(label, self.sizes[axis])
                    stays = may_split(self.rule, label) and fits and not is_cut
                    every = (label,) if stays else labels
                    if label not in self.shared and self.is_outer:
                        every = labels
                        self.handed.update(k for k in labels if k not in found)
                    found.update({k: None for k in every if may_split(self.rule, k)})
        return [label for label in found if label in self.shared or self.combines]

    def _seconds(self, axis: object, label: int | None, chosen: Mapping[int, set[object]]) -> float:
        """The cost if an axis splits the dims with a label, or none."""
        n = self.sizes[axis]
        if label is not None:
            count = n * math.prod(self.sizes[a] for a in chosen.get(label, ()))
            if not self._fits(label, count):
                return math.inf
        parts = math.prod(self.sizes[a] for axes in chosen.values() for a in axes)
        seconds = self.work / parts / (1 if label is None else n)
        if label in self.windows:
            seconds += self._halos(label, count, chosen)
        if label is not None and self.prim is reshape_p:
            seconds += self._reshaped(label, count, chosen)
        if self.inside is not None and label is not None:
            seconds += self.inside(label, count, parts)
        for (aval, labels, split), free in zip(self.operands, self.free, strict=True):
            before = _label_of(axis, labels, split)
            after = label if label in labels else None
            if after is None and axis in free:
                continue
            if before is not None and before != after:
                seconds += self._move(aval, labels, chosen, n, scattered=after is not None)
        for aval, labels, split in self.results:
            after = _label_of(axis, labels, split)
            if label in labels and label != after:
                if after is not None or label in self.closed or label in self.handed:
                    seconds += self._move(aval, labels, chosen, n, scattered=after is not None)
            elif label is not None and label not in labels and axis not in self.terms:
                moved = self._move(aval, labels, chosen, n, times=1 if after is not None else 2)
                seconds += self.share.get(axis, 1) * moved
        return seconds

    def _fits(self, label: int, count: int) -> bool:
        """Whether the dims with a label can be split in `count` parts, if need be uneven ones."""
        windows = self.windows.get(label, {})
        far = are_far(windows)
        for window in windows.values():
            if not far and window.exchanges(count)[0] < 0:
                return False
        if not any(size % count for size in self.extent[label]):
            return True
        large = (max if far else min)(self.extent[label]) >= count
        return large and label not in self.closed and may_be_uneven(self.prim, self.rule, label)

    def _halos(self, label: int, count: int, chosen: Mapping[int, set[object]]) -> float:
        """The cost of getting the rows of neighbours that windows read.

        A result at an edge of the program is gathered if its parts have different sizes.
        """
        seconds = 0.0
        others = {k: axes for k, axes in chosen.items() if k != label}
        far = are_far(self.windows[label])
        if far:
            window = next(iter(self.windows[label].values()))
            aval, labels, _ = self.results[0]
            parts = math.prod(self.sizes[a] for n in labels for a in others.get(n, ()))
            rows = rows_lacking(list(self.windows[label].values()), count)
            seconds += EXCHANGE + BYTE * aval.nbytes / window.results * rows / parts
        for k, window in () if far else self.windows[label].items():
            aval, labels, _ = self.operands[k]
            permutes, rows = window.exchanges(count)
            parts = math.prod(self.sizes[a] for n in labels for a in others.get(n, ()))
            seconds += permutes * EXCHANGE + BYTE * aval.nbytes / window.rows * rows / parts
        aval, labels, _ = self.results[0]
        uneven = any(n % count for n, own in zip(aval.shape, labels, strict=True) if own == label)
        if self.edge and uneven:
            seconds += self._move(aval, labels, others, count)
        return seconds

    def _reshaped(self, label: int, count: int, chosen: Mapping[int, set[object]]) -> float:
        """The cost of getting the elements that a part of the result has, and the operand's not.

        A result at an edge of the program is gathered if its parts have different sizes.
        """
        (old, labels, _), (new, made, _) = self.operands[0], self.results[0]
        others = {k: axes for k, axes in chosen.items() if k != label}
        seconds = 0.0
        share = lacking_share(old.shape, new.shape, labels.index(label), count)
        if share:
            parts = math.prod(self.sizes[a] for axes in others.values() for a in axes)
            seconds += EXCHANGE + BYTE * old.nbytes * share / parts
        if self.edge and new.shape[made.index(label)] % count:
            seconds += self._move(new, made, others, count)
        return seconds

    def _move(
        self,
        aval: ShapedArray,
        labels: Sequence[int],
        chosen: Mapping[int, set[object]],
        n: int,
        scattered: bool = False,
        times: int = 1,
    ) -> float:
        """A gather over n devices, or an exchange in which each keeps an n-th.

        An all_reduce moves twice what a gather or a reduce_scatter does.
        """
        parts = math.prod(self.sizes[a] for k in labels for a in chosen.get(k, ()))
        moved = aval.nbytes / parts * (n - 1) / n / (n if scattered else 1)
        return EXCHANGE + BYTE * times * moved

    def _ordered(self, label: int, axes: set[object]) -> Axes:
        """Some axes: first those that a dim has already, in its order, then in the mesh's order."""
        first: Axes = ()
        for _, labels, split in (*self.results, *self.operands):
            for own, held in zip(labels, split, strict=True):
                if own == label and axes.issuperset(held) and len(held) > len(first):
                    first = held
        return first + tuple(a for a in self.sizes if a in axes and a not in first)


def _label_of(axis: object, labels: Sequence[int], split: Split) -> int | None:
    """The label of the dim that an axis splits."""
    for label, axes in zip(labels, split, strict=True):
        if axis in axes:
            return label
    return None
