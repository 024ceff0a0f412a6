"""The stages of a call: what they know of its arguments, and calls that they refuse."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import errors, stages
from spmd import numpy as snp


def add(x, *, y):
    return x + y["a"]


def test_stages_know_the_arguments_and_results():
    traced = spmd.jit(add, donate_argnums=0).trace(1.0, y={"a": np.ones(3)})
    lowered = traced.lower(lowering_platforms=("cpu",))
    compiled = lowered.compile()
    for stage in (traced, lowered, compiled):
        (x,), named = stage.args_info
        assert isinstance(x, stages.ArgInfo) and x.donated and x.shape == ()
        info = named["y"]["a"]
        assert not info.donated and info.shape == (3,) and info.dtype == np.float32
        assert stage.in_avals[1]["y"]["a"] == spmd.typeof(snp.ones(3))
        assert stage.donate_argnums == (0,)
        assert stage.out_info.shape == (3,)
        assert stage.in_tree == spmd.tree.structure(((0,), {"y": {"a": 0}}))
    assert traced.out_avals == spmd.typeof(snp.ones(3))
    assert traced.fun_name == "add"
    assert isinstance(traced, stages.Traced) and isinstance(lowered, stages.Lowered)
    assert isinstance(compiled, stages.Compiled) and isinstance(spmd.jit(add), stages.Wrapped)
    np.testing.assert_array_equal(traced(2.0, y={"a": np.ones(3)}), [3, 3, 3])


def test_lowered_programs_as_objects_and_text():
    lowered = spmd.jit(lambda x: snp.sin(x) + 1).lower(np.ones(3))
    assert "sin" in str(lowered.compiler_ir()) and "launch" in lowered.as_text("schedule")
    assert lowered.as_text() == str(lowered.compiler_ir("jaxpr"))
    assert lowered.cost_analysis() == lowered.compile().cost_analysis()
    with pytest.raises(errors.ArgumentError, match="unknown dialect 'hlo'"):
        lowered.compiler_ir("hlo")
    with pytest.raises(errors.ArgumentError, match="lowering_platforms has 'tpu'"):
        spmd.jit(add).trace(1.0, y={"a": 1}).lower(lowering_platforms=("tpu",))


def test_a_compiled_call_refuses_other_arguments():
    compiled = spmd.jit(add).lower(1.0, y={"a": 2}).compile()
    assert compiled(3.0, y={"a": 4}) == 7
    for args, kwargs, message in (
        ((1.0, 2.0), {}, "compiled for arguments"),
        ((1.0,), {"y": {"b": 2}}, "compiled for arguments"),
        ((1,), {"y": {"a": 2}}, r"argument x is ~int32\[\]"),
        ((1.0,), {"y": {"a": np.ones(2, np.int32)}}, r"argument y\['a'\] is int32\[2\]"),
    ):
        with pytest.raises(errors.ArgumentError, match=message):
            compiled(*args, **kwargs)


def test_a_compiled_call_is_not_transformed():
    compiled = spmd.jit(lambda x: x * x).lower(1.0).compile()
    for transformed in (spmd.grad(compiled), spmd.jit(compiled)):
        with pytest.raises(TypeError, match="cannot be transformed"):
            transformed(1.0)


def test_static_arguments_are_left_out_of_a_compiled_call():
    compiled = spmd.jit(lambda n, x, k=1: n * x + k, static_argnums=0, static_argnames="k")
    compiled = compiled.lower(3, 2.0, k=5).compile()
    assert compiled(2.0) == 11
    for call in (lambda: compiled(3, 2.0), lambda: compiled(2.0, k=5)):
        with pytest.raises(TypeError, match=r"leave the static arguments \(number 0, k\) out"):
            call()


@pytest.mark.parametrize("known", ["xla_embed_ir_in_executable", "exec_time_optimization_effort"])
def test_options_of_the_compiler(known):
    assert spmd.jit(abs, compiler_options={known: True})(-1.0) == 1
    assert spmd.jit(abs).lower(-1.0).compile({known: True})(-1.0) == 1
    with pytest.raises(spmd.errors.JaxRuntimeError, match="No such compile option: 'fast'"):
        spmd.jit(abs).lower(1.0).compile(compiler_options={"fast": 1})
    with pytest.raises(errors.OptionError, match="No such compile option"):
        spmd.jit(abs, compiler_options={"fast": 1})
    with pytest.raises(errors.OptionError, match="must be a bool, a number or text"):
        spmd.jit(abs, compiler_options={known: []})


def test_a_backend_must_be_there():
    assert spmd.jit(abs, backend="cpu")(-1.0) == 1
    for use in (lambda: spmd.jit(abs, backend="abacus"), lambda: spmd.devices("abacus")):
        with pytest.raises(errors.PlatformError, match="platform 'abacus' is not avail") as caught:
            use()
        # As in JAX: programs that look for a GPU catch a RuntimeError, and ValueErrors are theirs.
        assert isinstance(caught.value, RuntimeError) and not isinstance(caught.value, ValueError)
    with pytest.raises(errors.ArgumentError, match="both a device and a backend"):
        spmd.jit(abs, backend="cpu", device=spmd.devices()[0])


def test_stages_of_pmap():
    f = spmd.pmap(lambda n, x: spmd.lax.psum(n * x, "i"), "i", static_broadcasted_argnums=0)
    x = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    lowered = f.lower(2, x)
    assert isinstance(lowered, stages.Lowered) and isinstance(f, stages.Wrapped)
    ((info,), _) = lowered.args_info
    assert info.shape == (4, 2)
    np.testing.assert_array_equal(lowered.compile()(x), f(2, x))
    with pytest.raises(errors.ArgumentError, match=r"float32\[4,3\], compiled for float32\[4,2\]"):
        lowered.compile()(np.ones((4, 3), np.float32))
