"""Declarations of what a text calls and does not define, found in the text itself."""

from __future__ import annotations

import re

_CALL = re.compile(r"\bcall ([\w]+) @([\w.]+)\(([^()]*)\)")
_DEFINED = re.compile(r"^define [^@\n]*@([\w.]+)\(", re.M)


def with_declarations(text: str) -> str:
    """A text of LLVM IR and, behind it, declarations of the functions that it only calls."""
    defined = set(_DEFINED.findall(text))
    found: dict[str, str] = {}
    for returns, name, operands in _CALL.findall(text):
        if name not in defined and name not in found:
            types = ", ".join(each.split()[0] for each in operands.split(",") if each.strip())
            found[name] = f"declare {returns} @{name}({types})"
    return "\n".join([text, *found.values(), ""])
