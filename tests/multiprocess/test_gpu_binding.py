"""`spmdrun` and GPUs, with real ranks: what each sees, the table, and what is refused."""

from __future__ import annotations

import pytest

from tests.multiprocess.test_launch import run_launcher

pytestmark = pytest.mark.mpi
SHOW = "-c", "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"


def seen(ranks: int, *options: str, platform: str = "cuda", **environ: str):
    env = {"SPMD_PLATFORM": platform, "SPMD_CUDA_DRIVER": "cupy", **environ}
    done = run_launcher("-n", str(ranks), *options, *SHOW, env=env)
    return done, dict(line.split(" | ") for line in done.stdout.splitlines())


def test_each_rank_sees_its_gpus_and_one_table_is_printed():
    done, shown = seen(2, CUDA_VISIBLE_DEVICES="GPU-a,GPU-b,MIG-c,MIG-d")
    assert done.returncode == 0, done.stderr
    assert shown == {"r0": "GPU-a,GPU-b", "r1": "MIG-c,MIG-d"}
    table = [line.split() for line in done.stderr.splitlines()]
    assert table[0] == ["rank", "host", "GPU", "UUID", "PCI", "bus", "NUMA", "cores"]
    assert [(row[0], row[2]) for row in table[1:]] == [
        ("0", "GPU-a"),
        ("0", "GPU-b"),
        ("1", "MIG-c"),
        ("1", "MIG-d"),
    ]


def test_too_few_gpus():
    done, _ = seen(3, CUDA_VISIBLE_DEVICES="GPU-a,GPU-b")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("3 ranks on this host, and 2 GPUs: start at most 2 here") == 1
    done, shown = seen(3, "--share-gpus", CUDA_VISIBLE_DEVICES="GPU-a,GPU-b")
    assert done.returncode == 0, done.stderr
    assert shown == {"r0": "GPU-a", "r1": "GPU-a", "r2": "GPU-b"}
    assert "warning: ranks 0, 1 share GPU GPU-a" in done.stderr


@pytest.mark.parametrize("options", [("--no-bind",), ()], ids=["not bound", "for CPUs"])
def test_ranks_that_are_not_bound_see_all(options):
    platform = "cuda" if options else "cpu"
    done, shown = seen(2, *options, platform=platform, CUDA_VISIBLE_DEVICES="GPU-a")
    assert done.returncode == 0, done.stderr
    assert shown == {"r0": "GPU-a", "r1": "GPU-a"}
    assert "rank" not in done.stderr


def test_the_doctor_of_gpus():
    done = run_launcher("--doctor", "--gpu", "-n", "2")
    assert "\ndriver     " in done.stdout and "\nNCCL       " in done.stdout
    assert run_launcher("--gpu", "-n", "2", "true").returncode == 2
