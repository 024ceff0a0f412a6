"""Random numbers against JAX: bits exactly, samples to the last bits, under transformations."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax, random
from spmd.base import dtypes
from spmd.base.errors import ShapeError, SpmdError

jax = pytest.importorskip("jax", reason="the oracle of these tests is JAX")
jr = pytest.importorskip("jax.random")

SEED = 1234
LOGITS = np.linspace(0, 3, 20, dtype=np.float32).reshape(4, 5)
P = np.array([0.1, 0.2, 0.3, 0.2, 0.2], np.float32)
# Few successes, many, impossible and unlimited ones: each way through the two methods.
BINOMIAL_N = np.array([3, 50, 50, 1e4, 1e4, 7, -1, np.inf, np.nan, 12], np.float32)
BINOMIAL_P = np.array([0.4, 0.5, 0.97, 1e-4, 0.3, 1, 0.5, 0.3, 0.5, np.nan], np.float32)
BF16 = ml_dtypes.bfloat16


def words(r, keys):
    return np.asarray(r.key_data(keys))


# ---- keys --------------------------------------------------------------------------------------

KEYS = {
    "seed": lambda r: r.key(7),
    "negative": lambda r: r.key(-5),
    "large": lambda r: r.key(2**40 + 3),
    "array": lambda r: r.key(np.uint32(7)),
    "split": lambda r: r.split(r.key(SEED), 5),
    "split-shape": lambda r: r.split(r.key(SEED), (2, 3)),
    "fold": lambda r: r.fold_in(r.key(SEED), 77),
    "fold-array": lambda r: r.fold_in(r.key(SEED), np.int32(-3)),
    "wrap": lambda r: r.wrap_key_data(np.arange(6, dtype=np.uint32).reshape(3, 2)),
}


@pytest.mark.parametrize("name", KEYS)
def test_keys_are_jax_s(name):
    np.testing.assert_array_equal(words(random, KEYS[name](random)), words(jr, KEYS[name](jr)))


def test_raw_keys_stay_raw():
    for f in (lambda r: r.PRNGKey(42), lambda r: r.split(r.PRNGKey(42), 3),
              lambda r: r.fold_in(r.PRNGKey(42), 1)):  # fmt: skip
        ours = f(random)
        assert ours.dtype == np.uint32
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(f(jr)))


def test_typed_keys_are_arrays_of_keys():
    keys = random.split(random.key(0), 4)
    assert keys.shape == (4,) and keys.dtype == dtypes.key_dtype
    np.testing.assert_array_equal(words(random, keys[1:3]), words(random, keys)[1:3])
    assert repr(random.key(0)).startswith("Array((), dtype=key<fry>)")
    assert random.key_impl(keys) == "threefry2x32"


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_bits_are_jax_s(dtype):
    ours = random.bits(random.key(SEED), (3, 5), dtype)
    np.testing.assert_array_equal(ours, jr.bits(jr.key(SEED), (3, 5), dtype))


# ---- samples -----------------------------------------------------------------------------------

EXACT = {
    "uniform": lambda r, k: r.uniform(k, (100,)),
    "uniform-f16": lambda r, k: r.uniform(k, (100,), np.float16),
    "uniform-bf16": lambda r, k: r.uniform(k, (100,), BF16),
    "randint": lambda r, k: r.randint(k, (100,), 3, 100),
    "randint-u8": lambda r, k: r.randint(k, (100,), 0, 256, np.uint8),
    "randint-i16": lambda r, k: r.randint(k, (100,), -5, 9, np.int16),
    "randint-u32": lambda r, k: r.randint(k, (100,), 0, 2**31 - 1, np.uint32),
    "randint-arrays": lambda r, k: r.randint(k, (4, 3), np.array([0, 5, -9]), np.array([1, 7, 99])),
    "randint-empty": lambda r, k: r.randint(k, (10,), 5, 5),
    "randint-all": lambda r, k: r.randint(k, (50,), -(2**31), 2**31 - 1),
    "bernoulli": lambda r, k: r.bernoulli(k, 0.3, (100,)),
    "bernoulli-array": lambda r, k: r.bernoulli(k, np.linspace(0, 1, 7, dtype=np.float32)),
    "bernoulli-high": lambda r, k: r.bernoulli(k, 0.01, (1000,), mode="high"),
    "rademacher": lambda r, k: r.rademacher(k, (50,)),
    "permutation": lambda r, k: r.permutation(k, 100),
    "permutation-rows": lambda r, k: r.permutation(k, np.arange(12).reshape(4, 3)),
    "permutation-columns": lambda r, k: r.permutation(k, np.arange(12).reshape(4, 3), 1),
    "permutation-each": lambda r, k: r.permutation(k, np.arange(60).reshape(20, 3), 0, True),
    "categorical": lambda r, k: r.categorical(k, LOGITS),
    "categorical-shape": lambda r, k: r.categorical(k, LOGITS, axis=0, shape=(50, 5)),
    "categorical-once": lambda r, k: r.categorical(k, LOGITS, shape=(3, 4), replace=False),
    "choice": lambda r, k: r.choice(k, 10, (20,)),
    "choice-p": lambda r, k: r.choice(k, 5, (20,), p=P),
    "choice-once": lambda r, k: r.choice(k, 10, (5,), False),
    "choice-once-p": lambda r, k: r.choice(k, 5, (3,), False, P),
    "choice-axis": lambda r, k: r.choice(k, np.arange(12.0).reshape(4, 3), (2, 2), axis=1),
    "poisson": lambda r, k: r.poisson(k, np.array([0.0, 1.0, 9.0, 30.0, 1000.0])),
    "geometric": lambda r, k: r.geometric(k, np.array([0.02, 0.3, 0.9, 1.0]), (20, 4)),
    "binomial": lambda r, k: r.binomial(k, BINOMIAL_N, BINOMIAL_P, (20, 10)),
    "multinomial": lambda r, k: r.multinomial(k, np.array([5.0, 900.0]), P, shape=(2, 5)),
}

CLOSE = {
    "uniform-bounds": lambda r, k: r.uniform(k, (100,), minval=-2.0, maxval=5.0),
    "normal": lambda r, k: r.normal(k, (300,)),
    "normal-scalar": lambda r, k: r.normal(k),
    "normal-c64": lambda r, k: r.normal(k, (100,), np.complex64),
    "exponential": lambda r, k: r.exponential(k, (100,)),
    "gumbel": lambda r, k: r.gumbel(k, (100,)),
    "gumbel-high": lambda r, k: r.gumbel(k, (100,), mode="high"),
    "laplace": lambda r, k: r.laplace(k, (100,)),
    "logistic": lambda r, k: r.logistic(k, (100,)),
    "cauchy": lambda r, k: r.cauchy(k, (100,)),
    "maxwell": lambda r, k: r.maxwell(k, (30,)),
    "pareto": lambda r, k: r.pareto(k, 2.0, (50,)),
    "rayleigh": lambda r, k: r.rayleigh(k, 2.0, (50,)),
    "weibull": lambda r, k: r.weibull_min(k, 2.0, 3.0, (50,)),
    "truncated": lambda r, k: r.truncated_normal(k, -1.0, 2.0, (100,)),
    "multivariate": lambda r, k: r.multivariate_normal(
        k, np.zeros(3), np.array([[2, 0.3, 0.1], [0.3, 1, 0], [0.1, 0, 3.0]]), (5,)
    ),
    "multivariate-eigh": lambda r, k: r.multivariate_normal(
        k, np.zeros(2), np.array([[2, 0.3], [0.3, 1]]), (5,), method="eigh"
    ),
    "orthogonal": lambda r, k: r.orthogonal(k, 3, (2,)),
    "orthogonal-wide": lambda r, k: r.orthogonal(k, 2, m=4),
    "orthogonal-tall": lambda r, k: r.orthogonal(k, 4, m=2),
    "gamma": lambda r, k: r.gamma(k, np.array([0.3, 1.0, 5.0, 20.0])),
    "loggamma": lambda r, k: r.loggamma(k, 0.01, (10,)),
    "beta": lambda r, k: r.beta(k, 2.0, 3.0, (10,)),
    "dirichlet": lambda r, k: r.dirichlet(k, np.array([1.0, 2.0, 3.0]), (4,)),
    "chisquare": lambda r, k: r.chisquare(k, 3.0, (10,)),
    "t": lambda r, k: r.t(k, 3.0, (10,)),
    "lognormal": lambda r, k: r.lognormal(k, np.array([0.5, 2.0]), (20, 2)),
    "triangular": lambda r, k: r.triangular(k, -1.0, np.array([0.0, 1.5]), 2.0, (20, 2)),
    "wald": lambda r, k: r.wald(k, np.array([0.1, 0.3, 1.0]), (20, 3)),
    "f": lambda r, k: r.f(k, np.full(8, 3.0), np.linspace(2.0, 9.0, 8)),
    "double-sided-maxwell": lambda r, k: r.double_sided_maxwell(k, 1.0, np.array([2.0, 3.0]), (5,)),
    "generalized-normal": lambda r, k: r.generalized_normal(k, 1.5, (10,)),
    "ball": lambda r, k: r.ball(k, 3, shape=(4,)),
}


@functools.cache
def jax_samples():
    """All of JAX's samples from one compiled program, which takes a tenth of the time."""
    key = jr.key(SEED)
    return jax.jit(lambda: {name: f(jr, key) for name, f in {**EXACT, **CLOSE}.items()})()


def as_numpy(x):
    value = np.asarray(x)
    return value.astype(np.float32) if value.dtype.name == "bfloat16" else value


@pytest.mark.parametrize("name", EXACT)
def test_samples_are_jax_s(name, from_jax):
    ours, theirs = EXACT[name](random, random.key(SEED)), from_jax(lambda: jax_samples()[name])
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(as_numpy(ours), as_numpy(theirs))


@pytest.mark.parametrize("name", CLOSE)
def test_samples_are_jax_s_to_rounding(name, from_jax):
    ours, theirs = CLOSE[name](random, random.key(SEED)), from_jax(lambda: jax_samples()[name])
    assert ours.dtype == theirs.dtype
    np.testing.assert_allclose(as_numpy(ours), as_numpy(theirs), rtol=3e-6, atol=1e-6)


def test_raw_keys_draw_the_same():
    raw, typed = random.PRNGKey(SEED), random.key(SEED)
    np.testing.assert_array_equal(random.normal(raw, (5,)), random.normal(typed, (5,)))


def test_parts_of_a_draw_do_not_depend_on_its_shape():
    key = random.key(SEED)
    np.testing.assert_array_equal(random.bits(key, (2, 6)), random.bits(key, (12,)).reshape(2, 6))


# ---- transformations ---------------------------------------------------------------------------


def test_vmap_over_keys_is_a_loop():
    keys = random.split(random.key(SEED), 3)
    draws = (
        lambda k: random.normal(k, (4,)),
        lambda k: random.permutation(k, 6),
        lambda k: random.randint(k, (2,), 0, 9),
        lambda k: random.gamma(k, 2.0, (2,)),
    )
    for f in draws:
        at_once = np.asarray(spmd.vmap(f)(keys))
        one_by_one = np.stack([np.asarray(f(keys[k])) for k in range(3)])
        np.testing.assert_allclose(at_once, one_by_one, rtol=1e-6)
    raw = random.split(random.PRNGKey(SEED), 3)
    at_once = spmd.vmap(lambda k: random.normal(k, (4,)))(raw)
    np.testing.assert_array_equal(at_once, spmd.vmap(lambda k: random.normal(k, (4,)))(keys))


def test_vmap_of_split_and_fold_in():
    key = random.key(SEED)
    folded = spmd.vmap(lambda i: random.fold_in(key, i))(np.arange(4))
    one_by_one = np.stack([words(random, random.fold_in(key, k)) for k in range(4)])
    np.testing.assert_array_equal(words(random, folded), one_by_one)
    nested = spmd.vmap(lambda k: random.split(k, 2))(random.split(key, 3))
    assert nested.shape == (3, 2)


def test_keys_go_through_loops():
    def step(key, _):
        key, fresh = random.split(key)
        return key, random.normal(fresh)

    key = random.key(SEED)
    _, samples = lax.scan(step, key, None, length=4)
    expected = []
    for _ in range(4):
        key, fresh = random.split(key)
        expected.append(random.normal(fresh))
    np.testing.assert_allclose(samples, np.stack([np.asarray(x) for x in expected]), rtol=1e-6)


def test_gradients_go_through_samples():
    key = random.key(SEED)
    grad = spmd.grad(lambda scale: snp.sum(scale * random.normal(key, (10,))))(2.0)
    np.testing.assert_allclose(grad, np.sum(np.asarray(random.normal(key, (10,)))), rtol=1e-5)
    by_bound = spmd.grad(lambda b: snp.sum(random.uniform(key, (10,), maxval=b)))(3.0)
    np.testing.assert_allclose(by_bound, np.sum(np.asarray(random.uniform(key, (10,)))), rtol=1e-5)


@pytest.mark.parametrize("name", ["gamma", "loggamma", "chisquare", "t"])
def test_derivatives_in_the_parameters_of_gamma_are_those_of_jax(name, from_jax):
    a = np.array([0.3, 1.0, 2.7, 40.0], np.float32)
    ours = spmd.grad(lambda a: snp.sum(getattr(random, name)(random.key(7), a)))(a)
    theirs = from_jax(lambda: jax.grad(lambda a: getattr(jr, name)(jr.key(7), a).sum())(a))
    np.testing.assert_allclose(ours, theirs, rtol=3e-5)


def test_the_derivative_of_a_gamma_sample_keeps_its_place_in_the_distribution():
    # P(a, sample(a)) stays, so the sample of a slightly larger parameter is where P is the same.
    special = pytest.importorskip("scipy.special")
    a = np.array([0.3, 2.7, 40.0], np.float32)
    sample = np.asarray(random.gamma(random.key(3), a), np.float64)
    place = special.gammainc(np.float64(a), sample)
    up, down = (special.gammaincinv(np.float64(a) * (1 + h), place) for h in (1e-5, -1e-5))
    by_differences = (up - down) / (2e-5 * np.float64(a))
    ours = spmd.vmap(spmd.grad(lambda a: random.gamma(random.key(3), a)))(a[:1])
    np.testing.assert_allclose(
        spmd.grad(lambda a: snp.sum(random.gamma(random.key(3), a)))(a), by_differences, rtol=1e-3
    )
    assert np.isfinite(ours).all()


def test_moments():
    x = np.asarray(random.normal(random.key(1), (20000,)))
    assert abs(x.mean()) < 0.03 and abs(x.std() - 1) < 0.03
    u = np.asarray(random.uniform(random.key(2), (20000,)))
    assert 0 <= u.min() and u.max() < 1 and abs(u.mean() - 0.5) < 0.01


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: random.normal(0, (3,)), "the key must be a typed key"),
        (lambda: random.normal("k", (3,)), "the key must be made by random.key"),
        (
            lambda: random.normal(random.split(random.key(0)), (3,)),
            "normal accepts a single key, but was given a key array of shape (2,)",
        ),
        (lambda: random.key(1.5), "the seed must be an integer"),
        (lambda: random.key(np.arange(3)), "the seed must be a scalar, got shape (3,)"),
        (lambda: random.uniform(random.key(0), (3,), np.int32), "dtype must be a float"),
        (lambda: random.bits(random.key(0), (3,), np.int32), "dtype must be an unsigned integer"),
        (lambda: random.bernoulli(random.key(0), 1), "the probability p must be a float"),
        (lambda: random.randint(random.key(0), (2,), 0, 1, np.float32), "must be an integer"),
        (
            lambda: random.uniform(random.key(0), (3,), minval=np.zeros(2)),
            "uniform got incompatible shapes",
        ),
        (lambda: random.choice(random.key(0), 3, (5,), False), "5 draws without replacement"),
        (lambda: random.fold_in(random.key(0), -1), "data=-1 does not fit uint32"),
        (lambda: random.key(0) + 1, "keys and numbers do not mix"),
    ],
)
def test_errors_name_what_is_wrong(call, text):
    with pytest.raises(SpmdError) as caught:
        call()
    assert text in str(caught.value)


SAMPLERS = {
    **{
        name: (lambda r, key, dtype, name=name: getattr(r, name)(key, (32,), dtype))
        for name in "uniform normal exponential gumbel laplace logistic cauchy maxwell".split()
    },
    "pareto": lambda r, key, dtype: r.pareto(key, 2.0, (32,), dtype),
    "rayleigh": lambda r, key, dtype: r.rayleigh(key, 2.0, (32,), dtype),
    "weibull_min": lambda r, key, dtype: r.weibull_min(key, 2.0, 3.0, (32,), dtype),
    "lognormal": lambda r, key, dtype: r.lognormal(key, 1.0, (32,), dtype),
    "triangular": lambda r, key, dtype: r.triangular(key, 0.0, 0.5, 1.0, (32,), dtype),
    "wald": lambda r, key, dtype: r.wald(key, 1.0, (32,), dtype),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, dtypes.bfloat16])
def test_eager_and_jit_draw_the_same_bits(dtype):
    key = random.key(3)
    compiled = spmd.jit(lambda key: {n: f(random, key, dtype) for n, f in SAMPLERS.items()})(key)
    wrong = []
    for name, f in SAMPLERS.items():
        found = np.asarray(f(random, key, dtype))
        if found.tobytes() != np.asarray(compiled[name]).tobytes():
            wrong.append(name)
    assert not wrong


@pytest.mark.parametrize("bound", [2**31, 2**40, -(2**31) - 1])
def test_bounds_beyond_the_default_integers_overflow(bound: int):
    with pytest.raises(OverflowError, match=f"={bound} does not fit int32"):
        random.randint(random.key(0), (2,), min(bound, 0), max(bound, 0), np.uint32)
    with spmd.enable_x64(True):
        assert random.randint(random.key(0), (), min(bound, 0), max(bound, 0)).dtype == np.int64


@pytest.mark.parametrize("name", ["astype", "max", "mean", "sum", "sort", "argmax", "dot"])
def test_keys_have_no_arithmetic(name: str):
    keys = random.split(random.key(0))
    arguments = {"astype": (np.uint32,), "dot": (keys,)}.get(name, ())
    with pytest.raises(NotImplementedError):
        getattr(keys, name)(*arguments)


def test_typed_keys_for_xlas_generator():
    key = random.key(3, impl="rbg")
    after, bits = lax.rng_bit_generator(key, (4,))
    words, expected = lax.rng_bit_generator(random.key_data(key), (4,))
    assert after.dtype == key.dtype
    np.testing.assert_array_equal(bits, expected)
    np.testing.assert_array_equal(random.key_data(after), words)
    with pytest.raises(ShapeError, match="must be uint32"):
        lax.rng_bit_generator(random.key(0), (4,))
