"""NVRTC compiles every rendered kernel for sm_80 and sm_90, which needs no GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from spmd.compile.cuda import nvrtc
from spmd.compile.cuda.kernel import module_text, render, render_product
from spmd.compile.cuda.launch import Function
from spmd.compile.cuda.nvrtc import NvrtcError, compile_cubin, compile_ptx, parse_usage, with_lines
from tests.compile.cuda.corpus import (
    operation_cases,
    program_kernels,
    program_products,
    written_cases,
)
from tests.compile.cuda.kernel_costs import report
from tests.compile.cuda.large_kernels import LARGE
from tests.compile.kernel.op_kernels import row_sum

ARCHS = ("sm_80", "sm_90")
# A multiprocessor has 65536 registers: with more than this a thread the largest block can't start.
REGISTERS = 65536


def corpus() -> dict[str, Function]:
    """All functions of all tested kernels, equal ones once."""
    kernels = [case.kernel for case in (*written_cases(), *operation_cases())]
    kernels += [make() for make, _ in LARGE.values()]
    kernels += program_kernels()
    rendered = [render(kernel) for kernel in kernels]
    rendered += [render_product(product) for product in program_products()]
    return {function.symbol: function for each in rendered for function in each.functions}


def test_every_kernel_compiles():
    functions = corpus()
    assert len(functions) > 300
    source = module_text(functions.values())
    with ThreadPoolExecutor(len(ARCHS)) as pool:
        compiled = list(pool.map(lambda arch: compile_cubin(source, arch), ARCHS))
    for arch, each in zip(ARCHS, compiled, strict=True):
        assert each.arch == arch and each.cubin.startswith(b"\x7fELF")
        assert set(each.usage) == set(functions)
        for symbol, usage in each.usage.items():
            function = functions[symbol]
            assert usage.spill_stores == usage.spill_loads == 0, function.text
            assert usage.registers * function.launch.threads <= REGISTERS, function.text
            assert function.barriers or not usage.barriers, function.text


def test_the_ptx_is_that_of_the_same_call():
    source = module_text(render(row_sum(3, 1000)).functions)
    compiled = compile_cubin(source, "sm_90")
    assert compiled.source == source
    assert compiled.ptx == compile_ptx(source, "sm_90")
    assert ".target sm_90" in compiled.ptx and "bar.sync" in compiled.ptx and ".loc" in compiled.ptx


def test_an_error_shows_the_source_around_its_line():
    source = "\n".join([*["// nothing"] * 50, "int f() { return missing; }", "// after"])
    with pytest.raises(NvrtcError) as caught:
        compile_cubin(source, "sm_90")
    message = caught.value.text
    assert message.startswith("NVRTC for sm_90: NVRTC_ERROR_COMPILATION\n")
    assert 'identifier "missing" is undefined' in message
    assert ">   51 | int f() { return missing; }\n    52 | // after" in message
    assert "   49 | // nothing" in message and "   48 |" not in message


def test_an_unknown_architecture_is_an_error():
    with pytest.raises(NvrtcError, match="sm_7"):
        compile_cubin("", "sm_7")


def test_without_the_wheel_the_error_says_what_to_install(run_python):
    program = (
        "from spmd.compile.cuda import nvrtc\n"
        "nvrtc.NVRTC_WHEEL = 'nvidia-cuda-nvrtc-of-no-version'\n"
        "nvrtc.compile_cubin('', 'sm_90')\n"
    )
    done = run_python(["-c", program])
    assert done.returncode == 1
    assert "NvrtcError: " in done.stderr
    assert "pip install nvidia-cuda-nvrtc-of-no-version" in done.stderr


def test_version_is_that_of_a_supported_toolkit():
    assert nvrtc.version() >= (13, 0)


def test_the_report_of_ptxas_is_read():
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kernel_1' for 'sm_90'
ptxas info    : Function properties for kernel_1
    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 38 registers, used 1 barriers, 8 bytes cumulative stack size
ptxas info    : Compiling entry function 'kernel_2' for 'sm_90'
ptxas info    : Function properties for kernel_2
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
"""
    usage = parse_usage(log)
    assert str(usage["kernel_1"]) == "38 registers, 40 bytes spilled, 1 barriers"
    assert usage["kernel_2"].registers == 10 and usage["kernel_2"].stack == 0


def test_numbered_lines_are_those_that_the_log_names():
    text = with_lines("kernels.cu(3): error: no", "a\nb\nc\nd\ne\nf", around=1)
    assert text == "kernels.cu(3): error: no\n     2 | b\n>    3 | c\n     4 | d"


def test_the_report_has_a_line_for_each_function():
    products = program_products()[:2]
    lines = report([row_sum(1000, 1000), row_sum(1, 100_000), *products, *products]).splitlines()
    assert lines[0].split() == ["function", "grid", "block", "registers", "spilled", "shared"]
    # One function, then partial sums, those of the shorter last chunk, and what joins them.
    launches = [line.split()[1:3] for line in lines[1:5]]
    assert launches == [["1000", "256x1"], ["24", "1024x1"], ["1", "512x1"], ["1", "32x1"]]
    assert len(lines) == 5 + len(products)
    for line in lines[1:]:
        _, _, _, registers, spilled, _ = line.split()
        assert 0 < int(registers) <= 128 and spilled == "0"
