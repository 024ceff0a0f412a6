"""The errors of a facade: for names that it lacks, and for names that can only be imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from spmd.as_jax import report
from spmd.base.errors import RefusedError


def missing(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a facade."""

    def find(name: str) -> NoReturn:
        if not name.startswith("__"):
            report.note("missing", f"{module}.{name}")
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}: `jax` is spmd here, which has "
            "nothing of this name (docs/libraries.md)"
        )

    return find


class refused:
    """A function that can be imported and passed around, and says why it can't be called."""

    def __init__(self, name: str, why: str):
        self.__name__ = name
        self._why = why

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        report.note("refused", self.__name__)
        raise RefusedError(f"{self.__name__}: {self._why}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return refused(f"{self.__name__}.{name}", self._why)


class _Refused(type):
    """The type of classes that annotations and `isinstance` may name, and that make no objects."""

    whole_name: str
    why: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return refused(cls.whole_name, cls.why)()

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return refused(f"{cls.whole_name}.{name}", cls.why)


def refusing(module: str, why: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module of which every name can be imported and none can be used."""

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return _Refused(
                name, (), {"__doc__": why, "whole_name": f"{module}.{name}", "why": why}
            )
        return refused(f"{module}.{name}", why)

    return find


_PALLAS = "spmd has no Pallas; write the function with jax.numpy and jax.lax, which spmd compiles"
_COLOCATED = "every process of spmd runs the program itself, and Python runs nowhere else"
_STORED = "spmd.checkpoints writes arrays over several devices to files"
_ORDER = "spmd's compiler orders operations itself, and takes no hints for XLA's"
_XLA = "there is no XLA here: spmd has a compiler and a runtime of its own"
_JAX2TF = "spmd has no TensorFlow; jax.export writes programs to files"

# Modules of which every name can be imported, with all that is below them, and why none can be
# used. Libraries import them beside what they need.
REFUSED = {
    "experimental.array_serialization": _STORED,
    "experimental.buffer_callback": "spmd hands no raw buffers to Python; use jax.pure_callback",
    "experimental.colocated_python": _COLOCATED,
    "experimental.control_deps": _ORDER,
    "experimental.fused": "spmd fuses operations by itself",
    "experimental.jax2tf": _JAX2TF,
    "experimental.mosaic": _PALLAS,
    "experimental.pallas": _PALLAS,
    "experimental.profiler": _XLA,
    "experimental.rnn": "spmd has no cuDNN; write the recurrence with jax.lax.scan",
    "experimental.serialize_executable": "spmd keeps compiled programs on the disk itself",
    "experimental.topologies": _XLA,
    "experimental.transfer": _STORED,
    "extend.ifrt_programs": "spmd has no IFRT; jax.export writes programs to files",
    "extend.lowering": "spmd does not write MLIR",
    "extend.mlir": "spmd does not write MLIR",
    "extend.pallas": _PALLAS,
    "extend.sharding": "spmd has no HLO; jax.NamedSharding says how arrays lie",
    "extend.xla": _XLA,
    "ffi": "spmd calls no foreign functions of XLA; spmd.extend makes primitives with CPU kernels",
}


def refusal(module: str) -> str | None:
    """The reason that a module of JAX has no usable names; None if it has, or is not known."""
    parts = module.removeprefix("jax.").split(".")
    names = (".".join(parts[:k]) for k in range(1, len(parts) + 1))
    return next((REFUSED[name] for name in names if name in REFUSED), None)
