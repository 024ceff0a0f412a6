"""Runs random programs beside JAX: one seed, or the seeds from the first number to the second."""

from __future__ import annotations

import sys

import tests.conftest  # noqa: F401  (sets the environment before JAX reads it)
from tests.jax.random_programs import draw, fault, report

first = int(sys.argv[1])
last = int(sys.argv[2]) if len(sys.argv) > 2 else first + 1
for seed in range(first, last):
    program = draw(seed)
    if last == first + 1:
        print(program)
    if fault(program):
        print(f"# {'-' * 90}\n{report(seed, program)}", flush=True)
