"""A multi-device SPMD runtime with JAX's public API.

Programs are traced once, differentiated, vectorised, compiled, and run on every device that
`mpirun` gives.
"""

# ruff: noqa: F401

from spmd import (
    ad_checkpoint,
    api,
    checkify,
    collectives,
    custom_batching,
    debug,
    distributed,
    dtypes,
    errors,
    export,
    extend,
    flatten_util,
    lax,
    nn,
    numpy,
    random,
    scipy,
    sharding,
    tree,
    tree_util,
)
from spmd.api import (
    ShapeDtypeStruct,
    block_until_ready,
    closure_convert,
    custom_gradient,
    device_get,
    device_put,
    device_put_replicated,
    device_put_sharded,
    disable_jit,
    eval_shape,
    grad,
    hessian,
    jacfwd,
    jacobian,
    jacrev,
    jit,
    jvp,
    linear_transpose,
    linearize,
    make_array_from_callback,
    make_jaxpr,
    value_and_grad,
    vjp,
    vmap,
)
from spmd.compile import dispatch as _dispatch
from spmd.compile.cpu import platform as _cpu
from spmd.core.aval import typeof
from spmd.core.config import config
from spmd.core.custom import custom_jvp
from spmd.core.custom_vjp import custom_vjp
from spmd.core.device import (
    Device,
    default_backend,
    device_count,
    devices,
    local_device_count,
    local_devices,
    process_count,
    process_index,
)
from spmd.core.dtypes import float0
from spmd.core.remat import checkpoint, checkpoint_policies
from spmd.core.scope import named_call, named_scope
from spmd.lax.callback import effects_barrier, io_callback, pure_callback
from spmd.numpy.array_type import Array
from spmd.sharding.named import NamedSharding
from spmd.sharding.pmap import pmap
from spmd.sharding.shard_map import shard_map
from spmd.sharding.spec import Mesh, make_mesh
from spmd.sharding.spec import PartitionSpec as P

# The collectives live one floor above the operations, and belong to the namespace `spmd.lax`.
for _name in collectives.__all__:
    setattr(lax, _name, getattr(collectives, _name))

remat = checkpoint
__version__ = "0.1.0"
