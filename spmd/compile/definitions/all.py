"""All definitions: importing this module declares them."""

from spmd.compile.definitions import (  # noqa: F401  (they declare definitions)
    attention,
    combinations,
    complex_functions,
    factors,
    fourier,
    householder,
    jacobi,
    random_words,
    series,
)
from spmd.compile.definitions.product_precision import choose_precision
from spmd.compile.definitions.table import write_definitions

__all__ = ["choose_precision", "write_definitions"]
