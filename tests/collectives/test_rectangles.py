"""Rectangles against a twin that asks of every element who holds it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd.collectives.rectangles import (
    Copies,
    copies_between,
    elements,
    gaps,
    held,
    interval,
    lacking,
    part_sizes,
)

MESHES = [{"x": 8}, {"x": 4, "y": 2}, {"x": 2, "y": 2, "z": 2}, {"x": 3, "y": 2}, {"x": 1}]
Layout = list[tuple[str, ...]]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[str, int], tuple[int, ...], Layout, Layout]:
    """A mesh, a shape, and two ways to split it."""
    sizes = draw(st.sampled_from(MESHES))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=0, max_size=3)))

    def split() -> Layout:
        found: Layout = [() for _ in shape]
        for axis in draw(st.permutations(list(sizes))):
            d = draw(st.integers(-1, len(shape) - 1))
            if d >= 0:
                found[d] = (*found[d], axis)
        return found

    return sizes, shape, split(), split()


def owned(shape: tuple[int, ...], split: Layout, sizes: dict[str, int]) -> list[np.ndarray]:
    """The twin: the flat numbers of the elements that each device holds, as an array."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    found = []
    for place in np.ndindex(*sizes.values()):
        at = dict(zip(sizes, place, strict=True))
        part = numbers
        for d, axes in enumerate(split):
            grid = tuple(sizes[a] for a in axes)
            k = int(np.ravel_multi_index([at[a] for a in axes], grid)) if axes else 0
            rows = math.ceil(shape[d] / math.prod(grid))
            part = np.take(part, np.arange(k * rows, min((k + 1) * rows, shape[d])), d)
        found.append(part)
    return found


@settings(deadline=None, max_examples=200)
@given(layouts())
def test_every_device_gets_what_it_lacks_and_nothing_else(drawn):
    sizes, shape, before, after = drawn
    have, want = (held(shape, split, sizes) for split in (before, after))
    mine, wanted = (owned(shape, split, sizes) for split in (before, after))
    for rectangle, part in zip([*have, *want], [*mine, *wanted], strict=True):
        assert tuple(stop - start for start, stop in rectangle) == part.shape
        assert elements(rectangle) == part.size

    copies = copies_between(have, want)
    for split, parts in ((before, mine), (after, wanted)):
        assert all(np.all(np.array(p.shape) <= part_sizes(shape, split, sizes)) for p in parts)
    received = copies.received()
    for target, part in enumerate(wanted):
        made = np.full(part.shape, -1)
        for copy in copies.items:
            if copy.target == target:
                source = tuple(slice(a, a + n) for a, n in zip(copy.start, copy.sizes, strict=True))
                place = tuple(slice(a, a + n) for a, n in zip(copy.place, copy.sizes, strict=True))
                assert np.all(made[place] == -1), "an element comes twice"
                made[place] = mine[copy.source][source]
        np.testing.assert_array_equal(made, part)
        room = np.zeros(part_sizes(shape, after, sizes), int)
        room[tuple(map(slice, part.shape))] += 1
        for gap in gaps(copies, target, room.shape):
            room[tuple(slice(*rows) for rows in gap)] += 1
        assert np.all(room == 1), "every element is copied or a gap, and not both"
        missing = np.setdiff1d(part, mine[target]).size
        assert received.get(target, 0) == missing == lacking(have[target], want[target])


def test_a_part_is_the_ceiling_of_its_share():
    assert [interval(10, 4, k) for k in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert [interval(2, 4, k) for k in range(4)] == [(0, 1), (1, 2), (2, 2), (2, 2)]


def test_what_several_hold_comes_from_the_same_process_or_from_all_alike():
    sizes = {"x": 2, "y": 4}
    have = held((8,), [("x",)], sizes)
    want = held((8,), [()], sizes)
    copies = copies_between(have, want)
    senders = [copy.source for copy in copies.items if copy.source != copy.target]
    assert sorted(senders) == list(range(8))
    near = copies_between(have, want, places=[0, 0, 1, 1] * 2)
    pairs = [(copy.source, copy.target) for copy in near.items if copy.source != copy.target]
    assert all(source // 2 % 2 == target // 2 % 2 for source, target in pairs)
    assert near.received() == copies.received() == dict.fromkeys(range(8), 4)


def test_copies_are_equal_by_content():
    have, want = (held((8,), [axes], {"x": 4, "y": 2}) for axes in (("x",), ("y",)))
    one, other = copies_between(have, want), copies_between(have, want)
    assert one == other and hash(one) == hash(other) and one != Copies(one.items[1:])
    assert str(one).startswith(f"{len(one.items)} rectangles")


@pytest.mark.parametrize("axes", [(), ("x",), ("x", "y")])
def test_nothing_moves_between_equal_layouts(axes):
    have = held((16, 3), [axes, ()], {"x": 2, "y": 2})
    copies = copies_between(have, have)
    assert not copies.received() and all(c.source == c.target for c in copies.items)
