"""`jit` as users call it: a function, a decorator, or a decorator with options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, overload

from spmd.compile.dispatch.jit import JitFunction

P = ParamSpec("P")


class _NotGiven:
    """Stands for a function that comes later: `jit(static_argnums=0)` is a decorator."""

    def __repr__(self) -> str:
        return "NotGiven"


_NOT_GIVEN = _NotGiven()
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

if TYPE_CHECKING:
    from spmd.compile.dispatch.stages import Lowered, Traced

    class Jitted(Protocol[P, R_co]):
        """The type of a `JitFunction` for type checkers: the function, and the stages of a call."""

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

        def __get__(self, instance: Any, owner: Any = None) -> Any: ...

        def trace(self, *args: Any, **kwargs: Any) -> Traced: ...

        def lower(self, *args: Any, **kwargs: Any) -> Lowered: ...

        def eval_shape(self, *args: Any, **kwargs: Any) -> Any: ...

        def clear_cache(self) -> None: ...


@overload
def jit(
    fun: Callable[P, R],
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    device: Any = None,
    inline: bool = False,
    in_shardings: Any = None,
    out_shardings: Any = None,
    backend: str | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> Jitted[P, R]: ...


@overload
def jit(
    fun: _NotGiven = _NOT_GIVEN,
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    device: Any = None,
    inline: bool = False,
    in_shardings: Any = None,
    out_shardings: Any = None,
    backend: str | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...


def jit(
    fun: Callable[..., Any] | _NotGiven = _NOT_GIVEN,
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    device: Any = None,
    inline: bool = False,
    in_shardings: Any = None,
    out_shardings: Any = None,
    backend: str | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """Compile `fun`: trace it once for each signature of its arguments, and run machine code.

    A signature is the arguments' structure, shapes, dtypes and weak types, and the values of the
    static arguments (`static_argnums`, `static_argnames`), which must be hashable. The result takes
    the parameters of `fun` and returns what `fun` does. Donated arguments (`donate_argnums`,
    `donate_argnames`) may be overwritten by results of as many bytes on each device and cannot be
    used afterwards; those that no result can take stay, and a UserWarning names them. Results lie
    on `device` if it is given. With `inline`, a `jit` inside another leaves no call in its jaxpr.
    `backend` may be "cpu". `keep_unused`, and XLA's options in `compiler_options`, are accepted for
    JAX's sake, without effect. Without `fun` this is a decorator with options. Python side effects
    happen only while tracing.

    Arguments over a mesh (`device_put` with a `NamedSharding`) make a program of that mesh: the
    compiler splits the work and keeps results split. `in_shardings` and `out_shardings`, pytree
    prefixes of `NamedSharding`s, of `PartitionSpec`s over the mesh in scope, or of None, say how
    positional arguments and results are to be laid out; None leaves it to the argument, or to the
    compiler.

    Raises `ShardingError` if an argument is laid out otherwise than `in_shardings` says, or cannot
    be split so; `ArgumentError` if `fun` cannot be called, if an argument that is not static is no
    array, or if a static one is not hashable. A call with a donated array raises `DeletedError`; an
    `if` on a traced value raises `TracerBoolConversionError`.

    >>> spmd.jit(lambda x: x * 2 + 1)(3.0)
    Array(7., dtype=float32, weak_type=True)
    >>> power = spmd.jit(lambda x, n: x**n, static_argnums=1)
    >>> power(np.arange(3.0), 2)
    Array([0., 1., 4.], dtype=float32)
    """
    options = {
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "keep_unused": keep_unused,
        "device": device,
        "inline": inline,
        "in_shardings": in_shardings,
        "out_shardings": out_shardings,
        "backend": backend,
        "compiler_options": compiler_options,
    }
    if isinstance(fun, _NotGiven):
        return functools.partial(jit, **options)
    return JitFunction(fun, **options)
