"""Settings: read once from the environment, checked by name, and told to who listens."""

from __future__ import annotations

import pytest

from spmd.core.config import SETTINGS, Config
from spmd.core.errors import ArgumentError


def test_defaults():
    config = Config({})
    for setting in SETTINGS:
        assert getattr(config, setting.name) == setting.default


def test_environment():
    config = Config(
        {"SPMD_NUM_CPU_DEVICES": "8", "SPMD_ENABLE_X64": "true", "SPMD_DISABLE_JIT": "0"}
    )
    assert (config.num_cpu_devices, config.enable_x64, config.disable_jit) == (8, True, False)
    with pytest.raises(ArgumentError, match="SPMD_NUM_CPU_DEVICES='many'"):
        Config({"SPMD_NUM_CPU_DEVICES": "many"})


def test_unknown_settings_are_listed():
    config = Config({})
    with pytest.raises(ArgumentError, match=r"unknown setting 'speed'\. Known: num_cpu_devices"):
        config.update("speed", 11)
    with pytest.raises(AttributeError, match="no setting 'speed'"):
        config.speed  # noqa: B018


def test_names_of_jax_are_understood():
    config = Config({})
    config.update("jax_enable_x64", True)
    assert config.enable_x64


def test_override_comes_back_and_listeners_hear():
    config = Config({})
    heard = []
    config.on_update("enable_x64", heard.append)
    with pytest.raises(ZeroDivisionError), config.override("enable_x64", True):
        assert config.enable_x64
        raise ZeroDivisionError
    assert not config.enable_x64 and heard == [True, False]
