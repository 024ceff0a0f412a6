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


def test_keys_may_be_reused_without_the_setting():
    with spmd.debug_key_reuse(False):
        key = random.key(0)
        assert random.normal(key) == random.normal(key)
        assert snp.isfinite(twice(key))
