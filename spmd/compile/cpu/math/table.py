"""The table of vector math: elementary functions as code on virtual vectors, for f32 and f64.

Every function takes `Floats` and operands and returns the operand of its result. In f32 errors are
below 2 units of the last place for every argument, in f64 below 4 (docs/accuracy.md has the
measurements); denormals, infinities, NaN and -0.0 are right. `sin`, `cos`, `tan` and `rem` leave a
vector to libm that holds an argument too large for their range reduction.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import Parameter, signature

from spmd.compile.cpu.math import exp, log, power, special, trig
from spmd.compile.cpu.math.floats import Floats
from spmd.compile.native.llvm.shared_functions import share
from spmd.compile.native.llvm.vector_emitter import Emitter, Module, Target, attributes_text

_FILES = {
    exp: "exp exp2 expm1 tanh logistic sinh cosh",
    log: "log log1p asinh acosh atanh",
    trig: "sin cos tan asin acos atan atan2",
    special: "erf erfc erf_inv lgamma digamma",
    power: "pow cbrt rem nextafter",
}
VECTOR_FUNCTIONS: dict[str, Callable[..., str]] = {
    name: getattr(module, name) for module, names in _FILES.items() for name in names.split()
}
HAS_BRANCHES = ("sin", "cos", "tan", "rem")
# The elements of shared functions that are compiled beforehand (`precompile.py`), and their bytes.
VECTOR_ELEMENTS = {"float": 4, "double": 8}
# Quarter turns between a sine and these.
TURNS = {"sin": 0, "cos": 1}


# Long enough that a call costs nothing beside them.
LONG = ("erf_inv", "lgamma", "digamma")

# Instructions that an operation expands to, where it is more than one.
INSTRUCTIONS = {
    "div": 3.0,
    "sqrt": 5.0,
    "rsqrt": 7.0,
    "exp": 12.0,
    "exp2": 12.0,
    "expm1": 16.0,
    "tanh": 20.0,
    "logistic": 20.0,
    "log": 27.0,
    "log1p": 35.0,
    "sin": 32.0,
    "cos": 32.0,
    "tan": 36.0,
    "erf": 32.0,
    "erfc": 90.0,
    "erf_inv": 120.0,
    "pow": 150.0,
    "sinh": 50.0,
    "cosh": 36.0,
    "atanh": 70.0,
    "asinh": 60.0,
    "acosh": 60.0,
    "asin": 22.0,
    "acos": 22.0,
    "atan": 26.0,
    "atan2": 40.0,
    "cbrt": 40.0,
    "rem": 16.0,
    "nextafter": 10.0,
    "threefry2x32": 75.0,
    "lgamma": 250.0,
    "digamma": 250.0,
}


def call_function(e: Emitter, name: str, element: str, *operands: str) -> str:
    """Write a vector function in place, or a call of the one that all kernels share
    (`native/llvm/shared_functions.py`).

    A module that uses much vector math calls it (`Module.shares_math`): it compiles several times
    faster and runs as fast. A small kernel does so for as many lanes as all kernels have: they are
    compiled already. Where it has sines and cosines, these are one function.
    """
    build, kind = VECTOR_FUNCTIONS[name], e.type(element)
    given = [(kind, operand) for operand in operands]
    if name in TURNS and e.module.joins_waves:
        turn = ("i32", str(TURNS[name]))
        return _call_shared(e, "sin_or_cos", element, trig.sin_or_cos, [*given, turn])
    if e.module.shares_math or name in HAS_BRANCHES or name in LONG or _is_usual(e, element):
        return _call_shared(e, name, element, build, given)
    return build(Floats(e, element), *operands)


def _is_usual(e: Emitter, element: str) -> bool:
    """Whether the module's kernel is small, and its lanes fill registers."""
    bits = 8 * VECTOR_ELEMENTS[element]
    return e.module.is_small and e.width * bits >= e.module.target.vector_bits


def _call_shared(
    e: Emitter, name: str, element: str, build: Callable[..., str], given: list[tuple[str, str]]
) -> str:
    """Call the shared function for the emitter's lanes."""
    kind, types = e.type(element), tuple(of for of, _ in given)
    symbol = _shared(e.module.target, name, e.width, element, build, types)
    e.module.declare(f"@{symbol}", f"declare {kind} @{symbol}({', '.join(types)})")
    operands = ", ".join(f"{of} {operand}" for of, operand in given)
    return e.set(f"call {kind} @{symbol}({operands})")


def shared_functions(target: Target, element: str, width: int) -> list[str]:
    """The symbols of all functions of so many lanes that kernels may share."""
    symbols = []
    kind = Emitter(Module(target), width).type(element)
    for name, build in VECTOR_FUNCTIONS.items():
        given = [p for p in signature(build).parameters.values() if p.default is Parameter.empty]
        count = len(given) - 1  # without the emitter's
        symbols.append(_shared(target, name, width, element, build, (kind,) * count))
    either = trig.sin_or_cos
    symbols.append(_shared(target, "sin_or_cos", width, element, either, (kind, "i32")))
    return symbols


@cache
def _shared(
    target: Target,
    name: str,
    width: int,
    element: str,
    build: Callable[..., str],
    types: tuple[str, ...],
) -> str:
    """Note the function of some lanes among the shared ones; its symbol."""
    module = Module(target)
    inner = Emitter(module, width)
    names = [f"%x{number}" for number in range(len(types))]
    result, kind = build(Floats(inner, element), *names), inner.type(element)
    params = ", ".join(f"{of} {name}" for of, name in zip(types, names, strict=True))
    head = f"define {kind} @SYMBOL({params}) #0 {{"
    text = (head, inner.body_text(), f"  ret {kind} {result}\n}}", module.text())
    return share(f"{name}_{inner.suffix(element)}", "\n".join((*text, attributes_text(target), "")))
