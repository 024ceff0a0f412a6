"""checkify: which check failed first, with which values, through every transformation."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import checkify as ck
from spmd import lax
from spmd.errors import ArgumentError

CHECKED = " (`check` failed)"
WRAPS = pytest.mark.parametrize("wrap", [lambda f: f, spmd.jit], ids=["eager", "jit"])


def said(f, *args, errors=ck.user_checks, wrap=spmd.jit):
    """The error's message, without the suffix of user checks."""
    error, _ = wrap(ck.checkify(f, errors))(*args)
    text = error.get()
    return text if text is None else text.removesuffix(CHECKED)


def positive(x):
    ck.check(x > 0, "{x} is not positive", x=x)
    return snp.sqrt(x)


@WRAPS
def test_a_failed_check_is_an_error_value(wrap):
    error, out = wrap(ck.checkify(positive))(4.0)
    assert error.get() is None and error.get_exception() is None and out == 2.0
    error.throw()
    error, out = wrap(ck.checkify(positive))(-4.0)
    assert error.get() == "-4.0 is not positive" + CHECKED
    assert np.isnan(out)
    with pytest.raises(
        ck.CheckError, match=r"-4.0 is not positive[^\n]*\n  checked at .*test_checkify.py:\d+"
    ):
        error.throw()
    assert issubclass(ck.JaxRuntimeError, ValueError)


@WRAPS
def test_the_first_failure_counts(wrap):
    def f(x):
        ck.check(x < 10, "{} is large", x)
        ck.check(x < 5, "{} is rather large: {more}", x, more={"twice": 2 * x}["twice"])
        ck.check(x < 1, "not small")

    assert said(f, 0, wrap=wrap) is None
    assert said(f, 3, wrap=wrap) == "not small"
    assert said(f, 6, wrap=wrap) == "6 is rather large: 12"
    assert said(f, 60, wrap=wrap) == "60 is large"


@WRAPS
def test_checks_in_calls_and_branches_are_found(wrap):
    def f(x):
        inner = spmd.jit(lambda x: positive(x) + 1)
        y = inner(x + 10)
        y = lax.cond(x > 0, lambda y: positive(y - 100), lambda y: inner(y * 0 - 7), y)
        ck.check(y > 0, "the end")
        return y

    assert said(f, -20.0, wrap=wrap) == "-10.0 is not positive"
    assert said(f, 90.0, wrap=wrap) == "-89.0 is not positive"
    assert said(f, -9.0, wrap=wrap) == "-7.0 is not positive"
    assert said(lambda x: lax.cond(x > 0, lambda: 1, lambda: 2), 1.0, wrap=wrap) is None


@WRAPS
def test_a_check_in_a_scan_names_the_first_iteration(wrap):
    def f(x):
        def body(c, k):
            ck.check(c < 5, "{c} in round {k}", c=c, k=k)
            return c + x, c * 2

        out, ys = lax.scan(body, 0.0, snp.arange(4))
        ck.check(out < 100, "out")
        return out, ys

    error, (out, ys) = wrap(ck.checkify(f))(3.0)
    assert error.get() == "6.0 in round 2" + CHECKED
    assert out == 12.0 and ys.shape == (4,)
    assert said(f, 1.0, wrap=wrap) is None
    assert said(lambda x: lax.fori_loop(0, 3, lambda k, c: positive(c - 1), x), 1.5, wrap=wrap)

    def nested(x):
        return lax.map(lambda v: lax.map(positive, v), x)

    assert said(nested, snp.array([[1.0, 2.0], [-3.0, -4.0]]), wrap=wrap) == "-3.0 is not positive"


@WRAPS
def test_checks_in_the_test_and_the_body_of_a_loop_are_found(wrap):
    def f(x, limit):
        def test(c):
            ck.check(c != limit, "tested at {}", c)
            return c < 5

        def body(c):
            ck.check(c < 4, "body at {}", c)
            return c + 1

        return lax.while_loop(test, body, x)

    assert said(f, 0, 9, wrap=wrap) == "body at 4"
    assert said(f, 0, 3, wrap=wrap) == "tested at 3"
    assert said(f, 2, 2, wrap=wrap) == "tested at 2"
    assert said(f, 0, 5, wrap=wrap) == "body at 4"
    assert said(f, 7, 9, wrap=wrap) is None


def test_checks_under_vmap_name_the_mapped_index():
    x = snp.array([1.0, -2.0, -3.0])
    error, out = spmd.vmap(ck.checkify(positive))(x)
    assert error.get() == (
        f"at mapped index 1: -2.0 is not positive{CHECKED}\n"
        f"at mapped index 2: -3.0 is not positive{CHECKED}"
    )
    assert out.shape == (3,)
    assert said(spmd.vmap(positive), x) == "-2.0 is not positive"
    assert said(spmd.vmap(positive), snp.ones(3)) is None
    assert said(spmd.vmap(lambda x, y: ck.check(x > 0, "{}", y), (None, 0)), 0.0, x) == "1.0"
    assert said(spmd.vmap(positive), snp.ones(0)) is None


@pytest.mark.parametrize("order", [spmd.grad, lambda f: spmd.grad(spmd.grad(f)), spmd.jacfwd])
def test_checks_fail_in_derivatives_too(order):
    def f(x):
        def body(c, k):
            ck.check(c < 5, "{c} in round {k}", c=c, k=k)
            return c * x, None

        return lax.scan(body, 1.0, snp.arange(3))[0]

    error, slope = spmd.jit(ck.checkify(order(f)))(4.0)
    assert error.get() == "16.0 in round 2" + CHECKED
    assert slope == order(lambda x: x**3)(4.0)
    assert said(order(f), 1.0) is None
    slope = spmd.grad(lambda x: ck.checkify(positive)(x)[1])(4.0)
    assert slope == 0.25


# ---- automatic checks --------------------------------------------------------------------------


@WRAPS
def test_nan_checks_name_the_primitive(wrap):
    log = "nan generated by primitive: log."
    assert said(snp.log, -1.0, errors=ck.nan_checks, wrap=wrap) == log
    assert said(snp.log, 1.0, errors=ck.nan_checks, wrap=wrap) is None

    def in_loop(x):
        return lax.scan(lambda c, _: (snp.log(c), c), x, None, 3)

    assert said(in_loop, 2.0, errors=ck.float_checks, wrap=wrap) == log
    assert said(lambda x: x / x, 0.0, errors=ck.nan_checks, wrap=wrap).endswith("div.")
    assert said(positive, -1.0, errors=ck.all_checks, wrap=wrap) == "-1.0 is not positive"


def test_user_checks_can_be_left_out():
    for f in (positive, spmd.jit(positive), lambda x: lax.map(positive, x[None])[0]):
        error, out = spmd.jit(ck.checkify(f, ck.div_checks))(snp.float32(-1))
        assert error.get() is None and np.isnan(out)


def test_div_checks_find_divisions_by_zero():
    assert said(lambda x, y: x / y, 1.0, 0.0, errors=ck.div_checks) == "division by zero"
    ones = snp.ones(3)
    assert said(lambda x, y: x // y, snp.arange(3), snp.arange(3), errors=ck.div_checks)
    assert said(lambda x, y: x / y, ones, ones, errors=ck.div_checks) is None


@pytest.mark.parametrize(
    "f, index, wanted",
    [
        (lambda x, i: x[i], 5, (5, 0, 3)),
        (lambda x, i: x[:, i], -5, (-1, 1, 4)),
        (lambda x, i: x[i, i], snp.array([0, 3]), (3, 0, 3)),
        (lambda x, i: x.at[i].set(1.0), 7, (7, 0, 3)),
        (lambda x, i: x.at[:, i].add(1.0), snp.array([1, 4]), (4, 1, 4)),
        (lambda x, i: lax.dynamic_slice(x, (0, i), (2, 2)), 3, (3, 1, 4)),
        (lambda x, i: lax.dynamic_update_slice(x, snp.ones((2, 2)), (i, 0)), 2, (2, 0, 3)),
    ],
)
def test_index_checks_name_the_index_and_the_axis(f, index, wanted):
    x = snp.ones((3, 4))
    text = said(f, x, index, errors=ck.index_checks)
    assert text is not None and text.startswith("out-of-bounds indexing for array of shape (3, 4)")
    assert f"index {wanted[0]} is out of bounds for axis {wanted[1]}" in text
    assert f"with size {wanted[2]}" in text
    assert said(f, x, snp.zeros_like(snp.asarray(index)), errors=ck.index_checks) is None


# ---- without checkify --------------------------------------------------------------------------


def test_a_check_without_checkify_raises():
    for run in (positive, spmd.jit(positive), lambda x: spmd.vmap(positive)(snp.stack([x, x]))):
        run(snp.float32(1))
        with pytest.raises(ck.CheckError, match="is not positive"):
            run(snp.float32(-1))


def test_debug_checks_are_noticed_by_checkify_only():
    def f(x):
        ck.debug_check(x > 0, "{}", x)
        return x

    assert f(-1.0) == -1.0
    assert spmd.jit(f)(-1.0) == -1.0
    assert said(f, -1.0) == "-1.0"


def test_check_error_passes_an_error_on():
    def f(x):
        error, out = ck.checkify(positive)(x)
        ck.check_error(error)
        return out

    assert said(f, -1.0) == "-1.0 is not positive"
    assert said(f, 1.0) is None

    def many(x):
        return ck.check_error(spmd.vmap(ck.checkify(positive))(x)[0])

    assert said(many, snp.array([1.0, -5.0])) == "-5.0 is not positive"
    with pytest.raises(ck.CheckError, match="is not positive"):
        f(-1.0)


def test_mistakes_are_named():
    with pytest.raises(ArgumentError, match="boolean scalar"):
        ck.check(snp.ones(2) > 0, "x")
    with pytest.raises(ArgumentError, match="names y"):
        ck.check(True, "{y}")
    with pytest.raises(ArgumentError, match="pytrees of arrays"):
        ck.check(True, "{}", "text")
    with pytest.raises(ArgumentError, match="must be one of"):
        ck.checkify(positive, "nan")


def test_around_maps():
    def f(x):
        return ck.checkify(g, ck.all_checks)(x)[0].get()

    mesh = spmd.make_mesh((2,), ("i",))
    x = snp.array([1.0, -2.0])
    specs = {"in_specs": spmd.P("i"), "out_specs": spmd.P("i")}
    shards = spmd.shard_map(lambda x: positive(x[0])[None], mesh=mesh, **specs)
    for g in spmd.pmap(positive), shards, spmd.jit(spmd.pmap(positive)):
        assert f(x).startswith("-2.0 is not positive"), g
        assert f(abs(x)) is None
    g = lambda x: spmd.lax.map(spmd.pmap(snp.log), x)  # noqa: E731
    assert f(snp.stack([abs(x), x])).startswith("nan generated by primitive: log")


def test_inside_pmap():
    def f(x):
        error, out = ck.checkify(positive)(x)
        return error, out

    error, _ = spmd.pmap(f)(snp.array([1.0, -2.0]))
    assert error.get() == f"at mapped index 1: -2.0 is not positive{CHECKED}"
