"""Mutable arrays: `new_ref(x)` makes one, `ref[i]` reads it, `ref[i] = v` and `ref[i] += v` write.

They work outside of transformations and inside of them; jitted functions take them as arguments,
and loops and branches may write to those that they close over. A program's jaxpr shows values only:
what a function writes is one more result of it (docs/design/0021).

>>> ref = new_ref(np.zeros(3))
>>> ref[1] = 5.0
>>> ref[0] += 2.0
>>> ref[...]
Array([2., 5., 0.], dtype=float32)
>>> spmd.jit(lambda ref, x: swap(ref, 2, x))(ref, 7.0), freeze(ref)
(Array(0., dtype=float32), Array([2., 5., 7.], dtype=float32))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from spmd import lax
from spmd import numpy as snp
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, RefError, ShapeError
from spmd.base.source import current_source
from spmd.base.tree import register_pytree_node_class
from spmd.core.aval import HasAval, ShapeDtypeStruct, typeof
from spmd.core.mutable import cells
from spmd.core.mutable.cells import AbstractRef
from spmd.numpy.promotion import as_array
from spmd.sharding.array import Array

__all__ = [
    "AbstractRef",
    "Ref",
    "addupdate",
    "empty_ref",
    "free_ref",
    "freeze",
    "get",
    "new_ref",
    "set",
    "swap",
]


class Ref(cells.Cell, HasAval):
    """A mutable array of fixed shape and dtype; `new_ref` makes one.

    It is read by `ref[index]` and written by `ref[index] = value`, both with the indices of NumPy;
    `ref[...]` is all of it. It is no array: functions take what is read.
    """

    __slots__ = ()
    __iter__ = None

    @property
    def at(self) -> _At:
        """`ref.at[index]`: a part of the mutable array, to be read and written like a whole one."""
        return _At(self)

    @property
    def sharding(self) -> Any:
        """The sharding of the value that it holds now."""
        return cells.read(self, "sharding").sharding

    def row(self, k: Any) -> RefPart:
        return RefPart(self, k)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a mutable array without dimensions")
        return self.shape[0]

    def __getitem__(self, index: Any) -> Array:
        return get(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        set(self, index, value)

    def get(self, index: Any = None) -> Array:
        """Return the elements at an index: `ref[index]`."""
        return get(self, index)

    def set(self, value: Any, index: Any = None) -> None:
        """Write the elements at an index: `ref[index] = value`."""
        set(self, index, value)

    def swap(self, value: Any, index: Any = None) -> Array:
        """Write the elements at an index, and return what was there."""
        return swap(self, index, value)

    def addupdate(self, x: Any, idx: Any = ()) -> None:
        """Add to the elements at an index."""
        addupdate(self, idx, x)

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RefError("a mutable array is no array; read it, ref[...]")

    def __bool__(self) -> NoReturn:
        raise TypeError("a mutable array has no truth value; read it, ref[...]")

    def __repr__(self) -> str:
        if self._frozen is not None:
            return f"Ref(frozen, {self.aval})"
        return f"Ref{repr(self._value).removeprefix('Array')}"


class _At:
    """`ref.at`, which takes an index."""

    __slots__ = ("_whole",)

    def __init__(self, whole: Any):
        self._whole = whole

    def __getitem__(self, index: Any) -> RefPart:
        return RefPart(self._whole, index)


class RefPart:
    """A part of a mutable array, `ref.at[index]`: reads and writes go to that array.

    As a pytree it is that array and the arrays in its index, so that rules of `custom_vjp` take it.
    """

    __slots__ = ("_index", "_whole")

    def __init__(self, whole: Any, index: Any):
        self._whole, self._index = whole, index

    def tree_flatten(self) -> tuple[list[Any], Any]:
        index = self._index if isinstance(self._index, tuple) else (self._index,)
        arrays = [k for k in index if hasattr(k, "shape")]
        fixed = tuple(None if hasattr(k, "shape") else (k,) for k in index)
        return [self._whole, *arrays], _Index(fixed, isinstance(self._index, tuple))

    @classmethod
    def tree_unflatten(cls, how: _Index, children: Sequence[Any]) -> RefPart:
        whole, *arrays = children
        rest = iter(arrays)
        index = tuple(next(rest) if k is None else k[0] for k in how.fixed)
        return cls(whole, index if how.is_tuple else index[0])

    def get(self, index: Any = None) -> Array:
        """Return the elements at an index."""
        return self[index]

    def set(self, value: Any, index: Any = None) -> None:
        """Write the elements at an index."""
        self[index] = value

    def swap(self, value: Any, index: Any = None) -> Array:
        """Write the elements at an index, and return what was there."""
        return swap(self, index, value)

    def addupdate(self, x: Any, idx: Any = ()) -> None:
        """Add to the elements at an index."""
        addupdate(self, idx, x)

    @property
    def at(self) -> _At:
        """A part of this part."""
        return _At(self)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._whole[self._index].shape

    @property
    def dtype(self) -> np.dtype:
        return self._whole.dtype

    def __getitem__(self, index: Any) -> Array:
        return _part(self._whole[self._index], index)

    def __setitem__(self, index: Any, value: Any) -> None:
        if _is_all(index):
            self._whole[self._index] = value
            return
        part = self._whole[self._index]
        value = _fitting(self, _part(part, index), value, "set")
        self._whole[self._index] = part.at[index].set(value)


register_pytree_node_class(RefPart)


class _Index:
    """The rest of an index, with None for its arrays; compared as text, as slices are."""

    __slots__ = ("fixed", "is_tuple")

    def __init__(self, fixed: tuple[Any, ...], is_tuple: bool):
        self.fixed, self.is_tuple = fixed, is_tuple

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"{self.fixed}{self.is_tuple}"


# ---- making and ending -------------------------------------------------------------------------


def new_ref(init_val: Any, *, memory_space: Any = None, kind: str | None = None) -> Ref:
    """Make a mutable array that holds the values of an array.

    `init_val` is an array or a number, whose shape and dtype stay those of the mutable array.
    `memory_space` and `kind` must be None. Raises `RefError` if `init_val` is a mutable array.

    >>> ref = new_ref(np.arange(3))
    >>> ref[1:] = ref[1:] * 10
    >>> ref[...]
    Array([ 0, 10, 20], dtype=int32)
    """
    if isinstance(init_val, cells.Cell):
        raise RefError(f"{current_source()}: new_ref: {init_val!r} is mutable; pass ref[...]")
    for name, given in (("memory_space", memory_space), ("kind", kind)):
        if given is not None:
            raise ArgumentError(
                f"{current_source()}: new_ref: {name}={given!r}: memory is of one kind here; "
                "leave it None"
            )
    value = as_array(init_val)
    return Ref(value, typeof(value))


def empty_ref(ty: Any, memory_space: Any = None) -> Ref:
    """Make a mutable array of a type, a `ShapeDtypeStruct` or an array; its elements are zeros.

    `ty` gives shape and dtype. `memory_space` must be None.

    >>> empty_ref(spmd.ShapeDtypeStruct((2,), np.int32))[...]
    Array([0, 0], dtype=int32)
    """
    aval = ty if isinstance(ty, ShapeDtypeStruct) else typeof(ty)
    return new_ref(snp.zeros(aval.shape, aval.dtype), memory_space=memory_space)


def freeze(ref: Ref) -> Array:
    """Return the last value of a mutable array, which must not be used any more.

    `ref` is a mutable array. The result has its shape and dtype. Raises `RefError` if it was frozen
    before; so does every later use of it.

    >>> ref = new_ref(1.0)
    >>> freeze(ref)
    Array(1., dtype=float32, weak_type=True)
    """
    return cells.freeze(_checked(ref, "freeze"))


def free_ref(ref: Ref) -> None:
    """End a mutable array, `ref`, whose value is not needed; later uses raise `RefError`.

    >>> ref = new_ref(1.0)
    >>> free_ref(ref)
    """
    freeze(ref)


# ---- reading and writing -----------------------------------------------------------------------


def get(ref: Ref | RefPart, idx: Any = None) -> Array:
    """Return the elements of a mutable array at an index: `ref[idx]`.

    `idx` is an index as of NumPy, and all of the array if it is None or `...`. Raises `RefError`
    for one that was frozen, and `ArgumentError` if a constant index is out of bounds.

    >>> get(new_ref(np.arange(3.0)), 1)
    Array(1., dtype=float32)
    """
    if isinstance(ref, RefPart):
        return ref[idx]
    return _part(cells.read(_checked(ref, "get"), "get"), idx)


def set(ref: Ref | RefPart, idx: Any, value: Any) -> None:  # JAX's name
    """Write the elements of a mutable array at an index: `ref[idx] = value`.

    `value` has the shape of what is there (there is no broadcasting) and the array's dtype; other
    integers are converted to an integer dtype, and weakly typed floats to a floating one.
    Raises `ShapeError`, `ArgumentError` for another dtype, and `RefError` if the array was frozen,
    or if it is outside of a transformation that `value` belongs to.

    >>> ref = new_ref(np.arange(3.0))
    >>> set(ref, slice(1, 3), np.zeros(2, np.float32))
    >>> ref[...]
    Array([0., 0., 0.], dtype=float32)
    """
    swap(ref, idx, value, "set")


def swap(ref: Ref | RefPart, idx: Any, value: Any, _function_name: str = "swap") -> Array:
    """Write the elements of a mutable array at an index, and return what was there.

    The arguments and errors are those of `set`; the result has the shape and dtype of `value`.

    >>> ref = new_ref(np.arange(3.0))
    >>> swap(ref, 2, 9.0), ref[...]
    (Array(2., dtype=float32), Array([0., 1., 9.], dtype=float32))
    """
    if isinstance(ref, RefPart):
        old, ref[idx] = ref[idx], value
        return old
    before = cells.read(_checked(ref, _function_name), _function_name)
    old = _part(before, idx)
    value = _fitting(ref, old, value, _function_name)
    after = value if _is_all(idx) else before.at[idx].set(value)
    _write(ref, after, _function_name)
    return old


def addupdate(ref: Ref | RefPart, idx: Any, x: Any) -> None:
    """Add to the elements of a mutable array at an index: `ref[idx] += x`.

    The arguments and errors are those of `set`.

    >>> ref = new_ref(np.arange(3.0))
    >>> addupdate(ref, 0, 5.0)
    >>> ref[...]
    Array([5., 1., 2.], dtype=float32)
    """
    if isinstance(ref, RefPart):
        ref[idx] = lax.add(ref[idx], _fitting(ref, ref[idx], x, "addupdate"))
        return
    before = cells.read(_checked(ref, "addupdate"), "addupdate")
    x = _fitting(ref, _part(before, idx), x, "addupdate")
    after = lax.add(before, x) if _is_all(idx) else before.at[idx].add(x)
    _write(ref, after, "addupdate")


def _checked(ref: Any, what: str) -> Ref:
    if not isinstance(ref, cells.Cell):
        raise ArgumentError(
            f"{current_source()}: {what}: needs a mutable array, got {ref!r} of type "
            f"{type(ref).__name__}; new_ref makes one"
        )
    return ref  # type: ignore[return-value]


def _is_all(idx: Any) -> bool:
    return idx is None or idx is Ellipsis or (isinstance(idx, tuple) and idx in ((), (Ellipsis,)))


def _part(value: Any, idx: Any) -> Any:
    if _is_all(idx):
        return value
    _check_bounds(value, idx)
    return value[idx]


def _check_bounds(value: Any, idx: Any) -> None:
    """Raise if a constant index is out of bounds, which indexing an array would clamp."""
    dim = 0
    for k in idx if isinstance(idx, tuple) else (idx,):
        if k is Ellipsis or k is None or isinstance(k, bool):
            return
        if isinstance(k, (int, np.integer)) and dim < value.ndim:
            size = value.shape[dim]
            if not -size <= k < size:
                raise ArgumentError(
                    f"{current_source()}: index {k} is out of bounds for dim {dim} of a mutable "
                    f"array of shape {value.shape}"
                )
        dim += 1


def _fitting(ref: Ref | RefPart, old: Any, value: Any, what: str) -> Any:
    """A value to be written, checked."""
    aval, wanted = typeof(value), typeof(old)
    if aval.shape != wanted.shape:
        raise ShapeError(
            f"{current_source()}: {what}: the value has shape {aval.shape}, and what it is written "
            f"to has shape {wanted.shape}; nothing is broadcast, use spmd.numpy.broadcast_to"
        )
    are_integers = dtypes.is_integer(aval.dtype) and dtypes.is_integer(ref.dtype)
    are_floats = dtypes.is_float(aval.dtype) and dtypes.is_float(ref.dtype)
    if aval.dtype != ref.dtype and not (are_integers or (aval.weak_type and are_floats)):
        raise ArgumentError(
            f"{current_source()}: {what}: the value has dtype {dtypes.long_name(aval.dtype)}, and "
            f"the mutable array {dtypes.long_name(ref.dtype)}; convert it with .astype"
        )
    return lax.convert_element_type(value, ref.dtype)


def _write(ref: Ref, value: Any, what: str) -> None:
    """Put a whole value into a mutable array, of exactly its type."""
    cells.write(ref, lax.convert_element_type(value, ref.dtype, ref.aval.weak_type), what)
