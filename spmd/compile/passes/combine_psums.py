"""Collective combining: many small psums become one, where each costs an exchange.

A psum is held back, and so is all work that reads its result, until another collective needs that;
psums held back together that agree in axes, groups and dtype travel as one vector. The order of
buckets is that of their first psum, so all ranks send the same things in the same order. Within a
process on CPUs an exchange costs less than the copies that combining takes: this pass is for
programs whose mesh spans processes, and for GPUs, where an exchange is launches and copies on each.

Where exchanges overlap with computation (`spmd.compile.schedule.overlap_collectives`), one bucket
of all gradients would be ready when nothing is left to compute. There psums first move to where
their operands are made, and a bucket is closed when it is large enough: buckets are in the order in
which gradients are ready, the last layer's first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.base.record import replace
from spmd.collectives.order_check import is_collective
from spmd.core.aval import ShapedArray
from spmd.core.ir import ClosedJaxpr, Eqn, Var, all_eqns, subjaxprs
from spmd.core.rewriting.equations import Pass, map_subjaxprs
from spmd.core.structural import reshape_p
from spmd.lax.concatenate import concatenate_p
from spmd.lax.slicing import slice_p

# Larger operands amortise their own exchange, and copying them costs more than it saves.
COMBINE_UP_TO_BYTES = 1 << 20
# A bucket of this size is sent while the next one fills. Measured with 256 KiB, 1 and 4 MiB at 100
# and 300 Mbit/s: benchmarks/README.md.
BUCKET_BYTES = 1 << 20
# Where operands have a multiple of so many bytes, all of them begin at whole cache lines.
ALIGNMENT = 64


def combine_psums(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Join psums that don't depend on each other, also those inside the bodies of control flow."""
    return _combined(closed, combine_psums, None)


def bucket_psums(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Join psums as their operands become ready, in buckets that can be sent one by one."""
    ready = ClosedJaxpr(closed.jaxpr.replace(eqns=_as_ready(closed.eqns)), closed.consts)
    return _combined(ready, bucket_psums, BUCKET_BYTES)


def _combined(closed: ClosedJaxpr, step: Pass, most: int | None) -> ClosedJaxpr:
    """Join psums, in buckets of `most` bytes where that is given; `step` joins those in bodies."""
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
        eqn = old.replace(params=map_subjaxprs(old, step))
        reads_waiting = not waiting.isdisjoint(eqn.invars)
        if _keeps_its_place(eqn):
            is_small = _is_small_psum(eqn)
            # Collectives and effects keep their order among each other, but for psums in buckets.
            if reads_waiting or not (is_small or (most is not None and eqn.prim.name == "psum")):
                flush()
            if is_small:
                bucket = buckets.setdefault(_key(eqn), [])
                bucket.append(eqn)
                waiting.update(eqn.outvars)
                if most is not None and sum(e.invars[0].aval.nbytes for e in bucket) >= most:
                    # Its readers stay behind: else they precede the psums of the next one.
                    done.extend(_joined(buckets.pop(_key(eqn))))
            else:
                done.append(eqn)
        elif reads_waiting:
            later.append(eqn)
            waiting.update(eqn.outvars)
        else:
            done.append(eqn)
    flush()
    return ClosedJaxpr(closed.jaxpr.replace(eqns=done), closed.consts)


def _as_ready(eqns: Sequence[Eqn]) -> list[Eqn]:
    """The same equations, psums right behind the makers of their operands.

    They don't pass effects, other collectives, or calls of such: those keep their places.
    """
    made: dict[Any, int] = {}  # by variable: the number of the equation that makes it
    fence = -1
    keys: list[tuple[float, int]] = []
    for number, eqn in enumerate(eqns):
        if eqn.prim.name == "psum":
            ready = made.get(eqn.invars[0], -1)
            keys.append((max(ready, fence) + 0.5, number))
            made[eqn.outvars[0]] = max(ready, fence)
            continue
        made.update(dict.fromkeys(eqn.outvars, number))
        keys.append((number, number))
        if _keeps_its_place(eqn):
            fence = number
    return [eqns[number] for _, number in sorted(keys)]


def _is_small_psum(eqn: Eqn) -> bool:
    return eqn.prim.name == "psum" and eqn.invars[0].aval.nbytes <= COMBINE_UP_TO_BYTES


def _keeps_its_place(eqn: Eqn) -> bool:
    """Whether an equation is a collective, has effects, or has collectives in its jaxprs."""
    if is_collective(eqn) or eqn.effects:
        return True
    inner = (closed for _, closed in subjaxprs(eqn.params))
    return any(is_collective(e) for closed in inner for e in all_eqns(closed))


def _key(eqn: Eqn) -> Any:
    aval = eqn.outvars[0].aval
    return eqn.params["axes"], eqn.params["groups"], aval.dtype, aval.vma


def _joined(bucket: list[Eqn]) -> list[Eqn]:
    """The equations of a bucket as flatten, concatenate, one psum, and a slice for each.

    Slices cost nothing: the readers of one read a part of the vector.
    """
    if len(bucket) == 1:
        return bucket
    # Operands that would leave the others at odd addresses come last.
    bucket = sorted(bucket, key=lambda eqn: eqn.invars[0].aval.nbytes % ALIGNMENT != 0)
    first = bucket[0]
    source = replace(first.source, operand=f"{len(bucket)} arrays joined")
    eqns: list[Eqn] = []

    def write(prim: Any, ins: Any, out: Var, **params: Any) -> Var:
        eqns.append(Eqn(prim, tuple(ins), (out,), params, frozenset(), source))
        return out

    def vector(like: ShapedArray, size: int) -> Var:
        return Var(like.update(shape=(size,), weak_type=False))

    flat = []
    for eqn in bucket:
        x = eqn.invars[0]
        flat.append(write(reshape_p, [x], vector(x.aval, x.aval.size), new_sizes=(x.aval.size,)))
    size = sum(v.aval.size for v in flat)
    joined = write(concatenate_p, flat, vector(flat[0].aval, size), dimension=0)
    total = write(first.prim, [joined], vector(first.outvars[0].aval, size), **first.params)
    start = 0
    for eqn in bucket:
        out, end = eqn.outvars[0], start + eqn.outvars[0].aval.size
        part = vector(out.aval, out.aval.size)
        cut: dict[str, Any] = {"start_indices": (start,), "limit_indices": (end,)}
        write(slice_p, [total], part, strides=None, **cut)
        write(reshape_p, [part], out, new_sizes=out.aval.shape)
        start = end
    return eqns
