"""Functions that call LAPACK's routines, one for each kind of factorization and dtype.

The one idea: a routine takes addresses, and a step's words have addresses: sizes and letters are
read where they lie. Where LAPACK fails, results are NaN, as `numpy.linalg` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from spmd.compile.kernel.factorization import (
    CHOLESKY,
    EIGENVALUES,
    EIGH,
    LU,
    QR,
    SINGULAR_VALUES,
    SOLVE,
    SVD,
    TRIANGULAR,
    UPPER,
)
from spmd.compile.native.llvm.compiler import host
from spmd.compile.native.llvm.function_builder import Function, Value, Words
from spmd.compile.native.llvm.shared_functions import share
from spmd.compile.native.llvm.vectors import vectors
from spmd.lax.linalg.lapack import threads_symbol

# The words of a step: sizes; bytes of a matrix (m, n), of the right sides, of the first factor and
# of the last one; elements of memory for work, of reals and of integers among it; where these
# begin; whether LAPACK must be told to have one thread; and letters.
SIZES: Sequence[str] = (
    "m n k least width "
    "matrix_bytes side_bytes first_bytes last_bytes value_bytes least_bytes row_bytes "
    "work reals integers work_at reals_at integers_at alone "
    "letter0 letter1 letter2 letter3"
).split()

_ELEMENTS = {"f32": "float", "f64": "double", "c64": "float", "c128": "double"}
_NBYTES = {"f32": 4, "f64": 8, "c64": 8, "c128": 16}

# How many steps are inside, and the library's threads before the first came in, under a lock.
_ALONE = """
@spmd_lapack_users = internal global [3 x i64] zeroinitializer
declare i32 @SET(i32)
define void @SYMBOL(i64 %enters) nounwind {
entry:
  %in = icmp ne i64 %enters, 0
  %change = select i1 %in, i64 1, i64 -1
  br label %wait
wait:
  %held = atomicrmw xchg ptr @spmd_lapack_users, i64 1 seq_cst
  %free = icmp eq i64 %held, 0
  br i1 %free, label %go, label %wait
go:
  %place = getelementptr i8, ptr @spmd_lapack_users, i64 8
  %saved = getelementptr i8, ptr @spmd_lapack_users, i64 16
  %inside = load i64, ptr %place
  %now = add i64 %inside, %change
  store i64 %now, ptr %place
  br i1 %in, label %enter, label %leave
enter:
  %first = icmp eq i64 %inside, 0
  br i1 %first, label %set, label %done
set:
  %before = call i32 @SET(i32 1)
  %wide = sext i32 %before to i64
  store i64 %wide, ptr %saved
  br label %done
leave:
  %many = load i64, ptr %saved
  %last = icmp eq i64 %now, 0
  %more = icmp sgt i64 %many, 1
  %resets = and i1 %last, %more
  br i1 %resets, label %reset, label %done
reset:
  %narrow = trunc i64 %many to i32
  %old = call i32 @SET(i32 %narrow)
  br label %done
done:
  store atomic i64 0, ptr @spmd_lapack_users seq_cst, align 8
  ret void
}
"""


@cache
def _alone(setter: str) -> str:
    """The symbol of the function that comes in, and leaves."""
    return share("lapack_alone", _ALONE.replace("@SET", f"@{setter}"))


class Routine:
    """A function under construction: what it was given, and the common parts of all."""

    def __init__(self, kind: str, dtype: str, routines: Sequence[str]):
        self.dtype, self.routines = dtype, routines
        self.element, self.nbytes = _ELEMENTS[dtype], _NBYTES[dtype]
        self.is_complex = dtype.startswith("c")
        attributes = vectors("f32", host().vector_bytes).attributes
        f = self.f = Function(
            symbol_of(kind, dtype), "void", ["ptr", "ptr", "i64", "i64"], attributes=attributes
        )
        self.args, self.sizes, self.begin, self.end = f.params
        self.words = Words(f, self.sizes, SIZES)
        setter = threads_symbol()
        self.alone = None if setter is None else _alone(setter)
        self.info = f.stack("i64", 1, align=8)
        self.one = f.stack("i64", 2, align=16)

    # ---- places ----

    def arg(self, number: int) -> Value:
        """The address of an operand or a result, or, behind them, of the memory for work."""
        return self.f.load("ptr", self.args, 8 * number)

    def word(self, name: str) -> Value:
        """The address of a word."""
        return self.f.at(self.sizes, 8 * SIZES.index(name))

    def letter(self, number: int) -> Value:
        """The address of a letter."""
        return self.word(f"letter{number}")

    @contextmanager
    def each(self) -> Any:
        """The number of each matrix; LAPACK has one thread, if the step says so."""
        self._tell(1)
        with self.f.range(self.begin, self.end) as number:
            yield number
        self._tell(0)

    def _tell(self, enters: int) -> None:
        """Say that this thread begins with its matrices, or ends."""
        f = self.f
        if self.alone is not None:
            with f.if_(self.words["alone"].differs(0)):
                f.call(self.alone, "void", f.value("i64", enters))

    # ---- actions ----

    def call(self, routine: int, *operands: Value) -> Value:
        """Call a routine; whether it succeeded."""
        f = self.f
        f.store(f.value("i64", 0), self.info)
        f.call(self.routines[routine], "void", *operands)
        return f.load("i64", self.info).equals(0)

    def copy(self, target: Value, source: Value, nbytes: Value) -> None:
        """Copy bytes."""
        self.f.call("memcpy", "ptr", target, source, nbytes)

    def zero(self, target: Value, nbytes: Value) -> None:
        """Write zeros."""
        self.f.call("memset", "ptr", target, self.f.value("i32", 0), nbytes)

    def fill_nan(self, target: Value, nbytes: Value, element: int = 0) -> None:
        """Write NaN, of complex numbers in the real parts."""
        f, apart = self.f, element or self.nbytes
        if apart > _real_bytes(self.dtype):
            self.zero(target, nbytes)
        with f.range(0, nbytes, apart) as offset:
            f.store(f.value(self.element, float("nan")), target, offset)

    def text(self) -> str:
        """The module."""
        declared = ["declare ptr @memcpy(ptr, ptr, i64)", "declare ptr @memset(ptr, i32, i64)"]
        if self.alone is not None:
            declared.append(f"declare void @{self.alone}(i64)")
        declared += [f"declare void @{name}(...)" for name in self.routines]
        return "\n".join((*declared, self.f.text()))


def _real_bytes(dtype: str) -> int:
    return 4 if _ELEMENTS[dtype] == "float" else 8


def symbol_of(kind: str, dtype: str) -> str:
    """The name of a function."""
    return f"spmd_lapack_{kind}_{dtype}"


@cache
def routine_text(kind: str, dtype: str, routines: tuple[str, ...]) -> str:
    """The module of the function that computes a kind of factorization."""
    made = Routine(kind, dtype, routines)
    _WRITERS[kind](made)
    return made.text()


# ---- one function each -------------------------------------------------------------------------


def _cholesky(r: Routine) -> None:
    """The upper factor of the columns is the lower factor of the rows."""
    f, w = r.f, r.words
    with r.each() as number:
        offset = number * w["matrix_bytes"]
        out = f.at(r.arg(1), offset)
        r.copy(out, f.at(r.arg(0), offset), w["matrix_bytes"])
        good = r.call(0, r.letter(0), r.word("n"), out, r.word("n"), r.info)
        with f.range(0, w["n"]) as i:
            row = f.at(out, i * w["row_bytes"])
            until = (i + 1) * r.nbytes
            with f.if_(good.equals(0)):
                r.fill_nan(row, until)
            r.zero(f.at(row, until), w["row_bytes"] - until)


def _triangular(r: Routine) -> None:
    f, w = r.f, r.words
    for half in range(2):  # of a complex number, too, the imaginary part is zero
        f.store(f.value("i64", 0), r.one, 8 * half)
    f.store(f.value(r.element, 1.0), r.one)
    with r.each() as number:
        offset = number * w["side_bytes"]
        out = f.at(r.arg(2), offset)
        r.copy(out, f.at(r.arg(1), offset), w["side_bytes"])
        a = f.at(r.arg(0), number * w["matrix_bytes"])
        is_left = w["letter0"].equals(ord("L"))
        rows = f.select(is_left, r.word("n"), r.word("k"))
        columns = f.select(is_left, r.word("k"), r.word("n"))
        letters = [r.letter(k) for k in range(4)]
        f.call(r.routines[0], "void", *letters, rows, columns, r.one, a, r.word("n"), out, rows)


def _solve(r: Routine) -> None:
    """The rows are the columns of the transpose, whose transpose is meant."""
    f, w = r.f, r.words
    room = r.arg(3)
    pivots = f.at(room, w["integers_at"])
    with r.each() as number:
        offset = number * w["side_bytes"]
        out = f.at(r.arg(2), offset)
        r.copy(out, f.at(r.arg(1), offset), w["side_bytes"])
        r.copy(room, f.at(r.arg(0), number * w["matrix_bytes"]), w["matrix_bytes"])
        n = r.word("n")
        good = r.call(0, n, n, room, n, pivots, r.info)
        with f.if_else(good) as it:
            r.call(1, r.letter(0), n, r.word("k"), room, n, pivots, out, n, r.info)
            it.otherwise()
            r.fill_nan(out, w["side_bytes"])


def _lu(r: Routine) -> None:
    """With a NaN among the elements the choice of pivots is that of array code, not LAPACK's."""
    f, w = r.f, r.words
    found = r.arg(4)
    with r.each() as number:
        offset = number * w["matrix_bytes"]
        out = f.at(r.arg(1), offset)
        r.copy(out, f.at(r.arg(0), offset), w["matrix_bytes"])
        has_nan = f.var("i1", 0)
        with f.range(0, w["matrix_bytes"], r.nbytes) as place:
            x = f.load(r.element, out, place)
            has_nan.set(has_nan.get() | x.differs(x))
        with f.if_else(has_nan.get()) as it:
            _eliminate(r, out, found)
            it.otherwise()
            r.call(0, r.word("m"), r.word("n"), out, r.word("m"), found, r.info)
        pivots = f.at(r.arg(2), number * w["least"] * 4)
        order = f.at(r.arg(3), number * w["m"] * 4)
        with f.range(0, w["m"]) as i:
            f.store(f.convert("trunc", i, "i32"), order, i * 4)
        with f.range(0, w["least"]) as i:
            row = f.load("i64", found, i * 8) - 1
            f.store(f.convert("trunc", row, "i32"), pivots, i * 4)
            one, other = f.load("i32", order, i * 4), f.load("i32", order, row * 4)
            f.store(other, order, i * 4)
            f.store(one, order, row * 4)


def _eliminate(r: Routine, columns: Value, pivots: Value) -> None:
    """LAPACK's getf2 for real numbers, to which NaN is never larger; pivots count from one."""
    f, w, nbytes = r.f, r.words, r.nbytes

    def at(i: Value, j: Value) -> Value:
        return f.at(columns, (j * w["m"] + i) * nbytes)

    def read(i: Value, j: Value) -> Value:
        return f.load(r.element, at(i, j))

    with f.range(0, w["least"]) as k:
        chosen, most = f.var("i64", k), f.var(r.element, -1.0)
        with f.range(k, w["m"]) as i:
            x = read(i, k)
            size = f.select(x < 0.0, f.value(r.element, 0.0) - x, x)
            with f.if_(size > most.get()):
                chosen.set(i)
                most.set(size)
        f.store(chosen.get() + 1, pivots, k * 8)
        with f.range(0, w["n"]) as j:
            one, other = read(k, j), read(chosen.get(), j)
            f.store(other, at(k, j))
            f.store(one, at(chosen.get(), j))
        pivot = read(k, k)
        safe = f.select(pivot.equals(0.0), f.value(r.element, 1.0), pivot)
        with f.range(k + 1, w["m"]) as i:
            factor = f.emit(r.element, f"fdiv {r.element} {read(i, k).text}, {safe.text}")
            f.store(factor, at(i, k))
            with f.range(k + 1, w["n"]) as j:
                f.store(read(i, j) - factor * read(k, j), at(i, j))


def _qr(r: Routine) -> None:
    _orthogonal(r, has_first=True)


def _upper(r: Routine) -> None:
    _orthogonal(r, has_first=False)


def _orthogonal(r: Routine, has_first: bool) -> None:
    f, w = r.f, r.words
    packed = r.arg(2 + has_first)
    scales = f.at(packed, w["reals_at"])
    work = f.at(packed, w["work_at"])
    element, align = f"i{8 * r.nbytes}", _real_bytes(r.dtype)
    with r.each() as number:
        m, n, least, width = (r.word(name) for name in ("m", "n", "least", "width"))
        places = (work, r.word("work"), r.info)
        r.copy(packed, f.at(r.arg(0), number * w["matrix_bytes"]), w["matrix_bytes"])
        r.call(0, m, n, packed, m, scales, *places)
        upper = f.at(r.arg(1 + has_first), number * w["last_bytes"])
        r.zero(upper, w["last_bytes"])
        with f.range(0, w["least"]) as i, f.range(i, w["n"]) as j:
            x = f.load(element, packed, (j * w["m"] + i) * r.nbytes, align=align)
            f.store(x, upper, (i * w["n"] + j) * r.nbytes, align=align)
        if has_first:
            q = f.at(r.arg(1), number * w["first_bytes"])
            r.copy(q, packed, w["least_bytes"])
            r.zero(f.at(q, w["least_bytes"]), w["first_bytes"] - w["least_bytes"])
            r.call(1, m, width, least, q, m, scales, *places)


def _eigh(r: Routine) -> None:
    _spectrum(r, has_vectors=True)


def _eigenvalues(r: Routine) -> None:
    _spectrum(r, has_vectors=False)


def _spectrum(r: Routine, has_vectors: bool) -> None:
    f, w = r.f, r.words
    room = r.arg(2 + has_vectors)
    with r.each() as number:
        offset = number * w["matrix_bytes"]
        vectors_ = f.at(r.arg(1), offset) if has_vectors else room
        values = f.at(r.arg(1 + has_vectors), number * w["value_bytes"])
        r.copy(vectors_, f.at(r.arg(0), offset), w["matrix_bytes"])
        reals = (f.at(room, w["reals_at"]), r.word("reals")) if r.is_complex else ()
        good = r.call(
            0, r.letter(0), r.letter(1), r.word("n"), vectors_, r.word("n"), values,
            f.at(room, w["work_at"]), r.word("work"), *reals,
            f.at(room, w["integers_at"]), r.word("integers"), r.info,
        )  # fmt: skip
        # Without vectors LAPACK finds some numbers that are none, and says nothing.
        failed = f.var("i1", good.equals(0))
        with f.range(0, w["value_bytes"], _real_bytes(r.dtype)) as place:
            x = f.load(r.element, values, place)
            failed.set(failed.get() | x.differs(x))
        with f.if_(failed.get()):
            r.fill_nan(values, w["value_bytes"], _real_bytes(r.dtype))
            if has_vectors:
                r.fill_nan(vectors_, w["matrix_bytes"])


def _svd(r: Routine) -> None:
    _singular(r, r.arg(4), r.arg(2), (r.arg(1), r.arg(3)))


def _singular_values(r: Routine) -> None:
    """Of the transposes: rows are columns."""
    _singular(r, r.arg(2), r.arg(1), None)


def _singular(r: Routine, room: Value, places: Value, factors: tuple[Value, Value] | None) -> None:
    f, w = r.f, r.words
    rows, columns = ("m", "n") if factors else ("n", "m")
    with r.each() as number:
        values = f.at(places, number * w["value_bytes"])
        r.copy(room, f.at(r.arg(0), number * w["matrix_bytes"]), w["matrix_bytes"])
        u = vh = room
        if factors:
            u = f.at(factors[0], number * w["first_bytes"])
            vh = f.at(factors[1], number * w["last_bytes"])
        reals = (f.at(room, w["reals_at"]),) if r.is_complex else ()
        good = r.call(
            0, r.letter(0), r.word(rows), r.word(columns), room, r.word(rows), values,
            u, r.word(rows), vh, r.word("width" if factors else columns),
            f.at(room, w["work_at"]), r.word("work"), *reals,
            f.at(room, w["integers_at"]), r.info,
        )  # fmt: skip
        with f.if_(good.equals(0)):
            r.fill_nan(values, w["value_bytes"], _real_bytes(r.dtype))
            if factors:
                r.fill_nan(u, w["first_bytes"])
                r.fill_nan(vh, w["last_bytes"])


_WRITERS: dict[str, Callable[[Routine], None]] = {
    CHOLESKY: _cholesky,
    TRIANGULAR: _triangular,
    SOLVE: _solve,
    LU: _lu,
    QR: _qr,
    UPPER: _upper,
    EIGH: _eigh,
    EIGENVALUES: _eigenvalues,
    SVD: _svd,
    SINGULAR_VALUES: _singular_values,
}
