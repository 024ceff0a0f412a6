"""Algebraic rules of `simplify`: when an equation is equal to something cheaper.

A rule takes (writer, eqn, operands) and returns the atom that the equation's one result is equal
to, or None. It holds for every value: signed zeros, infinities, NaNs and overflow included, so
`x + 0.0` stays (it turns -0.0 into 0.0) while `x - 0.0` and `x * 1.0` go. The exception are
products with bools (`_masked`).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.source import Source
from spmd.core.aval import ShapedArray
from spmd.core.ir import Atom, Eqn, Jaxpr, Literal, Var
from spmd.core.remat import optimization_barrier_p
from spmd.core.rewriting.equations import JaxprBuilder, Merging
from spmd.core.structural import broadcast_in_dim_p, permute_dims_p, reduce_sum_p, reshape_p
from spmd.lax.arithmetic import add_p, complex_p, imag_p, max_p, min_p, mul_p, real_p, sub_p
from spmd.lax.concatenate import concatenate_p
from spmd.lax.convert import convert_element_type_p
from spmd.lax.dot import DimensionNumbers
from spmd.lax.logic import and_p, or_p, select_n_p
from spmd.lax.slicing import slice_p

# The producers that rules about pairs of equations look for.
PRODUCERS = frozenset(
    "neg not conj convert_element_type permute_dims dot_general reshape broadcast_in_dim "
    "concatenate".split()
)

# How reductions of parts become one of the whole.
_JOINED = {
    "reduce_sum": add_p,
    "reduce_prod": mul_p,
    "reduce_max": max_p,
    "reduce_min": min_p,
    "reduce_and": and_p,
    "reduce_or": or_p,
}
# Parts of a concatenation that are reduced one by one.
_MOST_PARTS = 8

# Kinds of numbers within which a product may change the dtype.
_REAL_KINDS = (dtypes.is_float, dtypes.is_integer)

Rule = Callable[[JaxprBuilder, Eqn, Sequence[Atom]], Atom | None]


def same_type(a: ShapedArray, b: ShapedArray) -> bool:
    """Whether a value of one aval can take the place of the other in a compiled program."""
    return a.shape == b.shape and a.dtype == b.dtype and a.vma == b.vma


# ---- asking about operands ---------------------------------------------------------------------


def is_literal(atom: Atom, value: float) -> bool:
    """Whether an atom is a literal equal to `value`; the sign of a zero counts."""
    if type(atom) is not Literal or atom.aval.dtype.names or atom.aval.dtype.kind == "c":
        return False
    found = atom.val
    same_sign = found != 0 or np.signbit(np.float64(found)) == np.signbit(np.float64(value))
    return bool(found == value and same_sign)


class Producers(Merging):
    """A writer that knows which equation made a variable: rules about pairs of equations ask it."""

    def __init__(self) -> None:
        super().__init__()
        # The scalar of each variable that is a broadcast of one.
        self.scalars: dict[Atom, Atom] = {}
        # How often each concatenation is read, by others than slices; counted by `count_readers`.
        self.readers: Counter[Atom] = Counter()
        self._made: dict[Atom, Eqn] = {}

    def count_readers(self, jaxpr: Jaxpr) -> None:
        """Count the readers of concatenations: rules may take one with a single reader apart."""
        if concatenate_p.name not in jaxpr.primitives or jaxpr.primitives.isdisjoint(_JOINED):
            return
        made = {v for e in jaxpr.eqns if e.prim is concatenate_p for v in e.outvars}
        for eqn in jaxpr.eqns:
            if eqn.prim is not slice_p:
                self.readers.update(made.intersection(a for a in eqn.invars if type(a) is Var))
        self.readers.update(made.intersection(a for a in jaxpr.outvars if type(a) is Var))

    def note(self, eqn: Eqn) -> None:
        """Remember an equation that was written, if any rule may ask for it."""
        if eqn.prim.name in PRODUCERS:
            self._made[eqn.outvars[0]] = eqn
            if eqn.prim is broadcast_in_dim_p and not eqn.invars[0].aval.shape:
                self.scalars[eqn.outvars[0]] = eqn.invars[0]

    def of(self, atom: Atom, name: str) -> Eqn | None:
        """The equation that made `atom`, if it is one of primitive `name` (of `PRODUCERS`)."""
        found = self._made.get(atom)
        return found if found is not None and found.prim.name == name else None


# ---- identities --------------------------------------------------------------------------------


def _full(operand: Atom, eqn: Eqn) -> Atom | None:
    """`operand` as the result of `eqn`, if it has the result's type."""
    return operand if same_type(operand.aval, eqn.outvars[0].aval) else None


def _mul(writer: JaxprBuilder, eqn: Eqn, ins: Sequence[Atom], neutral: float = 1) -> Atom | None:
    for k in (0, 1):
        if is_literal(ins[k], neutral):
            return _full(ins[1 - k], eqn)
    return None


def _add(writer: JaxprBuilder, eqn: Eqn, ins: Sequence[Atom]) -> Atom | None:
    return _mul(writer, eqn, ins, -0.0 if dtypes.is_inexact(eqn.outvars[0].aval.dtype) else 0)


def _right(neutral: float) -> Rule:
    def rule(writer: JaxprBuilder, eqn: Eqn, ins: Sequence[Atom]) -> Atom | None:
        return _full(ins[0], eqn) if is_literal(ins[1], neutral) else None

    return rule


def _integer_pow(writer: JaxprBuilder, eqn: Eqn, ins: Sequence[Atom]) -> Atom | None:
    return _full(ins[0], eqn) if eqn.params["y"] == 1 else None


def _same_operands(writer: JaxprBuilder, eqn: Eqn, ins: Sequence[Atom]) -> Atom | None:
    return _full(ins[0], eqn) if ins[0] is ins[1] else None


def _select(writer: JaxprBuilder, eqn: Eqn, ins: Sequence[Atom]) -> Atom | None:
    which, *cases = ins
    if all(case is cases[0] for case in cases):
        return _full(cases[0], eqn)
    if isinstance(which, Literal):
        return _full(cases[min(max(int(which.val), 0), len(cases) - 1)], eqn)
    return None


def _identity(writer: JaxprBuilder, eqn: Eqn, ins: Sequence[Atom]) -> Atom | None:
    return _full(ins[0], eqn)


def _reduction(writer: JaxprBuilder, eqn: Eqn, ins: Sequence[Atom]) -> Atom | None:
    """A reduction over dims of size 1 only drops them."""
    aval, axes = ins[0].aval, eqn.params["axes"]
    if any(aval.shape[d] != 1 for d in axes):
        return None
    return reshaped(writer, ins[0], eqn.outvars[0].aval.shape, eqn)


def _reduction_rule(producers: Producers) -> Rule:
    def reduction(writer: JaxprBuilder, eqn: Eqn, ins: Sequence[Atom]) -> Atom | None:
        """Reduce the operands of a concatenation that nothing else reads, not their whole.

        A kernel over the whole asks each element in which part it lies.
        """
        found = _reduction(writer, eqn, ins)
        if found is not None:
            return found
        whole = producers.of(ins[0], "concatenate")
        if whole is None or producers.readers[ins[0]] != 1 or len(whole.invars) > _MOST_PARTS:
            return None
        dim, axes = whole.params["dimension"], eqn.params["axes"]
        parts = []
        for operand in whole.invars:
            # Padding of several dims is a concatenation of concatenations.
            part = reduction(writer, eqn.replace(invars=(operand,)), (operand,))
            if part is None:
                part = writer.emit(eqn.prim, [operand], eqn.params, eqn.source)
            parts.append(part)
        if dim not in axes:
            along = {"dimension": dim - sum(d < dim for d in axes)}
            return writer.emit(whole.prim, parts, along, eqn.source)
        join = _JOINED[eqn.prim.name]
        return functools.reduce(lambda a, b: writer.emit(join, [a, b], {}, eqn.source), parts)

    return reduction


# ---- pairs -------------------------------------------------------------------------------------


def reshaped(writer: JaxprBuilder, operand: Atom, shape: Any, eqn: Eqn) -> Atom:
    """`operand` with another shape, writing an equation only if it has another one now."""
    if operand.aval.shape == shape:
        return operand
    return writer.emit(reshape_p, [operand], {"new_sizes": tuple(shape)}, eqn.source)


def pair_rules(producers: Producers) -> dict[str, Rule]:
    """Rules that look at the equation that made an operand."""
    rules = {name: functools.partial(rule, producers) for name, rule in _PAIR_RULES.items()}
    return {**dict.fromkeys(_JOINED, _reduction_rule(producers)), **rules}


def _involution(
    producers: Producers, writer: JaxprBuilder, eqn: Eqn, ins: Sequence[Atom]
) -> Atom | None:
    inner = producers.of(ins[0], eqn.prim.name)
    return inner.invars[0] if inner is not None else None


def _uncast(producers: Producers, operand: Atom) -> Atom:
    """The narrower floats of which an operand of a product is a copy: it converts them too."""
    inner = producers.of(operand, "convert_element_type")
    if inner is None:
        return operand
    narrow, wide = inner.invars[0].aval.dtype, operand.aval.dtype
    floats = dtypes.is_float(narrow) and dtypes.is_float(wide) and not dtypes.is_small(narrow)
    return inner.invars[0] if floats and _is_widening(narrow, wide) else operand


def _widened_integers(producers: Producers, operand: Atom) -> Atom:
    """The narrower integers of which an operand is a copy."""
    inner = producers.of(operand, "convert_element_type")
    if inner is None or inner.invars[0].aval.dtype.kind not in "iu":
        return operand
    narrow = inner.invars[0]
    return narrow if _is_widening(narrow.aval.dtype, operand.aval.dtype) else operand


def _dot(producers: Producers, writer: JaxprBuilder, eqn: Eqn, ins: Sequence[Atom]) -> Atom | None:
    """Read operands where and as they lie: a product takes any strides, and narrower floats."""
    operands, moved = list(ins), eqn.params["dimension_numbers"]
    for side in range(2):
        operands[side] = widened = _uncast(producers, operands[side])
        inner = producers.of(widened, "permute_dims")
        found = None if inner is None else _unpermuted(inner, moved, side)
        if inner is not None and found is not None:
            operands[side], moved = _uncast(producers, inner.invars[0]), found
    other = _outer_product(writer, eqn, operands, moved)
    for rewritten in (_inner_products, _small_products, _complex_product):
        other = rewritten(writer, eqn, operands, moved) if other is None else other
    if other is None:
        narrow = [_widened_integers(producers, x) for x in operands]
        other = _integer_product(writer, eqn, narrow, moved)
    if other is not None:
        return other
    if operands == list(ins):
        return None
    params = eqn.params | {"dimension_numbers": moved}
    return writer.emit(eqn.prim, operands, params, eqn.source)


def _permute(
    producers: Producers, writer: JaxprBuilder, eqn: Eqn, ins: Sequence[Atom]
) -> Atom | None:
    perm = eqn.params["permutation"]
    product = producers.of(ins[0], "dot_general")
    if product is not None:
        return _swapped_product(writer, product, perm)
    inner = producers.of(ins[0], "permute_dims")
    operand = ins[0]
    if inner is not None:
        operand = inner.invars[0]
        perm = tuple(inner.params["permutation"][k] for k in perm)
    shape = operand.aval.shape
    long = [k for k in perm if shape[k] != 1]
    if perm == tuple(range(len(perm))):
        return operand
    if long == sorted(long):
        return reshaped(writer, operand, eqn.outvars[0].aval.shape, eqn)
    if inner is None:
        return None
    return writer.emit(permute_dims_p, [operand], {"permutation": perm}, eqn.source)


def _reshape(
    producers: Producers, writer: JaxprBuilder, eqn: Eqn, ins: Sequence[Atom]
) -> Atom | None:
    inner = producers.of(ins[0], "reshape")
    operand = ins[0] if inner is None else inner.invars[0]
    shape = eqn.outvars[0].aval.shape
    if inner is None and operand.aval.shape != shape:
        return None
    return reshaped(writer, operand, shape, eqn)


def _broadcast(
    producers: Producers, writer: JaxprBuilder, eqn: Eqn, ins: Sequence[Atom]
) -> Atom | None:
    operand, shape = ins[0], eqn.params["shape"]
    where = eqn.params["broadcast_dimensions"]
    inner = producers.of(operand, "broadcast_in_dim")
    if operand.aval.shape == shape and where == tuple(range(len(shape))):
        return operand
    if operand.aval.size == eqn.outvars[0].aval.size and operand.aval.size:
        return reshaped(writer, operand, shape, eqn)
    if inner is None:
        return None
    through = tuple(where[d] for d in inner.params["broadcast_dimensions"])
    params = {"shape": shape, "broadcast_dimensions": through}
    return writer.emit(broadcast_in_dim_p, [inner.invars[0]], params, eqn.source)


def _convert(
    producers: Producers, writer: JaxprBuilder, eqn: Eqn, ins: Sequence[Atom]
) -> Atom | None:
    operand, out = ins[0], eqn.outvars[0].aval
    if operand.aval.dtype == out.dtype:
        return operand
    inner = producers.of(operand, "convert_element_type")
    if inner is None or inner.invars[0].aval.dtype != out.dtype:
        return None
    return inner.invars[0] if _is_widening(out.dtype, operand.aval.dtype) else None


def _masked(
    producers: Producers, writer: JaxprBuilder, eqn: Eqn, ins: Sequence[Atom]
) -> Atom | None:
    """A product of floats and bools chooses between a float and 0, as XLA has it.

    Programs for JAX rely on that: infinities and NaNs do not pass where a mask is False.
    """
    found = _mul(writer, eqn, ins)
    aval = eqn.outvars[0].aval
    if found is not None or not dtypes.is_inexact(aval.dtype) or dtypes.is_small(aval.dtype):
        return found
    for k in (0, 1):
        inner = producers.of(ins[k], "convert_element_type")
        mask = None if inner is None else inner.invars[0]
        if mask is not None and dtypes.is_bool(mask.aval.dtype) and mask.aval.shape == aval.shape:
            zero = Literal(np.zeros((), aval.dtype)[()], ShapedArray((), aval.dtype))
            return writer.emit(select_n_p, [mask, zero, ins[1 - k]], {}, eqn.source)
    return None


_PAIR_RULES: dict[str, Callable[..., Atom | None]] = {
    **dict.fromkeys(("neg", "not", "conj"), _involution),
    "dot_general": _dot,
    "permute_dims": _permute,
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "convert_element_type": _convert,
    "mul": _masked,
}


def _unpermuted(permute: Eqn, numbers: DimensionNumbers, side: int) -> DimensionNumbers | None:
    """The numbers of a product that reads one side before its dims were permuted."""
    perm = permute.params["permutation"]
    free = [perm[d] for d in numbers.free(side, len(perm))]
    if free != sorted(free):
        return None
    contract, batch = list(numbers.contract), list(numbers.batch)
    contract[side] = tuple(perm[d] for d in contract[side])
    batch[side] = tuple(perm[d] for d in batch[side])
    return DimensionNumbers((contract[0], contract[1]), (batch[0], batch[1]))


def _outer_product(
    writer: JaxprBuilder, eqn: Eqn, ins: Sequence[Atom], numbers: DimensionNumbers
) -> Atom | None:
    """A product whose contracted dims have size 1 sums nothing: it is elementwise, and fuses."""
    out = eqn.outvars[0].aval
    if any(ins[0].aval.shape[d] != 1 for d in numbers.contract[0]):
        return None
    dtype = ins[0].aval.dtype
    if not any(is_kind(dtype) and is_kind(out.dtype) for is_kind in _REAL_KINDS):
        return None
    count, rows = len(numbers.batch[0]), len(numbers.free(0, ins[0].aval.ndim))
    factors = []
    for side, operand in enumerate(ins):
        first = count + side * rows
        free = numbers.free(side, operand.aval.ndim)
        order = (*numbers.batch[side], *free)
        if tuple(sorted(order)) != order:
            return None
        where = (*range(count), *range(first, first + len(free)))
        operand = _converted(writer, operand, out.dtype, eqn.source)
        operand = reshaped(writer, operand, tuple(operand.aval.shape[d] for d in order), eqn)
        if operand.aval.shape != out.shape:
            params = {"shape": out.shape, "broadcast_dimensions": where}
            operand = writer.emit(broadcast_in_dim_p, [operand], params, eqn.source)
        factors.append(operand)
    return writer.emit(mul_p, factors, {}, eqn.source)


# Inner products of at most so many numbers are a sum of products: 4096 of 64 take 14 us, a product
# 38 us, and with 16 of 65,536 the product is no slower.
_MOST_SUMMED = 4096
# Of many small products: the most rows or columns of a matrix, and the most terms of a sum. 4096 of
# 4 x 4 by 4 x 4 take 17 us as a sum, a product 115; of 8 x 8 by 8 x 8 70 and 180, of 12 x 12 209
# and 160. The columns of a row by a matrix fill the lanes.
_FEW, _FEW_TERMS, _MOST_COLUMNS = 8, 16, 128
# Sums along memory, with a vector: from 5 terms on matrices are transposed first, so that lanes lie
# together. 4096 of 8 x 8 take 47 us so, a product 165; of 12 x 12 408 and 200. Of fewer terms the
# lanes are matrices, which should be in a cache: 262,144 of 4 x 4 take twice as long.
_FEW_ALONG_MEMORY, _LEAST_TURNED, _MOST_ALONG_MEMORY = 10, 5, 2**19
# The least rows, columns and terms of matrices that are multiplied as floats, and the least work.
_LEAST_SIDE, _LEAST_WORK = 4, 32**3


def _is_plain(eqn: Eqn, ins: Sequence[Atom]) -> bool:
    """Whether a product is one of float32 or float64 throughout."""
    dtype = eqn.outvars[0].aval.dtype
    return dtype in (np.float32, np.float64) and all(x.aval.dtype == dtype for x in ins)


def _inner_products(
    writer: JaxprBuilder, eqn: Eqn, ins: Sequence[Atom], numbers: DimensionNumbers
) -> Atom | None:
    """Inner products as a sum of products, which reads along memory and fuses.

    `einsum("ij,ij->j")` of 1024 x 1024 took 13.6 ms as a product, whose reads are a row apart.
    """
    lhs, rhs = ins
    kept, summed = numbers.batch[0], numbers.contract[0]
    every = len(kept) + len(summed)
    if not _is_plain(eqn, ins) or rhs.aval.shape != lhs.aval.shape or lhs.aval.ndim != every:
        return None
    same = numbers.batch[1] == kept and numbers.contract[1] == summed
    if not same or not kept or tuple(sorted(kept)) != kept:
        return None
    if every - 1 in summed and math.prod(lhs.aval.shape[d] for d in summed) > _MOST_SUMMED:
        return None
    product = writer.emit(mul_p, [lhs, rhs], {}, eqn.source)
    return writer.emit(reduce_sum_p, [product], {"axes": tuple(sorted(summed))}, eqn.source)


def _small_products(
    writer: JaxprBuilder, eqn: Eqn, ins: Sequence[Atom], numbers: DimensionNumbers
) -> Atom | None:
    """A batch of products of small matrices as one sum of products, whose lanes are columns."""
    count = len(numbers.batch[0])
    front = tuple(range(count))
    if not count or numbers.batch != (front, front) or not _is_plain(eqn, ins):
        return None
    contract, shapes = numbers.contract, [x.aval.shape[count:] for x in ins]
    if len(contract[0]) != 1 or max(map(len, shapes)) > 2:
        return None
    # The dims behind the batch as they lie: rows i, columns j, and k, which is summed.
    dims = [
        "k" if len(shape) == 1 else f"k{own}" if place == count else f"{own}k"
        for own, shape, (place,) in zip("ij", shapes, contract, strict=True)
    ]
    order = dims[0] + dims[1].replace("k", "") if dims[1] != "jk" else dims[1]
    if not set(dims[0]) <= set(order):  # rows by columns that both lie along what is summed
        return None
    sizes = {
        d: n
        for own, shape in zip(dims, shapes, strict=True)
        for d, n in zip(own, shape, strict=True)
    }
    turns = False
    if len(order) == 3:
        fits = max(sizes["i"], sizes["j"]) <= _FEW and sizes["k"] <= _FEW_TERMS
    elif order[-1] == "k":
        size = max(x.aval.size for x in ins)
        turns = sizes["k"] >= _LEAST_TURNED
        fits = sizes["k"] <= _FEW_ALONG_MEMORY and (turns or size <= _MOST_ALONG_MEMORY)
    else:
        fits = sizes["k"] <= _FEW_TERMS and sizes[order[-1]] <= _MOST_COLUMNS
    if not fits:
        return None
    if turns:
        place = dims.index(order)
        perm = (*front, count + 1, count)
        turned = writer.emit(permute_dims_p, [ins[place]], {"permutation": perm}, eqn.source)
        # Fused into the sum, the transpose would be reads that are far apart again.
        kept, effects = Var(turned.aval), optimization_barrier_p.effects({})
        barrier = Eqn(optimization_barrier_p, (turned,), (kept,), {}, effects, eqn.source)
        (turned,) = writer.write(barrier)
        ins = [turned if k == place else x for k, x in enumerate(ins)]
        order = order[::-1]
        dims[place] = order
    factors = []
    for own, operand in zip(dims, ins, strict=True):
        where = (*front, *(count + order.index(d) for d in own))
        shape = (*operand.aval.shape[:count], *(sizes[d] for d in order))
        params = {"shape": shape, "broadcast_dimensions": where}
        wide = operand.aval.ndim == len(shape)
        factors.append(
            operand if wide else writer.emit(broadcast_in_dim_p, [operand], params, eqn.source)
        )
    product = writer.emit(mul_p, factors, {}, eqn.source)
    axes = (count + order.index("k"),)
    return writer.emit(reduce_sum_p, [product], {"axes": axes}, eqn.source)


def _is_large(ins: Sequence[Atom], numbers: DimensionNumbers) -> bool:
    """Whether a product is worth to read its operands twice."""
    sizes = [
        math.prod(x.aval.shape[d] for d in numbers.free(side, x.aval.ndim))
        for side, x in enumerate(ins)
    ]
    sizes.append(_depth(ins, numbers))
    return min(sizes) >= _LEAST_SIDE and math.prod(sizes) >= _LEAST_WORK


def _depth(ins: Sequence[Atom], numbers: DimensionNumbers) -> int:
    return math.prod(ins[0].aval.shape[d] for d in numbers.contract[0])


def _integer_product(
    writer: JaxprBuilder, eqn: Eqn, ins: Sequence[Atom], numbers: DimensionNumbers
) -> Atom | None:
    """A product of narrow integers as one of floats, in which all sums are exact.

    Platforms with tiles for integers have written an algorithm of them before.
    """
    precision = eqn.params["precision"]
    if precision is not None and type(precision) is not tuple:
        return None  # an algorithm, whose module a first call does not import
    out = eqn.outvars[0].aval.dtype
    kinds = [x.aval.dtype for x in ins]
    if out.kind not in "iu" or any(k.kind not in "iu" or k.itemsize > 2 for k in kinds):
        return None
    if any(map(dtypes.is_small, (out, *kinds))) or not _is_large(ins, numbers):
        return None
    most = _depth(ins, numbers) * math.prod(max(abs(v) for v in _range(k)) for k in kinds)
    if most > 2**53:
        return None
    # Sums that do not fit the result wrap, as integers do when they are narrowed.
    wide, whole = (np.float32, np.int32) if most <= 2**24 else (np.float64, np.int64)
    source = eqn.source
    factors = [_converted(writer, x, np.dtype(wide), source) for x in ins]
    how = {"precision": None, "preferred_element_type": np.dtype(wide)}
    params = eqn.params | {"dimension_numbers": numbers} | how
    found = writer.emit(eqn.prim, factors, params, source)
    return _converted(writer, _converted(writer, found, np.dtype(whole), source), out, source)


def _range(dtype: np.dtype) -> tuple[int, int]:
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)


def _converted(writer: JaxprBuilder, x: Atom, dtype: np.dtype, source: Source) -> Atom:
    if x.aval.dtype == dtype:
        return x
    params = {"new_dtype": dtype, "weak_type": False}
    return writer.emit(convert_element_type_p, [x], params, source)


def _complex_product(
    writer: JaxprBuilder, eqn: Eqn, ins: Sequence[Atom], numbers: DimensionNumbers
) -> Atom | None:
    """A product of complex matrices as four of real ones, which have kernels of their own."""
    aval = eqn.outvars[0].aval
    if not dtypes.is_complex(aval.dtype) or any(x.aval.dtype != aval.dtype for x in ins):
        return None
    if not _is_large(ins, numbers):
        return None
    source, parts = eqn.source, (real_p, imag_p)
    left, right = ([writer.emit(part, [x], {}, source) for part in parts] for x in ins)
    how = {"precision": None, "preferred_element_type": left[0].aval.dtype}
    params = eqn.params | {"dimension_numbers": numbers} | how

    def product(i: int, j: int) -> Var:
        return writer.emit(eqn.prim, [left[i], right[j]], params, source)

    real = writer.emit(sub_p, [product(0, 0), product(1, 1)], {}, source)
    imag = writer.emit(add_p, [product(0, 1), product(1, 0)], {}, source)
    return writer.emit(complex_p, [real, imag], {}, source)


def _swapped_product(writer: JaxprBuilder, product: Eqn, perm: tuple[int, ...]) -> Atom | None:
    """The transpose of a matrix product: the product of the operands in the other order."""
    lhs, rhs = product.invars
    numbers = product.params["dimension_numbers"]
    batch = len(numbers.batch[0])
    rows = len(numbers.free(0, lhs.aval.ndim))
    columns = len(numbers.free(1, rhs.aval.ndim))
    start = range(batch)
    swapped = (*start, *range(batch + rows, batch + rows + columns), *range(batch, batch + rows))
    if perm != swapped:
        return None
    contract, pairs = numbers.contract, numbers.batch
    turned = type(numbers)((contract[1], contract[0]), (pairs[1], pairs[0]))
    params = product.params | {"dimension_numbers": turned}
    return writer.emit(product.prim, [rhs, lhs], params, product.source)


def _is_widening(narrow: np.dtype, wide: np.dtype) -> bool:
    """Whether every value of `narrow` survives a journey through `wide`."""
    if dtypes.is_bool(narrow):
        return True
    if dtypes.is_small(narrow) or dtypes.is_small(wide):
        return dtypes.is_small(narrow) and wide == dtypes.wide_of(narrow)
    if dtypes.is_integer(narrow) and dtypes.is_integer(wide):
        grows = wide.itemsize > narrow.itemsize
        return grows if narrow.kind != wide.kind else wide.itemsize >= narrow.itemsize
    if dtypes.is_inexact(narrow) and dtypes.is_inexact(wide):
        return dtypes.promote_types(narrow, wide) == wide
    return False


# Rules that find nothing unless an operand is a literal.
WITH_LITERAL = frozenset(("add", "add_any", "sub", "div", "pow"))

RULES: dict[str, Rule] = {
    "add": _add,
    "add_any": _add,
    "sub": _right(0),
    "div": _right(1),
    "pow": _right(1),
    "integer_pow": _integer_pow,
    "and": _same_operands,
    "or": _same_operands,
    "max": _same_operands,
    "min": _same_operands,
    "select_n": _select,
    "copy": _identity,
    "stop_gradient": _identity,
    "name": _identity,
}
