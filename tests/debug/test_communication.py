"""`debug.sharding`: values by the user's lines, who decided how they are split, and what moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, debug, lax, nn
from spmd.base.amounts import size_text
from spmd.base.config import config
from spmd.checkify import check
from spmd.sharding import AxisType


def laid_out(f: Any, *args: Any) -> list[str]:
    """The lines of the text below those of arguments, each without its place in this file."""
    text = str(debug.sharding(f, show=False)(*args)).splitlines()
    lines = [line for line in text if "test_communication.py" in line]
    return [line.split("  ", 1)[1] for line in lines]


def put(x: np.ndarray, mesh: spmd.Mesh, *spec: Any) -> spmd.Array:
    return spmd.device_put(x, NamedSharding(mesh, P(*spec)))


X = np.ones((16, 8), np.float32)
W = np.ones((8, 12), np.float32)


def test_values_are_split_by_arguments_constraints_results_and_types():
    mesh = spmd.make_mesh((2, 2), ("data", "model"), AxisType.Auto)
    columns = NamedSharding(mesh, P(None, "model"))

    def f(x: Any, w: dict[str, Any]) -> Any:
        h = snp.tanh(x @ w["up"])
        y = lax.with_sharding_constraint(snp.ones((4, 4)), columns)
        return h.sum(1), y * 2

    text = laid_out(f, put(X, mesh, "data"), {"up": put(W, mesh, None, "model")})
    assert text[0] == ("""h = snp.tanh(x @ w["up"])    f32[16@data,12@model], by x and w['up']""")
    assert text[1].startswith("y = lax.with_sharding_constraint(snp.ones((4, 4)), columns)    ")
    assert "f32[4,4@model], by the constraint at " in text[1]
    assert text[2].startswith("return h.sum(1), y * 2    f32[")

    rows = NamedSharding(mesh, P("data"))
    wanted = spmd.jit(lambda x: x * 2, out_shardings=rows)
    assert "f32[16@data,8], by the constraint at " in laid_out(wanted, X)[0]


def test_explicit_types_and_the_least_time_decide_too():
    mesh = spmd.make_mesh((4,), ("x",), AxisType.Explicit)
    (line,) = laid_out(lambda x: snp.sin(x) * 2, put(X, mesh, "x"))
    assert line.endswith("f32[16@x,8], by its type")
    auto = spmd.make_mesh((4,), ("x",), AxisType.Auto)

    def neighbours(x: Any) -> Any:
        inner = x[1:-1] * 2
        return inner.sum()

    first, *_ = laid_out(neighbours, put(np.ones((4096, 64), np.float32), auto, "x"))
    assert first == "inner = x[1:-1] * 2    f32[4094@x,64], by the least time"


def test_what_a_line_moves_stands_below_it():
    mesh = spmd.make_mesh((4,), ("x",), AxisType.Auto)

    def f(x: Any) -> Any:
        y = x * 2
        return y.sum(0)

    text = str(debug.sharding(f, show=False)(put(X, mesh, "x"))).splitlines()
    assert text[2].endswith("y = x * 2    f32[16@x,8], by x")
    assert text[3].endswith("return y.sum(0)")
    assert text[4] == "  all_reduce f32[8] over x (4): 48 B received"


def test_the_totals_are_those_of_the_plan_of_memory():
    mesh = spmd.make_mesh((4,), ("x",), AxisType.Auto)

    def f(x: Any) -> Any:
        return snp.sort(x @ snp.ones((8, 4), np.float32), 1)

    x = put(np.ones((64, 8), np.float32), mesh, "x")
    moved = debug.sharding(f, show=False)(x)
    memory = spmd.jit(f).lower(x).compile().memory_analysis()
    assert moved.memory == memory
    assert memory.argument_size_in_bytes == 16 * 8 * 4
    assert memory.output_size_in_bytes == 16 * 4 * 4
    *_, received, held = str(moved).splitlines()
    assert received == "0 collectives; each device receives 0 B"
    assert held.startswith(f"a device holds at most {size_text(memory.peak_memory_in_bytes)}: ")
    assert "arguments 512 B, results 256 B" in held


def test_a_program_of_one_device_says_so():
    assert "a program of one device" in str(debug.sharding(lambda x: x + 1, show=False)(X))


def test_a_line_with_a_loss_and_its_gradient_tells_of_both():
    mesh = spmd.make_mesh((4,), ("x",), AxisType.Auto)

    def f(w: Any, x: Any) -> Any:
        return spmd.value_and_grad(lambda w: (snp.tanh(x @ w) ** 2).mean())(w)

    (line,) = laid_out(f, put(W, mesh, None, "x"), X)
    assert line.endswith("(w)    f32[]; f32[8,12@x], by w")


def block(where: Any = lambda y: y) -> Any:
    def f(x: Any, up: Any, down: Any) -> Any:
        y = x + nn.gelu(x @ up) @ down
        y = where(y)
        return (y * lax.rsqrt((y * y).mean(-1, keepdims=True))).sum(1)

    return f


@pytest.fixture
def eight_devices():
    with config.override("num_cpu_devices", 8):
        yield


@pytest.mark.usefixtures("eight_devices")
def test_a_large_move_tells_what_a_constraint_would_save():
    mesh = spmd.make_mesh((2, 4), ("data", "model"), AxisType.Auto)
    x = put(np.ones((8, 64, 256), np.float32), mesh, "data")
    up = put(np.ones((256, 1024), np.float32), mesh, None, "model")
    down = put(np.ones((1024, 256), np.float32), mesh, "model")
    moved = debug.sharding(block(), show=False)(x, up, down)
    (saving,) = moved.savings
    assert (saving.kind, saving.want, saving.reader) == ("all_reduce", "'data'", "add")
    constrained = NamedSharding(mesh, P(*eval(f"({saving.spec},)")))
    again = block(lambda y: lax.with_sharding_constraint(y, constrained))
    less = debug.sharding(again, show=False)(x, up, down)
    assert saving.saved == moved.received - less.received > 0
    text = str(moved).splitlines()
    at = next(k for k, line in enumerate(text) if "all_reduce" in line)
    assert text[at].endswith("; wanted as P('data') by add")
    ask = f"y = lax.with_sharding_constraint(y, NamedSharding(mesh, P({saving.spec})))"
    assert text[at + 1].startswith(f"    {ask} behind test_communication.py:")
    assert text[at + 1].endswith(f": {size_text(saving.saved)} less received in all")
    # What is best as it is, has its cause alone, and where types say how, nothing can be asked.
    best = debug.sharding(again, show=False)(x, up, down)
    assert best.savings and not any(s.saved for s in best.savings)
    rows = spmd.make_mesh((2, 4), ("data", "model"))
    whole = put(np.ones((8, 64, 256), np.float32), rows, "data")
    typed = debug.sharding(lambda x: snp.sin(spmd.reshard(x, P())), show=False)(whole)
    assert typed.received >= 1 << 16 and not any(s.saved for s in typed.savings)


def test_moves_that_only_a_failed_check_makes_are_left_out():
    mesh = spmd.make_mesh((4,), ("x",), AxisType.Auto)

    def f(x: Any) -> Any:
        check(snp.all(x > 0), "{x}", x=x)
        return x * 2

    moved = debug.collectives(f)(put(np.ones((64, 64), np.float32), mesh, "x"))
    assert [(c.kind, c.value) for c in moved] == [("all_reduce", "i32[]")]

    def counted(x: Any) -> Any:
        total = x.sum()
        check(total > 0, "{total}", total=total)
        return total

    moved = debug.collectives(counted)(put(X, mesh, "x"))
    assert [c.value for c in moved if c.value == "f32[]"] == ["f32[]"]


def test_what_a_loop_does_not_change_is_gathered_once():
    """The compiler moves it before the loop, and so it is counted."""
    mesh = spmd.make_mesh((4,), ("x",), AxisType.Auto)

    def f(x: Any, w: Any) -> Any:
        return lax.scan(lambda x, _: (snp.tanh(x @ w) - x.max(0), None), x, None, length=3)

    x, w = put(np.ones((8, 64), np.float32), mesh, "x"), put(np.eye(64), mesh, "x")
    found = {c.kind: c.times for c in debug.collectives(f)(x, w)}
    assert found == {"all_gather": 1, "all_reduce": 3}
