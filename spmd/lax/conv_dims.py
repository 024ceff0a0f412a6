"""The corresponding dims of a convolution, and the reach of its windows.

The one idea: a convolution slides a *window* (the rhs, its taps `rhs_dilation` apart) in steps of
`window_strides` over the lhs, between whose elements `lhs_dilation - 1` zeros lie and which is
padded (or, with negative padding, cut). Along one spatial dim:

    out[o] = sum over k of  padded[o * stride + k * rhs_dilation] * rhs[k]

`Windows` holds these numbers for all spatial dims. Reduction windows use the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from spmd.base.errors import ArgumentError, OptionError, ShapeError
from spmd.base.record import record
from spmd.lax.families import fail

Pads: TypeAlias = tuple[tuple[int, int], ...]


class ConvDimensionNumbers(NamedTuple):
    """The dims of lhs, rhs and result of a convolution, each in one canonical order.

    * `lhs_spec`: the batch dim, the feature dim, the spatial dims of the lhs.
    * `rhs_spec`: the output feature dim, the input feature dim, the spatial dims of the rhs.
    * `out_spec`: the batch dim, the feature dim, the spatial dims of the result.
    """

    lhs_spec: tuple[int, ...]
    rhs_spec: tuple[int, ...]
    out_spec: tuple[int, ...]


ConvGeneralDilatedDimensionNumbers: TypeAlias = tuple[str, str, str] | ConvDimensionNumbers | None

# ---- dimension numbers -------------------------------------------------------------------------


def conv_dimension_numbers(
    lhs_shape: Sequence[int], rhs_shape: Sequence[int], dimension_numbers: Any
) -> ConvDimensionNumbers:
    """Parse strings like `("NHWC", "HWIO", "NHWC")` into `ConvDimensionNumbers`, tuples of ints.

    `lhs_shape` and `rhs_shape` give the number of dims. As `dimension_numbers`, None means batch
    (output features for the rhs), features, then the spatial dims. Raises `ShapeError` if the
    operands have different numbers of dims, and `ArgumentError` for malformed strings.

    >>> lax.conv_dimension_numbers((8, 28, 28, 1), (3, 3, 1, 32), ("NHWC", "HWIO", "NHWC"))
    ConvDimensionNumbers(lhs_spec=(0, 3, 1, 2), rhs_spec=(3, 2, 0, 1), out_spec=(0, 3, 1, 2))
    """
    ndim = len(lhs_shape)
    if ndim != len(rhs_shape):
        fail(
            ShapeError,
            "convolution: lhs and rhs need the same number of dims, got shapes "
            f"{tuple(lhs_shape)} and {tuple(rhs_shape)}",
        )
    if ndim < 2:
        fail(
            ShapeError,
            "convolution: lhs and rhs need a batch and a feature dim, got shapes "
            f"{tuple(lhs_shape)} and {tuple(rhs_shape)}",
        )
    if dimension_numbers is None:
        order = tuple(range(ndim))
        return ConvDimensionNumbers(order, order, order)
    if isinstance(dimension_numbers, ConvDimensionNumbers):
        numbers = ConvDimensionNumbers(*(tuple(int(d) for d in f) for f in dimension_numbers))
        if any(sorted(spec) != list(range(ndim)) for spec in numbers):
            fail(
                ArgumentError,
                f"convolution: each field of dimension_numbers={numbers} must use each of the "
                f"{ndim} dims once",
            )
        return numbers
    if not isinstance(dimension_numbers, (tuple, list)) or len(dimension_numbers) != 3:
        _bad_numbers(dimension_numbers, "it is not three strings")
    for spec, letters in zip(dimension_numbers, ("NC", "OI", "NC"), strict=True):
        if not isinstance(spec, str):
            _bad_numbers(dimension_numbers, f"{spec!r} is not a string")
        if len(spec) != ndim:
            _bad_numbers(dimension_numbers, f"{spec!r} names {len(spec)} dims of {ndim}")
        if len(set(spec)) != ndim or not set(letters) <= set(spec):
            one, other = letters
            _bad_numbers(
                dimension_numbers,
                f"{spec!r} must contain {one!r} and {other!r}, and no letter twice",
            )
    return ConvDimensionNumbers(*conv_general_permutations(dimension_numbers))


def _bad_numbers(given: Any, why: str) -> None:
    fail(
        ArgumentError,
        f"convolution: dimension_numbers={given!r} must be three strings such as "
        f"('NHWC', 'HWIO', 'NHWC'), None or a ConvDimensionNumbers, but {why}",
    )


def conv_general_permutations(dimension_numbers: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the three permutations that bring dims named by strings to canonical order.

    `dimension_numbers` are three strings; a permutation is a tuple of ints. The spatial dims of all
    three are in the order in which the rhs names them. Raises `ArgumentError` if the strings name
    other spatial dims.

    >>> lax.conv_general_permutations(("NHWC", "HWIO", "NHWC"))
    ((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))
    """
    lhs, rhs, out = dimension_numbers
    spatial = [letter for letter in rhs if letter not in "OI"]
    for spec in (lhs, out):
        if set(spec) - set("NC") != set(spatial):
            _bad_numbers(tuple(dimension_numbers), f"{spec!r} and {rhs!r} name other spatial dims")
    pairs = ((lhs, "NC"), (rhs, "OI"), (out, "NC"))
    return tuple(tuple(spec.index(c) for c in (*letters, *spatial)) for spec, letters in pairs)


def swapped(spec: Sequence[int]) -> tuple[int, ...]:
    """A spec with its first two dims exchanged: batch and features, or both kinds of features."""
    return (spec[1], spec[0], *spec[2:])


# ---- sizes -------------------------------------------------------------------------------------


def dilated(size: int, dilation: int) -> int:
    """The size of a dim with `dilation - 1` elements put between its elements."""
    return 0 if size == 0 else 1 + dilation * (size - 1)


def padtype_to_pads(
    in_shape: Sequence[int],
    window_shape: Sequence[int],
    window_strides: Sequence[int],
    padding: Any,
) -> list[tuple[int, int]]:
    """Return the (low, high) padding of each dim that "SAME", "SAME_LOWER" or "VALID" means.

    `in_shape`, `window_shape` and `window_strides` hold one int for each dim. With `padding="SAME"`
    the result has a window for every `stride` elements, `ceil(size / stride)`; of an odd amount of
    padding the larger half goes to the end, with "SAME_LOWER" to the start. Raises `ArgumentError`
    for another name.

    >>> lax.padtype_to_pads((28, 28), (3, 2), (1, 2), "SAME")
    [(1, 1), (0, 0)]
    """
    name = padding.upper() if isinstance(padding, str) else getattr(padding, "name", padding)
    if name == "VALID":
        return [(0, 0)] * len(in_shape)
    if name not in ("SAME", "SAME_LOWER"):
        fail(
            OptionError,
            f"padding={padding!r} must be 'SAME', 'SAME_LOWER', 'VALID' or a (low, high) pair of "
            "integers for each dim",
        )
    pads = []
    for size, window, stride in zip(in_shape, window_shape, window_strides, strict=True):
        size, window, stride = int(size), int(window), int(stride)
        total = max((-(-size // stride) - 1) * stride + window - size, 0)
        small, large = total // 2, total - total // 2
        pads.append((small, large) if name == "SAME" else (large, small))
    return pads


@record
class Windows:
    """Windows that slide over an array: one number (or pair) for each of its dims."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    padding: Pads
    base_dilation: tuple[int, ...]
    dilation: tuple[int, ...]

    def spans(self) -> tuple[int, ...]:
        """The number of elements a window covers along each dim, gaps included."""
        return tuple(dilated(k, d) for k, d in zip(self.sizes, self.dilation, strict=True))

    def padded(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of an array of `shape`, dilated and padded."""
        sizes = zip(shape, self.base_dilation, self.padding, strict=True)
        return tuple(dilated(n, d) + low + high for n, d, (low, high) in sizes)

    def counts(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The number of windows that fit along each dim of an array of `shape`."""
        found = zip(self.padded(shape), self.spans(), self.strides, strict=True)
        return tuple(
            0 if whole < span or span == 0 else (whole - span) // stride + 1
            for whole, span, stride in found
        )

    def config(self) -> tuple[tuple[int, int, int], ...]:
        """Padding and base dilation, as `pad` takes them."""
        pairs = zip(self.padding, self.base_dilation, strict=True)
        return tuple((low, high, d - 1) for (low, high), d in pairs)


def pads_of_operand_gradient(windows: Windows, shape: Sequence[int], counts: Sequence[int]) -> Pads:
    """The padding with which windows slide over the cotangent to give that of the operand.

    There the cotangent is dilated by the strides, and windows move in steps of the base dilation.
    """
    found = []
    for d, (low, _) in enumerate(windows.padding):
        span = dilated(windows.sizes[d], windows.dilation[d])
        before = span - low - 1
        whole = dilated(shape[d], windows.base_dilation[d])
        covered = dilated(counts[d], windows.strides[d])
        found.append((before, whole + span - 1 - covered - before))
    return tuple(found)


def pads_of_window_gradient(windows: Windows, shape: Sequence[int], counts: Sequence[int]) -> Pads:
    """The padding with which the cotangent slides over the operand to give that of the window."""
    found = []
    for d, (low, _) in enumerate(windows.padding):
        span = dilated(windows.sizes[d], windows.dilation[d])
        covered = dilated(counts[d], windows.strides[d])
        found.append((low, covered - dilated(shape[d], windows.base_dilation[d]) + span - low - 1))
    return tuple(found)


# ---- arguments ---------------------------------------------------------------------------------


def per_dim(name: str, argument: str, given: Any, ndim: int) -> tuple[int, ...]:
    """A tuple of one positive integer for each dim; None means ones."""
    if given is None:
        return (1,) * ndim
    try:
        found = tuple(x.__index__() for x in given)
    except (TypeError, AttributeError):
        found = ()
    if len(found) != ndim or any(x < 1 for x in found):
        fail(
            ArgumentError,
            f"{name}: {argument}={given!r} must be {ndim} positive integers, one for each "
            "dim that windows slide along",
        )
    return found


def pads_of(
    name: str, padding: Any, shape: Sequence[int], spans: Sequence[int], strides: Sequence[int]
) -> Pads:
    """The (low, high) pairs of an argument `padding`, a name or pairs."""
    if isinstance(padding, str) or hasattr(padding, "name"):
        return tuple(padtype_to_pads(shape, spans, strides, padding))
    try:
        pads = tuple((low.__index__(), high.__index__()) for low, high in padding)
    except (TypeError, ValueError, AttributeError):
        pads = None
    if pads is None or len(pads) != len(shape):
        fail(
            ArgumentError,
            f"{name}: padding={padding!r} must be 'SAME', 'SAME_LOWER', 'VALID' or a (low, high) "
            f"pair of integers for each of the {len(shape)} dims that windows slide along",
        )
    return pads
