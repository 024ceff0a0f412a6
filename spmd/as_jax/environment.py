"""JAX's environment variables, read when `jax` is imported: programs set them just before.

`XLA_FLAGS` is read again at the first use of a device, until when JAX takes no notice of it.
spmd's own variables win, which `spmdrun` sets too.
"""

from __future__ import annotations

import os
import re

from spmd.base.config import SETTINGS, config
from spmd.base.device import platforms

# As `XLA_FLAGS` has it.
_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
_NAMES = {"JAX_PLATFORM_NAME": "platform", "JAX_PLATFORMS": "platform", "JAX_CHECK_TRACER_LEAKS":
          "check_leaks", "JAX_ENABLE_CHECKS": "check"}  # fmt: skip


def read() -> None:
    """Take over what the environment says of JAX."""
    names = {f"JAX_{s.name.upper()}": s.name for s in SETTINGS} | _NAMES
    ours = {s.name: s.env for s in SETTINGS}
    for variable, name in names.items():
        text = os.environ.get(variable)
        if text and ours[name] not in os.environ:
            config.update(name, text)
    before = os.environ.get("XLA_FLAGS", "")
    _read_flags(before)

    def read_again() -> None:
        now = os.environ.get("XLA_FLAGS", "")
        if now != before:  # what is set by `config.update` stays otherwise
            _read_flags(now)

    platforms["cpu"].on_first_count(read_again)


def _read_flags(text: str) -> None:
    flags = _DEVICES.search(text)
    if (
        flags
        and "SPMD_NUM_CPU_DEVICES" not in os.environ
        and "JAX_NUM_CPU_DEVICES" not in os.environ
    ):
        config.update("num_cpu_devices", int(flags[1]))
