"""The comparison with `jax.numpy` that the tests of `spmd.numpy` share.

A case is a function of the module (`xp.sum(x, axis=0)`) and its arguments. Both libraries compute
it; values, shapes, dtypes and weak types must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp

jax = pytest.importorskip("jax", reason="the oracle of these tests is JAX")
jnp = pytest.importorskip("jax.numpy")


@dataclass
class Case:
    """A function of the array module and what it is called with."""

    name: str
    f: Callable[..., Any]
    args: tuple[Any, ...] = ()
    rtol: float = 2e-6
    atol: float = 2e-6
    traceable: bool = True

    def __str__(self) -> str:
        return self.name


def case(name: str, f: Callable[..., Any], *args: Any, **options: Any) -> Case:
    """A `Case`; `rtol` and `atol` are its tolerances, `traceable` whether it can be traced."""
    return Case(name, f, args, **options)


def values(*shape: int, dtype: Any = np.float32, low: float = -3.0, high: float = 3.0) -> Any:
    """Numbers that look random and are the same in every run: ties, zeros and signs occur."""
    count = int(np.prod(shape))
    rng = np.random.default_rng(count + 7 * len(shape))
    if np.dtype(dtype).kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if np.dtype(dtype).kind in "iu":
        return rng.integers(
            max(low, 0) if np.dtype(dtype).kind == "u" else low, high + 1, shape
        ).astype(dtype)
    x = rng.uniform(low, high, shape)
    if np.dtype(dtype).kind == "c":
        return (x + 1j * rng.uniform(low, high, shape)).astype(dtype)
    return x.astype(dtype)


def as_list(out: Any) -> list[Any]:
    """The arrays of a result."""
    return jax.tree_util.tree_leaves(out)


def to_numpy(x: Any) -> np.ndarray:
    """The values, as something NumPy can compare."""
    value = np.asarray(x)
    return value.astype(np.float32) if value.dtype.name == "bfloat16" else value


def is_array(x: Any) -> bool:
    """Whether an argument is traced; numbers and everything else are constants of the program."""
    return isinstance(x, np.ndarray | np.generic)


def arrays_of(c: Case) -> list[Any]:
    """The arguments that are arrays."""
    return [x for x in c.args if is_array(x)]


def call(c: Case, xp: Any, arrays: Any) -> list[Any]:
    """The case's arrays, computed by `xp` from its arguments with other values in the arrays."""
    values = iter(arrays)
    args = [next(values) if is_array(x) else x for x in c.args]
    return [out for out in as_list(c.f(xp, *args)) if hasattr(out, "dtype")]


def assert_agrees(*cases: Case) -> None:
    """Compare cases with JAX: computed at once, and traced.

    JAX compiles all of them as one program, which takes a tenth of the time.
    """
    operands = [arrays_of(c) for c in cases]
    traced = jax.jit(
        lambda every: [call(c, jnp, xs) for c, xs in zip(cases, every, strict=True)]
    ).trace(operands)
    results = traced.lower().compile()(operands)
    types = iter(traced.jaxpr.out_avals)
    for c, wanted in zip(cases, results, strict=True):
        try:
            assert_same(c, wanted, [next(types) for _ in wanted])
        except Exception as error:
            error.add_note(f"in the case {c.name}")
            raise


def assert_same(c: Case, wanted: list[Any], types: list[Any]) -> None:
    """Compare one case with what JAX computed and with the types it inferred."""
    operands = arrays_of(c)
    found = call(c, snp, operands)
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert np.shape(a) == np.shape(b), f"shape {np.shape(a)}, JAX has {np.shape(b)}"
        assert a.dtype == b.dtype, f"dtype {a.dtype}, JAX has {b.dtype}"
        np.testing.assert_allclose(to_numpy(a), to_numpy(b), rtol=c.rtol, atol=c.atol)
    if c.traceable:
        ours = spmd.make_jaxpr(lambda *xs: call(c, snp, xs))(*operands).out_avals
        for a, b in zip(ours, types, strict=True):
            assert type_of(a) == type_of(b), f"traced as {type_of(a)}, JAX has {type_of(b)}"


def type_of(aval: Any) -> tuple[Any, ...]:
    """Shape, dtype and weakness; whether a bool is weak makes no difference to anything."""
    weak = bool(aval.weak_type) and aval.dtype != np.bool_
    return (*aval.shape,), str(aval.dtype), weak
