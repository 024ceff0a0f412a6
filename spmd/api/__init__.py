"""The transformations as users call them, over pytrees, with argnums, checks and clear errors.

`jit` is in `compile/dispatch/jit.py`, `pmap` and `shard_map` in `sharding/`; the files here
differentiate, vectorise and inspect.
"""

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
    clear_caches,
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
from spmd.core.aval import ShapeDtypeStruct

__all__ = [
    "ShapeDtypeStruct",
    "block_until_ready",
    "check_tracer_leaks",
    "checking_leaks",
    "clear_caches",
    "closure_convert",
    "copy_to_host_async",
    "custom_gradient",
    "debug_infs",
    "debug_key_reuse",
    "debug_nans",
    "default_matmul_precision",
    "device_get",
    "device_put",
    "device_put_replicated",
    "device_put_sharded",
    "disable_jit",
    "enable_checks",
    "enable_x64",
    "ensure_compile_time_eval",
    "eval_shape",
    "explain_cache_misses",
    "fwd_and_bwd",
    "grad",
    "hessian",
    "jacfwd",
    "jacobian",
    "jacrev",
    "jit",
    "jvp",
    "linear_transpose",
    "linearize",
    "live_arrays",
    "log_compiles",
    "make_array_from_callback",
    "make_array_from_process_local_data",
    "make_array_from_single_device_arrays",
    "make_jaxpr",
    "numpy_dtype_promotion",
    "numpy_rank_promotion",
    "print_environment_info",
    "process_indices",
    "value_and_grad",
    "vjp",
    "vmap",
]
