"""Rules for control flow: scan, while and cond become loops and branches of the same program.

A loop's carried values live where its results are wanted. The body reads them there; its results
are written over them at the end of each iteration, or straight away where nothing reads the old
value any more. Scanned values are read and written in place, at addresses that move with the loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from spmd.base.util import split_list
from spmd.compile.lower.in_place import may_overwrite
from spmd.compile.lower.lowering import Lowering, rule
from spmd.compile.lower.parallel_loops import can_be_parallel, parallel
from spmd.compile.lower.steps import TEMP, Branch, Loop, Ref, While
from spmd.core.ir import ClosedJaxpr, Eqn, Var


@rule("scan")
def scan(lowering: Lowering, eqn: Eqn) -> None:
    """A loop of known length over slices of the scanned arrays."""
    p = eqn.params
    sizes = [p["num_consts"], p["num_carry"]]
    consts, init, xs = split_list([lowering.ref(a) for a in eqn.invars], sizes)
    carried = eqn.outvars[: p["num_carry"]]
    carry = _start(lowering, carried, init)
    stacks = [lowering.place(v) for v in eqn.outvars[p["num_carry"] :]]
    if p["length"] == 0:
        return
    before = lowering.count(TEMP)
    body: ClosedJaxpr = p["jaxpr"]
    _, _, x_avals = split_list(body.in_avals, sizes)
    y_avals = body.out_avals[p["num_carry"] :]
    with lowering.loop() as level:
        moving = [r.moving(level, a.nbytes) for r, a in zip(xs, x_avals, strict=True)]
        targets = [r.moving(level, a.nbytes) for r, a in zip(stacks, y_avals, strict=True)]

        def write() -> None:
            operands = [*consts, *carry, *moving]
            _round(lowering, body, operands, carry, p["num_consts"], targets)

        steps, _ = lowering.block(write)
    if not p["num_carry"] and can_be_parallel(steps):
        number = lowering.next_parallel()
        lowering.steps.append(parallel(p["length"], steps, before, number))
    else:
        lowering.steps.append(Loop(p["length"], steps, p["reverse"]))


@rule("while")
def while_loop(lowering: Lowering, eqn: Eqn) -> None:
    """A loop that tests a predicate before each iteration."""
    p = eqn.params
    operands = [lowering.ref(a) for a in eqn.invars]
    test_consts, body_consts, init = split_list(operands, [p["cond_nconsts"], p["body_nconsts"]])
    carry = _start(lowering, eqn.outvars, init)
    with lowering.loop():
        test, found = lowering.block(
            lambda: lowering.body(p["cond_jaxpr"], [*test_consts, *carry], [None])
        )
        body, _ = lowering.block(
            lambda: _round(
                lowering, p["body_jaxpr"], [*body_consts, *carry], carry, p["body_nconsts"], []
            )
        )
    lowering.steps.append(While(test, found[0], body))


@rule("cond")
def cond(lowering: Lowering, eqn: Eqn) -> None:
    """One of several branches, which write the same results."""
    index, *operands = eqn.invars
    given = [lowering.ref(a) for a in operands]
    outs = [lowering.place(v) for v in eqn.outvars]
    branches = tuple(
        lowering.block(lambda branch=branch: lowering.body(branch, given, outs))[0]
        for branch in eqn.params["branches"]
    )
    lowering.steps.append(Branch(lowering.ref(index), branches, index.aval.dtype))


def _start(lowering: Lowering, results: Sequence[Var], init: Sequence[Ref]) -> list[Ref]:
    """The places of carried values, with their first values in them."""
    # No place holds another value's initial contents: temporaries are fresh, and a wanted place is
    # one that nothing reads after this equation writes it. So the copies may be made in any order.
    carry = [lowering.place(v) for v in results]
    for var, place, first in zip(results, carry, init, strict=True):
        lowering.copy(place, first, var.aval.nbytes)
    return carry


def _round(
    lowering: Lowering,
    body: ClosedJaxpr,
    operands: Sequence[Ref],
    carry: Sequence[Ref],
    before: int,
    targets: Sequence[Ref],
) -> None:
    """One iteration of a loop: the body, then its results become the carried values.

    The body's operand `before + k` is carried value k, its result k the new one.
    """
    wanted: list[Ref | None] = [
        place if may_overwrite(body.jaxpr, before + k, k) else None for k, place in enumerate(carry)
    ]
    found = lowering.body(body, operands, [*wanted, *targets])
    moves = {
        place: (result, aval.nbytes)
        for place, result, aval in zip(carry, found, body.out_avals, strict=False)
        if result != place
    }
    _move_all(lowering, moves)


def _move_all(lowering: Lowering, moves: dict[Ref, tuple[Ref, int]]) -> None:
    """Copy values to their places as if at once: none is overwritten before it is read."""
    while moves:
        sources = [source.buffer for source, _ in moves.values()]
        free = next((place for place in moves if place.buffer not in sources), None)
        if free is not None:
            source, nbytes = moves.pop(free)
            lowering.copy(free, source, nbytes)
            continue
        # Only circles are left: one value steps aside.
        place, (source, nbytes) = next(iter(moves.items()))
        aside = Ref(lowering.buffer(TEMP, nbytes))
        lowering.copy(aside, source, nbytes)
        moves[place] = (aside, nbytes)
