"""Programs whose kernels are counted: what one pass over memory can do, one kernel should.

Each is a function of arrays with its inputs. `test_fusion.py` compiles it, compares it with the
same function under `disable_jit`, and its number of kernels with `golden/kernel_counts.txt`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import spmd.numpy as snp
from spmd import lax, nn
from spmd.api.reverse import grad, value_and_grad, vjp

ROWS, COLUMNS = 24, 40
Program = tuple[Callable, tuple]
PROGRAMS: dict[str, Program] = {}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X, Y = normal(ROWS, COLUMNS), normal(ROWS, COLUMNS, seed=1)
SCALE, SHIFT = normal(COLUMNS, seed=2), normal(COLUMNS, seed=3)
IMAGES = normal(6, 5, 5, 16)
LABELS = (np.arange(ROWS) * 7 % COLUMNS).astype(np.int32)


def program(name: str, *inputs):
    def declare(function):
        PROGRAMS[name] = (function, inputs)
        return function

    return declare


def pulled_back(function, *primals_and_ct):
    *primals, ct = primals_and_ct
    return vjp(function, *primals)[1](ct)


# ---- rows and columns --------------------------------------------------------------------------


def layernorm(x, scale, shift, axis):
    mean = x.mean(axis, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + shift


def rmsnorm(x, scale, axis):
    return x * lax.rsqrt((x * x).mean(axis, keepdims=True) + 1e-6) * scale


for axis, where in ((-1, "rows"), (0, "columns")):
    for function in (nn.softmax, nn.log_softmax):
        name = f"{function.__name__} of {where}"

        def run(x, f=function, a=axis):
            return f(x, axis=a)

        program(name, X)(run)
        program(f"{name}, gradient", X, Y)(lambda x, ct, f=run: pulled_back(f, x, ct))

    def logsumexp(x, a=axis):
        return nn.logsumexp(x, axis=a)

    program(f"logsumexp of {where}", X)(logsumexp)
    program(f"logsumexp of {where}, gradient", X)(
        lambda x, f=logsumexp: grad(lambda x: f(x).sum())(x)
    )

    def norm(x, scale, shift, a=axis):
        return layernorm(x, scale, shift, a)

    def rms(x, scale, a=axis):
        return rmsnorm(x, scale, a)

    program(f"layernorm of {where}", X, SCALE, SHIFT)(norm)
    program(f"layernorm of {where}, gradient", X, SCALE, SHIFT, Y)(
        lambda x, g, b, ct, f=norm: pulled_back(f, x, g, b, ct)
    )
    program(f"rmsnorm of {where}", X, SCALE)(rms)
    program(f"rmsnorm of {where}, gradient", X, SCALE, Y)(
        lambda x, g, ct, f=rms: pulled_back(f, x, g, ct)
    )

program("residual and layernorm", X, Y, SCALE, SHIFT)(
    lambda x, r, g, b: (x + r, layernorm(x + r, g, b, -1))
)
program("mean and variance of columns", X)(lambda x: (x.mean(0), x.var(0)))
program("bias gradient", X, Y)(lambda x, ct: (ct * (x > 0), (ct * (x > 0)).sum(0)))
program("softmax of a middle dim", normal(6, 8, 4))(lambda x: nn.softmax(x, axis=1))


@program("batch norm, training", IMAGES, normal(16), normal(16, seed=1), np.zeros(16, np.float32))
def batch_norm(x, scale, shift, running):
    mean = x.mean((0, 1, 2))
    variance = ((x - mean) ** 2).mean((0, 1, 2))
    out = nn.relu((x - mean) * lax.rsqrt(variance + 1e-5) * scale + shift)
    return out, 0.9 * running + 0.1 * mean


# ---- losses ------------------------------------------------------------------------------------


def one_hot_loss(x, y):
    return -(nn.log_softmax(x) * nn.one_hot(y, COLUMNS)).sum(-1).mean()


program("one-hot cross entropy", X, LABELS)(one_hot_loss)
program("one-hot cross entropy, gradient", X, LABELS)(
    lambda x, y: value_and_grad(lambda x: one_hot_loss(x, y))(x)
)
program("picked cross entropy", X, LABELS)(
    lambda x, y: -snp.take_along_axis(nn.log_softmax(x), y[:, None], -1).mean()
)
program("mean square", X, Y)(lambda x, y: ((x - y) ** 2).mean())


# ---- optimizers --------------------------------------------------------------------------------

LEAVES = [normal(*((8, 4) if k % 2 else (4,)), seed=k) for k in range(12)]


@program("SGD over 12 leaves", LEAVES, [x + 1 for x in LEAVES])
def sgd(params, grads):
    return [p - 0.01 * g for p, g in zip(params, grads, strict=True)]


@program("Adam over 12 leaves", LEAVES, [x + 1 for x in LEAVES], LEAVES, [x * x for x in LEAVES])
def adam(params, grads, first, second):
    first = [0.9 * m + 0.1 * g for m, g in zip(first, grads, strict=True)]
    second = [0.999 * v + 0.001 * g * g for v, g in zip(second, grads, strict=True)]
    updates = [m / (snp.sqrt(v) + 1e-8) for m, v in zip(first, second, strict=True)]
    return [p - 1e-3 * u for p, u in zip(params, updates, strict=True)], first, second


# ---- moving elements ---------------------------------------------------------------------------

program("transpose and add", X, Y.T.copy())(lambda x, y: x.T + y)
program("concatenate rows", X, Y)(lambda x, y: snp.concatenate([x * 2, y + 1], 0))
program("concatenate columns", X, Y)(lambda x, y: snp.concatenate([snp.exp(x), snp.tanh(y)], 1))
program("concatenate uneven parts", X, Y)(
    lambda x, y: snp.concatenate([x[:, :7] * 2, snp.sin(y), x[:, 3:5]], 1)
)
program("stack", X, Y)(lambda x, y: snp.stack([x * 2, y + 1], -1))
program("concatenate into a sum", X, Y)(lambda x, y: snp.concatenate([x * 2, y + 1], 1).sum(1))
program("concatenate of concatenates", X, Y)(
    lambda x, y: snp.concatenate(
        [snp.concatenate([x * 2, y], 1), snp.concatenate([x, snp.exp(y)], 1)], 0
    )
)
program("parts that are results too", X, Y)(
    lambda x, y: (lambda a: (a, snp.concatenate([a, a, y], 0)))(snp.sin(x))
)
program("pad", X)(lambda x: snp.pad(x * 2, ((1, 2), (3, 0))))
program("differences", X)(lambda x: x[1:] - x[:-1])
program("stencil", X)(lambda x: x[2:, 1:-1] + x[:-2, 1:-1] + x[1:-1, 2:] + x[1:-1, :-2])
program("stencil of a product", X)(
    lambda x: (lambda y: y[2:, 1:-1] + y[:-2, 1:-1] - 4 * y[1:-1, 1:-1])(x * x + 1)
)
program("rolled stencil", X)(
    lambda x: snp.roll(x, 1, 0) + snp.roll(x, -1, 0) + snp.roll(x, 1, 1) + snp.roll(x, -1, 1)
)
program("differences, gradient", X)(
    grad(lambda x: ((x[1:] - x[:-1]) ** 2).sum() + ((x[:, 1:] - x[:, :-1]) ** 2).sum())
)
program("reverse and add", X)(lambda x: x[:, ::-1] + x)
program("pairs", X)(lambda x: x[:, ::2] + x[:, 1::2])


def rotary(x, cos, sin):
    a, b = snp.split(x, 2, -1)
    cos, sin = cos[None, :, None, :], sin[None, :, None, :]
    return snp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


HEADS, ANGLES = normal(2, 6, 3, 16), normal(6, 8)
program("rotary embedding", HEADS, ANGLES, ANGLES + 1)(rotary)
program("rotary embedding, gradient", HEADS, ANGLES, ANGLES + 1, HEADS + 1)(
    lambda x, c, s, ct: pulled_back(lambda x: rotary(x, c, s), x, ct)
)


@program("rotary embedding of pairs", HEADS, ANGLES, ANGLES + 1)
def rotary_of_pairs(x, cos, sin):
    a, b = x[..., ::2], x[..., 1::2]
    cos, sin = cos[None, :, None, :], sin[None, :, None, :]
    return snp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)


program("embedding", normal(50, COLUMNS), LABELS, X)(lambda table, i, p: table[i] * 16.0 + p)
program("elements by number", SCALE, LABELS)(lambda x, i: 2 * x[i - 5] + 1)
program("elements along rows", X, LABELS)(
    lambda x, i: snp.take_along_axis(x, (i[:, None] + snp.arange(6)) % COLUMNS, 1) - 1
)
program("elements by number, gradient", SCALE, LABELS)(
    grad(lambda x, i: (snp.sin(x[i - 5]) ** 2).sum())
)
program("outer", SCALE, X[:, 0])(lambda x, y: snp.exp(-((x[:, None] - y[None, :]) ** 2)))
program("distances", normal(20, 3), normal(18, 3, seed=1))(
    lambda x, y: snp.sqrt(((x[:, None] - y[None]) ** 2).sum(-1) + 1e-6)
)
program("several results", X)(lambda x: (snp.sin(x), snp.cos(x), x * x, snp.exp(x)))
program("an exp read by three", X)(
    lambda x: (lambda e: (e / (1 + e), e.sum(1), e.sum(0)))(snp.exp(x))
)
program("masked softmax", normal(2, 3, 16, 16))(
    lambda x: nn.softmax(snp.where(snp.tril(snp.ones((16, 16), bool)), x, -1e9), -1)
)
program("padded carry", X)(
    lambda x: lax.fori_loop(0, 3, lambda k, c: snp.concatenate([c[1:], c[:1] * 0.5], 0), x)
)
program("concatenated carry", X)(
    lambda x: lax.fori_loop(
        0, 3, lambda k, c: snp.concatenate([snp.sin(c[:, :20]), snp.tanh(c[:, 20:])], 1), x
    )
)
