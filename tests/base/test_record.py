"""Records are what `dataclasses` would make of the same class."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import sys
from dataclasses import dataclass

import pytest

import spmd
from spmd.base.record import Field, field, kept_hash, record


def twins(**options):
    """The same class made by `dataclass` and by `record`."""
    given = {"frozen": True} | options

    def both(cls):
        parts = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
        said = {k: v.described() if isinstance(v, Field) else v for k, v in parts.items()}
        return (
            dataclass(slots=True, **given)(type(cls)(cls.__name__, (), said)),
            record(**options)(type(cls)(cls.__name__, (), dict(parts))),
        )

    return both


@twins()
class Point:
    """Doc."""

    x: int
    y: tuple = (1, 2)
    made: list = field(default_factory=list)
    hidden: int = field(default=3, repr=False, compare=False)
    inner: int = field(default=4, init=False)

    def total(self):
        return self.x + self.hidden


@twins(frozen=False)
class Open:
    x: int
    rest: dict = field(default_factory=dict)


@twins(eq=False)
class ById:
    x: int = 0


@twins()
class Empty:
    pass


@twins()
class Own:
    x: int

    def __hash__(self):
        return 7

    def __repr__(self):
        return "own"


@twins()
class OwnEq:
    x: int

    def __eq__(self, other):
        return True


ALL = [Point, Open, ById, Empty, Own, OwnEq]
EXAMPLES = [
    (Point, (1,)),
    (Point, (1, (2,), [3], 4)),
    (Open, (5,)),
    (ById, ()),
    (Empty, ()),
    (Own, (1,)),
    (OwnEq, (1,)),
]


def outcome(f):
    """What a call gives, or which error."""
    try:
        return f()
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("pair", ALL, ids=lambda p: p[0].__name__)
def test_signatures_slots_and_fields(pair):
    theirs, ours = pair
    parameters = [inspect.signature(cls).parameters.values() for cls in pair]
    assert [p.name for p in parameters[0]] == [p.name for p in parameters[1]]
    assert ours.__slots__ == theirs.__slots__
    assert ours.__match_args__ == theirs.__match_args__
    assert [f.name for f in dataclasses.fields(ours)] == [
        f.name for f in dataclasses.fields(theirs)
    ]


def behaviour(cls, args):
    """All that can be seen of an instance."""
    x, same = cls(*args), cls(*args)
    names = [f.name for f in dataclasses.fields(x)]
    return [
        repr(x),
        x == same,
        x != same,
        x == 5,
        outcome(lambda: hash(x) == hash(same)),
        names and outcome(lambda: setattr(x, names[0], 9)),
        names and outcome(lambda: delattr(x, names[0])),
        outcome(lambda: dataclasses.asdict(x)),
        outcome(lambda: repr(dataclasses.replace(x, x=11))),
        outcome(lambda: cls(1, 2, 3, 4, 5, 6))[0],
        outcome(lambda: cls(nothing=1))[0],
        [getattr(copy.copy(x), name, None) for name in names],
        [getattr(copy.deepcopy(x), name, None) for name in names],
    ]


@pytest.mark.parametrize(("pair", "args"), EXAMPLES)
def test_records_behave_as_dataclasses(pair, args):
    theirs, ours = pair
    assert behaviour(ours, args) == behaviour(theirs, args)


def test_frozen_and_open_records_have_no_other_attributes():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Point[1](1).other = 2
    with pytest.raises(AttributeError):
        Open[1](1).other = 2


def test_each_default_is_made_anew():
    _, cls = Open
    assert cls(1).rest is not cls(1).rest
    assert cls(1, {2: 3}).rest == {2: 3}


def test_one_field_is_compared_as_a_tuple_of_it():
    nan = float("nan")
    theirs, ours = twins()(type("One", (), {"__annotations__": {"x": float}}))
    assert ours(nan) == ours(nan)
    # From Python 3.13 on, dataclasses compare field by field.
    assert (theirs(nan) == theirs(nan)) is (sys.version_info < (3, 13))


def test_records_match_patterns():
    Ours = Point[1]
    match Ours(1, (2,)):
        case Ours(2):
            raise AssertionError
        case Ours(x, y) as found:
            assert (x, y, found.total()) == (1, (2,), 4)


@record
class Importable:
    """At the top of a module, so that it can be pickled."""

    x: int
    y: str = "a"


def test_records_can_be_pickled_and_copied():
    x = Importable(1, "b")
    assert pickle.loads(pickle.dumps(x)) == x
    assert copy.deepcopy([x]) == [x]


def test_a_subclass_may_have_attributes_of_its_own():
    class Longer(Importable):
        def __init__(self, x):
            super().__init__(x)
            self.extra = 1

    made = Longer(3)
    assert (made.x, made.extra, made.y) == (3, 1, "a")
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.x = 4


def test_a_kept_hash_is_computed_once():
    asked = []

    class Part:
        def __hash__(self):
            asked.append(self)
            return 0

    @record
    class Whole:
        part: Part
        size: int = 1
        _hash: int = kept_hash()

    part = Part()
    one, other = Whole(part), Whole(part)
    assert hash(one) == hash(one) == hash((part, 1)) and len(asked) == 2  # by the tuple too
    assert one == other and hash(other) == hash(one) != hash(Whole(part, 2))
    assert repr(one).endswith("size=1)") and dataclasses.replace(one, size=2) == Whole(part, 2)


def records():
    """Every record of spmd that is imported by now."""
    spmd.jit(lambda x: x + 1)(1.0)
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("spmd."):
            for value in vars(module).values():
                if isinstance(value, type) and "__dataclass_fields__" in vars(value):
                    code = getattr(value.__init__, "__code__", None)
                    if code is not None and code.co_filename.startswith("<spmd record"):
                        found[value.__module__, value.__qualname__] = value
    return list(found.values())


def test_the_records_of_spmd_take_what_dataclasses_would_take():
    seen = records()
    assert len(seen) > 80
    for cls in seen:
        fields = [f for f in dataclasses.fields(cls) if f.init]
        parameters = list(inspect.signature(cls).parameters.values())
        assert [p.name for p in parameters] == [f.name for f in fields]
        assert [p.default is p.empty for p in parameters] == [
            f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            for f in fields
        ]
