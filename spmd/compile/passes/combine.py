"""Combine: many small psums become one, where each costs an exchange between processes.

A psum is held back, and so is all work that reads its result, until another collective needs that;
psums held back together that agree in axes, groups and dtype travel as one vector. The order of
buckets is that of their first psum, so all ranks send the same things in the same order. Within a
process an exchange costs less than the copies that combining takes: this pass is for programs whose
mesh spans processes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from spmd.compile.passes.substitute import map_subjaxprs
from spmd.core.aval import ShapedArray
from spmd.core.ir import ClosedJaxpr, Eqn, Var, all_eqns, subjaxprs
from spmd.core.structural import reshape_p
from spmd.lax.concatenate import concatenate_p, split_p

# Larger operands amortise their own exchange, and copying them costs more than it saves.
COMBINE_UP_TO_BYTES = 1 << 20


def combine_psums(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Join psums that don't depend on each other, also those inside the bodies of control flow."""
    done: list[Eqn] = []
    buckets: dict[Any, list[Eqn]] = {}
    later: list[Eqn] = []  # work on results of psums that are held back
    waiting: set[Any] = set()  # those results, and the results of that work

    def flush() -> None:
        for bucket in buckets.values():
            done.extend(_joined(bucket))
        done.extend(later)
        for held in (buckets, later, waiting):
            held.clear()

    for old in closed.eqns:
        eqn = old.replace(params=map_subjaxprs(old, combine_psums))
        reads_waiting = not waiting.isdisjoint(eqn.invars)
        if eqn.prim.members is not None or eqn.effects or _meets_others(eqn):
            if reads_waiting or not _is_small_psum(eqn):
                flush()  # collectives and effects keep their order among each other
            if _is_small_psum(eqn):
                buckets.setdefault(_key(eqn), []).append(eqn)
                waiting.update(eqn.outvars)
            else:
                done.append(eqn)
        elif reads_waiting:
            later.append(eqn)
            waiting.update(eqn.outvars)
        else:
            done.append(eqn)
    flush()
    return ClosedJaxpr(closed.jaxpr.replace(eqns=done), closed.consts)


def _is_small_psum(eqn: Eqn) -> bool:
    return eqn.prim.name == "psum" and eqn.invars[0].aval.nbytes <= COMBINE_UP_TO_BYTES


def _meets_others(eqn: Eqn) -> bool:
    """Whether an equation's own jaxprs hold collectives."""
    inner = (closed for _, closed in subjaxprs(eqn.params))
    return any(e.prim.members is not None for closed in inner for e in all_eqns(closed))


def _key(eqn: Eqn) -> Any:
    aval = eqn.outvars[0].aval
    return eqn.params["axes"], eqn.params["groups"], aval.dtype, aval.vma


def _joined(bucket: list[Eqn]) -> list[Eqn]:
    """The equations of a bucket as flatten, concatenate, one psum, split, reshape."""
    if len(bucket) == 1:
        return bucket
    first = bucket[0]
    source = dataclasses.replace(first.source, operand=f"{len(bucket)} arrays joined")
    eqns: list[Eqn] = []

    def write(prim: Any, ins: Any, outs: list[Var], **params: Any) -> list[Var]:
        eqns.append(Eqn(prim, tuple(ins), tuple(outs), params, frozenset(), source))
        return outs

    def vector(like: ShapedArray, size: int) -> Var:
        return Var(like.update(shape=(size,), weak_type=False))

    flat = []
    for eqn in bucket:
        x = eqn.invars[0]
        flat += write(reshape_p, [x], [vector(x.aval, x.aval.size)], new_sizes=(x.aval.size,))
    sizes = tuple(v.aval.size for v in flat)
    (joined,) = write(concatenate_p, flat, [vector(flat[0].aval, sum(sizes))], dimension=0)
    (total,) = write(
        first.prim, [joined], [vector(first.outvars[0].aval, sum(sizes))], **first.params
    )
    parts = [vector(total.aval, size) for size in sizes]
    write(split_p, [total], parts, sizes=sizes, axis=0)
    for eqn, part in zip(bucket, parts, strict=True):
        out = eqn.outvars[0]
        write(reshape_p, [part], [out], new_sizes=out.aval.shape)
    return eqns
