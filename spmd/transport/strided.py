"""Rectangles of arrays as bytes in memory: rows of one width at regular distances."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spmd.base.record import record

# Bytes: how often, and how far apart the repetitions are in the source and in the target.
Loop = tuple[int, int, int]


@record
class Strided:
    """`width` bytes from `start` of a source to `place` of a target, repeated by nested `loops`.

    The first loop is the outermost.
    """

    start: int
    place: int
    width: int
    loops: tuple[Loop, ...] = ()

    @property
    def nbytes(self) -> int:
        """All bytes."""
        count = self.width
        for trips, _, _ in self.loops:
            count *= trips
        return count

    def flattened(self, most: int) -> Iterator[Strided]:
        """The same in copies of at most so many loops, the inner ones."""
        if len(self.loops) <= most:
            yield self
            return
        trips, source, target = self.loops[0]
        for k in range(trips):
            start, place = self.start + k * source, self.place + k * target
            yield from Strided(start, place, self.width, self.loops[1:]).flattened(most)

    def packed(self, begin: int) -> Strided:
        """The copy into a dense buffer, where the first byte comes to `begin`."""
        return Strided(self.start, begin, self.width, self._dense(1))

    def unpacked(self, begin: int) -> Strided:
        """The copy out of a dense buffer, where the first byte is at `begin`."""
        return Strided(begin, self.place, self.width, self._dense(2))

    def _dense(self, kept: int) -> tuple[Loop, ...]:
        loops: list[Loop] = []
        nbytes = self.width
        for loop in reversed(self.loops):
            far = loop[kept]
            loops.insert(0, (loop[0], far, nbytes) if kept == 1 else (loop[0], nbytes, far))
            nbytes *= loop[0]
        return _merged(loops)


def strided(
    source: Sequence[int],
    start: Sequence[int],
    target: Sequence[int],
    place: Sequence[int],
    sizes: Sequence[int],
    itemsize: int,
) -> Strided:
    """The copy of a rectangle at `start` of an array of shape `source` to `place` of another.

    >>> strided((4, 6), (1, 2), (2, 3), (0, 0), (2, 3), 4)
    Strided(start=32, place=0, width=12, loops=((2, 24, 12),))
    """
    width, first, goal = itemsize, 0, 0
    near = far = itemsize
    loops: list[Loop] = []
    dims = zip(source, start, target, place, sizes, strict=True)
    for whole, begin, room, at, size in reversed(list(dims)):
        first, goal = first + begin * near, goal + at * far
        if size != 1:
            if not loops and near == far == width:
                width *= size
            else:
                loops.insert(0, (size, near, far))
        near, far = near * whole, far * room
    return Strided(first, goal, width, _merged(loops))


def _merged(loops: Sequence[Loop]) -> tuple[Loop, ...]:
    """Loops of which none repeats what the one inside goes on with."""
    found: list[Loop] = []
    for trips, source, target in reversed(loops):
        if found:
            inner, near, far = found[0]
            if (source, target) == (inner * near, inner * far):
                found[0] = (inner * trips, near, far)
                continue
        found.insert(0, (trips, source, target))
    return tuple(found)
