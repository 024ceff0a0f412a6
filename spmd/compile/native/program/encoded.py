"""A program as the executor takes it: its words, and facts about them for the runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from spmd.base.record import record
from spmd.compile.native.llvm.compiler import Address
from spmd.compile.native.program.steps import Step

StepsById: TypeAlias = Sequence[Step] | Mapping[int, Step]


@record
class Encoded:
    """The words of a program and the facts about it for the runner."""

    words: np.ndarray
    steps: StepsById  # of a loaded program only those that call Python
    levels: int
    max_args: int
    cost_ps: int
    bases: int
    devices: int
    calls_python: bool
    is_open: bool  # whether only run time knows how long it takes
    parts: tuple[str, ...]  # of the runtime, beside its core
    places: tuple[tuple[int, Address], ...] = ()  # the words that are addresses of compiled code
