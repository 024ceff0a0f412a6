"""`jax.version`: the level of the API."""

from spmd.as_jax.finder import API_LEVEL

__version__ = API_LEVEL
__version_info__ = tuple(int(part) for part in API_LEVEL.split("."))
