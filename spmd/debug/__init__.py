"""Looking into compiled programs: what a call becomes, what it costs, where its time goes.

What looks inside is imported when it is first asked for, like the compiler itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spmd.compile.deferred import Deferred
from spmd.core.errors import ArgumentError

if TYPE_CHECKING:
    from spmd.debug.timing import Profile

__all__ = ["profile"]

_timing = Deferred("spmd.debug.timing")


def profile(fun: Callable[..., Any], *, repeats: int = 10) -> Callable[..., Profile]:
    """Time each step of a compiled function: `print(profile(f)(*args))` shows a table.

    `fun` may be jitted, pmapped, or a plain function, which is then jitted. The program is compiled
    a second time with a clock between its steps and run `repeats` times (after two runs that do not
    count); each step's time is the median over the runs. Nothing is donated. Steps of a loop that
    runs on several threads show the time of one thread; its own row is what passed on the clock.
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
