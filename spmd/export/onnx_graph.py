"""An ONNX model while it is written: a graph of plain data.

A graph is a list of nodes, each a dictionary of names, numbers and texts, so that the graphs of a
function at several sizes can be walked side by side (`unify.py`): a number that differs becomes a
polynomial of the sizes. Rules (`onnx_rules.py` and its neighbours) write nodes here and never see
the `onnx` package.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import RefusedError
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Literal, Var
from spmd.core.rewrite import inline_calls
from spmd.export.encode import encode_number

# The numbers that ONNX gives to dtypes (`TensorProto.DataType`).
_CODES = {
    "float32": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "int32": 6, "int64": 7,
    "bool": 9, "float16": 10, "float64": 11, "uint32": 12, "uint64": 13, "bfloat16": 16,
}  # fmt: skip
# The end of a slice that goes backwards through the first element.
BEFORE_START = -(2**63) + 1

Rule: TypeAlias = Callable[["Graph", Eqn, list[str]], Any]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register how the primitives of these names are written."""

    def register(f: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, f))
        return f

    return register


def refused(eqn: Eqn, why: str) -> RefusedError:
    """The error for operations without a form in ONNX, with the primitive and the user's line."""
    return RefusedError(f"{eqn.source}: to_onnx: {eqn.prim} {why}")


def code(dtype: Any) -> int:
    """The number of a dtype in ONNX; a `RefusedError` for one that ONNX lacks."""
    name = dtypes.long_name(np.dtype(dtype))
    if name not in _CODES:
        raise RefusedError(f"to_onnx: there are no {name} arrays in the operators of ONNX")
    return _CODES[name]


class Graph:
    """A graph that is being written. Values are names; an operation gives the names it makes."""

    def __init__(self, outer: Graph | None = None):
        self.nodes: list[dict[str, Any]] = []
        self.arrays: dict[str, np.ndarray] = {} if outer is None else outer.arrays
        self._count: list[int] = [0] if outer is None else outer._count
        self.source = "" if outer is None else outer.source

    def inner(self) -> Graph:
        """The graph of a branch or loop body; it sees the values of this one."""
        return Graph(self)

    def name(self) -> str:
        """A name that no other value has."""
        self._count[0] += 1
        return f"v{self._count[0]}"

    # ---- constants ----

    def _constant(self, **node: Any) -> str:
        out = self.name()
        self.nodes.append({"constant": out, **node})
        return out

    def ints(self, *values: int) -> str:
        """A vector of integers: a shape, dims, sizes. Its elements may turn out to be symbolic."""
        return self._constant(ints=[int(v) for v in values])

    def size(self, n: int) -> str:
        """One size, as an integer of rank 0."""
        return self.op("Reshape", self.ints(n), self.ints())

    def scalar(self, value: Any, dtype: Any) -> str:
        """A constant of rank 0."""
        code(dtype)
        return self._constant(value=encode_number(value), dtype=dtypes.long_name(np.dtype(dtype)))

    def array(self, x: Any) -> str:
        """A constant array, by its digest; a few integers by their values, which may be sizes."""
        x = np.asarray(x)
        code(x.dtype)
        if x.dtype == np.int64 and x.ndim == 1 and x.size <= 64:
            return self.ints(*x)
        key = (
            f"{dtypes.long_name(x.dtype)}{list(x.shape)} {hashlib.sha256(x.tobytes()).hexdigest()}"
        )
        self.arrays[key] = x
        return self._constant(array=key)

    # ---- operations ----

    def several(self, op: str, inputs: Sequence[str], count: int, **attributes: Any) -> list[str]:
        """An operation with several results."""
        outs = [self.name() for _ in range(count)]
        node = {"op": op, "in": list(inputs), "out": outs, "with": attributes, "at": self.source}
        self.nodes.append(node)
        return outs

    def op(self, op: str, *inputs: str, **attributes: Any) -> str:
        """An operation with one result."""
        return self.several(op, inputs, 1, **attributes)[0]

    def cast(self, x: str, dtype: Any) -> str:
        return self.op("Cast", x, to=code(dtype))

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        # A size of 0 means zero, not "as before".
        return self.op("Reshape", x, self.ints(*shape), allowzero=1)

    def transpose(self, x: str, perm: Sequence[int]) -> str:
        if list(perm) == list(range(len(perm))):
            return x
        return self.op("Transpose", x, perm=[int(d) for d in perm])

    def expand(self, x: str, shape: Sequence[int]) -> str:
        return self.op("Expand", x, self.ints(*shape))

    def spread(self, x: str, dims: Sequence[int], shape: Sequence[int], old: Sequence[int]) -> str:
        """x of shape `old`, its dims at `dims` of a result of rank len(shape), others of size 1."""
        sizes = [1] * len(shape)
        for d, size in zip(dims, old, strict=True):
            sizes[d] = size
        return x if len(old) == len(shape) else self.reshape(x, sizes)

    def count(self, size: int, dtype: Any) -> str:
        """0, 1, ..., size - 1."""
        zero, one = (self.scalar(n, np.int64) for n in (0, 1))
        numbers = self.op("Range", zero, self.size(size), one)
        return numbers if np.dtype(dtype) == np.int64 else self.cast(numbers, dtype)


# ---- programs ----------------------------------------------------------------------------------


def write_program(g: Graph, closed: ClosedJaxpr, inputs: Sequence[str]) -> list[str]:
    """Write a program's equations; the names of its results."""
    closed = inline_calls(closed)
    jaxpr = closed.jaxpr
    values: dict[Var, str] = dict(zip(jaxpr.invars, inputs, strict=True))
    constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))

    def read(atom: Atom) -> str:
        if isinstance(atom, Literal):
            return g.scalar(atom.val, atom.aval.dtype)
        if atom not in values:
            values[atom] = g.array(constants[atom])
        return values[atom]

    for eqn in jaxpr.eqns:
        g.source = str(eqn.source)
        outs = _write(g, eqn, [read(a) for a in eqn.invars])
        values.update(zip(eqn.outvars, [outs] if isinstance(outs, str) else outs, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _write(g: Graph, eqn: Eqn, inputs: list[str]) -> Any:
    found = RULES.get(eqn.prim.name)
    for atom in (*eqn.invars, *eqn.outvars):
        if dtypes.long_name(atom.aval.dtype) not in _CODES:
            raise refused(eqn, f"has an operand or result {atom.aval}, a dtype that ONNX lacks")
    if found is not None:
        return found(g, eqn, inputs)
    inside = eqn.stands_for()
    if inside is not None:
        return write_program(g, inside, inputs)
    raise refused(eqn, "has no form in ONNX; export.export writes any function")


def product(sizes: Sequence[int]) -> int:
    return math.prod(sizes)
