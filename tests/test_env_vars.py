"""docs/env_vars.md is generated from the table of settings, and no variable is missing there.

`pytest tests/test_env_vars.py --update-golden` writes the page anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from spmd.core.config import SETTINGS, Setting

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "env_vars.md"

HEAD = """\
# Settings

Each setting has a name for `spmd.config.update(name, value)` and `with spmd.config.override(name,
value):`, and an environment variable that is read once, when spmd is imported. This page is
generated from `spmd/core/config.py`.

| name | variable | default | meaning |
|---|---|---|---|
"""

# Variables that are no settings: the launcher or a scheduler sets them for each rank.
TAIL = """
`spmdrun` and the environment of a job say who a process is; these variables are read by
`spmd/collectives/transport/bootstrap.py`, the first group that is complete wins:

| variables | set by |
|---|---|
"""
IDENTITY = (
    ("SPMD_RANK, SPMD_SIZE, SPMD_LOCAL_RANK, SPMD_LOCAL_SIZE", "you, or a launcher of your own"),
    ("OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, ...", "Open MPI's mpirun"),
    ("PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS", "MPICH's and Intel MPI's mpiexec"),
    ("SLURM_PROCID, SLURM_NTASKS", "srun, within a job step"),
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
