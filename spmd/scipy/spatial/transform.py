"""Rotations in three dimensions, and interpolation between them: `jax.scipy.spatial.transform`.

A `Rotation` is a pytree with one leaf, its unit quaternions (x, y, z, w). Every function is
arithmetic of components along the last dim, so that batches, `vmap`, `jit` and derivatives need
nothing of their own. At small angles, where the formulas are 0 / 0, values and derivatives come
from series.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from spmd import numpy as snp
from spmd.base.errors import ArgumentError, ShapeError
from spmd.base.source import current_source
from spmd.base.tree import register_dataclass
from spmd.core.aval import typeof
from spmd.numpy.promotion import promote_args_inexact
from spmd.random import normal

if TYPE_CHECKING:
    from spmd.sharding.array import Array

__all__ = ["Rotation", "Slerp"]

# Below these angles the series are as good as float64; above, the formulas are.
_SMALL = 1e-3
_GIMBAL = 1e-7  # of an angle at which two axes of Euler angles are one


@register_dataclass
@dataclass(frozen=True, eq=False)
class Rotation:
    """A rotation in three dimensions, or an array of n of them, as in SciPy.

    `quat` has the unit quaternions, of shape (4,) or (n, 4), the scalar last. Make one with
    `from_quat`, `from_matrix`, `from_rotvec`, `from_mrp`, `from_euler` or `identity`. Functions
    can take and return rotations: they are pytrees.

    >>> quarter = Rotation.from_euler("z", 90, degrees=True)
    >>> snp.abs(quarter.apply(np.array([1.0, 0.0, 0.0])).round(3))
    Array([0., 1., 0.], dtype=float32)
    >>> (quarter * quarter).magnitude().round(3)
    Array(3.142, dtype=float32)
    """

    quat: Array

    # ---- making them ---------------------------------------------------------------------------

    @classmethod
    def identity(cls, num: int | None = None, dtype: Any = float) -> Rotation:
        """The rotation that changes nothing, or `num` of them.

        >>> Rotation.identity().as_rotvec()
        Array([0., 0., 0.], dtype=float32)
        """
        one = snp.array([0.0, 0.0, 0.0, 1.0], dtype=dtype)
        return cls(one if num is None else snp.tile(one, (num, 1)))

    @classmethod
    def from_quat(cls, quat: Any) -> Rotation:
        """Rotations of quaternions, shape (4,) or (n, 4), which are scaled to length 1.

        >>> Rotation.from_quat(np.array([0.0, 0.0, 2.0, 0.0])).quat
        Array([0., 0., 1., 0.], dtype=float32)
        """
        (quat,) = _vectors("from_quat", 4, quat=quat)
        return cls(quat / _length(quat)[..., None])

    @classmethod
    def from_matrix(cls, matrix: Any) -> Rotation:
        """Rotations of orthogonal matrices, shape (3, 3) or (n, 3, 3).

        >>> Rotation.from_matrix(np.eye(3)).quat
        Array([0., 0., 0., 1.], dtype=float32)
        """
        (m,) = promote_args_inexact("Rotation.from_matrix", matrix)
        m = snp.asarray(m)
        if m.shape[-2:] != (3, 3):
            raise ShapeError(
                f"{current_source()}: Rotation.from_matrix: matrix must have the shape (..., 3, "
                f"3), got {typeof(m)}"
            )
        # Four times the products of the quaternion with itself: a multiple of it in each row, of
        # which the longest is the exact one.
        xx, yy, zz = m[..., 0, 0], m[..., 1, 1], m[..., 2, 2]
        xy, xz, yz = (m[..., i, j] + m[..., j, i] for i, j in ((0, 1), (0, 2), (1, 2)))
        xw, yw, zw = (m[..., i, j] - m[..., j, i] for i, j in ((2, 1), (0, 2), (1, 0)))
        rows = [
            [1 + xx - yy - zz, xy, xz, xw],
            [xy, 1 - xx + yy - zz, yz, yw],
            [xz, yz, 1 - xx - yy + zz, zw],
            [xw, yw, zw, 1 + xx + yy + zz],
        ]
        products = snp.stack([snp.stack(row, axis=-1) for row in rows], axis=-2)
        squares = snp.stack([xx, yy, zz, xx + yy + zz], axis=-1)
        best = snp.argmax(squares, axis=-1)[..., None, None]
        row = snp.take_along_axis(products, best, axis=-2)[..., 0, :]
        return cls(row / _length(row)[..., None])

    @classmethod
    def from_rotvec(cls, rotvec: Any, degrees: bool = False) -> Rotation:
        """Rotations about vectors by their length, shape (3,) or (n, 3).

        >>> Rotation.from_rotvec(np.array([0.0, 0.0, 180.0]), degrees=True).quat.round(3)
        Array([ 0.,  0.,  1., -0.], dtype=float32)
        """
        (v,) = _vectors("from_rotvec", 3, rotvec=rotvec)
        v = snp.deg2rad(v) if degrees else v
        square = snp.sum(v * v, axis=-1, keepdims=True)
        small = square < _SMALL**2
        angle = snp.sqrt(snp.where(small, 1.0, square))
        scale = snp.where(small, 0.5 - square / 48 + square**2 / 3840, snp.sin(0.5 * angle) / angle)
        cos = snp.where(small, 1 - square / 8 + square**2 / 384, snp.cos(0.5 * angle))
        return cls(snp.concatenate([scale * v, cos], axis=-1))

    @classmethod
    def from_mrp(cls, mrp: Any) -> Rotation:
        """Rotations of modified Rodrigues parameters, shape (3,) or (n, 3): axis x tan(angle / 4).

        >>> Rotation.from_mrp(np.array([0.0, 0.0, 1.0])).quat
        Array([0., 0., 1., 0.], dtype=float32)
        """
        (v,) = _vectors("from_mrp", 3, mrp=mrp)
        square = snp.sum(v * v, axis=-1, keepdims=True)
        return cls(snp.concatenate([2 * v, 1 - square], axis=-1) / (1 + square))

    @classmethod
    def from_euler(cls, seq: str, angles: Any, degrees: bool = False) -> Rotation:
        """Rotations about 1 to 3 axes, one after the other.

        `seq` names the axes: "xyz" are fixed (extrinsic), "XYZ" turn with the body (intrinsic).
        `angles` has a last dim of as many angles, or is a number if there is one axis.

        >>> Rotation.from_euler("zyx", np.array([90.0, 0.0, 0.0]), degrees=True).quat.round(3)
        Array([0.   , 0.   , 0.707, 0.707], dtype=float32)
        """
        axes, extrinsic = _axes("from_euler", seq, 1)
        (found,) = promote_args_inexact("Rotation.from_euler", angles)
        found = snp.asarray(found)
        found = snp.atleast_1d(found)
        if found.shape[-1] != len(axes):
            raise ShapeError(
                f"{current_source()}: Rotation.from_euler: seq={seq!r} names {len(axes)} axes, so "
                f"angles must have a last dim of {len(axes)}, got {typeof(found)}"
            )
        half = 0.5 * (snp.deg2rad(found) if degrees else found)
        total: Any = None
        for k, axis in enumerate(axes):
            sin, cos = snp.sin(half[..., k]), snp.cos(half[..., k])
            parts = [sin if d == axis else snp.zeros_like(sin) for d in range(3)]
            turn = snp.stack([*parts, cos], axis=-1)
            if total is None:
                total = turn
            else:
                total = _compose(turn, total) if extrinsic else _compose(total, turn)
        return cls(total)

    @classmethod
    def concatenate(cls, rotations: Sequence[Rotation]) -> Rotation:
        """All rotations of a sequence, one after the other, each an array of them.

        >>> len(Rotation.concatenate([Rotation.identity(2), Rotation.identity(1)]))
        3
        """
        return cls(snp.concatenate([snp.atleast_2d(r.quat) for r in rotations]))

    @classmethod
    def random(cls, random_key: Any, num: int | None = None) -> Rotation:
        """Uniformly distributed rotations: one, or `num` of them, from a key of `spmd.random`.

        >>> Rotation.random(spmd.random.key(0), 5).quat.shape
        (5, 4)
        """
        return cls.from_quat(normal(random_key, (4,) if num is None else (num, 4)))

    # ---- what they stand for -------------------------------------------------------------------

    def as_quat(self, canonical: bool = False, scalar_first: bool = False) -> Array:
        """The unit quaternions, shape (4,) or (n, 4).

        `canonical` takes, of the two that stand for one rotation, that whose scalar is positive
        (or, if it is zero, the first component that is not). `scalar_first` puts the scalar first.

        >>> Rotation.identity().as_quat(scalar_first=True)
        Array([1., 0., 0., 0.], dtype=float32)
        """
        quat = self.quat
        if canonical:
            sign: Any = 0
            for k in (2, 1, 0, 3):  # the last that is not zero wins
                sign = snp.where(quat[..., k] == 0, sign, snp.sign(quat[..., k]))
            quat = snp.where((sign < 0)[..., None], -quat, quat)
        return snp.roll(quat, 1, axis=-1) if scalar_first else quat

    def as_matrix(self) -> Array:
        """The matrices, shape (3, 3) or (n, 3, 3).

        >>> Rotation.identity().as_matrix()[0]
        Array([1., 0., 0.], dtype=float32)
        """
        x, y, z, w = (self.quat[..., k] for k in range(4))
        rows = [
            [x * x - y * y - z * z + w * w, 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), y * y - x * x - z * z + w * w, 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), z * z - x * x - y * y + w * w],
        ]
        return snp.stack([snp.stack(row, axis=-1) for row in rows], axis=-2)

    def as_rotvec(self, degrees: bool = False) -> Array:
        """The axes, each as long as the angle, which is at most pi; shape (3,) or (n, 3).

        >>> Rotation.from_euler("x", 0.5).as_rotvec()
        Array([0.5, 0. , 0. ], dtype=float32)
        """
        quat = snp.where(self.quat[..., 3:] < 0, -self.quat, self.quat)
        v, w = quat[..., :3], quat[..., 3:]
        square = snp.sum(v * v, axis=-1, keepdims=True)
        small = square < (0.5 * _SMALL) ** 2
        sin = snp.sqrt(snp.where(small, 1.0, square))
        # The angle is 2 arctan(t) with t = |v| / w; v / w times 2 (1 - t^2 / 3 + t^4 / 5).
        t2 = snp.where(small, square, 0.0) / snp.where(small, w * w, 1.0)
        series = 2 / snp.where(small, w, 1.0) * (1 - t2 / 3 + t2 * t2 / 5)
        scale = snp.where(small, series, 2 * snp.arctan2(sin, w) / sin)
        return (snp.rad2deg(scale) if degrees else scale) * v

    def as_mrp(self) -> Array:
        """The modified Rodrigues parameters, shape (3,) or (n, 3).

        >>> Rotation.identity().as_mrp()
        Array([0., 0., 0.], dtype=float32)
        """
        quat = snp.where(self.quat[..., 3:] < 0, -self.quat, self.quat)
        return quat[..., :3] / (1 + quat[..., 3:])

    def as_euler(self, seq: str, degrees: bool = False) -> Array:
        """The angles about three axes, shape (3,) or (n, 3), as `from_euler` takes them.

        Where the first and the last axis are one line only their sum, or difference, is
        determined: the last (of extrinsic angles) or the first is zero.

        >>> Rotation.from_euler("xyz", np.array([0.25, 0.5, 1.0])).as_euler("xyz").round(3)
        Array([0.25, 0.5 , 1.  ], dtype=float32)
        """
        axes, extrinsic = _axes("as_euler", seq, 3)
        i, j, k = axes if extrinsic else axes[::-1]
        proper = i == k  # the first axis once more; k is the axis that is left
        k = 3 - i - j if proper else k
        parity = (i - j) * (j - k) * (k - i) // 2
        q = [self.quat[..., d] for d in range(4)]
        if proper:
            a, b, c, d = q[3], q[i], q[j], q[k] * parity
        else:
            a, b, c, d = q[3] - q[j], q[i] + q[k] * parity, q[j] + q[3], q[k] * parity - q[i]
        middle = 2 * snp.arctan2(snp.hypot(c, d), snp.hypot(a, b))
        half_sum, half_difference = snp.arctan2(b, a), snp.arctan2(d, c)
        at_zero = snp.abs(middle) <= _GIMBAL
        locked = at_zero | (snp.abs(middle - math.pi) <= _GIMBAL)
        only = snp.where(at_zero, 2 * half_sum, 2 * half_difference * (-1 if extrinsic else 1))
        difference, total = half_sum - half_difference, half_sum + half_difference
        if extrinsic:
            first, last = snp.where(locked, only, difference), snp.where(locked, 0.0, total)
        else:
            first, last = snp.where(locked, only, total), snp.where(locked, 0.0, difference)
        if not proper:
            middle = middle - 0.5 * math.pi
            first, last = (first, last * parity) if extrinsic else (first * parity, last)
        angles = snp.stack([first, middle, last], axis=-1)
        angles = (angles + math.pi) % (2 * math.pi) - math.pi
        return snp.rad2deg(angles) if degrees else angles

    # ---- what can be done with them ------------------------------------------------------------

    def apply(self, vectors: Any, inverse: bool = False) -> Array:
        """Rotate vectors of shape (3,) or (n, 3), or rotate them back if `inverse`.

        One rotation goes with all vectors, and one vector with all rotations.

        >>> Rotation.identity(2).apply(np.array([1.0, 2.0, 3.0])).shape
        (2, 3)
        """
        (vectors,) = _vectors("apply", 3, vectors=vectors)
        matrix = self.as_matrix()
        return snp.einsum("...ji,...j->...i" if inverse else "...ij,...j->...i", matrix, vectors)

    def inv(self) -> Rotation:
        """The inverse rotations.

        >>> (Rotation.from_euler("x", 0.5).inv().as_rotvec())
        Array([-0.5, -0. , -0. ], dtype=float32)
        """
        return Rotation(self.quat * np.array([-1, -1, -1, 1], self.quat.dtype))

    def magnitude(self) -> Array:
        """The angles, between 0 and pi; shape () or (n,).

        >>> Rotation.from_euler("x", -0.5).magnitude()
        Array(0.5, dtype=float32)
        """
        return 2 * snp.arctan2(_length(self.quat[..., :3]), snp.abs(self.quat[..., 3]))

    def mean(self, weights: Any = None) -> Rotation:
        """The rotation that is nearest to all of an array, each counted with its weight.

        `weights` has shape (n,). The mean is the principal axis of the quaternions.

        >>> angles = np.array([[0.1], [0.3]])
        >>> Rotation.from_euler("z", angles).mean().magnitude().round(3)
        Array(0.2, dtype=float32)
        """
        count, quat = len(self), self.quat
        w = snp.ones(count, quat.dtype) if weights is None else snp.asarray(weights, quat.dtype)
        if w.shape != (count,):
            raise ShapeError(
                f"{current_source()}: Rotation.mean: weights must have the shape ({count},), one "
                f"for each rotation, got {typeof(w)}"
            )
        _, axes = snp.linalg.eigh(snp.einsum("n,ni,nj->ij", w, quat, quat))
        return Rotation(axes[:, -1])

    @property
    def single(self) -> bool:
        """Whether this is one rotation, and no array of them."""
        return self.quat.ndim == 1

    def __mul__(self, other: Any) -> Rotation:
        """The rotation by `other` and then by this one."""
        if not isinstance(other, Rotation):
            return NotImplemented
        return Rotation.from_quat(_compose(self.quat, other.quat))

    def __getitem__(self, indexer: Any) -> Rotation:
        if self.single:
            _refuse_single("has no parts")
        return Rotation(self.quat[indexer])

    def __len__(self) -> int:
        if self.single:
            _refuse_single("has no length")
        return self.quat.shape[0]

    def __iter__(self) -> Iterator[Rotation]:
        # Without it Python would ask for parts without end: those past the last are clamped.
        return (self[k] for k in range(len(self)))


@register_dataclass
@dataclass(frozen=True, eq=False)
class Slerp:
    """Interpolation between rotations at constant speed, each stretch about one axis.

    Make one with `Slerp.init(times, rotations)`; called with times it gives rotations. Before the
    first time and after the last the nearest stretch goes on.

    >>> turns = Rotation.from_euler("z", np.array([[0.0], [90.0]]), degrees=True)
    >>> Slerp.init(np.array([0.0, 1.0]), turns)(0.5).magnitude().round(4)
    Array(0.7854, dtype=float32)
    """

    times: Array
    timedelta: Array
    rotations: Rotation
    rotvecs: Array

    @classmethod
    def init(cls, times: Any, rotations: Rotation) -> Slerp:
        """The interpolation through `rotations`, at least 2, at increasing `times`.

        Raises `ArgumentError` if `rotations` is none or only one, and `ShapeError` if `times` has
        not one number for each.
        """
        if not isinstance(rotations, Rotation) or rotations.single or len(rotations) < 2:
            raise ArgumentError(
                f"{current_source()}: Slerp: rotations must be a Rotation of at least 2, got "
                f"{rotations!r}"
            )
        times = snp.asarray(times, dtype=rotations.quat.dtype)
        if times.shape != (len(rotations),):
            raise ShapeError(
                f"{current_source()}: Slerp: times must have the shape ({len(rotations)},), one "
                f"for each rotation, got {typeof(times)}"
            )
        first, second = rotations[:-1], rotations[1:]
        return cls(times, snp.diff(times), first, (first.inv() * second).as_rotvec())

    def __call__(self, times: Any) -> Rotation:
        """The rotations at `times`, a number or a vector."""
        at = snp.asarray(times, dtype=self.times.dtype)
        if at.ndim > 1:
            raise ShapeError(
                f"{current_source()}: Slerp: times must be a number or a vector, got {typeof(at)}"
            )
        last = len(self.timedelta) - 1
        k = snp.clip(snp.searchsorted(self.times, at) - 1, 0, last)
        part = ((at - self.times[k]) / self.timedelta[k])[..., None]
        return self.rotations[k] * Rotation.from_rotvec(self.rotvecs[k] * part)


# ---- components --------------------------------------------------------------------------------


def _refuse_single(what: str) -> NoReturn:
    # The type that `len` and `x[i]` raise for what is no sequence.
    raise ArgumentError(f"{current_source()}: Rotation: a single rotation {what}")


def _vectors(name: str, size: int, **given: Any) -> list[Any]:
    """Arguments as arrays of one float dtype, whose last dim has the size."""
    found = [snp.asarray(x) for x in promote_args_inexact(f"Rotation.{name}", *given.values())]
    for argument, x in zip(given, found, strict=True):
        if not x.ndim or x.shape[-1] != size:
            raise ShapeError(
                f"{current_source()}: Rotation.{name}: {argument} must have a last dim of {size}, "
                f"got {typeof(x)}"
            )
    return found


def _axes(name: str, seq: str, least: int) -> tuple[list[int], bool]:
    """The numbers of the axes in a text, and whether they stay where they are."""
    fixed = seq.islower()
    known = least <= len(seq) <= 3 and (fixed or seq.isupper()) and set(seq.lower()) <= set("xyz")
    if not known or any(a == b for a, b in pairwise(seq)):
        count = "3" if least == 3 else "1 to 3"
        raise ArgumentError(
            f"{current_source()}: Rotation.{name}: seq={seq!r} must be {count} letters of xyz "
            "(fixed axes) or of XYZ (axes that turn with the body), no two neighbours equal"
        )
    return ["xyz".index(c) for c in seq.lower()], fixed


def _length(x: Any) -> Any:
    """The lengths of vectors; the derivative at zero is zero."""
    square = snp.sum(x * x, axis=-1)
    zero = square == 0
    return snp.where(zero, 0.0, snp.sqrt(snp.where(zero, 1.0, square)))


def _compose(p: Any, q: Any) -> Any:
    """The products of quaternions: first the rotation `q`, then `p`."""
    (px, py, pz, pw), (qx, qy, qz, qw) = ([r[..., k] for k in range(4)] for r in (p, q))
    parts = [
        pw * qx + qw * px + py * qz - pz * qy,
        pw * qy + qw * py + pz * qx - px * qz,
        pw * qz + qw * pz + px * qy - py * qx,
        pw * qw - px * qx - py * qy - pz * qz,
    ]
    return snp.stack(parts, axis=-1)
