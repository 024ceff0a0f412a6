"""Primitives with JAX's tables of rules: each transformation asks the table, the compiler a jaxpr.

The facades are imported by their own names, so that JAX may be loaded in this process too.
"""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.as_jax.jax import api_util, monitoring
from spmd.as_jax.jax.core import get_aval
from spmd.as_jax.jax.extend import core, linear_util
from spmd.as_jax.jax.interpreters import ad, batching, mlir, partial_eval, xla
from spmd.errors import RefusedError
from spmd.lax import callback
from spmd.testing import check_grads


def make_scaled_sine() -> core.Primitive:
    """`scale * sin(x)`, with every rule by hand."""
    prim = core.Primitive("sin")  # a name that a primitive of spmd has
    prim.def_impl(lambda x, *, scale: scale * snp.sin(x))
    prim.def_abstract_eval(lambda x, *, scale: x.update(weak_type=False))

    def jvp(primals, tangents, *, scale):
        (x,), (t,) = primals, tangents
        out = prim.bind(x, scale=scale)
        if type(t) is ad.Zero:
            return out, ad.Zero.from_primal_value(out)
        return out, scale * snp.cos(x) * t

    ad.primitive_jvps[prim] = jvp
    batching.primitive_batchers[prim] = lambda args, dims, **p: (prim.bind(*args, **p), dims[0])
    mlir.register_lowering(
        prim, mlir.lower_fun(lambda x, *, scale: scale * snp.sin(x), multiple_results=False)
    )
    return prim


def make_linear_pair() -> core.Primitive:
    """`(a x + y, 2 y)`: two results, linear in both operands, with a transpose."""
    prim = core.Primitive("pair")
    prim.multiple_results = True
    prim.def_impl(lambda x, y, *, a: [a * x + y, 2 * y])
    prim.def_abstract_eval(lambda x, y, *, a: [x, y])

    def transpose(cts, x, y, *, a):
        assert ad.is_undefined_primal(x) and ad.is_undefined_primal(y)
        first, second = map(ad.instantiate_zeros, cts)
        return [a * first, first + 2 * second]

    ad.deflinear2(prim, transpose)
    batching.primitive_batchers[prim] = lambda args, dims, **p: (
        prim.bind(*[batching.bdim_at_front(x, d, 3) for x, d in zip(args, dims, strict=True)], **p),
        [0, 0],
    )
    mlir.register_lowering(prim, mlir.lower_fun(lambda x, y, *, a: [a * x + y, 2 * y]))
    return prim


def test_one_primitive_through_all_transformations():
    prim = make_scaled_sine()
    f = lambda x: prim.bind(x, scale=3.0)  # noqa: E731
    x = np.linspace(0, 1, 5, dtype=np.float32)
    want = 3 * np.sin(x)
    for g in (f, spmd.jit(f), spmd.vmap(f), spmd.jit(spmd.vmap(f)), lambda x: lax.map(f, x)):
        np.testing.assert_allclose(g(x), want, rtol=1e-6)
    np.testing.assert_allclose(spmd.vmap(spmd.grad(f))(x), 3 * np.cos(x), rtol=1e-6)
    second = spmd.jit(spmd.vmap(spmd.grad(spmd.grad(f))))
    np.testing.assert_allclose(second(x), -3 * np.sin(x), rtol=1e-6, atol=1e-6)
    check_grads(f, (x,), 2, rtol=1e-3)
    text = str(spmd.make_jaxpr(f)(x))
    assert "sin[scale=3.0] a" in text and "mul" not in text


def test_two_results_and_a_transpose():
    prim = make_linear_pair()

    def f(x, y):
        first, second = prim.bind(x, y, a=2.0)
        return (first * second).sum()

    x, y = np.arange(3.0, dtype=np.float32), np.ones(3, np.float32)
    plain = lambda x, y: ((2 * x + y) * 2 * y).sum()  # noqa: E731
    for wrap in (lambda g: g, spmd.jit):
        got, want = wrap(spmd.grad(f, (0, 1)))(x, y), spmd.grad(plain, (0, 1))(x, y)
        np.testing.assert_allclose(got[0], want[0])
        np.testing.assert_allclose(got[1], want[1])
    out = spmd.vmap(lambda x: prim.bind(x, np.float32(1), a=2.0)[0])(x)
    np.testing.assert_allclose(out, 2 * x + 1)
    check_grads(f, (x, y), 2, rtol=1e-3)


@pytest.mark.parametrize("fancy", [False, True], ids=["axis", "fancy"])
def test_batching_rules_that_know_the_axis(fancy):
    prim = core.Primitive("any_of")
    prim.def_impl(lambda x: x)
    prim.def_abstract_eval(lambda x: x)
    mlir.register_lowering(prim, mlir.lower_fun(lambda x: x, multiple_results=False))
    seen = []

    def rule(axis, args, dims):
        seen.append((axis.size, axis.name))
        return args[0].max(dims[0]), None

    if fancy:
        batching.fancy_primitive_batchers[prim] = rule
    else:
        batching.axis_primitive_batchers[prim] = lambda size, name, trace, args, dims: (
            seen.append((size, name)) or args[0].max(dims[0]),
            None,
        )
    x = np.arange(4.0, dtype=np.float32)
    out = spmd.vmap(prim.bind, axis_name="i", out_axes=None)(x)
    assert float(out) == 3.0 and seen == [(4, "i")]


def test_rules_see_arrays_and_not_literals():
    prim = core.Primitive("seen")
    kinds = []
    prim.def_impl(lambda x, y: kinds.append(type(y)) or x * y)
    prim.def_abstract_eval(lambda x, y: x)
    closed = spmd.make_jaxpr(lambda x: prim.bind(x, 2.0))(np.float32(3))
    (out,) = core.jaxpr_as_fun(closed)(snp.float32(3))
    assert float(out) == 6 and issubclass(kinds[0], spmd.Array)


def test_derived_rules():
    square = core.Primitive("square_")
    square.def_impl(lambda x: x * x)
    square.def_abstract_eval(lambda x: x)
    ad.defjvp(square, lambda t, x: 2 * x * t)
    batching.defvectorized(square)
    mlir.register_lowering(square, mlir.lower_fun(lambda x: x * x, multiple_results=False))
    product = core.Primitive("product")
    product.def_impl(lambda x, y: x * y)
    product.def_abstract_eval(lambda x, y: x if x.ndim >= y.ndim else y)
    ad.defbilinear(product, lambda ct, x, y: ct * y, lambda ct, x, y: ct * x)
    batching.defbroadcasting(product)
    mlir.register_lowering(product, mlir.lower_fun(lambda x, y: x * y, multiple_results=False))
    f = lambda x, y: product.bind(square.bind(x), y)  # noqa: E731
    x, y = np.float32(3), np.float32(5)
    for wrap in (lambda g: g, spmd.jit):
        assert wrap(spmd.grad(f, (0, 1)))(x, y) == (30.0, 9.0)
    many = spmd.vmap(f, (0, None))(np.arange(3.0, dtype=np.float32), y)
    np.testing.assert_allclose(many, [0, 5, 20])


def test_apply_primitive_compiles_the_lowering():
    prim = core.Primitive("only_lowered")
    prim.def_impl(lambda *args, **params: xla.apply_primitive(prim, *args, **params))
    prim.def_abstract_eval(lambda x: x)
    mlir.register_lowering(prim, mlir.lower_fun(lambda x: x + 1, multiple_results=False))
    assert float(prim.bind(np.float32(1))) == 2


def test_what_is_not_there_says_so():
    prim = core.Primitive("bare")
    prim.def_abstract_eval(lambda x: x)
    x = np.float32(1)
    with pytest.raises(NotImplementedError, match="Evaluation rule for 'bare' not implemented"):
        prim.bind(x)
    with pytest.raises(NotImplementedError, match="Differentiation rule for 'bare' not impl"):
        spmd.jvp(prim.bind, (x,), (x,))
    with pytest.raises(NotImplementedError, match="Batching rule for 'bare' not implemented"):
        spmd.vmap(prim.bind)(np.ones(2, np.float32))
    with pytest.raises(RefusedError, match="bare has no lowering; spmd compiles the function"):
        spmd.jit(prim.bind)(x)
    mlir.register_lowering(prim, lambda ctx, x: [x])
    with pytest.raises(RefusedError, match="bare is lowered by code that writes MLIR"):
        spmd.jit(prim.bind)(x)
    with pytest.raises(NotImplementedError, match=r"Transpose rule .* 'bare' not implemented"):
        ad.get_primitive_transpose(prim)


def test_tables_have_the_rules_of_our_primitives():
    sin_p = core.primitives.sin_p
    assert sin_p is lax.sin_p and sin_p in ad.primitive_jvps
    out, tangent = ad.primitive_jvps[sin_p]((0.0,), (2.0,))
    assert float(out) == 0 and float(tangent) == 2
    out, dim = batching.primitive_batchers[sin_p]((snp.zeros((2, 3)),), (1,))
    assert out.shape == (2, 3) and dim == 1
    assert sin_p not in ad.primitive_transposes
    with pytest.raises(KeyError):
        ad.primitive_transposes[sin_p]
    assert core.primitives.transpose_p is lax.permute_dims_p
    with pytest.raises(AttributeError, match="nothing_p"):
        _ = core.primitives.nothing_p


# ---- jaxprs, and functions of flat arguments ---------------------------------------------------


def test_a_jaxpr_is_taken_apart_and_made_again():
    closed = spmd.make_jaxpr(lambda x: snp.sin(x) * 2)(1.0)
    jaxpr = closed.jaxpr
    assert isinstance(jaxpr, core.Jaxpr) and isinstance(closed, core.ClosedJaxpr)
    assert not isinstance(closed, core.Jaxpr)
    again = core.Jaxpr(jaxpr.constvars, jaxpr.invars, jaxpr.outvars, jaxpr.eqns, jaxpr.effects)
    assert str(again) == str(jaxpr)
    eqn = jaxpr.eqns[0]
    made = core.new_jaxpr_eqn(eqn.invars, eqn.outvars, eqn.primitive, eqn.params, eqn.effects)
    assert str(made) == str(eqn) and closed.literals == closed.consts
    (out,) = core.jaxpr_as_fun(core.ClosedJaxpr(again, ()))(0.5)
    np.testing.assert_allclose(out, 2 * np.sin(0.5), rtol=1e-6)


def test_partial_evaluation_computes_what_is_known():
    def f(known, unknown):
        return known * 2, known + unknown

    fun = linear_util.wrap_init(f)
    aval = get_aval(np.float32(1))
    pvals = [partial_eval.PartialVal.known(snp.float32(3)), partial_eval.PartialVal.unknown(aval)]
    jaxpr, outs, consts = partial_eval.trace_to_jaxpr_nounits(fun, pvals)
    assert outs[0].is_known() and float(outs[0].get_known()) == 6
    assert not outs[1].is_known() and outs[1].get_aval().shape == ()
    (out,) = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, consts))(snp.float32(4))
    assert float(out) == 7
    smaller, used = partial_eval.dce_jaxpr(
        spmd.make_jaxpr(lambda x, y: (x + 1, y))(1.0, 2.0).jaxpr, [True, False]
    )
    assert used == [True, False] and len(smaller.invars) == len(smaller.outvars) == 1


def test_flat_functions_and_their_auxiliary_results():
    fun, out_tree = api_util.flatten_fun(
        linear_util.wrap_init(lambda x, *, y: {"sum": x + y}),
        spmd.tree.structure(((1,), {"y": 2})),
    )
    assert fun.call_wrapped(3, 4) == [7]
    assert out_tree() == spmd.tree.structure({"sum": 0})

    @linear_util.transformation
    def doubled(*args):
        outs = yield tuple(2 * x for x in args), {}
        yield outs + 1

    assert doubled(linear_util.wrap_init(lambda x: x)).call_wrapped(5) == 11
    part, dynamic = api_util.argnums_partial(
        linear_util.wrap_init(lambda x, y: (x, y)), 1, ("a", "b")
    )
    assert dynamic == ("b",) and part.call_wrapped("c") == ("a", "c")


def test_the_state_of_tracing():
    outside = core.get_opaque_trace_state()
    assert outside == core.get_opaque_trace_state() and core.trace_state_clean()
    inside = []
    spmd.jit(lambda x: inside.append(core.get_opaque_trace_state()) or x)(1.0)
    assert inside[0] != outside


def test_monitoring_tells_listeners():
    heard = []
    listener = lambda *args, **kwargs: heard.append((args, kwargs))  # noqa: E731
    monitoring.register_event_listener(listener)
    monitoring.register_scalar_listener(listener)
    monitoring.record_event("/a", kind=1)
    monitoring.record_scalar("/b", 2.0)
    monitoring.clear_event_listeners()
    monitoring.record_event("/c")
    assert heard == [(("/a",), {"kind": 1}), (("/b", 2.0), {})]


def test_errors_of_callbacks_stay_ours_where_jax_is_not_replaced():
    """Modules of `spmd.as_jax.jax` are imported above; only `install` changes this process."""
    assert callback.raised_as is None


# ---- traces that libraries define --------------------------------------------------------------


class Counting(core.Trace):
    """Counts primitives, and computes with the trace below."""

    def __init__(self, parent):
        super().__init__()
        self.parent = parent
        self.seen = []

    def process_primitive(self, primitive, tracers, params):
        self.seen.append(primitive.name)
        inner = [x.val if isinstance(x, Counted) else x for x in tracers]
        avals = [get_aval(x) for x in inner]
        out = primitive.bind_with_trace(self.parent, inner, avals, params)
        return [Counted(self, x) for x in out] if primitive.multiple_results else Counted(self, out)

    def process_custom_jvp_call(self, primitive, fun, jvp, tracers, *, symbolic_zeros):
        self.seen.append("custom_jvp_call")
        return fun.call_wrapped(*tracers)


class Counted(core.Tracer):
    def __init__(self, trace, val):
        super().__init__(trace, get_aval(val))
        self.val = val


def count(f, *args):
    """The primitives that `f` applies, and its result."""
    with core.take_current_trace() as parent:
        trace = Counting(parent)
        with core.set_current_trace(trace):
            out = f(*(Counted(trace, x) for x in args))
    return trace.seen, out.val


def test_a_trace_of_a_library_handles_each_primitive():
    x = snp.arange(3.0)
    seen, out = count(lambda x: snp.sin(x) * 2 + lax.sort(x), x)
    assert seen == ["sin", "mul", "sort", "add"]
    assert np.allclose(out, np.sin(x) * 2 + x)


def test_a_trace_of_a_library_works_below_jit_grad_and_vmap():
    f = lambda x: count(lambda x: snp.tanh(x) * x, x)[1]  # noqa: E731
    x = snp.array([0.5, -1.0])
    want = snp.tanh(x) * x
    assert np.allclose(spmd.jit(f)(x), want) and np.allclose(spmd.vmap(f)(x), want)
    slope = snp.tanh(x) + x * (1 - snp.tanh(x) ** 2)
    assert np.allclose(spmd.grad(lambda x: f(x).sum())(x), slope, rtol=1e-5)


def test_a_trace_of_a_library_sees_the_functions_of_custom_derivatives():
    relu = spmd.custom_jvp(lambda x: snp.maximum(x, 0.0))
    relu.defjvp(lambda primals, tangents: (relu(*primals), tangents[0]))
    seen, out = count(relu, snp.array([-1.0, 2.0]))
    assert seen[0] == "custom_jvp_call" and "max" in seen
    assert out.tolist() == [0.0, 2.0]


def test_a_trace_without_a_rule_names_its_class():
    class Empty(core.Trace):
        pass

    with core.set_current_trace(Empty()), pytest.raises(NotImplementedError, match="Empty"):
        snp.sin(1.0)


def test_tracers_of_every_transformation_are_tracers_for_a_library():
    seen = []
    spmd.jit(lambda x: seen.append(isinstance(x, core.Tracer)))(1.0)
    spmd.vmap(lambda x: seen.append(isinstance(x, Counted)) or x)(snp.ones(2))
    assert seen == [True, False] and not isinstance(snp.ones(2), core.Tracer)


class Seeing(Counting):
    """Handles `custom_vjp` as JAX calls it, with keyword arguments."""

    def process_custom_vjp_call(
        self, primitive, fun, fwd, bwd, tracers, /, *, out_trees, symbolic_zeros
    ):
        self.seen.append("custom_vjp_call")
        return fun.call_wrapped(*tracers)


def test_the_methods_of_a_trace_are_those_of_jax():
    half = spmd.custom_vjp(lambda x: x / 2)
    half.defvjp(lambda x: (half(x), None), lambda _, ct: (ct / 2,))
    with core.take_current_trace() as parent:
        trace = Seeing(parent)
        trace.tag = "mine"
        with core.set_current_trace(trace):
            out = half(Counted(trace, snp.float32(3)))
    assert trace.seen[0] == "custom_vjp_call" and float(out.val) == 1.5
    assert trace.full_raise(out) is out and trace.main == "mine"
    assert trace.is_valid()
    trace.invalidate()
    assert not trace.is_valid() and Counting(parent).is_valid()
    with pytest.raises(NotImplementedError, match="Seeing has no stage_value"):
        trace.stage_value(1.0)


class Handing(Counting):
    """Hands a function with a rule on to the trace below, as JAX's traces do."""

    def process_custom_jvp_call(self, primitive, fun, jvp, tracers, *, symbolic_zeros):
        inner = [x.val if isinstance(x, Counted) else x for x in tracers]
        avals = tuple(get_aval(x) for x in inner)
        params = {"subfuns": (fun, jvp), "symbolic_zeros": symbolic_zeros}
        outs = primitive.bind_with_trace(self.parent, tuple(inner), avals, params)
        return [Counted(self, x) for x in outs]


def test_a_trace_of_a_library_hands_on_functions_with_rules():
    cube = spmd.custom_jvp(lambda x, y: x * x * x + y)
    cube.defjvp(lambda xs, ts: (cube(*xs), 7.0 * ts[0] + ts[1]))

    def f(x):
        with core.take_current_trace() as parent:
            trace = Handing(parent)
            with core.set_current_trace(trace):
                out = cube(Counted(trace, x), 1.0)
        return out.val

    assert float(f(2.0)) == 9.0
    assert float(spmd.grad(f)(2.0)) == 7.0
    assert float(spmd.jit(spmd.grad(f))(2.0)) == 7.0
    assert spmd.vmap(spmd.grad(f))(snp.arange(3.0)).tolist() == [7.0] * 3


def test_every_primitive_is_of_jaxs_class():
    mine = make_scaled_sine()
    assert isinstance(lax.add_p, core.Primitive) and isinstance(mine, core.Primitive)
    assert not isinstance(lax.add_p, core.CallPrimitive) and not isinstance("add", core.Primitive)
    assert ad.primitive_jvps.get(lax.sin_p) is not None  # ours have rules of their own


def test_primitives_take_parameters_of_jax_that_ask_for_nothing():
    x = np.ones(2, np.float32)
    wide = lax.broadcast_in_dim_p.bind(x, shape=(3, 2), broadcast_dimensions=(1,), sharding=None)
    assert wide.shape == (3, 2)
    assert spmd.jit(lambda x: lax.exp_p.bind(x, accuracy=None))(x).dtype == np.float32
    assert lax.mul_p.bind(x, x, out_dtype=None).shape == (2,)
    with pytest.raises(TypeError, match="sharding"):
        lax.broadcast_in_dim_p.bind(x, shape=(3, 2), broadcast_dimensions=(1,), sharding="x")
