"""docs/env_vars.md is generated from the table of settings, and no variable is missing there.

`pytest tests/test_env_vars.py --update-golden` writes the page anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from spmd.base.config import SETTINGS, Setting

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "env_vars.md"

HEAD = """\
# Settings

Each setting has a name for `spmd.config.update(name, value)` and `with spmd.config.override(name,
value):`, and an environment variable that is read once, when spmd is imported. This page is
generated from `spmd/base/config.py`.

| name | variable | default | meaning |
|---|---|---|---|
"""

# Variables that are no settings: the launcher or a scheduler sets them for each rank.
TAIL = """
Rank, size and host of a process come from the environment too; `spmd/transport/environment.py`
reads it, and the first complete group wins:

| variables | set by |
|---|---|
"""
IDENTITY = (
    (
        "SPMD_PROCESS_INDEX, SPMD_PROCESS_COUNT, SPMD_LOCAL_PROCESS_INDEX, "
        "SPMD_LOCAL_PROCESS_COUNT",
        "you; SPMD_PROCESS_COUNT=1 alone makes any process run by itself",
    ),
    ("OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE", "the mpirun of Open MPI"),
    ("PMIX_RANK, PMIX_NAMESPACE", "launchers that speak PMIx"),
    ("PMI_RANK, PMI_SIZE", "the mpiexec of MPICH, Intel MPI and Cray MPICH"),
    ("SLURM_PROCID, SLURM_NTASKS", "srun, within a job step"),
    ("SPMD_RANK_PROCESS", "a rank, for its child processes: they are no ranks"),
    ("SPMD_INJECT", "you, for `spmdrun --inject`: faults to inject"),
    ("SPMD_RESTART", "spmdrun: how often `--max-restarts` has started the job again"),
    ("SPMD_STACKS", "spmdrun; on which signal a rank writes its stacks, and to which file"),
    ("SPMD_FAILURE_REPORT", "spmdrun; the file in which a failing rank leaves its report"),
    (
        "SPMD_FLIGHT_DIR",
        "spmdrun, or you under a plain mpirun: the folder of the ranks' flight records",
    ),
)


def _default(setting: Setting) -> str:
    if setting.name == "cache_dir":
        return "`~/.cache/spmd`"  # the value itself depends on the user's home and XDG_CACHE_HOME
    return {"": "empty", None: "unset"}.get(setting.default, f"`{setting.default}`")


def page() -> str:
    """The text of docs/env_vars.md."""
    rows = [f"| `{s.name}` | `{s.env}` | {_default(s)} | {s.help} |" for s in SETTINGS]
    identity = [f"| {names} | {who} |" for names, who in IDENTITY]
    return HEAD + "\n".join(rows) + "\n" + TAIL + "\n".join(identity) + "\n"


def test_page_is_current(golden):
    golden(PAGE, page())


def test_every_variable_in_the_sources_is_on_the_page():
    documented = set(re.findall(r"SPMD_[A-Z0-9_]+", PAGE.read_text(encoding="utf-8")))
    for folder in ("spmd", "launch"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            used = set(re.findall(r"\bSPMD_[A-Z0-9_]*[A-Z0-9]\b", path.read_text(encoding="utf-8")))
            unknown = used - documented
            assert not unknown, f"{path.relative_to(ROOT)} uses {unknown}; docs/env_vars.md doesn't"


def test_names_and_variables_are_unique():
    assert len({s.name for s in SETTINGS}) == len({s.env for s in SETTINGS}) == len(SETTINGS)
