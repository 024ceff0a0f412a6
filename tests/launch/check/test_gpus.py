"""`spmdrun --doctor --gpu` where one thing is missing: a sentence with what to install."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from launch.check.gpus import findings

NEW, OLD = "580.65.06", "550.54.14"
MPI: Any = SimpleNamespace(library="libmpi.so")


@pytest.fixture
def nvidia(tmp_path):
    """The kernel's files of two GPUs with a new driver."""
    for k in range(2):
        folder = tmp_path / "gpus" / f"0000:0{k}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: NVIDIA L4\nGPU UUID: GPU-{k}\n")
    said = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {NEW}  Sun Jul 27 07:14:17 UTC 2025\n"
    (tmp_path / "version").write_text(said)
    return tmp_path


def found(
    nvidia, environ=None, mpi=MPI, without=(), peers="yes 0 1\nyes 1 0\n", aware=True, **given
):
    def asked(text, *args):
        return ("aware" if aware else "not") if args else peers

    rows = findings(
        environ or {},
        mpi,
        str(nvidia),
        installed=lambda name: None if name in without else "13.1",
        asked=asked,
        loads=given.get("loads", lambda name: True),
    )
    return {
        f"{name} {k}" if name == "wheel" else name: (text, works)
        for k, (name, text, works) in enumerate(rows)
    }


def test_where_nothing_is_missing(nvidia):
    rows = found(nvidia)
    assert all(works for _, works in rows.values())
    assert rows["driver"][0] == f"NVIDIA driver {NEW}"
    assert rows["GPUs"][0] == "2 of 2 visible: NVIDIA L4"
    assert rows["NCCL"][0] == "nvidia-nccl-cu13 13.1"
    assert rows["peers"][0] == "peer access between all GPUs"
    assert rows["MPI"][0].startswith("this MPI takes memory of GPUs")


def test_a_driver_that_is_missing_old_or_halved(nvidia, tmp_path):
    text, works = found(tmp_path / "nowhere")["driver"]
    assert not works and text.startswith("there is no NVIDIA driver: install version 580 or newer")
    text, works = found(nvidia, loads=lambda name: False)["driver"]
    assert (
        not works and "install the driver's libraries, or start the container with --gpus" in text
    )
    version = nvidia / "version"
    version.write_text(version.read_text().replace(NEW, OLD))
    text, works = found(nvidia)["driver"]
    assert not works
    assert text == f"the NVIDIA driver {OLD} is older than CUDA 13: install version 580 or newer"


def test_gpus_that_are_hidden(nvidia):
    text, works = found(nvidia, {"CUDA_VISIBLE_DEVICES": "1"})["GPUs"]
    assert works and text.startswith("1 of 2 visible")
    text, works = found(nvidia, {"CUDA_VISIBLE_DEVICES": ""})["GPUs"]
    assert not works and "unset it" in text


def test_wheels_and_nccl(nvidia):
    rows = found(nvidia, without=("cupy-cuda13x", "nvidia-nccl-cu13"))
    wheels = [row for name, row in rows.items() if name.startswith("wheel")]
    assert [works for _, works in wheels] == [False, True]
    assert wheels[0][0].endswith("pip install spmd[cuda]")
    assert rows["NCCL"][1] and "pip install spmd[cuda-mesh]" in rows["NCCL"][0]


def test_connections(nvidia):
    assert "no peer access for 0-1: " in found(nvidia, peers="no 0 1\nyes 1 0\n")["peers"][0]
    assert "there is one GPU, or CUDA does not start" in found(nvidia, peers="")["peers"][0]
    assert found(nvidia, aware=False)["MPI"][0].startswith("this MPI takes no memory of GPUs")
    assert found(nvidia, mpi=None)["MPI"][0] == "no MPI was found: pip install spmd[mpi]"
