"""Explicit mode: the types of results, their layouts and values, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, lax, nn, random, scipy
from spmd.errors import ShardingTypeError
from spmd.sharding import AxisType, auto_axes, explicit_axes, reshard
from tests.sharding.explicit_programs import KINDER, PROGRAMS, REFUSED, TRACED, operands

EXPLICIT = AxisType.Explicit
ALL = {**PROGRAMS, **KINDER}
TYPED = {program: types for program, types in ALL.items() if types != REFUSED}
NAMES: dict[str, Any] = {
    "jax": spmd, "jnp": snp, "lax": lax, "np": np, "P": P, "nn": nn, "random": random,
    "scipy": scipy, "NamedSharding": NamedSharding, "reshard": reshard, "auto_axes": auto_axes,
}  # fmt: skip


def explicit_mesh(*sizes: int) -> spmd.Mesh:
    return spmd.make_mesh(sizes, ("x", "y")[: len(sizes)], (EXPLICIT,) * len(sizes))


class Programs:
    """Evaluates programs about some operands; `changed` are others of these names."""

    def __init__(self, given: dict[str, Any]):
        self.given = given
        self.arrays = {k: v for k, v in given.items() if isinstance(v, spmd.Array)}

    def __call__(self, program: str, **changed: Any) -> list[Any]:
        return spmd.tree_util.tree_leaves(eval(program, NAMES | self.given | changed))


@contextmanager
def programs_over(*sizes: int) -> Iterator[Programs]:
    """A `Programs` of operands over a mesh of these sizes."""
    mesh = explicit_mesh(*sizes)
    with spmd.set_mesh(mesh):
        yield Programs(operands(spmd, snp, mesh, spmd.sharding))


def types_of(values: list[Any]) -> str:
    return " ".join(str(spmd.typeof(v)).replace(", weak_type=True", "") for v in values)


@pytest.fixture(scope="module")
def programs_on_four() -> Programs:
    with programs_over(2, 2) as run:
        return run


@pytest.fixture
def on_four(programs_on_four: Programs) -> Iterator[Programs]:
    with spmd.set_mesh(explicit_mesh(2, 2)):
        yield programs_on_four


@pytest.fixture(scope="module")
def values_on_one() -> dict[str, list[np.ndarray]]:
    with programs_over(1, 1) as run:
        return {program: [np.asarray(v) for v in run(program)] for program in TYPED}


@pytest.mark.parametrize("program", TYPED)
def test_results_have_the_types_that_jax_gives_them_and_lie_so(
    program: str, on_four: Programs, values_on_one: dict[str, list[np.ndarray]]
):
    outs = on_four(program)
    assert types_of(outs) == TYPED[program]
    for out, value in zip(outs, values_on_one[program], strict=True):
        np.testing.assert_allclose(np.asarray(out), value, 1e-5, 1e-5)
        if out.aval.explicit is not None:
            assert out.sharding.explicit_part(out.ndim) == out.aval.explicit
            assert out.addressable_shards[0].data.shape == out.sharding.shard_shape(out.shape)


@pytest.mark.parametrize("program", TYPED)
def test_a_jitted_program_has_the_same_types_and_values(
    program: str, on_four: Programs, values_on_one: dict[str, list[np.ndarray]]
):
    outs = spmd.jit(lambda arrays: on_four(program, **arrays))(on_four.arrays)
    for out, value in zip(outs, values_on_one[program], strict=True):
        np.testing.assert_allclose(np.asarray(out), value, 1e-5, 1e-5)
    # A result that depends on no operand is on one device, or, of a program, on all.
    assert types_of(outs).replace(" ", "") == TYPED[program].replace(" ", "")


@pytest.mark.parametrize("program", [p for p, types in ALL.items() if types == REFUSED])
def test_what_jax_refuses_is_refused_with_a_way_out(program: str, on_four: Programs):
    with pytest.raises(ShardingTypeError, match=r"reshard|out_sharding"):
        on_four(program)
    jitted = spmd.jit(lambda arrays: on_four(program, **arrays))
    if program in TRACED:
        assert types_of(jitted(on_four.arrays)) == TRACED[program]
        return
    with pytest.raises(ShardingTypeError, match=r"reshard|out_sharding"):
        jitted(on_four.arrays)


def is_differentiable(types: str) -> bool:
    return types.startswith("float32")


@pytest.mark.parametrize("program", [p for p, types in TYPED.items() if is_differentiable(types)])
def test_gradients_lie_as_what_they_are_the_gradients_of(program: str, on_four: Programs):
    def loss(x: Any, run: Programs) -> Any:
        floats = [v for v in run(program, x=x) if spmd.dtypes.issubdtype(v.dtype, np.floating)]
        return sum((reshard(v, P()) ** 2).sum() for v in floats)

    x = on_four.arrays["x"]
    found = spmd.grad(lambda x: loss(x, on_four))(x)
    jitted = spmd.jit(spmd.grad(lambda x: loss(x, on_four)))(x)
    assert types_of([found, jitted]) == types_of([x, x])
    with programs_over(1, 1) as run:
        want = spmd.grad(lambda x: loss(x, run))(run.arrays["x"])
    np.testing.assert_allclose(np.asarray(found), np.asarray(want), 1e-4, 1e-4)
    np.testing.assert_allclose(np.asarray(jitted), np.asarray(want), 1e-4, 1e-4)


# ---- what the table does not say ---------------------------------------------------------------


def test_several_operands_split_alike_over_a_summed_dim_name_both_layouts_of_the_result():
    with programs_over(2, 2) as run, pytest.raises(ShardingTypeError) as error:
        run("x @ wy")
    assert "all_reduce" in str(error.value) and "reduce_scatter, half the bytes" in str(error.value)


def test_types_inside_jit_grad_and_vmap_are_those_of_the_values_there():
    seen: list[str] = []

    def f(x: Any) -> Any:
        seen.append(spmd.typeof(x).short())
        return (x * 2).sum()

    with programs_over(2, 2) as run:
        x = run.arrays["x"]
        spmd.jit(f)(x)
        spmd.grad(f)(x)
        spmd.vmap(f)(x)
        spmd.vmap(f, in_axes=1)(x)
    assert seen == ["f32[8@x,16@y]", "f32[8@x,16@y]", "f32[16@y]", "f32[8@x]"]


def test_jaxprs_show_the_layouts():
    with programs_over(2, 2) as run:
        text = str(spmd.make_jaxpr(lambda x: snp.sin(x).sum(0))(run.arrays["x"]))
    assert "f32[8@x,16@y] = sin" in text and "f32[16@y] = reduce_sum" in text


def test_the_compiler_decides_in_auto_axes_and_types_say_so():
    seen: list[str] = []

    @auto_axes(out_sharding=P("x", None))
    def product(x: Any, w: Any) -> Any:
        seen.append(spmd.typeof(x).short())
        return x @ w

    @auto_axes(axes="y", out_sharding=P("x", None))
    def double(x: Any) -> Any:
        seen.append(spmd.typeof(x).short())
        return x * 2

    with programs_over(2, 2) as run:
        x, w = run.arrays["x"], run.arrays["wy"]
        for f in (lambda x, w: product(x, w), spmd.jit(lambda x, w: product(x, w))):
            out = f(x, w)
            assert spmd.typeof(out).short() == "f32[8@x,8]"
            np.testing.assert_allclose(out, np.asarray(x) @ np.asarray(w), 1e-5, 1e-5)
        assert spmd.typeof(spmd.jit(double)(x)).short() == "f32[8@x,16]"
        other = auto_axes(lambda x: x * 2)(x, out_sharding=P(None, "y"))
        assert spmd.typeof(other).short() == "f32[8,16@y]"
    assert seen == ["f32[8,16]", "f32[8,16]", "f32[8@x,16]"]


def test_explicit_axes_inside_an_automatic_program():
    seen: list[str] = []

    def inside(x: Any) -> Any:
        seen.append(spmd.typeof(x).short())
        return snp.sin(x)

    mesh = spmd.make_mesh((4,), ("x",), (AxisType.Auto,))
    x = np.arange(8, dtype=np.float32)
    with spmd.set_mesh(mesh):
        out = spmd.jit(lambda x: explicit_axes(inside, in_sharding=P("x"))(x) + 1)(x)
    assert seen == ["f32[8@x]"]
    assert spmd.typeof(out).short() == "f32[8]"
    np.testing.assert_allclose(out, np.sin(x) + 1, 1e-6)


def test_a_mesh_may_have_explicit_and_automatic_axes():
    mesh = spmd.make_mesh((2, 2), ("x", "y"), (EXPLICIT, AxisType.Auto))
    x = spmd.device_put(np.ones((8, 16), np.float32), NamedSharding(mesh, P("x", "y")))
    w = spmd.device_put(np.ones((16, 4), np.float32), NamedSharding(mesh, P("y")))
    out = spmd.jit(lambda x, w: x @ w)(x, w)
    assert spmd.typeof(x).short() == "f32[8@x,16]" and spmd.typeof(out).short() == "f32[8@x,4]"
    np.testing.assert_array_equal(out, np.full((8, 4), 16, np.float32))


def test_a_constraint_checks_what_an_explicit_type_says():
    with programs_over(2, 2) as run:
        x = run.arrays["x"]
        assert lax.with_sharding_constraint(x, P("x", "y")) is x
        with pytest.raises(ShardingTypeError, match=r"it checks. Use reshard"):
            spmd.jit(lambda x: lax.with_sharding_constraint(x, P("y", "x")))(x)


def test_loops_keep_the_layout_of_what_they_carry():
    with programs_over(2, 2) as run:
        x, xr = run.arrays["x"], run.arrays["xr"]
        with pytest.raises(ShardingTypeError, match="returned f32"):
            lax.scan(lambda c, _: (reshard(c, P("y", "x")), None), x, None, length=2)
        with pytest.raises(ShardingTypeError, match="dim 0 of xs"):
            lax.scan(lambda c, r: (c, r), 0.0, xr)


def test_custom_rules_get_values_that_are_laid_out():
    seen: list[str] = []

    @spmd.custom_vjp
    def f(x: Any) -> Any:
        return snp.sin(x)

    def backward(x: Any, ct: Any) -> Any:
        seen.append(spmd.typeof(x).short())
        return (ct * snp.cos(x),)

    f.defvjp(lambda x: (snp.sin(x), x), backward)
    with programs_over(2, 2) as run:
        x = run.arrays["x"]
        found = spmd.jit(spmd.grad(lambda x: f(x).sum()))(x)
        assert spmd.typeof(found) is spmd.typeof(x)
        np.testing.assert_allclose(found, np.cos(np.asarray(x)), 1e-5)


def test_second_derivatives_and_checkpoint_keep_layouts():
    def f(x: Any, w: Any) -> Any:
        h = spmd.checkpoint(lambda x, w: snp.tanh(snp.matmul(x, w, out_sharding=P("x"))))(x, w)
        return (h * h).sum()

    with programs_over(2, 2) as run:
        x, w = run.arrays["x"], run.arrays["wy"]
        twice = lambda x, w: spmd.jvp(spmd.grad(f, 1), (x, w), (x, w))  # noqa: E731
        got, moved = spmd.jit(twice)(x, w)
        assert spmd.typeof(got) is spmd.typeof(w) and spmd.typeof(moved) is spmd.typeof(w)
    with programs_over(1, 1) as run:
        want = spmd.jit(twice)(run.arrays["x"], run.arrays["wy"])
    np.testing.assert_allclose(got, want[0], 1e-4, 1e-5)
    np.testing.assert_allclose(moved, want[1], 1e-4, 1e-5)


@pytest.mark.parametrize(
    ("call", "error", "told"),
    [
        (lambda x: reshard(x, P("z")), spmd.errors.ShardingError, "'z' does not exist"),
        (lambda x: reshard(x, P("x", "x")), spmd.errors.ShardingError, "more than once"),
        (lambda x: reshard(x, "x"), spmd.errors.ArgumentError, "is no sharding"),
        (lambda x: reshard(x[None], P("x")), spmd.errors.ShardingError, "not a multiple of 2"),
        (lambda x: auto_axes(lambda x: x)(x), spmd.errors.ArgumentError, "no out_sharding"),
        (
            lambda x: auto_axes(lambda x: x, axes="z", out_sharding=P())(x),
            spmd.errors.ShardingError,
            "names 'z'",
        ),
        (lambda x: explicit_axes(lambda x: x)(x), spmd.errors.ArgumentError, "no in_sharding"),
    ],
)
def test_mistakes_are_named(call: Any, error: Any, told: str):
    with programs_over(2, 2) as run, pytest.raises(error, match=told):
        call(run.arrays["x"])


def test_axes_that_the_compiler_decides_about_cannot_be_resharded():
    mesh = spmd.make_mesh((4,), ("x",), (AxisType.Auto,))
    with pytest.raises(spmd.errors.ShardingError, match=r"Auto axis 'x'.*with_sharding_constraint"):
        reshard(np.ones(4, np.float32), NamedSharding(mesh, P("x")))


@pytest.mark.parametrize("spec", [("x", None, "y"), ("x",), (("x", "y"),)], ids=str)
def test_attention_keeps_batch_and_heads_split(spec: Any):
    values = np.random.default_rng(0).standard_normal((4, 8, 4, 16)).astype(np.float32)

    def attend(q: Any) -> Any:
        return nn.dot_product_attention(q, q * 0.5, q + 1, is_causal=True)

    with spmd.set_mesh(explicit_mesh(2, 2)):
        q = spmd.device_put(values, P(*spec))
        out = spmd.jit(attend)(q)
        slope = spmd.jit(spmd.grad(lambda q: (attend(q) ** 2).sum()))(q)
        assert spmd.typeof(out) is spmd.typeof(q) is spmd.typeof(slope)
        assert not spmd.debug.collectives(spmd.jit(attend))(q)
        with pytest.raises(ShardingTypeError, match="batch and heads"):
            attend(spmd.device_put(values, P(None, None, None, "x")))
    np.testing.assert_allclose(out, spmd.jit(attend)(values), 1e-4, 1e-5)
    want = spmd.jit(spmd.grad(lambda q: (attend(q) ** 2).sum()))(values)
    np.testing.assert_allclose(slope, want, 1e-3, 1e-4)
