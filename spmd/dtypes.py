"""dtypes: promotion, limits, and the extended dtypes of typed PRNG keys."""

# ruff: noqa: F401

from spmd.core.dtypes import (
    bfloat16,
    extended,
    finfo,
    float0,
    iinfo,
    issubdtype,
    prng_key,
    promote_types,
)
from spmd.core.dtypes import canonical as canonicalize_dtype
