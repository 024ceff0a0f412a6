"""The module `jax`: spmd's names, JAX's version, and what is below it when that is asked for."""

from __future__ import annotations

import functools as _functools
import warnings as _warnings
from collections.abc import Callable as _Callable
from collections.abc import Iterator as _Iterator
from collections.abc import Sequence as _Sequence
from contextlib import contextmanager as _contextmanager
from importlib import import_module as _import_module
from types import ModuleType as _ModuleType
from typing import Any as _Any

import spmd as _spmd
import spmd.compile.dispatch.jit as _jitted
from spmd.api.inspect import jaxpr_maker as _jaxpr_maker
from spmd.as_jax import environment as _environment
from spmd.as_jax.callbacks import follow_jax as _follow_jax
from spmd.as_jax.finder import API_LEVEL as _API_LEVEL
from spmd.as_jax.finder import below as _below
from spmd.as_jax.finder import installed as _installed
from spmd.base.jax_options import OPTIONS as _OPTIONS

_environment.read()
if _installed():  # not where this facade is imported beside JAX, by its own name
    _follow_jax()
    # Libraries look among the imported modules for those that JAX imports itself.
    for _name in ("tree_util", "tree", "numpy", "lax", "random", "dtypes", "errors", "sharding"):
        _import_module(f"jax.{_name}")
    # Libraries know a jitted function by the name of its class.
    _jitted.PjitFunction = _jitted.JitFunction  # type: ignore[attr-defined]
    _jitted.JitFunction.__qualname__ = "PjitFunction"

globals().update(
    {
        name: value
        for name, value in vars(_spmd).items()
        if not name.startswith("_") and not isinstance(value, _ModuleType)
    }
)


def make_jaxpr(
    fun: _Callable[..., _Any],
    static_argnums: int | _Sequence[int] = (),
    axis_env: _Sequence[tuple[_Any, int]] | None = None,
    return_shape: bool = False,
) -> _Callable[..., _Any]:
    """Make the function that returns the jaxpr of `fun`, as `spmd.make_jaxpr` does.

    All arrays that `fun` closes over are in `consts`, those without dims too: libraries take the
    jaxpr for a pytree, whose structure must not depend on whether a value is traced.
    """
    return _jaxpr_maker(fun, static_argnums, axis_env, return_shape, keeps_arrays=True)


def host_count(backend: _Any = None) -> int:
    """`jax.process_count` by its older name."""
    return _renamed("host_count", "process_count")


def host_id(backend: _Any = None) -> int:
    """`jax.process_index` by its older name."""
    return _renamed("host_id", "process_index")


def host_ids(backend: _Any = None) -> list[int]:
    """`jax.process_indices` by its older name."""
    return _renamed("host_ids", "process_indices")


def _renamed(old: str, new: str) -> _Any:
    _warnings.warn(f"jax.{old} has been renamed to jax.{new}", stacklevel=3)
    return getattr(_spmd, new)()


__version__ = _API_LEVEL
__version_info__ = tuple(int(part) for part in _API_LEVEL.split("."))
# Says which system this is; the real JAX has no such name.
__spmd__ = _spmd.__version__
_absent = _below("jax")


def __getattr__(name: str) -> _Any:
    """The names that `spmd` imports when first asked, and the modules below `jax`."""
    if not name.startswith("_") and name in _spmd.__dir__():
        value = getattr(_spmd, name)
        if not isinstance(value, _ModuleType):
            return value
    if f"jax_{name}" in _OPTIONS:  # a context of an option that has no effect here
        return _functools.partial(_override, f"jax_{name}")
    return _absent(name)


@_contextmanager
def _override(option: str, new_val: _Any = True) -> _Iterator[None]:
    """Set an option of JAX's for the length of a `with` block."""
    before = _spmd.config.read(option)
    _spmd.config.update(option, new_val)
    try:
        yield
    finally:
        _spmd.config.update(option, before)
