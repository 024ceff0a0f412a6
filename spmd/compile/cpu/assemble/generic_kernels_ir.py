"""Native functions with run-time sizes, which eager operations of any shape share.

The one idea: a program per shape would be compiled for each shape that a user tries. A kernel of
one block of elements is compiled once; `blocks` runs it over any number of them, the last,
shorter one through a buffer. Sums and extremes along rows or columns are written here for all
sizes. All have the signature of kernels, `void (ptr args, ptr sizes, i64 begin, i64 end)`.

The order of a sum depends on its length alone: lanes first, then runs of blocks, then the lanes
with each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from spmd.compile.native.llvm.function_builder import Function, Value

# Elements of a block, and the most bytes that one of them has.
BLOCK = 64
_MOST_BYTES = 16

# The sizes that `blocks` is given: the kernel, the number of elements, the number of arguments, of
# which the last is the result; then the bytes of an element of each, 0 for one that has one only.
_KERNEL, _COUNT, _ARGUMENTS, _WIDTHS = range(4)

# Rows, or blocks of one, that are added up before their sum is added to that of the others.
RUN = 32
# Vectors that a row's reduction keeps, so that one addition need not wait for the last.
_VECTORS = 4

# The operations of reductions: the value that changes nothing, and the instruction.
IDENTITY = {"add": 0.0, "mul": 1.0, "max": float("-inf"), "min": float("inf")}
_INSTRUCTIONS = {"add": "fadd", "mul": "fmul"}
_INTRINSICS = {"max": "maximum", "min": "minimum"}
ELEMENTS = {"f32": ("float", 4, 16), "f64": ("double", 8, 8)}


def blocks_text() -> str:
    """The module of `spmd_blocks`: unit k is the k-th block of elements."""
    f = Function("spmd_blocks", "void", ["ptr", "ptr", "i64", "i64"])
    args, sizes, begin, end = f.params
    kernel, count = f.load("ptr", sizes, 8 * _KERNEL), f.load("i64", sizes, 8 * _COUNT)
    arguments = f.load("i64", sizes, 8 * _ARGUMENTS)
    own = f.stack_bytes(arguments * 8)
    buffers = f.stack_bytes(arguments * (BLOCK * _MOST_BYTES))
    whole = count // BLOCK
    last = f.smaller(end, whole)

    def width(k: Value) -> Value:
        return f.load("i64", f.at(sizes, 8 * _WIDTHS), k * 8)

    def run() -> None:
        f.call(kernel, "void", own, sizes, f.value("i64", 0), f.value("i64", 1))

    with f.range(begin, last) as block:
        with f.range(0, arguments) as k:
            f.store(f.at(f.load("ptr", args, k * 8), block * width(k) * BLOCK), own, k * 8)
        run()
    with f.if_(end > whole):
        rest = count - whole * BLOCK
        with f.range(0, arguments) as k:
            given = f.load("ptr", args, k * 8)
            with f.if_else(width(k).equals(0)) as it:
                f.store(given, own, k * 8)
                it.otherwise()
                # Zeros, as the garbage there may be slow to compute with.
                buffer = f.at(buffers, k * (BLOCK * _MOST_BYTES))
                f.call("memset", "ptr", buffer, f.value("i32", 0), width(k) * BLOCK)
                start = f.at(given, whole * width(k) * BLOCK)
                f.call("memcpy", "ptr", buffer, start, rest * width(k))
                f.store(buffer, own, k * 8)
        run()
        k = arguments - 1
        target = f.at(f.load("ptr", args, k * 8), whole * width(k) * BLOCK)
        f.call("memcpy", "ptr", target, f.load("ptr", own, k * 8), rest * width(k))
    declarations = "declare ptr @memset(ptr, i32, i64)\ndeclare ptr @memcpy(ptr, ptr, i64)"
    return f"{declarations}\n{f.text()}"


# ---- reductions --------------------------------------------------------------------------------


class _Reduction:
    """The common part of the functions of one reduction."""

    def __init__(self, name: str, op: str, dtype: str):
        self.op = op
        self.element, self.nbytes, self.lanes = ELEMENTS[dtype]
        self.vector = f"<{self.lanes} x {self.element}>"
        self.f = Function(name, "void", ["ptr", "ptr", "i64", "i64"])
        self.declared: dict[str, None] = {}

    def combine(self, x: Value, y: Value) -> Value:
        """Two vectors or elements combined."""
        f, kind = self.f, x.type
        if self.op in _INSTRUCTIONS:
            return f.emit(kind, f"{_INSTRUCTIONS[self.op]} {kind} {x.text}, {y.text}")
        width = kind.removeprefix("<").partition(" x ")[0] if "<" in kind else ""
        suffix = f"v{width}f{8 * self.nbytes}" if width else f"f{8 * self.nbytes}"
        name = f"llvm.{_INTRINSICS[self.op]}.{suffix}"
        self.declared[f"declare {kind} @{name}({kind}, {kind})"] = None
        return f.call(name, kind, x, y)

    def start(self, kind: str) -> Value:
        """The identity element of the operation."""
        number = IDENTITY[self.op]
        if "<" in kind and number:
            one = self.f.value(self.element, number)
            return Value(self.f, kind, f"splat ({self.element} {one.text})")
        return self.f.value(kind, number)

    def folded(self, x: Value) -> Value:
        """The lanes of a vector combined, halves with each other."""
        f, lanes = self.f, self.lanes
        while lanes > 1:
            lanes //= 2
            half, picks = f"<{lanes} x {self.element}>", f"<{lanes} x i32>"
            parts = []
            for first in (0, lanes):
                chosen = ", ".join(f"i32 {first + k}" for k in range(lanes))
                pair = f"{x.type} {x.text}, {x.type} poison, {picks} <{chosen}>"
                parts.append(f.emit(half, f"shufflevector {pair}"))
            x = self.combine(*parts)
        return f.emit(self.element, f"extractelement {x.type} {x.text}, i64 0")

    def text(self) -> str:
        """The module."""
        declared = ["declare ptr @memcpy(ptr, ptr, i64)", *self.declared]
        return "\n".join((*declared, self.f.text()))


def rows_text(name: str, op: str, dtype: str) -> str:
    """Each row of a matrix reduced: unit k is row k. The size is the length of a row."""
    r = _Reduction(name, op, dtype)
    f, (args, sizes, begin, end) = r.f, r.f.params
    source, target, length = f.load("ptr", args), f.load("ptr", args, 8), f.load("i64", sizes)
    step = _VECTORS * r.lanes
    buffer = f.stack("i8", step * r.nbytes, 64)
    blocks, at = length // step, [k * r.lanes * r.nbytes for k in range(_VECTORS)]

    def take(totals: Sequence, place: Value) -> None:
        for total, offset in zip(totals, at, strict=True):
            total.set(r.combine(total.get(), f.load(r.vector, place, offset, align=r.nbytes)))

    with f.range(begin, end) as row:
        here = f.at(source, row * length * r.nbytes)
        totals = [f.var(r.vector, r.start(r.vector)) for _ in at]
        with f.range(0, blocks, RUN) as first:
            run = [f.var(r.vector, r.start(r.vector)) for _ in at]
            with f.range(first, f.smaller(first + RUN, blocks)) as block:
                take(run, f.at(here, block * (step * r.nbytes)))
            for total, part in zip(totals, run, strict=True):
                total.set(r.combine(total.get(), part.get()))
        rest = length - blocks * step
        with f.if_(rest > 0):
            for offset in at:
                f.store(r.start(r.vector), buffer, offset)
            last = f.at(here, blocks * (step * r.nbytes))
            f.call("memcpy", "ptr", buffer, last, rest * r.nbytes)
            take(totals, buffer)
        pairs = [r.combine(totals[k].get(), totals[k + 1].get()) for k in (0, 2)]
        f.store(r.folded(r.combine(*pairs)), target, row * r.nbytes)
    return r.text()


def columns_text(name: str, op: str, dtype: str) -> str:
    """The columns of matrices reduced: unit k is matrix k. The sizes are its rows and columns."""
    r = _Reduction(name, op, dtype)
    f, (args, sizes, begin, end) = r.f, r.f.params
    source, target = f.load("ptr", args), f.load("ptr", args, 8)
    rows, columns = f.load("i64", sizes), f.load("i64", sizes, 8)

    def reduce(kind: str, here: Value, there: Value) -> None:
        """Reduce a column, or as many as a vector has lanes."""
        total = f.var(kind, r.start(kind))
        with f.range(0, rows, RUN) as first:
            run = f.var(kind, r.start(kind))
            with f.range(first, f.smaller(first + RUN, rows)) as row:
                value = f.load(kind, here, row * columns * r.nbytes, align=r.nbytes)
                run.set(r.combine(run.get(), value))
            total.set(r.combine(total.get(), run.get()))
        f.store(total.get(), there, align=r.nbytes)

    whole = columns // r.lanes * r.lanes
    with f.range(begin, end) as matrix:
        here, there = (
            f.at(source, matrix * rows * columns * r.nbytes),
            f.at(target, matrix * columns * r.nbytes),
        )
        with f.range(0, whole, r.lanes) as column:
            reduce(r.vector, f.at(here, column * r.nbytes), f.at(there, column * r.nbytes))
        with f.range(whole, columns) as column:
            reduce(r.element, f.at(here, column * r.nbytes), f.at(there, column * r.nbytes))
    return r.text()
