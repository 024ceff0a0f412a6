"""The collectives that plans of parallelism take: kinds and numbers, beside the least possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, lax, nn
from tests.partition.programs import auto_mesh, kinds

LAYERS, WIDTH, HEADS, HIDDEN, TOKENS, BATCH, TIME = 2, 32, 4, 64, 48, 8, 12
Params = dict[str, Any]


def put(x: Any, mesh: spmd.Mesh, *spec: Any) -> Any:
    return spmd.device_put(x, NamedSharding(mesh, P(*spec)))


# ---- single operations -------------------------------------------------------------------------

A = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
RING = {"x": 4}
GRID = {"x": 2, "y": 2}
CASES: dict[str, tuple[Mapping[str, int], Any, tuple[Any, ...], dict[str, int]]] = {
    "elementwise": (RING, lambda a, b: snp.tanh(a) * b, (("x",), ("x",)), {}),
    "rows times whole": (RING, lambda a, b: a @ b, (("x",), ()), {}),
    "contracted": (RING, lambda a, b: a @ b, ((None, "x"), ("x",)), {"all_reduce": 1}),
    "rows times columns": (RING, lambda a, b: a @ b, (("x",), (None, "x")), {"all_gather": 1}),
    "two dims": (GRID, lambda a, b: a @ b, (("x", "y"), ("x", "y")), {"all_gather": 2}),
    "sum over the split dim": (RING, lambda a, b: a.sum(0), (("x",), ()), {"all_reduce": 1}),
    "sum over another dim": (RING, lambda a, b: a.sum(1), (("x",), ()), {}),
    "max over the split dim": (RING, lambda a, b: a.max(0), (("x",), ()), {"all_reduce": 1}),
    "softmax of split classes": (
        RING, lambda a, b: nn.softmax(a), ((None, "x"), ()), {"all_reduce": 2},
    ),
    "transpose": (GRID, lambda a, b: a.T + 1, (("x", "y"), ()), {}),
    "heads cut": (RING, lambda a, b: a.reshape(64, 8, 8) * 2, ((None, "x"), ()), {}),
    "heads merged": (
        RING, lambda a, b: a.reshape(8, 8, 64).reshape(64, 64) + 1, (("x",), ()), {},
    ),
    "random numbers": (
        RING, lambda a, b: a + spmd.random.normal(spmd.random.key(0), (64, 64)), (("x",), ()), {},
    ),
    "two sums added": (
        RING, lambda a, b: a @ b + (2 * a) @ b, ((None, "x"), ("x",)), {"all_reduce": 1},
    ),
    "lookup in a table": (RING, lambda a, b: a[snp.arange(8)], ((None, "x"), ()), {}),
    "cumulative sum": (RING, lambda a, b: snp.cumsum(a, 0), (("x",), ()), {"all_gather": 1}),
    "cumulative maximum from behind": (
        RING, lambda a, b: lax.cummax(a, 0, reverse=True), (("x",), ()), {"all_gather": 1},
    ),
    "FFT": (RING, lambda a, b: snp.fft.fft(a, axis=0).real, (("x",), ()), {"all_to_all": 1}),
    "sort": (RING, lambda a, b: snp.sort(a, 0), (("x",), ()), {"all_to_all": 1}),
    "sort of the only dim": (
        RING, lambda a, b: snp.sort(a.reshape(-1)), (("x",), ()), {"all_gather": 1},
    ),
    "sort of a long dim": (
        RING,
        lambda a, b: snp.sort(snp.tile(a, (1, 32)).reshape(-1).astype(np.int32)),
        (("x",), ()), {"all_to_all": 2, "permute": 2},
    ),
    "sort of a dim beside a split one": (
        GRID, lambda a, b: snp.sort(a, 0), (("x", "y"), ()), {"all_to_all": 1},
    ),
    "top_k": (RING, lambda a, b: lax.top_k(a, 3)[0], ((None, "x"), ()), {"all_gather": 1}),
    "concatenate": (
        RING, lambda a, b: snp.concatenate([a, 2 * a]), (("x",), ()), {"exchange": 1},
    ),
    "three joined": (
        RING, lambda a, b: snp.concatenate([a, b[:16], a + 1]) * 2, (("x",), ()), {"exchange": 1},
    ),
    "half of the rows": (RING, lambda a, b: a[32:] * 2, (("x",), ()), {"exchange": 1}),
    "halves multiplied": (
        RING, lambda a, b: a[:, :32] * a[:, 32:], ((None, "x"), ()), {"exchange": 1},
    ),
    "padded by many": (
        RING, lambda a, b: snp.pad(a, ((64, 0), (0, 0))) * 2, (("x",), ()), {"exchange": 1},
    ),
    "roll": (RING, lambda a, b: snp.roll(a, 3, 0), (("x",), ()), {"permute": 1}),
    "roll over devices": (RING, lambda a, b: snp.roll(a, 35, 0), (("x",), ()), {"permute": 2}),
    "neighbours": (
        RING, lambda a, b: a[1:-1] + a[2:] + a[:-2], (("x",), ()), {"all_to_all": 1},
    ),
    "attention by heads": (
        RING, lambda a, b: nn.dot_product_attention(*[a.reshape(2, 32, 8, 8)] * 3),
        ((None, "x"), ()), {},
    ),
    "attention of split sequences": (
        RING,
        lambda a, b: nn.dot_product_attention(
            *[(a * k).reshape(1, 64, 8, 8) for k in (1, 2, 3)], is_causal=True
        ),
        (("x",), ()), {"all_gather": 2},
    ),
    "attention of a long sequence by heads": (
        RING,
        lambda a, b: nn.dot_product_attention(
            *[snp.tile(a * k, (1, 8)).reshape(1, 512, 8, 8) for k in (1, 2, 3)], is_causal=True
        ).sum(1),
        (("x",), ()), {"all_to_all": 4, "all_reduce": 1},
    ),
    "one query of keys beside heads": (
        RING,
        lambda a, b: nn.dot_product_attention(
            b[:1].reshape(1, 1, 8, 8), *[(a * k).reshape(1, 64, 8, 8) for k in (2, 3)]
        ),
        (("x",), ()), {"all_to_all": 2},
    ),
    "scan over rows": (
        RING, lambda a, b: lax.scan(lambda c, r: (c + r, c * r), a[0], a)[1], ((None, "x"), ()), {},
    ),
    "map over split rows": (
        RING, lambda a, b: lax.map(lambda r: snp.sin(r @ b), a), (("x",), ()), {},
    ),
    "gradient of a map over split rows": (
        RING,
        lambda a, b: spmd.grad(lambda b: (lax.map(lambda r: r @ b, a) ** 2).sum())(b / 8),
        (("x",), ()), {"all_reduce": 1},
    ),
    "sum of split rows in a scan": (
        RING, lambda a, b: lax.scan(lambda c, r: (c + r * r, None), a[0] * 0, a)[0],
        (("x",), ()), {"all_reduce": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_one_operation(name: str):
    axes, f, specs, expected = CASES[name]
    mesh = auto_mesh(tuple(axes.values()), tuple(axes))
    arguments = [put(A, mesh, *spec) for spec in specs]
    assert kinds(f, *arguments) == expected
    np.testing.assert_allclose(spmd.jit(f)(*arguments), spmd.jit(f)(A, A), rtol=1e-4, atol=1e-4)


def test_a_sum_that_is_wanted_split_is_scattered():
    mesh = auto_mesh((4,), ("x",))
    f = spmd.jit(lambda a, b: a @ b, out_shardings=NamedSharding(mesh, P("x")))
    arguments = put(A, mesh, None, "x"), put(A, mesh, "x")
    assert kinds(f, *arguments) == {"reduce_scatter": 1}
    assert f(*arguments).sharding.spec == P("x")


def test_a_split_that_moves_to_another_dim_is_one_exchange():
    mesh = auto_mesh((4,), ("x",))
    f = spmd.jit(lambda a: a, out_shardings=NamedSharding(mesh, P(None, "x")))
    assert kinds(f, put(A, mesh, "x")) == {"all_to_all": 1}
    np.testing.assert_array_equal(f(put(A, mesh, "x")), A)


def test_bytes_are_those_of_the_formulas():
    mesh = auto_mesh((4,), ("x",))
    (found,) = spmd.debug.collectives(lambda a, b: a @ b)(
        put(A, mesh, None, "x"), put(A, mesh, "x")
    )
    assert (found.axes, found.devices, found.received) == (("x",), 4, 2 * A.nbytes * 3 // 4)
    (found,) = spmd.debug.collectives(lambda a, b: a @ b)(
        put(A, mesh, "x"), put(A, mesh, None, "x")
    )
    assert (found.kind, found.received) == ("all_gather", A.nbytes * 3 // 4)


def test_a_fully_sharded_block_gathers_each_weight_and_scatters_each_gradient():
    """The rows' split spreads through the activation before the second weight's can."""
    mesh = auto_mesh((4,), ("x",))
    weights = {"up": put(A, mesh, "x"), "down": put(A, mesh, "x")}

    def loss(weights: Any, x: Any) -> Any:
        return snp.sum((nn.gelu(x @ weights["up"]) @ weights["down"]) ** 2)

    rows = NamedSharding(mesh, P("x"))
    slopes = spmd.jit(spmd.grad(loss), out_shardings={"up": rows, "down": rows})
    found = spmd.debug.collectives(slopes)(weights, put(A, mesh, "x"))
    assert Counter(c.kind for c in found) == {"all_gather": 2, "reduce_scatter": 2}
    assert {c.received for c in found} == {A.nbytes * 3 // 4}


# ---- a language model --------------------------------------------------------------------------


def init() -> Params:
    rng = np.random.default_rng(1)
    shapes = {
        "emb": (TOKENS, WIDTH), "q": (LAYERS, WIDTH, WIDTH), "k": (LAYERS, WIDTH, WIDTH),
        "v": (LAYERS, WIDTH, WIDTH), "o": (LAYERS, WIDTH, WIDTH), "up": (LAYERS, WIDTH, HIDDEN),
        "down": (LAYERS, HIDDEN, WIDTH),
    }  # fmt: skip
    return {
        name: (rng.standard_normal(shape) / shape[-2] ** 0.5).astype(np.float32)
        for name, shape in shapes.items()
    }


def norm(x: Any) -> Any:
    return x * lax.rsqrt(snp.mean(x * x, -1, keepdims=True) + 1e-5)


def loss(p: Params, tokens: Any) -> Any:
    x = p["emb"][tokens[:, :-1]]
    b, t, _ = x.shape
    for n in range(LAYERS):
        h = norm(x)
        q, k, v = ((h @ p[name][n]).reshape(b, t, HEADS, WIDTH // HEADS) for name in "qkv")
        x = x + nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, t, WIDTH) @ p["o"][n]
        x = x + nn.gelu(norm(x) @ p["up"][n]) @ p["down"][n]
    scores = nn.log_softmax(norm(x) @ p["emb"].T)
    return -snp.mean(snp.take_along_axis(scores, tokens[:, 1:, None], -1))


def step(p: Params, tokens: Any) -> Any:
    value, slope = spmd.value_and_grad(loss)(p, tokens)
    return value, spmd.tree.map(lambda w, g: w - 0.1 * g, p, slope)


WEIGHTS = 6 * LAYERS + 1
COLUMNS, ROWS = P(None, None, "model"), P(None, "model")
TENSOR = dict.fromkeys(("q", "k", "v", "up"), COLUMNS) | dict.fromkeys(("o", "down"), ROWS)
PLANS: dict[str, tuple[dict[str, int], dict[str, P], P, dict[str, int]]] = {
    # Each weight's gradient once, the tied embedding's too, and the loss.
    "data": ({"data": 4}, {}, P("data"), {"all_reduce": WEIGHTS + 1}),
    # Weights are gathered (the embedding once for its two uses), gradients scattered.
    "fully sharded": (
        {"data": 4},
        {"emb": P("data"), **dict.fromkeys(("q", "k", "v", "o", "up", "down"), P(None, "data"))},
        P("data"),
        {"all_gather": WEIGHTS, "reduce_scatter": WEIGHTS, "all_reduce": 1},
    ),
    # Two sums a layer forward, two backward.
    "tensor": ({"model": 4}, TENSOR, P(), {"all_reduce": 4 * LAYERS}),
    "data and tensor": (
        {"data": 2, "model": 2}, TENSOR, P("data"), {"all_reduce": WEIGHTS + 1 + 4 * LAYERS},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_a_training_step_takes_the_least_collectives_and_the_same_values(name: str):
    axes, specs, split, expected = PLANS[name]
    mesh = auto_mesh(tuple(axes.values()), tuple(axes))
    params, tokens = init(), np.random.default_rng(2).integers(0, TOKENS, (BATCH, TIME + 1))
    placed = {k: put(w, mesh, *specs.get(k, P())) for k, w in params.items()}
    batch = put(tokens.astype(np.int32), mesh, *split)
    assert kinds(step, placed, batch) == expected
    value, updated = spmd.jit(step)(placed, batch)
    wanted, plain = spmd.jit(step)(params, tokens.astype(np.int32))
    assert float(value) == pytest.approx(float(wanted), abs=1e-5)
    for key, found in updated.items():
        np.testing.assert_allclose(found, plain[key], atol=1e-5)
        assert found.sharding.spec == placed[key].sharding.spec, "weights stay where they are"


def test_gradients_of_a_scan_of_sharded_layers_are_scattered_in_each_iteration():
    mesh = auto_mesh((4,), ("data",))
    rng = np.random.default_rng(3)
    layers = rng.standard_normal((3, 2, 16, 16)).astype(np.float32) / 4
    x = rng.standard_normal((64, 16)).astype(np.float32)

    def loss(layers: Any, x: Any) -> Any:
        return snp.mean(lax.scan(lambda h, w: (snp.tanh(h @ w[0]) @ w[1], None), x, layers)[0] ** 2)

    def step(layers: Any, x: Any) -> Any:
        return layers - 0.1 * spmd.grad(loss)(layers, x)

    arguments = put(layers, mesh, None, None, "data"), put(x, mesh, "data")
    found = kinds(step, *arguments)
    # Of each layer two weights, gathered forward and backward.
    assert found == {"all_gather": 3 * 2 * 2, "reduce_scatter": 3 * 2}
    np.testing.assert_allclose(spmd.jit(step)(*arguments), spmd.jit(step)(layers, x), atol=1e-5)


def test_a_sum_that_a_loop_reads_is_made_once():
    mesh = auto_mesh((4,), ("x",))

    def f(a: Any, b: Any) -> Any:
        total = a @ b
        return lax.scan(lambda c, _: (c + snp.sin(total), None), snp.zeros_like(total), length=5)[0]

    arguments = put(A, mesh, None, "x"), put(A, mesh, "x")
    assert kinds(f, *arguments) == {"all_reduce": 1}
    np.testing.assert_allclose(spmd.jit(f)(*arguments), spmd.jit(f)(A, A), rtol=1e-3, atol=1e-3)


def test_a_partial_sum_whose_split_dim_is_merged_is_made_first():
    mesh = auto_mesh((2, 2), ("x", "z"))

    def f(a: Any, b: Any) -> Any:
        return (a @ b).reshape(64 * 64) * 2

    arguments = put(A, mesh, None, "z"), put(A, mesh, "z", "x")
    np.testing.assert_allclose(spmd.jit(f)(*arguments), f(A, A), rtol=1e-3, atol=1e-3)


def test_a_nan_on_one_device_reaches_the_maximum():
    x = A.copy()
    x[17, 3] = np.nan
    for reduce in (snp.max, snp.min, snp.sum):
        found = spmd.jit(lambda a, reduce=reduce: reduce(a, 0))(
            put(x, auto_mesh((4,), ("x",)), "x")
        )
        assert np.isnan(found[3]) and np.isnan(np.asarray(found)).sum() == 1


# ---- indexing along a split dim ----------------------------------------------------------------

PLACES = np.array([3, 60, -1, 17, 63, 2, 100, 0])
READS: dict[str, tuple[Callable[[Any], Any], int | str]] = {
    "rows": (lambda x: x[snp.asarray(PLACES)], 1),
    "rows, clipped": (lambda x: x.at[snp.asarray(PLACES)].get(mode="clip"), 1),
    "rows, filled": (lambda x: x.at[snp.asarray(PLACES)].get(mode="fill", fill_value=7.0), 1),
    "elements": (lambda x: x[snp.asarray([1, 50]), snp.asarray([3, 30])], 1),
    "one row": (lambda x: x[5], "exchange"),
    "a slice": (lambda x: x[3:6], "exchange"),
    "a slice with steps": (lambda x: x[1:60:7, 2:5], 1),
    "a slice that ends behind": (lambda x: lax.dynamic_slice(x, (62, 0), (5, 64)), "exchange"),
    "a traced slice": (
        lambda x: lax.dynamic_slice(x, lax.optimization_barrier((np.int32(62), 30)), (5, 7)), 1,
    ),
    "unsigned indices": (lambda x: x[snp.asarray([3, 63], "uint8")], 1),
}  # fmt: skip
WRITES: dict[str, Callable[[Any], Any]] = {
    "one row": lambda x: x.at[3].set(1.0),
    "rows": lambda x: x.at[snp.asarray(PLACES)].set(2.0),
    "rows added": lambda x: x.at[snp.asarray(PLACES)].add(2.0),
    "elements multiplied": lambda x: x.at[snp.asarray(PLACES), 3].multiply(2.0),
    "greatest": lambda x: x.at[snp.asarray(PLACES)].max(0.0),
    "a block": lambda x: lax.dynamic_update_slice(x, snp.ones((5, 7)), (62, 30)),
    "a block of rows": lambda x: lax.dynamic_update_slice(x, snp.ones((5, 64)), (14, 0)),
}


@pytest.mark.parametrize("name", READS)
def test_rows_of_a_split_dim_are_read_by_one_sum_of_the_rows(name: str):
    f, expected = READS[name]
    x = put(A, auto_mesh((2, 2), ("x", "y")), "x", "y")
    kind = expected if isinstance(expected, str) else "all_reduce"
    assert kinds(f, x) == {kind: 1}
    np.testing.assert_array_equal(spmd.jit(f)(x), spmd.jit(f)(A))
    gradient = spmd.grad(lambda x: (f(x) ** 2).sum())
    np.testing.assert_allclose(spmd.jit(gradient)(x), spmd.jit(gradient)(A), rtol=1e-6)


@pytest.mark.parametrize("name", WRITES)
def test_rows_of_a_split_dim_are_written_without_an_exchange(name: str):
    f, x = WRITES[name], put(A, auto_mesh((2, 2), ("x", "y")), "x", "y")
    assert not kinds(f, x) and spmd.jit(f)(x).sharding.spec == P("x", "y")
    np.testing.assert_array_equal(spmd.jit(f)(x), spmd.jit(f)(A))


def test_a_lookup_in_a_table_split_by_rows_sums_the_result():
    mesh = auto_mesh((4,), ("model",))
    tokens = np.arange(24, dtype=np.int32).reshape(4, 6) * 7 % 64

    def f(table: Any, tokens: Any) -> Any:
        return table[tokens]

    (found,) = spmd.debug.collectives(f)(put(A, mesh, "model"), tokens)
    assert (found.kind, found.value) == ("all_reduce", "f32[4,6,64]")
    np.testing.assert_array_equal(spmd.jit(f)(put(A, mesh, "model"), tokens), A[tokens])


def test_the_gradient_of_a_lookup_by_split_tokens_is_one_sum_of_the_table():
    mesh = auto_mesh((4,), ("data",))
    tokens = put(np.arange(32, dtype=np.int32) * 5 % 64, mesh, "data")
    gradient = spmd.grad(lambda table, tokens: (table[tokens] ** 3).sum())
    assert kinds(gradient, put(A, mesh), tokens) == {"all_reduce": 1}
    expected = spmd.jit(gradient)(A, np.asarray(tokens))
    np.testing.assert_allclose(spmd.jit(gradient)(put(A, mesh), tokens), expected, rtol=1e-6)


# ---- calls -------------------------------------------------------------------------------------


def test_an_operation_gives_the_same_bits_whenever_it_is_called():
    x = put(A, auto_mesh((2, 2), ("x", "y")), "x", "y")
    for f in (lambda x: x + 1.5, snp.tanh, lambda x: x[3], lambda x: x @ x, lambda x: x.sum(0)):
        first = np.asarray(f(x))
        for _ in range(12):
            again = f(x)
            np.testing.assert_array_equal(again, first)
        assert isinstance(again.sharding, NamedSharding)


def test_debug_nans_reaches_programs_that_were_called_often():
    x = put(np.zeros((8, 8), np.float32), auto_mesh((4,), ("x",)), "x")
    f = spmd.jit(lambda x: x / 0.0)
    for _ in range(4):
        f(x)
    with spmd.debug_nans(True), pytest.raises(FloatingPointError):
        f(x)


def test_an_argument_is_not_moved_silently():
    mesh = auto_mesh((4,), ("x",))
    f = spmd.jit(lambda a: a * 2, in_shardings=NamedSharding(mesh, P("x")))
    assert f(A).sharding.spec == P("x")
    with pytest.raises(spmd.errors.ShardingError, match=r"in_shardings: a \(f32\[64,64\]\) is com"):
        f(put(A, mesh, None, "x"))


def test_donated_shards_are_written_over():
    x = put(A, auto_mesh((4,), ("x",)), "x")
    out = spmd.jit(lambda a: a * 2, donate_argnums=0)(x)
    assert x.is_deleted() and out.sharding.spec == P("x")
    np.testing.assert_array_equal(out, A * 2)


def test_stages_tell_shardings():
    mesh = auto_mesh((4,), ("x",))
    like = spmd.ShapeDtypeStruct((64, 64), np.float32, sharding=NamedSharding(mesh, P("x")))
    compiled = spmd.jit(lambda a: a @ a.T).lower(like).compile()
    (given,), _ = compiled.input_shardings
    assert given.spec == P("x") and compiled.output_shardings.spec == P("x")
    np.testing.assert_allclose(compiled(put(A, mesh, "x")), A @ A.T, rtol=1e-4, atol=1e-4)


def test_a_spec_is_one_over_the_mesh_in_scope():
    mesh, other = auto_mesh((4,), ("x",)), auto_mesh((2, 2), ("x", "y"))
    f = spmd.jit(lambda a: lax.with_sharding_constraint(a * 2, P("x")))
    for grid in (mesh, other, mesh):
        with spmd.set_mesh(grid):
            for _ in range(3):
                assert f(A).sharding.mesh == grid
    with pytest.raises(spmd.errors.ShardingError, match="without a mesh"):
        f(A)


def test_callbacks_see_whole_values_once(capfd):
    mesh = auto_mesh((2, 2), ("x", "y"))
    seen: list[np.ndarray] = []

    def look(v: Any) -> Any:
        seen.append(np.asarray(v))
        return np.asarray(v)[::-1] * 2, np.asarray(v) > 0

    @spmd.jit
    def f(a: Any) -> Any:
        kinds = (np.float32, bool)
        shapes = tuple(spmd.ShapeDtypeStruct(a.shape, kind) for kind in kinds)
        doubled, positive = spmd.io_callback(look, shapes, a)
        spmd.debug.print("sum {}", a.sum())
        return a + doubled, positive

    total, positive = f(put(A, mesh, "x", "y"))
    np.testing.assert_array_equal(seen, [A])
    np.testing.assert_array_equal(total, A + A[::-1] * 2)
    np.testing.assert_array_equal(positive, A > 0)
    spmd.effects_barrier()
    assert capfd.readouterr().out.count("sum") == 1


def test_a_constraint_over_another_mesh_is_an_error_or_the_same_layout():
    mesh = auto_mesh((2, 2), ("x", "y"))
    renamed, line = auto_mesh((2, 2), ("a", "b")), auto_mesh((4,), ("z",))
    pair = auto_mesh((2,), ("z",))

    def f(grid: Any, *spec: Any) -> Any:
        place = NamedSharding(grid, P(*spec))
        return spmd.jit(lambda a: lax.with_sharding_constraint(a * 2, place))(put(A, mesh, "x"))

    assert f(renamed, None, "b").sharding.spec == P(None, "y")
    assert f(line, "z").sharding == NamedSharding(line, P("z"))
    np.testing.assert_array_equal(f(line, None, "z"), A * 2)
    with pytest.raises(spmd.errors.ShardingError, match=r"constrained to .*'z'.* over one mesh"):
        f(pair, "z")
    odd = spmd.Mesh(np.array(spmd.devices())[[1, 0, 2, 3]], ("z",))
    out = f(odd, "z")
    assert out.sharding == NamedSharding(odd, P("z"))
    np.testing.assert_array_equal(out, A * 2)


def test_a_closed_over_array_stays_where_it_is():
    mesh = auto_mesh((4,), ("x",))
    w = put(A, mesh, "x")
    f = spmd.jit(lambda a: a @ w)
    assert kinds(lambda a: a @ w, put(A, mesh, None, "x")) == {"all_reduce": 1}
    np.testing.assert_allclose(f(put(A, mesh, None, "x")), A @ A, rtol=1e-4, atol=1e-4)


def test_what_repeats_a_number_is_made_and_not_moved():
    """The cotangent of a sum is split as one reader likes, and whole for another."""
    mesh = auto_mesh((4,), ("x",))
    rows = NamedSharding(mesh, P("x"))
    table = np.random.default_rng(0).standard_normal((4096, 256)).astype(np.float32)
    tokens = np.arange(2048, dtype=np.int32) * 5 % 4096
    t, i = spmd.device_put(table, rows), spmd.device_put(tokens, rows)
    slope = spmd.grad(lambda t, i: (t[i] ** 2).sum())
    found = spmd.debug.collectives(spmd.jit(slope))(t, i)
    assert [(c.kind, c.value) for c in found] == [
        ("all_gather", "i32[512,1]"),
        ("all_reduce", "f32[2048,256]"),
    ]
    np.testing.assert_allclose(spmd.jit(slope)(t, i), slope(table, tokens), 1e-6)
