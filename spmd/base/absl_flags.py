"""Settings as flags of absl: `--jax_enable_x64` and the like on a program's command line."""

from __future__ import annotations

import sys
from itertools import takewhile
from typing import Any

_given = "--jax_", "--nojax_", "-jax_"


def define_flags(config: Any) -> None:
    """Define a flag for each setting that has a name of JAX's; a flag that is given sets it.

    absl reads the flags when it parses the command line. A flag that is there already stays.
    """
    from absl import app, flags

    for name, value in config.values.items():
        if not name.startswith("jax_") or name in flags.FLAGS:
            continue
        kind = next((k for k in (bool, int, float) if type(value) is k), str)
        define = {
            bool: flags.DEFINE_bool,
            int: flags.DEFINE_integer,
            float: flags.DEFINE_float,
            str: flags.DEFINE_string,
        }[kind]
        define(name, None, f"the setting {name} of jax.config", module_name="jax")
    app.call_after_init(lambda: _set_given(config))


def parse_flags(config: Any) -> None:
    """Set what the process's arguments say of JAX's settings; absl parses the other flags later."""
    from absl import flags

    define_flags(config)
    arguments = takewhile(lambda a: a != "--", sys.argv[1:])
    flags.FLAGS(["", *(a for a in arguments if a.startswith(_given))])
    _set_given(config)


def _set_given(config: Any) -> None:
    from absl import flags

    for name in config.values:
        if name in flags.FLAGS and flags.FLAGS[name].present:
            config.update(name, flags.FLAGS[name].value)
