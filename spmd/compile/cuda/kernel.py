"""Kernel IR to CUDA C++ text.

    rendered = render(kernel)
    source = module_text(rendered.functions)       # for NVRTC
    # then launch each of rendered.functions as its `launch` says

The shape of a kernel decides on its threads: points (`elementwise.py`), teams of threads for
rows (`rows.py`), blocks for tiles of a product (`matmul.py`), or, where the order of points
counts, one thread or one for each independent lane (`serial.py`). A long reduction with few results
becomes two launches: partial results of chunks, and one that joins them. There are no atomics, and
every order is fixed by the shapes: the same inputs give the same bits. A symbol is a hash of the
text, so equal kernels share compiled code.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from spmd.base.record import replace
from spmd.compile.cuda import tensor_product, windows
from spmd.compile.cuda.elementwise import render_points, render_tiles, tile_dim
from spmd.compile.cuda.keep_rows import keep_rows
from spmd.compile.cuda.launch import Function, Launch, Rendered
from spmd.compile.cuda.matmul import ProductText, as_rows, is_narrow
from spmd.compile.cuda.rows import SCRATCH, RowText, plan_rows
from spmd.compile.cuda.scalar_ops import carrier
from spmd.compile.cuda.serial import render_serial
from spmd.compile.cuda.text import Text
from spmd.compile.kernel.check import check_kernel
from spmd.compile.kernel.format import format_kernel
from spmd.compile.kernel.ir import Arg, Kernel, is_sequential
from spmd.compile.kernel.iteration_space import is_elementwise, normalise
from spmd.compile.kernel.matmul import Product, check_product
from spmd.compile.kernel.split_reduction import Chunks, split_reduction
from spmd.compile.kernel.window_contraction import Contraction, check_contraction

# The bytes that the addresses of arguments are a multiple of.
ALIGNED = 16
# With this many rows every multiprocessor of today's largest GPUs has two of them.
CHUNKS = Chunks(elements=4096, most=1024, enough_points=264)

_HEADS = {
    name: Path(__file__).with_name(name).read_text(encoding="utf-8")
    for name in (
        *("scalar.cuh", "team.cuh", "tensor.cuh", "sort.cuh"),
        *("attention.cuh", "tensor_attention.cuh"),
    )
}
PRELUDE = "\n".join(_HEADS.values())


def prelude_files() -> list[tuple[str, int, int]]:
    """The files that a module begins with: name, first line in the module, count of lines."""
    found, first = [], 1
    for name, text in _HEADS.items():
        count = text.count("\n") + 1
        found.append((name, first, count))
        first += count
    return found


def render(kernel: Kernel) -> Rendered:
    """Render `kernel` as CUDA functions to launch in order."""
    check_kernel(kernel)
    if 0 in kernel.outer or not kernel.passes or (is_elementwise(kernel) and 0 in kernel.sizes):
        return Rendered(())
    split = None if is_sequential(kernel) else split_reduction(kernel, CHUNKS)
    if split is None:
        return _render_whole(kernel)
    functions: list[Function] = []
    temporaries = list(split.temporaries)
    for part in (*split.partials, split.combine):
        made = _render_whole(part, len(kernel.args) + len(temporaries))
        functions += made.functions
        temporaries += made.temporaries
    return Rendered(tuple(functions), tuple(temporaries))


def render_product(product: Product, alignment: int = ALIGNED) -> Rendered:
    """Render a product; its arguments are A, B and the epilogue's without the first.

    `alignment` divides the addresses of A and B.
    """
    check_product(product)
    if 0 in (*product.batch, product.m, product.n):
        return Rendered(())
    if is_narrow(product):
        return render(as_rows(product))
    text = Text()
    text.depth = 1
    if tensor_product.takes(product):
        launch = tensor_product.TensorText(product, text, alignment).write()
    else:
        launch = ProductText(product, text, alignment).write()
    operands = [f"const {product.a.dtype} *a", f"const {product.b.dtype} *b"]
    rest = list(enumerate(product.epilogue.args))[1:]
    parameters = [*operands, *(_parameter(arg, number) for number, arg in rest)]
    arguments = tuple(range(len(parameters)))
    sizes = "x".join(map(str, (*product.batch, product.m, product.n, product.k)))
    comment = f"product {sizes}, then\n{format_kernel(product.epilogue)}"
    return Rendered((as_function(comment, parameters, text, launch, arguments, True),))


def render_contraction(given: Contraction, alignment: int = ALIGNED) -> Rendered:
    """Render a contraction over windows; its arguments are A, B, the result, the epilogue's.

    `alignment` divides the addresses of A and B.
    """
    check_contraction(given)
    after = () if given.epilogue is None else given.epilogue.args[1:]
    written = (2,) if given.epilogue is None else ()
    numbers = (0, 1, *written, *range(3, 3 + len(after)))
    if windows.is_narrow(given):
        return _renumbered(render(windows.as_rows(given)), numbers, 3 + len(after))
    text = Text()
    text.depth = 1
    if windows.takes_tensor_cores(given):
        launch = windows.TensorWindowsText(given, text, alignment).write()
    else:
        launch = windows.WindowsText(given, text).write()
    parameters = [f"const {given.dtype} *a", f"const {given.dtype} *b"]
    parameters += [f"{given.dtype} *out" for _ in written]
    parameters += [_parameter(arg, number) for number, arg in enumerate(after, 1)]
    sizes = "x".join(map(str, (given.batch[0], given.rows.count, given.columns, given.depth.count)))
    comment = f"contraction {sizes}"
    if given.epilogue is not None:
        comment += f", then\n{format_kernel(given.epilogue)}"
    return Rendered((as_function(comment, parameters, text, launch, numbers, True),))


def _renumbered(rendered: Rendered, numbers: Sequence[int], count: int) -> Rendered:
    """A kernel whose arguments are those of these numbers among `count`."""
    names = [*numbers, *range(count, count + len(rendered.temporaries))]
    functions = tuple(
        replace(f, arguments=tuple([names[k] for k in f.arguments])) for f in rendered.functions
    )
    return replace(rendered, functions=functions)


def module_text(functions: Iterable[Function]) -> str:
    """Return the source of one module with all these functions, equal ones once."""
    return "\n".join(
        [PRELUDE, *{function.symbol: function.text for function in functions}.values()]
    )


def _render_whole(kernel: Kernel, first_temporary: int | None = None) -> Rendered:
    """Render as one function; its scratch arrays are numbered from `first_temporary`."""
    kernel = normalise(kernel)
    count = len(kernel.args)
    first = count if first_temporary is None else first_temporary
    text, temporaries, barriers = Text(), (), False
    text.depth = 1
    if is_sequential(kernel) and is_elementwise(kernel):
        launch = render_serial(kernel, text)
    elif is_elementwise(kernel):
        along = tile_dim(kernel)
        barriers = along is not None
        launch = render_points(kernel, text) if along is None else render_tiles(kernel, along, text)
    else:
        kernel = keep_rows(kernel)
        plan = plan_rows(kernel)
        barriers = plan.team > 1
        launch = RowText(kernel, plan, text, first).write()
        if plan.place == SCRATCH:
            elements = math.prod(kernel.sizes)
            temporaries = tuple((carrier(dtype), elements) for dtype in kernel.buffers)
    arguments = (*range(count), *range(first, first + len(temporaries)))
    parameters = [_parameter(arg, number) for number, arg in enumerate(kernel.args)]
    scratch = zip(arguments[count:], temporaries, strict=True)
    parameters += [f"{dtype} *a{number}" for number, (dtype, _) in scratch]
    comment = format_kernel(kernel)
    function = as_function(comment, parameters, text, launch, arguments, barriers)
    return Rendered((function,), temporaries)


def _parameter(arg: Arg, number: int) -> str:
    return f"{'const ' if arg.role == 'in' else ''}{arg.dtype} *a{number}"


def as_function(
    comment: str,
    parameters: Sequence[str],
    text: Text,
    launch: Launch,
    arguments: tuple[int, ...],
    barriers: bool,
    bounds: str = "",
) -> Function:
    """Put the head around a body, with the kernel's own text as a comment above it.

    `bounds` are further arguments of `__launch_bounds__`.
    """
    lines = [
        f'extern "C" __global__ void __launch_bounds__({launch.threads}{bounds})',
        f"SYMBOL({', '.join(parameters)}) {{",
        *(["  extern __shared__ unsigned char shared[];"] if launch.shared else []),
        str(text),
        "}\n",
    ]
    rendered = "\n".join(lines)
    symbol = "kernel_" + hashlib.sha256(f"{launch}{rendered}".encode()).hexdigest()[:32]
    above = "".join(f"// {line}\n" for line in comment.splitlines())
    return Function(symbol, above + rendered.replace("SYMBOL", symbol), launch, arguments, barriers)
