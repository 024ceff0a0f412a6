"""Small helpers: those that have something to get wrong."""

import gc

import pytest

from spmd.core.util import collector_paused


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
