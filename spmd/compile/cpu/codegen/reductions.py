"""Accumulators of reductions: how they start, take in a block of lanes, and end as one value.

Every lane accumulates for itself; at the end of a row the lanes are combined in halves. The order
is fixed by the shape of the kernel alone, so results are the same bits for any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spmd.compile.cpu.codegen.conversions import constant_parts, element_of
from spmd.compile.cpu.codegen.scalar_ops import combine
from spmd.compile.kernel.dtypes import DTYPES, kind, to_bits
from spmd.compile.kernel.ir import Reduce
from spmd.compile.kernel.ops import ARG_REDUCERS, identity
from spmd.compile.native.llvm.vector_emitter import Emitter


class Accumulator:
    """One reduction of a pass, at a given number of lanes."""

    def __init__(self, e: Emitter, width: int, reduction: Reduce, operand_dtype: str):
        self.e = e
        self.width = width
        self.reduction = reduction
        self.dtype = operand_dtype
        self.by_position = reduction.op in ARG_REDUCERS
        self.elements = [element_of(operand_dtype)] * (2 if kind(operand_dtype) == "c" else 1)
        if self.by_position:
            self.elements.append(element_of(reduction.dtype))
        self.types = [e.type(element, width) for element in self.elements]
        self.is_float_sum = reduction.op == "add" and kind(operand_dtype) in "fc"

    def initial(self) -> list[str]:
        """Return the operands that the accumulation starts from."""
        with self.e.at_width(self.width):
            op = {"argmax": "max", "argmin": "min"}.get(self.reduction.op, self.reduction.op)
            carrier = DTYPES[self.dtype].carrier
            start = to_bits(identity(op, self.dtype), carrier)
            parts = list(constant_parts(self.e, carrier, start))
            if self.by_position:
                parts.append(self.e.int(0, self.elements[-1]))
            return parts

    def step(
        self,
        state: Sequence[str],
        operand: Sequence[str],
        position: Callable[[str], str],
        mask: str | None,
        backwards: bool = False,
    ) -> list[str]:
        """Take in one operand per lane; where the mask does not hold the state stays.

        Positions grow from one step to the next, unless the row runs `backwards`.
        """
        with self.e.at_width(self.width):
            given = list(operand)
            if self.by_position:
                given.append(position(self.elements[-1]))
            takes = self._is_better if backwards else self._is_greater
            following = self._combine(state, given, takes)
            if mask is None:
                return following
            return [
                self.e.select(mask, element, new, old)
                for element, new, old in zip(self.elements, following, state, strict=True)
            ]

    def finish(self, state: Sequence[str], across_lanes: bool) -> tuple[tuple[str, ...], int]:
        """Return the result's parts and lanes; `across_lanes` combines the lanes into one."""
        width, parts = self.width, list(state)
        while across_lanes and width > 1:
            typed = zip(parts, self.elements, strict=True)
            halves = [self._halves(part, element, width) for part, element in typed]
            width //= 2
            with self.e.at_width(width):
                lows, highs = ([half[k] for half in halves] for k in (0, 1))
                parts = self._combine(lows, highs, self._is_better)
        return (parts[-1],) if self.by_position else tuple(parts), width

    def _halves(self, vector: str, element: str, width: int) -> tuple[str, str]:
        e, kind_text, half = self.e, self.e.type(element, width), width // 2
        if half == 1:
            return (
                e.set(f"extractelement {kind_text} {vector}, i32 0"),
                e.set(f"extractelement {kind_text} {vector}, i32 1"),
            )
        with e.at_width(width):
            return e.piece(element, vector, 0, half), e.piece(element, vector, half, half)

    def _combine(
        self,
        old: Sequence[str],
        new: Sequence[str],
        takes: Callable[[Sequence[str], Sequence[str]], str],
    ) -> list[str]:
        if not self.by_position:
            return list(combine(self.e, self.reduction.op, self.dtype, old, new))
        taken = takes(old, new)
        return [
            self.e.select(taken, element, y, x)
            for element, x, y in zip(self.elements, old, new, strict=True)
        ]

    def _is_greater(self, old: Sequence[str], new: Sequence[str]) -> str:
        """Say whether `new` comes before `old` although it stands behind it."""
        e, element = self.e, self.elements[0]
        largest = self.reduction.op == "argmax"
        if kind(self.dtype) == "f":
            # Unordered comparisons hold for NaN; a first NaN stays.
            beats = e.compare("ugt" if largest else "ult", element, new[0], old[0])
            return e.binary("and", "i1", beats, e.compare("ord", element, old[0], old[0]))
        sign = "s" if kind(self.dtype) == "i" else "u"
        return e.compare(sign + ("gt" if largest else "lt"), element, new[0], old[0])

    def _is_better(self, old: Sequence[str], new: Sequence[str]) -> str:
        """Say whether (value, position) `new` comes before `old`: better, or equal and earlier.

        A NaN is better than any number, and equal to another NaN.
        """
        e, element = self.e, self.elements[0]
        largest = self.reduction.op == "argmax"
        earlier = e.compare("ult", self.elements[1], new[1], old[1])
        if kind(self.dtype) == "f":
            better = e.compare("ogt" if largest else "olt", element, new[0], old[0])
            equal = e.compare("oeq", element, new[0], old[0])
            new_nan = e.compare("uno", element, new[0], new[0])
            old_nan = e.compare("uno", element, old[0], old[0])
            first_nan = e.binary("and", "i1", new_nan, e.compare("ord", element, old[0], old[0]))
            better = e.binary("or", "i1", better, first_nan)
            equal = e.binary("or", "i1", equal, e.binary("and", "i1", new_nan, old_nan))
        else:
            sign = "s" if kind(self.dtype) == "i" else "u"
            better = e.compare(sign + ("gt" if largest else "lt"), element, new[0], old[0])
            equal = e.compare("eq", element, new[0], old[0])
        return e.binary("or", "i1", better, e.binary("and", "i1", equal, earlier))
