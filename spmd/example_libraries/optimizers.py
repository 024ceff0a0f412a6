"""First-order optimizers over pytrees, each a triple of functions, as in JAX's library.

`init_fn(params)` makes a state, `update_fn(step, grads, state)` the next one, `get_params(state)`
gives the parameters of a state. A state is a pytree. Step sizes are numbers, or schedules:
functions from the number of the step to a number.

>>> init_fn, update_fn, get_params = momentum(0.1, mass=0.9)
>>> state = init_fn({"w": np.float32(1.0)})
>>> state = update_fn(0, {"w": np.float32(2.0)}, state)
>>> get_params(state)
{'w': Array(0.8, dtype=float32)}
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import spmd.numpy as snp
from spmd.base.errors import ArgumentError, PytreeError
from spmd.base.tree import (
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_structure,
    tree_unflatten,
)

__all__ = [
    "Optimizer",
    "OptimizerState",
    "adagrad",
    "adam",
    "adamax",
    "clip_grads",
    "constant",
    "exponential_decay",
    "inverse_time_decay",
    "l2_norm",
    "make_schedule",
    "momentum",
    "nesterov",
    "optimizer",
    "piecewise_constant",
    "polynomial_decay",
    "rmsprop",
    "rmsprop_momentum",
    "sgd",
    "sm3",
]

Schedule = Callable[[Any], Any]


class OptimizerState(NamedTuple):
    """The flat states of all leaves, with the structures of the parameters and of each state."""

    packed_state: Any
    tree_def: Any
    subtree_defs: Any


register_pytree_node(
    OptimizerState,
    lambda s: ((s.packed_state,), (s.tree_def, s.subtree_defs)),
    lambda aux, children: OptimizerState(children[0], *aux),
)


class Optimizer(NamedTuple):
    """The three functions of an optimizer."""

    init_fn: Callable[[Any], OptimizerState]
    update_fn: Callable[[Any, Any, OptimizerState], OptimizerState]
    params_fn: Callable[[OptimizerState], Any]


def optimizer(opt_maker: Callable[..., tuple[Any, Any, Any]]) -> Callable[..., Optimizer]:
    """Make an optimizer of pytrees out of one of single arrays.

    `opt_maker` returns `init(x)`, `update(step, grad, state)` and `get_params(state)` for one
    array.
    The result has the parameters of `opt_maker`, and returns an `Optimizer`. Its `update_fn` raises
    a `PytreeError` if the gradients have another structure than the parameters.
    """

    @functools.wraps(opt_maker)
    def make(*args: Any, **kwargs: Any) -> Optimizer:
        init, update, get_params = opt_maker(*args, **kwargs)

        def tree_init(params: Any) -> OptimizerState:
            leaves, tree = tree_flatten(params)
            return _packed([init(x) for x in leaves], tree)

        def tree_update(step: Any, grads: Any, state: OptimizerState) -> OptimizerState:
            leaves, tree = tree_flatten(grads)
            if tree != state.tree_def:
                raise PytreeError(
                    f"update_fn: the gradients are {tree}, the parameters {state.tree_def}; "
                    "both must have one structure"
                )
            pairs = zip(leaves, _unpacked(state), strict=True)
            return _packed([update(step, g, s) for g, s in pairs], tree)

        def tree_params(state: OptimizerState) -> Any:
            return tree_unflatten(state.tree_def, [get_params(s) for s in _unpacked(state)])

        return Optimizer(tree_init, tree_update, tree_params)

    return make


def _packed(states: list[Any], tree: Any) -> OptimizerState:
    found = [tree_flatten(s) for s in states]
    leaves = tuple(tuple(leaves) for leaves, _ in found)
    return OptimizerState(leaves, tree, tuple(t for _, t in found))


def _unpacked(state: OptimizerState) -> list[Any]:
    pairs = zip(state.subtree_defs, state.packed_state, strict=True)
    return [tree_unflatten(t, leaves) for t, leaves in pairs]


# ---- optimizers --------------------------------------------------------------------------------


@optimizer
def sgd(step_size: float | Schedule) -> Any:
    """Gradient descent."""
    rate = make_schedule(step_size)
    return lambda x: x, lambda i, g, x: x - rate(i) * g, lambda x: x


@optimizer
def momentum(step_size: float | Schedule, mass: float) -> Any:
    """Gradient descent with momentum."""
    rate = make_schedule(step_size)

    def update(i: Any, g: Any, state: Any) -> Any:
        x, velocity = state
        velocity = mass * velocity + g
        return x - rate(i) * velocity, velocity

    return _with_zeros(1), update, _first


@optimizer
def nesterov(step_size: float | Schedule, mass: float) -> Any:
    """Gradient descent with Nesterov's momentum."""
    rate = make_schedule(step_size)

    def update(i: Any, g: Any, state: Any) -> Any:
        x, velocity = state
        velocity = mass * velocity + g
        return x - rate(i) * (mass * velocity + g), velocity

    return _with_zeros(1), update, _first


@optimizer
def adagrad(step_size: float | Schedule, momentum: float = 0.9) -> Any:
    """Adagrad: steps divided by the root of the sum of squared gradients, with momentum."""
    rate = make_schedule(step_size)

    def update(i: Any, g: Any, state: Any) -> Any:
        x, squares, m = state
        squares = squares + g * g
        scale = snp.where(squares > 0, 1.0 / snp.sqrt(snp.where(squares > 0, squares, 1.0)), 0.0)
        m = (1.0 - momentum) * (g * scale) + momentum * m
        return x - rate(i) * m, squares, m

    return _with_zeros(2), update, _first


@optimizer
def rmsprop(step_size: float | Schedule, gamma: float = 0.9, eps: float = 1e-8) -> Any:
    """RMSProp: steps divided by the root of a running mean of squared gradients."""
    rate = make_schedule(step_size)

    def update(i: Any, g: Any, state: Any) -> Any:
        x, mean = state
        mean = mean * gamma + g * g * (1.0 - gamma)
        return x - rate(i) * g / snp.sqrt(mean + eps), mean

    return _with_zeros(1), update, _first


@optimizer
def rmsprop_momentum(
    step_size: float | Schedule, gamma: float = 0.9, eps: float = 1e-8, momentum: float = 0.9
) -> Any:
    """RMSProp with momentum."""
    rate = make_schedule(step_size)

    def update(i: Any, g: Any, state: Any) -> Any:
        x, mean, m = state
        mean = mean * gamma + g * g * (1.0 - gamma)
        m = momentum * m + rate(i) * g / snp.sqrt(mean + eps)
        return x - m, mean, m

    return _with_zeros(2), update, _first


@optimizer
def adam(step_size: float | Schedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Any:
    """Adam: running means of gradients and of their squares, with bias correction."""
    rate = make_schedule(step_size)

    def update(i: Any, g: Any, state: Any) -> Any:
        x, m, v = state
        m = (1 - b1) * g + b1 * m
        v = (1 - b2) * g * g + b2 * v
        power = snp.asarray(i + 1, m.dtype)
        m_hat = m / (1 - snp.asarray(b1, m.dtype) ** power)
        v_hat = v / (1 - snp.asarray(b2, m.dtype) ** power)
        return x - rate(i) * m_hat / (snp.sqrt(v_hat) + eps), m, v

    return _with_zeros(2), update, _first


@optimizer
def adamax(
    step_size: float | Schedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> Any:
    """Adamax: Adam with a decaying maximum in the place of the mean of squares."""
    rate = make_schedule(step_size)

    def update(i: Any, g: Any, state: Any) -> Any:
        x, m, v = state
        m = (1 - b1) * g + b1 * m
        v = snp.maximum(b2 * v, snp.abs(g))
        start = 1 - snp.asarray(b1, m.dtype) ** snp.asarray(i + 1, m.dtype)
        return x - (rate(i) / start) * m / (v + eps), m, v

    return _with_zeros(2), update, _first


@optimizer
def sm3(step_size: float | Schedule, momentum: float = 0.9) -> Any:
    """SM3: as Adagrad, with one accumulator for each index of each dim instead of each element."""
    rate = make_schedule(step_size)

    def init(x: Any) -> Any:
        x = snp.asarray(x)
        return x, snp.zeros_like(x), [snp.zeros(n, x.dtype) for n in x.shape]

    def update(i: Any, g: Any, state: Any) -> Any:
        x, m, rows = state
        spread = [
            row.reshape([-1 if d == k else 1 for d in range(x.ndim)]) for k, row in enumerate(rows)
        ]
        sums = (
            functools.reduce(snp.minimum, spread, snp.full((), snp.inf, x.dtype)) if rows else 0.0
        )
        sums = sums + g * g
        scale = snp.where(sums > 0, 1.0 / snp.sqrt(snp.where(sums > 0, sums, 1.0)), 0.0)
        m = (1.0 - momentum) * (g * scale) + momentum * m
        rows = [sums.max(axis=tuple(d for d in range(x.ndim) if d != k)) for k in range(len(rows))]
        return x - rate(i) * m, m, rows

    return init, update, _first


def _with_zeros(count: int) -> Callable[[Any], Any]:
    return lambda x: (snp.asarray(x), *(snp.zeros_like(x) for _ in range(count)))


def _first(state: Any) -> Any:
    return state[0]


# ---- schedules ---------------------------------------------------------------------------------


def constant(step_size: float) -> Schedule:
    """A constant step size."""
    return lambda i: step_size


def exponential_decay(step_size: float, decay_steps: float, decay_rate: float) -> Schedule:
    """A step size that is multiplied by `decay_rate` every `decay_steps`."""
    return lambda i: step_size * decay_rate ** (i / decay_steps)


def inverse_time_decay(
    step_size: float, decay_steps: float, decay_rate: float, staircase: bool = False
) -> Schedule:
    """A step size divided by `1 + decay_rate * i / decay_steps`; `staircase` rounds down."""

    def schedule(i: Any) -> Any:
        passed = i / decay_steps
        return step_size / (1 + decay_rate * (snp.floor(passed) if staircase else passed))

    return schedule


def polynomial_decay(
    step_size: float, decay_steps: float, final_step_size: float, power: float = 1.0
) -> Schedule:
    """A step size that goes to `final_step_size` in `decay_steps`."""

    def schedule(i: Any) -> Any:
        left = 1 - snp.minimum(i, decay_steps) / decay_steps
        return left**power * (step_size - final_step_size) + final_step_size

    return schedule


def piecewise_constant(boundaries: Sequence[float], values: Sequence[float]) -> Schedule:
    """`values[k]` from `boundaries[k - 1]` on; raises `ArgumentError` if the numbers don't fit."""
    if len(values) != len(boundaries) + 1:
        raise ArgumentError(
            f"piecewise_constant: {len(boundaries)} boundaries need {len(boundaries) + 1} values, "
            f"got {len(values)}"
        )
    edges, steps = snp.asarray(boundaries), snp.asarray(values)
    return lambda i: steps[snp.sum(i > edges)]


def make_schedule(scalar_or_schedule: float | Schedule) -> Schedule:
    """Make a schedule of a number, or return a schedule as it is.

    Raises `ArgumentError` for anything else.
    """
    if callable(scalar_or_schedule):
        return scalar_or_schedule
    if snp.ndim(scalar_or_schedule) == 0:
        return constant(scalar_or_schedule)
    raise ArgumentError(
        f"make_schedule: a step size is a number or a function, got {scalar_or_schedule!r}"
    )


# ---- gradients ---------------------------------------------------------------------------------


def l2_norm(tree: Any) -> Any:
    """The Euclidean norm of all leaves together.

    >>> l2_norm([np.float32(3.0), np.float32(4.0)])
    Array(5., dtype=float32)
    """
    return snp.sqrt(sum(snp.vdot(x, x) for x in tree_leaves(tree)))


def clip_grads(grad_tree: Any, max_norm: float) -> Any:
    """The same gradients, scaled so that their norm is at most `max_norm`."""
    norm = l2_norm(grad_tree)
    return tree_map(lambda g: snp.where(norm < max_norm, g, g * (max_norm / norm)), grad_tree)


class JoinPoint:
    """Marks where one pytree stands inside another."""

    def __init__(self, subtree: Any):
        self.subtree = subtree

    def __iter__(self) -> Any:
        yield self.subtree


def unpack_optimizer_state(opt_state: OptimizerState) -> Any:
    """A pytree of the parameters' structure, with each leaf's state in a `JoinPoint`."""
    states = [JoinPoint(s) for s in _unpacked(opt_state)]
    return tree_unflatten(opt_state.tree_def, states)


def pack_optimizer_state(marked_pytree: Any) -> OptimizerState:
    """Undo `unpack_optimizer_state`."""
    points, tree = tree_flatten(marked_pytree)
    return _packed([p.subtree for p in points], tree_structure(tree_unflatten(tree, points)))
