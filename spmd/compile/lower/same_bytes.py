"""Values of the same bytes under two types: keys and their words, numbers and their parts."""

from __future__ import annotations

from spmd.compile.lower.lowering import Lowering, rule
from spmd.core.ir import Eqn


@rule("random_wrap", "random_unwrap", "bitcast_convert_type")
def retyped(lowering: Lowering, eqn: Eqn) -> None:
    """Copy the bytes: a key is its two words, a number its parts, the first (least) one first."""
    out = eqn.outvars[0]
    lowering.copy(lowering.place(out), lowering.ref(eqn.invars[0]), out.aval.nbytes)
