"""Makes the folder `launch/` importable as `spmd_launch` in an editable install.

A wheel simply contains the renamed folder. An editable install puts the checkout on the path
instead, where the folder has its own name; so this hook adds one generated package,
`spmd_launch/__init__.py`, which points at the folder and runs its `__init__.py`. Edits to
`launch/` are then live, as they are for `spmd/`.
"""

import tempfile
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SHIM = '''\
"""Stands for {folder} in an editable install of spmd."""

__path__ = [{folder!r}]
__file__ = {init!r}
with open(__file__, encoding="utf-8") as _source:
    exec(compile(_source.read(), __file__, "exec"))
'''


class LaunchHook(BuildHookInterface):
    """Adds the generated package to editable installs only."""

    def initialize(self, version: str, build_data: dict) -> None:
        """Write the package and tell hatchling to ship it; `version` is the kind of wheel."""
        if version != "editable":
            return
        folder = Path(self.root, "launch")
        self.scratch = tempfile.TemporaryDirectory(prefix="spmd-editable-")
        shim = Path(self.scratch.name, "__init__.py")
        shim.write_text(SHIM.format(folder=str(folder), init=str(folder / "__init__.py")))
        build_data["force_include_editable"][str(shim)] = "spmd_launch/__init__.py"

    def finalize(self, version: str, build_data: dict, artifact_path: str) -> None:
        """Remove the generated file once it is inside the wheel."""
        if version == "editable":
            self.scratch.cleanup()
