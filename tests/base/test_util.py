"""Small helpers: those that have something to get wrong."""

import gc

import pytest

from spmd.base.util import collector_paused, importing


def test_the_collector_runs_again_after_a_pause():
    assert gc.isenabled()
    with pytest.raises(KeyError), collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_the_user_disabled_stays_so():
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_imported_objects_are_old_for_the_collector_and_not_frozen():
    with importing():
        made = [[] for _ in range(100)]
    assert gc.isenabled()
    young = {id(x) for x in gc.get_objects(0)} | {id(x) for x in gc.get_objects(1)}
    assert not young.intersection(map(id, made))
    assert gc.get_freeze_count() == 0


def test_objects_that_the_program_froze_stay_frozen():
    # One object that stays: how many are frozen changes by itself, since frozen ones may die.
    kept: list[object] = [object]
    gc.freeze()
    try:
        with importing():
            pass
        assert gc.get_freeze_count() > 0
        assert not any(x is kept for x in gc.get_objects())  # which leaves out what is frozen
    finally:
        gc.unfreeze()
    assert any(x is kept for x in gc.get_objects())


def test_an_import_that_fails_leaves_the_collector_on():
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()
