"""The steps that only the host computes: all of them, with a reason, are in docs/cuda.md."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd import numpy as snp
from spmd.base.config import config
from spmd.compile.cuda.assemble import legalise
from spmd.compile.executable.build import make_schedule
from spmd.compile.executable.cuda_backend import BACKEND
from spmd.compile.lower.steps import Host, walk
from spmd.compile.passes.pipeline import PASSES, run_passes
from tests.conftest import ROOT
from tests.lax.test_records_programs import ALL


@pytest.fixture(autouse=True)
def wide():
    """Keep numbers of 64 bits."""
    with config.override("enable_x64", True):
        yield


LAPACK = "It is LAPACK's: an iteration whose next step depends on what the last one found."
REASONS = {
    **dict.fromkeys(
        "eig schur sqrtm sylvester".split(),
        LAPACK,
    ),
    **dict.fromkeys(("debug_callback", "pure_callback"), "It is Python of the user."),
}


def host_steps() -> dict[str, set[str]]:
    """By primitive, the dtypes of the op records in which the host computes a step."""
    found: dict[str, set[str]] = collections.defaultdict(set)
    for record in ALL:
        for dtype in record.dtypes:

            def call(*given, record=record):
                return record.function(lax, *given)

            closed = spmd.make_jaxpr(call)(*record.make(dtype))
            optimised = run_passes(closed, passes=BACKEND.passes(PASSES))
            schedule = make_schedule(optimised, BACKEND)
            for step in walk(schedule.steps):
                if isinstance(step, Host):
                    found[step.name].add(np.dtype(dtype).name)
    return found


def table(found: dict[str, set[str]]) -> str:
    """Primitives with one reason and the same dtypes share a row."""
    rows: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for name in sorted(found):
        rows[REASONS[name], ", ".join(sorted(found[name]))].append(f"`{name}`")
    lines = ["| primitives | dtypes | why the host computes them |", "|---|---|---|"]
    lines += [f"| {' '.join(names)} | {dtypes} | {why} |" for (why, dtypes), names in rows.items()]
    return "\n".join(lines)


BEGIN, END = "<!-- host steps: written by pytest --update-golden -->\n", "\n<!-- end -->"


def test_the_page_lists_each_step_of_the_host_with_a_reason(request):
    assert legalise.__module__ == "spmd.compile.cuda.assemble"  # which adds no step of the host
    found = host_steps()
    assert set(found) == set(REASONS)
    page = ROOT / "docs" / "cuda.md"
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    listed, after = rest.split(END)
    wanted = table(found)
    if request.config.getoption("--update-golden"):
        page.write_text(f"{before}{BEGIN}{wanted}{END}{after}", encoding="utf-8")
        return
    assert listed == wanted, "if the change is meant: pytest --update-golden"


@pytest.mark.usefixtures("gpus")
def test_log_compiles_names_what_the_host_computes(capfd):
    x = np.eye(3)
    with config.override("log_compiles", True):
        spmd.jit(lambda x: lax.linalg.cholesky(x) + lax.linalg.eig(x)[0].real)(x)
    told = [line for line in capfd.readouterr().err.splitlines() if "the host computes" in line]
    assert len(told) == 1
    assert told[0].startswith("spmd: the host computes eig ") and "test_host_steps.py:" in told[0]


# ---- steps that were the host's ------------------------------------------------------------------


@pytest.fixture(params=["cpu", "cuda"])
def platform(request):
    with (
        config.override("cuda_driver", "emulator"),
        config.override("num_cuda_devices", 4),
        config.override("platform", request.param),
    ):
        yield request.param


def all_bits(name: str) -> np.ndarray:
    """All numbers of 16 bits; of wider dtypes, numbers of all sizes and the special ones."""
    dtype = np.dtype(snp.dtype(name))
    if dtype.itemsize == 2:
        return np.arange(1 << 16, dtype=np.uint16).view(dtype)
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 63, 3000, np.uint64) << np.uint64(1)
    bits |= rng.integers(0, 2, 3000, np.uint64)
    numbers = (bits >> np.uint64(64 - 8 * dtype.itemsize)).astype(f"u{dtype.itemsize}").view(dtype)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.5, 65519.0, 65520.0, 6e-8], dtype)
    return np.concatenate([numbers, special, np.nextafter(special, dtype.type(1))])


def assert_same_numbers(found, wanted) -> None:
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.dtype == wanted.dtype
    is_nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(found), is_nan)
    bits = f"u{wanted.dtype.itemsize}"
    np.testing.assert_array_equal(found[~is_nan].view(bits), wanted[~is_nan].view(bits))


def definition(prim: Any, *operands: Any, **params: Any) -> Any:
    return prim.impl(np, *operands, **params)


def without_host(function, *args):
    compiled = spmd.jit(function).lower(*args).compile()
    assert "host" not in compiled.as_text()
    return compiled(*args)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    "bits", [(5, 10), (8, 7), (4, 3), (5, 2), (2, 1), (11, 52), (8, 0)], ids=str
)
def test_reduced_precision_is_that_of_the_definition(platform, name, bits):
    x = all_bits(name)
    how = {"exponent_bits": bits[0], "mantissa_bits": bits[1]}
    found = without_host(lambda x: lax.reduce_precision(x, **how), x)
    with np.errstate(all="ignore"):
        assert_same_numbers(found, definition(lax.reduce_precision_p, x, **how))
        if name == "float32" and bits == (8, 7):  # a twin of another kind
            narrow = x.astype(snp.dtype("bfloat16")).astype(np.float32)
            assert_same_numbers(
                np.where(np.abs(x) < 1e-37, 0, found), np.where(np.abs(x) < 1e-37, 0, narrow)
            )


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_the_next_number_of_16_bits(platform, name):
    x = all_bits(name)
    towards = [np.roll(x, k) for k in (1, -1, 7, 1 << 15)]
    towards += [np.full_like(x, y) for y in (0.0, -0.0, np.inf, -np.inf, np.nan)]
    for y in [*towards, x]:
        found = without_host(lax.nextafter, x, y)
        with np.errstate(all="ignore"):
            # From a number to its equal leads nowhere: JAX gives y, NumPy x for float16.
            assert_same_numbers(found, np.where(x == y, y, np.nextafter(x, y)))


@pytest.mark.parametrize("reverse", [False, True])
def test_running_sums_of_complex_numbers(platform, reverse):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(3, 70)) + 1j * rng.normal(size=(3, 70))).astype(np.complex64)
    found = without_host(lambda x: lax.cumsum(x, 1, reverse=reverse), x)
    wanted = np.cumsum(x[:, ::-1], 1)[:, ::-1] if reverse else np.cumsum(x, 1)
    np.testing.assert_allclose(found, wanted, 1e-5, 1e-5)


def test_bits_of_another_width_are_copied(platform):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)

    def call(x):
        parts = lax.bitcast_convert_type(x * 2, np.uint16)
        return parts, lax.bitcast_convert_type(parts, np.int32) + 1

    parts, whole = without_host(call, x)
    np.testing.assert_array_equal(parts, (x * 2).view(np.uint16).reshape(3, 4, 2))
    np.testing.assert_array_equal(whole, (x * 2).view(np.int32) + 1)


@pytest.mark.parametrize(
    "config_of_dims",
    [
        ((1, -1, 1), (-1, 2, 0)),
        ((-3, -2, 2), (-1, -1, 1)),
        ((-4, 9, 3), (2, -5, 2)),
        ((-9, 12, 1), (0, 0, 1)),
    ],
    ids=str,
)
def test_padding_between_elements_of_which_some_are_cut_off(platform, config_of_dims):
    x = np.arange(1.0, 21).reshape(5, 4)
    found = without_host(lambda x: lax.pad(x, 0.5, config_of_dims), x)
    assert_same_numbers(
        found, definition(lax.pad_p, x, np.float64(0.5), padding_config=config_of_dims)
    )
