"""The table of vector math: elementary functions as code on virtual vectors, for f32 and f64.

Every function takes `Floats` and operands and returns the operand of its result. In f32 errors are
below 2 units of the last place for every argument, in f64 below 4 (docs/accuracy.md has the
measurements); denormals, infinities, NaN and -0.0 are right. `sin`, `cos`, `tan` and `rem` leave a
vector to libm that holds an argument too large for their range reduction.
"""

from __future__ import annotations

from collections.abc import Callable

from spmd.compile.cpu import (
    vectormath_exp,
    vectormath_log,
    vectormath_power,
    vectormath_special,
    vectormath_trig,
)
from spmd.compile.cpu.emit import Emitter
from spmd.compile.cpu.floats import Floats

_FILES = {
    vectormath_exp: "exp exp2 expm1 tanh logistic sinh cosh",
    vectormath_log: "log log1p asinh acosh atanh",
    vectormath_trig: "sin cos tan asin acos atan atan2",
    vectormath_special: "erf erfc erf_inv lgamma digamma",
    vectormath_power: "pow cbrt rem nextafter",
}
VECTOR_FUNCTIONS: dict[str, Callable[..., str]] = {
    name: getattr(module, name) for module, names in _FILES.items() for name in names.split()
}
HAS_BRANCHES = ("sin", "cos", "tan", "rem")
# Quarter turns between a sine and these.
TURNS = {"sin": 0, "cos": 1}


def call_function(e: Emitter, name: str, element: str, *operands: str) -> str:
    """Write a vector function in place, or a call of one copy of it per module.

    A module that uses much vector math shares the copies (`Module.shares_math`): it compiles
    several times faster and runs as fast. Where it has sines and cosines, these share one copy too.
    """
    build, kind = VECTOR_FUNCTIONS[name], e.type(element)
    given = [(kind, operand) for operand in operands]
    if name in TURNS and e.module.joins_waves:
        turn = ("i32", str(TURNS[name]))
        return _call_shared(e, "sin_or_cos", element, vectormath_trig.sin_or_cos, [*given, turn])
    if e.module.shares_math or name in HAS_BRANCHES:
        return _call_shared(e, name, element, build, given)
    return build(Floats(e, element), *operands)


def _call_shared(
    e: Emitter, name: str, element: str, build: Callable[..., str], given: list[tuple[str, str]]
) -> str:
    """Call the copy of a function, which is written if there is none."""
    symbol, kind = f"@{name}_{e.suffix(element)}", e.type(element)
    if symbol not in e.module.functions:
        inner = Emitter(e.module, e.width)
        names = [f"%x{number}" for number in range(len(given))]
        params = ", ".join(f"{of} {name}" for (of, _), name in zip(given, names, strict=True))
        e.module.functions[symbol] = ""
        result = build(Floats(inner, element), *names)
        e.module.functions[symbol] = (
            f"define internal {kind} {symbol}({params}) #0 {{\n{inner.body_text()}\n"
            f"  ret {kind} {result}\n}}"
        )
    operands = ", ".join(f"{of} {operand}" for of, operand in given)
    return e.set(f"call {kind} {symbol}({operands})")
