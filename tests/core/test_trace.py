"""Tracers: what Python may do with them, what it may not, and what happens to those that escape."""

from __future__ import annotations

import copy
import pickle
import re

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.base import errors
from spmd.core.primitive import Primitive, Refused, all_primitives

V = np.ones(3, np.float32)

CONCRETE = {
    "bool": (lambda x: 1 if x.sum() > 0 else 0, errors.TracerBoolConversionError, "lax.cond"),
    "while": (lambda x: [None for _ in iter(lambda: bool(x[0]), False)],
              errors.TracerBoolConversionError, "lax.while_loop"),
    "and": (lambda x: x[0] and x[1], errors.TracerBoolConversionError, "& | ~"),
    "int": (lambda x: int(x[0]), errors.ConcretizationError, "static_argnums"),
    "float": (lambda x: float(x[0]), errors.ConcretizationError, "static_argnums"),
    "complex": (lambda x: complex(x[0]), errors.ConcretizationError, "static_argnums"),
    "index": (lambda x: [1, 2, 3][x.astype(int)[0]], errors.TracerIntegerConversionError,
              "concrete integers"),
    "range": (lambda x: range(x.astype(int)[0]), errors.TracerIntegerConversionError, "fori_loop"),
    "numpy": (lambda x: np.sin(np.asarray(x)), errors.TracerArrayConversionError, "spmd.numpy"),
    "item": (lambda x: x[0].item(), errors.ConcretizationError, "static_argnums"),
    "tolist": (lambda x: x.tolist(), errors.ConcretizationError, "static_argnums"),
    "assignment": (lambda x: x.__setitem__(0, 1.0), errors.MutationError, r"\.at\[i\]\.set"),
}  # fmt: skip


@pytest.mark.parametrize("how", [spmd.jit, spmd.make_jaxpr, spmd.vmap])
@pytest.mark.parametrize("name", CONCRETE)
def test_traced_values_read_as_concrete_are_refused(name, how):
    f, error, advice = CONCRETE[name]
    x = np.ones((2, 3), np.float32) if how is spmd.vmap else V
    with pytest.raises(error, match=advice) as caught:
        how(f)(x)
    assert "test_trace.py" in str(caught.value)
    if error is not errors.MutationError:
        assert "Traced<ShapedArray(" in str(caught.value)


def test_values_are_concrete_under_grad_and_jvp():
    """Under grad alone, values are known: Python may branch on them."""

    def f(x):
        assert int(x) == 2 and float(x) == 2.0 and bool(x > 0) and np.asarray(x) == 2
        return x * x if x > 1 else x

    assert float(spmd.grad(f)(2.0)) == 4.0
    assert float(spmd.jvp(f, (2.0,), (1.0,))[1]) == 4.0


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.committed,
        lambda x: x.addressable_shards,
        lambda x: x.devices(),
        lambda x: x.is_deleted(),
        lambda x: x.unsafe_buffer_pointer(),
        lambda x: x.is_fully_replicated,
        lambda x: x.tobytes(),
        lambda x: x.__dlpack__(),
        pickle.dumps,
    ],
)
@pytest.mark.parametrize("how", [spmd.jit, spmd.grad, spmd.vmap])
def test_a_traced_value_has_no_memory_or_place(read, how):
    def f(x):
        read(x)
        return x

    with pytest.raises(errors.ConcretizationError, match=r"test_trace\.py"):
        how(f)(2.0 if how is spmd.grad else V)


def test_tracers_look_like_arrays():
    def f(x):
        assert (x.shape, x.ndim, x.size, x.dtype, x.nbytes, len(x)) == ((3,), 1, 3, V.dtype, 12, 3)
        assert not x.weak_type and copy.copy(x) is x and copy.deepcopy(x) is x
        with pytest.raises(TypeError):
            hash(x)
        with pytest.raises(TypeError):
            len(x[0])
        return x

    for how in (spmd.jit, spmd.make_jaxpr, lambda f: spmd.vmap(f, in_axes=1)):
        how(f)(V if how in (spmd.jit, spmd.make_jaxpr) else np.ones((3, 2), np.float32))


# ---- leaks -------------------------------------------------------------------------------------

HOLDERS = {
    "jit": (spmd.jit, V),
    "grad": (spmd.grad, np.float32(1)),
    "vmap": (spmd.vmap, V),
    "jvp": (lambda f: lambda x: spmd.jvp(f, (x,), (x,)), V),
    "jit(grad)": (lambda f: spmd.jit(spmd.grad(f)), np.float32(1)),
    "make_jaxpr": (spmd.make_jaxpr, V),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_leaked_tracers_are_refused(name):
    how, x = HOLDERS[name]
    kept = []

    def leaky(x):
        kept.append(x * 2)
        return x

    how(leaky)(x)
    for use in (lambda: kept[0] + 1, lambda: spmd.jit(lambda y: y + kept[0])(1.0)):
        with pytest.raises(errors.UnexpectedTracerError, match="had ended") as caught:
            use()
    if "jit" in name or "jaxpr" in name:
        assert "computed by mul at" in str(caught.value) and "in leaky" in str(caught.value)


@pytest.mark.parametrize("name", HOLDERS)
def test_leak_check_names_the_line_of_a_kept_tracer(name):
    how, x = HOLDERS[name]
    kept = []

    def leaky(x):
        kept.append(x * 2)
        return x

    with spmd.config.override("check_leaks", True):
        with pytest.raises(errors.UnexpectedTracerError, match="leaked 1 traced value") as caught:
            how(leaky)(x)
        made_at = leaky.__code__.co_firstlineno + 1
        assert re.search(rf"(made|computed by mul) at .*test_trace.py:{made_at}", str(caught.value))
        kept.clear()
        # Nothing is found where nothing is kept.
        how(lambda x: x * 2 + snp.sin(x))(x)


def test_an_error_under_a_trace_restores_evaluation():
    with pytest.raises(ZeroDivisionError):
        spmd.jit(lambda x: 1 // 0)(1.0)
    with pytest.raises(ZeroDivisionError):
        spmd.vmap(spmd.grad(lambda x: 1 // 0))(V)
    assert float(snp.add(1.0, 2.0)) == 3.0


# ---- primitives --------------------------------------------------------------------------------


def test_refusals_are_sentences():
    for prim in all_primitives():
        for slot in ("impl", "jvp", "transpose", "batch", "dims"):
            rule = getattr(prim, slot)
            if isinstance(rule, Refused):
                assert len(rule.why.split()) >= 4, f"{prim}.{slot}: {rule.why!r}"
                with pytest.raises(errors.RefusedError, match=f"^.*{prim.name}: "):
                    prim.rule(slot)
            else:
                assert rule is not None


def test_names_are_unique():
    with pytest.raises(errors.InternalError, match="'sin' is defined twice"):
        Primitive("sin", abstract=None, impl=None, jvp=None, transpose=None, batch=None, dims=None)


def test_programs_keep_the_constants_they_were_traced_with():
    held = np.ones(3, np.float32)
    f = spmd.jit(lambda x: x + held)
    traced = spmd.make_jaxpr(lambda x: x + held)(1.0)
    _, pullback = spmd.vjp(lambda x: snp.sum(x * held), 2.0)
    y = np.ones(3, np.float32)
    _, back = spmd.vjp(lambda x: snp.sum(x * x), y)
    f(1.0)
    held[:] = y[:] = 7
    np.testing.assert_array_equal(f(1.0), 2 * np.ones(3))
    np.testing.assert_array_equal(traced.consts[0], np.ones(3))
    assert float(pullback(1.0)[0]) == 3
    np.testing.assert_array_equal(back(1.0)[0], 2 * np.ones(3))
