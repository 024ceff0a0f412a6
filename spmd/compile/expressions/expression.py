"""Expressions: a fused group's computation at one point of its space, as a graph of nodes.

`Expressions.pull(atom, index)` gives the node that computes a variable of the group's jaxpr at an
index. Moving equations only change the index; elementwise ones become nodes; inputs become loads.
`group_kernel` turns the nodes into the passes of a kernel.

The rule of an equation is a generator: it yields its reads, `(atom, index, guard)`, receives
the node of that, and returns its own node. `pull` keeps the rules under way on a list, so that a
chain of equations may be as long as a group can be, whatever the interpreter's stack allows.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, TypeAlias

import numpy as np

from spmd.base.record import record
from spmd.compile.expressions.index_map import (
    MOVES,
    ZERO,
    Affine,
    Index,
    dim,
    linear,
    operand_index,
    span,
    strides_of,
)
from spmd.compile.expressions.scalar_ops import ENTRIES, EXPENSIVE, NoKernelError, storage_dtype
from spmd.compile.kernel.dtypes import kind
from spmd.core.ir import Atom, Eqn, Literal, Var
from spmd.lax.windows import GatherScatterMode

REDUCTIONS = {
    "reduce_sum": "add",
    "reduce_prod": "mul",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "xor",
    "argmax": "argmax",
    "argmin": "argmin",
}

EXPENSIVE_COST = 16
GATHER_COST = 4


def need_dtype(dtype: np.dtype) -> str:
    """`storage_dtype`, or a NoKernelError."""
    found = storage_dtype(dtype)
    if found is None:
        raise NoKernelError(f"kernels do not know dtype {dtype}")
    return found


class Node:
    """One value of a kernel.

    `row` says that it depends on the inner dims, `stage` after how many reductions, one behind the
    other, it can be known, `cost` the cost of computing it again from memory.
    """

    __slots__ = ("cost", "data", "dtype", "kind", "operands", "row", "stage")

    def __init__(self, kind: str, dtype: str, operands: Sequence[Node], data: Any, row: bool):
        self.kind = kind
        self.dtype = dtype
        self.operands = tuple(operands)
        self.data = data
        self.row = row or any(o.row for o in operands)
        self.stage = max((o.stage + (o.kind == "reduce") for o in operands), default=0)
        self.cost = _own_cost(kind, data) + sum(o.cost for o in operands if o.row)
        if kind == "reduce":
            self.row = False


def _own_cost(kind: str, data: Any) -> int:
    if kind == "entry":
        return EXPENSIVE_COST if data[0] in EXPENSIVE else 1
    if kind == "load":
        return GATHER_COST if data.gathered else 1
    return 0 if kind == "const" else 1


@record
class LoadAt:
    """The place that a load reads: an argument, the address, and the roles of operands.

    The node's operands are the gathered index values, then the guard and the fill if there are any.
    """

    arg: int
    address: Affine
    gathered: tuple[int, ...] = ()
    guarded: bool = False
    filled: bool = False


# A value that a rule reads: the variable or literal, the index, and the guard of the read.
Wanted: TypeAlias = tuple[Atom, Index, Node | None]
# The rule of one equation, under way.
Rule: TypeAlias = Generator[Wanted, Node, Node]


def _of_whole_rows(guard: Node | None) -> Node | None:
    """The terms of a guard that are the same along the row: a reduction reads its whole row."""
    found: Node | None = None
    parts = [] if guard is None else [guard]
    while parts:
        part = parts.pop()
        if not part.row:
            found = part if found is None else Node("op", part.dtype, (found, part), "and", False)
        elif part.kind == "op" and part.data == "and":
            parts.extend(reversed(part.operands))
    return found


class Expressions:
    """Builds the nodes of one group."""

    def __init__(self, inputs: Sequence[Var], eqns: Sequence[Eqn], outer: Any, inner: Any):
        self.space = (*outer, *inner)
        self.inner = tuple(range(len(outer), len(self.space)))
        self._args = {v: k for k, v in enumerate(inputs)}
        self._makers = {v: eqn for eqn in eqns for v in eqn.outvars}
        self._memo: dict[Any, Node] = {}

    def pull(self, atom: Atom, index: Index, guard: Node | None = None) -> Node:
        """The node of a variable or literal at an index; with a guard, where that holds."""
        wanted = (atom, index, guard)
        found = self._known(wanted)
        if found is not None:
            return found
        under_way = [(wanted, self._rule(wanted))]
        while under_way:
            wanted, rule = under_way[-1]
            try:
                read = rule.send(found)  # type: ignore[arg-type]  # a rule starts with None
            except StopIteration as end:
                found = self._memo[wanted] = end.value
                under_way.pop()
                continue
            found = self._known(read)
            if found is None:
                under_way.append((read, self._rule(read)))
        assert found is not None
        return found

    def _known(self, wanted: Wanted) -> Node | None:
        """The node of an input, a literal, or a value made already."""
        atom, index, guard = wanted
        if isinstance(atom, Literal):
            return self.const(atom.val, need_dtype(atom.aval.dtype))
        found = self._memo.get(wanted)
        if found is None and atom in self._args:
            found = self.load(atom, linear(index, atom.aval.shape), guard=guard)
            self._memo[wanted] = found
        return found

    # ---- simple nodes ----

    def const(self, value: Any, dtype: str) -> Node:
        """A constant."""
        stored = np.asarray(value)
        key = ("const", dtype, stored.dtype, stored.tobytes())
        if key not in self._memo:
            self._memo[key] = Node("const", dtype, (), stored, row=False)
        return self._memo[key]

    def op(self, name: str, *operands: Node, dtype: str | None = None) -> Node:
        """A kernel operation whose result has the dtype of its last operand unless given."""
        return Node("op", dtype or operands[-1].dtype, operands, name, row=False)

    def index_value(self, affine: Affine, dtype: str) -> Node:
        """The value of an affine index as a number."""
        row = any(d in self.inner for d in affine.dims)
        return Node("iota", dtype, (), affine, row)

    def load(
        self,
        var: Atom,
        address: Affine,
        gathered: Sequence[tuple[Node, int]] = (),
        guard: Node | None = None,
        fill: Node | None = None,
    ) -> Node:
        """A read of one of the group's inputs."""
        if isinstance(var, Literal) or var not in self._args:
            raise NoKernelError("an operand that is read at computed places must be in memory")
        operands = [value for value, _ in gathered]
        operands += [node for node in (guard, fill) if node is not None]
        row = any(d in self.inner for d in address.dims)
        where = LoadAt(
            self._args[var],
            address,
            tuple(stride for _, stride in gathered),
            guard is not None,
            fill is not None,
        )
        return Node("load", need_dtype(var.aval.dtype), operands, where, row)

    def both(self, a: Node | None, b: Node | None) -> Node | None:
        if a is None or b is None:
            return b if a is None else a
        return self.op("and", a, b)

    # ---- equations ----

    def _rule(self, wanted: Wanted) -> Rule:
        """The rule of the equation that makes a variable."""
        atom, index, guard = wanted
        assert isinstance(atom, Var)
        eqn = self._makers[atom]
        name = eqn.prim.name
        if name in MOVES:
            return self._move(eqn, index, guard)
        if name in ENTRIES:
            return self._elementwise(eqn, index, guard)
        if name in REDUCTIONS:
            return self._reduction(eqn, index, guard)
        maker = getattr(self, f"_{name}", None)
        if maker is None:
            raise NoKernelError(f"no expression for {name}")
        return maker(eqn, index, guard)

    def _move(self, eqn: Eqn, index: Index, guard: Node | None) -> Rule:
        inside = operand_index(eqn, index, self.space)
        if inside is None:
            raise NoKernelError(f"{eqn.prim.name} at an index that is not affine")
        return (yield eqn.invars[0], inside, guard)

    def _elementwise(self, eqn: Eqn, index: Index, guard: Node | None) -> Rule:
        operands = []
        for a in eqn.invars:
            operands.append((yield a, index if a.aval.shape else (), guard))
        out = need_dtype(eqn.outvars[0].aval.dtype)
        return Node("entry", out, operands, (eqn.prim.name, eqn.params), row=False)

    def _reduction(self, eqn: Eqn, index: Index, guard: Node | None) -> Rule:
        axes = eqn.params["axes"]
        kept = iter(index)
        along = iter(self.inner)
        shape = eqn.invars[0].aval.shape
        inside = []
        for d, size in enumerate(shape):
            if d not in axes:
                inside.append(next(kept))
            else:  # dims of size 1 are not in the space
                inside.append(ZERO if size == 1 else dim(next(along), size))
        operand = yield eqn.invars[0], tuple(inside), _of_whole_rows(guard)
        out = need_dtype(eqn.outvars[0].aval.dtype)
        return Node("reduce", out, (operand,), REDUCTIONS[eqn.prim.name], row=False)

    def _iota(self, eqn: Eqn, index: Index, guard: Node | None) -> Rule:
        yield from ()  # reads nothing
        return self.index_value(
            index[eqn.params["dimension"]], need_dtype(eqn.outvars[0].aval.dtype)
        )

    def _concatenate(self, eqn: Eqn, index: Index, guard: Node | None) -> Rule:
        along = eqn.params["dimension"]
        position = self.position(index[along], eqn.outvars[0].aval.shape[along])
        result, start = None, 0
        for operand in eqn.invars:
            size = operand.aval.shape[along]
            if not size:
                continue
            end = self.const(start + size, position.dtype)
            inside = self.op("lt", position, end, dtype="bool")
            if start:
                least = self.const(start, position.dtype)
                above = self.op("ge", position, least, dtype="bool")
                inside = self.op("and", inside, above)
            moved = (*index[:along], index[along].scale(1, -start), *index[along + 1 :])
            value = yield operand, moved, self.both(guard, inside)
            result = value if result is None else self.op("select", inside, value, result)
            start += size
        if result is None:
            raise NoKernelError("an empty concatenation")
        return result

    def _pad(self, eqn: Eqn, index: Index, guard: Node | None) -> Rule:
        operand, padding = eqn.invars
        inside: Node | None = None
        moved = []
        for affine, size, config in zip(
            index, operand.aval.shape, eqn.params["padding_config"], strict=True
        ):
            low, high, between = config
            if between:
                raise NoKernelError("pad with interior padding")
            moved.append(affine.scale(1, -low))
            position = self.position(moved[-1], size)
            if low > 0:
                least = self.const(0, position.dtype)
                inside = self.both(inside, self.op("ge", position, least, dtype="bool"))
            if high > 0:
                end = self.const(size, position.dtype)
                inside = self.both(inside, self.op("lt", position, end, dtype="bool"))
        value = yield operand, tuple(moved), self.both(guard, inside)
        if inside is None:
            return value
        outside = yield padding, (), guard
        return self.op("select", inside, value, outside)

    def position(self, affine: Affine, most: int) -> Node:
        """An affine index to be compared with numbers up to `most`, in few bits if they do."""
        low, high = span(affine, self.space)
        narrow = max(most, high) < 1 << 31 and low >= -(1 << 31)
        return self.index_value(affine, "i32" if narrow else "i64")

    # ---- reads at computed places ----

    def start(self, atom: Atom, index: Index, guard: Node | None, most: int) -> Node:
        """An index value for comparisons with 0 and `most`, in few bits if all of them fit."""
        return self.narrowed(self.pull(atom, index, guard), most)

    def narrowed(self, value: Node, most: int) -> Node:
        """`value` as an index for comparisons with 0 and `most`, in few bits if all of them fit."""
        if kind(value.dtype) not in "iu" or value.dtype == "u64":
            raise NoKernelError(f"indices of {value.dtype}")
        narrow = value.dtype not in ("i64", "u32") and most < 1 << 31
        dtype = "i32" if narrow else "i64"
        return value if value.dtype == dtype else self.op("convert", value, dtype=dtype)

    def clamped(self, value: Node, most: int) -> Node:
        above = self.op("max", value, self.const(0, value.dtype))
        return self.op("min", above, self.const(most, value.dtype))

    def _dynamic_slice(self, eqn: Eqn, index: Index, guard: Node | None) -> Rule:
        operand, *starts = eqn.invars
        shape = operand.aval.shape
        strides = strides_of(operand.aval.shape)
        gathered = []
        for start, whole, size, stride in zip(
            starts, shape, eqn.params["slice_sizes"], strides, strict=True
        ):
            if whole != size:
                value = self.narrowed((yield start, (), None), whole - size)
                value = self.clamped(value, whole - size)
                gathered.append((value, stride))
        return self.load(operand, linear(index, shape), gathered, guard)

    def _gather(self, eqn: Eqn, index: Index, guard: Node | None) -> Rule:
        operand, indices = eqn.invars
        numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
        place = windows_at(numbers, index, operand.aval.ndim)
        fits: Node | None = None
        gathered = []
        strides = strides_of(operand.aval.shape)
        fill_mode = eqn.params["mode"] is GatherScatterMode.FILL_OR_DROP
        for component, d in enumerate(numbers.start_index_map):
            at = (*place.batch, ZERO.scale(1, component))
            most = operand.aval.shape[d] - sizes[d]
            start = self.narrowed((yield indices, at, guard), most)
            if fill_mode:
                fits = self.both(fits, self.within(start, most))
            else:
                start = self.clamped(start, most)
            gathered.append((start, strides[d]))
        address = linear(place.operand, operand.aval.shape)
        if fits is None:
            return self.load(operand, address, gathered, guard)
        dtype = need_dtype(operand.aval.dtype)
        fill = self.const(eqn.params["fill_value"], dtype)
        return self.load(operand, address, gathered, self.both(guard, fits), fill)

    def within(self, value: Node, most: int) -> Node:
        """Whether an index is in 0 to `most`: without its sign a negative one is too large."""
        dtype = "u32" if value.dtype == "i32" else "u64"
        return self.op(
            "le", self.op("convert", value, dtype=dtype), self.const(most, dtype), dtype="bool"
        )


@record
class Place:
    """A point of a stack of windows: its index vector, and the static part of its position."""

    batch: Index
    operand: Index


def index_of_start(eqn: Eqn, index: Index) -> Index | None:
    """The index at which a gather reads its start index for `index`; None if there are several."""
    numbers = eqn.params["dimension_numbers"]
    if len(numbers.start_index_map) != 1:
        return None
    return (*windows_at(numbers, index, eqn.invars[0].aval.ndim).batch, ZERO)


def windows_at(numbers: Any, index: Index, ndim: int) -> Place:
    """The index vector of an element of a gather's result, and its window offset.

    `operand` has the offset inside the window, and the position in batching dims.
    """
    offset_dims = numbers.offset_dims
    batch = tuple(a for d, a in enumerate(index) if d not in offset_dims)
    offsets = iter([index[d] for d in sorted(offset_dims)])
    paired = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    operand = []
    for d in range(ndim):
        if d in paired:
            operand.append(batch[paired[d]])
        elif d in numbers.collapsed_slice_dims:
            operand.append(ZERO)
        else:
            operand.append(next(offsets))
    return Place(batch, tuple(operand))
