"""The code of one point of the nest: instructions and stores, with the values known so far.

`Body` holds the state of the point that is being written: indices, base addresses, tail, values.
The loops that move the point are in `loop_nest.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from spmd.base.record import replace
from spmd.compile.cpu.codegen import access
from spmd.compile.cpu.codegen.access import Place, Tail
from spmd.compile.cpu.codegen.conversions import constant_parts, element_of
from spmd.compile.cpu.codegen.division import inverse_of
from spmd.compile.cpu.codegen.outlining import (
    LEAST_RUN,
    find_repeat,
    readers_elsewhere,
    runs,
    write_repeat,
)
from spmd.compile.cpu.codegen.random_bits import threefry2x32
from spmd.compile.cpu.codegen.scalar_ops import Value, combine, render_op
from spmd.compile.cpu.codegen.transpose_tiles import read_step
from spmd.compile.cpu.math.floats import Floats
from spmd.compile.kernel.dtypes import DTYPES, from_bits, itemsize, kind
from spmd.compile.kernel.ir import (
    ROW,
    Const,
    Instr,
    Iota,
    Kernel,
    Load,
    LoadRow,
    Map,
    Op,
    Pass,
    Scan,
    Store,
    StoreRow,
    definitions,
    reads_of,
)
from spmd.compile.native.llvm.vector_emitter import Emitter

# From so many iterations of a loop on, a divisor that is fixed in it is inverted before it.
INVERTED_FROM = 4

# Bytes of a row that is read in several passes, and stays in the nearest cache between them.
ROWS_AHEAD = range(512, 16 * 1024 + 1)


def loads_ahead(kernel: Kernel) -> dict[Load, int]:
    """Return loads that shall fetch the bytes so far ahead, in the next row, as well.

    Rows that several passes read come from the nearest cache but in the first pass, which would
    wait for each: the machine's own prefetching begins anew with every page. So the last of the
    passes fetches the next row. (Softmax of 1000 x 1024: 441 us without, 356 with it.)
    """
    if len(kernel.inner) != 1 or not kernel.outer:
        return {}
    rows = [step for step in kernel.passes if step.level == ROW]
    loads = [[item for item in step.instrs if isinstance(item, Load)] for step in rows]
    found: dict[tuple[int, Map], list[Load]] = {}
    for load in [load for each in loads for load in each]:
        size = itemsize(kernel.args[load.arg].dtype)
        plain = load.guard is None and not load.map.gathered and load.map.strides[-1] == 1
        if plain and load.map.strides[-2] and kernel.inner[0] * size in ROWS_AHEAD:
            found.setdefault((load.arg, load.map), []).append(load)
    return {
        same[-1]: same[-1].map.strides[-2] * itemsize(kernel.args[same[-1].arg].dtype)
        for same in found.values()
        if len(same) > 1
    }


class Body:
    """Writes instructions and stores of one kernel at the current point."""

    def __init__(
        self,
        e: Emitter,
        kernel: Kernel,
        width: int,
        tile_dim: int | None,
        streams: Mapping[Store, int],
    ):
        self.e = e
        self.streams = streams
        self.tile_dim = tile_dim
        self.tiles: dict[Load, str] = {}
        self.kernel = kernel
        # The lanes of this block, and of whole ones.
        self.width = self.whole_width = width
        lanes = kernel.vector_dim if width > 1 else None
        self.lane_dim = lanes
        self.lanes_inner = lanes is not None and lanes >= len(kernel.outer)
        self.lanes_outer = lanes is not None and lanes < len(kernel.outer)
        self.defined = definitions(kernel)
        self.depth: dict[int, int] = {}
        self.varying: dict[int, bool] = {}
        self.values: dict[int, Value] = {}
        self.running: dict[int, tuple[str, ...]] = {}
        self.divisors: set[int] = set()
        self.ahead = loads_ahead(kernel) if self.lanes_inner else {}
        self.sizes = kernel.sizes
        self.index: list[str] = ["0"] * len(self.sizes)
        self.bases: dict[Load | Store, str] = {}
        self.row_position = "0"
        self.tail: Tail | None = None
        self.pointers: list[str] = []
        self.buffers: list[str] = []

    # ---- where values belong ----

    def place_values(self, step: Pass) -> None:
        """Find for each value of a pass the loop it belongs to, and whether lanes differ in it."""
        deepest = len(self.kernel.inner) if step.level == ROW else 0
        for instr, read in zip(step.instrs, reads_of(step.instrs), strict=True):
            depth = max((self.depth[value] for value in read), default=0)
            varying = any(self.varying[value] for value in read)
            match instr:
                case Iota(dim=dim):
                    depth, varying = self.dim_depth(dim), dim == self.lane_dim
                case Load(map=where, arg=arg):
                    dims = [dim for dim, stride in enumerate(where.strides) if stride]
                    depth = max([depth, *(self.dim_depth(dim) for dim in dims)])
                    varying = varying or self.lane_dim in dims
                    if self.kernel.args[arg].role == "inout":
                        depth = deepest
                case LoadRow() | Scan():
                    depth, varying = deepest, self.lane_dim is not None
            self.depth[instr.out], self.varying[instr.out] = depth, varying
            if isinstance(instr, Op) and self._divides_often(instr):
                self.divisors.add(instr.operands[1])
        for value in self.divisors & self.values.keys():
            self._invert(value)

    def _divides_often(self, instr: Op) -> bool:
        """Say whether an instruction divides floats by a value that is fixed in a long loop."""
        if instr.op != "div" or kind(instr.dtype) != "f" or not self.e.module.target.fma:
            return False
        x, y = instr.operands
        iterations = math.prod(self.kernel.inner) // (self.width if self.lanes_inner else 1)
        const = isinstance(self.defined[y], Const)
        return not const and self.depth[y] < self.depth[x] and iterations >= INVERTED_FROM

    def _invert(self, value: int) -> None:
        """Write the reciprocal of a divisor, where the divisor has just become known."""
        known = self.values[value]
        if known.inverse is not None:
            return
        with self.e.at_width(known.width):
            by = inverse_of(Floats(self.e, element_of(known.dtype)), known.parts[0])
        self.values[value] = replace(known, inverse=by)

    def define(self, value: int, dtype: str, parts: tuple[str, ...], width: int) -> None:
        """Make a result of a reduction known."""
        self.values[value] = Value(dtype, parts, width)
        self.depth[value], self.varying[value] = 0, width > 1

    def dim_depth(self, dim: int) -> int:
        """Return how many inner loops enclose code that depends on `dim`."""
        return 1 if dim == self.tile_dim else max(dim - len(self.kernel.outer) + 1, 0)

    # ---- addresses ----

    def enter_level(self, step: Pass, level: int) -> None:
        """Extend all base addresses by the indices known at this loop level."""
        e, count = self.e, len(self.kernel.outer)
        known = [dim for dim in range(len(self.sizes)) if self.dim_depth(dim) == level]
        if step.level != ROW:
            known = list(range(count))
        indices = [self.index[dim] for dim in known]
        items = [i for i in (*step.instrs, *step.stores) if isinstance(i, Load | Store)]
        if level == 0:
            self.bases |= {item: str(item.map.offset) for item in items}
        if known:
            bases = [self.bases[item] for item in items]
            strides = [[item.map.strides[dim] for dim in known] for item in items]
            self.bases.update(zip(items, e.extend_indices(bases, indices, strides), strict=True))
        if level > 0:
            dim = count + level - 1
            pitch = e.mul_index(self.row_position, self.pitch(level - 1))
            self.row_position = e.add_index(pitch, self.index[dim])

    def pitch(self, level: int) -> int:
        """Return the padded size of an inner dim in row buffers: whole vectors for the lanes."""
        size = self.kernel.inner[level]
        last = level == len(self.kernel.inner) - 1
        lanes = self.whole_width if self.lanes_inner and last else 1
        return -(-size // lanes) * lanes

    def place(self, item: Load | Store, width: int) -> Place:
        """Return the address of an access for lanes of the given width."""
        e, arg = self.e, self.kernel.args[item.arg]
        base, lanes = self.bases[item], None
        for value, stride in item.map.gathered:
            if stride == 0:
                continue
            varying = self.varying[value] and width > 1
            index = self.get(value, width if varying else 1)
            element, opcode = element_of(index.dtype), "sext"
            with e.at_width(index.width):
                wide = index.parts[0]
                if element != "i64":
                    opcode = "sext" if kind(index.dtype) == "i" else "zext"
                    wide = e.cast(opcode, element, "i64", wide)
                if varying:
                    wide = e.binary("mul", "i64", wide, e.int(stride, "i64"))
                    lanes = wide if lanes is None else e.binary("add", "i64", lanes, wide)
                else:
                    base = e.add_index(base, e.mul_index(wide, stride))
        strides = item.map.strides
        lane_dim = self.lane_dim
        stride = 0
        if width > 1 and lane_dim is not None and lane_dim < len(strides):
            stride = strides[lane_dim]
        return Place(self.pointers[item.arg], base, stride, arg.dtype, lanes)

    # ---- values ----

    def get(self, value: int, width: int) -> Value:
        """Return a value at a number of lanes, copying a scalar into all of them."""
        e, made_by = self.e, self.defined[value]
        if isinstance(made_by, Const):
            with e.at_width(width):
                parts = constant_parts(e, made_by.dtype, made_by.bits)
            return Value(made_by.dtype, parts, width, _known(made_by))
        known = self.values[value]
        if known.width == width:
            return known
        assert known.width == 1, f"value %{value} differs between lanes"
        with e.at_width(width):
            element = element_of(known.dtype)
            parts = tuple(e.splat(element, part) for part in known.parts)
        return Value(known.dtype, parts, width, inverse=known.inverse)

    def instr(self, instr: Instr) -> None:
        """Write one instruction, for all lanes or as a scalar."""
        if isinstance(instr, Const):
            return
        width = self.width if self.varying[instr.out] else 1
        outside, self.e.width = self.e.width, width
        match instr:
            case Iota():
                parts = (self._iota(instr, width),)
            case Op(op="threefry2x32", operands=operands):
                # Words that are the same in all lanes stay scalars.
                words = [(value, width if self.varying[value] else 1) for value in operands]
                parts = (threefry2x32(self.e, [self.get(*word) for word in words]),)
            case Op():
                values = [self.get(value, width) for value in instr.operands]
                parts = render_op(self.e, instr.op, values, instr.dtype, instr.attr)
            case Load():
                parts = self._load(instr, width)
            case LoadRow(buffer=buffer):
                parts = access.read_lanes(self.e, self._row_pointer(buffer), _carried(instr))
            case Scan():
                operand = self.get(instr.operand, width).parts
                before = self.running[instr.out]
                parts = combine(self.e, instr.op, instr.dtype, before, operand)
                self.running[instr.out] = parts
        self.e.width = outside
        self.values[instr.out] = Value(instr.dtype, tuple(parts), width)
        if instr.out in self.divisors:
            self._invert(instr.out)

    def instrs(self, instrs: Sequence[Instr]) -> None:
        """Write instructions; of those that repeat, calls of a function."""
        for run in runs(instrs, self._may_repeat) if len(instrs) >= LEAST_RUN else (instrs,):
            ops = [instr for instr in run if isinstance(instr, Op)]
            repeat = None
            if len(run) == len(ops) >= LEAST_RUN:
                escaping = readers_elsewhere(self.kernel, run)
                repeat = find_repeat(ops, self.defined, escaping)
            if repeat is None:
                for instr in run:
                    self.instr(instr)
                continue
            self.instrs(ops[: repeat.first])
            with self.e.at_width(self.width):
                calls = write_repeat(
                    self.e, repeat, self.defined, lambda value: self.get(value, self.width)
                )
                for out, value in calls:
                    self.values[out] = value
            self.instrs(ops[repeat.end :])

    def _may_repeat(self, instr: Instr) -> bool:
        """Say whether an instruction is an operation on whole vectors of real numbers."""
        if not isinstance(instr, Op) or self.width == 1 or not self.varying[instr.out]:
            return False
        if instr.op == "threefry2x32" or self.divisors.intersection(instr.operands):
            return False
        dtypes = [instr.dtype, *(self.defined[value].dtype for value in instr.operands)]
        return "c" not in map(kind, dtypes)

    def _iota(self, instr: Iota, width: int) -> str:
        e, element = self.e, element_of(instr.dtype)
        floating = element in ("float", "double")
        small = self.sizes[instr.dim] < 1 << 31
        integer = ("i32" if small else "i64") if floating else element
        index = self.index[instr.dim]
        with e.at_width(1):
            if integer != "i64" and not index.isdigit():
                index = e.cast("trunc", "i64", integer, index)
        if width > 1:
            numbers = e.lanes(range(width), integer)
            index = e.binary("add", integer, e.splat(integer, index), numbers)
        return e.cast("uitofp", integer, element, index) if floating else index

    def _row_pointer(self, buffer: int) -> str:
        e, dtype = self.e, self.kernel.buffers[buffer]
        carried = DTYPES[dtype].carrier
        position = self.row_position
        with e.at_width(1):
            if self.lanes_outer:
                position = e.mul_index(position, self.width)
            if kind(carried) == "c":
                position = e.mul_index(position, 2)
            return e.at(access.memory_element(carried), self.buffers[buffer], position)

    # ---- memory ----

    def mask(self, guard: int | None, width: int) -> str | None:
        """Return the lanes that may touch memory one by one, or None if all may."""
        tail = None if self.tail is None or width == 1 else self.tail.mask
        if guard is None:
            return tail
        condition = self.get(guard, width).parts[0]
        if tail is None:
            return condition
        with self.e.at_width(width):
            return self.e.binary("and", "i1", condition, tail)

    def some_mask(self, guard: int | None, width: int) -> str:
        """Return the same where the caller knows that there is a guard or a masked tail."""
        mask = self.mask(guard, width)
        assert mask is not None
        return mask

    def _load(self, load: Load, width: int) -> tuple[str, ...]:
        fill = None if load.fill is None else self.get(load.fill, width).parts
        if load.guard is not None and fill is None:
            fill = constant_parts(self.e, load.dtype, 0)
        if self.kernel.args[load.arg].size == 0:
            return fill or constant_parts(self.e, load.dtype, 0)
        if load in self.tiles:
            return (read_step(self.e, self.tiles[load], load.dtype),)
        place = self.place(load, width)
        if width > 1 and place.contiguous:
            if load.guard is None:
                if load in self.ahead and self.tail is None:
                    access.fetch(self.e, place, self.ahead[load])
                return access.load_contiguous(self.e, place, self.tail)
            if not self.varying[load.guard] and self.tail is None:
                return self._load_if(self.get(load.guard, 1).parts[0], place, fill or ())
            mask = self.some_mask(load.guard, width)
            return access.load_masked(self.e, self._mapped(load, place, mask), mask, fill)
        backwards = width > 1 and place.stride == -1 and place.gathered is None
        if backwards and load.guard is None and not (self.tail and self.tail.masked):
            return access.load_reversed(self.e, place, self.tail)
        if self._is_near(place, load.guard, width):
            return access.load_near(self.e, place, self.tail)
        if width == 1 and load.guard is None:
            return access.load_scalar(self.e, place.pointer, place.dtype, place.base)
        return access.load_each(self.e, place, self.mask(load.guard, width), fill)

    def _load_if(self, live: str, place: Place, fill: tuple[str, ...]) -> tuple[str, ...]:
        """Read neighbouring elements if the scalar i1 `live` holds, else take `fill`.

        The branch costs less than masked instructions: the column sums of rows between two others
        (concatenate) took 15 ms with masks, and take 6.
        """
        e = self.e
        kinds = [e.type(element_of(place.dtype))] * len(fill)
        return e.either(live, kinds, lambda: access.load_contiguous(e, place, None), fill)

    def _mapped(self, item: Load | Store, place: Place, mask: str) -> Place:
        """Return the place of a masked access, or the argument's beginning where no lane is live.

        An index that is out of bounds points anywhere. A masked instruction on a page that is not
        mapped touches nothing, but takes a microcode assist: 2M elements of which most are out of
        bounds took 29 ms, and take 0.15; the sums of an array and itself rolled 115 ms, and 10.
        """
        e, guard = self.e, item.guard
        if guard is None:
            return place
        if self.varying[guard]:
            bools = e.type("i1")
            name = f"@llvm.vector.reduce.or.v{e.width}i1"
            e.module.declare(name, f"declare i1 {name}({bools})")
            live = e.set(f"call i1 {name}({bools} {mask})")
        else:
            live = self.get(guard, 1).parts[0]
        with e.at_width(1):
            return replace(place, base=e.select(live, "i64", place.base, "0"))

    def _is_near(self, place: Place, guard: int | None, width: int) -> bool:
        """Say whether a load reads whole vectors and picks its lanes from them."""
        if width == 1 or guard is not None or place.gathered is not None:
            return False
        masked = self.tail is not None and self.tail.masked
        return access.is_near(place.stride) and kind(place.dtype) != "c" and not masked

    def stores(self, step: Pass) -> None:
        """Write the stores of a pass."""
        everywhere = self.lanes_outer or (self.lanes_inner and step.level == ROW)
        width = self.width if everywhere else 1
        outside, self.e.width = self.e.width, width
        for store in step.stores:
            parts = self.get(store.value, width).parts
            if isinstance(store, StoreRow):
                dtype = DTYPES[self.kernel.buffers[store.buffer]].carrier
                access.write_lanes(self.e, self._row_pointer(store.buffer), dtype, parts)
            elif self.kernel.args[store.arg].size:
                self._store(store, parts, width)
        self.e.width = outside

    def _store(self, store: Store, parts: tuple[str, ...], width: int) -> None:
        e, place = self.e, self.place(store, width)
        dtype = place.dtype

        def update(old: tuple[str, ...], new: tuple[str, ...]) -> tuple[str, ...]:
            return combine(e, store.combine, dtype, old, new) if store.combine else new

        if width == 1 or not place.contiguous:
            mask = self.mask(store.guard, width)
            access.store_each(e, place, mask, parts, update if store.combine else None)
        elif store.guard is not None or (self.tail is not None and self.tail.masked):
            mask = self.some_mask(store.guard, width)
            place = self._mapped(store, place, mask)
            if store.combine:
                parts = update(access.load_masked(e, place, mask, None), parts)
            access.store_masked(e, place, mask, parts)
        else:
            known = update if store.combine else None
            access.store_contiguous(e, place, self.tail, parts, known, self.streams.get(store, 0))


def _known(const: Const) -> int | float | None:
    """Return the number of a real constant that is not NaN."""
    number = from_bits(const.bits, const.dtype)
    if kind(const.dtype) in "iu":
        return int(number)
    if kind(const.dtype) == "f" and number == number:
        return float(number)
    return None


def _carried(instr: LoadRow) -> str:
    return DTYPES[instr.dtype].carrier
