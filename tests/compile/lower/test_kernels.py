"""Updates of a part: their operand lies where the result goes only if nobody else reads it."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax

X = (np.arange(4096).reshape(64, 64) % 13 - 6).astype(np.float32)

UPDATES = {
    "slice": lambda v: lax.dynamic_update_index_in_dim(v, v[0], 1, 0),
    "set": lambda v: v.at[1].set(v[0]),
    "add": lambda v: v.at[snp.array([1, 3])].add(7),
    "max": lambda v: v.at[:, 1].max(100),
}
# Ways to make a value of X that another equation renames, and two that it has one name only.
MAKERS = {
    "reshaped": lambda x: snp.sort(x.reshape(-1)).reshape(64, 64),
    "sum of reshaped": lambda x: (snp.sort(x.reshape(-1)) + 1).reshape(64, 64),
    "squeezed": lambda x: lax.squeeze(snp.cumsum(x[None], 1), (0,)),
    "named": lambda x: spmd.ad_checkpoint.checkpoint_name(snp.sort(x, 1), "v"),
    "searched": lambda x: snp.searchsorted(snp.sort(x.reshape(-1)), x),
    "plain": lambda x: snp.sort(x, 1),
}


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("maker", MAKERS)
def test_value_before_an_update_is_still_there(maker, update):
    def program(x, read):
        old = MAKERS[maker](x)
        new = UPDATES[update](old)
        return (read(old, new), new)

    readers = {
        "after": lambda old, new: snp.where(old, new, -128),
        "flat": lambda old, new: snp.sort(old.reshape(-1)) + new.reshape(-1),
        "returned": lambda old, new: old.reshape(-1),
    }
    for name, read in readers.items():
        wanted = program(X, read)
        found = spmd.jit(lambda x, read=read: program(x, read))(X)
        for x, y in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(x, y, err_msg=name)
