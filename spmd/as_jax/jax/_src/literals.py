"""`jax._src.literals`: the class of constants in JAX's jaxprs, which spmd keeps as arrays."""


class TypedNdArray:
    """No value is one."""
