"""Fourier transforms over several dims that are split: one dim after the other.

Each transform needs its own dim whole, and the axes that split it go to the others meanwhile. One
over all dims at once would need all of them whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.core.aval import ShapedArray
from spmd.core.ir import ClosedJaxpr, Eqn
from spmd.core.rewrite import close
from spmd.core.structural import permute_dims
from spmd.lax.fft import FftType, fft


def split_transforms(eqn: Eqn, split: Sequence[Sequence[Any]]) -> ClosedJaxpr | None:
    """The transforms of an equation one by one; None if at most one of its dims is split."""
    lengths = eqn.params["fft_lengths"]
    if sum(map(bool, split[len(split) - len(lengths) :])) == 0 or len(lengths) == 1:
        return None
    return one_by_one(eqn.invars[0].aval, eqn.params["fft_type"], lengths)


def one_by_one(aval: ShapedArray, kind: FftType, lengths: Sequence[int]) -> ClosedJaxpr:
    """A transform over the last dims as transforms of one dim each.

    Real numbers are those of the last dim, which comes first, or last where they are the result.
    """
    inner = {FftType.RFFT: FftType.FFT, FftType.IRFFT: FftType.IFFT}.get(kind, kind)

    def transforms(x: Any) -> list[Any]:
        ndim, first = aval.ndim, aval.ndim - len(lengths)
        if kind is not FftType.IRFFT:
            x = fft(x, kind, lengths[-1:])
        for d in range(ndim - 2, first - 1, -1):
            swapped = list(range(ndim))
            swapped[d], swapped[-1] = ndim - 1, d
            x = permute_dims(fft(permute_dims(x, swapped), inner, [lengths[d - first]]), swapped)
        if kind is FftType.IRFFT:
            x = fft(x, kind, lengths[-1:])
        return [x]

    return close(transforms, [aval.update(vma=frozenset(), sharding=None)], "fft", ("x",))
