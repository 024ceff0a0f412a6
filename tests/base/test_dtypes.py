"""dtypes: canonical widths, promotion against JAX's table, names and limits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from spmd.base import dtypes
from spmd.base.config import config
from spmd.base.errors import DtypeError

jax = pytest.importorskip("jax", reason="the oracle of these tests is JAX")

ALL = tuple(d for d in dtypes.ANY if not dtypes.is_small(d))  # small ones: tests/jax


@pytest.mark.parametrize("x64", [False, True])
def test_promotion_is_jax_s(x64):
    with config.override("enable_x64", x64), jax.enable_x64(x64):
        for a, b in itertools.product(ALL, ALL):
            assert dtypes.promote_types(a, b) == jax.numpy.promote_types(a, b), (a, b)


@pytest.mark.parametrize("number", [True, 1, 1.0, 1j])
def test_numbers_promote_as_jax_s(number):
    weak = {bool: np.dtype(bool), int: np.int32, float: np.float32, complex: np.complex64}
    mine = (np.dtype(weak[type(number)]), type(number) is not bool)
    for other in (dtypes.canonical(d) for d in ALL):
        dtype, is_weak = dtypes.promote(((other, False), mine))
        theirs = jax.numpy.multiply(jax.numpy.ones((), other), number)
        assert (dtype, is_weak) == (theirs.dtype, theirs.weak_type), other


def jax_array(dtype, weak):
    """A JAX array of any dtype and weak type; only an internal function makes odd weak ones."""
    internal = pytest.importorskip("jax._src.lax.lax")
    return internal._convert_element_type(np.ones((), dtype), dtype, weak)


def test_weak_promotion_is_jax_s():
    pairs = [(dtypes.canonical(d), weak) for d in ALL for weak in (False, True)]
    pairs = [p for p in pairs if not (p[1] and p[0].kind == "b")]
    for a, b in itertools.combinations_with_replacement(pairs, 2):
        if not (a[1] or b[1]):
            continue
        arrays = [jax_array(d, weak) for d, weak in (a, b)]
        wanted = jax.numpy.add(*arrays)
        assert (
            dtypes.promote((a, b)) == dtypes.promote((b, a)) == (wanted.dtype, wanted.weak_type)
        ), (a, b)


@pytest.mark.parametrize(
    ("given", "narrow"),
    [
        (float, "float32"),
        (int, "int32"),
        (complex, "complex64"),
        (bool, "bool"),
        ("float64", "float32"),
        (np.uint64, "uint32"),
        (">f4", "float32"),
        ("float16", "float16"),
    ],
)
def test_canonical_is_narrow_unless_asked(given, narrow):
    assert dtypes.canonical(given) == np.dtype(narrow)
    with config.override("enable_x64", True):
        assert dtypes.canonical("float64") == np.dtype("float64")


@pytest.mark.parametrize("bad", ["no such", "S3", "datetime64[s]", object])
def test_unsupported_dtypes_are_refused(bad):
    with pytest.raises(DtypeError):
        dtypes.canonical(bad)


def test_keys_and_numbers_do_not_mix():
    key, number = (dtypes.key_dtype, False), (dtypes.float32, False)
    assert dtypes.promote((key, key)) == key
    with pytest.raises(DtypeError, match="keys and numbers do not mix"):
        dtypes.promote((key, number))
    with pytest.raises(DtypeError, match="float0 takes no part"):
        dtypes.promote((number, (dtypes.float0, False)))


def test_dtypes_have_short_and_long_names():
    assert dtypes.short_name(np.dtype("float32")) == "f32"
    assert dtypes.short_name(dtypes.bfloat16) == "bf16"
    assert dtypes.long_name(dtypes.key_dtype) == "key<fry>"
    assert dtypes.long_name(np.dtype("uint8")) == "uint8"


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_classes_are_numpy_s(dtype):
    for kind in (np.floating, np.integer, np.inexact, np.complexfloating, np.number, np.generic):
        assert dtypes.issubdtype(dtype, kind) == jax.numpy.issubdtype(dtype, kind), kind
    assert dtypes.issubdtype(dtypes.key_dtype, dtypes.prng_key)
    assert not dtypes.issubdtype(dtype, dtypes.prng_key)


def test_finfo_and_iinfo_give_the_limits_of_every_dtype():
    assert float(dtypes.finfo(dtypes.bfloat16).eps) == 2**-7
    assert dtypes.iinfo(np.int8).max == 127
    for dtype in dtypes.ORDERED:
        low, high = dtypes.min_value(dtype), dtypes.max_value(dtype)
        assert low.dtype == high.dtype == dtype
        assert low <= np.zeros((), dtype) <= high and low < high  # 0 is the largest int1


def test_parts_of_complex_dtypes():
    assert dtypes.real_of(np.dtype("complex128")) == np.dtype("float64")
    assert dtypes.complex_of(np.dtype("float32")) == np.dtype("complex64")
    assert dtypes.to_inexact(np.dtype("int8")) == np.dtype("float32")
    assert dtypes.tangent_dtype(np.dtype("int8")) == dtypes.float0


def test_result_types_and_sizes_in_bits_are_given():
    from spmd import dtypes as public

    assert public.result_type(1.0, np.int8(2)) == np.float32
    assert public.result_type(np.float16, 1, return_weak_type_flag=True) == (np.float16, False)
    assert public.result_type(1, 2.0, return_weak_type_flag=True) == (np.float32, True)
    assert [public.itemsize_bits(d) for d in (bool, np.int16, public.bfloat16)] == [8, 16, 16]
    kinds = [public.scalar_type_of(x) for x in (True, 1, np.float16(1), np.complex64(1))]
    assert kinds == [bool, int, float, complex]


def test_dtypes_of_one_kind_of_numpy_have_their_own_names():
    assert dtypes.long_name(dtypes.bfloat16) == "bfloat16"
    assert dtypes.long_name(dtypes.float0) == "float0"
    assert {dtypes.long_name(d) for d in dtypes.FLOATING} == {d.name for d in dtypes.FLOATING}
