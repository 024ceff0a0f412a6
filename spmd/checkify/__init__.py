"""Errors as values: check values of a compiled program, and learn afterwards which check failed.

`check` says what must be true; `checkify` turns a function into one that returns an `Error` beside
its result. It can be jitted, vmapped and differentiated like any other.
"""

# ruff: noqa: F401

from spmd.checkify.check import check, check_error, debug_check
from spmd.checkify.errors import CheckError, Error, init_error
from spmd.checkify.rewrite import (
    all_checks,
    automatic_checks,
    checkify,
    div_checks,
    float_checks,
    index_checks,
    nan_checks,
    user_checks,
)

# The members of sets such as `user_checks`.
ErrorCategory = str
# JAX's name for the exception of `Error.throw`.
JaxRuntimeError = CheckError
