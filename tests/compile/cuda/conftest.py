"""Fixtures of tests that run programs on emulated GPUs."""

from __future__ import annotations

import os

import pytest

from spmd.base.config import config
from spmd.compile.executable import cuda_backend


@pytest.fixture
def gpus(request: pytest.FixtureRequest):
    """Four emulated GPUs are the default platform.

    Tests marked `gpu` need one, and run on a real one where `SPMD_CUDA_DRIVER` is cupy.
    """
    cuda_backend.release_arenas()  # so that memory that was never written holds NaN
    name = "emulator"
    if request.node.get_closest_marker("gpu"):
        name = os.environ.get("SPMD_CUDA_DRIVER", name)
    with (
        config.override("cuda_driver", name),
        config.override("num_cuda_devices", 4),
        config.override("platform", "cuda"),
    ):
        yield
