"""Primitives that say how keys are used, and compute nothing: `debug_key_reuse` reads them.

A sampler is many operations, some of which use its key twice and rightly so. Under
`debug_key_reuse` it begins with `random_draw`: the key that it was given is used up, and what is
made of the result is the sampler's own matter. A key that it hands out goes through
`random_clone`, whose result may be used once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.base.source import current_source
from spmd.core.ir import ClosedJaxpr, Jaxpr, Var
from spmd.core.primitive import Primitive, Refused
from spmd.lax.convert import copy
from spmd.lax.families import elementwise_dims
from spmd.lax.keys import consumption

_NO_JVP = Refused("keys are integers, which have no derivative")
_NO_TRANSPOSE = Refused("keys are not linear in anything")


def _expand(avals: Any, params: dict[str, Any]) -> ClosedJaxpr:
    var = Var(avals[0])
    return ClosedJaxpr(Jaxpr((), (var,), (), (var,)))


def _marker(name: str, eager: Any) -> Primitive:
    made = Primitive(
        name,
        abstract=lambda x, **params: x,
        impl=lambda xp, x, **params: xp.array(x),
        jvp=_NO_JVP,
        transpose=_NO_TRANSPOSE,
        batch=lambda axis, xs, at, **params: (made.bind(*xs, **params), at[0]),
        dims=elementwise_dims,
        expand=_expand,
        eager=eager,
    )
    return made


# ---- drawing -----------------------------------------------------------------------------------


def draw(key: Any, by: str, sinks: bool = True) -> Any:
    """The key for a function's own use; with `sinks`, nothing else may use the one given."""
    return random_draw_p.bind(key, by=by, sinks=sinks)


def _draw_eager(key: Any, *, by: str, sinks: bool) -> Any:
    if sinks:
        consumption.use(key, True, by)
    own = copy(key)
    consumption.leave_alone(own)
    return own


random_draw_p = _marker("random_draw", _draw_eager)


def clone(key: Any) -> Any:
    """The same key once more, which may be used once."""
    return random_clone_p.bind(key)


random_clone_p = _marker("random_clone", lambda key: consumption.unmarked(copy, key))


# ---- consuming, and looking --------------------------------------------------------------------


def consume(key: Any) -> Any:
    """Use a typed key up, and return it once more, as used as it is.

    The shape and dtype of `key` stay. Raises a `KeyReuseError` under `debug_key_reuse` if it was
    used before.

    >>> key = consume(spmd.random.key(0))
    >>> assert_consumed(key)
    """
    return consume_p.bind(key)


def _consume_eager(key: Any) -> Any:
    consumption.use(key, True, "consume")
    out = copy(key)
    consumption.mark(out, True, "consume", current_source())
    return out


consume_p = _marker("consume", _consume_eager)


def assert_consumed(key: Any, value: Any = True) -> None:
    """Assert that a typed key was used, for tests of programs.

    `value` is a bool, or an array of them, of the shape of `key`: which of the keys were. In a
    traced function, `check_key_reuse` compares them, and outside of one this function does. Raises
    an `AssertionError` if they are others.

    >>> key = consume(spmd.random.key(0))
    >>> assert_consumed(key)
    """
    mask = np.asarray(value, bool)
    expected = bool(mask) if not mask.shape else (mask.shape, tuple(map(bool, mask.flat)))
    assert_consumed_value_p.bind(key, value=expected)


def assert_unconsumed(key: Any) -> None:
    """Assert that a typed key was not used, for tests of programs.

    `key` has any shape and the dtype of typed keys. It is looked at as `assert_consumed` does.
    Raises an `AssertionError` if it was.

    >>> assert_unconsumed(spmd.random.key(0))
    """
    assert_consumed(key, False)


def check_consumed(found: Any, value: Any, source: Any) -> None:
    """Compare what `assert_consumed` was told with what there is."""
    expected = value if isinstance(value, bool) else np.array(value[1]).reshape(value[0])
    if np.all(np.equal(found, expected)):
        return
    if isinstance(value, bool):
        what = "to be consumed" if value else "not to be consumed"
        raise AssertionError(f"{source}: expected the key {what}")
    raise AssertionError(f"{source}: expected {expected}, got {found}")


def _assert_eager(key: Any, *, value: Any) -> Any:
    check_consumed(consumption.consumed(key), value, current_source())
    return key


assert_consumed_value_p = _marker("assert_consumed_value", _assert_eager)
