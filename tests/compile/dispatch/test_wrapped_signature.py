"""`jit` of a function that shows the signature of another, as functools.wraps makes it."""

from __future__ import annotations

import functools

import pytest

import spmd


def shown(x):
    return x


@functools.wraps(shown)
def called(scope, x, y=1.0):
    return scope + x * y


def test_a_call_fits_the_function_and_not_the_signature_that_it_shows():
    assert spmd.jit(called)(1.0, 2.0) == 3.0
    assert spmd.jit(called)(1.0, 2.0, 4.0) == 9.0


def test_a_call_that_does_not_fit_is_an_error_of_python():
    with pytest.raises(TypeError, match="positional argument"):
        spmd.jit(called)(1.0)
    with pytest.raises(TypeError, match=r"jit\(shown\)"):
        spmd.jit(shown)(1.0, 2.0)
