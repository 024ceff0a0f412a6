"""The exception that a program sees for one in a callback: a `JaxRuntimeError` with its text.

Libraries look for their own errors in that text. spmd itself raises what the callback raised.
"""

from __future__ import annotations

import traceback

import spmd.lax.callback as callback
from spmd.errors import JaxRuntimeError


def _as_in_jax(error: Exception) -> Exception:
    text = "".join(traceback.format_exception(error, chain=False)).rstrip()
    return JaxRuntimeError(f"INTERNAL: CpuCallback error calling callback: {text}")


def follow_jax() -> None:
    """From now on, in this process."""
    callback.raised_as = _as_in_jax
