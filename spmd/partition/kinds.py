"""Kinds of equations: those of one kind have the same primitive, types and parameters.

Programs repeat equations, in each of their layers and whenever they are compiled again. The
partitioner keeps its findings about one equation for all of its kind: the rule, and the dims that
have to be split alike.
"""

from __future__ import annotations

import functools
from operator import attrgetter
from types import NoneType
from typing import Any, TypeVar

from spmd.base.config import config
from spmd.core.ir import ClosedJaxpr, Eqn
from spmd.core.primitive import Dims, Primitive, no_effects
from spmd.lax.slicing import slice_p
from spmd.partition.halos import Windows, windows_of
from spmd.partition.indexing import INDEXING
from spmd.partition.rules import KEPT, RENAMES, is_row_by_row, level_of, may_split, rule_of
from spmd.partition.strategies.sorting import SORTED

T = TypeVar("T")

# For each label: the dims that have it, as numbers of a cell (operands, then results) and a dim.
Group = tuple[tuple[int, int], ...]
Groups = tuple[Group, ...]

# A dim, by its numbers, that takes axes from another, and what links offer where cells are laid out
# like this.
Offer = tuple[int, int, tuple[Any, ...], tuple[int, int]]
Offers = dict[Any, list[Offer]]

# How many kinds are kept, and of each for how many layouts how it runs.
_MOST = 4096
MOST_WAYS = 64
_MOST_GRIDS = 16


class Kind:
    """The rule of some equations and what follows from it.

    `windows` are those of dims that halos may split, `groups` the dims that should be split alike,
    `ways` how the equations run on parts, by the layouts of operands and results, and `offers`
    which axes propagation spreads, by the sizes of the mesh and then by layouts. `repeats` are the
    `ways` that write nothing but an equation; there are none if other things have a say.
    """

    __slots__ = (
        "groups",
        "is_elementwise",
        "level",
        "offers",
        "repeats",
        "rule",
        "ways",
        "windows",
    )

    def __init__(self, prim: Primitive, rule: Dims | None, windows: Windows | None = None):
        self.rule = rule
        self.windows: Windows = windows or {}
        self.is_elementwise = rule is not None and is_row_by_row(rule)
        self.level = RENAMES if rule is None else level_of(prim, self.is_elementwise)
        self.groups: Groups = () if rule is None else _groups(rule, prim in INDEXING)
        self.ways: dict[Any, Any] = {}
        self.offers: dict[Any, Offers] = {}
        has_one_result = rule is not None and len(rule.results) == 1
        # Of a slice one device may have the rows.
        self.repeats: dict[Any, Any] | None = {} if has_one_result and prim is not slice_p else None

    def offers_over(self, grid: Any) -> Offers:
        """The offers of links of this kind over a mesh, for which `grid` stands."""
        found = self.offers.get(grid)
        if found is None:
            if len(self.offers) >= _MOST_GRIDS:
                self.offers.clear()
            found = self.offers[grid] = {}
        return found

    def keep(self, key: Any, way: T) -> T:
        """Keep how the equations run on parts laid out like this."""
        if len(self.ways) >= MOST_WAYS:
            self.ways.clear()
        self.ways[key] = way
        return way

    def keep_repeat(self, key: Any, found: Any) -> None:
        """Keep how the equations are written again."""
        assert self.repeats is not None
        if len(self.repeats) >= MOST_WAYS:
            self.repeats.clear()
        self.repeats[key] = found


def kind_of(eqn: Eqn) -> Kind:
    """The kind of an equation."""
    params = eqn.params
    try:
        if eqn.prim in KEPT:  # `spec` says all, and the jaxpr is the user's program
            params = {"spec": params["spec"]}
        key = (
            eqn.prim,
            tuple(map(_aval_of, eqn.invars)),
            tuple(map(_aval_of, eqn.outvars)),
            tuple(params.items()),
            config.enable_x64,
        )
        found = _kinds.get(key)
    except TypeError:  # a parameter that has no hash
        return new_kind(eqn)
    if found is None:
        found = new_kind(eqn)
        if _may_be_kept(eqn.prim, params):
            if len(_kinds) >= _MOST:
                _kinds.clear()
            _kinds[key] = found
    return found


_kinds: dict[Any, Kind] = {}
# The types of parameters that hold nothing else.
_VALUES = frozenset((bool, int, float, str, NoneType))
_aval_of = attrgetter("aval")


def new_kind(eqn: Eqn) -> Kind:
    """A kind for this equation alone."""
    windows = windows_of(eqn)
    return Kind(eqn.prim, rule_of(eqn, windows), windows)


def _may_be_kept(prim: Primitive, params: dict[str, Any]) -> bool:
    """Whether no program, function or array of a user's would be kept alive."""
    if not prim.is_own or prim.effects is not no_effects:
        return False
    for value in params.values():
        for x in value if type(value) is tuple else (value,):
            if type(x) not in _VALUES and (isinstance(x, ClosedJaxpr) or callable(x)):
                return False
    return True


@functools.lru_cache(maxsize=_MOST)
def _groups(rule: Dims, is_indexing: bool) -> Groups:
    """The dims of each label that may be split, the first of which get an axis that more would.

    Sorted rows need not be split like those before: another dim often takes the axis for less.
    Where rows of a table are looked up, the split of the indices comes first: it is that of data,
    on which the rest of a program works, and tables are gathered, as weights are.
    """
    found: dict[int, Group] = {}
    for k, labels in enumerate((*rule.operands, *rule.results)):
        for d, label in enumerate(labels):
            if label in found:
                found[label] += ((k, d),)
            elif label != SORTED and may_split(rule, label):
                found[label] = ((k, d),)
    groups = list(found.values())
    if is_indexing:
        groups.sort(key=lambda group: all(k != 1 for k, _ in group))
    return tuple(groups)
