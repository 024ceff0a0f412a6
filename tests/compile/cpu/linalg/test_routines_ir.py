"""The native functions that call LAPACK, as text."""

from __future__ import annotations

import re

import pytest

from spmd.compile.cpu.linalg.routines_ir import routine_text
from spmd.compile.kernel.factorization import TRIANGULAR
from spmd.compile.lower.linalg import routines


@pytest.mark.parametrize("char, dtype", [("f", "f32"), ("d", "f64"), ("F", "c64"), ("D", "c128")])
def test_all_bytes_of_the_number_one_are_written(char, dtype):
    """Of complex numbers LAPACK reads an imaginary part, where the stack may hold anything."""
    found = routines(TRIANGULAR, char)
    if found is None:
        pytest.skip("NumPy's library exports no trsm here")
    zeros = re.findall(r"store i64 0, ptr (%\S+)", routine_text(TRIANGULAR, dtype, found))
    assert len(zeros) >= 2  # both halves of 16 bytes
