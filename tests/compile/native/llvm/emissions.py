"""What a loader emits: the sources of each LLVM module, and the function that emits them.

A loader emits through a `Team`, and ahead of time through a `BackgroundCompiler`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest.mock import patch

import pytest

from spmd.compile.native.llvm import background_compile, compiler, modules
from spmd.compile.native.llvm.compiler import Loader
from spmd.compile.native.llvm.modules import Source

Emit = Callable[[Sequence[Source]], bytes]


def replace_emit(monkeypatch: pytest.MonkeyPatch, change: Callable[[Emit], Emit]) -> None:
    """Have all loaders emit with `change(emit)` instead of `emit`, until the test ends."""
    team, background = modules.Team, background_compile.BackgroundCompiler
    monkeypatch.setattr(compiler.sharing, "Team", lambda emit, cores: team(change(emit), cores))
    monkeypatch.setattr(
        compiler.background_compile, "BackgroundCompiler", lambda emit: background(change(emit))
    )


def note_emissions(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The texts of each module that is emitted from now on."""
    seen: list[list[str]] = []

    def change(emit: Emit) -> Emit:
        def noted(sources: Sequence[Source]) -> bytes:
            seen.append([text for text, _ in sources])
            return emit(sources)

        return noted

    replace_emit(monkeypatch, change)
    return seen


def refuse_emissions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it an error to emit anything from now on."""

    def refuse(sources: Sequence[Source]) -> bytes:
        raise AssertionError("compiled again")

    replace_emit(monkeypatch, lambda emit: refuse)


def emit_of(loader: Loader) -> Emit:
    """The function by which a loader emits one module."""
    with patch.object(compiler.sharing, "Team") as team:
        loader.batch()
    return team.call_args.args[0]
