"""The law of kernel IR: `check_kernel` raises `KernelError` for a kernel that breaks it.

Every renderer may rely on what is checked here: types agree with `ops.py`, each value is defined
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
    operands_of,
)
from spmd.compile.kernel.ops import ARG_REDUCERS, OPS, REDUCERS, SCANNERS, result_dtype

READABLE = ("in", "inout")
WRITABLE = ("out", "inout")
COMBINERS = ("add", "mul", "max", "min")


class KernelError(Exception):
    """A kernel breaks the law of the IR: a mistake in the lowering, never the user's."""


def check_kernel(kernel: Kernel) -> None:
    """Raise `KernelError`, naming pass and item, if `kernel` is not well formed."""
    _Checker(kernel).run()


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


class _Checker:
    """Walks a kernel in program order, remembering what each pass may see."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.visible: dict[int, str] = {}
        self.used: set[int] = set()
        self.filled: set[int] = set()
        self.where = "the kernel"

    def fail(self, message: str) -> None:
        raise KernelError(f"{self.where}: {message}")

    def need(self, condition: bool, message: str) -> None:
        if not condition:
            self.fail(message)

    def run(self) -> None:
        kernel = self.kernel
        for number, arg in enumerate(kernel.args):
            self.need(arg.dtype in DTYPES, f"arg {number} has unknown dtype {arg.dtype!r}")
            self.need(arg.role in ("in", "out", "inout"), f"arg {number} has role {arg.role!r}")
            self.need(arg.size >= 0, f"arg {number} has size {arg.size}")
        for dtype in kernel.buffers:
            self.need(dtype in DTYPES, f"a row buffer has unknown dtype {dtype!r}")
        self.need(min(kernel.sizes, default=0) >= 0, f"negative size in {kernel.sizes}")
        lanes = kernel.vector_dim
        self.need(
            lanes is None or 0 <= lanes < len(kernel.sizes),
            f"vector_dim {lanes} is not one of the {len(kernel.sizes)} dims",
        )
        for number, step in enumerate(kernel.passes):
            self.check_pass(number, step)

    def check_pass(self, number: int, step: Pass) -> None:
        self.where = f"pass {number}"
        self.need(step.level in (ROW, POINT), f"unknown level {step.level!r}")
        sizes = self.kernel.sizes if step.level == ROW else self.kernel.outer
        outside = dict(self.visible)
        for index, instr in enumerate(step.instrs):
            self.where = f"pass {number}, instr {index} (%{instr.out} = {type(instr).__name__})"
            self.check_operands(operands_of(instr))
            self.check_instr(instr, step.level, sizes)
            self.define(instr.out, instr.dtype)
        self.where = f"pass {number}"
        directions = {instr.reverse for instr in step.instrs if isinstance(instr, Scan)}
        self.need(len(directions) < 2, "the scans of a pass run in one direction")
        kept: set[int] = set()
        for index, store in enumerate(step.stores):
            self.where = f"pass {number}, store {index}"
            self.check_operands(operands_of(store))
            if isinstance(store, StoreRow):
                kept.add(self.check_store_row(store, step.level, kept))
            else:
                self.check_store(store, sizes)
        results = {}
        for reduction in step.reductions:
            self.where = f"pass {number}, reduction %{reduction.out}"
            self.check_operands(operands_of(reduction))
            self.check_reduction(reduction, step.level)
            results[reduction.out] = reduction.dtype
        if step.level == ROW:
            self.visible = outside
        for value, dtype in results.items():
            self.define(value, dtype)
        self.filled |= kept

    def define(self, value: int, dtype: str) -> None:
        self.need(value not in self.used, f"value %{value} is defined twice")
        self.used.add(value)
        self.visible[value] = dtype

    def check_operands(self, values: tuple[int, ...]) -> None:
        for value in values:
            self.need(value in self.visible, f"value %{value} is not defined or not visible here")

    # ---- instructions ----

    def check_instr(self, instr: Instr, level: str, sizes: tuple[int, ...]) -> None:
        self.need(instr.dtype in DTYPES, f"unknown dtype {instr.dtype!r}")
        match instr:
            case Const(bits=bits, dtype=dtype):
                self.need(0 <= bits < 1 << DTYPES[dtype].bits, f"{bits:#x} is no {dtype} pattern")
            case Iota(dim=dim):
                self.need(0 <= dim < len(sizes), f"dim {dim} does not exist at {level} level")
                self.need(kind(instr.dtype) in "iuf", f"iota of {instr.dtype}")
            case Op():
                self.check_op(instr)
            case Load():
                self.check_load(instr, sizes)
            case LoadRow(buffer=buffer):
                self.need(level == ROW, "a row buffer is read in ROW passes only")
                self.need(buffer in self.filled, f"no earlier pass fills row buffer {buffer}")
                self.need(instr.dtype == self.kernel.buffers[buffer], "dtype is not the buffer's")
            case Scan(op=op, operand=operand):
                self.need(level == ROW and len(self.kernel.inner) == 1, "scans need one inner dim")
                self.need(op in SCANNERS, f"{op!r} is not one of {SCANNERS}")
                self.need(instr.dtype == self.visible[operand], "dtype is not the operand's")
                self.need(result_dtype(op, (instr.dtype,) * 2, "") is not None, f"no {op}")

    def check_op(self, instr: Op) -> None:
        dtypes = tuple(self.visible[value] for value in instr.operands)
        expected = result_dtype(instr.op, dtypes, instr.dtype)
        self.need(expected is not None, f"{instr.op!r} does not take {dtypes} to {instr.dtype}")
        self.need(expected == instr.dtype, f"{instr.op} gives {expected}, not {instr.dtype}")
        has_attr = instr.attr is not None
        self.need(has_attr == (instr.op == "integer_pow"), f"attr={instr.attr} on {instr.op}")

    def check_load(self, load: Load, sizes: tuple[int, ...]) -> None:
        self.check_map(load.arg, load.map, sizes, load.guard)
        arg = self.kernel.args[load.arg]
        self.need(arg.role in READABLE, f"arg {load.arg} is only written")
        self.need(load.dtype == arg.dtype, f"arg {load.arg} is {arg.dtype}, not {load.dtype}")
        self.need(load.fill is None or load.guard is not None, "fill without a guard")
        if load.fill is not None:
            self.need(self.visible[load.fill] == load.dtype, "fill has another dtype")

    def check_map(self, number: int, where: Map, sizes: tuple[int, ...], guard: int | None) -> None:
        args = self.kernel.args
        self.need(0 <= number < len(args), f"there is no arg {number}")
        self.need(
            len(where.strides) == len(sizes),
            f"{len(where.strides)} strides for {len(sizes)} dims",
        )
        for value, _ in where.gathered:
            dtype = self.visible[value]
            self.need(kind(dtype) in "iu", f"gathered index %{value} is {dtype}, not an integer")
        if guard is not None:
            self.need(self.visible[guard] == "bool", f"guard %{guard} is not bool")
        if guard is None and not where.gathered and 0 not in sizes and 0 not in self.kernel.sizes:
            low, high = affine_range(where, sizes)
            self.need(
                0 <= low and high < args[number].size,
                f"addresses {low}..{high} leave arg {number} of {args[number].size} elements",
            )

    # ---- ends ----

    def check_store(self, store: Store, sizes: tuple[int, ...]) -> None:
        self.check_map(store.arg, store.map, sizes, store.guard)
        arg = self.kernel.args[store.arg]
        self.need(arg.role in WRITABLE, f"arg {store.arg} is only read")
        self.need(self.visible[store.value] == arg.dtype, f"arg {store.arg} is {arg.dtype}")
        if store.combine is not None:
            self.need(store.combine in COMBINERS, f"unknown combine {store.combine!r}")
            self.need(arg.role == "inout", f"combine reads arg {store.arg}: make it inout")
        if not store.map.gathered:
            self.need(
                writes_once(store.map, sizes),
                f"strides {store.map.strides} write some element of arg {store.arg} twice",
            )

    def check_store_row(self, store: StoreRow, level: str, kept: set[int]) -> int:
        self.need(level == ROW, "a row buffer is written in ROW passes only")
        self.need(0 <= store.buffer < len(self.kernel.buffers), f"no row buffer {store.buffer}")
        self.need(store.buffer not in kept, f"row buffer {store.buffer} is written twice")
        self.need(
            self.visible[store.value] == self.kernel.buffers[store.buffer],
            f"row buffer {store.buffer} is {self.kernel.buffers[store.buffer]}",
        )
        return store.buffer

    def check_reduction(self, reduction: Reduce, level: str) -> None:
        op, dtype = reduction.op, self.visible[reduction.operand]
        self.need(level == ROW, "a POINT pass has nothing to reduce")
        if op in ARG_REDUCERS:
            self.need(kind(reduction.dtype) in "iu", f"{op} gives an integer position")
            self.need(kind(dtype) in "biuf", f"{op} does not take {dtype}")
            return
        self.need(op in REDUCERS, f"unknown reduction {op!r}")
        self.need(reduction.dtype == dtype, f"{op} of {dtype} gives {dtype}")
        self.need(kind(dtype) in OPS[op].kinds, f"{op} does not take {dtype}")
