"""Source lines: equations and errors name the user's file, whatever transformed them since."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.base.source import UNKNOWN, Source, current_source, is_ours
from spmd.core.ir import all_eqns
from spmd.core.trace import Tracer

V = np.ones(3, np.float32)


def line_of(f, text):
    lines, start = inspect.getsourcelines(f)
    return start + next(k for k, line in enumerate(lines) if text in line)


def inner(x):
    y = snp.sin(x)
    return y * x


def lines(jaxpr, name):
    """The lines of this file from which equations of a primitive come."""
    found = [e.source for e in all_eqns(jaxpr) if e.prim.name == name]
    assert found and all(s.file == __file__ for s in found), found
    return {s.line for s in found}


TRANSFORMED = {
    "plain": inner,
    "jit": spmd.jit(inner),
    "grad": spmd.grad(inner),
    "grad(jit)": spmd.grad(spmd.jit(inner)),
    "jit(grad(jit))": spmd.jit(spmd.grad(spmd.jit(inner))),
    "hessian(jit)": spmd.hessian(spmd.jit(inner)),
    "vmap(jit)": spmd.vmap(spmd.jit(inner), axis_size=2, in_axes=None),
    "checkpoint": spmd.grad(spmd.checkpoint(inner)),
    "scan": spmd.grad(lambda x: lax.scan(lambda c, _: (inner(c), None), x, None, 3)[0]),
    "cond": spmd.grad(lambda x: lax.cond(x > 0, inner, inner, x)),
    "vjp of linear part": lambda x: spmd.vjp(spmd.jit(inner), x)[1](x),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_equations_keep_the_line_they_were_written_on(name):
    jaxpr = spmd.make_jaxpr(TRANSFORMED[name])(1.0)
    assert lines(jaxpr, "sin") == {line_of(inner, "snp.sin")}
    if "grad" in name or "hessian" in name:
        assert line_of(inner, "snp.sin") in lines(jaxpr, "cos")
        # The product's transpose is on the product's line, not where grad was called.
        assert line_of(inner, "y * x") in lines(jaxpr, "mul")


def test_rules_of_the_user_have_their_own_lines():
    @spmd.custom_jvp
    def f(x):
        return x

    def rule(primals, tangents):
        return f(*primals), snp.cos(primals[0]) * tangents[0]

    f.defjvp(rule)
    jaxpr = spmd.make_jaxpr(spmd.grad(spmd.jit(f)))(1.0)
    assert lines(jaxpr, "cos") == {line_of(rule, "snp.cos")}

    @spmd.custom_vjp
    def g(x):
        return x

    def bwd(x, ct):
        return (snp.tan(x) * ct,)

    g.defvjp(lambda x: (g(x), x), bwd)
    jaxpr = spmd.make_jaxpr(spmd.grad(spmd.jit(g)))(1.0)
    assert lines(jaxpr, "tan") == {line_of(bwd, "snp.tan")}


def test_an_error_in_a_walk_leaves_no_line_behind():
    def leaky(x):
        raise RuntimeError("from the user")

    f = spmd.custom_jvp(lambda x: x)
    f.defjvp(lambda p, t: leaky(p))
    with pytest.raises(RuntimeError, match="from the user"):
        spmd.grad(spmd.jit(f))(1.0)
    after = current_source()
    assert after.line == line_of(test_an_error_in_a_walk_leaves_no_line_behind, "after = ")


def test_context_managers_are_passed_through():
    @contextlib.contextmanager
    def block():
        yield current_source()

    with block() as source:
        assert source.function == "block"
    assert current_source().short.startswith("test_source.py:")


def test_command_line_programs_have_lines():
    program = "import spmd; print(spmd.make_jaxpr(lambda x: x * 2)(1.0).eqns[0].source)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "<string>:1 (<lambda>)"


def test_sources_print_briefly():
    source = Source("/a/b.py", 3, "f")
    assert (str(source), source.short) == ("/a/b.py:3 (f)", "b.py:3")
    assert UNKNOWN.line == 0


@pytest.fixture
def layers(tmp_path, monkeypatch):
    """A module of layers, as pip would install it."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "layers_of_others.py").write_text(
        "import functools\n"
        "import spmd.numpy as snp\n"
        "def wrapped(f):\n"
        "    return functools.wraps(f)(lambda *args: f(*args))\n"
        "@wrapped\n"
        "def dense(x):\n"
        "    return snp.tan(x)\n"
        "@wrapped\n"
        "def apply(f, x):\n"
        "    return f(x)\n"
    )
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("layers_of_others")
    del sys.modules["layers_of_others"]


def test_lines_of_installed_packages_stand_after_the_line_that_calls_them(layers):
    def model(x):
        y = layers.dense(x)
        return layers.apply(lambda y: snp.cos(y), layers.dense(y))

    jaxpr = spmd.make_jaxpr(spmd.jit(model))(V)
    first, second, third = (e.source for e in all_eqns(jaxpr) if e.prim.name in ("tan", "cos"))
    here = line_of(model, "y = layers")
    assert str(first) == f"{__file__}:{here} (model) through layers_of_others.py:7"
    assert first.short == f"test_source.py:{here} through layers_of_others.py:7"
    assert second.short == f"test_source.py:{here + 1} through layers_of_others.py:7"
    # A function that a package calls is the user's own.
    assert (third.short, third.function) == (f"test_source.py:{here + 1}", "<lambda>")


def test_a_program_that_is_all_installed_has_its_own_lines(layers):
    program = Path(layers.__file__)
    program.write_text(program.read_text() + "print(spmd.make_jaxpr(dense)(1.0).eqns[0].source)\n")
    program.write_text("import spmd\n" + program.read_text())
    found = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, cwd=program.parent
    )
    assert found.stdout.strip() == f"{program}:8 (dense)", found.stderr


def test_tracers_tell_where_they_come_from():
    told = []

    def f(weights, x):
        y = x * 2
        told.extend(t.where_from() for t in (weights["w"], y) if isinstance(t, Tracer))
        return y

    spmd.jit(f)({"w": V}, V)
    assert told[0].startswith("It is argument weights['w'] of f, traced at ")
    assert told[1].startswith("It was computed by mul at ") and "test_source.py" in told[1]


def test_generated_code_is_ours():
    names: dict = {"current_source": current_source}
    exec(compile("def call(): return current_source()", "<spmd fast path>", "exec"), names)
    assert names["call"]().file == __file__
    assert is_ours("<spmd fast path>")
    assert not is_ours(__file__)


def test_a_remembered_line_has_the_scope_of_the_moment():
    def f():
        return current_source()

    found = [f()]
    with spmd.named_scope("inside"):
        found.append(f())
    found.append(f())
    assert [s.scope for s in found] == ["", "inside", ""]
    assert {(s.file, s.line) for s in found} == {(__file__, f.__code__.co_firstlineno + 1)}
    assert found[0] is found[2]


def test_lines_of_code_that_is_gone_are_not_those_of_other_code():
    """Code objects come and go at the same addresses."""
    for k in range(200):
        names = {"current_source": current_source}
        text = "\n" * k + "def made():\n    return current_source()"
        exec(compile(text, f"file_{k}.py", "exec"), names)
        found = names["made"]()
        assert (found.file, found.line) == (f"file_{k}.py", k + 2)
