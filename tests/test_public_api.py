"""The public surface as a golden text: every exported name with its parameters.

A change of tests/golden/public_api.txt is a change for users: it belongs into CHANGELOG.md too.
Annotations and default values are left out; Python versions print them differently.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import typing
from types import ModuleType
from typing import Any

import pytest

MODULES = (
    "spmd",
    "spmd.numpy",
    "spmd.numpy.fft",
    "spmd.numpy.linalg",
    "spmd.lax",
    "spmd.lax.linalg",
    "spmd.random",
    "spmd.nn",
    "spmd.nn.initializers",
    "spmd.scipy",
    "spmd.scipy.linalg",
    "spmd.scipy.special",
    "spmd.scipy.signal",
    "spmd.scipy.stats",
    "spmd.scipy.integrate",
    "spmd.scipy.interpolate",
    "spmd.scipy.optimize",
    "spmd.sharding",
    "spmd.tree",
    "spmd.tree_util",
    "spmd.dtypes",
    "spmd.debug",
    "spmd.distributed",
    "spmd.errors",
    "spmd.ad_checkpoint",
    "spmd.extend",
    "spmd.flatten_util",
    "spmd.jet",
    "spmd.multihost",
    "spmd.checkify",
    "spmd.profiler",
    "spmd.checkpoints",
    "spmd.custom_batching",
    "spmd.custom_partitioning",
    "spmd.dlpack",
    "spmd.image",
    "spmd.ref",
    "spmd.shard_alike",
    "spmd.stages",
    "spmd.typing",
    "spmd.export",
    "spmd.testing",
)


def exists(name: str) -> bool:
    """Whether the module is there; a part of a missing package is missing too."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def exported(module: ModuleType) -> list[str]:
    """The names a user may rely on: `__all__`, else what doesn't start with an underscore."""
    names = vars(module).get("__all__")
    if names is None:
        names = [
            name
            for name in dir(module)  # which has what is imported when it is asked for
            if not name.startswith("_")
            and name != "annotations"
            and not inspect.ismodule(getattr(module, name))
        ]
    return sorted(names)


def describe(value: Any) -> str:
    """The kind of a public object and, where Python can tell, its parameters."""
    if inspect.ismodule(value):
        return " (module)"
    if typing.get_origin(value) is not None:
        return " (type)"
    if inspect.isclass(value):
        return " (class)"
    if not callable(value):
        return f" ({type(value).__name__})"
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return "(...)"
    return f"({', '.join(_parameters(list(parameters)))})"


def _parameters(parameters: list[inspect.Parameter]) -> list[str]:
    shown: list[str] = []
    star = False
    for i, parameter in enumerate(parameters):
        if parameter.kind is parameter.VAR_POSITIONAL:
            star = True
            shown.append("*" + parameter.name)
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            shown.append("**" + parameter.name)
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            star = True
            shown.append("*")
        optional = "" if parameter.default is parameter.empty else "=..."
        shown.append(parameter.name + optional)
        following = parameters[i + 1].kind if i + 1 < len(parameters) else None
        if parameter.kind is parameter.POSITIONAL_ONLY and following is not parameter.kind:
            shown.append("/")
    return shown


def surface() -> str:
    """All modules with all names, one a line."""
    lines = []
    for name in filter(exists, MODULES):
        module = importlib.import_module(name)
        lines.append(f"[{name}]")
        lines += [public + describe(getattr(module, public)) for public in exported(module)]
        lines.append("")
    return "\n".join(lines)


def test_public_api(golden):
    golden("public_api.txt", surface())


@pytest.mark.parametrize("name", [name for name in MODULES if exists(name)])
def test_all_names_exist_once(name):
    module = importlib.import_module(name)
    names = exported(module)
    assert len(names) == len(set(names))
    assert [n for n in names if not hasattr(module, n)] == []


def test_parameters_are_printed_as_written():
    def sample(a, /, b, c=1, *, d, e=2, **rest): ...

    def variadic(*args, key): ...

    assert describe(sample) == "(a, /, b, c=..., *, d, e=..., **rest)"
    assert describe(variadic) == "(*args, key)"
