"""Each program's values, and how many kernels and copies it takes."""

from __future__ import annotations

import numpy as np
import pytest

from spmd.api.compiled import jit
from spmd.api.inspect import disable_jit
from spmd.base.tree import tree_flatten
from spmd.compile.lower.lowering import lower
from spmd.compile.lower.steps import Copy, Host, Launch, blocks
from spmd.compile.passes import pipeline
from tests.compile.fusion_programs import PROGRAMS


def steps_of(function, inputs):
    """All steps of a program's schedule, those in loops too."""
    closed = pipeline.run_passes(jit(function).trace(*inputs).jaxpr)
    found, stack = [], list(lower(closed).steps)
    while stack:
        step = stack.pop()
        found.append(step)
        stack += [inner for block in blocks(step) for inner in block]
    return found


def counts(name):
    steps = steps_of(*PROGRAMS[name])
    kinds = {"kernels": Launch, "copies": Copy, "host steps": Host}
    number = {word: sum(isinstance(s, kind) for s in steps) for word, kind in kinds.items()}
    return ", ".join(f"{n} {word}" for word, n in number.items() if n or word == "kernels")


def test_kernel_counts(golden):
    golden("kernel_counts.txt", "".join(f"{name}: {counts(name)}\n" for name in PROGRAMS))


@pytest.mark.parametrize("name", PROGRAMS)
def test_values(name):
    function, inputs = PROGRAMS[name]
    with disable_jit():
        expected, tree = tree_flatten(function(*inputs))
    results, same_tree = tree_flatten(jit(function)(*inputs))
    assert tree == same_tree
    for got, want in zip(results, expected, strict=True):
        want = np.asarray(want)
        scale = np.maximum(1.0, np.abs(want).max(initial=0.0))
        np.testing.assert_allclose(got, want, rtol=3e-5, atol=2e-6 * scale)
