"""Rounding of float32 products' factors on GPUs, as JAX's words of precision ask for it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import spmd
from spmd import lax
from spmd import numpy as snp
from spmd.base.config import config
from spmd.compile.definitions.product_precision import choose_precision, factors_of
from spmd.core.ir import all_eqns
from spmd.experimental.ode import odeint
from spmd.experimental.sparse import bcoo_dot_general_sampled
from spmd.lax import DotAlgorithmPreset, Precision
from spmd.scipy import linalg
from spmd.scipy.optimize import minimize
from spmd.scipy.sparse import linalg as sparse

HIGHEST, HIGH, DEFAULT = Precision.HIGHEST, Precision.HIGH, Precision.DEFAULT
TF32 = DotAlgorithmPreset.TF32_TF32_F32
F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)

RNG = np.random.default_rng(0)
X, Y = (RNG.uniform(-1, 1, shape).astype("f4") for shape in ((32, 40), (40, 48)))


def in_tf32(x: np.ndarray) -> np.ndarray:
    return ((x.view(np.uint32) + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32)


def in_dtype(dtype):
    return lambda x: x.astype(dtype).astype(np.float32)


def exact(x: np.ndarray) -> np.ndarray:
    return x


ROUNDED = {None: exact, TF32: in_tf32, BF16: in_dtype(BF16), np.dtype("f2"): in_dtype("f2")}


@pytest.mark.parametrize(
    ("precision", "wanted"),
    [
        (None, None),
        ((DEFAULT, DEFAULT), TF32),
        ((HIGH, HIGH), TF32),
        ((HIGHEST, HIGHEST), None),
        ((DEFAULT, HIGHEST), None),
        (DotAlgorithmPreset.DEFAULT, None),
        (TF32, TF32),
        (DotAlgorithmPreset.TF32_TF32_F32_X3, None),
        (DotAlgorithmPreset.F32_F32_F32, None),
        (DotAlgorithmPreset.BF16_BF16_F32, BF16),
        (DotAlgorithmPreset.BF16_BF16_F32_X3, None),
        (DotAlgorithmPreset.F16_F16_F32, np.dtype("f2")),
        (lax.DotAlgorithm(BF16, BF16, F32), BF16),
        (lax.DotAlgorithm(BF16, BF16, F32, 2, 2, 3), None),
        (lax.DotAlgorithm(F32, F32, F32), None),
    ],
    ids=str,
)
def test_factors_have_the_dtype_that_an_algorithm_names(precision, wanted):
    assert factors_of(precision) == wanted


@pytest.fixture
def gpu():
    with (
        config.override("cuda_driver", "emulator"),
        config.override("num_cuda_devices", 1),
        config.override("platform", "cuda"),
    ):
        yield


def product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) @ y.astype(np.float64)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("precision", "wanted"),
    [
        (None, None),
        ("default", TF32),
        ("high", TF32),
        ("highest", None),
        ("TF32_TF32_F32", TF32),
        ("TF32_TF32_F32_X3", None),
        ("BF16_BF16_F32", BF16),
        ("F16_F16_F32", np.dtype("f2")),
    ],
)
def test_a_product_on_a_gpu_rounds_its_factors(precision, wanted):
    found = spmd.jit(lambda x, y: snp.matmul(x, y, precision=precision))(X, Y)
    rounded = ROUNDED[wanted]
    np.testing.assert_allclose(found, product(rounded(X), rounded(Y)), 1e-5, 2e-6)
    if wanted is not None:
        assert abs(np.asarray(found) - product(X, Y)).max() > 1e-5


@pytest.mark.usefixtures("gpu")
def test_the_setting_is_the_precision_of_products_that_say_none():
    with config.override("default_matmul_precision", "tensorfloat32"):
        found = spmd.jit(snp.matmul)(X, Y)
        exact = spmd.jit(lambda x, y: snp.matmul(x, y, precision="highest"))(X, Y)
    np.testing.assert_allclose(found, product(in_tf32(X), in_tf32(Y)), 1e-5, 2e-6)
    np.testing.assert_allclose(exact, product(X, Y), 1e-5, 2e-6)


def steps(x, y):
    return lax.scan(lambda c, _: (c @ y, c @ y), x, None, 2)[1]


@pytest.mark.usefixtures("gpu")
def test_products_in_loops_round_too():
    y = Y[:, :40]
    first = product(in_tf32(X), in_tf32(y)).astype("f4")
    with config.override("default_matmul_precision", "tensorfloat32"):
        found = spmd.jit(steps)(X, y)
    np.testing.assert_allclose(found[0], first, 1e-5, 2e-6)
    np.testing.assert_allclose(found[1], product(in_tf32(first), in_tf32(y)), 1e-3, 1e-3)


@pytest.mark.usefixtures("gpu")
def test_convolutions_round_their_factors_and_those_of_16_bits_are_exact():
    x, k = RNG.normal(size=(2, 8, 9, 9)), RNG.normal(size=(12, 8, 3, 3))
    call = spmd.jit(lambda x, k, p=None: lax.conv(x, k, (1, 1), "SAME", p), static_argnums=2)

    def wanted(x, k):
        with config.override("platform", "cpu"), config.override("enable_x64", True):
            return np.asarray(call(x.astype("f8"), k.astype("f8")))

    single = x.astype("f4"), k.astype("f4")
    np.testing.assert_allclose(call(*single, "high"), wanted(*map(in_tf32, single)), 1e-4, 1e-5)
    np.testing.assert_allclose(call(*single), wanted(*single), 1e-4, 1e-5)
    narrow = x.astype(BF16), k.astype(BF16)
    found = np.asarray(call(*narrow), np.float64)
    np.testing.assert_allclose(found, wanted(*narrow), 2.0**-8)


def quadratic(x):
    return ((x - 1) ** 2).sum()


@pytest.mark.parametrize(
    "solve",
    [
        lambda a, b: odeint(lambda y, t: y @ a, b, snp.linspace(0.0, 1.0, 3)),
        spmd.grad(lambda a, b: odeint(lambda y, t: y @ a, b, snp.linspace(0.0, 1.0, 3)).sum()),
        lambda a, b: sparse.cg(a, b[0])[0],
        lambda a, b: sparse.bicgstab(a, b[0])[0],
        lambda a, b: sparse.gmres(a, b[0])[0],
        lambda a, b: minimize(quadratic, b[0], method="BFGS").x,
        lambda a, b: linalg.qr_multiply(a, b),
        lambda a, b: snp.linalg.pinv(a),
        lambda a, b: linalg.expm(a),
        lambda a, b: bcoo_dot_general_sampled(
            a[None],
            b[None],
            np.zeros((1, 2, 2), int),
            dimension_numbers=(((2,), (1,)), ((0,), (0,))),
        ),
    ],
    ids="odeint grad-odeint cg bicgstab gmres minimize qr_multiply pinv expm sampled".split(),
)
def test_solvers_compute_with_full_precision(solve):
    """As in JAX: a tolerance below what TF32 can tell is never reached."""
    a = np.eye(9, dtype=np.float32)
    closed = spmd.make_jaxpr(solve)(a, a)
    found = [e.params["precision"] for e in all_eqns(closed) if e.prim.name == "dot_general"]
    assert found and {*found} == {(HIGHEST, HIGHEST)}


def test_other_products_keep_what_they_ask_for():
    def products(x, y):
        high = snp.matmul(x, y, precision="high")
        return high, snp.matmul(x.astype(BF16), y.astype(BF16), precision="high"), x @ y

    closed = spmd.make_jaxpr(products)(X, Y)
    before, after = (
        [e for e in all_eqns(c) if e.prim.name == "dot_general"]
        for c in (closed, choose_precision(closed))
    )
    assert [e.params["precision"] for e in before] == [(HIGH, HIGH), (HIGH, HIGH), None]
    assert [e.params["precision"] for e in after] == [TF32, (HIGH, HIGH), None]


def test_cpus_compute_with_full_precision():
    found = spmd.jit(lambda x, y: snp.matmul(x, y, precision="TF32_TF32_F32"))(X, Y)
    np.testing.assert_allclose(found, product(X, Y), 1e-5, 2e-6)


def test_products_of_integers_say_the_dtype_of_their_sums():
    def multiply(x, y):
        return lax.dot(x, y, preferred_element_type=np.int32), lax.dot(x, y)

    x = np.ones((4, 4), np.int8)
    closed = spmd.make_jaxpr(multiply)(x, x)
    found = [eqn.params["precision"] for eqn in all_eqns(choose_precision(closed).jaxpr)]
    narrow = np.dtype(np.int8)
    assert found == [lax.DotAlgorithm(narrow, narrow, np.dtype(t)) for t in (np.int32, np.int8)]
    # A user's own is about floats: equations of integers say nothing on the CPU.
    closed = spmd.make_jaxpr(lambda x: lax.dot(x, x, precision=found[0]))(x)
    assert [eqn.params["precision"] for eqn in all_eqns(closed.jaxpr)] == [None]
