"""The table of op records, continued: Fourier transforms."""

from __future__ import annotations

from typing import Any

from tests.lax.records import COMPLEX, WIDE_FLOAT, Operand, Record, record, some


def _fft(kind: str, operand: Operand, lengths: tuple[int, ...], accepted: Any) -> Record:
    return record(
        "fft",
        lambda lax, x: lax.fft(x, getattr(lax.FftType, kind), lengths),
        operand,
        dtypes=accepted,
        case=f"{kind} {'x'.join(map(str, lengths))}",
        tolerance=256,
    )


RECORDS = [
    _fft("FFT", some(2, 5), (5,), COMPLEX),
    _fft("FFT", some(2, 3, 4), (3, 4), COMPLEX),
    _fft("IFFT", some(2, 6), (6,), COMPLEX),
    _fft("IFFT", some(2, 3, 2), (2, 3, 2), COMPLEX),
    _fft("RFFT", some(2, 5), (5,), WIDE_FLOAT),
    _fft("RFFT", some(3, 4), (3, 4), WIDE_FLOAT),
    _fft("IRFFT", some(2, 3), (4,), COMPLEX),
    _fft("IRFFT", some(2, 3), (5,), COMPLEX),
    _fft("IRFFT", some(2, 3, 3), (3, 5), COMPLEX),
]
