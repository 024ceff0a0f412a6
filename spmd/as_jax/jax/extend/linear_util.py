"""`jax.extend.linear_util`: functions wrapped in transformations of their arguments and results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class StoreException(Exception):
    """A value that was not stored, or was stored twice."""


class Store:
    """A place for the auxiliary result of one call."""

    def __init__(self) -> None:
        self._values: list[Any] = []

    def store(self, value: Any) -> None:
        """Keep a value."""
        if self._values:
            raise StoreException("Store occupied")
        self._values.append(value)

    def reset(self) -> None:
        """Forget the value."""
        self._values.clear()

    @property
    def val(self) -> Any:
        """The value; raises `StoreException` if there is none."""
        if not self._values:
            raise StoreException("Store empty")
        return self._values[0]

    def __call__(self) -> Any:
        return self.val


class WrappedFun:
    """A function to be called with `call_wrapped`."""

    def __init__(
        self, f: Callable[..., Any], debug_info: Any = None, stores: tuple[Store, ...] = ()
    ):
        self.f_transformed = f
        self.debug_info = debug_info
        self.stores = stores

    @property
    def __name__(self) -> str:
        return getattr(self.f_transformed, "__name__", "<wrapped function>")

    def wrap(self, f: Callable[..., Any], store: Store | None = None) -> WrappedFun:
        """The same with another function around it."""
        stores = self.stores if store is None else (store, *self.stores)
        return WrappedFun(f, self.debug_info, stores)

    def call_wrapped(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with all that is around it."""
        return self.f_transformed(*args, **kwargs)

    def with_unknown_names(self) -> WrappedFun:
        """The same function: names of arguments are not kept here."""
        return self


def wrap_init(f: Callable[..., Any], params: Any = None, *, debug_info: Any = None) -> WrappedFun:
    """A function before any transformation; `params` are keyword arguments for it."""
    return WrappedFun(functools.partial(f, **params) if params else f, debug_info)


def transformation2(gen: Callable[..., Any]) -> Callable[..., WrappedFun]:
    """A transformation from a function `gen(f, *its_own_args, *args, **kwargs)`."""

    def transform(fun: WrappedFun, *gen_args: Any) -> WrappedFun:
        return fun.wrap(functools.partial(gen, fun.f_transformed, *gen_args))

    return transform


def transformation_with_aux2(gen: Callable[..., Any]) -> Callable[..., Any]:
    """As `transformation2`; `gen(f, store, ...)` stores a value that the second result gives."""

    def transform(fun: WrappedFun, *gen_args: Any) -> tuple[WrappedFun, Store]:
        store = Store()
        return fun.wrap(functools.partial(gen, fun.f_transformed, store, *gen_args), store), store

    return transform


def _around(gen: Callable[..., Any], f: Any, gen_args: Any, args: Any, kwargs: Any) -> Any:
    """Run a generator around a call: it yields arguments, gets results, yields what it makes."""
    steps = gen(*gen_args, *args, **kwargs)
    inner_args, inner_kwargs = next(steps)
    return steps.send(f(*inner_args, **inner_kwargs))


def transformation(gen: Callable[..., Any]) -> Callable[..., WrappedFun]:
    """A transformation from a generator that yields arguments and then results."""
    return transformation2(
        lambda f, *rest, **kwargs: _around(gen, f, (), rest, kwargs)  # gen's own arguments first
    )


def transformation_with_aux(gen: Callable[..., Any]) -> Callable[..., Any]:
    """As `transformation`; the generator yields results and a value for the second result."""

    def call(f: Any, store: Store, *rest: Any, **kwargs: Any) -> Any:
        out, aux = _around(gen, f, (), rest, kwargs)
        store.store(aux)
        return out

    return transformation_with_aux2(call)


def merge_linear_aux(first: Store, second: Store) -> tuple[bool, Any]:
    """Which of two stores was filled, and with what."""
    try:
        return True, first()
    except StoreException:
        return False, second()


def cache(call: Callable[..., Any]) -> Callable[..., Any]:
    """Remember the results of `call(fun, *args)` by function and arguments."""
    return functools.lru_cache(maxsize=None)(call)
