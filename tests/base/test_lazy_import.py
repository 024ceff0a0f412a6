"""What is imported when it is asked for, wherever that is."""

import subprocess
import sys

import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.base.context import state, undisturbed
from spmd.core.trace import EVAL

# Everything that is imported late is asked for first while something else goes on.
INSIDE = """
import sys, threading, warnings
import spmd, spmd.numpy as snp
from spmd import lax

late = ["spmd.nn", "spmd.random", "spmd.debug", "spmd.scipy"]
late += ["spmd.numpy._lazy_names", "spmd.lax._lazy_names"]
assert not {*late} & {*sys.modules}, sorted({*late} & {*sys.modules})

def f(x):
    noise = spmd.random.normal(spmd.random.key(0), x.shape)
    spmd.debug.callback(lambda _: None, x)
    made = spmd.nn.gelu(x) + lax.erf(x) + snp.linalg.norm(x) + snp.gcd(4, 6) + noise
    return snp.sum(made + spmd.scipy.special.expit(x))

x = snp.linspace(0.1, 1, 4)
inside = spmd.vmap(spmd.jit(spmd.grad(f)), axis_name="i")(snp.stack([x, x]))
assert not {*late} - {*sys.modules}
outside = spmd.grad(f)(x)
assert snp.allclose(inside[0], outside, rtol=1e-4), (inside, outside)
assert float(f(x)) == float(f(x))
"""

IN_THREADS = """
import sys, threading
import spmd
found, start = [], threading.Barrier(8)
def ask(name):
    start.wait()
    found.append(getattr(spmd, name).__name__)
names = ["nn", "random", "debug", "ops"] * 2
threads = [threading.Thread(target=ask, args=(name,)) for name in names]
for t in threads: t.start()
for t in threads: t.join(60)
assert sorted(found) == sorted(f"spmd.{name}" for name in names), found
"""


@pytest.mark.parametrize("program", [INSIDE, IN_THREADS], ids=["inside", "in_threads"])
def test_deferred_modules_are_imported_at_their_first_use(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", [spmd, snp, lax], ids=lambda p: p.__name__)
def test_all_names_are_there_and_no_others(package):
    names = dir(package)
    assert {"nn", "linalg"} & set(names)
    for name in names:
        assert getattr(package, name) is getattr(package, name)
    with pytest.raises(AttributeError, match=f"{package.__name__}.*no_such_name"):
        _ = package.no_such_name
    with pytest.raises(AttributeError, match="__no_such_name__"):
        _ = package.__no_such_name__


def test_a_star_import_has_late_names_too():
    seen: dict[str, object] = {}
    exec("from spmd.numpy import *", seen)
    assert seen["linalg"] is snp.linalg and seen["unique"] is snp.unique and "more" not in seen


def test_undisturbed_begins_anew_and_ends_as_it_was():
    seen = []

    def f(x):
        before = state.trace, state.axes
        with pytest.raises(KeyError), undisturbed():
            seen.append((state.trace is EVAL, state.axes, float(snp.sum(snp.ones(3)))))
            raise KeyError
        assert (state.trace, state.axes) == before
        return x + 1

    spmd.vmap(spmd.jit(f), axis_name="i")(snp.arange(3.0))
    assert seen == [(True, (), 3.0)]
    assert state.trace is EVAL
