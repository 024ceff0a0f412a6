"""Elementwise functions against JAX: values, dtypes and weak types, for each kind of operand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.base.errors import SpmdError
from tests.numpy.oracle import assert_agrees, case, values

SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 3.5, 2.5, -2.5, 1e30], np.float32)

# One operand of each kind that promotes in its own way.
OPERANDS = {
    "f32": values(2, 3),
    "special": SPECIAL,
    "i32": values(5, dtype=np.int32),
    "u8": values(5, dtype=np.uint8),
    "bool": values(5, dtype=bool),
    "c64": values(5, dtype=np.complex64),
    "f16": values(5, dtype=np.float16),
    "bf16": values(5, dtype=ml_dtypes.bfloat16),
    "float": 0.5,
    "int": 2,
}

FLOAT_UNARY = """exp exp2 expm1 log log1p sqrt log2 log10 sin cos tan arcsin arccos arctan sinh
cosh tanh arcsinh arccosh arctanh reciprocal sinc""".split()
ANY_UNARY = """absolute positive square rint real imag conj isfinite isinf isnan logical_not isreal
iscomplex nan_to_num""".split()
REAL_UNARY = """negative sign floor ceil trunc cbrt fabs deg2rad rad2deg signbit frexp modf isposinf
isneginf""".split()
INTEGER_UNARY = "bitwise_not bitwise_count".split()

BINARY = """add multiply divide maximum minimum fmax fmin power equal not_equal less
less_equal greater greater_equal logical_and logical_or logical_xor isclose float_power""".split()
REAL_BINARY = """subtract floor_divide remainder fmod divmod logaddexp logaddexp2 arctan2 hypot
copysign heaviside nextafter""".split()
INTEGER_BINARY = "bitwise_and bitwise_or bitwise_xor left_shift right_shift".split()

OTHER = {
    "f32": values(2, 3, low=-2),
    "row": values(3),
    "i32": values(5, dtype=np.int32, low=-2, high=5),
    "i8": values(5, dtype=np.int8),
    "u32": values(5, dtype=np.uint32, low=1),
    "bool": np.array([True, True, False, False, True]),
    "c64": values(5, dtype=np.complex64, low=-1),
    "f16": values(5, dtype=np.float16),
    "float": 0.5,
    "int": 2,
}

PAIRS = [
    ("f32", "f32"), ("f32", "row"), ("f32", "int"), ("f32", "float"), ("float", "f32"),
    ("i32", "i32"), ("i32", "float"), ("i32", "int"), ("u8", "i8"), ("bool", "bool"),
    ("bool", "int"), ("bf16", "float"), ("bf16", "f16"), ("f16", "i32"), ("special", "special"),
]  # fmt: skip
OTHER["special"] = SPECIAL[::-1].copy()


def tolerance(kinds: str) -> dict[str, float]:
    """16-bit floats are computed by JAX in one of several ways."""
    return {"rtol": 2e-2, "atol": 1e-2} if "16" in kinds else {"rtol": 1e-5, "atol": 1e-5}


def unary_cases():
    for names, kinds in (
        (FLOAT_UNARY, ["f32", "special", "i32", "bool", "c64", "bf16", "int"]),
        (ANY_UNARY, ["f32", "special", "i32", "u8", "bool", "c64", "bf16", "float"]),
        (REAL_UNARY, ["f32", "special", "i32", "f16"]),
        (INTEGER_UNARY, ["i32", "u8"]),
    ):
        for name in names:
            yield [
                case(
                    f"{name}-{kind}",
                    lambda xp, x, name=name: getattr(xp, name)(x),
                    OPERANDS[kind],
                    **tolerance(kind),
                )
                for kind in kinds
            ]


def binary_cases():
    for names, pairs in (
        (BINARY, [*PAIRS, ("c64", "c64")]),
        (REAL_BINARY, [p for p in PAIRS if "bool" not in p]),
        (INTEGER_BINARY, [("i32", "i32"), ("u8", "i8"), ("i32", "int"), ("u8", "u32")]),
    ):
        for name in names:
            yield [
                case(
                    f"{name}-{a}-{b}",
                    lambda xp, x, y, name=name: getattr(xp, name)(x, y),
                    OPERANDS[a],
                    OTHER[b],
                    **tolerance(a + b),
                )
                for a, b in pairs
            ]


def name_of(cases):
    return cases[0].name.split("-")[0]


@pytest.mark.parametrize("cases", [*unary_cases()], ids=name_of)
def test_unary(cases):
    assert_agrees(*cases)


@pytest.mark.parametrize("cases", [*binary_cases()], ids=name_of)
def test_binary(cases):
    assert_agrees(*cases)


OPTIONS = [
    case("round-2", lambda xp, x: xp.round(x, 2), values(7)),
    case("round-negative", lambda xp, x: xp.round(x, -1), values(7, high=40.0)),
    case("round-halves", lambda xp, x: xp.round(x), SPECIAL),
    case("round-complex", lambda xp, x: xp.round(x, 1), OPERANDS["c64"]),
    case("ldexp", lambda xp, x, k: xp.ldexp(x, k), values(4), np.array([-3, 0, 5, 100])),
    case("angle", lambda xp, x: xp.angle(x, deg=True), OPERANDS["c64"]),
    case("power-negative", lambda xp, x: xp.power(x, -2), values(4, low=1.0)),
    case("power-integers", lambda xp, x, y: xp.power(x, y), *[values(5, dtype=np.int32)] * 2),
    case("allclose", lambda xp, x: xp.allclose(x, x + 1e-7), values(4)),
    case("array_equal", lambda xp, x: xp.array_equal(x, x[:2]), values(4)),
    case("array_equal-nan", lambda xp, x: xp.array_equal(x, x, equal_nan=True), SPECIAL),
    case("array_equiv", lambda xp, x: xp.array_equiv(x, x[None]), values(4)),
    case("isclose-nan", lambda xp, x: xp.isclose(x, x, equal_nan=True), SPECIAL),
    case("clip", lambda xp, x: xp.clip(x, -1, 1.5), values(6)),
    case("clip-min", lambda xp, x: xp.clip(x, min=0), values(6, dtype=np.int32)),
    case("where", lambda xp, x: xp.where(x > 0, x, 0.0), values(6)),
    case("where-row", lambda xp, x, y: xp.where(y > 0, x, y), values(2, 3), values(3)),
    case("where-number", lambda xp, x: xp.where(x, 1, 2.5), values(4, dtype=bool)),
    case(
        "select",
        lambda xp, x: xp.select([x > 1, x > 0], [x, x * 2], -1.0),
        values(6),
    ),
    case(
        "choose",
        lambda xp, x: xp.choose(xp.array([0, 1, 5]), [x, x + 1], mode="clip"),
        values(3),
    ),
    case(
        "piecewise",
        lambda xp, x: xp.piecewise(x, [x < 0, x > 1], [lambda v: -v, 7.0, 0.5]),
        values(6),
    ),
    case("nan_to_num", lambda xp, x: xp.nan_to_num(x, nan=1.0, posinf=2.0), SPECIAL),
]


def test_functions_with_options():
    assert_agrees(*OPTIONS)


# ---- what JAX leaves to us ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: snp.add([1, 2], 3), "add requires ndarray or scalar arguments"),
        (lambda: snp.sin("x"), "sin requires ndarray or scalar arguments, got <class 'str'>"),
        (lambda: snp.multiply(1, None), "got <class 'NoneType'> at position 1"),
        (
            lambda: snp.add(np.ones((2, 3)), np.ones(4)),
            "add got incompatible shapes for broadcasting: (2, 3), (4,)",
        ),
        (lambda: snp.add(np.ones((2, 3)), np.ones(4)), "dim -1 has sizes 3 and 4"),
        (lambda: snp.add(np.ones((2, 3)), np.ones(4)), "test_ufuncs.py"),
        (lambda: snp.floor_divide(1j, 2), "floor_divide does not support complex input"),
        (lambda: snp.round(np.arange(3), -1), "integers cannot be rounded"),
        (lambda: snp.ldexp(1.0, 2.0), "the exponent must be integers"),
    ],
)  # fmt: skip
def test_errors_name_what_is_wrong(call, text):
    with pytest.raises(SpmdError) as caught:
        call()
    assert text in str(caught.value)


def test_numbers_beside_arrays_cost_no_equation():
    jaxpr = spmd.make_jaxpr(lambda x: snp.multiply(x, 2))(np.ones(3, np.float32))
    assert [str(e.prim) for e in jaxpr.jaxpr.eqns] == ["mul"]


def test_wide_shapes_are_not_broadcast_twice():
    jaxpr = spmd.make_jaxpr(lambda x, y: snp.add(x, y))(np.ones((2, 3)), np.ones(3))
    assert [str(e.prim) for e in jaxpr.jaxpr.eqns] == ["broadcast_in_dim", "add"]


def test_frexp_and_ldexp_are_inverse():
    x = np.array([1e-30, 0.1, 3.0, -7e20, 0.0, np.inf], np.float32)
    mantissa, exponent = snp.frexp(x)
    np.testing.assert_array_equal(snp.ldexp(mantissa, exponent), x)


HOLES = np.array([np.inf, -np.inf, np.nan, -1.0, 2.0], np.float32)
MASK = np.array([True, False, False, False, True])


def masked_products(j, jnp):
    """Products with bools, whose other factors may be what a mask is to keep out."""

    def product(x, m):
        return x * m

    def loss(x, m):
        return jnp.sum(jnp.log(jnp.abs(x)) * m)

    x, m, one = jnp.array(HOLES), jnp.array(MASK), jnp.array(False)
    wide = jnp.stack([x, x])
    outs = [product(x, m), j.jit(product)(x, m), product(m, x), j.jit(product)(m, x)]
    outs += [product(np.inf, m), j.jit(product)(np.inf, m), product(x[0], one)]
    outs += [product(wide, m), j.jit(product)(wide, m), product(x, one)]  # the mask is broadcast
    outs += [product(x.astype("float16"), m).astype("float32"), product(x, MASK)]
    outs += [j.vmap(product)(x, m), j.jit(j.grad(loss))(x, m), j.grad(loss)(x, m)]
    outs += [j.jit(lambda x, m: x * m.astype("float32"))(x, m), x * m.astype("float32")]
    # As texts, in which NaNs are equal; NaNs have any sign.
    return [str([float(x) for x in np.ravel(o)]) for o in outs]


def test_floats_are_0_where_a_mask_is_false_as_in_jax(from_jax):
    def ask():
        import jax

        return masked_products(jax, jax.numpy)

    assert masked_products(spmd, snp) == from_jax(ask)
