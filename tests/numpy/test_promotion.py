"""The promotion table, dtype names and weak types: those of JAX, entry by entry."""

from __future__ import annotations

import itertools
import warnings

import ml_dtypes
import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.base.config import config
from spmd.base.errors import DtypeError
from tests.numpy.oracle import jax, jnp

DTYPES = [
    bool, np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int16, np.int32, np.int64,
    ml_dtypes.bfloat16, np.float16, np.float32, np.float64, np.complex64, np.complex128,
]  # fmt: skip
SCALARS = [True, 1, 1.0, 1j]


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
def test_table(x64):
    """All pairs of dtypes and Python numbers, by `result_type`."""
    operands = [*map(np.dtype, DTYPES), *SCALARS]
    with config.override("enable_x64", x64), jax.enable_x64(x64), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrong = [
            (a, b, snp.result_type(a, b), jnp.result_type(a, b))
            for a, b in itertools.product(operands, operands)
            if snp.result_type(a, b) != jnp.result_type(a, b)
        ]
    assert not wrong


def test_weakness_of_sums():
    """All pairs of weak and strong operands, by what `add` gives."""
    strong = [np.zeros((), d) for d in (np.bool_, np.int8, np.uint32, np.int32, np.float16,
                                        ml_dtypes.bfloat16, np.float32, np.complex64)]  # fmt: skip
    for a, b in itertools.product([*strong, *SCALARS], repeat=2):
        ours = spmd.eval_shape(snp.add, a, b)
        theirs = jax.eval_shape(jnp.add, a, b)
        assert (ours.dtype, ours.weak_type) == (theirs.dtype, theirs.weak_type), (a, b)


@pytest.mark.parametrize("call", [
    lambda xp: xp.promote_types("uint8", "int8"),
    lambda xp: xp.promote_types(xp.bfloat16, xp.float16),
    lambda xp: xp.issubdtype(xp.bfloat16, xp.floating),
    lambda xp: xp.issubdtype(np.dtype(np.int32), xp.inexact),
    lambda xp: xp.isdtype(xp.float32, "real floating"),
    lambda xp: xp.isdtype(np.dtype(np.uint8), ("bool", "integral")),
    lambda xp: xp.can_cast(np.int32, np.float32),
    lambda xp: float(xp.finfo(xp.bfloat16).max),
    lambda xp: xp.iinfo(xp.int16).max,
    lambda xp: np.zeros(1, np.float32).dtype == xp.float32,
    lambda xp: np.dtype(xp.bfloat16),
    lambda xp: xp.float32 == np.float32,
    lambda xp: xp.float32 in (np.float16, np.float32),
    lambda xp: isinstance(np.float32(1), xp.float32),
    lambda xp: hash(xp.int32) == hash(np.int32),
    lambda xp: (xp.shape(3.0), xp.ndim(np.ones((2, 3))), xp.size(np.ones((2, 3)), 1)),
    lambda xp: xp.broadcast_shapes((3, 1), (4,), ()),
], ids=range(17))  # fmt: skip
def test_questions_have_jax_s_answers(call):
    assert call(snp) == call(jnp)


def test_dtype_names_make_arrays():
    x = snp.float16(3)
    assert x.dtype == np.float16 and not x.weak_type and float(x) == 3
    assert snp.int32([1.7, 2]).dtype == np.int32
    assert snp.zeros(2, snp.bfloat16).dtype == ml_dtypes.bfloat16


def test_64_bits_are_asked_for_in_vain():
    with pytest.warns(UserWarning, match="dtype float64 was asked for"):
        assert snp.zeros(2, np.float64).dtype == np.float32
    assert snp.zeros(2, float).dtype == np.float32
    with config.override("enable_x64", True):
        assert snp.zeros(2, np.float64).dtype == np.float64
        assert snp.arange(3).dtype == np.int64


def test_numbers_beside_arrays_wrap_as_those_of_jax():
    assert int(snp.add(np.uint8(1), 1000)) == int(jax.numpy.add(np.uint8(1), 1000)) == 233


def test_keys_and_numbers_do_not_mix():
    with pytest.raises(DtypeError, match="keys and numbers do not mix"):
        snp.add(spmd.random.key(0), 1)


def test_containers_with_a_dtype_count_as_arrays_of_it():
    class Named:  # as those of libraries that name dims; it can't be hashed
        dtype = np.dtype(np.float16)
        __hash__ = None

    for n in (snp, jnp):
        assert n.result_type(Named(), np.float32) == np.float32
        assert n.result_type(np.int8(1), Named()) == np.float16


@pytest.mark.parametrize("a", [np.generic, np.number, np.floating, np.signedinteger])
@pytest.mark.parametrize("b", [np.generic, np.number, np.inexact, np.float32])
def test_kinds_of_dtypes_are_kinds_of_others(a, b):
    assert snp.issubdtype(a, b) == jnp.issubdtype(a, b)
