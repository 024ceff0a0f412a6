"""Iteration spaces: dropping, reordering and merging dims, and choosing the one for the lanes.

Every renderer applies `normalise` first. It keeps the meaning of a kernel and brings it
into the shape that compiles best: few dims, the widest contiguous run last, everything that can be
parallel in `outer`. Lowerings may therefore write kernels in the dims of the user's arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from spmd.base.record import replace
from spmd.compile.kernel.ir import (
    POINT,
    ROW,
    Const,
    Instr,
    Iota,
    Kernel,
    Load,
    Map,
    Op,
    Pass,
    Scan,
    Store,
    StoreRow,
    is_sequential,
)

# Rough costs in units of one arithmetic instruction on one lane of a full register.
LANES = 16
STRIDED_COST = 1.0
# Combining the lanes of an accumulator at the end of a row: shuffles that wait for each other.
ACROSS_COST = 20.0
HEAVY_OPS = frozenset(
    "exp exp2 expm1 log log1p sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh "
    "erf erfc erf_inv lgamma digamma logistic pow cbrt rem div sqrt rsqrt threefry2x32".split()
)


def normalise(kernel: Kernel) -> Kernel:
    """Return an equal kernel with few, well ordered dims and `vector_dim` chosen.

    A `vector_dim` that is set already is kept. Afterwards it is the last inner dim, the last outer
    dim, or None (scalar code).
    """
    if 0 in kernel.outer:
        return kernel
    if kernel.vector_dim is not None:
        return _lanes_last(kernel, kernel.vector_dim)
    kernel = _drop_unit_dims(kernel)
    if is_elementwise(kernel) and not is_sequential(kernel):
        dims = _by_store_stride(kernel, range(len(kernel.sizes)))
        kernel = _merge(rearrange(kernel, (), dims))
        chosen = choose_vector_dim(kernel)
        kernel = _elementwise_last(kernel, chosen)
        return _merge(kernel)
    if not _row_order_matters(kernel):
        count = len(kernel.outer)
        inner = _by_load_stride(kernel, range(count, len(kernel.sizes)))
        outer = _by_store_stride(kernel, range(count))
        kernel = rearrange(kernel, outer, inner)
    kernel = _merge(kernel)
    return _lanes_last(kernel, choose_vector_dim(kernel))


def is_elementwise(kernel: Kernel) -> bool:
    """Say whether no value crosses from one element to another: any dim may be parallel."""
    return not kernel.buffers and all(
        step.level == ROW
        and not step.reductions
        and not any(isinstance(instr, Scan) for instr in step.instrs)
        for step in kernel.passes
    )


def _row_order_matters(kernel: Kernel) -> bool:
    if is_sequential(kernel):
        return True
    return any(
        any(isinstance(instr, Scan) for instr in step.instrs)
        or any(reduction.op.startswith("arg") for reduction in step.reductions)
        for step in kernel.passes
    )


# ---- rewriting maps ---------------------------------------------------------------------------


def rewrite_maps(
    kernel: Kernel,
    change: Callable[[Map, str], Map],
    iota: Callable[[Iota], Instr],
) -> tuple[Pass, ...]:
    """Return the passes with every index map and every Iota replaced."""
    # Written out: `replace` takes ten times as long, and every kernel comes here a few times.
    known: dict[tuple[Map, str], Map] = {}

    def map_of(where: Map, level: str) -> Map:
        found = known.get((where, level))
        if found is None:
            found = known[where, level] = change(where, level)
        return found

    def instr_of(i: Instr, level: str) -> Instr:
        if type(i) is Load:
            return Load(i.out, i.dtype, i.arg, map_of(i.map, level), i.guard, i.fill)
        return iota(i) if type(i) is Iota else i

    def store_of(s: Store | StoreRow, level: str) -> Store | StoreRow:
        if type(s) is not Store:
            return s
        where = map_of(s.map, level)
        return Store(s.arg, where, s.value, s.guard, s.combine, s.unique, s.apart)

    return tuple(
        Pass(
            step.level,
            tuple([instr_of(instr, step.level) for instr in step.instrs]),
            tuple([store_of(store, step.level) for store in step.stores]),
            step.reductions,
        )
        for step in kernel.passes
    )


def rearrange(kernel: Kernel, outer: Sequence[int], inner: Sequence[int]) -> Kernel:
    """Reorder dims, given as old dim numbers; dims left out must have size 1.

    Moving a dim between outer and inner is right only for elementwise kernels.
    """
    order = (*outer, *inner)
    if order == tuple(range(len(kernel.sizes))) and len(outer) == len(kernel.outer):
        return kernel
    place = {old: new for new, old in enumerate(order)}

    def change(where: Map, level: str) -> Map:
        kept = order if level == ROW else outer
        return Map(tuple([where.strides[dim] for dim in kept]), where.offset, where.gathered)

    def iota(instr: Iota) -> Instr:
        if instr.dim not in place:
            return Const(instr.out, instr.dtype, 0)
        return replace(instr, dim=place[instr.dim])

    vector = None if kernel.vector_dim is None else place.get(kernel.vector_dim)
    return replace(
        kernel,
        outer=tuple(kernel.sizes[dim] for dim in outer),
        inner=tuple(kernel.sizes[dim] for dim in inner),
        passes=rewrite_maps(kernel, change, iota),
        vector_dim=vector,
    )


def _drop_unit_dims(kernel: Kernel) -> Kernel:
    count = len(kernel.outer)
    outer = [dim for dim in range(count) if kernel.sizes[dim] != 1]
    inner = [dim for dim in range(count, len(kernel.sizes)) if kernel.sizes[dim] != 1]
    if any(isinstance(instr, Scan) for step in kernel.passes for instr in step.instrs):
        inner = list(range(count, len(kernel.sizes)))
    return rearrange(kernel, outer, inner)


def _maps(kernel: Kernel) -> list[tuple[Map, str, bool]]:
    """List (map, level, whether it stores) of every access."""
    found = []
    for step in kernel.passes:
        for item in (*step.instrs, *step.stores):
            if isinstance(item, Load | Store):
                found.append((item.map, step.level, isinstance(item, Store)))
    return found


def _merge(kernel: Kernel) -> Kernel:
    """Join neighbouring dims that every access walks through as one."""
    iotas = {i.dim for step in kernel.passes for i in step.instrs if isinstance(i, Iota)}
    dim = len(kernel.sizes) - 2
    while dim >= 0:
        if dim + 1 != len(kernel.outer) and not iotas & {dim, dim + 1} and _nests(kernel, dim):
            kernel = _join(kernel, dim)
            iotas = {number - (number > dim) for number in iotas}
        dim -= 1
    return kernel


def _nests(kernel: Kernel, dim: int) -> bool:
    size = kernel.sizes[dim + 1]
    for where, level, _ in _maps(kernel):
        if level == POINT and dim + 1 >= len(kernel.outer):
            continue
        if where.strides[dim] != where.strides[dim + 1] * size:
            return False
    return True


def _join(kernel: Kernel, dim: int) -> Kernel:
    def change(where: Map, level: str) -> Map:
        if dim >= len(where.strides):
            return where
        strides = where.strides[:dim] + where.strides[dim + 1 :]
        return Map(strides, where.offset, where.gathered)

    def iota(instr: Iota) -> Iota:
        return replace(instr, dim=instr.dim - (instr.dim > dim))

    sizes, count = list(kernel.sizes), len(kernel.outer)
    sizes[dim : dim + 2] = [sizes[dim] * sizes[dim + 1]]
    count -= dim < count
    return replace(
        kernel,
        outer=tuple(sizes[:count]),
        inner=tuple(sizes[count:]),
        passes=rewrite_maps(kernel, change, iota),
    )


# ---- ordering -----------------------------------------------------------------------------------


def _by_store_stride(kernel: Kernel, dims: Sequence[int]) -> list[int]:
    """Order dims as the first store walks memory, so that writes run forward."""
    stores = [where for where, level, stores in _maps(kernel) if stores]
    wide = [where for where in stores if not where.gathered] or stores
    if not wide:
        return list(dims)
    strides = wide[0].strides
    return sorted(dims, key=lambda dim: -abs(strides[dim]) if dim < len(strides) else 0)


def _by_load_stride(kernel: Kernel, dims: Sequence[int]) -> list[int]:
    """Order dims as the largest load walks memory, so that reads run forward."""
    loads = [where for where, level, stores in _maps(kernel) if level == ROW and not stores]
    if not loads:
        return list(dims)
    widest = max(loads, key=lambda where: sum(stride != 0 for stride in where.strides))
    return sorted(dims, key=lambda dim: -abs(widest.strides[dim]))


def _elementwise_last(kernel: Kernel, chosen: int | None) -> Kernel:
    dims = list(range(len(kernel.sizes)))
    if not dims:
        return kernel
    last = dims[-1] if chosen is None else chosen
    dims.remove(last)
    kernel = rearrange(kernel, dims, (last,))
    return replace(kernel, vector_dim=None if chosen is None else len(dims))


def _lanes_last(kernel: Kernel, chosen: int | None) -> Kernel:
    """Bring the chosen dim to the end of its group."""
    count = len(kernel.outer)
    outer, inner = list(range(count)), list(range(count, len(kernel.sizes)))
    if chosen is None:
        return replace(kernel, vector_dim=None)
    group = outer if chosen < count else inner
    group.remove(chosen)
    group.append(chosen)
    return rearrange(replace(kernel, vector_dim=chosen), outer, inner)


# ---- choosing the lanes ------------------------------------------------------------------------


def choose_vector_dim(kernel: Kernel) -> int | None:
    """Return the dim along which lanes cost least, or None if scalar code is best or needed."""
    candidates = [dim for dim in range(len(kernel.sizes)) if _may_hold_lanes(kernel, dim)]
    if not candidates:
        return None
    cost, behind = min((_cost(kernel, dim), -dim) for dim in candidates)
    return -behind if cost < _cost(kernel, None) else None


def _may_hold_lanes(kernel: Kernel, dim: int) -> bool:
    if kernel.sizes[dim] <= 1:
        return False
    inner = dim >= len(kernel.outer)
    scans = any(isinstance(instr, Scan) for step in kernel.passes for instr in step.instrs)
    if scans and inner:
        return False
    last = dim == len(kernel.sizes) - 1
    if _row_order_matters(kernel) and inner and not last:
        return False
    return not is_sequential(kernel) or (last and inner and _scatters_along(kernel, dim))


def _scatters_along(kernel: Kernel, dim: int) -> bool:
    """Say whether the points along `dim` scatter to different elements, at gathered bases."""
    for step in kernel.passes:
        dependent = dependencies(kernel, step)
        for store in step.stores:
            if not isinstance(store, Store) or not store.map.gathered:
                continue
            bases = {value for value, _ in store.map.gathered}
            along = step.level == ROW and store.map.strides[dim] != 0
            if not along or any(dim in dependent.get(value, ()) for value in bases):
                return False
    return True


def dependencies(kernel: Kernel, step: Pass) -> dict[int, frozenset[int]]:
    """Return the dims on which each value of a pass depends.

    Values of earlier passes are left out: they depend on outer dims at most.
    """
    everything = frozenset(range(len(kernel.sizes)))
    found: dict[int, frozenset[int]] = {}
    for instr in step.instrs:
        match instr:
            case Const():
                dims: frozenset[int] = frozenset()
            case Iota(dim=dim):
                dims = frozenset((dim,))
            case Op(operands=operands):
                dims = frozenset().union(*(found.get(value, ()) for value in operands))
            case Load(map=where):
                dims = frozenset(d for d, stride in enumerate(where.strides) if stride)
                read = [value for value, _ in where.gathered]
                read += [value for value in (instr.guard, instr.fill) if value is not None]
                dims = dims.union(*(found.get(value, ()) for value in read))
            case _:
                dims = everything
        found[instr.out] = dims
    return found


def _cost(kernel: Kernel, dim: int | None) -> float:
    """Estimate the cost of one element with lanes along `dim` (None: scalar code)."""
    total = 0.0
    width = 1.0 if dim is None else float(LANES)
    for where, level, stores in _maps(kernel):
        smooth = dim is not None and (dim >= len(where.strides) or where.strides[dim] in (0, 1))
        weight = 1.0 if level == ROW else 0.1
        whole = smooth and not (where.gathered and stores)
        total += weight * (1 / width if whole else STRIDED_COST * (1.2 if stores else 1.0))
    # Work that is done once for a row is scalar code unless the lanes are rows.
    once, rows = 0.0, max(math.prod(kernel.inner), 1)
    for step in kernel.passes:
        for instr in step.instrs:
            if isinstance(instr, Op):
                work = 12.0 if instr.op in HEAVY_OPS else 1.0
                if step.level == ROW:
                    total += work / width
                elif dim is not None and dim < len(kernel.outer):
                    total += work / width / rows
                else:
                    once += work / rows
    if dim is None:
        return total + once
    size = kernel.sizes[dim]
    if dim >= len(kernel.outer):
        reductions = sum(len(step.reductions) for step in kernel.passes)
        total += reductions * ACROSS_COST / rows
    return total * (-(-size // LANES) * LANES) / size + once
