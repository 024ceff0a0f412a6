"""`debug.print`: values of a compiled program on standard output, in the order of the program."""

from __future__ import annotations

import logging
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spmd.base.errors import ArgumentError, FormatError
from spmd.base.record import record
from spmd.base.source import current_source
from spmd.lax.callback import debug_callback, here

_log = logging.getLogger("spmd.debug")

# Names in a format that the caller need not give.
PLACE_NAMES = ("device", "axes")


class _Checker(string.Formatter):
    """Finds out whether a format and its arguments fit, without formatting anything."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def format_field(self, value: Any, format_spec: str) -> str:
        return ""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return value

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            return super().get_value(key, args, kwargs)
        except (IndexError, KeyError):
            if key in PLACE_NAMES:
                return ""
            raise FormatError(
                f"{current_source()}: {self.name}: the format names {{{key}}}, but the call gives "
                f"{len(args)} positional arguments and the names {', '.join(kwargs) or 'none'}"
            ) from None

    def check_unused_args(
        self, used_args: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        unused = [str(k) for k in range(len(args)) if k not in used_args]
        unused += [name for name in kwargs if name not in used_args]
        if unused:
            raise ArgumentError(
                f"{current_source()}: {self.name}: the format does not use the arguments "
                f"{', '.join(unused)}. An f-string is formatted before the value is known: write "
                f'{self.name}("x = {{x}}", x=x), without f.'
            )


@record
class _Printer:
    """Formats and prints; equal for equal formats, so that equal programs are recognised."""

    fmt: str
    has_fields: bool
    options: tuple[tuple[str, Any], ...]
    record: tuple[str, int] | None = None  # a line of the log, from this file and line

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        place = here()
        known = {"device": place.device, "axes": str(place)} | kwargs
        with np.printoptions(**dict(self.options)):
            if self.has_fields:
                text = self.fmt.format(*args, **known)
            else:
                text = " ".join((self.fmt, *map(str, args)))
        if self.record is None:
            sys.stdout.write(text + "\n")
        else:
            file, line = self.record
            _log.handle(_log.makeRecord(_log.name, logging.INFO, file, line, text, (), None))

    @property
    def __name__(self) -> str:
        return f"debug.{'print' if self.record is None else 'log'}({self.fmt!r})"


def debug_print(
    fmt: str | None = None,
    *args: Any,
    ordered: bool = False,
    partitioned: bool = False,
    skip_format_check: bool = False,
    **kwargs: Any,
) -> Callable[..., None] | None:
    """Print values when a compiled program computes them: `print("x = {x}", x=x)`.

    The format is that of `str.format`. It works inside jit, vmap (a line for each example), scan,
    while_loop, cond, grad (the forward pass), pmap and shard_map (a line for each device, in mesh
    order). Lines keep the order of the program, `ordered` or not. A format may name `{device}`, the
    device a line is from, and `{axes}`, its index along each named axis ("i=2, j=0"), which the
    call need not give. **An f-string does not work**: it would format the traced value.

    Without `fmt`, a function that prints with these options: `print(ordered=True)("x = {x}", x=x)`.

    >>> import spmd, spmd.numpy as snp
    >>> @spmd.jit
    ... def f(x):
    ...     spmd.debug.print("x = {x}, twice that {:.2f}", 2 * x, x=x)
    ...     return x
    >>> _ = f(1.5)
    x = 1.5, twice that 3.00
    >>> g = lambda x: spmd.debug.print("{axes} on {device}: {}", x)
    >>> _ = spmd.pmap(g, axis_name="i")(snp.arange(2.0))
    i=0 on cpu:0: 0.0
    i=1 on cpu:1: 1.0
    """

    how = {"ordered": ordered, "partitioned": partitioned}
    return _emitter(fmt, args, kwargs, how, skip_format_check, logs=False)


def debug_log(
    fmt: str | None = None,
    *args: Any,
    ordered: bool = False,
    partitioned: bool = False,
    skip_format_check: bool = False,
    **kwargs: Any,
) -> Callable[..., None] | None:
    """Log values when a compiled program computes them: `debug.print` to the logger "spmd.debug".

    Records are of level INFO and name the file and line of the call. `logging` decides where they
    go: nowhere, until a program configures it (`logging.basicConfig(level="INFO")`).

    >>> import logging, spmd
    >>> seen, handler = [], logging.Handler()
    >>> handler.emit = lambda record: seen.append((record.levelname, record.getMessage()))
    >>> logger = logging.getLogger("spmd.debug")
    >>> logger.addHandler(handler)
    >>> logger.setLevel("INFO")
    >>> spmd.jit(lambda x: spmd.debug.log("x = {x}", x=x))(1.5)
    >>> seen
    [('INFO', 'x = 1.5')]
    >>> logger.removeHandler(handler)
    """
    how = {"ordered": ordered, "partitioned": partitioned}
    return _emitter(fmt, args, kwargs, how, skip_format_check, logs=True)


def _emitter(
    fmt: str | None, args: Any, kwargs: Any, how: Any, skip_format_check: bool, logs: bool
) -> Callable[..., None] | None:
    """Show values now, or, without a format, give the function that will."""
    name = "debug.log" if logs else "debug.print"

    def emit(fmt: str, *args: Any, **kwargs: Any) -> None:
        if not isinstance(fmt, str):
            raise ArgumentError(
                f"{current_source()}: {name}: the format must be a string, got {fmt!r}; "
                f'write {name}("{{x}}", x=x)'
            )
        if not skip_format_check:
            _Checker(name).vformat(fmt, args, kwargs)
        has_fields = any(name is not None for _, name, _, _ in string.Formatter().parse(fmt))
        options = tuple((k, v) for k, v in np.get_printoptions().items() if k != "formatter")
        source = current_source()
        record = (source.file, source.line) if logs else None
        printer = _Printer(fmt, has_fields or not args, options, record)
        debug_callback(printer, *args, **how, **kwargs)

    if fmt is not None:
        return emit(fmt, *args, **kwargs)
    if args or kwargs:
        raise ArgumentError(
            f'{current_source()}: {name}: values need a format; write {name}("{{x}}", x=x)'
        )
    return emit
