"""Names of `spmd` that few programs use: imported when the first of them is asked for."""

# ruff: noqa: F401

from spmd.api.settings import (
    default_device,
    default_prng_impl,
    enable_custom_prng,
    legacy_prng_key,
    make_user_context,
    no_tracing,
    threefry_partitionable,
    transfer_guard,
    transfer_guard_device_to_device,
    transfer_guard_device_to_host,
    transfer_guard_host_to_device,
)
from spmd.lax.callback import effects_barrier, io_callback, pure_callback
from spmd.ref import Ref, empty_ref, free_ref, freeze, new_ref
