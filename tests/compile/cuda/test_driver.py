"""The choice of a CUDA driver."""

from __future__ import annotations

import pytest

import spmd
from spmd.base.errors import PlatformError
from spmd.compile.cuda.driver import driver


def test_an_unknown_driver_is_an_error_that_names_the_setting():
    before = spmd.config.cuda_driver
    spmd.config.update("cuda_driver", "vulkan")
    try:
        with pytest.raises(PlatformError, match="SPMD_CUDA_DRIVER=vulkan: there is no such driver"):
            driver()
    finally:
        spmd.config.update("cuda_driver", before)
