"""`debug_key_reuse`: a key that is used twice is found, wherever, and nothing else is."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax, random
from spmd.errors import KeyReuseError
from spmd.experimental import key_reuse
from spmd.experimental.key_reuse import (
    Forward,
    KeyReuseSignature,
    Sink,
    Source,
    assert_consumed,
    assert_unconsumed,
    check_key_reuse,
    consume,
)


@pytest.fixture(autouse=True)
def _checked() -> Iterator[None]:
    with spmd.debug_key_reuse(True):
        yield


ARGUMENTS = {
    "bernoulli": (0.5,),
    "ball": (3,),
    "categorical": (np.zeros(3, np.float32),),
    "choice": (5,),
    "gamma": (2.0,),
    "lognormal": (1.0,),
    "multivariate_normal": (np.zeros(2, np.float32), np.eye(2, dtype=np.float32)),
    "normal": (),
    "permutation": (5,),
    "poisson": (3.0,),
    "randint": ((2,), 0, 5),
    "split": (),
    "uniform": (),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_function_uses_its_key_once(name: str):
    key = random.key(0)
    draw = getattr(random, name)
    draw(key, *ARGUMENTS[name])
    with pytest.raises(KeyReuseError, match="this key was used already, by random"):
        draw(key, *ARGUMENTS[name])


def twice(key):
    return random.normal(key) + random.uniform(key)


normal = spmd.jit(random.normal)
MISTAKES = {
    "jit": lambda: spmd.jit(twice)(random.key(0)),
    "grad": lambda: spmd.grad(lambda x: x * twice(random.key(0)))(1.0),
    "vmap": lambda: spmd.vmap(twice)(random.split(random.key(0), 3)),
    "pmap": lambda: spmd.pmap(twice)(random.split(random.key(0), 4)),
    "scan": lambda: lax.scan(lambda k, _: (k, twice(k)), random.key(0), None, length=2),
    "calls of a jitted function": lambda: (lambda k: (normal(k), normal(k)))(random.key(0)),
    "calls in jit": lambda: spmd.jit(lambda k: normal(k) + normal(k))(random.key(0)),
    "before vmap": lambda: (lambda ks: [spmd.vmap(random.normal)(ks) for _ in range(2)])(
        random.split(random.key(0), 2)
    ),
}


@pytest.mark.parametrize("where", MISTAKES)
def test_a_second_use_is_found(where: str):
    with pytest.raises(KeyReuseError) as caught:
        MISTAKES[where]()
    assert len(re.findall(r"test_key_reuse.py:\d+", str(caught.value))) == 2  # both lines


def test_keys_that_are_split_cloned_or_folded_are_no_reuse():
    def draws(key):
        first, second = random.split(key)
        return random.normal(first) + random.uniform(second)

    for _ in range(3):
        spmd.jit(draws)(random.key(0))
        normal(random.key(1))
    spmd.jit(spmd.grad(lambda x, k: draws(k) * x))(1.0, random.key(0))
    lax.cond(True, random.normal, random.uniform, random.key(0))

    def step(key, _):
        key, fresh = random.split(key)
        return key, random.normal(fresh)

    lax.scan(step, random.key(0), None, length=3)
    key = random.key(0)
    np.testing.assert_array_equal(random.normal(key), random.normal(random.clone(key)))
    key = random.key(0)
    for step_number in range(3):
        random.normal(random.fold_in(key, step_number))


# ---- functions, unrun --------------------------------------------------------------------------

FIRST = np.array([True, False])


def _keys(count: int = 2):
    return random.split(random.key(0), count)


def _two(f):
    return lambda key: (f(key), f(key))


def _step(draw):
    return lambda key: lax.scan(lambda k, _: draw(k), key, None, length=2)


def _fresh_carry(key):
    key, own = random.split(key)
    return key, random.normal(own)


# What the function does to its keys; None if it uses one twice.
SIGNATURES = {
    "draw": (random.normal, KeyReuseSignature(Sink(0))),
    "split": (random.split, KeyReuseSignature(Sink(0), Source(0))),
    "fold_in": (lambda k: random.fold_in(k, 1), KeyReuseSignature(Source(0))),
    "clone": (random.clone, KeyReuseSignature(Source(0))),
    "consume": (consume, KeyReuseSignature(Sink(0), Forward(0, 0))),
    "key_data": (random.key_data, KeyReuseSignature()),
    "new dim": (lambda k: k[None], KeyReuseSignature(Forward(0, 0))),
    "jit": (spmd.jit(random.split), KeyReuseSignature(Sink(0), Source(0))),
    "other generator": (
        lambda k: random.normal(random.wrap_key_data(random.bits(k, 4), impl="rbg")),
        KeyReuseSignature(Sink(0)),
    ),
    "branches": (lambda k: lax.cond(True, *[random.normal] * 2, k), KeyReuseSignature(Sink(0))),
    "a branch": (
        lambda k: lax.cond(True, random.normal, lambda _: np.float32(0), k),
        KeyReuseSignature(Sink(0)),
    ),
    "carry": (_step(_fresh_carry), KeyReuseSignature(Sink(0), Source(0))),
    "checkpoint": (
        lambda k: spmd.grad(spmd.checkpoint(lambda x: lax.sin(x * random.uniform(k))))(1.0),
        KeyReuseSignature(Sink(0)),
    ),
    "twice": (_two(random.normal), None),
    "draw and split": (lambda k: (random.normal(k), random.split(k)), None),
    "closure of jit": (lambda k: _two(lambda _: spmd.jit(lambda: random.bits(k))())(0), None),
    "old carry": (_step(lambda k: (k, random.normal(k))), None),
    "closure of scan": (
        lambda k: lax.scan(lambda c, _: (c, random.normal(k)), 0, None, length=2),
        None,
    ),
    "condition of while": (
        lambda k: lax.while_loop(lambda c: random.normal(k) < c, lambda c: c + 1, 0.0),
        None,
    ),
    "body of while": (
        lambda k: lax.while_loop(lambda c: c[0] < 1, lambda c: (random.normal(c[1]), k), (0.0, k)),
        None,
    ),
    "branch, then draw": (
        lambda k: (lax.cond(True, random.normal, lambda _: np.float32(0), k), random.bits(k)),
        None,
    ),
    "chosen key": (lambda k: (snp.where(True, k, random.key(1)), random.bits(k)), None),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_function_is_checked_without_running(name: str):
    f, expected = SIGNATURES[name]
    key = random.key(0)
    if expected is None:
        with pytest.raises(KeyReuseError):
            check_key_reuse(f, key)
    else:
        assert key_reuse.function_type_signature(f, key) == expected
    assert_unconsumed(key)


def test_slices_use_the_keys_that_they_take():
    def f(keys):
        first = keys[0]
        assert_consumed(keys, FIRST)
        consume(first)
        consume(keys[1])
        assert_consumed(keys)

    check_key_reuse(f, _keys())
    with pytest.raises(KeyReuseError):
        check_key_reuse(lambda keys: (keys[0], keys[:1]), _keys())
    keys = _keys()
    random.bits(keys[0])
    assert_consumed(keys, FIRST)
    with pytest.raises(KeyReuseError):
        spmd.vmap(random.bits)(keys)


def test_assertions_say_what_they_expected():
    with pytest.raises(AssertionError, match="expected the key to be consumed"):
        check_key_reuse(assert_consumed, random.key(0))
    with pytest.raises(AssertionError, match="expected the key not to be consumed"):
        assert_unconsumed(consume(random.key(0)))
    with pytest.raises(AssertionError, match="got False"):
        assert_consumed(_keys(), FIRST)


def test_keys_that_a_program_closes_over_are_used_by_its_call():
    key = random.key(0)
    draw = spmd.jit(lambda: random.bits(key))
    draw()
    for again in (draw, lambda: random.bits(key)):
        with pytest.raises(KeyReuseError):
            again()
    other = random.key(1)
    with pytest.raises(KeyReuseError, match="closes over"):
        lax.scan(lambda c, _: (c, random.bits(other)), 0, None, length=2)


def test_signatures_are_values():
    assert Sink(0, np.array([True, True])) == Sink(0) != Source(0)
    assert hash(Sink(0, FIRST)) == hash(Sink(0, FIRST.copy()))
    assert repr(Sink(0, FIRST)) == "Sink(0, [ True False])"
    with pytest.raises(ValueError, match="Source is immutable"):
        Source(0).idx = 1  # type: ignore[misc]
    both = KeyReuseSignature(Forward(0, 1), Source(0), Sink(1))
    assert repr(both) == "KeyReuseSignature(Sink(1), Source(0), Forward(0, 1))"
    assert both == KeyReuseSignature(Sink(1), Forward(0, 1), Source(0), Source(0))


def test_keys_may_be_reused_without_the_setting():
    with spmd.debug_key_reuse(False):
        key = random.key(0)
        assert random.normal(key) == random.normal(key)
        assert snp.isfinite(twice(key))
