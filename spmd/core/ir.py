"""Jaxprs: the frozen, typed, single-assignment form of a traced program.

A `Jaxpr` is a list of equations over variables, each of which has an aval. A `ClosedJaxpr` adds the
values of its constants. Both are never changed after they are made; passes build new ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from spmd.base.record import record
from spmd.base.source import UNKNOWN, Source
from spmd.core.aval import ShapedArray
from spmd.core.primitive import Primitive

NO_EFFECTS: frozenset[str] = frozenset()


class Var:
    """A variable of a jaxpr. Variables are told apart by identity."""

    __slots__ = ("aval",)

    def __init__(self, aval: ShapedArray):
        self.aval = aval

    def __repr__(self) -> str:
        return f"Var({self.aval.short()})"


class Literal:
    """A scalar constant written where it is used."""

    __slots__ = ("aval", "val")

    def __init__(self, val: Any, aval: ShapedArray):
        self.val = val
        self.aval = aval

    def __repr__(self) -> str:
        value = self.val.item() if isinstance(self.val, np.generic) else self.val
        return f"{value}:{self.aval.short()}"


Atom: TypeAlias = Var | Literal


@record(eq=False)
class Eqn:
    """One application of a primitive: `outvars = prim[params] invars`, made at `source`."""

    prim: Primitive
    invars: tuple[Atom, ...]
    outvars: tuple[Var, ...]
    params: dict[str, Any]
    effects: frozenset[str] = NO_EFFECTS
    source: Source = UNKNOWN

    def replace(self, **changes: Any) -> Eqn:
        """The same equation with some fields changed."""
        get = changes.get
        assert changes.keys() <= _FIELDS, changes.keys() - _FIELDS
        return Eqn(
            get("prim", self.prim),
            get("invars", self.invars),
            get("outvars", self.outvars),
            get("params", self.params),
            get("effects", self.effects),
            get("source", self.source),
        )

    @property
    def primitive(self) -> Primitive:
        return self.prim

    # JAX's names for what a rewritten equation takes over; the source says where it was made.
    ctx = None

    @property
    def source_info(self) -> Source:
        return self.source

    def stands_for(self) -> Any:
        """The closed jaxpr that is compiled in the equation's place; None if it is no call."""
        return self.prim.stands_for([a.aval for a in self.invars], self.params)

    def __str__(self) -> str:
        from_here = Names()
        return format_eqn(self, from_here)


_FIELDS = frozenset(Eqn.__match_args__)


class ShownParams(dict):
    """The parameters of an equation, which also has those that its text shows: JAX's names."""

    __slots__ = ("_invars", "_prim")

    def __init__(self, prim: Primitive, invars: tuple[Atom, ...], params: dict[str, Any]):
        super().__init__(params)
        self._prim, self._invars = prim, invars

    def __missing__(self, name: str) -> Any:
        assert self._prim.text is not None
        bare = Eqn(self._prim, self._invars, (), dict(self))
        return self._prim.text(bare, Names())[1][name]

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class Jaxpr:
    """Equations in order, with the variables that come in and the atoms that go out."""

    __slots__ = (
        "_by_primitive",
        "_nested",
        "_primitives",
        "arg_names",
        "constvars",
        "effects",
        "eqns",
        "invars",
        "name",
        "outvars",
    )

    def __init__(
        self,
        constvars: Sequence[Var],
        invars: Sequence[Var],
        eqns: Sequence[Eqn],
        outvars: Sequence[Atom],
        name: str = "",
        arg_names: Sequence[str] = (),
    ):
        self.constvars = tuple(constvars)
        self.invars = tuple(invars)
        self.eqns = tuple(eqns)
        self.outvars = tuple(outvars)
        self.effects = NO_EFFECTS.union(*[e.effects for e in eqns if e.effects])
        self.name = name
        # As the user wrote them, of the last inputs; constants may have become inputs before them.
        self.arg_names = tuple(arg_names)
        self._by_primitive: dict[Primitive, list[int]] | None = None
        self._nested: frozenset[Eqn] | None = None
        self._primitives: frozenset[str] | None = None

    @property
    def by_primitive(self) -> dict[Primitive, list[int]]:
        """The equations of each primitive that it has, by number."""
        if self._by_primitive is None:
            found: defaultdict[Primitive, list[int]] = defaultdict(list)
            for k, eqn in enumerate(self.eqns):
                found[eqn.prim].append(k)
            self._by_primitive = dict(found)
        return self._by_primitive

    def eqns_of(self, *prims: Primitive) -> list[tuple[int, Eqn]]:
        """The equations of some primitives, in order, with their numbers."""
        found, eqns = self.by_primitive, self.eqns
        numbers = [k for prim in prims if prim in found for k in found[prim]]
        return [(k, eqns[k]) for k in sorted(numbers)]

    @property
    def nested(self) -> frozenset[Eqn]:
        """The equations with closed jaxprs among their parameters; most programs have none."""
        if self._nested is None:
            self._nested = frozenset(_with_jaxprs(self.eqns))
        return self._nested

    @property
    def primitives(self) -> frozenset[str]:
        """The names of its primitives, and of those in the jaxprs nested in it."""
        if self._primitives is None:
            names = {prim.name for prim in self.by_primitive}
            for eqn in self.nested:
                for inner in bodies(eqn):
                    body = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
                    names |= body.primitives
            self._primitives = frozenset(names)
        return self._primitives

    @property
    def debug_info(self) -> Any:
        """The names of the function and of its arguments."""
        return self.name, self.arg_names

    def replace(self, **changes: Any) -> Jaxpr:
        """The same jaxpr with some fields changed; effects are always those of the equations."""
        changes.pop("effects", None)
        if "debug_info" in changes:
            changes["name"], changes["arg_names"] = changes.pop("debug_info")
        names = ("constvars", "invars", "eqns", "outvars", "name", "arg_names")
        return Jaxpr(**({n: getattr(self, n) for n in names} | changes))

    @property
    def in_avals(self) -> list[ShapedArray]:
        return [v.aval for v in self.invars]

    @property
    def out_avals(self) -> list[ShapedArray]:
        return [v.aval for v in self.outvars]

    def pretty_print(self, **_: Any) -> str:
        """The text of the jaxpr; JAX's options for it are accepted without effect."""
        return str(self)

    def __str__(self) -> str:
        return format_jaxpr(self, Names())

    __repr__ = __str__


class ClosedJaxpr:
    """A jaxpr together with the values of its constants."""

    __slots__ = ("__weakref__", "consts", "jaxpr")

    def __init__(self, jaxpr: Jaxpr, consts: Sequence[Any] = ()):
        assert len(jaxpr.constvars) == len(consts), (len(jaxpr.constvars), len(consts))
        self.jaxpr = jaxpr
        self.consts = tuple(consts)

    @property
    def literals(self) -> tuple[Any, ...]:
        return self.consts  # as interpreters of jaxprs call them

    @property
    def in_avals(self) -> list[ShapedArray]:
        return self.jaxpr.in_avals

    @property
    def out_avals(self) -> list[ShapedArray]:
        return self.jaxpr.out_avals

    @property
    def eqns(self) -> tuple[Eqn, ...]:
        return self.jaxpr.eqns

    @property
    def effects(self) -> frozenset[str]:
        return self.jaxpr.effects

    def pretty_print(self, **_: Any) -> str:
        """The text of the jaxpr; JAX's options for it are accepted without effect."""
        return str(self)

    def __str__(self) -> str:
        return str(self.jaxpr)

    __repr__ = __str__


def _with_jaxprs(eqns: Sequence[Eqn]) -> list[Eqn]:
    """The equations with closed jaxprs among their parameters."""
    found = []
    for eqn in eqns:
        for value in eqn.params.values():
            kind = type(value)
            if kind is ClosedJaxpr or (kind is tuple and ClosedJaxpr in map(type, value)):
                found.append(eqn)
                break
    return found


def subjaxprs(params: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The jaxprs inside an equation's parameters, with the parameter's name."""
    for name, value in params.items():
        if isinstance(value, (Jaxpr, ClosedJaxpr)):
            yield name, value
        elif isinstance(value, tuple):
            for item in value:
                if isinstance(item, (Jaxpr, ClosedJaxpr)):
                    yield name, item


def bodies(eqn: Eqn) -> list[Any]:
    """The jaxprs inside an equation; of a call the one that is compiled in its place."""
    if eqn.prim.inline is not None:
        return [eqn.prim.inline(eqn.params)]
    return [inner for _, inner in subjaxprs(eqn.params)]


def all_eqns(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[Eqn]:
    """Every equation of a jaxpr and of the jaxprs nested in it, outer before inner."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.params:
            for inner in bodies(eqn):
                yield from all_eqns(inner)


# ---- printing ----------------------------------------------------------------------------------


class Names:
    """Gives variables their letters, in order of first appearance."""

    def __init__(self) -> None:
        self._names: dict[Var, str] = {}
        self._given = 0

    def __call__(self, var: Atom) -> str:
        if isinstance(var, Literal):
            return repr(var)
        if var not in self._names:
            self._names[var] = letters(self._given)
            self._given += 1
        return self._names[var]

    def share(self, inside: Sequence[Atom], outside: Sequence[Atom]) -> None:
        """Give variables the names of others, which have the same values."""
        taken: set[Var] = set()
        # Not strict: messages about an equation with too few operands show its text.
        for inner, outer in zip(inside, outside, strict=False):
            if isinstance(inner, Var) and isinstance(outer, Var) and outer not in taken:
                self._names[inner] = self(outer)
                taken.add(outer)

    def typed(self, var: Atom) -> str:
        return f"{self(var)}:{var.aval.short()}"


def letters(n: int) -> str:
    """a, b, ..., z, ba, bb, ...: the number n in base 26."""
    text = chr(ord("a") + n % 26)
    while n >= 26:
        n //= 26
        text = chr(ord("a") + n % 26) + text
    return text


# The width of lines, as JAX has it: a group stays on one line if it ends within it, and the items
# of a list go to the next line after one that does not.
_WIDTH = 80


def _format_param(value: Any, names: Names, column: int, base: int) -> str:
    """The text of a parameter that begins at `column` of a line which `base` spaces indent."""
    if isinstance(value, ClosedJaxpr):
        return format_jaxpr(value.jaxpr, names, column, base)
    if isinstance(value, Jaxpr):
        return format_jaxpr(value, names, column, base)
    if isinstance(value, tuple) and any(isinstance(v, (Jaxpr, ClosedJaxpr)) for v in value):
        parts = [_format_param(v, names, base + 2, base + 2) for v in value]
        flat = f"({' '.join(parts)})"
        if "\n" not in flat and column + len(flat) <= _WIDTH:
            return flat
        return "(\n" + "\n".join(_indent(part, 2) for part in parts) + "\n)"
    if isinstance(value, np.dtype):
        return str(value) if value.names is None else "key<fry>"
    if isinstance(value, frozenset):  # in one order, whatever the hashes are
        return f"frozenset({{{', '.join(sorted(map(repr, value)))}}})"
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__
    return str(value)


def _fill(
    begin: str, items: Sequence[str], column: int, base: int, indent: int, separator: str = ""
) -> str:
    """A text that begins at `column`, and a list; lines after the first have `indent` spaces.

    All lines will stand `base` columns further to the right.
    """
    text, at = begin, column + len(begin)
    for k, item in enumerate(items):
        last = k == len(items) - 1
        if k and at + 1 > _WIDTH:
            text, at = f"{text}\n{' ' * indent}", base + indent
        elif k:
            text, at = text + " ", at + 1
        item = item if last else item + separator
        text, at = text + item, at + len(item)
    return text


def _indent(text: str, by: int) -> str:
    return "\n".join(" " * by + line for line in text.split("\n"))


def format_eqn(eqn: Eqn, names: Names, used: set[Any] | None = None, column: int = 0) -> str:
    """One equation, `b:f32[3] = sin a`, on lines that begin at `column`."""
    # As `make_jaxpr` of JAX names variables: results before those of jaxprs inside.
    outs = [
        names.typed(v) if used is None or v in used else f"_:{v.aval.short()}" for v in eqn.outvars
    ]
    name, params = eqn.prim.name, dict(sorted(eqn.params.items()))
    if eqn.prim.text is not None:
        name, params = eqn.prim.text(eqn, names)
    params = {k: v for k, v in params.items() if not k.startswith("_")}
    text = _fill("", outs, column, column, 2) + (f" = {name}" if outs else name)
    if params:
        inside = column + 2
        parts = [
            f"{k}={_format_param(v, names, inside + len(k) + 1, inside)}" for k, v in params.items()
        ]
        flat = "[" + " ".join(parts) + "]"
        if "\n" in flat or _end(text, column) + len(flat) > _WIDTH:
            text += "[\n" + "\n".join(_indent(p, 2) for p in parts) + "\n]"
        else:
            text += flat
    ins = [names(v) for v in eqn.invars]
    before, _, line = text.rpartition("\n")
    return (before + "\n" if before else "") + _fill(line + " ", ins, column, column, 2)


def _end(text: str, column: int) -> int:
    """The column after a text that begins at `column`, as do all of its lines."""
    return column + len(text) - text.rfind("\n") - 1


def format_jaxpr(jaxpr: Jaxpr, names: Names, column: int = 0, base: int = 0) -> str:
    """A whole jaxpr, as `make_jaxpr` users know it.

    It begins at `column` of a line which `base` spaces indent.
    """
    consts = [names.typed(v) for v in jaxpr.constvars]
    ins = [names.typed(v) for v in jaxpr.invars]
    used: set[Any] = {v for v in jaxpr.outvars if isinstance(v, Var)}
    used.update(v for e in jaxpr.eqns for v in e.invars if isinstance(v, Var))
    eqns = [format_eqn(e, names, used, base + 4) for e in jaxpr.eqns]
    outs = [names(v) for v in jaxpr.outvars]
    close = ",)" if len(outs) == 1 else ")"
    first = f"{{ lambda {' '.join(consts)}; "
    flat = f"{first}{' '.join(ins)}. let {'; '.join(eqns)} in ({', '.join(outs)}{close}"
    if "\n" not in flat and column + len(flat) <= _WIDTH:
        return flat + " }"
    head = _fill(first, ins, column, base, 4)
    last = _fill("  in (", outs, base, base, 4, ",")
    body = "\n".join(_indent(e, 4) for e in eqns) if eqns else "    "
    return f"{head}. let\n{body}\n{last}{close} }}"
