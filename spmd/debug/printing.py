"""`debug.print`: values of a compiled program on standard output, in the order of the program."""

from __future__ import annotations

import string
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmd.core.errors import ArgumentError
from spmd.core.source import current_source
from spmd.lax.callback import debug_callback, here

# What a format may name that the caller need not give.
PLACE_NAMES = ("device", "axes")


class _Checker(string.Formatter):
    """Finds out whether a format and its arguments fit, without formatting anything."""

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
            raise ArgumentError(
                f"{current_source()}: debug.print: the format names {{{key}}}, but the call gives "
                f"{len(args)} positional arguments and the names {', '.join(kwargs) or 'none'}"
            ) from None

    def check_unused_args(
        self, used_args: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        unused = [str(k) for k in range(len(args)) if k not in used_args]
        unused += [name for name in kwargs if name not in used_args]
        if unused:
            raise ArgumentError(
                f"{current_source()}: debug.print: the format does not use the arguments "
                f"{', '.join(unused)}. An f-string is formatted before the value is known: write "
                'debug.print("x = {x}", x=x), without f.'
            )


@dataclass(frozen=True, slots=True)
class _Printer:
    """Formats and prints; equal for equal formats, so that equal programs are recognised."""

    fmt: str
    has_fields: bool
    options: tuple[tuple[str, Any], ...]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        place = here()
        known = {"device": place.device, "axes": str(place)} | kwargs
        with np.printoptions(**dict(self.options)):
            if self.has_fields:
                text = self.fmt.format(*args, **known)
            else:
                text = " ".join((self.fmt, *map(str, args)))
        sys.stdout.write(text + "\n")

    @property
    def __name__(self) -> str:
        return f"debug.print({self.fmt!r})"


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
    i=0 on CPU_0: 0.0
    i=1 on CPU_1: 1.0
    """

    def emit(fmt: str, *args: Any, **kwargs: Any) -> None:
        if not isinstance(fmt, str):
            raise ArgumentError(
                f"{current_source()}: debug.print: the format must be a string, got {fmt!r}; "
                'write debug.print("{x}", x=x)'
            )
        if not skip_format_check:
            _Checker().vformat(fmt, args, kwargs)
        has_fields = any(name is not None for _, name, _, _ in string.Formatter().parse(fmt))
        options = tuple((k, v) for k, v in np.get_printoptions().items() if k != "formatter")
        printer = _Printer(fmt, has_fields or not args, options)
        debug_callback(printer, *args, ordered=ordered, partitioned=partitioned, **kwargs)

    if fmt is not None:
        return emit(fmt, *args, **kwargs)
    if args or kwargs:
        raise ArgumentError(
            f"{current_source()}: debug.print: values need a format; write "
            'debug.print("{x}", x=x)'
        )
    return emit
