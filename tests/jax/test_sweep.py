"""Calls made from tables, beside JAX's: structure, shapes, dtypes, weak types, values, exceptions.

A line of `sweep_calls/*.txt` is an expression with choices, `jnp.{{sum|max}}(x("i4", 2, 3))`, and
stands for all its combinations, or for `SAMPLE` of them. Calls are traced, which is cheap; those of
a line that begins with `=` are computed too, and compared in units of the last place.
`sweep_calls/differences.txt` has the calls that are meant to differ; none of them may agree.

`python -m tests.jax.test_sweep 200` makes that many calls of each line, and prints what differs.
"""

from __future__ import annotations

import builtins
import itertools
import random
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spmd

jax = pytest.importorskip("jax", reason="the oracle of these tests is JAX")
jnp = pytest.importorskip("jax.numpy")

FOLDER = Path(__file__).parent / "sweep_calls"
DIFFERENCES = FOLDER / "differences.txt"
TABLES = sorted(FOLDER.glob("*.txt"))
TABLES.remove(DIFFERENCES)
SAMPLE = 4
# Functions that JAX has not; and values that its traces do not know, which are concrete here.
NOT_COMPARED = {"AttributeError", "NonConcreteBooleanIndexError", "ConcretizationTypeError"}
ULPS = 64  # of the largest element: functions differ in method, and XLA contracts products

DTYPES = {
    "b1": np.bool_, "i1": np.int8, "i4": np.int32, "u1": np.uint8, "u4": np.uint32,
    "bf": jnp.bfloat16, "f2": np.float16, "f4": np.float32, "c8": np.complex64,
}  # fmt: skip
MACROS = {
    "ALL": "|".join(DTYPES),
    "FEW": "b1|i4|u1|bf|f4|c8",
    "AX": "None|0|1|-1|(0,1)|()|2",
    "K": "True|False",
}


def numbers(dtype: str, *shape: int, seed: int = 0) -> np.ndarray:
    """Numbers that depend on dtype, shape and seed alone, in NumPy."""
    kind, rng = np.dtype(DTYPES[dtype]), np.random.RandomState(seed + sum(shape))
    if dtype == "b1":
        return rng.rand(*shape) < 0.5
    if kind.kind in "iu":
        return rng.randint(-5 * (kind.kind == "i"), 6, shape).astype(kind)
    real = np.round(rng.randn(*shape) * 16) / 8
    return (real + 1j * rng.randn(*shape) if kind.kind == "c" else real).astype(kind)


def special(dtype: str) -> np.ndarray:
    """Bounds, zeros, infinities and NaNs of a dtype."""
    kind = np.dtype(DTYPES[dtype])
    if dtype == "b1":
        return np.array([True, False])
    if kind.kind in "iu":
        ends = np.iinfo(kind)
        return np.array([ends.min, ends.max, 0, 1, 2, 3, 5, 10, 31], kind)
    real = [np.inf, -np.inf, np.nan, 0.0, -0.0, 0.25, 0.5, 1.0, -1.0, 1.5, 2.5, -3.0, 10.0, -13.25]
    return np.array(real, kind)


def namespace(j: Any, numpy: Any) -> dict[str, Any]:
    """The names that an expression uses, of one library."""
    return {
        "jax": j, "jnp": numpy, "lax": j.lax, "sp": j.scipy.special, "st": j.scipy.stats,
        "jsp": j.scipy, "nn": j.nn, "jr": j.random, "ops": j.ops, "image": j.image,
        "la": numpy.linalg, "np": np, "inf": np.inf, "nan": np.nan, "d": DTYPES,
        "x": lambda *args, **seed: numpy.asarray(numbers(*args, **seed)),
        "S": lambda dtype: numpy.asarray(special(dtype)),
        "A": lambda value, dtype=None: numpy.asarray(np.array(value, dtype and DTYPES[dtype])),
    }  # fmt: skip


def libraries() -> tuple[Any, Any]:
    """Names of spmd and of JAX, with the packages that either imports late."""
    for library in (spmd, jax):
        for late in ("nn", "scipy.special", "scipy.stats", "scipy.linalg", "scipy.signal",
                     "scipy.fft", "image", "ops", "scipy.ndimage"):  # fmt: skip
            __import__(f"{library.__name__}.{late}")
    return namespace(spmd, spmd.numpy), namespace(jax, jnp)


def calls(path: Path, sample: int = SAMPLE) -> Iterator[tuple[str, bool]]:
    """The calls of a table, and whether their values are compared."""
    for line in path.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        values, line = line.startswith("="), line.removeprefix("=").strip()
        for name, choices in MACROS.items():
            line = line.replace("{{" + name + "}}", "{{" + choices + "}}")
        fixed, *rest = re.split(r"\{\{(.*?)\}\}", line)
        choices = [part.split("|") for part in rest[::2]]
        combined = list(itertools.product(*choices))
        if len(combined) > sample:
            combined = random.Random(line).sample(combined, sample)
        for chosen in combined:
            pairs = zip(chosen, rest[1::2], strict=True)
            yield fixed + "".join(a + b for a, b in pairs), values


def outcome(j: Any, names: dict[str, Any], call: str, values: bool) -> Any:
    """The classes of the exception, or for each array of the result what is compared of it."""
    other: list[str] = []

    def run() -> list[Any]:
        leaves = j.tree.leaves(eval(call, dict(names)))
        numeric = (j.Array, np.ndarray, np.generic, bool, int, float, complex)
        other.extend(type(x).__name__ for x in leaves if not isinstance(x, numeric))
        return [x for x in leaves if isinstance(x, numeric)]

    try:
        found = run() if values else j.eval_shape(run)
    except Exception as error:
        return [c.__name__ for c in type(error).__mro__ if c not in (object, Exception)]
    if values:
        found = [j.numpy.asarray(x) for x in found]
        found = [j.random.key_data(x) if "key" in str(x.dtype) else x for x in found]
    types = [(str(x.dtype), tuple(x.shape), bool(x.weak_type) and x.dtype != bool) for x in found]
    return types, other, [np.asarray(x) for x in found] if values else []


def difference(found: Any, wanted: Any) -> str:
    """How two outcomes differ, or an empty text."""
    if isinstance(wanted, list):
        general = next(name for name in wanted if hasattr(builtins, name))
        same = isinstance(found, list) and (wanted[0] in found or general in found)
        return "" if same else f"{found if isinstance(found, list) else found[0]}, JAX {wanted}"
    if isinstance(found, list):
        return f"{found}, JAX {wanted[0]}"
    if found[:2] != wanted[:2]:
        return f"{found[:2]}, JAX {wanted[:2]}"
    for got, true in zip(found[2], wanted[2], strict=True):
        if true.dtype.kind in "biu" or true.dtype.names or not true.size:
            if not np.array_equal(got, true):
                return f"{got}, JAX {true}"
            continue
        wide = np.complex128 if true.dtype.kind == "c" else np.float64
        unit = float(jnp.finfo(true.dtype).eps)
        got, true = got.astype(wide), true.astype(wide)
        finite = np.abs(true[np.isfinite(true)])
        size = float(finite.max()) if finite.size else 0.0
        if not np.allclose(got, true, rtol=0, atol=ULPS * unit * size, equal_nan=True):
            return f"{got}, JAX {true}"
        zeros = (got == 0) & (true == 0)
        if (np.signbit(got.real) != np.signbit(true.real))[zeros].any():
            return f"a zero of another sign: {got}, JAX {true}"
    return ""


def differing(path: Path, sample: int = SAMPLE) -> dict[str, str]:
    """The calls of a table that differ, and how."""
    ours, theirs = libraries()
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call, values in calls(path, sample):
            wanted = outcome(jax, theirs, call, values)
            if isinstance(wanted, list) and NOT_COMPARED & set(wanted):
                continue
            text = difference(outcome(spmd, ours, call, values), wanted)
            if text:
                found[call] = text
    return found


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_calls_of_the_tables_give_what_jax_gives(path: Path):
    meant = set(DIFFERENCES.read_text().splitlines())
    found = differing(path)
    assert not (new := {c: t for c, t in found.items() if c not in meant}), "\n".join(
        f"{call}\n  here: {text}" for call, text in new.items()
    )
    stale = [call for call, _ in calls(path) if call in meant and call not in found]
    assert not stale, f"they agree; delete them from {DIFFERENCES.name}: {stale}"


def main() -> None:
    """Print what differs, with many calls of each line."""
    for path in TABLES:
        for call, text in differing(path, int(sys.argv[1])).items():
            print(f"{path.stem}: {call}\n  here: {text}", flush=True)


if __name__ == "__main__":
    main()
