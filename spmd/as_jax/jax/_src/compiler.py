"""`jax._src.compiler`: the name of its entry, which no program of spmd's passes."""

from spmd.as_jax.refuse import refused

backend_compile = backend_compile_and_load = refused(
    "jax._src.compiler.backend_compile", "spmd compiles programs itself, without XLA"
)
