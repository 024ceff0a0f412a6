"""The CPU platform: virtual devices of this process, and those of all other ranks."""

from __future__ import annotations

from spmd.collectives.transport import bootstrap
from spmd.core.config import config
from spmd.core.device import Platform, register_platform


def _process() -> tuple[int, int]:
    return bootstrap.process_index(), bootstrap.process_count()


register_platform(Platform("cpu", lambda: config.num_cpu_devices, _process, "cpu"))
