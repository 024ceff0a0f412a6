"""Kernels of fused groups: the nodes of a group become the passes of one kernel.

The nodes of the group's outputs are distributed over the kernel's passes. A node that depends on
the inner dims is computed in ROW passes, one that does not in POINT passes, each as early as the
reductions it needs allow. A value that a later pass needs again is computed again if that is cheap,
and kept in a row buffer if it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spmd.base.record import record
from spmd.compile.expressions.expression import Expressions, Node, need_dtype
from spmd.compile.expressions.index_map import Affine, index_along, strides_of
from spmd.compile.expressions.scalar_ops import ENTRIES, NoKernelError
from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.ir import Kernel
from spmd.core.aval import ShapedArray
from spmd.core.ir import ClosedJaxpr

# A node may be computed again in a later pass if it costs at most this (a load costs 1, an exp 16).
RECOMPUTE_COST = 4


@record
class Space:
    """The space of a group, and for each of its outputs which space dim each dim runs along."""

    outer: tuple[int, ...]
    inner: tuple[int, ...]
    outputs: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.outer + self.inner

    def __str__(self) -> str:
        outer, inner = ("x".join(map(str, dims)) or "1" for dims in (self.outer, self.inner))
        return f"{outer}({inner})" if self.inner else outer


@record
class Layout:
    """The layout of an output in a larger array: array `array` has `size` elements."""

    array: int
    size: int
    offset: int
    strides: tuple[int, ...]


def group_name(group: ClosedJaxpr) -> str:
    """A short name that says what a group does: `exp+reduce_sum+div`."""
    dull = ("broadcast_in_dim", "reshape", "convert_element_type", "copy", "squeeze")
    names = [e.prim.name for e in group.eqns if e.prim.name not in dull] or ["move"]
    return "+".join(names if len(names) <= 4 else [*names[:2], f"{len(names) - 3}more", names[-1]])


def build_kernel(group: ClosedJaxpr, space: Space, layouts: Sequence[Layout | None] = ()) -> Kernel:
    """The kernel of a group.

    Its arguments are the group's inputs, the arrays of which outputs are parts (`layouts` has an
    entry for each output, or none at all), then the other outputs.
    """
    jaxpr = group.jaxpr
    graph = Expressions(jaxpr.invars, jaxpr.eqns, space.outer, space.inner)
    results = []
    for atom, along in zip(jaxpr.outvars, space.outputs, strict=True):
        index = index_along(along, space.sizes)
        results.append(graph.pull(atom, index))
    emitter = _Emitter(group, space, layouts or [None] * len(results))
    emitter.emit(results)
    return emitter.builder.build()


class NodeWriter:
    """Writes single nodes with a kernel builder; `ins` are its numbers of the group's inputs."""

    def __init__(self, builder: Builder, ins: Sequence[int], space: Space):
        self.builder = builder
        self.ins = ins
        self.space = space
        self.has_rows = bool(space.inner)

    def write(self, node: Node, operands: list[int]) -> int:
        """One node as kernel instructions."""
        b = self.builder
        match node.kind:
            case "const":
                return b.const(node.data, node.dtype)
            case "iota":
                return self.write_index(node.data, node.dtype)
            case "entry":
                name, params = node.data
                made = ENTRIES[name](b, operands, params, node.dtype)
                if b.dtype(made) != node.dtype:
                    raise NoKernelError(f"{name} gives {b.dtype(made)}, not {node.dtype}")
                return made
            case "op" if node.data == "convert":
                return b.convert(operands[0], node.dtype)
            case "op":
                return b.op(node.data, *operands)
            case "load":
                return self.write_load(node, operands)
        raise AssertionError(node.kind)

    def written(
        self, node: Node, values: dict[Node, int], known: Callable[[Node], int | None]
    ) -> int:
        """The value of a node: its operands are written before it, the first operand first.

        `values` gets the written nodes, `known` tells the values that there are.
        """
        waiting = [node]
        found = None
        while waiting:
            at = waiting[-1]
            found = known(at)
            if found is None:
                operands: list[int] = []
                for operand in at.operands:
                    value = known(operand)
                    if value is None:
                        waiting.append(operand)
                        break
                    operands.append(value)
                else:
                    found = values[at] = self.write(at, operands)
            if found is not None:
                waiting.pop()
        assert found is not None
        return found

    def write_index(self, affine: Affine, dtype: str) -> int:
        """The number that an affine index is, computed in 32 bits if `dtype` has no more."""
        b, wide = self.builder, "i32" if dtype == "i32" else "i64"
        total = None
        for d, coefficient in affine.terms:
            term = b.iota(d, wide)
            if coefficient != 1:
                term = b.op("mul", term, b.const(coefficient, wide))
            total = term if total is None else b.op("add", total, term)
        if total is None:
            return b.convert(b.const(affine.offset, wide), dtype)
        if affine.offset:
            total = b.op("add", total, b.const(affine.offset, wide))
        return b.convert(total, dtype)

    def write_load(self, node: Node, operands: list[int]) -> int:
        where = node.data
        count = len(where.gathered)
        gathered = list(zip(operands[:count], where.gathered, strict=True))
        rest = operands[count:]
        guard = rest.pop(0) if where.guarded else None
        fill = rest.pop(0) if where.filled else None
        in_row = node.row or not self.has_rows
        return self.builder.load(
            self.ins[where.arg],
            self.strides(where.address, in_row),
            where.address.offset,
            gathered,
            guard,
            fill,
        )

    def strides(self, address: Affine, in_row: bool) -> list[int]:
        """One stride per space dim that the pass has."""
        count = len(self.space.sizes) if in_row else len(self.space.outer)
        strides = [0] * count
        for d, coefficient in address.terms:
            strides[d] = coefficient
        return strides


class _Emitter(NodeWriter):
    """Distributes nodes over passes and writes them with a kernel builder."""

    def __init__(self, group: ClosedJaxpr, space: Space, layouts: Sequence[Layout | None]):
        b = Builder(space.outer, space.inner)
        ins = [b.arg(need_dtype(v.aval.dtype), v.aval.size) for v in group.jaxpr.invars]
        super().__init__(b, ins, space)
        self.out_shapes = [v.aval.shape for v in group.jaxpr.outvars]
        self.layouts = layouts
        self.outs = self.output_args([v.aval for v in group.jaxpr.outvars])
        self.points: dict[Node, int] = {}  # values of POINT passes and reductions
        self.rows: dict[Node, int] = {}  # values of the ROW pass being written
        self.buffers: dict[Node, int] = {}

    def output_args(self, avals: Sequence[ShapedArray]) -> list[int]:
        """The argument that each output is written to."""
        whole: dict[int, tuple[str, int]] = {}
        for aval, layout in zip(avals, self.layouts, strict=True):
            if layout is not None:
                whole[layout.array] = (need_dtype(aval.dtype), layout.size)
        b = self.builder
        arrays = {k: b.arg(*whole[k], "out") for k in sorted(whole)}
        return [
            b.arg(need_dtype(aval.dtype), aval.size, "out")
            if layout is None
            else arrays[layout.array]
            for aval, layout in zip(avals, self.layouts, strict=True)
        ]

    # ---- the plan of passes ----

    def emit(self, results: Sequence[Node]) -> None:
        """Write all passes."""
        if not self.has_rows:
            with self.builder.row():
                for k, node in enumerate(results):
                    self.store(k, self.value(node, 0))
            return
        reductions = _reductions(results)
        last = max([self.stage_of(k, n) for k, n in enumerate(results)])
        last = max([last, *(r.stage for r in reductions)])
        kept = self.plan_buffers(results, reductions, last)
        for stage in range(last + 1):
            self.point_pass(results, reductions, stage, last)
            self.row_pass(results, reductions, kept, stage)
        self.point_pass(results, reductions, last + 1, last)

    def is_row(self, k: int) -> bool:
        """Whether output `k` has an element for each element of the row."""
        return any(d >= len(self.space.outer) for d in self.space.outputs[k])

    def stage_of(self, k: int, node: Node) -> int:
        """The ROW pass in which output `k` is stored; -1 for one stored in a POINT pass."""
        if not self.is_row(k):
            return -1
        return node.stage if node.row else _known_before(node)

    def plan_buffers(
        self, results: Sequence[Node], reductions: Sequence[Node], last: int
    ) -> dict[int, list[Node]]:
        """For each stage, the nodes to keep in row buffers for later passes."""
        kept: dict[int, list[Node]] = {}
        seen: set[Node] = set()
        for stage in range(last, -1, -1):
            roots = [n for n in results if n.row and n.stage == stage]
            roots += [r.operands[0] for r in reductions if r.stage == stage]
            roots += kept.get(stage, [])
            visited: set[Node] = set()
            while roots:
                node = roots.pop()
                if node in visited or not node.row:
                    continue
                visited.add(node)
                if node.stage < stage and node.cost > RECOMPUTE_COST:
                    if node not in seen:
                        seen.add(node)
                        kept.setdefault(node.stage, []).append(node)
                    continue
                roots.extend(node.operands)
        for nodes in kept.values():
            for node in nodes:
                self.buffers[node] = self.builder.buffer(node.dtype)
        return kept

    def row_pass(
        self,
        results: Sequence[Node],
        reductions: Sequence[Node],
        kept: dict[int, list[Node]],
        stage: int,
    ) -> None:
        stores = [(k, n) for k, n in enumerate(results) if self.stage_of(k, n) == stage]
        combined = [r for r in reductions if r.stage == stage]
        buffered = kept.get(stage, [])
        if not (stores or combined or buffered):
            return
        with self.builder.row():
            self.rows = {}
            for node in buffered:
                self.builder.store_row(self.buffers[node], self.value(node, stage))
            for k, node in stores:
                self.store(k, self.value(node, stage))
            found = {}
            for node in combined:
                operand = self.value(node.operands[0], stage)
                found[node] = self.builder.reduce(node.data, operand, node.dtype)
        self.points.update(found)

    def point_pass(
        self, results: Sequence[Node], reductions: Sequence[Node], stage: int, last: int
    ) -> None:
        """The POINT pass before ROW pass `stage`: all that can be known by then."""
        wanted = [
            (k, n)
            for k, n in enumerate(results)
            if not self.is_row(k) and _known_before(n) == stage
        ]
        roots = [n for _, n in wanted]
        if stage <= last:
            roots += [n for k, n in enumerate(results) if self.is_row(k)]
            roots += [r.operands[0] for r in reductions]
        ready = [
            n
            for n in _walk(roots)
            if not n.row
            and n.kind not in ("reduce", "const")
            and n not in self.points
            and _known_before(n) <= stage
        ]
        if not ready and not wanted:
            return
        with self.builder.point():
            for node in ready:
                self.point_value(node)
            for k, node in wanted:
                self.store(k, self.point_value(node))

    # ---- values ----

    def point_value(self, node: Node) -> int:
        """The value of a node in a POINT pass."""
        return self.written(node, self.points, self.points.get)

    def value(self, node: Node, stage: int) -> int:
        """The value of a node in the ROW pass `stage`."""

        def known(node: Node) -> int | None:
            if self.has_rows and not node.row and node.kind != "const":
                return self.points[node]
            found = self.rows.get(node)
            if found is None and node in self.buffers and node.stage < stage:
                found = self.rows[node] = self.builder.load_row(self.buffers[node])
            return found

        return self.written(node, self.rows, known)

    def store(self, k: int, value: int) -> None:
        """Store the value of output `k` at the current point."""
        along = self.space.outputs[k]
        in_row = not self.has_rows or self.is_row(k)
        strides = [0] * (len(self.space.sizes) if in_row else len(self.space.outer))
        shape = self.out_shapes[k]
        layout = self.layouts[k]
        steps, offset = (
            (strides_of(shape), 0) if layout is None else (layout.strides, layout.offset)
        )
        for d, size, stride in zip(along, shape, steps, strict=True):
            if size != 1:
                strides[d] = stride
        self.builder.store(self.outs[k], strides, value, offset)


def _walk(roots: Sequence[Node]) -> list[Node]:
    """All nodes behind `roots`, operands first."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(n, False) for n in reversed(roots)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((o, False) for o in reversed(node.operands))
    return order


def _reductions(results: Sequence[Node]) -> list[Node]:
    return [n for n in _walk(results) if n.kind == "reduce"]


def _known_before(node: Node) -> int:
    """The first ROW pass before which a point-level node can be computed."""
    return node.stage + (node.kind == "reduce")
