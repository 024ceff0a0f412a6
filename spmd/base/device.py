"""Devices that programs run on. Platforms register how their devices are made.

Ids are global and the same on every process; the devices of one process are consecutive.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from spmd.base.config import config
from spmd.base.errors import ArgumentError, DeviceError, PlatformError
from spmd.base.record import record


class Device:
    """One CPU device or GPU of some process."""

    __slots__ = ("client", "id", "local_hardware_id", "platform", "process_index")

    def __init__(self, id: int, client: Platform, process_index: int, local_id: int):
        self.id = id
        # The platform that the device belongs to, which knows all its devices.
        self.client = client
        # JAX's name of the platform: "gpu", where the device's own name is "cuda:0".
        self.platform = client.platform
        self.process_index = process_index
        self.local_hardware_id = local_id

    @property
    def device_kind(self) -> str:
        """The name of a GPU, else "cpu"."""
        return self.client.kind(self.local_hardware_id)

    def __repr__(self) -> str:
        return f"{self.client.name.capitalize()}Device(id={self.id})"

    def __str__(self) -> str:
        return f"{self.client.name}:{self.id}"

    def memory_stats(self) -> dict[str, int] | None:
        """Counts of the device's memory in bytes; None for CPUs, as in JAX.

        Those of a GPU are `bytes_in_use`, `peak_bytes_in_use` and `bytes_limit`.
        """
        return self.client.memory_stats(self.local_hardware_id)

    def addressable_memories(self) -> list[Memory]:
        """The memories that arrays of the device can be in."""
        return [self.memory(kind) for kind in MEMORY_KINDS]

    def default_memory(self) -> Memory:
        """The memory that arrays are in when nothing else is said."""
        return self.memory(MEMORY_KINDS[0])

    def memory(self, kind: str) -> Memory:
        """The memory of a kind; raises `ArgumentError` if the device has none of it."""
        check_memory_kind(f"{self!r}.memory", kind)
        return Memory(self, kind)

    def __reduce__(self) -> Any:
        """By the id, which is the same on every process."""
        return device_of, (self.platform, self.id)


# JAX's names of the memories of a device. Here a device has one memory, and the names are labels:
# an array keeps the label with which it was put, and programs read all arrays.
MEMORY_KINDS = "device", "pinned_host", "unpinned_host"


class MemorySpace(enum.Enum):
    """Memory by what is meant, as `device_put` takes it: the device's own, or the host's."""

    Device = "device"
    Host = "pinned_host"
    Any = "any"

    def __repr__(self) -> str:
        return f"MemorySpace.{self.name}"


def check_memory_kind(what: str, kind: Any) -> None:
    """Raise an ArgumentError unless `kind` is one of `MEMORY_KINDS`."""
    if kind not in MEMORY_KINDS:
        raise ArgumentError(
            f"{what}: there is no memory kind {kind!r}; devices have {', '.join(MEMORY_KINDS)}"
        )


@record
class Memory:
    """One kind of memory of a device."""

    device: Device
    kind: str

    @property
    def platform(self) -> str:
        """The platform of the device."""
        return self.device.platform

    @property
    def process_index(self) -> int:
        """The process of the device."""
        return self.device.process_index

    def __repr__(self) -> str:
        return f"{self.device.platform.upper()}_{self.kind.upper()}_{self.device.id}"


def device_of(platform: str, id: int) -> Device:
    """The device of this job that has an id; raises `DeviceError` if there is none."""
    for device in devices(platform):
        if device.id == id:
            return device
    raise DeviceError(
        f"a pickled {platform} device has id {id}, and this job has {device_count(platform)}"
    )


class _Gpus:
    """Whether this process has asked for GPUs: if not, no program looks for its device."""

    def __init__(self) -> None:
        self.in_use = False

    def ask(self, platform: str) -> None:
        """Take note of the name of a platform that is asked for."""
        self.in_use = self.in_use or platform != "cpu"


gpus = _Gpus()
gpus.ask(config.platform)
config.on_update("platform", gpus.ask)


class Platform:
    """How one kind of device is found: how many this process has, and its place among others.

    `family` is JAX's name of such devices, "gpu" for those of CUDA. `kind` says what one of this
    process's devices is, and `memory_stats` gives the counts of its memory, by its number.
    """

    def __init__(
        self,
        name: str,
        local_count: Callable[[], int],
        process: Callable[[], tuple[int, int]],
        kind: Callable[[int], str],
        family: str | None = None,
        memory_stats: Callable[[int], dict[str, int] | None] = lambda local_id: None,
    ):
        self.name = name
        self.platform = family or name
        self.kind = kind
        self.memory_stats = memory_stats
        self._local_count = local_count
        self._process = process
        self._known: dict[int, Device] = {}
        self._lists: dict[tuple[int, int, int], list[Device]] = {}

    def devices(self) -> list[Device]:
        """All devices of all processes; every process has as many as this one."""
        count = self._local_count()  # raises if there is none
        gpus.ask(self.name)
        index, processes = self._process()
        key = (count, index, processes)
        if key not in self._lists:
            self._lists[key] = [
                self._device(p * count + k, p, k) for p in range(processes) for k in range(count)
            ]
        return self._lists[key]

    def on_first_count(self, hook: Callable[[], None]) -> None:
        """Call `hook` just before the devices of this process are counted the next time."""
        count = self._local_count

        def first() -> int:
            self._local_count = count
            hook()
            return count()

        self._local_count = first

    def _device(self, id: int, process: int, local: int) -> Device:
        found = self._known.get(id)
        if found is None or found.process_index != process:
            found = self._known[id] = Device(id, self, process, local)
        return found

    def process(self) -> tuple[int, int]:
        """This process's index, and how many there are."""
        return self._process()

    # Programs for JAX read these of a device's client.
    runtime_type = "spmd"

    @property
    def platform_version(self) -> str:
        """The platform's name, and who runs programs on it."""
        return f"{self.name} spmd"

    def process_index(self) -> int:
        """The number of this process."""
        return self._process()[0]

    def local_devices(self) -> list[Device]:
        """The devices of this process."""
        return [d for d in self.devices() if d.process_index == self.process_index()]

    def device_count(self) -> int:
        """The number of devices all processes have."""
        return len(self.devices())

    def local_device_count(self) -> int:
        """The number of devices this process has."""
        return self._local_count()


platforms: dict[str, Platform] = {}


def register_platform(platform: Platform) -> None:
    """Make a platform's devices known."""
    platforms[platform.name] = platform


def _platform(backend: str | None) -> Platform:
    name = canonicalize_platform(backend or config.platform)
    found = platforms.get(name)
    if found is None:
        known = ", ".join(sorted(platforms)) or "none"
        raise PlatformError(
            f"Unknown backend: platform {name!r} is not available here; there are: {known}. "
            "Set SPMD_PLATFORM to one of them."
        )
    return found


def canonicalize_platform(name: str) -> str:
    """The name of a platform as programs have it: "cuda" for "gpu", which is JAX's name for all."""
    families = {each.platform: each.name for each in platforms.values()}
    return families.get(name, name)


def devices(backend: str | None = None) -> list[Device]:
    """List all devices of all processes, in the order of their ids.

    `backend` is the platform's name, by default the one in use ("cpu"). The number of virtual CPU
    devices is the int setting `num_cpu_devices`. Raises `PlatformError`, a `RuntimeError`, if there
    is no such platform.

    >>> spmd.devices()[0], len(spmd.devices())
    (CpuDevice(id=0), 4)
    """
    return list(_platform(backend).devices())


def local_devices(
    process_index: int | None = None, backend: str | None = None, host_id: int | None = None
) -> list[Device]:
    """List the devices of one process, by default this one.

    `process_index` (or `host_id`, JAX's older name) is the int that numbers the process, and
    `backend` the platform's name. Raises `PlatformError` if there is no such
    platform, and `DeviceError` if there is no such process.

    >>> len(spmd.local_devices())
    4
    """
    platform = _platform(backend)
    wanted = process_index if process_index is not None else host_id
    if wanted is not None and not 0 <= wanted < platform.process()[1]:
        raise DeviceError(
            f"local_devices: there is no process {wanted}; this job has {platform.process()[1]}"
        )
    mine = platform.process()[0] if wanted is None else wanted
    return [d for d in platform.devices() if d.process_index == mine]


def device_count(backend: str | None = None) -> int:
    """Count the devices that all processes have together.

    The result is an int, the size of `devices(backend)`; `backend` is the platform's name. Raises
    `PlatformError` if there is no such platform.

    >>> spmd.device_count()
    4
    """
    return len(_platform(backend).devices())


def local_device_count(backend: str | None = None) -> int:
    """Count the devices that this process has.

    The result is an int, the size of `local_devices()`; `backend` is the platform's name. Raises
    `PlatformError` if there is no such platform.

    >>> spmd.local_device_count()
    4
    """
    return len(local_devices(backend=backend))


def process_index(backend: str | None = None) -> int:
    """Return the number of this process, an int scalar: its rank.

    `backend` is the platform's name. Raises `PlatformError` if there is no such platform.

    >>> spmd.process_index()
    0
    """
    return _platform(backend).process()[0]


def process_count(backend: str | None = None) -> int:
    """Return how many processes the job has, an int scalar.

    `backend` is the platform's name. Raises `PlatformError` if there is no such platform.

    >>> spmd.process_count()
    1
    """
    return _platform(backend).process()[1]


def default_backend() -> str:
    """Return the name of the platform in use, as its devices have it: "cpu" or "gpu".

    Raises `PlatformError` if the setting `platform` names none.

    >>> spmd.default_backend()
    'cpu'
    """
    return _platform(None).platform


def too_few_devices(what: str, wanted: int, have: int) -> DeviceError:
    """The error for asking for more devices than there are; it says what to set."""
    each = len(local_devices())
    ranks = -(-wanted // each)
    more = f" or spmdrun -n {ranks} --devices-per-rank {each} ..." if 1 < each < wanted else ""
    return DeviceError(
        f"{what} needs {wanted} devices, but there are {have}. On CPU set "
        f'spmd.config.update("num_cpu_devices", {wanted}) or SPMD_NUM_CPU_DEVICES={wanted} for '
        f"virtual devices in this process, or start more ranks: spmdrun -n {wanted} ...{more}"
    )


def default_device() -> Device:
    """The device that arrays are put on when nothing else is said: the first local one.

    `config.default_device` names another, or a platform.
    """
    chosen = config.default_device
    if chosen is None:
        return local_devices()[0]
    return local_devices(backend=chosen)[0] if isinstance(chosen, str) else chosen


def as_device(x: Any) -> Device:
    """Check that `x` is a device."""
    if not isinstance(x, Device):
        raise DeviceError(f"{x!r} is not a device; spmd.devices() lists them")
    return x
