"""Exported functions: equal to what was exported, for all sizes, from bytes, in another process."""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest

import spmd
import spmd.numpy as jnp
from spmd import ShapeDtypeStruct, export, grad, jit, lax, nn, random, scipy, vmap
from spmd.errors import (
    ArgumentError,
    DtypeError,
    GradError,
    InconclusiveDimensionOperation,
    PytreeError,
    ShapeError,
)

RNG = np.random.default_rng(0)
SCOPE = export.SymbolicScope()
WEIGHTS = RNG.normal(size=(4, 3)).astype(np.float32)


def symbolic(spec, dtype="float32"):
    """A description of an argument with named sizes."""
    return ShapeDtypeStruct(export.symbolic_shape(spec, scope=SCOPE), dtype)


def array(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def same(found, wanted, rtol=1e-5):
    found, wanted = spmd.tree.leaves(found), spmd.tree.leaves(wanted)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=rtol, atol=1e-6)


# ---- what can be exported ----------------------------------------------------------------------


def rolled(x):
    def step(carry, row):
        return jnp.tanh(carry + row), carry.sum()

    return lax.scan(step, jnp.zeros(4), x)


def looped(x):
    return lax.while_loop(
        lambda s: s[0] < x.shape[0], lambda s: (s[0] + 1, s[1] + x[s[0]]), (0, x[0])
    )


@spmd.custom_jvp
def bent(x):
    return jnp.where(x > 0, x, 0.1 * x)


bent.defjvp(lambda primals, tangents: (bent(*primals), tangents[0] * 7.0))


@spmd.custom_vjp
def odd(x):
    return jnp.sin(x)


odd.defvjp(lambda x: (odd(x), x), lambda x, ct: (ct * 3.0,))

FUNCTIONS = {
    "layer": lambda x: nn.softmax(nn.gelu(x @ WEIGHTS)),
    "mean, which divides by the size": lambda x: (x.mean(0), x.mean(1), x.std()),
    "sizes that are sums and products": lambda x: (x.reshape(-1), jnp.concatenate([x, x[1:], x])),
    "sorting": lambda x: (jnp.sort(x, 0), jnp.argsort(x, 0), lax.top_k(x, 2)),
    "reading and writing": lambda x: (x[:, ::2], x.at[1:, 2].add(2.0), x[np.array([0, -1])], x[-1]),
    "scan": rolled,
    "while": looped,
    "cond": lambda x: lax.cond(x.sum() > 0, jnp.sin, lambda y: y * 2, x),
    "rules of its own": lambda x: (bent(x), odd(x), nn.relu(x)),
    "cumulative": lambda x: (jnp.cumsum(x, 0), lax.cummax(x, reverse=True)),
    "keys": lambda x: x + random.normal(random.key(3), x.shape) + random.uniform(random.PRNGKey(1)),
    "moved and padded": lambda x: jnp.pad(x.T, ((1, 2), (0, 1)), constant_values=-jnp.inf),
    "sizes as values": lambda x: (jnp.arange(len(x)), x * len(x), x / len(x), jnp.eye(len(x))),
    "dtypes": lambda x: (x.astype(jnp.bfloat16), x > 0, x.astype(int), x + 1j, jnp.round(x)),
    "a transformed function": lambda x: vmap(grad(lambda r: jnp.sum(jnp.tanh(r) ** 2)))(x),
    "an argument and a constant": lambda x: (x, 3, jnp.float32(2), {"a": [x, None]}),
    "called inside": lambda x: jit(jnp.exp)(jit(jnp.sin)(x)),
    "rows by rows": lambda x: x @ x.T,
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_file_serves_all_sizes(name):
    f = FUNCTIONS[name]
    exported = export.export(jit(f))(symbolic("b, 4"))
    loaded = export.deserialize(exported.serialize())
    assert str(loaded) == str(exported)
    for b in (2, 5):
        x = array(b, 4)
        same(loaded.call(x), jit(f)(x))
    same(exported.call(x), loaded.call(x), rtol=0)


@pytest.mark.parametrize("name", ["attention", "convolution", "pooling"])
def test_networks(name):
    def pooled(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2), (1, 2, 2), "VALID")

    functions = {
        "attention": (lambda x: nn.dot_product_attention(x, x, x, is_causal=True), (3, 8, 2, 4)),
        "convolution": (lambda x: lax.conv(x, np.ones((2, 3, 3, 3), np.float32), (1, 1), "SAME"),
                        (2, 3, 6, 6)),
        "pooling": (pooled, (3, 6, 6)),
    }  # fmt: skip
    f, shape = functions[name]
    spec = "b, " + ", ".join(map(str, shape[1:]))
    exported = export.export(jit(f))(symbolic(spec))
    x = array(*shape)
    same(export.deserialize(exported.serialize()).call(x), f(x), rtol=1e-4)


def test_two_symbols():
    def f(x, y):
        b = x.shape[0]
        return x.reshape(-1), jnp.zeros(4 * b * b + 1), x @ y

    exported = export.export(jit(f))(symbolic("b, s"), symbolic("s, 2*b"))
    x, y = array(3, 4), array(4, 6)
    same(exported.call(x, y), f(x, y))
    assert [str(a.shape) for a in exported.out_avals[1:]] == ["(4*b^2 + 1,)", "(b, 2*b)"]


def _late(x):
    """What it is made of is imported when it is first used, in part by `scipy` only."""
    made = scipy.special.expi(x) + lax.erf(x) + jnp.linalg.inv(x.T @ x + jnp.eye(4))[0]
    return made + random.uniform(random.key(0), (4,))


@pytest.mark.parametrize("f", [FUNCTIONS["layer"], _late], ids=["layer", "late"])
def test_another_process_needs_no_source(f, tmp_path):
    x = array(6, 4)
    exported = export.export(jit(f))(symbolic("b, 4"))
    (tmp_path / "f.spmd").write_bytes(exported.serialize(vjp_order=1))
    np.save(tmp_path / "x.npy", x)
    program = """
import sys, numpy as np, spmd
from pathlib import Path
here = Path(sys.argv[1])
f = spmd.export.deserialize((here / "f.spmd").read_bytes())
x = np.load(here / "x.npy")
np.save(here / "y.npy", f.call(x))
np.save(here / "g.npy", spmd.grad(lambda x: (f.call(x) ** 2).sum())(x))
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=120)
    same(np.load(tmp_path / "y.npy"), f(x))
    same(np.load(tmp_path / "g.npy"), grad(lambda x: (f(x) ** 2).sum())(x))


# ---- transformations ---------------------------------------------------------------------------


def test_derivatives_are_those_of_the_source():
    f = lambda w, x, n: jnp.sum(jnp.tanh(odd(x) @ w) ** 2) + n  # noqa: E731
    exported = export.export(jit(f))(WEIGHTS, symbolic("b, 4"), 3)
    loaded = export.deserialize(exported.serialize(vjp_order=2))
    x = array(3, 4)
    for found in (exported, loaded):
        same(grad(found.call, (0, 1))(WEIGHTS, x, 3), grad(f, (0, 1))(WEIGHTS, x, 3))

    def second(call):
        return grad(lambda w: jnp.sum(grad(call)(w, x, 3) ** 2))(WEIGHTS)

    same(second(loaded.call), second(f), rtol=1e-4)
    assert loaded.vjp().has_vjp() and not loaded.vjp().vjp().has_vjp()
    assert loaded.vjp().fun_name == "vjp_<lambda>"


def test_under_jit_and_vmap():
    f = FUNCTIONS["layer"]
    loaded = export.deserialize(export.export(jit(f))(symbolic("b, 4")).serialize())
    x = array(5, 2, 4)
    same(jit(vmap(loaded.call))(x), f(x))
    assert spmd.make_jaxpr(loaded.call)(x[0]).out_avals[0].shape == (2, 3)


def test_a_file_without_derivative_says_so():
    loaded = export.deserialize(export.export(jit(jnp.sin))(1.0).serialize())
    assert not loaded.has_vjp()
    for differentiate in (lambda: grad(loaded.call)(1.0), loaded.vjp):
        with pytest.raises(
            GradError, match=r"no derivative; write the file with serialize\(vjp_or"
        ):
            differentiate()


# ---- structures --------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: object
    right: object


def test_structures_of_arguments_and_results():
    def f(params, *, scale):
        return Pair(params["w"] * scale, None)

    exported = export.export(jit(f))({"w": array(2), "v": (array(3),)}, scale=2.0)
    with pytest.raises(ArgumentError, match="holds a Pair that files don't know"):
        exported.serialize()
    export.register_namedtuple_serialization(Pair, serialized_name="tests.Pair")
    loaded = export.deserialize(exported.serialize())
    w = array(2)
    found = loaded.call({"w": w, "v": (array(3),)}, scale=3.0)
    assert type(found) is Pair and found.right is None
    same(found.left, w * 3)
    with pytest.raises(PytreeError, match=r"f: exported for arguments .*, called with"):
        loaded.call({"w": w}, scale=3.0)


# ---- mistakes ----------------------------------------------------------------------------------


def test_arguments_that_do_not_fit():
    loaded = export.export(jit(lambda x, y: x + y["a"]))(symbolic("b, 4"), {"a": symbolic("b, 1")})
    cases = [
        (array(3, 5), array(3, 1), ShapeError, r"\[0\]: dim 1 of float32\[3,5\] has size 5, but"),
        (array(3, 4), array(2, 1), ShapeError, r"\[1\]\['a'\]: dim 0 .* must be b = 3 \(b"),
        (array(4), array(4, 1), ShapeError, r"is float32\[4\], exported for"),
        (array(3, 4) > 0, array(3, 1), DtypeError, r"is bool\[3,4\], exported for"),
    ]  # fmt: skip
    for x, y, kind, text in cases:
        with pytest.raises(kind, match=text):
            loaded.call(x, {"a": y})


def test_sizes_that_cannot_be_solved():
    even = export.export(jit(jnp.sum))(symbolic("2*b"))
    with pytest.raises(ShapeError, match=r"has size 3, which no b makes 2\*b"):
        even.call(array(3))
    with pytest.raises(ShapeError, match=r"'a' can't be found out from a\*b"):
        export.export(jit(jnp.sum))(symbolic("a*b"))
    shape = export.symbolic_shape("c", constraints=["c >= 2", "c <= 8"])
    few = export.export(jit(lambda x: x * 2))(ShapeDtypeStruct(shape, "float32"))
    few = export.deserialize(few.serialize())
    x = array(8)
    same(few.call(x), x * 2)
    with pytest.raises(ShapeError, match=r"exported for c <= 8 only, called with c = 9"):
        few.call(array(9))


@pytest.mark.parametrize(
    "f, text",
    [
        (lambda x: jnp.sin(x) if x.shape[0] % 2 else x, "branches on a size"),
        (lambda x: x + np.arange(x.shape[0], dtype=np.float32), "the constant array of"),
        (lambda x: x[: x.shape[0] // 9], "not a polynomial with integer coefficients"),
        (lambda x: {"odd": x} if x.shape[0] % 2 else {"even": x}, "structure of the results"),
    ],
)
def test_programs_that_depend_on_the_size_are_refused(f, text):
    with pytest.raises(ArgumentError, match=text):
        export.export(jit(f))(symbolic("b"))


def test_what_is_not_exported():
    with pytest.raises(ArgumentError, match=r"must be jitted, got .*; use jit\(f\)"):
        export.export(abs)
    with pytest.raises(ArgumentError, match=r"the debug_callback of .* has an effect"):
        export.export(jit(lambda x: spmd.debug.print("{}", x)))(array(2))


def test_bytes_that_are_not_a_file():
    blob = export.export(jit(jnp.sin))(1.0).serialize()
    cases = [
        (b"nonsense", "not the bytes of an exported function"),
        (blob.replace(b"spmd.export 1", b"spmd.export 9"), r"version 9; this spmd reads 1 to 1"),
        (blob.replace(b'"sin"', b'"cos"'), "the file is damaged"),
    ]
    for bad, text in cases:
        with pytest.raises(ArgumentError, match=text):
            export.deserialize(bad)
    loaded = export.deserialize(blob)
    loaded.document["equations"][0]["do"] = "no_such_thing"
    with pytest.raises(ArgumentError, match="the primitive 'no_such_thing', which does not exist"):
        loaded.call(1.0)


def test_wide_programs_need_wide_settings():
    with spmd.config.override("enable_x64", True):
        blob = export.export(jit(lambda x: x * 2 + 0.1))(symbolic("b", "float64")).serialize()
        same(export.deserialize(blob).call(np.ones(3)), np.full(3, 2.1), rtol=1e-15)
    with pytest.raises((ArgumentError, DtypeError), match=r"enable_x64|exported for"):
        export.deserialize(blob).call(np.ones(3))


# ---- symbolic sizes ----------------------------------------------------------------------------


def test_symbolic_shapes():
    b, four, sum_, a, c = export.symbolic_shape("b, 4, (a + 2*b)^2 - a*a, a, c")
    assert export.is_symbolic_dim(b) and four == 4
    assert str(sum_) == "4*b^2 + 4*a*b"
    assert sum_ == 4 * b * (b + a)
    assert sum_.evaluate({"a": 3, "b": 5}) == (3 + 10) ** 2 - 9
    assert b - b == 0 and str(3 - b) == "- b + 3"
    assert export.symbolic_shape("_, c, ...", scope=c.scope, like=(7, 8, 9)) == (7, c, 9)
    with pytest.raises(ArgumentError, match=r"'b//2' is not a size.*floordiv"):
        export.symbolic_shape("b//2")
    with pytest.raises(ArgumentError, match="needs `like`"):
        export.symbolic_shape("b, ...")
    with pytest.raises(ArgumentError, match="dim 0 of '2' is 2, that of `like` is 3"):
        export.symbolic_shape("2", like=(3,))
    with pytest.raises(InconclusiveDimensionOperation, match="is no number yet"):
        int(b)


def test_names_are_those_of_a_scope():
    (a,), (other,) = export.symbolic_shape("a"), export.symbolic_shape("a")
    assert a != other and a == export.symbolic_shape("a", scope=a.scope)[0]
    with pytest.raises(ArgumentError, match="of two scopes"):
        a + other
    with pytest.raises(ArgumentError, match="sizes of 2 scopes, made at"):
        export.export(jit(jnp.add))(*(ShapeDtypeStruct((s,), "float32") for s in (a, other)))


HALVES = {
    "floordiv(a + 1, 2), b": lambda x: x[::2],
    "floordiv(a + 1, 3), b": lambda x: x[1::3],
    "floordiv(a, 2), b": lambda x: x[: x.shape[0] // 2] + x.shape[0] // 2,
    "mod(a, 3), 2": lambda x: jnp.ones((x.shape[0] % 3, 2)),
    "a, floordiv(b + 1, 2)": lambda x: spmd.vmap(lambda row: row[::2])(x),
    "floordiv(a^2 + a, 2)": lambda x: jnp.zeros(x.shape[0] * (x.shape[0] + 1) // 2),
    "b*floordiv(a + 1, 2)": lambda x: x[::2].reshape(-1),
    "": lambda x: x[1::2].mean(),
}


@pytest.mark.parametrize("form", HALVES)
def test_sizes_may_be_quotients(form):
    exported = export.export(jit(HALVES[form]))(symbolic("a, b"))
    assert ", ".join(map(str, exported.out_avals[0].shape)) == form
    loaded = export.deserialize(exported.serialize())
    for n, m in ((5, 6), (8, 7), (301, 2)):
        x = array(n, m)
        same(loaded.call(x), HALVES[form](jnp.asarray(x)), rtol=1e-5)


def test_specs_for_a_tree_of_arguments():
    args = {"x": array(3, 4), "y": (array(5),)}
    found = export.symbolic_args_specs(args, {"x": "b, _", "y": ("n",)})
    assert str(found["x"].shape) == "(b, 4)" and str(found["y"][0].shape) == "(n,)"
    assert export.symbolic_args_specs(args, "b, ...")["x"].shape[1] == 4
    assert export.symbolic_args_specs(args, {"x": None, "y": "n"})["x"].shape == (3, 4)
    with pytest.raises(PytreeError, match="shapes_specs of symbolic_args_specs"):
        export.symbolic_args_specs(args, {"x": "b, _"})


def test_the_document_is_readable_and_the_same_each_time():
    first, second = (export.export(jit(FUNCTIONS["scan"]))(symbolic("b, 4")) for _ in range(2))
    assert first.serialize() == second.serialize()
    assert b'"do": "scan"' in first.serialize() and b'{"size": "b"}' in first.serialize()
