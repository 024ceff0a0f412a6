"""The data that a call moves between devices: each collective, its bytes, and its source line."""

from __future__ import annotations

import linecache
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from spmd.base.amounts import size_text
from spmd.base.record import record
from spmd.base.source import UNKNOWN, Source
from spmd.base.tree import keystr, tree_flatten_with_path
from spmd.collectives.volume import KINDS, axes_of, received
from spmd.compile.executable.memory_analysis import MemoryAnalysis, memory_of
from spmd.compile.executable.mesh_program import MeshProgram
from spmd.compile.executable.select import partitioned
from spmd.compile.passes.hoist_invariants import hoist_invariants
from spmd.compile.passes.simplify import simplify
from spmd.core.aval import ShapedArray
from spmd.core.ir import ClosedJaxpr, Eqn, Var, subjaxprs
from spmd.debug.program import Program
from spmd.debug.savings import NOTABLE, Saving, savings_of
from spmd.partition.propagate import Cell, Plan, Scope
from spmd.partition.unasked import type_text
from spmd.sharding.named import NamedSharding
from spmd.sharding.operand_layouts import layouts_of

NO_VALUES: Mapping[Source, str] = {}


@record
class Collective:
    """One collective of a program, as each device takes part in it.

    `kind` is all_reduce, all_gather, reduce_scatter, all_to_all, permute or exchange; `axes` are
    mesh axes and `devices` the product of their sizes. `value` is the type of its operand on one
    device, `times` how often it runs in a call (a loop that only run time counts: once), `received`
    the bytes that a device receives each time by the formula of its kind (of an exchange: that
    device which receives the most), and `source` the line that asks for it.
    """

    kind: str
    axes: tuple[Any, ...]
    devices: int
    value: str
    times: int
    received: int
    source: Source

    def __str__(self) -> str:
        over = ", ".join(map(str, self.axes))
        often = f", {self.times} times" if self.times != 1 else ""
        return f"{self.kind} {self.value} over {over} ({self.devices}): {self._bytes()}{often}"

    def _bytes(self) -> str:
        return f"{size_text(self.received)} received"


def collectives_of(program: Program) -> list[Collective]:
    """The collectives of a compiled call, in the order of its program.

    It leaves out exchanges that only the message of a failed check would need.
    """
    found = program.executable
    if not isinstance(found, MeshProgram):
        return []
    return moves_of(found.params["jaxpr"], found.core.mesh.shape)


def moves_of(closed: ClosedJaxpr, sizes: Mapping[Any, int]) -> list[Collective]:
    """The collectives of a jaxpr over axes of these sizes; what is asked for twice is made once.

    A collective that a loop repeats unchanged is made before the loop.
    """
    return list(_walk(simplify(hoist_invariants(closed)), sizes, 1))


def _walk(closed: ClosedJaxpr, sizes: Mapping[Any, int], times: int) -> Iterator[Collective]:
    """The collectives of a jaxpr, each of which runs so many times, over axes of these sizes."""
    shown = _for_messages(closed)
    for k, eqn in enumerate(closed.eqns):
        if eqn.prim.name in KINDS and k not in shown:
            yield _collective(eqn, sizes, times)
        inside = times * int(eqn.params.get("length", 1)) if eqn.prim.name == "scan" else times
        for _, inner in subjaxprs(eqn.params):
            yield from _walk(inner, sizes, inside)


def _for_messages(closed: ClosedJaxpr) -> frozenset[int]:
    """The collectives, by number, that only bring what messages of failed checks show."""
    if not any(eqn.prim.name == "check" for eqn in closed.eqns):
        return frozenset()
    needed, found = set(closed.jaxpr.outvars), []
    for k, eqn in reversed(list(enumerate(closed.eqns))):
        if eqn.prim.name == "check":
            needed.add(eqn.invars[0])
        elif eqn.effects or not needed.isdisjoint(eqn.outvars):
            needed.update(eqn.invars)
        elif eqn.prim.name in KINDS:
            found.append(k)
    return frozenset(found)


def _collective(eqn: Eqn, sizes: Mapping[Any, int], times: int) -> Collective:
    axes, aval = axes_of(eqn), eqn.invars[0].aval
    n = math.prod(sizes.get(a, 1) for a in axes)
    value = aval.update(vma=frozenset()).short()
    kind, source = KINDS[eqn.prim.name], eqn.source or UNKNOWN
    return Collective(kind, axes, n, value, times, received(eqn, sizes), source)


def by_line(
    found: Sequence[Collective],
    values: Mapping[Source, str] = NO_VALUES,
    savings: Sequence[Saving] = (),
) -> list[str]:
    """The collectives below the lines that ask for them, and what is said of lines' values.

    Below a collective stands what a constraint would save.
    """
    asked: dict[tuple[str, int], list[Collective]] = {}
    lines, left = [], list(savings)
    for c in found:
        asked.setdefault(_line(c.source), []).append(c)
    said = {_line(source): (source, text) for source, text in values.items()}
    for c in found:
        said.setdefault(_line(c.source), (c.source, ""))
    for line, (source, text) in said.items():
        code = linecache.getline(source.file, source.line).strip()
        lines.append("    ".join(filter(None, [f"{source.short}  {code}".rstrip(), text])))
        for c in asked.get(line, ()):
            lines.append(f"  {c}")
            key = c.kind, line, c.received
            about = next((s for s in left if (s.kind, _line(s.source), s.received) == key), None)
            if about is not None:
                left.remove(about)
                lines[-1] += f"; {about.cause}"
                lines += [f"    {about}"] if about.saved else []
    return lines


def _line(source: Source) -> tuple[str, int]:
    return source.file, source.line


def values_of(program: Program) -> dict[Source, str]:
    """For each line whose value is split: the value's type, and the cause of the split."""
    plans: list[Plan] = []
    traced = program.traced
    partitioned(traced.program, layouts_of(traced.split.leaves), plans)
    rows = [row for plan in plans for row in _rows(plan.top)]
    read = {(_line(eqn.source), atom) for eqn, _ in rows for atom in eqn.invars if _is_var(atom)}
    found: dict[tuple[str, int], tuple[Source, dict[str, Cell]]] = {}
    inside: dict[tuple[str, int], str] = {}  # the last value of the line that is split
    left: set[tuple[str, int]] = set()
    before = ("", 0)
    for eqn, scope in rows:
        line = _line(eqn.source)
        if line != before:
            left.add(before)  # what a backward pass computes for the line comes later
            before = line
        if line in left or not eqn.source.line:
            continue
        _, said = found.setdefault(line, (eqn.source, {}))
        for var in eqn.outvars:
            cell = scope.cells.get(var)
            if cell is None:
                continue
            text = _decided(var.aval, cell)
            if (line, var) not in read:
                said[text] = cell
            if any(cell.axes):
                inside[line] = text
    texts = {}
    for line, (source, said) in found.items():
        if any(any(cell.axes) for cell in said.values()):
            texts[source] = "; ".join(list(said)[-_MOST_VALUES:])
        elif line in inside:
            texts[source] = inside[line]
    return texts


# So many values are shown of a line that computes many, a loss and its gradients for example.
_MOST_VALUES = 3


def _is_var(atom: Any) -> bool:
    return isinstance(atom, Var)


def _decided(aval: ShapedArray, cell: Cell) -> str:
    """A value's type, and the cause of its split."""
    split = [by for axes, by in zip(cell.axes, cell.by, strict=True) if axes and by]
    decided = " and ".join(dict.fromkeys(split))
    return f"{_type(aval, cell.axes)}{f', by {decided}' if decided else ''}"


def _rows(scope: Scope) -> Iterator[tuple[Eqn, Scope]]:
    """The equations of a program in its order, those of loops and calls in their place."""
    for k, eqn in enumerate(scope.closed.eqns):
        for inner in scope.inner.get(k, ()):
            yield from _rows(inner)
        yield eqn, scope


class Movement:
    """How a program is laid out and what it moves; `str` gives the text that `sharding` prints."""

    def __init__(self, program: Program):
        self.program = program
        self.collectives = collectives_of(program)
        self.values = values_of(program)

    @property
    def received(self) -> int:
        """The bytes that a device receives in a call."""
        return sum(c.received * c.times for c in self.collectives)

    @cached_property
    def savings(self) -> list[Saving]:
        """The largest moves of a call, why they are made, and what a constraint would save."""
        if not any(c.received >= NOTABLE for c in self.collectives):
            return []
        traced = self.program.traced
        return savings_of(traced.program, layouts_of(traced.split.leaves))

    @cached_property
    def memory(self) -> MemoryAnalysis:
        """The memory that a call needs on a device."""
        return memory_of(self.program.executable)

    def __str__(self) -> str:
        found = self.program.executable
        if not isinstance(found, MeshProgram):
            return "a program of one device: no argument is over a mesh, and nothing is constrained"
        names = self.program.traced.signature
        lines = [f"{names.name} over {found.core.outer_mesh}"]
        shardings = zip(found.input_shardings, found.in_avals, strict=True)
        arguments = self.program.traced.jaxpr.jaxpr.arg_names
        for k, (sharding, aval) in enumerate(shardings):
            name = arguments[k] if k < len(arguments) else f"argument {k}"
            lines.append(f"  {name}: {_laid_out(aval, sharding)}")
        lines += by_line(self.collectives, self.values, self.savings)
        tree = self.program.traced.out_tree
        paths, _ = tree_flatten_with_path(tree.unflatten(range(tree.num_leaves)))
        results = zip(paths, found.output_shardings, found.out_avals, strict=True)
        lines += [f"  result{keystr(path)}: {_laid_out(a, s)}" for (path, _), s, a in results]
        count = sum(c.times for c in self.collectives)
        lines.append(f"{count} collectives; each device receives {size_text(self.received)}")
        return "\n".join([*lines, self._held()])

    def _held(self) -> str:
        """The most that a device holds at one time, and what."""
        memory = self.memory
        parts = {
            "arguments": memory.argument_size_in_bytes,
            "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
            "constants": memory.constant_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
        }
        said = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in parts.items() if nbytes)
        total = size_text(memory.peak_memory_in_bytes)
        return f"a device holds at most {total}" + (f": {said}" if said else "")


def _laid_out(aval: Any, sharding: NamedSharding | None) -> str:
    """The type of an argument or a result."""
    if sharding is None:
        return f"{aval.short()} unused"
    return _type(aval, [sharding.spec.axes_of(d) for d in range(aval.ndim)])


def _type(aval: Any, split: Sequence[Sequence[Any]]) -> str:
    """A type as explicit mode writes it, `f32[8@x,4]`."""
    return type_text(aval.short().partition("[")[0], aval.shape, split)
