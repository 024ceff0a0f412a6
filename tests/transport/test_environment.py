"""Which variables make a process a rank, and which only look as if they did."""

from __future__ import annotations

import os

import pytest

from spmd.transport.environment import OWNER, Environment, detect

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "3"}
SLURM_STEP = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
}


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, Environment("single")),
        (OPEN_MPI, Environment("OMPI_COMM_WORLD_*", 2, 4, 0, 2)),
        (PMI, Environment("PMI_*", 1, 3)),
        (SLURM_STEP, Environment("SLURM_*", 5, 8, 1)),
        ({"PMIX_RANK": "3", "PMIX_NAMESPACE": "job"}, Environment("PMIX_*", 3, None)),
        (
            {"PMIX_RANK": "3", "PMIX_NAMESPACE": "job", **SLURM_STEP},
            Environment("PMIX_*", 3, 8),
        ),
        (PMI | OPEN_MPI, Environment("OMPI_COMM_WORLD_*", 2, 4, 0, 2)),
        (SLURM_STEP | PMI, Environment("PMI_*", 1, 3)),
        (OPEN_MPI | {"SPMD_PROCESS_COUNT": "1"}, Environment("SPMD_PROCESS_COUNT")),
        (
            OPEN_MPI | {"SPMD_PROCESS_COUNT": "4", "SPMD_PROCESS_INDEX": "3"},
            Environment("SPMD_PROCESS_*", 3, 4),
        ),
        (OPEN_MPI | {OWNER: str(os.getpid())}, Environment("OMPI_COMM_WORLD_*", 2, 4, 0, 2)),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else value.source,
)
def test_variables_are_read_in_order_of_precedence(environ: dict[str, str], wanted: Environment):
    assert detect(environ) == wanted


@pytest.mark.parametrize(
    ("environ", "note"),
    [
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_RANK is set without OMPI_COMM_WORLD_SIZE"),
        ({"PMI_SIZE": "4"}, "PMI_SIZE is set without PMI_RANK"),
        ({"PMI_RANK": "4", "PMI_SIZE": "4"}, "PMI_RANK=4 is not below PMI_SIZE=4"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK is set without PMIX_NAMESPACE"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "not in a job step"),
        (SLURM_STEP | {"SLURM_STEP_NUM_TASKS": "1"}, "SLURM_NTASKS=8, but this job step has 1"),
        (OPEN_MPI | {OWNER: "1"}, "process 1, a rank, started this process"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:30],
)
def test_half_an_environment_is_a_single_process_with_a_note(environ: dict[str, str], note: str):
    found = detect(environ)
    assert found.is_single and found.source == "single"
    assert note in found.note


def test_arguments_win():
    assert detect(OPEN_MPI, 1, 2) == Environment("arguments", 1, 2)
