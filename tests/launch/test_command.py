"""The command line of spmdrun, and the commands it makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.__main__ import main
from launch.options import UsageError, parse
from launch.supervise import mpirun_command
from launch.supervise.find_mpi import Mpi, vendor_of
from launch.supervise.rank import SETTINGS, by_core, place, share

ROOT = str(Path(__file__).resolve().parents[2])
OPEN_MPI = Mpi("Open MPI", "Open MPI v5.0.11", "4.1.2", "/lib/libmpi.so.40", "/bin/mpirun")
MPICH = Mpi("MPICH", "MPICH Version: 5.0.2", "4.1.2", "/lib/libmpi.so.12", "/bin/mpirun")


@pytest.fixture
def script(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return "train.py"


# ---- options -----------------------------------------------------------------------------------


def test_options_end_where_the_program_begins(script: str):
    options = parse(
        ["-n", "4", "--devices-per-rank", "2", "-v", script, "-n", "9", "--timeout", "1"]
    )
    assert options.ranks == 4 and options.devices_per_rank == 2 and options.verbose
    assert options.timeout is None
    assert options.command == (sys.executable, "train.py", "-n", "9", "--timeout", "1")


def test_a_module(script: str):
    options = parse(["--ranks=2", "-m", "pkg.train", "--epochs", "3"])
    assert options.ranks == 2
    assert options.command == (sys.executable, "-m", "pkg.train", "--epochs", "3")


def test_an_executable():
    options = parse(["-n", "2", "--", "echo", "hello"])
    assert os.path.isabs(options.command[0]) and options.command[1:] == ("hello",)


def test_the_number_of_ranks_defaults_to_the_cores(script: str):
    assert parse([script]).ranks == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["-n", "2", "nothing.py"], "there is no file nothing.py"),
        (["-n", "2", "no-such-program"], "neither a Python script"),
        (["-n", "2", "--"], "which program"),
    ],
    ids=["script", "executable", "nothing"],
)
def test_what_cannot_run_is_an_error_before_ranks_start(argv: list[str], text: str):
    with pytest.raises(UsageError, match=text):
        parse(argv)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--grace", "-1"], "--grace: '-1' can't be meant; give a number of seconds from 0"),
        (["--timeout", "nan"], "--timeout: 'nan' can't be meant; give a number of seconds"),
        (["--stall-timeout", "1e300"], "--stall-timeout: '1e300' can't be meant"),
        (["--devices-per-rank", "0"], "--devices-per-rank: '0' can't be meant; give a whole"),
        (["--devices-per-rank", "-2"], "--devices-per-rank: '-2' can't be meant; give a whole"),
        (["-n", "99999999999"], "-n/--ranks: '99999999999' can't be meant; give a whole number"),
        (["-n", "two"], "-n/--ranks: 'two' can't be meant; give a whole number from 1 to"),
        (["--max-restarts", "1.5"], "--max-restarts: '1.5' can't be meant; give a whole number"),
        (["--stdin", "4"], "--stdin 4: the job has ranks 0 to 3"),
        (["--hostfile", ""], "--hostfile: '' is empty; write a value, or leave the option out"),
        (["--log-dir", " "], "--log-dir: '' is empty"),
        (["--inject", ""], "--inject: '' is empty"),
        (["--mpirun", ""], "--mpirun: '' is empty"),
        (["--rank", "0"], "-n/--ranks: '0' can't be meant"),
        (["--doctor"], "--doctor runs no program; leave 'train.py' out"),
        (["--elastic", "9", "--max-restarts", "1"], "--elastic 9: the job starts with 4 ranks"),
        (["--only-rank", "0,x"], "--only-rank 0,x: 'x' is no rank; write 0 or 0,2-3"),
        (["--only-rank", "2-4"], "--only-rank 2-4: 2-4 is not among ranks 0 to 3"),
    ],
)
def test_values_that_cannot_be_meant(script: str, argv: list[str], text: str, capsys):
    with pytest.raises(SystemExit):
        parse(["-n", "4", *argv, script])
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["-np", "3"], ["--n", "3"], ["--np=3"], ["--rank", "3"], ["-n3"]])
def test_the_number_of_ranks_as_others_write_it(script: str, argv: list[str]):
    options = parse([*argv, script, "--n", "9"])
    assert options.ranks == 3 and options.command[1:] == ("train.py", "--n", "9")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--hostfile", "nofile"], "--hostfile nofile: No such file or directory; name a file"),
        (["--hostfile", "folder"], "--hostfile folder: Is a directory; name a file with a host"),
        (["--hostfile", "binary"], "--hostfile binary: is no text; name a file with a host"),
        (["--mpirun", "nowhere"], "--mpirun nowhere: no program of that name can be run"),
        (["--log-dir", "train.py"], "--log-dir train.py: File exists; name a folder in which"),
        (["--log-dir", "train.py/x"], "--log-dir train.py/x: Not a directory; name a folder"),
        (["folder.py"], "folder.py is a folder; name a script in it"),
        (["./binary"], "'./binary' is neither a Python script (.py) nor an executable on PATH"),
        (["-n", "1", "./junk"], "junk can't be run: Exec format error; the name of a Python"),
        (["-m"], "-m: nothing follows it; write a module"),
        (["-c"], "-c: nothing follows it; write a program text"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.mpi
def test_what_cannot_be_is_one_sentence(script: str, argv: list[str], text: str, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "junk").write_text("junk")
    (tmp_path / "junk").chmod(0o755)
    words = [] if argv[0][0] in ".f" or argv[0] in ("-m", "-c", "-n") else [script]
    assert main(["-n", "2", *argv, *words]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("spmdrun: ") and text in said[0]


@pytest.mark.parametrize(
    ("words", "code"),
    [(["--help"], 0), (["--inject", "help"], 0), (["-n", "1", "--timeout", "60", "talks.py"], 141)],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_readers_that_leave(tmp_path, words: list[str], code: int):
    (tmp_path / "talks.py").write_text(
        "import time\nfor k in range(6000):\n    print(k, flush=True)\n    time.sleep(0.01)\n"
    )
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [sys.executable, "-m", "launch", *words],
        stdout=writes,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    os.close(writes)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    assert "BrokenPipe" not in done.stderr


def test_lists_of_ranks(script: str):
    assert parse(["-n", "9", "--only-rank", "0,2-4,8", script]).only_ranks == (0, 2, 3, 4, 8)


def test_one_time_limit_for_stalls(script: str, monkeypatch):
    """The knob, else the ranks' own limit, else ten minutes; the ranks' own then comes later."""
    options = parse(["-n", "2", script])
    monkeypatch.delenv("SPMD_COLLECTIVE_TIMEOUT", raising=False)
    assert mpirun_command.stall_timeout(options) == 600.0
    environ = mpirun_command.environment(options, "unix:/x", "secret", "/tmp/job", {})
    assert float(environ["SPMD_COLLECTIVE_TIMEOUT"]) > 600.0
    monkeypatch.setenv("SPMD_COLLECTIVE_TIMEOUT", "40")
    assert mpirun_command.stall_timeout(options) == 40.0
    options = parse(["-n", "2", "--stall-timeout", "0", script])
    assert mpirun_command.stall_timeout(options) == 0.0


def test_devices_that_the_environment_gets_wrong_are_the_ranks_business(script, monkeypatch):
    options = parse(["-n", "2", script])
    for said, name in (("x", "cpu:1"), ("0", "cpu:1"), ("", "cpu:1"), ("2", "cpu:2-3")):
        monkeypatch.setenv("SPMD_NUM_CPU_DEVICES", said)
        assert mpirun_command.device(options, 1) == name


@pytest.mark.parametrize("argv", [["-n", "0", "x.py"], ["-n", "2"], ["--nonsense", "x.py"]])
def test_usage(argv: list[str], capsys):
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 2
    assert "spmdrun" in capsys.readouterr().err


def test_the_help_has_every_option_below_a_title(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    (untitled, *groups) = capsys.readouterr().out.split("\n\n")[2:]
    titles = ["ranks:", "ends and failures:", "output and input:", "instead of a program:"]
    assert [group.splitlines()[0] for group in groups] == titles
    assert untitled.splitlines()[0] == "options:" and untitled.count("--") == 1


# ---- hosts -------------------------------------------------------------------------------------


def test_hostfiles_of_both_kinds(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# two racks\na slots=4\nb:2   # slow\n\nc\n")
    hosts = mpirun_command.read_hostfile(str(file))
    assert [(host.name, host.slots) for host in hosts] == [("a", 4), ("b", 2), ("c", 1)]


@pytest.mark.parametrize(
    ("content", "text"), [("a b c\n", r"hosts:1: 'a b c' is not a host"), ("#\n", "names no host")]
)
def test_bad_hostfiles(tmp_path, content: str, text: str):
    file = tmp_path / "hosts"
    file.write_text(content)
    with pytest.raises(UsageError, match=text):
        mpirun_command.read_hostfile(str(file))


def test_each_mpi_gets_the_hostfile_it_reads(script: str, tmp_path):
    (tmp_path / "hosts").write_text("a:4\n")
    options = parse(["-n", "4", "--hostfile", str(tmp_path / "hosts"), script])
    folder = tmp_path / "job"
    folder.mkdir()
    line = mpirun_command.command(options, OPEN_MPI, {"SPMD_CHECK": "1", "HOME": "/"}, str(folder))
    assert (folder / "hosts").read_text() == "a slots=4\n"
    assert line[line.index("-x") + 1] == "SPMD_CHECK" and "HOME" not in line
    line = mpirun_command.command(options, MPICH, {}, str(folder))
    assert (folder / "hosts").read_text() == "a:4\n"
    assert line[:5] == ["/bin/mpirun", "-n", "4", "-f", str(folder / "hosts")]


# ---- the job's environment -----------------------------------------------------------------------


def test_a_former_job_does_not_leak_into_a_new_one(script: str):
    base = {
        "OMPI_COMM_WORLD_RANK": "1",
        "PMIX_RANK": "1",
        "PMI_FD": "7",
        "SPMD_RANK_PROCESS": "12",
        "OMPI_MCA_btl": "self,sm",
        "HOME": "/root",
    }
    options = parse(["-n", "2", "--devices-per-rank", "3", script])
    environ = mpirun_command.environment(options, "unix:/x", "secret", "/tmp/job", base)
    assert not {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_FD", "SPMD_RANK_PROCESS"} & set(environ)
    assert environ["OMPI_MCA_btl"] == "self,sm"  # the user's choice stays
    assert environ["SPMD_NUM_CPU_DEVICES"] == "3"
    settings = json.loads(environ[SETTINGS])
    assert settings | {"flight": ""} == {
        "bind": True,
        "folder": "/tmp/job",
        "flight": "",
        "grace": 1.5,
        "ranks": 2,
        "share_gpus": False,
        "stdin": 0,
        "survives": False,
    }


def test_one_rank_needs_no_mpirun(script: str):
    line = mpirun_command.command(parse(["-n", "1", script]), None, {}, "/tmp")
    assert line[0] == sys.executable and line[-2:] == [sys.executable, "train.py"]


@pytest.mark.parametrize(
    ("text", "vendor"),
    [
        ("Open MPI v5.0.11, package: x", "Open MPI"),
        ("mpirun (Open MPI) 4.1.2", "Open MPI"),
        ("HYDRA build details", "MPICH"),
        ("MPICH Version:      5.0.2", "MPICH"),
        ("Intel(R) MPI Library 2021.12 for Linux* OS", "Intel MPI"),
        ("SomethingElse 1.0", "unknown"),
    ],
)
def test_vendors(text: str, vendor: str):
    assert vendor_of(text) == vendor


# ---- guards --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpus", "size", "shares"),
    [
        ([0, 1, 2, 3], 2, [[0, 1], [2, 3]]),
        ([0, 1, 2, 3, 4], 2, [[0, 1], [2, 3]]),
        ([4, 5], 4, [[4], [5], [4], [5]]),
        ([7], 1, [[7]]),
    ],
)
def test_cores_are_shared_out(cpus: list[int], size: int, shares: list[list[int]]):
    assert [share(cpus, r, size) for r in range(size)] == shares


def test_cores_keep_their_number():
    cpus = sorted(os.sched_getaffinity(0))
    assert sorted(by_core(cpus)) == cpus


@pytest.mark.parametrize(
    ("environ", "where"),
    [
        ({}, (0, 0, 0)),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, (3, 3, 0)),
        ({"PMI_RANK": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, (3, 1, 2)),
        (
            {
                "OMPI_COMM_WORLD_RANK": "5",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
                "PMIX_RANK": "5",
            },
            (5, 1, 4),
        ),
    ],
    ids=["alone", "pmi", "hydra", "open mpi"],
)
def test_a_guard_knows_its_place(environ: dict[str, str], where: tuple[int, int, int]):
    assert place(environ) == where
