"""`debug.breakpoint`: stop a compiled program and look at the values of the calling function."""

from __future__ import annotations

import cmd
import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from spmd.base.device import process_count, process_index
from spmd.base.errors import ArgumentError, SpmdError
from spmd.base.record import record
from spmd.base.source import current_source, is_ours
from spmd.base.tree import tree_flatten, tree_unflatten
from spmd.core.aval import is_arraylike
from spmd.lax.callback import debug_callback, here
from spmd.transport.checked import OPEN_GROUPS
from spmd.transport.flight_recorder import BREAKPOINT, FLIGHT

# Lines shown before and after the one that stopped.
AROUND = 5


class BreakpointQuit(SpmdError, KeyboardInterrupt):
    """The user ended the program at a breakpoint."""

    located = False


@record
class _Stop:
    """One breakpoint: the frames that called it, innermost first, as (file, line, function)."""

    frames: tuple[tuple[str, int, str], ...]
    rank: int | None = None

    def __call__(self, variables: list[dict[str, Any]]) -> None:
        if self.rank not in (None, process_index()):
            return  # this rank goes on, and waits at its next collective
        sys.stdout.flush()
        debugger = _Debugger(self.frames, variables)
        with FLIGHT.phase(BREAKPOINT), _held():
            debugger.cmdloop()

    @property
    def __name__(self) -> str:
        return "debug.breakpoint"


def debug_breakpoint(
    *,
    backend: str | None = None,
    filter_frames: bool = True,
    num_frames: int | None = None,
    ordered: bool = False,
    rank: int | None = None,
) -> None:
    """Stop here when the compiled program runs, and read commands from standard input.

    The arrays among the local variables of the calling functions (`num_frames` of them, default
    all) are values then, those of one example under vmap and of one device under pmap. Commands: `p
    EXPRESSION`, `pp EXPRESSION`, `l` (list the source), `bt` (the frames), `u` and `d` (up and down
    the frames), `c` (continue), `q` (end the program). With `filter_frames`, frames of spmd are not
    shown. `backend` chooses among JAX's debuggers; there is one here.

    Over several processes `rank` says which one stops; it needs the standard input (rank 0 has it;
    `spmdrun --stdin 1` gives it to another). The others go on to their next collective with it,
    say that they wait for it, and do not give up. `q` ends the whole job.
    """
    count = process_count()
    if rank is None and count > 1:
        raise ArgumentError(
            f"{current_source()}: debug.breakpoint reads standard input, which {count} processes "
            "cannot share; say which one stops, debug.breakpoint(rank=0), or use debug.print"
        )
    if rank is not None and not (isinstance(rank, int) and 0 <= rank < count):
        raise ArgumentError(
            f"{current_source()}: debug.breakpoint: rank={rank!r}, but this job has ranks 0 to "
            f"{count - 1}"
        )
    frames, variables = [], []
    frame: Any = sys._getframe(1)
    while frame is not None and (num_frames is None or len(frames) < num_frames):
        code = frame.f_code
        if not (filter_frames and is_ours(code.co_filename)):
            frames.append((code.co_filename, frame.f_lineno, code.co_name))
            # Names at module level may be anything: they are those of the program, not values.
            variables.append({} if code.co_name == "<module>" else _values(frame.f_locals))
        frame = frame.f_back
    debug_callback(_Stop(tuple(frames), rank), variables, ordered=ordered)


@contextmanager
def _held() -> Iterator[None]:
    """Announce to the other ranks that a person holds this one in the debugger."""
    for group in OPEN_GROUPS:
        group.announce_held(True)
    try:
        yield
    finally:
        for group in OPEN_GROUPS:
            group.announce_held(False)


def _values(found: dict[str, Any]) -> dict[str, Any]:
    """The local variables that are pytrees of arrays only."""
    out = {}
    for name, value in found.items():
        leaves, tree = tree_flatten(value)
        if leaves and all(is_arraylike(x) for x in leaves):
            out[name] = tree_unflatten(tree, leaves)
    return out


class _Debugger(cmd.Cmd):
    """The commands of a breakpoint."""

    prompt = "(spmd) "

    def __init__(self, frames: Any, variables: list[dict[str, Any]]):
        # Not readline: it reads and writes sys.stdin and sys.stdout as they are now.
        super().__init__(stdin=sys.stdin, stdout=sys.stdout)
        self.use_rawinput = False
        self.frames, self.variables, self.at = frames, variables, 0
        place = here()
        where = f" on {place.device} ({place})" if place.axes else ""
        if process_count() > 1:
            where = f" on rank {process_index()}," + (where or " on the host")
        self.intro = f"spmd breakpoint{where}\n{self._line(0)}"

    def _line(self, k: int) -> str:
        file, line, function = self.frames[k]
        return f"{'>' if k == self.at else ' '} {file}:{line} ({function})"

    def _say(self, text: str) -> None:
        self.stdout.write(text + "\n")

    def _evaluate(self, text: str) -> Any:
        return eval(text, {}, dict(self.variables[self.at]))

    def onecmd(self, line: str) -> bool:
        try:
            return bool(super().onecmd(line))
        except (BreakpointQuit, SystemExit):
            raise
        except Exception as error:  # a typing mistake must not end the program
            self._say(f"*** {type(error).__name__}: {error}")
            return False

    def do_p(self, arg: str) -> None:
        """Print the value of an expression."""
        self._say(repr(self._evaluate(arg)))

    def do_pp(self, arg: str) -> None:
        """Print the value of an expression, as `print` does."""
        self._say(str(self._evaluate(arg)))

    def default(self, line: str) -> bool:
        """Anything else is an expression; the end of the input continues."""
        if line == "EOF":
            return True
        self.do_p(line)
        return False

    def emptyline(self) -> bool:
        return False

    def do_l(self, arg: str) -> None:
        """List the source around the current line."""
        file, line, _ = self.frames[self.at]
        for k in range(max(line - AROUND, 1), line + AROUND + 1):
            text = linecache.getline(file, k).rstrip()
            if text:
                self._say(f"{'->' if k == line else '  '} {k:4} {text}")

    do_list = do_l

    def do_bt(self, arg: str) -> None:
        """Show the frames."""
        self._say("\n".join(self._line(k) for k in range(len(self.frames))))

    def do_u(self, arg: str) -> None:
        """Go to the calling frame."""
        self.at = min(self.at + 1, len(self.frames) - 1)
        self._say(self._line(self.at))

    def do_d(self, arg: str) -> None:
        """Go back to the called frame."""
        self.at = max(self.at - 1, 0)
        self._say(self._line(self.at))

    def do_c(self, arg: str) -> bool:
        """Continue."""
        return True

    do_cont = do_continue = do_c

    def do_q(self, arg: str) -> bool:
        """End the program."""
        raise BreakpointQuit("the program was ended at a breakpoint")

    do_quit = do_q
