"""The special cases of the array API standard's elementwise functions, as a table.

A line is a function and its cases, `operands -> result`, separated by `|`. Operands are words for
classes of numbers (`CLASSES`), results are words for values. Of complex functions, an operand is a
real and an imaginary part, and so is a result; `~` before a part says that its sign is open.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

REAL = """
abs: nan -> nan | -0 -> +0 | -inf -> +inf | neg -> |x1|
acos: nan -> nan | >1 -> nan | <-1 -> nan | 1 -> +0
acosh: nan -> nan | <1 -> nan | 1 -> +0 | +inf -> +inf
add: nan any -> nan | any nan -> nan | +inf -inf -> nan | -inf +inf -> nan | +inf +inf -> +inf
add: -inf -inf -> -inf | +inf finite -> +inf | -inf finite -> -inf | finite +inf -> +inf
add: finite -inf -> -inf | -0 -0 -> -0 | -0 +0 -> +0 | +0 -0 -> +0 | +0 +0 -> +0
add: 0 nonzero -> x2 | nonzero 0 -> x1
asin: nan -> nan | >1 -> nan | <-1 -> nan | +0 -> +0 | -0 -> -0
asinh: nan -> nan | +0 -> +0 | -0 -> -0 | +inf -> +inf | -inf -> -inf
atan: nan -> nan | +0 -> +0 | -0 -> -0 | +inf -> pi/2 | -inf -> -pi/2
atan2: nan any -> nan | any nan -> nan | >0 0 -> pi/2 | +0 >0 -> +0 | +0 +0 -> +0 | +0 -0 -> pi
atan2: +0 <0 -> pi | -0 >0 -> -0 | -0 +0 -> -0 | -0 -0 -> -pi | -0 <0 -> -pi | <0 0 -> -pi/2
atan2: pos +inf -> +0 | pos -inf -> pi | neg +inf -> -0 | neg -inf -> -pi | +inf finite -> pi/2
atan2: -inf finite -> -pi/2 | +inf +inf -> pi/4 | +inf -inf -> 3pi/4 | -inf +inf -> -pi/4
atan2: -inf -inf -> -3pi/4
atanh: nan -> nan | <-1 -> nan | >1 -> nan | -1 -> -inf | 1 -> +inf | +0 -> +0 | -0 -> -0
ceil: +inf -> +inf | -inf -> -inf | +0 -> +0 | -0 -> -0 | nan -> nan | integer -> x1
copysign: any <0 -> -|x1| | any -0 -> -|x1| | any +0 -> |x1| | any >0 -> |x1|
cos: nan -> nan | 0 -> 1 | inf -> nan
cosh: nan -> nan | 0 -> 1 | inf -> +inf
divide: nan any -> nan | any nan -> nan | inf inf -> nan | 0 0 -> nan | +0 >0 -> +0 | -0 >0 -> -0
divide: +0 <0 -> -0 | -0 <0 -> +0 | >0 +0 -> +inf | >0 -0 -> -inf | <0 +0 -> -inf
divide: <0 -0 -> +inf | +inf pos -> +inf | +inf neg -> -inf | -inf pos -> -inf | -inf neg -> +inf
divide: pos +inf -> +0 | pos -inf -> -0 | neg +inf -> -0 | neg -inf -> +0
divide: pos pos -> positive | neg neg -> positive | pos neg -> negative | neg pos -> negative
equal: nan any -> False | any nan -> False | +inf +inf -> True | -inf -inf -> True | 0 0 -> True
equal: +inf -inf -> False | 1 1 -> True | pos neg -> False
exp: nan -> nan | 0 -> 1 | +inf -> +inf | -inf -> +0
expm1: nan -> nan | +0 -> +0 | -0 -> -0 | +inf -> +inf | -inf -> -1
floor: +inf -> +inf | -inf -> -inf | +0 -> +0 | -0 -> -0 | nan -> nan | integer -> x1
floor_divide: nan any -> nan | any nan -> nan | inf inf -> nan | 0 0 -> nan | +0 >0 -> +0
floor_divide: -0 >0 -> -0 | +0 <0 -> -0 | -0 <0 -> +0 | >0 +0 -> +inf | >0 -0 -> -inf
floor_divide: <0 +0 -> -inf | <0 -0 -> +inf | +inf pos -> +inf | +inf neg -> -inf
floor_divide: -inf pos -> -inf | -inf neg -> +inf | pos +inf -> +0 | pos -inf -> -0
floor_divide: neg +inf -> -0 | neg -inf -> +0 | pos pos -> positive | neg neg -> positive
floor_divide: pos neg -> negative | neg pos -> negative
hypot: inf any -> +inf | any inf -> +inf | 0 finite -> |x2| | finite 0 -> |x1| | finite nan -> nan
hypot: nan nan -> nan | nan finite -> nan
isfinite: inf -> False | nan -> False | finite -> True
isinf: inf -> True | nan -> False | finite -> False
isnan: nan -> True | inf -> False | finite -> False
log: nan -> nan | <0 -> nan | 0 -> -inf | 1 -> +0 | +inf -> +inf
log1p: nan -> nan | <-1 -> nan | -1 -> -inf | -0 -> -0 | +0 -> +0 | +inf -> +inf
log2: nan -> nan | <0 -> nan | 0 -> -inf | 1 -> +0 | +inf -> +inf
log10: nan -> nan | <0 -> nan | 0 -> -inf | 1 -> +0 | +inf -> +inf
logaddexp: nan any -> nan | any nan -> nan | +inf number -> +inf | number +inf -> +inf
maximum: nan any -> nan | any nan -> nan
minimum: nan any -> nan | any nan -> nan
multiply: nan any -> nan | any nan -> nan | inf 0 -> nan | 0 inf -> nan | pos pos -> positive
multiply: neg neg -> positive | pos neg -> negative | neg pos -> negative | +inf +inf -> +inf
multiply: -inf -inf -> +inf | +inf -inf -> -inf | +inf pos -> +inf | +inf neg -> -inf
multiply: pos -inf -> -inf | neg -inf -> +inf | -0 pos -> -0 | -0 neg -> +0
nextafter: nan any -> nan | any nan -> nan | +0 -0 -> -0 | -0 +0 -> +0 | 1 1 -> 1
not_equal: nan any -> True | any nan -> True | +inf -inf -> True | -inf +inf -> True
not_equal: +inf +inf -> False | 1 1 -> False | pos neg -> True | 0 0 -> False
pow: -1 nan -> nan | pos>1 nan -> nan | nan 0 -> 1 | any 0 -> 1 | nan nonzero -> nan
pow: pos>1 +inf -> +inf | <-1 +inf -> +inf | pos>1 -inf -> +0 | <-1 -inf -> +0 | 1 inf -> 1
pow: -1 inf -> 1 | 1 number -> 1 | part +inf -> +0 | part -inf -> +inf | +inf >0 -> +inf
pow: +inf <0 -> +0 | -inf odd -> -inf | -inf pos_not_odd -> +inf | -inf -odd -> -0
pow: -inf neg_not_odd -> +0 | +0 >0 -> +0 | +0 <0 -> +inf | -0 odd -> -0 | -0 pos_not_odd -> +0
pow: -0 -odd -> -inf | -0 neg_not_odd -> +inf | neg broken -> nan
reciprocal: nan -> nan | +inf -> +0 | -inf -> -0 | +0 -> +inf | -0 -> -inf
remainder: nan any -> nan | any nan -> nan | inf inf -> nan | 0 0 -> nan | 0 >0 -> +0 | 0 <0 -> -0
remainder: >0 0 -> nan | <0 0 -> nan | inf pos -> nan | inf neg -> nan | pos +inf -> x1
remainder: pos -inf -> x2 | neg +inf -> x2 | neg -inf -> x1
round: +inf -> +inf | -inf -> -inf | +0 -> +0 | -0 -> -0 | nan -> nan | 2.5 -> 2 | 3.5 -> 4
round: -2.5 -> -2 | 0.5 -> +0 | -0.5 -> -0 | integer -> x1
sign: <0 -> -1 | 0 -> +0 | >0 -> 1 | nan -> nan
signbit: +0 -> False | -0 -> True | +inf -> False | -inf -> True | pos -> False | neg -> True
sin: nan -> nan | +0 -> +0 | -0 -> -0 | inf -> nan
sinh: nan -> nan | +0 -> +0 | -0 -> -0 | +inf -> +inf | -inf -> -inf
sqrt: nan -> nan | <0 -> nan | +0 -> +0 | -0 -> -0 | +inf -> +inf
square: nan -> nan | inf -> +inf | 0 -> +0
subtract: +inf +inf -> nan | -inf -inf -> nan | +inf -inf -> +inf | +0 +0 -> +0 | -0 +0 -> -0
tan: nan -> nan | +0 -> +0 | -0 -> -0 | inf -> nan
tanh: nan -> nan | +0 -> +0 | -0 -> -0 | +inf -> 1 | -inf -> -1
trunc: +inf -> +inf | -inf -> -inf | +0 -> +0 | -0 -> -0 | nan -> nan | integer -> x1
"""

# Only the upper half plane: `f(conj(x))` is `conj(f(x))`, which is tested for each of the cases.
COMPLEX = """
abs: inf any -> +inf | any inf -> +inf | nan finite -> nan | finite nan -> nan | nan nan -> nan
acos: 0 +0 -> pi/2 -0 | 0 nan -> pi/2 nan | finite +inf -> pi/2 -inf | nonzero nan -> nan nan
acos: -inf pos -> pi -inf | +inf pos -> +0 -inf | -inf +inf -> 3pi/4 -inf | +inf +inf -> pi/4 -inf
acos: inf nan -> nan ~inf | nan finite -> nan nan | nan +inf -> nan -inf | nan nan -> nan nan
acosh: 0 +0 -> +0 pi/2 | finite +inf -> +inf pi/2 | nonzero nan -> nan nan | +0 nan -> nan ~pi/2
acosh: -inf pos -> +inf pi | +inf pos -> +inf +0 | -inf +inf -> +inf 3pi/4
acosh: +inf +inf -> +inf pi/4 | inf nan -> +inf nan | nan finite -> nan nan | nan +inf -> +inf nan
acosh: nan nan -> nan nan
asinh: +0 +0 -> +0 +0 | pos +inf -> +inf pi/2 | finite nan -> nan nan | +inf pos -> +inf +0
asinh: +inf +inf -> +inf pi/4 | nan +0 -> nan +0 | nan nonzero -> nan nan | nan +inf -> ~inf nan
asinh: nan nan -> nan nan
atanh: +0 +0 -> +0 +0 | +0 nan -> +0 nan | 1 +0 -> +inf +0 | pos +inf -> +0 pi/2
atanh: nonzero nan -> nan nan | +inf pos -> +0 pi/2 | +inf +inf -> +0 pi/2 | +inf nan -> +0 nan
atanh: nan finite -> nan nan | nan +inf -> ~0 pi/2 | nan nan -> nan nan
cosh: +0 +0 -> 1 +0 | +0 +inf -> nan ~0 | +0 nan -> nan ~0 | nonzero +inf -> nan nan
cosh: nonzero nan -> nan nan | +inf +0 -> +inf +0 | +inf +inf -> ~inf nan | +inf nan -> +inf nan
cosh: nan 0 -> nan ~0 | nan nonzero -> nan nan | nan nan -> nan nan
exp: 0 +0 -> 1 +0 | finite +inf -> nan nan | finite nan -> nan nan | +inf +0 -> +inf +0
exp: -inf +inf -> ~0 ~0 | +inf +inf -> ~inf nan | -inf nan -> ~0 ~0 | +inf nan -> ~inf nan
exp: nan +0 -> nan +0 | nan nonzero -> nan nan | nan nan -> nan nan | -inf pos -> ~0 ~0
expm1: 0 +0 -> ~0 +0 | finite +inf -> nan nan | finite nan -> nan nan | +inf +0 -> +inf +0
expm1: -inf +inf -> -1 ~0 | +inf +inf -> ~inf nan | -inf nan -> -1 ~0 | +inf nan -> ~inf nan
expm1: nan +0 -> nan +0 | nan nonzero -> nan nan | nan nan -> nan nan | -inf pos -> -1 ~0
isfinite: nan any -> False | any nan -> False | inf any -> False | any inf -> False
isfinite: finite finite -> True
isinf: inf any -> True | any inf -> True | finite finite -> False | nan nan -> False
isnan: nan any -> True | any nan -> True | number number -> False
log: -0 +0 -> -inf pi | +0 +0 -> -inf +0 | finite +inf -> +inf pi/2 | finite nan -> nan nan
log: -inf pos -> +inf pi | +inf pos -> +inf +0 | -inf +inf -> +inf 3pi/4 | +inf +inf -> +inf pi/4
log: inf nan -> +inf nan | nan finite -> nan nan | nan +inf -> +inf nan | nan nan -> nan nan
log1p: -1 +0 -> -inf +0 | finite +inf -> +inf pi/2 | finite nan -> nan nan | -inf pos -> +inf pi
log1p: +inf pos -> +inf +0 | -inf +inf -> +inf 3pi/4 | +inf +inf -> +inf pi/4
log1p: inf nan -> +inf nan | nan finite -> nan nan | nan +inf -> +inf nan | nan nan -> nan nan
sign: 0 0 -> +0 +0 | nan any -> nan nan | any nan -> nan nan
sinh: +0 +0 -> +0 +0 | +0 +inf -> ~0 nan | +0 nan -> ~0 nan | pos +inf -> nan nan
sinh: pos nan -> nan nan | +inf +0 -> +inf +0 | +inf +inf -> ~inf nan | +inf nan -> ~inf nan
sinh: nan +0 -> nan +0 | nan nonzero -> nan nan | nan nan -> nan nan
sqrt: 0 +0 -> +0 +0 | any +inf -> +inf +inf | finite nan -> nan nan | -inf pos -> +0 +inf
sqrt: +inf pos -> +inf +0 | -inf nan -> nan ~inf | +inf nan -> +inf nan | nan finite -> nan nan
sqrt: nan nan -> nan nan
tanh: +0 +0 -> +0 +0 | +0 +inf -> +0 nan | +0 nan -> +0 nan | nonzero +inf -> nan nan
tanh: nonzero nan -> nan nan | +inf pos -> 1 ~0 | +inf +inf -> 1 ~0 | +inf nan -> 1 ~0
tanh: nan +0 -> nan +0 | nan nonzero -> nan nan | nan nan -> nan nan
"""

# What stays, and why: (function, case) of the table -> a reason that docs/array_api.md gives, too.
_PYTHON = "NaN, which the standard allows: `//` and `%` are those of Python"
_TRULY = "-1, which the standard allows: the floor of a small negative number, as in Python"
DEVIATIONS = {
    **{("floor_divide", c): _PYTHON for c in ("+inf pos", "+inf neg", "-inf pos", "-inf neg")},
    **{("floor_divide", c): _TRULY for c in ("pos -inf", "neg +inf")},
}

_POSITIVE = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 7.0, 1e10)
_NEGATIVE = tuple(-x for x in _POSITIVE)
CLASSES: dict[str, tuple[float, ...]] = {
    "nan": (np.nan,),
    "0": (0.0, -0.0),
    "inf": (np.inf, -np.inf),
    "pos": _POSITIVE,
    "neg": _NEGATIVE,
    "nonzero": _POSITIVE + _NEGATIVE,
    "finite": (0.0, -0.0, *_POSITIVE, *_NEGATIVE),
    "number": (0.0, -0.0, np.inf, -np.inf, *_POSITIVE, *_NEGATIVE),
    "any": (0.0, -0.0, np.inf, -np.inf, np.nan, *_POSITIVE, *_NEGATIVE),
    ">0": (*_POSITIVE, np.inf),
    "<0": (*_NEGATIVE, -np.inf),
    ">1": (1.5, 2.0, 1e10, np.inf),
    "pos>1": (1.5, 2.0, 1e10, np.inf),
    "<-1": (-1.5, -2.0, -1e10, -np.inf),
    "<1": (0.5, 0.0, -3.0, -np.inf),
    "part": (0.25, 0.0, -0.0, -0.5),
    "odd": (1.0, 3.0, 7.0),
    "-odd": (-1.0, -3.0, -7.0),
    "pos_not_odd": (2.0, 0.5, 2.5, 1e10, np.inf),
    "neg_not_odd": (-2.0, -0.5, -2.5, -1e10, -np.inf),
    "broken": (0.5, -0.5, 2.5, -3.5),
    "integer": (0.0, -0.0, 1.0, -3.0, 1e10),
}


@dataclass(frozen=True)
class Case:
    """One special case: operand classes, and the result for all numbers of these classes."""

    function: str
    operands: tuple[str, ...]
    result: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.function}({' '.join(self.operands)}) -> {' '.join(self.result)}"

    @property
    def reason(self) -> str | None:
        """Why this case is not as the standard says, if it is not."""
        return DEVIATIONS.get((self.function, " ".join(self.operands)))

    def examples(self) -> list[tuple[float, ...]]:
        """All combinations of numbers of the operands' classes."""
        columns = [CLASSES[w] if w in CLASSES else (number(w),) for w in self.operands]
        grids = np.meshgrid(*columns, indexing="ij")
        return list(zip(*(g.ravel().tolist() for g in grids), strict=True))


def number(word: str) -> float:
    """The number that a word stands for: `-3pi/4`, `+inf`, `2.5`."""
    if "pi" not in word:
        return float(word)
    before, _, after = word.partition("pi")
    factor = {"": 1.0, "-": -1.0, "+": 1.0}.get(before)
    whole = float(before) if factor is None else factor
    return whole * np.pi / float(after[1:] or 1)


def cases(table: str) -> dict[str, list[Case]]:
    """The cases of a table by function."""
    found: dict[str, list[Case]] = {}
    for line in table.split("\n"):
        name, _, rest = line.partition(": ")
        for text in rest.split(" | ") if rest else ():
            operands, _, result = text.partition(" -> ")
            case = Case(name, tuple(operands.split()), tuple(result.split()))
            found.setdefault(name, []).append(case)
    return found
