"""The GPUs that ranks get, on hosts that are folders: numbers, UUIDs, parts, Slurm's, sharing."""

from __future__ import annotations

import json
import socket

import pytest

from launch import options
from launch.supervise import gpus, rank
from launch.supervise.supervisor import Link, Supervisor
from tests.launch.supervise.test_supervisor import say

BUSES = "0000:17:00.0", "0000:65:00.0", "0000:CA:00.0", "0000:E3:00.0"
UUIDS = tuple(f"GPU-{letter * 8}-0000-1111-2222-333344445555" for letter in "abcd")


@pytest.fixture
def host(tmp_path) -> list[gpus.Gpu]:
    """A host of four GPUs, two a NUMA node, as the kernel shows them."""
    for k, (bus, uuid) in enumerate(zip(BUSES, UUIDS, strict=True)):
        folder, device = tmp_path / "gpus" / bus, tmp_path / "pci" / bus.lower()
        folder.mkdir(parents=True)
        device.mkdir(parents=True)
        text = f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\nGPU UUID: \t {uuid}\n"
        (folder / "information").write_text(text)
        (device / "numa_node").write_text(f"{k // 2}\n")
    return gpus.of_host(str(tmp_path), str(tmp_path / "pci"))


def given(host, environ: dict[str, str], ranks: int, may_share: bool = False) -> list[str]:
    """What the ranks of a host see, each in its own environment."""
    found = []
    for local_rank in range(ranks):
        own = {"SPMD_PLATFORM": "cuda", **environ}
        gpus.bind(own, local_rank, ranks, may_share, host)
        found.append(own.get("CUDA_VISIBLE_DEVICES", ""))
    return found


def test_a_host_is_read_from_the_files_of_the_kernel(host, tmp_path):
    assert [gpu.name for gpu in host] == ["0", "1", "2", "3"]
    assert [gpu.uuid for gpu in host] == list(UUIDS)
    assert [(gpu.bus, gpu.numa) for gpu in host] == list(zip(BUSES, "0011", strict=True))
    assert {gpu.model for gpu in host} == {"NVIDIA H100 80GB HBM3"}
    assert gpus.of_host(str(tmp_path / "nowhere")) == []


@pytest.mark.parametrize(
    ("environ", "ranks", "wanted"),
    [
        ({}, 4, ["0", "1", "2", "3"]),
        ({}, 2, ["0,1", "2,3"]),
        ({}, 3, ["0", "1", "2"]),  # ranks have as many each
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, 2, ["3", "1"]),
        ({"CUDA_VISIBLE_DEVICES": " 2 , 0 "}, 1, ["2,0"]),
        ({"CUDA_VISIBLE_DEVICES": "1,7,2"}, 1, ["1"]),  # nothing behind a wrong one, as in CUDA
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, 1, ["1"]),
        ({"CUDA_VISIBLE_DEVICES": f"{UUIDS[2]},GPU-bbbb"}, 2, [UUIDS[2], "GPU-bbbb"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-"}, 0, []),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1234,MIG-5678"}, 2, ["MIG-1234", "MIG-5678"]),
        (
            {"CUDA_VISIBLE_DEVICES": f"MIG-{UUIDS[1]}/1/0,MIG-{UUIDS[1]}/2/0"},
            2,
            [f"MIG-{UUIDS[1]}/1/0", f"MIG-{UUIDS[1]}/2/0"],
        ),
        ({"SLURM_JOB_GPUS": "0,1,2,3", "SLURM_STEP_GPUS": "1,3"}, 2, ["1", "3"]),
        ({"SLURM_JOB_GPUS": "2,3"}, 2, ["2", "3"]),
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_JOB_GPUS": "2,3"}, 1, ["0"]),
    ],
)
def test_ranks_divide_what_a_program_would_see(host, environ, ranks, wanted):
    assert given(host, environ, ranks) == wanted


def test_names_are_trusted_where_the_kernel_shows_no_list():
    assert given([], {"CUDA_VISIBLE_DEVICES": "0,GPU-x"}, 2) == ["0", "GPU-x"]
    assert given([], {}, 2) == ["", ""]


def test_numbers_count_along_the_bus(host):
    environ = {"SPMD_PLATFORM": "gpu"}
    gpus.bind(environ, 1, 2, False, host)
    assert environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    environ = {"CUDA_VISIBLE_DEVICES": UUIDS[0]}
    gpus.bind(environ, 0, 1, False, host)
    assert "CUDA_DEVICE_ORDER" not in environ


def test_more_ranks_than_gpus_are_an_error_with_the_fix(host):
    with pytest.raises(gpus.BindingError) as caught:
        given(host, {"CUDA_VISIBLE_DEVICES": "0"}, 2)
    assert str(caught.value) == (
        "2 ranks on this host, and 1 GPU: start at most 1 here (-n, or slots= in the hostfile), or "
        "let ranks share GPUs with --share-gpus"
    )
    shared = given(host, {"CUDA_VISIBLE_DEVICES": "0,1"}, 4, may_share=True)
    assert shared == ["0", "0", "1", "1"]
    with pytest.raises(gpus.BindingError, match="shows none of the 4 GPUs of this host; unset it"):
        given(host, {"CUDA_VISIBLE_DEVICES": "9"}, 1)


def test_programs_for_cpus_keep_what_they_see(host):
    for environ in (
        {"SPMD_PLATFORM": "cpu", "CUDA_VISIBLE_DEVICES": "0"},
        {"SPMD_PLATFORM": "cuda", "SPMD_CUDA_DRIVER": "emulator", "CUDA_VISIBLE_DEVICES": "0"},
        {"SPMD_PLATFORM": "cpu", "CUDA_VISIBLE_DEVICES": ""},
    ):
        own = dict(environ)
        assert gpus.bind(own, 1, 2, False, host) == []
        assert own == environ


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        (
            {
                "OMPI_COMM_WORLD_RANK": "5",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
                "SLURM_LOCALID": "0",
            },
            (5, 1, 4),
        ),
        ({"PMI_RANK": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, (3, 1, 2)),
        (
            {"SLURM_PROCID": "6", "SLURM_LOCALID": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
            (6, 2, 4),
        ),
        (
            {"SLURM_PROCID": "6", "SLURM_LOCALID": "2", "SLURM_STEP_TASKS_PER_NODE": "4,3"},
            (6, 2, 0),
        ),
        ({}, (0, 0, 0)),
    ],
)
def test_a_rank_knows_its_place_on_its_host(environ, wanted):
    assert rank.place(environ) == wanted


# ---- the table ---------------------------------------------------------------------------------


def test_the_table_names_all_ranks_and_warns_of_sharing(host):
    ranks = {
        k: ("node7", gpus.rows(gpus.bind({"SPMD_PLATFORM": "cuda"}, k, 2, False, host[:2])), "0-3")
        for k in range(2)
    }
    assert gpus.table(ranks) == [
        "rank  host   GPU  UUID" + " " * 38 + "PCI bus       NUMA  cores",
        f"0     node7  0    {UUIDS[0]}  0000:17:00.0  0     0-3",
        f"1     node7  1    {UUIDS[1]}  0000:65:00.0  0     0-3",
    ]
    # By number and by UUID, but one GPU; that of another host is another.
    one, same = (gpus.visible({gpus.VISIBLE: v}, host)[:1] for v in ("2", "GPU-cc"))
    shared = {0: ("a", gpus.rows(one), "0"), 1: ("a", gpus.rows(same), "1")}
    apart = {2: ("b", gpus.rows(one), "0")}
    (warning,) = [line for line in gpus.table(shared | apart) if line.startswith("warning")]
    assert warning.startswith(f"warning: ranks 0, 1 share GPU {UUIDS[2]} of a: they take turns")
    parts = [gpus.visible({gpus.VISIBLE: f"MIG-{UUIDS[0]}/{k}/0"}, host) for k in range(2)]
    apart = {k: ("a", gpus.rows(part), "0") for k, part in enumerate(parts)}
    assert not any(line.startswith("warning") for line in gpus.table(apart))


def test_spmdrun_prints_one_table_when_all_ranks_are_there(capfdbinary, host):
    supervisor = Supervisor(options.parse(["-n", "2", "true"]), mpi=None)
    ends: list[socket.socket] = []
    for k in range(2):
        near, far = socket.socketpair()
        link = Link(near, trusted=True)
        supervisor.links.append(link)
        ends += [near, far]
        rows = json.loads(json.dumps(gpus.rows(host[k : k + 1])))
        say(far, rank.HELLO, rank=k, group=None, host="here", gpus=rows, cores=str(k))
        supervisor.hear(link)
        supervisor.printer.close()
        lines = capfdbinary.readouterr().err.decode().splitlines()
        assert len(lines) == (3 if k else 0)
    assert [line.split()[2] for line in lines] == ["GPU", "0", "1"]
    for end in ends:
        end.close()
    supervisor.select.close()
