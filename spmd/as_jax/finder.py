"""The import finder that answers `import jax`, and everything below it, with spmd's modules.

It stands first in `sys.meta_path`, since `pip` installs JAX beside every library that needs it. A
module of JAX is one of three things:

* ours under a second name: `jax.numpy` *is* the module `spmd.numpy`;
* a facade in `spmd/as_jax/jax/`, where JAX has names that spmd has elsewhere, or not at all;
* one that can be imported, and says when it is used why it can't be (`refuse.py`);
* absent: importing it is a `ModuleNotFoundError`, so that a library takes its way without it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from spmd.as_jax import absent, report
from spmd.as_jax.refuse import missing, refusal, refusing
from spmd.base.errors import ArgumentError
from spmd.transport.world import share_values

# The API that spmd follows: what programs compare versions with.
API_LEVEL = "0.10.2"

FACADES = "spmd.as_jax.jax"
_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "jax")

# Packages and modules of JAX that are ours, with all that is in them.
OURS = frozenset(
    "ad_checkpoint checkify custom_batching custom_derivatives debug distributed dlpack dtypes "
    "errors example_libraries experimental export flatten_util image lax nn numpy ops "
    "profiler random ref scipy sharding stages tree tree_util typing".split()
)


# Modules that stand in another place than JAX's, with what is below them. Most names of a private
# module are those of the public one.
_MOVED = {
    "_src.ad_checkpoint": "ad_checkpoint",
    "_src.api": "",
    "_src.array": "_src.sharding_impls",
    "_src.api_util": "api_util",
    "_src.interpreters": "interpreters",
    "_src.lib.xla_client": "_src.xla_client",
    "_src.lax": "lax",
    "_src.lax.lax": "lax",
    "_src.mesh": "_src.sharding_impls",
    "_src.named_sharding": "_src.sharding_impls",
    "_src.nn": "nn",
    "_src.numpy": "numpy",
    "_src.numpy.lax_numpy": "numpy",
    "_src.numpy.ufuncs": "numpy",
    "_src.numpy.util": "_src.numpy_util",
    "_src.partition_spec": "sharding",
    "_src.random": "random",
    "_src.random.threefry2x32": "_src.threefry2x32",
    "_src.scipy": "scipy",
    "_src.sharding": "_src.sharding_impls",
    "_src.source_info_util": "extend.source_info_util",
    "_src.state.types": "_src.state",
    "extend.core.primitives": "extend.primitives",
}

# Modules below JAX's packages whose names our package has itself.
_WHOLE = {
    f"experimental.sparse.{name}": "spmd.experimental.sparse"
    for name in ("api", "bcoo", "bcsr", "coo", "csr", "random", "util")
} | {"experimental.key_reuse._core": "spmd.experimental.key_reuse"}


class _Alias(Loader):
    """Loads a module under a second name: the module is the one that there is.

    A namespace that is a module in JAX and an object here (`scipy.stats.norm`) stands for itself.
    """

    def __init__(self, target: str):
        self.target = target
        self.before: dict[str, Any] = {}

    def create_module(self, spec: ModuleSpec) -> Any:
        found = _find(self.target)
        self.before = dict(vars(found))
        return found

    def exec_module(self, module: Any) -> None:
        # The import machinery has just written these.
        for name in ("__name__", "__loader__", "__package__", "__spec__"):
            if name in self.before:
                setattr(module, name, self.before[name])
            elif name in vars(module):
                delattr(module, name)
        _prepare(self.target, module)


class _Refusing(Loader):
    """Makes a module every name of which can be imported and none can be used."""

    def __init__(self, why: str):
        self.why = why

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        module.__doc__ = self.why
        module.__getattr__ = refusing(module.__name__, self.why)


class _Distribution(importlib.metadata.Distribution):
    """The distribution of JAX for `importlib.metadata`: libraries ask for its version."""

    def __init__(self, name: str):
        self._name = name

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: {self._name}\nVersion: {API_LEVEL}\n"

    def locate_file(self, path: Any) -> Any:
        return os.path.join(_FOLDER, path)


class Finder(MetaPathFinder):
    """Finds `jax`, `jaxlib` and what is below them; it leaves other names to other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """The spec of a module of JAX; raises `ModuleNotFoundError` for one that is not here."""
        top, _, rest = fullname.partition(".")
        if top not in ("jax", "jaxlib"):
            return None
        why = refusal(fullname) if top == "jax" else None
        if why is not None:
            return ModuleSpec(fullname, _Refusing(why), is_package=True)
        ours = resolve(fullname)
        if ours is None:
            report.note("no module", fullname)
            what = "has no compiled parts" if top == "jaxlib" else f"has no module {rest!r}"
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: `jax` is spmd here, which {what}; "
                "docs/libraries.md says what there is",
                name=fullname,
            )
        report.note("module", fullname)
        return ModuleSpec(fullname, _Alias(ours), origin=ours)

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        """The distributions `jax` and `jaxlib`, at the API's level."""
        wanted = getattr(context, "name", None)
        return [_Distribution(n) for n in ("jax", "jaxlib") if wanted == n]


def resolve(fullname: str) -> str | None:
    """The name of the module that stands for a module of JAX; None if there is none of ours."""
    top, _, rest = fullname.partition(".")
    if top == "jaxlib":
        file = os.path.join(_FOLDER + "lib", f"{rest}.py")
        whole = f"{FACADES}lib.{rest}" if rest else f"{FACADES}lib"
        return whole if not rest or os.path.isfile(file) else None
    rest = _in_its_place(rest)
    if not rest:
        return FACADES
    if rest in _WHOLE:
        return _WHOLE[rest]
    place = os.path.join(_FOLDER, *rest.split("."))
    if os.path.isfile(place + ".py") or os.path.isfile(os.path.join(place, "__init__.py")):
        return f"{FACADES}.{rest}"
    first = rest.partition(".")[0]
    if first in OURS and _is_here(f"spmd.{rest}"):
        return f"spmd.{rest}"
    return None


def _in_its_place(rest: str) -> str:
    """The path below `jax` of what stands for a module."""
    parts = rest.split(".")
    for k in range(len(parts), 0, -1):
        moved = _MOVED.get(".".join(parts[:k]))
        if moved is not None:
            return ".".join([moved, *parts[k:]]).strip(".")
    return rest


def _prepare(name: str, module: Any) -> None:
    if name == "spmd.lax" and installed():
        absent.add_to(module)
    if not name.startswith(FACADES):  # which report missing names themselves
        report.watch(module)


def _is_here(name: str) -> bool:
    try:
        if importlib.util.find_spec(name) is not None:
            return True
    except ModuleNotFoundError:  # of a parent, which may be a module and no package
        return False
    parent, _, last = name.rpartition(".")
    found = vars(importlib.import_module(parent)).get(last)
    return hasattr(found, "__dict__") and not isinstance(found, type)


def _find(name: str) -> Any:
    """A module, or an attribute of one."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        parent, _, last = name.rpartition(".")
        return getattr(importlib.import_module(parent), last)


def below(package: str) -> Callable[[str], Any]:
    """The `__getattr__` of a facade that imports what is below it when it is asked for.

    JAX imports some of its modules itself, and others not; nothing is lost by being generous.
    """
    absent = missing(package)

    def find(name: str) -> Any:
        whole = f"{package}.{name}"
        if name.startswith("__"):
            return absent(name)
        if installed() and refusal(whole):
            return importlib.import_module(whole)
        ours = resolve(whole)
        if ours is None:
            return absent(name)
        report.note("module", whole)
        value = _find(ours)
        _prepare(ours, value)
        setattr(sys.modules[FACADES + package[3:]], name, value)  # found without this from now on
        return value

    return find


_finder = Finder()


def installed() -> bool:
    """Whether `import jax` gives spmd in this process."""
    return _finder in sys.meta_path


def install() -> None:
    """Give spmd to every `import jax` from now on, and to those of what is below it.

    A second call does nothing. Raises an `ArgumentError` if JAX itself has been imported in this
    process.
    """
    if installed():
        return
    real = [name for name in ("jax", "jaxlib") if name in sys.modules]
    if real:
        raise ArgumentError(
            f"as_jax.install: {real[0]} is imported already; install spmd in its place "
            "before the first import of jax, or start the program with `python -m spmd.as_jax`"
        )
    sys.meta_path.insert(0, _finder)
    report.start()
    share_values()
