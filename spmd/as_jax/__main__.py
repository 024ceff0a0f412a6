"""`python -m spmd.as_jax script.py [arguments]`, or `-m module [arguments]`, or `-c text`.

Runs a program that imports JAX, with spmd in JAX's place.
"""

from __future__ import annotations

import os
import runpy
import sys

from spmd.as_jax.finder import install
from spmd.as_jax.tracebacks import begin_at_program

_USAGE = "usage: python -m spmd.as_jax (script.py | -m module | -c text) [arguments]"


def main(argv: list[str]) -> None:
    """Run the program of a command line in this process, as `python` would."""
    if not argv or argv[0] in ("-h", "--help") or (argv[0] in ("-m", "-c") and not argv[1:]):
        print(_USAGE, file=sys.stdout if argv[:1] in (["-h"], ["--help"]) else sys.stderr)
        sys.exit(0 if argv[:1] in (["-h"], ["--help"]) else 2)
    install()
    begin_at_program()
    # `python -m` has put the working folder first, which is right for modules and texts.
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    elif argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        _run_text(argv[1], "<string>")
    else:
        if not os.path.isfile(argv[0]):
            sys.exit(f"python -m spmd.as_jax: there is no file {argv[0]}")
        sys.argv = argv
        whole = os.path.abspath(argv[0])  # `__file__`, and in tracebacks, as `python` has it
        sys.path[0] = os.path.dirname(whole)
        with open(whole, "rb") as file:
            _run_text(file.read(), whole)


def _run_text(text: str | bytes, name: str) -> None:
    """Run a program in the module `__main__`, where pickles and libraries look for its names."""
    here = vars(sys.modules["__main__"])
    for key in [k for k in here if k not in ("__name__", "__builtins__")]:
        del here[key]
    here.update(__file__=name, __spec__=None, __package__=None, __loader__=None, __doc__=None)
    exec(compile(text, name, "exec", dont_inherit=True), here)


if __name__ == "__main__":
    main(sys.argv[1:])
