"""`jax._src.lib`: the version of jaxlib's extension, as a number, and the module `xla_client`."""

from spmd.as_jax.finder import API_LEVEL, below

__getattr__ = below("jax._src.lib")

version = tuple(int(part) for part in API_LEVEL.split("."))
jaxlib_extension_version = 400
