"""All settings in one table: name, environment variable, default, one line of meaning.

`config.name` reads; `config.name = value` and `config.update(name, value)` write. JAX's names
(`jax_enable_x64`) mean the same settings, unknown names are errors. The environment is read once,
at import. `docs/env_vars.md` is generated from `SETTINGS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from spmd.base.absl_flags import define_flags, parse_flags
from spmd.base.amounts import bytes_of_text
from spmd.base.errors import ArgumentError, SettingError
from spmd.base.jax_options import OPTIONS
from spmd.base.record import record


def _bool(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes", "on")


def _optional_int(text: str) -> int | None:
    return int(text) if text.strip() else None


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return parse


# The generators of random numbers; spmd/random/generators.py makes them.
GENERATORS = (
    "threefry2x32",
    "threefry4x32",
    "philox2x32",
    "philox4x32",
    "rbg",
    "unsafe_rbg",
)


def _device(value: Any) -> Any:
    """A device, or the name of a platform."""
    known = value in _PLATFORMS if isinstance(value, str) else hasattr(value, "device_kind")
    if not known:
        raise ValueError(f"must be a device or one of {', '.join(_PLATFORMS)}")
    return value


_PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu")

# JAX's names of precisions. The CPU always computes with full precision, GPUs as in JAX.
_PRECISIONS = (
    *("default", "high", "highest", "bfloat16", "tensorfloat32", "float32"),
    *("ANY_F8_ANY_F8_F32", "ANY_F8_ANY_F8_F32_FAST_ACCUM", "ANY_F8_ANY_F8_ANY"),
    *("ANY_F8_ANY_F8_ANY_FAST_ACCUM", "F16_F16_F16", "F16_F16_F32", "BF16_BF16_BF16"),
    *("BF16_BF16_F32", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9"),
    *("TF32_TF32_F32", "TF32_TF32_F32_X3", "F32_F32_F32", "F64_F64_F64"),
)

_GUARD = _one_of("allow", "log", "disallow", "log_explicit", "disallow_explicit")


@record
class Setting:
    """One row of the table."""

    name: str
    env: str
    default: Any
    parse: Callable[[str], Any]
    help: str


SETTINGS = (
    Setting("num_cpu_devices", "SPMD_NUM_CPU_DEVICES", 1, int, "virtual CPU devices in a process"),
    Setting("enable_x64", "SPMD_ENABLE_X64", False, _bool, "keep 64-bit dtypes instead of 32-bit"),
    Setting("disable_jit", "SPMD_DISABLE_JIT", False, _bool, "run jitted code op by op"),
    Setting("platform", "SPMD_PLATFORM", "cpu", str, "default platform: cpu or cuda"),
    Setting("cuda_driver", "SPMD_CUDA_DRIVER", "cupy", str, "driver of GPUs: cupy or emulator"),
    Setting("num_cuda_devices", "SPMD_NUM_CUDA_DEVICES", 1, int, "GPUs that the emulator has"),
    Setting(
        "cuda_emulator",
        "SPMD_CUDA_EMULATOR",
        "checked",
        _one_of("checked", "plain"),
        "whether the emulator of GPUs checks what kernels access: checked or plain",
    ),
    Setting(
        "cuda_emulator_seed",
        "SPMD_CUDA_EMULATOR_SEED",
        0,
        int,
        "seed of what the emulator leaves to chance: the order of streams, approximate results",
    ),
    Setting(
        "cuda_graphs",
        "SPMD_CUDA_GRAPHS",
        True,
        _bool,
        "capture repeated calls on one GPU, and give them to it as one launch",
    ),
    Setting(
        "nccl",
        "SPMD_NCCL",
        "auto",
        _one_of("auto", "always", "never"),
        "GPUs of several ranks exchange by NCCL: auto (where all can), always, never",
    ),
    Setting(
        "debug",
        "SPMD_DEBUG",
        "",
        str,
        "1 compiles, 2 collectives, 3 jaxprs, 4 kernels, collectives: check their results",
    ),
    Setting("log_compiles", "SPMD_LOG_COMPILES", False, _bool, "print each compile and its cause"),
    Setting(
        "as_jax_report",
        "SPMD_AS_JAX_REPORT",
        False,
        _bool,
        "under spmd.as_jax, print at the end what of JAX was imported and missing, and for whom",
    ),
    Setting("check", "SPMD_CHECK", False, _bool, "check the IR after every pass"),
    Setting("check_leaks", "SPMD_CHECK_LEAKS", False, _bool, "find tracers that outlive a trace"),
    Setting("debug_nans", "SPMD_DEBUG_NANS", False, _bool, "raise where a NaN is first produced"),
    Setting("debug_infs", "SPMD_DEBUG_INFS", False, _bool, "raise where an inf is first produced"),
    Setting(
        "debug_key_reuse", "SPMD_DEBUG_KEY_REUSE", False, _bool, "raise where a key is used twice"
    ),
    Setting(
        "numpy_rank_promotion",
        "SPMD_NUMPY_RANK_PROMOTION",
        "allow",
        _one_of("allow", "warn", "raise"),
        "operands of different ranks: allow, warn or raise",
    ),
    Setting(
        "numpy_dtype_promotion",
        "SPMD_NUMPY_DTYPE_PROMOTION",
        "standard",
        _one_of("standard", "strict"),
        "operands of different dtypes: standard promotes them, strict raises",
    ),
    Setting(
        "cpu_enable_async_dispatch",
        "SPMD_CPU_ENABLE_ASYNC_DISPATCH",
        True,
        _bool,
        "calls of long programs return before these are done; results wait where they are needed",
    ),
    Setting("num_threads", "SPMD_NUM_THREADS", None, _optional_int, "compute threads a process"),
    Setting(
        "cache_dir",
        "SPMD_CACHE_DIR",
        os.path.join(os.path.expanduser(os.environ.get("XDG_CACHE_HOME", "~/.cache")), "spmd"),
        str,
        "folder of the compile cache; empty switches it off",
    ),
    Setting(
        "collective_timeout",
        "SPMD_COLLECTIVE_TIMEOUT",
        600.0,
        float,
        "seconds a collective waits for a rank before it raises",
    ),
    Setting(
        "trace",
        "SPMD_TRACE",
        "",
        str,
        "folder for a timeline of all ranks: what each did when, who waited for whom",
    ),
    Setting(
        "shared_memory",
        "SPMD_SHARED_MEMORY",
        True,
        _bool,
        "ranks of one host exchange data through shared memory instead of MPI messages",
    ),
    Setting(
        "direct_reads",
        "SPMD_DIRECT_READS",
        True,
        _bool,
        "ranks of one host read large arrays in each other's memory, where the system allows it",
    ),
    Setting(
        "overlap",
        "SPMD_OVERLAP",
        "auto",
        _one_of("auto", "always", "never"),
        "collectives between processes run while programs compute: auto (between hosts), always, "
        "never",
    ),
    Setting(
        "unasked_gathers",
        "SPMD_UNASKED_GATHERS",
        "allow",
        _one_of("allow", "warn", "raise"),
        "moves between devices that no sharding asks for, in programs over a mesh: allow, warn or "
        "raise",
    ),
    Setting(
        "unasked_gathers_from",
        "SPMD_UNASKED_GATHERS_FROM",
        2**20,
        bytes_of_text,
        "bytes that a device receives, as a number or as '8 MB', from which unasked_gathers tells",
    ),
    Setting(
        "traceback_filtering",
        "SPMD_TRACEBACK_FILTERING",
        "auto",
        _one_of("auto", "off", "tracebackhide", "remove_frames", "quiet_remove_frames"),
        "frames of spmd in tracebacks: quiet_remove_frames, remove_frames (the cause has all of "
        "them), tracebackhide (marked for IPython and pytest), off, or auto",
    ),
    Setting("no_tracing", "SPMD_NO_TRACING", False, _bool, "raise where a function is traced"),
    Setting(
        "default_device",
        "SPMD_DEFAULT_DEVICE",
        None,
        _device,
        "the device of arrays that have no own",
    ),
    Setting(
        "transfer_guard_host_to_device",
        "SPMD_TRANSFER_GUARD_HOST_TO_DEVICE",
        "allow",
        _GUARD,
        "values of the host as operands: allow, log or disallow; _explicit: device_put too",
    ),
    Setting(
        "transfer_guard_device_to_device",
        "SPMD_TRANSFER_GUARD_DEVICE_TO_DEVICE",
        "allow",
        _GUARD,
        "arguments of jit that lie elsewhere: allow, log or disallow; _explicit: device_put too",
    ),
    Setting(
        "transfer_guard_device_to_host",
        "SPMD_TRANSFER_GUARD_DEVICE_TO_HOST",
        "allow",
        _GUARD,
        "accepted for JAX's sake: the host reads the memory of CPU devices",
    ),
    Setting(
        "default_prng_impl",
        "SPMD_DEFAULT_PRNG_IMPL",
        "threefry2x32",
        _one_of(*GENERATORS),
        "the generator of random.key and random.PRNGKey",
    ),
    Setting(
        "threefry_partitionable",
        "SPMD_THREEFRY_PARTITIONABLE",
        True,
        _bool,
        "bits of threefry2x32 depend on their place alone; off gives those of JAX before 0.5",
    ),
    Setting(
        "random_seed_offset",
        "SPMD_RANDOM_SEED_OFFSET",
        0,
        int,
        "a number added to the seed of each new key",
    ),
    Setting(
        "enable_custom_prng",
        "SPMD_ENABLE_CUSTOM_PRNG",
        False,
        _bool,
        "random.PRNGKey makes typed keys, as random.key does",
    ),
    Setting(
        "high_dynamic_range_gumbel",
        "SPMD_HIGH_DYNAMIC_RANGE_GUMBEL",
        False,
        _bool,
        "random.gumbel and categorical draw from the far tail too",
    ),
    Setting(
        "legacy_prng_key",
        "SPMD_LEGACY_PRNG_KEY",
        "allow",
        _one_of("allow", "warn", "error"),
        "raw keys (random.PRNGKey) given to functions of random: allow, warn or error",
    ),
    Setting(
        "default_matmul_precision",
        "SPMD_MATMUL_PRECISION",
        None,
        _one_of(*_PRECISIONS),
        "precision in equations of products that say none; on CPUs all are of full precision",
    ),
)


# Settings that change how functions are traced, beside `enable_x64`: a program compiled for one
# value is not run under another.
TRACING_SETTINGS = (
    "disable_jit",
    "debug_key_reuse",
    "numpy_rank_promotion",
    "numpy_dtype_promotion",
    "unasked_gathers",
    "unasked_gathers_from",
    "legacy_prng_key",
    "default_prng_impl",
    "threefry_partitionable",
    "random_seed_offset",
    "enable_custom_prng",
    "high_dynamic_range_gumbel",
    "default_matmul_precision",
)

# Settings that the fast paths to compiled code do not check: a change discards these paths.
PROGRAM_SETTINGS = (
    "enable_x64",
    "disable_jit",
    "debug_nans",
    "debug_infs",
    *TRACING_SETTINGS,
    "num_cpu_devices",
    "platform",
    "cuda_graphs",
    "check",
    "trace",
    "cpu_enable_async_dispatch",
    "overlap",
    "default_device",
    "transfer_guard_host_to_device",
    "transfer_guard_device_to_device",
)


# JAX's names that differ from ours by more than the prefix.
JAX_NAMES = {
    "jax_check_tracer_leaks": "check_leaks",
    "jax_compilation_cache_dir": "cache_dir",
    "jax_enable_checks": "check",
    "jax_explain_cache_misses": "log_compiles",
    "jax_platform_name": "platform",
    "jax_platforms": "platform",
}


# The settings that `jax_transfer_guard` stands for.
TRANSFERS = (
    "transfer_guard_host_to_device",
    "transfer_guard_device_to_device",
    "transfer_guard_device_to_host",
)


class Config:
    """The values of all settings in this process."""

    def __init__(self, environ: Any = os.environ):
        listeners: dict[str, list[Callable[[Any], None]]] = {}
        self.__dict__["_listeners"] = listeners
        self.__dict__["_known"] = {s.name: s for s in SETTINGS}
        self.__dict__["_options"] = dict(OPTIONS)
        self.__dict__["_contexts"] = {}
        for s in SETTINGS:
            text = environ.get(s.env)
            try:
                value = s.default if text is None else s.parse(text)
            except ValueError as error:
                raise ArgumentError(f"environment variable {s.env}={text!r}: {error}") from None
            self.__dict__[s.name] = value
        self._note_tracing()

    def _note_tracing(self) -> None:
        """The values that traced programs depend on: part of the key they are kept under."""
        values = (self.enable_x64, *(getattr(self, name) for name in TRACING_SETTINGS))
        self.__dict__["tracing"] = (*values, *self._contexts.values())

    def set_context(self, context: Hashable, value: Hashable) -> None:
        """Note the value of a context of the user's that traced programs depend on."""
        self._contexts[context] = value
        self._note_tracing()
        self.notify_program_update()

    def _setting(self, name: str, use: str) -> Setting:
        """The setting of a name, ours or JAX's; an error that names the nearest if there is none.

        `use` is how the user asked for it, with `{}` for the name.
        """
        ours = JAX_NAMES.get(name) or name.removeprefix("jax_").removeprefix("spmd_")
        if ours in self._known:
            return self._known[ours]
        import difflib  # needed for a mistake only, and slow to import

        prefix = "jax_" if name.startswith("jax_") else ""
        names = [*(prefix + known for known in self._known), *(JAX_NAMES if prefix else ())]
        near = difflib.get_close_matches(name, names, n=1)
        advice = f"Did you mean {near[0]!r}? " if near else ""
        raise SettingError(
            f"{use.format(name)}: unknown setting {name!r}. {advice}Known: {', '.join(self._known)}"
        )

    def update(self, name: str, value: Any) -> None:
        """Set `name` to `value` from now on, in this process; None sets its default."""
        if name in self._options:
            self._options[name] = value
            return
        if name == "jax_transfer_guard":
            for part in TRANSFERS:
                self._set(self._known[part], value)
            return
        self._set(self._setting(name, "config.update"), value)

    def _set(self, setting: Setting, value: Any) -> None:
        name = setting.name
        if value is None:
            value = setting.default
        elif isinstance(value, str) or isinstance(setting.default, str) or setting.parse is _device:
            try:
                value = setting.parse(value)
            except ValueError as error:
                raise ArgumentError(f"config.update({name!r}, {value!r}): {error}") from None
        elif setting.parse is _bool:
            value = bool(value)
        self.__dict__[name] = value
        self._note_tracing()
        for listener in self._listeners.get(name, ()):
            listener(value)

    def read(self, name: str) -> Any:
        """The value of the setting `name`."""
        if name in self._options or name == "jax_transfer_guard":
            return getattr(self, name)
        return getattr(self, self._setting(name, "config.read").name)

    @property
    def x64_enabled(self) -> bool:
        """The setting `enable_x64`, by JAX's older name."""
        return self.enable_x64

    @property
    def values(self) -> dict[str, Any]:
        """The values of all settings by their names, ours and JAX's."""
        ours = {name: getattr(self, name) for name in self._known}
        theirs = {f"jax_{name}": value for name, value in ours.items()}
        other = {name: ours[mine] for name, mine in JAX_NAMES.items()}
        other["jax_transfer_guard"] = self.transfer_guard_host_to_device
        return ours | theirs | other | self._options

    def config_with_absl(self) -> None:
        """Define a flag of absl for each of JAX's settings; a flag that is given sets it."""
        define_flags(self)

    def parse_flags_with_absl(self) -> None:
        """Set what `--jax_...` of this process's arguments says, before absl parses the others."""
        parse_flags(self)

    def on_update(self, name: str, listener: Callable[[Any], None]) -> None:
        """Call `listener(value)` whenever the setting `name` is updated."""
        self._listeners.setdefault(name, []).append(listener)

    def on_program_update(self, listener: Callable[[Any], None]) -> None:
        """Call `listener(value)` whenever a setting is updated that compiled code depends on."""
        for name in PROGRAM_SETTINGS:
            self.on_update(name, listener)

    def notify_program_update(self) -> None:
        """Call the listeners of `on_program_update`, which drop their cached fast calls."""
        for listener in self._listeners.get(PROGRAM_SETTINGS[0], []):
            listener(None)

    @contextmanager
    def override(self, name: str, value: Any) -> Iterator[None]:
        """Set a value for the length of a `with` block."""
        setting = self._setting(name, "config.override")
        before = getattr(self, setting.name)
        self._set(setting, value)
        try:
            yield
        finally:
            self._set(setting, before)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._options or name == "jax_transfer_guard":
            self.update(name, value)
            return
        self._set(self._setting(name, "config.{} = ..."), value)

    def __delattr__(self, name: str) -> None:
        setting = self._setting(name, "del config.{}")
        raise SettingError(
            f"del config.{name}: a setting can't be deleted; "
            f"config.update({name!r}, None) sets its default, {setting.default!r}"
        )

    def __getattr__(self, name: str) -> Any:
        # The settings themselves are found before this is asked. Private names are those that
        # Python looks for while it copies or pickles.
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._options:
            return self._options[name]
        if name == "jax_transfer_guard":
            return self.transfer_guard_host_to_device
        return self.__dict__[self._setting(name, "config.{}").name]


config = Config()
