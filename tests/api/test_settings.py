"""Settings in `with` blocks, pullbacks across jit, arrays put together from shards."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import errors, lax
from spmd import numpy as snp


def test_settings_hold_for_a_block():
    with spmd.enable_x64(True):
        assert snp.zeros(1).dtype == np.float64
    assert snp.zeros(1).dtype == np.float32
    with spmd.debug_nans(), pytest.raises(FloatingPointError, match="NaN"):
        spmd.jit(snp.log)(np.float32(-1)).block_until_ready()
    for scope, name in (
        (spmd.log_compiles, "log_compiles"),
        (spmd.explain_cache_misses, "log_compiles"),
        (spmd.enable_checks, "check"),
        (spmd.checking_leaks, "check_leaks"),
        (spmd.check_tracer_leaks, "check_leaks"),
    ):
        before = getattr(spmd.config, name)
        with scope(not before):
            assert getattr(spmd.config, name) is not before
        assert getattr(spmd.config, name) is before
    with spmd.default_matmul_precision("float32"):
        assert spmd.config.default_matmul_precision == "float32"


def test_evaluating_while_tracing():
    @spmd.jit
    def f(x):
        with spmd.ensure_compile_time_eval():
            steps = int(snp.ceil(snp.log2(x.size)))
        return x + steps

    np.testing.assert_array_equal(f(np.zeros(5, np.float32)), np.full(5, 3))

    @spmd.jit
    def g(x):
        with spmd.ensure_compile_time_eval():
            return x + 1

    assert g(1.0) == 2  # as it is outside of the block: a traced value stays one


def test_clearing_the_caches_compiles_again():
    traces = []
    f = spmd.jit(lambda x: traces.append(1) or x + 1)
    assert (f(1.0), f(2.0)) == (2, 3)
    spmd.clear_caches()
    assert f(1.0) == 2 and len(traces) == 2


def test_the_environment_info_names_versions_and_devices(capsys):
    text = spmd.print_environment_info(return_string=True)
    assert text and f"spmd {spmd.__version__}" in text and "devices: " in text
    spmd.print_environment_info()
    assert capsys.readouterr().out == text + "\n"
    assert spmd.process_indices() == [0]


def test_functions_by_platform():
    f = lambda x: lax.platform_dependent(x, cpu=lambda x: x + 1, default=lambda x: x)  # noqa: E731
    assert spmd.jit(spmd.grad(f))(2.0) == 1 and f(2.0) == 3
    with pytest.raises(errors.ArgumentError, match="nothing is given for 'cpu', only for cuda"):
        lax.platform_dependent(2.0, cuda=lambda x: x)


# ---- pullbacks ---------------------------------------------------------------------------------


def test_a_pullback_crosses_jit():
    traced = []
    pull = spmd.jit(lambda x, y: spmd.vjp(lambda x, y: (x * snp.sin(y)).sum(), x, y))
    push = spmd.jit(lambda pullback, ct: traced.append(ct) or pullback(ct))
    x, y = np.arange(3, dtype=np.float32), np.ones(3, np.float32)
    for k in (1.0, 2.0):
        out, pullback = pull(k * x, y)
        dx, dy = push(pullback, 2.0)
        np.testing.assert_allclose(out, (k * x * np.sin(y)).sum(), rtol=1e-6)
        np.testing.assert_allclose(dx, 2 * np.sin(y), rtol=1e-6)
        np.testing.assert_allclose(dy, 2 * k * x * np.cos(y), rtol=1e-6)
    assert len(traced) == 1


@pytest.mark.parametrize("jitted", [False, True])
def test_fwd_and_bwd_give_values_and_gradients(jitted):
    f = lambda x, w: ((x @ w).sum(), w)  # noqa: E731
    fwd, bwd = spmd.fwd_and_bwd(f, argnums=(1, 0), has_aux=True, jitted=jitted)
    x, w = np.ones((2, 3), np.float32), np.full((3, 2), 2.0, np.float32)
    out, pullback, aux = fwd(x, w)
    dw, dx = bwd(pullback, 1.0)
    assert out == 24 and aux.shape == (3, 2)
    np.testing.assert_array_equal(dw, np.full((3, 2), 2))
    np.testing.assert_array_equal(dx, np.full((2, 3), 4))


# ---- shards ------------------------------------------------------------------------------------


def test_shards_must_fit_their_places():
    sharding = spmd.sharding.SingleDeviceSharding(spmd.devices()[0])
    piece = spmd.device_put(np.arange(4.0), spmd.devices()[0])
    rows = spmd.NamedSharding(spmd.make_mesh((1,), ("x",)), spmd.P("x"))
    again = spmd.make_array_from_single_device_arrays((4,), rows, [spmd.device_put(piece, rows)])
    assert again.sharding == rows and float(again.sum()) == float(piece.sum())
    whole = spmd.make_array_from_single_device_arrays((4,), sharding, [piece])
    np.testing.assert_array_equal(whole, np.arange(4))
    with pytest.raises(errors.ShapeError, match=r"has shape \(4,\)"):
        spmd.make_array_from_single_device_arrays((5,), sharding, [piece])
    with pytest.raises(errors.ArgumentError, match="one array on each"):
        spmd.make_array_from_single_device_arrays((4,), sharding, [])
    tree = {"x": piece}
    assert spmd.copy_to_host_async(tree) is tree


def test_rank_promotion_is_warned_of_or_refused():
    x, y = snp.ones((2, 3)), snp.ones(3)
    f = spmd.jit(lambda x, y: x * y)
    for _ in range(4):
        f(x, y)  # a fast path must not hide the setting
    with spmd.numpy_rank_promotion("raise"):
        for call in (lambda: x + y, lambda: f(x, y), lambda: snp.maximum(x, y)):
            with pytest.raises(
                errors.ShapeError, match=r"shapes \(2, 3\), \(3,\).* differ in rank"
            ):
                call()
        np.testing.assert_array_equal(x + y[None] + 1.0, np.full((2, 3), 3))
        np.testing.assert_array_equal(snp.where(x > 0, y, 0), np.ones((2, 3)))  # as in JAX
    with (
        spmd.numpy_rank_promotion("warn"),
        pytest.warns(UserWarning, match="add: operands of shapes"),
    ):
        x + y
    np.testing.assert_array_equal(f(x, y), x)
    with pytest.raises(errors.ArgumentError, match="must be one of allow, warn, raise"):
        spmd.config.update("numpy_rank_promotion", "never")


def pairs_of_operands(jnp):
    f, i, b = jnp.ones(2, np.float32), jnp.ones(2, np.int32), jnp.ones(2, bool)
    half = jnp.ones(2, jnp.bfloat16)
    return [(x, y) for x in (f, i, b, half) for y in (f, i, b, half, True, 1, 1.0)]


def test_strict_promotion_forbids_what_jax_forbids():
    jax = pytest.importorskip("jax")
    pairs = zip(pairs_of_operands(snp), pairs_of_operands(jax.numpy), strict=True)
    for ours, theirs in pairs:
        with jax.numpy_dtype_promotion("strict"):
            try:
                want = jax.numpy.add(*theirs).dtype
            except ValueError:
                want = None
        with spmd.numpy_dtype_promotion("strict"):
            if want is None:
                with pytest.raises(errors.DtypeError, match="numpy_dtype_promotion is 'strict'"):
                    snp.add(*ours)
            else:
                assert snp.add(*ours).dtype == want


def test_debug_infs_finds_infinities():
    with spmd.debug_infs():
        with pytest.raises(FloatingPointError, match=r"div made an inf at .*test_settings"):
            spmd.jit(lambda x: 1 / x)(0.0)
        with pytest.raises(FloatingPointError, match="an inf among its arguments"):
            spmd.jit(lambda x: x * 2)(np.inf)
        assert np.isnan(spmd.jit(lambda x: snp.log(x))(-1.0))
        with pytest.raises(FloatingPointError, match=r"exp made an inf on cpu:1 \(i=1\)"):
            spmd.pmap(lambda x: snp.exp(x) - 1, axis_name="i")(np.array([1.0, 100.0]))


def test_live_arrays_are_those_that_are_not_freed():
    x = spmd.jit(lambda x: x + 1)(snp.ones(3))
    sharded = spmd.pmap(lambda x: x)(np.arange(4.0))
    ids = {id(a) for a in spmd.live_arrays()}
    assert id(x) in ids and id(sharded) in ids
    assert not any(id(piece) in ids for piece in sharded.shards)
    x.delete()
    assert id(x) not in {id(a) for a in spmd.live_arrays()}


def test_a_user_context_is_part_of_what_a_program_is_compiled_for():
    traced = []
    context = spmd.make_user_context(default_value=1)

    @spmd.jit
    def f(x):
        traced.append(context.value)
        return x * context.value

    assert [int(f(3)) for _ in range(4)] == [3] * 4  # the last ones by the fast call
    with context(2):
        assert [int(f(3)) for _ in range(4)] == [6] * 4
        with context(5):
            assert int(f(3)) == 15
    assert int(f(3)) == 3
    assert traced == [1, 2, 5]
