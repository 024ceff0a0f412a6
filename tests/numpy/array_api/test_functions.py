"""Every function of the standard: its signature, its dtypes, and its values beside NumPy's."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pytest

import spmd
from spmd import numpy as snp
from tests.numpy.array_api import signatures
from tests.numpy.array_api.calls import ALONE, CALLS, evaluate

KINDS = {
    "b": ["bool"],
    "i": ["int8", "int16", "int32", "int64"],
    "u": ["uint8", "uint16", "uint32", "uint64"],
    "f": ["float32", "float64"],
    "c": ["complex64", "complex128"],
}
SIGNATURES = dict(line.split("(", 1) for line in signatures.SIGNATURES.split("\n") if line)


@pytest.fixture(autouse=True)
def wide_dtypes():
    with spmd.enable_x64(True):
        yield


def function(name: str, xp: Any = snp) -> Any:
    for part in name.split("."):
        xp = getattr(xp, part)
    return xp


# ---- signatures --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str):
    scope: dict[str, Any] = {}
    exec(f"def f({SIGNATURES[name]}: pass", scope)
    wanted = inspect.signature(scope["f"]).parameters.values()
    found = inspect.signature(function(name)).parameters
    positional = [
        p for p in found.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    for k, parameter in enumerate(wanted):
        if parameter.kind is parameter.VAR_POSITIONAL:
            assert any(p.kind is p.VAR_POSITIONAL for p in found.values())
            continue
        by_position = parameter.kind is not parameter.KEYWORD_ONLY
        ours = positional[k] if by_position else found[parameter.name]
        if parameter.kind is not parameter.POSITIONAL_ONLY:
            assert ours.name == parameter.name and ours.kind is not ours.POSITIONAL_ONLY
        if (name, parameter.name) in signatures.OTHER_DEFAULTS:
            assert ours.default is not ours.empty and ours.default != parameter.default
        elif parameter.default is not parameter.empty:
            assert ours.default == parameter.default, parameter.name


def test_no_parameter_more_is_needed():
    for name, text in SIGNATURES.items():
        given = {p.strip().partition("=")[0] for p in text.rstrip(")").split(",")}
        for parameter in inspect.signature(function(name)).parameters.values():
            needed = (
                parameter.default is parameter.empty and parameter.kind is parameter.KEYWORD_ONLY
            )
            assert not needed or parameter.name in given, f"{name} demands {parameter.name}"


def test_constants_and_dtypes():
    for name in signatures.CONSTANTS.split():
        ours, theirs = getattr(snp, name), getattr(np, name)
        assert ours == theirs or (name == "nan" and ours != ours)
    for name in signatures.DTYPES.split():
        assert snp.zeros(1, getattr(snp, name)).dtype == np.dtype(name)


@pytest.mark.parametrize("traced", [False, True])
def test_arrays_have_the_standards_methods(traced: bool):
    def check(x: Any) -> Any:
        for name in (signatures.METHODS + " " + signatures.ATTRIBUTES).split():
            concrete = name in ("__dlpack__", "__dlpack_device__", "device", "to_device")
            assert (traced and concrete) or hasattr(x, name), name
        return x

    (spmd.jit(check) if traced else check)(snp.ones((2, 2)))


def test_methods_of_conversion():
    assert complex(snp.asarray(1 + 2j)) == 1 + 2j and float(snp.asarray(1.5)) == 1.5
    assert int(snp.asarray(3)) == 3 and bool(snp.asarray(2j)) and [0, 1, 2][snp.asarray(2)] == 2
    x = snp.arange(3.0)
    assert x.to_device(x.device, stream=None) is x or (x.to_device(x.device) == x).all()
    with pytest.raises(spmd.errors.ArgumentError, match="stream=1"):
        x.to_device(x.device, stream=1)
    with pytest.raises(TypeError):
        x[0] = 1.0


# ---- dtypes ------------------------------------------------------------------------------------


def rows(table: str) -> list[tuple[str, str, str]]:
    lines = [line.split() for line in table.split("\n") if line]
    return [(name, kinds, rule) for kinds, rule, *names in lines for name in names]


def dtypes_of(kinds: str) -> list[np.dtype]:
    return [np.dtype(d) for k in ("biufc" if kinds == "*" else kinds) for d in KINDS[k]]


def example(dtype: np.dtype, shape: tuple[int, ...] = (2, 3)) -> np.ndarray:
    # Between 0 and 1 every function of floats but acosh is defined; integers are small.
    if dtype.kind in "fc":
        return np.linspace(0.25, 0.75, int(np.prod(shape))).reshape(shape).astype(dtype)
    return (np.arange(int(np.prod(shape))) % 3 + 1).reshape(shape).astype(dtype)


@pytest.mark.parametrize("name, kinds, rule", rows(signatures.ELEMENTWISE))
def test_elementwise_dtypes(name: str, kinds: str, rule: str):
    count = SIGNATURES[name].count("x")
    for dtype in dtypes_of(kinds):
        result = {"same": dtype, "bool": np.dtype(np.bool_)}.get(rule, dtype)
        if rule == "real":
            result = np.zeros(0, dtype).real.dtype
        for shape in ((2, 3), (), (0, 2)):
            operands = [example(dtype, shape)] * count
            if name == "acosh":
                operands = [x + 1 for x in operands]
            out = function(name)(*map(snp.asarray, operands))
            assert (out.dtype, out.shape) == (result, shape)
            np.testing.assert_allclose(out, getattr(np, name)(*operands), rtol=2e-5, atol=1e-6)


PAIRS = [line.split() for line in signatures.PROMOTION.split("\n") if line]


@pytest.mark.parametrize("row", PAIRS[1:], ids=lambda row: row[0])
def test_promotion(row: list[str]):
    codes = {"b": "bool"}
    first, *results = [np.dtype(codes.get(code, code)) if code != "-" else None for code in row]
    for other, result in zip(PAIRS[0], results, strict=True):
        if result is None:
            continue
        x, y = example(first), example(np.dtype(codes.get(other, other)))
        assert snp.result_type(x.dtype, y.dtype) == result
        assert snp.result_type(snp.asarray(x), y.dtype) == result
        combine = snp.logical_or if result.kind == "b" else snp.add
        assert combine(snp.asarray(x), snp.asarray(y)).dtype == result
        # Python's numbers have no dtype of their own.
        if result.kind != "b":
            number = 1 if result.kind in "iu" else 1.0
            assert (snp.asarray(x) + number).dtype == first


@pytest.mark.parametrize("name, kinds, rule", rows(signatures.REDUCTIONS))
def test_reduction_dtypes(name: str, kinds: str, rule: str):
    for dtype in dtypes_of(kinds):
        x = example(dtype, (4,))
        out = function(name)(snp.asarray(x))
        wide = {"i": np.int64, "u": np.uint64}.get(dtype.kind, dtype)
        wanted = {"same": dtype, "wide": wide, "bool": np.bool_, "index": np.int64}[rule]
        assert out.dtype == wanted, dtype
        np.testing.assert_allclose(out, function(name, np)(x), rtol=2e-5)


# ---- values ------------------------------------------------------------------------------------


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, (tuple, list)):
        assert isinstance(found, (tuple, list)) and len(found) == len(wanted)
        for x, y in zip(found, wanted, strict=True):
            assert_same(x, y)
        return
    x, y = np.asarray(found), np.asarray(wanted)
    if isinstance(wanted, (np.ndarray, np.generic)):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
    if y.dtype == object or isinstance(wanted, np.dtype):
        assert found == wanted
        return
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("text", [line for line in CALLS.split("\n") if line])
def test_values_are_numpy_s(text: str):
    with np.errstate(all="ignore"):
        for found, wanted in zip(evaluate(text, snp), evaluate(text, np), strict=True):
            assert_same(found, wanted)


@pytest.mark.parametrize("text", ALONE)
def test_values(text: str):
    assert_same(*evaluate(text, snp), np.asarray(ALONE[text]))


def test_every_function_has_a_test():
    called = set(re.findall(r"xp\.((?:linalg\.|fft\.)?\w+)\(", CALLS + " ".join(ALONE)))
    elementwise = {name for name, *_ in rows(signatures.ELEMENTWISE)}
    reduced = {name for name, *_ in rows(signatures.REDUCTIONS)}
    assert not set(SIGNATURES) - called - elementwise - reduced
    assert not called - set(SIGNATURES)


def test_axes_that_are_not_there_are_index_errors():
    x = snp.ones((2, 3))
    for call in (
        lambda: snp.expand_dims(x, 4),
        lambda: snp.sum(x, axis=2),
        lambda: snp.flip(x, axis=5),
    ):
        with pytest.raises(IndexError, match="out of bounds"):
            call()
    with pytest.raises(ValueError):
        snp.squeeze(x, 0)
    with pytest.raises(ValueError):
        snp.nonzero(snp.asarray(1))


def test_creation_takes_a_device():
    device = snp.asarray(1.0).device
    for made in (
        snp.arange(3, device=device), snp.zeros(2, device=device), snp.ones((2,), device=device),
        snp.full(2, 1, device=device), snp.empty(2, device=device), snp.eye(2, device=device),
        snp.linspace(0, 1, 3, device=device), snp.asarray([1], device=device),
        snp.zeros_like(snp.ones(2), device=device), snp.ones_like(snp.ones(2), device=device),
        snp.full_like(snp.ones(2), 1, device=device), snp.empty_like(snp.ones(2), device=device),
        snp.fft.fftfreq(3, device=device), snp.fft.rfftfreq(3, device=device),
        snp.astype(snp.ones(2), snp.int8, device=device),
    ):  # fmt: skip
        assert made.device == device
    assert snp.fft.fftfreq(3, dtype=snp.float32).dtype == np.float32
