"""The arithmetic of collective reductions: a native kernel per operator and dtypes, on demand.

The one idea: `out[e] = ((in_0[e] op in_1[e]) op in_2[e]) ...` in the order of the group, for a
range of elements. The inputs meet in registers, so the outputs may be the inputs.

ABI: args = inputs then outputs, sizes = [number of inputs, number of outputs], units = elements.
f16 and bf16 accumulate in f32 and round once; the result may stay f32, or be rounded from f32 that
was accumulated before. Sums of bools are `or`, products `and`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spmd.base.errors import DtypeError
from spmd.base.record import record
from spmd.compile.native.llvm.compiler import compile_texts, host
from spmd.compile.native.llvm.function_builder import (
    STREAM_ALIGNMENT,
    STREAM_METADATA,
    Function,
    Value,
)
from spmd.compile.native.llvm.vectors import round_to_bfloat, vector_type

OPERATORS = ("sum", "prod", "max", "min", "and", "or", "xor")

# Registers that one input fills at a time: enough loads in flight to hide their latency.
_VECTORS = 4


@record
class _Element:
    """How a dtype lies in memory (`stored`) and in registers (`carried`)."""

    stored: str
    carried: str
    nbytes: int
    kind: str  # float, signed, unsigned, bool, complex


_ELEMENTS = {
    "bool": _Element("i8", "i8", 1, "bool"),
    "float16": _Element("half", "float", 2, "float"),
    "bfloat16": _Element("i16", "float", 2, "float"),
    "float32": _Element("float", "float", 4, "float"),
    "float64": _Element("double", "double", 8, "float"),
    "complex64": _Element("float", "float", 4, "complex"),
    "complex128": _Element("double", "double", 8, "complex"),
    **{f"int{b}": _Element(f"i{b}", f"i{b}", b // 8, "signed") for b in (8, 16, 32, 64)},
    **{f"uint{b}": _Element(f"i{b}", f"i{b}", b // 8, "unsigned") for b in (8, 16, 32, 64)},
}

# The operator of each kind, as an LLVM instruction or (with a dot) an intrinsic.
_COMBINE = {
    "float": {"sum": "fadd", "prod": "fmul", "max": "llvm.maximum", "min": "llvm.minimum"},
    "complex": {"sum": "fadd", "prod": "complex"},
    "bool": {"sum": "or", "prod": "and", "max": "or", "min": "and"},
    "signed": {"sum": "add", "prod": "mul", "max": "llvm.smax", "min": "llvm.smin"},
    "unsigned": {"sum": "add", "prod": "mul", "max": "llvm.umax", "min": "llvm.umin"},
}
_BITWISE = {"and": "and", "or": "or", "xor": "xor"}


def supports(op: str, dtype: str) -> bool:
    """Whether there is a reduction with this operator for a dtype (by its NumPy name)."""
    return dtype in _ELEMENTS and _combiner(op, _ELEMENTS[dtype].kind) is not None


# Operator, dtype of the inputs, dtype of the outputs, by their NumPy names; and whether it streams.
Reduction = tuple[str, str, str, bool]


def reduce_kernels(wanted: Sequence[Reduction]) -> dict[Reduction, int]:
    """The addresses of the kernels for some reductions."""
    for op, dtype, *_ in wanted:
        if not supports(op, dtype):
            raise DtypeError(
                f"a {op or 'nameless'} over devices is not defined for {dtype}; "
                f"operators: {', '.join(OPERATORS)}; max, min and bitwise ones are not for complex."
            )
    texts = {reduction: reduce_text(*reduction) for reduction in wanted}
    symbols = compile_texts(list(texts.values()), optimize=True)
    return {reduction: symbols[_symbol(*reduction)] for reduction in texts}


def reduce_text(op: str, dtype: str, result: str, streams: bool = False) -> str:
    """The module that reduces `dtype` with `op` and writes `result`.

    One that streams writes past the caches, where all outputs are aligned: results larger than
    they are would first be read from memory, only to be overwritten.
    """
    element, written = _ELEMENTS[dtype], _ELEMENTS[result]
    if element.carried != written.carried or element.kind != written.kind:
        raise ValueError(f"a reduction of {dtype} cannot be written as {result}")
    lanes = _VECTORS * host().vector_bytes // max(element.nbytes, 4)
    intrinsics: dict[str, None] = {}
    f = Function(_symbol(op, dtype, result, streams), "void", ["ptr", "ptr", "i64", "i64"])
    begin, end = f.params[2:]
    if element.kind == "complex" and op == "prod":
        _elements(f, element, written, op, 1, begin, end, intrinsics)
    else:
        # A complex sum is a sum of twice as many reals.
        scale = 2 if element.kind == "complex" else 1
        first, last = begin * scale, end * scale
        middle = last - (last - first) % lanes
        if streams and not lanes * written.nbytes % STREAM_ALIGNMENT:
            start = _where_aligned(f, first * written.nbytes, first, middle)
            _elements(f, element, written, op, lanes, first, start, intrinsics)
            _elements(f, element, written, op, lanes, start, middle, intrinsics, streams)
            # Such stores are not ordered by the release that says a unit is done.
            f.do("fence seq_cst")
        else:
            _elements(f, element, written, op, lanes, first, middle, intrinsics)
        _elements(f, element, written, op, 1, middle, last, intrinsics)
    return "\n".join([*intrinsics, f.text(), STREAM_METADATA])


def _where_aligned(f: Function, offset: Value, first: Value, middle: Value) -> Value:
    """`first` if all outputs are aligned there, else `middle`."""
    args, sizes = f.params[:2]
    inputs, outputs = f.load("i64", sizes), f.load("i64", sizes, 8)
    odd = f.var("i64", offset)
    with f.range(inputs, inputs + outputs) as i:
        odd.set(odd.get() | f.load("i64", args, i * 8))
    return f.select((odd.get() % STREAM_ALIGNMENT).equals(0), first, middle)


def _symbol(op: str, dtype: str, result: str, streams: bool) -> str:
    written = f"_{result}" if result != dtype else ""
    return f"reduce_{op}_{dtype}{written}{'_streams' if streams else ''}"


def _combiner(op: str, kind: str) -> str | None:
    found = _COMBINE[kind].get(op)
    if found is None and kind not in ("float", "complex"):
        found = _BITWISE.get(op)
    return found


def _elements(
    f: Function,
    element: _Element,
    written: _Element,
    op: str,
    lanes: int,
    begin: Value,
    end: Value,
    intrinsics: dict[str, None],
    streams: bool = False,
) -> None:
    """Reduce the elements [begin, end), `lanes` at a time."""
    args, sizes = f.params[:2]
    inputs, outputs = f.load("i64", sizes), f.load("i64", sizes, 8)
    reals = 2 if element.kind == "complex" and op == "prod" else 1
    combine = _make_combiner(f, element, op, lanes, intrinsics)
    with f.range(begin, end, lanes) as index:
        offset = index * (element.nbytes * reals)

        def read(source: Value, at: Value = offset) -> list[Value]:
            address = f.at(source, at)
            return [_read(f, element, lanes, address, r * element.nbytes) for r in range(reals)]

        start = read(f.load("ptr", args))
        total = [f.var(part.type, part) for part in start]
        with f.range(1, inputs) as i:
            other = read(f.load("ptr", args, i * 8))
            combined = combine([part.get() for part in total], other)
            for variable, part in zip(total, combined, strict=True):
                variable.set(part)
        with f.range(inputs, inputs + outputs) as i:
            address = f.at(f.load("ptr", args, i * 8), index * (written.nbytes * reals))
            for r, variable in enumerate(total):
                _write(f, written, lanes, variable.get(), address, r * written.nbytes, streams)


def _make_combiner(
    f: Function, element: _Element, op: str, lanes: int, intrinsics: dict[str, None]
) -> Callable[[list[Value], list[Value]], list[Value]]:
    name = _combiner(op, element.kind)
    type = vector_type(element.carried, lanes)
    if name == "complex":

        def multiply(a: list[Value], b: list[Value]) -> list[Value]:
            return [a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]]

        return multiply
    if name is not None and "." in name:
        suffix = {"float": "f32", "double": "f64"}.get(element.carried, element.carried)
        intrinsic = f"{name}.v{lanes}{suffix}" if lanes > 1 else f"{name}.{suffix}"
        intrinsics[f"declare {type} @{intrinsic}({type}, {type})"] = None
        return lambda a, b: [f.call(intrinsic, type, a[0], b[0])]
    return lambda a, b: [f.emit(type, f"{name} {type} {a[0].text}, {b[0].text}")]


def _read(f: Function, element: _Element, lanes: int, address: Value, offset: int) -> Value:
    stored, carried = vector_type(element.stored, lanes), vector_type(element.carried, lanes)
    value = f.load(stored, address, offset, align=element.nbytes)
    if element.stored == "half":
        return f.convert("fpext", value, carried)
    if element.stored == "i16" and element.carried == "float":
        wide = f.convert("zext", value, vector_type("i32", lanes)) << 16
        return f.convert("bitcast", wide, carried)
    return value


def _write(
    f: Function,
    element: _Element,
    lanes: int,
    value: Value,
    address: Value,
    offset: int,
    streams: bool,
) -> None:
    if element.stored == "half":
        value = f.convert("fptrunc", value, vector_type("half", lanes))
    elif element.stored == "i16" and element.carried == "float":
        value = round_to_bfloat(f, value, lanes)
    if streams:
        f.stream(value, f.at(address, offset))
    else:
        f.store(value, address, offset, align=element.nbytes)
