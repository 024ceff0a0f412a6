"""A small structured assembler: native functions written in Python, rendered as LLVM IR text.

The one idea: control flow is a `with` block and a variable is a stack slot (`var`), so runtime
code reads like the C it stands for. A few LLVM passes (`compile_texts(..., optimize=True)`) turn
the slots into registers. It serves the runtime: pool, executor, matrix products. Kernels have
their own emitter, which needs no passes.

    @define("sum", "i64")
    def sum_of(f: Function, data: Ptr, count: I64) -> None:
        total = f.var("i64", 0)
        with f.range(0, count) as i:
            total.set(total.get() + f.load("i64", data, i * 8))
        f.ret(total.get())

    text = sum_of().text()

All integer arithmetic is signed and wraps. Addresses are plain `ptr` with byte offsets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from spmd.compile.native.llvm.vector_emitter import float_literal

# The alignment of vectors that are written past the caches, and the mark of such stores.
STREAM_ALIGNMENT = 64
STREAM_METADATA = "!900 = !{i32 1}"

_FLOATS = ("half", "bfloat", "float", "double")


def _arithmetic(
    integer: str, floating: str = "", swap: bool = False
) -> Callable[[Value, Operand], Value]:
    """An operator: the LLVM instructions for integers and for floats."""

    def apply(self: Value, other: Operand) -> Value:
        left, right = self, self.function.value(self.type, other)
        if swap:
            left, right = right, left
        operation = floating if is_float(self.type) else integer
        return self.function.emit(self.type, f"{operation} {self.type} {left.text}, {right.text}")

    return apply


def _comparison(integer: str, floating: str) -> Callable[[Value, Operand], Value]:
    """A comparison: LLVM's predicates of integers and of floats."""

    def apply(self: Value, other: Operand) -> Value:
        right = self.function.value(self.type, other)
        kind = f"fcmp {floating}" if is_float(self.type) else f"icmp {integer}"
        result = "i1" if "<" not in self.type else self.type.split(" x ")[0] + " x i1>"
        return self.function.emit(result, f"{kind} {self.type} {self.text}, {right.text}")

    return apply


class Value:
    """A typed operand: a register or a constant, with the operators of its type."""

    __slots__ = ("function", "text", "type")

    def __init__(self, function: Function, type: str, text: str):
        self.function = function
        self.type = type
        self.text = text

    __add__ = __radd__ = _arithmetic("add", "fadd")
    __sub__ = _arithmetic("sub", "fsub")
    __rsub__ = _arithmetic("sub", "fsub", swap=True)
    __mul__ = __rmul__ = _arithmetic("mul", "fmul")
    __floordiv__ = _arithmetic("sdiv", "fdiv")  # truncates toward zero
    __mod__ = _arithmetic("srem", "frem")
    __and__ = _arithmetic("and")
    __or__ = _arithmetic("or")
    __xor__ = _arithmetic("xor")
    __lshift__ = _arithmetic("shl")
    __rshift__ = _arithmetic("ashr")  # keeps the sign

    # All give an i1, or a vector of them.
    __lt__ = _comparison("slt", "olt")
    __le__ = _comparison("sle", "ole")
    __gt__ = _comparison("sgt", "ogt")
    __ge__ = _comparison("sge", "oge")
    equals = _comparison("eq", "oeq")
    differs = _comparison("ne", "une")


Operand = Value | int | float


class Variable:
    """A stack slot that can be set again and again."""

    __slots__ = ("function", "pointer", "type")

    def __init__(self, function: Function, type: str, pointer: Value):
        self.function = function
        self.type = type
        self.pointer = pointer

    def get(self) -> Value:
        """The present value."""
        return self.function.load(self.type, self.pointer)

    def set(self, value: Operand) -> None:
        """Assign."""
        self.function.store(self.function.value(self.type, value), self.pointer)


class Function:
    """A function under construction. `text()` renders it; a module is a list of such texts."""

    def __init__(
        self,
        name: str,
        returns: str,
        params: Sequence[str],
        *,
        internal: bool = False,
        attributes: str = "nounwind",
    ):
        self.name = name
        self._returns = returns
        self.params = tuple(Value(self, t, f"%a{i}") for i, t in enumerate(params))
        self._linkage = "internal " if internal else ""
        self._attributes = attributes
        self._entry: list[str] = []
        self._body: list[str] = []
        self._names = 0
        self._open = True
        self._breaks: list[str] = []

    # ---- values ------------------------------------------------------------------------------

    def value(self, type: str, operand: Operand) -> Value:
        """`operand` as a value of `type`; Python numbers become constants."""
        if isinstance(operand, Value):
            if operand.type != type:
                raise TypeError(f"{self.name}: {operand.type} {operand.text} used as {type}")
            return operand
        if "<" in type:
            element = type.split(" x ")[1].rstrip(">")
            text = f"splat ({element} {_constant(element, operand)})"
            return Value(self, type, text if operand else "zeroinitializer")
        return Value(self, type, _constant(type, operand))

    def null(self) -> Value:
        """The null pointer."""
        return Value(self, "ptr", "null")

    def symbol(self, name: str) -> Value:
        """The address of a function or global of this module, or of an external one."""
        return Value(self, "ptr", f"@{name}")

    def emit(self, type: str, instruction: str) -> Value:
        """Append an instruction with a result."""
        register = f"%v{self._fresh()}"
        self.do(f"{register} = {instruction}")
        return Value(self, type, register)

    def do(self, instruction: str) -> None:
        """Append an instruction without a result."""
        if not self._open:
            # Code behind a return still needs a block to stand in; LLVM removes it.
            self.start(self.label())
        self._body.append(instruction)

    def var(self, type: str, initial: Operand | None = None) -> Variable:
        """A new variable, set to `initial` at this point of the code."""
        variable = Variable(self, type, self.stack(type))
        if initial is not None:
            variable.set(initial)
        return variable

    def stack(self, type: str, count: int = 1, align: int | None = None) -> Value:
        """Stack memory of a fixed size, the same for every pass through this point."""
        register = f"%s{self._fresh()}"
        alignment = f", align {align}" if align else ""
        self._entry.append(f"{register} = alloca {type}, i64 {count}{alignment}")
        return Value(self, "ptr", register)

    def stack_bytes(self, count: Value) -> Value:
        """Stack memory of a size known at run time. Never in a loop: it lives until the return."""
        return self.emit("ptr", f"alloca i8, i64 {count.text}, align 16")

    # ---- memory ------------------------------------------------------------------------------

    def at(self, pointer: Value, offset: Operand) -> Value:
        """The address `offset` bytes behind `pointer`."""
        if isinstance(offset, int) and offset == 0:
            return pointer
        text = self.value("i64", offset).text
        return self.emit("ptr", f"getelementptr i8, ptr {pointer.text}, i64 {text}")

    def apart(self, pointer: Value, stride: Value, count: int) -> list[Value]:
        """So many addresses from `pointer` on, each `stride` bytes behind the one before."""
        return [pointer, *[self.at(pointer, stride * number) for number in range(1, count)]]

    def load(self, type: str, pointer: Value, offset: Operand = 0, align: int = 0) -> Value:
        """Read a value; `align` (bytes) where the natural alignment is not certain."""
        suffix = f", align {align}" if align else ""
        address = self.at(pointer, offset)
        return self.emit(type, f"load {type}, ptr {address.text}{suffix}")

    def store(self, value: Value, pointer: Value, offset: Operand = 0, align: int = 0) -> None:
        """Write a value."""
        suffix = f", align {align}" if align else ""
        address = self.at(pointer, offset)
        self.do(f"store {value.type} {value.text}, ptr {address.text}{suffix}")

    def stream(self, value: Value, pointer: Value) -> None:
        """Write a vector past the caches; the place is a multiple of `STREAM_ALIGNMENT`."""
        how = f"align {STREAM_ALIGNMENT}, !nontemporal !900"
        self.do(f"store {value.type} {value.text}, ptr {pointer.text}, {how}")

    def atomic_load(self, pointer: Value, offset: int, order: str = "acquire") -> Value:
        """Read an i64 that other threads write."""
        address = self.at(pointer, offset)
        return self.emit("i64", f"load atomic i64, ptr {address.text} {order}, align 8")

    def atomic_store(self, value: Value, pointer: Value, offset: int) -> None:
        """Write a value that other threads read."""
        address = self.at(pointer, offset)
        width = int(value.type[1:]) // 8
        text = f"{value.type} {value.text}, ptr {address.text}"
        self.do(f"store atomic {text} seq_cst, align {width}")

    def atomic(self, operation: str, pointer: Value, offset: int, value: Value) -> Value:
        """An atomic read-modify-write (add, and, or, xchg); gives the value before it."""
        address = self.at(pointer, offset)
        text = f"{operation} ptr {address.text}, {value.type} {value.text}"
        return self.emit(value.type, f"atomicrmw {text} seq_cst")

    def opaque(self, number: Value) -> Value:
        """The same number, hidden from LLVM's analysis of induction variables.

        Loop strength reduction turns addresses that depend on a counter into pointers of their own.
        With many addresses that takes most of the compile time, and more instructions and
        registers.
        """
        return self.emit(
            number.type, f'call {number.type} asm "", "=r,0"({number.type} {number.text})'
        )

    # ---- conversions and choices -------------------------------------------------------------

    def convert(self, operation: str, value: Value, type: str) -> Value:
        """An LLVM conversion: sext, zext, trunc, sitofp, fpext, fptrunc, bitcast, ptrtoint, ..."""
        return self.emit(type, f"{operation} {value.type} {value.text} to {type}")

    def select(self, condition: Value, left: Operand, right: Operand) -> Value:
        """`left` where the condition holds, else `right`; one of them must be a Value."""
        type = left.type if isinstance(left, Value) else right.type  # type: ignore[union-attr]
        a, b = self.value(type, left), self.value(type, right)
        test = f"{condition.type} {condition.text}"
        return self.emit(type, f"select {test}, {type} {a.text}, {type} {b.text}")

    def smaller(self, left: Value, right: Operand) -> Value:
        """The smaller of two numbers."""
        right = self.value(left.type, right)
        return self.select(left < right, left, right)

    def larger(self, left: Value, right: Operand) -> Value:
        """The larger of two numbers."""
        right = self.value(left.type, right)
        return self.select(left > right, left, right)

    def divided(self, number: Value, by: Value) -> tuple[Value, Value]:
        """Divide a number that is not negative: the quotient and what is left."""
        quotient = number // by
        return quotient, number - quotient * by

    def weighted(self, numbers: Sequence[Value], factors: Sequence[Value]) -> Value:
        """The sum of numbers, each times its factor."""
        products = [number * factor for number, factor in zip(numbers, factors, strict=True)]
        return functools.reduce(Value.__add__, products)

    # ---- calls and control flow --------------------------------------------------------------

    def call(self, target: str | Value, returns: str, *operands: Value, type: str = "") -> Value:
        """Call a function by name, through a pointer, or at an address that is a number.

        `type` spells a variadic signature.
        """
        if isinstance(target, Value) and target.type != "ptr":
            target = self.convert("inttoptr", target, "ptr")
        callee = target.text if isinstance(target, Value) else f"@{target}"
        text = ", ".join(f"{v.type} {v.text}" for v in operands)
        instruction = f"call {type or returns} {callee}({text})"
        if returns == "void":
            self.do(instruction)
            return Value(self, "void", "")
        return self.emit(returns, instruction)

    def ret(self, value: Operand | None = None) -> None:
        """Return from the function."""
        if value is None:
            self.do("ret void")
        else:
            self.do(f"ret {self._returns} {self.value(self._returns, value).text}")
        self._open = False

    def ret_if(self, condition: Value, value: Operand | None = None) -> None:
        """Return a value that is known already when the condition holds."""
        with self.if_(condition):
            self.ret(value)

    @contextmanager
    def if_(self, condition: Value) -> Iterator[None]:
        """Run the block when the condition holds."""
        then, after = self.label(), self.label()
        self.branch(condition, then, after)
        self.start(then)
        yield
        self.goto(after)
        self.start(after)

    @contextmanager
    def if_else(self, condition: Value) -> Iterator[Else]:
        """Run the block when the condition holds, up to `it.otherwise()`; if not, the rest.

        with f.if_else(x < 0) as it:
            ...
            it.otherwise()
            ...
        """
        then, otherwise, after = self.label(), self.label(), self.label()
        self.branch(condition, then, otherwise)
        self.start(then)
        yield Else(self, otherwise, after)
        self.goto(after)
        self.start(after)

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Repeat the block until `break_if` or a return."""
        head, after = self.label(), self.label()
        self.goto(head)
        self.start(head)
        self._breaks.append(after)
        yield
        self._breaks.pop()
        self.goto(head)
        self.start(after)

    def break_if(self, condition: Value) -> None:
        """Leave the innermost loop when the condition holds."""
        stay = self.label()
        self.branch(condition, self._breaks[-1], stay)
        self.start(stay)

    @contextmanager
    def range(self, begin: Operand, end: Operand, step: Operand = 1) -> Iterator[Value]:
        """Count from `begin` below `end`."""
        index = self.var("i64", begin)
        bound = self.value("i64", end)
        with self.loop():
            i = index.get()
            self.break_if(i >= bound)
            yield i
            index.set(i + step)

    def label(self) -> str:
        """A name for a block of code."""
        return f"b{self._fresh()}"

    def start(self, label: str) -> None:
        """Begin a block of code, which blocks before it end by going to."""
        self._body.append(f"{label}:")
        self._open = True

    def goto(self, label: str) -> None:
        """End the block by going to another; nothing where it has ended already."""
        if self._open:
            self._body.append(f"br label %{label}")
            self._open = False

    def branch(self, condition: Value, then: str, otherwise: str) -> None:
        """End the block by going to one of two others."""
        self.do(f"br i1 {condition.text}, label %{then}, label %{otherwise}")
        self._open = False

    # ---- rendering ---------------------------------------------------------------------------

    def text(self) -> str:
        """The definition as LLVM IR."""
        if self._open:
            if self._returns != "void":
                raise ValueError(f"{self.name} ends without returning a value")
            self.ret()
        params = ", ".join(f"{v.type} {v.text}" for v in self.params)
        head = f"define {self._linkage}{self._returns} @{self.name}({params}) {self._attributes} {{"
        return "\n".join([head, "entry:", *self._entry, *self._body, "}"])

    def _fresh(self) -> int:
        self._names += 1
        return self._names


class Words(dict[str, Value]):
    """The named numbers of 8 bytes each that lie one after the other in memory.

    A function reads each where it is used.
    """

    def __init__(self, function: Function, where: Value, names: Sequence[str]):
        super().__init__()
        self._function = function
        self._where = where
        self._offsets = {name: 8 * k for k, name in enumerate(names)}

    def __missing__(self, name: str) -> Value:
        return self._function.load("i64", self._where, self._offsets[name])

    def read(self, *names: str) -> list[Value]:
        """Some of them, read here."""
        return [self[name] for name in names]


class Else:
    """The second half of an `if_else` block."""

    __slots__ = ("_after", "_function", "_label")

    def __init__(self, function: Function, label: str, after: str):
        self._function = function
        self._label = label
        self._after = after

    def otherwise(self) -> None:
        """End the first half; the code that follows runs when the condition does not hold."""
        self._function.goto(self._after)
        self._function.start(self._label)


def is_float(type: str) -> bool:
    """Whether a type is a floating-point number or a vector of them."""
    return any(name in type for name in _FLOATS)


def _constant(type: str, number: int | float) -> str:
    if type == "i1":
        return "true" if number else "false"
    if type == "ptr" and number == 0:
        return "null"
    if type in ("float", "double"):
        return float_literal(number, type)
    return str(int(number))


# The types of a native function's parameters, as annotations; `I64` is the type `i64`.
Ptr: TypeAlias = Value
I64: TypeAlias = Value
I32: TypeAlias = Value
_PARAMETER_TYPES = frozenset(("Ptr", "I64", "I32"))


def define(
    name: str, returns: str, *, exported: bool = False, attributes: str = "nounwind"
) -> Callable[[Callable[..., None]], Callable[..., Function]]:
    """A decorator: makes the writer of a body into a maker of the whole native function.

    The writer is called with the function, its parameters, whose types are their annotations, and
    the arguments of the maker. Its module has `from __future__ import annotations`.
    """

    def decorate(write: Callable[..., None]) -> Callable[..., Function]:
        annotations = write.__annotations__.values()
        params = [t.lower() for t in annotations if t in _PARAMETER_TYPES]

        @functools.wraps(write)
        def make(*settings: Any) -> Function:
            f = Function(name, returns, params, internal=not exported, attributes=attributes)
            write(f, *f.params, *settings)
            return f

        return make

    return decorate
