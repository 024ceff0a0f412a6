"""ONNX models: each primitive that has a form, and whole networks, run by onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import ShapeDtypeStruct, errors, export, jit, lax, nn
from spmd.base import dtypes
from spmd.export.onnx_graph import RULES
from tests.export.onnx_runtime import run, session
from tests.lax import records, records_indexing, records_windows

RECORDS = (*records.RECORDS, *records_indexing.RECORDS, *records_windows.RECORDS)
DTYPES = tuple(map(np.dtype, (np.float32, np.float64, np.int32, np.bool_)))


def close(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


def agrees(f: Any, *args: Any, specs: Any = None, tolerance: float = 1e-5) -> bytes:
    """The model of f gives f's results; with specs, it is made from those."""
    model = export.to_onnx(jit(f))(*(args if specs is None else specs))
    found = run(model, spmd.tree.leaves(args))
    for x, y in zip(found, spmd.tree.leaves(f(*args)), strict=True):
        close(x, y, tolerance)
    return model


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# ---- primitives --------------------------------------------------------------------------------

# Of primitives that have a form, the cases that have none.
REFUSED = {
    "convert_element_type-to complex128", "sort-two keys", "conv_general_dilated-batch groups",
    "conv_general_dilated-no space",
}  # fmt: skip
REFUSED_OF_INTEGERS = {"reduce_and", "reduce_or", "reduce_xor", "conv_general_dilated"}


def is_refused(record: records.Record, dtype: np.dtype) -> bool:
    of_integers = dtype.kind == "i" and record.primitive in REFUSED_OF_INTEGERS
    return of_integers or str(record) in REFUSED


def exported():
    return [
        pytest.param(r, d, id=f"{r}-{dtypes.short_name(d)}")
        for r in RECORDS
        for d in r.dtypes
        if r.primitive in RULES and d in DTYPES
    ]


@pytest.mark.parametrize("record, dtype", exported())
def test_records(record, dtype):
    with spmd.enable_x64(True):
        operands = record.make(dtype)

        def f(*xs: Any) -> Any:
            return record.function(lax, *xs)

        if is_refused(record, dtype):
            with pytest.raises(errors.RefusedError, match=f"to_onnx: {record.primitive} .*ONNX"):
                export.to_onnx(jit(f))(*operands)
            return
        model = export.to_onnx(jit(f))(*operands)
        wanted = np.asarray(f(*operands))
        if wanted.dtype == dtypes.bfloat16:
            return  # NumPy cannot take it from the runtime; test_bfloat16_inside has it
        (found,) = run(model, operands, only_runtime=False)
    if record.primitive in ("erf", "erfc") and dtype == np.float64:
        close(found, wanted, 1e-6)  # onnxruntime has none in float64, ONNX's own is a single's
        return
    eps = {"f": np.finfo(np.float32).eps, "d": np.finfo(np.float64).eps}.get(
        wanted.dtype.char, 1e-3
    )
    close(found, wanted, 0 if wanted.dtype.kind in "biu" else max(record.tolerance, 16) * eps)


def test_every_rule_has_a_record():
    elsewhere = {"attention", "cond", "optimization_barrier", "scan", "while"}
    assert set(RULES) - {r.primitive for r in RECORDS} - elsewhere == set()


def test_what_is_written_is_deterministic():
    f = jit(lambda x: nn.softmax(x @ x.T) + 1)
    x = normal(3, 3)
    assert export.to_onnx(f)(x) == export.to_onnx(f)(x) == export.to_onnx(jit(f))(x)


@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_rows_taken_directly_are_those_of_the_general_way(mode, monkeypatch):
    from spmd.export import onnx_index

    x, index = normal(5, 3), np.array([[0, 4], [7, -9]], np.int32)
    for axis in (0, 1):

        def f(x, index, axis=axis):
            return snp.take(x, index, axis=axis, mode=mode)

        agrees(f, x, index)
        with monkeypatch.context() as patch:
            patch.setattr(onnx_index, "takes_whole_rows", lambda eqn: False)
            agrees(f, x, index)


# ---- sizes that are known when the model is run ------------------------------------------------


def test_a_dynamic_batch():
    w = normal(4, 3)
    spec = ShapeDtypeStruct(export.symbolic_shape("b, 4"), np.float32)

    def f(x):
        h = nn.gelu(x @ w)
        centred = (h - h.mean(0)) / snp.sqrt(h.var(0) + 1e-3)
        return {"rows": snp.concatenate([centred, h]), "flat": h.reshape(-1), "loss": h.sum()}

    model = export.to_onnx(jit(f))(spec)
    runtime = session(model)
    assert [x.name for x in runtime.get_inputs()] == ["x"]
    described = {x.name: x.shape for x in runtime.get_outputs()}
    assert described == {"out['flat']": ["3*b"], "out['loss']": [], "out['rows']": ["2*b", 3]}
    for b in (1, 2, 17):
        x = normal(b, 4)
        for found, wanted in zip(run(model, [x]), spmd.tree.leaves(f(x)), strict=True):
            close(found, wanted)


def test_two_sizes_and_what_is_made_of_them():
    specs = [ShapeDtypeStruct(export.symbolic_shape("n, m"), np.float32)]

    def f(x):
        n, m = x.shape
        ramp = snp.arange(n * m, dtype=np.float32).reshape(n, m)
        return snp.tril(x + ramp) / n, snp.pad(x, ((1, 1), (0, 2))), x[1:, :-1].T

    model = export.to_onnx(jit(f))(*specs)
    for shape in ((2, 3), (5, 4)):
        for found, wanted in zip(run(model, [normal(*shape)]), f(normal(*shape)), strict=True):
            close(found, wanted)


def test_a_size_that_is_no_dim_is_refused():
    spec = ShapeDtypeStruct(export.symbolic_shape("2*b, 3"), np.float32)
    with pytest.raises(errors.ArgumentError, match="the size b is not the size of a dim"):
        export.to_onnx(jit(lambda x: x.reshape(-1)))(spec)


def test_a_fixed_number_that_depends_on_a_size_is_refused():
    spec = ShapeDtypeStruct(export.symbolic_shape("1, n, 4, 1"), np.float32)

    def f(x):
        pooled = lax.reduce_window(x, 0.0, lax.add, (1, *x.shape[1:3], 1), (1, 1, 1, 1), "VALID")
        return pooled

    with pytest.raises(errors.ArgumentError, match=r"test_onnx.py.*AveragePool takes"):
        export.to_onnx(jit(f))(spec)


# ---- control flow ------------------------------------------------------------------------------


@pytest.mark.parametrize("which", range(-1, 4))
def test_branches(which):
    w = normal(3)
    branches = [lambda x: x + 1, lambda x: x * w, lambda x: snp.sum(x) - x]
    agrees(lambda i, x: lax.switch(i, branches, x), np.int32(which), normal(3))


@pytest.mark.parametrize("reverse", [False, True])
def test_scan(reverse):
    w = normal(3, 3)

    def f(h, xs):
        def step(h, x):
            h = snp.tanh(h @ w + x)
            return h, (h.sum(), x[0] > 0)

        return lax.scan(step, h, xs, reverse=reverse)

    steps = ShapeDtypeStruct(export.symbolic_shape("t, 3"), np.float32)
    model = export.to_onnx(jit(f))(normal(3), steps)
    for t in (1, 6):
        args = normal(3), normal(t, 3)
        for found, wanted in zip(run(model, args), spmd.tree.leaves(f(*args)), strict=True):
            close(found, wanted)


def test_while_inside_cond_inside_scan():
    def double(x, limit):
        return lax.while_loop(lambda s: s[0] < limit, lambda s: (s[0] * 2, s[1] + 1), (x, 0))

    def f(xs, limit):
        def step(total, x):
            y, n = lax.cond(x > 0, lambda x: double(x, limit), lambda x: (x, -1), x)
            return total + y, n

        return lax.scan(step, np.float32(0), xs)

    agrees(f, np.array([0.5, -1, 3, 100], np.float32), np.float32(20))
    agrees(lambda x: lax.fori_loop(0, 5, lambda i, x: x + i * x, x), normal(3))


# ---- whole models ------------------------------------------------------------------------------


SCOPE = export.SymbolicScope()


def batch_spec(*rest: int, dtype: Any = np.float32) -> ShapeDtypeStruct:
    text = f"b, {', '.join(map(str, rest))}"
    return ShapeDtypeStruct(export.symbolic_shape(text, scope=SCOPE), dtype)


def test_a_convolutional_network():
    p = {
        "conv": normal(3, 3, 1, 4),
        "deep": normal(3, 3, 2, 8, seed=1),
        "scale": normal(8, seed=2),
        "out": normal(32, 5, seed=3),
    }
    dims = ("NHWC", "HWIO", "NHWC")

    def conv(x, w, strides, padding, groups=1):
        return lax.conv_general_dilated(
            x, w, strides, padding, dimension_numbers=dims, feature_group_count=groups
        )

    def pool(x, init, op):
        return lax.reduce_window(x, init, op, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    def f(p, images):
        x = nn.relu(conv(images, p["conv"], (1, 1), "SAME"))
        x = pool(x, -np.inf, lax.max)
        x = conv(x, p["deep"], (2, 2), ((1, 1), (0, 1)), groups=2)
        mean, var = x.mean((1, 2), keepdims=True), x.var((1, 2), keepdims=True)
        x = nn.silu((x - mean) * lax.rsqrt(var + 1e-5) * p["scale"])
        x = pool(x, 0.0, lax.add) / 4
        return nn.log_softmax(x.reshape(x.shape[0], -1) @ p["out"][: 8 * 1 * 1])

    specs = p, batch_spec(8, 8, 1)
    model = export.to_onnx(jit(f))(*specs)
    for b in (1, 3):
        images = normal(b, 8, 8, 1)
        close(run(model, [*spmd.tree.leaves(p), images])[0], f(p, images))
    assert [x.name for x in session(model).get_inputs()][-1] == "images"


def test_a_transformer_that_has_its_weights():
    heads, width, words = 2, 8, 11
    e, wq, wo = normal(words, width), normal(width, 3 * width, seed=1), normal(width, width, seed=2)

    def norm(x):
        mean = x.mean(-1, keepdims=True)
        return (x - mean) / snp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)

    def f(tokens):
        x = snp.asarray(e)[tokens]
        q, k, v = snp.split((norm(x) @ wq).reshape(*tokens.shape, heads, -1), 3, -1)
        a = nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + a.reshape(x.shape) @ wo
        logits = nn.gelu(norm(x)) @ e.T
        best, index = lax.top_k(logits[:, -1], 3)
        return snp.argmax(logits, -1), nn.softmax(best), index

    model = export.to_onnx(jit(f))(batch_spec(6, dtype=np.int32))
    for b in (1, 4):
        tokens = np.random.default_rng(b).integers(0, words, (b, 6)).astype(np.int32)
        for found, wanted in zip(run(model, [tokens]), f(tokens), strict=True):
            close(found, wanted)


def test_normalising_sorting_and_sampling():
    def f(x):
        probabilities = nn.softmax(x / 0.7)
        order = snp.argsort(-probabilities, axis=-1)
        ranked = snp.take_along_axis(probabilities, order, axis=-1)
        kept = snp.where(snp.cumsum(ranked, -1) < 0.8, ranked, 0.0)
        norms = snp.linalg.norm(x, axis=-1)
        return (
            kept,
            snp.sort(x, axis=0),
            nn.logsumexp(x, axis=-1),
            norms,
            nn.one_hot(order[:, 0], 5),
        )

    agrees(f, normal(4, 5), specs=[batch_spec(5)])


def test_bfloat16_inside():
    def f(x):
        return x.astype(snp.bfloat16).astype(np.float32) * 2

    x = normal(3, 4)
    agrees(f, x)


# ---- what has no form --------------------------------------------------------------------------


def test_what_has_no_form_names_the_primitive_and_the_line():
    def f(x):
        return snp.fft.fft(x)

    with pytest.raises(errors.RefusedError, match=r"test_onnx.py:\d+ \(f\): to_onnx: \w+ "):
        export.to_onnx(jit(f))(normal(4))
    with pytest.raises(errors.RefusedError, match=r"lgamma has no form in ONNX"):
        export.to_onnx(jit(lambda x: lax.lgamma(x)))(normal(4))
    with pytest.raises(errors.ArgumentError, match="must be jitted"):
        export.to_onnx(f)
