"""`jax._src.checkify`: the names of `jax.experimental.checkify`, and its types for annotations."""

from typing import TypeVar

from spmd.checkify import *  # noqa: F403
from spmd.checkify import CheckError as JaxException

Out = TypeVar("Out")
ErrorCategory = JaxException
