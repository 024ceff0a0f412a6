"""Behaviours beside JAX's: arguments that are taken, settings, structures, kinds of errors."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import numpy as np
import pytest

import spmd
from tests.jax.compare import OURS, THEIRS, assert_same, cases, jax

for _name in (
    "nn",
    "random",
    "scipy",
    "legacy_prng_key",
    "transfer_guard",
    "default_matmul_precision",
    "default_device",
    "pmap",
):  # imported when asked for
    setattr(OURS, _name, getattr(spmd, _name))
X = np.arange(12, dtype=np.float32).reshape(3, 4)
COV = np.array([[2.0, 0.5], [0.5, 1.0]], np.float32)


class Holder:
    """Something that stands for an array, in the way that JAX asks for."""

    def __init__(self, j: Any):
        self.j = j

    def __jax_array__(self) -> Any:
        return self.j.np.arange(3.0)


def known_and_traced(j: Any) -> Any:
    @j.jit
    def f(x: Any) -> Any:
        with j.ensure_compile_time_eval():
            n = int(j.np.ceil(j.np.log2(x.size)))
            y = x * 2
        return y + n

    return f(X)


def with_no_operands(j: Any) -> Any:
    return j.lax.cond(X[0, 0] == 0, 2.0, lambda x: x + 1, 5.0, lambda x: x * 2)


def shadowed(j: Any, inner: Any) -> Any:
    """What is inside of a map over an axis of a name, inside of another of that name."""
    return j.vmap(
        lambda row: (j.vmap(inner, axis_name="i")(row), j.lax.psum(row, "i")), axis_name="i"
    )


def summed_twice(j: Any) -> Any:
    return lambda x: j.np.sin(x) * j.lax.psum(x, "i") + j.lax.psum(2.0, "i") * j.lax.axis_index("i")


def gradient_of_shadowed(j: Any) -> Any:
    return j.grad(lambda x: sum(y.sum() for y in shadowed(j, summed_twice(j))(x)))(X)


def shadowed_in_loops(j: Any) -> Any:
    def inner(x: Any) -> Any:
        return j.lax.scan(
            lambda c, k: (c + j.lax.psum(x * k, "i"), c), x * 0, np.array([1, 2], np.float32)
        )

    return j.jit(shadowed(j, j.jit(inner)))(X)


@cases(
    axis_name_of_an_enclosing_map=lambda j: shadowed(j, summed_twice(j))(X),
    axis_name_of_an_enclosing_map_in_loops=shadowed_in_loops,
    axis_name_of_an_enclosing_map_gradient=gradient_of_shadowed,
    axis_name_of_devices=lambda j: j.pmap(
        lambda x: (j.vmap(lambda y: y * j.lax.psum(y, "i"), axis_name="i")(x), j.lax.psum(x, "i")),
        axis_name="i",
    )(X),
    columns_of_integers=lambda j: j.jacfwd(lambda x: ((x * 2).astype("int8"), x.sum()))(X[0]),
    rows_of_integers=lambda j: j.jacrev(lambda k, x: k * x, (0, 1), allow_int=True)(
        np.array([[1, 2], [3, 4]], np.int8), X[:2, :2]
    ),
    columns_of_integers_in_jit=lambda j: j.jit(j.jacfwd(lambda x: x.astype(int)))(X[0]),
    rows_of_integers_mapped=lambda j: j.vmap(j.jacrev(lambda k: k * 2.0, allow_int=True))(
        np.arange(3)
    ),
    unrolled_never=lambda j: j.lax.scan(lambda c, x: (c + x, c), 0.0, X[0], unroll=0),
    dims_of_size_1=lambda j: (j.lax.mul(X, X[:, :1]), j.lax.lt(X[:1], X), j.lax.max(2.0, X)),
    gradient_of_dims_of_size_1=lambda j: j.grad(lambda b: (j.lax.mul(X, b) ** 2).sum())(X[:, :1]),
    branches_with_an_operand_each=with_no_operands,
    functions_that_are_not_mapped=lambda j: j.vmap(lambda f, x: f(x), (None, 0))(j.np.sin, X),
    objects_that_are_not_mapped=lambda j: j.vmap(lambda a, x: x + a["k"], (None, 0))(
        {"k": 2.0, "of": None}, X
    ),
    arrays_by_conversion=lambda j: (j.np.array(Holder(j)), j.np.ones(3) + Holder(j)),
    reflected_arrays_by_conversion=lambda j: Holder(j).__jax_array__() * 2,
    known_values_at_compile_time=known_and_traced,
    dims_from_a_range=lambda j: j.np.expand_dims(X, range(2)),
    argpartition_of_an_array=lambda j: j.np.asarray(X)[0].argpartition(1).shape,
    densities_of_normal_vectors=lambda j: [
        getattr(j.scipy.stats.multivariate_normal, name)(x, X[0, :2], cov)
        for name in ("logpdf", "pdf")
        for x, cov in ((X[:, :2], COV), (X[0, 2:], 2.0), (X[:, :2], np.stack([COV, 2 * COV, COV])))
    ],
    gradient_of_a_density=lambda j: j.grad(
        lambda c: j.scipy.stats.multivariate_normal.logpdf(X[1, :2], X[0, :2], c)
    )(COV),
    functions_with_a_name=lambda j: j.lax.composite(lambda x, k: x * k, name="my.x")(X, k=2),
    algorithms_of_products=lambda j: [
        j.lax.dot(X, X.T, precision=p) for p in (j.lax.DotAlgorithmPreset.F32_F32_F32, None)
    ],
    sizes_of_structures=lambda j: len(j.ShapeDtypeStruct((3, 2), np.float32)),
)
def test_what_is_taken(case):
    assert_same(case)


ERRORS = {
    "custom_vjp without rules": lambda j: j.grad(j.custom_vjp(lambda x: x))(1.0),
    "custom_jvp without rules": lambda j: j.jvp(j.custom_jvp(lambda x: x), (1.0,), (1.0,)),
    "static method": lambda j: j.jit(staticmethod(abs)),
    "dims that differ": lambda j: j.lax.add(X, X[:, :3]),
    "ranks that differ": lambda j: j.lax.add(X, X[0]),
    "signed bits": lambda j: j.random.bits(j.random.key(0), (2,), np.int32),
    "negative unroll": lambda j: j.lax.scan(lambda c, x: (c, x), 0.0, X, unroll=-1),
    "raw keys": lambda j: raw_key_is_an_error(j),
    "products of no precision": lambda j: j.default_matmul_precision("exact").__enter__(),
    "number as a device": lambda j: j.default_device(3).__enter__(),
    "name of no platform": lambda j: j.default_device("abacus").__enter__(),
    "number of a device": lambda j: j.default_device("cpu:1").__enter__(),
    "host arrays": lambda j: host_array_is_an_error(j),
    "host arguments of jit": lambda j: host_argument_is_an_error(j),
}


def raw_key_is_an_error(j: Any) -> Any:
    with j.legacy_prng_key("error"):
        return j.random.normal(j.random.PRNGKey(0))


def host_array_is_an_error(j: Any) -> Any:
    x = j.np.ones(3)
    with j.transfer_guard("disallow"):
        return x + np.ones(3, np.float32)


def host_argument_is_an_error(j: Any) -> Any:
    with j.transfer_guard("disallow"):
        return j.jit(lambda x: x + x)(X)


@pytest.mark.parametrize("call", ERRORS.values(), ids=ERRORS)
def test_kinds_of_errors(call):
    """Ours is an instance of the built-in class of JAX's."""
    with pytest.raises(Exception) as theirs:  # the oracle
        call(THEIRS)
    builtin = next(c for c in type(theirs.value).__mro__ if c.__module__ == "builtins")
    with pytest.raises(builtin):
        call(OURS)


@pytest.mark.parametrize("name", sorted(jax.lax.DotAlgorithmPreset.__members__))
def test_precisions_have_the_names_of_jax(name):
    for library in (spmd, jax):
        if name == "DEFAULT":
            with pytest.raises(ValueError, match=r"default"):
                library.default_matmul_precision(name).__enter__()
        else:
            with library.default_matmul_precision(name):
                assert library.config.jax_default_matmul_precision == name


def test_partials_are_those_of_python():
    for library in (spmd, jax):
        kind = library.tree_util.Partial
        outer = kind(functools.partial(max, 1), 2, key=abs)
        assert isinstance(outer, functools.partial) and outer(-3) == -3
        assert outer.args == (2,) and outer.keywords == {"key": abs}
        assert pickle.loads(pickle.dumps(outer)).args == (2,)
        assert library.tree_util.tree_leaves(kind(kind(max, 5), 2)) == [2]
    assert outer.func(0) == 1


TREES = [0, (), None, [1, (2,), {"b": 3, "a": None}], {"x": [1, 2], "y": ((),)}]


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_structures(tree):
    ours, theirs = spmd.tree.structure(tree), jax.tree_util.tree_structure(tree)
    leaves = list(range(10, 10 + ours.num_leaves))
    assert str(ours) == str(theirs) and ours.num_nodes == theirs.num_nodes
    assert ours.node_data() == theirs.node_data()
    assert [str(c) for c in ours.children()] == [str(c) for c in theirs.children()]
    assert ours.walk(lambda xs, d: (xs, d), lambda x: -x, leaves) == theirs.walk(
        lambda xs, d: (xs, d), lambda x: -x, leaves
    )
    for inner in TREES:
        composed = ours.compose(spmd.tree.structure(inner))
        assert str(composed) == str(theirs.compose(jax.tree_util.tree_structure(inner)))
        assert composed.num_leaves == ours.num_leaves * spmd.tree.structure(inner).num_leaves
    kind = spmd.tree_util.PyTreeDef
    written = ours.serialize_using_proto()
    assert kind.deserialize_using_proto(spmd.tree_util.default_registry, written) == ours
    again = kind.from_node_data_and_children(None, ours.node_data(), ours.children())
    assert again == ours


def test_options_of_jax_are_known():
    for name in jax.config.values:
        if name.startswith("jax_"):
            assert name in spmd.config.values, name
            spmd.config.read(name)
    before = spmd.config.jax_threefry_partitionable
    spmd.config.update("jax_threefry_partitionable", not before)
    assert spmd.config.jax_threefry_partitionable is not before
    spmd.config.jax_threefry_partitionable = before
