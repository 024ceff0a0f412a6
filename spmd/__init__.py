"""A multi-device SPMD runtime with JAX's public API.

Programs are traced once, differentiated, vectorised, compiled, and run on every device that
`mpirun` gives.
"""

# ruff: noqa: F401

from __future__ import annotations

import types as _types
import typing as _typing

from spmd.base import stack_dump as _stacks  # isort: skip  # first: a later import may hang
from spmd.base.lazy_import import attach as _attach
from spmd.base.util import importing as _importing

with _importing():
    from spmd import (
        api,
        collectives,
        dtypes,
        errors,
        lax,
        numpy,
        sharding,
        tree,
        tree_util,
    )
    from spmd.api.closure import closure_convert, custom_gradient
    from spmd.api.compiled import jit
    from spmd.api.forward import jvp, linearize
    from spmd.api.inspect import (
        block_until_ready,
        device_get,
        disable_jit,
        eval_shape,
        linear_transpose,
        live_arrays,
        make_jaxpr,
    )
    from spmd.api.jacobian import hessian, jacfwd, jacobian, jacrev
    from spmd.api.named_scope import named_call, named_scope
    from spmd.api.placement import (
        copy_to_host_async,
        device_put,
        device_put_replicated,
        device_put_sharded,
        make_array_from_callback,
        make_array_from_process_local_data,
        make_array_from_single_device_arrays,
    )
    from spmd.api.reverse import fwd_and_bwd, grad, value_and_grad, vjp
    from spmd.api.settings import (
        check_tracer_leaks,
        checking_leaks,
        debug_infs,
        debug_key_reuse,
        debug_nans,
        default_matmul_precision,
        enable_checks,
        enable_x64,
        ensure_compile_time_eval,
        explain_cache_misses,
        log_compiles,
        numpy_dtype_promotion,
        numpy_rank_promotion,
        print_environment_info,
        process_indices,
    )
    from spmd.api.vectorize import vmap
    from spmd.base.config import config
    from spmd.base.device import (
        Device,
        default_backend,
        device_count,
        devices,
        local_device_count,
        local_devices,
        process_count,
        process_index,
    )
    from spmd.base.dtypes import float0
    from spmd.compile import platforms as _platforms
    from spmd.compile.dispatch import eager as _dispatch
    from spmd.compile.dispatch.jit import clear_caches
    from spmd.core.aval import ShapeDtypeStruct
    from spmd.core.custom import custom_jvp
    from spmd.core.custom_vjp import custom_vjp
    from spmd.core.remat import checkpoint, checkpoint_policies
    from spmd.numpy.array_type import Array
    from spmd.sharding import constraint as _constraint
    from spmd.sharding.array import Shard
    from spmd.sharding.explicit_layouts import reshard
    from spmd.sharding.mesh_scope import set_mesh, typeof
    from spmd.sharding.named import NamedSharding
    from spmd.sharding.pmap import pmap
    from spmd.sharding.shard_map import shard_map
    from spmd.sharding.smap import smap
    from spmd.sharding.spec import Mesh, make_mesh
    from spmd.sharding.spec import PartitionSpec as P

if _typing.TYPE_CHECKING:
    from spmd import (
        ad_checkpoint,
        checkify,
        checkpoints,
        custom_batching,
        custom_derivatives,
        custom_partitioning,
        debug,
        distributed,
        dlpack,
        export,
        extend,
        flatten_util,
        image,
        jet,
        multihost,
        nn,
        ops,
        profiler,
        random,
        ref,
        scipy,
        shard_alike,
        stages,
        typing,
    )
    from spmd._lazy_names import *  # noqa: F403

# Not every program needs these: they are imported when they are first asked for.
__getattr__, __dir__ = _attach(__name__, (
    "ad_checkpoint", "checkify", "checkpoints", "custom_batching", "custom_derivatives",
    "custom_partitioning", "debug", "distributed", "dlpack", "export", "extend", "flatten_util",
    "image", "jet", "multihost", "nn", "ops", "profiler", "random", "scipy", "shard_alike",
    "ref", "stages", "typing",
), "_lazy_names")  # fmt: skip

# The collectives live one floor above the operations, and belong to the namespace `spmd.lax`.
for _name, _value in vars(collectives).items():
    if not _name.startswith("_") and not isinstance(_value, _types.ModuleType):
        setattr(lax, _name, _value)
lax.with_sharding_constraint = _constraint.with_sharding_constraint  # type: ignore[attr-defined]

remat = checkpoint
__version__ = "0.2.0"
