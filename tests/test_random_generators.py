"""The generators other than the default one, against JAX: bits exactly, under transformations."""

from __future__ import annotations

import importlib
import pickle

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import checkpoints, export, lax, random
from spmd.base.errors import ArgumentError, DtypeError

NAMES = ["threefry2x32", "threefry4x32", "philox2x32", "philox4x32", "rbg", "unsafe_rbg"]
SHAPES = [(), (0,), (5,), (2, 3, 4)]
UINTS = ["uint8", "uint16", "uint32", "uint64"]


def words(x):
    """Keys as their words, and other arrays as they are."""
    return np.asarray(random.key_data(x) if "key" in str(x.dtype) else x)


@pytest.fixture
def assert_same_bits(from_jax):
    """`assert_same_bits(f)`: the leaves of `f(j)` are the same with either library."""

    def check(f):
        def ask():
            jax = importlib.import_module("jax")
            return jax.tree.leaves(f(jax))

        for x, y in zip(spmd.tree.leaves(f(spmd)), from_jax(ask), strict=True):
            x = words(x)
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)

    return check


@pytest.mark.parametrize("name", NAMES)
def test_seeds(name, assert_same_bits):
    seeds = 0, -3, 2**40 + 7
    assert_same_bits(lambda j: [j.random.key(seed, impl=name) for seed in seeds])


@pytest.mark.parametrize("name", NAMES)
def test_bits(name, assert_same_bits):
    def draw(j):
        key = j.random.key(7, impl=name)
        narrow = [j.random.bits(key, shape) for shape in SHAPES]
        with j.enable_x64(True):
            return narrow, [j.random.bits(key, (5,), dtype) for dtype in UINTS]

    assert_same_bits(draw)


@pytest.mark.parametrize("name", NAMES)
def test_keys_from_keys(name, assert_same_bits):
    def made(j):
        key = j.random.key(7, impl=name)
        many = j.random.split(key, (2, 3))
        each = j.vmap(j.random.fold_in)(j.random.split(key, 3), np.arange(3))
        mapped = j.vmap(lambda k: j.random.split(k, 2))(many[0])
        drawn = j.vmap(lambda k: j.random.bits(k, (5,)))(many[0])
        return many, j.random.fold_in(key, 5), each, mapped, drawn, key == many

    assert_same_bits(made)


@pytest.mark.parametrize("name", NAMES)
def test_keys_are_moved_like_other_elements(name, assert_same_bits):
    def moved(j):
        np_ = j.numpy
        keys = j.random.split(j.random.key(1, impl=name), 5)
        picked = j.jit(lambda a, i: a[i])(keys, np.array([1, 4, 1]))
        put = j.jit(lambda a, i: a.at[i].set(a[0]))(keys, 2)
        filled = keys.at[np.array([1, 9])].get(mode="fill")
        chosen = np_.where(np.array([True, False]), keys[:2], keys[3])
        state, drawn = j.lax.scan(
            lambda c, x: (j.random.fold_in(c, x), j.random.bits(c)), keys[0], np.arange(3)
        )
        last = j.lax.while_loop(
            lambda s: s[0] < 3, lambda s: (s[0] + 1, j.random.split(s[1])[0]), (0, keys[0])
        )[1]
        full = np_.full((2,), 7, keys.dtype), np_.full((2,), keys[1]), np_.zeros((2,), keys.dtype)
        return picked, put, filled, chosen, state, drawn, last, full, np_.stack([keys, keys[::-1]])

    assert_same_bits(moved)


@pytest.mark.parametrize("name", NAMES)
def test_raw_keys_are_of_the_default_generator(name, assert_same_bits):
    def made(j):
        with j.default_prng_impl(name):
            key = j.random.PRNGKey(3)
            return key, j.random.split(key, 3), j.random.bits(key, (4,)), j.random.key(1)

    assert_same_bits(made)


@pytest.mark.parametrize("shape", SHAPES)
def test_threefry_before_it_was_partitionable(shape, assert_same_bits):
    def made(j):
        with j.threefry_partitionable(False):
            key = j.random.key(3)
            narrow = [j.random.bits(key, shape, dtype) for dtype in UINTS[:3]]
            return j.random.split(key, shape), narrow, j.jit(lambda k: j.random.bits(k, shape))(key)

    assert_same_bits(made)
    assert_same_bits(lambda j: j.random.split(j.random.key(3)))


@pytest.mark.parametrize("algorithm", [0, 1, 2])
@pytest.mark.parametrize("state", [[1, 2, 3, 4], [1, 2, 2**32 - 1, 2**32 - 1]])
def test_rng_bit_generator(algorithm, state, assert_same_bits):
    state = np.array(state, np.uint32)
    cases = [(shape, "uint32") for shape in (*SHAPES, (4, 3), (3, 3))]
    cases += [((5,), dtype) for dtype in UINTS]

    def draw(j):
        with j.enable_x64(True):
            kind = j.lax.RandomAlgorithm(algorithm)
            return [j.lax.rng_bit_generator(state, *case, kind) for case in cases]

    assert_same_bits(draw)


def test_rng_bit_generator_of_many_states(assert_same_bits):
    states = np.arange(12, dtype=np.uint32).reshape(3, 4)
    assert_same_bits(lambda j: j.vmap(lambda k: j.lax.rng_bit_generator(k, (5,)))(states))
    assert_same_bits(
        lambda j: j.vmap(lambda k: j.lax.rng_bit_generator(k, (5,)), in_axes=1)(states.T)
    )
    with pytest.raises(DtypeError):
        lax.rng_bit_generator(states[0], (2,), np.int32)


def test_rng_uniform_has_a_state():
    draw = spmd.jit(lambda: lax.rng_uniform(np.int32(2), np.int32(9), (50,)))
    first, second = draw(), draw()
    assert first.dtype == np.int32 and bool(((first >= 2) & (first < 9)).all())
    assert not bool((first == second).all())
    with pytest.raises(ValueError, match="one dtype"):
        lax.rng_uniform(np.int32(0), np.float32(1), (2,))


def test_dtypes_of_keys():
    key, other = random.key(0), random.key(0, impl="rbg")
    assert str(key.dtype) == repr(key.dtype) == key.dtype.name == "key<fry>"
    assert other.dtype.name == "key<rbg>" and other.dtype.itemsize == 16
    assert key.dtype == random.key_dtype() != random.key_dtype("rbg") == other.dtype
    assert snp.issubdtype(other.dtype, spmd.dtypes.prng_key)
    assert not snp.issubdtype(other.dtype, np.integer)
    assert snp.empty((2,), other.dtype).dtype is other.dtype
    assert spmd.eval_shape(random.split, other).dtype == other.dtype
    assert pickle.loads(pickle.dumps(other.dtype)) is other.dtype
    assert random.key(1, dtype=other.dtype).dtype == other.dtype
    assert random.key_impl(other) == "rbg"
    assert spmd.device_get(other).dtype == other.dtype
    for wrong in (np.asarray, bool, lambda k: k + 1, lambda k: k.item(), lambda k: k.tolist()):
        with pytest.raises(TypeError):
            wrong(other)
    for wrong in (
        lambda: random.key(0, impl="rbg", dtype="rbg"),
        lambda: random.key(0, impl="philox"),
        lambda: key.astype(np.float32),
    ):
        with pytest.raises(ValueError):
            wrong()


def test_keys_of_any_generator_in_files(tmp_path):
    keys = {name: random.split(random.key(3, impl=name), 3) for name in NAMES}
    checkpoints.save(tmp_path / "run", 1, keys)
    restored = checkpoints.restore(tmp_path / "run", keys)
    assert restored is not None
    back = restored[1]
    for name, found in back.items():
        assert found.dtype == keys[name].dtype
        assert bool((found == keys[name]).all())
    exported = export.export(spmd.jit(lambda k: random.bits(k, (3,))))(keys["rbg"][0])
    again = export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(keys["rbg"][0]), random.bits(keys["rbg"][0], (3,)))


def test_a_generator_of_ones_own():
    def seed(number):
        return snp.stack([snp.uint32(number), snp.uint32(1)]).reshape(2, 1)

    def split(key, shape):
        count = int(np.prod(shape))
        numbers = snp.arange(count, dtype=np.uint32).reshape(shape)
        return key + snp.stack([numbers, numbers], -1)[..., None]

    def bits(key, width, shape):
        return snp.broadcast_to(key[0, 0], shape).astype(f"uint{width}")

    def define(tag):
        return random.define_prng_impl(
            key_shape=(2, 1), seed=seed, split=split, random_bits=bits, tag=tag, name="counting",
            fold_in=lambda key, number: key + snp.uint32(number),
        )  # fmt: skip

    spec, other = define("cnt"), define("cnt")
    key = random.key(5, impl=spec)
    assert key.dtype.name == "key<cnt>" and random.key_data(key).shape == (2, 1)
    assert random.key_impl(key) is spec and random.key(5, impl=other).dtype != key.dtype
    assert random.bits(random.fold_in(key, 3), (2,)).tolist() == [8, 8]
    assert random.bits(random.split(key, 3)[2], (), np.uint8).tolist() == 7
    drawn = spmd.vmap(lambda k: random.bits(k))(random.split(key, 4))
    assert drawn.tolist() == [5, 6, 7, 8]
    assert random.uniform(key, (3,)).shape == (3,)


def test_gamma_draws_each_sample_with_its_own_key(from_jax):
    def ask():
        jax = importlib.import_module("jax")
        return jax.random.gamma(jax.random.key(0, impl="rbg"), 2.5, (50,))

    samples = random.gamma(random.key(0, impl="rbg"), 2.5, (50,))
    assert np.unique(np.asarray(samples)).size == 50
    np.testing.assert_allclose(samples, from_jax(ask), rtol=1e-5)


def test_parameters_that_a_dtype_does_not_hold():
    with pytest.raises(ValueError, match="does not hold"):
        random.pareto(random.key(0), np.array([1, 2], np.float32), dtype=np.float16)
    with pytest.raises(ArgumentError, match="must be a float"):
        random.normal(random.key(0), (2,), np.int32)
