"""PTX types and comparisons in LLVM's words."""

from __future__ import annotations

import re

_FLOATS = {"f16": "half", "f32": "float", "f64": "double"}
_BITS = {"half": 16, "float": 32, "double": 64}
_TYPE = re.compile(r"^(pred|[busf]\d+)$")


class UnknownPtxError(Exception):
    """PTX that the emulator does not know."""


def is_type(word: str) -> bool:
    """Whether a word of an opcode is a type."""
    return _TYPE.match(word) is not None


def llvm_type(ptx: str) -> str:
    """The LLVM type of a PTX type."""
    if ptx == "pred":
        return "i1"
    return _FLOATS.get(ptx) or f"i{ptx[1:]}"


def width(llvm: str) -> int:
    """The bits of an LLVM type."""
    return _BITS.get(llvm) or int(llvm[1:])


def is_float(ptx: str) -> bool:
    """Whether a PTX type is of floating-point numbers."""
    return ptx in _FLOATS


# PTX ISA, table of comparisons: "u" after a name means that NaN gives true.
FLOAT_COMPARISONS = {
    "eq": "oeq", "ne": "one", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge",
    "equ": "ueq", "neu": "une", "ltu": "ult", "leu": "ule", "gtu": "ugt", "geu": "uge",
    "num": "ord", "nan": "uno",
}  # fmt: skip
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def integer_comparison(name: str, signed: bool) -> str:
    """LLVM's name of a comparison of integers."""
    if name in _UNSIGNED:
        name, signed = _UNSIGNED[name], False
    return name if name in ("eq", "ne") else f"{'s' if signed else 'u'}{name}"
