"""Numbers of bytes as text, both ways: "98.3 KB"."""

from __future__ import annotations

UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def size_text(count: float) -> str:
    """Bytes as a user reads them.

    >>> size_text(98304)
    '98.3 KB'
    """
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def bytes_of_text(text: str) -> int:
    """The number of bytes that a text says, with or without a unit; ValueError if it says none.

    >>> bytes_of_text("8 MB"), bytes_of_text("512")
    (8000000, 512)
    """
    number, _, unit = text.strip().partition(" ")
    if (unit or "B") not in UNITS:
        raise ValueError(f"must be a number of bytes, or text like '8 MB' with {', '.join(UNITS)}")
    try:
        return int(float(number) * UNITS[unit or "B"])
    except ValueError:
        raise ValueError("must be a number of bytes, or text like '8 MB'") from None
