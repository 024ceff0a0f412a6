"""Names of JAX that are not here, and what to use instead: one table for errors and for the docs.

`docs/coming_from_jax.md` shows the table; an AttributeError for one of these names ends with its
advice. Names that JAX itself removed stand here too, for older programs.
"""

from __future__ import annotations

import sys

_PALLAS = "there are no kernels by hand: the compiler makes its own"
_NUMPY_LEFT = "NumPy and JAX removed it; use"

# Each group: the names, below `spmd` or `jax`, and what to do.
GROUPS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("xmap", "experimental.maps"), "use `spmd.shard_map`, or `spmd.vmap` with `axis_name`"),
    (("pjit",), "use `spmd.jit`, which takes shardings"),
    (("xla_computation",), "use `spmd.jit(f).lower(x)`, or `spmd.make_jaxpr`"),
    (("mask", "shapecheck"), "use `spmd.export.symbolic_shape` for sizes that are not known yet"),
    (
        ("tree_map", "tree_leaves", "tree_flatten", "tree_unflatten", "tree_structure"),
        "use `spmd.tree.map`, `spmd.tree.leaves` and their relatives",
    ),
    (
        ("tree_multimap", "tree_util.tree_multimap"),
        "use `spmd.tree.map`, which takes many trees",
    ),
    (("ShapedArray", "abstract_arrays"), "use `spmd.ShapeDtypeStruct`, or `spmd.typeof(x)`"),
    (("array_ref", "mutable_array"), "use `spmd.new_ref`"),
    (
        ("host_callback", "experimental.host_callback"),
        "use `spmd.debug.callback`, `spmd.pure_callback` or `spmd.io_callback`",
    ),
    (
        ("linear_util", "interpreters", "abstract_eval", "ad_util", "api_util", "util"),
        "JAX's inner modules are there under `spmd.as_jax` only; `spmd.extend` makes operations",
    ),
    (("lib", "xla", "jaxlib", "cloud_tpu_init"), "there is no XLA here"),
    (("clear_backends",), "use `spmd.clear_caches`"),
    (("monitoring",), "use `spmd.log_compiles`, or `spmd.debug` for what a program does"),
    (("collect_profile", "profiler.start_server"), "use `spmd.profiler.trace`"),
    (("ffi",), "foreign functions of XLA can't run here; use `spmd.pure_callback`"),
    (("experimental.pallas", "experimental.mosaic"), _PALLAS),
    (("experimental.jax2tf",), "use `spmd.export`"),
    (("experimental.rnn",), "there is no cuDNN; write the recurrence with `spmd.lax.scan`"),
    (("experimental.buffer_callback",), "use `spmd.pure_callback`"),
    (
        ("experimental.control_deps", "experimental.fused"),
        "leave it out: the compiler fuses and orders operations itself",
    ),
    (("experimental.topologies", "experimental.profiler"), "there is no XLA here"),
    (
        ("experimental.transfer", "experimental.array_serialization"),
        "use `spmd.checkpoints`, which writes arrays over several devices to files",
    ),
    (("experimental.stax",), "use `spmd.example_libraries`"),
    (("experimental.optimizers",), "use `spmd.example_libraries`"),
    (("random.KeyArray",), "use `spmd.Array`; `spmd.dtypes.prng_key` is the kind of their dtypes"),
    (("numpy.DeviceArray", "DeviceArray"), "use `spmd.Array`"),
    (("nn.normalize",), "use `spmd.nn.standardize`"),
    (("lax.tie_in",), "leave it out: operations need no tie to what is traced"),
    (("lax.xeinsum", "lax.pdot"), "use `spmd.numpy.einsum`, and `spmd.lax.psum` of its result"),
    (
        ("sharding.PositionalSharding", "sharding.GSPMDSharding", "sharding.OpSharding"),
        "use `spmd.NamedSharding` over a mesh of `spmd.make_mesh`",
    ),
    (("numpy.in1d",), f"{_NUMPY_LEFT} `spmd.numpy.isin`"),
    (("numpy.row_stack",), f"{_NUMPY_LEFT} `spmd.numpy.vstack`"),
    (("numpy.trapz",), f"{_NUMPY_LEFT} `spmd.numpy.trapezoid`"),
    (("numpy.product",), f"{_NUMPY_LEFT} `spmd.numpy.prod`"),
    (("numpy.cumproduct",), f"{_NUMPY_LEFT} `spmd.numpy.cumprod`"),
    (("numpy.msort",), f"{_NUMPY_LEFT} `spmd.numpy.sort`"),
    (("numpy.alltrue",), f"{_NUMPY_LEFT} `spmd.numpy.all`"),
    (("numpy.sometrue",), f"{_NUMPY_LEFT} `spmd.numpy.any`"),
    (("numpy.float",), "use the `float` of Python, or `spmd.numpy.float32`"),
    (("numpy.asscalar",), f"{_NUMPY_LEFT} `x.item()`"),
)

ADVICE = {name: advice for names, advice in GROUPS for name in names}


def missing(package: str, name: str) -> AttributeError:
    """The error for a name that a package has not, with advice if it is one of JAX's."""
    text = f"module {package!r} has no attribute {name!r}"
    path = f"{package}.{name}".removeprefix("spmd.")
    if path == "experimental":
        text += "; import it: import spmd.experimental"
    elif path in ADVICE:
        text += f"; {ADVICE[path].replace('`', '')}"
    elif close := _like(package, name):
        text += f". Did you mean {close!r}?"
    return AttributeError(text, name=name)


def _like(package: str, name: str) -> str | None:
    """The public name of a package that a misspelt one is most like; None if none is near."""
    if name.startswith("_"):
        return None
    import difflib  # for mistakes alone

    names = [known for known in dir(sys.modules[package]) if not known.startswith("_")]
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return found[0] if found else None


def table() -> str:
    """The table of `docs/coming_from_jax.md`."""
    lines = ["| in JAX, now or once | here |", "|---|---|"]
    for names, advice in GROUPS:
        shown = ", ".join(f"`jax.{name}`" for name in names)
        lines.append(f"| {shown} | {advice} |")
    return "\n".join(lines)
