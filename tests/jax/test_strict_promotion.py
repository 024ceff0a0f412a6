"""Functions that JAX runs under its strict settings run here under them.

The settings `numpy_rank_promotion="raise"` and `numpy_dtype_promotion="strict"` find promotions in
a user's program. What a function of the library promotes inside is not the user's: an error about
it would ask the user to mend the library.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import spmd
from spmd.errors import DtypeError, ShapeError

jax = pytest.importorskip("jax", reason="the oracle of these tests is JAX")

MODULES = """
numpy numpy.linalg numpy.fft nn random scipy.special scipy.signal scipy.linalg scipy.ndimage
scipy.integrate scipy.fft scipy.cluster.vq lax scipy.stats
""".split()

DISTRIBUTIONS = """
bernoulli beta betabinom binom cauchy chi2 dirichlet expon gamma gennorm geom laplace logistic
multinomial nbinom norm pareto poisson t truncnorm uniform vonmises wrapcauchy
""".split()

SETTINGS = (("numpy_rank_promotion", "raise"), ("numpy_dtype_promotion", "strict"))

# These change the process or a file, or are for loops.
LEFT_OUT = """
save savez load fromfile frombuffer set_printoptions printoptions while_loop fori_loop key PRNGKey
""".split()

# Of dot's operands JAX promotes those of two dtypes without asking.
DEVIATIONS = {"lax.dot"}

_rng = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return _rng.uniform(0.1, 0.9, shape).astype(np.float32)


def symmetric(n: int) -> np.ndarray:
    x = floats(n, n)
    return (x @ x.T + n * np.eye(n)).astype(np.float32)


_i = np.arange(4, dtype=np.int32)
ARGUMENTS: tuple[tuple[Any, ...], ...] = (
    (floats(4),),
    (floats(4), floats(4)),
    (floats(4), floats(4), floats(4)),
    (floats(3, 4),),
    (floats(3, 4), floats(3, 4)),
    (floats(3, 4), floats(3, 4), floats(3, 4)),
    (symmetric(3),),
    (symmetric(3), symmetric(3)),
    (symmetric(3), floats(3)),
    (floats(3), floats(3), symmetric(3)),
    (floats(3, 4, 4),),
    (_i,),
    (_i, _i[::-1].copy()),
    (floats(4), 2),
    (floats(3, 4), 1),
    (floats(4), floats(4), 2),
    (floats(3, 4), np.array([0, 2], np.int32)),
    (floats(64), floats(64)),
)
AFTER_A_KEY: tuple[tuple[Any, ...], ...] = (
    (),
    (floats(4),),
    (floats(4), floats(4)),
    ((3,),),
    (floats(3), symmetric(3)),
    (0.5, (3,)),
    (0.5, 2.0, (3,)),
    (_i,),
    (np.float32(5.0), np.float32(0.5), (3,)),
    (np.float32(5.0), floats(4)),
)


def functions(name: str) -> Iterator[tuple[str, Any, Any]]:
    """The public functions that both libraries have in a module: name, ours and JAX's."""
    modules = [name]
    if name == "scipy.stats":
        modules += [f"{name}.{d}" for d in DISTRIBUTIONS]
    for module in modules:
        theirs = importlib.import_module(f"jax.{module}")
        try:
            ours = importlib.import_module(f"spmd.{module}")
        except ModuleNotFoundError:
            ours = getattr(importlib.import_module("spmd.scipy.stats"), module.split(".")[-1])
        for public in sorted(dir(theirs)):
            f, g = getattr(ours, public, None), getattr(theirs, public)
            is_function = callable(f) and not inspect.isclass(g) and not inspect.isclass(f)
            if is_function and not inspect.ismodule(g) and public not in LEFT_OUT:
                if public[0] != "_" and f"{module}.{public}" not in DEVIATIONS:
                    yield f"{module}.{public}", f, g


def called(library: Any, f: Any, arguments: tuple[Any, ...], keyed: bool) -> None:
    given = [library.numpy.asarray(x) if isinstance(x, np.ndarray) else x for x in arguments]
    library.block_until_ready(f(*([library.random.key(0)] * keyed), *given))


def promotion_error(f: Any, arguments: tuple[Any, ...], keyed: bool, name: str) -> str | None:
    """The message with which our function refuses arguments because of a setting."""
    try:
        called(spmd, f, arguments, keyed)
    except (DtypeError, ShapeError) as error:
        return str(error).splitlines()[0] if name in str(error) else None
    except Exception:
        return None  # not made for these arguments
    return None


def accepted_by_jax(f: Any, arguments: tuple[Any, ...], keyed: bool) -> bool:
    try:
        called(jax, f, arguments, keyed)
    except Exception:
        return False
    return True


@pytest.mark.parametrize("module", MODULES)
def test_what_jax_accepts_under_strict_settings_is_accepted(module: str) -> None:
    refused, tried = [], 0
    keyed = module == "random"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for public, ours, theirs in functions(module):
            for arguments in AFTER_A_KEY if keyed else ARGUMENTS:
                for name, value in SETTINGS:
                    tried += 1
                    with getattr(spmd, name)(value):
                        said = promotion_error(ours, arguments, keyed, name)
                    if said is None:
                        continue
                    with getattr(jax, name)(value):
                        if accepted_by_jax(theirs, arguments, keyed):
                            refused.append(f"{public}: {said}")
    assert tried
    assert not refused, "\n".join(refused)


def test_the_callers_own_promotions_are_found() -> None:
    """Functions that promote inside still ask for one dtype of what they are given."""
    x, y = spmd.numpy.arange(4.0), spmd.numpy.arange(4)
    with spmd.numpy_dtype_promotion("strict"):
        for f in (
            lambda: spmd.numpy.polyfit(x, y, 1),
            lambda: spmd.numpy.polyfit(x, y=y, deg=1),
            lambda: spmd.numpy.trapezoid(x=y, y=x),
            lambda: spmd.numpy.trapezoid(x, y),
            lambda: spmd.scipy.signal.csd(x, y),
            lambda: spmd.jit(spmd.numpy.polyval)(x, y),
        ):
            with pytest.raises(DtypeError, match="numpy_dtype_promotion is 'strict'"):
                f()
