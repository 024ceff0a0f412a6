"""The register tile of matrix products as assembly, for x86-64 with AVX-512 or AVX2.

The one idea: of a tile only the choice of registers is left to decide. LLVM takes a hundred passes
and 7 to 14 ms for that, so it is given the instructions; its assembler takes half a millisecond.
The first product of a machine waits for that, and so does every program with a new kind of tile.

It does the operations of `tile_ir` one for one, so that the bits are equal; other processors use
`tile_ir`. A step of the loop has no time for two loads of a B that all rows of a tile need, nor of
the elements of A that all its columns need: the fewer of both stay in registers for the step.

Formulas: System V Application Binary Interface, AMD64 Architecture Processor Supplement, 3.2.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from spmd.base.record import record
from spmd.compile.native.llvm.modules import ASSEMBLY
from spmd.compile.native.llvm.target import Host

# The registers that point to rows of A; the first has the argument already. Those from the fourth
# on belong to the caller.
_LINES = ("rdi", "rax", "r11", "rbx", "rbp", "r12", "r13", "r14")
_KEPT = frozenset(("rbx", "rbp", "r12", "r13", "r14", "r15"))
# Registers of the other arguments: bytes between rows of A and between its k; B, bytes between
# its k; the number of k that are left.
_A_ROW, _A_K, _B, _B_K, _LEFT = "rsi", "rdx", "rcx", "r8", "r9"
# How far the loop has come in all rows of A; the rows of the tile before and after it.
_ALONG = _ROWS = "r10"
# The register of C's rows, once those of A are known.
_C = "rsi"
# The place of the mask, where masks lie in memory: tiles are no higher than six rows there.
_MASK = "r14"
# The arguments on the stack, from the return address on.
_STACKED = ("c", "c_row", "rows", "columns", "accumulate")


@cache
def can_assemble(machine: Host) -> bool:
    """Whether tiles for a processor are written here, for the calls of this system."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or not machine.has("fma"):
        return False
    return machine.vector_bytes == 32 or (machine.vector_bytes == 64 and machine.has("bmi2"))


@record
class Shape:
    """A register tile: so many rows and vectors of C, and k of a round; see `tile_ir.Tile`."""

    symbol: str
    nbytes: int  # of an element
    vector_bytes: int
    rows: int
    width: int
    masked: bool
    steps: int

    @property
    def lanes(self) -> int:
        """Elements in a vector."""
        return self.vector_bytes // self.nbytes

    def text(self) -> str:
        """The module: LLVM IR that is nothing but assembly."""
        writer = _Wide(self) if self.vector_bytes == 64 else _Narrow(self)
        lines = (f'module asm "{line}"' for line in writer.lines())
        return "\n".join((ASSEMBLY, *lines, ""))


class _Writer:
    """The instructions of one tile, in the order of the assembler of Unix: targets come last."""

    # The name of a vector register, without its number.
    register: str

    def __init__(self, shape: Shape):
        self.shape = shape
        self.sums = [
            [self.vector(row * shape.width + i) for i in range(shape.width)]
            for row in range(shape.rows)
        ]
        self._free = shape.rows * shape.width
        self.kind = "s" if shape.nbytes == 4 else "d"
        kept = [r for r in (*_LINES[: shape.rows], *self.used()) if r in _KEPT]
        self.kept = list(dict.fromkeys(kept))

    # ---- differences between instruction sets ----

    def used(self) -> Sequence[str]:
        """Registers beside those of rows."""
        return ()

    def prepare_mask(self) -> Iterator[str]:
        """Make the mask of the last vector, while all registers are free but those of arguments."""
        raise NotImplementedError

    def load_masked(self, place: str, target: str) -> Iterator[str]:
        """Read the last vector."""
        raise NotImplementedError

    def store_masked(self, source: str, place: str) -> Iterator[str]:
        """Write the last vector."""
        raise NotImplementedError

    def zero(self, register: str) -> str:
        """Set a sum to zero."""
        raise NotImplementedError

    def constants(self) -> Iterator[str]:
        """The lines behind the code."""
        return iter(())

    # ---- names ----

    def vector(self, number: int) -> str:
        """A vector register."""
        return f"%{self.register}{number}"

    def argument(self, name: str) -> str:
        """The place of an argument on the stack."""
        return f"{8 * (1 + len(self.kept) + _STACKED.index(name))}(%rsp)"

    def label(self, name: str) -> str:
        """A label of this tile; modules may have several."""
        return f".L{self.shape.symbol}_{name}"

    def is_cut(self, i: int) -> bool:
        """Whether a vector is the last one of a masked tile."""
        return self.shape.masked and i == self.shape.width - 1

    # ---- the function ----

    def lines(self) -> Iterator[str]:
        """All of it."""
        symbol = self.shape.symbol
        yield from (".text", f".globl {symbol}", ".p2align 4", f".type {symbol},@function")
        yield f"{symbol}:"
        yield from (f"push %{register}" for register in self.kept)
        if self.shape.masked:
            yield from self.prepare_mask()
        yield from self._begin()
        yield from self._sum()
        yield from self._finish()
        yield from (f"pop %{register}" for register in reversed(self.kept))
        yield from ("vzeroupper", "ret", f".size {symbol}, .-{symbol}")
        yield from self.constants()

    def _begin(self) -> Iterator[str]:
        """Find the rows of A, the last again for those that are missing; fetch C; clear the sums.

        C is on its way while the sums are made: at the end all of it is wanted at once.
        """
        yield f"mov {self.argument('rows')}, %{_ROWS}"
        lines = _LINES[: self.shape.rows]
        for row in range(1, self.shape.rows):
            before, line = lines[row - 1], lines[row]
            yield f"lea (%{before},%{_A_ROW}), %{line}"
            yield f"cmp ${row + 1}, %{_ROWS}"
            yield f"cmovl %{before}, %{line}"
        yield from self._each_row("fetched", lambda row, i, place: iter((f"prefetchw {place}",)))
        yield from (self.zero(total) for sums in self.sums for total in sums)

    def _each_row(self, end: str, act: Callable[[int, int, str], Iterator[str]]) -> Iterator[str]:
        """The instructions of `act` for each vector of C, in the rows that exist."""
        yield f"mov {self.argument('c')}, %{_C}"
        for row in range(self.shape.rows):
            if row:
                yield f"cmp ${row}, %{_ROWS}"
                yield f"jle {self.label(end)}"
                yield f"add {self.argument('c_row')}, %{_C}"
            for i in range(self.shape.width):
                yield from act(row, i, f"{i * self.shape.vector_bytes}(%{_C})")
        yield f"{self.label(end)}:"

    def _sum(self) -> Iterator[str]:
        """The loop along k."""
        steps = self.shape.steps
        yield f"xor %{_ALONG}, %{_ALONG}"
        yield f"test %{_LEFT}, %{_LEFT}"
        yield f"je {self.label('summed')}"
        yield ".p2align 4"
        yield f"{self.label('round')}:"
        for _ in range(steps):
            yield from self._step()
            yield f"add %{_A_K}, %{_ALONG}"
            yield f"add %{_B_K}, %{_B}"
        yield f"sub ${steps}, %{_LEFT}"
        yield f"jne {self.label('round')}"
        yield f"{self.label('summed')}:"

    def _step(self) -> Iterator[str]:
        """All multiply-adds of one k."""
        shape = self.shape
        fused = f"vfmadd231p{self.kind}"
        if shape.rows < shape.width:
            elements = [self.vector(self._free + row) for row in range(shape.rows)]
            part = self.vector(self._free + shape.rows)
            yield from (self._element(row, to) for row, to in enumerate(elements))
            for i in range(shape.width):
                yield from self._part_of_b(i, part)
                for row, element in enumerate(elements):
                    yield f"{fused} {part}, {element}, {self.sums[row][i]}"
            return
        parts = [self.vector(self._free + i) for i in range(shape.width)]
        element = self.vector(self._free + shape.width)
        for i, part in enumerate(parts):
            yield from self._part_of_b(i, part)
        for row, sums in enumerate(self.sums):
            yield self._element(row, element)
            for part, total in zip(parts, sums, strict=True):
                yield f"{fused} {part}, {element}, {total}"

    def _element(self, row: int, target: str) -> str:
        return f"vbroadcasts{self.kind} (%{_LINES[row]},%{_ALONG}), {target}"

    def _part_of_b(self, i: int, target: str) -> Iterator[str]:
        place = f"{i * self.shape.vector_bytes}(%{_B})"
        if self.is_cut(i):
            return self.load_masked(place, target)
        return iter((f"vmovup{self.kind} {place}, {target}",))

    def _finish(self) -> Iterator[str]:
        """Write C, or add to it."""
        yield f"mov {self.argument('rows')}, %{_ROWS}"
        yield f"cmpq $0, {self.argument('accumulate')}"
        yield f"je {self.label('added')}"
        yield from self._each_row("added", self._add)
        yield from self._each_row("written", self._write)

    def _add(self, row: int, i: int, place: str) -> Iterator[str]:
        total = self.sums[row][i]
        if self.is_cut(i):
            found = self.vector(self._free)
            yield from self.load_masked(place, found)
            place = found
        yield f"vaddp{self.kind} {place}, {total}, {total}"

    def _write(self, row: int, i: int, place: str) -> Iterator[str]:
        total = self.sums[row][i]
        if self.is_cut(i):
            return self.store_masked(total, place)
        return iter((f"vmovup{self.kind} {total}, {place}",))


class _Wide(_Writer):
    """AVX-512: a mask is a register of its own, and part of an instruction."""

    register = "zmm"

    def prepare_mask(self) -> Iterator[str]:
        before = (self.shape.width - 1) * self.shape.lanes
        yield f"mov {self.argument('columns')}, %rax"
        yield f"sub ${before}, %rax"
        yield "mov $-1, %r10d"
        yield "bzhi %eax, %r10d, %r10d"
        yield "kmovw %r10d, %k1"

    def load_masked(self, place: str, target: str) -> Iterator[str]:
        yield f"vmovup{self.kind} {place}, {target} {{%k1}} {{z}}"

    def store_masked(self, source: str, place: str) -> Iterator[str]:
        yield f"vmovup{self.kind} {source}, {place} {{%k1}}"

    def zero(self, register: str) -> str:
        return f"vpxord {register}, {register}, {register}"


class _Narrow(_Writer):
    """AVX2: a mask is a vector, and there is no register left for it.

    It is read, from a row of ones before a row of zeros, where it is needed.
    """

    register = "ymm"

    def used(self) -> Sequence[str]:
        return (_MASK,) if self.shape.masked else ()

    @property
    def _table(self) -> str:
        return self.label("ones")

    def prepare_mask(self) -> Iterator[str]:
        shape = self.shape
        yield f"mov ${shape.width * shape.lanes}, %eax"
        yield f"sub {self.argument('columns')}, %rax"
        yield f"lea {self._table}(%rip), %{_MASK}"
        yield f"lea (%{_MASK},%rax,{shape.nbytes}), %{_MASK}"

    def load_masked(self, place: str, target: str) -> Iterator[str]:
        yield f"vmovup{self.kind} (%{_MASK}), {target}"
        yield f"vmaskmovp{self.kind} {place}, {target}, {target}"

    def store_masked(self, source: str, place: str) -> Iterator[str]:
        mask = self.vector(self._free)
        yield f"vmovup{self.kind} (%{_MASK}), {mask}"
        yield f"vmaskmovp{self.kind} {source}, {mask}, {place}"

    def zero(self, register: str) -> str:
        return f"vxorp{self.kind} {register}, {register}, {register}"

    def constants(self) -> Iterator[str]:
        if self.shape.masked:
            yield ".section .rodata,\\22a\\22,@progbits"
            yield f"{self._table}:"
            yield f".fill {self.shape.vector_bytes}, 1, 255"
            yield f".zero {self.shape.vector_bytes}"
            yield ".text"
