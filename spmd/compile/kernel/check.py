"""The law of kernel IR: `check_kernel` raises `KernelError` for a kernel that breaks it.

Every renderer may rely on these checks: types agree with `ops.py`, each value is defined
once and before it is used, in a pass that may see it, affine addresses lie inside their argument,
and plain stores never write one element twice. Addresses that contain gathered or guarded parts are
run-time values; the interpreter checks those.
"""

from __future__ import annotations

from spmd.compile.kernel.dtypes import DTYPES, kind
from spmd.compile.kernel.ir import (
    POINT,
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
    Reduce,
    Scan,
    Store,
    StoreRow,
    reads_of,
)
from spmd.compile.kernel.ops import ARG_REDUCERS, OPS, REDUCERS, SCANNERS, result_dtype

READABLE = ("in", "inout")
WRITABLE = ("out", "inout")
COMBINERS = ("add", "mul", "max", "min")


class KernelError(Exception):
    """A kernel breaks the law of the IR: a mistake in the lowering, never the user's."""


def check_kernel(kernel: Kernel) -> None:
    """Raise `KernelError`, naming pass and item, if `kernel` is not well formed."""
    if not kernel.is_checked:
        _Checker(kernel).run()
        object.__setattr__(kernel, "is_checked", True)


def affine_range(where: Map, sizes: tuple[int, ...]) -> tuple[int, int]:
    """Return the least and greatest address of the affine part over a non-empty space."""
    spans = [stride * (size - 1) for stride, size in zip(where.strides, sizes, strict=True)]
    low = where.offset + sum(min(span, 0) for span in spans)
    high = where.offset + sum(max(span, 0) for span in spans)
    return low, high


def writes_once(where: Map, sizes: tuple[int, ...]) -> bool:
    """Say whether the affine map sends different points to different elements.

    Sufficient, and exact for layouts whose strides nest: each stride passes over all smaller ones.
    """
    if 0 in sizes:
        return True
    dims = [(abs(stride), size) for stride, size in zip(where.strides, sizes, strict=True)]
    reach = 0
    for stride, size in sorted(dim for dim in dims if dim[1] > 1):
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def _shown(part: object) -> str:
    if isinstance(part, Instr):
        return f"(%{part.out} = {type(part).__name__})"
    return str(part)


class _Checker:
    """Walks a kernel in program order, with the values that each pass may see."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.sizes = kernel.outer + kernel.inner
        self.visible: dict[int, str] = {}
        self.used: set[int] = set()
        self.filled: set[int] = set()
        self.where: tuple[object, ...] = ("the kernel",)

    def broken(self, message: str) -> KernelError:
        """The error to raise. Kernels are checked at every compile: texts are made when it is."""
        where = "".join([_shown(part) for part in self.where])
        return KernelError(f"{where}: {message}")

    def run(self) -> None:
        kernel = self.kernel
        for number, arg in enumerate(kernel.args):
            if arg.dtype not in DTYPES:
                raise self.broken(f"arg {number} has unknown dtype {arg.dtype!r}")
            if arg.role not in ("in", "out", "inout"):
                raise self.broken(f"arg {number} has role {arg.role!r}")
            if arg.size < 0:
                raise self.broken(f"arg {number} has size {arg.size}")
        for dtype in kernel.buffers:
            if dtype not in DTYPES:
                raise self.broken(f"a row buffer has unknown dtype {dtype!r}")
        if min(self.sizes, default=0) < 0:
            raise self.broken(f"negative size in {self.sizes}")
        lanes = kernel.vector_dim
        if lanes is not None and not 0 <= lanes < len(self.sizes):
            raise self.broken(f"vector_dim {lanes} is not one of the {len(self.sizes)} dims")
        for number, step in enumerate(kernel.passes):
            self.check_pass(number, step)

    def check_pass(self, number: int, step: Pass) -> None:
        self.where = ("pass ", number)
        if step.level not in (ROW, POINT):
            raise self.broken(f"unknown level {step.level!r}")
        sizes = self.sizes if step.level == ROW else self.kernel.outer
        outside = dict(self.visible)
        reads = iter(reads_of((*step.instrs, *step.stores, *step.reductions)))
        for index, instr in enumerate(step.instrs):
            self.where = "pass ", number, ", instr ", index, " ", instr
            self.check_operands(next(reads))
            self.check_instr(instr, step.level, sizes)
            self.define(instr.out, instr.dtype)
        self.where = ("pass ", number)
        directions = {instr.reverse for instr in step.instrs if isinstance(instr, Scan)}
        if len(directions) > 1:
            raise self.broken("the scans of a pass run in one direction")
        kept: set[int] = set()
        for index, store in enumerate(step.stores):
            self.where = "pass ", number, ", store ", index
            self.check_operands(next(reads))
            if isinstance(store, StoreRow):
                kept.add(self.check_store_row(store, step.level, kept))
            else:
                self.check_store(store, sizes)
        results = {}
        for reduction in step.reductions:
            self.where = "pass ", number, ", reduction %", reduction.out
            self.check_operands(next(reads))
            self.check_reduction(reduction, step.level)
            results[reduction.out] = reduction.dtype
        if step.level == ROW:
            self.visible = outside
        for value, dtype in results.items():
            self.define(value, dtype)
        self.filled |= kept

    def define(self, value: int, dtype: str) -> None:
        if value in self.used:
            raise self.broken(f"value %{value} is defined twice")
        self.used.add(value)
        self.visible[value] = dtype

    def check_operands(self, values: tuple[int, ...]) -> None:
        for value in values:
            if value not in self.visible:
                raise self.broken(f"value %{value} is not defined or not visible here")

    # ---- instructions ----

    def check_instr(self, instr: Instr, level: str, sizes: tuple[int, ...]) -> None:
        if instr.dtype not in DTYPES:
            raise self.broken(f"unknown dtype {instr.dtype!r}")
        match instr:
            case Const(bits=bits, dtype=dtype):
                if not 0 <= bits < 1 << DTYPES[dtype].bits:
                    raise self.broken(f"{bits:#x} is no {dtype} pattern")
            case Iota(dim=dim):
                if not 0 <= dim < len(sizes):
                    raise self.broken(f"dim {dim} does not exist at {level} level")
                if kind(instr.dtype) not in "iuf":
                    raise self.broken(f"iota of {instr.dtype}")
            case Op():
                self.check_op(instr)
            case Load():
                self.check_load(instr, sizes)
            case LoadRow(buffer=buffer):
                if level != ROW:
                    raise self.broken("a row buffer is read in ROW passes only")
                if buffer not in self.filled:
                    raise self.broken(f"no earlier pass fills row buffer {buffer}")
                if instr.dtype != self.kernel.buffers[buffer]:
                    raise self.broken("dtype is not the buffer's")
            case Scan(op=op, operand=operand):
                if level != ROW or len(self.kernel.inner) != 1:
                    raise self.broken("scans need one inner dim")
                if op not in SCANNERS:
                    raise self.broken(f"{op!r} is not one of {SCANNERS}")
                if instr.dtype != self.visible[operand]:
                    raise self.broken("dtype is not the operand's")
                if result_dtype(op, (instr.dtype,) * 2, "") is None:
                    raise self.broken(f"no {op}")

    def check_op(self, instr: Op) -> None:
        dtypes = tuple(self.visible[value] for value in instr.operands)
        expected = result_dtype(instr.op, dtypes, instr.dtype)
        if expected is None:
            raise self.broken(f"{instr.op!r} does not take {dtypes} to {instr.dtype}")
        if expected != instr.dtype:
            raise self.broken(f"{instr.op} gives {expected}, not {instr.dtype}")
        has_attr = instr.attr is not None
        if has_attr != (instr.op == "integer_pow"):
            raise self.broken(f"attr={instr.attr} on {instr.op}")

    def check_load(self, load: Load, sizes: tuple[int, ...]) -> None:
        self.check_map(load.arg, load.map, sizes, load.guard)
        arg = self.kernel.args[load.arg]
        if arg.role not in READABLE:
            raise self.broken(f"arg {load.arg} is only written")
        if load.dtype != arg.dtype:
            raise self.broken(f"arg {load.arg} is {arg.dtype}, not {load.dtype}")
        if load.fill is not None and load.guard is None:
            raise self.broken("fill without a guard")
        if load.fill is not None and self.visible[load.fill] != load.dtype:
            raise self.broken("fill has another dtype")

    def check_map(self, number: int, where: Map, sizes: tuple[int, ...], guard: int | None) -> None:
        args = self.kernel.args
        if not 0 <= number < len(args):
            raise self.broken(f"there is no arg {number}")
        if len(where.strides) != len(sizes):
            raise self.broken(f"{len(where.strides)} strides for {len(sizes)} dims")
        for value, _ in where.gathered:
            dtype = self.visible[value]
            if kind(dtype) not in "iu":
                raise self.broken(f"gathered index %{value} is {dtype}, not an integer")
        if guard is not None and self.visible[guard] != "bool":
            raise self.broken(f"guard %{guard} is not bool")
        if guard is None and not where.gathered and 0 not in sizes and 0 not in self.sizes:
            low, high = affine_range(where, sizes)
            if low < 0 or high >= args[number].size:
                raise self.broken(
                    f"addresses {low}..{high} leave arg {number} of {args[number].size} elements"
                )

    # ---- ends ----

    def check_store(self, store: Store, sizes: tuple[int, ...]) -> None:
        self.check_map(store.arg, store.map, sizes, store.guard)
        arg = self.kernel.args[store.arg]
        if arg.role not in WRITABLE:
            raise self.broken(f"arg {store.arg} is only read")
        if self.visible[store.value] != arg.dtype:
            raise self.broken(f"arg {store.arg} is {arg.dtype}")
        if store.combine is not None:
            if store.combine not in COMBINERS:
                raise self.broken(f"unknown combine {store.combine!r}")
            if arg.role != "inout":
                raise self.broken(f"combine reads arg {store.arg}: make it inout")
        if not store.map.gathered and not writes_once(store.map, sizes):
            raise self.broken(
                f"strides {store.map.strides} write some element of arg {store.arg} twice"
            )

    def check_store_row(self, store: StoreRow, level: str, kept: set[int]) -> int:
        if level != ROW:
            raise self.broken("a row buffer is written in ROW passes only")
        if not 0 <= store.buffer < len(self.kernel.buffers):
            raise self.broken(f"no row buffer {store.buffer}")
        if store.buffer in kept:
            raise self.broken(f"row buffer {store.buffer} is written twice")
        if self.visible[store.value] != self.kernel.buffers[store.buffer]:
            raise self.broken(f"row buffer {store.buffer} is {self.kernel.buffers[store.buffer]}")
        return store.buffer

    def check_reduction(self, reduction: Reduce, level: str) -> None:
        op, dtype = reduction.op, self.visible[reduction.operand]
        if level != ROW:
            raise self.broken("a POINT pass has nothing to reduce")
        if op in ARG_REDUCERS:
            if kind(reduction.dtype) not in "iu":
                raise self.broken(f"{op} gives an integer position")
            if kind(dtype) not in "biuf":
                raise self.broken(f"{op} does not take {dtype}")
            return
        if op not in REDUCERS:
            raise self.broken(f"unknown reduction {op!r}")
        if reduction.dtype != dtype:
            raise self.broken(f"{op} of {dtype} gives {dtype}")
        if kind(dtype) not in OPS[op].kinds:
            raise self.broken(f"{op} does not take {dtype}")
