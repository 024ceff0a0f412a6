"""How much of JAX's public API is here: names, parameters, and what is left out with its reason.

    python tools/api_coverage.py            # needs jax
    python tools/api_coverage.py --missing  # also every name that is missing without a reason

A name counts if `spmd` has it under the same namespace. Names in `tools/api_exclusions.toml` mean
nothing outside XLA, or are left out on purpose: each has its reason there, and is not counted.
Parameters are compared by the names that a caller can write: those of functions that both sides
have, without positional-only ones and without the parameters excluded for a reason.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

# The distributions of `scipy.stats`, each a namespace of its own.
DISTRIBUTIONS = (
    "bernoulli beta betabinom binom cauchy chi2 dirichlet expon gamma gennorm geom gumbel_l "
    "gumbel_r laplace logistic multinomial multivariate_normal nbinom norm pareto poisson t "
    "truncnorm uniform vonmises wrapcauchy"
).split()

NAMESPACES = (
    "",
    "ad_checkpoint",
    "custom_batching",
    "custom_derivatives",
    "debug",
    "distributed",
    "dlpack",
    "dtypes",
    "export",
    "flatten_util",
    "image",
    "lax",
    "lax.linalg",
    "nn",
    "nn.initializers",
    "numpy",
    "numpy.fft",
    "numpy.linalg",
    "ops",
    "profiler",
    "random",
    "ref",
    "scipy.cluster.vq",
    "scipy.fft",
    "scipy.integrate",
    "scipy.interpolate",
    "scipy.linalg",
    "scipy.ndimage",
    "scipy.optimize",
    "scipy.signal",
    "scipy.sparse.linalg",
    "scipy.special",
    "scipy.stats",
    *(f"scipy.stats.{name}" for name in DISTRIBUTIONS),
    "sharding",
    "stages",
    "tree",
    "tree_util",
    "typing",
)


@dataclass(frozen=True, slots=True)
class Exclusions:
    """Names and parameters that are not counted, with the reason for each."""

    names: dict[str, str]
    suffixes: dict[str, str]
    parameters: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Exclusions:
        """Read a file of groups, each with a reason and what it covers."""
        names: dict[str, str] = {}
        suffixes: dict[str, str] = {}
        parameters: dict[str, str] = {}
        for group in tomllib.loads(path.read_text(encoding="utf-8"))["group"]:
            for table, key in (
                (names, "names"),
                (suffixes, "suffixes"),
                (parameters, "parameters"),
            ):
                table.update(dict.fromkeys(group.get(key, ()), group["reason"]))
        return cls(names, suffixes, parameters)

    def reason(self, name: str) -> str | None:
        """The reason that a name (`lax.sin_p`) is not counted; None if it is."""
        for suffix, why in self.suffixes.items():
            if name.endswith(suffix):
                return why
        return self.names.get(name)


@dataclass(slots=True)
class Coverage:
    """The names that were found in one namespace."""

    namespace: str
    present: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    excluded: dict[str, str] = field(default_factory=dict)
    compared: int = 0
    # name: (what only JAX takes, what only spmd takes)
    differ: dict[str, tuple[list[str], list[str]]] = field(default_factory=dict)

    @property
    def names(self) -> float:
        """The share of JAX's names that are here, in percent."""
        return _percent(len(self.present), len(self.present) + len(self.missing))

    @property
    def parameters(self) -> float:
        """The share of the functions compared whose parameters agree, in percent."""
        return _percent(self.compared - len(self.differ), self.compared)


def _percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 100.0


def measure(namespace: str, exclusions: Exclusions) -> Coverage | None:
    """Compare one namespace; None if this version of JAX has none of that name."""
    try:
        theirs = _module("jax", namespace)
    except ImportError:
        return None
    ours = _ours(namespace)
    found = Coverage(namespace)
    for name in sorted(_public(theirs)):
        full = f"{namespace}.{name}".lstrip(".")
        why = exclusions.reason(full)
        if ours is not None and hasattr(ours, name):
            found.present.append(name)
            _compare(found, name, getattr(theirs, name), getattr(ours, name), exclusions)
        elif why is not None:
            found.excluded[name] = why
        else:
            found.missing.append(name)
    return found


def _module(root: str, namespace: str) -> ModuleType:
    return importlib.import_module(f"{root}.{namespace}".rstrip("."))


def _ours(namespace: str) -> Any:
    """Our module of a namespace, or our object; None if there is neither."""
    try:
        return _module("spmd", namespace)
    except ImportError:
        parent, _, name = namespace.rpartition(".")
        return getattr(_ours(parent), name, None) if parent else None


def _public(module: ModuleType) -> list[str]:
    names = []
    for name in dir(module):
        # Removed names raise when they are asked for.
        value = None if name.startswith("_") else getattr(module, name, None)
        if value is not None and not isinstance(value, ModuleType):
            names.append(name)
    return names


def _compare(found: Coverage, name: str, theirs: Any, ours: Any, exclusions: Exclusions) -> None:
    if inspect.isclass(theirs) or inspect.isclass(ours) or type(theirs).__name__ == "ufunc":
        return  # constructors are for their classes' pages; a ufunc names no parameter but `where`
    first, second = _writable(theirs), _writable(ours)
    if first is None or second is None:
        return
    full = f"{found.namespace}.{name}".lstrip(".")

    def counts(p: str) -> bool:
        known = exclusions.parameters
        return not (p.startswith("_") or p in known or f"{full}:{p}" in known)

    found.compared += 1
    lacking = [p for p in first if p not in second and counts(p)]
    extra = [p for p in second if p not in first and counts(p)]
    if lacking or extra:
        found.differ[name] = (lacking, extra)


def _writable(function: Any) -> list[str] | None:
    """The parameters that a caller can name; None where Python cannot say."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return None
    unnamed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    return [
        p.name
        for p in parameters
        if p.kind not in unnamed and p.kind is not inspect.Parameter.VAR_KEYWORD
    ]


def report(rows: list[Coverage], exclusions: Exclusions, show_missing: bool) -> str:
    """The table, the differences in parameters, and the exclusions by reason."""
    lines = ["namespace            names            excluded  parameters equal"]
    for row in rows:
        total = len(row.present) + len(row.missing)
        lines.append(
            f"{row.namespace or '(top level)':20} {len(row.present):4}/{total:<4} "
            f"{row.names:5.1f} %   {len(row.excluded):4}     "
            f"{row.compared - len(row.differ):4}/{row.compared:<4} {row.parameters:5.1f} %"
        )
    lines.append("")
    for row in rows:
        for name, (lacking, extra) in row.differ.items():
            said = [f"lacks {', '.join(lacking)}"] if lacking else []
            said += [f"adds {', '.join(extra)}"] if extra else []
            lines.append(
                f"parameters: {row.namespace}.{name} {'; '.join(said)}".replace(": .", ": ")
            )
    if show_missing:
        lines += [f"missing: {row.namespace}.{name}" for row in rows for name in row.missing]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for name, why in row.excluded.items():
            reasons.setdefault(why, []).append(f"{row.namespace}.{name}".lstrip("."))
    lines.append("")
    for why, names in reasons.items():
        lines.append(f"excluded ({len(names)}): {why}")
        lines.append(f"    {' '.join(names)}")
    for parameter, why in exclusions.parameters.items():
        lines.append(f"parameter not compared: {parameter}: {why}")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Print the report; 2 where jax is not installed."""
    parser = argparse.ArgumentParser(
        description="Compare spmd's public names and parameters with JAX's."
    )
    parser.add_argument("--missing", action="store_true", help="list the names that are missing")
    options = parser.parse_args(argv)
    if importlib.util.find_spec("jax") is None:
        print("api_coverage: jax is not installed (pip install jax)", file=sys.stderr)
        return 2
    exclusions = Exclusions.read(Path(__file__).with_name("api_exclusions.toml"))
    rows = [row for n in NAMESPACES if (row := measure(n, exclusions)) is not None]
    print(report(rows, exclusions, options.missing))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
