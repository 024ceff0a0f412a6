"""How much of JAX's public API is here: names, parameters, and what is left out with its reason.

    python tools/api_coverage.py            # needs jax
    python tools/api_coverage.py --missing  # also every name that is missing without a reason

Every module of JAX that can be imported is a namespace, and so is every class in one: its methods
and properties are the names. A module's names are those that it defines or exports (`__all__`, or
`from a import b as b`), not what it imports for its own use. A name counts if `spmd` has it under
the same namespace, or `spmd.as_jax` where that gives a module of JAX's inner parts. Names in
`tools/api_exclusions.toml` mean nothing outside XLA, or are left out on purpose: each has its
reason there. The table does not count them; its last line says what the share is if they count as
missing.

Signatures are compared whole: the names of the parameters, their order, kinds and defaults. A
parameter here may be more than JAX asks for (by position *and* by name, where JAX allows one of
the two; after JAX's own, with a default): every call that JAX takes is taken, and `extra` lists
them.
"""

from __future__ import annotations

import argparse
import ast
import enum
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import tomllib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any, TypeVar

from spmd.as_jax.finder import resolve
from spmd.as_jax.refuse import refusal

# What is below `jax` and no part of its API: programs that are run as scripts.
_SCRIPTS = ("tools", "collect_profile", "cloud_tpu_init")
# These need what JAX does not install (absl, TensorStore, TensorFlow): they would be counted on
# some machines only.
_NEED_MORE = (
    "experimental.array_serialization",
    "experimental.jax2tf",
    "experimental.mosaic",
    "experimental.roofline",
    "experimental.source_mapper",
    "experimental.sparse.test_util",
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
    of_class: bool = False
    # name: what is different
    differ: dict[str, list[str]] = field(default_factory=dict)

    @property
    def names(self) -> float:
        """The share of JAX's names that are here, in percent."""
        return _percent(len(self.present), len(self.present) + len(self.missing))

    @property
    def parameters(self) -> float:
        """The share of the functions compared whose parameters agree, in percent."""
        return _percent(self.compared - len(self.differ), self.compared)

    def add(self, other: Coverage) -> None:
        """Count the names of another namespace as well, under their whole names."""
        prefix = f"{other.namespace}.".lstrip(".")
        self.present += [prefix + name for name in other.present]
        self.missing += [prefix + name for name in other.missing]
        self.excluded |= {prefix + name: why for name, why in other.excluded.items()}
        self.differ |= {prefix + name: said for name, said in other.differ.items()}
        self.compared += other.compared


def _percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 100.0


def namespaces() -> list[str]:
    """Every module of JAX that can be imported, below `jax`; the first is `jax` itself."""
    found: list[str] = []

    def walk(module: ModuleType) -> None:
        found.append(module.__name__.partition(".")[2])
        for child in pkgutil.iter_modules(getattr(module, "__path__", ())):
            if child.name.startswith("_") or child.name in _SCRIPTS:
                continue
            name = f"{module.__name__}.{child.name}"
            if name.partition(".")[2] in _NEED_MORE:
                continue
            try:
                walk(importlib.import_module(name))
            except ImportError:
                continue

    walk(importlib.import_module("jax"))
    return found


def measure(namespace: str, exclusions: Exclusions) -> Coverage | None:
    """Compare one namespace, a module or a class; None if this version of JAX has none of it."""
    theirs = _theirs(namespace)
    if theirs is None:
        return None
    ours = _ours(namespace)
    found = Coverage(namespace, of_class=inspect.isclass(theirs))
    refused = refusal(f"jax.{namespace}")
    for name in _members(theirs) if inspect.isclass(theirs) else sorted(_public(theirs)):
        full = f"{namespace}.{name}".lstrip(".")
        why = refused or exclusions.reason(full)
        place = next((place for place in ours if _has(place, name)), None)
        if place is not None and _is_refused(getattr(place, name, None)):
            found.excluded[name] = (
                "it can be imported by programs for JAX, and says why it can't be used"
            )
        elif refused is None and place is not None:
            found.present.append(name)
            first, second = (_parameters(side, name) for side in (theirs, place))
            _compare(found, name, first, second, exclusions)
        elif why is not None:
            found.excluded[name] = why
        else:
            found.missing.append(name)
    return found


# Libraries reach into these; what their classes hold is each system's own.
_INNER = ("api_util", "core", "experimental.hijax", "extend", "interpreters", "ref.AbstractRef")


def _has(place: Any, name: str) -> bool:
    """Whether a module or a class has a name; fields of a dataclass are those of its objects."""
    return hasattr(place, name) or name in getattr(place, "__dataclass_fields__", ())


def _is_refused(value: Any) -> bool:
    """Whether a name can be imported under `spmd.as_jax`, and refuses to be used."""
    return type(value).__module__ == "spmd.as_jax.refuse"


def classes(rows: Iterable[Coverage]) -> list[str]:
    """The classes among the names that are here, as namespaces; each once, where it is first."""
    found: dict[int, str] = {}
    for row in rows:
        theirs = _theirs(row.namespace)
        for name in row.present:
            value = getattr(theirs, name)
            known = isinstance(value, type) and value.__module__.startswith("jax")
            whole = f"{row.namespace}.{name}".lstrip(".")
            inner = any(f"{whole}.".startswith(f"{module}.") for module in _INNER)
            if known and not inner and not issubclass(value, (BaseException, enum.Enum)):
                found.setdefault(id(value), whole)
    return list(found.values())


def _theirs(namespace: str) -> Any:
    """JAX's module or class of a namespace; None if it has none."""
    try:
        return importlib.import_module(f"jax.{namespace}".rstrip("."))
    except ImportError:
        parent, _, name = namespace.rpartition(".")
        return getattr(_theirs(parent), name, None) if namespace else None


def _ours(namespace: str) -> list[Any]:
    """Our modules or classes of a namespace: the one below `spmd`, and that of `spmd.as_jax`."""
    found: list[Any] = []
    facade = resolve(f"jax.{namespace}".rstrip("."))
    for name in (f"spmd.{namespace}".rstrip("."), facade):
        try:
            found += [importlib.import_module(name)] if name else []
        except ImportError:
            continue
    parent, _, last = namespace.rpartition(".")
    if not found and namespace:
        found = [getattr(place, last) for place in _ours(parent) if hasattr(place, last)]
    return list({id(place): place for place in found}.values())


def _public(module: ModuleType) -> list[str]:
    """The names that a module defines or exports, without modules and removed names."""
    names = []
    for name in _exported(module):
        # Removed names raise when they are asked for.
        value = None if name.startswith("_") else getattr(module, name, None)
        if value is not None and not isinstance(value, (ModuleType, TypeVar)):
            names.append(name)
    return names


def _exported(module: ModuleType) -> set[str]:
    if hasattr(module, "__all__"):
        return set(module.__all__)
    tree = ast.parse(inspect.getsource(module))
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names.update(alias.name for alias in node.names if alias.asname == alias.name)
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names


def _members(cls: type) -> list[str]:
    """The public methods and properties that a class, or a class of JAX above it, defines."""
    found: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("jax"):
            found.update(n for n in vars(base) if not n.startswith("_"))
    return sorted(found)


def _parameters(place: Any, name: str) -> list[inspect.Parameter] | None:
    """The parameters of a function or method; None for what is none, or where Python can't say."""
    value, bound = getattr(place, name, None), False
    if inspect.isclass(place):
        value = inspect.getattr_static(place, name, value)
        bound = not isinstance(value, staticmethod)
        value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    if inspect.isclass(value) or not callable(value) or type(value).__name__ == "ufunc":
        # The names below a class say what its objects take; a ufunc of JAX names no parameters
        # but `out` and `where`, which it refuses.
        return None
    try:
        found = list(inspect.signature(value).parameters.values())
    except (ValueError, TypeError):
        return None
    return found[1:] if bound else found


def _compare(
    found: Coverage,
    name: str,
    first: list[inspect.Parameter] | None,
    second: list[inspect.Parameter] | None,
    exclusions: Exclusions,
) -> None:
    if first is None or second is None:
        return
    full = f"{found.namespace}.{name}".lstrip(".")

    def counts(p: inspect.Parameter) -> bool:
        known = exclusions.parameters
        return not (p.name.startswith("_") or p.name in known or f"{full}:{p.name}" in known)

    found.compared += 1
    differences = compare_signatures(
        [p for p in first if counts(p)], [p for p in second if counts(p)]
    )
    if differences:
        found.differ[name] = differences


_KINDS = inspect.Parameter
_BY_POSITION = (_KINDS.POSITIONAL_ONLY, _KINDS.POSITIONAL_OR_KEYWORD)
_BY_NAME = (_KINDS.KEYWORD_ONLY, _KINDS.POSITIONAL_OR_KEYWORD)


def compare_signatures(theirs: list[inspect.Parameter], ours: list[inspect.Parameter]) -> list[str]:
    """What a caller who knows JAX's signature finds to be different here, in words.

    >>> def parameters(f): return list(inspect.signature(f).parameters.values())
    >>> compare_signatures(parameters(lambda a, b=1: a), parameters(lambda b, c=2: b))
    ['lacks a', 'b is at place 0, not 1', 'b has no default, not 1']
    """
    said: list[str] = []
    places = [[p.name for p in side if p.kind in _BY_POSITION] for side in (theirs, ours)]
    known = {p.name: p for p in ours}
    takes = {p.kind for p in ours}
    for p in theirs:
        named, placed = p.kind in _BY_NAME, p.kind in _BY_POSITION
        mine = known.get(p.name)
        if p.kind in (_KINDS.VAR_POSITIONAL, _KINDS.VAR_KEYWORD):
            if p.kind not in takes:
                said.append(f"lacks {'*' if p.kind is _KINDS.VAR_POSITIONAL else '**'}{p.name}")
        elif mine is None and p.kind is _KINDS.POSITIONAL_ONLY:
            place = places[0].index(p.name)  # nobody can write this name
            if place >= len(places[1]) and _KINDS.VAR_POSITIONAL not in takes:
                said.append(f"lacks {p.name}")
            elif place < len(places[1]):
                said += _default(p, known[places[1][place]])
        elif mine is None:
            said.append(f"lacks {p.name}")
        else:
            if named and mine.kind not in _BY_NAME:
                said.append(f"{p.name} has no name")
            if placed and mine.kind not in _BY_POSITION:
                said.append(f"{p.name} is by name only")
            elif placed and places[0].index(p.name) != places[1].index(p.name):
                where = [side.index(p.name) for side in places]
                said.append(f"{p.name} is at place {where[1]}, not {where[0]}")
            said += _default(p, mine)
    for p in ours:
        optional = p.default is not p.empty or p.kind in (
            _KINDS.VAR_POSITIONAL,
            _KINDS.VAR_KEYWORD,
        )
        unknown = p.name not in {q.name for q in theirs}
        if unknown and not optional and p.name not in places[1][: len(places[0])]:
            said.append(f"asks for {p.name}")
    return said


def _default(theirs: inspect.Parameter, ours: inspect.Parameter) -> list[str]:
    """The words of a default that is another one."""
    if theirs.default is theirs.empty or not _is_plain(theirs.default):
        # A default where JAX has none takes every call; markers are each system's own, and JAX's
        # may say that the argument must be given.
        return []
    if ours.default is ours.empty:
        return [f"{ours.name} has no default, not {_plain(theirs.default)}"]
    mine, wanted = _plain(ours.default), _plain(theirs.default)
    return [f"{ours.name} has default {mine}, not {wanted}"] if mine != wanted else []


def _is_plain(value: Any) -> bool:
    """Whether a default is a value that a caller could write."""
    simple = (bool, int, float, complex, str, bytes, tuple, frozenset, NoneType, enum.Enum)
    return callable(value) or isinstance(value, simple)


def _plain(value: Any) -> str:
    """A default in words that are equal where two systems mean the same."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    return repr(value)


def _line(row: Coverage) -> str:
    total = len(row.present) + len(row.missing)
    return (
        f"{row.namespace or '(top level)':40} {len(row.present):4}/{total:<4} "
        f"{row.names:5.1f} %   {len(row.excluded):4}     "
        f"{row.compared - len(row.differ):4}/{row.compared:<4} {row.parameters:5.1f} %"
    )


def _said(row: Coverage) -> str:
    counted = len(row.present) + len(row.missing)
    equal = len(row.present) - len(row.differ)
    return (
        f"{row.namespace}: {_percent(equal, counted):.1f} % of {counted} names are here with "
        f"JAX's parameters; {_percent(equal, counted + len(row.excluded)):.1f} % of "
        f"{counted + len(row.excluded)} with those that are left out for a reason"
    )


def report(rows: list[Coverage], exclusions: Exclusions, show_missing: bool) -> str:
    """The table, the differences in parameters, and the exclusions by reason."""
    lines = [f"{'namespace':40} names            excluded  parameters equal"]
    whole = Coverage("all modules"), Coverage("all classes")
    for row in rows:
        lines += [_line(row)] if row.present or row.missing or row.excluded else []
        whole[row.of_class].add(row)
    lines += ["", *map(_line, whole), "", *map(_said, whole), ""]
    for row in rows:
        for name, said in row.differ.items():
            lines.append(f"parameters: {f'{row.namespace}.{name}'.lstrip('.')} {'; '.join(said)}")
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
    warnings.simplefilter("ignore")  # of modules that JAX is about to remove
    rows = [row for n in namespaces() if (row := measure(n, exclusions)) is not None]
    rows += [row for n in classes(rows) if (row := measure(n, exclusions)) is not None]
    print(report(rows, exclusions, options.missing))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
