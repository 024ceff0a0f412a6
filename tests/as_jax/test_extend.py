"""Facades of `jax.extend` and `jax.test_util` against JAX's own."""

from __future__ import annotations

import importlib
from typing import NamedTuple

import jax.extend.random as jax_random
import numpy as np
import pytest

import spmd
from spmd.as_jax import finder, refuse
from spmd.as_jax.jax import monitoring, test_util
from spmd.as_jax.jax._src import public_test_util
from spmd.as_jax.jax.extend import linear_util, random
from spmd.experimental import sparse


@pytest.mark.parametrize("shape", [(4,), (5,), (2, 3), (1,)])
def test_block_cipher(shape):
    key = np.array([3, 5], np.uint32)
    count = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)
    found = random.threefry_2x32(key, count)
    wanted = jax_random.threefry_2x32(tuple(key), count)
    np.testing.assert_array_equal(np.asarray(found), wanted)


@pytest.mark.parametrize("name", ["threefry_prng_impl", "rbg_prng_impl", "unsafe_rbg_prng_impl"])
@pytest.mark.parametrize("seeds", [7, np.arange(3), np.arange(4).reshape(2, 2)])
def test_keys_of_seeds(name: str, seeds):
    found = random.random_seed(seeds, impl=getattr(random, name))
    wanted = jax_random.random_seed(seeds, impl=getattr(jax_random, name))
    words = spmd.random.key_data(found)
    np.testing.assert_array_equal(
        np.asarray(words), importlib.import_module("jax").random.key_data(wanted)
    )
    again = random.seed_with_impl(getattr(random, name), seeds)
    np.testing.assert_array_equal(np.asarray(spmd.random.key_data(again)), np.asarray(words))


def test_derivatives_are_checked():
    args = (np.float32(0.5),)
    test_util.check_jvp(spmd.numpy.sin, lambda p, t: spmd.jvp(spmd.numpy.sin, p, t), args)
    test_util.check_vjp(spmd.numpy.sin, lambda *p: spmd.vjp(spmd.numpy.sin, *p), args)
    with pytest.raises(AssertionError, match="mine: tangent"):
        wrong = lambda p, t: (spmd.numpy.sin(*p), 2 * t[0])  # noqa: E731
        test_util.check_jvp(spmd.numpy.sin, wrong, args, err_msg="mine")
    with pytest.raises(AssertionError, match="vjp: cotangent"):
        wrong = lambda *p: (spmd.numpy.sin(*p), lambda ct: (2 * ct,))  # noqa: E731
        test_util.check_vjp(spmd.numpy.sin, wrong, args)


def test_nearly_equal_values():
    x, y = np.ones(3, np.float32), np.float32([1, 1, 1.001])
    public_test_util.check_close({"a": x, "b": 1}, {"a": spmd.numpy.array(x), "b": 1})
    public_test_util.check_close([x], [y], rtol={"float32": 1e-3, "float64": 1e-6})
    with pytest.raises(AssertionError, match="mine"):
        public_test_util.check_close([x], [y], err_msg="mine")
    with pytest.raises(AssertionError, match="shapes"):
        public_test_util.check_close(x, y[:2], atol=1.0)


def test_listeners_hear_until_they_are_taken_away():
    heard: list = []

    def listen(event, *args, **kwargs):
        heard.append((event, *args))

    monitoring.register_event_listener(callback=listen)
    monitoring.register_scalar_listener(callback=listen)
    monitoring.record_event("a")
    monitoring.record_scalar("b", 2.0)
    monitoring.unregister_event_listener(callback=listen)
    monitoring.record_event("c")
    monitoring.clear_event_listeners()
    monitoring.record_scalar("d", 1.0)
    assert heard == [("a",), ("b", 2.0)]
    with pytest.raises(ValueError, match="not in list"):
        monitoring.unregister_event_listener(callback=listen)


def test_transformations_take_the_function_at_once_or_later():
    def scaled(f, by, *args):
        return by * f(*args)

    fun = linear_util.wrap_init(lambda x: x + 1)
    for wrapped in (
        linear_util.transformation2(scaled)(fun, 3),
        linear_util.transformation2(scaled, fun, 3),
    ):
        assert wrapped.call_wrapped(4) == 15

    def noted(f, store, *args):
        store.store(len(args))
        return f(*args)

    wrapped, store = linear_util.transformation_with_aux2(noted, fun)
    assert wrapped.call_wrapped(1) == 2 and store() == 1
    with pytest.raises(linear_util.StoreException, match="occupied"):
        wrapped.call_wrapped(1)
    wrapped, store = linear_util.transformation_with_aux2(noted, use_eq_store=True)(fun)
    assert wrapped.call_wrapped(1) == wrapped.call_wrapped(1) == 2 and store() == 1
    with pytest.raises(linear_util.StoreException, match="not-equal"):
        store.store(2)


@pytest.mark.parametrize("name", ["coo", "csr", "bcsr", "util", "random", "api"])
def test_modules_of_sparse_are_the_package(name: str):
    assert finder.resolve(f"jax.experimental.sparse.{name}") == sparse.__name__


@pytest.mark.parametrize("module", refuse.REFUSED)
def test_refusals_are_one_sentence(module: str):
    why = refuse.refusal(f"jax.{module}")
    assert why and "\n" not in why and not why.endswith(".")
    refused = refuse.refusing(f"jax.{module}", why)("anything")
    with pytest.raises(NotImplementedError, match="anything: "):
        refused()


def test_registered_classes_are_taken_apart_and_put_together():
    """Libraries read the table `jax._src.tree_util._registry` itself."""
    from jax._src.tree_util import _registry as theirs

    from spmd.as_jax.jax._src.tree_util import _registry as ours

    class Pair(NamedTuple):
        a: int
        b: int

    class Box:
        def __init__(self, x):
            self.x = x

    spmd.tree_util.register_pytree_node(Box, lambda b: ((b.x,), "aux"), lambda _, c: Box(*c))
    for tree in ({"b": 1, "a": 2}, [1, 2], (3,), None):
        children, aux = ours[type(tree)].to_iter(tree)
        wanted, their_aux = theirs[type(tree)].to_iter(tree)
        assert (list(children), aux) == (list(wanted), their_aux)
        assert ours[type(tree)].from_iter(aux, children) == tree
    children, aux = ours[Box].to_iter(Box(5))
    assert (list(children), aux) == ([5], "aux") and ours[Box].from_iter(aux, [6]).x == 6
    for kind in (dict, Pair, float, set):
        assert (kind in ours) == (kind in theirs)
        assert (ours.get(kind) is None) == (theirs.get(kind) is None)
    assert Box in list(ours) and len(ours) == len(list(ours))


# ---- values that processes share -----------------------------------------------------------------

RANKS = """
import threading
import jax
assert jax._src.distributed.global_state.client is None
me, n = jax.process_index(), jax.process_count()
client = jax._src.distributed.global_state.client
client.key_value_set(f"rank/{me}", str(me * me))
met = []
waits = threading.Thread(target=lambda: met.append(client.wait_at_barrier("other thread", 30000)))
waits.start()
# A collective of all ranks beside a barrier that is under way.
total = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")(jax.numpy.ones(1))
waits.join()
client.wait_at_barrier(barrier_id="all", timeout_in_ms=30000)
print("found", client.key_value_dir_get("rank"), int(total[0]), met)
"""


@pytest.mark.mpi
def test_ranks_share_values(mpirun):
    done = mpirun(3, ["-m", "spmd.as_jax", "-c", RANKS], timeout=120)
    assert done.returncode == 0, done.stderr
    found = "found [('rank/0', '0'), ('rank/1', '1'), ('rank/2', '4')] 3 [None]"
    assert done.stdout.count(found) == 3, done.stdout


def test_a_process_alone_has_no_store(run_python):
    code = (
        "import sys, jax; jax.devices(); assert jax._src.distributed.global_state.client is None; "
        "assert 'multiprocessing.connection' not in sys.modules"
    )
    done = run_python(["-m", "spmd.as_jax", "-c", code])
    assert done.returncode == 0, done.stderr


# ---- types ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", [np.ones(2), np.float32, 1.0, spmd.ShapeDtypeStruct((2,), "i4")])
def test_what_has_a_dtype(x):
    import jax._src.typing as theirs

    from spmd.as_jax.jax._src import typing as ours

    assert isinstance(x, ours.SupportsDType) == isinstance(x, theirs.SupportsDType)
    assert set(ours.__all__) <= set(dir(theirs))
