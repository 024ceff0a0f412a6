"""Every rule of lowering is declared, whichever test runs first: tests call `lower` by itself."""

import spmd.compile.building  # noqa: F401
