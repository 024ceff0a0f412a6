"""One side in a process of its own: prepares a case, then times blocks of calls on request.

The process reads commands from standard input, one JSON object a line, and answers each with one.
Between commands it blocks in a read, so that the other side has the machine to itself; two
frameworks in one process would compete with their thread pools. It answers once its own threads
sleep: NumPy's BLAS looks for work for a tenth of a second after a product, with a core each.

    {"prepare": case, "save": path} -> {"seconds": one call's time after warming up}
    {"samples": n, "inner": m}      -> {"seconds": [n averages over m calls each]}
    {"memory": case}                -> {"seconds": bytes that are planned for it}
    {"measured": case}              -> {"seconds": bytes by which the process grows in a call}
    any of them, if it raises       -> {"error": the exception}
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy

from benchmarks.cases import find_case
from benchmarks.limits import Limit
from benchmarks.memory import measured, planned
from benchmarks.sides import Side, load_side

# The results of which call are compared: a program whose state goes round has then shown that its
# gradients and updates are right.
COMPARED_CALL = 3
WARM_UP_CALLS = 10
WARM_UP_SECONDS = 0.1
MOST_WARM_UP_SECONDS = 1.0
# A process is at rest when it has used next to nothing of a few such times in a row.
REST_SECONDS = 0.01
RESTS = 3
MOST_REST_SECONDS = 1.0


def waiter(side: Side, result: Any) -> Callable[[Any], Any]:
    """The cheapest way to wait for a result on this side."""
    if side.name in ("numpy", "torch"):
        return lambda out: None
    if hasattr(result, "block_until_ready"):
        return lambda out: out.block_until_ready()
    return side.ready


def rest() -> None:
    """Wait until no thread of this process computes, or waits for work with a core."""
    end, calm = time.perf_counter() + MOST_REST_SECONDS, 0
    while calm < RESTS and time.perf_counter() < end:
        used = time.process_time()
        time.sleep(REST_SECONDS)
        calm = calm + 1 if time.process_time() - used < REST_SECONDS / 10 else 0


def leaves(result: Any) -> list[numpy.ndarray]:
    """The arrays of a result, in an order that all sides share."""
    if isinstance(result, dict):
        return [leaf for name in sorted(result) for leaf in leaves(result[name])]
    if isinstance(result, tuple | list):
        return [leaf for item in result for leaf in leaves(item)]
    return [numpy.asarray(result)]


class Bench:
    """The case in hand, ready to be timed."""

    def __init__(self, side: Side):
        self.side = side

    def prepare(self, case_name: str, save: str) -> float:
        """Build the case, write a result, warm up, and return the time of a call."""
        self.run = self.wait = None  # nothing of the last case stays in memory
        self.case = find_case(case_name)
        if self.side.name == "torch" and self.case.torch is not None:
            self.run = self.case.torch(self.side.top)
        else:
            self.run = self.case.make(self.side)
        for _ in range(COMPARED_CALL):
            result = self.run()
        self.wait = waiter(self.side, result)
        self.wait(result)
        numpy.savez(save, *leaves(result))
        del result
        start, calls, past = time.perf_counter(), 0, 0.0
        while past < MOST_WARM_UP_SECONDS and (calls < WARM_UP_CALLS or past < WARM_UP_SECONDS):
            self.wait(self.run())
            calls, past = calls + 1, time.perf_counter() - start
        return min(self.samples(3, 1))

    def samples(self, count: int, inner: int) -> list[float]:
        """Average seconds per call, `count` times, over `inner` calls each."""
        run, wait, now = self.run, self.wait, time.perf_counter
        assert run is not None and wait is not None
        seconds = []
        gc.collect()
        gc.disable()
        for _ in range(count):
            if self.case.wait:
                start = now()
                for _ in range(inner):
                    wait(run())
                seconds.append((now() - start) / inner)
            else:
                start = now()
                for _ in range(inner):
                    out = run()
                seconds.append((now() - start) / inner)
                wait(out)
        gc.enable()
        return seconds


class LimitBench(Limit):
    """The machine itself as a side."""

    side: Side

    def prepare(self, case_name: str, save: str) -> float:  # type: ignore[override]
        """Choose the native loop of a case; it has no values to compare."""
        del save
        return super().prepare(find_case(case_name))


def main() -> None:
    """Serve commands until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a framework prints must not look like an answer
    side = sys.argv[1]
    bench = LimitBench() if side == "limit" else Bench(load_side(side))
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer: Any
            if "memory" in command:
                answer = planned(find_case(command["memory"]), bench.side)
            elif "measured" in command:
                bench.run = bench.wait = None
                answer = measured(find_case(command["measured"]), bench.side)
            elif "prepare" in command:
                answer = bench.prepare(command["prepare"], command["save"])
            else:
                answer = bench.samples(command["samples"], command["inner"])
            reply = {"seconds": answer}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        rest()
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()
