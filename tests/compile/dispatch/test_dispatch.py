"""Calls: what is cached, what is matched, what is said when a call is wrong."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import namedtuple
from unittest.mock import Mock, patch

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.api.compiled import jit
from spmd.api.inspect import make_jaxpr
from spmd.api.reverse import grad
from spmd.api.vectorize import vmap
from spmd.base.config import config
from spmd.base.errors import ArgumentError
from spmd.base.util import MISS, MOST_MATCHERS
from spmd.compile import lazy
from spmd.compile.dispatch.jit import JitFunction, clear_caches
from spmd.compile.executable import select
from spmd.sharding.array import Array, from_numpy
from tests.compile.dispatch.fast_calls import forget, is_fast, written

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def array(value):
    return from_numpy(np.asarray(value))


def counted(f):
    """A function that counts how often it is traced, and the counter."""
    calls = []

    def wrapped(*args, **kwargs):
        calls.append(args)
        return f(*args, **kwargs)

    return wrapped, calls


# ---- the cache ---------------------------------------------------------------------------------


def test_a_function_is_traced_once_per_signature():
    f, calls = counted(lambda x: lax.mul(x, x))
    g = jit(f)
    for _ in range(5):
        g(array(X))
    g(X)
    assert len(calls) == 1
    g(X[0])
    g(X.astype(np.int32))
    assert len(calls) == 3


def test_weak_types_are_part_of_the_signature():
    f, calls = counted(lambda x: lax.mul(x, x))
    g = jit(f)
    assert g(2.0).weak_type and not g(np.float32(2.0)).weak_type
    assert len(calls) == 2


def test_jits_of_one_function_share_their_cache():
    f, calls = counted(lax.sin)
    for _ in range(3):
        jit(f)(X)
    assert len(calls) == 1


def test_jits_of_one_function_share_their_closures():
    def f(x):
        return lax.mul(x, x)

    x = array(X)
    for k in range(4):
        assert is_fast(jit(f), x) == (k >= 2)
    assert not is_fast(jit(f, device=spmd.devices()[0]), x)  # a closure knows nothing of it


def test_closures_are_written_again_after_a_setting_has_changed():
    g, x = jit(lambda x: lax.mul(x, x)), array(X)
    for _ in range(3):
        assert [is_fast(g, x) for _ in range(4)] == [False, False, True, True]
        forget()


def test_clear_cache_traces_again():
    f, calls = counted(lax.sin)
    g = jit(f)
    g(X)
    g.clear_cache()
    g(X)
    clear_caches()
    g(X)
    assert len(calls) == 3


def test_static_arguments_are_part_of_the_signature():
    f, calls = counted(lambda x, n, mode="up": lax.mul(x, np.float32(n if mode == "up" else -n)))
    g = jit(f, static_argnums=1, static_argnames="mode")
    for _ in range(3):
        np.testing.assert_array_equal(g(array(X), 3), 3 * X)
        np.testing.assert_array_equal(g(array(X), 4), 4 * X)
        np.testing.assert_array_equal(g(array(X), 4, mode="down"), -4 * X)
    assert len(calls) == 3


def test_static_values_of_different_types_are_traced_apart():
    f, calls = counted(lambda x, n: lax.mul(x, np.float32(2 if isinstance(n, bool) else 3)))
    g = jit(f, static_argnums=1)
    for _ in range(3):
        np.testing.assert_array_equal(g(X, True), 2 * X)
        np.testing.assert_array_equal(g(X, 1), 3 * X)
    assert len(calls) == 2


def test_a_method_can_be_jitted():
    class Model:
        def __init__(self, scale):
            self.scale = scale

        def __hash__(self):
            return hash(self.scale)

        def __eq__(self, other):
            return self.scale == other.scale

        @jit
        def plain(self):
            return 1

        def call(self, x):
            return lax.mul(x, np.float32(self.scale))

    np.testing.assert_array_equal(jit(Model(2).call)(X), 2 * X)
    assert isinstance(Model.plain, JitFunction)
    fast = JitFunction(Model.call, static_argnums=0)
    np.testing.assert_array_equal(fast(Model(3), X), 3 * X)


# ---- the fast path -------------------------------------------------------------------------------

Point = namedtuple("Point", "x y")


def test_every_kind_of_tree_is_matched():
    def f(tree, *, scale):
        a, b = tree["a"], tree["b"]
        return {"p": Point(lax.add(a[0], a[1]), b.y), "q": [lax.mul(b.x, scale), None]}

    g = jit(f)
    one = array(np.ones(3, np.float32))
    for k in range(6):
        tree = {"b": Point(array(np.full(3, k, np.float32)), one), "a": (one, one), "c": None}
        out = g(tree, scale=2.0 * k)
        assert type(out["p"]) is Point and out["q"][1] is None and list(out) == ["p", "q"]
        np.testing.assert_array_equal(out["p"].x, np.full(3, 2))
        np.testing.assert_array_equal(out["q"][0], np.full(3, 2 * k * k))
    assert is_fast(g, tree, scale=2.0)


def test_another_structure_is_not_matched():
    g = jit(lambda d: lax.add(d["a"], d["b"]) if len(d) == 2 else d["a"])
    one = array(np.ones(3, np.float32))
    for _ in range(3):
        np.testing.assert_array_equal(g({"a": one, "b": one}), np.full(3, 2))
        np.testing.assert_array_equal(g({"a": one}), np.ones(3))
        with pytest.raises(KeyError):
            g({"a": one, "c": one})


def test_a_function_keeps_a_bounded_number_of_fast_calls():
    g = jit(lax.sin)
    alive = []
    for n in range(1, 30):
        x = array(np.zeros(n, np.float32))
        with written() as made:
            for _ in range(3):
                np.testing.assert_allclose(g(x), np.zeros(n))
        alive += [weakref.ref(closure) for closure in made]
        del made[:]
    gc.collect()
    assert len(alive) == 29
    assert sum(ref() is not None for ref in alive) == MOST_MATCHERS
    assert is_fast(g, x)


def test_arguments_that_do_not_match_are_a_silent_miss():
    g = jit(lambda x: lax.mul(x, x))
    with written() as made:
        for _ in range(3):
            g(array(X))
    (match,) = made
    assert match((array(X),), {}) is not MISS
    assert match((X, X), {}) is match((X[0],), {}) is match(("text",), {}) is MISS


def test_numbers_too_large_for_the_dtype_are_a_miss():
    g = jit(lambda n: lax.add(n, 1))
    for _ in range(3):
        assert int(g(5)) == 6
    with pytest.raises(OverflowError):
        g(2**40)


def test_transformations_trace_a_matched_call():
    g = jit(lambda x: lax.mul(lax.sin(x), x))
    for _ in range(3):
        g(array(X))
    wanted = np.cos(X) * X + np.sin(X)
    np.testing.assert_allclose(vmap(vmap(grad(g)))(X), wanted, rtol=1e-5)
    np.testing.assert_allclose(jit(vmap(vmap(grad(g))))(array(X)), wanted, rtol=1e-5)


def test_a_jitted_function_may_close_over_a_tracer():
    def f(x):
        return jit(lambda y: lax.mul(x, y))(x)

    assert float(grad(f)(3.0)) == 6.0
    assert float(jit(grad(f))(3.0)) == 6.0


def test_threads_share_one_function():
    g = jit(lambda x, y: lax.add(lax.mul(x, x), y))
    g(array(X), array(X))
    wrong = []

    def work(k):
        value = array(np.full((3, 4), k, np.float32))
        for _ in range(300):
            if not np.array_equal(np.asarray(g(value, value)), np.full((3, 4), k * k + k)):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


# ---- settings ------------------------------------------------------------------------------------


def test_disable_jit_calls_the_function():
    f, calls = counted(lambda x: lax.mul(x, x))
    g = jit(f)
    for _ in range(3):
        g(array(X))
    with config.override("disable_jit", True):
        g(array(X))
        g(array(X))
    assert [type(a[0]) is Array for a in calls] == [False, True, True]


def test_x64_is_part_of_the_key():
    g = jit(lambda x: lax.mul(x, 2.0))
    for _ in range(3):
        assert g(1.5).dtype == np.float32
    with config.override("enable_x64", True):
        assert g(1.5).dtype == np.float64
    assert g(1.5).dtype == np.float32


def test_log_compiles_says_why(capsys):
    g = jit(lambda x, y: lax.add(x, y))
    with config.override("log_compiles", True):
        g(X, X)
        g(X[0], X[0])
    text = capsys.readouterr().err
    assert "its first call" in text
    assert "x was float32[3,4], is float32[4]" in text


def test_log_compiles_names_static_values_and_tells_how_far_it_is(capsys, monkeypatch):
    monkeypatch.setattr("spmd.compile.native.llvm.modules.SECONDS_BETWEEN_REPORTS", 0.0)
    scale = 1 + np.random.default_rng().random()  # a kernel that no cache has
    g = jit(
        lambda x, n, mode: lax.mul(lax.sin(x), n * scale), static_argnums=1, static_argnames="mode"
    )
    with config.override("log_compiles", True):
        g(X, 3.0, mode="up")
        g(X, 4.0, mode="up")
    text = capsys.readouterr().err
    assert "static values were (argument 1: 3.0, mode='up'), are (argument 1: 4.0" in text
    assert "equations, in 0." in text
    assert "spmd: compiled 1 of 1 kernels in" in text and "the last was kernel_" in text


# ---- errors --------------------------------------------------------------------------------------


def test_a_non_array_argument_is_named():
    with pytest.raises(ArgumentError, match=r"argument cfg\['name'\] is 'abc' of type str"):
        jit(lambda x, cfg: x)(X, {"name": "abc", "n": 1})
    with pytest.raises(ArgumentError, match="take it out of cfg"):
        jit(lambda x, cfg: x)(X, {"name": "abc"})
    with pytest.raises(ArgumentError, match="static_argnames='mode'"):
        jit(lambda x, mode: x)(X, "abc")


def test_an_unhashable_static_argument_is_named():
    with pytest.raises(
        ArgumentError, match=r"static argument 1 \(sizes\) is \[1, 2\] of type list"
    ):
        jit(lambda x, sizes: x, static_argnums=1)(X, [1, 2])


def test_a_call_that_does_not_fit_names_the_function():
    def area(width, height):
        return lax.mul(width, height)

    with pytest.raises(TypeError, match=r"jit\(area\): missing a required argument: 'height'"):
        jit(area)(X)


def test_options_that_do_not_fit_are_refused():
    with pytest.raises(ArgumentError, match="names position 3, but f has 1 positional"):

        def f(x):
            return x

        jit(f, static_argnums=3)
    with pytest.raises(ArgumentError, match="names 'mode', but f has the parameters x"):
        jit(f, static_argnames="mode")
    with pytest.raises(ArgumentError, match="not callable"):
        jit(5)


def test_a_result_that_is_no_array_is_named():
    with pytest.raises(ArgumentError, match="returned 'text' of type str"):
        jit(lambda x: "text")(X)


# ---- stages --------------------------------------------------------------------------------------


def test_stages_trace_lower_and_compile():
    f = jit(lambda x: {"y": lax.sin(x)})
    traced = f.trace(X)
    assert "sin" in str(traced.jaxpr) and traced.out_info["y"].shape == (3, 4)
    lowered = traced.lower()
    assert "fused" in lowered.as_text()
    compiled = f.lower(spmd.ShapeDtypeStruct((3, 4), np.float32)).compile()
    np.testing.assert_allclose(compiled(X)["y"], np.sin(X), rtol=1e-6)
    with pytest.raises(ArgumentError, match=r"argument x is float32\[4\], compiled for"):
        compiled(X[0])
    with pytest.raises(ArgumentError, match="compiled for arguments"):
        compiled(X, X)


# ---- eager ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10, 1 << 17])
def test_eager_operations_give_the_values_of_numpy(size):
    x = np.linspace(0, 1, size, dtype=np.float32)
    np.testing.assert_allclose(lax.add(lax.exp(x), x), np.exp(x) + x, rtol=1e-6)
    np.testing.assert_allclose(lax.reduce_sum(array(x), (0,)), x.sum(), rtol=1e-5)
    assert type(lax.add(array(x), 1.0)) is Array


def test_eager_results_do_not_share_memory_with_numpy_arguments():
    given = X.copy()
    out = lax.reshape(given, (4, 3))
    given[:] = 0
    np.testing.assert_array_equal(out, X.reshape(4, 3))


def test_debug_nans_names_the_line():
    def bad(x):
        y = lax.add(x, np.float32(1))
        return jit(lambda z: lax.log(lax.neg(z)))(lax.exp(y))  # the line of the NaN

    with config.override("debug_nans", True):
        np.testing.assert_allclose(jit(lax.exp)(X), np.exp(X), rtol=1e-6)
        with pytest.raises(FloatingPointError, match=r"jit\(bad\): log made a NaN at .*test_disp"):
            jit(bad)(X)
        with pytest.raises(FloatingPointError, match="among its arguments"):
            jit(lax.exp)(np.array([np.nan, 1.0], np.float32))


def test_debug_nans_looks_at_calls_with_an_argument_elsewhere_that_nothing_reads():
    one, two = spmd.devices()[:2]
    function = jit(lambda x, unused: lax.log(x))
    given = spmd.device_put(-np.ones(3, np.float32), one), spmd.device_put(X, two)
    with config.override("debug_nans", True), pytest.raises(FloatingPointError, match="log made"):
        function(*given)


def test_debug_nans_looks_at_arrays_of_numpy():
    bad = np.array([1.0, np.nan], np.float32)
    for make in (snp.array, snp.asarray, lambda x: snp.array(x.tolist())):
        assert np.isnan(make(bad)[1])
        with (
            config.override("debug_nans", True),
            pytest.raises(FloatingPointError, match=r"array made a NaN at \[1\]"),
        ):
            make(bad)
        with config.override("debug_infs", True):
            assert make(bad).shape == (2,)
    with config.override("debug_nans", True):
        np.testing.assert_array_equal(snp.nan_to_num(bad), [1, 0])  # which take NaNs, and make none
        with pytest.raises(FloatingPointError, match="float32 made a NaN"):
            snp.float32(np.nan)
        assert snp.isnan(bad)[1] and snp.nansum(bad) == 1


def test_debug_prints_kernels_and_passes(capsys):
    with config.override("debug", "134"):
        jit(lambda x: lax.cos(lax.mul(x, np.float32(1.2345))))(X)
    text = capsys.readouterr().err
    assert "spmd: compiling" in text and "after fuse:" in text and "spmd: kernel_" in text


def test_eager_control_flow_gives_the_values_of_python():
    total, rows = lax.scan(lambda c, x: (lax.add(c, x), lax.neg(c)), X[0], X)
    np.testing.assert_allclose(total, X[0] + X.sum(0), rtol=1e-6)
    assert rows.shape == (3, 4)
    assert int(lax.while_loop(lambda n: n < 50, lambda n: n * 2, 3)) == 96
    for flag in (True, False):
        found = lax.cond(flag, lambda x: lax.add(x, x), lambda x: lax.neg(x), X)
        np.testing.assert_array_equal(found, 2 * X if flag else -X)


def test_a_loop_called_again_is_not_compiled_again():
    body = make_jaxpr(lambda c, x: lax.add(c, x))(X[0], X[0])
    params = {"length": 3, "reverse": False, "num_consts": 0, "num_carry": 1, "unroll": 1}
    with patch.object(
        lazy.select, "compile_program", Mock(wraps=select.compile_program)
    ) as compiled:
        for _ in range(3):
            lax.scan_p.bind(X[0], X, jaxpr=body, **params)
    assert compiled.call_count == 1


def test_the_options_device_and_inline_are_respected():
    device = spmd.devices()[1]
    for _ in range(3):
        assert jit(lax.sin, device=device)(array(X)).devices() == {device}
    inner = jit(lambda x: lax.sin(x), inline=True)
    assert [e.prim.name for e in make_jaxpr(lambda x: inner(x))(X).eqns] == ["sin"]
