"""Calls whose arrays are read and made by native code, beside their twin in Python."""

from __future__ import annotations

import gc
import resource
import sys
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from pathlib import Path

import numpy as np
import pytest

from spmd import device_put, lax
from spmd.api.compiled import jit
from spmd.base.errors import ArgumentError
from spmd.base.tree import LEAF, TreeDef, register_pytree_node
from spmd.base.util import MISS
from spmd.compile.dispatch import fast_call
from spmd.compile.native.cpython import entry_layout, entry_point
from spmd.compile.native.cpython.object_layout import object_layout, slot_offsets
from spmd.compile.native.program.steps import Copy, Host, Program, Slot
from spmd.compile.native.runtime.allocator import Block, alloc, home_of
from spmd.compile.native.runtime.run import build_program
from spmd.core.aval import typeof
from spmd.sharding.array import Array, from_numpy
from tests.compile.dispatch.fast_calls import written
from tests.compile.native.programs import address
from tests.threads import in_threads

SLOTS = ("aval", "ptr", "owner", "shards", "_numpy", "_sharding")

pytestmark = pytest.mark.skipif(
    object_layout() is None, reason="this interpreter's objects are not laid out as expected"
)


def array(value, dtype=np.float32):
    return from_numpy(np.asarray(value, dtype))


Point = namedtuple("Point", ["x", "y"])
ONE_LEAF, NO_NAMES = TreeDef(tuple, None, (LEAF,)), TreeDef(dict, (), ())
X, Y = array(np.arange(4)), array(np.full(4, 3))


# ---- the layout --------------------------------------------------------------------------------


def test_the_offsets_of_slots_are_found():
    layout = object_layout()
    assert layout is not None
    offsets = [layout.type, *(getattr(layout, n.strip("_")) for n in SLOTS), layout.block_address]
    assert len(set(offsets[:-1])) == 7
    assert all(o % 8 == 0 and 0 <= o < Array.__basicsize__ for o in offsets[:-1])


def test_a_class_that_keeps_a_value_elsewhere_has_no_offsets():
    class Plain:
        pass

    assert slot_offsets(Plain, {"a": 1.5}) is None


# ---- entry points with results -------------------------------------------------------------------


def copier(native=None, **options):
    """An entry point that copies four floats; and the aval of its operand."""
    aval = typeof(X)
    native = native or build_program(Program((16, 16), (Copy(Slot(1), Slot(0), 16),)))
    results = entry_point.Results(
        [entry_point.Result(1, entry_layout.OF_SLAB, aval)], slab=16, slab_word=1
    )
    results = results._replace(**options)
    return entry_point.make_entry_point(
        native, [0, 0], [entry_point.Operand(entry_layout.ARRAY, 0, aval)], (), results
    )


def test_a_result_is_an_array_like_any_other():
    out = copier()(X)
    assert type(out) is Array and out.aval is X.aval and type(out.owner) is bytes
    assert out.shards is None and not out.committed
    np.testing.assert_array_equal(out, X)
    assert np.asarray(out).ctypes.data == out.ptr
    alive = weakref.ref(out)
    assert gc.is_tracked(out)
    del out
    assert alive() is None


def test_arguments_that_do_not_fit_are_a_miss():
    copy = copier()
    deleted, committed = array(np.arange(4)), device_put(X, X.device)
    deleted.delete()
    assert committed.committed
    others = [array(np.arange(5)), array(np.arange(4), np.int32), deleted, committed, None, 1.5]
    for wrong in [*others, np.arange(4, dtype=np.float32), Array()]:
        assert copy(wrong) is MISS
    assert copy() is copy(X, X) is MISS
    flat = copier(given=(ONE_LEAF, NO_NAMES))
    np.testing.assert_array_equal(flat((X,), {}), X)
    for args in [((X,), {"x": X}), ((), {}), ((X, X), {}), (X, {}), ((X,), None), ((X,),)]:
        assert flat(*args) is MISS


def test_a_call_leaves_reference_counts_as_they_were():
    copy, aval = copier(), X.aval
    many = copier(out=ONE_LEAF)

    def counts():
        return [sys.getrefcount(o) for o in (X, aval, X.owner, None, MISS)]

    before = counts()
    for _ in range(1000):
        copy(X)
        many(X)
        copy(None)
    after = counts()
    # None is counted by everybody; where it is immortal it does not move at all.
    assert all(abs(a - b) < 50 for a, b in zip(after, before, strict=True)), (before, after)


def test_an_error_in_the_program_is_raised():
    def fail(device, inputs, outputs):
        raise ZeroDivisionError("in the program")

    steps = (Copy(Slot(1), Slot(0), 16), Host(fail, (), ()))
    copy = copier(build_program(Program((16, 16), steps)))
    for _ in range(3):
        with pytest.raises(ZeroDivisionError, match="in the program"):
            copy(X)


def test_results_may_live_in_blocks_and_in_operands():
    aval = typeof(X)
    native = build_program(Program((16, 16), (Copy(Slot(1), Slot(0), 16),)))
    results = entry_point.Results(
        [entry_point.Result(1, 1, aval), entry_point.Result(0, entry_layout.of_operand(0), aval)],
        TreeDef(tuple, None, (LEAF, LEAF)),
    )
    operands = [
        entry_point.Operand(entry_layout.ARRAY, 0, aval),
        entry_point.Operand(entry_layout.BLOCK, 1),
    ]
    run = entry_point.make_entry_point(native, [0, 0], operands, (), results)
    block = alloc(16)
    made, given = run(X, block)
    assert made.owner is block and made.ptr == block.address
    assert given.owner is X.owner and given.ptr == X.ptr and given is not X
    np.testing.assert_array_equal(made, X)
    assert run(X, X) is MISS


def with_block(steps=(), nbytes=70_016):
    """An entry point that copies four floats into a block of its own; and the block's class."""
    aval, home = typeof(X), home_of(nbytes)
    native = build_program(Program((16, 16), (Copy(Slot(1), Slot(0), 16), *steps)))
    results = entry_point.Results(
        [entry_point.Result(1, entry_layout.of_block(0), aval)], blocks=[(home, 1)]
    )
    return entry_point.make_entry_point(
        native, [0, 0], [entry_point.Operand(entry_layout.ARRAY, 0, aval)], (), results
    ), home


def test_entry_point_makes_blocks():
    copy, home = with_block()
    home.free.clear()
    first, second = copy(X), copy(X)
    assert type(first.owner) is Block and first.owner.home is home and not home.free
    assert first.ptr == first.owner.address != second.ptr
    np.testing.assert_array_equal(second, X)
    place = first.ptr
    before = sys.getrefcount(home), sys.getrefcount(place)
    del first
    assert home.free == [place]
    assert copy(None) is MISS and home.free == [place]  # nothing was made for what does not fit
    for _ in range(100):
        assert copy(X).ptr == place
    assert home.free == [place]
    assert abs(sys.getrefcount(home) - before[0]) < 3
    assert abs(sys.getrefcount(place) - before[1]) < 3


def test_an_error_in_the_program_frees_its_blocks():
    def fail(device, inputs, outputs):
        raise ZeroDivisionError

    copy, home = with_block((Host(fail, (), ()),))
    home.free.clear()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            copy(X)
        gc.collect()
        assert len(home.free) == 1


def test_a_call_raises_while_there_is_no_memory_for_its_block():
    copy, _ = with_block(nbytes=2**30)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**28, hard))
    try:
        with pytest.raises(MemoryError, match=r"no memory for an array of 10\d\d\.\d MiB"):
            copy(X)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    np.testing.assert_array_equal(copy(X), X)


def test_native_code_keeps_the_bound_of_free_lists():
    copy, home = with_block(nbytes=2**16)
    assert type(Block.__del__).__name__ == "method_descriptor"
    held = [copy(X) for _ in range(2 * home.most)]
    del held
    assert len(home.free) == home.most
    del home.free[2:]
    assert Block() is not None  # a block that was never finished


def test_numbers_of_another_type_are_unfit():
    out = np.zeros(1, np.float32)
    native = build_program(Program((4, 4), (Copy(Slot(1), Slot(0), 4),)))
    operands = [
        entry_point.Operand(entry_point.NUMBERS["float32"], 0, float),
        entry_point.Operand(entry_layout.ADDRESS, 1),
    ]
    nothing = entry_point.Results((), TreeDef(tuple, None, ()))
    run = entry_point.make_entry_point(native, [0, 0], operands, (), nothing)
    assert run(1.5, address(out)) == () and out[0] == 1.5
    assert run(2, address(out)) is run(np.float64(2), address(out)) is MISS


# ---- calls beside their twin -------------------------------------------------------------------


class Kept:
    """A registered class: a child, and a value that belongs to the structure."""

    def __init__(self, value, rest):
        self.value, self.rest = value, rest


register_pytree_node(Kept, lambda x: ((x.value,), x.rest), lambda rest, c: Kept(c[0], rest))


# A dict of so many leaves is read and made by one call each; its keys are not in order.
WIDE = {f"k{(7 * i) % 10}": array(np.full(3, i)) for i in range(10)}

CALLS = {
    "one": (lambda x, y: lax.add(x, y), (X, Y)),
    "two": (lambda x, y: (lax.add(x, y), lax.mul(x, y)), (X, Y)),
    "list": (lambda x, y: [lax.add(x, y), {"a": y}], (X, Y)),
    "forwarded": (lambda x, y: (y, lax.add(x, y), x), (X, Y)),
    "nothing": (lambda x: None, (X,)),
    "number": (lambda x, n: lax.mul(x, n), (X, 2.5)),
    "numpy": (lambda x, y: lax.mul(x, y), (X, np.arange(4, dtype=np.float32))),
    "tree": (lambda t: {k: lax.neg(v) for k, v in t.items()}, ({"a": X, "b": Y},)),
    "wide": (lambda t: {k: lax.neg(v) for k, v in t.items()}, (WIDE,)),
    "wide, numbers": (lambda t: {k: lax.neg(v) for k, v in t.items()}, ({**WIDE, "k0": 2.5},)),
    "wide, twice": (lambda t, u: [{k: lax.add(t[k], u[k]) for k in t}, t], (WIDE, WIDE)),
    "wide, forwarded": (lambda t, x: {**t, "k3": lax.neg(x)}, (WIDE, X)),
    "nested": (
        lambda t, n: (Point([lax.mul(t[0]["a"], n), None], {}), {"b": (t[1].y,), "a": [t[0]["c"]]}),
        ([{"c": X, "a": Y}, Point(None, X)], 2.0),
    ),
    "made here": (
        lambda t: (OrderedDict(b=lax.neg(t["a"]), a=t["b"]), t["b"]),
        ({"a": X, "b": Y},),
    ),
    "other containers": (
        lambda t: defaultdict(list, a=lax.mul(t["a"]["y"], t["b"]["x"])),
        ({"a": OrderedDict(y=Y, x=X), "b": defaultdict(list, x=X, y=2.0)},),
    ),
    "registered": (
        lambda t, n: Kept((lax.mul(t.value["a"], n), t.value["b"].value), t.rest),
        (Kept({"b": Kept(X, "inner"), "a": Y}, "outer"), 2.0),
    ),
    "slab": (lambda x: (lax.neg(x), lax.exp(x)), (array(np.ones(1500)),)),
    "large": (lambda x: (lax.neg(x), lax.exp(x)), (array(np.ones(70_000)),)),
    "empty": (lambda x: lax.neg(x), (array(np.zeros((0, 3))),)),
}


def taken_apart(out):
    if isinstance(out, dict):
        return {k: taken_apart(v) for k, v in out.items()}
    if isinstance(out, Point):
        return Point(*map(taken_apart, out))
    if isinstance(out, Kept):
        return Kept, taken_apart(out.value), out.rest
    if isinstance(out, (list, tuple)):
        return type(out)(map(taken_apart, out))
    return None if out is None else (type(out), out.aval, np.asarray(out).tolist())


@pytest.mark.parametrize("name", CALLS)
def test_closures_do_what_the_general_path_does(name, monkeypatch):
    f, args = CALLS[name]

    def results():
        g = jit(lambda *args: f(*args))
        with written() as made:
            return [taken_apart(g(*args)) for _ in range(5)], made

    found, (match,) = results()
    assert match(args, {}) is not MISS and match((*args, 1), {}) is MISS
    plain = name not in ("numpy", "made here", "other containers", "registered")
    assert type(match).__name__ == ("builtin_function_or_method" if plain else "function")
    monkeypatch.setattr(fast_call, "object_layout", lambda: None)
    expected, matchers = results()
    assert not any(matchers)
    assert found == expected


@pytest.mark.parametrize("donated", [(), (0,)], ids=["kept", "donated"])
def test_wide_dicts_are_matched_by_their_keys(donated):
    f = jit(lambda t: {k: lax.mul(v, v) for k, v in t.items()}, donate_argnums=donated)

    def given(keys):
        return {k: array(np.full(3, float(n))) for n, k in enumerate(keys)}

    with written() as made:
        for _ in range(4):
            f(given(WIDE))
    (match,) = made
    for keys in (list(WIDE), sorted(WIDE), sorted(WIDE, reverse=True)):
        arguments = given(keys)
        out = match((arguments,), {})
        assert list(out) == sorted(WIDE)
        for n, k in enumerate(keys):
            np.testing.assert_array_equal(out[k], np.full(3, n * n))
            assert arguments[k].is_deleted() == bool(donated)
    others = [*list(WIDE)[:-1], "other"]
    for keys in (others, [*WIDE, "other"], list(WIDE)[:-1]):
        assert match((given(keys),), {}) is MISS
        np.testing.assert_array_equal(f(given(keys))[keys[2]], np.full(3, 4))
    assert match((given(WIDE) | {"k5": array(np.ones(4))},), {}) is MISS
    assert match((None,), {}) is MISS and match((list(WIDE.values()),), {}) is MISS


def test_a_donated_block_is_used_again():
    f = jit(lambda x: lax.add(x, x), donate_argnums=0)
    value = array(np.ones(70_000))
    for k in range(5):
        place, is_block = value.ptr, type(value.owner) is Block
        before, value = value, f(value)
        assert before.is_deleted()
        assert is_block == (k > 0) == (value.ptr == place)
    np.testing.assert_array_equal(value, np.full(70_000, 32))
    with pytest.raises(ArgumentError, match="which is not an array"):
        f("text")


def test_results_hold_their_memory_when_all_else_is_gone():
    g = jit(lambda x: (lax.add(x, x), lax.mul(x, x)))
    for _ in range(3):
        g(X)
    kept = [g(array(np.full(4, k)))[1] for k in range(200)]
    gc.collect()
    for k, x in enumerate(kept):
        np.testing.assert_array_equal(x, np.full(4, k * k))


def test_other_trees_are_a_miss():
    def f(state, *, rate):
        params, count = state
        return [(lax.mul(w, rate), b) for w, b in params], lax.add(count, count)

    g = jit(f)
    state = ([(X, Y), (Y, X)], X)
    with written() as made:
        for _ in range(3):
            g(state, rate=0.5)
    (match,) = made
    assert type(match).__name__ == "builtin_function_or_method"
    (params, count) = match((state,), {"rate": 0.25})
    assert type(params) is list and [type(p) for p in params] == [tuple, tuple]
    np.testing.assert_array_equal(params[1][0], np.full(4, 0.75))
    assert params[1][1].ptr == X.ptr
    np.testing.assert_array_equal(count, 2 * np.arange(4))

    class List(list):
        """A list that might have a meaning of its own."""

    deleted, committed = array(np.arange(4)), device_put(X, X.device)
    deleted.delete()
    assert committed.committed
    states = [
        ([(X, Y), (Y, X), (X, X)], X),
        ([(X, Y)], X),
        ([(X, Y), [Y, X]], X),
        (((X, Y), (Y, X)), X),
        (List([(X, Y), (Y, X)]), X),
        ([(X, Y), (Y, X)], None),
        ([(X, Y), Point(Y, X)], X),
        ([(X, Y), (Y, (X,))], X),
        ([(X, Y), (Y, deleted)], X),
        ([(X, Y), (Y, committed)], X),
        ([(X, Y), (Y, np.asarray(X))], X),
        ([(X, Y), (Y, array(np.arange(5)))], X),
        list(state),
        None,
    ]
    before = [sys.getrefcount(o) for o in (X, Y, MISS)]
    for _ in range(50):
        for other in states:
            assert match((other,), {"rate": 0.5}) is MISS
        assert match((state,), {"rate": 1}) is MISS
        for named in ({}, {"other": 0.5}, {"rate": 0.5, "other": 1}, None):
            assert match((state,), named) is MISS
        match((state,), {"rate": 0.5})
    del other, params, count
    after = [sys.getrefcount(o) for o in (X, Y, MISS)]
    assert all(abs(a - b) < 20 for a, b in zip(after, before, strict=True)), (before, after)


def test_dict_keys_may_be_of_any_class():
    class Key:
        """A key that says so when it is compared, and may refuse."""

        refuses = False

        def __init__(self, name):
            self.name = name

        def __hash__(self):
            return hash(self.name)

        def __eq__(self, other):
            if Key.refuses:
                raise ZeroDivisionError
            return self.name == other.name

        def __lt__(self, other):
            return self.name < other.name

    g = jit(lambda t: {k: lax.neg(v) for k, v in t.items()})
    given = {Key("b"): X, Key("a"): Y}
    with written() as made:
        for _ in range(3):
            given = g(given)
    (match,) = made
    out = match(({Key("b"): Y, Key("a"): X},), {})
    assert [k.name for k in out] == ["a", "b"]
    np.testing.assert_array_equal(out[Key("a")], -np.arange(4))
    assert match(({Key("b"): Y, Key("c"): X},), {}) is MISS
    Key.refuses = True
    assert match(({Key("a"): X, Key("b"): Y},), {}) is MISS
    assert len(match((given,), {})) == 2  # the entry point's own keys need no comparison


def test_registered_classes_are_matched_with_what_they_keep():
    class Rest:
        """A value of the structure whose comparison may be impossible."""

        def __init__(self, name):
            self.name = name

        def __hash__(self):
            return hash(self.name)

        def __eq__(self, other):
            if self.name == "refuses":
                raise ZeroDivisionError
            return self.name == other.name

    traced = []

    def f(t):
        traced.append(t.rest.name)
        return Kept(lax.neg(t.value), t.rest)

    g = jit(f)
    state = Kept(X, Rest("a"))
    with written() as made:
        for _ in range(4):
            state = g(state)
    (match,) = made
    np.testing.assert_array_equal(state.value, X)
    # Equal values fit, as in the general path's key; others are traced apart.
    out = match((Kept(Y, Rest("a")),), {})
    np.testing.assert_array_equal(out.value, -Y)
    assert type(out) is Kept and out.rest.name == "a"
    for other in (
        Kept(X, Rest("b")),
        Kept(X, Rest("refuses")),
        Kept((X,), Rest("a")),
        Kept(array(np.arange(5)), Rest("a")),
        (X,),
        X,
    ):
        assert match((other,), {}) is MISS
    assert g(Kept(X, Rest("b"))).rest.name == "b" and traced == ["a", "b"]


def test_containers_that_differ_in_keys_or_count_are_a_miss():
    g = jit(lambda t: next(iter(t.values())))
    given = OrderedDict(b=X, a=Y)
    with written() as made:
        for _ in range(3):
            g(given)
    (match,) = made
    assert match((OrderedDict(b=Y, a=X),), {}).ptr == Y.ptr
    for other in (OrderedDict(a=Y, b=X), OrderedDict(b=X), dict(a=Y, b=X), OrderedDict(given, c=X)):
        assert match((other,), {}) is MISS
        np.testing.assert_array_equal(g(other), next(iter(other.values())))


def test_a_flatten_function_that_fails_is_an_error_of_the_call():
    class Fails(Kept):
        """A registered class whose objects may be unfit to be taken apart."""

    register_pytree_node(Fails, lambda x: ((x.value,), x.rest["a"]), lambda rest, c: X)
    g = jit(lambda t: lax.neg(t))
    with written() as made:
        for _ in range(3):
            g(Fails(X, {"a": 1}))
    (match,) = made
    assert match((Fails(X, {}),), {}) is MISS
    with pytest.raises(KeyError, match="a"):
        g(Fails(X, {}))


def test_operands_are_held_while_the_program_runs():
    """A callback empties the list that the operands came in."""
    state = [array(np.arange(4)) for _ in range(3)]
    alive = [weakref.ref(x) for x in state]
    seen = []

    def empty(device, inputs, outputs):
        state.clear()
        gc.collect()
        seen.append([ref() is not None for ref in alive])

    steps = (Host(empty, (), ()), Copy(Slot(1), Slot(0), 16))
    native = build_program(Program((16, 16), steps))
    aval = typeof(X)
    tree = TreeDef(tuple, None, (TreeDef(list, None, (LEAF,) * 3),))
    results = entry_point.Results([entry_point.Result(1, 3, aval)], LEAF, (tree, NO_NAMES))
    operands = [entry_point.Operand(entry_layout.ARRAY, 0, aval)] * 3
    with pytest.raises(ValueError, match="are not the leaves of"):
        entry_point.make_entry_point(native, [0, 0], operands[:2], (), results)
    with pytest.raises(ValueError, match="1 results are no"):
        entry_point.make_entry_point(native, [0, 0], operands, (), results._replace(out=tree))
    results = results._replace(made=[entry_point.Result(0, entry_layout.of_operand(2), aval)])
    native = build_program(Program((16, 16), (steps[0],)))
    run = entry_point.make_entry_point(native, [0, 0], operands, (), results)
    out = run((state,), {})
    assert seen == [[True] * 3]
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3
    np.testing.assert_array_equal(out, np.arange(4))
    assert run((state,), {}) is MISS


def test_threads_call_with_trees():
    g = jit(lambda t: {k: [lax.add(v, v)] for k, v in t.items()})
    wrong = []

    def work(k):
        given = {f"k{i}": array(np.full(3, k * i)) for i in range(12)}
        for _ in range(200):
            out = g(given)
            if any(out[f"k{i}"][0].tolist() != [2.0 * k * i] * 3 for i in range(12)):
                wrong.append(k)

    in_threads(work, range(1, 4))
    assert not wrong
