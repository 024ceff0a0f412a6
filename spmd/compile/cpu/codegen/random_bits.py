"""Random bits: the rounds of threefry2x32 as a loop over its five groups.

Written out, its twenty rounds were most of the code of a kernel that draws numbers, and took LLVM
20 ms. All groups do the same but for the distances of their rotations, which come from a table, and
the words of the key, which go round.
"""

from __future__ import annotations

from collections.abc import Sequence

from spmd.compile.cpu.codegen.scalar_ops import Value
from spmd.compile.native.llvm.vector_emitter import Emitter
from spmd.lax.keys.threefry import KEY_SCHEDULE, PARITY, ROTATIONS

_TABLE = "@rotations"
_GROUPS = len(KEY_SCHEDULE)
_ROUNDS = len(ROTATIONS[0])

# The words of the key go round: those of a group are the next ones of the group before.
assert all(pair == ((1 + g) % 3, (2 + g) % 3) for g, pair in enumerate(KEY_SCHEDULE))


def threefry2x32(e: Emitter, words: Sequence[Value]) -> str:
    """Write the rounds on (key, key, counter, counter); returns the words of the result as i64.

    Words of one lane are the same for all lanes of the emitter.
    """
    key_width = max(word.width for word in words[:2])
    with e.at_width(key_width):
        k0, k1 = (_spread(e, word.parts[0], word.width) for word in words[:2])
        k2 = e.binary("xor", "i32", e.binary("xor", "i32", k0, k1), e.int(PARITY, "i32"))
    x0, x1 = (_spread(e, word.parts[0], word.width) for word in words[2:])
    x0 = e.binary("add", "i32", x0, _spread(e, k0, key_width))
    x1 = e.binary("add", "i32", x1, _spread(e, k1, key_width))

    def group(number: str, state: list[str]) -> list[str]:
        x0, x1, *key = state
        for by in _distances(e, number):
            x0 = e.binary("add", "i32", x0, x1)
            x1 = e.binary("xor", "i32", x0, e.intrinsic("fshl", "i32", x1, x1, by))
        with e.at_width(1):
            following = e.binary("add", "i32", e.cast("trunc", "i64", "i32", number), "1")
        x0 = e.binary("add", "i32", x0, _spread(e, key[0], key_width))
        with e.at_width(key_width):
            counted = e.binary("add", "i32", key[1], e.splat("i32", following))
        x1 = e.binary("add", "i32", x1, _spread(e, counted, key_width))
        return [x0, x1, key[1], key[2], key[0]]

    carried = [(e.type("i32"), x) for x in (x0, x1)]
    carried += [(e.type("i32", key_width), k) for k in (k1, k2, k0)]
    x0, x1, *_ = e.loop("0", str(_GROUPS), carried, group)
    low, high = e.cast("zext", "i32", "i64", x0), e.cast("zext", "i32", "i64", x1)
    return e.binary("or", "i64", low, e.binary("shl", "i64", high, e.int(32, "i64")))


def _spread(e: Emitter, operand: str, width: int) -> str:
    return operand if width == e.width else e.splat("i32", operand)


def _distances(e: Emitter, group: str) -> list[str]:
    """Read by how much the rounds of a group rotate, in all lanes."""
    table = [by for number in range(_GROUPS) for by in ROTATIONS[number % 2]]
    numbers = ", ".join(f"i32 {by}" for by in table)
    e.module.declare(_TABLE, f"{_TABLE} = private constant [{len(table)} x i32] [{numbers}]")
    with e.at_width(1):
        row = e.at("i32", _TABLE, e.mul_index(group, _ROUNDS))
        scalars = [
            e.set(f"load i32, ptr {e.at('i32', row, str(number))}, align 4")
            for number in range(_ROUNDS)
        ]
    return [e.splat("i32", scalar) for scalar in scalars]
