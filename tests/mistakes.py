"""The mistakes users make most, one program each, by the part of the library they meet first.

`MISTAKES[topic][name]` is a function that makes the mistake when it is called. Their error texts
are kept in `tests/golden/errors/`, where they can be read as a user would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import spmd
import spmd.numpy as jnp
from spmd import grad, jit, lax, pmap, random, vmap
from spmd.sharding import Mesh, NamedSharding
from spmd.sharding import PartitionSpec as P

MISTAKES: dict[str, dict[str, Callable[[], Any]]] = {}


def mistake(topic: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Enter a program under its own name, with spaces."""

    def enter(program: Callable[[], Any]) -> Callable[[], Any]:
        name = program.__name__.replace("_", " ").strip()
        MISTAKES.setdefault(topic, {})[name] = program
        return program

    return enter


@dataclass
class Model:
    """A user's class that nobody registered as a pytree."""

    weight: Any


# ---- mapped functions: in_axes, out_axes, sizes ------------------------------------------------


def apply(params, state, image):
    """A function with three arguments, one of them a tree."""
    return params["w"] @ image + state


def apply_arguments():
    return {"w": jnp.ones((4, 2, 3)), "b": jnp.ones((4, 2))}, jnp.ones((4, 2)), jnp.ones((4, 3))


@mistake("maps")
def vmap_with_too_few_in_axes():
    return vmap(apply, in_axes=(0, 0))(*apply_arguments())


@mistake("maps")
def pmap_with_too_few_in_axes():
    return pmap(apply, in_axes=(0, 0))(*apply_arguments())


@mistake("maps")
def vmap_in_axes_with_another_structure():
    return vmap(apply, in_axes=({"w": 0}, 0, 0))(*apply_arguments())


@mistake("maps")
def vmap_in_axes_with_a_list_for_a_tuple():
    return vmap(lambda pair: pair[0], in_axes=[[0, None, 0]])((jnp.ones(3), jnp.ones(3)))


@mistake("maps")
def pmap_in_axes_with_a_list_for_a_tuple():
    return pmap(lambda pair: pair[0], in_axes=[[0, None, 0]])((jnp.ones(4), jnp.ones(4)))


@mistake("maps")
def vmap_in_axes_that_is_no_integer():
    return vmap(lambda x: x, in_axes="batch")(jnp.ones(3))


@mistake("maps")
def vmap_over_sizes_that_differ():
    params, state, _ = apply_arguments()
    return vmap(apply)(params, state, jnp.ones((5, 3)))


@mistake("maps")
def pmap_over_sizes_that_differ():
    params, state, _ = apply_arguments()
    return pmap(apply)(params, state, jnp.ones((3, 3)))


@mistake("maps")
def vmap_over_a_scalar():
    return vmap(lambda x, rate: x * rate)(jnp.ones(3), 0.1)


@mistake("maps")
def pmap_over_a_scalar():
    return pmap(lambda x, rate: x * rate)(jnp.ones(4), 0.1)


@mistake("maps")
def vmap_over_a_dim_that_is_not_there():
    return vmap(lambda x: x, in_axes=2)(jnp.ones((3, 4)))


@mistake("maps")
def vmap_over_nothing():
    return vmap(lambda x: x, in_axes=None)(jnp.ones(3))


@mistake("maps")
def vmap_with_out_axes_none_for_what_varies():
    return vmap(lambda x: (x, 2 * x), out_axes=(0, None))(jnp.ones(3))


@mistake("maps")
def vmap_with_out_axes_of_another_structure():
    return vmap(lambda x: (x, x), out_axes=(0, 0, 0))(jnp.ones(3))


@mistake("maps")
def pmap_with_out_axes_of_another_structure():
    return pmap(lambda x: {"loss": x}, out_axes={"los": 0})(jnp.ones(4))


@mistake("maps")
def pmap_over_more_devices_than_there_are():
    return pmap(lambda x: x)(jnp.ones((8, 2)))


@mistake("maps")
def mesh_over_more_devices_than_there_are():
    return spmd.make_mesh((4, 2), ("data", "model"))


@mistake("maps")
def pmap_of_a_string():
    return pmap(lambda x, mode: x)(jnp.ones(4), "train")


# ---- named axes --------------------------------------------------------------------------------


@mistake("axes")
def collective_outside_any_map():
    return lax.psum(jnp.ones(3), "i")


@mistake("axes")
def collective_over_an_axis_with_another_name():
    return pmap(lambda g: lax.pmean(g, "batch"), axis_name="data")(jnp.ones(4))


@mistake("axes")
def collective_under_a_map_without_a_name():
    return vmap(lambda g: lax.psum(g, "i"))(jnp.ones(4))


@mistake("axes")
def axis_index_outside_any_map():
    return jit(lambda x: x + lax.axis_index("i"))(1.0)


@mistake("axes")
def axis_name_used_twice():
    return pmap(pmap(lambda x: lax.psum(x, "i"), axis_name="i"), axis_name="i")(jnp.ones((2, 2)))


@mistake("axes")
def ppermute_to_one_device_twice():
    rotate = pmap(lambda x: lax.ppermute(x, "i", [(0, 1), (2, 1)]), axis_name="i")
    return rotate(jnp.ones(4))


@mistake("axes")
def ppermute_to_a_device_that_is_not_there():
    return pmap(lambda x: lax.ppermute(x, "i", [(0, 4)]), axis_name="i")(jnp.ones(4))


@mistake("axes")
def all_to_all_of_a_dim_that_does_not_split():
    return pmap(lambda x: lax.all_to_all(x, "i", 0, 0), axis_name="i")(jnp.ones((4, 6)))


@mistake("axes")
def psum_scatter_of_a_dim_that_does_not_split():
    f = pmap(lambda x: lax.psum_scatter(x, "i", tiled=True), axis_name="i")
    return f(jnp.ones((4, 6)))


# ---- shardings ---------------------------------------------------------------------------------


def data_mesh():
    return spmd.make_mesh((4,), ("data",))


@mistake("shardings")
def sharding_of_a_size_that_does_not_divide():
    return spmd.device_put({"w": jnp.ones((10, 512))}, NamedSharding(data_mesh(), P("data")))


@mistake("shardings")
def spec_with_more_entries_than_dims():
    return spmd.device_put(jnp.ones(8), NamedSharding(data_mesh(), P(None, "data")))


@mistake("shardings")
def spec_with_an_axis_the_mesh_lacks():
    return NamedSharding(data_mesh(), P("model"))


@mistake("shardings")
def mesh_with_a_name_too_few():
    return Mesh(np.array(spmd.devices()).reshape(2, 2), ("data",))


@mistake("shardings")
def shard_map_with_too_few_in_specs():
    f = spmd.shard_map(lambda x, y: x + y, mesh=data_mesh(), in_specs=(P("data"),),
                       out_specs=P("data"))  # fmt: skip
    return f(jnp.ones(8), jnp.ones(8))


@mistake("shardings")
def shard_map_of_a_size_that_does_not_divide():
    f = spmd.shard_map(lambda x: x, mesh=data_mesh(), in_specs=P("data"), out_specs=P("data"))
    return f(jnp.ones((6, 2)))


@mistake("shardings")
def shard_map_whose_output_varies_but_is_not_split():
    f = spmd.shard_map(
        lambda batch: batch.sum(), mesh=data_mesh(), in_specs=P("data"), out_specs=P()
    )
    return f(jnp.ones(8))


# ---- arguments that are no arrays --------------------------------------------------------------


@mistake("arguments")
def jit_of_a_string():
    return jit(lambda x, mode: x if mode == "train" else -x)(jnp.ones(3), "train")


@mistake("arguments")
def jit_of_an_unregistered_class():
    return jit(lambda model, x: model.weight * x)(Model(jnp.ones(3)), 1.0)


@mistake("arguments")
def jit_of_a_dict_that_holds_a_string():
    return jit(lambda config: config["x"])({"x": jnp.ones(3), "name": "run 1"})


@mistake("arguments")
def jit_that_returns_a_string():
    return jit(lambda x: (x, {"status": "done"}))(jnp.ones(3))


@mistake("arguments")
def static_argument_that_cannot_be_hashed():
    return jit(lambda x, shape: x.reshape(shape), static_argnums=1)(jnp.ones(6), [2, 3])


@mistake("arguments")
def static_argument_that_is_an_array():
    return jit(lambda x, n: x * n, static_argnums=1)(jnp.ones(3), jnp.array(2))


@mistake("arguments")
def static_argnums_out_of_range():
    return jit(lambda x: x, static_argnums=2)(jnp.ones(3))


@mistake("arguments")
def static_argnames_misspelt():
    return jit(lambda x, training: x, static_argnames="trainig")(jnp.ones(3), True)


@mistake("arguments")
def jit_of_no_function():
    return jit(jnp.ones(3))


@mistake("arguments")
def array_function_of_a_list():
    return jnp.sum([1.0, 2.0, 3.0])


@mistake("arguments")
def array_function_of_a_string():
    return jnp.sin("0.5")


@mistake("arguments")
def operator_with_a_list():
    return jnp.ones(3) + [1, 2, 3]  # noqa: RUF005


@mistake("arguments")
def array_of_ragged_lists():
    return jnp.array([[1.0, 2.0], [3.0]])


@mistake("arguments")
def random_without_a_key():
    return random.normal((3,))


@mistake("arguments")
def random_with_a_seed_for_a_key():
    return random.normal(0, (3,))


@mistake("arguments")
def random_key_used_twice():
    key = random.key(0)
    with spmd.debug_key_reuse(True):
        return random.normal(key) + random.normal(key)


@mistake("arguments")
def tree_map_over_trees_that_differ():
    return spmd.tree.map(lambda p, g: p - g, {"w": 1.0, "b": 2.0}, {"w": 1.0})


@mistake("arguments")
def donated_array_used_again():
    x = jnp.ones(1000)
    jit(lambda x: x + 1, donate_argnums=0)(x)
    return x + 1


# ---- differentiating ---------------------------------------------------------------------------


@mistake("gradients")
def grad_of_an_integer():
    return grad(lambda x: x**2)(3)


@mistake("gradients")
def grad_of_an_integer_inside_a_tree():
    params = {"layers": [{"w": jnp.ones(2), "steps": jnp.arange(2)}]}
    return grad(lambda params: params["layers"][0]["w"].sum())(params)


@mistake("gradients")
def grad_of_a_vector_valued_function():
    return grad(lambda x: x**2)(jnp.ones(3))


@mistake("gradients")
def grad_of_a_pair():
    return grad(lambda x: (x, x))(1.0)


@mistake("gradients")
def grad_of_a_function_that_returns_none():
    def loss(x):
        jnp.sum(x)

    return grad(loss)(jnp.ones(3))


@mistake("gradients")
def grad_of_a_complex_function():
    return grad(lambda x: x * 1j)(1.0)


@mistake("gradients")
def grad_with_argnums_out_of_range():
    return grad(lambda x: x, argnums=1)(1.0)


@mistake("gradients")
def grad_of_a_string():
    return grad(lambda x, mode: x)("train", 1.0)


@mistake("gradients")
def grad_through_a_while_loop():
    f = lambda x: lax.while_loop(lambda x: x < 10, lambda x: x * 2, x)  # noqa: E731
    return grad(f)(1.0)


@mistake("gradients")
def cotangent_of_another_structure():
    _, pull = spmd.vjp(lambda x: (x, x), 1.0)
    return pull(1.0)


@mistake("gradients")
def cotangent_of_another_shape():
    _, pull = spmd.vjp(lambda x: x * 2, jnp.ones(3))
    return pull(jnp.ones(4))


@mistake("gradients")
def tangents_of_another_structure():
    return spmd.jvp(lambda x, y: x * y, (1.0, 2.0), (1.0,))


@mistake("gradients")
def tangents_of_another_dtype():
    return spmd.jvp(jnp.sin, (1.0,), (jnp.int32(1),))


@mistake("gradients")
def custom_vjp_without_its_rule():
    return grad(spmd.custom_vjp(lambda x: x))(1.0)


@mistake("gradients")
def custom_vjp_whose_rule_returns_too_few():
    f = spmd.custom_vjp(lambda x, y: x * y)
    f.defvjp(lambda x, y: (x * y, (x, y)), lambda res, g: (g * res[1],))
    return grad(f, argnums=(0, 1))(1.0, 2.0)


@mistake("gradients")
def custom_jvp_whose_rule_changes_the_shape():
    f = spmd.custom_jvp(lambda x: jnp.sum(x))
    f.defjvp(lambda primals, tangents: (jnp.sum(primals[0]), tangents[0]))
    return spmd.jvp(f, (jnp.ones(3),), (jnp.ones(3),))


@mistake("slips")
def update_in_place_at():
    x = jnp.ones(3)
    x.at[0] += 5  # type: ignore[operator]
    return x


@mistake("slips")
def place_in_an_array_as_a_value():
    return jnp.ones(3).at[0] * 2  # type: ignore[operator]


@mistake("slips")
def view_for_reshape():
    return jnp.ones((2, 3)).view(-1)


@mistake("slips")
def count_that_is_no_integer():
    return jnp.linspace(0, 1, 2.5)  # type: ignore[arg-type]


@mistake("slips")
def classes_that_are_no_integer():
    return spmd.nn.one_hot(jnp.arange(3), 3.0)  # type: ignore[arg-type]
