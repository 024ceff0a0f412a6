"""debug.print: what is printed, in which order, under which transformation; and named scopes."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.errors import ArgumentError


def f(x):
    spmd.debug.print("{x} and {}", x * 2, x=x)
    return x * x


@pytest.mark.parametrize(
    "call, wanted",
    [
        (lambda: f(1.0), "1.0 and 2.0\n"),
        (lambda: spmd.jit(f)(1.0), "1.0 and 2.0\n"),
        (lambda: spmd.grad(f)(1.0), "1.0 and 2.0\n"),
        (lambda: spmd.vmap(f)(snp.arange(2)), "0 and 0\n1 and 2\n"),
        (lambda: spmd.jit(spmd.vmap(spmd.grad(f)))(snp.arange(2.0)), "0.0 and 0.0\n1.0 and 2.0\n"),
        (lambda: lax.scan(lambda c, x: (c, f(x)), 0, snp.arange(2)), "0 and 0\n1 and 2\n"),
        (lambda: spmd.pmap(f)(snp.arange(2)), "0 and 0\n1 and 2\n"),
        (lambda: f(snp.arange(2)), "[0 1] and [0 2]\n"),
    ],
)
def test_lines(call, wanted, capsys):
    call()
    assert capsys.readouterr().out == wanted


def test_place(capsys):
    def g(x):
        spmd.debug.print("{axes} on {device}: {:.1f}", x)
        spmd.debug.print("mine: {device}", device=x)

    spmd.pmap(g, axis_name="i")(snp.arange(2.0))
    assert capsys.readouterr().out == (
        "i=0 on cpu:0: 0.0\ni=1 on cpu:1: 1.0\nmine: 0.0\nmine: 1.0\n"
    )


def test_options(capsys):
    spmd.debug.print("no fields")
    spmd.debug.print("no fields", 1, "two", skip_format_check=True)
    spmd.debug.print(ordered=True)("{tree} {text!r}", tree={"a": 1}, text="t")
    with np.printoptions(precision=2):
        spmd.debug.print("{}", snp.array([1 / 3]), partitioned=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["no fields", "no fields 1 two"]
    assert lines[2].endswith("'t'") and lines[2].startswith("{'a': ")
    assert lines[3] == "[0.33]"


@pytest.mark.parametrize(
    "args, kwargs, said",
    [
        (("{}",), {}, "names {0}"),
        (("{x}",), {"y": 1}, "names {x}"),
        (("{}", 1, 2), {}, "arguments 1"),
        (("x = 3",), {"x": 1}, "f-string"),
        ((3,), {}, "must be a string"),
        ((), {"x": 1}, "need a format"),
    ],
)
def test_wrong_formats(args, kwargs, said):
    with pytest.raises(ArgumentError, match=said):
        spmd.debug.print(*args, **kwargs)


def test_equal_prints_are_one_program():
    calls = []

    @spmd.jit
    def g(x):
        calls.append(1)
        spmd.debug.print("{}", x)

    g(1.0)
    g(2.0)
    assert len(calls) == 1


# ---- named scopes ------------------------------------------------------------------------------


def scopes(closed):
    return [eqn.source.scope for eqn in closed.eqns]


def test_named_scope():
    @spmd.named_scope("layer")
    def layer(x):
        with spmd.named_scope("inner"):
            y = snp.sin(x)
        return y * 2.0

    assert scopes(spmd.make_jaxpr(layer)(1.0)) == ["layer/inner", "layer"]
    assert scopes(spmd.make_jaxpr(lambda x: snp.sin(x))(1.0)) == [""]
    derivative = scopes(spmd.make_jaxpr(spmd.grad(layer))(1.0))
    assert "layer/inner" in derivative
    assert scopes(spmd.make_jaxpr(spmd.named_call(lambda x: snp.cos(x), name="c"))(1.0)) == ["c"]
    with pytest.raises(ArgumentError, match="must be a string"):
        spmd.named_scope(3).__enter__()  # type: ignore


def test_named_scope_is_left_on_errors():
    with pytest.raises(ValueError), spmd.named_scope("outer"):
        raise ValueError
    assert scopes(spmd.make_jaxpr(snp.sin)(1.0))[-1] == ""


def test_errors_and_listings_tell_the_scope(capsys):
    with spmd.named_scope("head"), pytest.raises(ArgumentError, match="in head"):
        spmd.grad(lambda x: x, argnums=3)(1.0)

    @spmd.named_scope("body")
    def g(x):
        return snp.sum(snp.sin(x))

    assert "in body" in str(spmd.debug.show(g)(snp.arange(8.0)))


def test_the_log_is_print_to_a_logger(caplog):
    def f(x):
        spmd.debug.log("x = {x} on {axes}", x=x)
        return x

    with caplog.at_level("INFO", logger="spmd.debug"):
        spmd.jit(lambda x: spmd.vmap(f, axis_name="i")(x))(np.arange(2.0))
    assert [r.getMessage() for r in caplog.records] == ["x = 0.0 on i=0", "x = 1.0 on i=1"]
    assert {(r.levelname, r.filename) for r in caplog.records} == {("INFO", "test_printing.py")}
    with pytest.raises(ArgumentError, match=r"test_printing.*debug.log: the format names {y}"):
        spmd.debug.log("{y}", x=1)
