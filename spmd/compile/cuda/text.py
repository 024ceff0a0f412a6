"""A writer of indented C++ text, and index arithmetic as readable expressions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager


class Text:
    """Collects lines at the current depth of braces."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0

    def add(self, line: str) -> None:
        """Write one line."""
        self.lines.append("  " * self.depth + line)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Write `head {`, the lines written inside, and the closing brace."""
        self.add(f"{head} {{" if head else "{")
        self.depth += 1
        yield
        self.depth -= 1
        self.add("}")

    def __str__(self) -> str:
        return "\n".join(self.lines)


def linear(offset: int, terms: Iterable[tuple[str, int]]) -> str:
    """Return the expression of `offset + sum(name * stride)`, the shortest way to write it.

    >>> linear(3, [("d0", 100), ("d1", -1), ("d2", 0)])
    'd0 * 100 - d1 + 3'
    """
    text = ""
    for name, stride in terms:
        if not stride or name == "0":
            continue
        size = abs(stride)
        term = name if size == 1 else f"{name} * {size}"
        text += (" - " if stride < 0 else " + " if text else "") + term
    if offset or not text:
        text += f" {'-' if offset < 0 else '+'} {abs(offset)}" if text else str(offset)
    return text.strip()


def digits(position: str, sizes: Sequence[int]) -> list[str]:
    """Return the row-major index along each dim of a flat position, a name."""
    found = []
    step = 1
    for number, size in reversed(list(enumerate(sizes))):
        text = position if step == 1 else f"{position} / {step}"
        if number > 0 and size > 1:
            text += f" % {size}"
        found.append("0" if size == 1 else text)
        step *= size
    return found[::-1]
