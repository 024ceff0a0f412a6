"""Fixtures of the tests of native code."""

from __future__ import annotations

import pytest

from spmd.compile.native.llvm import compiler
from spmd.compile.native.llvm.object_cache import ObjectCache


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A loader module with an object cache of its own."""
    monkeypatch.setattr(compiler, "object_cache", ObjectCache(lambda: tmp_path))
    return tmp_path
