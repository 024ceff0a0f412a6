"""ragged_all_to_all: every device sends slices of any length to every other.

Sizes are data, and a collective's are not: all operands are gathered, and every device picks what
is sent to it. That costs n times the traffic of the best exchange, and no size is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base.errors import ShapeError
from spmd.collectives.all_gather import all_gather
from spmd.collectives.all_to_all import all_to_all
from spmd.collectives.axis import axis_index
from spmd.collectives.groups import group_size, names_of, normal_groups
from spmd.core.aval import typeof
from spmd.core.structural import broadcast_in_dim, reshape
from spmd.lax.arithmetic import add, mul, sub
from spmd.lax.array import iota
from spmd.lax.convert import convert_element_type
from spmd.lax.dynamic import dynamic_index_in_dim
from spmd.lax.families import fail
from spmd.lax.gather import gather
from spmd.lax.logic import bitwise_and, ge, lt, select
from spmd.lax.slicing import index_in_dim
from spmd.lax.windows import GatherDimensionNumbers

if TYPE_CHECKING:
    from spmd.sharding.array import Array

_INDEX = np.dtype(np.int32)


def ragged_all_to_all(
    operand: Any,
    output: Any,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    *,
    axis_name: Any,
    axis_index_groups: Any = None,
) -> Array:
    """Send slices of rows of any length to every device, and put what arrives into `output`.

    Per device: `operand` (n, ...) and `output` (m, ...) of one dtype; the four vectors of integers
    have one length, a multiple of the size of the axis, and as many consecutive entries for each
    device. Entry i sends the `send_sizes[i]` rows from `input_offsets[i]` on; they arrive at row
    `output_offsets[i]` **of the receiver**, whose `recv_sizes` say how many come. Rows without a
    sender stay those of `output`, whose shape is the result's. `axis_name` and
    `axis_index_groups` are those of `psum`.

    Raises `ShapeError` where lengths do not fit, `AxisError` if the axis is not in scope, and
    `ArgumentError` if the groups do not divide the axis into parts of equal size.

    >>> def first_rows(x, out):
    ...     me = lax.axis_index("i")
    ...     zeros, ones = snp.zeros(2, int), snp.ones(2, int)
    ...     places = snp.full(2, me)
    ...     return lax.ragged_all_to_all(x, out, zeros, ones, places, ones, axis_name="i")
    >>> x = np.array([[1, 2], [3, 4]])
    >>> spmd.vmap(first_rows, axis_name="i")(x, np.zeros((2, 2), int))
    Array([[1, 3],
           [1, 3]], dtype=int32)
    """
    axes = names_of(axis_name)
    size = group_size(axes, normal_groups("ragged_all_to_all", axes, axis_index_groups))
    how = {"axis_index_groups": axis_index_groups}
    vectors = (input_offsets, send_sizes, output_offsets, recv_sizes)
    slices = _check(operand, output, vectors, size) // size
    rows, out_rows = typeof(operand).shape[0], typeof(output).shape[0]
    data = all_gather(operand, axis_name, **how)
    begins = all_gather(convert_element_type(input_offsets, _INDEX), axis_name, **how)
    places = convert_element_type(output_offsets, _INDEX)
    places = all_to_all(places, axis_name, 0, 0, tiled=True, **how)
    counts = convert_element_type(recv_sizes, _INDEX)
    here = axis_index(axis_name)
    if axis_index_groups is not None:
        here = _position_in_group(here, axis_index_groups)

    row = iota(_INDEX, out_rows)
    # For each row of the output, its row in all operands, one after the other.
    source = broadcast_in_dim(np.int32(-1), (out_rows,), ())
    for k in range(slices * size):
        sender, number = divmod(k, slices)
        place, count = (index_in_dim(x, k, 0, keepdims=False) for x in (places, counts))
        entry = add(mul(here, np.int32(slices)), np.int32(number))
        begin = dynamic_index_in_dim(
            index_in_dim(begins, sender, 0, keepdims=False), entry, 0, keepdims=False
        )
        first, last, shift = (
            broadcast_in_dim(x, (out_rows,), ())
            for x in (place, add(place, count), add(sub(begin, place), np.int32(sender * rows)))
        )
        source = select(bitwise_and(ge(row, first), lt(row, last)), add(row, shift), source)
    flat = reshape(data, (size * rows, *typeof(operand).shape[1:]))
    found = _rows(flat, source)
    sent = ge(source, broadcast_in_dim(np.int32(0), (out_rows,), ()))
    return select(broadcast_in_dim(sent, typeof(output).shape, (0,)), found, output)


def _check(operand: Any, output: Any, vectors: tuple[Any, ...], size: int) -> int:
    """The length of the vectors."""
    a, b = typeof(operand), typeof(output)
    if a.ndim < 1 or b.ndim != a.ndim or a.shape[1:] != b.shape[1:] or a.dtype != b.dtype:
        fail(
            ShapeError,
            f"ragged_all_to_all: operand {a} and output {b} must agree in all but their first dim",
        )
    shapes = {typeof(v).shape for v in vectors}
    if len(shapes) != 1 or any(len(s) != 1 for s in shapes):
        fail(
            ShapeError,
            "ragged_all_to_all: offsets and sizes must be vectors of one length, got "
            f"{[typeof(v).shape for v in vectors]}",
        )
    (count,) = shapes.pop()
    if count % size:
        fail(
            ShapeError,
            f"ragged_all_to_all: {count} slices cannot be divided among {size} devices",
        )
    return count


def _position_in_group(index: Any, groups: Any) -> Any:
    """The position of a device in its group."""
    table = np.zeros(sum(len(g) for g in groups), np.int32)
    for group in groups:
        for k, member in enumerate(group):
            table[member] = k
    return dynamic_index_in_dim(table, index, 0, keepdims=False)


def _rows(x: Any, index: Any) -> Any:
    """`x[index]` along the first dim."""
    rest = typeof(x).shape[1:]
    numbers = GatherDimensionNumbers(
        offset_dims=tuple(range(1, 1 + len(rest))),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
    )
    starts = reshape(index, (*typeof(index).shape, 1))
    return gather(x, starts, numbers, (1, *rest), mode="clip")
