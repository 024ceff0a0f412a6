"""The base of all sparse arrays, and the function of unbatched ones over batch dims."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import spmd.numpy as snp
from spmd.api.vectorize import vmap
from spmd.base.errors import RefusedError
from spmd.base.source import current_source
from spmd.core.trace import Tracer


class SparseEfficiencyError(ValueError):
    """The array that was asked for would store many more elements than there are."""


class SparseEfficiencyWarning(UserWarning):
    """The array that was asked for stores many more elements than there are."""


class JAXSparse(abc.ABC):
    """The base of sparse arrays, which have a shape and buffers."""

    data: Any
    shape: Any
    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    @property
    @abc.abstractmethod
    def nse(self) -> int:
        """How many elements are stored (for each batch)."""

    @abc.abstractmethod
    def tree_flatten(self) -> tuple[Any, Any]:
        """The buffers, and what says how they lie."""

    @classmethod
    @abc.abstractmethod
    def tree_unflatten(cls, aux_data: Any, children: Any) -> Any:
        """The array of buffers."""

    @abc.abstractmethod
    def todense(self) -> Any:
        """The dense array."""

    @abc.abstractmethod
    def transpose(self, axes: Any = None) -> Any:
        """The array with its dims in another order."""

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the elements."""
        return self.data.dtype

    @property
    def size(self) -> int:
        """The number of elements of the dense array."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def T(self) -> Any:
        """The transposed array."""
        return self.transpose()

    def sum(self, *args: Any, **kwargs: Any) -> Any:
        """The sum of elements, as of `numpy.sum`; `BCOO` and `BCSR` have it."""
        raise RefusedError(
            f"{type(self).__name__}.sum is not there; call todense() first, or make a BCOO"
        )

    def block_until_ready(self) -> Any:
        """Wait for the stored elements."""
        self.data.block_until_ready()
        return self

    def _details(self) -> str:
        return f"nse={self.nse}"

    def __repr__(self) -> str:
        name = type(self).__name__
        try:
            text = f"{name}({self.dtype}{list(self.shape)}, {self._details()})"
        except (AttributeError, IndexError, TypeError):  # its parts are no arrays
            return f"{name}(<invalid>)"
        return f"{type(self.data).__name__}[{text}]" if isinstance(self.data, Tracer) else text

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        raise RefusedError(
            f"{type(self).__name__} takes no indices; call todense() first, or make a BCOO"
        )

    def __iter__(self) -> Iterator[Any]:
        # Without it Python would ask for items without end: those past the last are clamped.
        return (self[k] for k in range(len(self)))

    def __pos__(self) -> Any:
        return self


def refuse_sharding(name: str, sharding: Any) -> None:
    """Raise a `RefusedError` for a sharding that is not None: sparse arrays lie on one device."""
    if sharding is not None:
        raise RefusedError(
            f"{current_source()}: {name}: got sharding {sharding}, but sparse arrays lie on one "
            "device; leave the argument out, or place x.todense()"
        )


def over_batches(f: Callable[..., Any], n_batch: int) -> Callable[..., Any]:
    """`f` of unbatched values as a function of values with that many leading batch dims."""
    for _ in range(n_batch):
        f = vmap(f)
    return f


def with_batches(x: Any, batch: tuple[int, ...], n_batch: int) -> Any:
    """A buffer with batch dims of their full sizes; they may have been 1."""
    shape = (*batch, *x.shape[n_batch:])
    return x if x.shape == shape else snp.broadcast_to(x, shape)
