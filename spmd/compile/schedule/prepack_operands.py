"""Packs operands of products once for all blocks of rows and iterations of a loop that use them.

A product whose B is read by many blocks, or is the same in every iteration of the loops around it
(the weights of a recurrent network), reads panels that a step of their own wrote before: before the
outermost loop in which B does not change. The backend decides which products want that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from spmd.base.record import field, record, replace
from spmd.compile.kernel.matmul import Product
from spmd.compile.kernel.packing import Packing
from spmd.compile.lower.steps import (
    TEMP,
    Branch,
    Buffer,
    Multiply,
    Pack,
    Parallel,
    Ref,
    Schedule,
    Step,
    accesses_inside,
    blocks,
    walk,
)
from spmd.compile.native.program.steps import levels, rounds_of, with_blocks

# A loop of which only run time knows the iterations counts as one of so many.
_ASSUMED_ROUNDS = 8

# Of a product that is run in some iterations with the same B: the product with packed B, the
# packing, and whether A and B changed places; None if it should stay as it is.
Prefers: TypeAlias = Callable[[Product, int], "tuple[Product, Packing, bool] | None"]


def packed_product(
    product: Product, prefers: Prefers, a_iterations: int = 1, b_iterations: int = 1
) -> tuple[Product, Packing, bool] | None:
    """The product that reads B, or A as its B, packed by a step before it; None if unchanged.

    The operands stay the same for so many iterations; one of none is not packed.
    """
    found = prefers(product, b_iterations) if b_iterations else None
    if found is None or found[2]:
        if a_iterations != b_iterations:
            found = prefers(product, a_iterations) if a_iterations else None
        if found is not None and not found[2]:
            found = None
    return found


@record(frozen=False)
class _Around:
    """A loop or branch around steps, and the packings before it."""

    step: Step
    level: int  # loops around it
    written: set[Buffer]
    packs: dict[tuple[Packing, Ref], Pack] = field(default_factory=dict)

    @property
    def iterations(self) -> int:
        """How often its body runs."""
        return rounds_of(self.step, _ASSUMED_ROUNDS)

    @property
    def inside(self) -> int:
        """Loops around its body."""
        return self.level + levels(self.step)

    def keeps(self, ref: Ref) -> bool:
        """Whether a value is the same in all iterations."""
        if isinstance(self.step, Branch) or ref.buffer in self.written:
            return False
        return all(level < self.level for level, stride in ref.strides if stride)


def prepack(schedule: Schedule, prefers: Prefers) -> Schedule:
    """The schedule with steps that pack; the one given is changed in place."""
    if any(isinstance(step, Multiply) for step in walk(schedule.steps)):
        schedule.steps = _Prepacker(schedule, prefers).block(schedule.steps, ())
    return schedule


class _Prepacker:
    def __init__(self, schedule: Schedule, prefers: Prefers):
        self.prefers = prefers
        numbers = [
            ref.buffer.number
            for ref, _ in accesses_inside(schedule.steps)
            if ref.buffer.kind == TEMP
        ]
        self.next_number = 1 + max(numbers, default=-1)

    def block(self, steps: Sequence[Step], around: tuple[_Around, ...]) -> list[Step]:
        """The steps of one block, which other steps are around."""
        made: list[Step] = []
        known: dict[tuple[Packing, Ref], Pack] = {}
        for step in steps:
            if isinstance(step, Multiply):
                pack, multiply = self.multiply(step, around, known)
                made += (pack, multiply) if pack else (multiply,)
                step = multiply
            elif blocks(step):
                frame = _Around(step, around[-1].inside if around else 0, _written(step))
                inside = (*around, frame)
                step = with_blocks(step, lambda block, inside=inside: self.block(block, inside))
                made += (*frame.packs.values(), step)
            else:
                made.append(step)
            if known:
                changed = _written(step)
                known = {key: pack for key, pack in known.items() if key[1].buffer not in changed}
        return made

    def multiply(
        self,
        step: Multiply,
        around: tuple[_Around, ...],
        known: dict[tuple[Packing, Ref], Pack],
    ) -> tuple[Pack | None, Multiply]:
        """A product that reads its B packed, and the step that packs it, if that stands here."""
        # Each operand has its own outermost loop in which it does not change.
        homes = [self.home(ref, around) for ref in step.refs[:2]]
        if any(isinstance(frame.step, Parallel) for frame in around):
            a_iterations, b_iterations = (count if count > 1 else 0 for _, count in homes)
        else:
            a_iterations, b_iterations = (iterations for _, iterations in homes)
        found = packed_product(step.product, self.prefers, a_iterations, b_iterations)
        if found is None:
            return None, step
        made, packing, swapped = found
        home = homes[not swapped][0]
        a, b, *rest = step.refs
        if swapped:
            a, b = b, a
        packs = known if home == len(around) else around[home].packs
        pack = packs.get((packing, b))
        is_new = pack is None
        if pack is None:
            pack = Pack(packing, (b, Ref(self.buffer(packing, around[:home]))), "pack", step.source)
            packs[packing, b] = pack
        multiply = replace(step, product=made, refs=(a, pack.refs[1], *rest))
        return (pack if is_new and packs is known else None), multiply

    def home(self, ref: Ref, around: tuple[_Around, ...]) -> tuple[int, int]:
        """The number of loops that change the value of a ref, and the iterations inside."""
        home, iterations = len(around), 1
        while home and around[home - 1].keeps(ref):
            home -= 1
            iterations *= max(around[home].iterations, 1)
        return home, iterations

    def buffer(self, packing: Packing, around: tuple[_Around, ...]) -> Buffer:
        """A temporary for panels; the innermost parallel loop around it keeps it for itself."""
        made = Buffer(TEMP, packing.nbytes, self.next_number)
        self.next_number += 1
        for frame in around:
            if isinstance(frame.step, Parallel):
                made.owner = frame.step.number
        return made


def _written(step: Step) -> set[Buffer]:
    return {ref.buffer for ref, writes in accesses_inside((step,)) if writes}
