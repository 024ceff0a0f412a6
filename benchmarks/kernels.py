"""Kernels: one operation, or a chain that should become one: elementwise, rows, sums, moves."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.case import ALL, NUMPY, WIDE, Case, array, indices, of, shuffled
from benchmarks.sides import Side

# Cases that wait for memory rather than for arithmetic, from this many elements on.
STREAMED = 1_000_000
ROWS = (1000, 1024)


# ---- elementwise -------------------------------------------------------------------------------


def square(side: Side, x):
    """One array in, one out, next to no arithmetic."""
    return x * x + x


def gelu(side: Side, x):
    """The tanh form, written out, so that every side computes the same formula."""
    return 0.5 * x * (1 + side.np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def tanh_exp(side: Side, x):
    """Two transcendentals and little memory traffic."""
    return side.np.tanh(0.7 * x + 0.1) * side.np.exp(-x * x)


def black_scholes(side: Side, x):
    """Price of a call option; the normal distribution by its logistic approximation."""
    spot, strike, rate, volatility = 100 + 10 * x, 100.0, 0.02, 0.3
    d1 = (side.np.log(abs(spot) / strike) + rate + volatility**2 / 2) / volatility

    def distribution(d):
        return 1 / (1 + side.np.exp(-1.5976 * d - 0.070565992 * d * d * d))

    return spot * distribution(d1) - strike * math.exp(-rate) * distribution(d1 - volatility)


def tanh_chain(side: Side, x):
    """A long dependent chain: latency, not bandwidth."""
    for k in range(12):
        x = side.np.tanh(x * 1.1 + 0.01 * k)
    return x


def elementwise_cases() -> list[Case]:
    """Chains of elementwise operations, small (in the cache) to large (in memory)."""
    cases = []
    for name, body, tolerance, sizes in (
        ("x*x+x", square, 2e-5, (10_000, 1_000_000, 10_000_000)),
        ("gelu", gelu, 2e-5, (10_000, 1_000_000, 10_000_000)),
        ("tanh exp", tanh_exp, 2e-5, (10_000, 1_000_000)),
        ("black-scholes", black_scholes, 2e-4, (10_000, 1_000_000)),
        ("chain of 12 tanh", tanh_chain, 2e-4, (10_000, 1_000_000)),
    ):
        for size in sizes:
            light = body is square or body is gelu
            cases.append(
                Case(
                    f"kernels/{name}, {size:.0e}",
                    of(body, array(size)),
                    sides=ALL,
                    tolerance=tolerance,
                    nbytes=8 * size if light and size >= STREAMED else 0,
                )
            )
    gradient = of(gelu, array(STREAMED), grad=True)
    cases.append(Case(f"kernels/gradient of gelu, {STREAMED:.0e}", gradient, tolerance=2e-4))
    return cases


# ---- rows --------------------------------------------------------------------------------------


def softmax(side: Side, x):
    """Over rows."""
    return side.nn.softmax(x, axis=-1)


def softmax_columns(side: Side, x):
    """Over the first dim."""
    return side.nn.softmax(x, axis=0)


def layernorm(side: Side, x):
    """Over rows, without scale and shift."""
    centred = x - x.mean(-1, keepdims=True)
    return centred * side.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)


def scaled_layernorm(side: Side, x, scale, shift):
    """As in a network."""
    return layernorm(side, x) * scale + shift


def logsumexp(side: Side, x):
    """Over rows, as losses use it."""
    return side.nn.logsumexp(x, axis=-1)


def cross_entropy(side: Side, scores, labels):
    """The loss of a classifier."""
    chosen = side.np.take_along_axis(side.nn.log_softmax(scores), labels[:, None], axis=-1)
    return -side.np.mean(chosen)


def cross_entropy_gradient(side: Side, scores, labels):
    """The operands with which its backward pass begins."""
    assert side.grad is not None
    return side.grad(lambda s: cross_entropy(side, s, labels))(scores)


def row_cases() -> list[Case]:
    """Rows that are read twice or more, and their gradients."""
    rows = math.prod(ROWS) * 8
    width = ROWS[1]
    norm = (array(*ROWS), array(width, seed=1), array(width, seed=2))
    return [
        Case("kernels/softmax, 10 x 1024", of(softmax, array(10, width)), sides=ALL),
        Case("kernels/softmax, 1000 x 1024", of(softmax, array(*ROWS)), sides=ALL, nbytes=rows),
        Case(
            "kernels/softmax over columns, 1000 x 1024",
            of(softmax_columns, array(*ROWS)),
            sides=ALL,
        ),
        Case("kernels/gradient of softmax, 1000 x 1024", of(softmax, array(*ROWS), grad=True)),
        Case("kernels/layernorm, 10 x 1024", of(layernorm, array(10, width)), sides=ALL),
        Case("kernels/layernorm, 1000 x 1024", of(layernorm, array(*ROWS)), sides=ALL, nbytes=rows),
        Case(
            "kernels/gradient of layernorm, 1000 x 1024",
            of(scaled_layernorm, *norm, grad=True),
            tolerance=5e-4,
        ),
        Case("kernels/gradient of logsumexp, 1000 x 1024", of(logsumexp, array(*ROWS), grad=True)),
        Case(
            "kernels/gradient of cross entropy, 1000 x 1024",
            of(cross_entropy_gradient, array(*ROWS), indices(width, ROWS[0])),
        ),
    ]


# ---- reductions and running sums ---------------------------------------------------------------


def full_sum(side: Side, x):
    """One number of a whole array."""
    return side.np.sum(x)


def column_sum(side: Side, x):
    """Over the first dim."""
    return x.sum(0)


def variance(side: Side, x):
    """Over rows: two passes."""
    return ((x - x.mean(-1, keepdims=True)) ** 2).mean(-1)


def norm_of_difference(side: Side, x, y):
    """A reduction with a chain before it."""
    return side.np.sqrt(side.np.sum((x - y) * (x - y)))


def argmax(side: Side, x):
    """Over rows."""
    return side.np.argmax(x, axis=-1)


def cumsum(side: Side, x):
    """Along the last dim."""
    return side.np.cumsum(x, axis=-1)


def cumsum_columns(side: Side, x):
    """Along the first dim."""
    return side.np.cumsum(x, axis=0)


def reduction_cases() -> list[Case]:
    """Sums over all, over rows, over columns; running sums."""
    cases = [
        Case(
            f"kernels/full sum, {size:.0e}",
            of(full_sum, array(size)),
            sides=ALL,
            tolerance=1e-3,
        )
        for size in (10_000, 1_000_000, 10_000_000)
    ]
    for name, body, operands, sides, tolerance in (
        ("column sum, 1000 x 1024", column_sum, [array(*ROWS)], ALL, 1e-4),
        ("variance of rows, 1000 x 1024", variance, [array(*ROWS)], ALL, 1e-4),
        (
            "norm of a difference, 1e+06",
            norm_of_difference,
            [array(STREAMED), array(STREAMED, seed=1)],
            ALL,
            1e-3,
        ),
        ("argmax of rows, 1000 x 1024", argmax, [array(*ROWS)], NUMPY, 0.0),
        ("cumsum, 1e+06", cumsum, [array(STREAMED)], ALL, 1e-3),
        ("cumsum along rows, 1000 x 1024", cumsum, [array(*ROWS)], ALL, 1e-3),
        ("cumsum along columns, 1000 x 1024", cumsum_columns, [array(*ROWS)], ALL, 1e-3),
    ):
        make = of(body, *operands)
        cases.append(Case(f"kernels/{name}", make, sides=sides, tolerance=tolerance))
    return cases


# ---- moves: transposes, sort, gather, scatter, random ------------------------------------------


def transpose_add(side: Side, x, y):
    """One operand across the grain."""
    return x.T + y


def join_and_scale(side: Side, x, y):
    """A concatenate between elementwise work."""
    return side.np.concatenate([2 * x, y - 1]) * 3


def windows(side: Side, x):
    """A stencil: five slices of one array."""
    return 4 * x[1:-1, 1:-1] - x[:-2, 1:-1] - x[2:, 1:-1] - x[1:-1, :-2] - x[1:-1, 2:]


def sort(side: Side, x):
    """Along the last dim."""
    return side.np.sort(x, axis=-1)


def argsort(side: Side, x):
    """Along the last dim; the numbers are all different."""
    return side.np.argsort(x, axis=-1)


def take_rows(side: Side, table, ids):
    """An embedding."""
    return table[ids] * 2.0


def add_rows(side: Side, table, ids, updates):
    """An embedding's gradient."""
    return table.at[ids].add(updates)


def histogram(side: Side, x):
    """Counts in a thousand bins."""
    bins = side.np.clip((x * 100).astype(side.np.int32) + 500, 0, 999)
    return side.np.zeros(1000, side.np.float32).at[bins].add(1.0)


def random_normal(side: Side, seed):
    """Bits and their quantiles."""
    return side.random.normal(side.random.key(seed), (STREAMED,))


def random_uniform(side: Side, seed):
    """Bits and a shift."""
    return side.random.uniform(side.random.key(seed), (STREAMED,))


def move_cases() -> list[Case]:
    """The cases that move data rather than compute."""
    square_of: list[Any] = [array(1024, 1024), array(1024, 1024, seed=1)]
    embedding = [array(10_000, 128), indices(10_000, 4096)]
    seed = indices(1000)
    return [
        Case(
            "kernels/transpose and add, 1024 x 1024",
            of(transpose_add, *square_of),
            sides=ALL,
            nbytes=12 * 1024 * 1024,
        ),
        Case(
            "kernels/concatenate, 2 x 5e+05",
            of(join_and_scale, array(500_000), array(500_000, seed=1)),
            sides=NUMPY,
            nbytes=8 * 1_000_000,
        ),
        Case("kernels/five-point stencil, 1000 x 1024", of(windows, array(*ROWS)), sides=ALL),
        Case("kernels/sort, 1e+05", of(sort, array(100_000)), sides=NUMPY),
        Case("kernels/sort of rows, 1000 x 1024", of(sort, array(*ROWS)), sides=NUMPY),
        Case("kernels/argsort, 1e+05", of(argsort, shuffled(100_000)), sides=NUMPY, tolerance=0.0),
        Case("kernels/gather rows, 4096 of 10000 x 128", of(take_rows, *embedding), sides=NUMPY),
        Case(
            "kernels/gather elements, 1e+06 of 1e+06",
            of(take_rows, array(STREAMED), indices(STREAMED, STREAMED)),
            sides=NUMPY,
        ),
        Case(
            "kernels/scatter-add rows, 4096 into 10000 x 128",
            of(add_rows, *embedding, array(4096, 128, seed=1)),
        ),
        Case("kernels/histogram, 1e+05 into 1000", of(histogram, array(100_000))),
        Case("kernels/random normal, 1e+06", of(random_normal, seed), sides=WIDE),
        Case("kernels/random uniform, 1e+06", of(random_uniform, seed), sides=WIDE),
    ]
