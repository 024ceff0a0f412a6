"""`check`: an assertion about traced values. `checkify` collects it; otherwise it raises."""

from __future__ import annotations

import string
from typing import Any

import spmd.numpy as snp
from spmd.base.dtypes import is_bool
from spmd.base.errors import ArgumentError
from spmd.base.source import current_source
from spmd.base.tree import tree_flatten
from spmd.checkify.errors import CheckError, Error, Site
from spmd.core.aval import is_arraylike, typeof
from spmd.core.primitive import Primitive, Refused
from spmd.core.structural import to_front
from spmd.core.trace import Tracer
from spmd.lax.convert import convert_element_type


def check(pred: Any, msg: str, *fmt_args: Any, debug: bool = False, **fmt_kwargs: Any) -> None:
    """Say that `pred`, a boolean scalar, must be true; `msg` is the format of the message if not.

    In a function rewritten by `checkify` a failure becomes part of the returned `Error`. Elsewhere
    it raises a `CheckError`, in eager code at once and in compiled code when the program gets there
    (`debug=True`: it does nothing). Format arguments are pytrees of arrays; the message shows their
    values.

    >>> import spmd.numpy as snp
    >>> def f(x):
    ...     check(x > 0, "{x} must be positive", x=x)
    ...     return snp.log(x)
    >>> error, out = spmd.jit(checkify(f))(-3.0)
    >>> error.get()
    '-3.0 must be positive (`check` failed)'
    """
    what = "debug_check" if debug else "check"
    if not is_arraylike(pred) or typeof(pred).shape or not is_bool(typeof(pred).dtype):
        raise ArgumentError(
            f"{current_source()}: {what}: the predicate must be a boolean scalar, got {pred!r}; "
            "combine several with snp.all"
        )
    leaves, tree = tree_flatten((fmt_args, fmt_kwargs))
    for x in leaves:
        if not is_arraylike(x):
            raise ArgumentError(
                f"{current_source()}: {what}: format arguments must be pytrees of arrays, got "
                f"{x!r} of type {type(x).__name__}; format it into the message before"
            )
    fields = [name for _, name, _, _ in string.Formatter().parse(msg) if name]
    missing = [f for f in fields if f.isidentifier() and f not in fmt_kwargs]
    if missing:
        raise ArgumentError(
            f"{current_source()}: {what}: the message names {', '.join(missing)}, which the call "
            "does not give"
        )
    payload = [_strong(x) for x in leaves]
    avals = tuple(typeof(x) for x in payload)
    site = Site("user", msg, current_source(), tree, avals)
    check_p.bind(pred, *payload, site=site, debug=debug)


def _strong(x: Any) -> Any:
    """A value without weak type, as loops carry it."""
    aval = typeof(x)
    return convert_element_type(x, aval.dtype) if aval.weak_type else x


def debug_check(pred: Any, msg: str, *fmt_args: Any, **fmt_kwargs: Any) -> None:
    """A `check` that does nothing unless the function is rewritten by `checkify`.

    >>> debug_check(False, "not noticed")
    """
    check(pred, msg, *fmt_args, debug=True, **fmt_kwargs)


def check_error(error: Error) -> None:
    """Raise what `error` holds; inside a function that is traced, check it there.

    >>> error, _ = checkify(lambda x: check(x > 0, "no"))(1.0)
    >>> check_error(error)
    """
    if not isinstance(error, Error):
        raise ArgumentError(
            f"{current_source()}: check_error: the argument must be an Error, the first result of "
            f"a checkified function, got {error!r}"
        )
    if not isinstance(error.code, Tracer):
        error.throw()
        return
    traced: Any = error.code
    code, payloads = snp.ravel(traced), error.payloads
    size, batched = typeof(code).size, bool(typeof(error.code).shape)
    for k, site in enumerate(error.sites):
        fine = code != k + 1
        values = payloads[k]
        if batched:
            at = snp.argmin(fine)
            flat = [
                snp.reshape(x, (size, *a.shape)) for x, a in zip(values, site.avals, strict=True)
            ]
            values = [x[at] for x in flat]
        check_p.bind(snp.all(fine), *values, site=site, debug=False)


# ---- the primitive -----------------------------------------------------------------------------


def _impl(xp: Any, pred: Any, *payload: Any, site: Site, debug: bool) -> list[Any]:
    if not (debug or pred):
        raise CheckError(f"{site.source}: {site.message(payload)}")
    return []


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    return check_p.bind(*primals, **params), []


def _batch(axis: Any, operands: Any, at: Any, **params: Any) -> Any:
    """All examples must pass; the payload is that of the first that fails."""
    pred, *payload = (
        x if d is None else to_front(x, d, axis.size) for x, d in zip(operands, at, strict=True)
    )
    if not axis.size:
        return [], []
    first: Any = 0
    if at[0] is not None:
        first, pred = snp.argmin(pred), snp.all(pred)
    values = [x if d is None else x[first] for x, d in zip(payload, at[1:], strict=True)]
    check_p.bind(pred, *values, **params)
    return [], []


check_p = Primitive(
    "check",
    abstract=lambda *_, **__: [],
    impl=_impl,
    jvp=_jvp,
    transpose=Refused("a check of a tangent works in forward mode (jvp) only"),
    batch=_batch,
    dims=Refused("a check has no results to partition"),
    multiple=True,
    effects=lambda params: frozenset(("check",)),
)
