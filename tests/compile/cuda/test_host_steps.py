"""The steps that only the host computes: all of them, with a reason, are in docs/cuda.md."""

from __future__ import annotations

import collections

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.base.config import config
from spmd.compile.cuda.assemble import legalise
from spmd.compile.executable.backend import CPU
from spmd.compile.executable.build import make_schedule
from spmd.compile.lower.steps import Host, walk
from spmd.compile.passes.pipeline import run_passes
from tests.conftest import ROOT
from tests.lax.test_records_programs import ALL


@pytest.fixture(autouse=True)
def wide():
    """Keep numbers of 64 bits."""
    with config.override("enable_x64", True):
        yield


COMPLEX = "NumPy's functions know the branch cuts and the infinities of complex numbers."
SERIES = "A series or an iteration whose length differs from element to element."
COMBINE = "Kernels combine real numbers; complex numbers and booleans have no such operation there."
LAPACK = "It is LAPACK's, or a recurrence in which each step needs the one before."
REASONS = {
    **dict.fromkeys(
        "acos acosh asin asinh atan atanh cos cosh exp2 expm1 log1p logistic pow rsqrt sign sin "
        "sinh tan tanh".split(),
        COMPLEX,
    ),
    **dict.fromkeys(
        "bessel_i0e bessel_i1e bessel_over_power cosine_integral dawsn erfcx exp1 expi expn "
        "fresnel_c fresnel_s hyp1f1 hyp1f1_slope hyp2f1 hyp2f1_slope igamma igamma_grad_a igammac "
        "owens_t polygamma random_gamma_grad regularized_incomplete_beta sine_integral spence "
        "wofz zeta".split(),
        SERIES,
    ),
    **dict.fromkeys(
        "cumprod max min reduce_prod reduce_window_max reduce_window_min reduce_window_sum "
        "scatter_add scatter_max scatter_min scatter_mul".split(),
        COMBINE,
    ),
    **dict.fromkeys(
        "cholesky cholesky_update eig eigh geqrf hessenberg householder_product lu "
        "lu_pivots_to_permutation ormqr qr schur solve sqrtm svd sylvester triangular_solve "
        "tridiagonal tridiagonal_solve".split(),
        LAPACK,
    ),
    **dict.fromkeys(("debug_callback", "pure_callback"), "It is Python of the user."),
    **dict.fromkeys(("nextafter", "reduce_precision"), "It works on the bits of a number."),
    "bitcast_convert_type": "To another width: the same bytes in another shape.",
    "cumsum": COMBINE,
    "pad": "With elements cut off and others spread out, in one step.",
    "cumlogsumexp": "Its running value is a largest number and a sum; scans carry one number.",
    "fft": "It is NumPy's.",
    "rng_bit_generator": "Its bits are XLA's, in XLA's order; `threefry2x32` runs in kernels.",
}


def host_steps() -> dict[str, set[str]]:
    """By primitive, the dtypes of the op records in which the host computes a step."""
    found: dict[str, set[str]] = collections.defaultdict(set)
    for record in ALL:
        for dtype in record.dtypes:

            def call(*given, record=record):
                return record.function(lax, *given)

            closed = spmd.make_jaxpr(call)(*record.make(dtype))
            schedule = make_schedule(run_passes(closed), CPU)
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
