"""Rules for equations that become kernels: fused groups, running sums, updates, scatters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from spmd.base import dtypes
from spmd.base.record import replace
from spmd.compile.expressions.expression import Expressions, Node, need_dtype, windows_at
from spmd.compile.expressions.group_kernel import Layout, NodeWriter, Space, group_name
from spmd.compile.expressions.index_map import ZERO, Affine, dim, linear, strides_of
from spmd.compile.expressions.scalar_ops import storage_dtype
from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.dtypes import itemsize
from spmd.compile.kernel.ir import Kernel
from spmd.compile.kernel.ops import supports
from spmd.compile.kernel.split_by_condition import Piece, cut_pieces
from spmd.compile.kernel.split_reduction import Split, split_reduction
from spmd.compile.lower.concatenate import View
from spmd.compile.lower.in_place import group_kernel
from spmd.compile.lower.lowering import ALIASES, Lowering, hints, host, rule
from spmd.compile.lower.steps import OUTPUT, TEMP, Launch, Ref
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Literal, Var
from spmd.lax.windows import GatherDimensionNumbers, GatherScatterMode, as_gather


@rule("fused")
def fused(lowering: Lowering, eqn: Eqn) -> None:
    """A fused group is one kernel, or a host step if some operation in it has no native code."""
    if all(v in lowering.spread for v in eqn.outvars):
        return
    views = [lowering.views.get(v) for v in eqn.outvars]
    layouts, places = _layouts(views)
    kernel = group_kernel(eqn, layouts)
    if kernel is None:
        host(lowering, eqn)
        return
    reads = [lowering.ref(v) for v in eqn.invars]
    writes = list(places)
    for var, view in zip(eqn.outvars, views, strict=True):
        if view is None:
            writes.append(lowering.place(var))
        else:
            lowering.written.add(var)
    name = group_name(eqn.params["jaxpr"])
    launch(lowering, Launch(kernel, (*reads, *writes), name, eqn.source))


def _layouts(views: Sequence[View | None]) -> tuple[tuple[Layout | None, ...], list[Ref]]:
    """The layouts of outputs that are views, and the arrays that they are views of, each once."""
    arrays = dict.fromkeys(view.ref for view in views if view is not None)
    number = {ref: k for k, ref in enumerate(arrays)}
    layouts = tuple(
        None if v is None else Layout(number[v.ref], v.size, v.offset, v.strides) for v in views
    )
    return layouts, list(arrays)


def launch(lowering: Lowering, step: Launch) -> None:
    """Write a kernel's step.

    It is cut in parts if it is one long reduction that threads could share, in pieces if it asks
    each point on which side of an edge it lies.
    """
    if step.kernel not in _pieces:
        _pieces[step.kernel] = cut_pieces(step.kernel)
    for piece in _pieces[step.kernel]:
        args = zip(piece.args, piece.starts, strict=True)
        refs = [
            step.refs[arg].shifted(start * itemsize(step.kernel.args[arg].dtype))
            for arg, start in args
        ]
        lowering.steps.append(replace(step, kernel=piece.kernel, refs=tuple(refs)))
    if _pieces[step.kernel]:
        return
    if step.kernel not in _splits:
        _splits[step.kernel] = split_reduction(step.kernel)
    split = _splits[step.kernel]
    if split is None:
        lowering.steps.append(step)
        return
    partial = tuple(
        Ref(lowering.buffer(TEMP, count * itemsize(dtype))) for dtype, count in split.temporaries
    )
    for kernel in (*split.partials, split.combine):
        lowering.steps.append(replace(step, kernel=kernel, refs=(*step.refs, *partial)))


_splits: dict[Kernel, Split | None] = {}
_pieces: dict[Kernel, tuple[Piece, ...]] = {}


# ---- running sums ------------------------------------------------------------------------------


_SCANS = {"cumsum": "add", "cumprod": "mul", "cummax": "max", "cummin": "min"}


@rule(*_SCANS)
def cumulative(lowering: Lowering, eqn: Eqn) -> None:
    """A running combination along one dim: the rows of its kernel."""
    (operand,), (out,) = eqn.invars, eqn.outvars
    op = _SCANS[eqn.prim.name]
    dtype = storage_dtype(out.aval.dtype) or "bool"
    by_parts = dtype[0] == "c" and op == "add"
    is_scanned = dtype != "bool" and dtype[0] != "c" and supports(op, (dtype, dtype), dtype)
    if not by_parts and not is_scanned:
        host(lowering, eqn)
        return
    axis, shape = eqn.params["axis"], out.aval.shape
    strides = strides_of(shape)
    outer = [d for d in range(len(shape)) if d != axis]
    order = [strides[d] for d in (*outer, axis)]
    b = Builder([shape[d] for d in outer], (shape[axis],))
    source, target = b.arg(dtype, out.aval.size), b.arg(dtype, out.aval.size, "out")
    with b.row():
        value, backwards = b.load(source, order), bool(eqn.params["reverse"])
        if by_parts:
            parts = [b.scan(op, b.op(part, value), backwards) for part in ("real", "imag")]
            made = b.op("complex", *parts)
        else:
            made = b.scan(op, value, backwards)
        b.store(target, order, made)
    refs = (lowering.ref(operand), lowering.place(out))
    lowering.steps.append(Launch(b.build(), refs, eqn.prim.name, eqn.source))


# ---- updates of a part -------------------------------------------------------------------------

_COMBINE = {
    "scatter": None,
    "scatter_add": "add",
    "scatter_mul": "mul",
    "scatter_min": "min",
    "scatter_max": "max",
}


@rule("dynamic_update_slice")
def dynamic_update_slice(lowering: Lowering, eqn: Eqn) -> None:
    """Copy the operand (or do not, if it may be overwritten), then write the part."""
    operand, update, *starts = eqn.invars
    if not update.aval.size:
        _copy_operand(lowering, eqn)
        return
    writer = _PartWriter(eqn, (operand, update, *starts), update.aval.shape)
    graph = writer.graph
    gathered = []
    for start, whole, size, stride in zip(
        starts, operand.aval.shape, update.aval.shape, strides_of(operand.aval.shape), strict=True
    ):
        if whole != size:
            most = whole - size
            value = graph.clamped(graph.start(start, (), None, most), most)
            gathered.append((value, stride))
    address = linear(writer.index, operand.aval.shape)
    writer.store(address, gathered, None, graph.pull(update, writer.index), None, unique=True)
    writer.launch(lowering)


@rule(*_COMBINE)
def scatter(lowering: Lowering, eqn: Eqn) -> None:
    """Write, or combine, windows into an array at computed places."""
    operand, indices, updates = eqn.invars
    combine = _COMBINE[eqn.prim.name]
    if not _has_kernel(eqn):
        host(lowering, eqn)
        return
    if not updates.aval.size:
        _copy_operand(lowering, eqn)
        return
    p, shape = eqn.params, updates.aval.shape
    numbers = as_gather(p["dimension_numbers"])
    windows = _window_sizes(numbers, operand.aval.shape, shape)
    unique = bool(p["unique_indices"])
    blocks = 0 if unique else _blocks(numbers, windows, operand, updates)
    added = lowering.spread.get(updates, updates) if isinstance(updates, Var) else updates
    writer = _PartWriter(eqn, (operand, indices, added), shape, blocks)
    graph, index = writer.graph, writer.index
    place = windows_at(numbers, index, operand.aval.ndim)
    strides = strides_of(operand.aval.shape)
    fits: Node | None = None
    gathered = []
    for component, d in enumerate(numbers.start_index_map):
        most = operand.aval.shape[d] - windows[d]
        at = (*place.batch, ZERO.scale(1, component))
        start = graph.start(indices, at, None, most)
        if p["mode"] is GatherScatterMode.CLIP:
            start = graph.clamped(start, most)
        else:
            fits = graph.both(fits, graph.within(start, most))
        gathered.append((start, strides[d]))
    address = linear(place.operand, operand.aval.shape)
    value = graph.pull(added, index)
    writer.store(address, gathered, fits, value, combine, unique)
    writer.launch(lowering)


# Scatters of at least so many elements are shared between threads, by parts of their windows.
_SHARED_FROM = 32 * 1024
_LEAST_BLOCK = 32


def _blocks(
    numbers: GatherDimensionNumbers, windows: Sequence[int], operand: Atom, updates: Atom
) -> int:
    """How many parts of their last dim the windows are cut into, which never touch each other."""
    size = windows[-1] if windows else 1
    last = operand.aval.ndim - 1
    single = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    # A window as wide as the operand always begins at 0.
    whole = last not in single and size == operand.aval.shape[-1]
    whole = whole and updates.aval.ndim - 1 in numbers.offset_dims
    if not whole or updates.aval.size < _SHARED_FROM:
        return 1
    return next((n for n in (4, 2) if size % n == 0 and size // n >= _LEAST_BLOCK), 1)


@hints("dynamic_update_slice", *_COMBINE)
def _hint_operand(
    lowering: Lowering, eqn: Eqn, makers: dict[Var, Eqn], readers: Counter[Var]
) -> None:
    """Make an operand that only an update reads right where the program wants the result.

    Not in loops: there a value's place may still hold that of the iteration before. Updates that
    are one number everywhere (the ones of a count) are made nowhere.
    """
    if eqn.prim.name in _COMBINE and _has_kernel(eqn):
        updates = eqn.invars[2]
        if isinstance(updates, Var) and updates in makers and readers[updates] == 1:
            number = _number_everywhere(makers[updates])
            if number is not None:
                lowering.spread[updates] = number
    operand, target = eqn.invars[0], lowering.targets.get(eqn.outvars[0])
    if target is None or target.buffer.kind != OUTPUT or lowering.level:
        return
    if isinstance(operand, Var) and operand in makers and _has_one_reader(operand, makers, readers):
        lowering.targets.setdefault(operand, target)


def _has_one_reader(var: Var, makers: dict[Var, Eqn], readers: Counter[Var]) -> bool:
    """Whether one equation reads a variable, and nothing else reads it under another name."""
    while readers[var] == 1:
        maker = makers.get(var)
        if maker is None or maker.prim.name not in ALIASES:
            return True
        source = maker.invars[0]
        if not isinstance(source, Var):
            return True
        var = source
    return False


def _number_everywhere(maker: Eqn) -> Literal | None:
    """The number of which a fused equation makes an array, if that is all it does."""
    if maker.prim.name != "fused" or len(maker.outvars) != 1:
        return None
    group: ClosedJaxpr = maker.params["jaxpr"]
    if len(group.eqns) != 1 or group.eqns[0].prim.name != "broadcast_in_dim":
        return None
    (source,) = group.eqns[0].invars
    return source if isinstance(source, Literal) and not source.aval.shape else None


def _has_kernel(eqn: Eqn) -> bool:
    """Whether a scatter of these dtypes is native code."""
    operand, indices, _ = eqn.invars
    dtype = storage_dtype(operand.aval.dtype)
    if dtype is None or indices.aval.dtype.kind not in "iu" or indices.aval.dtype.str[1:] == "u8":
        return False
    if _at_one_place(eqn):
        return False
    plain = not dtypes.is_complex(operand.aval.dtype) and dtype != "bool"
    return plain or _COMBINE[eqn.prim.name] is None


def _at_one_place(eqn: Eqn) -> bool:
    """Whether several windows lie at the same place because no index moves them.

    A kernel's law allows stores that meet only where addresses are read from an array.
    """
    operand, _, updates = eqn.invars
    numbers = as_gather(eqn.params["dimension_numbers"])
    if numbers.start_index_map:
        return False
    shape = operand.aval.shape
    apart = math.prod(_window_sizes(numbers, shape, updates.aval.shape))
    apart *= math.prod(shape[d] for d in numbers.operand_batching_dims)
    return updates.aval.size > apart


def _window_sizes(
    numbers: GatherDimensionNumbers, shape: Sequence[int], updates: Sequence[int]
) -> tuple[int, ...]:
    """The size of a window along each operand dim."""
    single = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    sizes = iter([updates[d] for d in sorted(numbers.offset_dims)])
    return tuple(1 if d in single else next(sizes) for d in range(len(shape)))


def _copy_operand(lowering: Lowering, eqn: Eqn) -> None:
    out = eqn.outvars[0]
    lowering.copy(lowering.place(out), lowering.ref(eqn.invars[0]), out.aval.nbytes)


class _PartWriter:
    """A kernel that updates a part of its first operand in place, point by point of the part."""

    def __init__(self, eqn: Eqn, operands: Sequence[Atom], shape: Sequence[int], blocks: int = 0):
        """With `blocks` the points are in order, apart from so many blocks of the last dim."""
        self.eqn = eqn
        self.apart = blocks > 1
        sizes = tuple(shape)
        self.index = tuple(dim(d, s) for d, s in enumerate(sizes))
        if blocks > 1:
            sizes = (blocks, *sizes[:-1], sizes[-1] // blocks)
            self.index = tuple(dim(d, s) for d, s in enumerate(sizes))[1:]
            self.index = (*self.index[:-1], self.index[-1] + dim(0, blocks).scale(sizes[-1]))
        outer = 1 if blocks > 1 else 0 if blocks else len(sizes)
        self.space = Space(sizes, (), ())
        target, *rest = operands
        self.reads = list(dict.fromkeys(v for v in rest if isinstance(v, Var)))
        self.graph = Expressions(self.reads, (), sizes, ())
        self.builder = b = Builder(sizes[:outer], sizes[outer:])
        ins = [b.arg(need_dtype(v.aval.dtype), v.aval.size) for v in self.reads]
        self.target = b.arg(need_dtype(target.aval.dtype), target.aval.size, "inout")
        self.nodes = NodeWriter(b, ins, self.space)
        self.done: dict[Node, int] = {}

    def store(
        self,
        address: Affine,
        gathered: Sequence[tuple[Node, int]],
        guard: Node | None,
        value: Node,
        combine: str | None,
        unique: bool,
    ) -> None:
        """Write the kernel's one pass."""
        with self.builder.row():
            moved = [(self.value(node), stride) for node, stride in gathered]
            self.builder.store(
                self.target,
                self.nodes.strides(address, in_row=True),
                self.value(value),
                address.offset,
                moved,
                None if guard is None else self.value(guard),
                combine,
                unique,
                self.apart,
            )

    def value(self, node: Node) -> int:
        """The number of a node's value."""
        return self.nodes.written(node, self.done, self.done.get)

    def launch(self, lowering: Lowering) -> None:
        """Bring the operand to the result's place and run the kernel there."""
        operand, out = self.eqn.invars[0], self.eqn.outvars[0]
        reads = [lowering.ref(v) for v in self.reads]
        source = lowering.ref(operand)
        place = lowering.place(out)
        if any(ref.buffer is place.buffer for ref in reads):
            # A value written over the operand's old contents must not be read from them.
            aside = [lowering.temp(v.aval) for v in self.reads]
            for target, ref, v in zip(aside, reads, self.reads, strict=True):
                lowering.copy(target, ref, v.aval.nbytes)
            reads = aside
        lowering.copy(place, source, out.aval.nbytes)
        kernel = self.builder.build()
        step = Launch(kernel, (*reads, place), self.eqn.prim.name, self.eqn.source)
        lowering.steps.append(step)
