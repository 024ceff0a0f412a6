"""The code of one thread under construction: registers, operands, the environment.

PTX registers are stack slots, which LLVM's passes turn into its own registers. Operands have no
type of their own in PTX: the instruction says how it reads and writes them.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

from spmd.compile.cuda.emulator.layout import INDEX, Mode, place
from spmd.compile.cuda.emulator.ptx import Instruction
from spmd.compile.cuda.emulator.types import UnknownPtxError, llvm_type, width
from spmd.compile.native.llvm.function_builder import Function, Operand, Value

_INTEGER = re.compile(r"^-?(0[xX][0-9a-fA-F]+|\d+)U?$")
_SPECIAL = {
    "%ctaid.x": "block", "%ntid.x": "block_x", "%ntid.y": "block_y", "%nctaid.x": "grid",
}  # fmt: skip
# These have no third dimension, and grids only one: `launch.Launch` has no more.
_ZEROS = ("%tid.z", "%ctaid.y", "%ctaid.z")
_ONES = ("%ntid.z", "%nctaid.y", "%nctaid.z")


class Thread:
    """A thread's code: what the translations of instructions read and write.

    `f` is the LLVM function; its first parameters are the environment and the thread's x and y.
    """

    def __init__(self, f: Function, mode: Mode):
        self.f = f
        self.mode = mode
        self.environment, self.x, self.y = f.params[:3]
        self.number = self.x + self.y * self.word("block_x", "i32")
        self.registers: dict[str, tuple[Value, str]] = {}
        # Addresses by name: tables, local memory, shared memory.
        self.symbols: dict[str, Callable[[], Value]] = {}
        # Memory for parameters, by name.
        self.slots: dict[str, Value] = {}
        # The carry flag of add.cc and its like.
        self.carry = f.var("i1", 0)
        # (space, whether it writes, bytes, place) of each access, where accesses are counted.
        self.accesses: list[tuple[str, bool, int, int]] = []
        self.place = 0

    def at(self, instruction: Instruction) -> None:
        """Note which instruction the following code is for."""
        self.place = place(instruction.line, instruction.called_at)

    # ---- values --------------------------------------------------------------------------------

    def constant(self, type: str, number: int | float) -> Value:
        """A constant of an LLVM type."""
        return self.f.value(type, number)

    def word(self, name: str, type: str = "i64") -> Value:
        """A word of the environment, which only the launch and the scheduler change."""
        return self.f.load(type, self.environment, 8 * INDEX[name])

    def declare(self, name: str, ptx: str) -> None:
        """A new register, whatever had the name before."""
        type = llvm_type(ptx)
        self.registers[name] = self.f.stack(type), type

    def read(self, operand: str, type: str) -> Value:
        """An operand as a value of an LLVM type."""
        f = self.f
        if found := self.registers.get(operand):
            slot, has = found
            return self.cast(f.load(has, slot), type)
        if operand.startswith(("0f", "0F", "0d", "0D")):
            return self.cast(_float_constant(f, operand), type)
        if _INTEGER.match(operand):
            number = int(operand.rstrip("U"), 0)
            if type == "i1":
                return self.constant("i1", number)
            bits = width(type)
            return self.cast(Value(f, f"i{bits}", str(number & (1 << bits) - 1)), type)
        if operand in self.symbols:
            return self.cast(self.symbols[operand](), type)
        return self.cast(self._special(operand), type)

    def write(self, name: str, value: Value, signed: bool = False) -> None:
        """Set a register; a wider one takes the value with zeros above it, or its sign."""
        if name == "_":
            return
        slot, type = self.registers[name]
        self.f.store(self.cast(value, type, signed), slot)

    def cast(self, value: Value, type: str, signed: bool = False) -> Value:
        """The same bits as another type, cut off or filled up where it has another width."""
        f = self.f
        if value.type == type:
            return value
        has, wanted = width(value.type), width(type)
        if has == wanted:
            return f.convert("bitcast", value, type)
        bits = value if value.type[0] == "i" else f.convert("bitcast", value, f"i{has}")
        how = "trunc" if has > wanted else "sext" if signed else "zext"
        return self.cast(f.convert(how, bits, f"i{wanted}"), type)

    def choose(self, condition: Value, left: Operand, right: Operand) -> Value:
        """`left` where the condition holds, else `right`."""
        return self.f.select(condition, left, right)

    def compare(self, how: str, left: Value, right: Operand) -> Value:
        """`icmp` or `fcmp` by LLVM's name of the comparison."""
        kind = "fcmp" if left.type in ("half", "float", "double") else "icmp"
        other = self.f.value(left.type, right)
        return self.f.emit("i1", f"{kind} {how} {left.type} {left.text}, {other.text}")

    def intrinsic(self, name: str, *operands: Value) -> Value:
        """An LLVM intrinsic whose result and operands have one type."""
        type = operands[0].type
        suffix = {"float": "f32", "double": "f64", "half": "f16"}.get(type, type)
        return self.f.call(f"llvm.{name}.{suffix}", type, *operands)

    def _special(self, name: str) -> Value:
        f = self.f
        if name == "%tid.x":
            return self.x
        if name == "%tid.y":
            return self.y
        if name in _SPECIAL:
            return self.word(_SPECIAL[name], "i32")
        if name in _ZEROS or name in _ONES:
            return self.constant("i32", int(name in _ONES))
        if name == "%laneid":
            return self.number & 31
        if name == "%warpid":
            return f.emit("i32", f"lshr i32 {self.number.text}, 5")
        if name == "WARP_SZ":
            return self.constant("i32", 32)
        raise UnknownPtxError(f"the operand {name}")


def _float_constant(f: Function, text: str) -> Value:
    """`0f3F800000` and `0d3FF0000000000000`: the bits of a number."""
    bits = int(text[2:], 16)
    if text[1] in "dD":
        return Value(f, "double", f"0x{bits:016X}")
    (single,) = struct.unpack("<f", struct.pack("<I", bits))
    if single != single:  # a conversion would make it quiet
        return f.emit("float", f"bitcast i32 {bits} to float")
    return Value(f, "float", f"0x{struct.unpack('<Q', struct.pack('<d', single))[0]:016X}")
