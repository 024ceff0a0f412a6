"""Mistakes in programs over a mesh: meshes, specs, layouts in types, at any depth of a pytree."""

from __future__ import annotations

from typing import Any

import numpy as np

import spmd
import spmd.numpy as jnp
from spmd import grad, jit, lax, reshard
from spmd.custom_partitioning import custom_partitioning
from spmd.sharding import AxisType, Mesh, NamedSharding
from spmd.sharding import PartitionSpec as P
from tests.mistakes import mistake

AUTO = AxisType.Auto


def automatic(*sizes: int) -> Mesh:
    return spmd.make_mesh(sizes or (2, 2), ("x", "y")[: len(sizes) or 2], AUTO)


def explicit(*sizes: int) -> Mesh:
    return spmd.make_mesh(sizes or (2, 2), ("x", "y")[: len(sizes) or 2])


def put(mesh: Mesh, *spec: Any, shape: tuple[int, ...] = (8, 4)) -> Any:
    return spmd.device_put(jnp.ones(shape), NamedSharding(mesh, P(*spec)))


# ---- meshes and specs --------------------------------------------------------------------------


@mistake("meshes")
def mesh_larger_than_the_devices():
    return spmd.make_mesh((4, 2), ("x", "y"))


@mistake("meshes")
def mesh_with_a_name_twice():
    return spmd.make_mesh((2, 2), ("x", "x"))


@mistake("meshes")
def mesh_with_a_type_that_is_none():
    return spmd.make_mesh((2, 2), ("x", "y"), ("auto", "auto"))


@mistake("meshes")
def axis_twice_in_a_spec():
    return NamedSharding(explicit(), P("x", "x"))


@mistake("meshes")
def axis_twice_in_an_entry():
    return NamedSharding(explicit(), P(("x", "y", "x")))


@mistake("meshes")
def spec_that_is_a_string():
    return NamedSharding(explicit(), "x")


@mistake("meshes")
def mesh_and_spec_in_the_wrong_order():
    return NamedSharding(P("x"), explicit())


@mistake("meshes")
def spec_with_a_number():
    return NamedSharding(explicit(), P(0))


@mistake("meshes")
def unreduced_along_an_automatic_axis():
    return NamedSharding(automatic(), P(unreduced={"x"}))


@mistake("meshes")
def unreduced_along_an_axis_that_splits_too():
    return NamedSharding(explicit(), P("x", unreduced={"x"}))


@mistake("meshes")
def bare_spec_without_a_mesh():
    return spmd.device_put({"w": [jnp.ones(8)]}, P("x"))


@mistake("meshes")
def set_mesh_of_a_string():
    with spmd.set_mesh("x"):
        pass


@mistake("meshes")
def sharding_of_a_scalar():
    return spmd.device_put({"loss": jnp.float32(1)}, NamedSharding(explicit(), P("x")))


@mistake("meshes")
def device_put_of_a_dim_left_to_the_compiler():
    return spmd.device_put(jnp.ones(8), NamedSharding(automatic(), P(P.UNCONSTRAINED)))


@mistake("meshes")
def device_put_to_a_mesh():
    return spmd.device_put(jnp.ones(8), automatic())


@mistake("meshes")
def shape_of_a_shard_that_does_not_divide():
    return NamedSharding(explicit(), P(None, ("x", "y"))).shard_shape((3, 6))


# ---- jit ---------------------------------------------------------------------------------------


@mistake("jit_over_meshes")
def argument_committed_otherwise_than_in_shardings():
    mesh = automatic()
    f = jit(lambda params: params["w"], in_shardings=({"w": NamedSharding(mesh, P("y"))},))
    return f({"w": put(mesh, "x")})


@mistake("jit_over_meshes")
def in_shardings_of_another_structure():
    rows = NamedSharding(automatic(), P("x"))
    f = jit(lambda params: params["w"], in_shardings=({"w": rows},))
    return f({"w": jnp.ones(8), "b": jnp.ones(8)})


@mistake("jit_over_meshes")
def in_shardings_with_too_few_entries():
    rows = NamedSharding(automatic(), P("x"))
    return jit(lambda x, y: x + y, in_shardings=(rows,))(jnp.ones(8), jnp.ones(8))


@mistake("jit_over_meshes")
def in_shardings_that_do_not_divide():
    rows = NamedSharding(automatic(4), P("x"))
    return jit(lambda x: x, in_shardings=({"w": (None, rows)},))({"w": (1.0, jnp.ones(6))})


@mistake("jit_over_meshes")
def in_shardings_that_is_a_string():
    return jit(lambda x: x, in_shardings="x")(jnp.ones(8))


@mistake("jit_over_meshes")
def in_shardings_with_an_argument_by_name():
    rows = NamedSharding(automatic(), P("x"))
    return jit(lambda x: x, in_shardings=rows)(x=jnp.ones(8))


@mistake("jit_over_meshes")
def out_shardings_that_do_not_divide():
    rows = NamedSharding(automatic(4), P("x"))
    return jit(lambda x: {"y": [x, x[1:]]}, out_shardings={"y": [None, rows]})(jnp.ones(8))


@mistake("jit_over_meshes")
def out_shardings_of_another_structure():
    rows = NamedSharding(automatic(), P("x"))
    return jit(lambda x: (x, x), out_shardings=(rows, rows, rows))(jnp.ones(8))


@mistake("jit_over_meshes")
def out_shardings_with_more_entries_than_dims():
    rows = NamedSharding(automatic(), P("x", "y"))
    return jit(lambda x: x.sum(1), out_shardings=rows)(jnp.ones((8, 4)))


@mistake("jit_over_meshes")
def arguments_on_different_devices():
    half = Mesh(np.array(spmd.devices()[:2]), ("z",))
    return jit(lambda x, y: x + y)(put(automatic(), "x"), put(half, "z"))


@mistake("jit_over_meshes")
def operands_on_different_devices():
    half = Mesh(np.array(spmd.devices()[:2]), ("z",))
    return put(automatic(), "x") + put(half, "z")


@mistake("jit_over_meshes")
def argument_on_a_device_outside_of_the_mesh():
    half = Mesh(np.array(spmd.devices()[:2]), ("z",))
    return put(half, "z") + spmd.device_put(jnp.ones((8, 4)), spmd.devices()[3])


@mistake("jit_over_meshes")
def constraint_over_another_mesh():
    other = NamedSharding(Mesh(np.array(spmd.devices()[:2]), ("z",)), P("z"))
    return jit(lambda x: lax.with_sharding_constraint(x * 2, other))(put(automatic(), "x"))


@mistake("jit_over_meshes")
def constraint_in_a_map():
    mesh = automatic(4)
    inside = lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, P("x")))  # noqa: E731
    return spmd.shard_map(inside, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(jnp.ones(8))


@mistake("jit_over_meshes")
def constraint_with_a_string_in_a_tree():
    mesh = automatic()
    shardings = {"w": NamedSharding(mesh, P("x")), "b": "x"}
    tree = {"w": jnp.ones(8), "b": jnp.ones(8)}
    return jit(lambda tree: lax.with_sharding_constraint(tree, shardings))(tree)


@mistake("jit_over_meshes")
def compiled_for_another_layout():
    mesh = automatic()
    compiled = jit(lambda tree: tree["a"][0] * 2).lower({"a": (put(mesh, "x"),)}).compile()
    return compiled({"a": (put(mesh, "y"),)})


@mistake("jit_over_meshes")
def donated_twice_over_a_mesh():
    x = put(automatic(), "x")
    f = jit(lambda x: x * 2, donate_argnums=0)
    f(x)
    return f(x)


@mistake("jit_over_meshes")
def a_move_for_which_no_sharding_asks():
    with spmd.config.override("unasked_gathers", "raise"):
        with spmd.config.override("unasked_gathers_from", "64 B"):
            return jit(lambda x, w: jnp.sin(x @ w))(
                put(automatic(4), "x"), put(automatic(4), "x", shape=(4, 8))
            )


@mistake("jit_over_meshes")
def custom_partition_without_one():
    @custom_partitioning
    def f(x: Any) -> Any:
        return x * 2

    return jit(lambda x: f(x))(put(automatic(), "x"))


# ---- layouts in types --------------------------------------------------------------------------


@mistake("layouts_in_types")
def operands_split_differently():
    mesh = explicit()
    return put(mesh, "x") + put(mesh, None, "x")


@mistake("layouts_in_types")
def ambiguous_contraction():
    mesh = explicit()
    return put(mesh, None, "x") @ put(mesh, "x", shape=(4, 8))


@mistake("layouts_in_types")
def contraction_of_dims_split_differently():
    mesh = explicit()
    return put(mesh, None, "x") @ put(mesh, "y", shape=(4, 8))


@mistake("layouts_in_types")
def reshape_that_cuts_a_split_dim():
    return put(explicit(4), "x").reshape(2, 4, 4)


@mistake("layouts_in_types")
def slice_of_a_split_dim():
    return put(explicit(), "x")[1:5]


@mistake("layouts_in_types")
def constraint_that_says_something_else():
    mesh = explicit()
    return jit(lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, P("y"))))(
        put(mesh, "x")
    )


@mistake("layouts_in_types")
def reshard_that_does_not_divide():
    return reshard({"w": [put(explicit(), "x", shape=(6, 3))]}, P(None, "y"))


@mistake("layouts_in_types")
def reshard_along_an_automatic_axis():
    mesh = automatic()
    return reshard({"w": put(mesh, "x")}, NamedSharding(mesh, P("y")))


@mistake("layouts_in_types")
def out_sharding_along_an_automatic_axis():
    mesh = automatic()
    return jnp.matmul(put(mesh, "x"), jnp.ones((4, 8)), out_sharding=NamedSharding(mesh, P("y")))


@mistake("layouts_in_types")
def out_sharding_with_more_entries_than_dims():
    mesh = explicit()
    out = NamedSharding(mesh, P("x", None, "y"))
    return jnp.einsum("ij,jk->ik", put(mesh, "x"), jnp.ones((4, 8)), out_sharding=out)


@mistake("layouts_in_types")
def out_sharding_along_a_manual_axis():
    mesh = explicit(4)
    f = lambda x: jnp.matmul(x, x.T, out_sharding=P("x"))  # noqa: E731
    return spmd.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(jnp.ones((8, 4)))


@mistake("layouts_in_types")
def scan_over_a_split_dim():
    return lax.scan(lambda c, x: (c + x.sum(), None), 0.0, {"xs": put(explicit(), "x")})


@mistake("layouts_in_types")
def value_of_terms():
    terms = reshard(put(explicit(), "x"), P(unreduced={"y"}))
    return np.asarray(terms)


@mistake("layouts_in_types")
def product_of_terms():
    terms = reshard(put(explicit()), P(unreduced={"x"}))
    return terms * terms


@mistake("layouts_in_types")
def shard_map_with_a_spec_that_moves():
    mesh = explicit(4)
    f = spmd.shard_map(lambda p: p["w"][0], mesh=mesh, in_specs=P(None, "x"), out_specs=P("x"))
    return f({"w": [put(mesh, "x")]})


# ---- bad specs at depth ------------------------------------------------------------------------


def model() -> dict[str, Any]:
    layer = {"w": jnp.ones((8, 6)), "b": jnp.ones(6)}
    return {"layers": [layer, dict(layer)], "head": (jnp.ones((6, 8)), {"scale": jnp.float32(1)})}


def rows(mesh: Mesh | None = None) -> NamedSharding:
    return NamedSharding(mesh or automatic(4), P("x"))


def shardings(**changed: Any) -> dict[str, Any]:
    free = {"layers": [{"w": None, "b": None}] * 2, "head": (None, {"scale": None})}
    return free | changed


@mistake("shardings_in_trees")
def bias_that_does_not_divide():
    layers = [{"w": rows(), "b": None}, {"w": rows(), "b": rows()}]
    return spmd.device_put(model(), shardings(layers=layers))


@mistake("shardings_in_trees")
def scale_that_is_split():
    return spmd.device_put(model(), shardings(head=(None, rows())))


@mistake("shardings_in_trees")
def a_layer_too_few():
    return spmd.device_put(model(), shardings(layers=[rows()]))


@mistake("shardings_in_trees")
def a_key_too_much():
    return spmd.device_put(model(), shardings(tail=rows()))


@mistake("shardings_in_trees")
def a_number_for_a_sharding():
    return spmd.device_put(model(), shardings(head=(3, None)))


@mistake("shardings_in_trees")
def a_bare_spec_inside():
    return spmd.device_put(model(), shardings(head=(P("x"), None)))


@mistake("shardings_in_trees")
def an_axis_that_is_not_there_inside():
    with spmd.set_mesh(automatic()):
        return spmd.device_put(model(), shardings(head=(P("z"), None)))


@mistake("shardings_in_trees")
def a_string_for_an_array():
    return spmd.device_put({"head": ("w", jnp.ones(4))}, rows())


@mistake("shardings_in_trees")
def in_shardings_of_a_leaf_that_does_not_divide():
    f = jit(lambda step, model: step, in_shardings=(None, shardings(head=rows())))
    return f(0, model())


@mistake("shardings_in_trees")
def in_shardings_with_a_number_inside():
    f = jit(lambda step, model: step, in_shardings=(None, shardings(head=(None, {"scale": 3}))))
    return f(0, model())


@mistake("shardings_in_trees")
def in_shardings_with_another_structure_inside():
    f = jit(lambda step, model: step, in_shardings=(None, shardings(head=(None, {"bias": None}))))
    return f(0, model())


@mistake("shardings_in_trees")
def out_shardings_of_a_leaf_that_does_not_divide():
    f = jit(lambda model: model, out_shardings=shardings(layers=[None, {"w": None, "b": rows()}]))
    return f(model())


@mistake("shardings_in_trees")
def out_shardings_with_a_string_inside():
    return jit(lambda model: model, out_shardings=shardings(head=("x", None)))(model())


@mistake("shardings_in_trees")
def out_shardings_where_there_is_none():
    f = jit(lambda model: {"head": None, "rest": model}, out_shardings={"head": rows()})
    return f(model())


@mistake("shardings_in_trees")
def constraint_of_a_leaf_with_more_entries_than_dims():
    columns = NamedSharding(automatic(4), P(None, "x"))
    return jit(lambda m: lax.with_sharding_constraint(m, shardings(head=columns)))(model())


@mistake("shardings_in_trees")
def in_specs_of_a_leaf_that_does_not_divide():
    f = spmd.shard_map(lambda m: m["head"][0], mesh=explicit(4), in_specs=P("x"), out_specs=P("x"))
    return f(model())


@mistake("shardings_in_trees")
def in_specs_with_a_sharding_inside():
    specs = {"layers": P(), "head": (rows(), P())}
    f = spmd.shard_map(lambda m: m["head"][0], mesh=explicit(4), in_specs=(specs,), out_specs=P())
    return f(model())


@mistake("shardings_in_trees")
def out_specs_of_a_leaf_with_more_entries_than_dims():
    f = spmd.shard_map(
        lambda m: {"a": [m["head"][1]]}, mesh=explicit(4), in_specs=P(), out_specs=P("x")
    )
    return f(model())


@mistake("shardings_in_trees")
def reshard_of_a_leaf_that_does_not_divide():
    with spmd.set_mesh(explicit(4)):
        return reshard(model(), {"layers": P(), "head": (P("x"), P())})


@mistake("shardings_in_trees")
def restored_to_a_layout_that_does_not_divide():
    import tempfile

    from spmd import checkpoints

    with tempfile.TemporaryDirectory() as folder:
        checkpoints.save(folder, 1, {"layers": [{"b": jnp.ones(6)}]})
        like = spmd.ShapeDtypeStruct((6,), "float32", sharding=rows())
        return checkpoints.restore(folder, {"layers": [{"b": like}]})


@mistake("shardings_in_trees")
def gradient_with_respect_to_a_leaf_on_other_devices():
    half = Mesh(np.array(spmd.devices()[:2]), ("z",))
    tree = {"a": [put(automatic(), "x")], "b": put(half, "z")}
    return grad(lambda t: (t["a"][0] * t["b"]).sum())(tree)


@mistake("jit_over_meshes")
def structure_that_does_not_divide():
    rows = NamedSharding(automatic(4), P("x"))
    w = spmd.ShapeDtypeStruct((10,), np.float32, sharding=rows)
    return jit(lambda params: params["w"] * 2).lower({"w": w})


@mistake("jit_over_meshes")
def constraint_of_a_text():
    rows = NamedSharding(automatic(), P("x"))
    return jit(lambda x: lax.with_sharding_constraint((x, "adam"), rows))(jnp.ones(8))


@mistake("jit_over_meshes")
def constraints_of_another_structure():
    rows = NamedSharding(automatic(), P("x"))
    return jit(lambda x: lax.with_sharding_constraint({"w": x}, {"b": rows}))(jnp.ones(8))


@mistake("jit_over_meshes")
def step_that_does_not_fit_the_memory():
    def step(x):
        return jnp.broadcast_to(x[:, None], (8, 1 << 40)) + 1

    return jit(step)(put(automatic(), "x").sum(1))


@mistake("maps")
def map_over_axes_of_a_map_around():
    mesh = automatic()
    inside = spmd.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    f = spmd.shard_map(inside, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    return f(jnp.ones(8))


@mistake("maps")
def map_inside_that_names_an_axis():
    def outside(x):
        return spmd.shard_map(lambda x: x * 2, in_specs=P("y"), out_specs=P("y"))(x)

    f = spmd.shard_map(outside, mesh=automatic(), in_specs=P("x"), out_specs=P("x"))
    return f(jnp.ones(8))
