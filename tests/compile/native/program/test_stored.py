"""Images: what is found again, what is told apart, and loaded programs are the compiled ones."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.api.inspect import make_jaxpr
from spmd.base.config import config
from spmd.base.errors import CollectiveError
from spmd.compile.executable import build
from spmd.compile.executable.executable import compile_jaxpr
from spmd.compile.fingerprint import fingerprint
from spmd.compile.lower import host_steps
from spmd.compile.native.llvm import compiler, object_cache
from spmd.compile.native.program import stored
from spmd.compile.native.program.frames import Frames
from spmd.core import primitive as primitive_module
from spmd.core.ir import ClosedJaxpr
from spmd.core.primitive import Primitive, Refused
from spmd.core.trace import to_numpy
from spmd.lax.families import FLOAT, unary
from spmd.scipy.sparse.linalg import cg, gmres
from spmd.scipy.special import hyp1f1
from spmd.sharding import AxisType, Mesh, NamedSharding
from spmd.sharding import PartitionSpec as P
from tests.compile.native.llvm.emissions import refuse_emissions
from tests.compile.programs import by_impl, random_program

X = np.linspace(-2, 2, 40, dtype=np.float32).reshape(5, 8)


def forget(monkeypatch):
    """Have the loader be as in a new process: it has loaded no code yet."""
    monkeypatch.setattr(compiler.loader, "__dict__", vars(compiler.Loader()))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An object cache of the test's own, with images in use as they are outside of tests."""
    own = object_cache.ObjectCache(lambda: tmp_path)
    monkeypatch.setattr(compiler, "object_cache", own)
    monkeypatch.setattr(stored, "object_cache", own)
    forget(monkeypatch)
    with config.override("check", False):
        yield tmp_path


@pytest.fixture
def second_process(folder, monkeypatch):
    """Call it: from then on nothing is loaded yet, and to compile is an error."""

    def refuse(*_args, **_kwargs):
        raise AssertionError("compiled again")

    def begin():
        forget(monkeypatch)
        monkeypatch.setattr(build, "lower", refuse)
        refuse_emissions(monkeypatch)

    return begin


def again(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program as another process would trace it."""
    return ClosedJaxpr(closed.jaxpr, [np.array(to_numpy(c)) for c in closed.consts])


def run(closed, *args, donated=()):
    return [np.asarray(to_numpy(r)) for r in compile_jaxpr(closed, donated)(args)]


# ---- loaded programs ---------------------------------------------------------------------------

_TABLE = np.arange(8, dtype=np.float32)
_LARGE = np.eye(40, dtype=np.float32)


def loop(x):
    def turn(h, row):
        h = snp.tanh(h @ snp.ones((8, 8)) + row)
        return h, snp.sum(h)

    return lax.scan(turn, x[0], x)


def sort_and_count(x):
    rounds = lax.while_loop(lambda k: k < 5, lambda k: k + 1, snp.sum(x > 0).astype(int) - 30)
    return lax.sort(x), rounds, lax.cond(rounds > 5, snp.sin, snp.cos, x)


_MATRIX = np.eye(8, dtype=np.float32) * 9 + np.arange(64, dtype=np.float32).reshape(8, 8) / 64


def solution(b, matrix=_MATRIX):
    return lax.custom_linear_solve(
        lambda x: matrix @ x,
        b,
        lambda _, y: snp.linalg.solve(matrix, y),
        lambda _, y: snp.linalg.solve(matrix.T, y),
    )


def weighted(matrix):
    return snp.sum(solution(X[0], matrix) * _TABLE)


def two_solutions(x):
    """Two maps beside one `solve`: the constants of one are batched."""
    return spmd.vmap(spmd.grad(weighted))(snp.stack([_MATRIX, _MATRIX + snp.diag(x[0])]))


SOLVES = {
    "solve": lambda x: solution(x[0]),
    "cg": lambda x: cg(lambda v: v * (1 + _TABLE), x[0])[0],
    "gmres": lambda x: gmres(lambda v: _MATRIX @ v, x[0])[0],
    "solve in scan": lambda x: lax.scan(lambda c, r: (solution(c + r), c), x[0], x),
    "solve in while": lambda x: lax.while_loop(lambda c: c.sum() > 1, solution, x[0] + 9),
    "solve in switch": lambda x: lax.switch(
        snp.sum(x > 9).astype(int), [solution, snp.sin, cg_of_twice], x[0]
    ),
    "gradient of a solve": lambda x: spmd.grad(lambda b: snp.sum(solution(b) ** 2))(x[0]),
    "solves of a batch": lambda x: (spmd.vmap(solution)(x), two_solutions(x)),
}


def cg_of_twice(b):
    return cg(lambda v: v * 2, b)[0]


PROGRAMS = {
    "constant of the trace": lambda x: x * _TABLE + 1,
    "constant of a pass": lambda x: x + snp.arange(40.0).reshape(5, 8) ** 2,
    "forwarded": lambda x: (x, snp.exp(x), x),
    "products": lambda x: snp.maximum(x @ x.T + 1, 0) @ x,
    "gradient": spmd.grad(lambda x: snp.sum(snp.tanh(x @ x.T) ** 2)),
    "convolution": lambda x: lax.conv(x[None, None], x[None, None, :3, :3], (1, 1), "SAME"),
    "loop": loop,
    "sort, while, cond": sort_and_count,
    "host steps": lambda x: (hyp1f1(x * x, x * x + 1, x), snp.linalg.eigvals(x[:, :5]), x + 1),
    "host steps with constants": lambda x: (
        hyp1f1(snp.float32(2), x * x + 1, x) + snp.fft.fft(x).real
    ),
    "host steps in calls and loops": lambda x: lax.scan(
        lambda c, r: (spmd.jit(hyp1f1)(c * c, r * r + 1, r), snp.linalg.qr(r[:4, None])[1]), x[0], x
    ),
    "constants wider than users' arrays": lambda x: lax.igamma(snp.float32(2), x * x),
    "host steps in a gradient": spmd.grad(lambda x: hyp1f1(x * x, x * x + 1, x).sum()),
    **SOLVES,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_second_process_loads_what_the_first_compiled(name, second_process):
    closed = make_jaxpr(PROGRAMS[name])(X)
    first = run(closed, X)
    second_process()
    for one, other in zip(first, run(again(closed), X), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_are_loaded(seed, second_process):
    closed, args = random_program(seed)
    first = run(closed, *args)
    second_process()
    for one, other in zip(first, run(again(closed), *args), strict=True):
        np.testing.assert_array_equal(one, other)


def over_devices(count):
    """Results of a program over several devices, traced anew."""

    def body(x):
        place = lax.axis_index("i")  # a constant with another value on each device
        total = lax.psum(x * place, "i")
        moved = lax.ppermute(total @ x.T, "i", [(k, (k + 1) % count) for k in range(count)])
        return snp.tanh(x @ x.T) + moved + snp.sum(x * _TABLE), x

    x = np.linspace(-1, 1, count * 40, dtype=np.float32).reshape(count, 5, 8)
    return [np.asarray(a) for a in spmd.pmap(body, axis_name="i")(x)]


def test_programs_over_a_mesh_are_loaded(second_process):
    first = over_devices(4)
    second_process()
    for one, other in zip(first, over_devices(4), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(AssertionError, match="compiled again"):
        over_devices(2)


def test_maps_without_a_name_are_loaded(second_process):
    x = np.linspace(-1, 1, 160, dtype=np.float32).reshape(4, 5, 8)

    def results():
        inner = spmd.vmap(lambda x: snp.tanh(x) * 2)
        return np.asarray(spmd.pmap(lambda x: inner(x) @ x.T)(x))

    first = results()
    second_process()
    np.testing.assert_array_equal(first, results())
    with pytest.raises(AssertionError, match="compiled again"):
        spmd.pmap(lambda x: snp.tanh(x) * 2)(x)


@pytest.mark.parametrize("name", SOLVES)
def test_solves_are_compiled_as_they_are_evaluated(name, folder):
    wanted = by_impl(make_jaxpr(SOLVES[name])(X), [X])
    for one, other in zip(spmd.tree.leaves(spmd.jit(SOLVES[name])(X)), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


def test_maps_with_solves_are_loaded(second_process):
    def results():
        rows = spmd.pmap(solution)(X[:4])
        jitted = spmd.jit(lambda x: spmd.pmap(solution)(2 * x) / 2)
        return np.asarray(rows), np.asarray(jitted(X[:4]))

    first = results()
    wanted = np.linalg.solve(_MATRIX, X[:4].T).T
    for one in first:
        np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-6)
    second_process()
    np.testing.assert_array_equal(first[0], np.asarray(spmd.pmap(lambda b: solution(b))(X[:4])))


@pytest.mark.filterwarnings("ignore::spmd.errors.CollectiveWarning")
def test_a_loaded_program_says_where_it_failed(folder, monkeypatch):
    """Its steps are made again for that: they are not in the image."""

    def meets_sometimes(x):
        return lax.cond(x > 0, lambda x: lax.psum(x, "i"), lambda x: x, x)

    def fails():
        with pytest.raises(CollectiveError, match="another way") as caught:
            spmd.pmap(meets_sometimes, axis_name="i")(np.float32([1, -1, 1]))
        return str(caught.value)

    told = fails()
    forget(monkeypatch)
    assert fails() == told and "psum" in told


def test_a_loaded_program_over_a_mesh_takes_donated_memory(folder, monkeypatch):
    def step(x):
        return lax.psum(x, "i") * 0 + x * 2

    def run():
        x = spmd.device_put_sharded([np.ones((64, 64), np.float32)] * 4, spmd.devices()[:4])
        out = spmd.pmap(lambda x: step(x), axis_name="i", donate_argnums=0)(x)
        assert x.is_deleted()
        return np.asarray(out)

    first = run()
    forget(monkeypatch)
    refuse_emissions(monkeypatch)
    np.testing.assert_array_equal(run(), first)
    assert np.all(first == 2)


def test_a_loaded_program_takes_donated_memory(second_process):
    closed = make_jaxpr(lambda x: x + 1)(X)
    results = compile_jaxpr(closed, [True])([X])
    second_process()
    pointer = results[0].ptr
    (result,) = compile_jaxpr(again(closed), [True])(results)
    assert result.ptr == pointer


def test_the_schedule_of_a_loaded_program_can_be_asked_for(folder):
    closed = make_jaxpr(lambda x: snp.sin(x) @ x.T)(X)
    text = compile_jaxpr(closed).as_text()
    same = again(closed)
    loaded = compile_jaxpr(same)
    assert loaded.native.program is None
    assert loaded.as_text() == text


_PROGRAM = """
import platform, sys
import numpy as np, spmd, spmd.numpy as snp
from spmd import lax
x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
def turn(h, row):
    return snp.tanh(h @ x + row), snp.sum(h)
def f(x):
    made = lax.scan(turn, x[0], x), lax.sort(x @ x), spmd.grad(lambda x: snp.sum(x @ x))(x)
    return *made, snp.linalg.eigvals(x)
made = spmd.jit(f)(x), spmd.pmap(lambda x: lax.psum(x @ x, "i"), axis_name="i")(x[None])
print([np.asarray(a).tobytes().hex() for a in spmd.tree.leaves(made)])
if sys.argv[1:] == ["second"]:  # what makes programs was not even imported
    wholes = "passes", "schedule", "kernel", "expressions", "cpu.assemble", "native.runtime.ir"
    wholes += "executable.build", "lower.lowering", "lower.steps", "native.program.encode"
    assert not {f"spmd.compile.{name}" for name in wholes} & set(sys.modules)
    if (sys.platform, platform.machine()) == ("linux", "x86_64"):
        assert "llvmlite" not in sys.modules
"""


def test_processes_with_other_addresses_agree(tmp_path):
    def outputs(which):
        variables = os.environ | {"SPMD_CACHE_DIR": str(tmp_path), "SPMD_CHECK": "0"}
        command = [sys.executable, "-c", _PROGRAM, which]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
        return done.stdout

    assert outputs("first") == outputs("second")


# ---- no image ----------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut", "code gone"])
def test_damaged_stored_programs_are_compiled_again(folder, monkeypatch, damage):
    closed = make_jaxpr(lambda x: snp.sin(x) + 3)(X)
    first = run(closed, X)
    forget(monkeypatch)
    for path in folder.rglob("*.o"):
        if damage == "cut":
            path.write_bytes(path.read_bytes()[:-3])
        elif b"ELF" in path.read_bytes():
            path.unlink()
    np.testing.assert_array_equal(run(again(closed), X), first)


def test_programs_that_call_the_user_are_compiled_in_every_process(folder):
    def f(x):
        return spmd.pure_callback(np.sin, spmd.ShapeDtypeStruct(x.shape, x.dtype), x)

    closed = make_jaxpr(f)(X)
    run(closed, X)
    assert compile_jaxpr(again(closed)).native.program is not None


def test_programs_with_host_steps_of_a_pass_are_not_stored(folder):
    """What is not among the user's equations cannot be found among them again."""
    closed = make_jaxpr(lax.linalg.cholesky_update)(_LARGE, _LARGE[0])
    other = make_jaxpr(lambda r, w: lax.linalg.cholesky_update(r, w) + 1)(_LARGE, _LARGE[0])
    step = compile_jaxpr(closed).native.encoded.steps[0]
    assert host_steps.keep(step.function, closed) == (0, (0, 1))
    assert host_steps.keep(step.function, make_jaxpr(snp.sin)(X)) is None
    assert host_steps.keep(lambda *_: None, closed) is None
    assert host_steps.find((0, (0, 0)), other).prim is step.function.prim


def test_a_program_with_an_unknown_address_is_not_stored(folder):
    closed = make_jaxpr(lambda x: x * 2)(X)
    made = compile_jaxpr(closed).native.encoded
    before = set(folder.rglob("*.o"))
    made.words[-1] = 2**46
    stored.save_program("ab" * 32, made, Frames((0,), ((0,),)), (None,), {}, [], closed, None)
    assert set(folder.rglob("*.o")) == before


def test_programs_are_not_loaded_where_passes_are_checked(folder):
    closed = make_jaxpr(lambda x: x * 5)(X)
    run(closed, X)
    with config.override("check", True):
        assert compile_jaxpr(again(closed)).native.program is not None


def test_settings_and_files_are_part_of_the_key(folder, monkeypatch):
    def key():
        return stored.program_key(lambda: "program", (), "cpu")

    keys = [
        key(),
        stored.program_key(lambda: "program", (True,), "cpu"),
        stored.program_key(lambda: "program", (), "cuda"),
    ]
    with config.override("num_threads", 1):
        keys.append(key())
    monkeypatch.setattr(stored, "source_digest", lambda: "other files")
    keys.append(key())
    monkeypatch.setattr(np, "__file__", "/elsewhere/numpy/__init__.py")
    keys.append(key())
    assert len(set(keys)) == len(keys)


# ---- fingerprint -------------------------------------------------------------------------------


def of(f, *args):
    return fingerprint(make_jaxpr(f)(*args))


def test_lines_and_names_are_not_part_of_the_fingerprint():
    def f(x):
        y = lax.sin(x)
        return lax.add(y, y)

    def g(u):
        w = lax.sin(u)

        return lax.add(w, w)

    assert of(f, X) == of(g, X)


@pytest.mark.parametrize(
    "other",
    [
        lambda x, y: lax.sin(x) * 2.0 + y,
        lambda x, y: lax.cos(x) * 3.0 + y,
        lambda x, y: lax.cos(y) * 2.0 + x,
        lambda x, y: lax.cos(x) * 2.0 + x,
        lambda x, y: (lax.cos(x) * 2.0 + y, x),
        lambda x, y: lax.cos(x) * np.float32(2.0) + y[:, ::-1],
        lambda x, y: lax.cos(x) * X + y,
    ],
)
def test_the_computation_is_part_of_the_fingerprint(other):
    assert of(lambda x, y: lax.cos(x) * 2.0 + y, X, X) != of(other, X, X)


def test_types_and_constants_are_part_of_the_fingerprint():
    texts = [
        of(lambda x: x + x, X),
        of(lambda x: x + x, X[:4]),
        of(lambda x: x + x, X.astype(np.int32)),
        of(lambda x: x + X, X),
        of(lambda x: x + (X + 1), X),
        of(lambda x: lax.reduce_sum(x, (0,)), X),
        of(lambda x: lax.reduce_sum(x, (1,)), X),
        of(lambda x: lax.scan(lambda c, r: (c + r, c), x[0], x), X),
        of(lambda x: lax.scan(lambda c, r: (c - r, c), x[0], x), X),
        of(lambda x: lax.scan(lambda c, r: (c - r, c), x[0], x, reverse=True), X),
    ]
    assert None not in texts
    assert len(set(texts)) == len(texts)


def test_custom_derivatives_leave_a_program_its_fingerprint():
    assert of(lambda x: spmd.nn.relu(spmd.nn.softmax(x)), X) is not None


def test_meshes_and_layouts_are_part_of_the_fingerprint():
    mesh = spmd.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
    other = Mesh(mesh.devices[::-1], ("i",))
    constrain = lax.with_sharding_constraint
    shardings = [
        NamedSharding(mesh, P("i")),
        NamedSharding(mesh, P(None, "i")),
        NamedSharding(other, P("i")),
    ]
    square = np.ones((4, 4), np.float32)
    texts = [of(lambda x, s=s: constrain(x, s), square) for s in shardings]
    assert None not in texts and len(set(texts)) == len(texts)
    assert texts[0] == of(lambda x: constrain(x, shardings[0]), square)


def test_primitives_of_users_have_no_fingerprint(monkeypatch):
    monkeypatch.setattr(primitive_module, "_registry", {})
    why = Refused("not in this test")
    theirs = Primitive(
        "of_a_user",
        abstract=lambda x: x,
        impl=lambda xp, x: xp.sin(x),
        jvp=why,
        transpose=why,
        batch=why,
        dims=why,
    )
    assert of(theirs.bind, X) is None
    assert of(unary("made_by_our_function", accepts=FLOAT, impl="sin").bind, X) is None


def test_primitives_of_spmd_are_what_its_modules_define():
    ours = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("spmd.")]
    defined = {id(value) for each in ours for value in each.values() if type(value) is Primitive}
    assert defined == {id(p) for p in primitive_module.all_primitives() if p.is_own}
