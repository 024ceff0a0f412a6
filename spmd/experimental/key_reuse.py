"""Checks that random keys are used once: of arrays as they are used, and of functions, unrun.

`config.update("debug_key_reuse", True)`, or `with spmd.debug_key_reuse(True):`, looks at every use
of a typed key. `check_key_reuse` looks at a function without running it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmd.api.inspect import make_jaxpr
from spmd.api.settings import debug_key_reuse
from spmd.base.errors import KeyReuseError
from spmd.core.ir import ClosedJaxpr, Eqn, Jaxpr
from spmd.core.primitive import Primitive, all_primitives
from spmd.lax.keys.markers import (
    assert_consumed,
    assert_consumed_value_p,
    assert_unconsumed,
    consume,
    consume_p,
)
from spmd.lax.keys.reuse import (
    SIGNATURES,
    equation_signature,
    jaxpr_signature,
    unknown_signature,
)
from spmd.lax.keys.uses import Forward, KeyReuseSignature, Sink, Source

__all__ = [
    "Forward",
    "KeyReuseError",
    "KeyReuseSignature",
    "Sink",
    "Source",
    "assert_consumed",
    "assert_consumed_value_p",
    "assert_unconsumed",
    "check_key_reuse",
    "check_key_reuse_jaxpr",
    "consume",
    "consume_p",
    "function_type_signature",
    "jaxpr_type_signature",
    "key_reuse_signature_from_eqn",
    "key_reuse_signatures",
    "unknown_signature",
]

# The primitives that do the same to keys whatever their parameters are.
key_reuse_signatures: dict[Primitive, KeyReuseSignature] = {
    prim: SIGNATURES[prim.name] for prim in all_primitives() if prim.name in SIGNATURES
}


def jaxpr_type_signature(jaxpr: Jaxpr | ClosedJaxpr) -> KeyReuseSignature:
    """Find what a jaxpr does to typed keys among its inputs, constants and outputs.

    `jaxpr` is best traced under `debug_key_reuse`, as `function_type_signature` does. Raises a
    `KeyReuseError` if it uses a key twice.

    >>> with spmd.debug_key_reuse():
    ...     made = spmd.make_jaxpr(spmd.random.split)(spmd.random.key(0))
    >>> jaxpr_type_signature(made.jaxpr)
    KeyReuseSignature(Sink(0), Source(0))
    """
    return jaxpr_signature(jaxpr)[0]


def key_reuse_signature_from_eqn(eqn: Eqn) -> KeyReuseSignature:
    """Find what an equation `eqn` of a jaxpr does to typed keys.

    Raises a `KeyReuseError` if a jaxpr inside of it uses a key twice.

    >>> made = spmd.make_jaxpr(lambda k: k[None])(spmd.random.key(0))
    >>> key_reuse_signature_from_eqn(made.eqns[0])
    KeyReuseSignature(Forward(0, 0),)
    """
    return equation_signature(eqn, [False] * len(eqn.invars))[0]


def function_type_signature(fun: Callable[..., Any], *args: Any) -> KeyReuseSignature:
    """Find what `fun(*args)` does to typed keys, without computing anything.

    `args` are pytrees of arrays, whose leaves are counted. Raises a `KeyReuseError` if it uses a
    key twice.

    >>> function_type_signature(spmd.random.normal, spmd.random.key(0))
    KeyReuseSignature(Sink(0),)
    """
    with debug_key_reuse(True):
        return jaxpr_type_signature(make_jaxpr(fun)(*args))


def check_key_reuse_jaxpr(jaxpr: Jaxpr | ClosedJaxpr) -> None:
    """Raise a `KeyReuseError` if `jaxpr` uses a typed key twice.

    >>> check_key_reuse_jaxpr(spmd.make_jaxpr(spmd.random.split)(spmd.random.key(0)).jaxpr)
    """
    jaxpr_type_signature(jaxpr)


def check_key_reuse(fun: Callable[..., Any], /, *args: Any) -> None:
    """Raise a `KeyReuseError` if `fun(*args)` would use a typed key twice; nothing is computed.

    `args` are pytrees of arrays.

    >>> check_key_reuse(lambda k: spmd.random.bits(k) + spmd.random.bits(k), spmd.random.key(0))
    Traceback (most recent call last):
    ...
    spmd.errors.KeyReuseError: ...
    """
    function_type_signature(fun, *args)
