"""The meanings of products, packings and contractions in NumPy: the oracles of their renderers."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.compile.kernel.dtypes import DTYPES
from spmd.compile.kernel.matmul import Operand, Product, check_product
from spmd.compile.kernel.packing import Packing
from spmd.compile.kernel.window_contraction import Contraction
from tests.compile.kernel.interpret import interpret

Array = np.ndarray[Any, Any]


def interpret_product(p: Product, a: Array, b: Array, *rest: Array) -> None:
    """Run a product on flat arrays: A and B from their elements [0, 0], then the epilogue's.

    The order in which a backend sums is its own, as long as it depends on nothing but the product.
    """
    check_product(p)
    dtype = DTYPES[p.carried].numpy
    left = view(a, p.a, (*p.batch, p.m, p.k)).astype(dtype)
    right = view(b, p.b, (*p.batch, p.k, p.n)).astype(dtype)
    with np.errstate(all="ignore"):
        c = np.matmul(left, right)
    interpret(p.epilogue, [np.ascontiguousarray(c).reshape(-1), *rest])


def view(array: Array, operand: Operand, shape: tuple[int, ...]) -> Array:
    """An operand of a shape (*batch, rows, columns), where its elements [0, 0] come first."""
    strides = (*operand.batch, operand.row, operand.column)
    if operand.panel:
        *outer, columns = shape
        shape = (*outer, -(-columns // operand.panel), operand.panel)
        strides = (*strides[:-1], operand.column * operand.panel, 1)
        panels = _strided(array, shape, strides)
        return panels.reshape(*outer, shape[-2] * shape[-1])[..., :columns]
    return _strided(array, shape, strides)


def _strided(array: Array, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    nbytes = tuple(stride * array.itemsize for stride in strides)
    return np.lib.stride_tricks.as_strided(array, shape, nbytes, writeable=False)


def interpret_packing(p: Packing, source: Array, target: Array) -> None:
    """Pack a flat array, from its element [0, 0], into a flat one."""
    shape = (*p.batch, p.panels, p.k, p.panel)
    columns = view(source, p.source, (*p.batch, p.k, p.n)).astype(DTYPES[p.carried].numpy)
    whole = np.zeros((*p.batch, p.k, p.panels * p.panel), columns.dtype)
    whole[..., : p.n] = columns
    panels = whole.reshape(*p.batch, p.k, p.panels, p.panel)
    target.reshape(shape)[...] = np.swapaxes(panels, -2, -3)


def interpret_contraction(given: Contraction, a: Any, b: Any, out: Any, *rest: Any) -> None:
    """Run a contraction on flat NumPy arrays that begin at the elements at index zero."""
    rows, depth = given.rows.offsets(), given.depth.offsets()
    columns = np.arange(given.columns)
    count, a_step, b_step, out_step = given.batch
    for member in range(count):
        left = a[member * a_step + rows[:, :1] + depth[:, 0]]
        right = b[member * b_step + depth[:, 1:] + columns]
        out[member * out_step + rows[:, 1:] + columns] = left @ right
    if given.epilogue is not None:
        interpret(given.epilogue, [out, *rest])
