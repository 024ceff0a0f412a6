"""All cases by subject, and the lists of the programs and of the collectives."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from benchmarks import programs, torch_programs
from benchmarks.case import BOTH, WIDE, Case, array, normal, of
from benchmarks.dispatch import dispatch_cases
from benchmarks.functions import function_cases
from benchmarks.kernels import elementwise_cases, move_cases, reduction_cases, row_cases
from benchmarks.libraries import library_cases
from benchmarks.products import attention_cases, conv_cases, product_cases
from benchmarks.sharding import sharding_cases
from benchmarks.sides import Side


def kernel_cases() -> list[Case]:
    """One operation, or a chain that should become one."""
    lists = (
        elementwise_cases,
        row_cases,
        reduction_cases,
        move_cases,
        product_cases,
        attention_cases,
        conv_cases,
    )
    return [case for cases in lists for case in cases()]


def program_cases() -> list[Case]:
    """Training steps, loops, second derivatives."""
    small, large = (64, 256, 128, 10), (784, 512, 512, 10)
    cases = [
        Case(
            f"programs/MLP {'-'.join(map(str, sizes))}, batch 128",
            partial(programs.train_mlp, sizes=sizes, batch=128),
            tolerance=1e-3,
            torch=partial(torch_programs.train_mlp, sizes=sizes, batch=128),
        )
        for sizes in (small, large)
    ]
    shape = {"layers": 2, "width": 128, "length": 64, "batch": 8}
    small_shape = {"layers": 1, "width": 32, "length": 16, "batch": 4}
    cases += [
        Case(
            f"programs/transformer with Adam, {name}",
            partial(programs.train_transformer, **sizes),
            tolerance=2e-2,
            torch=partial(torch_programs.train_transformer, **sizes),
        )
        for name, sizes in (("2 layers of 128", shape), ("1 layer of 32", small_shape))
    ]
    bodies = (array(128, 3), array(128, 3, seed=1, scale=0.1))
    gru = (array(50, 32, 64), array(64, 192, scale=0.1), array(64, 192, scale=0.1), array(192))
    regression = (array(64, scale=0.1), array(256, 64, seed=1), array(256, seed=2))
    cases += [
        Case(
            "programs/convnet, 32 images of 32 x 32",
            partial(programs.train_convnet, batch=32),
            tolerance=1e-3,
            torch=partial(torch_programs.train_convnet, batch=32),
        ),
        Case(
            "programs/per-example gradients, 64-128-10, batch 64",
            partial(programs.train_private, sizes=(64, 128, 10), batch=64),
            tolerance=1e-3,
        ),
        Case(
            "programs/gradient of a GRU, 50 steps", of(programs.gru_gradient, *gru), tolerance=1e-3
        ),
        Case(
            "programs/n-body, 128 bodies, 100 steps",
            of(partial(programs.n_body, steps=100), *bodies),
            tolerance=1e-3,
        ),
        Case(
            "programs/power iteration of 256 x 256",
            of(programs.power_iteration, programs.positive(256), array(256)),
            tolerance=1e-3,
        ),
        Case("programs/Hessian of 64 weights", of(programs.hessian, *regression), tolerance=1e-3),
        Case("programs/Adam of 60 parameters", programs.adam_only, tolerance=1e-3),
    ]
    return [case.replace(sides=WIDE) for case in cases]


# ---- psum over the devices of one process ------------------------------------------------------


def psum_call(side: Side, devices: int, nbytes: int, inside: int) -> Callable[[], Any]:
    """A pmapped psum; `inside` of them in a row within the program."""

    def body(x):
        for _ in range(inside):
            x = side.lax.psum(x, "i") / devices
        return x

    function = side.top.pmap(body, axis_name="i")
    # Placed by a first call: what is timed is a step that follows another.
    x = function(normal(devices, nbytes // 4))
    return lambda: function(x)


def psum_cases() -> list[Case]:
    """Devices × sizes; and ten in one program, where the call itself counts little."""
    sizes = {"4 B": 4, "64 KiB": 65536, "1 MiB": 2**20, "16 MiB": 2**24}
    return [
        Case(
            f"psum/{devices} devices, {label}" + (f", {inside} in a program" if inside > 1 else ""),
            partial(psum_call, devices=devices, nbytes=nbytes, inside=inside),
            sides=BOTH,
            devices=devices,
        )
        for devices in (2, 4, 8)
        for label, nbytes in sizes.items()
        for inside in ((1, 10) if nbytes <= 2**20 else (1,))
    ]


# ---- all ---------------------------------------------------------------------------------------

SUBJECTS: dict[str, Callable[[], list[Case]]] = {
    "dispatch": dispatch_cases,
    "kernels": kernel_cases,
    "functions": function_cases,
    "programs": program_cases,
    "psum": psum_cases,
    "sharding": sharding_cases,
    "libraries": library_cases,
}


@cache
def _by_name() -> dict[str, Case]:
    return {case.name: case for make in SUBJECTS.values() for case in make()}


def find_case(name: str) -> Case:
    """The case of that name, whatever its subject."""
    return _by_name()[name]
