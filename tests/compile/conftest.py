"""Every rule of lowering is declared, whichever test runs first: tests call `lower` by itself."""

import spmd.compile.executable.build  # noqa: F401
