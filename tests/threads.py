"""Work of tests in several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any


def in_threads(work: Callable[[Any], Any], given: Iterable[Any], seconds: float = 60.0) -> None:
    """Call `work(x)` for each `x` in a thread of its own, and wait until all have returned.

    Raises the first error of a thread. A thread that does not return fails the test.
    """
    errors: list[BaseException] = []

    def run(x: Any) -> None:
        try:
            work(x)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(x,), daemon=True) for x in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if errors:
        raise errors[0]
    late = sum(thread.is_alive() for thread in threads)
    assert not late, f"{late} of {len(threads)} threads had not returned after {seconds:g} s"
