"""The limits of this machine: copies and multiply-adds in native loops on all cores.

A case that says how many bytes it must move, or how much it must compute, gets one more side: the
time in which the machine copies that many bytes (half of them read, half written, through the
caches or past them, whichever is faster), or does that many multiply-adds between registers. The
loops run for milliseconds, so that starting them costs nothing, each thread on its own part, round
after round: data that is where a previous call left it. A program can be faster than this limit: if
it goes through its data forwards and backwards in turns, part of it is still in a cache.
`capacities` says what one core does, and all at once.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy

from benchmarks.case import Case
from spmd.compile.native.llvm.compiler import compile_texts, host

# Long enough for the start of the threads not to count.
ROUND_SECONDS = 4e-3
# Independent chains: more than latency times issue width of any processor so far, and no more than
# the registers of AVX2 hold.
CHAINS = 12
_TURNS = 1000


def _copy_text(lanes: int, name: str, how: str = "") -> str:
    vector = f"<{lanes} x float>"
    moves = "\n".join(
        f"  %o{k} = add i64 %at, {4 * lanes * k}\n"
        f"  %s{k} = getelementptr i8, ptr %source, i64 %o{k}\n"
        f"  %t{k} = getelementptr i8, ptr %target, i64 %o{k}\n"
        f"  %v{k} = load {vector}, ptr %s{k}, align 64\n"
        f"  store {vector} %v{k}, ptr %t{k}, align 64{how}"
        for k in range(4)
    )
    return f"""
define void @{name}(ptr %target, ptr %source, i64 %nbytes, i64 %rounds) {{
entry:
  br label %round
round:
  %r = phi i64 [0, %entry], [%next_r, %done]
  br label %move
move:
  %at = phi i64 [0, %round], [%next, %move]
{moves}
  %next = add i64 %at, {16 * lanes}
  %more = icmp ult i64 %next, %nbytes
  br i1 %more, label %move, label %done
done:
  %next_r = add i64 %r, 1
  %again = icmp ult i64 %next_r, %rounds
  br i1 %again, label %round, label %end
end:
  fence seq_cst
  ret void
}}
!0 = !{{i32 1}}
"""


def _fma_text(lanes: int) -> str:
    vector = f"<{lanes} x float>"
    phis = "\n".join(
        f"  %a{k} = phi {vector} [%start, %entry], [%b{k}, %turn]" for k in range(CHAINS)
    )
    work = "\n".join(
        f"  %b{k} = call {vector} @llvm.fma.v{lanes}f32({vector} %a{k}, {vector} %x, {vector} %x)"
        for k in range(CHAINS)
    )
    sums = "\n".join(
        f"  %c{k + 1} = fadd {vector} %{f'c{k}' if k else 'b0'}, %b{k + 1}"
        for k in range(CHAINS - 1)
    )
    return f"""
declare {vector} @llvm.fma.v{lanes}f32({vector}, {vector}, {vector})
define void @limit_fma(ptr %out, i64 %turns) {{
entry:
  %start = load {vector}, ptr %out, align 4
  %x = fmul {vector} %start, %start
  br label %turn
turn:
  %i = phi i64 [0, %entry], [%next, %turn]
{phis}
{work}
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, %turns
  br i1 %more, label %turn, label %end
end:
{sums}
  %behind = getelementptr i8, ptr %out, i64 {4 * lanes}
  store {vector} %c{CHAINS - 1}, ptr %behind, align 4
  ret void
}}
"""


class Limit:
    """Answers like a side's worker, with the time that the machine itself needs for a case."""

    def __init__(self, threads: int = 0) -> None:
        self.lanes = host().vector_bytes // 4
        self.threads = threads or len(os.sched_getaffinity(0))
        texts = [
            _copy_text(self.lanes, "limit_copy"),
            _copy_text(self.lanes, "limit_stream", ", !nontemporal !0"),
            _fma_text(self.lanes),
        ]
        addresses = compile_texts(texts)
        i64, pointer = ctypes.c_int64, ctypes.c_void_p
        copy = ctypes.CFUNCTYPE(None, pointer, pointer, i64, i64)
        self._ways = [copy(addresses[name]) for name in ("limit_copy", "limit_stream")]
        self._fma = ctypes.CFUNCTYPE(None, pointer, i64)(addresses["limit_fma"])
        # What each thread does in a number of rounds, and the part of a round that is the case.
        self._work: Callable[[int, int], None] = lambda thread, rounds: None
        self._scale = 1.0

    def prepare(self, case: Case) -> float:
        """Choose the loop of a case; give its time."""
        if not case.nbytes:
            self._products(case.flops)
            return min(self.samples(3, 1))
        seconds = []
        for way in self._ways:
            self._copies(case.nbytes, way)
            seconds.append(min(self.samples(3, 1)))
        best = min(seconds)
        self._copies(case.nbytes, self._ways[seconds.index(best)])
        return best

    def samples(self, count: int, inner: int) -> list[float]:
        """Seconds of the case's work, `count` times; each over as many rounds as it takes."""
        del inner
        rounds, seconds = 1, self._together(1)
        while seconds < ROUND_SECONDS:
            rounds *= max(2, math.ceil(ROUND_SECONDS / max(seconds, 1e-6)))
            seconds = self._together(rounds)
        return [self._together(rounds) / rounds * self._scale for _ in range(count)]

    def _copies(self, nbytes: int, copy: Callable[..., None]) -> None:
        # Each thread copies its part of half the bytes; whole cache lines, four vectors a turn.
        step = 16 * self.lanes
        part = max(step, nbytes // 2 // self.threads // step * step)
        memory = [_aligned(2 * part) for _ in range(self.threads)]

        def work(thread: int, rounds: int) -> None:
            place = memory[thread].__array_interface__["data"][0]
            copy(place + part, place, part, rounds)

        self._work, self._scale = work, nbytes / 2 / (part * self.threads)

    def _products(self, flops: int) -> None:
        per_round = 2 * self.lanes * CHAINS * _TURNS
        out = [numpy.full(2 * self.lanes, 0.5, numpy.float32) for _ in range(self.threads)]

        def work(thread: int, rounds: int) -> None:
            self._fma(out[thread].__array_interface__["data"][0], rounds * _TURNS)

        self._work, self._scale = work, flops / per_round / self.threads

    def _together(self, rounds: int) -> float:
        """The time of the slowest thread; all begin at once."""
        gate, seconds = threading.Barrier(self.threads), [0.0] * self.threads

        def run(thread: int) -> None:
            gate.wait()
            start = time.perf_counter()
            self._work(thread, rounds)
            seconds[thread] = time.perf_counter() - start

        others = [threading.Thread(target=run, args=(t,)) for t in range(1, self.threads)]
        for thread in others:
            thread.start()
        run(0)
        for thread in others:
            thread.join()
        return max(seconds)


# What `capacities` measures: the name, the unit, and the bytes or operations of a case.
_CAPACITIES = (
    ("multiply-adds", "GFLOP/s", Case("limit", lambda side: lambda: None, flops=10**9)),
    ("copies inside 1 MB", "GB/s", Case("limit", lambda side: lambda: None, nbytes=10**6)),
    ("copies inside 30 MB", "GB/s", Case("limit", lambda side: lambda: None, nbytes=3 * 10**7)),
)
_CAPACITY_SAMPLES = 7


def capacities() -> list[dict[str, Any]]:
    """The rates of one core by itself, and of all at once: median and best, in 1e9 a second.

    Cores share memory, and on a shared host more than that: all of them at once are seldom as fast
    as their number says, and a case that two threads compute in half the time is the exception.
    """
    alone, together = Limit(1), Limit()
    found = []
    for name, unit, case in _CAPACITIES:
        rates: dict[int, list[float]] = {1: [], together.threads: []}
        for limit in (alone, together):
            limit.prepare(case)
        for _ in range(_CAPACITY_SAMPLES):
            for limit in (alone, together):
                (seconds,) = limit.samples(1, 1)
                rates[limit.threads].append((case.nbytes or case.flops) / seconds / 1e9)
        cores = {str(n): {"median": median(r), "best": max(r)} for n, r in rates.items()}
        found.append({"name": name, "unit": unit, "cores": cores})
    return found


def _aligned(nbytes: int) -> numpy.ndarray:
    """Bytes that begin on a cache line.

    They are written first: all pages that nobody has written to are one page of zeros, which would
    be read from the nearest cache.
    """
    memory = numpy.ones(nbytes + 64, numpy.uint8)
    start = -memory.__array_interface__["data"][0] % 64
    return memory[start : start + nbytes]
