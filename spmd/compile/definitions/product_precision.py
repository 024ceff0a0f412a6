"""The pass that says how the factors of products and convolutions are multiplied on GPUs.

Equations have what the user asked for, in JAX's words. A product of float32 rounds its factors to
TF32 where it asks for a precision below the highest; one that asks for nothing has full precision,
so that GPUs give the CPU's values. An algorithm of 16-bit factors rounds float32 to them.
Algorithms of several products in place of one come as near as full precision, which is taken. The
pass comes before definitions are written: the products in these are of full precision.

A product of integers has tiles on GPUs, which its algorithm says: factors and sums of integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.source import Source
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Var
from spmd.core.rewriting.equations import Walk, finish, map_subjaxprs, start
from spmd.lax.conv import conv_general_dilated_p
from spmd.lax.convert import convert_element_type_p
from spmd.lax.dot import dot_general_p
from spmd.lax.precision import DotAlgorithm, DotAlgorithmPreset, Precision

_PRODUCTS = (dot_general_p, conv_general_dilated_p)
_FLOAT32 = np.dtype(np.float32)
_TF32 = DotAlgorithmPreset.TF32_TF32_F32
_BF16, _F16 = np.dtype(dtypes.bfloat16), np.dtype(np.float16)
# The algorithms whose factors have one part of 16 bits, by that dtype.
_NARROW = {
    DotAlgorithmPreset.BF16_BF16_F32: _BF16,
    DotAlgorithmPreset.BF16_BF16_BF16: _BF16,
    DotAlgorithmPreset.F16_F16_F32: _F16,
    DotAlgorithmPreset.F16_F16_F16: _F16,
}


_INTEGERS = frozenset("iu")


def choose_precision(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Write what the factors of float32 products are rounded to, in calls and loops too."""
    if closed.jaxpr.primitives.isdisjoint([prim.name for prim in _PRODUCTS]):
        return closed
    writer = start(closed)
    _Writer(writer).run(closed.jaxpr)
    return finish(writer, closed)


def factors_of(precision: Any) -> np.dtype | DotAlgorithmPreset | None:
    """The kind of numbers that float32 factors become: a dtype, TF32, or None for themselves.

    `precision` is that of an equation: None, a pair of `Precision`s, or an algorithm.

    >>> factors_of((Precision.HIGH, Precision.HIGH)), factors_of(None)
    (<DotAlgorithmPreset.TF32_TF32_F32: 12>, None)
    """
    if precision is None or precision is DotAlgorithmPreset.DEFAULT:
        return None
    if isinstance(precision, DotAlgorithm):
        kinds = {precision.lhs_precision_type, precision.rhs_precision_type}
        parts = (precision.lhs_component_count, precision.rhs_component_count)
        narrow = {np.dtype(kind) for kind in kinds if kind in (_BF16, _F16)}
        return narrow.pop() if len(kinds) == len(narrow) == 1 and parts == (1, 1) else None
    if isinstance(precision, DotAlgorithmPreset):
        return _TF32 if precision is _TF32 else _NARROW.get(precision)
    asked = [p for p in precision if isinstance(p, Precision)]
    if len(asked) < len(precision):
        # Two algorithms: that of the first operand, where both are the same.
        return factors_of(precision[0]) if precision[0] == precision[1] else None
    return None if Precision.HIGHEST in asked else _TF32


def _integer_algorithm(eqn: Eqn) -> DotAlgorithm:
    left, right = (atom.aval.dtype for atom in eqn.invars)
    return DotAlgorithm(left, right, eqn.outvars[0].aval.dtype)


class _Writer(Walk):
    def replaces(self, eqn: Eqn, ins: tuple[Atom, ...], source: Source) -> bool:
        """Write a product of float32 with the precision of its factors, or one of integers."""
        if (
            eqn.prim is dot_general_p
            and {ins[0].aval.dtype.kind, eqn.outvars[0].aval.dtype.kind} <= _INTEGERS
        ):
            self.write(eqn, ins, _integer_algorithm(eqn), source)
            return True
        if eqn.prim not in _PRODUCTS or any(a.aval.dtype != _FLOAT32 for a in ins):
            return False
        found = factors_of(eqn.params["precision"])
        params, given = eqn.params, ins
        if isinstance(found, np.dtype):
            given = tuple([self.rounded(a, found, source) for a in ins])
        if found is not None:
            params = params | {"precision": _TF32}
        if params is eqn.params and given is ins:
            return False
        self.write(eqn, given, params["precision"], source)
        return True

    def write(self, eqn: Eqn, given: tuple[Atom, ...], precision: Any, source: Source) -> None:
        """Write the equation with other operands and another precision."""
        params, out = eqn.params | {"precision": precision}, Var(eqn.outvars[0].aval)
        self.define(
            eqn, self.writer.write(Eqn(eqn.prim, given, (out,), params, eqn.effects, source))
        )

    def rounded(self, atom: Atom, dtype: np.dtype, source: Source) -> Var:
        """A factor rounded to a narrow dtype, as float32: TF32 has all these numbers."""
        for target in (dtype, _FLOAT32):
            params = {"new_dtype": target, "weak_type": False}
            atom = self.writer.emit(convert_element_type_p, [atom], params, source)
        assert isinstance(atom, Var)
        return atom

    def params_of(self, eqn: Eqn) -> dict[str, Any]:
        return map_subjaxprs(eqn, choose_precision)
