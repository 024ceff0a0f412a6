"""Uses of keys, as a function's type says them: `Sink`, `Source`, `Forward`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import total_ordering
from typing import Any, NamedTuple

import numpy as np

Mask = bool | np.ndarray


@total_ordering
class _End:
    """An argument or result, and which of its keys are meant: all of them, or those of a mask."""

    idx: int
    mask: Mask

    __slots__ = ("idx", "mask")

    def __init__(self, idx: int, mask: Any = True):
        assert isinstance(idx, int) and not isinstance(idx, bool)
        object.__setattr__(self, "idx", idx)
        object.__setattr__(self, "mask", simple(mask))

    def __setattr__(self, name: str, value: Any) -> None:
        raise ValueError(f"{type(self).__name__} is immutable")

    def _key(self) -> tuple[Any, ...]:
        mask = np.asarray(self.mask)
        return type(self).__name__, self.idx, mask.shape, tuple(map(bool, mask.flat))

    def __eq__(self, other: Any) -> bool:
        return type(self) is type(other) and self._key() == other._key()

    def __lt__(self, other: Any) -> bool:
        if isinstance(other, Forward):
            return True
        return self._key() < other._key() if isinstance(other, _End) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        rest = "" if self.mask is True else f", {self.mask}"
        return f"{type(self).__name__}({self.idx}{rest})"


def simple(mask: Any) -> Mask:
    """A mask as a bool if it is the same for all keys, or else as an array that stays as it is."""
    if isinstance(mask, (bool, np.bool_)):
        return bool(mask)
    assert isinstance(mask, np.ndarray) and mask.dtype == np.dtype(bool), mask
    if not mask.any():  # of no keys at all, too
        return False
    if mask.all():
        return True
    if mask.flags.writeable:
        mask = mask.copy()
        mask.setflags(write=False)
    return mask


class Sink(_End):
    """An argument whose keys are used: nothing may use them afterwards.

    `idx` is its number, and `mask` a bool or an array of them: which of the keys.

    >>> Sink(0)
    Sink(0)
    """

    __slots__ = ()


class Source(_End):
    """A result whose keys are new: they may be used once.

    `idx` is its number, and `mask` a bool or an array of them: which of the keys.

    >>> Source(1)
    Source(1)
    """

    __slots__ = ()


class Forward(NamedTuple):
    """A result whose keys are those of an argument.

    >>> Forward(0, 1)
    Forward(0, 1)
    """

    in_idx: int
    out_idx: int

    def __repr__(self) -> str:
        return f"Forward({self.in_idx}, {self.out_idx})"


class KeyReuseSignature:
    """All that a function does to keys: a set of `Sink`, `Source` and `Forward`.

    >>> KeyReuseSignature(Source(0), Sink(0))
    KeyReuseSignature(Sink(0), Source(0))
    """

    __slots__ = ("_args",)

    def __init__(self, *args: Sink | Source | Forward):
        self._args = frozenset(args)

    def __repr__(self) -> str:
        inside = *sorted([*self.sinks, *self.sources]), *sorted(self.forwards)
        return f"KeyReuseSignature{inside}"

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, KeyReuseSignature) and self._args == other._args

    def __hash__(self) -> int:
        return hash(self._args)

    @property
    def sinks(self) -> Iterator[Sink]:
        """The arguments that are used."""
        return (s for s in self._args if isinstance(s, Sink))

    @property
    def sources(self) -> Iterator[Source]:
        """The results that are new."""
        return (s for s in self._args if isinstance(s, Source))

    @property
    def forwards(self) -> Iterator[Forward]:
        """The results that are arguments."""
        return (s for s in self._args if isinstance(s, Forward))


def fit(mask: Mask, shape: tuple[int, ...]) -> Mask:
    """A mask for keys of another shape, of which it speaks too; all of them, where it can't."""
    if isinstance(mask, bool) or mask.shape == shape:
        return mask
    if mask.size == int(np.prod(shape)):
        return mask.reshape(shape)
    if mask.shape == shape[len(shape) - mask.ndim :]:
        return np.broadcast_to(mask, shape)
    return True
