"""Runs random programs beside JAX: one seed, or the seeds from the first number to the second.

`deeper` before the numbers takes those of the second family.
"""

from __future__ import annotations

import sys

import tests.conftest  # noqa: F401  (sets the environment before JAX reads it)
from tests.jax.random_programs import draw, fault, report

deeper = sys.argv[1] == "deeper"
first, *rest = map(int, sys.argv[1 + deeper :])
last = rest[0] if rest else first + 1
for seed in range(first, last):
    program = draw(seed, deeper)
    if last == first + 1:
        print(program)
    if fault(program):
        print(f"# {'-' * 90}\n{report(seed, program)}", flush=True)
