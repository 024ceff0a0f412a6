"""The memory behind the frames of a program: which devices have it for themselves, and which share.

A frame is one device's base pointers: its arena, the inputs, the outputs, the arenas of other
devices in which values lie that it shares with them, and the constants.
"""

from __future__ import annotations

from spmd.base.record import record


@record
class Frames:
    """The sizes of arenas, and the homes of what devices share, in built-in types.

    `arenas` are the bytes of each device's arena. `outputs` has for each output, `shared` for each
    arena of other devices, the home of each device: the device whose memory it is.
    """

    arenas: tuple[int, ...]
    outputs: tuple[tuple[int, ...], ...]
    shared: tuple[tuple[int, ...], ...] = ()
