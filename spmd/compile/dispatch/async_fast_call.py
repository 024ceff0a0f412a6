"""The fast path of calls whose program runs in the queue: they are matched, not flattened.

The text of `python_fast_call.Writer` up to the entry point; behind it, what the executable does for
any call in the queue. That is Python, a few microseconds beside a program of a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmd.compile.dispatch.python_fast_call import Writer
from spmd.compile.executable.async_operands import copied_bytes, most_copied
from spmd.compile.native.runtime.async_queue import QUEUE
from spmd.compile.native.runtime.run import NativeProgram


def is_queued(leaves: Sequence[Any], native: NativeProgram) -> bool:
    """Whether calls like this one go through the queue as long as it is open."""
    return QUEUE.is_open and native.is_long and copied_bytes(leaves) <= most_copied(native)


Match = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def now_or_later(native: NativeProgram, now: Match, later: Match) -> Match:
    """The function that runs a program at once, for callers that wait at once, or in the queue."""
    jobs = QUEUE.jobs

    def match(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        left = native.calls_at_once
        if left and not jobs:
            native.calls_at_once = left - 1
            return now(args, kwargs)
        return later(args, kwargs)

    return match


def put_enqueued(
    writer: Writer, enqueue: Callable[..., Any], held: Sequence[str], count: int
) -> list[str]:
    """Write the call that goes into the queue; gives the names of its `count` results.

    `held` are the arrays that must have memory: what has none is an error of the general way.
    """
    writer.names |= {"QUEUE": QUEUE, "enqueue": enqueue}
    gone = [f" or {name}.owner is None" for name in held]
    writer.put(f"if not QUEUE.is_open{''.join(gone)}: return MISS")
    outs = [writer.fresh() for _ in range(count)]
    targets = "".join(f"{name}, " for name in outs)
    call = f"enqueue(({''.join(f'{name}, ' for name in writer.arrays)}))"
    writer.put(f"{targets}= {call}" if outs else call)
    return outs


class QueuedWriter(Writer):
    """Writes the function of one signature of a long program."""

    def results(self) -> None:
        """Write the call of the executable and the making of its results."""
        count = len(self.executable.out_avals)
        outs = put_enqueued(self, self.executable.enqueue, self.whole_arrays(), count)
        self.put("return " + self.tree(self.out_tree, iter(outs)))
