"""The fingerprint of a program: a text that determines the compiled form of a closed jaxpr.

Two jaxprs of one fingerprint differ at most in the names of their variables and in the user's
source lines. Constants count by content. A program with a part that cannot be written down exactly
(a Python function, a primitive of the user's, arrays on several devices) has no fingerprint: it is
compiled in every process.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from spmd.base.digest import blake2b
from spmd.core.aval import ShapedArray
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var
from spmd.core.primitive import Primitive
from spmd.core.trace import to_numpy
from spmd.sharding.abstract_mesh import AbstractMesh
from spmd.sharding.array import Array
from spmd.sharding.spec import Mesh, PartitionSpec

# Types of which equal values have one text, and others another.
_WRITTEN = frozenset((bool, int, str, float, complex, slice, PartitionSpec, AbstractMesh))


class NoFingerprintError(Exception):
    """Something in the program cannot be written down."""


def fingerprint(closed: ClosedJaxpr) -> str | None:
    """The text of a closed jaxpr, or None if it has none."""
    try:
        return "\n".join(_Writer().closed(closed))
    except NoFingerprintError:
        return None


def eqn_text(prim: Primitive, params: dict[str, Any]) -> str | None:
    """The text of an equation's operation, whatever its operands are; None if it has none."""
    try:
        return _Writer().head(prim, params)
    except NoFingerprintError:
        return None


class _Writer:
    """Writes one program; numbers variables, avals and inner jaxprs in order of appearance."""

    def __init__(self) -> None:
        self._vars: dict[Atom, str] = {}
        self._avals: dict[ShapedArray, str] = {}
        self._inner: dict[int, str] = {}
        # Inner jaxprs are told apart by `id`: they must live as long as this object.
        self._kept: list[Any] = []

    def closed(self, closed: ClosedJaxpr) -> Iterator[str]:
        """The lines of a closed jaxpr."""
        yield from (self._const(c) for c in closed.consts)
        yield from self._lines(closed.jaxpr)

    def _lines(self, jaxpr: Jaxpr) -> Iterator[str]:
        yield f"lambda {self._new(jaxpr.constvars)} ; {self._new(jaxpr.invars)}"
        for eqn in jaxpr.eqns:
            yield self._eqn(eqn)
        yield f"in {' '.join(map(self._atom, jaxpr.outvars))}"

    def _eqn(self, eqn: Eqn) -> str:
        head = self.head(eqn.prim, eqn.params, [a.aval for a in eqn.invars])
        ins = " ".join([self._atom(a) for a in eqn.invars])
        return f"{head} {ins} : {self._new(eqn.outvars)}"

    def head(self, prim: Primitive, params: dict[str, Any], avals: Any = ()) -> str:
        """A primitive and its parameters."""
        if not prim.is_own:
            raise NoFingerprintError(prim.name)
        if prim.inline is not None or prim.expand is not None:
            # The compiler sees the body of the call, and nothing of its rules.
            params = {"jaxpr": prim.stands_for(avals, params)}
        if not params:
            return f"{prim.name} "
        return f"{prim.name} " + " ".join([f"{n}={self._value(v)}" for n, v in params.items()])

    def _atom(self, atom: Atom) -> str:
        name = self._vars.get(atom)
        if name is not None:
            return name
        assert isinstance(atom, Literal), atom
        return f"{self._value(atom.val)}:{self._aval(atom.aval)}"

    def _new(self, made: tuple[Var, ...]) -> str:
        texts = []
        for var in made:
            name = self._vars[var] = f"v{len(self._vars)}"
            texts.append(f"{name}:{self._aval(var.aval)}")
        return " ".join(texts)

    def _aval(self, aval: ShapedArray) -> str:
        name = self._avals.get(aval)
        if name is None:
            self._avals[aval] = name = f"a{len(self._avals)}"
            shown = (aval.shape, _dtype(aval.dtype), aval.weak_type, sorted(map(str, aval.vma)))
            return f"{name}={shown}"
        return name

    def _const(self, value: Any) -> str:
        if type(value) is Array and value.shards is not None:
            raise NoFingerprintError("an array on several devices")
        return self._array(np.asarray(to_numpy(value)))

    def _array(self, array: np.ndarray) -> str:
        if array.dtype.hasobject:
            raise NoFingerprintError("an array of objects")
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        digest = blake2b(data, digest_size=32)
        return f"array {array.shape} {_dtype(array.dtype)} {digest.hexdigest()}"

    def _value(self, value: Any) -> str:
        """A parameter. Types are told apart where equal values of two types mean two programs."""
        kind = type(value)
        if value is None or kind in _WRITTEN:
            return repr(value)
        if kind is Mesh:
            return f"{value!r} of {[d.id for d in value.flat_devices()]}"
        if kind is frozenset:
            return f"frozenset({' '.join(sorted(map(self._value, value)))})"
        if kind in (tuple, list) or isinstance(value, tuple):
            return f"{kind.__name__}({' '.join([self._value(v) for v in value])})"
        if kind is ClosedJaxpr or kind is Jaxpr:
            return self._jaxpr(value)
        if isinstance(value, np.dtype):
            return _dtype(value)
        if kind is not ShapedArray and isinstance(value, np.generic):
            return f"{_dtype(value.dtype)} {value.tobytes().hex()}"
        if isinstance(value, np.ndarray):
            return self._array(value)
        if kind is ShapedArray:
            return self._aval(value)
        return self._named(value)

    def _jaxpr(self, value: ClosedJaxpr | Jaxpr) -> str:
        name = self._inner.get(id(value))
        if name is not None:
            return name
        name = self._inner[id(value)] = f"j{len(self._inner)}"
        self._kept.append(value)
        lines = self.closed(value) if isinstance(value, ClosedJaxpr) else self._lines(value)
        return f"{name}={{{' ; '.join(lines)}}}"

    def _named(self, value: Any) -> str:
        """An object of spmd's own that is its fields, a member of an enum, or a type of NumPy's."""
        kind = type(value)
        if isinstance(value, enum.Enum):
            return f"{kind.__qualname__}.{value.name}"
        if isinstance(value, type) and issubclass(value, np.generic):
            return value.__name__
        fields = kind.__dict__.get("__dataclass_fields__")
        if fields is not None and kind.__module__.startswith("spmd."):
            # A record lists its fields when something asks for them; they are its slots.
            names = fields if isinstance(fields, dict) else kind.__slots__
            parts = [f"{name}={self._value(getattr(value, name))}" for name in names]
            return f"{kind.__qualname__}({' '.join(parts)})"
        raise NoFingerprintError(f"{kind.__module__}.{kind.__qualname__}")


@functools.lru_cache(maxsize=256)
def _dtype(dtype: np.dtype) -> str:
    # NumPy composes the name anew each time, in 2 us.
    return f"{dtype.name}{dtype.names or ''}{dtype.itemsize}"
