"""`jaxlib`: a version, and the classes that libraries name. No compiled part of it is loaded."""

from spmd.as_jax.finder import API_LEVEL

__version__ = API_LEVEL
