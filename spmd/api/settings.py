"""Settings for the length of a `with` block, under JAX's names: `with spmd.debug_nans(True): ...`.

A setting is the process's, not the thread's: `spmd.config` shows it, and other threads see it too.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from spmd.base.config import config
from spmd.base.context import current_trace, state
from spmd.base.device import devices, process_count
from spmd.core.primitive import Primitive
from spmd.core.trace import EVAL, Trace, Tracer

_SWITCH = """{doc}, for the length of a `with` block.

`new_val` is a bool; False switches it off inside such a block.

>>> with spmd.{name}():
...     spmd.config.{setting}
True
"""


def _switch(name: str, setting: str, doc: str) -> Callable[..., AbstractContextManager[None]]:
    def f(new_val: bool = True) -> AbstractContextManager[None]:
        return config.override(setting, bool(new_val))

    f.__name__ = f.__qualname__ = name
    f.__doc__ = _SWITCH.format(doc=doc, name=name, setting=setting)
    return f


enable_x64 = _switch("enable_x64", "enable_x64", "Keep 64-bit dtypes instead of halving them")
debug_nans = _switch("debug_nans", "debug_nans", "Raise where a NaN is first produced")
debug_infs = _switch("debug_infs", "debug_infs", "Raise where an infinity is first produced")
debug_key_reuse = _switch(
    "debug_key_reuse", "debug_key_reuse", "Raise where a random key is used a second time"
)
log_compiles = _switch("log_compiles", "log_compiles", "Print each compile and its cause")
explain_cache_misses = _switch(
    "explain_cache_misses", "log_compiles", "Print each compile and why it was not known already"
)
enable_checks = _switch("enable_checks", "check", "Check the program's law after every pass")
checking_leaks = _switch("checking_leaks", "check_leaks", "Find tracers that outlive their trace")
check_tracer_leaks = _switch(
    "check_tracer_leaks", "check_leaks", "Find tracers that outlive their trace"
)
enable_custom_prng = _switch(
    "enable_custom_prng", "enable_custom_prng", "Let random.PRNGKey make typed keys"
)
threefry_partitionable = _switch(
    "threefry_partitionable",
    "threefry_partitionable",
    "Draw bits of threefry2x32 that depend on their place alone",
)


def default_matmul_precision(new_val: Any) -> AbstractContextManager[None]:
    """Set the precision of matrix products for the length of a `with` block.

    `new_val` is a name such as "highest", or None. The CPU computes with full precision whatever it
    says. GPUs round factors of float32 to TF32 if it is "tensorfloat32", "high" or "default".

    >>> with spmd.default_matmul_precision("highest"):
    ...     snp.ones((2, 3)) @ snp.ones(3)
    Array([3., 3.], dtype=float32)
    """
    return config.override("default_matmul_precision", new_val)


def default_device(new_val: Any) -> AbstractContextManager[None]:
    """Choose the device of arrays that have no device of their own, for a `with` block.

    `new_val` is a device, the name of a platform, or None for the first device.

    >>> with spmd.default_device(spmd.devices()[1]):
    ...     snp.ones(2).devices() == {spmd.devices()[1]}
    True
    """
    return config.override("default_device", new_val)


def no_tracing(new_val: bool = True) -> AbstractContextManager[None]:
    """Raise a `TracingError` where a function is traced, for the length of a `with` block.

    For loops that must not compile anything any more. `new_val` False allows it again.

    >>> f = spmd.jit(lambda x: x + 1)
    >>> _ = f(1.0)
    >>> with spmd.no_tracing():
    ...     f(2.0)
    Array(3., dtype=float32, weak_type=True)
    """
    return config.override("no_tracing", bool(new_val))


def default_prng_impl(new_val: str) -> AbstractContextManager[None]:
    """Choose the generator of new random keys, for the length of a `with` block.

    `new_val` is the name of a generator.

    >>> with spmd.default_prng_impl("threefry2x32"):
    ...     spmd.random.key_data(spmd.random.key(1))
    Array([0, 1], dtype=uint32)
    """
    return config.override("default_prng_impl", new_val)


def legacy_prng_key(new_val: str) -> AbstractContextManager[None]:
    """Choose what functions of `random` do with raw keys, for the length of a `with` block.

    `new_val` is "allow", "warn" or "error", with which they raise an `ArgumentError`.

    >>> with spmd.legacy_prng_key("error"):
    ...     spmd.random.normal(spmd.random.PRNGKey(0))
    Traceback (most recent call last):
    ...
    spmd.errors.ArgumentError: ...
    """
    return config.override("legacy_prng_key", new_val)


class UserContext:
    """A value that traced functions may read: `context(value)` sets it for a `with` block."""

    def __init__(self, default_value: Hashable = None):
        self.value = default_value
        config.set_context(self, default_value)

    @contextmanager
    def __call__(self, new_val: Hashable) -> Iterator[None]:
        """Set the value for the length of a `with` block."""
        before = self.value
        self._set(new_val)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, value: Hashable) -> None:
        self.value = value
        config.set_context(self, value)


def make_user_context(default_value: Hashable = None) -> UserContext:
    """Make a context whose value jitted functions may depend on.

    Its value is `default_value` at first. `context(value)` sets it for the length of a `with`
    block, and `context.value` reads it. A function is traced anew under another value of it, and
    not again under one it has seen.

    >>> scale = spmd.make_user_context(2)
    >>> f = spmd.jit(lambda x: x * scale.value)
    >>> with scale(5):
    ...     print(f(10))
    50
    >>> print(f(10))
    20
    """
    return UserContext(default_value)


_GUARD = """Allow, log or disallow {what}, for the length of a `with` block.

`new_val` is "allow", "log", "disallow", "log_explicit" or "disallow_explicit"; the last two speak
of `device_put` and `asarray` too. A move that is disallowed raises a `DeviceError`.

>>> with spmd.{name}("allow"):
...     snp.ones(2) + np.ones(2, np.float32)
Array([2., 2.], dtype=float32)
"""


def _guard(name: str, what: str) -> Callable[[str], AbstractContextManager[None]]:
    def f(new_val: str) -> AbstractContextManager[None]:
        return config.override(name, new_val)

    f.__name__ = f.__qualname__ = name
    f.__doc__ = _GUARD.format(name=name, what=what)
    return f


transfer_guard_host_to_device = _guard(
    "transfer_guard_host_to_device",
    "NumPy arrays as operands of operations, and values of the host as arguments of `jit`",
)
transfer_guard_device_to_device = _guard(
    "transfer_guard_device_to_device",
    "arguments of `jit` that lie on another device than the one, or the mesh, where it runs",
)
transfer_guard_device_to_host = _guard(
    "transfer_guard_device_to_host", "reads by the host, which are no moves for CPU devices"
)


@contextmanager
def transfer_guard(new_val: str) -> Iterator[None]:
    """Allow, log or disallow moves between host and devices, for the length of a `with` block.

    `new_val` is that of `transfer_guard_host_to_device`, which it sets with its two relatives.

    >>> x = snp.ones(2)  # the ones are of the host
    >>> with spmd.transfer_guard("disallow"):
    ...     x + x
    Array([2., 2.], dtype=float32)
    """
    with (
        transfer_guard_host_to_device(new_val),
        transfer_guard_device_to_device(new_val),
        transfer_guard_device_to_host(new_val),
    ):
        yield


def numpy_rank_promotion(new_val: str) -> AbstractContextManager[None]:
    """Choose the treatment of operands of different ranks, for the length of a `with` block.

    `new_val` is "allow", which broadcasts them as NumPy does, "warn", which warns too, or "raise",
    with which they raise `ShapeError`. Scalars go with everything.

    >>> with spmd.numpy_rank_promotion("raise"):
    ...     snp.ones((2, 3)) + snp.ones(3)
    Traceback (most recent call last):
    ...
    spmd.errors.ShapeError: ...
    """
    return config.override("numpy_rank_promotion", new_val)


def numpy_dtype_promotion(new_val: str) -> AbstractContextManager[None]:
    """Choose the treatment of operands of different dtypes, for the length of a `with` block.

    `new_val` is "standard", which promotes them to a common one, or "strict", with which they raise
    `DtypeError`, except for Python numbers that take the other operand's dtype.

    >>> with spmd.numpy_dtype_promotion("strict"):
    ...     snp.ones(2) * 2
    Array([2., 2.], dtype=float32)
    """
    return config.override("numpy_dtype_promotion", new_val)


def ensure_compile_time_eval() -> AbstractContextManager[Any]:
    """Evaluate at once what a `with` block inside a traced function computes from concrete values.

    Operations on traced values are traced as they are outside of the block.

    >>> @spmd.jit
    ... def f(x):
    ...     with ensure_compile_time_eval():
    ...         n = int(snp.ceil(snp.log2(x.size)))
    ...     return x + n
    >>> f(snp.zeros(5))
    Array([3., 3., 3., 3., 3.], dtype=float32)
    """
    return current_trace(_KnownTrace())


class _KnownTrace(Trace):
    """Evaluates operations whose operands are known, and leaves others to the trace around it."""

    def __init__(self) -> None:
        self.parent = state.trace

    def process(self, prim: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        traced = any(isinstance(x, Tracer) for x in operands)
        trace = self.parent if traced else EVAL
        with current_trace(trace):
            return trace.process(prim, operands, params)


def process_indices(backend: str | None = None) -> list[int]:
    """List the numbers of all processes of the job.

    `backend` is accepted for JAX's sake; all devices are of one platform.

    >>> spmd.process_indices()
    [0]
    """
    del backend
    return list(range(process_count()))


def print_environment_info(return_string: bool = False) -> str | None:
    """Print what a report of a problem needs: versions, the system, the devices.

    With `return_string` the text is returned and not printed.

    >>> "numpy" in spmd.print_environment_info(return_string=True)
    True
    """
    from_modules = (f"{name} {module.__version__}" for name, module in _modules())
    lines = [
        f"python {platform.python_version()}, {platform.platform()}",
        *from_modules,
        f"devices: {[str(d) for d in devices()]} in {process_count()} processes",
    ]
    text = "\n".join(lines)
    if return_string:
        return text
    print(text)
    return None


def _modules() -> list[tuple[str, Any]]:
    """The libraries in use that tell their version."""
    names = ("spmd", "llvmlite", "ml_dtypes", "mpi4py")
    loaded = [(n, sys.modules[n]) for n in names if hasattr(sys.modules.get(n), "__version__")]
    return [*loaded, ("numpy", np)]
