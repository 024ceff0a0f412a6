"""Kernels built around matrix products: products of many shapes, attention, convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy

from benchmarks.case import ALL, NUMPY, WIDE, Case, array, normal, of
from benchmarks.sides import Side

# ---- matrix products ---------------------------------------------------------------------------


def matmul(side: Side, a, b):
    """Plain."""
    return a @ b


def left_transposed(side: Side, a, b):
    """The gradient of a layer's weights."""
    return a.T @ b


def right_transposed(side: Side, a, b):
    """The gradient of a layer's input."""
    return a @ b.T


def dense(side: Side, x, w, b):
    """A layer: what follows the product should cost nothing."""
    return side.np.maximum(x @ w + b, 0)


SQUARES = ((512, 512), (512, 512))


def of_dtype(side: Side, dtype: str, shapes: tuple[tuple[int, ...], ...]) -> Callable[[], Any]:
    """A product of matrices of another dtype; bfloat16 is given as such to each side."""
    kind = getattr(side.np, dtype)
    a, b = (side.array(normal(*s, seed=k).astype(numpy.float64)) for k, s in enumerate(shapes))
    a, b = a.astype(kind), b.astype(kind)
    result = (lambda c: c.astype(side.np.float32)) if dtype == "bfloat16" else (lambda c: c)
    function = side.jit(lambda a, b: result(a @ b))
    return lambda: function(a, b)


def product(
    name: str, body: Callable[..., Any], *shapes: tuple[int, ...], flops: int, sides=NUMPY
) -> Case:
    """A case of one product; the smallest are bound by their call, not by arithmetic."""
    operands = [array(*shape, seed=k) for k, shape in enumerate(shapes)]
    return Case(
        f"kernels/{name}",
        of(body, *operands),
        sides=sides,
        tolerance=1e-4,
        flops=flops if flops >= 10**7 else 0,
    )


def product_cases() -> list[Case]:
    """Square, skinny, batched, transposed, by a vector, in other precisions, with an epilogue."""
    cases = [
        product(f"matmul {n}", matmul, (n, n), (n, n), flops=2 * n**3, sides=ALL)
        for n in (16, 64, 256, 512, 1024)
    ]
    for m, k, n in ((8, 1024, 1024), (4096, 64, 64), (1024, 16, 1024), (100, 300, 70)):
        name = f"matmul {m} x {k} x {n}"
        cases.append(product(name, matmul, (m, k), (k, n), flops=2 * m * k * n, sides=ALL))
    cases += [
        product(
            "batched matmul 32 of 128 x 64 x 128",
            matmul,
            (32, 128, 64),
            (32, 64, 128),
            flops=2 * 32 * 128 * 64 * 128,
            sides=ALL,
        ),
        product(
            "batched matmul 1000 of 8", matmul, (1000, 8, 8), (1000, 8, 8), flops=2 * 1000 * 512
        ),
        product("matrix by vector, 2048", matmul, (2048, 2048), (2048,), flops=0).replace(
            nbytes=4 * 2048 * 2048
        ),
        product("vector by matrix, 2048", matmul, (2048,), (2048, 2048), flops=0).replace(
            nbytes=4 * 2048 * 2048
        ),
        product("matmul a.T @ b, 512", left_transposed, (512, 512), (512, 512), flops=2 * 512**3),
        product("matmul a @ b.T, 512", right_transposed, (512, 512), (512, 512), flops=2 * 512**3),
        product(
            "layer relu(x @ w + b), 256 x 512 x 512",
            dense,
            (256, 512),
            (512, 512),
            (512,),
            flops=2 * 256 * 512 * 512,
        ),
        Case(
            "kernels/matmul 512, bfloat16",
            partial(of_dtype, dtype="bfloat16", shapes=SQUARES),
            sides=WIDE,
            tolerance=2e-2,
        ),
        Case(
            "kernels/matmul 512, float64",
            partial(of_dtype, dtype="float64", shapes=SQUARES),
            sides=NUMPY,
            tolerance=1e-10,
            x64=True,
        ),
    ]
    return cases


# ---- attention ---------------------------------------------------------------------------------

HEADS_BNTH = (4, 8, 256, 64)


def attention(side: Side, q_BNTH, k_BNSH, v_BNSH, causal: bool = False):
    """Written as a formula."""
    scores = side.np.einsum("bnth,bnsh->bnts", q_BNTH, k_BNSH) / math.sqrt(q_BNTH.shape[-1])
    if causal:
        size = q_BNTH.shape[2]
        seen = side.np.tril(side.np.ones((size, size), bool))
        scores = side.np.where(seen, scores, -1e30)
    return side.np.einsum("bnts,bnsh->bnth", side.nn.softmax(scores, axis=-1), v_BNSH)


def library_attention(side: Side, q_BTNH, k_BSNH, v_BSNH):
    """The function that the library offers."""
    return side.nn.dot_product_attention(q_BTNH, k_BSNH, v_BSNH, is_causal=True)


def _torch_attention(torch: Any) -> Callable[[], Any]:
    q, k, v = (torch.from_numpy(normal(*HEADS_BNTH, seed=s)) for s in range(3))
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)


def _torch_causal(torch: Any) -> Callable[[], Any]:
    q, k, v = (torch.from_numpy(normal(*HEADS_BNTH, seed=s)) for s in range(3))
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention_cases() -> list[Case]:
    """Forward and gradient, with and without a mask; one long sequence."""
    b, n, t, h = HEADS_BNTH
    heads = [array(*HEADS_BNTH, seed=k) for k in range(3)]
    swapped = [array(b, t, n, h, seed=k) for k in range(3)]
    long = [array(1, 4, 1024, 64, seed=k) for k in range(3)]
    masked = partial(attention, causal=True)
    flops = 4 * b * n * t * t * h
    return [
        Case(
            "kernels/attention, 32 heads of 256 x 64",
            of(attention, *heads),
            flops=flops,
            torch=_torch_attention,
        ),
        Case(
            "kernels/causal attention, 32 heads of 256 x 64",
            of(masked, *heads),
            torch=_torch_causal,
        ),
        Case("kernels/causal dot_product_attention, 32 heads", of(library_attention, *swapped)),
        Case(
            "kernels/attention, 4 heads of 1024 x 64",
            of(attention, *long),
            flops=4 * 4 * 1024 * 1024 * 64,
        ),
        Case(
            "kernels/gradient of causal attention, 32 heads",
            of(masked, *heads, grad=True),
            tolerance=5e-4,
        ),
    ]


# ---- convolutions ------------------------------------------------------------------------------


def conv(side: Side, x, w, stride: int = 1, layout: str = "NHWC", groups: int = 1):
    """Padded so that a stride of one keeps the size."""
    kernel = "HWIO" if layout == "NHWC" else "OIHW"
    return side.lax.conv_general_dilated(
        x,
        w,
        (stride, stride),
        "SAME",
        dimension_numbers=(layout, kernel, layout),
        feature_group_count=groups,
    )


def max_pool(side: Side, x_NHWC):
    """Windows of 2 x 2."""
    lax = side.lax
    return lax.reduce_window(x_NHWC, -math.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def _torch_conv(torch: Any) -> Callable[[], Any]:
    image = torch.from_numpy(normal(4, 32, 32, 64)).permute(0, 3, 1, 2)
    image = image.contiguous(memory_format=torch.channels_last)
    kernel = torch.from_numpy(normal(3, 3, 64, 64, seed=1) / 24).permute(3, 2, 0, 1).contiguous()
    conv2d = torch.nn.functional.conv2d
    return lambda: conv2d(image, kernel, padding=1).permute(0, 2, 3, 1)


def conv_cases() -> list[Case]:
    """Forward and gradients, both layouts, strided, one by one, depthwise; pooling."""
    image, kernel = array(4, 32, 32, 64), array(3, 3, 64, 64, seed=1, scale=1 / 24)
    flops = 2 * 4 * 32 * 32 * 9 * 64 * 64
    strided = partial(conv, stride=2)
    first = partial(conv, layout="NCHW")
    depthwise = partial(conv, groups=64)
    gradient = {"tolerance": 5e-4}
    return [
        Case(
            "kernels/conv 3x3, 4 x 32 x 32 x 64",
            of(conv, image, kernel),
            flops=flops,
            tolerance=1e-4,
            torch=_torch_conv,
        ),
        Case(
            "kernels/conv 3x3, channels first",
            of(first, array(4, 64, 32, 32), array(64, 64, 3, 3, seed=1, scale=1 / 24)),
            flops=flops,
            tolerance=1e-4,
        ),
        Case("kernels/conv 3x3, stride 2", of(strided, image, kernel), tolerance=1e-4),
        Case(
            "kernels/conv 1x1, 64 to 256",
            of(conv, image, array(1, 1, 64, 256, seed=1, scale=1 / 8)),
            tolerance=1e-4,
        ),
        Case(
            "kernels/conv 7x7 of 3 channels, stride 2",
            of(strided, array(4, 64, 64, 3), array(7, 7, 3, 32, seed=1, scale=1 / 12)),
            tolerance=1e-4,
        ),
        Case("kernels/depthwise conv 3x3", of(depthwise, image, array(3, 3, 1, 64, seed=1))),
        Case("kernels/gradients of conv 3x3", of(conv, image, kernel, grad=True), **gradient),
        Case("kernels/max pool 2x2", of(max_pool, image)),
        Case("kernels/gradient of max pool 2x2", of(max_pool, image, grad=True), **gradient),
    ]
