"""Plans: the words of a factorization, its memory for work, and its native step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spmd.compile.cpu.linalg.routines_ir import SIZES, routine_text, symbol_of
from spmd.compile.kernel.dtypes import itemsize
from spmd.compile.kernel.factorization import (
    EIGENVALUES,
    EIGH,
    LU,
    QR,
    SINGULAR_VALUES,
    SOLVE,
    SVD,
    UPPER,
    Factorization,
)
from spmd.compile.lower.linalg import routines
from spmd.compile.native.program.steps import KernelStep, Slot
from spmd.lax.linalg.lapack import has_one_thread

# Measured on one core: a call, and operations in a nanosecond; both within a factor of three.
_NS_PER_CALL, _OPERATIONS_PER_NS = 500.0, 5.0
# Columns that LAPACK takes at once.
_BLOCK = 64
_ALIGNMENT = 64
_LEAST_ALONE = 24
# NumPy's characters of dtypes.
_CHARACTERS = {"f32": "f", "f64": "d", "c64": "F", "c128": "D"}


def text_of(f: Factorization) -> str:
    """The module of the function of a factorization."""
    found = routines(f.kind, _CHARACTERS[f.dtype])
    assert found is not None, "a step is only made where its routines are"
    return routine_text(f.kind, f.dtype, found)


def factor_step(
    f: Factorization, addresses: Mapping[str, int], slots: Sequence[Slot], name: str
) -> KernelStep:
    """The step of a factorization whose text is compiled."""
    nbytes, least = itemsize(f.dtype), min(f.m, f.n)
    real = nbytes // 2 if f.dtype.startswith("c") else nbytes
    width = f.k if f.kind in (QR, SVD) else 0
    square = f.n if "A" in f.letters else least
    last = {QR: f.k * f.n, UPPER: f.k * f.n, SVD: square * f.n}.get(f.kind, 0)
    work, reals, integers = room_of(f)
    # Matrices that are written over, numbers, reals, integers: one after the other.
    copied = 0 if f.kind == EIGH else f.m * f.n
    at_work = _aligned(copied * nbytes)
    at_reals = at_work + _aligned(work * nbytes)
    at_integers = at_reals + _aligned(reals * (nbytes if f.kind in (QR, UPPER) else real))
    scratch = at_integers + _aligned(integers * 8)
    words = dict.fromkeys(SIZES, 0) | {
        "m": f.m, "n": f.n, "k": f.k, "least": least,
        "width": last // f.n if f.kind == SVD else width,
        "matrix_bytes": f.m * f.n * nbytes, "side_bytes": f.n * f.k * nbytes,
        "first_bytes": f.m * width * nbytes, "last_bytes": last * nbytes,
        "value_bytes": least * real, "least_bytes": f.m * least * nbytes,
        "row_bytes": f.n * nbytes,
        "work": work, "reals": reals, "integers": integers,
        "work_at": at_work, "reals_at": at_reals, "integers_at": at_integers,
        # With many right sides LAPACK has several threads for the smallest matrices, too.
        "alone": has_one_thread(max(f.m, f.n, _LEAST_ALONE if f.k > 1 else 0)),
        **{f"letter{k}": ord(letter) for k, letter in enumerate(f.letters)},
    }  # fmt: skip
    return KernelStep(
        addresses[symbol_of(f.kind, f.dtype)],
        tuple(slots),
        f.count,
        _NS_PER_CALL + f.flops / _OPERATIONS_PER_NS,
        sizes=tuple(map(int, words.values())),
        scratch=scratch if f.kind in _WITH_ROOM else 0,
        name=name,
    )


_WITH_ROOM = frozenset((SOLVE, LU, QR, UPPER, EIGH, EIGENVALUES, SVD, SINGULAR_VALUES))


def room_of(f: Factorization) -> tuple[int, int, int]:
    """Memory for work, as LAPACK asks for it: numbers, reals beside complex ones, integers."""
    n, most, least = f.n, max(f.m, f.n), min(f.m, f.n)
    is_complex = f.dtype.startswith("c")
    match f.kind:
        case "solve":
            return 0, 0, n
        case "lu":
            return 0, 0, least
        case "qr" | "upper":
            return _BLOCK * most, least, 0
        case "eigh" | "eigenvalues" if is_complex:
            return 2 * n + n * n + _BLOCK * n, 1 + 5 * n + 2 * n * n, 3 + 5 * n
        case "eigh":
            return 1 + 6 * n + 2 * n * n + _BLOCK * n, 0, 3 + 5 * n
        case "eigenvalues":
            return 1 + 2 * n + _BLOCK * n, 0, 3 + 5 * n
        case "svd" | "singular_values":
            reals = least * max(5 * least + 7, 2 * most + 2 * least + 1) if is_complex else 0
            return f.work, reals, 8 * least
    return 0, 0, 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
