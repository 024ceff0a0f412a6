"""The pages of docs/api: one for each namespace, made of the docstrings of its public names.

    python tools/api_pages.py   # writes docs/api/*.md

The examples on them run in the tests, where they stand: in the docstrings.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

NAMESPACES = (
    "spmd",
    "spmd.checkify",
    "spmd.custom_derivatives",
    "spmd.custom_partitioning",
    "spmd.debug",
    "spmd.distributed",
    "spmd.dlpack",
    "spmd.dtypes",
    "spmd.export",
    "spmd.extend",
    "spmd.image",
    "spmd.jet",
    "spmd.lax",
    "spmd.lax.linalg",
    "spmd.multihost",
    "spmd.nn",
    "spmd.nn.initializers",
    "spmd.numpy",
    "spmd.numpy.fft",
    "spmd.numpy.linalg",
    "spmd.ops",
    "spmd.profiler",
    "spmd.random",
    "spmd.scipy.cluster.vq",
    "spmd.scipy.fft",
    "spmd.scipy.integrate",
    "spmd.scipy.interpolate",
    "spmd.scipy.linalg",
    "spmd.scipy.ndimage",
    "spmd.scipy.optimize",
    "spmd.scipy.signal",
    "spmd.scipy.sparse.linalg",
    "spmd.scipy.spatial.transform",
    "spmd.scipy.special",
    "spmd.scipy.stats",
    "spmd.ref",
    "spmd.sharding",
    "spmd.stages",
    "spmd.testing",
    "spmd.tree",
    "spmd.tree_util",
)


def page(namespace: str) -> str:
    """The text of one page."""
    module = importlib.import_module(namespace)
    documented, plain = [], []
    for name, value in public(module):
        is_dtype = isinstance(value, type) and isinstance(getattr(value, "dtype", None), np.dtype)
        if is_dtype or not callable(value):
            plain.append(name)
        else:
            documented.append((name, value))
    lines = [f"# {namespace}", "", inspect.cleandoc(module.__doc__ or ""), ""]
    lines += ["Written by `python tools/api_pages.py` from the docstrings.", ""]
    if plain:
        names = " ".join(f"`{n}`" for n in plain)
        lines += [*textwrap.wrap(f"Values and dtypes: {names}", 118, break_on_hyphens=False), ""]
    for name, value in documented:
        lines += [f"## {name}", "", "```py", *_heading(name, value), "```", ""]
        lines += [*_body(value), ""]
    return "\n".join(lines).rstrip() + "\n"


def public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The public names of a namespace with their values, sorted, without primitives and modules."""
    for name in sorted(getattr(module, "__all__", None) or dir(module)):
        value = getattr(module, name, None)
        hidden = name.startswith("_") or name.endswith("_p") or name == "annotations"
        if hidden or isinstance(value, ModuleType):
            continue
        if getattr(value, "__module__", "spmd").partition(".")[0] in ("typing", "collections"):
            continue
        yield name, value


def _heading(name: str, value: Any) -> list[str]:
    if inspect.isclass(value):
        return [f"class {name}"]
    try:
        signature = inspect.signature(value)
    except (ValueError, TypeError):
        return [name]
    parameters = [
        p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()
    ]
    shown = str(inspect.Signature(parameters))
    # Objects that stand for "not given" would show where they are in memory.
    shown = re.sub(r"<[^<>]*>", "...", shown)
    whole = f"{name}{shown}"
    return textwrap.wrap(whole, 100, subsequent_indent="    ", break_long_words=False)


def _body(value: Any) -> Iterator[str]:
    """The docstring, with its examples in blocks."""
    inside = False
    for line in inspect.cleandoc(value.__doc__ or "").splitlines():
        if line.startswith(">>>") and not inside:
            inside = True
            yield "```pycon"
        elif inside and not line.strip():
            inside = False
            yield "```"
        yield line
    if inside:
        yield "```"


def write(folder: Path) -> None:
    """Write all pages."""
    folder.mkdir(parents=True, exist_ok=True)
    for namespace in NAMESPACES:
        (folder / f"{namespace}.md").write_text(page(namespace), encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).parent.parent / "docs" / "api")
    sys.exit(0)
