"""`jax._src.literals`: the class of constants in JAX's jaxprs, which spmd keeps as arrays."""


class TypedNdArray:
    """No value is one."""


class TypedInt(int):
    """No value is one: a Python number stays one until an operation takes it."""


class TypedFloat(float):
    """No value is one."""


class TypedComplex(complex):
    """No value is one."""
