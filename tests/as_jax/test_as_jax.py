"""`spmd.as_jax`: programs that import JAX run on spmd, without a module of JAX.

Each program is a process of its own: JAX, which is installed as an oracle, may be loaded in this
one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NO_JAX = """
import sys
real = [n for n, m in sys.modules.items() if n.split(".")[0] in ("jax", "jaxlib")
        and "spmd" not in str(getattr(m, "__file__", "spmd"))]
assert not real, real
"""


def run(
    text: str, *words: str, folder: Path, ranks: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program on spmd in JAX's place; it must end well, and JAX stay unloaded."""
    script = folder / "program.py"
    script.write_text(textwrap.dedent(text) + NO_JAX)
    command = [sys.executable, "-m", "spmd.as_jax", str(script), *words]
    if ranks:
        command = [sys.executable, "-m", "launch", "-n", str(ranks), "--as-jax", str(script)]
    return execute(command, **environment)


def execute(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the checkout."""
    unset = "SPMD_NUM_CPU_DEVICES", "XLA_FLAGS", "SPMD_CHECK"
    env = {k: v for k, v in os.environ.items() if k not in unset}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=240, env=env | environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


# ---- modules -----------------------------------------------------------------------------------


def test_private_modules_that_libraries_use(tmp_path):
    program = """
        import jax, jax.numpy as jnp
        from jax._src import literals
        import jax._src.random.threefry2x32 as threefry
        from jax.extend.core import Primitive

        # Every primitive of JAX has its name: libraries register rules for all of them.
        assert isinstance(jax.lax.tile_p, Primitive) and jax.lax.device_put_p.name == "device_put"
        try:
            jax.lax.tile_p.bind(1.0, reps=(2,))
        except NotImplementedError as error:
            assert "jax.lax.tile_p: spmd expresses it by other primitives" in str(error)
        else:
            raise AssertionError

        words = threefry.threefry_seed(jnp.array(3))
        assert words.tolist() == jax.random.PRNGKey(3).tolist()
        two = threefry.threefry_split(words, (2,))
        assert two.tolist() == jax.random.split(jax.random.PRNGKey(3)).tolist()
        folded = threefry.threefry_fold_in(words, 7)
        assert folded.tolist() == jax.random.fold_in(jax.random.PRNGKey(3), 7).tolist()
        bits = threefry.threefry_random_bits(words, 16, (4,))
        assert bits.tolist() == jax.random.bits(jax.random.PRNGKey(3), (4,), "uint16").tolist()

        half = literals.TypedFloat(0.5, jnp.dtype("float16"))
        assert half == 0.5 and half.dtype == jnp.float16 and jnp.sin(half).dtype == jnp.float32
        assert literals.TypedInt(2, "int8") + 1 == literals.TypedComplex(3, "complex64")
    """
    run(program, folder=tmp_path)


def test_modules_are_ours_under_a_second_name(tmp_path):
    program = """
        import jax, jax.numpy as jnp, jax.numpy.linalg, jax.scipy.stats.norm as norm
        from jax import lax, nn, random
        from jax.experimental import checkify, mesh_utils, multihost_utils, io_callback
        from jax.experimental.shard_map import shard_map
        import spmd, spmd.numpy, spmd.scipy.stats

        assert jnp is spmd.numpy and jax.numpy.linalg is spmd.numpy.linalg and lax is spmd.lax
        assert jnp.__spec__.name == jnp.__name__ == "spmd.numpy"
        assert norm is spmd.scipy.stats.norm and jax.jit is spmd.jit and jax.tree is spmd.tree
        assert checkify.checkify is spmd.checkify.checkify
        assert jax.stages.Lowered is type(jax.jit(jnp.sin).lower(1.0))
        import jax.tree_util, jax.errors, jax.sharding, jax.typing, jax.dtypes, jax.export
        import jax.profiler, jax.extend.linear_util, jax.api_util, jax.monitoring, jax.test_util
        print(jnp.sin(0.5))
    """
    assert run(program, folder=tmp_path).stdout.strip() == "0.47942555"


def test_versions_state_the_level_of_the_api(tmp_path):
    program = """
        import importlib.metadata, jax, jaxlib, jax.version, jax.lib
        print(jax.__version__, jax.__version_info__, jaxlib.__version__, jax.lib.__version__,
              importlib.metadata.version("jax"), importlib.metadata.version("jaxlib"),
              jax.__spmd__)
    """
    import spmd

    level = "0.10.2"
    wanted = f"{level} (0, 10, 2) {level} {level} {level} {level} {spmd.__version__}"
    assert run(program, folder=tmp_path).stdout.strip() == wanted


def test_what_is_missing_says_so_and_probes_find_nothing(tmp_path):
    program = """
        import importlib.util, jax, jax.extend.core, jax.numpy as jnp
        for name in ("jaxlib.mlir", "jax.base", "jax.compile.cpu", "jax.numpy.none"):
            try:
                importlib.import_module(name)
            except ImportError as error:
                print(error)
            else:
                raise SystemExit(f"{name} was found")
        assert not hasattr(jax, "host_id_") and not hasattr(jax, "transport")
        assert not hasattr(jax.extend.core, "nothing")
        try:
            from jax.core import nothing
        except ImportError:
            print("no name")
        try:
            jax.extend.core.nothing
        except AttributeError as error:
            print(error)
    """
    lines = run(program, folder=tmp_path).stdout.splitlines()
    assert lines[0] == (
        "No module named 'jaxlib.mlir': `jax` is spmd here, which has no compiled parts; "
        "docs/libraries.md says what there is"
    )
    assert lines[1].startswith("No module named 'jax.base': `jax` is spmd here, which has no mod")
    assert lines[2].startswith("No module named 'jax.compile'")
    assert lines[3].startswith("No module named 'jax.numpy.none'")
    assert lines[4] == "no name"
    assert lines[5] == (
        "module 'jax.extend.core' has no attribute 'nothing': `jax` is spmd here, which has "
        "nothing of this name (docs/libraries.md)"
    )


def test_what_cannot_be_is_importable_and_refuses_when_used(tmp_path):
    program = """
        import jax
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import triton, tpu as pltpu
        from jax.experimental.array_serialization import GlobalAsyncCheckpointManager as GACM
        from jax.interpreters import mlir
        import jax.experimental.colocated_python as cp

        assert not isinstance(3, GACM) and cp.serialization.DeviceList is not None
        for use in (pl.pallas_call, lambda: triton.load(1), lambda: GACM.wait(1), GACM,
                    lambda: mlir.ir_constant(1), cp.colocated_python, jax.ffi.ffi_call):
            try:
                use()
            except NotImplementedError as error:
                print(error)
            else:
                raise SystemExit("nothing was refused")
    """
    lines = run(program, folder=tmp_path).stdout.splitlines()
    assert len(lines) == 7
    assert lines[0].endswith(
        "jax.experimental.pallas.pallas_call: spmd has no Pallas; write the function with "
        "jax.numpy and jax.lax, which spmd compiles"
    )


def test_real_jax_is_not_replaced_once_it_is_imported():
    program = (
        "import jax, spmd.as_jax\n"
        "try:\n    spmd.as_jax.install()\n"
        "except TypeError as error:\n    print(error)\n"
        "assert not spmd.as_jax.installed()"
    )
    pytest.importorskip("jax", reason="needs JAX, to have it imported first")
    said = execute([sys.executable, "-W", "ignore", "-c", program]).stdout
    assert said.strip().endswith(
        "as_jax.install: jax is imported already; install spmd in its place before the first "
        "import of jax, or start the program with `python -m spmd.as_jax`"
    )


def test_install_in_a_program_holds_from_then_on():
    program = (
        "import spmd, sys\n"
        "assert not any(n.startswith('spmd.as_jax') for n in sys.modules)\n"
        "import spmd.as_jax\n"
        "spmd.as_jax.install(); spmd.as_jax.install()\n"
        "import jax.numpy as jnp\n"
        "assert jnp is spmd.numpy and spmd.as_jax.installed()\n"
        "assert len([f for f in sys.meta_path if type(f).__module__ == 'spmd.as_jax.finder']) == 1"
    )
    execute([sys.executable, "-c", program])


# ---- programs ----------------------------------------------------------------------------------


def test_a_program_runs_as_python_runs_it(tmp_path):
    (tmp_path / "beside.py").write_text("value = 41\n")
    program = """
        import pickle, sys, jax, beside
        class Point:
            pass
        assert __name__ == "__main__" and __file__ == sys.argv[0] and __spec__ is None
        assert isinstance(pickle.loads(pickle.dumps(Point())), Point)
        print(sys.argv[1:], beside.value + 1)
    """
    assert run(program, "-n", "3", folder=tmp_path).stdout.strip() == "['-n', '3'] 42"
    (tmp_path / "short.py").write_text(
        "import jax, sys\nassert 'jax.tree_util' in sys.modules\nprint(__file__, sys.argv)\n"
    )
    path = os.path.relpath(tmp_path / "short.py", ROOT)
    said = execute([sys.executable, "-m", "spmd.as_jax", path]).stdout
    assert said.strip() == f"{tmp_path / 'short.py'} {[path]}"


def test_a_module_and_a_text(tmp_path):
    (tmp_path / "module_of_mine.py").write_text(
        "import sys, jax\nprint(__name__, sys.argv[1:], jax.__spmd__)\n"
    )
    start = [sys.executable, "-m", "spmd.as_jax"]
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    said = execute([*start, "-m", "module_of_mine", "a"], **path).stdout
    assert said.startswith("__main__ ['a'] ")
    said = execute([*start, "-c", "import jax, sys; print(jax.__name__, sys.argv)", "b"]).stdout
    assert said.strip() == "spmd.as_jax.jax ['-c', 'b']"


def test_annotations_of_a_program_are_values(tmp_path):
    program = """
        import jax
        class Named:
            x: jax.Array
        print(Named.__annotations__["x"] is jax.Array)
    """
    assert run(program, folder=tmp_path).stdout.strip() == "True"


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ([], 2, "usage: python -m spmd.as_jax (script.py | -m module | -c text)"),
        (["none.py"], 1, "there is no file none.py"),
        (["-c", "raise SystemExit(7)"], 7, ""),
        (["-c", "import jax; jax.numpy.zeros(-1)"], 1, "shape (-1,) has a negative size"),
    ],
    ids=["nothing", "no file", "exit code", "error"],
)
def test_exit_codes(words, code, text):
    command = [sys.executable, "-m", "spmd.as_jax", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == code and text in done.stderr


def test_flags_are_read_until_the_first_use_of_a_device(tmp_path):
    program = """
        import os
        import jax
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
        assert jax.device_count("cpu") == len(jax.devices()) == 4
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
        assert len(jax.devices()) == 4
    """
    run(program, folder=tmp_path)
    set_by_program = """
        import jax
        jax.config.update("jax_num_cpu_devices", 2)
        assert len(jax.devices()) == 2
    """
    flags = "--xla_force_host_platform_device_count=3"
    run(set_by_program, folder=tmp_path, XLA_FLAGS=flags)


def test_dispatch_on_types_tells_tracers_from_arrays(tmp_path):
    program = """
        from functools import singledispatch
        import jax
        from jax.core import Tracer

        assert not issubclass(Tracer, jax.Array) and issubclass(type(jax.numpy.ones(1)), jax.Array)
        for kinds in ((jax.Array, Tracer), (Tracer, jax.Array)):
            which = singledispatch(lambda x: None)
            for kind in kinds:
                which.register(kind)(lambda x, kind=kind: kind)
            assert which(jax.numpy.ones(1)) is jax.Array
            seen = []
            jax.vmap(jax.grad(lambda x: seen.append(which(x)) or x))(jax.numpy.ones(2))
            assert seen == [Tracer] and isinstance(jax.numpy.ones(1), jax.Array)
    """
    run(program, folder=tmp_path)


def test_devices_from_flags_and_settings(tmp_path):
    program = """
        import os
        os.environ["XLA_FLAGS"] = "--other=1 --xla_force_host_platform_device_count=3"
        os.environ["JAX_ENABLE_X64"] = "1"
        import jax
        print(len(jax.devices()), jax.numpy.arange(2.0).dtype, jax.config.jax_enable_x64)
        jax.config.update("jax_num_cpu_devices", 2)
        jax.config.update("jax_enable_x64", False)
        jax.config.update("jax_threefry_partitionable", True)
        jax.config.update("jax_platform_name", "cpu")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        print(len(jax.devices()), jax.numpy.arange(2.0).dtype, jax.config.jax_enable_x64,
              jax.config.jax_persistent_cache_min_compile_time_secs)
        with jax.softmax_custom_jvp(True):
            print(jax.config.jax_softmax_custom_jvp)
        print(jax.config.jax_softmax_custom_jvp, hasattr(jax, "no_such_option"))
    """
    said = run(program, folder=tmp_path).stdout.splitlines()
    assert said == ["3 float64 True", "2 float32 False 0.5", "True", "False False"]
    said = run(program, folder=tmp_path, SPMD_NUM_CPU_DEVICES="1").stdout.splitlines()
    assert said[0] == "1 float64 True"  # what is set for spmd wins


def test_report_says_what_was_asked_for_and_by_whom(tmp_path):
    (tmp_path / "library.py").write_text(
        "import jax.core\nfrom jax.experimental import pallas\n"
        "has = hasattr(jax.numpy, 'no_name'), hasattr(jax.core, 'no_name')\n"
        "try:\n    import jax.none\nexcept ImportError:\n    pass\n"
        "try:\n    pallas.pallas_call()\nexcept NotImplementedError:\n    pass\n"
    )
    said = run("import library", folder=tmp_path, SPMD_AS_JAX_REPORT="1").stderr
    for line in (
        "module    jax.core  (library)",
        "no module jax.none  (library)",
        "missing   jax.core.no_name  (library)",
        "missing   jax.numpy.no_name  (library)",
        "refused   jax.experimental.pallas.pallas_call  (library)",
    ):
        assert line in said, said
    assert not run("import library", folder=tmp_path).stderr


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_of_spmdrun(ranks, tmp_path):
    program = """
        import jax, jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec as P
        total = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")(
            jnp.ones(jax.local_device_count()) * (jax.process_index() + 1))
        mesh = jax.make_mesh((jax.device_count(),), ("x",))
        x = jax.device_put(jnp.arange(6.0), NamedSharding(mesh, P("x")))
        print(f"{jax.process_count()} {float(total[0])} {float(jax.jit(jnp.sum)(x))}")
    """
    done = run(program, folder=tmp_path, ranks=ranks)
    wanted = f"{ranks} {float(sum(range(1, ranks + 1)))} 15.0"
    assert done.stdout.count(wanted) == ranks, done.stdout + done.stderr


def test_names_that_libraries_use(tmp_path):
    """What the programs of JAX's libraries asked for: each line failed once."""
    program = """
        import jax, jax.numpy as jnp, jax.extend.core
        import jax.extend.linear_util as lu
        from jax.api_util import debug_info, flatten_fun_nokwargs
        from jax.experimental import checkify
        from jax.interpreters import partial_eval as pe
        ref = jax.new_ref(jnp.zeros(2))
        ref[0] = 3.0
        assert jax.freeze(ref)[0] == 3.0 and callable(jax.default_device)
        assert isinstance(jax.dtypes.bfloat16, type)

        def fail(x):
            raise ValueError("of the callback")
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        try:
            jax.jit(lambda x: jax.pure_callback(fail, shape, x))(1.0)
        except jax.errors.JaxRuntimeError as error:
            assert "ValueError: of the callback" in str(error), str(error)
            assert isinstance(error.__cause__, ValueError)

        def top(x):
            trace = jax.extend.core.find_top_trace((x,))
            assert x._trace.main is trace.main
            return x
        jax.jvp(top, (1.0,), (1.0,))

        f = lambda x, y: (x * 2, y + 1)
        fun = lu.wrap_init(lambda *a: f(*a), debug_info=debug_info("f", f, (1.0, 2.0), {}))
        pvals = [pe.PartialVal.known(1.0), pe.PartialVal.unknown(jax.typeof(2.0))]
        jaxpr, out, consts = pe.trace_to_jaxpr_nounits(fun, pvals)
        (known, value), (aval, unknown) = out
        assert known is None and value == 2.0 and aval.shape == () and unknown is None

        try:
            checkify.check_error(checkify.checkify(lambda x: checkify.check(x > 0, "low"))(-1)[0])
        except ValueError as error:
            assert str(error).startswith("low")
        print("fine")
    """
    assert run(program, folder=tmp_path).stdout == "fine\n"


def test_arrays_that_a_function_closes_over_are_constants_of_its_jaxpr(tmp_path):
    # A pytree that holds the jaxpr has one structure, whether a value is traced or not.
    program = """
        import numpy as np
        import jax
        import jax.numpy as jnp

        def consts(scale, row):
            made = jax.make_jaxpr(lambda x: x * scale * np.float32(2) * 3.0 + row)(1.0)
            assert jnp.allclose(jax.core.eval_jaxpr(made.jaxpr, made.consts, 2.0)[0], 25.0)
            return len(made.consts), made

        count, made = consts(jnp.float32(2.0), jnp.ones(3))
        assert made.jaxpr.eqns[0].invars[1] is made.jaxpr.constvars[0]
        found = []

        @jax.jit
        def f(scale, row):
            made = jax.make_jaxpr(lambda x: x * scale * np.float32(2) * 3.0 + row)(1.0)
            found.append(len(made.consts))
            return jax.core.eval_jaxpr(made.jaxpr, made.consts, 2.0)[0]

        assert jnp.allclose(f(jnp.float32(2.0), jnp.ones(3)), 25.0)
        assert [count] == found == [2]
    """
    run(program, folder=tmp_path)


def test_private_modules_are_the_public_ones_by_another_path(tmp_path):
    program = """
        import inspect, jax, jax.numpy as jnp, numpy as np
        import jax._src.api_util, jax._src.config, jax._src.numpy.lax_numpy
        import jax._src.source_info_util
        from jax._src.api_util import infer_argnums_and_argnames
        from jax._src.interpreters import partial_eval
        from jax._src.numpy.util import promote_dtypes_complex, promote_dtypes_inexact
        from jax._src.pjit import jit_p
        from jax._src.tree_util import prefix_errors
        from jax.api_util import flatten_axes
        from jaxlib._jax import PjitFunction
        from jaxlib.xla_client import Device

        f = jax.jit(lambda x, y=1: x + y)
        assert isinstance(f, PjitFunction) and "PjitFunction" in str(type(f))
        assert str(inspect.signature(f, follow_wrapped=False)) == "(x, y=1)"
        assert isinstance(jax.devices()[0], Device)
        assert jax.make_jaxpr(f)(1.0).eqns[0].primitive is jit_p
        assert partial_eval is jax.interpreters.partial_eval
        assert jax._src.numpy.lax_numpy is jnp
        a, b = promote_dtypes_complex(1, 2.0)
        assert a.dtype == b.dtype == jnp.complex64
        assert promote_dtypes_inexact(1, 2)[0].dtype == jnp.float32
        assert jax._src.config.numpy_rank_promotion.value == "allow"
        with jax._src.config.numpy_rank_promotion("raise"):
            assert jax.config.jax_numpy_rank_promotion == "raise"
        tree = jax.tree.structure(({"a": 1, "b": 2}, 3))
        assert flatten_axes("axes", tree, (0, None)) == [0, 0, None]
        signature = inspect.signature(lambda x, y, *, z: 0)
        assert infer_argnums_and_argnames(signature, 1, None) == ((1,), ("y",))
        assert infer_argnums_and_argnames(signature, None, ("x", "z")) == ((0,), ("x", "z"))
        (error,) = prefix_errors((1, [2]), (1, 2))
        assert "in_axes" in str(error("in_axes"))
        assert prefix_errors((1, 2), (1, [2])) == []
    """
    run(program, folder=tmp_path)


@pytest.mark.parametrize("words", [["failing.py"], ["-m", "failing"]], ids=["script", "module"])
def test_tracebacks_begin_at_the_program(words, tmp_path):
    (tmp_path / "failing.py").write_text("import jax\n\ndef f():\n    raise KeyError(1)\n\nf()\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "spmd.as_jax", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0].startswith("Traceback") and "failing.py" in lines[1], done.stderr
    assert lines[-1] == "KeyError: 1"


def test_names_of_core_and_of_its_neighbours(tmp_path):
    program = """
        import warnings
        import jax, jax.numpy as jnp
        import jax.experimental.compilation_cache.compilation_cache as cache
        from jax.api_util import donation_vector, rebase_donate_argnums
        from jax.core import eval_context, max_dim, min_dim
        from jax.example_libraries import stax
        from jax.extend import core

        assert (max_dim(2, 5), min_dim(2, 5)) == (5, 2)
        tree = jax.tree.structure((([1, 2], 3), {"k": 4}))
        assert donation_vector((0,), ("k",), tree) == (True, True, False, True)
        assert rebase_donate_argnums((3, 4), (0, 1)) == (1, 2)

        seen = []
        def f(x):
            seen.append(core.unsafe_am_i_under_a_jit_DO_NOT_USE())
            seen.append(core.unsafe_am_i_under_a_vmap_DO_NOT_USE())
            seen.append(core.unsafe_get_axis_names_DO_NOT_USE())
            with eval_context():
                seen.append(float(jnp.sin(0.0)))
            return x
        jax.jit(jax.vmap(f, axis_name="i"))(jnp.ones(2))
        f(1.0)
        assert seen == [True, True, ["i"], 0.0, False, False, [], 0.0], seen
        assert issubclass(jax.errors.JaxprTypeError, TypeError)
        assert core.primal_dtype_to_tangent_dtype(jnp.int32) == jax.dtypes.float0
        assert stax.logsoftmax is jax.nn.log_softmax
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert jax.host_count() == 1 and jax.host_id() == 0 and jax.host_ids() == [0]
        assert len(told) == 3
        cache.set_cache_dir(str(cache.config.cache_dir))
        jax.distributed.shutdown()
    """
    run(program, folder=tmp_path)
