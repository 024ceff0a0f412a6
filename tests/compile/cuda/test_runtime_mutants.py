"""Mistakes of the runtime of GPUs: each is told with the name of a step, before anything runs.

The laws are of programs, not of runs, so no seed of the emulator matters. Mistakes whose report is
a matter of runs (events, barriers, bounds) are in `test_overlap.py` and `test_mutants.py`; uses of
donated arguments in `tests/compile/schedule/test_memory_check.py`.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd import numpy as snp
from spmd.base.errors import InternalError
from spmd.compile.cuda import assemble
from spmd.compile.cuda.assemble import Builder

pytestmark = pytest.mark.usefixtures("gpus")

X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)


def called(x):
    shape = spmd.ShapeDtypeStruct(x.shape, x.dtype)
    return spmd.pure_callback(np.flip, shape, x * 2, vmap_method="sequential") + 1


# Programs in which the host has a part, and the names of the steps where it has.
PROGRAMS = {
    "callback": (called, ["pure_callback"]),
    "loop": (lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 2 + 1, x), ["while"]),
    "branch": (lambda x: lax.cond(x.sum() > 0, snp.sin, snp.cos, x), ["branch"]),
    "branch in a loop": (
        lambda x: lax.fori_loop(0, 3, lambda k, c: lax.cond(c[0, 0] > k, snp.sin, called, c), x),
        ["branch", "pure_callback"],
    ),
    "loop in a loop": (
        lambda x: lax.while_loop(
            lambda c: c.sum() < 9,
            lambda c: lax.while_loop(lambda d: d.max() < 5, lambda d: d * d + 1, c) + 1,
            x,
        ),
        ["while"],
    ),
}


def compiled(name: str) -> None:
    """Compile a program, whose code nobody has kept."""
    function = PROGRAMS[name][0]
    spmd.clear_caches()
    spmd.jit(lambda x: function(x)).lower(X).compile()


def told(name: str, monkeypatch: pytest.MonkeyPatch, method: str, mutant) -> int:
    """How many mutants of a program there are: of each, one call of a method is replaced."""
    plain = getattr(Builder, method)
    for number in itertools.count():
        calls = itertools.count()

        def replaced(self, *args, number=number, calls=calls):
            return (mutant if next(calls) == number else plain)(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(Builder, method, replaced)
            try:
                compiled(name)
            except InternalError as error:
                assert any(step in str(error) for step in PROGRAMS[name][1]), error
                continue
        assert next(calls) <= number, f"{method} number {number} of {name} is not told"
        return number
    return 0


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_wait_of_the_host_is_needed(name, monkeypatch):
    """The wait becomes an event, which nobody waits for."""

    def without(self, step_name, *_):
        return self.record_event(0, self.new_event(), step_name)

    assert told(name, monkeypatch, "wait", without) >= len(PROGRAMS[name][1])


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_host_read_of_an_address_of_a_device_is_told(name, monkeypatch):
    """One copy to staging memory is left out, and the host looks at the device's."""
    with_places = assemble.with_places

    def read_there(self, step):
        if isinstance(step, assemble.While):
            *before, loop = loop_on_host(self, step)
            return [*before, assemble.replace(loop, predicate=self.slot(step.predicate))]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(assemble, "with_places", lambda s, place: with_places(s, self.slot))
            return on_host(self, step)

    on_host, loop_on_host = Builder.on_host, Builder.loop_on_predicate
    assert told(name, monkeypatch, "on_host", read_there) >= len(PROGRAMS[name][1])
