"""The rule of attention by blocks: one step, whose kernel keeps all scores to itself."""

from __future__ import annotations

from collections import Counter

from spmd.compile.expressions.scalar_ops import storage_dtype
from spmd.compile.kernel.attention import FORWARD, READS, BlockedAttention, Extra
from spmd.compile.lower.lowering import Lowering, hints, rule
from spmd.compile.lower.steps import Attend, Ref
from spmd.core.ir import Eqn, Var
from spmd.lax.attention_blocks import Attention

# Kernels may read so many bytes at once where all arrays begin at multiples of them.
_ALIGNMENT = 16


@hints("attention_block")
def note_readers(
    lowering: Lowering, eqn: Eqn, makers: dict[Var, Eqn], readers: Counter[Var]
) -> None:
    """Note whether anything reads the logsumexp."""
    if eqn.params["part"] == FORWARD and not any(readers[v] for v in eqn.outvars[1:]):
        lowering.unread.update(eqn.outvars[1:])


@rule("attention_block")
def attention_block(lowering: Lowering, eqn: Eqn) -> None:
    """The step of one part of attention."""
    spec: Attention = eqn.params["spec"]
    part = eqn.params["part"]
    avals = [atom.aval for atom in eqn.invars]
    q, k = avals[0], avals[1]
    b, t, heads, groups, features = q.shape
    whole = (b, heads, groups, t, k.shape[1])
    extras = []
    for aval in avals[len(READS[part]) :]:
        dtype = storage_dtype(aval.dtype)
        assert dtype is not None, "definitions give extras that kernels know"
        sizes = zip(aval.shape, whole, strict=True)
        extras.append(Extra(dtype, tuple([n == size and size != 1 for n, size in sizes])))
    numbers = not lowering.unread.issuperset(eqn.outvars[1:]) if part == FORWARD else True
    written = eqn.outvars if numbers else eqn.outvars[:1]
    refs = [lowering.ref(atom) for atom in eqn.invars]
    refs += [lowering.place(var) for var in written]
    dtype = storage_dtype(q.dtype)
    assert dtype is not None
    kernel = BlockedAttention(
        part, dtype, b, heads, groups, t, k.shape[1], features,
        spec.scale, spec.causal, spec.window, spec.bias, spec.shifted,
        tuple(extras), numbers, all(map(_is_aligned, refs)), eqn.params["tf32"],
    )  # fmt: skip
    lowering.steps.append(Attend(kernel, tuple(refs), "attention", eqn.source))


def _is_aligned(ref: Ref) -> bool:
    return all(n % _ALIGNMENT == 0 for n in (ref.offset, *(step for _, step in ref.strides)))
