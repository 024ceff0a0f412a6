"""The cost of kernels, known before a GPU is there: launches, registers, spills, as a table."""

from __future__ import annotations

from collections.abc import Iterable

from spmd.compile.cuda.kernel import module_text, render, render_product
from spmd.compile.cuda.launch import Function
from spmd.compile.cuda.nvrtc import compile_cubin
from spmd.compile.kernel.ir import Kernel
from spmd.compile.kernel.matmul import Product


def report(kernels: Iterable[Kernel | Product], arch: str = "sm_90") -> str:
    """Compile kernels and products for `arch`; one line a function, equal ones once.

    Registers are those of a thread, bytes those of a block. Spilled bytes are traffic that a kernel
    should not have.

    Raises:
        NvrtcError: NVRTC is not installed, or a rendered kernel does not compile.
    """
    functions: dict[str, Function] = {}
    for kernel in kernels:
        rendered = render_product(kernel) if isinstance(kernel, Product) else render(kernel)
        functions |= {function.symbol: function for function in rendered.functions}
    usage = compile_cubin(module_text(functions.values()), arch).usage
    rows: list[tuple[str, ...]] = [("function", "grid", "block", "registers", "spilled", "shared")]
    for symbol, function in functions.items():
        used, launch = usage[symbol], function.launch
        block = "x".join(map(str, launch.block))
        numbers = (used.registers, used.spill_stores + used.spill_loads, launch.shared)
        rows.append((symbol[:15], str(launch.grid), block, *map(str, numbers)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
