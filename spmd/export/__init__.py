"""Jitted functions as files: traced here, run in another process without the Python source.

exported = export.export(jit(f))(ShapeDtypeStruct(export.symbolic_shape("b, 4"), "float32"))
blob = exported.serialize(vjp_order=1)          # bytes; a readable, versioned document
export.deserialize(blob).call(x)                # for any b, under grad, vmap and jit too
"""

# ruff: noqa: F401

from spmd.export.dims import max_dim, min_dim
from spmd.export.encode import (
    register_namedtuple_serialization,
    register_pytree_node_serialization,
)
from spmd.export.exported import (
    DisabledSafetyCheck,
    Exported,
    default_export_platform,
    deserialize,
    export,
    maximum_supported_calling_convention_version,
    minimum_supported_calling_convention_version,
    symbolic_args_specs,
)
from spmd.export.onnx_model import to_onnx
from spmd.export.symbolic import (
    SymbolicScope,
    is_symbolic_dim,
    symbolic_shape,
)
