"""The dtypes of typed PRNG keys: one for each generator, of as many uint32 words as its keys have.

A key is an element of a NumPy structured dtype, moved like any other. The names of the fields tell
the generators apart. Users see a `KeyDType` in its place, which has the name `key<fry>`; the two
are equal, have one hash, and may be given in each other's place.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np


class prng_key(np.generic):
    """The abstract class of typed PRNG keys: `issubdtype(key.dtype, dtypes.prng_key)`."""


class KeyDType:
    """The dtype of typed keys as users see it: `random.key(0).dtype`.

    `name` is `key<fry>`, `dtype` the structured dtype of the elements, `key_shape` the shape of
    the words of one key.
    """

    __slots__ = ("dtype", "ident", "key_shape", "name")

    type = prng_key
    kind = "V"

    def __init__(self, tag: str, ident: str, key_shape: tuple[int, ...], dtype: np.dtype):
        self.name = f"key<{tag}>"
        self.ident = ident
        self.key_shape = key_shape
        self.dtype = dtype

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def names(self) -> tuple[str, ...] | None:
        return self.dtype.names

    def __getattr__(self, name: str) -> Any:
        # Other attributes of NumPy's dtypes: `hasobject`, `byteorder`, ...
        if name.startswith("_") or name in KeyDType.__slots__:
            raise AttributeError(name)
        return getattr(self.dtype, name)

    def __repr__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        if isinstance(other, KeyDType):
            return self is other
        return isinstance(other, np.dtype) and self.dtype == other

    def __hash__(self) -> int:
        return hash(self.dtype)

    def __reduce__(self) -> Any:
        return _unpickled, (self.ident,)


def _unpickled(ident: str) -> KeyDType:
    return _BY_IDENT[ident]


# By the names of the fields of the structured dtype, and by the generator's identity.
_BY_FIELDS: dict[Any, KeyDType] = {}
_BY_IDENT: dict[str, KeyDType] = {}


def register_key_dtype(tag: str, key_shape: tuple[int, ...]) -> KeyDType:
    """Make the dtype of a generator's keys. Two of one tag are two dtypes of one name."""
    same = sum(1 for known in _BY_IDENT.values() if known.name == f"key<{tag}>")
    ident = f"{tag}#{same}" if same else tag
    fields = [(f"{ident}.{i}", "<u4") for i in range(math.prod(key_shape))]
    found = KeyDType(tag, ident, tuple(key_shape), np.dtype(fields))
    _BY_FIELDS[found.names] = _BY_IDENT[ident] = found
    return found


def is_key(dtype: Any) -> bool:
    """Whether a dtype is one of typed keys."""
    return getattr(dtype, "names", None) in _BY_FIELDS


def key_name(dtype: Any) -> str:
    """`key<fry>`."""
    return _BY_FIELDS[dtype.names].name


def visible(dtype: np.dtype) -> Any:
    """A dtype as users see it: a `KeyDType` in place of the structured dtype of keys."""
    return dtype if dtype.names is None else _BY_FIELDS.get(dtype.names, dtype)


def key_dtype_of(ident: str) -> KeyDType:
    """The key dtype of this identity. Raises a `KeyError` if there is none."""
    return _BY_IDENT[ident]


def key_dtype_named(name: str) -> np.dtype | None:
    """The first dtype of this name, `key<fry>`, as it stands in files; None if there is none."""
    found = _BY_IDENT.get(name[4:-1]) if name.startswith("key<") and name.endswith(">") else None
    return None if found is None else found.dtype


# The keys of the default generator, threefry2x32: two words.
key_dtype = register_key_dtype("fry", (2,)).dtype
