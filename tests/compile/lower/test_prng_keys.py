"""Raw keys in compiled programs: words become keys and back where they lie, without Python."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax, random

KEY = random.PRNGKey(7)
KEYS = random.split(KEY, 5)


def steps(key, x):
    """A loop as trainers write it: a raw key is split in every round."""

    def step(carry, _):
        key, x = carry
        key, fresh = random.split(key)
        return (key, x + random.normal(fresh, x.shape)), key

    return lax.scan(step, (key, x), None, length=3)


PROGRAMS = {
    "draw": (lambda k: random.normal(k, (4, 3)), (KEY,)),
    "split": (lambda k: random.split(k, 6), (KEY,)),
    "fold_in": (lambda k, i: random.fold_in(k, i), (KEY, np.uint32(3))),
    "loop": (steps, (KEY, np.zeros(5, np.float32))),
    "many keys": (lambda ks: spmd.vmap(lambda k: random.uniform(k, (2,)))(ks), (KEYS,)),
    "no keys": (lambda ks: spmd.vmap(random.normal)(ks), (np.zeros((0, 2), np.uint32),)),
    "words of typed keys": (lambda k: random.key_data(random.split(k, 3)), (random.key(1),)),
    "there and back": (lambda k: random.key_data(random.wrap_key_data(k)) + k, (KEY,)),
    "words that are computed": (lambda k, n: random.normal(k ^ n), (KEY, np.uint32(9))),
    "a part of the words": (lambda ks: random.normal(ks[2]) + ks[1, 0], (KEYS,)),
    "words in a concatenation": (
        lambda k: snp.concatenate([random.key_data(random.key(3)), random.split(k, 2)[1]]),
        (KEY,),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_step_returns_to_python(name, capsys):
    f, args = PROGRAMS[name]
    assert not spmd.debug.show(f)(*args).host_steps
    with spmd.disable_jit():
        want = spmd.tree.leaves(f(*args))
    jitted = spmd.jit(f)
    for _ in range(2):
        for a, b in zip(spmd.tree.leaves(jitted(*args)), want, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_donated_key_makes_room_for_its_successor():
    split = spmd.jit(lambda k: random.split(k)[0], donate_argnums=0)
    key = random.PRNGKey(3)
    want = random.split(random.PRNGKey(3))[0]
    np.testing.assert_array_equal(split(key), want)
