"""More mistakes: with traced values, with shapes and dtypes, with control flow.

They go into the same table as those of `mistakes.py`.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

import spmd
import spmd.numpy as jnp
from spmd import grad, jit, lax, nn, vmap
from tests.mistakes import mistake

# ---- traced values -----------------------------------------------------------------------------


@mistake("tracing")
def if_on_a_traced_value():
    @jit
    def relu(x):
        if x > 0:
            return x
        return 0.0

    return relu(1.0)


@mistake("tracing")
def if_on_a_traced_value_under_vmap_and_grad():
    def f(x):
        y = jnp.sin(x)
        return y if y > 0 else -y

    return vmap(grad(f))(jnp.ones(3))


@mistake("tracing")
def while_on_a_traced_value():
    @jit
    def halve(x):
        while x > 1:
            x = x / 2
        return x

    return halve(8.0)


@mistake("tracing")
def range_of_a_traced_value():
    return jit(lambda n: sum(range(n)))(3)


@mistake("tracing")
def shape_from_a_traced_value():
    return jit(lambda n: jnp.zeros(n))(3)


@mistake("tracing")
def shape_from_a_traced_value_in_a_tuple():
    return jit(lambda x, n: x.reshape((n, -1)))(jnp.ones(6), 2)


@mistake("tracing")
def numpy_function_of_a_traced_value():
    return jit(lambda x: np.sin(x))(1.0)


@mistake("tracing")
def float_of_a_traced_value():
    return jit(lambda x: float(x) + 1)(1.0)


@mistake("tracing")
def item_of_a_traced_loss():
    def step(w):
        loss, g = spmd.value_and_grad(lambda w: jnp.sum(w**2))(w)
        history.append(loss.item())
        return w - g

    history: list[float] = []
    return jit(step)(jnp.ones(3))


@mistake("tracing")
def list_index_by_a_traced_value():
    return jit(lambda i: [10, 20, 30][i])(1)


@mistake("tracing")
def numpy_array_indexed_by_a_traced_value():
    table = np.arange(3.0)
    return jit(lambda i: table[i])(1)


@mistake("tracing")
def boolean_mask_under_jit():
    return jit(lambda x: x[x > 0])(jnp.ones(3))


@mistake("tracing")
def nonzero_under_jit():
    return jit(lambda x: jnp.nonzero(x))(jnp.ones(3))


@mistake("tracing")
def slice_with_traced_bounds():
    return jit(lambda x, n: x[:n])(jnp.arange(5.0), 2)


@mistake("tracing")
def value_kept_in_a_global():
    kept = SimpleNamespace()

    @jit
    def f(x):
        kept.y = jnp.sin(x)
        return x

    f(1.0)
    return kept.y + 1


@mistake("tracing")
def value_kept_in_a_list_under_grad():
    history = []

    def loss(w):
        value = jnp.sum(w**2)
        history.append(value)
        return value

    grad(loss)(jnp.ones(3))
    return history[0] + 1


@mistake("tracing")
def value_kept_and_used_by_another_jit():
    kept = []
    jit(lambda x: kept.append(x * 2))(1.0)
    return jit(lambda y: y + kept[0])(1.0)


@mistake("tracing")
def assignment_in_place():
    x = jnp.zeros(3)
    x[0] = 1.0
    return x


@mistake("tracing")
def assignment_in_place_under_jit():
    @jit
    def f(x):
        x[0] += 1.0
        return x

    return f(jnp.zeros(3))


# ---- shapes and dtypes -------------------------------------------------------------------------


@mistake("shapes")
def add_of_shapes_that_do_not_broadcast():
    return jnp.ones((4, 3)) + jnp.ones(4)


@mistake("shapes")
def add_of_shapes_that_do_not_broadcast_under_jit():
    @jit
    def residual(x, y):
        return jnp.sin(x) - y

    return residual(jnp.ones((4, 3)), jnp.ones((4, 2)))


@mistake("shapes")
def lax_add_of_different_shapes():
    return lax.add(jnp.ones((4, 3)), jnp.ones((2, 3)))


@mistake("shapes")
def matmul_of_shapes_that_do_not_fit():
    return jnp.ones((8, 3)) @ jnp.ones((4, 2))


@mistake("shapes")
def dot_of_shapes_that_do_not_fit():
    return jnp.dot(jnp.ones((512, 784)), jnp.ones((10, 784)))


@mistake("shapes")
def einsum_of_sizes_that_differ():
    return jnp.einsum("bi,ij->bj", jnp.ones((2, 3)), jnp.ones((4, 5)))


@mistake("shapes")
def matmul_with_a_scalar():
    return jnp.ones((3, 3)) @ 2.0


@mistake("shapes")
def concatenate_of_shapes_that_differ():
    return jnp.concatenate([jnp.ones((2, 3)), jnp.ones((2, 4))])


@mistake("shapes")
def concatenate_of_an_array_for_a_list():
    return jnp.concatenate(jnp.ones(3), jnp.ones(2))


@mistake("shapes")
def stack_of_shapes_that_differ():
    return jnp.stack([jnp.ones(2), jnp.ones(3)])


@mistake("shapes")
def reshape_to_another_size():
    return jnp.ones((4, 6)).reshape(5, 5)


@mistake("shapes")
def reshape_with_an_unknown_that_does_not_divide():
    return jnp.ones((4, 6)).reshape(5, -1)


@mistake("shapes")
def broadcast_to_a_smaller_shape():
    return jnp.broadcast_to(jnp.ones((2, 3)), (2, 4))


@mistake("shapes")
def sum_over_a_dim_that_is_not_there():
    return jnp.sum(jnp.ones((2, 3)), axis=2)


@mistake("shapes")
def transpose_with_a_wrong_permutation():
    return jnp.transpose(jnp.ones((2, 3)), (0, 2))


@mistake("shapes")
def squeeze_of_a_dim_that_is_not_one():
    return jnp.squeeze(jnp.ones((2, 1)), axis=0)


@mistake("shapes")
def split_into_parts_that_do_not_fit():
    return jnp.split(jnp.ones(10), 3)


@mistake("shapes")
def index_with_too_many_indices():
    return jnp.ones((2, 3))[0, 1, 2]


@mistake("shapes")
def index_with_a_float():
    return jnp.arange(4)[1.0]


@mistake("shapes")
def index_with_a_list():
    return jnp.arange(4)[[0, 2]]


@mistake("shapes")
def mask_of_another_shape():
    return jnp.ones((3, 2))[jnp.ones(4, bool)]


@mistake("shapes")
def update_with_a_value_that_does_not_broadcast():
    return jnp.zeros((3, 4)).at[0].set(jnp.ones(3))


@mistake("shapes")
def float_operation_on_an_integer():
    return lax.sin(jnp.arange(3))


@mistake("shapes")
def lax_operation_on_two_dtypes():
    return lax.add(jnp.ones(3), jnp.arange(3))


@mistake("shapes")
def bit_operation_on_floats():
    return jnp.bitwise_and(jnp.ones(3), 1)


@mistake("shapes")
def negative_of_bools():
    return -jnp.array([True, False])


@mistake("shapes")
def iteration_over_a_scalar():
    return list(jnp.float32(3.0))


@mistake("shapes")
def bool_of_many():
    return bool(jnp.ones(3) > 0)


@mistake("shapes")
def softmax_over_a_dim_that_is_not_there():
    return nn.softmax(jnp.ones(3), axis=1)


# ---- control flow ------------------------------------------------------------------------------


@mistake("control")
def cond_whose_branches_return_different_dtypes():
    return lax.cond(True, lambda x: x + 1, lambda x: x + 1.5, 1)


@mistake("control")
def cond_whose_branches_return_different_shapes():
    return lax.cond(True, lambda x: {"y": x}, lambda x: {"y": x[:2]}, jnp.ones(3))


@mistake("control")
def cond_whose_branches_return_different_trees():
    return lax.cond(True, lambda x: (x, x), lambda x: x, 1.0)


@mistake("control")
def cond_on_a_vector():
    return lax.cond(jnp.ones(3) > 0, lambda: 1, lambda: 2)


@mistake("control")
def cond_without_a_function():
    return lax.cond(True, 1.0, 2.0)


@mistake("control")
def switch_without_branches():
    return lax.switch(0, [], 1.0)


@mistake("control")
def while_loop_whose_carry_changes_its_dtype():
    start = (jnp.int32(0), jnp.ones(3))
    return lax.while_loop(lambda c: c[0] < 10, lambda c: (c[0] + 0.5, c[1]), start)


@mistake("control")
def while_loop_whose_carry_changes_its_shape():
    state = {"i": 0, "x": jnp.ones(3)}
    body = lambda s: {"i": s["i"] + 1, "x": jnp.append(s["x"], 1.0)}  # noqa: E731
    return lax.while_loop(lambda s: s["i"] < 10, body, state)


@mistake("control")
def while_loop_whose_carry_changes_its_tree():
    return lax.while_loop(lambda c: c[0] < 10, lambda c: c[0] + 1, (0, 1))


@mistake("control")
def while_loop_whose_condition_is_no_scalar():
    return lax.while_loop(lambda x: x < 10, lambda x: x + 1, jnp.ones(3))


@mistake("control")
def while_loop_whose_condition_is_a_number():
    return lax.while_loop(lambda x: 10 - x, lambda x: x + 1, 0)


@mistake("control")
def fori_loop_whose_carry_changes_its_tree():
    return lax.fori_loop(0, 10, lambda i, c: c[0], (1.0, 2.0))


@mistake("control")
def fori_loop_whose_carry_changes_its_dtype():
    return lax.fori_loop(0, 10, lambda i, total: total + i / 2, jnp.int32(0))


@mistake("control")
def scan_over_lengths_that_differ():
    def step(carry, x):
        return carry + x["a"] + x["b"], None

    return lax.scan(step, 0.0, {"a": jnp.ones(3), "b": jnp.ones(4)})


@mistake("control")
def scan_over_a_length_that_differs_from_the_given():
    return lax.scan(lambda c, x: (c + x, x), 0.0, jnp.ones(3), length=4)


@mistake("control")
def scan_without_any_length():
    return lax.scan(lambda c, _: (c, c), 0.0, None)


@mistake("control")
def scan_over_a_scalar():
    return lax.scan(lambda c, x: (c + x, x), 0.0, 3.0)


@mistake("control")
def scan_whose_carry_changes_its_dtype():
    return lax.scan(lambda c, x: (c + x, c), jnp.int32(0), jnp.ones(3))


@mistake("control")
def scan_whose_carry_changes_its_shape():
    step = lambda c, x: ({"h": c["h"] @ x}, None)  # noqa: E731
    return lax.scan(step, {"h": jnp.ones((2, 3))}, jnp.ones((5, 3, 4)))


@mistake("control")
def scan_whose_carry_changes_its_tree():
    return lax.scan(lambda c, x: ([c[0], c[1]], x), (0.0, 1.0), jnp.ones(3))


@mistake("control")
def scan_whose_body_returns_no_pair():
    return lax.scan(lambda c, x: c + x, 0.0, jnp.ones(3))


# ---- slips -------------------------------------------------------------------------------------


@mistake("slips")
def f_string_of_a_traced_value():
    return jit(lambda x: (f"loss {x:.2f}", x)[1])(1.0)


def squares(w):
    """A loss with extra outputs."""
    return (w**2).sum(), {"w": w}


@mistake("slips")
def forgotten_has_aux():
    return grad(squares)(jnp.ones(3))


@mistake("slips")
def has_aux_of_one_array():
    return grad(lambda w: (w**2).sum(), has_aux=True)(jnp.ones(3))


@mistake("slips")
def has_aux_of_three_values():
    return grad(lambda w: ((w**2).sum(), 1, 2), has_aux=True)(jnp.ones(3))


@mistake("slips")
def has_aux_the_wrong_way_round():
    return grad(lambda w: squares(w)[::-1], has_aux=True)(jnp.ones(3))


@mistake("slips")
def misspelt_axis_name():
    return vmap(lambda x: lax.psum(x, "bacth"), axis_name="batch")(jnp.ones(3))


@mistake("slips")
def mean_over_an_axis_too_many():
    return jnp.ones((2, 3)).mean(axis=2)


@mistake("slips")
def median_over_an_axis_too_many():
    return jnp.median(jnp.ones((2, 3)), axis=2)


@mistake("slips")
def array_too_large_for_the_memory():
    return jnp.ones((1_000_000, 1_000_000))


@mistake("slips")
def assignment_to_at():
    x = jnp.ones(3)
    x.at[0] = 5  # type: ignore[index]
    return x


@mistake("slips")
def at_called_like_a_function():
    return jnp.ones(3).at(0)  # type: ignore[operator]


@mistake("slips")
def unequal_bounds_of_a_loop():
    return lax.fori_loop(0, np.float32(3), lambda i, c: c, 1.0)


@mistake("slips")
def argnums_twice():
    return grad(lambda x, y: x * y, argnums=(0, 0))(1.0, 2.0)
