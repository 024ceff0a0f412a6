"""`Array`: an immutable value of global shape, held in shards by one or several devices.

A single-device array is a raw pointer with the object that owns the memory; its NumPy view is made
on demand. While a program computes it, it has no address, and its owner is `Future`; a reader of
its values settles it first, which waits. An array over several devices holds one
single-device array per local device.
Nothing here communicates: `repr` of an array that other processes hold shards of shows the shards
that are here.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np

from spmd.base import dtypes
from spmd.base.aligned_copy import aligned_copy
from spmd.base.config import config
from spmd.base.context import busy, evaluation, state
from spmd.base.device import Device, default_device, local_devices, process_index
from spmd.base.errors import (
    ArgumentError,
    DeletedError,
    DeviceError,
    DtypeError,
    KeyOperationError,
    MutationError,
    ShardingError,
)
from spmd.base.key_dtypes import visible
from spmd.base.lazy_import import Deferred
from spmd.base.record import record
from spmd.base.source import current_source, is_ours
from spmd.core.aval import HasAval, ShapedArray, register_array_type, typeof
from spmd.core.ir import Jaxpr
from spmd.core.rewrite import dce
from spmd.core.trace import in_place_message, set_array_of
from spmd.sharding.future import DeviceMemory, Future
from spmd.sharding.named import Index, NamedSharding, Sharding, SingleDeviceSharding
from spmd.sharding.spec import Mesh, PartitionSpec
from spmd.sharding.xla.layout import Format, Layout

# Small results are kept in `bytes` objects, where CPython has the content behind the header.
BYTES_OFFSET = bytes.__basicsize__ - 1


@record
class Shard:
    """One device's shard: which slices of the global array, and their values."""

    device: Device
    index: Index
    data: Any
    replica_id: int = 0

    def __repr__(self) -> str:
        data = "None" if self.data is None else str(self.data)
        return (
            f"Shard(device={self.device!r}, index={self.index}, replica_id={self.replica_id}, "
            f"data={data})"
        )


if TYPE_CHECKING:
    from spmd.sharding.array_methods import ArrayMethods
else:
    ArrayMethods = HasAval

_key_uses: Any = Deferred("spmd.lax.keys.consumption")


class Array(ArrayMethods):
    """An immutable n-dimensional array.

    Made by `spmd.numpy` functions, `device_put`, and every transformed function. Operators and
    methods are those of NumPy arrays; `x.at[i].set(v)` stands for in-place updates.
    """

    __slots__ = (
        "__weakref__",
        "_made_on",
        "_numpy",
        "_sharding",
        "aval",
        "owner",
        "ptr",
        "shards",
    )
    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    aval: ShapedArray
    ptr: int  # address of a single-device array's first element; 0 for several devices, or pending
    owner: Any  # keeps the memory alive; None when there are several devices, or deleted
    shards: tuple[Array, ...] | None  # the local shards, where there are several devices
    _numpy: np.ndarray | None
    _sharding: Sharding | None  # None for a single-device array that is committed to no device
    _made_on: Device  # where such an array was made under `default_device`; unset for any other

    @property
    def sharding(self) -> Sharding:
        """The devices of the array, and their parts of it."""
        if self._sharding is None:
            return SingleDeviceSharding(getattr(self, "_made_on", None) or local_devices()[0])
        return self._sharding

    @property
    def nbytes(self) -> int:
        return self.aval.nbytes

    @property
    def itemsize(self) -> int:
        return self.aval.dtype.itemsize

    # -- devices and shards --

    def devices(self) -> set[Device]:
        """The devices that hold a shard."""
        self._check_alive()
        return self.sharding.device_set

    @property
    def device(self) -> Any:
        """The device of a single-device array, else the sharding."""
        s = self.sharding
        return s.device if isinstance(s, SingleDeviceSharding) else s

    @property
    def format(self) -> Format:
        """The order of the dims in memory, and the sharding."""
        return Format(Layout(tuple(range(self.ndim)), ()), self.sharding)

    @property
    def committed(self) -> bool:
        return self._sharding is not None

    _committed = committed

    @property
    def _consumed(self) -> Any:
        """Which of these typed keys were used, as `debug_key_reuse` noted."""
        return _key_uses.consumed(self)

    @property
    def is_fully_addressable(self) -> bool:
        """Whether all shards are on this process's devices."""
        return self.shards is None or self.sharding.is_fully_addressable

    @property
    def is_fully_replicated(self) -> bool:
        return self.shards is None or self.sharding.is_fully_replicated

    @property
    def is_unreduced(self) -> bool:
        """Whether the devices hold terms of a sum, which is the value."""
        sharding = self._sharding
        return isinstance(sharding, NamedSharding) and bool(sharding.spec.unreduced)

    @property
    def global_shards(self) -> list[Shard]:
        """Every device's shard; the `data` of those on other processes is None."""
        self._check_alive()
        if self.shards is None:
            index = tuple(slice(None) for _ in self.shape)
            return [Shard(self.device, index, self)]
        here = {shard.device: shard for shard in self.shards}
        counts: dict[Any, int] = {}
        found = []
        for device, index in self.sharding.devices_indices_map(self.shape).items():
            key = tuple((s.start, s.stop) for s in index)
            replica = counts.get(key, 0)
            counts[key] = replica + 1
            found.append(Shard(device, index, self._true(here.get(device), index), replica))
        return found

    def _true(self, shard: Array | None, index: Index) -> Array | None:
        """A shard as users see it: of an uneven part its rows, without what fills it up."""
        if shard is None or not isinstance(self._sharding, NamedSharding):
            return shard
        if not self._sharding.uneven:
            return shard
        sizes = [len(range(*s.indices(n))) for s, n in zip(index, self.shape, strict=True)]
        if list(shard.shape) == sizes:
            return shard
        rows = shard._value[tuple(map(slice, sizes))]
        return from_numpy(rows, shard.aval.update(shape=tuple(sizes)), shard.device)

    @property
    def addressable_shards(self) -> list[Shard]:
        """This process's shards."""
        return [shard for shard in self.global_shards if shard.data is not None]

    def addressable_data(self, index: int) -> Array:
        """The values on one of this process's devices."""
        self._check_alive()
        return self._arrays[index]

    @property
    def _arrays(self) -> list[Array]:
        """The array of each of this process's devices."""
        if isinstance(self._sharding, NamedSharding) and self._sharding.uneven:
            return [shard.data for shard in self.addressable_shards]
        return list(self.shards or (self,))

    # -- values --

    def _check_alive(self) -> None:
        if self.is_deleted():
            raise DeletedError(
                f"this array ({self.aval}) was deleted or donated to a jitted function "
                "(donate_argnums); use that function's result instead"
            )

    @property
    def _value(self) -> np.ndarray:
        """A read-only NumPy view (or, of several shards, an assembled copy, kept)."""
        if self._numpy is None:
            if self.shards is None:
                if self.owner is None:
                    self._check_alive()
                if type(self.owner) is Future:
                    self.settle()
                owner = self.owner
                is_far = isinstance(owner, DeviceMemory)
                self._numpy = owner.read(self.aval) if is_far else _view(self.ptr, self.aval, owner)
            else:
                self._numpy = self._assembled()
        return self._numpy

    def _assembled(self) -> np.ndarray:
        assert self.shards is not None
        if not self.shards:
            raise ShardingError(f"no device of this process holds a shard of {self.aval}")
        self._check_alive()
        if self.is_fully_replicated:
            return self.shards[0]._value
        if self.is_unreduced:
            raise ShardingError(
                f"this array is {self.aval}: along the axes after U each device holds a term of a "
                "sum, which is its value. Make the sum with reshard(x, P(...)), or read the terms, "
                ".addressable_shards"
            )
        if not self.is_fully_addressable:
            raise ShardingError(
                f"this array of shape {self.shape} has shards on other processes; its whole value "
                "is not here. Read .addressable_shards, or gather it on every process with "
                "spmd.multihost.process_allgather(x, tiled=True)"
            )
        out = np.empty(self.shape, self.aval.dtype)
        for shard in self.addressable_shards:
            out[shard.index] = shard.data._value
        out.flags.writeable = False
        return out

    def _numbers(self, what: str) -> np.ndarray:
        """`_value`; for typed keys only spmd's own code gets the elements, and users an error."""
        if self.aval.dtype.names is None or not dtypes.is_key(self.aval.dtype):
            return self._value
        if not is_ours(sys._getframe(2).f_code.co_filename):
            error = KeyOperationError if what == "item" else DtypeError
            raise error(
                f"{what}: an array of {dtypes.key_name(self.aval.dtype)} cannot be converted to "
                "numbers; random.key_data(keys) gives its words"
            )
        return self._value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = self._numbers("np.asarray")
        if dtype is not None and np.dtype(dtype) != value.dtype:
            if copy is False:
                raise ArgumentError(
                    f"np.asarray: {self.aval.short()} becomes {np.dtype(dtype).name} by a copy "
                    "only, and copy=False forbids it"
                )
            return value.astype(dtype)
        return value.copy() if copy else value

    def __buffer__(self, flags: int) -> memoryview:
        """The memory, to be read only: the buffer protocol, for Python from 3.12 on."""
        value: Any = self._value
        return memoryview(value)

    def __bool__(self) -> bool:
        if dtypes.is_key(self.aval.dtype):
            raise DtypeError("a key has no truth value; random.key_data(key) gives its words")
        return bool(self._value)

    def __int__(self) -> int:
        return int(self._value)

    def __float__(self) -> float:
        return float(self._value)

    def __complex__(self) -> complex:
        return complex(self._value)

    def __index__(self) -> int:
        if self.ndim or not dtypes.is_integer(self.dtype):
            raise TypeError(f"only integer scalars can be used as an index, got {self.aval}")
        return int(self._value)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dimensions")
        return self.shape[0]

    def item(self, *args: Any) -> Any:
        """The value of one element as a Python number."""
        return self._numbers("item").item(*args)

    def tolist(self) -> Any:
        """The values as nested Python lists."""
        return self._numbers("tolist").tolist()

    def tobytes(self, order: Any = "C") -> bytes:
        return self._numbers("tobytes").tobytes(order)

    def __format__(self, spec: str) -> str:
        if self.is_unreduced or (self.shape and not spec):
            return str(self)
        return format(self._value if self.shape else self._value[()], spec)

    def __bytes__(self) -> bytes:
        # JAX's arrays are buffers, which `bytes` reads; without this method it would iterate.
        if self.shards is not None or self.dtype.kind == "V":
            what = "several devices" if self.shards is not None else str(self.dtype)
            raise BufferError(f"bytes: an array of {what} is no one buffer; take x.tobytes()")
        return self.tobytes()

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise MutationError(in_place_message())

    def __copy__(self) -> Array:
        return alias(self)

    def __deepcopy__(self, memo: Any) -> Array:
        if self.shards is not None:
            shards = [s.__deepcopy__(memo) for s in self.shards]
            return from_shards(self.aval, self.sharding, shards)
        made = from_numpy(self._value, self.aval)
        made._sharding = self._sharding
        return _made_where(self, made)

    def on_device_size_in_bytes(self) -> int:
        """The bytes of all devices' shards together; those that share memory count each."""
        self._check_alive()
        if self.shards is None:
            return self.nbytes
        size = math.prod(self.sharding.shard_shape(self.shape)) * self.itemsize
        return size * self.sharding.num_devices

    def unsafe_buffer_pointer(self) -> int:
        """The address of the first element, of an array on one device.

        It is that of the values as long as the array lives. Raises `DeviceError` if several devices
        hold the array, and `DeletedError` if none does.
        """
        self._check_alive()
        if self.shards is not None:
            raise DeviceError(
                f"unsafe_buffer_pointer: this array ({self.aval}) lies on "
                f"{self.sharding.num_devices} devices, and each shard has an address; read "
                ".addressable_shards[k].data.unsafe_buffer_pointer()"
            )
        self.settle()
        return self.owner.address if isinstance(self.owner, DeviceMemory) else self.ptr

    def __reduce__(self) -> Any:
        return _unpickle, (np.array(self._value), self.aval)

    # -- life --

    def settle(self) -> None:
        """Wait for the program that computes a single-device array, and take what it made.

        Raises what the program failed with, each time.
        """
        owner = self.owner
        if type(owner) is Future:
            owner.work.wait()
            if self.owner is owner:  # the array was not deleted meanwhile
                self.ptr, self.owner = owner.address, owner.block

    def block_until_ready(self) -> Array:
        """Wait until the values are there; raises what the program failed with."""
        for shard in self.shards or (self,):
            if not shard.ptr:  # pending, on a device, deleted or empty
                if shard.owner is None:
                    self._check_alive()
                elif type(shard.owner) is Future:
                    shard.settle()
                elif isinstance(shard.owner, DeviceMemory):
                    shard.owner.wait()
        return self

    def copy_to_host_async(self) -> None:
        """Start copying to the host: nothing to do for CPU arrays."""
        self._check_alive()
        for shard in self.shards or (self,):
            if shard._numpy is None and isinstance(shard.owner, DeviceMemory):
                shard.owner.fetch()

    def is_ready(self) -> bool:
        """Whether the program that computes the array has ended."""
        owners = [shard.owner for shard in self.shards or (self,)]
        works = [owner.work if type(owner) is Future else owner for owner in owners]
        return all(
            work.is_done()
            for work, owner in zip(works, owners, strict=True)
            if type(owner) is Future or isinstance(owner, DeviceMemory)
        )

    def delete(self) -> None:
        """Free the memory now; using the array afterwards is an error."""
        for s in self.shards or ():
            s.delete()
        self.ptr = 0
        self.owner = None
        self._numpy = None

    def is_deleted(self) -> bool:
        if self.shards is None:
            return self.owner is None
        return any(s.is_deleted() for s in self.shards)

    # -- text --

    def __repr__(self) -> str:
        if self.is_deleted():
            return f"Array(deleted, {self.aval})"
        weak = ", weak_type=True" if self.weak_type else ""
        dtype = f"dtype={dtypes.long_name(self.dtype)}{weak}"
        if self.is_unreduced:
            return f"Array(shape={self.shape}, {dtype}, sharding={self.sharding})"
        if not self.is_fully_addressable and not self.is_fully_replicated:
            shards = ", ".join(f"{s.device}: {_text(s.data, '')}" for s in self.addressable_shards)
            return f"Array(shape={self.shape}, {dtype}, sharding={self.sharding}, here: {shards})"
        if dtypes.is_key(self.dtype):
            words = self._value.reshape(-1).view(np.uint32)
            words = words.reshape(*self.shape, *visible(self.aval.dtype).key_shape)
            return f"Array({self.shape}, {dtype}) overlaying:\n{words}"
        if self.size == 0:
            return f"Array([], shape={self.shape}, {dtype})"
        return f"Array({_text(self, 'Array(')}, {dtype})"

    def __str__(self) -> str:
        if dtypes.is_key(self.aval.dtype):
            return repr(self)
        has_value = self.is_fully_addressable or self.is_fully_replicated
        if self.is_deleted() or self.is_unreduced or not has_value:
            return repr(self)
        return str(self._value)

    def __iter__(self) -> Iterator[Array]:
        if not self.shape:
            raise TypeError("iteration over an array without dimensions")
        if self.shards is not None and self.is_fully_replicated:
            return (self[k] for k in range(self.shape[0]))
        # Rows of an array that is split lie where the next operation wants them, as in JAX.
        is_placed = self._sharding is not None and self.shards is None
        value, device = self._value, self.device if is_placed else None
        row = self.aval.strip_sharding().update(shape=self.shape[1:])
        rows = (from_numpy(value[k], row, device) for k in range(self.shape[0]))
        return map(in_scope, rows) if device is None else rows


register_array_type(Array, lambda x: x.aval)

# Types that `spmd.numpy` takes as an array. Lists and tuples are none: see `numpy.asarray`.
ArrayLike: TypeAlias = Array | np.ndarray | np.bool_ | np.number | bool | int | float | complex


def _text(x: Any, prefix: str) -> str:
    return np.array2string(np.asarray(x), separator=", ", prefix=prefix, threshold=1000)


def _view(ptr: int, aval: ShapedArray, owner: Any) -> np.ndarray:
    if isinstance(owner, np.ndarray):
        return owner
    if aval.nbytes == 0:
        out = np.empty(aval.shape, aval.dtype)
    elif type(owner) is bytes:
        start = ptr - id(owner) - BYTES_OFFSET
        return np.ndarray(aval.shape, aval.dtype, owner, start)
    else:
        buffer: Any = (ctypes.c_char * aval.nbytes).from_address(ptr)
        buffer._owner = owner  # the view keeps the memory through its base
        out = np.frombuffer(buffer, dtype=aval.dtype).reshape(aval.shape)
    out.flags.writeable = False
    return out


def _unpickle(value: np.ndarray, aval: ShapedArray) -> Array:
    return from_numpy(value, aval)


# ---- making arrays -----------------------------------------------------------------------------


def from_numpy(
    x: Any, aval: ShapedArray | None = None, device: Device | None = None, copy: bool = True
) -> Array:
    """A single-device array with the values of a NumPy array or number (copied by default)."""
    aval = typeof(x) if aval is None else aval
    if aval.explicit is not None:
        aval = aval.update(sharding=None)
    value = dtypes.exact_integer(x, aval.dtype) if type(x) is int else np.asarray(x)
    if copy or value.dtype != aval.dtype or not value.flags.c_contiguous:
        value = aligned_copy(value, aval.dtype)
    value = value.view()
    value.flags.writeable = False
    out = Array()
    out.aval = aval
    out.ptr = value.__array_interface__["data"][0]
    out.owner = value
    out.shards = None
    out._numpy = value
    out._sharding = None if device is None else SingleDeviceSharding(device)
    if device is None and config.default_device is not None:
        out._made_on = default_device()
    return out


def array_of(x: Any, aval: ShapedArray | None = None) -> Array:
    """An array of a NumPy array or number, over the mesh in scope if there is one."""
    return in_scope(from_numpy(x, aval))


set_array_of(array_of)


def from_memory(ptr: int, owner: Any, aval: ShapedArray, sharding: Sharding | None = None) -> Array:
    """A single-device array over memory that `owner` keeps alive."""
    out = Array()
    out.aval = aval if aval.explicit is None else aval.update(sharding=None)
    out.ptr = ptr
    out.owner = owner
    out.shards = None
    out._numpy = None
    out._sharding = sharding
    if sharding is None and config.default_device is not None:
        out._made_on = default_device()
    return out


def note_made(arrays: Iterable[Any], before: Sequence[Any] = ()) -> None:
    """Record the default device in uncommitted arrays, except those in `before`.

    Called while `default_device` is set: arrays keep the device when the setting has changed.
    """
    device = default_device()
    for x in arrays:
        if type(x) is Array and x._sharding is None and not any(x is y for y in before):
            x._made_on = device


def note_place(outs: Iterable[Any], place: Sharding | None) -> None:
    """Commit results of one device to `place`, or else record the default device that is set."""
    if place is not None:
        for out in outs:
            out._sharding = place
    elif config.default_device is not None:
        note_made(outs)


def _made_where(x: Array, other: Array) -> Array:
    """The other array, which was made on the device that `x` was made on."""
    if x._sharding is None and (config.default_device is not None or hasattr(x, "_made_on")):
        other._made_on = x.device
    return other


def from_shards(aval: ShapedArray, sharding: Sharding, shards: Sequence[Array]) -> Array:
    """A global array of this process's shards, in the order of the sharding's devices."""
    out = Array()
    out.aval = sharding.typed(aval)
    out.ptr = 0
    out.owner = None
    out.shards = tuple(shards)
    out._numpy = None
    out._sharding = sharding
    return out


def in_scope(x: Array) -> Array:
    """An array that lies nowhere yet, over the mesh that `set_mesh` has set; else as it is."""
    if not busy or state.mesh is None or state.trace is not evaluation[0] or state.axes:
        return x
    return x if x._sharding is not None else replicated(x, state.mesh)


def replicated(x: Array, mesh: Mesh, in_full: bool = False) -> Array:
    """A one-device array replicated over a mesh, in the same memory.

    Its spec is P(), or `in_full`. Where this process has no device of the mesh it stays as it is.
    """
    sharding, homes = _replicating(mesh)
    if not homes:
        return x
    owner = x.owner  # before the address, which settling writes before the owner
    aval = x.aval
    shards = [from_memory(x.ptr, owner, aval, home) for home in homes]
    return from_shards(aval, sharding.in_full(aval.ndim) if in_full else sharding, shards)


@functools.lru_cache(maxsize=32)
def _replicating(mesh: Mesh) -> tuple[NamedSharding, list[SingleDeviceSharding]]:
    """The sharding that replicates over a mesh, and those of this process's devices."""
    mine = process_index()
    homes = [SingleDeviceSharding(d) for d in mesh.flat_devices() if d.process_index == mine]
    return NamedSharding(mesh, PartitionSpec()), homes


def alias(x: Array) -> Array:
    """Another array over the same memory: a copy, since neither can be written to.

    Deleting or donating one leaves the other: a program takes a donated operand's memory for a
    result only if no other array holds it. Raises a `DeletedError` if `x` is deleted.
    """
    x._check_alive()
    if x.shards is not None:
        return from_shards(x.aval, x.sharding, [alias(s) for s in x.shards])
    owner = x.owner  # before the address, which settling writes before the owner
    return _made_where(x, from_memory(x.ptr, owner, x.aval, x._sharding))


def usable(donated: Sequence[bool], ins: Sequence[int], outs: Sequence[int]) -> tuple[bool, ...]:
    """Which donated operands a result may take the memory of, by their bytes on each device.

    The others are not given up: no result is as large, or those that are have one already.
    """
    left = list(outs)
    found = []
    for gone, nbytes in zip(donated, ins, strict=True):
        found.append(gone and nbytes in left)
        if found[-1]:
            left.remove(nbytes)
    return tuple(found)


def warn_unusable(what: str, avals: Iterable[ShapedArray]) -> None:
    """Tell of donated operands that stay as they are; of none, nothing."""
    texts = ", ".join(str(a.strip_sharding()) for a in avals)
    if texts:
        warnings.warn(
            f"{current_source()}: {what}: Some donated buffers were not usable: {texts}. No result "
            "of as many bytes is left to take their memory, so they stay; don't donate them",
            UserWarning,
            stacklevel=2,
        )


def check_alive(what: str, leaves: Sequence[Any], names: Callable[[], Sequence[str]]) -> None:
    """Raise a DeletedError for the first operand that is deleted; `names()` gives their names."""
    for k, x in enumerate(leaves):
        if isinstance(x, Array) and x.is_deleted():
            raise DeletedError(
                f"{what}: {names()[k]} ({x.aval}) was deleted or donated to an earlier call "
                "(donate_argnums); use that call's result instead"
            ) from None


def check_donated(
    what: str,
    leaves: Sequence[Any],
    donated: Sequence[bool],
    names: Callable[[], Sequence[str]],
    jaxpr: Jaxpr | None = None,
) -> None:
    """Raise a DeletedError if a donated array is another operand of the same call too.

    `names()` gives the operands' names. An operand that `jaxpr` does not need may be any.
    """
    numbers: dict[int, int] = {}
    for k, x in enumerate(leaves):
        if type(x) is not Array:
            continue
        first = numbers.setdefault(id(x), k)
        if first != k and (donated[first] or donated[k]):
            if jaxpr is not None:
                _, needed = dce(jaxpr, [True] * len(jaxpr.outvars))
                if not (needed[first] and needed[k]):
                    continue
            one, other = names()[first], names()[k]
            raise DeletedError(
                f"{what}: {one} and {other} are the same array, {x.aval}, and "
                f"{one if donated[first] else other} is donated (donate_argnums): the call may "
                "write over it while it is read. Don't donate it, or pass a copy, x.copy()"
            )


def shard_value(value: np.ndarray, aval: ShapedArray, sharding: Sharding, mine: int) -> Array:
    """Cut a whole NumPy value over a sharding; only the shards of process `mine` are made.

    Devices that hold the same part of it share one copy.
    """
    if isinstance(sharding, NamedSharding):
        sharding.check(aval.shape, "device_put: x")
    return sharded(lambda index: value[index], aval, sharding, mine)


def sharded(
    part_of: Callable[[Index], np.ndarray], aval: ShapedArray, sharding: Sharding, mine: int
) -> Array:
    """The array of which `part_of` gives the values of some slices, as `shard_value` makes it."""
    shards = []
    copies: dict[tuple[Any, ...], Array] = {}
    # Parts of an uneven dim have the rows of the first; what the last lack is filled with zeros.
    part = aval.update(shape=sharding.shard_shape(aval.shape))
    for device, index in sharding.devices_indices_map(aval.shape).items():
        if device.process_index != mine:
            continue
        place = tuple((s.start, s.stop) for s in index)
        if place not in copies:
            shard = from_numpy(filled_up(part_of(index), part.shape), part, device)
            copies[place] = shard
        else:
            shard = alias(copies[place])
        shard._sharding = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        shards.append(shard)
    return from_shards(aval, sharding, shards)


def filled_up(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A part with zeros behind its rows, where it has fewer than the first."""
    if value.shape == shape or value.ndim != len(shape):
        return value
    full = np.zeros(shape, value.dtype)
    full[tuple(map(slice, value.shape))] = value
    return full
