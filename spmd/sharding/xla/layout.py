"""`Layout` and `Format`: the order of an array's dims in memory, with a sharding or without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from spmd.base.errors import ArgumentError, ShapeError
from spmd.sharding.named import Sharding


class AutoLayout:
    """`Layout.AUTO`, which leaves the order of the dims to the compiler: it is row-major."""

    def __repr__(self) -> str:
        return "AUTO"


class Layout:
    """The order of an array's dims in memory, from the slowest to the fastest.

    Arrays are in row-major order here: `major_to_minor` is (0, 1, ...) for each of them. `tiling`
    and the size of elements below a byte are what JAX says of other devices. `Layout.AUTO` leaves
    the order to the compiler.

    >>> snp.ones((2, 3)).format.layout.major_to_minor
    (0, 1)
    """

    __slots__ = ("major_to_minor", "sub_byte_element_size_in_bits", "tiling")

    AUTO: ClassVar[AutoLayout] = AutoLayout()

    def __init__(
        self,
        major_to_minor: Sequence[int],
        tiling: Sequence[Sequence[int]] | None = None,
        sub_byte_element_size_in_bits: int = 0,
    ):
        self.major_to_minor = tuple(major_to_minor)
        self.tiling = None if tiling is None else tuple(map(tuple, tiling))
        self.sub_byte_element_size_in_bits = sub_byte_element_size_in_bits

    def update(self, **kwargs: Any) -> Layout:
        """Make a layout with other fields, and the rest of this one's."""
        return Layout(**({name: getattr(self, name) for name in self.__slots__} | kwargs))

    def check_compatible_aval(self, aval_shape: Sequence[int]) -> None:
        """Raise a `ShapeError` unless the layout is one of arrays of this shape."""
        if len(self.major_to_minor) != len(aval_shape):
            raise ShapeError(
                f"{self}: major_to_minor names {len(self.major_to_minor)} dims, and an array of "
                f"shape {tuple(aval_shape)} has {len(aval_shape)}"
            )

    def _key(self) -> Any:
        return self.major_to_minor, self.tiling, self.sub_byte_element_size_in_bits

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return (
            f"Layout(major_to_minor={self.major_to_minor}, tiling={self.tiling}, "
            f"sub_byte_element_size_in_bits={self.sub_byte_element_size_in_bits})"
        )


class Format:
    """A `Layout`, or None, together with a sharding: how an array lies in memory, and where.

    Raises `ArgumentError` if `layout` is no layout or `sharding` no sharding, and for a layout
    without a sharding.
    """

    __slots__ = ("layout", "sharding")

    def __init__(self, layout: Layout | AutoLayout | None = None, sharding: Sharding | None = None):
        if not (layout is None or isinstance(layout, Layout | AutoLayout)):
            raise ArgumentError(
                f"Format: layout must be a Layout, Layout.AUTO or None, got {layout!r} of type "
                f"{type(layout).__name__}"
            )
        if not (sharding is None or isinstance(sharding, Sharding)):
            raise ArgumentError(
                f"Format: sharding must be a Sharding or None, got {sharding!r} of type "
                f"{type(sharding).__name__}"
            )
        if isinstance(layout, Layout) and sharding is None:
            raise ArgumentError(
                f"Format: {layout} has no sharding, which says where an array of this layout lies; "
                "give one, or Layout.AUTO"
            )
        self.layout, self.sharding = layout, sharding

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Format):
            return False
        return self.layout == other.layout and self.sharding == other.sharding

    def __hash__(self) -> int:
        return hash((self.layout, self.sharding))

    def __repr__(self) -> str:
        return f"Format(layout={self.layout}, sharding={self.sharding})"


def without_layout(place: Any) -> Any:
    """The sharding of a `Format`, or `place` itself; an ArgumentError if dims are in disorder."""
    if not isinstance(place, Format):
        return place
    check_order(place.layout)
    return place.sharding


def check_order(layout: Any) -> None:
    """Raise an ArgumentError for a layout in which dims are in disorder."""
    order = layout.major_to_minor if isinstance(layout, Layout) else ()
    if order != tuple(range(len(order))):
        raise ArgumentError(
            f"{layout}: arrays lie in row-major order, {tuple(range(len(order)))}; transpose the "
            "array instead"
        )
