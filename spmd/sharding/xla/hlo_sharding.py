"""`HloSharding` and `OpSharding`: how XLA writes down which device holds which tile of an array.

A tiled one has the numbers of tiles of each dim, and the devices of the tiles in row-major order.
Behind the dims there may be further ones, the subgroups: along them devices hold the same tile, or
terms of a sum. Order of devices that a transposed grid has prints as such: `<=[4,2]T(1,0)`.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.base.errors import ArgumentError

# The sizes of a grid of devices in order, and the permutation that it is read in.
Grid = tuple[tuple[int, ...], tuple[int, ...]]


class OpShardingType(enum.Enum):
    """The kinds of shardings, and of their subgroups."""

    REPLICATED = 0
    MAXIMAL = 1
    TUPLE = 2
    OTHER = 3
    MANUAL = 4
    UNKNOWN = 5
    UNREDUCED = 6

    def __repr__(self) -> str:
        return f"OpSharding_Type.{self.name}"

    __str__ = __repr__


class OpSharding:
    """The record that an `HloSharding` is made from, with fields to be set one by one."""

    Type = OpShardingType

    def __init__(self) -> None:
        self.type = OpShardingType.REPLICATED
        self.tile_assignment_dimensions: Sequence[int] = []
        self.tile_assignment_devices: Sequence[int] = []
        self.iota_reshape_dims: Sequence[int] = []
        self.iota_transpose_perm: Sequence[int] = []
        self.last_tile_dims: Sequence[OpShardingType] = []
        self.replicate_on_last_tile_dim = False
        self.tuple_shardings: Sequence[OpSharding] = []

    def clone(self) -> OpSharding:
        """Make another record with the same fields."""
        made = OpSharding()
        vars(made).update(vars(self))
        return made


class HloSharding:
    """An immutable sharding in XLA's words; its class methods make one."""

    __slots__ = ("_devices", "_dims", "_iota", "_kind", "_subgroups")

    def __init__(
        self,
        kind: OpShardingType,
        dims: Sequence[int] = (),
        devices: Sequence[int] = (),
        subgroups: Sequence[OpShardingType] = (),
        iota: Grid | None = None,
    ):
        self._kind = kind
        self._dims = tuple(int(n) for n in dims)
        self._devices = tuple(int(d) for d in devices)
        self._subgroups = tuple(subgroups)
        self._iota = iota
        tiles = int(np.prod(self._dims, dtype=np.int64))
        if kind is OpShardingType.OTHER and tiles != len(self._devices):
            raise ArgumentError(
                f"HloSharding: tiles {list(self._dims)} are for {tiles} devices, and "
                f"{len(self._devices)} are given"
            )

    @staticmethod
    def replicate() -> HloSharding:
        """Make the sharding of arrays that every device holds whole."""
        return HloSharding(OpShardingType.REPLICATED)

    @staticmethod
    def manual() -> HloSharding:
        """Make the sharding of arrays that a program lays out itself."""
        return HloSharding(OpShardingType.MANUAL)

    @staticmethod
    def unreduced() -> HloSharding:
        """Make the sharding of arrays of which every device holds a term of a sum."""
        return HloSharding(OpShardingType.UNREDUCED)

    @staticmethod
    def unknown() -> HloSharding:
        """Make the sharding that says nothing."""
        return HloSharding(OpShardingType.UNKNOWN)

    @staticmethod
    def iota_tile(
        dims: Sequence[int],
        reshape_dims: Sequence[int] = (),
        transpose_perm: Sequence[int] = (),
        subgroup_types: Sequence[OpShardingType] = (),
    ) -> HloSharding:
        """Make tiles `dims` of the devices of a grid `reshape_dims` in order, then transposed."""
        sizes = tuple(reshape_dims) or (int(np.prod(dims, dtype=np.int64)),)
        perm = tuple(transpose_perm) or tuple(range(len(sizes)))
        devices = np.arange(np.prod(sizes, dtype=np.int64)).reshape(sizes).transpose(perm)
        return _tiled(dims, devices.ravel().tolist(), subgroup_types, _shortest(sizes, perm))

    @staticmethod
    def subgroup_with_device_ordering(
        tile_assignment: np.ndarray, subgroup_types: Sequence[OpShardingType] = ()
    ) -> HloSharding:
        """Make tiles of the devices in an array, of which the last dims are subgroups."""
        grid = np.asarray(tile_assignment)
        return _tiled(grid.shape, grid.ravel().tolist(), subgroup_types, None)

    @staticmethod
    def from_proto(record: OpSharding) -> HloSharding:
        """Make the sharding that a record describes."""
        if record.type is OpShardingType.MAXIMAL:
            return HloSharding(record.type, (1,), record.tile_assignment_devices)
        if record.type is not OpShardingType.OTHER:
            return HloSharding(record.type)
        groups = list(record.last_tile_dims)
        if record.replicate_on_last_tile_dim:
            groups = [OpShardingType.REPLICATED]
        dims = record.tile_assignment_dimensions
        if record.iota_reshape_dims:
            grid = record.iota_reshape_dims, record.iota_transpose_perm
            return HloSharding.iota_tile(dims, *grid, groups)
        return _tiled(dims, record.tile_assignment_devices, groups, None)

    @staticmethod
    def from_string(text: str) -> HloSharding:
        """Make the sharding that prints as `text`; raises `ArgumentError` if none does."""
        for kind in OpShardingType:
            if text == f"{{{kind.name.lower()}}}":
                return HloSharding(kind)
        found = re.fullmatch(r"\{maximal device=(\d+)\}", text)
        if found is not None:
            return HloSharding(OpShardingType.MAXIMAL, (1,), (int(found[1]),))
        found = re.fullmatch(_TILED, text)
        if found is None:
            raise ArgumentError(f"HloSharding.from_string: {text!r} is no sharding in XLA's words")
        dims, devices, sizes, perm, replicated, groups = found.groups()
        names = ["REPLICATED"] if replicated else re.findall(r"\w+", (groups or "").upper())
        kinds = [OpShardingType[name] for name in names]
        if devices:
            return _tiled(_numbers(dims), _numbers(devices), kinds, None)
        return HloSharding.iota_tile(_numbers(dims), _numbers(sizes), _numbers(perm or ""), kinds)

    def to_proto(self) -> OpSharding:
        """Make the record that describes this sharding."""
        made = OpSharding()
        made.type = self._kind
        if self._kind in (OpShardingType.OTHER, OpShardingType.MAXIMAL):
            made.tile_assignment_dimensions = list(self._dims)
            if self._iota is None:
                made.tile_assignment_devices = list(self._devices)
            else:
                made.iota_reshape_dims, made.iota_transpose_perm = map(list, self._iota)
            made.replicate_on_last_tile_dim = self.replicate_on_last_tile_dim()
            made.last_tile_dims = self.subgroup_types()
        return made

    def v3_to_v2_sharding(self) -> HloSharding:
        """Give this sharding, which is in the second format of XLA's."""
        return self

    def is_replicated(self) -> bool:
        return self._kind is OpShardingType.REPLICATED

    def is_manual(self) -> bool:
        return self._kind is OpShardingType.MANUAL

    def is_unreduced(self) -> bool:
        return self._kind is OpShardingType.UNREDUCED

    def is_unknown(self) -> bool:
        return self._kind is OpShardingType.UNKNOWN

    def is_maximal(self) -> bool:
        return self._kind is OpShardingType.MAXIMAL

    def is_tiled(self) -> bool:
        return self._kind is OpShardingType.OTHER

    def is_tile_assignment_iota(self) -> bool:
        """Whether the devices are those of a transposed grid in order."""
        return self._iota is not None

    def replicate_on_last_tile_dim(self) -> bool:
        """Whether the only subgroup is of devices that hold the same tile."""
        return self._subgroups == (OpShardingType.REPLICATED,)

    def subgroup_types(self) -> list[OpShardingType]:
        """The kinds of the last dims of the tiles, but for a single one that is replicated."""
        return [] if self.replicate_on_last_tile_dim() else list(self._subgroups)

    def tile_assignment_dimensions(self) -> list[int]:
        """The number of tiles along each dim, and those of the subgroups behind them."""
        return list(self._dims) or [0]

    def tile_assignment_devices(self) -> list[int]:
        """The places of the tiles' devices, in row-major order."""
        return list(self._devices)

    def get_axis_sizes(self) -> list[int]:
        """The sizes of the grid's axes, of which each dim of the tiles has some."""
        found = None if self._iota is None else _axes_of_tiles(self._dims, *self._iota)
        return [] if found is None else found[0]

    def num_devices(self) -> int:
        """The number of devices; 0 if the sharding is for any."""
        return len(self._devices)

    def num_dimensions(self) -> int:
        """The number of dims of the tiles, those of subgroups included."""
        return len(self._dims) or 1

    def tuple_elements(self) -> list[HloSharding]:
        return []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HloSharding) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> Any:
        return self._kind, self._dims, self._devices, self._subgroups

    def __repr__(self) -> str:
        if self._kind is OpShardingType.MAXIMAL:
            return f"{{maximal device={self._devices[0]}}}"
        if self._kind is not OpShardingType.OTHER:
            return f"{{{self._kind.name.lower()}}}"
        if self._iota is None:
            order = _listed(self._devices)
        else:
            sizes, perm = self._iota
            order = f"<=[{_listed(sizes)}]"
            order += f"T({_listed(perm)})" if perm != tuple(range(len(perm))) else ""
        more = ""
        if self.replicate_on_last_tile_dim():
            more = " last_tile_dim_replicate"
        elif self._subgroups:
            more = f" last_tile_dims={{{', '.join(g.name.lower() for g in self._subgroups)}}}"
        return f"{{devices=[{_listed(self._dims)}]{order}{more}}}"


_TILED = (
    r"\{devices=\[([\d,]+)\](?:([\d,]+)|<=\[([\d,]+)\](?:T\(([\d,]+)\))?)"
    r"(?: (last_tile_dim_replicate)| last_tile_dims=\{([\w, ]+)\})?\}"
)


def _tiled(
    dims: Sequence[int],
    devices: Sequence[int],
    groups: Sequence[OpShardingType],
    iota: Grid | None,
) -> HloSharding:
    """A tiled sharding in its shortest form.

    Of each kind of subgroups there is one, those of equal tiles last, and none of one device.
    """
    rank = len(dims) - len(groups)
    places = [k for k in range(rank, len(dims)) if dims[k] > 1]
    places.sort(key=lambda k: _order(groups[k - rank]))
    order = [*range(rank), *places]
    if places != sorted(places):
        whole = [*dims[:rank], *[n for n in dims[rank:] if n > 1]]
        kept = [*range(rank), *sorted(places)]
        turn = [kept.index(k) for k in order]
        devices = np.reshape(devices, whole).transpose(turn).ravel().tolist()
        axes = None if iota is None else _axes_of_tiles(whole, *iota)
        if axes is None:
            iota = None
        else:
            iota = _shortest(axes[0], [a for k in turn for a in axes[1][k]])
    kinds = [groups[k - rank] for k in places]
    parts = [int(n) for n in dims[:rank]]
    found: list[OpShardingType] = []
    for k, kind in zip(places, kinds, strict=True):
        if found and found[-1] is kind:
            parts[-1] *= dims[k]
        else:
            found.append(kind)
            parts.append(dims[k])
    if len(found) == 1 and all(n == 1 for n in dims[:rank]):
        return HloSharding(found[0])
    if iota is None and found == [OpShardingType.REPLICATED]:  # their order says nothing
        devices = np.sort(np.reshape(devices, (-1, parts[-1])), axis=1).ravel().tolist()
    return HloSharding(OpShardingType.OTHER, parts, devices, found, iota)


def _order(kind: OpShardingType) -> tuple[bool, int]:
    """The place of a subgroup among others: devices that hold the same tile come last."""
    return kind is OpShardingType.REPLICATED, kind.value


def _axes_of_tiles(
    dims: Sequence[int], sizes: Sequence[int], perm: Sequence[int]
) -> tuple[list[int], list[list[int]]] | None:
    """The sizes of a grid's axes, cut so that each dim of the tiles has some, and which.

    It is None for a grid that no cuts make so.
    """
    turned = [sizes[k] for k in perm]
    edges = sorted({1, *np.cumprod(dims).tolist(), *np.cumprod(turned).tolist()})
    steps = list(itertools.pairwise(edges))
    if any(b % a for a, b in steps):
        return None

    def inside(numbers: Sequence[int]) -> list[list[int]]:
        ends = np.cumprod(numbers).tolist()
        starts = [1, *ends]
        return [
            [k for k, (a, b) in enumerate(steps) if start <= a and b <= end]
            for start, end in zip(starts, ends, strict=False)
        ]

    of_axis = dict(zip(perm, inside(turned), strict=True))
    in_order = [k for axis in range(len(sizes)) for k in of_axis[axis]]
    number = {k: place for place, k in enumerate(in_order)}
    cut = [steps[k][1] // steps[k][0] for k in in_order]
    return cut, [[number[k] for k in tile] for tile in inside(dims)]


def _shortest(sizes: Sequence[int], perm: Sequence[int]) -> Grid:
    """The smallest grid and permutation of the same order: axes that stay together are one."""
    runs: list[list[int]] = []
    for k in perm:
        if sizes[k] == 1:
            continue
        between = range(runs[-1][-1] + 1, k) if runs else ()
        joins = bool(runs) and k > runs[-1][-1] and all(sizes[j] == 1 for j in between)
        if joins:
            runs[-1].append(k)
        else:
            runs.append([k])
    order = sorted(range(len(runs)), key=lambda r: runs[r][0])
    grid = tuple(int(np.prod([sizes[k] for k in runs[r]])) for r in order)
    return grid or (1,), tuple(order.index(r) for r in range(len(runs))) or (0,)


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def of_axes(
    sizes: dict[Any, int],
    axes_of_dims: Sequence[Sequence[Any]],
    kinds: dict[Any, OpShardingType],
) -> HloSharding:
    """The sharding over a mesh with axes of these sizes: `axes_of_dims` split the dims.

    `kinds` are those of axes along which devices hold something other than the same tile.
    """
    sizes = {axis: n for axis, n in sizes.items() if n > 1}
    place = {axis: k for k, axis in enumerate(sizes)}
    split = [[a for a in axes if a in sizes] for axes in axes_of_dims]
    used = {a for axes in split for a in axes}
    rest = [a for a in sizes if a not in used]
    if not used and not any(a in kinds for a in rest):
        return HloSharding.replicate()
    of = {a: kinds.get(a, OpShardingType.REPLICATED) for a in rest}
    groups = sorted(set(of.values()), key=_order)
    tiles = [*split, *[[a for a in rest if of[a] is kind] for kind in groups]]
    dims = [int(np.prod([sizes[a] for a in axes], dtype=np.int64)) for axes in tiles]
    perm = [place[a] for axes in tiles for a in axes]
    return HloSharding.iota_tile(dims, list(sizes.values()), perm, groups)
