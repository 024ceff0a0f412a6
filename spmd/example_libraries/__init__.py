"""Small libraries in terms of spmd's public names, as in `jax.example_libraries`.

`optimizers` has first-order optimizers over pytrees, `stax` layers as pairs of functions.
"""
