"""A multi-device SPMD runtime with JAX's public API.

Programs are traced once, differentiated, vectorised, compiled, and run on every device that
`mpirun` gives.
"""

from spmd import lax
from spmd.api import (
    ShapeDtypeStruct,
    block_until_ready,
    device_get,
    eval_shape,
    grad,
    hessian,
    jacfwd,
    jacobian,
    jacrev,
    jvp,
    linear_transpose,
    linearize,
    make_jaxpr,
    value_and_grad,
    vjp,
    vmap,
)
from spmd.core.config import config
from spmd.core.custom import custom_jvp, custom_vjp
from spmd.core.remat import checkpoint, checkpoint_policies
