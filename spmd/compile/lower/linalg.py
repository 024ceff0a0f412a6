"""Factorizations as native steps: LAPACK of the library behind NumPy, called without Python.

The one idea: an `impl` spends more time in Python than LAPACK takes for a matrix of 32 rows. The
routines are the same, so that signs and orders of results are. Operands whose columns LAPACK needs
are transposed by kernels before and after.
"""

from __future__ import annotations

import math

from spmd.base import dtypes
from spmd.compile.expressions.scalar_ops import storage_dtype
from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.factorization import (
    CHOLESKY,
    EIGENVALUES,
    EIGH,
    LU,
    QR,
    READS,
    SINGULAR_VALUES,
    SOLVE,
    SVD,
    TRIANGULAR,
    UPPER,
    WRITES,
    Factorization,
)
from spmd.compile.lower.kernels import launch
from spmd.compile.lower.lowering import Lowering, host
from spmd.compile.lower.steps import Factor, Launch, Ref
from spmd.core.aval import ShapedArray
from spmd.core.ir import Eqn
from spmd.lax.linalg.lapack import exported, room_for_svd

# The routines of each kind; Hermitian matrices have another name than symmetric ones.
_ROUTINES = {
    CHOLESKY: "potrf",
    TRIANGULAR: "trsm",
    SOLVE: "getrf getrs",
    LU: "getrf",
    QR: "geqrf orgqr",
    UPPER: "geqrf",
    EIGH: "syevd",
    EIGENVALUES: "syevd",
    SVD: "gesdd",
    SINGULAR_VALUES: "gesdd",
}
_OF_COMPLEX = {"orgqr": "ungqr", "syevd": "heevd"}


def routines(kind: str, dtype: str) -> tuple[str, ...] | None:
    """The symbols of the routines of a kind, for a dtype's character; None if one is not there."""
    names = _ROUTINES[kind].split()
    if dtype in "FD":
        names = [_OF_COMPLEX.get(name, name) for name in names]
    found = [exported(name, dtype) for name in names]
    return tuple(s for s in found if s) if all(found) else None


def factor(lowering: Lowering, eqn: Eqn) -> None:
    """The native step of an equation, or the host's if there is none."""
    found = _factorization(lowering, eqn)
    if found is None or routines(found.kind, eqn.invars[0].aval.dtype.char) is None:
        host(lowering, eqn)
    else:
        _Steps(lowering, eqn, found).write()


def _factorization(lowering: Lowering, eqn: Eqn) -> Factorization | None:
    """LAPACK's part of an equation, or None where it has none."""
    avals = [atom.aval for atom in eqn.invars]
    *leading, m, n = avals[0].shape
    if not avals[0].size:
        return None  # LAPACK refuses matrices without rows
    params, character = eqn.params, avals[0].dtype.char
    dtype = storage_dtype(avals[0].dtype)
    assert dtype is not None, "LAPACK's dtypes have kernels"
    is_read = [var not in lowering.unread for var in eqn.outvars]

    def made(kind: str, k: int = 0, letters: str = "", work: int = 0) -> Factorization:
        return Factorization(kind, dtype, math.prod(leading), m, n, k, letters, work)

    match eqn.prim.name:
        case "cholesky":
            return made(CHOLESKY, letters="U")
        case "triangular_solve":
            # A row-major matrix is its transpose to LAPACK: b = op(a) x is b^T = x^T op(a)^T.
            if params["conjugate_a"] and not params["transpose_a"]:
                return None
            side = "R" if params["left_side"] else "L"
            how = "C" if params["conjugate_a"] else "T" if params["transpose_a"] else "N"
            triangle = "U" if params["lower"] else "L"
            letters = side + triangle + how + ("U" if params["unit_diagonal"] else "N")
            return made(TRIANGULAR, avals[1].shape[-1 if params["left_side"] else -2], letters)
        case "solve":
            return made(SOLVE, avals[1].shape[-1], "T")
        case "lu":
            # A column with NaNs has a pivot by another rule than LAPACK's.
            return None if dtypes.is_complex(avals[0].dtype) else made(LU)
        case "qr" if not params["pivoting"]:
            return made(QR if is_read[0] else UPPER, eqn.outvars[0].aval.shape[-1])
        case "eigh":
            kind = EIGH if is_read[0] else EIGENVALUES
            triangle = "L" if params["lower"] else "U"
            return made(kind, letters=("V" if kind == EIGH else "N") + triangle)
        case "svd" if not params["compute_uv"] or is_read[::2] == [False, False]:
            # Of the transposes, which have the same values.
            work = room_for_svd(character, b"N", n, m)
            return made(SINGULAR_VALUES, letters="N", work=work)
        case "svd":
            job = "A" if params["full_matrices"] else "S"
            work = room_for_svd(character, job.encode(), m, n)
            width = eqn.outvars[0].aval.shape[-1]
            return made(SVD, width, job, work)
    return None


class _Steps:
    """One equation on its way to steps."""

    def __init__(self, lowering: Lowering, eqn: Eqn, factorization: Factorization):
        self.lowering, self.eqn, self.factorization = lowering, eqn, factorization

    def write(self) -> None:
        """All steps."""
        lowering, eqn, found = self.lowering, self.eqn, self.factorization
        name, source = eqn.prim.name, eqn.source
        refs: list[Ref] = []
        turned: list[tuple[Ref, Ref, ShapedArray]] = []
        for atom, how in zip(eqn.invars, READS[found.kind], strict=True):
            ref = lowering.ref(atom)
            if how == "columns" and _has_columns(atom.aval):
                rows, ref = ref, lowering.temp(atom.aval)
                self.transpose(rows, ref, atom.aval, to_columns=True)
            refs.append(ref)
        places = [lowering.place(var) for var in eqn.outvars]
        outs = list(zip(eqn.outvars, places, strict=True))
        # Vectors, or the first factor, or both factors are not read.
        if len(outs) > len(WRITES[found.kind]):
            outs = outs[1:2]
        for (var, place), how in zip(outs, WRITES[found.kind], strict=True):
            if how == "columns" and _has_columns(var.aval):
                columns = lowering.temp(var.aval)
                turned.append((columns, place, var.aval))
                place = columns
            refs.append(place)
        reads = len(READS[found.kind])
        lowering.steps.append(Factor(found, reads, tuple(refs), name, source))
        for columns, place, aval in turned:
            self.transpose(columns, place, aval, to_columns=False)

    def transpose(self, given: Ref, result: Ref, aval: ShapedArray, to_columns: bool) -> None:
        """Between matrices row by row and column by column."""
        *leading, m, n = aval.shape
        count = math.prod(leading)
        dtype = storage_dtype(aval.dtype)
        assert dtype is not None, "LAPACK's dtypes have kernels"
        # The result's order: its last dim is the lanes.
        rows, lanes = (n, m) if to_columns else (m, n)
        outer, apart = ((rows,), (1, rows)) if count == 1 else ((count, rows), (m * n, 1, rows))
        b = Builder(outer, (lanes,), len(outer))
        source, target = b.arg(dtype, aval.size), b.arg(dtype, aval.size, "out")
        with b.row():
            value = b.load(source, apart)
            b.store(target, (lanes, 1) if count == 1 else (m * n, lanes, 1), value)
        step = Launch(b.build(), (given, result), self.eqn.prim.name, self.eqn.source)
        launch(self.lowering, step)


def _has_columns(aval: ShapedArray) -> bool:
    """Whether rows and columns lie differently."""
    return min(aval.shape[-2:]) > 1
