"""Every op record on an emulated GPU, in checked mode, against the CPU."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.base.config import config
from tests.lax import records_linalg
from tests.lax.test_records import assert_close
from tests.lax.test_records_programs import ALL

WANTED = [np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.complex64)]
# For definitions of real numbers too, whose only difference is that nothing is conjugated.
MATRICES = [np.dtype(np.complex64), *WANTED]

pytestmark = [pytest.mark.usefixtures("gpus"), pytest.mark.gpu]


@pytest.mark.parametrize("record", ALL, ids=str)
def test_the_value_is_that_of_the_cpu(record):
    wanted = MATRICES if isinstance(record, records_linalg.Linear) else WANTED
    dtype = next((d for d in wanted if d in record.dtypes), record.dtypes[0])
    operands = record.make(dtype)

    def call(*xs):
        return record.function(lax, *xs)

    found = spmd.jit(call)(*operands)
    assert spmd.tree_util.tree_leaves(found)[0].device.platform == "gpu"
    with config.override("platform", "cpu"):
        wanted = spmd.jit(call)(*operands)
    pairs = zip(*map(spmd.tree_util.tree_leaves, (found, wanted)), strict=True)
    for x, y in pairs:
        assert_close(x, y, getattr(record, "tolerance", 64.0))
