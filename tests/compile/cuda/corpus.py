"""What the CUDA renderer is tested on: kernels with inputs, and the kernels of whole programs.

Programs go through the passes and the lowering exactly as they do for the CPU, and stop there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import numpy as np

from spmd import lax
from spmd.compile.kernel.dtypes import DTYPES
from spmd.compile.kernel.ir import Kernel
from spmd.compile.kernel.matmul import Product
from spmd.compile.lower.lowering import lower
from spmd.compile.lower.steps import Launch, Multiply, Step, blocks
from spmd.compile.passes.pipeline import run_passes
from spmd.core.aval import typeof
from spmd.core.ir import ClosedJaxpr
from spmd.core.stage import trace_to_jaxpr
from tests.compile.kernel.op_kernels import (
    BITCASTS,
    OP_NAMES,
    bitcast_case,
    conversion_case,
    op_case,
    transposed_case,
)
from tests.compile.kernel.random_kernels import Case, random_case
from tests.compile.programs import random_program
from tests.lax.records import RECORDS

RANDOM_KERNELS = 30
RANDOM_PROGRAMS = 15


# ---- kernels written for tests ----------------------------------------------------------------


def written_cases() -> Iterator[Case]:
    """One case for each feature of the IR, and random mixtures of them."""
    yield from (random_case(seed) for seed in range(RANDOM_KERNELS))
    yield from (conversion_case(dtype) for dtype in DTYPES)
    yield from (bitcast_case(pair) for pair in BITCASTS)
    for shape in ((16, 16), (17, 33), (8, 100), (64, 9)):
        yield from (transposed_case(shape, dtype) for dtype in ("f32", "i8", "bf16", "c64"))


def operation_cases() -> Iterator[Case]:
    """Each operation on all its dtypes."""
    yield from (op_case(name) for name in OP_NAMES)


# ---- kernels of programs ------------------------------------------------------------------------


def work(steps: Iterable[Step]) -> Iterator[Kernel | Product]:
    """All kernels and products of a schedule, in order."""
    for step in steps:
        if isinstance(step, Launch):
            yield step.kernel
        elif isinstance(step, Multiply):
            yield step.product
        for block in blocks(step):
            yield from work(block)


def work_of(closed: ClosedJaxpr) -> dict[Kernel | Product, None]:
    """The distinct kernels and products of a traced program."""
    return dict.fromkeys(work(lower(run_passes(closed)).steps))


@functools.cache
def program_work() -> tuple[Kernel | Product, ...]:
    """Those of random programs, and of every op record in float32."""
    found: dict[Kernel | Product, None] = {}
    for seed in range(RANDOM_PROGRAMS):
        found |= work_of(random_program(seed)[0])
    for record in RECORDS:
        single = np.dtype(np.float32)
        operands = record.make(single if single in record.dtypes else record.dtypes[0])

        def call(*given, record=record):
            out = record.function(lax, *given)
            return list(out) if isinstance(out, list | tuple) else [out]

        found |= work_of(trace_to_jaxpr(call, [typeof(x) for x in operands]))
    return tuple(found)


def program_kernels() -> list[Kernel]:
    """The distinct kernels of programs."""
    return [each for each in program_work() if isinstance(each, Kernel)]


def program_products() -> list[Product]:
    """The distinct products of programs."""
    return [each for each in program_work() if isinstance(each, Product)]


def with_inputs(kernel: Kernel, seed: int = 0) -> Case:
    """A kernel with random inputs; kernels clamp or guard whatever they take as an index."""
    rng = np.random.default_rng(seed)
    arrays = []
    for arg in kernel.args:
        numpy_dtype = DTYPES[arg.dtype].numpy
        if DTYPES[arg.dtype].kind in "iu":
            arrays.append(rng.integers(0, 9, arg.size).astype(numpy_dtype))
        elif DTYPES[arg.dtype].kind == "b":
            arrays.append(rng.integers(0, 2, arg.size).astype(bool))
        else:
            values = rng.uniform(-2, 2, arg.size)
            if DTYPES[arg.dtype].kind == "c":
                values = values + 1j * rng.uniform(-2, 2, arg.size)
            arrays.append(values.astype(numpy_dtype))
    return Case(kernel, arrays)
