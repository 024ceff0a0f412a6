"""Puts the output of many ranks on one screen without mixing their lines.

Only whole lines are printed, each with its rank. Progress bars, which return to the start of their
line with `\\r`, stay alive on rank 0; of the other ranks' bars the last state is printed. On
request a line that all ranks say is printed once, and some ranks are only logged.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..options import UsageError

# A prompt has no line end: text of rank 0 that stays alone for so long is shown as it is.
PROMPT_SECONDS = 0.1
TAIL_LINES = 200
# The reader still sees a line that was printed so many lines ago.
SCREEN_LINES = 60
# How long a line waits for the other ranks to say the same.
COLLAPSE_SECONDS = 0.25
_PIECE = re.compile(rb"([^\r\n]*)(\r\n|\n|\r)?")


@dataclass(slots=True)
class Stream:
    """One stream of one rank: its text since its last line end."""

    rank: int
    kind: bytes
    text: bytes = b""
    is_bar: bool = False  # it has returned to the start of this line
    drawn: bytes = b""  # the state of the bar that was drawn last
    since: float = 0.0


class Printer:
    """Writes lines of ranks to stdout and stderr."""

    def __init__(
        self,
        ranks: int,
        out: BinaryIO,
        err: BinaryIO,
        prefix: bool,
        log_dir: str | None = None,
        *,
        only: Sequence[int] | None = None,
        collapse: bool = False,
        name_hosts: bool = False,
        again: bool = False,
    ):
        self.width = len(str(ranks - 1))
        self.shown = set(range(ranks) if only is None else only)
        self.hosts: dict[int, str] = {}
        self.name_hosts = name_hosts
        self.log_mode = "ab" if again else "wb"
        # Lines that wait for their likes on other ranks: (since, kind, text), in each rank's order.
        self.held: dict[int, deque[tuple[float, bytes, bytes]]] | None = (
            {r: deque() for r in sorted(self.shown)} if collapse else None
        )
        self.sinks = {b"o": out, b"e": err}
        self.prefix = prefix
        self.streams = {(r, kind): Stream(r, kind) for r in range(ranks) for kind in self.sinks}
        self.tails: dict[int, list[str]] = {}
        self.on_screen: deque[bytes] = deque(maxlen=SCREEN_LINES)  # without the ranks' marks
        self.has_reader = True
        self.open_line: Stream | None = None  # the one whose text the cursor stands behind
        self.logs: dict[int, BinaryIO] = {}
        self.log_dir = Path(log_dir) if log_dir else None
        if self.log_dir:
            self._make_log_dir(self.log_dir)

    def _make_log_dir(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            why = "" if os.access(folder, os.W_OK | os.X_OK) else "Permission denied"
        except OSError as error:
            why = error.strerror
        if why:
            raise UsageError(
                f"--log-dir {folder}: {why}; name a folder in which files can be written"
            )

    def mark(self, rank: int) -> bytes:
        """`r2 | `, with several hosts `node7:r2 | `, or nothing."""
        host = f"{self.hosts.get(rank, '?')}:" if self.name_hosts else ""
        return f"{host}r{rank:<{self.width}} | ".encode() if self.prefix else b""

    def show_always(self, rank: int) -> None:
        """Show a rank's output from now on, whatever was asked for: it talks to a person."""
        self.shown.add(rank)
        if self.held is not None:
            for text in self._without(rank):
                self._write_line(self.mark(rank), *text)

    def feed(self, rank: int, kind: bytes, data: bytes) -> None:
        """Take output of a rank, in whatever pieces it arrives."""
        self._log(rank, data)
        if rank not in self.shown:
            self._remember(rank, kind, data)
            return
        stream = self.streams[rank, kind]
        stream.since = time.monotonic()
        for text, end in _PIECE.findall(data):
            if end in (b"\n", b"\r\n"):
                self._line(stream, stream.text + text)
            elif end == b"\r":
                self._return(stream, stream.text + text)
            elif text:
                stream.text += text
                if stream.is_bar and rank == 0:
                    self._draw(stream)

    def idle(self) -> None:
        """Show text that looks like a prompt, and lines that have waited long enough."""
        self._release(time.monotonic() - COLLAPSE_SECONDS)
        for kind in self.sinks if 0 in self.shown else ():
            stream = self.streams[0, kind]
            waited = time.monotonic() - stream.since
            if stream.text and not stream.is_bar and waited > PROMPT_SECONDS:
                before = b"" if self.open_line is stream else self.mark(0)
                if self.open_line is not stream:
                    self._end_open_line()
                self._write(kind, before + stream.text)
                stream.text = b""
                self.open_line = stream

    def finish(self, rank: int) -> None:
        """A rank has ended: its last line may have no end."""
        for kind in self.sinks:
            stream = self.streams[rank, kind]
            if stream.text and rank not in self.shown:
                self._keep(rank, stream.text)
            elif stream.text:
                self._line(stream, stream.text)
        if self.held is not None:
            self._release(time.monotonic() - COLLAPSE_SECONDS)
        log = self.logs.pop(rank, None)
        if log:
            log.close()

    def close(self) -> None:
        """Show all that waits; end an open line: the shell's prompt begins on a new one."""
        self._release(float("inf"))
        self._end_open_line()

    def note(self, text: str) -> None:
        """A line of spmdrun's own; earlier text of the ranks comes first."""
        self._release(float("inf"))
        self._end_open_line()
        self._write(b"e", text.encode() + b"\n")

    def tail(self, rank: int) -> list[str]:
        """The last lines that a rank wrote to stderr."""
        return self.tails.get(rank, [])

    def shows(self, lines: Sequence[str]) -> bool:
        """Whether all these lines of a rank were printed a moment ago."""
        return set(line.encode() for line in lines) <= set(self.on_screen)

    # ---- details -------------------------------------------------------------------------------

    def _line(self, stream: Stream, line: bytes) -> None:
        was_bar, stream.is_bar, stream.text = stream.is_bar, False, b""
        if stream.kind == b"e":
            self._keep(stream.rank, line)
        if self.open_line is stream:
            self.open_line = None
            if was_bar and line != stream.drawn:
                line = self._line_start(stream.kind) + self.mark(stream.rank) + line
            elif was_bar:
                line = b""  # it stands there; otherwise this is the answer to a prompt
            self.on_screen.append(line)
            self._write(stream.kind, line + b"\n")
            return
        if self.held is not None and stream.rank in self.held:
            self.held[stream.rank].append((time.monotonic(), stream.kind, line))
            self._release(time.monotonic() - COLLAPSE_SECONDS)
            return
        self._write_line(self.mark(stream.rank), stream.kind, line)

    def _write_line(self, mark: bytes, kind: bytes, line: bytes) -> None:
        self._end_open_line()
        self.on_screen.append(line)
        self._write(kind, mark + line + b"\n")

    def _keep(self, rank: int, line: bytes) -> None:
        tail = self.tails.setdefault(rank, [])
        tail.append(line.decode(errors="replace"))
        del tail[:-TAIL_LINES]

    def _remember(self, rank: int, kind: bytes, data: bytes) -> None:
        """Keep the last lines of a rank that is not shown: it may be the one that fails."""
        if kind == b"e":
            stream = self.streams[rank, kind]
            *lines, stream.text = (stream.text + data).split(b"\n")
            for line in lines:
                self._keep(rank, line)

    # ---- equal lines of several ranks ----------------------------------------------------------

    def _release(self, before: float) -> None:
        """Print the lines that all ranks have said, and those that came before a moment.

        A rank's lines keep their order, so only the first that waits can go.
        """
        if self.held is None:
            return
        while True:
            first = {r: lines[0] for r, lines in self.held.items() if lines}
            if not first:
                return
            _, kind, text = min(first.values())
            ranks = [r for r, said in first.items() if said[1:] == (kind, text)]
            if len(ranks) < len(self.held) and min(first.values())[0] > before:
                return
            for rank in ranks:
                self.held[rank].popleft()
            self._write_line(self._marks(ranks), kind, text)

    def _marks(self, ranks: Sequence[int]) -> bytes:
        """`r0-3 | ` of neighbours, `r0,2 | ` of others."""
        if len(ranks) == 1 or not self.prefix:
            return self.mark(ranks[0])
        runs: list[list[int]] = []
        for rank in ranks:
            if runs and rank == runs[-1][-1] + 1:
                runs[-1].append(rank)
            else:
                runs.append([rank])
        words = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
        return f"r{','.join(words)} | ".encode()

    def _without(self, rank: int) -> list[tuple[bytes, bytes]]:
        assert self.held is not None
        return [(kind, line) for _, kind, line in self.held.pop(rank, ())]

    def _return(self, stream: Stream, text: bytes) -> None:
        """The cursor goes back to the start of the line: the next text replaces `text`."""
        stream.is_bar, stream.text = True, text
        if text and text != stream.drawn and stream.rank == 0:
            self._draw(stream)
        stream.text = b""

    def _draw(self, bar: Stream) -> None:
        if self.open_line is not bar:
            self._end_open_line()
        self._write(bar.kind, self._line_start(bar.kind) + self.mark(bar.rank) + bar.text)
        self.open_line, bar.drawn = bar, bar.text

    def _line_start(self, kind: bytes) -> bytes:
        return b"\r\x1b[K" if self.sinks[kind].isatty() else b"\r"

    def _end_open_line(self) -> None:
        """Give way to another line: a bar is wiped (it will be drawn again), a prompt stays."""
        stream, self.open_line = self.open_line, None
        if stream is not None:
            wipe = stream.is_bar and self.sinks[stream.kind].isatty()
            self._write(stream.kind, self._line_start(stream.kind) if wipe else b"\n")

    def _write(self, stream: bytes, data: bytes) -> None:
        sink = self.sinks[stream]
        try:
            sink.write(data)
            sink.flush()
        except BrokenPipeError:  # the job is to end; its remaining output goes nowhere
            self.has_reader = False
            os.dup2(os.open(os.devnull, os.O_WRONLY), sink.fileno())

    def _log(self, rank: int, data: bytes) -> None:
        if self.log_dir is None:
            return
        if rank not in self.logs:
            name = f"rank-{rank:0{self.width}}.log"
            self.logs[rank] = open(self.log_dir / name, self.log_mode)
        self.logs[rank].write(data)
        self.logs[rank].flush()
