"""The QR algorithm: a Hessenberg matrix made (quasi-)triangular, over NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.lax.linalg.qr import householder_vector, reflect

# Iterations for one eigenvalue before giving up; every tenth has an exceptional shift.
_PATIENCE = 60


def _negligible(h: Any, k: int) -> bool:
    """Whether the subdiagonal element before row k is zero for this precision."""
    size = abs(h[k - 1, k - 1]) + abs(h[k, k])
    size = size if size else np.abs(h).max()
    return abs(h[k, k - 1]) <= np.finfo(h.dtype).eps * size


def _start(h: Any, last: int) -> int:
    """The first row of the unreduced block that ends in row `last`."""
    low = last
    while low > 0 and not _negligible(h, low):
        low -= 1
    if low > 0:
        h[low, low - 1] = 0
    return low


def complex_schur(h: Any, z: Any) -> tuple[Any, Any]:
    """Schur form of a complex Hessenberg matrix, by single shifts (Golub & Van Loan, 7.5)."""
    last, tries = h.shape[0] - 1, 0
    while last > 0:
        low = _start(h, last)
        if low == last:
            last, tries = last - 1, 0
            continue
        tries += 1
        if tries > _PATIENCE:
            return np.full_like(h, np.nan), np.full_like(z, np.nan)
        shift = _wilkinson(h[last - 1 : last + 1, last - 1 : last + 1])
        if tries % 10 == 0:
            shift = abs(h[last, last - 1]) + abs(h[last - 1, max(last - 2, 0)])
        _chase_one(h, z, low, last, shift)
    return np.triu(h), z


def _wilkinson(block: Any) -> Any:
    """The eigenvalue of a 2 by 2 block that is closer to its last element."""
    half = (block[0, 0] - block[1, 1]) / 2
    product = block[0, 1] * block[1, 0]
    root = np.sqrt(half * half + product)
    if (np.conj(half) * root).real < 0:
        root = -root
    return block[1, 1] - product / (half + root) if half + root else block[1, 1]


def _chase_one(h: Any, z: Any, low: int, last: int, shift: Any) -> None:
    """One step: reflections of two rows move the bulge that the shift makes down and out."""
    x = np.array([h[low, low] - shift, h[low + 1, low]])
    for k in range(low, last):
        _similar(h, z, k, x, min(k + 3, last + 1), max(k - 1, low))
        if k + 2 <= last:
            x = h[k + 1 : k + 3, k].copy()


def _similar(h: Any, z: Any, k: int, x: Any, stop: int, left: int) -> None:
    """Apply the reflection that takes x to e1 in rows and columns k and following."""
    v, tau, _ = householder_vector(x)
    n = len(x)
    reflect(h[k : k + n, left:], v, np.conj(tau))
    reflect(h[:stop, k : k + n], v, tau, left=False)
    reflect(z[:, k : k + n], v, tau, left=False)
    h[k + 1 : k + n, left : max(left, k)] = 0


def real_schur(h: Any, z: Any) -> tuple[Any, Any]:
    """Real Schur form of a Hessenberg matrix, by Francis's double shifts (Golub & Van Loan, 7.5).

    Blocks of two rows stay for complex pairs, in LAPACK's standard form.
    """
    last, tries = h.shape[0] - 1, 0
    while last > 0:
        low = _start(h, last)
        if low >= last - 1:
            if low == last - 1:
                _standardize(h, z, low)
            last, tries = low - 1, 0
            continue
        tries += 1
        if tries > _PATIENCE:
            return np.full_like(h, np.nan), np.full_like(z, np.nan)
        _chase_two(h, z, low, last, unusual=tries % 10 == 0)
    return np.triu(h, -1), z


def _chase_two(h: Any, z: Any, low: int, last: int, unusual: bool) -> None:
    """One double step with the eigenvalues of the last block as shifts, in real numbers."""
    a, b, c, d = h[last - 1 : last + 1, last - 1 : last + 1].ravel()
    total, product = a + d, a * d - b * c
    if unusual:
        size = abs(h[last, last - 1]) + abs(h[last - 1, last - 2])
        total, product = 1.5 * size, size * size
    p, q = h[low, low], h[low + 1, low]
    x = np.array(
        [
            p * p + h[low, low + 1] * q - total * p + product,
            q * (p + h[low + 1, low + 1] - total),
            q * h[low + 2, low + 1],
        ]
    )
    for k in range(low, last):
        count = min(3, last - k + 1)
        _similar(h, z, k, x[:count], min(k + 4, last + 1), max(k - 1, low))
        x = h[k + 1 : min(k + 4, last + 1), k].copy()


def _standardize(h: Any, z: Any, k: int) -> None:
    """Rotate a 2 by 2 block: triangular if its eigenvalues are real, else of equal diagonal."""
    a, b, c, d = h[k : k + 2, k : k + 2].ravel()
    half = (a - d) / 2
    inside = half * half + b * c
    if inside >= 0:
        # A real eigenvector, of the eigenvalue farther from d, becomes the first axis.
        root = half + np.copysign(np.sqrt(inside), half)
        x, y = root, c
        if abs(x) + abs(y) == 0:
            x, y = 1.0, 0.0
    else:
        # The rotation that makes the diagonal equal: tan(2t) = (d - a) / (b + c).
        angle = 0.5 * np.arctan2(d - a, b + c)
        x, y = np.cos(angle), np.sin(angle)
    length = np.hypot(x, y)
    x, y = x / length, y / length
    turn = np.array([[x, -y], [y, x]])
    h[k : k + 2, k:] = turn.T @ h[k : k + 2, k:]
    h[: k + 2, k : k + 2] = h[: k + 2, k : k + 2] @ turn
    z[:, k : k + 2] = z[:, k : k + 2] @ turn
    if inside >= 0:
        h[k + 1, k] = 0
    else:
        h[k, k] = h[k + 1, k + 1] = (a + d) / 2
