"""Fixtures of tests that run programs on emulated GPUs."""

from __future__ import annotations

import pytest

from spmd.base.config import config


@pytest.fixture
def gpus():
    """Four emulated GPUs are the default platform."""
    with (
        config.override("cuda_driver", "emulator"),
        config.override("num_cuda_devices", 4),
        config.override("platform", "cuda"),
    ):
        yield
