"""Cosine transforms, Krylov solvers, arrays read between elements, and the nearest code."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import spmd
from spmd import errors
from spmd import numpy as snp
from spmd.scipy import cluster, fft, ndimage
from spmd.scipy.sparse import linalg as krylov
from spmd.testing import check_grads

scipy_fft = pytest.importorskip("scipy.fft", reason="the oracle is SciPy")
scipy_ndimage = pytest.importorskip("scipy.ndimage", reason="the oracle is SciPy")
scipy_vq = pytest.importorskip("scipy.cluster.vq", reason="the oracle is SciPy")

_random = np.random.default_rng(11)


def _normal(*shape: int) -> np.ndarray:
    return _random.normal(size=shape).astype(np.float32)


# ---- cosine transforms -------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [None, "ortho", "forward"])
@pytest.mark.parametrize("n", [None, 1, 4, 9])
@pytest.mark.parametrize("name", ["dct", "idct"])
def test_cosine_transforms(name, n, norm):
    for size, axis in ((6, -1), (7, 0)):
        x = _normal(*((3, size) if axis else (size, 3)))
        expected = getattr(scipy_fft, name)(x, 2, n, axis, norm)
        found = getattr(fft, name)(x, 2, n, axis, norm)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", [{}, {"axes": (0, 2)}, {"s": (4, 3)}, {"norm": "ortho"}])
def test_cosine_transforms_of_several_dims(how):
    x = _normal(3, 4, 5)
    for name in ("dctn", "idctn"):
        expected = getattr(scipy_fft, name)(x, 2, **how)
        found = spmd.jit(functools.partial(getattr(fft, name), type=2, **how))(x)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_cosine_transforms_have_gradients_and_inverses():
    x = _normal(2, 5)
    np.testing.assert_allclose(fft.idct(fft.dct(x)), x, rtol=1e-5, atol=1e-6)
    check_grads(lambda x: fft.dct(x, norm="ortho"), (x,), order=2, atol=1e-3, rtol=1e-3)


def test_cosine_transforms_refuse_what_they_have_not():
    with pytest.raises(errors.ArgumentError, match="type=3"):
        fft.dct(np.ones(3), 3)
    with pytest.raises(errors.ArgumentError, match="norm"):
        fft.idct(np.ones(3), norm="both")


_x = np.array([0.3, -1.2, 2.0, 0.7], np.float32)
_m = np.array([[4.0, 1.0], [0.0, 3.0]], np.float32)
_TRANSFORMS = {
    "complex": lambda s: s.fft.dct(_x + 2j),
    "complex, inverse": lambda s: s.fft.idct((_x + 2j).astype(np.complex64), norm="ortho"),
    "float16": lambda s: s.fft.dct(_x.astype(np.float16)),
    "float16, inverse": lambda s: s.fft.idct(_x.astype(np.float16)),
    "one axis": lambda s: s.fft.dctn(_m, axes=0),
    "one axis, inverse": lambda s: s.fft.idctn(_m, axes=-1),
    "NumPy scalar": lambda s: s.fft.dctn(np.float32(2)),
    "gmres": lambda s: s.sparse.linalg.gmres(_m, _m[0])[1],
    "gmres of NaN": lambda s: s.sparse.linalg.gmres(_m * np.nan, _m[0])[1],
    "cg of a number": lambda s: s.sparse.linalg.cg(lambda x: 2 * x, 3.0)[0],
    "bools between elements": lambda s: s.ndimage.map_coordinates(
        _x > 0, [np.array([0.2, 0.8, 5.0])], 1
    ),
    "points of one dim": lambda s: s.interpolate.RegularGridInterpolator((_x[[1, 0, 3, 2]],), _x)(
        np.array([-1.0, 0.5, 9.0], np.float32)
    ),
}


@pytest.mark.parametrize("name", _TRANSFORMS)
def test_odd_arguments_give_what_jax_gives(name, from_jax):
    def ask():
        import jax
        import jax.scipy.interpolate
        import jax.scipy.ndimage
        import jax.scipy.sparse.linalg

        made = _TRANSFORMS[name](jax.scipy)
        return [made, made.weak_type]

    wanted, weak = from_jax(ask)
    found = _TRANSFORMS[name](spmd.scipy)
    assert isinstance(found, spmd.Array) and found.dtype == wanted.dtype
    assert found.weak_type == weak
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-6)


def test_fill_value_fits_the_values():
    with pytest.raises(errors.DtypeError, match="fill_value=1j does not fit"):
        spmd.scipy.interpolate.RegularGridInterpolator((_x,), _x, fill_value=1j)


# ---- Krylov solvers ----------------------------------------------------------------------------

SOLVERS = {"cg": krylov.cg, "bicgstab": krylov.bicgstab, "gmres": krylov.gmres}


def _system(name: str, n: int = 12) -> tuple[np.ndarray, np.ndarray]:
    a = _normal(n, n)
    a = a @ a.T / n + 2 * np.eye(n, dtype=np.float32) if name == "cg" else a / 4 + 2 * np.eye(n)
    return a.astype(np.float32), _normal(n)


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("how", ["matrix", "function", "jit", "preconditioned", "started"])
def test_solvers_solve(name, how):
    a, b = _system(name)
    expected = np.linalg.solve(a.astype(np.float64), b)
    options = {}
    if how == "preconditioned":
        options["M"] = np.diag(1 / np.diag(a)).astype(np.float32)
    if how == "started":
        options["x0"] = (expected + 0.1).astype(np.float32)
    given = a if how == "matrix" else lambda x: a @ x
    f = lambda b: SOLVERS[name](given, b, tol=1e-6, **options)[0]  # noqa: E731
    found = (spmd.jit(f) if how == "jit" else f)(b)
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", SOLVERS)
def test_gradients_solve_the_transposed_system(name):
    a, b = _system(name, 5)
    w = _normal(5)
    grads = spmd.grad(lambda a, b: w @ SOLVERS[name](lambda x: a @ x, b, tol=1e-7)[0], (0, 1))(a, b)
    x, back = np.linalg.solve(a, b), np.linalg.solve(a.T, w)
    np.testing.assert_allclose(grads[1], back, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(grads[0], -np.outer(back, x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", SOLVERS)
def test_vectors_are_trees(name):
    b = {"u": _normal(3), "v": (_normal(2, 2),)}
    apply = lambda t: spmd.tree.map(lambda x: 3 * x, t)  # noqa: E731
    x, _ = SOLVERS[name](apply, b)
    np.testing.assert_allclose(x["v"][0], b["v"][0] / 3, rtol=1e-5)
    many = spmd.vmap(lambda k: SOLVERS[name](lambda t: k * t, b["u"])[0])(
        np.array([2, 4], np.float32)
    )
    np.testing.assert_allclose(many, np.stack([b["u"] / 2, b["u"] / 4]), rtol=1e-5)


def test_complex_systems_and_few_rounds():
    a = (_normal(6, 6) + 1j * _normal(6, 6)).astype(np.complex64)
    a = a @ a.conj().T + 3 * np.eye(6, dtype=np.complex64)
    b = (_normal(6) + 1j * _normal(6)).astype(np.complex64)
    for f in SOLVERS.values():
        np.testing.assert_allclose(
            f(a, b, tol=1e-6)[0], np.linalg.solve(a, b), rtol=1e-3, atol=1e-4
        )
    start = np.zeros(6, np.complex64)
    np.testing.assert_array_equal(krylov.cg(a, b, start, maxiter=0)[0], start)
    zero = krylov.gmres(a, np.zeros(6, np.complex64))[0]
    np.testing.assert_array_equal(zero, start)


def test_reverse_mode_of_hermitian_systems_solves_the_conjugate_one():
    a = (_normal(4, 4) + 1j * _normal(4, 4)).astype(np.complex64)
    b, w = (_normal(4) + 1j * _normal(4)).astype(np.complex64), _normal(4)

    def loss(b, solve):
        matrix = a @ a.conj().T + np.eye(4, dtype=np.complex64)
        return snp.sum(snp.abs(solve(matrix, b)) ** 2 * w)

    by_cg = lambda b: loss(b, lambda m, b: krylov.cg(m, b, tol=1e-7)[0])  # noqa: E731
    directly = lambda b: loss(b, snp.linalg.solve)  # noqa: E731
    np.testing.assert_allclose(spmd.grad(by_cg)(b), spmd.grad(directly)(b), rtol=1e-3, atol=1e-3)


def test_solvers_say_what_does_not_fit():
    with pytest.raises(errors.ShapeError, match="square"):
        krylov.cg(np.ones((2, 3)), np.ones(3))
    with pytest.raises(errors.ShapeError, match="x0"):
        krylov.bicgstab(np.eye(3), np.ones(3), np.ones(2))
    with pytest.raises(errors.ArgumentError, match="solve_method"):
        krylov.gmres(np.eye(3), np.ones(3), solve_method="fast")


# ---- between elements --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["constant", "nearest", "wrap", "mirror", "reflect"])
@pytest.mark.parametrize("order", [0, 1])
def test_arrays_are_read_between_their_elements(order, mode):
    x = _normal(4, 5)
    inside = mode == "constant"  # SciPy blends with the constant beyond the edge, JAX does too
    places = [_random.uniform(0 if inside else -6, n - 1 if inside else n + 6, 40) for n in (4, 5)]
    places = [p.astype(np.float32) for p in places]
    scipy_mode = {"wrap": "grid-wrap"}.get(mode, mode)
    expected = scipy_ndimage.map_coordinates(x, places, order=order, mode=scipy_mode)
    found = ndimage.map_coordinates(x, places, order, mode)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_halves_round_away_from_zero():
    x, at = np.array([1.0, 4.0, 2.0, 8.0]), np.array([-0.5, 0.5, 1.5, 2.5, 3.5])
    assert np.asarray(ndimage.map_coordinates(x, [at], 0, cval=7.0)).tolist() == [7, 4, 2, 8, 7]
    whole = np.asarray(ndimage.map_coordinates(np.array([0, 1, 2, 5]), [at[1:]], 1, mode="nearest"))
    assert whole.tolist() == [1, 2, 4, 5]


def test_places_outside_are_constant_and_integers_round():
    x = np.arange(4)
    found = ndimage.map_coordinates(x, [np.array([-2.0, 1.4, 9.0])], 1, cval=7)
    np.testing.assert_array_equal(found, [7, 1, 7])
    assert found.dtype == np.int32
    y = _normal(4)
    check_grads(
        lambda y: ndimage.map_coordinates(y, [np.array([0.3, 2.6], np.float32)], 1),
        (y,),
        order=1,
        atol=1e-3,
    )
    with pytest.raises(errors.ShapeError, match="1 dims"):
        ndimage.map_coordinates(y, [], 1)
    with pytest.raises(errors.ArgumentError, match="order=3"):
        ndimage.map_coordinates(y, [y], 3)


def test_the_nearest_code():
    obs, book = _normal(20, 3), _normal(5, 3)
    for found, expected in zip(cluster.vq.vq(obs, book), scipy_vq.vq(obs, book), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_array_equal(
        cluster.vq.vq(np.array([1, 9], np.float32), np.array([8, 0], np.float32))[0], [1, 0]
    )
    with pytest.raises(errors.ShapeError, match="code_book"):
        cluster.vq.vq(obs, book[:, :2])


def test_solvers_under_x64():
    with spmd.enable_x64(True):
        a, b = _system("cg")
        x = krylov.cg(snp.asarray(a, np.float64), snp.asarray(b, np.float64), tol=1e-12)[0]
        np.testing.assert_allclose(x, np.linalg.solve(a.astype(np.float64), b), rtol=1e-9)
