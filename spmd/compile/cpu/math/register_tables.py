"""Tables in registers: AVX-512 looks up 16 numbers of f32 at once, among 16 or 32.

The one idea: a look-up is one instruction, and it replaces many: half of an exponential's
polynomial, or both branches and the division of a hyperbolic tangent, which is cut into pieces with
a short polynomial each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from spmd.compile.cpu.math.coefficients_piecewise import Pieces
from spmd.compile.cpu.math.floats import Floats
from spmd.compile.native.llvm.vector_emitter import float_literals

# Lanes of a register, which are the numbers of a short table, and the digits of a piece's number.
LANES = 16
_PIECES = 32


def look_up(m: Floats, name: str, table: Sequence[float], places: str) -> str:
    """The numbers of a table of 16, each at the place that the lowest bits of a float name.

    `name` is the table's own in the module.
    """
    e = m.emitter
    (numbers,) = _load(m, name, table)

    def pick(given: str) -> str:
        kind, integers = e.type(m.element), e.type(m.integer)
        permute = "@llvm.x86.avx512.permvar.sf.512"
        e.module.declare(permute, f"declare {kind} {permute}({kind}, {integers})")
        return e.set(f"call {kind} {permute}({kind} {numbers}, {integers} {m.to_bits(given)})")

    return e.in_registers(pick, m.element, LANES, places)


def in_pieces(m: Floats, x: str, pieces: Pieces) -> str:
    """A function in pieces of an x that is not negative; NaN stays NaN."""
    e = m.emitter
    # Exponent and upper two digits of the mantissa number the pieces; the lowest five bits of that
    # are a place in the tables. All below the least has the place of the last quarter before it.
    below, digits = pieces.least * 0.875, m.mantissa - 2
    first = 4 * (m.bias + math.frexp(below)[1] - 1) + 3
    rows = [pieces.rows[k] if k < len(pieces.rows) else pieces.rows[0] for k in range(_PIECES)]
    order = [(place - first) % _PIECES for place in range(_PIECES)]
    columns = [[rows[k][column] for k in order] for column in range(len(rows[0]))]
    tables = _load(m, pieces.name, [number for column in columns for number in column])

    def evaluate(x: str) -> str:
        most, least = m.const(pieces.most), m.const(below)
        x = m.select(m.is_("ogt", x, most), most, x)
        inside = m.select(m.is_("ogt", x, least), x, least)
        places = m.int_op("lshr", m.to_bits(inside), m.int(digits))
        centre, *upwards = _picks_of_two(m, tables, places)
        distance = m.exact_sub(x, centre)
        result = upwards.pop()
        while upwards:
            result = m.fma(result, distance, upwards.pop())
        return result

    return e.in_registers(evaluate, m.element, LANES, x)


def _picks_of_two(m: Floats, tables: Sequence[str], places: str) -> list[str]:
    """The numbers at some places of tables, each of which is two registers."""
    e = m.emitter
    kind, integers = e.type(m.element), e.type(m.integer)
    permute = "@llvm.x86.avx512.vpermi2var.ps.512"
    e.module.declare(permute, f"declare {kind} {permute}({kind}, {integers}, {kind})")
    return [
        e.set(f"call {kind} {permute}({kind} {low}, {integers} {places}, {kind} {high})")
        for low, high in zip(tables[::2], tables[1::2], strict=True)
    ]


def _load(m: Floats, name: str, numbers: Sequence[float]) -> list[str]:
    """Load the registers of a constant."""
    e, count = m.emitter, len(numbers)
    values = ", ".join(f"{m.element} {x}" for x in float_literals(numbers, m.element))
    kind = f"[{count} x {m.element}]"
    e.module.declare(f"@{name}", f"@{name} = internal constant {kind} [{values}], align 64")
    with e.at_width(LANES):
        return e.load_vectors(f"@{name}", m.element, count // LANES, align=64)
