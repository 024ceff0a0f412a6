"""Collectives that not all devices reach, found while tracing; and programs that look like them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.base.errors import CollectiveError, CollectiveWarning
from spmd.sharding import PartitionSpec as P

X = np.arange(1.0, 5.0, dtype=np.float32)


def total(x: Any) -> Any:
    return lax.psum(x, "i")


def mapped(f: Callable[..., Any]) -> Callable[..., Any]:
    return spmd.pmap(f, axis_name="i")


def sharded(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    mesh = spmd.make_mesh((4,), ("i",))
    return spmd.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"), **options)


def untyped(f: Callable[..., Any]) -> Callable[..., Any]:
    return sharded(f, check_vma=False)


# ---- certain: worked out from positions --------------------------------------------------------


def branch_of_the_first(x: Any) -> Any:
    return lax.cond(lax.axis_index("i") == 0, total, lambda x: x, x)


def branches_by_parity(x: Any) -> Any:
    k = (lax.axis_index("i") + 1) * 3 % 2
    return lax.switch(k, [total, lambda x: lax.pmax(x, "i")], x)


def rounds_by_position(x: Any) -> Any:
    return lax.fori_loop(0, lax.axis_index("i") + 1, lambda _, c: total(c), x)


def branch_inside_a_scan(x: Any) -> Any:
    first = lax.axis_index("i") == 0

    def step(c: Any, _: Any) -> Any:
        return lax.cond(first, total, lambda c: c, c), None

    return lax.scan(step, x, None, length=3)[0]


def branch_inside_a_call(x: Any) -> Any:
    return spmd.jit(branch_of_the_first)(x)


CERTAIN = (
    branch_of_the_first,
    branches_by_parity,
    rounds_by_position,
    branch_inside_a_scan,
    branch_inside_a_call,
)


# In maps with types their values would vary over different axes.
NEED_NO_TYPES = (
    rounds_by_position,
    branch_inside_a_scan,
    branch_of_the_first,
    branch_inside_a_call,
)


@pytest.mark.parametrize("how", [mapped, sharded], ids=["pmap", "shard_map"])
@pytest.mark.parametrize("body", CERTAIN, ids=lambda f: f.__name__)
def test_positions_that_decide_differently_are_an_error(body: Any, how: Any):
    if how is sharded and body in NEED_NO_TYPES:
        how = untyped
    with pytest.raises(CollectiveError) as caught:
        how(body)(X)
    text = str(caught.value)
    assert "over 'i'" in text and "they would wait for each other" in text
    assert "i=0" in text and text.count("test_divergence_check.py:") >= 2
    assert "snp.where" in text


def test_the_text_of_the_error(golden: Any):
    import re

    with pytest.raises(CollectiveError) as caught:
        mapped(branch_of_the_first)(X)
    golden("divergence_error.txt", re.sub(r"\.py:\d+", ".py:N", str(caught.value)) + "\n")


# ---- likely: decided by data that differs ------------------------------------------------------


def branch_by_data(x: Any) -> Any:
    return lax.cond(snp.sum(x) > 2, total, lambda x: x, x)


def rounds_by_data(x: Any) -> Any:
    return lax.while_loop(lambda c: snp.sum(c) < 100, lambda c: total(c) + 1, x)


@pytest.mark.parametrize("body", [branch_by_data, rounds_by_data], ids=lambda f: f.__name__)
def test_data_that_differs_is_a_warning(body: Any):
    with pytest.warns(CollectiveWarning, match=r"(?s)made from x, which differs between devices"):
        try:
            mapped(body)(X)
        except CollectiveError as error:
            assert "reached it" in str(error)  # and the run finds out that they do differ


def test_data_split_by_type_is_a_warning_before_its_values_are_known():
    def branch(x: Any) -> Any:
        return lax.cond(snp.sum(x) > 2, lambda x: total(x) + 0 * x, lambda x: x, x)

    f = spmd.jit(sharded(branch, check_vma=True))
    with pytest.warns(CollectiveWarning, match=r"(?s)pmap|shard_map"):
        f.trace(spmd.ShapeDtypeStruct((4,), np.float32))


# ---- look-alikes: no alarm ---------------------------------------------------------------------


def branch_by_a_total(x: Any) -> Any:
    return lax.cond(total(snp.sum(x)) > 2, total, lambda x: x * 4, x)


def branch_by_gathered(x: Any) -> Any:
    everyone = lax.all_gather(x, "i")
    return lax.cond(everyone[0].sum() > everyone[1].sum(), total, lambda x: x * 4, x)


def rounds_until_all_agree(x: Any) -> Any:
    def again(c: Any) -> Any:
        return lax.pmax(abs(c).max(), "i") > 0.1

    return lax.while_loop(again, lambda c: (c + lax.pmean(c, "i")) * 0.3, x)


def branch_without_collectives(x: Any) -> Any:
    return total(lax.cond(lax.axis_index("i") == 0, snp.sin, snp.cos, x))


def position_that_never_decides(x: Any) -> Any:
    return lax.cond(lax.axis_index("i") < 100, total, lambda x: x, x)


def rounds_that_are_equal_after_all(x: Any) -> Any:
    n = lax.axis_index("i") * 0 + 3
    return lax.fori_loop(0, n, lambda _, c: total(c) * 0.1, x)


def whole_groups_take_their_branch(x: Any) -> Any:
    groups = [[0, 1], [2, 3]]
    one = lambda x: lax.psum(x, "i", axis_index_groups=groups)  # noqa: E731
    return lax.cond(lax.axis_index("i") < 2, one, lambda x: x, x)


def every_other_round(x: Any) -> Any:
    def step(c: Any, k: Any) -> Any:
        return lax.cond(k % 2 == 0, lambda c: lax.pmean(c, "i"), lambda c: c * 0.5, c), None

    return lax.scan(step, x, snp.arange(4))[0]


def step_counter(state: Any) -> Any:
    """The replicated state of a training loop: stacked, and equal on all devices."""
    return lax.cond(state % 2 == 0, lambda s: lax.pmean(s, "i"), lambda s: s, state)


QUIET = (
    branch_by_a_total,
    branch_by_gathered,
    rounds_until_all_agree,
    branch_without_collectives,
    position_that_never_decides,
    rounds_that_are_equal_after_all,
    whole_groups_take_their_branch,
    every_other_round,
)


@pytest.mark.parametrize(
    "how", [mapped, lambda f: sharded(f, check_vma=False)], ids=["pmap", "map"]
)
@pytest.mark.parametrize("body", QUIET, ids=lambda f: f.__name__)
def test_look_alikes_raise_no_alarm(body: Any, how: Any):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = how(body)(X)
    expected = spmd.vmap(body, axis_name="i")(X)
    np.testing.assert_allclose(np.ravel(out), np.ravel(expected), rtol=1e-5)


def test_replicated_state_raises_no_alarm():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = mapped(step_counter)(np.full(4, 6.0, np.float32))
    np.testing.assert_array_equal(out, np.full(4, 6.0))


# ---- the scale of a summed loss ----------------------------------------------------------------


def loss(w: Any, x: Any) -> Any:
    return snp.sum((w * x) ** 2)


def of_the_sum(w: Any, x: Any) -> Any:
    return spmd.grad(lambda w: lax.psum(loss(w, x), "i"))(w)


def test_a_loss_summed_inside_grad_is_a_warning():
    w = np.float32(2)
    with pytest.warns(
        CollectiveWarning, match=r"4 times the gradient .*\n.*lax.pmean\(grads, 'i'\)"
    ):
        found = spmd.pmap(of_the_sum, axis_name="i", in_axes=(None, 0))(w, X)
    own = spmd.vmap(lambda x: spmd.grad(loss)(w, x))(X)
    np.testing.assert_allclose(found, 4 * np.asarray(own), rtol=1e-6)  # as the warning says


def test_a_summed_loss_inside_a_call_is_found():
    f = spmd.jit(lambda w, x: lax.psum(loss(w, x), "i"))
    with pytest.warns(CollectiveWarning):
        spmd.pmap(lambda x: spmd.grad(f)(np.float32(2), x), axis_name="i")(X)


def of_the_mean(x: Any) -> Any:
    return spmd.grad(lambda w: lax.pmean(loss(w, x), "i"))(np.float32(2))


def of_a_normalised_loss(x: Any) -> Any:
    """Statistics over all devices in the forward pass, as in batch normalisation."""
    return spmd.grad(lambda w: loss(w, x / lax.psum(x, "i")))(np.float32(2))


def of_the_own_loss(x: Any) -> Any:
    return lax.psum(spmd.grad(loss)(np.float32(2), x), "i")


@pytest.mark.parametrize("body", [of_the_mean, of_a_normalised_loss, of_the_own_loss])
def test_losses_that_look_like_it_raise_no_alarm(body: Any):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mapped(body)(X)


def test_a_summed_loss_in_shard_map_or_vmap_is_right():
    mesh = spmd.make_mesh((4,), ("i",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f = lambda w, x: spmd.grad(lambda w: lax.psum(loss(w, x), "i"))(w)  # noqa: E731
        typed = spmd.shard_map(f, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
        np.testing.assert_allclose(typed(np.float32(2), X), 4 * np.sum(X**2), rtol=1e-6)
        spmd.vmap(f, axis_name="i", in_axes=(None, 0))(np.float32(2), X)
