"""Values that are unreduced or reduced: types, terms, sums that are made once, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import P, debug, lax
from spmd.errors import ArgumentError, ShardingError, ShardingTypeError
from spmd.sharding import AxisType, reshard
from tests.sharding.test_explicit_types import NAMES, explicit_mesh, types_of
from tests.sharding.unreduced_programs import KINDER, PROGRAMS, REFUSED, operands

ALL = {**PROGRAMS, **KINDER}
TYPED = {program: types for program, types in ALL.items() if types != REFUSED}
NAMES = NAMES | {"grad": spmd.grad, "jit": spmd.jit, "vmap": spmd.vmap, "vjp": spmd.vjp}


def run(program: str, given: dict[str, Any], **changed: Any) -> list[Any]:
    return spmd.tree_util.tree_leaves(eval(program, NAMES | given | changed))


def value_of(x: Any) -> np.ndarray:
    """The value of an array that may be a sum that is not made yet."""
    return np.asarray(reshard(x, P()) if spmd.typeof(x).explicit is not None else x)


@pytest.fixture(scope="module")
def given() -> Iterator[dict[str, Any]]:
    mesh = explicit_mesh(2, 2)
    with spmd.set_mesh(mesh):
        yield operands(spmd, snp, mesh, spmd.sharding)


@pytest.fixture(scope="module")
def on_one() -> dict[str, list[np.ndarray]]:
    """The values over a mesh of one device, where a term is the sum."""
    mesh = explicit_mesh(1, 1)
    with spmd.set_mesh(mesh):
        alone = operands(spmd, snp, mesh, spmd.sharding)
        return {program: [value_of(x) for x in run(program, alone)] for program in TYPED}


@pytest.mark.parametrize("program", TYPED)
def test_results_have_these_types_and_values(
    program: str, given: dict[str, Any], on_one: dict[str, list[np.ndarray]]
):
    outs = run(program, given)
    assert types_of(outs) == TYPED[program]
    for out, value in zip(outs, on_one[program], strict=True):
        np.testing.assert_allclose(value_of(out), value, 1e-5, 1e-5)


@pytest.mark.parametrize("program", TYPED)
def test_compiled_whole_they_are_the_same(
    program: str, given: dict[str, Any], on_one: dict[str, list[np.ndarray]]
):
    named = {k: v for k, v in given.items() if isinstance(v, spmd.Array)}
    whole = spmd.jit(lambda named: run(program, given, **named))
    outs = whole(named)
    assert types_of(outs) == TYPED[program]
    for out, value in zip(outs, on_one[program], strict=True):
        np.testing.assert_allclose(value_of(out), value, 1e-5, 1e-5)


@pytest.mark.parametrize("program", [p for p, types in ALL.items() if types == REFUSED])
def test_what_would_need_bytes_is_refused(program: str, given: dict[str, Any]):
    with pytest.raises(ShardingTypeError, match=r"reshard\(x, P|leave others out|Use reshard"):
        run(program, given)


# ---- terms -------------------------------------------------------------------------------------


def test_each_device_has_its_term_and_the_array_says_so(given: dict[str, Any]):
    a, b, c = (given[name] for name in "abc")
    terms = [np.asarray(a)[:, :2] @ np.asarray(b)[:2], np.asarray(a)[:, 2:] @ np.asarray(b)[2:]]
    shards = [np.asarray(s.data) for s in c.addressable_shards]
    np.testing.assert_allclose(shards, [terms[0], terms[0], terms[1], terms[1]], 1e-6)
    assert repr(c).endswith("spec=P(None, None, unreduced={'x'}), memory_kind=device))")
    assert not c.is_fully_replicated
    with pytest.raises(ShardingError, match=r"Make the sum with reshard\(x, P"):
        np.asarray(c)
    assert debug.collectives(lambda c: reshard(c, P()))(c)[0].kind == "all_reduce"
    assert debug.collectives(lambda c: reshard(c, P("x")))(c)[0].kind == "reduce_scatter"


@pytest.mark.parametrize("program", ["c + c", "2. * c", "c * w", "c.T", "c.sum(0)", "c[0]"])
def test_linear_operations_on_terms_move_nothing(program: str, given: dict[str, Any]):
    assert (
        debug.collectives(lambda c, w: run(program, given, c=c, w=w)[0])(given["c"], given["w"])
        == []
    )


def test_whole_and_split_values_become_terms_without_a_move(given: dict[str, Any]):
    for name in "y", "xs", "w":
        x = given[name]
        out = reshard(x, P(unreduced={"x"}))
        np.testing.assert_array_equal(value_of(out), np.asarray(x))
        assert debug.collectives(lambda x: reshard(x, P(unreduced={"x"})))(x) == []


# ---- gradients ---------------------------------------------------------------------------------


def test_the_sum_of_microbatches_gradients_is_made_once():
    """The example of JAX's page on autodiff and sharding: one all_reduce, outside of both loops."""
    mesh = spmd.make_mesh((2,), ("x",), (AxisType.Explicit,))
    rng = np.random.default_rng(0)
    W = rng.standard_normal((3, 4, 4)).astype(np.float32) / 2
    X = rng.standard_normal((5, 6, 4)).astype(np.float32)

    def loss(layers: Any, rows: Any) -> Any:
        out, _ = lax.scan(lambda h, w: (snp.tanh(h @ w), None), rows, layers)
        return snp.sum(out**2)

    def step(layers: Any, batches: Any) -> Any:
        def microbatch(total: Any, rows: Any) -> Any:
            slope = spmd.grad(loss)(layers, rows)
            assert spmd.typeof(slope).sharding.spec.unreduced == {"x"}
            return total + slope, None

        zero = reshard(snp.zeros_like(layers), P(unreduced={"x"}))
        total, _ = lax.scan(microbatch, zero, batches)
        return reshard(layers, P()) - 0.01 * reshard(total, P())

    expected = W - 0.01 * sum(np.asarray(spmd.grad(loss)(W, rows)) for rows in X)
    with spmd.set_mesh(mesh):
        layers = spmd.device_put(W, P(reduced={"x"}))
        batches = spmd.device_put(X, P(None, "x"))
        np.testing.assert_allclose(spmd.jit(step)(layers, batches), expected, 1e-4, 1e-5)
        (only,) = debug.collectives(step)(layers, batches)
    assert (only.kind, only.times, only.received) == ("all_reduce", 1, W.nbytes)


def test_cotangents_of_one_reduced_value_meet_before_their_sum():
    mesh = spmd.make_mesh((2,), ("x",), (AxisType.Explicit,))

    def loss(w: Any, one: Any, other: Any) -> Any:
        w = reshard(w, P(None, None, reduced={"x"}))
        return snp.sum(one @ w) + snp.sum(other @ w)

    with spmd.set_mesh(mesh):
        w = spmd.device_put(np.ones((4, 2), np.float32), P(None, None))
        x = spmd.device_put(np.arange(32, dtype=np.float32).reshape(8, 4), P("x", None))
        assert len(debug.collectives(spmd.grad(loss))(w, x, x)) == 1
        slope = spmd.jit(spmd.grad(loss))(w, x, x)
        np.testing.assert_allclose(slope, np.tile(2 * np.asarray(x).sum(0)[:, None], (1, 2)))


# ---- inside of maps ----------------------------------------------------------------------------


@pytest.fixture
def over_two() -> Iterator[dict[str, Any]]:
    mesh = spmd.make_mesh((2,), ("x",), (AxisType.Explicit,))
    rng = np.random.default_rng(1)
    with spmd.set_mesh(mesh):
        yield {
            name: spmd.device_put(rng.standard_normal(shape).astype(np.float32), spec)
            for name, shape, spec in [
                ("a", (3, 4), P(None, "x")),
                ("b", (4, 5), P("x", None)),
                ("rows", (8, 4), P("x", None)),
                ("w", (4, 2), P(None, None, reduced={"x"})),
            ]
        }


def test_a_map_returns_terms_and_its_gradient_moves_nothing(over_two: dict[str, Any]):
    a, b = over_two["a"], over_two["b"]

    def product(a: Any, b: Any) -> Any:
        return lax.pcast(a @ b, "x", to="unreduced")

    partial = spmd.shard_map(product, out_specs=P(None, None, unreduced={"x"}))
    bare = spmd.shard_map(lambda a, b: a @ b, out_specs=P(None, None, unreduced={"x"}))
    scale = np.arange(15, dtype=np.float32).reshape(3, 5)
    wanted = np.asarray(a) @ np.asarray(b)
    for f in partial, bare, spmd.jit(partial):
        assert spmd.typeof(f(a, b)).short() == "f32[3,5]{U:x}"
        np.testing.assert_allclose(value_of(f(a, b)), wanted, 1e-5, 1e-5)

    def loss(a: Any, b: Any) -> Any:
        return snp.sum(reshard(partial(a, b), P(None, None)) ** 2 * scale)

    slopes = spmd.grad(loss, (0, 1))
    by_hand = spmd.grad(lambda a, b: snp.sum((a @ b) ** 2 * scale), (0, 1))(
        np.asarray(a), np.asarray(b)
    )
    for found in slopes(a, b), spmd.jit(slopes)(a, b):
        assert types_of(list(found)) == "float32[3,4@x] float32[4@x,5]"
        for slope, expected in zip(found, by_hand, strict=True):
            np.testing.assert_allclose(slope, expected, 1e-4, 1e-4)
    assert [c.kind for c in debug.collectives(slopes)(a, b)] == ["all_reduce"]


def test_weights_that_are_reduced_in_a_map_have_unreduced_gradients(over_two: dict[str, Any]):
    rows, w = over_two["rows"], over_two["w"]
    seen = []

    def layer(rows: Any, w: Any) -> Any:
        seen.append((spmd.typeof(w).short(), spmd.typeof(snp.sin(w) + 1).short()))
        return snp.tanh(rows @ (2 * w) + np.float32(0.5))

    f = spmd.shard_map(layer, in_specs=(P("x"), P(None, None, reduced={"x"})), out_specs=P("x"))
    loss = lambda w, rows: snp.sum(f(rows, w) ** 2)  # noqa: E731
    expected = spmd.grad(lambda w, x: snp.sum(snp.tanh(x @ (2 * w) + 0.5) ** 2))(
        np.asarray(w), np.asarray(rows)
    )
    for slope in spmd.grad(loss)(w, rows), spmd.jit(spmd.grad(loss))(w, rows):
        assert spmd.typeof(slope).short() == "f32[4,2]{U:x}"
        np.testing.assert_allclose(value_of(slope), expected, 1e-4, 1e-4)
    assert seen[0] == ("f32[4,2]{R:x}", "f32[4,2]{R:x}")
    assert debug.collectives(spmd.grad(loss))(w, rows) == []


def test_biases_beside_reduced_weights_are_summed(over_two: dict[str, Any]):
    """A value that is equal on all devices meets a reduced one: its cotangent is summed."""
    rows, w = over_two["rows"], over_two["w"]
    specs = P("x"), P(None, None, reduced={"x"}), P()
    f = spmd.shard_map(lambda x, w, b: x @ (w + b), in_specs=specs, out_specs=P("x"))
    b = spmd.device_put(np.ones((4, 2), np.float32), P())
    slopes = spmd.jit(spmd.grad(lambda w, b: snp.sum(f(rows, w, b) ** 2), (0, 1)))(w, b)
    assert types_of(list(slopes)) == "float32[4,2]{U:x} float32[4,2]"
    np.testing.assert_allclose(value_of(slopes[0]), np.asarray(slopes[1]), 1e-4, 1e-4)


def test_a_sum_of_terms_in_a_map_and_its_gradient(over_two: dict[str, Any]):
    u = reshard(snp.arange(3.0), P(unreduced={"x"}))
    total = spmd.shard_map(lambda u: lax.psum(u + u, "x"), out_specs=P())
    np.testing.assert_array_equal(total(u), [0, 2 * 1, 2 * 2])
    slope = spmd.grad(lambda u: snp.sum(total(u) ** 2))(u)
    assert spmd.typeof(slope).short() == "f32[3]{R:x}"
    np.testing.assert_array_equal(slope, [0, 8, 16])


def test_casts_of_other_states_are_refused(over_two: dict[str, Any]):
    rows, w = over_two["rows"], over_two["w"]

    def cast(x: Any, to: str, spec: P) -> Any:
        return spmd.shard_map(lambda x: lax.pcast(x, "x", to=to), out_specs=spec)(x)

    with pytest.raises(ArgumentError, match="one that is equal there can become reduced"):
        cast(rows, "reduced", P("x"))
    with pytest.raises(ArgumentError, match="one that varies over 'x' can become unreduced"):
        cast(w, "unreduced", P(unreduced={"x"}))
    with pytest.raises(ArgumentError, match="must be 'varying', 'unreduced' or 'reduced'"):
        cast(w, "other", P())


def test_specs_of_maps_have_to_be_those_of_types(over_two: dict[str, Any]):
    w = over_two["w"]
    u = reshard(np.ones(3, np.float32), P(unreduced={"x"}))
    same = lambda x: x  # noqa: E731
    for x, spec, out in [
        (u, P(), P()),
        (w, P(), P()),
        (np.ones(3), P(reduced={"x"}), P(reduced={"x"})),
    ]:
        with pytest.raises(ShardingError, match="nothing is moved silently"):
            spmd.shard_map(same, in_specs=spec, out_specs=out)(x)
    with pytest.raises(ShardingError, match="it varies there"):
        spmd.shard_map(same, out_specs=P())(u)
    with pytest.raises(ShardingError, match="does not say that it is reduced along 'x'"):
        spmd.shard_map(same, out_specs=P())(w)
    with pytest.raises(ShardingError, match="it is equal there"):
        spmd.shard_map(same, in_specs=P(), out_specs=P(unreduced={"x"}))(np.ones(3))


def test_axes_of_sums_have_to_be_known_and_explicit():
    mesh = spmd.make_mesh((2,), ("x",), (AxisType.Auto,))
    with pytest.raises(ShardingError, match="it is an Auto axis"):
        spmd.NamedSharding(mesh, P(unreduced={"x"}))
    with pytest.raises(ShardingError, match="'z'"):
        spmd.NamedSharding(mesh, P(reduced={"z"}))
    with pytest.raises(ShardingError, match=r"then call reshard\(x, P"):
        explicit = spmd.make_mesh((2,), ("x",), (AxisType.Explicit,))
        spmd.device_put(np.ones(3), spmd.NamedSharding(explicit, P(unreduced={"x"})))


# ---- beside automatic axes ---------------------------------------------------------------------


@pytest.fixture
def mixed() -> Iterator[tuple[Any, Any]]:
    mesh = spmd.make_mesh((2, 2), ("x", "y"), (AxisType.Explicit, AxisType.Auto))
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 8), (8, 6)))
    with spmd.set_mesh(mesh):
        put = lambda x, spec: spmd.device_put(x, spmd.NamedSharding(mesh, spec))  # noqa: E731
        yield put(a, P("y", "x")), put(b, P("x"))


LINEAR: dict[str, Any] = {
    "itself": lambda c: c,
    "a sum": lambda c: c.sum(0),
    "transposed": lambda c: c.T * 2,
    "slices": lambda c: c[1:3] + c[:2],
    "padded": lambda c: snp.pad(c, 1, constant_values=3.0),
    "reshaped": lambda c: c.reshape(-1),
    "cumulative": lambda c: snp.cumsum(c, 0),
    "reversed": lambda c: snp.flip(c, 0),
    "rows": lambda c: c[snp.array([3, 0])],
    "carried": lambda c: lax.scan(lambda s, r: (s + r, r * 2), c[0], c),
    "written": lambda c: lax.dynamic_update_slice(c, c[:1], (2, 0)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_terms_that_the_compiler_splits_further(name: str, mixed: tuple[Any, Any]):
    a, b = mixed
    f = LINEAR[name]
    found = spmd.jit(lambda a, b: f(snp.matmul(a, b, out_sharding=P(unreduced={"x"}))))(a, b)
    expected = f(snp.asarray(np.asarray(a) @ np.asarray(b)))
    for one, other in zip(spmd.tree.leaves(found), spmd.tree.leaves(expected), strict=True):
        assert spmd.typeof(one).sharding.spec.unreduced == {"x"}
        np.testing.assert_allclose(value_of(one), other, 1e-4, 1e-4)


def test_maps_along_the_explicit_axis_only(mixed: tuple[Any, Any]):
    a, b = mixed
    terms = P(unreduced={"x"})
    f = spmd.shard_map(
        lambda a, b: lax.pcast(a @ b, "x", to="unreduced"),
        in_specs=(P(None, "x"), P("x")), out_specs=terms, axis_names={"x"},
    )  # fmt: skip
    whole = np.asarray(a) @ np.asarray(b)
    np.testing.assert_allclose(value_of(spmd.jit(f)(a, b)), whole, 1e-4, 1e-4)
    slope = spmd.jit(spmd.grad(lambda a: (reshard(f(a, b), P()) ** 2).sum()))(a)
    np.testing.assert_allclose(slope, 2 * whole @ np.asarray(b).T, 1e-4, 1e-4)
    total = spmd.shard_map(
        lambda c: lax.psum(2 * c, "x"), in_specs=terms, out_specs=P(), axis_names={"x"}
    )
    np.testing.assert_allclose(spmd.jit(lambda a, b: total(f(a, b)))(a, b), 2 * whole, 1e-4, 1e-4)


@pytest.mark.parametrize("dim", [0, 1])
def test_psum_scatter_makes_a_sum_whose_terms_a_type_speaks_of(dim: int):
    mesh = spmd.make_mesh((2, 2), ("x", "y"))
    value = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    weights = np.arange(32, dtype=np.float32).reshape(8, 4)
    spec = spmd.P("x") if dim == 0 else spmd.P(None, "x")

    def body(terms: Any) -> Any:
        return lax.psum_scatter(terms, "x", scatter_dimension=dim, tiled=True)

    with spmd.set_mesh(mesh):
        a = spmd.device_put(value.T, spmd.P(None, "x"))
        b = spmd.device_put(value @ value.T @ weights, spmd.P("x", None))
        scatter = spmd.shard_map(body, in_specs=spmd.P(unreduced={"x"}), out_specs=spec)

        def f(a: Any, b: Any) -> Any:
            return scatter(spmd.numpy.matmul(a, b, out_sharding=spmd.P(unreduced={"x"})))

        want = np.asarray(a) @ np.asarray(b)
        for g in (f, spmd.jit(f)):
            np.testing.assert_allclose(g(a, b), want, 1e-4)
        assert [c.kind for c in spmd.debug.collectives(f)(a, b)] == ["reduce_scatter"]
        slopes = spmd.jit(spmd.grad(lambda a, b: (f(a, b) ** 2).sum(), (0, 1)))(a, b)
        np.testing.assert_allclose(slopes[0], 2 * want @ np.asarray(b).T, 1e-4)
        np.testing.assert_allclose(slopes[1], 2 * np.asarray(a).T @ want, 1e-4)
