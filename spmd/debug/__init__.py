"""Inspection of programs: their values while they run, the form of a call, its costs.

The inspection modules are imported at their first use, like the compiler itself.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spmd.base.errors import ArgumentError
from spmd.base.lazy_import import Deferred
from spmd.compile.lazy import allocator as _allocator
from spmd.compile.lazy import async_queue as _queue
from spmd.debug.debugger import debug_breakpoint as breakpoint
from spmd.debug.picture import (
    inspect_array_sharding,
    visualize_array_sharding,
    visualize_sharding,
)
from spmd.debug.printing import debug_log as log
from spmd.debug.printing import debug_print as print
from spmd.debug.progress import loading, step
from spmd.debug.replicated import assert_replicated
from spmd.lax.callback import Place, here
from spmd.lax.callback import debug_callback as callback

if TYPE_CHECKING:
    from spmd.debug.communication import Collective, Movement
    from spmd.debug.expectation import CollectivesExpected
    from spmd.debug.explain import Explanation
    from spmd.debug.timing import Profile

__all__ = [
    "Place",
    "assert_replicated",
    "breakpoint",
    "callback",
    "collectives",
    "expect_collectives",
    "here",
    "inspect_array_sharding",
    "loading",
    "log",
    "memory_stats",
    "print",
    "profile",
    "sharding",
    "show",
    "step",
    "visualize_array_sharding",
    "visualize_sharding",
]

# Not in `compile/lazy.py`: no module of the compiler names one of a higher floor.
_communication = Deferred("spmd.debug.communication")
_expectation = Deferred("spmd.debug.expectation")
_explain = Deferred("spmd.debug.explain")
_program = Deferred("spmd.debug.program")
_timing = Deferred("spmd.debug.timing")


def collectives(fun: Callable[..., Any]) -> Callable[..., list[Collective]]:
    """List what a call moves between devices: `collectives(f)(*args)`; the call does not run.

    `args` are arrays of any shapes and dtypes, or a `ShapeDtypeStruct` with a sharding for each.
    The result holds a record for each collective of the program in its order: `kind`, `axes`,
    `devices`, `value`, `times`, `received` (the bytes that a device receives each time) and
    `source`, the line that asks for it. It is empty for a program of one device. Moves
    that only the message of a failed check needs are left out.

    >>> rows = spmd.NamedSharding(spmd.make_mesh((4,), ("x",)), spmd.P("x"))
    >>> x = spmd.device_put(np.ones((8, 8), np.float32), rows)
    >>> [str(c) for c in spmd.debug.collectives(lambda x: x.sum(0))(x)]
    ['all_reduce f32[8] over x (4): 48 B received']
    """

    def of(*args: Any, **kwargs: Any) -> list[Collective]:
        return _communication.collectives_of(_program.compile_call(fun, args, kwargs))

    return of


def expect_collectives(at_most: int | str | None = None, **counts: int) -> CollectivesExpected:
    """Expect that the calls in a `with` block run certain collectives, and no others.

    `counts` are numbers by kind: all_reduce, all_gather, reduce_scatter, all_to_all, permute,
    exchange. `at_most` is the most that each device may receive in all, in bytes or as text like
    "8 MB"; alone, it says nothing of kinds. A loop counts each of its iterations, but one that only
    run time counts has one. The block's value has `collectives` and `received`, those that ran so
    far.

    Raises `ExpectationError`, an `AssertionError`, at the end of the block if that is not so: it
    names each collective with its line. Raises `ArgumentError` for an unknown kind or unit.

    >>> rows = spmd.NamedSharding(spmd.make_mesh((4,), ("x",)), spmd.P("x"))
    >>> x = spmd.device_put(np.ones((8, 8), np.float32), rows)
    >>> with spmd.debug.expect_collectives(all_reduce=1, at_most="64 B") as moved:
    ...     y = spmd.jit(lambda x: x.sum(0))(x)
    >>> moved.received
    48
    """
    return _expectation.CollectivesExpected(at_most, counts)


def sharding(fun: Callable[..., Any], *, show: bool = True) -> Callable[..., Movement]:
    """Print how a call is laid out and what it moves: `sharding(f)(*args)`; it does not run.

    The text has the type of each argument and result with the mesh axes that split its dims. For
    each line of the user's it has the type of the value that the line computes, and the cause of
    its split; the collectives that the line causes follow, with the bytes that a device receives.
    Of the largest ones, from 64 KiB on, it tells which operation wants the value how, and what a
    constraint would save: the program is partitioned again with the value laid out in other ways,
    and the bytes of both are counted. The last lines are totals: the bytes that a device receives
    in a call, and the most that it holds at one time, after the plan of the program's memory.
    `args` are arrays of any shapes and dtypes. Returns an object with `collectives`, as
    `collectives` gives them, `received`, the bytes in all, `savings`, what is said of the largest
    moves, and `memory`, as `Compiled.memory_analysis` gives it; its `str` is the text, which
    `show=False` does not print.

    >>> rows = spmd.NamedSharding(spmd.make_mesh((4,), ("x",)), spmd.P("x"))
    >>> x = spmd.device_put(np.ones((8, 8), np.float32), rows)
    >>> spmd.debug.sharding(spmd.jit(lambda x: x * 2))(x).received
    <lambda> over Mesh('x': 4, axis_types=(Explicit,))
      x: f32[8@x,8]
    ...   f32[8@x,8], by its type
      result: f32[8@x,8]
    0 collectives; each device receives 0 B
    a device holds at most 128 B: arguments 64 B, results 64 B
    0
    """

    def of(*args: Any, **kwargs: Any) -> Movement:
        found = _communication.Movement(_program.compile_call(fun, args, kwargs))
        if show:
            builtins.print(found)
        return found

    return of


def show(fun: Callable[..., Any], *, lines: int = 60) -> Callable[..., Explanation]:
    """Print what a call becomes: `show(f)(*args)`; the call is compiled but not run.

    The text has the jaxpr, its form after each pass, the steps of the program with the bytes they
    read and write and the operations they compute, those that return to Python (with `!`, and why),
    and the memory it needs. Of a mapped function it is the program that each device runs. No list
    gets longer than `lines`. The result has it all as fields: `kernels`, `products`,
    `collectives`, `host_steps`, `steps`, `passes`, `jaxpr`, `bytes`, `flops`, `memory`,
    `peak_bytes`; `str` of it is the text.

    >>> import spmd, spmd.numpy as snp
    >>> found = spmd.debug.show(lambda x: snp.sum(snp.sin(x) * 2))(snp.arange(1000.0))
    <lambda>: traced in ...
    >>> len(found.kernels), found.bytes, found.flops
    (1, 4004, 3000)
    """
    if lines < 1:
        raise ArgumentError(f"show: lines={lines} must be at least 1")

    def explain(*args: Any, **kwargs: Any) -> Explanation:
        found = _explain.explain(fun, args, kwargs, lines)
        builtins.print(found)
        return found

    return explain


def memory_stats() -> dict[str, int]:
    """Bytes of the recycling allocator of the host's memory, by JAX's names where JAX has them.

    `bytes_in_use` are in arrays and running programs, `bytes_waiting` were and will be used again,
    `bytes_reserved` are both together, `peak_bytes_reserved` is the most there has been, and
    `num_allocs` says how often the system was asked for a block. Results of a few kilobytes and
    arrays that NumPy made are not among them.

    >>> import spmd, spmd.numpy as snp
    >>> before = spmd.debug.memory_stats()["bytes_in_use"]
    >>> x = snp.ones(1_000_000).block_until_ready()
    >>> spmd.debug.memory_stats()["bytes_in_use"] - before >= 4_000_000
    True
    """
    _queue.QUEUE.reap()
    return _allocator.statistics()


def profile(fun: Callable[..., Any], *, repeats: int = 10) -> Callable[..., Profile]:
    """Time each step of a compiled function: `print(profile(f)(*args))` shows a table.

    `fun` may be jitted, pmapped, or a plain function, which is then jitted. The program is compiled
    a second time with a clock between its steps and run `repeats` times (after two runs that do not
    count); each step's time is the median over the runs. Nothing is donated. Steps of a loop that
    runs on several threads show the time of one thread; its own row is the time on the clock.
    **All processes of a multi-process program must make the call**, as with the program itself.

    >>> import spmd, spmd.numpy as snp
    >>> found = spmd.debug.profile(lambda x: snp.sum(snp.sin(x) * 2))(snp.arange(10.0))
    >>> [step.info.kind for step in found.steps]
    ['kernel']
    >>> found.seconds > 0
    True
    """
    if repeats < 1:
        raise ArgumentError(f"profile: repeats={repeats} must be at least 1")
    return lambda *args, **kwargs: _timing.measure(fun, args, kwargs, repeats)
