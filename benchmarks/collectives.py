"""Collectives of every kind and size beside JAX, PyTorch and bare MPI, taking turns in one run.

Two settings: virtual devices of one process (spmd and JAX), and processes of this host (spmd and
MPI under mpirun; JAX and PyTorch over gloo). All processes of a setting are started once; the sides
then take turns block by block, each waiting in a read while another is timed (`ranks`). The table
is laid out like that of the OSU benchmarks: a line a size.

python -m benchmarks collectives [--quick] [--only "2 ranks"] [--json FILE] [--plot FILE.svg]
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.case import BOTH
from benchmarks.measure import ROOT, Failure, Result, environment, is_installed
from benchmarks.ranks import KINDS
from benchmarks.sharding import over_ranks

DEVICES, RANKS = (2, 4, 8), (2, 4)
SIZES = (4, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
QUICK_SIZES = (4, 64 << 10, 1 << 20)
DIGEST_SIZES = (4, 64 << 10, 1 << 20, 16 << 20)
# Larger ones of all devices together would not fit beside each other in a small machine's memory.
MOST_BYTES_IN_ALL = 512 << 20
BLOCKS, QUICK_BLOCKS = 4, 2
BLOCK_SECONDS, SAMPLES = 0.04, 4
START_SECONDS, ANSWER_SECONDS = 120.0, 120.0
MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_btl": "^ofi",
    "OMPI_MCA_osc": "^ucx",
}


@dataclass(frozen=True)
class Setting:
    """Who takes part: so many processes of so many devices each."""

    ranks: int
    devices: int

    def __str__(self) -> str:
        if self.ranks == 1:
            return f"{self.devices} devices"
        return f"{self.ranks} ranks"

    @property
    def members(self) -> int:
        """The size of the axis."""
        return self.ranks * self.devices

    @property
    def sides(self) -> tuple[str, ...]:
        """Whom it can be compared with."""
        return ("spmd", "jax") if self.ranks == 1 else ("spmd", "jax", "torch", "mpi")


SETTINGS = (*(Setting(1, n) for n in DEVICES), *(Setting(n, 1) for n in RANKS))


class JobError(RuntimeError):
    """The processes of a side failed or gave no answer."""


class Job:
    """All processes of one side of a setting."""

    def __init__(self, side: str, setting: Setting, folder: Path):
        self.side = side
        self._answers = folder / f"{side}-answers"
        self._answers.touch()
        self._read = 0
        self._pipes: list[int] = []
        self._log = (folder / f"{side}-log").open("w+")
        for rank in range(setting.ranks):
            pipe = folder / f"{side}-{rank}"
            os.mkfifo(pipe)
            # Open for both, so that it opens at once, whether or not the process has come.
            self._pipes.append(os.open(pipe, os.O_RDWR))
        self._processes = [
            subprocess.Popen(
                command,
                env=_environment(side, setting),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
            )
            for command in _commands(side, setting, folder)
        ]

    def ask(self, **command: Any) -> Any:
        """Have every process do something; rank 0's answer."""
        line = json.dumps(command).encode() + b"\n"
        for pipe in self._pipes:
            os.write(pipe, line)
        deadline = time.monotonic() + ANSWER_SECONDS + (0 if self._read else START_SECONDS)
        while time.monotonic() < deadline:
            text = self._answers.read_text()[self._read :]
            if "\n" in text:
                first = text[: text.index("\n") + 1]
                self._read += len(first)
                answer = json.loads(first)
                if "error" in answer:
                    raise JobError(f"rank {answer['rank']}: {answer['error']}")
                return answer["value"]
            if any(process.poll() is not None for process in self._processes):
                raise JobError(f"a process ended: {self._last_words()}")
            time.sleep(0.002)
        raise JobError(f"no answer for {ANSWER_SECONDS:.0f} s")

    def close(self) -> None:
        """End all processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                os.write(pipe, b"null\n")
        deadline = time.monotonic() + 5
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
        for pipe in self._pipes:
            os.close(pipe)
        self._log.close()

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return " / ".join(lines[-3:]) or "without a word"


def _commands(side: str, setting: Setting, folder: Path) -> list[list[str]]:
    program = [sys.executable, "-m", "benchmarks.ranks", side, str(folder), str(setting.ranks)]
    address = f"127.0.0.1:{_free_port()}"
    if setting.ranks == 1 or side in ("jax", "torch"):
        return [[*program, str(rank), address] for rank in range(setting.ranks)]
    mpirun = Path(sysconfig.get_path("scripts"), "mpirun")
    launcher = str(mpirun) if mpirun.exists() else "mpirun"
    return [[launcher, "-n", str(setting.ranks), *program, "-1", address]]


def _environment(side: str, setting: Setting) -> dict[str, str]:
    found = {**environment(side, setting.devices), **MPI_ENVIRONMENT}
    if setting.ranks > 1:  # a core each, as mpirun binds them
        found["OMP_NUM_THREADS"] = "1"
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class _Jobs:
    """The jobs of a setting. One that failed is started anew for the next case."""

    def __init__(self, setting: Setting):
        self._setting = setting
        self._jobs: dict[str, Job] = {}
        self._folders: list[tempfile.TemporaryDirectory[str]] = []

    def __getitem__(self, side: str) -> Job:
        if side not in self._jobs:
            folder = tempfile.TemporaryDirectory(prefix="spmd-bench-")
            self._folders.append(folder)
            self._jobs[side] = Job(side, self._setting, Path(folder.name))
        return self._jobs[side]

    def drop(self, side: str) -> None:
        self._jobs.pop(side).close()

    def close(self) -> None:
        for side in list(self._jobs):
            self.drop(side)
        for folder in self._folders:
            folder.cleanup()


@contextlib.contextmanager
def _jobs_of(setting: Setting) -> Iterator[_Jobs]:
    jobs = _Jobs(setting)
    try:
        yield jobs
    finally:
        jobs.close()


def measure_collectives(
    only: str, quick: bool, sides: Sequence[str], say: Callable[[str], None]
) -> list[Result | Failure]:
    """All settings, collectives and sizes whose name contains a text."""
    results: list[Result | Failure] = []
    sizes = QUICK_SIZES if quick else SIZES
    for setting in SETTINGS:
        cases = [
            (kind, nbytes)
            for kind in KINDS
            for nbytes in sizes
            if only in case_name(kind, setting, nbytes) and _fits(kind, setting, nbytes)
        ]
        if not cases:
            continue
        with _jobs_of(setting) as jobs:
            for kind, nbytes in cases:
                say(case_name(kind, setting, nbytes))
                wanted = [s for s in setting.sides if (not sides or s in sides) and is_installed(s)]
                blocks = QUICK_BLOCKS if quick else BLOCKS
                prepare = {"do": "prepare", "kind": kind, "nbytes": nbytes}
                name = case_name(kind, setting, nbytes)
                results += _measure(jobs, wanted, name, prepare, blocks)
    return results


def measure_over_ranks(
    only: str, quick: bool, sides: Sequence[str], say: Callable[[str], None]
) -> list[Result | Failure]:
    """Programs over arrays that are spread over ranks, beside JAX over gloo."""
    results: list[Result | Failure] = []
    wanted = [s for s in BOTH if (not sides or s in sides) and is_installed(s)]
    for ranks in RANKS:
        cases = [case for case in over_ranks(ranks) if only in case.name]
        if not cases:
            continue
        with _jobs_of(Setting(ranks, 1)) as jobs:
            for case in cases:
                say(case.name)
                prepare = {"do": "prepare_case", "case": case.name}
                blocks = QUICK_BLOCKS if quick else BLOCKS
                results += _measure(jobs, wanted, case.name, prepare, blocks, case.tolerance)
    return results


def _fits(kind: str, setting: Setting, nbytes: int) -> bool:
    """Whether inputs and results of all members fit in memory, for one side."""
    each = nbytes * (setting.members if kind == "all_gather" else 1)
    return each * setting.members <= MOST_BYTES_IN_ALL


def case_name(kind: str, setting: Setting, nbytes: int) -> str:
    """`collectives/psum, 2 ranks, 64 KiB`; the bytes are those that each member gives."""
    return f"collectives/{kind}, {setting}, {size_text(nbytes)}"


def size_text(nbytes: int) -> str:
    """4 B, 64 KiB, 16 MiB."""
    for factor, unit in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= factor:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def _measure(
    jobs: _Jobs,
    sides: Sequence[str],
    name: str,
    prepare: dict[str, Any],
    blocks: int,
    tolerance: float = 0.0,
) -> list[Result | Failure]:
    """One case: each side prepares it, then they take turns.

    Sides that tell the sizes of their results must agree to `tolerance`.
    """
    failures: list[Result | Failure] = []
    inner: dict[str, int] = {}
    rounds: dict[str, int] = {}
    sizes: list[float] = []
    for side in sides:
        with _noting(failures, jobs, name, side):
            seconds = jobs[side].ask(**prepare)
            if isinstance(seconds, dict):
                sizes = sizes or seconds["sizes"]
                seconds = agreed_seconds(seconds, sizes, tolerance)
            # All take as long: with as many calls as the slowest makes, the samples of a fast side
            # would be too short to read.
            inner[side] = min(max(1, math.floor(BLOCK_SECONDS / SAMPLES / seconds)), 2000)
            rounds[side] = min(max(1, math.floor(BLOCK_SECONDS / seconds)), SAMPLES)
    samples: dict[str, list[float]] = {side: [] for side in inner}
    for _ in range(blocks):
        for side in list(samples):
            with _noting(failures, jobs, name, side, samples):
                samples[side] += jobs[side].ask(do="time", samples=rounds[side], inner=inner[side])
    timed = [Result.of(name, side, found, inner[side]) for side, found in samples.items()]
    return [*timed, *failures]


def agreed_seconds(answer: dict[str, Any], sizes: Sequence[float], tolerance: float) -> float:
    """The seconds of an answer whose results are those of the first side."""
    pairs = zip(answer["sizes"], sizes, strict=True)
    if not all(math.isclose(a, b, rel_tol=tolerance) for a, b in pairs):
        raise JobError(f"other results: {answer['sizes']}, not {list(sizes)}")
    return answer["seconds"]


@contextlib.contextmanager
def _noting(
    failures: list[Result | Failure],
    jobs: _Jobs,
    name: str,
    side: str,
    samples: dict[str, list[float]] | None = None,
) -> Iterator[None]:
    """Turn the end of a side into a line of the report."""
    try:
        yield
    except JobError as error:
        failures.append(Failure(name, side, str(error)))
        jobs.drop(side)
        if samples is not None:
            del samples[side]


# ---- tables and plots ----------------------------------------------------------------------------

Figures = dict[tuple[str, str], dict[int, dict[str, float]]]


def figures_of(results: Sequence[Result]) -> Figures:
    """Seconds by (collective, setting), bytes and side."""
    sizes = {size_text(n): n for n in SIZES}
    found: Figures = {}
    for result in results:
        kind, setting, size = result.case.removeprefix("collectives/").split(", ")
        row = found.setdefault((kind, setting), {}).setdefault(sizes[size], {})
        row[result.side] = result.median
    return found


def osu_table(results: Sequence[Result]) -> str:
    """A block for each collective and setting: microseconds by size, bytes per second of spmd."""
    lines = []
    for (kind, setting), rows in figures_of(results).items():
        sides = [s for s in ("spmd", "mpi", "jax", "torch") if any(s in r for r in rows.values())]
        lines.append(f"# {kind} over {setting}, float32: average latency (us)")
        ratios = [f"{s}/spmd" for s in sides if s != "spmd"]
        head = [f"{'# Size':<12}", *(f"{s:>12}" for s in sides), *(f"{r:>12}" for r in ratios)]
        lines.append("".join([*head, f"{'spmd MB/s':>12}"]))
        for nbytes, row in sorted(rows.items()):
            cells = [f"{nbytes:<12}"]
            cells += [f"{row[s] * 1e6:>12.2f}" if s in row else f"{'-':>12}" for s in sides]
            own = row.get("spmd")
            for side in sides[1:] if sides[0] == "spmd" else []:
                cells.append(f"{row[side] / own:>12.2f}" if own and side in row else f"{'-':>12}")
            cells.append(f"{nbytes / own / 1e6:>12.1f}" if own else f"{'-':>12}")
            lines.append("".join(cells))
        lines.append("")
    return "\n".join(lines)


def digest(results: Sequence[Result]) -> str:
    """Tables in Markdown, of processes and of devices: a row a size, and the ratios to spmd's time.

    The first number of a cell is spmd's time, the others say how many times longer a side takes.
    """
    figures = figures_of(results)
    parts = []
    for chosen in ([s for s in SETTINGS if s.ranks > 1], [s for s in SETTINGS if s.ranks == 1]):
        settings = [s for s in chosen if any(str(s) == name for _, name in figures)]
        if not settings:
            continue
        rivals = [s for s in ("mpi", "jax", "torch") if s in settings[0].sides]
        lines = [
            f"| case | {' | '.join(map(str, settings))} |",
            "| --- " * (1 + len(settings)) + "|",
        ]
        for kind in KINDS:
            for nbytes in DIGEST_SIZES:
                cells = [
                    _cell(figures.get((kind, str(s)), {}).get(nbytes, {}), rivals) for s in settings
                ]
                if any(cells):
                    lines.append(f"| {kind}, {size_text(nbytes)} | {' | '.join(cells)} |")
        title = f"spmd's time, and how many times longer {', '.join(rivals)} take:"
        parts.append("\n".join([title, "", *lines]))
    return "\n\n".join(parts)


def _cell(row: dict[str, float], rivals: Sequence[str]) -> str:
    own = row.get("spmd")
    if own is None:
        return ""
    found = [row[side] / own if side in row else None for side in rivals]
    ratios = ["-" if r is None else f"{r:.1f}" if r < 10 else f"{r:.0f}" for r in found]
    micros = own * 1e6
    time_text = f"{micros:.3g} µs" if micros < 1000 else f"{micros / 1000:.3g} ms"
    return f"{time_text}: {', '.join(ratios)}"


def plot(results: Sequence[Result], path: Path) -> None:
    """Latency over size, a panel for each collective and setting; matplotlib draws it."""
    figures = figures_of(results)
    pyplot = importlib.import_module("matplotlib.pyplot")
    # Text as text, and nothing that changes from one run to the next.
    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "spmd"})
    settings = list(dict.fromkeys(setting for _, setting in figures))
    shape = {"nrows": len(settings), "ncols": len(KINDS), "squeeze": False, "sharex": True}
    drawing, panels = pyplot.subplots(figsize=(16, 3 * len(settings)), **shape)
    for (kind, setting), rows in figures.items():
        panel = panels[settings.index(setting)][KINDS.index(kind)]
        for side in dict.fromkeys(s for row in rows.values() for s in row):
            points = sorted((n, row[side] * 1e6) for n, row in rows.items() if side in row)
            panel.loglog(*zip(*points, strict=True), marker="o", markersize=3, label=side)
        panel.minorticks_off()
        panel.set_title(f"{kind}, {setting}", fontsize=9)
        panel.set_xlabel("bytes a member gives")
        panel.set_ylabel("µs a call")
        panel.legend(fontsize=7)
    drawing.tight_layout()
    drawing.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
