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


class EqualStore(Store):
    """A store that takes a value again if it is equal."""

    def store(self, value: Any) -> None:
        """Keep a value; raises `StoreException` if there is another one."""
        if self._values and self._values[0] != value:
            raise StoreException(f"Store occupied with not-equal value: {self._values[0]}, {value}")
        self._values = [value]


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


def transformation2(gen: Callable[..., Any], fun: Any = None, *gen_static_args: Any) -> Any:
    """Transform `fun` by a function `gen(f, *gen_static_args, *args, **kwargs)`.

    Without `fun` the result is the transformation, `transform(fun, *gen_static_args)`.
    """
    if fun is None:
        return functools.partial(transformation2, gen)
    return fun.wrap(functools.partial(gen, fun.f_transformed, *gen_static_args))


def transformation_with_aux2(
    gen: Callable[..., Any],
    fun: Any = None,
    *gen_static_args: Any,
    use_eq_store: bool = False,
    unk_names: bool = False,
) -> Any:
    """As `transformation2`; `gen(f, store, ...)` stores a value that the second result gives.

    With `use_eq_store` a value may be stored again, if it is equal. Names of arguments are not kept
    here, known or not.
    """
    if fun is None:
        return functools.partial(
            transformation_with_aux2, gen, use_eq_store=use_eq_store, unk_names=unk_names
        )
    store = EqualStore() if use_eq_store else Store()
    return fun.wrap(
        functools.partial(gen, fun.f_transformed, store, *gen_static_args), store
    ), store


def _around(gen: Callable[..., Any], f: Any, gen_args: Any, args: Any, kwargs: Any) -> Any:
    """Run a generator around a call: it yields arguments, gets results, yields what it makes."""
    steps = gen(*gen_args, *args, **kwargs)
    inner_args, inner_kwargs = next(steps)
    return steps.send(f(*inner_args, **inner_kwargs))


def transformation(gen: Callable[..., Any], fun: Any = None, *gen_static_args: Any) -> Any:
    """As `transformation2`, from a generator that yields arguments and then results."""

    def call(f: Any, *rest: Any, **kwargs: Any) -> Any:  # gen's own arguments come first
        return _around(gen, f, (), rest, kwargs)

    return transformation2(call, fun, *gen_static_args)


def transformation_with_aux(gen: Callable[..., Any], fun: Any = None, *gen_static_args: Any) -> Any:
    """As `transformation`; the generator yields results and a value for the second result."""

    def call(f: Any, store: Store, *rest: Any, **kwargs: Any) -> Any:
        out, aux = _around(gen, f, (), rest, kwargs)
        store.store(aux)
        return out

    return transformation_with_aux2(call, fun, *gen_static_args)


def merge_linear_aux(aux1: Store, aux2: Store) -> tuple[bool, Any]:
    """Which of two stores was filled, and with what."""
    try:
        return True, aux1()
    except StoreException:
        return False, aux2()


def cache(call: Callable[..., Any], *, explain: Any = None) -> Callable[..., Any]:
    """Remember the results of `call(fun, *args)` by function and arguments.

    `explain`, which JAX calls for each miss, is not called: `log_compiles` tells of misses.
    """
    return functools.lru_cache(maxsize=None)(call)
