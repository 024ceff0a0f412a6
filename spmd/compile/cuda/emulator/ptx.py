"""PTX text as data: functions with their declarations and instructions, and tables of constants.

    module = parse(compiled.ptx)
    module.entries["kernel_..."].body        # labels and instructions, in order

Nothing is checked here: what an instruction means, and whether it is known, is for those who
translate it. Every instruction knows the line of CUDA C++ that it comes from, if NVRTC was told to
note lines.

Grammar: PTX ISA, chapters 4 (syntax), 5 (state spaces) and 11 (directives).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from spmd.base.record import field, record

_WORD_BYTES = 8


@record
class Instruction:
    """One instruction or declaration: `@!guard opcode operands`, and the place in the source.

    Declarations have an opcode of one word that begins with a point: `.reg`, `.local`, `.param`.
    `line` is the line of the text that was compiled, `called_at` that of the call where the line is
    in a function that was inlined, else 0.
    """

    opcode: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str = ""
    negated: bool = False
    line: int = 0
    called_at: int = 0

    def __str__(self) -> str:
        return f"{'.'.join(self.opcode)} {', '.join(self.operands)}"


@record
class Label:
    """A place to branch to."""

    name: str


@record
class Code:
    """An entry or a function: parameters (name, bytes), what it returns likewise, and its body."""

    name: str
    parameters: tuple[tuple[str, int], ...]
    result: tuple[str, int] | None
    body: tuple[Instruction | Label, ...]

    def instructions(self) -> Iterator[Instruction]:
        """All instructions, without labels."""
        return (each for each in self.body if isinstance(each, Instruction))


@record
class Table:
    """Constants in global memory."""

    name: str
    alignment: int
    values: bytes


@record
class Module:
    """All that a PTX text defines; `shared` are the names of the dynamic shared memory."""

    entries: dict[str, Code] = field(default_factory=dict)
    functions: dict[str, Code] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    shared: list[str] = field(default_factory=list)


_TABLE = re.compile(
    r"^(?:\.visible )?\.(?:global|const) \.align (\d+) \.b8 (\w+)\[(\d+)\] = \{([^}]*)\};",
    re.M,
)
_SHARED = re.compile(r"^\.extern \.shared (?:\.align \d+ )?\.\w+ (\w+)\[\]", re.M)
_HEAD = re.compile(r"^(?:\.visible |\.weak )?\.(entry|func)\s+(?:\(([^)]*)\)\s*)?(\w+)\s*\(?", re.M)
_PARAMETER = re.compile(r"\.([a-z]\d+)\s+(?:\.ptr\s+[\w. ]*?)?(\w+)(?:\[(\d+)\])?\s*$")
_LOC = re.compile(r"\.loc\s+\d+\s+(\d+)\s+\d+(?:.*inlined_at\s+\d+\s+(\d+))?")
_LABEL = re.compile(r"^([$\w]+):")
_INSTRUCTION = re.compile(r"^(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_CALL = re.compile(r"^call(?:\.uni)?\s*(?:\(\s*(\w+)\s*\)\s*,)?\s*(\w+)\s*(?:,\s*\(([^)]*)\))?")


def parse(text: str) -> Module:
    """Read a PTX text."""
    module = Module(shared=_SHARED.findall(text))
    for alignment, name, count, values in _TABLE.findall(text):
        numbers = bytes(int(value) for value in values.split(","))
        module.tables[name] = Table(name, int(alignment), numbers.ljust(int(count), b"\0"))
    for head in _HEAD.finditer(text):
        opening = text.find("{", head.end())
        semicolon = text.find(";", head.end())
        if opening < 0 or 0 <= semicolon < opening:
            continue  # a declaration
        signature = text[head.end() : opening].partition(")")[0]
        kind, result, name = head.groups()
        made = _parameters(result or "")
        code = Code(
            name,
            tuple(_parameters(signature)),
            made[0] if made else None,
            tuple(_body(text, opening + 1)),
        )
        (module.entries if kind == "entry" else module.functions)[name] = code
    return module


def _parameters(text: str) -> list[tuple[str, int]]:
    found = []
    for each in filter(None, map(str.strip, text.split(","))):
        match = _PARAMETER.search(each)
        if match is None:
            raise ValueError(f"PTX parameter {each!r}")
        found.append((match[2], int(match[3] or 1) * int(match[1][1:]) // 8))
    return found


def _body(text: str, start: int) -> Iterator[Instruction | Label]:
    """The text between the brace before `start` and the one that closes it."""
    depth, line, called_at, open_text = 1, 0, 0, ""
    while True:
        end = text.index("\n", start)
        each, start = text[start:end].partition("//")[0].strip(), end + 1
        if match := _LOC.match(each):
            line, called_at = int(match[1]), int(match[2] or 0)
            continue
        if not each or each.startswith((".pragma", ".file")):
            continue
        depth += each.count("{") - each.count("}")
        if not open_text and (match := _LABEL.match(each)):
            yield Label(match[1])
            continue
        open_text = f"{open_text} {each}".strip()
        while True:
            # Braces that are no operands open and close scopes: names are not used again inside.
            open_text = open_text.lstrip("{} \t")
            statement, semicolon, rest = open_text.partition(";")
            if not semicolon:
                break
            open_text = rest.strip()
            yield from _statement(statement.strip(), line, called_at)
        if depth <= 0:
            return


def _statement(text: str, line: int, called_at: int) -> Iterator[Instruction]:
    for opcode, operands, guard, negated in _taken_apart(text):
        yield Instruction(opcode, operands, guard, negated, line, called_at)


_Parts = tuple[tuple[str, ...], tuple[str, ...], str, bool]


@functools.lru_cache(8192)
def _taken_apart(text: str) -> tuple[_Parts, ...]:
    if text.startswith("."):
        return tuple(_declared(text))
    if match := _CALL.match(text):
        arguments = [x.strip() for x in (match[3] or "").split(",") if x.strip()]
        return ((("call",), (match[1] or "", match[2], *arguments), "", False),)
    match = _INSTRUCTION.match(text)
    if match is None:
        raise ValueError(f"PTX statement {text!r}")
    negated, guard, opcode, rest = match.groups()
    operands = tuple(operand.strip() for operand in _OPERAND.findall(rest))
    return ((tuple(opcode.split(".")), operands, guard or "", bool(negated)),)


def _declared(text: str) -> Iterator[_Parts]:
    """Declarations: (`.reg`, type, name), and (`.local` or `.param`, name, bytes)."""
    if match := re.match(r"\.reg\s+\.(\w+)\s+(.*)", text):
        for name in match[2].split(","):
            several = re.match(r"(%?\w+)<(\d+)>", name.strip())
            names = [f"{several[1]}{k}" for k in range(int(several[2]))] if several else [name]
            for each in names:
                yield (".reg",), (match[1], each.strip()), "", False
    elif match := re.match(
        r"\.(local|param)\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)\s+(\w+)(?:\[(\d+)\])?", text
    ):
        nbytes = int(match[2]) // 8 * int(match[4] or 1)
        yield (f".{match[1]}",), (match[3], str(max(nbytes, _WORD_BYTES))), "", False
    else:
        raise ValueError(f"PTX declaration {text!r}")
