"""Sorting networks between registers: a hundred whole numbers in order without a branch.

The one idea: registers are rows and lanes are columns. A network between whole registers sorts all
columns at once; then neighbouring columns merge, two by two (bitonic: the second one upside down),
until one is left, which lies in memory's order after interleaving the registers. An exchange
between registers is a minimum and a maximum; one between lanes needs a shuffle more.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence

from spmd.base.record import record
from spmd.compile.native.llvm.function_builder import Function, Value
from spmd.compile.native.llvm.vector_emitter import attributes_of
from spmd.compile.native.llvm.vectors import VECTOR_REGISTER, FullVectors, lane_mask, masked_name

# The registers that a network compares, by their number: smaller elements go into the first.
COLUMN_NETWORKS: dict[int, Sequence[tuple[int, int]]] = {
    1: (),
    4: ((0, 2), (1, 3), (0, 1), (2, 3), (1, 2)),
    8: (
        *((0, 2), (1, 3), (4, 6), (5, 7), (0, 4), (1, 5), (2, 6), (3, 7), (0, 1), (2, 3)),
        *((4, 5), (6, 7), (2, 4), (3, 5), (1, 4), (3, 6), (1, 2), (3, 4), (5, 6)),
    ),
}


@record
class Keys(FullVectors):
    """Vectors of signed keys of 32 or 64 bits, as wide as the registers."""

    bits: int
    nbytes_of_vector: int

    @property
    def element(self) -> str:
        """The LLVM type of a key."""
        return f"i{self.bits}"

    @property
    def nbytes(self) -> int:
        """The bytes of a key."""
        return self.bits // 8

    @property
    def lanes(self) -> int:
        """Keys in a vector."""
        return self.nbytes_of_vector // self.nbytes

    @property
    def attributes(self) -> str:
        """Attributes of functions that compute with these vectors."""
        return attributes_of(8 * self.nbytes_of_vector)

    @property
    def largest(self) -> int:
        """The key that no other follows."""
        return (1 << (self.bits - 1)) - 1

    @property
    def least(self) -> int:
        """The key that follows no other: its highest bit."""
        return -1 << (self.bits - 1)

    def declarations(self, *stored: str) -> str:
        """Declarations of the operations on these vectors."""
        vector = self.vector
        extremes = (f"declare {vector} @{self.name(op)}({vector}, {vector})" for op in _EXTREMES)
        return "\n".join((FullVectors.declarations(self, *stored), *extremes))

    def name(self, operation: str) -> str:
        """The name of LLVM's function for an operation on these vectors."""
        return f"llvm.{operation}.v{self.lanes}{self.element}"

    # ---- memory ----

    def load(
        self, f: Function, place: Value, live: Value | None = None, beyond: int | None = None
    ) -> Value:
        """A vector of keys; lanes from `live` on have the key `beyond`, by default the largest."""
        if live is None:
            return f.load(self.vector, place, align=self.nbytes)
        mask = lane_mask(f, self.lanes, live)
        others = f.value(self.vector, self.largest if beyond is None else beyond)
        operands = place, f.value("i32", self.nbytes), mask, others
        return f.call(masked_name("load", self.vector), self.vector, *operands)

    def store(self, f: Function, value: Value, place: Value, live: Value | None = None) -> None:
        """Write a vector of keys, or only the lanes below `live`."""
        if live is None:
            f.store(value, place, align=self.nbytes)
            return
        mask = lane_mask(f, self.lanes, live)
        operands = value, place, f.value("i32", self.nbytes), mask
        f.call(masked_name("store", self.vector), "void", *operands)


_EXTREMES = ("smin", "smax")


def network(keys: Keys, registers: int, name: str, internal: bool = True) -> Function:
    """The function that sorts up to so many registers of keys: `name(place, count)`."""
    params = ["ptr", "i64"]
    attributes = f"{keys.attributes} noinline"
    f = Function(name, "void", params, internal=internal, attributes=attributes)
    place, count = f.params
    sorter = _Sorter(f, keys)
    starts = [keys.lanes * k for k in range(registers)]
    rows = [keys.load(f, f.at(place, s * keys.nbytes), count - s) for s in starts]
    rows = sorter.interleaved(sorter.merged(sorter.columns(rows)))
    for start, row in zip(starts, rows, strict=True):
        keys.store(f, row, f.at(place, start * keys.nbytes), count - start)
    return f


class _Sorter:
    """Writes a network into a function."""

    def __init__(self, f: Function, keys: Keys):
        self.f = f
        self.keys = keys
        self._masks: dict[int, Value] = {}

    def columns(self, rows: Sequence[Value]) -> list[Value]:
        """Sort each lane over the registers."""
        rows = list(rows)
        for i, j in COLUMN_NETWORKS[len(rows)]:
            rows[i], rows[j] = self._extremes(rows[i], rows[j])
        return rows

    def merged(self, rows: list[Value]) -> list[Value]:
        """Merge sorted columns until all of them are one, read lane by lane."""
        width = 2
        while width <= self.keys.lanes:
            rows = self._upside_down(self._opaque(rows), width)
            apart = width // 4
            while apart:
                rows = [self._between_lanes(row, apart) for row in rows]
                apart //= 2
            apart = len(rows) // 2
            while apart:
                for i in range(len(rows)):
                    if not i & apart:
                        rows[i], rows[i + apart] = self._extremes(rows[i], rows[i + apart])
                apart //= 2
            width *= 2
        return self._opaque(rows)

    def interleaved(self, rows: list[Value]) -> list[Value]:
        """Turn registers that are read lane by lane into registers that are read one by one."""
        lanes, half = self.keys.lanes, len(rows) // 2
        for _ in range(len(rows).bit_length() - 1):
            made = []
            for i in range(half):
                for start in (0, lanes // 2):
                    order = [start + lane // 2 + (lane % 2) * lanes for lane in range(lanes)]
                    made.append(self._shuffle(rows[i], rows[i + half], order))
            rows = made
        return rows

    def _upside_down(self, rows: list[Value], width: int) -> list[Value]:
        """Compare the halves of each group of columns, the second one read from its end."""
        order = [lane ^ (width - 1) for lane in range(self.keys.lanes)]
        first = self._lanes_without(width // 2)
        select = self.f.select
        if len(rows) == 1:
            low, high = self._extremes(rows[0], self._shuffle(rows[0], rows[0], order))
            return [select(first, low, high)]
        made = list(rows)
        for i in range(len(rows) // 2):
            other = len(rows) - 1 - i
            low, high = self._extremes(rows[i], self._shuffle(rows[other], rows[other], order))
            made[i], rest = select(first, low, high), select(first, high, low)
            made[other] = self._shuffle(rest, rest, order)
        return made

    def _between_lanes(self, row: Value, apart: int) -> Value:
        order = [lane ^ apart for lane in range(self.keys.lanes)]
        low, high = self._extremes(row, self._shuffle(row, row, order))
        return self.f.select(self._lanes_without(apart), low, high)

    def _extremes(self, a: Value, b: Value) -> tuple[Value, Value]:
        keys = self.keys
        low, high = (self.f.call(keys.name(op), keys.vector, a, b) for op in _EXTREMES)
        return low, high

    def _shuffle(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        order = ", ".join(f"i32 {lane}" for lane in lanes)
        pair = f"{self.keys.vector} {a.text}, {self.keys.vector} {b.text}"
        return self.f.emit(
            self.keys.vector, f"shufflevector {pair}, <{self.keys.lanes} x i32> <{order}>"
        )

    def _opaque(self, rows: list[Value]) -> list[Value]:
        """The same registers, whose history is hidden from LLVM.

        It would go back through all shuffles to look for fewer, and finds none: a quarter of the
        time of compiling.
        """
        vector, register = self.keys.vector, VECTOR_REGISTER.get(platform.machine())
        if register is None:
            return rows
        hide = f'call {vector} asm "", "={register},0"'
        return [self.f.emit(vector, f"{hide}({vector} {row.text})") for row in rows]

    def _lanes_without(self, bit: int) -> Value:
        """A mask of the lanes whose number is without a bit.

        The bit is hidden from LLVM: it would look for shuffles that do what a mask does at once,
        which takes three fifths of the time of compiling.
        """
        found = self._masks.get(bit)
        if found is None:
            f, lanes = self.f, self.keys.lanes
            bits = sum(1 << lane for lane in range(lanes) if not lane & bit)
            # Registers of general use begin at a byte.
            word = f.opaque(f.value(f"i{max(lanes, 8)}", bits))
            word = word if lanes >= 8 else f.convert("trunc", word, f"i{lanes}")
            found = self._masks[bit] = f.convert("bitcast", word, self.keys.mask)
        return found
