"""debug.breakpoint: commands read from standard input, on the values of the running program."""

from __future__ import annotations

import io

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.debug.debugger import BreakpointQuit


@pytest.fixture
def session(monkeypatch, capsys):
    """Run a function with these commands typed; gives what was printed."""

    def run(call, *commands):
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(commands) + "\n"))
        call()
        return capsys.readouterr().out

    return run


def inner(y):
    z = y + 1.0
    spmd.debug.breakpoint()
    return z


def outer(x):
    name = "not an array"
    return inner(x * 2.0), name


def test_commands(session):
    out = session(
        lambda: spmd.jit(lambda x: outer(x)[0])(3.0),
        "p z",
        "u",
        "p x",
        "d",
        "y * 2",
        "pp z",
        "p missing",
        "",
        "l",
        "bt",
        "c",
    )
    assert "(inner)" in out.splitlines()[1]
    for value in ("Array(7.", "Array(3.", "Array(12.", "\n(spmd) 7.0"):
        assert value in out
    assert "*** NameError" in out
    assert "-> " in out and "spmd.debug.breakpoint()" in out
    assert "(outer)" in out


def test_the_end_of_the_input_continues(session):
    out = session(lambda: lax.map(inner, snp.arange(2.0)), "p y")
    assert out.count("spmd breakpoint") == 2 and "0." in out


def test_it_says_which_device(session):
    out = session(lambda: spmd.pmap(inner, axis_name="i")(snp.arange(2.0)), "c", "p y", "c")
    assert "on cpu:0 (i=0)" in out and "on cpu:1 (i=1)" in out and "1." in out


def test_quit(session):
    with pytest.raises(BreakpointQuit):
        session(lambda: spmd.jit(inner)(np.float32(1)), "q")


def test_frames(session):
    def f(x):
        spmd.debug.breakpoint(num_frames=1)
        return x

    assert session(lambda: spmd.jit(f)(1.0), "u", "bt", "c").count("(f)") >= 2
