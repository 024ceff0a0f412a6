"""Which way a call took: the fast calls that are written, and whether one of them answered.

The general path of a jitted function splits its arguments (`Signature.split`), that of a mapped
function notes the call (`FastCalls.note`). A fast call does neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from spmd.base.config import config
from spmd.compile import lazy
from spmd.compile.dispatch import eager
from spmd.compile.dispatch.jit import JitFunction
from spmd.compile.dispatch.signature import Signature
from spmd.compile.native.llvm import compiler
from spmd.core.primitive import Primitive
from spmd.core.trace import set_eager
from spmd.sharding import call_cache


@contextmanager
def _results_of(*places: tuple[Any, str]) -> Iterator[list[Any]]:
    """What these functions return within a block."""
    returned: list[Any] = []

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            returned.append(function(*args, **kwargs))
            return returned[-1]

        return call

    with ExitStack() as stack:
        for owner, name in places:
            stack.enter_context(patch.object(owner, name, noting(getattr(owner, name))))
        yield returned


@contextmanager
def written() -> Iterator[list[Any]]:
    """The fast calls that are written within a block; None where a call has none."""
    with _results_of(
        (lazy.fast_call, "specialise"),
        (lazy.mesh_fast_call, "specialise_jitted"),
        (call_cache.hook, "specialise"),
    ) as made:
        yield made


def is_fast(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether a fast call answers this call, which is made."""
    with _results_of((Signature, "split"), (call_cache.FastCalls, "note")) as general:
        function(*args, **kwargs)
    return not general


@contextmanager
def cached() -> Iterator[list[Any]]:
    """The closures that operations outside `jit` get within a block; None where one has none."""
    with _results_of((JitFunction, "closure"), (lazy.eager_kernels, "program_of")) as made:
        yield made


@contextmanager
def linked() -> Iterator[list[Any]]:
    """What machine code is linked within a block: new code and code of the disk."""
    with _results_of((compiler, "link")) as tables:
        yield tables


@contextmanager
def evaluated() -> Iterator[list[str]]:
    """The names of the primitives that are evaluated one by one within a block."""
    names: list[str] = []

    def noting(prim: Primitive, operands: Any, params: Any) -> Any:
        names.append(prim.name)
        return eager.evaluate(prim, operands, params)

    set_eager(noting)
    try:
        yield names
    finally:
        set_eager(eager.evaluate)


@contextmanager
def computed_by_impl() -> Iterator[list[str]]:
    """The names of the primitives whose `impl` computes a result within a block."""
    names: list[str] = []
    rule = Primitive.rule

    def noting(prim: Primitive, slot: str) -> Any:
        if slot == "impl":
            names.append(prim.name)
        return rule(prim, slot)

    with patch.object(Primitive, "rule", noting):
        yield names


def forget() -> None:
    """Forget all fast calls, as each update of a setting does that programs depend on."""
    config.update("enable_x64", config.enable_x64)
