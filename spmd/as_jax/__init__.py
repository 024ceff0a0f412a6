"""Unmodified JAX programs and libraries on spmd: `import jax` gives spmd from `install()` on.

    python -m spmd.as_jax train.py --steps 10       # a script, or -m module
    spmdrun -n 4 --as-jax train.py                  # on several ranks

In a program, `spmd.as_jax.install()` before the first `import jax` does the same. Nothing of JAX
is loaded, though it may be installed. `SPMD_AS_JAX_REPORT=1` prints at the end which modules of JAX
a program imported and which names it asked for that spmd has not, and for whom.
"""

from spmd.as_jax.finder import install, installed

__all__ = ["install", "installed"]
