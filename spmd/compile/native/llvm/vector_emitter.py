"""An emitter of LLVM IR text: numbered values, vectors that turn into scalars at width 1, loops.

Text is written line by line, because building LLVM's objects from Python costs eleven times as
much. All code of a kernel is written against *virtual vectors*: `width` lanes of an element type.
LLVM splits a `<64 x float>` into as many registers as the machine needs, which interleaves
independent work for free. At width 1 the same calls write plain scalar code.

Names depend only on the order of emission, so equal kernels give equal text.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from spmd.base.record import record

# Loop strength reduction would turn the addresses in a loop into pointers of their own, in a tenth
# of LLVM's time, and in half of it where they are many. Loops over blocks of lanes run as fast
# without, so there it is not told what counts; nor in loops over single points with more addresses
# than this. (Few of those gain: a sum over columns 10 %, rows that are gathered 12 %.)
MANY_ADDRESSES = 12


@record
class Target:
    """The facts about the CPU for rendering: register width in bits, and whether it has FMA."""

    vector_bits: int = 128
    fma: bool = False

    @staticmethod
    def from_features(features: str) -> Target:
        """Choose by the features of a processor in LLVM's words: `+avx2,-avx512f,...`."""
        found = {name[1:] for name in features.split(",") if name.startswith("+")}
        if found.issuperset(("avx512f", "avx512bw", "avx512vl", "avx512dq")):
            return Target(512, True)
        if "avx2" in found:
            return Target(256, "fma" in found)
        return Target(128, not found.isdisjoint(("fma", "neon")))


def attributes_text(target: Target) -> str:
    """Return the attribute group #0, which all functions of kernels have."""
    return f"attributes #0 = {{ {attributes_of(target.vector_bits)} }}"


def attributes_of(vector_bits: int) -> str:
    """Return the attributes of functions that compute with vectors of so many bits.

    LLVM's tables for a processor depend on them, and take as long to make as a small module.
    """
    return (
        f'nounwind "prefer-vector-width"="{vector_bits}" "min-legal-vector-width"="{vector_bits}"'
    )


def rounded(value: float, element: str) -> float:
    """The nearest number of an element type."""
    return struct.unpack("<f", struct.pack("<f", value))[0] if element == "float" else value


def float_literal(value: float, element: str) -> str:
    """Write a float constant exactly: LLVM wants the bits of the double, also for `float`."""
    return float_literals([value], element)[0]


def float_literals(values: Sequence[float], element: str) -> list[str]:
    """Write float constants exactly, as `float_literal`."""
    bits = struct.pack(f"<{len(values)}d", *[rounded(value, element) for value in values])
    return [f"0x{word:016X}" for (word,) in struct.iter_unpack("<Q", bits)]


class Module:
    """The declarations that one kernel's text needs besides its own functions.

    With `shares_math` vector functions are called, if the kernel `is_small` where lanes fill
    registers; with `joins_waves` one function serves sines and cosines.
    """

    def __init__(
        self,
        target: Target,
        shares_math: bool = False,
        joins_waves: bool = False,
        is_small: bool = False,
    ):
        self.target = target
        self.shares_math = shares_math
        self.is_small = is_small
        self.joins_waves = joins_waves
        self.declared: dict[str, str] = {}
        self._helpers: dict[str, str] = {}

    def helper(self, text: str) -> str:
        """The name of a function that is private to the module, in whose text it is `@NAME`."""
        return self._helpers.setdefault(text, f"@helper{len(self._helpers)}")

    def declare(self, name: str, signature: str) -> None:
        """Declare an external function or intrinsic once."""
        self.declared.setdefault(name, signature)

    def text(self) -> str:
        """Return the declarations, and the private functions."""
        helpers = [text.replace("@NAME", name) for text, name in self._helpers.items()]
        return "\n".join((*self.declared.values(), *helpers))


class Emitter:
    """Writes the body of one function."""

    def __init__(self, module: Module, width: int):
        self.module = module
        self.width = width
        self.lines: list[str] = []
        self.prologue: list[str] = []
        self.block = "entry"
        self._count = 0
        self._blocks = 0

    @contextmanager
    def at_width(self, width: int) -> Iterator[None]:
        """Write for another number of lanes inside the block."""
        before, self.width = self.width, width
        yield
        self.width = before

    # ---- names, types, constants ----

    def name(self) -> str:
        """Return a fresh value name."""
        self._count += 1
        return f"%v{self._count}"

    def label(self) -> str:
        """Return a fresh block name."""
        self._blocks += 1
        return f"b{self._blocks}"

    def type(self, element: str, width: int | None = None) -> str:
        """Write the type of `width` lanes (the emitter's own unless given) of an element type."""
        width = self.width if width is None else width
        return element if width == 1 else f"<{width} x {element}>"

    def suffix(self, element: str, width: int | None = None) -> str:
        """Write the suffix of an overloaded intrinsic's name."""
        width = self.width if width is None else width
        short = {"float": "f32", "double": "f64", "half": "f16"}.get(element, element)
        return short if width == 1 else f"v{width}{short}"

    def splat_literal(self, element: str, literal: str) -> str:
        """Write a constant in all lanes."""
        return literal if self.width == 1 else f"splat ({element} {literal})"

    def float(self, value: float, element: str) -> str:
        """Write a float constant in all lanes."""
        return self.splat_literal(element, float_literal(value, element))

    def floats(self, values: Sequence[float], element: str) -> list[str]:
        """Write float constants, each in all lanes."""
        return [self.float(value, element) for value in values]

    def int(self, value: int, element: str) -> str:
        """Write an integer constant in all lanes (`i1` too)."""
        bits = int(element[1:])
        value &= (1 << bits) - 1
        if value >> (bits - 1) and bits > 1:
            value -= 1 << bits
        literal = str(value) if bits > 1 else ("true" if value else "false")
        return self.splat_literal(element, literal)

    def lanes(self, values: Sequence[int], element: str) -> str:
        """Write a constant with one integer per lane."""
        if len(values) == 1:
            return str(values[0])
        return "<" + ", ".join(f"{element} {value}" for value in values) + ">"

    # ---- instructions ----

    def put(self, line: str) -> None:
        """Append a line that defines no value."""
        self.lines.append("  " + line)

    def set(self, text: str) -> str:
        """Append an instruction and return the name of its value."""
        name = self.name()
        self.lines.append(f"  {name} = {text}")
        return name

    def binary(self, opcode: str, element: str, x: str, y: str) -> str:
        """Apply a two-operand instruction lane by lane."""
        return self.set(f"{opcode} {self.type(element)} {x}, {y}")

    def compare(self, predicate: str, element: str, x: str, y: str) -> str:
        """Compare lane by lane; integer predicates are LLVM's (slt), float ones too (olt)."""
        opcode = "fcmp" if element in ("float", "double", "half") else "icmp"
        return self.set(f"{opcode} {predicate} {self.type(element)} {x}, {y}")

    def select(self, condition: str, element: str, x: str, y: str) -> str:
        """Choose x where the condition holds, else y."""
        kind, bools = self.type(element), self.type("i1")
        return self.set(f"select {bools} {condition}, {kind} {x}, {kind} {y}")

    def cast(self, opcode: str, source: str, target: str, x: str) -> str:
        """Apply a conversion instruction lane by lane."""
        return self.set(f"{opcode} {self.type(source)} {x} to {self.type(target)}")

    def intrinsic(self, name: str, element: str, *operands: str, extra: str = "") -> str:
        """Call `@llvm.<name>` overloaded on one type; `extra` holds trailing immediates."""
        kind = self.type(element)
        full = f"@llvm.{name}.{self.suffix(element)}"
        params = [kind] * len(operands) + (["i1"] if extra else [])
        self.module.declare(full, f"declare {kind} {full}({', '.join(params)})")
        given = [f"{kind} {operand}" for operand in operands] + ([extra] if extra else [])
        return self.set(f"call {kind} {full}({', '.join(given)})")

    def external(self, symbol: str, element: str, count: int) -> str:
        """Declare an external scalar function of `count` operands; the address of it."""
        params = ", ".join([element] * count)
        self.module.declare(f"@{symbol}", f"declare {element} @{symbol}({params})")
        return f"@{symbol}"

    def call_lanes(self, symbol: str, element: str, *operands: str) -> str:
        """Call an external scalar function (of libm, or a pointer to one) for each lane."""
        if not symbol.startswith(("%", "@")):
            symbol = self.external(symbol, element, len(operands))
        if self.width == 1:
            given = ", ".join(f"{element} {operand}" for operand in operands)
            return self.set(f"call {element} {symbol}({given})")
        kind = self.type(element)
        size = self.width * (4 if element == "float" else 8)
        buffers = [self.alloca(size) for _ in operands]
        for buffer, operand in zip(buffers, operands, strict=True):
            self.put(f"store {kind} {operand}, ptr {buffer}, align 64")
        width = self.width

        def one(lane: str, carried: list[str]) -> list[str]:
            with self.at_width(1):
                places = [self.at(element, buffer, lane) for buffer in buffers]
                scalars = [self.set(f"load {element}, ptr {place}") for place in places]
                result = self.call_lanes(symbol, element, *scalars)
                self.put(f"store {element} {result}, ptr {places[0]}")
            return carried

        self.loop("0", str(width), [], one)
        return self.set(f"load {kind}, ptr {buffers[0]}, align 64")

    def in_registers(
        self, function: Callable[..., str], element: str, lanes: int, *operands: str
    ) -> str:
        """Apply a function to `lanes` lanes at a time and join the results.

        Fewer lanes than that become part of a register.
        """
        if self.width == lanes:
            return function(*operands)
        if self.width < lanes:
            return self._in_one_register(function, element, lanes, *operands)
        parts = []
        for first in range(0, self.width, lanes):
            pieces = [self.piece(element, operand, first, lanes) for operand in operands]
            with self.at_width(lanes):
                parts.append(function(*pieces))
        return self.join(element, lanes, parts)

    def piece(self, element: str, vector: str, first: int, lanes: int) -> str:
        """Take neighbouring lanes out of a vector, from a multiple of their number on."""
        kind, part = self.type(element), self.type(element, lanes)
        name = f"@llvm.vector.extract.{self.suffix(element, lanes)}.{self.suffix(element)}"
        self.module.declare(name, f"declare {part} {name}({kind}, i64)")
        return self.set(f"call {part} {name}({kind} {vector}, i64 {first})")

    def join(self, element: str, lanes: int, parts: Sequence[str]) -> str:
        """Make one vector of parts that have so many lanes each."""
        kind, part = self.type(element), self.type(element, lanes)
        name = f"@llvm.vector.insert.{self.suffix(element)}.{self.suffix(element, lanes)}"
        self.module.declare(name, f"declare {kind} {name}({kind}, {part}, i64)")
        whole = "poison"
        for number, given in enumerate(parts):
            place = f"{part} {given}, i64 {number * lanes}"
            whole = self.set(f"call {kind} {name}({kind} {whole}, {place})")
        return whole

    def _in_one_register(
        self, function: Callable[..., str], element: str, lanes: int, *operands: str
    ) -> str:
        width, narrow, wide = self.width, self.type(element), self.type(element, lanes)
        if width == 1:
            given = [
                self.set(f"insertelement {wide} poison, {element} {operand}, i32 0")
                for operand in operands
            ]
        else:
            mask = f"<{lanes} x i32> {self.lanes([*range(width)] * (lanes // width), 'i32')}"
            given = [
                self.set(f"shufflevector {narrow} {operand}, {narrow} poison, {mask}")
                for operand in operands
            ]
        with self.at_width(lanes):
            result = function(*given)
            if width == 1:
                return self.extract(element, result, 0)
        mask = f"<{width} x i32> {self.lanes(range(width), 'i32')}"
        return self.set(f"shufflevector {wide} {result}, {wide} poison, {mask}")

    def extract(self, element: str, vector: str, lane: int) -> str:
        """Take one lane out of a vector."""
        if self.width == 1:
            return vector
        return self.set(f"extractelement {self.type(element)} {vector}, i32 {lane}")

    def splat(self, element: str, scalar: str) -> str:
        """Copy a scalar value into all lanes."""
        if self.width == 1:
            return scalar
        kind = self.type(element)
        first = self.set(f"insertelement {kind} poison, {element} {scalar}, i32 0")
        zeros = f"<{self.width} x i32> zeroinitializer"
        return self.set(f"shufflevector {kind} {first}, {kind} poison, {zeros}")

    def alloca(self, size_bytes: int) -> str:
        """Reserve 64-byte aligned stack memory in the entry block."""
        name = self.name()
        self.prologue.append(f"  {name} = alloca [{max(size_bytes, 1)} x i8], align 64")
        return name

    def at(self, element: str, pointer: str, index: str) -> str:
        """Address element `index` behind a pointer."""
        if index == "0":
            return pointer
        return self.set(f"getelementptr {element}, ptr {pointer}, i64 {index}")

    # ---- scalar index arithmetic on i64, folding constants ----

    def add_index(self, x: str, y: str) -> str:
        """Add two i64 scalars."""
        if x == "0":
            return y
        if y == "0":
            return x
        if x.isdigit() and y.isdigit():
            return str(int(x) + int(y))
        return self.set(f"add i64 {x}, {y}")

    def mul_index(self, x: str, factor: int) -> str:
        """Multiply an i64 scalar by a constant."""
        if factor == 0 or x == "0":
            return "0"
        if x.isdigit():
            return str(int(x) * factor)
        return x if factor == 1 else self.set(f"mul i64 {x}, {factor}")

    def extend_indices(
        self, bases: Sequence[str], indices: Sequence[str], factors: Sequence[Sequence[int]]
    ) -> list[str]:
        """Add to each i64 scalar the others, each times the factor that it has for this one."""
        return [self._extended(*each, indices) for each in zip(bases, factors, strict=True)]

    def _extended(self, base: str, factors: Sequence[int], indices: Sequence[str]) -> str:
        for x, factor in zip(indices, factors, strict=True):
            base = self.add_index(base, self.mul_index(x, factor))
        return base

    def load_vectors(self, pointer: str, element: str, count: int, align: int) -> list[str]:
        """Read so many vectors of an element type that lie one after the other."""
        type, places = self.type(element), range(0, count * self.width, self.width)
        return [
            self.set(f"load {type}, ptr {self.at(element, pointer, str(k))}, align {align}")
            for k in places
        ]

    # ---- control flow ----

    def start(self, label: str) -> None:
        """Begin a new block."""
        self.lines.append(f"{label}:")
        self.block = label

    def branch(self, label: str) -> None:
        """Jump."""
        self.put(f"br label %{label}")

    def when(self, condition: str, body: Callable[[], None]) -> None:
        """Run `body` only if the scalar i1 holds; it defines nothing used after."""
        inside, after = self.label(), self.label()
        self.put(f"br i1 {condition}, label %{inside}, label %{after}")
        self.start(inside)
        body()
        self.branch(after)
        self.start(after)

    def either(
        self,
        condition: str,
        kinds: Sequence[str],
        body: Callable[[], Sequence[str]],
        otherwise: Sequence[str],
    ) -> tuple[str, ...]:
        """Return the operands of `body` if the scalar i1 holds, else those of `otherwise`.

        `kinds` are their types' texts; `body` runs only if the condition holds.
        """
        before = self.block
        inside, after = self.label(), self.label()
        self.put(f"br i1 {condition}, label %{inside}, label %{after}")
        self.start(inside)
        results, last = body(), self.block
        self.branch(after)
        self.start(after)
        both = zip(kinds, results, otherwise, strict=True)
        return tuple(
            self.set(f"phi {kind} [ {new}, %{last} ], [ {old}, %{before} ]")
            for kind, new, old in both
        )

    def loop(
        self,
        first: str,
        end: str,
        carried: Sequence[tuple[str, str]],
        body: Callable[[str, list[str]], list[str]],
        step: int = 1,
    ) -> list[str]:
        """Run `body(index, carried)` for first <= index < end; **at least once**.

        `carried` holds (type text, initial operand); the body returns the next operands.
        Returns the last ones. The caller knows that the range is not empty. No loop is written for
        code that is known to run once.
        """
        if first.isdigit() and end.isdigit() and int(first) + step >= int(end):
            return body(first, [operand for _, operand in carried])
        head, after, before = self.label(), self.label(), self.block
        self.branch(head)
        self.start(head)
        index = self.name()
        names = [self.name() for _ in carried]
        place = len(self.lines)
        results = body(index, names)
        addresses = sum("getelementptr" in line for line in self.lines[place:])
        hides = addresses > MANY_ADDRESSES if step == 1 else addresses > 0
        counter = self.name() if hides else index
        following = self.set(f"add i64 {counter}, {step}")
        again = self.set(f"icmp slt i64 {following}, {end}")
        last = self.block
        self.put(f"br i1 {again}, label %{head}, label %{after}")
        phis = [f"  {counter} = phi i64 [ {first}, %{before} ], [ {following}, %{last} ]"]
        for name, (kind, initial), result in zip(names, carried, results, strict=True):
            phis.append(f"  {name} = phi {kind} [ {initial}, %{before} ], [ {result}, %{last} ]")
        if hides:
            phis.append(self._hidden(index, counter))
        self.lines[place:place] = phis
        self.start(after)
        return results

    def _hidden(self, index: str, counter: str) -> str:
        """The line that copies the counter to `index`, hidden from LLVM."""
        self.module.declare("@llvm.expect.i64", "declare i64 @llvm.expect.i64(i64, i64)")
        return f"  {index} = call i64 @llvm.expect.i64(i64 {counter}, i64 0)"

    def body_text(self) -> str:
        """Return the whole body, entry block first."""
        return "\n".join(("entry:", *self.prologue, *self.lines))
