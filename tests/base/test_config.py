"""Settings: read once from the environment, checked by name, and told to who listens."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.base.config import JAX_NAMES, SETTINGS, TRACING_SETTINGS, TRANSFERS, Config
from spmd.base.errors import ArgumentError


def test_settings_have_their_defaults_without_an_environment():
    config = Config({})
    for setting in SETTINGS:
        assert getattr(config, setting.name) == setting.default


def test_environment_variables_are_parsed_and_checked():
    config = Config(
        {"SPMD_NUM_CPU_DEVICES": "8", "SPMD_ENABLE_X64": "true", "SPMD_DISABLE_JIT": "0"}
    )
    assert (config.num_cpu_devices, config.enable_x64, config.disable_jit) == (8, True, False)
    with pytest.raises(ArgumentError, match="SPMD_NUM_CPU_DEVICES='many'"):
        Config({"SPMD_NUM_CPU_DEVICES": "many"})


@pytest.mark.parametrize("name", ["jax_enable_x46", "enable_x46", "spmd_enable_x46"])
@pytest.mark.parametrize(
    "use",
    [
        lambda config, name: config.update(name, True),
        lambda config, name: setattr(config, name, True),
        lambda config, name: getattr(config, name),
        lambda config, name: delattr(config, name),
        lambda config, name: config.read(name),
        lambda config, name: config.override(name, True).__enter__(),
    ],
)
def test_unknown_settings_name_the_nearest(use, name):
    config = Config({})
    before = config.values
    near = "jax_enable_x64" if name.startswith("jax_") else "enable_x64"
    text = rf"unknown setting '{name}'\. Did you mean '{near}'\? Known: num_cpu_devices"
    with pytest.raises(AttributeError, match=text):
        use(config, name)
    assert config.values == before and not hasattr(config, name)


def test_unknown_settings_are_listed():
    config = Config({})
    with pytest.raises(ArgumentError, match=r"unknown setting 'speed'\. Known: num_cpu_devices"):
        config.update("speed", 11)


def other_value(setting):
    """A value that is not the setting's default."""
    if isinstance(setting.default, bool):
        return not setting.default
    choices = {
        **dict.fromkeys(TRANSFERS, "log"),
        "legacy_prng_key": "warn",
        "default_prng_impl": "rbg",
        "cuda_emulator": "plain",
        "unasked_gathers": "warn",
        "nccl": "never",
        "overlap": "never",
        "default_device": "gpu",
        "traceback_filtering": "remove_frames",
        "default_matmul_precision": "high",
        "numpy_rank_promotion": "warn",
        "numpy_dtype_promotion": "strict",
    }
    return (
        "x"
        if isinstance(setting.default, str) and setting.name not in choices
        else (choices.get(setting.name, 7))
    )


JAX = {s.name: f"jax_{s.name}" for s in SETTINGS} | {ours: jax for jax, ours in JAX_NAMES.items()}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
@pytest.mark.parametrize("prefix", ["", "spmd_", "jax_"])
def test_every_setting_is_set_by_attribute_and_by_update(setting, prefix):
    name = JAX[setting.name] if prefix == "jax_" else prefix + setting.name
    config, value = Config({}), other_value(setting)
    for write in (lambda v: setattr(config, name, v), lambda v: config.update(name, v)):
        heard = []
        config.on_update(setting.name, heard.append)
        tracing = config.tracing
        write(value)
        assert config.read(name) == getattr(config, name) == getattr(config, setting.name) == value
        assert (config.tracing != tracing) == (setting.name in (*TRACING_SETTINGS, "enable_x64"))
        write(None)
        assert getattr(config, setting.name) == setting.default
        assert heard == [value, setting.default]


def test_settings_of_jax_that_exist_here_have_its_names():
    jax = pytest.importorskip("jax")
    for name in JAX_NAMES:
        assert name in jax.config.values


@pytest.mark.parametrize("value", [1, 1.0, "true", "on"])
def test_switches_are_bools(value):
    config = Config({})
    config.jax_enable_x64 = value  # pyright: ignore[reportAttributeAccessIssue]
    assert config.enable_x64 is True


@pytest.mark.parametrize("value", ["never", 3])
def test_values_that_are_no_choice_raise(value):
    config = Config({})
    with pytest.raises(ArgumentError, match="must be one of allow, warn, raise"):
        config.numpy_rank_promotion = value
    assert config.numpy_rank_promotion == "allow"


def test_settings_are_not_deleted():
    with pytest.raises(AttributeError, match=r"sets its default, False"):
        del Config({}).jax_enable_x64


def test_the_setting_of_an_attribute_takes_effect():
    before = spmd.config.jax_enable_x64
    double = spmd.jit(lambda x: x * snp.asarray(2.0))
    assert double(np.float64(1)).dtype == "float32"
    try:
        spmd.config.jax_enable_x64 = True
        assert snp.arange(3.0).dtype == double(np.float64(1)).dtype == "float64"
    finally:
        spmd.config.jax_enable_x64 = before
    assert snp.arange(3.0).dtype == double(np.float64(1)).dtype == "float32"


def test_override_restores_the_value_and_calls_listeners():
    config = Config({})
    heard = []
    config.on_update("enable_x64", heard.append)
    with pytest.raises(ZeroDivisionError), config.override("enable_x64", True):
        assert config.enable_x64
        raise ZeroDivisionError
    assert not config.enable_x64 and heard == [True, False]


def test_flags_of_absl_set_what_the_command_line_says(tmp_path):
    pytest.importorskip("absl")
    program = """
        import spmd
        from absl import app, flags
        flags.DEFINE_integer("steps", 1, "")
        spmd.config.parse_flags_with_absl()
        assert spmd.config.enable_x64 and not spmd.config.debug_nans

        def main(argv):
            assert flags.FLAGS.steps == 3 and flags.FLAGS.jax_enable_x64
            assert spmd.config.x64_enabled and spmd.config.debug_nans is False
            print(spmd.config.default_matmul_precision)

        app.run(main)
    """
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(program))
    flags = ["--jax_enable_x64", "--steps=3", "--jax_default_matmul_precision=highest"]
    done = subprocess.run(
        [sys.executable, str(script), *flags], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "highest"
