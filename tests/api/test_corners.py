"""Corners of the transformations that programs written for JAX turn into: JAX is the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.errors import ArgumentError, GradError, PytreeError

jax = pytest.importorskip("jax", reason="JAX is the oracle")

A = np.arange(24, dtype=np.float32).reshape(2, 3, 4) / 10
V = np.linspace(0.3, 1.2, 3, dtype=np.float32)


def result(j: Any, x: Any, y: Any) -> Any:
    return {"sum": x + y, "pair": (x * 2, j.numpy.sum(y)), "fixed": j.numpy.ones(2)}


OUT_AXES: dict[str, Any] = {
    "one for all": 1,
    "a tree": {"sum": 1, "pair": (0, 0), "fixed": 0},
    "a prefix of the tree": {"sum": -1, "pair": 0, "fixed": 1},
    "none for what is not mapped": {"sum": 0, "pair": (1, None), "fixed": None},
    "none for a whole branch": {"sum": 0, "pair": (0, None), "fixed": None},
}


@pytest.mark.parametrize("name", OUT_AXES)
@pytest.mark.parametrize("jitted", [False, True])
def test_out_axes_are_a_tree_or_a_prefix(name: str, jitted: bool):
    if name == "one for all":  # a scalar result has one place for the mapped dim
        body = lambda j: lambda x, y: {"sum": x + y, "twice": [2 * x]}  # noqa: E731
    else:
        body = lambda j: lambda x, y: result(j, x, y)  # noqa: E731
    rows = A[0]

    def run(j: Any) -> Any:
        f = j.vmap(body(j), in_axes=(0, None), out_axes=OUT_AXES[name])
        return (j.jit(f) if jitted else f)(rows, A[1, 0])

    found, want = run(spmd), run(jax)
    assert spmd.tree.structure(found).num_leaves == jax.tree.structure(want).num_leaves
    for a, b in zip(spmd.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_out_axes_that_do_not_fit_are_named():
    with pytest.raises(PytreeError, match="out_axes has keys 'sums'"):
        spmd.vmap(lambda x: {"sum": x}, out_axes={"sums": 0})(V)
    with pytest.raises(ArgumentError, match="out_axes is None for output 0"):
        spmd.vmap(lambda x: x, out_axes=None)(V)


@pytest.mark.parametrize("j", [spmd, jax])
def test_axis_size_alone_gives_copies(j: Any):
    out = j.vmap(lambda: j.numpy.arange(2), axis_size=3)()
    np.testing.assert_array_equal(out, np.arange(2)[None].repeat(3, 0))
    index = j.vmap(lambda: j.lax.axis_index("i"), axis_size=3, axis_name="i")()
    np.testing.assert_array_equal(index, np.arange(3))


# ---- custom derivatives that close over traced values ------------------------------------------


def with_jvp(j: Any, scale: Any) -> Any:
    @j.custom_jvp
    def f(x):
        return j.numpy.sin(x) * scale

    f.defjvp(lambda primals, tangents: (f(*primals), 7 * scale * tangents[0]))
    return f


def with_vjp(j: Any, scale: Any) -> Any:
    @j.custom_vjp
    def f(x):
        return j.numpy.sin(x) * scale

    f.defvjp(lambda x: (f(x), x), lambda x, ct: (7 * scale * ct,))
    return f


AROUND = {
    "jit": lambda j, f: j.jit(f)(V, V[::-1]),
    "vmap": lambda j, f: j.vmap(f)(V, V[::-1]),
    "vmap of grad": lambda j, f: j.vmap(j.grad(f))(V, V[::-1]),
    "vmap over the closed value": lambda j, f: j.vmap(j.grad(f), (None, 0))(V[0], V),
    "jit of vmap of grad": lambda j, f: j.jit(j.vmap(j.value_and_grad(f)))(V, V[::-1]),
    "scan": lambda j, f: j.lax.scan(lambda c, s: (c + j.grad(f)(c, s), s), V[0], V),
}


@pytest.mark.parametrize("make", [with_jvp, with_vjp])
@pytest.mark.parametrize("name", AROUND)
def test_rules_may_close_over_traced_values(make: Any, name: str):
    def run(j: Any) -> Any:
        return AROUND[name](j, lambda x, s: j.numpy.sum(make(j, s)(x)))

    for a, b in zip(spmd.tree.leaves(run(spmd)), jax.tree.leaves(run(jax)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


# ---- ordered prints ----------------------------------------------------------------------------


def test_ordered_prints_keep_their_order_everywhere(capsys):
    def show(tag: str, x: Any) -> None:
        spmd.debug.print("{tag} {x} ({axes})", tag=tag, x=x, ordered=True)

    def step(c: Any, x: Any) -> Any:
        show("step", x)
        return c + x, None

    def one(x: Any) -> Any:
        show("start", x)
        total, _ = lax.scan(step, x, snp.arange(2.0))
        lax.cond(total > 2, lambda t: show("large", t), lambda t: show("small", t), total)
        return total

    spmd.jit(one)(snp.float32(1))
    assert capsys.readouterr().out.splitlines() == [
        "start 1.0 ()", "step 0.0 ()", "step 1.0 ()", "small 2.0 ()",
    ]  # fmt: skip
    spmd.pmap(one, axis_name="i")(snp.arange(2.0) + 1)
    lines = capsys.readouterr().out.splitlines()
    for device in range(2):
        mine = [line for line in lines if f"(i={device})" in line]
        assert [line.split()[0] for line in mine][:3] == ["start", "step", "step"]
    assert [line.split()[0] for line in lines[:2]] == ["start", "start"]
    spmd.vmap(lambda x: show("v", x), axis_name="b")(snp.arange(2.0))
    assert capsys.readouterr().out.splitlines() == ["v 0.0 (b=0)", "v 1.0 (b=1)"]


COMPLEX = V.astype(np.complex64)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (lambda j: j.jacrev(lambda x: x * 1j)(V), r"jacrev\(<lambda>\): .* returned complex64"),
        (lambda j: j.jacrev(lambda x: (x, 3))(V), "returned dtype int32, which has no derivative"),
        (lambda j: j.hessian(lambda x: (x * 1j).sum())(V), "take the real part"),
        (lambda j: j.jacfwd(lambda z: z * z)(COMPLEX), "argument is complex64"),
        (lambda j: j.jacfwd(lambda z: z.real, holomorphic=True)(COMPLEX), "returned float32"),
        (lambda j: j.jacrev(lambda z: z.real, holomorphic=True)(COMPLEX), "returned float32"),
        (lambda j: j.grad(lambda z: z.real.sum(), holomorphic=True)(COMPLEX), "returned float32"),
    ],
)
def test_derivatives_of_unfit_dtypes_are_refused(case: Any, message: str):
    with pytest.raises(TypeError):
        case(jax)
    with pytest.raises(GradError, match=message):
        case(spmd)
