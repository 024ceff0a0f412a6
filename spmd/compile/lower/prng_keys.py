"""Random keys and the words that they are made of: the same bytes under two types."""

from __future__ import annotations

from spmd.compile.lower.lowering import Lowering, rule
from spmd.core.ir import Eqn


@rule("random_wrap", "random_unwrap")
def retyped(lowering: Lowering, eqn: Eqn) -> None:
    """Copy the bytes: a key is its two words, the first one first."""
    out = eqn.outvars[0]
    lowering.copy(lowering.place(out), lowering.ref(eqn.invars[0]), out.aval.nbytes)
