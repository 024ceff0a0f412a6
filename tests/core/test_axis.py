"""Axis names in scope: found from the inside out, gone after their block, told in errors."""

from __future__ import annotations

import threading

import pytest

from spmd.base.context import attributed_to, current_trace, state
from spmd.base.errors import AxisError
from spmd.base.source import Source, current_source
from spmd.core.axis import (
    AxisFrame,
    axis_frame,
    axis_names,
    extend_axes,
    manual_axes,
    replace_axes,
    size_of,
)
from spmd.core.trace import EVAL, Trace

FRAMES = (AxisFrame("i", 2, "vmap"), AxisFrame("j", 3, "manual"), AxisFrame(("a", 1), 5, "pmap"))


def test_names_are_found():
    with extend_axes(FRAMES):
        assert axis_frame("j") is FRAMES[1]
        assert size_of(("i", "j")) == 6 and size_of("i") == 2
        assert axis_names("i") == ("i",) and manual_axes() == ("j",)
        with extend_axes([AxisFrame("i", 7, "vmap")]):
            assert size_of("i") == 7
        with replace_axes([]), pytest.raises(AxisError):
            axis_frame("i")
        assert size_of("i") == 2
    assert state.axes == ()


def test_unbound_names_are_told_with_those_that_are():
    with pytest.raises(AxisError, match=r"unbound axis name 'k'.*in scope here: none"):
        axis_frame("k")
    with extend_axes(FRAMES), pytest.raises(AxisError, match=r"'i', 'j', \('a', 1\)"):
        axis_names(("i", "k"))


def test_scopes_end_with_errors():
    with pytest.raises(ZeroDivisionError), extend_axes(FRAMES):
        raise ZeroDivisionError
    trace = Trace()
    with pytest.raises(ZeroDivisionError), current_trace(trace):
        assert state.trace is trace
        raise ZeroDivisionError
    assert state.axes == () and state.trace is EVAL


def test_each_thread_has_its_own_axes_trace_and_source():
    found = []

    def look():
        found.append((state.axes, state.trace, state.source))

    with extend_axes(FRAMES), current_trace(Trace()), attributed_to(Source("f", 1, "g")):
        assert current_source().file == "f"
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert found == [((), EVAL, None)]
