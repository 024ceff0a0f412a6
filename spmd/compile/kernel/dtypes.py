"""The dtypes of kernels: short names, their NumPy twins, and constants as bit patterns.

Kernel IR names dtypes by short strings ("f32", "bf16", "bool"): they hash fast, print well, and are
the same in every process. Values of f16 and bf16 are *carried* in f32: they are rounded when they
are stored or converted to that dtype, not after each operation. Bools are stored as bytes 0 and 1.
"""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np

from spmd.base.record import record


@record
class DType:
    """A dtype of kernels: `kind` is b(ool), i(nt), u(nsigned), f(loat) or c(omplex)."""

    name: str
    kind: str
    bits: int
    numpy: np.dtype
    carrier: str


def _table() -> dict[str, DType]:
    table = {"bool": DType("bool", "b", 8, np.dtype(np.bool_), "bool")}
    for bits in (8, 16, 32, 64):
        table[f"i{bits}"] = DType(f"i{bits}", "i", bits, np.dtype(f"int{bits}"), f"i{bits}")
        table[f"u{bits}"] = DType(f"u{bits}", "u", bits, np.dtype(f"uint{bits}"), f"u{bits}")
    table["f16"] = DType("f16", "f", 16, np.dtype(np.float16), "f32")
    table["bf16"] = DType("bf16", "f", 16, np.dtype(ml_dtypes.bfloat16), "f32")
    table["f32"] = DType("f32", "f", 32, np.dtype(np.float32), "f32")
    table["f64"] = DType("f64", "f", 64, np.dtype(np.float64), "f64")
    table["c64"] = DType("c64", "c", 64, np.dtype(np.complex64), "c64")
    table["c128"] = DType("c128", "c", 128, np.dtype(np.complex128), "c128")
    return table


DTYPES = _table()
_BY_NUMPY = {dtype.numpy: name for name, dtype in DTYPES.items()}

REAL_OF = {"c64": "f32", "c128": "f64"}
COMPLEX_OF = {"f32": "c64", "f64": "c128"}


def kernel_dtype(dtype: np.dtype) -> str | None:
    """Return the kernel name of a NumPy dtype, or None if kernels do not know it."""
    return _BY_NUMPY.get(np.dtype(dtype))


@cache
def kind(dtype: str) -> str:
    """Return the kind letter (b, i, u, f, c) of a kernel dtype."""
    return DTYPES[dtype].kind


@cache
def itemsize(dtype: str) -> int:
    """Return the bytes of one stored element."""
    return DTYPES[dtype].bits // 8


def to_bits(value: object, dtype: str) -> int:
    """Return the bit pattern of `value` stored as `dtype`, as a non-negative int."""
    stored = np.asarray(value).astype(DTYPES[dtype].numpy)
    return int.from_bytes(stored.tobytes(), "little")


def from_bits(bits: int, dtype: str) -> np.generic:
    """Return the NumPy scalar whose stored bit pattern is `bits`."""
    raw = bits.to_bytes(itemsize(dtype), "little")
    return np.frombuffer(raw, DTYPES[dtype].numpy)[0]
