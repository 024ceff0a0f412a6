"""Dtypes for storage: what a program of them becomes, on one device, several, and on the disk."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import spmd
from spmd import errors, lax
from spmd import numpy as snp
from spmd.base import dtypes

ALL = sorted(dtypes.SMALL, key=str)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_every_small_dtype_is_stored_and_moved(dtype):
    x = snp.array([[1, 2, 1], [2, 1, 1]]).astype(dtype)
    assert x.dtype == dtype and x.nbytes == 6
    moved = spmd.jit(lambda x: snp.concatenate([x.T, x.T])[np.array([4, 0])])(x)
    np.testing.assert_array_equal(
        moved.astype(np.float32), np.asarray(x).T[[1, 0]].astype(np.float32)
    )
    back = pickle.loads(pickle.dumps(x))
    assert back.dtype == dtype
    np.testing.assert_array_equal(back.astype(np.float32), x.astype(np.float32))


def test_operations_outside_jit_have_the_bits_of_compiled_ones():
    for dtype in ALL:
        x = snp.arange(1, 9).astype(dtype)
        for f in (lambda x: x * x, lambda x: x + x[::-1], snp.sort, lambda x: x @ x, snp.cumsum):
            np.testing.assert_array_equal(
                np.asarray(f(x)).astype(np.float32), np.asarray(spmd.jit(f)(x)).astype(np.float32)
            )


def test_an_operation_computes_wide_and_rounds():
    x = snp.arange(4).astype(snp.float8_e4m3fn)
    text = spmd.jit(lambda x: x * x).lower(x).as_text()
    assert "new_dtype=float32" in text and "new_dtype=float8_e4m3fn" in text
    assert "f32[4] = mul" in text


def test_a_cast_there_and_back_is_no_work():
    x = snp.arange(4).astype(snp.float8_e5m2)
    text = spmd.jit(lambda x: x.astype(np.float32).astype(x.dtype)).lower(x).as_text()
    assert "convert_element_type" not in text


def test_sums_over_devices_of_small_floats():
    x = snp.arange(8).reshape(4, 2).astype(snp.float8_e4m3fn)
    out = spmd.pmap(lambda x: (lax.psum(x, "i"), lax.all_gather(x, "i")), axis_name="i")(x)
    np.testing.assert_array_equal(
        np.asarray(out[0]).astype(np.float32), np.tile(np.array([12, 16], np.float32), (4, 1))
    )
    assert out[1].dtype == snp.float8_e4m3fn and out[1].shape == (4, 4, 2)


def test_small_arrays_over_a_mesh_stay_split():
    mesh = spmd.make_mesh((4,), ("i",), (spmd.sharding.AxisType.Auto,))
    place = spmd.NamedSharding(mesh, spmd.P("i"))
    x = spmd.device_put(snp.arange(8).astype(snp.int4), place)
    for f in (lambda x: x + x, spmd.jit(lambda x: x * 3)):
        out = f(x)
        assert out.sharding.is_equivalent_to(place, 1) and out.dtype == snp.int4


def test_dtypes_know_their_bits():
    assert spmd.dtypes.itemsize_bits(snp.int4) == 4
    assert spmd.dtypes.itemsize_bits(snp.float6_e2m3fn) == 6
    assert snp.issubdtype(snp.int4, np.signedinteger) and not snp.issubdtype(snp.uint4, np.floating)
    assert snp.isdtype(snp.uint2, "unsigned integer") and snp.isdtype(snp.int2, "integral")
    assert snp.isdtype(snp.float8_e5m2, "real floating")
    assert str(spmd.typeof(snp.zeros(2, snp.int4))) == "int4[2]"


def test_what_small_dtypes_are_not_for():
    x = snp.arange(3).astype(snp.int4)
    with pytest.raises(errors.DtypeError, match="clz"):
        lax.clz(x)
    with pytest.raises(errors.TypePromotionError, match="int32, int4 have no common type"):
        snp.add(x, np.int32(1))
    with pytest.raises(ValueError, match="float32, float8_e5m2 have no common type"):
        snp.add(snp.zeros(2), snp.zeros(2, snp.float8_e5m2))
    with pytest.raises(OverflowError, match="holds -8 to 7"):
        snp.int4(8)
