"""spmdrun itself: real ranks, real failures, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
needs_mpi = pytest.mark.mpi

SPMD = """
import os, signal, sys, time
import numpy as np
from spmd.transport import world as bootstrap
comm = bootstrap.world()
rank, size = comm.rank, comm.size
x = np.ones(3)
comm.all_reduce(x)
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """`start(options, program)` starts `spmdrun options train.py`."""

    def run(
        options: list[str], text: str, preamble: str = SPMD, stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[str]:
        program = tmp_path / "train.py"
        program.write_text(preamble + textwrap.dedent(text))
        environ = {k: v for k, v in os.environ.items() if k != "SPMD_NUM_CPU_DEVICES"}
        environ["TMPDIR"] = str(tmp_path)
        return subprocess.Popen(
            [sys.executable, "-m", "launch", *options, str(program), "--epochs", "3"],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environ,
        )

    return run


@pytest.fixture
def spmdrun(start, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Start and wait; whatever happens, no process and no file stays."""

    def run(options: list[str], text: str, preamble: str = SPMD):
        process = start(options, text, preamble)
        try:
            out, err = process.communicate(timeout=40)
        finally:
            process.terminate()  # a job that hangs must not outlive its test
        assert not processes_of(tmp_path)
        assert not list(tmp_path.glob("spmdrun-*"))
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    return run


def processes_of(folder: Path) -> list[str]:
    """Processes that still run the program in `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder) in words:
            found.append(words.replace("\0", " "))
    return found


def wait_until_gone(folder: Path, seconds: float = 5.0) -> list[str]:
    deadline = time.monotonic() + seconds
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


# ---- jobs that end well --------------------------------------------------------------------------


@needs_mpi
def test_a_job(spmdrun):
    done = spmdrun(
        ["-n", "3", "--devices-per-rank", "2"],
        """
        print("sum", x[0], os.environ["SPMD_NUM_CPU_DEVICES"], sys.argv[1:])
        print("on stderr", file=sys.stderr)
        """,
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"r{r} | sum 3.0 2 ['--epochs', '3']" for r in range(3)]
    assert sorted(done.stderr.splitlines()) == [f"r{r} | on stderr" for r in range(3)]


@needs_mpi
def test_ranks_get_their_share_of_the_cores(spmdrun):
    done = spmdrun(
        ["-n", "2", "--no-prefix"],
        """
        cpus = sorted(os.sched_getaffinity(0))
        print(rank, cpus, os.environ["SPMD_NUM_THREADS"], os.environ["OMP_NUM_THREADS"])
        """,
    )
    cpus = sorted(os.sched_getaffinity(0))
    each = max(1, len(cpus) // 2)
    rows = [line.replace(",", "").replace("[", "").split("]") for line in done.stdout.splitlines()]
    bound = [set(head.split()[1:]) for head, _ in rows]
    assert all(len(mine) == each for mine in bound)
    assert len(cpus) < 2 or not bound[0] & bound[1]
    assert all(tail.split() == [str(each)] * 2 for _, tail in rows)


@needs_mpi
def test_many_lines_stay_whole(spmdrun, tmp_path: Path):
    done = spmdrun(
        ["-n", "2", "--log-dir", str(tmp_path / "logs")],
        """
        for k in range(3000):
            print(f"<{rank}:{k}:" + "x" * (k % 200) + ">")
        """,
    )
    for r in (0, 1):
        mine = [line for line in done.stdout.splitlines() if line.startswith(f"r{r} | ")]
        wanted = [f"<{r}:{k}:" + "x" * (k % 200) + ">" for k in range(3000)]
        assert [line[5:] for line in mine] == wanted
        assert (tmp_path / "logs" / f"rank-{r}.log").read_text().splitlines() == wanted


def test_one_rank_needs_no_mpi(spmdrun):
    done = spmdrun(
        ["-n", "1"],
        """
        assert not any(name.startswith("mpi4py") for name in sys.modules)
        assert type(comm).__name__ == "SingleCommunicator"
        sys.exit(5)
        """,
    )
    assert (done.returncode, done.stderr) == (5, "")


def test_one_rank_can_be_watched(spmdrun):
    done = spmdrun(["-n", "1", "--timeout", "6"], "print('on'); time.sleep(60)")
    assert done.returncode == 124
    assert done.stdout == "r0 | on\n"
    assert "the time limit of 6 s has passed" in done.stderr


@needs_mpi
def test_standard_input_belongs_to_rank_0(start):
    process = start(["-n", "2"], "print('got', sys.stdin.read())", stdin=subprocess.PIPE)
    out, err = process.communicate("all of\nit", timeout=30)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == ["r0 | got all of", "r0 | it", "r1 | got "]


@needs_mpi
def test_the_end_of_standard_input_is_seen(spmdrun):
    done = spmdrun(["-n", "2"], "input('? ') if rank == 0 else None")
    assert done.returncode == 1
    assert "raised EOFError at train.py:9" in done.stderr


# ---- jobs that do not ----------------------------------------------------------------------------


@needs_mpi
def test_the_first_failure_is_shown_last(spmdrun):
    done = spmdrun(
        ["-n", "3"],
        """
        def loss():
            return 1 // 0
        for step in range(5):
            if rank == 1 and step == 3:
                loss()
            comm.all_reduce(x)
        """,
    )
    assert done.returncode == 1
    final = done.stderr[done.stderr.index("spmdrun: ") :].splitlines()
    assert final[0] == "spmdrun: ranks 0, 2: stopped by that failure" and len(final) == 2
    assert done.stderr.count("Traceback (most recent call last):") == 1
    assert done.stderr.count("r1 | ZeroDivisionError: integer division") == 1
    assert final[-1].startswith("spmdrun: rank 1 (")
    assert "cpu:1) raised ZeroDivisionError at train.py:11: integer division" in final[-1]
    assert final[-1].endswith("train.py:15")
    assert "; ranks 0, 2 were waiting " in final[-1]
    assert "MPI_ABORT" not in done.stderr + done.stdout


@needs_mpi
def test_a_traceback_that_was_not_shown_is_shown_last(spmdrun):
    done = spmdrun(["-n", "2", "--only-rank", "0"], "comm.barrier() if rank == 0 else 1 // 0")
    final = done.stderr[done.stderr.index("spmdrun: ") :].splitlines()
    assert done.returncode == 1
    assert final[1] == "r1 | Traceback (most recent call last):"
    assert final[-2].startswith("r1 | ZeroDivisionError: integer division")


@needs_mpi
@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "was killed by SIGSEGV"),
        ("os._exit(9)", 9, "ended with exit code 9"),
        ("sys.exit(7)", 7, "ended with exit code 7"),
        ("sys.exit('no data')", 1, "ended with exit code 1"),
    ],
    ids=["kill", "segfault", "os._exit", "sys.exit", "words"],
)
def test_how_a_rank_ended(spmdrun, how: str, code: int, said: str):
    began = time.monotonic()
    done = spmdrun(["-n", "2"], f"if rank == 1:\n    {how}\ncomm.all_reduce(x)")
    assert time.monotonic() - began < 15
    assert done.returncode == code
    last = done.stderr.splitlines()[-1]
    assert last.startswith("spmdrun: rank 1 (") and said in last
    assert how[:8] != "sys.exit" or code == 7 or done.stderr.count("r1 | no data\n") == 1
    assert "rank 0: stopped by that failure" in done.stderr


@needs_mpi
def test_a_program_that_never_reaches_spmd(spmdrun):
    done = spmdrun(["-n", "2"], "import nothing_of_this_name", preamble="")
    assert done.returncode == 1
    error = "ModuleNotFoundError: No module named 'nothing_of_this_name'"
    assert done.stderr.count(error) == 2  # of each rank once


@needs_mpi
def test_the_time_limit(spmdrun):
    done = spmdrun(["-n", "2", "--timeout", "1.5"], "time.sleep(60)")
    assert done.returncode == 124
    assert "spmdrun: the time limit of 1.5 s has passed" in done.stderr


@needs_mpi
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks_and_what_they_started(start, tmp_path: Path, number: int):
    process = start(
        ["-n", "2"],
        """
        import subprocess
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", sys.argv[0]])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a rank that does not listen
        print("ready", flush=True)
        time.sleep(60)
        """,
    )
    for _ in range(2):
        assert "ready" in process.stdout.readline()
    process.send_signal(number)
    began = time.monotonic()
    process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert time.monotonic() - began < 10
    assert wait_until_gone(tmp_path) == []


@needs_mpi
def test_the_ranks_end_when_spmdrun_is_killed(start, tmp_path: Path):
    process = start(["-n", "2"], "print('ready', flush=True); time.sleep(60)")
    for _ in range(2):
        assert "ready" in process.stdout.readline()
    process.kill()
    process.communicate(timeout=20)
    assert wait_until_gone(tmp_path) == []
    assert not list(Path("/dev/shm").glob(f"spmdrun-flight-{process.pid}-*"))


def test_without_an_mpi_several_ranks_are_an_error(start, tmp_path: Path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('hidden by the test')")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}"}
    (tmp_path / "train.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "launch", "-n", "2", str(tmp_path / "train.py")],
        capture_output=True,
        text=True,
        env=environ,
        cwd=ROOT,
        timeout=60,
    )
    assert done.returncode == 2
    assert 'Install both: pip install "spmd[mpi]"' in done.stderr


# ---- the machine ---------------------------------------------------------------------------------


@needs_mpi
def test_selftest():
    done = run_launcher("--selftest", "-n", "2")
    assert done.returncode == 0, done.stderr
    assert "2 ranks on" in done.stdout and done.stdout.endswith("all right\n")
    assert "GB/s" in done.stdout


@needs_mpi
def test_doctor():
    """What was detected and why; a shell inside an allocation, and inside another job's rank."""
    shell = {
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "4",
        "OMPI_COMM_WORLD_RANK": "3",
    }
    done = run_launcher("--doctor", "-n", "2", env=shell)
    assert done.returncode == 0, done.stderr
    for word in ("python", "cores", "MPI", "mpirun", "binds to cores rank 0"):
        assert word in done.stdout
    assert "OMPI_COMM_WORLD_RANK=3 (of the job that this shell is part of)" in done.stdout
    assert "meeting    two ranks were started, and MPI knows them as two" in done.stdout
    assert "this shell a program started here without spmdrun runs alone" in done.stdout
    assert "inside a Slurm allocation, but not in a job step" in done.stdout
    assert "OMPI_COMM_WORLD_RANK is set without OMPI_COMM_WORLD_SIZE" in done.stdout


@needs_mpi
def test_links():
    done = run_launcher("--links", "-n", "2")
    assert done.returncode == 0, done.stderr
    assert "2 ranks through ShmCommunicator" in done.stdout
    assert re.search(r"GB/s of 1 MiB\n +1\n +0 +\d+\.\d\d\n", done.stdout)


@needs_mpi
def test_signals_reach_the_program(start):
    """SIGUSR1 is handed on and ends nothing; SIGINT comes as itself, and there is time to save."""
    process = start(
        ["-n", "2", "--grace", "20"],
        """
        # Not print: the signal may come while the one below is still in its buffer's lock.
        signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"asked to save\\n"))
        try:
            print("ready", flush=True)  # in here: SIGINT may follow before the next line runs
            for _ in range(600):
                time.sleep(0.1)
        except KeyboardInterrupt:
            time.sleep(2.0)  # longer than the usual grace
            print("saved", flush=True)
            sys.exit(0)
        """,
    )
    assert ["ready" in process.stdout.readline() for _ in range(2)] == [True, True]
    process.send_signal(signal.SIGUSR1)
    said = sorted(process.stdout.readline() for _ in range(2))
    assert said == ["r0 | asked to save\n", "r1 | asked to save\n"]
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert sorted(out.splitlines()) == ["r0 | saved", "r1 | saved"]
    assert process.returncode == 130


@needs_mpi
def test_flight_files_stay_beside_the_logs_of_a_failed_job(spmdrun, tmp_path: Path):
    logs = tmp_path / "logs"
    done = spmdrun(["-n", "2", "--log-dir", str(logs)], "1 // rank\ncomm.all_reduce(x)")
    assert done.returncode == 1
    assert sorted(path.name for path in logs.iterdir()) == [
        "rank-0.flight",
        "rank-0.log",
        "rank-1.flight",
        "rank-1.log",
    ]


def test_faults_are_read_before_ranks_start():
    done = run_launcher("--inject", "kil:rank=1,op=5", "-n", "2", "-m", "this")
    assert done.returncode == 2
    assert "'kil' is no fault; known: delay, kill, skip, swap-op, corrupt, raise" in done.stderr
    assert "delay:rank=2,op=17,s=30" in run_launcher("--inject", "help").stdout


def run_launcher(*argv: str, env: dict[str, str] | None = None):
    return subprocess.run(
        [sys.executable, "-m", "launch", *argv],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        timeout=120,
    )
