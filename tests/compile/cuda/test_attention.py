"""Attention in one launch and its two gradients: emulated, beside the formula over all scores."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import spmd
from spmd import nn
from spmd import numpy as snp
from spmd.base.config import config
from spmd.base.errors import CudaError
from spmd.base.record import record
from spmd.compile.cuda.attention import plan_attention, render_attention
from spmd.compile.cuda.kernel import PRELUDE, module_text
from spmd.compile.cuda.launch import MOST_SHARED, Rendered
from spmd.compile.cuda.nvrtc import architectures, compile_cubin
from spmd.compile.definitions.attention import attention_block_p
from spmd.compile.kernel.attention import (
    FORWARD,
    KEY_GRAD,
    QUERY_GRAD,
    BlockedAttention,
    Extra,
    check_attention,
)
from spmd.compile.kernel.check import KernelError
from spmd.compile.kernel.dtypes import DTYPES
from spmd.core.aval import ShapedArray
from spmd.lax.attention_blocks import Attention
from tests.compile.cuda.emulated import Emulator

PARTS = (FORWARD, QUERY_GRAD, KEY_GRAD)
BARRIER = "__syncthreads();"


@record(eq=False)
class Case:
    """A part with arrays, and the check that the arrays are right afterwards."""

    kernel: BlockedAttention
    rendered: Rendered
    arrays: list[np.ndarray]
    check: Callable[[list[np.ndarray]], None]


def kernel_of(
    sizes: Any,
    dtype="f32",
    part=FORWARD,
    bias: Any = None,
    masks: Any = (),
    shift: Any = None,
    **how: Any,
) -> BlockedAttention:
    extras = [Extra("f32", bias)] * (bias is not None) + [Extra("bool", m) for m in masks]
    extras += [Extra("i32", shift)] * (shift is not None)
    causal, window = how.pop("causal", False), how.pop("window", None)
    names = ("batch", "heads", "groups", "queries", "keys", "features")
    how |= dict(zip(names, sizes, strict=True), bias=bias is not None, shifted=shift is not None)
    return BlockedAttention(
        part=part,
        dtype=dtype,
        scale=1 / math.sqrt(sizes[-1]),
        causal=causal,
        window=window,
        extras=tuple(extras),
        **how,
    )


def case_of(kernel: BlockedAttention) -> Case:
    """A case, whose reference is the meaning of the primitive that lowers to it."""
    b, k, g, t, s, h = (
        kernel.batch, kernel.heads, kernel.groups, kernel.queries, kernel.keys, kernel.features,
    )  # fmt: skip
    rng = np.random.default_rng(t + s)
    narrow = DTYPES[kernel.dtype].numpy
    shapes = {"q": (b, t, k, g, h), "k": (b, s, k, h), "v": (b, s, k, h)}
    shapes |= dict(out=shapes["q"], ct=shapes["q"], dq=shapes["q"], dk=shapes["k"], dv=shapes["k"])
    shapes |= dict.fromkeys(("top", "rest", "delta"), (b, k, g, t))
    extras = []
    for extra in kernel.extras:
        shape = [n if w else 1 for n, w in zip((b, k, g, t, s), extra.whole, strict=True)]
        drawn = rng.normal(size=shape)
        if extra.dtype == "bool":
            extras.append(drawn > 0)
        else:
            extras.append((3 * drawn).astype(DTYPES[extra.dtype].numpy))
    q, key, v, ct = (rng.normal(size=shapes[n]).astype(narrow) for n in ("q", "k", "v", "ct"))
    window, masks = kernel.window, len(extras) - kernel.bias - kernel.shifted
    spec = Attention(kernel.scale, kernel.causal, window, kernel.bias, masks, kernel.shifted)

    def meaning(part: str, *operands: np.ndarray) -> list[np.ndarray]:
        types = (ShapedArray((1,), np.dtype(np.float32)),)
        found = attention_block_p.rule("impl")(
            np, *operands, *extras, part=part, spec=spec, results=types, tf32=kernel.tf32
        )
        return [np.ascontiguousarray(x) for x in found]

    given = [q, key, v]
    if kernel.part != FORWARD:
        out, top, rest = meaning(FORWARD, *given)
        product = out.astype(np.float32) * ct.astype(np.float32)
        given += [top, rest, product.sum(-1).transpose(0, 2, 3, 1), ct]
    wanted = meaning(kernel.part, *given)[: len(kernel.writes)]
    if kernel.part == FORWARD and kernel.numbers:
        wanted = [wanted[0], wanted[1] + wanted[2]]

    def check(arrays: list[np.ndarray]) -> None:
        found = list(arrays[-len(kernel.writes) :])
        if len(found) == 3:
            found[1:] = [found[1] + found[2]]
        for x, y in zip(found, wanted, strict=True):
            y = y.reshape(-1).astype(np.float64)
            rounding = "tf32" if kernel.tf32 else kernel.dtype
            error = {"f32": 2e-6, "tf32": 3e-3, "f16": 2e-3, "bf16": 1.6e-2}[rounding]
            error *= np.abs(y).max()
            np.testing.assert_allclose(x.astype(np.float64), y, 1e-6, error)

    written = [
        np.zeros(shapes[n], np.float32 if n in ("top", "rest") else narrow) for n in kernel.writes
    ]
    arrays = [np.ascontiguousarray(x).reshape(-1) for x in (*given, *extras, *written)]
    return Case(kernel, render_attention(kernel), arrays, check)


ALL, HEADS = (True,) * 5, (False, True, True, True, True)
LENGTHS, QUERY_LENGTHS = (True, False, False, False, True), (True, False, False, True, False)
# Sizes are B, K, G, T, S, H.
KINDS = [
    kernel_of((2, 1, 3, 20, 37, 24), causal=True, masks=(LENGTHS, QUERY_LENGTHS)),
    kernel_of((1, 1, 2, 18, 50, 9), window=(4, 3)),
    kernel_of((1, 2, 2, 20, 10, 40), "bf16", bias=HEADS),
    # On tensor cores: several tiles, of which queries and keys see few, and queries none.
    kernel_of((1, 1, 2, 35, 75, 20), "f16", window=(4, 3), masks=(LENGTHS,)),
    kernel_of((1, 2, 1, 18, 35, 24), tf32=True, causal=True),
]
MORE = [
    kernel_of((1, 1, 1, 64, 70, 32), numbers=False),
    kernel_of((2, 1, 1, 7, 20, 72), "f16", bias=LENGTHS, masks=(ALL,), causal=True),
    kernel_of((1, 1, 1, 17, 17, 256), aligned=False),
    kernel_of((1, 1, 8, 1, 40, 128), "bf16"),
    kernel_of((1, 1, 1, 40, 50, 200), "bf16", causal=True),
    kernel_of((1, 1, 1, 20, 40, 200), tf32=True),
    kernel_of((1, 1, 2, 18, 33, 5), tf32=True, aligned=False, window=(4, 3)),
    kernel_of((2, 1, 2, 18, 33, 15), "f16", aligned=False),
    kernel_of((1, 1, 1, 70, 140, 64), "bf16", causal=True, numbers=False),
    kernel_of((1, 1, 1, 20, 20, 8), causal=True, shift=(False, False, False, True, False)),
]


@functools.cache
def cases(nightly: bool = False) -> list[Case]:
    """Every kind of attention, each part of it."""
    return [
        case_of(replace(kind, part=part, numbers=kind.numbers or part != FORWARD))
        for kind in (MORE if nightly else KINDS)
        for part in PARTS
    ]


@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_attention_gives_the_values_of_the_formula(more):
    emulator = Emulator([f for case in cases(more) for f in case.rendered.functions])
    for case in cases(more):
        got = [x.copy() for x in case.arrays]
        emulator.run(case.rendered, got)
        case.check(got)


def test_functions_fit_on_all_gpus_without_spills():
    kinds = [kernel_of((2, 4, 2, 512, 512, 64), part=part, causal=True) for part in PARTS]
    kinds += [kernel_of((2, 4, 2, 512, 512, 200))]
    kinds += [
        kernel_of((2, 4, 2, 512, 512, size), dtype, part=part, causal=True, tf32=dtype == "f32")
        for size in (64, 256)
        for part in PARTS
        for dtype in ("bf16", "f32")
    ]
    functions = [f for kind in kinds for f in render_attention(kind).functions]
    for arch in ("sm_80", "sm_90", f"sm_{architectures()[-1]}"):
        usage = compile_cubin(module_text(functions), arch).usage
        for function in functions:
            used = usage[function.symbol]
            assert used.spill_stores == used.spill_loads == 0, used
            assert used.registers * function.launch.threads <= 65536


@pytest.mark.parametrize("dtype", ("f32", "bf16"))
@pytest.mark.parametrize("features", (1, 16, 33, 64, 128, 256))
def test_tiles_fit_in_shared_memory(features, dtype):
    for part in PARTS:
        tiling = plan_attention(kernel_of((1, 1, 1, 500, 500, features), dtype, part=part))
        assert 0 < tiling.shared <= MOST_SHARED


def test_tensor_cores_multiply_floats_of_16_bits():
    for part in PARTS:
        for dtype, count in (("bf16", 1), ("f16", 1), ("f32", 0)):
            kernel = kernel_of((1, 1, 1, 64, 64, 64), dtype, part=part)
            (function,) = render_attention(kernel).functions
            assert function.text.count("_tensor<64, 64, 64, ") == count
            # Four warps of 16 rows each, or 16 x 16 threads.
            assert function.launch.threads == (128 if count else 256)


@functools.cache
def walks() -> list[Case]:
    """Parts whose blocks walk over several tiles, near ones and others."""
    return [case_of(kernel_of((1, 1, 2, 70, 130, 8), part=p, window=(4, 3))) for p in PARTS]


def removed(function: str, which: int) -> str:
    """The head of modules without a barrier of a function."""
    start = re.search(rf"^void {function}\(", PRELUDE, re.M)
    assert start is not None
    at = [m.start() for m in re.finditer(re.escape(BARRIER), PRELUDE) if m.start() > start.end()]
    return PRELUDE[: at[which]] + " " * len(BARRIER) + PRELUDE[at[which] + len(BARRIER) :]


NIGHTLY = [("attend", k) for k in (0, 1, 3, 4)]
NIGHTLY += [("attend_query_grad", k) for k in (0, 1, 2)]
NIGHTLY += [("attend_key_grad", k) for k in (0, 1, 2)]
REMOVED = [pytest.param(*each, marks=pytest.mark.nightly) for each in NIGHTLY]


@pytest.mark.parametrize(("function", "which"), [("attend", 2), ("attend_key_grad", 3), *REMOVED])
def test_a_removed_barrier_is_told(function, which):
    part = {"attend": FORWARD, "attend_query_grad": QUERY_GRAD}.get(function, KEY_GRAD)
    case = walks()[PARTS.index(part)]
    head = removed(function, which)
    source = head + module_text(case.rendered.functions).removeprefix(PRELUDE)
    with pytest.raises(CudaError, match=r"with no barrier between.*kernels\.cu"):
        Emulator(case.rendered.functions, source).run(
            case.rendered, [x.copy() for x in case.arrays]
        )


# Calls that order copies and threads in `tensor_attention.cuh`, by the function around them.
_ORDERS = re.compile(r"__syncthreads\(\);|commit_copies\(\);|wait_for_copies<0>\(\);")
ORDERS = {
    "attend_tensor": (FORWARD, (35, 75), 6),
    "attend_query_grad_tensor": (QUERY_GRAD, (80, 20), 6),
    "attend_key_grad_tensor": (KEY_GRAD, (20, 80), 6),
}


def without_each_order(function: str, case: Case) -> tuple[str, list[Rendered]]:
    """A module with a copy of the function for each thing that it needs, without that one."""
    start = PRELUDE.index(f"void {function}(")
    start = PRELUDE.rindex("template <", 0, start)
    whole = PRELUDE[start : PRELUDE.index("\n}\n", start) + 3]
    (kernel,) = case.rendered.functions
    copies, kernels = [], []
    for number, found in enumerate(_ORDERS.finditer(whole)):
        symbol = f"{kernel.symbol}_{number}"
        broken = whole[: found.start()] + whole[found.end() :]
        copies.append(broken.replace(function, f"{function}_{number}"))
        text = kernel.text.replace(function, f"{function}_{number}")
        text = text.replace(kernel.symbol, symbol)
        kernels.append(Rendered((replace(kernel, symbol=symbol, text=text),)))
    texts = [f.text for each in kernels for f in each.functions]
    return "\n".join([PRELUDE, *copies, *texts]), kernels


@pytest.mark.parametrize(
    "function",
    [
        "attend_query_grad_tensor",
        pytest.param("attend_tensor", marks=pytest.mark.nightly),
        pytest.param("attend_key_grad_tensor", marks=pytest.mark.nightly),
    ],
)
def test_each_barrier_and_wait_on_tensor_cores_is_needed(function):
    part, (queries, keys), count = ORDERS[function]
    case = case_of(kernel_of((1, 1, 1, queries, keys, 8), "bf16", part=part, window=(4, 3)))
    source, mutants = without_each_order(function, case)
    assert len(mutants) == count
    emulator = Emulator([f for mutant in mutants for f in mutant.functions], source)
    for mutant in mutants:
        with pytest.raises(CudaError, match=r"no barrier between|nothing waits for that"):
            emulator.run(mutant, [x.copy() for x in case.arrays])


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"part": "backward"}, "part 'backward'"),
        ({"dtype": "f64"}, "dtype 'f64'"),
        ({"dtype": "bf16", "tf32": True}, "factors of bf16 in TF32"),
        ({"features": 257}, r"sizes \(1, 1, 1, 8, 8, 257\)"),
        ({"extras": (Extra("f32", ALL),)}, "a mask that is not bool"),
        ({"part": KEY_GRAD, "numbers": False}, "a gradient without numbers"),
    ],
)
def test_the_law(wrong, what):
    with pytest.raises(KernelError, match=f"attention has {what}"):
        check_attention(replace(kernel_of((1, 1, 1, 8, 8, 8)), **wrong))


# ---- programs ----------------------------------------------------------------------------------


def numbers(*shapes: Any, dtype: Any = np.float32) -> Any:
    rng = np.random.default_rng(3)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def on_cpu(function: Any, *operands: Any) -> Any:
    with config.override("platform", "cpu"):
        return spmd.jit(function)(*operands)


def steps_of(function, *operands) -> str:
    return spmd.jit(function).lower(*operands).compile().as_text()


@pytest.mark.usefixtures("gpus")
def test_a_call_is_one_launch():
    q, k, v = numbers((2, 20, 4, 16), (2, 12, 2, 16), (2, 12, 2, 16))

    def attend(q, k, v):
        return nn.dot_product_attention(q, k, v, is_causal=True)

    (line,) = steps_of(attend, q, k, v).splitlines()
    assert "attention forward 2x2x2x20x12x16" in line
    found, wanted = spmd.jit(attend)(q, k, v), on_cpu(attend, q, k, v)
    np.testing.assert_allclose(found, wanted, 1e-5, 1e-6)


@pytest.mark.usefixtures("gpus")
def test_factors_are_rounded_to_tf32_where_that_is_asked_for():
    given = numbers((1, 20, 2, 16), (1, 24, 2, 16), (1, 24, 2, 16))

    def attend(*given):
        return nn.dot_product_attention(*given)

    wanted, errors = np.asarray(on_cpu(attend, *given)), []
    for precision in (None, "tensorfloat32", "highest"):
        with spmd.default_matmul_precision(precision):
            call = spmd.jit(lambda *given: attend(*given))
            assert steps_of(attend, *given).count("attention forward") == 1
            errors.append(np.abs(np.asarray(call(*given)) - wanted).max())
    assert errors[0] == errors[2] < 1e-6 < 1e-4 < errors[1] < 3e-3


@pytest.mark.usefixtures("gpus")
def test_gradients_are_three_launches_behind_it():
    q, k, v = numbers((1, 12, 2, 8), (1, 12, 2, 8), (1, 12, 2, 8))

    def loss(q, k, v):
        return snp.sum(nn.dot_product_attention(q, k, v, is_causal=True) ** 2)

    gradient = spmd.grad(loss, argnums=(0, 1, 2))
    text = steps_of(gradient, q, k, v)
    assert [part for part in PARTS if text.count(f"attention {part} ") == 1] == list(PARTS)
    assert len(text.splitlines()) == 4, text  # one more has the sums of result times cotangent
    for x, y in zip(spmd.jit(gradient)(q, k, v), on_cpu(gradient, q, k, v), strict=True):
        np.testing.assert_allclose(x, y, 1e-4, 1e-5)


@pytest.mark.usefixtures("gpus")
def test_queries_that_see_nothing_take_the_average_of_all_values():
    q, k, v = numbers((1, 4, 1, 8), (1, 80, 1, 8), (1, 80, 1, 8))
    mask = np.zeros((1, 1, 4, 80), bool)
    mask[0, 0, 1:, :2] = True
    call = functools.partial(nn.dot_product_attention, mask=mask, is_causal=True)
    found = np.asarray(spmd.jit(call)(q, k, v))
    np.testing.assert_allclose(found[0, 0], v.mean(1)[0], 1e-5, 1e-6)
    np.testing.assert_allclose(found, on_cpu(call, q, k, v), 1e-5, 1e-6)


@pytest.mark.usefixtures("gpus")
def test_float64_and_many_features_are_expanded():
    with spmd.enable_x64(True):
        for shape, dtype in (((1, 4, 1, 8), np.float64), ((1, 4, 1, 260), np.float32)):
            given = numbers(shape, shape, shape, dtype=dtype)
            assert "attention" not in steps_of(nn.dot_product_attention, *given)
