"""Donated arguments: their memory becomes that of results, and of nothing that is still read."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.base.tree import tree_map
from spmd.errors import DeletedError
from spmd.sharding import AxisType, NamedSharding
from spmd.sharding import PartitionSpec as P

# Larger than what is allocated together with other results.
LARGE = 100_000


def places(x):
    """The addresses of an array's shards."""
    return [shard.ptr for shard in x.shards or (x,)]


def pmapped(f, **options):
    return spmd.pmap(f, axis_name="i", **options)


def sharded(f, **options):
    mesh = spmd.make_mesh((4,), ("i",))
    return spmd.jit(spmd.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i")), **options)


@pytest.mark.parametrize("mapped", [pmapped, sharded], ids=["pmap", "jit of shard_map"])
def test_a_mapped_step_writes_over_its_donated_state(mapped):
    step = mapped(lambda x: x * 2 + lax.axis_index("i").astype(np.float32), donate_argnums=0)
    state = mapped(lambda x: x)(np.ones((4, LARGE), np.float32))
    state = step(state)
    seen = set()
    for _ in range(6):  # the general path first, then the closure written for the call
        before = places(state)
        old, state = state, step(state)
        with pytest.raises(DeletedError):
            np.asarray(old)
        seen.update(places(state))
    assert places(state) == before and len(seen) <= 8, "no new memory once the closure is made"
    expected = np.ones((4, LARGE), np.float32)
    for _ in range(7):
        expected = expected * 2 + np.arange(4, dtype=np.float32)[:, None]
    np.testing.assert_array_equal(state, expected)


def test_a_donated_piece_that_is_read_later_stays():
    def f(x):
        total = lax.psum(x, "i")
        return x + 1, total[::-1] + x

    step = pmapped(f, donate_argnums=0)
    x = np.arange(4 * LARGE, dtype=np.float32).reshape(4, LARGE)
    for _ in range(4):
        given = pmapped(lambda x: x)(x)
        one, two = step(given)
        np.testing.assert_array_equal(one, x + 1)
        np.testing.assert_array_equal(two, x.sum(0)[::-1] + x)


@pytest.mark.parametrize("calls", [1, 3], ids=["general", "closure"])
def test_an_array_over_the_same_memory_is_not_overwritten(calls):
    @partial(spmd.jit, donate_argnums=0)
    def f(a, b):
        return a + 1, snp.cumsum(b)[::-1] + b[::-1]

    for _ in range(calls):
        x = snp.arange(float(LARGE)) * 1e-3
        expected = np.asarray(x).copy()
        one, two = f(x, x.copy())
        np.testing.assert_array_equal(one, expected + 1)
        np.testing.assert_allclose(two, np.cumsum(expected)[::-1] + expected[::-1], rtol=1e-4)


@pytest.mark.parametrize("calls", [1, 3], ids=["general", "closure"])
def test_only_the_array_over_the_same_memory_keeps_it(calls):
    @partial(spmd.jit, donate_argnums=0)
    def f(state, other):
        # The end of `state["a"]` is still to be read when its begin would be overwritten.
        return {"a": state["a"] * 2, "b": state["b"] * 3}, (other[::-1] + other)

    for _ in range(calls):
        a, b = snp.arange(float(LARGE)), snp.arange(float(LARGE)) + 1
        expected, place = np.asarray(a).copy(), b.ptr
        out, other = f({"a": a, "b": b}, a.copy())
        np.testing.assert_array_equal(out["a"], expected * 2)
        np.testing.assert_array_equal(out["b"], (expected + 1) * 3)
        np.testing.assert_array_equal(other, expected[::-1] + expected)
        assert out["b"].ptr == place
        del out, other


@pytest.mark.parametrize("calls", [1, 3], ids=["general", "closure"])
def test_an_array_inside_of_a_block_is_not_moved_to_its_begin(calls):
    pair = spmd.jit(lambda x: (x + 1, x * 2))  # small results share one block
    shift = spmd.jit(lambda x: x[::-1] + x, donate_argnums=0)
    given = np.arange(3000, dtype=np.float32)
    for _ in range(calls):
        first, second = pair(given)
        del first
        np.testing.assert_array_equal(shift(second), 2 * (given[::-1] + given))


def test_memory_analysis_counts_what_is_written_over_donated_arguments():
    x = np.ones(LARGE, np.float32)

    def alias(f, **options):
        compiled = spmd.jit(f, **options).trace(x).lower().compile()
        return compiled.memory_analysis().alias_size_in_bytes

    assert alias(lambda x: x + 1) == 0
    assert alias(lambda x: x + 1, donate_argnums=0) == x.nbytes
    assert alias(lambda x: x[:5] + 1, donate_argnums=0) == 0, "no result is as large"


COPIES = {
    "array": snp.array,
    "copy": snp.copy,
    "method": lambda x: x.copy(),
    "asarray": lambda x: snp.asarray(x, copy=True),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "device_put": lambda x: spmd.device_put(x, may_alias=False),
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("size", [3, LARGE])
def test_a_copy_outlives_the_donation_of_what_it_is_a_copy_of(name, size):
    make, step = COPIES[name], spmd.jit(lambda x: (x * 2, x[::-1] + x), donate_argnums=0)
    for k in range(40):  # often enough that calls take every fast path
        x = spmd.jit(lambda n: snp.arange(size) + n)(float(k))
        kept, twice = make(x), make(make(x))
        step(kept if k % 3 == 0 else x)  # either may go
        left = x if k % 3 == 0 else kept
        wanted = np.arange(size, dtype=np.float32) + k
        np.testing.assert_array_equal(left, wanted)
        np.testing.assert_array_equal(twice, wanted)
        with pytest.raises(DeletedError):
            make(kept if k % 3 == 0 else x)


def test_a_copy_of_what_is_still_computed_outlives_its_donation():
    x = np.random.default_rng(0).standard_normal((700, 700), np.float32)
    product = spmd.jit(lambda x: x @ x)
    step = spmd.jit(lambda x: x * 2 @ x, donate_argnums=0)
    wanted = np.asarray(product(x))
    for _ in range(4):
        pending = product(x)
        kept = snp.array(pending)
        step(pending)
        np.testing.assert_array_equal(kept, wanted)


def test_a_copy_over_several_devices_outlives_its_donation():
    step = pmapped(lambda x: x * 2, donate_argnums=0)
    for _ in range(4):
        state = pmapped(lambda x: x + 1)(np.ones((4, LARGE), np.float32))
        kept = spmd.tree.map(snp.copy, {"w": state})
        step(state)
        np.testing.assert_array_equal(kept["w"], np.full((4, LARGE), 2, np.float32))


TWICE = {
    "first": (lambda x, y: x + y, (0,), lambda a: (a, a)),
    "second": (lambda x, y: x + y, (1,), lambda a: (a, a)),
    "both": (lambda x, y: (x * y, x - y), (0, 1), lambda a: (a, a)),
    "in a tree": (
        lambda t: (t["u"] + t["v"], t["u"] - t["v"]),
        (0,),
        lambda a: ({"u": a, "v": a},),
    ),
}


@pytest.mark.parametrize("mapped", [spmd.jit, spmd.pmap])
@pytest.mark.parametrize("f, donated, twice", TWICE.values(), ids=TWICE)
def test_a_donated_array_is_no_other_argument(mapped, f, donated, twice):
    step = mapped(f, donate_argnums=donated)

    def fresh():
        return snp.ones((4, 3)) * 2

    with pytest.raises(
        DeletedError, match=r"are the same array, float32\[4,3\], and .* is donated"
    ):
        step(*twice(fresh()))
    for _ in range(4):  # the fast path too
        step(*tree_map(lambda _: fresh(), twice(0)))
    given = fresh()
    with pytest.raises(DeletedError, match="are the same array"):
        step(*twice(given))
    assert not given.is_deleted()
    if mapped is spmd.jit:
        with pytest.raises(DeletedError, match="are the same array"):
            step.lower(*twice(given)).compile()(*twice(given))


def test_arrays_that_share_memory_may_be_donated_beside_each_other():
    step = spmd.jit(lambda x, y: x + y, donate_argnums=0)
    for _ in range(3):
        given = snp.arange(3.0)
        np.testing.assert_array_equal(step(given, given.copy()), [0, 2, 4])


def over_mesh(f, **options):
    return spmd.jit(spmd.shard_map(f, mesh=MESH, in_specs=P("i"), out_specs=P("i")), **options)


MESH = spmd.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
# A function, and the arguments whose memory a result can take.
USABLE = {
    "all": (lambda x, y: (x + y, x - y), [True, True]),
    "one of two": (lambda x, y: x + y, [True, False]),
    "none": (lambda x, y: ((x + y).ravel()[:1], (x - y).ravel()[:1]), [False, False]),
    "of another shape": (lambda x, y: ((x + y).ravel(), x.ravel()[:1]), [True, False]),
    "of another dtype": (lambda x, y: (y + x).astype(np.int32), [True, False]),
    "of a smaller dtype": (lambda x, y: (y + x).astype(np.int16), [False, False]),
}


@pytest.mark.parametrize("mapped", [spmd.jit, pmapped, over_mesh], ids=["jit", "pmap", "mesh"])
@pytest.mark.parametrize("name", USABLE)
def test_only_what_a_result_can_take_is_deleted(name, mapped):
    f, wanted = USABLE[name]
    step = mapped(f, donate_argnums=(0, 1))
    place = NamedSharding(MESH, P("i"))
    values = [np.arange(32, dtype=np.float32).reshape(4, 8) + k for k in range(2)]
    expected = None
    for call in range(4):  # the fast path too
        given = [x if mapped is spmd.jit else spmd.device_put(x, place) for x in values]
        given = [snp.array(x) if isinstance(x, np.ndarray) else x for x in given]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            out = step(*given)
        assert [x.is_deleted() for x in given] == wanted
        texts = [str(w.message) for w in told if w.category is UserWarning]
        said = mapped is not over_mesh and call == 0 and False in wanted
        assert len(texts) == said and all(
            "Some donated buffers were not usable" in t for t in texts
        )
        for x, value in zip(given, values, strict=True):
            if not x.is_deleted():
                np.testing.assert_array_equal(x, value)
        out = [np.asarray(x) for x in spmd.tree.leaves(out)]
        expected = expected or [np.asarray(x) for x in spmd.tree.leaves(mapped(f)(*values))]
        for one, other in zip(out, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_an_error_names_the_argument_that_is_gone_by_its_path():
    mesh = spmd.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))

    def step(state, rate):
        return {"layer": {"w": state["layer"]["w"] * rate}}

    for place in (None, NamedSharding(mesh, P("i"))):
        state = {"layer": {"w": spmd.device_put(np.ones(8, np.float32), place)}}
        compiled = spmd.jit(step).lower(state, 0.5).compile()
        jitted = spmd.jit(step, donate_argnums=0)
        jitted(state, 0.5)
        for call in (jitted, compiled):
            with pytest.raises(DeletedError, match=r"step.*: state\['layer'\]\['w'\] \(float32\[8"):
                call(state, 0.5)
