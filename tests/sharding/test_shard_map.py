"""shard_map: shards in and out, types that know what varies, gradients; JAX's as the oracle."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.core.call import impl_jaxpr
from spmd.sharding import Mesh, NamedSharding
from spmd.sharding import PartitionSpec as P
from spmd.sharding.lockstep_interpreter import Lockstep
from spmd.sharding.shard_map_rules import cut, join
from spmd.testing import check_grads

X = np.random.default_rng(2).normal(size=(8, 4)).astype(np.float32)
W = np.random.default_rng(3).normal(size=(4, 6)).astype(np.float32)


def mesh_of(*shape: int) -> Mesh:
    return spmd.make_mesh(shape, ("x", "y")[: len(shape)])


def as_numpy(tree: Any) -> list[np.ndarray]:
    return [np.asarray(v) for v in spmd.tree.leaves(tree)]


# ---- programs: (per-device function, mesh shape, in_specs, out_specs, arguments) ---------------


def matmul_split_over_rows(x: Any, w: Any) -> Any:
    return x @ w


def matmul_split_over_the_sum(x: Any, w: Any) -> Any:
    return psum_of(x)(x @ w, "y")


def normalise(x: Any) -> Any:
    lax_of = lax_module(x)
    return x - lax_of.pmean(x.mean(), "x"), lax_of.pmax(x.max(), "x")


def halo(x: Any) -> Any:
    """The mean of each row with those above and below, around the ring."""
    lax_of = lax_module(x)
    down = lax_of.ppermute(x[-1:], "x", [(k, (k + 1) % 4) for k in range(4)])
    up = lax_of.ppermute(x[:1], "x", [(k, (k - 1) % 4) for k in range(4)])
    above = numpy_module(x).concatenate([down, x[:-1]])
    below = numpy_module(x).concatenate([x[1:], up])
    return (above + x + below) / 3


def shared_and_split(x: Any, b: Any) -> Any:
    """A value that is equal everywhere meets one that is not: a cast is inserted."""
    return x * b + lax_module(x).axis_index("x"), b * 2


def gathered(x: Any) -> Any:
    return lax_module(x).all_gather(x, "x", tiled=True)[:2]


def transposed(x: Any) -> Any:
    """Rows split over devices become columns split over devices."""
    return lax_module(x).all_to_all(x, "x", 1, 0, tiled=True)


def lax_module(x: Any) -> Any:
    return lax if type(x).__module__.startswith("spmd") else _jax().lax


def numpy_module(x: Any) -> Any:
    return snp if type(x).__module__.startswith("spmd") else _jax().numpy


def psum_of(x: Any) -> Any:
    return lax_module(x).psum


@functools.cache
def _jax() -> Any:
    return pytest.importorskip("jax")


PROGRAMS = {
    "rows": (matmul_split_over_rows, (4,), (("x",), ()), ("x",), (X, W)),
    "sum": (matmul_split_over_the_sum, (2, 2), (("x", "y"), ("y",)), ("x",), (X, W)),
    "normalise": (normalise, (4,), (("x",),), (("x",), ()), (X,)),
    "halo": (halo, (4,), (("x",),), ("x",), (X,)),
    "shared": (shared_and_split, (4,), (("x",), ()), (("x",), ()), (X, W[0, :4])),
    "gathered": (gathered, (4,), (("x",),), ("x",), (X,)),
    "transposed": (transposed, (4,), (("x",),), (None, "x"), (X,)),
    "columns": (lambda x: x * 2, (2, 2), ((None, "y"),), (None, "y"), (X,)),
    "both": (lambda x: x * 2, (2, 2), ((("y", "x"),),), (("y", "x"),), (X,)),
}
EACH = pytest.mark.parametrize("name", PROGRAMS)
TWO_RESULTS = ("normalise", "shared")


def specs(given: Any, spec: Any, several: bool) -> Any:
    return tuple(spec(*s) for s in given) if several else spec(*given)


def ours(name: str, **options: Any) -> Any:
    f, shape, ins, outs, _ = PROGRAMS[name]
    return spmd.shard_map(
        f,
        mesh=mesh_of(*shape),
        in_specs=specs(ins, P, True),
        out_specs=specs(outs, P, name in TWO_RESULTS),
        **options,
    )


@EACH
def test_jaxs_shard_map_gives_the_same(name: str):
    jax = _jax()
    if jax.device_count() < 4:
        pytest.skip(f"JAX has {jax.device_count()} devices here; XLA_FLAGS sets their number")
    f, shape, ins, outs, args = PROGRAMS[name]
    theirs = jax.shard_map(
        f,
        mesh=jax.sharding.Mesh(np.reshape(jax.devices()[:4], shape), ("x", "y")[: len(shape)]),
        in_specs=specs(ins, jax.P, True),
        out_specs=specs(outs, jax.P, name in TWO_RESULTS),
    )
    for a, b in zip(as_numpy(ours(name)(*args)), as_numpy(theirs(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

    if name == "normalise":
        return  # JAX's pmax has no derivative

    def total(mapped: Any, numpy: Any, tree: Any) -> Any:
        return lambda *args: sum(numpy.sin(v).sum() for v in tree(mapped(*args)))

    found = spmd.grad(total(ours(name), snp, spmd.tree.leaves))(*args)
    wanted = jax.grad(total(theirs, jax.numpy, jax.tree.leaves))(*args)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@EACH
def test_compiled_means_lockstep(name: str):
    """The definition: every device's jaxpr, one equation at a time over NumPy."""
    mapped, args = ours(name), PROGRAMS[name][-1]
    closed = spmd.make_jaxpr(mapped)(*args)
    expected = impl_jaxpr(np, closed, *args)
    for found in (mapped(*args), spmd.jit(mapped)(*args), ours(name, check_vma=False)(*args)):
        for a, b in zip(as_numpy(found), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@EACH
def test_gradients(name: str):
    check_grads(ours(name), PROGRAMS[name][-1], 2, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("name", ["rows", "halo", "shared"])
def test_vmap(name: str):
    mapped, args = ours(name), PROGRAMS[name][-1]
    stacked = [np.stack([a, 2 * a, a - 1]) for a in args]
    found = spmd.vmap(mapped)(*stacked)
    for k in range(3):
        expected = mapped(*[a[k] for a in stacked])
        for a, b in zip(as_numpy(found), as_numpy(expected), strict=True):
            np.testing.assert_allclose(a[k], b, rtol=1e-5, atol=1e-6)


def test_cut_and_join_are_inverse():
    mesh = mesh_of(2, 2)
    for spec in (P(), P("x"), P(None, "y"), P("y", "x"), P(("x", "y")), P(("y", "x"), None)):
        shards = cut(X, spec, mesh)
        assert len(shards) == 4
        np.testing.assert_array_equal(join(shards, spec, mesh), X)


def test_lockstep_runs_a_jaxpr_on_given_sizes():
    closed = spmd.make_jaxpr(lambda x: x * 3)(np.float32(1))
    (out,) = Lockstep({"i": 3}).run(closed, [[np.float32(k) for k in range(3)]])
    assert [float(v) for v in out] == [0, 3, 6]


# ---- types -------------------------------------------------------------------------------------


def test_types_know_what_varies():
    seen: dict[str, str] = {}

    def f(x: Any, w: Any) -> Any:
        seen.update(
            x=str(spmd.typeof(x)),
            w=str(spmd.typeof(w)),
            product=str(spmd.typeof(x * w)),
            sum_x=str(spmd.typeof(lax.psum(x, "x"))),
            sum_all=str(spmd.typeof(lax.psum(x, ("x", "y")))),
            index=str(spmd.typeof(lax.axis_index("y"))),
            cast=str(spmd.typeof(lax.pvary(w, "x"))),
        )
        return x

    spmd.shard_map(f, mesh=mesh_of(2, 2), in_specs=(P("x", "y"), P()), out_specs=P("x", "y"))(
        X, np.float32(1)
    )
    assert seen == {
        "x": "float32[4,2]{V:(x,y)}",
        "w": "float32[]",
        "product": "float32[4,2]{V:(x,y)}",
        "sum_x": "float32[4,2]{V:y}",
        "sum_all": "float32[4,2]",
        "index": "int32[]{V:y}",
        "cast": "float32[]{V:x}",
    }


def test_loops_and_branches_vary_over_axes_as_their_casts_say():
    def f(x: Any) -> Any:
        zero = lax.pcast(snp.zeros(()), "x", to="varying")
        carried = lax.scan(lambda c, k: (c + x.sum() * k, c), zero, snp.arange(3.0))[0]
        chosen = lax.cond(x.sum() > 0, lambda: x.sum(), lambda: zero)
        looped = lax.while_loop(lambda c: c < 3, lambda c: c + abs(x).sum(), zero)
        return (carried + chosen + looped)[None]

    def definition(x: Any) -> Any:
        return (3 * x.sum() + max(x.sum(), 0) + _until_3(abs(x).sum()))[None]

    mapped = spmd.shard_map(f, mesh=mesh_of(4), in_specs=P("x"), out_specs=P("x"))
    expected = np.concatenate([definition(part) for part in np.split(X, 4)])
    np.testing.assert_allclose(mapped(X), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("f", "says"),
    [
        (
            lambda x: lax.scan(lambda c, y: ({"a": c["a"] + y}, y), {"a": 0.0}, x)[1],
            "carry['a']: given f32[], returned f32[]{V:x}; use lax.pcast(init['a'], ('x',), "
            "to='varying') before the loop",
        ),
        (
            lambda x: lax.fori_loop(0, 2, lambda k, c: lax.psum(c, "x"), x),
            "carry: given f32[2]{V:x}, returned f32[2]; use lax.pcast(result, ('x',), "
            "to='varying') in the body",
        ),
        (
            lambda x: lax.cond(x.sum() > 0, lambda y: y, lambda y: lax.psum(y, "x"), x),
            "use lax.pcast(result, ('x',), to='varying') in false_fun",
        ),
    ],
    ids=["a carry that begins equal", "a carry that becomes equal", "branches"],
)
def test_loops_and_branches_that_vary_over_other_axes_are_refused(f: Any, says: str):
    mapped = spmd.shard_map(f, mesh=mesh_of(4), in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(TypeError) as caught:
        mapped(np.arange(8, dtype=np.float32))
    assert says in str(caught.value)


def _until_3(step: Any) -> Any:
    out = np.float32(0)
    while out < 3:
        out = out + step
    return out


def test_custom_rules_inside():
    @spmd.custom_vjp
    def clipped(x: Any) -> Any:
        return snp.clip(x, -1, 1)

    clipped.defvjp(lambda x: (snp.clip(x, -1, 1), None), lambda _, ct: (ct,))
    mapped = spmd.shard_map(
        lambda w, x: lax.psum((clipped(w) * x).sum(), "x"),
        mesh=mesh_of(4),
        in_specs=(P(), P("x")),
        out_specs=P(),
    )
    gradient = spmd.grad(mapped)(np.full(4, 2, np.float32), X)
    np.testing.assert_allclose(gradient, X.sum(0), rtol=1e-5)


def test_data_parallel_step_has_the_gradient_of_the_whole_batch():
    def loss(w: Any, x: Any) -> Any:
        return snp.mean(snp.tanh(x @ w) ** 2)

    @spmd.jit
    @spmd.shard_map(mesh=mesh_of(4), in_specs=(P(), P("x")), out_specs=(P(), P()))
    def step(w: Any, x: Any) -> Any:
        value, gradient = spmd.value_and_grad(lambda w: lax.pmean(loss(w, x), "x"))(w)
        return value, w - 0.1 * gradient

    value, new = step(W, X)
    expected, gradient = spmd.value_and_grad(loss)(W, X)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(new, W - 0.1 * np.asarray(gradient), rtol=1e-5)


# ---- meshes ------------------------------------------------------------------------------------


def test_the_mesh_of_the_context():
    f = spmd.shard_map(lambda x: lax.psum(x, "x"), in_specs=P("x"), out_specs=P())
    with mesh_of(4):
        np.testing.assert_allclose(f(X), X.reshape(4, 2, 4).sum(0), rtol=1e-5)
    with mesh_of(2):
        np.testing.assert_allclose(f(X), X.reshape(2, 4, 4).sum(0), rtol=1e-5)


def test_results_are_laid_out_as_their_specs_say():
    mesh = mesh_of(2, 2)
    mapped = spmd.shard_map(lambda x: x, mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y"))
    out = mapped(X)
    assert out.sharding == NamedSharding(mesh, P("x", "y"))
    assert [s.data.shape for s in out.addressable_shards] == [(4, 2)] * 4
    for shard in out.addressable_shards:
        np.testing.assert_array_equal(shard.data, X[shard.index])


@pytest.mark.parametrize("jitted", [False, True])
def test_pullbacks_inside_take_a_cotangent_by_device(jitted: bool):
    """`w` is shared, so its cotangent is the sum over devices, though no operation sums."""

    def f(w: Any, x: Any) -> Any:
        add = spmd.jit(lambda w: w + x) if jitted else lambda w: w + x
        return spmd.vjp(add, w)[1](x)[0]

    mapped = spmd.shard_map(f, mesh=mesh_of(4), in_specs=(P(), P("x")), out_specs=P())
    x = X[:4, 0]
    np.testing.assert_allclose(mapped(np.ones(1, np.float32), x), [x.sum()], rtol=1e-6)


def test_a_product_in_a_map_inside_of_a_larger_program():
    """The map's body is optimised with the program around it, and once more by itself."""
    mesh = mesh_of(4)
    mapped = spmd.shard_map(
        lambda x, w: snp.tanh(x @ w), mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x")
    )
    back = lambda x, w, ct: spmd.vjp(mapped, x, w)[1](ct)  # noqa: E731
    ct = np.ones((8, 6), np.float32)
    plain = spmd.vjp(lambda x, w: snp.tanh(x @ w), X, W)[1](ct)
    for found, want in zip(spmd.jit(back)(X, W, ct), plain, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
