"""The origin of a collective: its program, its place there, and the user's line.

A transport knows buffers only. The code above it gives each call an `Origin`, so that ranks can
compare more than the bytes they move, and so that every report names the user's lines.
"""

from __future__ import annotations

from spmd.base.record import record


@record(eq=False)
class Origin:
    """One place in a program from which collectives are called. Compared by identity: it is a key.

    `schedule` is the digest of all collectives of the program, 0 outside of compiled programs, and
    `position` this one's number among them. Ranks must agree about these and `text`; `program`, the
    name of the program and the line that called it, is only told.
    """

    text: str = ""  # psum f32[3] over 'i' at train.py:12
    program: str = ""  # step (called at train.py:30)
    schedule: int = 0
    position: int = -1
    source: str = ""  # train.py:12
    operand: str = ""  # ['w'], where the operand is one leaf of a pytree

    def __str__(self) -> str:
        return f"{self.text} in {self.program}" if self.text and self.program else self.label

    @property
    def label(self) -> str:
        """The name of the call, without the program around it."""
        return self.text or self.program


NOWHERE = Origin()
