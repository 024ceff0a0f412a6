"""Approximate instructions: ex2, lg2, sin, cos, tanh, reciprocals and roots.

A GPU's result may differ from the exact one by a bound that the PTX manual states. Checked mode
adds an error up to that bound, which depends on the operand and the launch's seed: code whose
results hang on the bits of one GPU, or of a CPU's library, is found. Plain mode rounds the exact
result. PTX ISA, section 9.7.3: "approx" of each instruction.
"""

from __future__ import annotations

from collections.abc import Callable

from spmd.base.record import record
from spmd.compile.cuda.emulator.floats import arithmetic, flushed
from spmd.compile.cuda.emulator.native_functions import NOISE
from spmd.compile.cuda.emulator.ptx import Instruction
from spmd.compile.cuda.emulator.thread import Thread
from spmd.compile.cuda.emulator.types import UnknownPtxError, is_type
from spmd.compile.native.llvm.function_builder import Value

_ULP = 2.0**-23
# Half of the last place of a float goes into the last rounding.
_ROUNDING = 2.0**-24


@record
class Bound:
    """How far from the exact result: relative to it, or absolute where that is more."""

    relative: float
    absolute: float = 0.0


BOUNDS = {
    "ex2": Bound(2 * _ULP),
    "lg2": Bound(2.0**-22, 2.0**-22),
    "sin": Bound(0.0, 2.0**-20.5),
    "cos": Bound(0.0, 2.0**-20.5),
    "tanh": Bound(2.0**-11),
    "rcp": Bound(_ULP),
    "rsqrt": Bound(2.0**-22.9),
    "sqrt": Bound(2.0**-23),
    "div": Bound(2 * _ULP),
}
# rcp.approx.ftz.f64 and rsqrt.approx.ftz.f64 are "gross": 20 bits, and the lower 32 bits are zero.
# rsqrt.approx.f64 is software that ptxas puts in, good to a few of the last places.
_GROSS = 2.0**-20


def approximate(t: Thread, i: Instruction) -> None:
    """One of `BOUNDS`."""
    name, ptx = i.opcode[0], i.opcode[-1]
    if ptx == "f64":
        _doubles(t, i)
        return
    if ptx != "f32":
        raise UnknownPtxError(str(i))
    f = t.f
    operands = [flushed(t, i, t.read(each, "float")) for each in i.operands[1:]]
    exact = _exact(t, name, [f.convert("fpext", x, "double") for x in operands])
    if t.mode == "checked":
        disturbed = _disturbed(t, exact, operands, BOUNDS[name])
        # NVIDIA's own functions of doubles (tanh, erf) make powers of two with it.
        whole = operands[0].equals(t.intrinsic("trunc", operands[0]))
        exact = t.choose(whole, exact, disturbed) if name == "ex2" else disturbed
    t.write(i.operands[0], flushed(t, i, f.convert("fptrunc", exact, "float")))


def _exact(t: Thread, name: str, x: list[Value]) -> Value:
    one = t.constant("double", 1.0)
    if name in ("rcp", "div"):
        return (one if name == "rcp" else x[0]) // x[-1]
    if name in ("sqrt", "rsqrt"):
        root = t.intrinsic("sqrt", x[0])
        return root if name == "sqrt" else one // root
    library = {"ex2": "exp2", "lg2": "log2"}.get(name, name)
    return t.f.call(library, "double", x[0])


def _disturbed(t: Thread, exact: Value, operands: list[Value], bound: Bound) -> Value:
    """The exact result with an error within the bound; zeros and infinities are exact."""
    noise = _noise(t, [t.cast(x, "i32") for x in operands])
    room = t.intrinsic("fabs", exact) * max(bound.relative - _ROUNDING, 0.0)
    if bound.absolute:
        room = t.intrinsic("maxnum", room, t.constant("double", bound.absolute - _ROUNDING))
    exactly = exact.equals(0.0) | (t.intrinsic("fabs", exact)).equals(float("inf"))
    return t.choose(exactly, exact, exact + room * noise)


def _noise(t: Thread, bits: list[Value]) -> Value:
    """A number between -1 and 1 that depends on all these bits and the seed."""
    key = t.word("seed")
    for each in bits:
        key = (key ^ t.cast(each, "i64")) * 0x9E3779B1
    return t.f.call(NOISE, "double", key)


def _doubles(t: Thread, i: Instruction) -> None:
    """rcp and rsqrt of doubles."""
    name, f = i.opcode[0], t.f
    if name not in ("rcp", "rsqrt"):
        raise UnknownPtxError(str(i))
    x = t.read(i.operands[1], "double")
    if "ftz" not in i.opcode:
        t.write(i.operands[0], _exact(t, name, [x]))
        return
    x = t.cast(t.cast(x, "i64") & -(1 << 32), "double")
    small = t.intrinsic("fabs", x) < 2.0**-1022
    x = t.choose(small, t.intrinsic("copysign", t.constant("double", 0.0), x), x)
    exact = _exact(t, name, [x])
    if t.mode == "checked":
        high = t.cast(f.emit("i64", f"lshr i64 {t.cast(x, 'i64').text}, 32"), "i32")
        exact = _disturbed(t, exact, [t.cast(high, "float")], Bound(_GROSS))
    t.write(i.operands[0], t.cast(t.cast(exact, "i64") & -(1 << 32), "double"))


def is_approximate(opcode: tuple[str, ...]) -> bool:
    """Whether an instruction has no one right result."""
    return opcode[0] in BOUNDS and ("approx" in opcode or "full" in opcode)


def either(t: Thread, i: Instruction) -> None:
    """`rcp`, `sqrt`, `div`, ...: which of them are rounded says the opcode."""
    assert is_type(i.opcode[-1])
    (approximate if is_approximate(i.opcode) else arithmetic)(t, i)


HANDLERS: dict[str, Callable[[Thread, Instruction], None]] = dict.fromkeys(BOUNDS, either)
