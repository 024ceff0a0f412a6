"""custom_partitioning: rules and callbacks decide layouts; values are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, export, lax
from spmd.custom_partitioning import custom_partitioning
from spmd.errors import (
    ArgumentError,
    DtypeError,
    PytreeError,
    ShapeError,
    ShardingError,
    UnexpectedTracerError,
)
from spmd.sharding import AxisType
from tests.partition.programs import auto_mesh

A = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
B = np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32)
MESH = {"x": 4}
GRID = {"x": 2, "y": 2}


def put(x: Any, *spec: Any, sizes: dict[str, int] = MESH) -> Any:
    mesh = auto_mesh(tuple(sizes.values()), tuple(sizes))
    return spmd.device_put(x, NamedSharding(mesh, P(*spec)))


def kinds(f: Callable[..., Any], *args: Any) -> list[str]:
    return [c.kind for c in spmd.debug.collectives(f)(*args)]


def shardings(tree: Any) -> Any:
    return spmd.tree.map(lambda s: s.sharding, tree)


def product(
    seen: list[Any] | None = None, rule: Any = "i j, j k -> i k", **options: Any
) -> Callable[..., Any]:
    """A matrix product whose parts are multiplied, and summed where the inner dim is split."""

    @custom_partitioning
    def f(a, b):
        return a @ b

    def partition(mesh, arg_shapes, result_shape):
        if seen is not None:
            seen.append((*(s.sharding.spec for s in arg_shapes), result_shape.sharding.spec))
        axes = arg_shapes[0].sharding.spec.axes_of(arg_shapes[0].ndim - 1)
        lower_fn = lambda a, b: lax.psum(a @ b, axes) if axes else a @ b  # noqa: E731
        return mesh, lower_fn, result_shape.sharding, shardings(arg_shapes)

    f.def_partition(partition, sharding_rule=rule, **options)
    return f


def fft_of_rows(**options: Any) -> Callable[..., Any]:
    """FFTs of the last dim, which is not split; the others stay as they are."""

    @custom_partitioning
    def f(x):
        return snp.fft.fft(x)

    def supported(x):
        return NamedSharding(x.sharding.mesh, P(*x.sharding.spec[: x.ndim - 1], None))

    def partition(mesh, arg_shapes, result_shape):
        rows = supported(arg_shapes[0])
        return mesh, snp.fft.fft, rows, (rows,)

    if not options:
        options["infer_sharding_from_operands"] = lambda mesh, args, result: supported(args[0])
    f.def_partition(partition, **options)
    return f


# ---- rules -------------------------------------------------------------------------------------

PRODUCTS = {
    "rows": (("x",), (), P("x"), []),
    "columns": ((), (None, "x"), P(None, "x"), []),
    "inner dim": ((None, "x"), ("x",), P(), ["all_reduce"]),
    "rows of one, columns of the other": (("x",), (None, "x"), P("x"), ["all_gather"]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_rule_ties_dims(name):
    one, other, out, collectives = PRODUCTS[name]
    f, arguments = product(), (put(A, *one), put(B, *other))
    found = spmd.jit(f)(*arguments)
    assert found.sharding.spec == out
    assert kinds(f, *arguments) == collectives
    np.testing.assert_allclose(found, A @ B, rtol=1e-4, atol=1e-5)


def test_a_rule_lays_out_operands_that_are_not_placed():
    seen: list[Any] = []
    spmd.jit(product(seen))(put(A, None, "x"), B)
    assert set(seen) == {(P(None, "x"), P("x", None), P(None, None))}


def test_a_rule_goes_back_to_operands():
    f = spmd.jit(product(), out_shardings=put(A, "x").sharding)
    assert f(A, B).sharding.spec == P("x")
    assert not kinds(f, A, B)


def test_factors_that_are_not_split():
    seen: list[Any] = []
    f = product(seen, need_replication_factors=("j",))
    arguments = put(A, None, "x"), put(B, "x")
    np.testing.assert_allclose(spmd.jit(f)(*arguments), A @ B, rtol=1e-4, atol=1e-5)
    assert set(seen) == {(P(None, None),) * 3}
    assert kinds(f, *arguments) == ["all_gather"] * 2


def test_leading_dims():
    seen: list[Any] = []
    f = product(seen, "...i j, j k -> ...i k", reduction_factors=("j",))
    x = np.stack([A, B])
    out = spmd.jit(f)(put(x, "x", None, "y", sizes=GRID), B)
    np.testing.assert_allclose(out, x @ B, rtol=1e-4, atol=1e-5)
    assert seen[0][0] == P("x", None, "y") and seen[0][2] == P("x", None, None)


def test_a_dim_of_two_factors():
    @custom_partitioning
    def heads(x):
        return x.reshape(8, 2, 4)

    def partition(mesh, arg_shapes, result_shape):
        return (
            mesh,
            lambda x: x.reshape(x.shape[0], -1, 4),
            result_shape.sharding,
            shardings(arg_shapes),
        )

    heads.def_partition(partition, sharding_rule="i (a b) -> i a b")
    out = spmd.jit(heads)(put(A, None, "x", sizes=GRID))
    assert out.sharding.spec == P(None, "x")
    np.testing.assert_array_equal(out, A.reshape(8, 2, 4))
    # Two heads are not split over four devices.
    out = spmd.jit(heads)(put(A, None, "x"))
    assert out.sharding.spec == P()
    np.testing.assert_array_equal(out, A.reshape(8, 2, 4))


def test_a_rule_from_a_function():
    def rule(mesh, arg_shapes, result_shapes):
        assert mesh.shape == MESH and [s.shape for s in arg_shapes] == [(8, 8)] * 2
        assert [s.shape for s in result_shapes] == [(8, 8)]
        return "i j, j k -> i k", {"need_replication_factors": ("i",)}

    seen: list[Any] = []
    f = product(seen, rule)
    np.testing.assert_allclose(spmd.jit(f)(put(A, "x"), B), A @ B, rtol=1e-4, atol=1e-5)
    assert seen[0][0][0] is None


# ---- callbacks ---------------------------------------------------------------------------------


def test_results_inferred_from_operands():
    f, x = fft_of_rows(), put(A, "x")
    out = spmd.jit(lambda x: f(x) * 2)(x)
    assert out.sharding.spec == P("x") and not kinds(f, x)
    np.testing.assert_allclose(out, np.fft.fft(A) * 2, rtol=1e-4, atol=1e-4)


def test_operands_are_moved_to_what_partition_says():
    f, x = fft_of_rows(), put(A, None, "x")
    out = spmd.jit(f)(x)
    assert out.sharding.spec == P() and kinds(f, x) == ["all_gather"]
    np.testing.assert_allclose(out, np.fft.fft(A), rtol=1e-4, atol=1e-4)


def test_partition_alone_decides():
    f = fft_of_rows(decode_shardings=True, sharding_rule=None)
    assert spmd.jit(f)(put(A, "x")).sharding.spec == P("x")


def test_the_wishes_of_readers():
    seen = []

    @custom_partitioning
    def f(x):
        return x + 1

    def partition(mesh, arg_shapes, result_shape):
        seen.append(result_shape.sharding.spec)
        return mesh, lambda x: x + 1, result_shape.sharding, (result_shape.sharding,)

    def wish(mesh, user_shape):
        assert user_shape.sharding.spec == P("x", None)
        return NamedSharding(mesh, P(None, "x"))

    f.def_partition(partition, propagate_user_sharding=wish)
    g = spmd.jit(f, out_shardings=put(A, "x").sharding)
    np.testing.assert_array_equal(g(A), A + 1)
    assert seen[0] == P(None, "x")


def test_static_and_named_arguments():
    @custom_partitioning
    def power(x, n=2):
        return x**n

    def partition(n, mesh, arg_shapes, result_shape):
        return mesh, lambda x: x**n, result_shape.sharding, shardings(arg_shapes)

    def infer(n, mesh, arg_shapes, result_shape):
        assert n in (2, 3) and len(arg_shapes) == 1
        return arg_shapes[0].sharding

    static = custom_partitioning(power.fun, static_argnums=(1,))
    static.def_partition(partition, infer)
    for call, n in ((lambda x: static(x), 2), (lambda x: static(n=3, x=x), 3)):
        out = spmd.jit(call)(put(A, "x"))
        assert out.sharding.spec == P("x")
        np.testing.assert_allclose(out, A**n, rtol=1e-5)
    with pytest.raises(UnexpectedTracerError, match="as a static argument"):
        spmd.jit(static)(A, 2)


def test_pytrees():
    @custom_partitioning
    def f(batch):
        return {"sum": batch["x"] + batch["y"], "total": (batch["x"].sum(),)}

    def partition(mesh, arg_shapes, result_shape):
        (batch,) = arg_shapes
        assert (batch["x"].shape, batch["y"].dtype) == ((8, 8), np.float32)

        def lower_fn(batch):
            return {"sum": batch["x"] + batch["y"], "total": (lax.psum(batch["x"].sum(), "x"),)}

        rows = NamedSharding(mesh, P("x"))
        whole = NamedSharding(mesh, P())
        return mesh, lower_fn, {"sum": rows, "total": (whole,)}, ({"x": rows, "y": rows},)

    f.def_partition(partition, sharding_rule="i j, i j -> i j, ")
    out = spmd.jit(f)({"x": put(A, None, "x"), "y": B})
    assert out["sum"].sharding.spec == P("x")
    np.testing.assert_allclose(out["sum"], A + B, rtol=1e-6)
    np.testing.assert_allclose(out["total"][0], A.sum(), rtol=1e-4)


FUNCTIONS = {
    "a permutation": (
        lambda x: snp.roll(x, 2, 0),
        lambda x: lax.ppermute(x, "x", [(i, (i + 1) % 4) for i in range(4)]),
        (P("x"), P("x")), {"permutation_factors": ("i",)},
    ),
    "a gather": (
        lambda x: x * 2, lambda x: lax.all_gather(x, "x", tiled=True) * 2, (P("x"), P()), {},
    ),
    "a sum of equal parts": (lambda x: x * 4, lambda x: lax.psum(x, "x"), (P(), P()), {}),
    "a loop": (
        lambda x: snp.cumsum(x, 1),
        lambda x: lax.scan(lambda c, r: (c + r, c + r), snp.zeros(len(x)), x.T)[1].T,
        (P("x"), P("x")), {"need_replication_factors": ("j",)},
    ),
    "the position": (
        lambda x: x + snp.arange(8.0)[:, None] // 2,
        lambda x: x + lax.axis_index("x"), (P("x"), P("x")), {},
    ),
    "jit inside": (spmd.jit(lambda x: -x), spmd.jit(lambda x: -x), (P("x"), P("x")), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_parts(name):
    fun, lower_fn, (into, out), options = FUNCTIONS[name]
    f = custom_partitioning(fun)

    def partition(mesh, arg_shapes, result_shape):
        return mesh, lower_fn, NamedSharding(mesh, out), (NamedSharding(mesh, into),)

    f.def_partition(partition, sharding_rule="i j -> i j", **options)
    found = spmd.jit(lambda x: f(f(x)))(put(A, "x"))
    assert found.sharding.spec == out
    np.testing.assert_allclose(found, fun(fun(A)), rtol=1e-4, atol=1e-5)


def test_lines_of_collectives_are_those_of_the_function():
    (found,) = spmd.debug.collectives(product())(put(A, None, "x"), put(B, "x"))
    assert found.source.function == "<lambda>" and found.source.file == __file__


# ---- transformations ---------------------------------------------------------------------------


def test_without_a_mesh_the_function_runs_as_it_is():
    f = product()
    np.testing.assert_allclose(f(A, b=B), A @ B, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(spmd.jit(f)(A, B), A @ B, rtol=1e-5, atol=1e-6)
    assert "custom_partitioning" in str(spmd.make_jaxpr(f)(A, B))


def test_derivatives_and_vmap_are_those_of_the_function():
    f = product()
    grad = spmd.grad(lambda a, b: f(a, b).sum())
    wanted = np.ones((8, 8)) @ B.T
    for call in grad, spmd.jit(grad):
        np.testing.assert_allclose(call(A, B), wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(call(put(A, "x"), B), wanted, rtol=1e-4, atol=1e-5)
    out = spmd.jit(spmd.vmap(f, (0, None)))(put(np.stack([A] * 4), "x"), B)
    assert out.sharding.spec == P("x")
    np.testing.assert_allclose(out, np.stack([A @ B] * 4), rtol=1e-4, atol=1e-5)


def test_custom_vjp_around_it():
    seen: list[Any] = []
    f = spmd.custom_vjp(product(seen))
    backward = product(seen)

    def bwd(residuals, ct):
        a, b = residuals
        return backward(ct, b.T), backward(a.T, ct)

    f.defvjp(lambda a, b: (f(a, b), (a, b)), bwd)
    grad = spmd.grad(lambda a, b: (f(a, b) ** 2).sum(), (0, 1))
    found = spmd.jit(grad)(put(A, "x"), B)
    plain = spmd.grad(lambda a, b: ((a @ b) ** 2).sum(), (0, 1))(A, B)
    for one, other in zip(found, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)
    rows, whole, columns = P("x", None), P(None, None), P(None, "x")
    assert set(seen) == {(rows, whole, rows), (columns, rows, whole)}
    assert found[0].sharding.spec == P("x")


def test_in_control_flow():
    f = product()

    def run(f, a, b):
        a = lax.scan(lambda c, s: (f(c, b) * s, None), a, np.ones(3, np.float32) / 4)[0]
        a = lax.fori_loop(0, 2, lambda _, c: f(c, b) / 4, a)
        return lax.cond(a[0, 0] > 0, lambda a: f(a, b), lambda a: f(a, b) * 2, a)

    out = spmd.jit(lambda a, b: run(f, a, b))(put(A, "x"), B)
    assert out.sharding.spec == P("x")
    np.testing.assert_allclose(out, run(snp.matmul, A, B), rtol=1e-3, atol=1e-4)
    # In a scan, `checkpoint` and `grad`, too.
    loss = spmd.checkpoint(lambda a, b: run(f, a, b).sum())
    plain = spmd.grad(lambda a, b: run(snp.matmul, a, b).sum())(A, B)
    found = spmd.jit(spmd.grad(lambda a, b: loss(a, b)), static_argnums=())(put(A, "x"), B)
    np.testing.assert_allclose(found, plain, rtol=1e-3, atol=1e-4)


def test_in_maps():
    seen: list[Any] = []
    f = product(seen)
    placed = put(A, "x", sizes=GRID)
    mesh = placed.sharding.mesh
    whole = spmd.shard_map(f, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    np.testing.assert_allclose(spmd.jit(whole)(placed, B), A @ B, rtol=1e-4, atol=1e-5)
    assert not seen
    partly = spmd.shard_map(
        f, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"}
    )
    out = spmd.jit(partly)(put(A, "x", "y", sizes=GRID), B)
    np.testing.assert_allclose(out, A @ B, rtol=1e-4, atol=1e-5)
    assert set(seen) == {(P(None, "y"), P("y", None), P(None, None))}


def test_explicit_axes():
    mesh = spmd.make_mesh((4,), ("x",), AxisType.Explicit)
    f = product()

    @spmd.jit
    def g(a, b):
        out = f(a, b)
        assert spmd.typeof(out).explicit is None
        return spmd.reshard(out, NamedSharding(mesh, P(None, "x")))

    x = spmd.device_put(A, NamedSharding(mesh, P("x")))
    for call, spec in (spmd.jit(f), P("x", None)), (g, P(None, "x")):
        out = call(x, B)
        assert out.sharding.spec == spec
        np.testing.assert_allclose(out, A @ B, rtol=1e-4, atol=1e-5)


def test_sizes_that_do_not_divide():
    f = product()
    x = A[:6]
    out = spmd.jit(lambda a, b: f(a * 2, b))(put(x, None, "x"), B)
    np.testing.assert_allclose(out, x @ B * 2, rtol=1e-4, atol=1e-5)
    f = product(rule="i j, j k -> i k")
    out = spmd.jit(lambda a, b: f(a[1:-1], b))(put(A, "x"), B)
    np.testing.assert_allclose(out, A[1:-1] @ B, rtol=1e-4, atol=1e-5)


def test_export_holds_the_function():
    f = product()
    exported = export.export(spmd.jit(lambda a, b: f(a, b) + 1))(A, B)
    again = export.deserialize(exported.serialize())
    np.testing.assert_allclose(again.call(A, B), A @ B + 1, rtol=1e-4, atol=1e-5)


# ---- errors ------------------------------------------------------------------------------------


def returns(**changes: Any) -> Callable[..., Any]:
    """`x + 1`, with some of the values that `partition` returns changed."""

    @custom_partitioning
    def f(x):
        return x + 1

    def partition(mesh, arg_shapes, result_shape):
        given = {
            "mesh": mesh,
            "lower_fn": lambda x: x + 1,
            "result": result_shape.sharding,
            "args": shardings(arg_shapes),
        }
        made = {k: v(mesh) if k in ("result", "args") else v for k, v in changes.items()}
        return tuple((given | made).values())

    f.def_partition(partition, sharding_rule="i j -> i j")
    return f


def over(*spec: Any) -> Callable[[spmd.Mesh], NamedSharding]:
    return lambda mesh: NamedSharding(mesh, P(*spec))


OTHER = {"y": 4}
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "too many": ({"more": 1}, ArgumentError, r"partition returned \(.*; return \(mesh, lower_fn"),
    "no mesh": ({"mesh": None}, ShardingError, "returned the mesh None, but the program is over"),
    "no function": ({"lower_fn": 3}, ArgumentError, "returned 3 as lower_fn; return a function"),
    "a spec": (
        {"result": lambda mesh: P("x")}, ShardingError,
        r"result_shardings, which for array 0 P\('x',\), which is no NamedSharding",
    ),
    "another structure": (
        {"args": over("x")}, PytreeError, "arg_shardings.* must be a tuple with 1 children",
    ),
    "another mesh": (
        {"result": lambda mesh: put(A, "y", sizes=OTHER).sharding}, ShardingError,
        "a sharding over .*; use the mesh that the callback gets",
    ),
    "too many dims": (
        {"result": over(None, None, "x")}, ShardingError, "may have at most one for each dim",
    ),
    "shape of a part": (
        {"result": over()}, ShapeError, r"output 0 of shape \(2, 8\), and one device's part .* "
        r"\(8, 8\)",
    ),
    "dtype": (
        {"lower_fn": lambda x: x > 0}, DtypeError, "output 0 of dtype bool, and the function",
    ),
    "no array": ({"lower_fn": lambda x: "x"}, ArgumentError, "returned 'x' as output 0"),
    "structure of results": (
        {"lower_fn": lambda x: (x, x)}, PytreeError, r"of structure PyTreeDef\(\(\*, \*\)\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_partition_returns(name):
    changes, error, text = WRONG[name]
    with pytest.raises(error, match=r"custom_partitioning\(f\): .*" + text):
        spmd.jit(returns(**changes))(put(A, "x"))


def test_a_spec_that_does_not_divide():
    f = returns(result=over("x"))
    with pytest.raises(ShardingError, match=r"6 is not a multiple of 4\.\nPad dim 0 to 8"):
        spmd.jit(f)(put(A[:6], None, "x"))


def test_what_other_callbacks_return():
    f = fft_of_rows(infer_sharding_from_operands=lambda mesh, args, result: None)
    with pytest.raises(ShardingError, match="infer_sharding_from_operands returned for array 0"):
        spmd.jit(f)(put(A, "x"))
    f = fft_of_rows(propagate_user_sharding=lambda mesh, result: (result.sharding,))
    with pytest.raises(ShardingError, match="propagate_user_sharding returned for array 0"):
        spmd.jit(f)(put(A, "x"))
    f = product(rule=lambda *args: None)
    with pytest.raises(ArgumentError, match="sharding_rule returned None; return a string"):
        spmd.jit(f)(put(A, "x"), B)


def test_calls_that_cannot_be_made():
    f = custom_partitioning(lambda x: x)
    with pytest.raises(ArgumentError, match=r"has no partition; set one with \.def_partition"):
        f(A)
    with pytest.raises(ArgumentError, match="belong to a sharding_rule that is a string"):
        f.def_partition(lambda *args: None, need_replication_factors=("i",))

    def closes_over(x):
        g = custom_partitioning(lambda y: x + y)
        g.def_partition(lambda *args: None)
        return g(x)

    with pytest.raises(ArgumentError, match="closes over a traced value of f32"):
        spmd.jit(closes_over)(A)
