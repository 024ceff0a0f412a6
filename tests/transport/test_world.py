"""A process that nobody launched as a rank: alone, and without importing mpi4py."""

from __future__ import annotations

import pytest


def run(run_python, code: str, **env: str):
    return run_python(["-c", code], env=env, timeout=60)


SHOW = (
    "import sys; from spmd.transport import world as b; "
    "print(b.world(), b.process_index(), b.process_count(), b.local_rank(), b.local_size()); "
    "assert not any(name.startswith('mpi4py') for name in sys.modules)"
)


def test_a_process_alone_has_a_single_communicator(run_python):
    done = run(run_python, SHOW)
    assert done.stdout == "SingleCommunicator(world, rank 0 of 1) 0 1 0 1\n"
    assert done.stderr == ""


def test_half_an_environment_is_noted(run_python):
    done = run(run_python, SHOW, PMI_RANK="1")
    assert done.returncode == 0
    assert done.stderr == ("spmd: running as a single process: PMI_RANK is set without PMI_SIZE\n")


def test_a_rank_asked_to_run_alone_writes_no_note(run_python):
    done = run(run_python, SHOW, PMI_RANK="1", PMI_SIZE="2", SPMD_PROCESS_COUNT="1")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_rank_without_mpi4py_is_told_what_to_install(run_python):
    hide = "import sys; sys.modules['mpi4py'] = None; "
    done = run(run_python, hide + SHOW, PMI_RANK="1", PMI_SIZE="2")
    assert done.returncode == 1
    assert 'Install it: pip install "spmd[mpi]"' in done.stderr


@pytest.mark.parametrize("wish", ["process_count=2", "process_index=1"])
def test_arguments_that_contradict_the_world_are_refused(run_python, wish: str):
    code = f"from spmd.transport import world as b; b.world(); b.initialize(); b.initialize({wish})"
    done = run(run_python, code)
    assert "this process is rank 0 of 1 already (from single)" in done.stderr
