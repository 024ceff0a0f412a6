"""`checkify` in programs over a mesh: checks see whole values, the first that fails is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, lax
from spmd.checkify import CheckError, all_checks, check, checkify, debug_check
from spmd.compile.executable.select import partitioned
from spmd.sharding.operand_layouts import layouts_of
from tests.partition.programs import auto_mesh

X = np.arange(16, dtype=np.float32).reshape(4, 4)


def put(x: np.ndarray, *spec: Any) -> Any:
    return spmd.device_put(x, NamedSharding(auto_mesh((2, 2), ("x", "y")), P(*spec)))


def checked(x: Any, least: Any) -> Any:
    check(snp.all(x > -100), "the first: {m}", m=snp.min(x))
    y = x * 2
    check(snp.all(y > least), "the second: {y}", y=y)
    check(snp.all(y > 3), "the third: {y}", y=y)
    return y


@pytest.mark.parametrize("spec", [("x", "y"), ("y",), (None, ("x", "y")), ()])
def test_the_first_check_that_fails_is_told_with_whole_values(spec: Any):
    x = put(X, *spec)
    for least, words in ((5.0, "second"), (-1.0, "third")):
        with pytest.raises(CheckError) as found:
            spmd.jit(checked)(x, least)
        with pytest.raises(CheckError) as expected:
            spmd.jit(checked)(X, least)
        assert str(found.value) == str(expected.value)
        assert f"the {words}: {2 * X}" in str(found.value)


def test_a_program_with_checks_is_split_and_gathers_nothing_unless_one_fails():
    x = put(X + 2, "x", "y")
    found = spmd.jit(checked)(x, 0.0)
    assert found.sharding.spec == P("x", "y")
    np.testing.assert_array_equal(found, (X + 2) * 2)
    traced = spmd.jit(checked).trace(x, 0.0)
    made = partitioned(traced.jaxpr, layouts_of((x, 0.0)))
    assert made is not None
    eqns = made.eqns[0].params["jaxpr"].eqns
    moves = [(e.prim.name, e.invars[0].aval.shape) for e in eqns if e.prim.axes(e.params)]
    assert moves == [("pmin", ()), ("cond", ())] * 3, "what is shown moves in branches alone"


def test_checks_in_loops_and_branches_stop_at_the_iteration():
    def f(x: Any) -> Any:
        def body(c: Any, r: Any) -> Any:
            check(snp.all(r < 8), "row {r}", r=r)
            return c + r, lax.cond(r[0] > 0, lambda r: inner(r), lambda r: r, r)

        def inner(r: Any) -> Any:
            check(r.sum() < 21, "sum of {r}", r=r)
            return r * 2

        return lax.scan(body, snp.zeros(4), x)

    for shift, words in ((0, r"sum of \[4. 5. 6. 7.\]"), (6, r"row \[6. 7. 8. 9.\]")):
        for spec in (("x",), (None, "y")):
            with pytest.raises(CheckError, match=words):
                spmd.jit(f)(put(X + shift, *spec))


def test_checks_that_do_nothing_move_nothing():
    def f(x: Any) -> Any:
        debug_check(snp.all(x > 100), "not noticed {x}", x=x)
        return x * 2

    assert not spmd.debug.collectives(f)(put(X, "x", "y"))


def test_an_error_as_a_value_is_that_of_one_device():
    f = spmd.jit(checkify(lambda x: snp.log(x - 3) / x, all_checks))
    error, out = f(put(X, "x", "y"))
    expected, plain = f(X)
    assert error.get() == expected.get() and error.get() is not None
    assert out.sharding.spec == P("x", "y")
    np.testing.assert_allclose(out, plain, rtol=1e-6)
