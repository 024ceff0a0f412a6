"""The CPU platform: virtual devices of this process, and those of all other ranks."""

from __future__ import annotations

from spmd.base.config import config
from spmd.base.device import Platform, register_platform
from spmd.transport import world


def _process() -> tuple[int, int]:
    return world.process_index(), world.process_count()


register_platform(Platform("cpu", lambda: config.num_cpu_devices, _process, "cpu"))
