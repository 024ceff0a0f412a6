"""Checks in a partitioned program: of whole values, alike on every device.

All devices find the same, so all of them stop at the same check, the first of the program that
fails. The values of a message are made whole only if it is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.collectives.psum import pmin
from spmd.core.aval import typeof
from spmd.core.ir import Eqn
from spmd.lax.control_cond import named_switch
from spmd.lax.convert import convert_element_type
from spmd.lax.logic import gt
from spmd.partition.unasked import asked
from spmd.partition.values import Sizes, Value, total_form, unsplit


def write_check(eqn: Eqn, operands: Sequence[Value], sizes: Sizes) -> list[Value]:
    """A check of a whole value; `operands` are the value and what the message shows."""
    if eqn.params["debug"]:
        return []  # it would do nothing
    fine, *shown = operands
    if all(total_form(unsplit(x.cell)) in x.forms for x in shown):
        values = [x.read(unsplit(x.cell), sizes) for x in shown]
        eqn.prim.bind(fine.read((), sizes), *values, **eqn.params)
        return []
    is_fine = _agreed(fine, sizes)

    def check() -> list[Any]:
        with asked():
            values = [x.copy().read(unsplit(x.cell), sizes) for x in shown]
        eqn.prim.bind(gt(is_fine, np.int32(0)), *values, **eqn.params)
        return []

    named_switch("lax.cond", is_fine, [check, lambda: []], [], ["the check", "nothing"])
    return []


def _agreed(fine: Value, sizes: Sizes) -> Any:
    """1 or 0, of which the type says that it is equal on all devices: they branch alike."""
    form = fine.partial()
    term = fine.forms[form] if form is not None and form[2] == "and" else fine.read((), sizes)
    number = convert_element_type(term, np.dtype(np.int32))
    varies = tuple(a for a in sizes if a in typeof(number).vma)
    return pmin(number, varies) if varies else number
