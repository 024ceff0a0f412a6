"""Abstract values: the known facts of a traced value before it has any data.

`ShapedArray`s are interned: equal ones are the same object, so the compiler and the dispatcher
compare them by identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from spmd.base import dtypes
from spmd.base.config import config
from spmd.base.errors import ArgumentError
from spmd.base.key_dtypes import visible
from spmd.base.record import record

NO_AXES: frozenset[str] = frozenset()


@record
class ManualAxisType:
    """The axes of the `shard_map`s around a value, as its type says them in sets of names.

    Over a `varying` axis devices have different values, over an `unreduced` one terms of a sum, and
    over a `reduced` one equal values whose cotangents are unreduced.

    >>> from spmd.sharding import ManualAxisType
    >>> ManualAxisType(varying=frozenset({"x"})).varying
    frozenset({'x'})
    """

    varying: frozenset[Any] = NO_AXES
    unreduced: frozenset[Any] = NO_AXES
    reduced: frozenset[Any] = NO_AXES

    def update(self, **kwargs: frozenset[Any]) -> ManualAxisType:
        """Make a type with other sets of axes, and the rest of this one's."""
        sets = {name: getattr(self, name) for name in ("varying", "unreduced", "reduced")}
        return ManualAxisType(**(sets | kwargs))

    def to_ct_mat(self) -> ManualAxisType:
        """The type of a cotangent: `reduced` axes are unreduced in it, and the reverse."""
        return self.update(unreduced=self.reduced, reduced=self.unreduced)

    @property
    def vur(self) -> frozenset[Any]:
        """The axes of all sets."""
        return self.varying | self.unreduced | self.reduced

    @property
    def empty(self) -> bool:
        """Whether all sets are empty."""
        return not self.vur

    def invarying(self, mesh: Any) -> frozenset[Any]:
        """The manual axes of a mesh over which the value is the same on all devices."""
        return frozenset(mesh.manual_axes) - self.vur


class ShapedArray:
    """Shape, dtype, weak type, varying axes (`vma`), and the explicit part of a sharding.

    `vma` is empty outside `shard_map`. Inside, it names the manual axes along which the devices may
    hold different values; a value with empty `vma` is equal on all devices. `explicit` is None but
    for values over the `Explicit` axes of a mesh (`core/explicit.py`); an aval `is_plain` if it has
    neither. `sharding` is for users: where `explicit` is None it is made when it is asked for.
    """

    # Equal avals are one object, so identity is equality and the hash that of any object.
    __slots__ = (
        "_tangent",
        "dtype",
        "explicit",
        "is_plain",
        "ndim",
        "shape",
        "size",
        "vma",
        "weak_type",
    )
    _interned: ClassVar[dict[Any, ShapedArray]] = {}

    shape: tuple[int, ...]
    dtype: np.dtype
    weak_type: bool
    vma: frozenset[str]
    explicit: Any
    _tangent: ShapedArray | None

    def __new__(
        cls,
        shape,
        dtype,
        weak_type: bool = False,
        vma: frozenset[str] = NO_AXES,
        sharding: Any = None,
    ):
        key = (shape, dtype, weak_type, vma, sharding)
        try:
            return cls._interned[key]
        except (KeyError, TypeError):
            pass
        shape = tuple(int(d) for d in shape)
        dtype = np.dtype(dtype)
        vma = frozenset(vma)
        if sharding is not None:
            sharding = sharding.of_type(len(shape))
        exact = (shape, dtype, weak_type, vma, sharding)
        found = cls._interned.get(exact)
        if found is None:
            found = object.__new__(cls)
            found.shape = shape
            found.dtype = dtype
            found.weak_type = bool(weak_type)
            found.vma = vma
            found.explicit = sharding
            found.is_plain = not vma and sharding is None
            found.ndim = len(shape)
            found.size = math.prod(shape)
            found._tangent = None
            cls._interned[exact] = found
        return found

    def __reduce__(self):
        return ShapedArray, (self.shape, self.dtype, self.weak_type, self.vma, self.explicit)

    def update(self, **changes: Any) -> ShapedArray:
        """The same aval with some fields changed; one with another shape has no sharding."""
        kept = {
            "shape": self.shape,
            "dtype": self.dtype,
            "weak_type": self.weak_type,
            "vma": self.vma,
            "sharding": None if "shape" in changes else self.explicit,
        }
        return ShapedArray(**(kept | changes))

    def with_vma(self, vma: frozenset[Any]) -> ShapedArray:
        """The same aval varying over other axes."""
        if vma == self.vma:
            return self
        return ShapedArray(self.shape, self.dtype, self.weak_type, vma, self.explicit)

    def strip_weak(self) -> ShapedArray:
        return self.update(weak_type=False) if self.weak_type else self

    def strip_sharding(self) -> ShapedArray:
        return self.update(sharding=None) if self.explicit is not None else self

    def tangent(self) -> ShapedArray:
        """The aval of this value's tangents."""
        found = self._tangent
        if found is None:
            dtype = dtypes.tangent_dtype(self.dtype)
            found = ShapedArray(self.shape, dtype, self.weak_type, self.vma, self.explicit)
            self._tangent = found
        return found

    to_tangent_aval = tangent  # JAX's name
    normalize = strip_weak  # JAX's name

    def lo_ty(self) -> list[ShapedArray]:
        """The types of what values of this one are made of (JAX's `hijax`): itself alone."""
        return [self]

    def lower_val(self, value: Any) -> list[Any]:
        """The values that make up a value of this type: itself alone."""
        return [value]

    def raise_val(self, *values: Any) -> Any:
        """The value of this type that is made of `values`, of which there is one."""
        (value,) = values
        return value

    @property
    def sharding(self) -> Any:
        """The `NamedSharding` of the type: that along explicit axes, else over the mesh in scope.

        It is over an abstract mesh, which is empty where none is set. Its spec splits no dim of a
        value without explicit axes.
        """
        return _unsaid_sharding(self) if self.explicit is None else self.explicit

    def over(self, mesh: Any) -> ShapedArray:
        """The same type as users see it of a value over a mesh, whatever mesh is in scope."""
        return _over(self, mesh)

    def manual_sets(self) -> tuple[frozenset[Any], frozenset[Any]]:
        """The manual axes over which a value is unreduced, and those over which it is reduced."""
        return (NO_AXES, NO_AXES) if self.explicit is None else self.explicit.manual_sets()

    @property
    def manual_axis_type(self) -> ManualAxisType:
        """The type's axes of the maps around: JAX's view of `vma` and the sets."""
        unreduced, reduced = self.manual_sets()
        return ManualAxisType(self.vma - unreduced, unreduced, reduced)

    mat = manual_axis_type

    def cotangent(self) -> ShapedArray:
        """The aval of this value's cotangents, of which the dtype is not changed."""
        if self.explicit is None:
            return self
        unreduced, reduced = self.manual_sets()
        vma = (self.vma - unreduced) | reduced
        return self.update(vma=vma, sharding=self.explicit.cotangent())

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def short(self) -> str:
        """`f32[3,4]`, as jaxprs print it.

        `f32[3]{V:i}` varies over axis i and `f32[3@i]` is split over it; `{U:i}` is unreduced and
        `{R:i}` reduced.
        """
        return f"{dtypes.short_name(self.dtype)}{self._dims()}"

    def str_short(self, short_dtypes: bool = False) -> str:
        """`float32[3,4]`, or `f32[3,4]` with `short_dtypes`, without the weak type."""
        return self.short() if short_dtypes else f"{dtypes.long_name(self.dtype)}{self._dims()}"

    def __str__(self) -> str:
        return f"{'~' if self.weak_type else ''}{self.str_short()}"

    def _dims(self) -> str:
        entries = self.explicit.spec if self.explicit is not None else (None,) * self.ndim
        dims = ",".join(map(_dim_text, self.shape, entries))
        sets: list[tuple[str, Any]] = [("V", self.vma)]
        if self.explicit is not None:
            spec = self.explicit.spec
            varying = self.vma - self.manual_sets()[0]
            sets = [("V", varying), ("U", spec.unreduced), ("R", spec.reduced)]
        texts = [f"{letter}:{_axes_text(axes)}" for letter, axes in sets if axes]
        return f"[{dims}]{{{', '.join(texts)}}}" if texts else f"[{dims}]"

    def __repr__(self) -> str:
        weak = ", weak_type=True" if self.weak_type else ""
        return f"ShapedArray({dtypes.long_name(self.dtype)}{self._dims()}{weak})"


class SeenArray(ShapedArray):
    """A type as users see it: that of a value over a mesh of which `explicit` says nothing."""

    __slots__ = ("mesh",)

    mesh: Any

    @property
    def sharding(self) -> Any:
        return _replicated(self.mesh, self.ndim)

    def __reduce__(self):
        return _over, (ShapedArray(*super().__reduce__()[1]), self.mesh)


def _over(aval: ShapedArray, mesh: Any) -> ShapedArray:
    """A type over a mesh, as `ShapedArray.over` gives it; there is one for each of both."""
    found = _seen.get((aval, mesh))
    if found is None:
        found = object.__new__(SeenArray)
        for name in ShapedArray.__slots__:
            setattr(found, name, getattr(aval, name))
        found.mesh = mesh
        _seen[aval, mesh] = found
    return found


_seen: dict[Any, SeenArray] = {}


def set_views(unsaid: Callable[[ShapedArray], Any], replicated: Callable[[Any, int], Any]) -> None:
    """Set what makes the sharding of a type that says nothing, in scope, or over a given mesh."""
    global _unsaid_sharding, _replicated
    _unsaid_sharding, _replicated = unsaid, replicated


_unsaid_sharding: Callable[[ShapedArray], Any]
_replicated: Callable[[Any, int], Any]


class HasAval:
    """A base class of values: what their avals say of them."""

    __slots__ = ()

    aval: ShapedArray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape

    @property
    def dtype(self) -> np.dtype:
        dtype = self.aval.dtype
        return dtype if dtype.names is None else visible(dtype)

    @property
    def ndim(self) -> int:
        return self.aval.ndim

    @property
    def size(self) -> int:
        return self.aval.size

    @property
    def weak_type(self) -> bool:
        return self.aval.weak_type


def _dim_text(size: int, entry: Any) -> str:
    """A dim's size, and the axes that split it."""
    if entry is None:
        return str(size)
    axes = f"({','.join(map(str, entry))})" if isinstance(entry, tuple) else str(entry)
    return f"{size}@{axes}"


def _axes_text(axes: Any) -> str:
    names = sorted(map(str, axes))
    return names[0] if len(names) == 1 else f"({','.join(names)})"


# ---- from values to avals ----------------------------------------------------------------------

_aval_of_type: dict[type, Callable[[Any], ShapedArray]] = {}


def register_array_type(kind: type, aval_of: Callable[[Any], ShapedArray]) -> None:
    """Declare that values of class `kind` are arrays, and how to read their aval."""
    _aval_of_type[kind] = aval_of


def is_arraylike(x: Any) -> bool:
    """Whether `x` can be an operand: a number, a NumPy array, an `Array` or a tracer."""
    kind = type(x)
    if kind in _aval_of_type:
        return True
    return any(base in _aval_of_type for base in kind.__mro__) or hasattr(x, "__spmd_array__")


def typeof(x: Any) -> ShapedArray:
    """Return the abstract value of `x`: its shape, its dtype, and whether that is weak.

    `x` is a number, a NumPy array, an `Array` or a tracer; the weak type of a Python number gives
    way in promotion. Raises `ArgumentError` for anything else.

    >>> spmd.typeof(1.0)
    ShapedArray(float32[], weak_type=True)
    >>> spmd.typeof(np.zeros((2, 3), np.int8))
    ShapedArray(int8[2,3])
    """
    handler = _aval_of_type.get(type(x))
    if handler is not None:
        return handler(x)
    for kind in type(x).__mro__[1:]:
        handler = _aval_of_type.get(kind)
        if handler is not None:
            _aval_of_type[type(x)] = handler
            return handler(x)
    convert = getattr(x, "__spmd_array__", None)
    if convert is not None:
        return typeof(convert())
    raise ArgumentError(
        f"{x!r} of type {type(x).__name__} is not an array or a number. "
        "Arrays are NumPy arrays, spmd arrays and Python numbers; "
        "mark other arguments static (jit's static_argnums), or close over them."
    )


def _scalar_aval(kind: type) -> Callable[[Any], ShapedArray]:
    known: dict[bool, ShapedArray] = {}

    def aval(_: Any) -> ShapedArray:
        found = known.get(config.enable_x64)
        if found is None:
            found = ShapedArray((), dtypes.canonical(kind), kind is not bool)
            known[config.enable_x64] = found
        return found

    return aval


# The avals of NumPy's arrays, by shape, dtype and whether x64 is on.
_numpy_avals: dict[tuple[tuple[int, ...], np.dtype, bool], ShapedArray] = {}


def _numpy_aval(x: Any) -> ShapedArray:
    key = x.shape, x.dtype, config.enable_x64
    found = _numpy_avals.get(key)
    if found is None:
        found = ShapedArray(x.shape, dtypes._canonical(x.dtype, config.enable_x64))
        _numpy_avals[key] = found
    return found


for _kind in (bool, int, float, complex):
    register_array_type(_kind, _scalar_aval(_kind))
register_array_type(np.ndarray, _numpy_aval)
register_array_type(np.generic, _numpy_aval)


# ---- ShapeDtypeStruct --------------------------------------------------------------------------


class ShapeDtypeStruct:
    """A shape and dtype without data: what `eval_shape` and `make_jaxpr` take and return.

    `sharding`, `weak_type` and `manual_axis_type` are those of the array that it stands for; a
    `PartitionSpec` is over the mesh in scope. Raises `ArgumentError` for one without a mesh, and
    `ShardingError` if the sharding is of more dims.

    >>> spmd.ShapeDtypeStruct((2, 3), np.float32)
    ShapeDtypeStruct(shape=(2, 3), dtype=float32)
    """

    __slots__ = ("dtype", "format", "manual_axis_type", "shape", "sharding", "weak_type")

    def __init__(
        self,
        shape: Any,
        dtype: Any,
        *,
        sharding: Any = None,
        weak_type: bool = False,
        manual_axis_type: ManualAxisType | None = None,
    ):
        if dtype is None:
            raise ArgumentError("ShapeDtypeStruct: dtype is None, and must be given")
        self.shape = tuple(shape)
        self.dtype = visible(np.dtype(dtype))
        if sharding is not None:
            sharding = _resolve_sharding(sharding, self.shape)
        # A `Format` has a layout in memory beside a sharding.
        self.format = sharding if hasattr(sharding, "sharding") else None
        self.sharding = getattr(sharding, "sharding", sharding)
        self.weak_type = weak_type
        self.manual_axis_type = manual_axis_type

    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: int(np.prod(self.shape)))
    # `jax.new_ref` makes mutable arrays of arrays; no structure stands for one.
    is_ref = property(lambda self: False)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a structure without dimensions")
        return self.shape[0]

    def __bool__(self) -> bool:
        return True

    @staticmethod
    def like(x: Any) -> ShapeDtypeStruct:
        """The structure that stands for an array: its shape, dtype, weak type and sharding."""
        aval = typeof(x)
        # Arrays of ours have `shards`; a traced value lies nowhere.
        sharding = x.sharding if hasattr(x, "shards") and x.committed else aval.explicit
        return ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ShapeDtypeStruct)
            and (self.shape, self.dtype) == (other.shape, other.dtype)
            and (self.sharding, self.weak_type) == (other.sharding, other.weak_type)
            and self.manual_axis_type == other.manual_axis_type
        )

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype, self.sharding, self.weak_type))

    def __repr__(self) -> str:
        sharding = "" if self.sharding is None else f", sharding={self.sharding}"
        sharding += "" if self.format is None else f", format={self.format.layout}"
        dtype = dtypes.long_name(self.dtype)
        weak = ", weak_type=True" if self.weak_type else ""
        manual = self.manual_axis_type
        axes = "" if manual is None else f", manual_axis_type={manual}"
        return f"ShapeDtypeStruct(shape={self.shape}, dtype={dtype}{sharding}{weak}{axes})"

    def update(self, **changes: Any) -> ShapeDtypeStruct:
        """The same with some of `shape`, `dtype`, `sharding` and `weak_type` changed."""
        kept = {name: getattr(self, name) for name in self.__slots__ if name != "format"}
        kept["sharding"] = self.format or self.sharding
        return ShapeDtypeStruct(**(kept | changes))


def set_sharding_resolver(resolve: Callable[[Any, tuple[int, ...]], Any]) -> None:
    """Set what makes the sharding of a `ShapeDtypeStruct` of what its user gives for a shape."""
    global _resolve_sharding
    _resolve_sharding = resolve


def _as_given(sharding: Any, shape: tuple[int, ...]) -> Any:
    return sharding


_resolve_sharding: Callable[[Any, tuple[int, ...]], Any] = _as_given


def _aval_of(struct: ShapeDtypeStruct) -> ShapedArray:
    vma = NO_AXES if struct.manual_axis_type is None else struct.manual_axis_type.varying
    dtype = struct.dtype
    if dtype.kind in "iufc" and dtype.itemsize > 4:
        dtype = dtypes.canonical(dtype)  # as that of an array of NumPy's
    aval = ShapedArray(struct.shape, dtype, struct.weak_type, vma)
    typed = getattr(struct.sharding, "typed", None)  # what no sharding is says nothing
    return aval if typed is None else typed(aval)


register_array_type(ShapeDtypeStruct, _aval_of)
