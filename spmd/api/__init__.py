"""The transformations as users call them, over pytrees, with argnums, checks and clear errors.

`jit` is in `compile/jit.py`, `pmap` and `shard_map` in `sharding/`; what is here differentiates,
vectorises and inspects.
"""

from spmd.api.closure import closure_convert, custom_gradient
from spmd.api.compiled import jit
from spmd.api.forward import jvp, linearize
from spmd.api.inspect import (
    ShapeDtypeStruct,
    block_until_ready,
    device_get,
    disable_jit,
    eval_shape,
    linear_transpose,
    make_jaxpr,
)
from spmd.api.jacobian import hessian, jacfwd, jacobian, jacrev
from spmd.api.placement import (
    device_put,
    device_put_replicated,
    device_put_sharded,
    make_array_from_callback,
    make_array_from_process_local_data,
)
from spmd.api.reverse import grad, value_and_grad, vjp
from spmd.api.vectorize import vmap

__all__ = [
    "ShapeDtypeStruct",
    "block_until_ready",
    "closure_convert",
    "custom_gradient",
    "device_get",
    "device_put",
    "device_put_replicated",
    "device_put_sharded",
    "disable_jit",
    "eval_shape",
    "grad",
    "hessian",
    "jacfwd",
    "jacobian",
    "jacrev",
    "jit",
    "jvp",
    "linear_transpose",
    "linearize",
    "make_array_from_callback",
    "make_array_from_process_local_data",
    "make_jaxpr",
    "value_and_grad",
    "vjp",
    "vmap",
]
