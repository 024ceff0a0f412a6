"""`jaxlib`: a version, and nothing else. Its compiled parts are not loaded, and can't be."""

from spmd.as_jax.finder import API_LEVEL

__version__ = API_LEVEL
__path__: list[str] = []  # so that the finder is asked for what would be below, and refuses it
