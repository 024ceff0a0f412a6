"""`jax._src.lib`: the version of jaxlib's extension, as a number."""

from spmd.as_jax.finder import API_LEVEL
from spmd.as_jax.refuse import missing

__getattr__ = missing("jax._src.lib")

version = tuple(int(part) for part in API_LEVEL.split("."))
jaxlib_extension_version = 400
