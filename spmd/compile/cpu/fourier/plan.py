"""Plans: the passes of a transform, the roots that they read, and its native step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from spmd.base.record import record
from spmd.compile.cpu.fourier.moves_ir import (
    LANES,
    POINTS,
    SIZES,
    load_text,
    loop_symbol,
    loop_text,
    move_symbol,
    store_text,
)
from spmd.compile.cpu.fourier.passes_ir import (
    pass_symbol,
    pass_text,
    real_symbol,
    real_text,
)
from spmd.compile.kernel.fourier import (
    COMPLEX,
    Pass,
    Transform,
    passes_of,
    turns_at,
)
from spmd.compile.native.llvm.vectors import Vectors, vectors
from spmd.compile.native.program.steps import KernelStep, Slot

# Operations of a core in a nanosecond, with vectors; measured within a factor of two.
_OPERATIONS_PER_NS = 16.0


@record
class TransformPlan:
    """The texts of a transform's functions, the words of its loop, and its work.

    `functions` are (number of a word, symbol): words that are addresses.
    """

    symbol: str
    texts: tuple[str, ...]
    words: tuple[int, ...]
    functions: tuple[tuple[int, str], ...]
    units: int
    cost_ns: float
    scratch: int


def plan_transform(t: Transform, width: int) -> TransformPlan:
    """The plan of a transform for vectors of so many bytes."""
    v = vectors(t.dtype, width)
    blocks = -(-t.lanes.count // v.lanes)
    number = 2 * v.nbytes
    texts = [loop_text(t.dtype, width)]
    functions: list[tuple[int, str]] = []
    moves: dict[str, tuple[str, int]] = {}
    for kind, lanes, point in (
        ("load", t.lanes.operand, t.points[0]),
        ("store", t.lanes.result, t.points[1]),
    ):
        along = LANES if lanes == 1 or t.lanes.count == 1 else POINTS
        assert along == LANES or point == 1, f"{t} neither has lanes that lie together nor points"
        moves[kind] = (along, (point if along == LANES else lanes) * number)
        turned = t.turned and kind == "store"
        made = load_text(t.dtype, width, along) if kind == "load" else None
        texts.append(made or store_text(t.dtype, width, along, turned))
        name = move_symbol(v, f"{kind}_turned" if turned else kind, along)
        functions.append((SIZES.index(kind), name))
    passes = passes_of(t)
    words_of_passes: list[int] = []
    for one in passes:
        functions.append((len(SIZES) + len(words_of_passes), _symbol(v, t, one)))
        texts.append(_text(width, t, one))
        words_of_passes += (0, one.m, one.s, one.roots * number)
    room = max(t.points_read, t.points_written) + v.lanes
    words = dict.fromkeys(SIZES, 0) | {
        "passes": len(passes),
        "blocks": blocks,
        "lanes": t.lanes.count,
        "outer_read": t.outer.operand * number,
        "outer_written": t.outer.result * number,
        "block_read": t.lanes.operand * v.lanes * number,
        "block_written": t.lanes.result * v.lanes * number,
        "points_read": t.points_read,
        "stride_read": moves["load"][1],
        "load_exchanges": width if t.inverse and t.kind == COMPLEX else 0,
        "points_written": t.points_written,
        "stride_written": moves["store"][1],
        "store_exchanges": width if t.inverse else 0,
        "half": room * 2 * width,
        "turns": turns_at(t) * v.nbytes,
        "turns_stride": t.lanes.count * v.nbytes,
        "turns_plane": t.size * t.lanes.count * v.nbytes,
        "turns_block": v.lanes * v.nbytes,
    }
    operations = 5 * t.size * (math.log2(t.size) + 4) * min(v.lanes, t.lanes.count)
    return TransformPlan(
        loop_symbol(v),
        tuple(dict.fromkeys(texts)),
        (*words.values(), *words_of_passes),
        tuple(functions),
        units=t.outer.count * blocks,
        cost_ns=operations / _OPERATIONS_PER_NS,
        scratch=2 * room * 2 * width,
    )


def _symbol(v: Vectors, t: Transform, one: Pass) -> str:
    return pass_symbol(v, one.radix, one.turns) if one.radix else real_symbol(v, t.kind)


def _text(width: int, t: Transform, one: Pass) -> str:
    if one.radix == 0:
        return real_text(t.dtype, width, t.kind)
    return pass_text(t.dtype, width, one.radix, one.turns)


def transform_step(
    plan: TransformPlan, addresses: Mapping[str, int], slots: Sequence[Slot], name: str
) -> KernelStep:
    """The step of a planned transform whose texts are compiled: operand, result, roots."""
    operand, roots, result = slots
    words = list(plan.words)
    for number, symbol in plan.functions:
        words[number] = addresses[symbol]
    return KernelStep(
        addresses[plan.symbol],
        (operand, result, roots),
        plan.units,
        plan.cost_ns,
        sizes=tuple(words),
        scratch=plan.scratch,
        name=name,
    )
