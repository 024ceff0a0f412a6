"""Rotations against SciPy and JAX, derivatives against finite differences, and errors."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.spatial.transform as oracle

import spmd
import spmd.numpy as jnp
from spmd.scipy.spatial.transform import Rotation, Slerp
from spmd.testing import check_grads

RNG = np.random.default_rng(3)
QUATS = RNG.normal(size=(6, 4)).astype(np.float32)
VECTORS = RNG.normal(size=(6, 3)).astype(np.float32)
SEQUENCES = ["xyz", "zxz", "yzx", "XYZ", "ZXZ", "ZYX", "YXY"]


def close(found, wanted, tolerance=2e-5):
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=tolerance, atol=tolerance)


def same(found: Rotation, wanted, tolerance=2e-5):
    """A rotation and its negative quaternion are one."""
    close(found.as_matrix(), wanted.as_matrix(), tolerance)
    assert found.quat.dtype == np.float32


OURS, THEIRS = Rotation.from_quat(QUATS), oracle.Rotation.from_quat(QUATS)


@pytest.mark.parametrize(
    "form", ["as_quat", "as_matrix", "as_rotvec", "as_mrp", "magnitude", "inv", "mean"]
)
def test_forms_are_scipys(form: str):
    found, wanted = getattr(OURS, form)(), getattr(THEIRS, form)()
    if isinstance(found, Rotation):
        same(found, wanted)
    else:
        close(found, wanted)


def test_one_rotation_has_no_batch_dim():
    one, wanted = OURS[2], THEIRS[2]
    assert one.single and not OURS.single and len(OURS) == 6
    assert [part.single for part in OURS] == [True] * 6
    for form in ("as_quat", "as_matrix", "as_rotvec", "as_mrp", "magnitude"):
        close(getattr(one, form)(), getattr(wanted, form)())


@pytest.mark.parametrize("seq", SEQUENCES)
@pytest.mark.parametrize("degrees", [False, True])
def test_euler_angles(seq: str, degrees: bool):
    close(OURS.as_euler(seq, degrees), THEIRS.as_euler(seq, degrees), 2e-4)
    angles = VECTORS * (40 if degrees else 1)
    same(
        Rotation.from_euler(seq, angles, degrees), oracle.Rotation.from_euler(seq, angles, degrees)
    )


@pytest.mark.parametrize("seq", ["x", "Z", "xy", "YX"])
def test_fewer_axes(seq: str):
    angles = VECTORS[:, : len(seq)]
    same(Rotation.from_euler(seq, angles), oracle.Rotation.from_euler(seq, angles))
    if len(seq) == 1:
        same(Rotation.from_euler(seq, 0.5), oracle.Rotation.from_euler(seq, 0.5))


@pytest.mark.parametrize("seq", ["xyz", "zxz", "XYZ", "ZXZ"])
@pytest.mark.parametrize("middle", [0.0, np.pi / 2, np.pi])
@pytest.mark.filterwarnings("ignore:Gimbal lock")
def test_locked_axes_give_the_same_rotation(seq: str, middle: float):
    with spmd.enable_x64(True):
        there = Rotation.from_euler(seq, np.array([0.3, middle, 0.5]))
        found = Rotation.from_euler(seq, there.as_euler(seq))
        close(found.as_matrix(), there.as_matrix(), 1e-6)
        wanted = oracle.Rotation.from_quat(np.asarray(there.quat)).as_euler(seq)
        close(Rotation.from_euler(seq, wanted).as_matrix(), there.as_matrix(), 1e-6)


def test_made_of_matrices_vectors_and_parameters():
    matrices = THEIRS.as_matrix().astype(np.float32)
    same(Rotation.from_matrix(matrices), THEIRS)
    half_turns = np.stack([np.diag([1.0, -1, -1]), np.diag([-1.0, 1, -1]), np.diag([-1.0, -1, 1])])
    same(Rotation.from_matrix(half_turns), oracle.Rotation.from_matrix(half_turns))
    same(Rotation.from_rotvec(VECTORS), oracle.Rotation.from_rotvec(VECTORS))
    degrees = VECTORS * 50
    same(Rotation.from_rotvec(degrees, True), oracle.Rotation.from_rotvec(degrees, True))
    same(Rotation.from_mrp(VECTORS), oracle.Rotation.from_mrp(VECTORS))
    close(Rotation.from_rotvec(np.zeros(3)).quat, [0, 0, 0, 1])
    close(Rotation.from_rotvec(np.full(3, 1e-5)).as_rotvec(), np.full(3, 1e-5), 1e-9)


def test_apply_compose_concatenate():
    close(OURS.apply(VECTORS), THEIRS.apply(VECTORS))
    close(OURS.apply(VECTORS, inverse=True), THEIRS.apply(VECTORS, inverse=True))
    close(OURS[0].apply(VECTORS), THEIRS[0].apply(VECTORS))
    close(OURS.apply(VECTORS[0]), THEIRS.apply(VECTORS[0]))
    same(OURS * OURS[1], THEIRS * THEIRS[1])
    both = Rotation.concatenate([OURS[:2], OURS[5]])
    same(both, oracle.Rotation.concatenate([THEIRS[:2], THEIRS[5]]))
    weights = np.arange(1.0, 7.0)
    same(OURS.mean(weights), THEIRS.mean(weights), 1e-4)


def test_canonical_quaternions():
    quats = np.concatenate([QUATS, -QUATS, [[0, -1, 0, 0], [0, 0, -1, 0], [-1, 1, 0, 0]]])
    found = Rotation.from_quat(quats).as_quat(canonical=True)
    close(found, oracle.Rotation.from_quat(quats).as_quat(canonical=True))
    first = Rotation.from_quat(quats).as_quat(scalar_first=True)
    close(first, oracle.Rotation.from_quat(quats).as_quat(scalar_first=True))


def test_identity_and_random():
    same(Rotation.identity(), oracle.Rotation.identity())
    assert Rotation.identity(3).quat.shape == (3, 4)
    drawn = Rotation.random(spmd.random.key(1), 4000)
    close(jnp.linalg.norm(drawn.quat, axis=-1), np.ones(4000))
    # Uniform over all rotations: a vector goes everywhere alike, and the mean angle is this one.
    close(drawn.apply(np.array([0.0, 0.0, 1.0])).mean(0), np.zeros(3), 0.04)
    close(drawn.magnitude().mean(), np.pi / 2 + 2 / np.pi, 0.03)


def test_slerp_is_scipys():
    times = np.array([0.0, 1.0, 3.0, 4.0, 6.0, 7.0])
    at = np.array([0.0, 0.3, 1.0, 2.5, 5.5, 7.0])
    found, wanted = Slerp.init(times, OURS), oracle.Slerp(times, THEIRS)
    same(found(at), wanted(at), 1e-4)
    same(found(2.5), wanted(2.5), 1e-4)
    same(spmd.jit(lambda s, t: s(t))(found, at), wanted(at), 1e-4)


@pytest.mark.parametrize("name", ["as_matrix", "as_rotvec", "as_mrp", "magnitude", "inv"])
def test_results_are_jaxs(name: str):
    theirs = pytest.importorskip("jax.scipy.spatial.transform").Rotation.from_quat(QUATS)
    found, wanted = getattr(OURS, name)(), getattr(theirs, name)()
    found, wanted = (x.quat if hasattr(x, "quat") else x for x in (found, wanted))
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    close(found, np.asarray(wanted))


@pytest.mark.parametrize("vector", [[0.3, -0.5, 0.2], [1e-5, 2e-5, 0.0], [0.0, 0.0, 0.0]])
def test_derivatives_at_small_angles_too(vector):
    with spmd.enable_x64(True):
        v = np.array(vector)
        check_grads(lambda v: Rotation.from_rotvec(v).quat, (v,), 2)
        check_grads(lambda v: Rotation.from_rotvec(v).as_rotvec(), (v,), 1)
        check_grads(lambda v: Rotation.from_rotvec(v).apply(np.ones(3)), (v,), 2)


def test_derivatives_of_euler_angles_and_matrices():
    with spmd.enable_x64(True):
        angles = np.array([0.3, 0.4, -0.5])
        for seq in ("xyz", "ZXZ"):
            check_grads(lambda a, s=seq: Rotation.from_euler(s, a).as_euler(s), (angles,), 1)
        matrix = np.asarray(Rotation.from_euler("xyz", angles).as_matrix())
        check_grads(lambda m: Rotation.from_matrix(m).quat, (matrix,), 1)


def test_rotations_are_pytrees():
    mapped = spmd.vmap(lambda r, v: r.apply(v))(OURS, VECTORS)
    close(mapped, THEIRS.apply(VECTORS))
    same(spmd.jit(lambda r: r * r)(OURS), THEIRS * THEIRS)
    spmd.grad(lambda r: r.as_matrix().sum())(OURS)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda: Rotation.from_quat(np.ones(3)), "quat must have a last dim of 4, got float32"),
        (lambda: Rotation.from_matrix(np.ones((3, 4))), r"matrix must have the shape \(..., 3, 3"),
        (lambda: Rotation.from_euler("xx", np.ones(2)), "seq='xx' must be 1 to 3 letters of xyz"),
        (lambda: Rotation.from_euler("xY", np.ones(2)), "no two neighbours equal"),
        (lambda: Rotation.from_euler("xy", np.ones(3)), "names 2 axes, so angles must have"),
        (lambda: OURS.as_euler("xy"), "must be 3 letters"),
        (lambda: OURS.apply(np.ones(2)), "vectors must have a last dim of 3"),
        (lambda: OURS.mean(np.ones(2)), r"weights must have the shape \(6,\)"),
        (lambda: Slerp.init([0.0], OURS), r"times must have the shape \(6,\)"),
        (lambda: Slerp.init([0.0], OURS[0]), "rotations must be a Rotation of at least 2"),
        (lambda: Slerp.init(np.arange(6.0), OURS)(np.ones((2, 2))), "a number or a vector"),
    ],
)
def test_errors_name_the_argument(mistake, words: str):
    with pytest.raises(ValueError, match=words) as error:
        mistake()
    assert "test_rotation.py:" in str(error.value)


def test_a_single_rotation_is_no_sequence():
    with pytest.raises(TypeError, match="a single rotation has no length"):
        len(OURS[0])
    with pytest.raises(TypeError, match="a single rotation has no parts"):
        OURS[0][0]
