"""The recycling allocator: sizes, reuse, lifetimes, threads."""

import gc
import itertools

import ml_dtypes
import numpy as np
import pytest

from spmd.compile.native.runtime import allocator
from spmd.compile.native.runtime.allocator import (
    ALIGNMENT,
    LARGE,
    alloc,
    size_class,
    trim,
)
from tests.threads import in_threads


@pytest.fixture(autouse=True)
def empty_lists():
    trim()
    yield
    trim()


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 100, 4096, 4097, 2**20 + 1, 3 * 2**21 + 5])
def test_blocks_are_aligned_and_large_enough(nbytes):
    block = alloc(nbytes)
    assert block.address % ALIGNMENT == 0
    assert block.capacity >= max(nbytes, 1)
    assert block.view((block.capacity,), np.uint8).shape == (block.capacity,)


def test_size_classes_waste_at_most_a_quarter():
    for nbytes in [*range(256, 5000, 7), *(int(1.37**k) for k in range(30, 70))]:
        capacity = size_class(nbytes)
        assert nbytes <= capacity <= 1.25 * nbytes + ALIGNMENT
        assert capacity % ALIGNMENT == 0
        assert size_class(capacity) == capacity


def test_a_freed_block_is_used_again():
    block = alloc(5000)
    address = block.address
    del block
    assert alloc(5001).address == address, "5000 and 5001 bytes are of one class"


def test_live_blocks_do_not_overlap():
    blocks = [alloc(n) for n in (100, 100, 5000, 5000, 70, 2**20, 2**20)]
    spans = sorted((b.address, b.address + b.capacity) for b in blocks)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_a_view_keeps_its_block():
    view = alloc(400).view((10, 10), np.float32)
    part = view[3:5, ::2]
    view[:] = 7
    del view
    gc.collect()
    others = [alloc(400).view((100,), np.float32) for _ in range(20)]
    for other in others:
        other[:] = -1
    assert (part == 7).all()


def test_views_may_have_other_dtypes_and_offsets():
    block = alloc(64)
    block.view((32,), ml_dtypes.bfloat16)[:] = 1.5
    assert (block.view((2, 3), np.uint16, offset=4) == 0x3FC0).all()
    assert block.view((0, 3), np.float64).shape == (0, 3)
    assert block.view((), np.int32).shape == ()


@pytest.mark.parametrize("shape, offset", [((17,), 0), ((16,), 4), ((1,), -4)])
def test_a_view_outside_the_block_is_refused(shape, offset):
    with pytest.raises(ValueError, match="needs"):
        alloc(64).view(shape, np.float32, offset)


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="-1 bytes"):
        alloc(-1)


def test_the_lists_are_bounded():
    small = [alloc(2**16) for _ in range(200)]
    del small
    # Less than a block of this size more: blocks of other sizes may wait too.
    assert allocator.waiting_bytes() < allocator.SMALL_CLASS_LIMIT + 2**16
    trim()
    assert allocator.waiting_bytes() == 0


def test_large_blocks_are_bounded_in_total(monkeypatch):
    monkeypatch.setattr(allocator, "LIMIT", 16 * LARGE)
    blocks = [alloc(5 * LARGE) for _ in range(3)] + [alloc(6 * LARGE) for _ in range(3)]
    del blocks
    assert 10 * LARGE <= allocator.waiting_bytes() <= 16 * LARGE


def test_threads_share_the_lists():
    failures = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        held = []
        for step in range(2000):
            view = alloc(int(rng.integers(1, 3000))).view((16,), np.uint8)
            view[:] = seed
            held.append(view)
            if step % 3:
                old = held.pop(int(rng.integers(len(held))))
                if not (old == seed).all():
                    failures.append(seed)

    in_threads(work, range(4))
    assert not failures


def test_blocks_that_outlive_the_modules_names_are_left_alone(monkeypatch):
    """A process that ends takes the names of modules away before the last arrays go."""
    home = alloc(100).home
    monkeypatch.setattr(allocator, "sys", None)
    allocator.give_back(home, 0)
    assert 0 not in home.free
