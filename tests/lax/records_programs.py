"""Op records of the primitives that hold programs: calls, control flow, rules of one's own.

The meaning of each is one line of NumPy. Collectives have a table of their own
(tests/collectives/table.py), as they need devices to mean something.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import spmd
from spmd import custom_batching, custom_derivatives, nn
from spmd.ad_checkpoint import checkpoint_name
from spmd.core.trace import Tracer
from spmd.lax.keys import markers
from spmd.lax.keys.threefry import threefry2x32
from tests.lax.records import WIDE_FLOAT, between, record, some

AB = some(2, 3)
UINT = np.dtype(np.uint32)


def _sin_squared(x: Any) -> Any:
    return spmd.lax.sin(x) ** 2


@spmd.custom_jvp
def _with_jvp(x: Any) -> Any:
    return spmd.lax.sin(x) * x


_with_jvp.defjvp(
    lambda p, t: (_with_jvp(*p), t[0] * (spmd.lax.cos(p[0]) * p[0] + spmd.lax.sin(p[0])))
)


@spmd.custom_vjp
def _with_vjp(x: Any) -> Any:
    return spmd.lax.exp(x) * x


_with_vjp.defvjp(lambda x: (_with_vjp(x), x), lambda x, ct: (ct * spmd.lax.exp(x) * (x + 1),))


@custom_batching.custom_vmap
def _with_vmap(x: Any) -> Any:
    return x * 3


_with_vmap.def_vmap(lambda size, batched, x: (_with_vmap(x), batched[0]))


def _switch(lax: Any, index: Any, x: Any) -> Any:
    return lax.switch(index, [lambda x: x * 2, lambda x: lax.sin(x), lambda x: x * x], x)


def _scan(lax: Any, c: Any, xs: Any) -> Any:
    return lax.scan(lambda c, x: (lax.sin(c) * x, None), c, xs)[0]


def _scan_in_numpy(c: Any, xs: Any) -> Any:
    for x in xs:
        c = np.sin(c) * x
    return c


def _while(lax: Any, n: Any, x: Any) -> Any:
    def body(state: Any) -> Any:
        return state[0] + 1, lax.sin(state[1]) * 2

    return lax.while_loop(lambda s: s[0] < n, body, (np.int32(0), x))[1]


def _while_in_numpy(n: Any, x: Any) -> Any:
    for _ in range(int(n)):
        x = np.sin(x) * 2
    return x.astype(x.dtype)


def _linear_solve(lax: Any, a: Any, b: Any) -> Any:
    # Diagonal systems: the matrix is the vector a.
    def solve(_: Any, b: Any) -> Any:
        return b / a

    return lax.custom_linear_solve(lambda x: a * x, b, solve, solve)


def _attention(q: Any, k: Any, v: Any) -> Any:
    return nn.dot_product_attention(q, k, v, is_causal=True)


def _attention_in_numpy(q: Any, k: Any, v: Any) -> Any:
    scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(*scores.shape[1:], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("nts,snh->tnh", weights, v).astype(q.dtype)


def _difference(f: Any, step: float = 1e-6) -> Any:
    """The directional derivative along ones of a NumPy function, by central differences."""

    def derivative(*xs: Any) -> Any:
        wide = [np.asarray(x, np.float64) for x in xs]
        ahead, behind = (f(*(x + sign * step for x in wide)) for sign in (1, -1))
        return ((ahead - behind) / (2 * step)).astype(xs[0].dtype)

    return derivative


def _attention_tangent(lax: Any, *xs: Any) -> Any:
    return spmd.jvp(_attention, xs, tuple(np.ones(x.shape, x.dtype) for x in xs))[1]


def _attention_grad(lax: Any, *xs: Any) -> Any:
    out, back = spmd.vjp(_attention, *xs)
    return sum(x.sum() for x in back(np.ones(out.shape, out.dtype)))


def _callback(lax: Any, x: Any) -> Any:
    like = spmd.ShapeDtypeStruct(x.shape, x.dtype)
    return spmd.pure_callback(np.cbrt, like, x, vmap_method="expand_dims")


def _seen(x: Any) -> Any:
    assert not isinstance(x, Tracer)


def _printed(lax: Any, x: Any) -> Any:
    spmd.debug.callback(_seen, x)
    return x * 2


MARKS = {
    "random_draw": lambda key: markers.draw(key, "a test"),
    "random_clone": markers.clone,
    "consume": markers.consume,
    "assert_consumed_value": lambda key: markers.assert_unconsumed(key) or key,
}


def _marked(mark):
    """The words of a key that went through a marker, which changes nothing."""
    return lambda lax, words: spmd.random.key_data(mark(spmd.random.wrap_key_data(words)))


def _key(lax: Any, data: Any) -> Any:
    return spmd.random.key_data(spmd.random.wrap_key_data(data))


def _threefry_in_numpy(key: Any, high: Any, low: Any) -> Any:
    """Threefry-2x32 with 20 rounds, as its authors give it (Salmon and others, 2011)."""
    k0, k1 = (np.uint32(k) for k in key)
    ks = [k0, k1, np.uint32(k0 ^ k1 ^ np.uint32(0x1BD11BDA))]
    with np.errstate(over="ignore"):
        x, y = high + ks[0], low + ks[1]
        for group in range(5):
            for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
                x = x + y
                y = ((y << np.uint32(turn)) | (y >> np.uint32(32 - turn))) ^ x
            x = x + ks[(group + 1) % 3]
            y = y + ks[(group + 2) % 3] + np.uint32(group + 1)
    return np.stack([x, y], -1)


def _threefry(lax: Any, key: Any, high: Any, low: Any) -> Any:
    out = threefry2x32(spmd.random.wrap_key_data(key), high, low)
    return spmd.random.key_data(out)


def _philox_in_numpy(state: Any) -> Any:
    """Five numbers of a key, whose words are the high half of the counter too; plain integers."""
    low, out = 2**32 - 1, []
    for block in range(2):
        k0, k1, first, second = (int(word) for word in np.asarray(state).tolist())
        counter = (first + (second << 32) + block) % 2**64
        x = [counter & low, counter >> 32, k0, k1]
        for _ in range(10):
            a, b = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
            x = [b >> 32 ^ x[1] ^ k0, b & low, a >> 32 ^ x[3] ^ k1, a & low]
            k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
        out += x
    return np.array(out[:5], UINT)


COUNTERS = between(0, 2**31, 2, 3, dtype=UINT)
ATTENDED = (some(4, 2, 3), some(4, 2, 3), some(4, 2, 3))
FLOAT32 = WIDE_FLOAT[:1]

RECORDS = [
    record(
        "jit",
        lambda lax, x: spmd.jit(_sin_squared)(x),
        AB,
        dtypes=WIDE_FLOAT,
        reference=lambda x: np.sin(x) ** 2,
    ),
    record(
        "checkpoint",
        lambda lax, x: spmd.checkpoint(_sin_squared)(x),
        AB,
        dtypes=WIDE_FLOAT,
        reference=lambda x: np.sin(x) ** 2,
    ),
    record(
        "name",
        lambda lax, x: checkpoint_name(lax.sin(x), "here"),
        AB,
        dtypes=WIDE_FLOAT,
        reference=np.sin,
    ),
    record(
        "optimization_barrier",
        lambda lax, x: lax.optimization_barrier(x),
        AB,
        dtypes=WIDE_FLOAT,
        reference=np.array,
    ),
    record(
        "custom_jvp_call",
        lambda lax, x: _with_jvp(x),
        AB,
        dtypes=WIDE_FLOAT,
        reference=lambda x: np.sin(x) * x,
    ),
    record(
        "custom_vjp_call",
        lambda lax, x: _with_vjp(x),
        AB,
        dtypes=WIDE_FLOAT,
        reference=lambda x: np.exp(x) * x,
        order=0,  # in reverse only: tests/core/test_custom_vjp.py
    ),
    record(
        "custom_vmap_call",
        lambda lax, x: _with_vmap(x),
        AB,
        dtypes=WIDE_FLOAT,
        reference=lambda x: x * 3,
    ),
    record(
        "linear_call",
        lambda lax, r, x: custom_derivatives.linear_call(
            lambda r, x: x / r, lambda r, ct: ct / r, r, x
        ),
        between(0.5, 2, 2, 3),
        AB,
        dtypes=WIDE_FLOAT,
        differentiable=(1,),
        reference=lambda r, x: x / r,
    ),
    *(
        record(
            "cond",
            _switch,
            between(at, at, dtype=np.int32),
            AB,
            dtypes=WIDE_FLOAT,
            differentiable=(1,),
            case=f"branch {at}",
            reference=lambda i, x: [lambda x: x * 2, np.sin, np.square][int(i)](x),
        )
        for at in range(3)
    ),
    record("scan", _scan, some(3), some(4, 3), dtypes=WIDE_FLOAT, reference=_scan_in_numpy),
    record(
        "scan",
        _scan,
        some(3),
        some(0, 3),
        dtypes=WIDE_FLOAT,
        reference=_scan_in_numpy,
        case="no step",
    ),
    record(
        "while",
        _while,
        between(0, 4, dtype=np.int32),
        AB,
        dtypes=WIDE_FLOAT,
        reference=_while_in_numpy,
        order=0,  # forwards only: tests/lax/test_control_while.py
    ),
    record(
        "custom_linear_solve",
        _linear_solve,
        between(0.5, 2, 3),
        some(3),
        dtypes=WIDE_FLOAT,
        reference=lambda a, b: b / a,
    ),
    record(
        "attention",
        lambda lax, *xs: _attention(*xs),
        *ATTENDED,
        dtypes=FLOAT32,
        reference=_attention_in_numpy,
    ),
    record(
        "attention_tangent",
        _attention_tangent,
        *ATTENDED,
        dtypes=FLOAT32,
        reference=_difference(_attention_in_numpy),
        tolerance=2**10,
    ),
    record(
        "attention_grad",
        _attention_grad,
        *ATTENDED,
        dtypes=FLOAT32,
        reference=lambda *xs: _difference(lambda *ys: _attention_in_numpy(*ys))(*xs).sum(),
        tolerance=2**12,
    ),
    record("pure_callback", _callback, AB, dtypes=WIDE_FLOAT, reference=np.cbrt, order=0),
    record("debug_callback", _printed, AB, dtypes=WIDE_FLOAT, reference=lambda x: x * 2),
    record(
        "threefry2x32",
        _threefry,
        between(0, 2**31, 2, dtype=UINT),
        COUNTERS,
        COUNTERS,
        dtypes=[UINT],
        reference=_threefry_in_numpy,
    ),
    *(
        record(name, _key, between(0, 2**31, 2, dtype=UINT), dtypes=[UINT], reference=np.array)
        for name in ("random_wrap", "random_unwrap")
    ),
    *(
        record(
            name,
            _marked(mark),
            between(0, 2**31, 2, dtype=UINT),
            dtypes=[UINT],
            reference=np.array,
        )
        for name, mark in MARKS.items()
    ),
    record(
        "rng_bit_generator",
        lambda lax, x: lax.rng_bit_generator(x, (5,))[1],
        between(0, 2**31, 4, dtype=UINT),
        dtypes=[UINT],
        reference=_philox_in_numpy,
        vmap=False,  # the first state gives the bits of all
    ),
    record(
        "key_bits",
        lambda lax, x: spmd.random.bits(spmd.random.wrap_key_data(x), (4,), UINT),
        between(0, 2**31, 2, dtype=UINT),
        dtypes=[UINT],
        reference=lambda key: np.bitwise_xor.reduce(
            _threefry_in_numpy(key, np.zeros(4, UINT), np.arange(4, dtype=UINT)), -1
        ),
    ),
]
