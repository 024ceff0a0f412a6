"""What a program of the corpus is, and what must be said about it.

A program is a function of the rank in one of the files under `programs/`. Its decorator says what
is wrong; comments mark the lines that must be named, so no line number is written by hand:

    @fault("mismatch", ranks=3, culprits=[1])
    def operator(rank):
        reduce = lax.pmax if rank == 1 else lax.psum
        ...                                             # fault      the culprits' line
        ...                                             # others     where the other ranks were

A look-alike does what a fault does at first sight, and is right: nothing may be said about it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

Body = Callable[[int], object]

FOLDER = Path(__file__).with_name("programs")

# What can be wrong, and what is expected to be said about it.
KINDS = {
    "mismatch": "ranks reached different collectives, or ran different programs",
    "left": "a rank left in good order while others wait for it",
    "raised": "a rank raised",
    "exited": "a rank ended with an exit code of its own",
    "killed": "a signal killed a rank",
    "stopped": "a rank is stopped, by a signal or in a debugger",
    "stuck": "a rank stays in code of the host and never enters the collective",
    "loading": "a rank waits for data",
    "computing": "a rank stays in compiled code without a collective, or in tracing or compiling",
    "slow": "a rank comes late, again and again",
    "value": "a rank has a NaN, a failed check, or values that differ where they must not",
    "static": "the program is wrong for any data: said at trace time",
    "launch": "the job is not what its ranks believe",
    "none": "nothing is wrong",
}


@dataclass(frozen=True, slots=True)
class Program:
    """One program, and what must be said when it runs."""

    name: str  # `file.function`
    body: Body
    kind: str
    ranks: int
    culprits: tuple[int, ...] = ()
    words: tuple[str, ...] = ()  # regular expressions; each must be found in what is said
    code: int | None = None  # the exit code of the job; None: any but 0
    helpers: tuple[Any, ...] = ()  # functions and classes beside it that hold marks
    options: tuple[str, ...] = ()  # more options of spmdrun
    environ: dict[str, str] = field(default_factory=dict)
    ci: bool = False  # runs in every test run, not only in the whole table
    hosts: bool = False  # runs with its ranks on different hosts, too
    launcher: str = "spmdrun"  # or "python": one process; "other-mpi": ranks that MPI does not know
    like: str = ""  # of a look-alike: the kind of fault that it resembles

    @property
    def is_fault(self) -> bool:
        """Whether something must be said."""
        return self.kind != "none"

    @property
    def module(self) -> ModuleType:
        """The file that holds the program."""
        return sys.modules[self.body.__module__]

    @property
    def file(self) -> str:
        """The base name of the file that holds the program: what a `file:line` shows."""
        return Path(inspect.getsourcefile(self.body) or "").name

    def lines(self, mark: str) -> list[int]:
        """The lines of the program and its helpers that end with the comment `# mark`.

        Where the others wait in the step that the programs of a file share, its line is as good.
        """
        found = [line for part in (self.body, *self.helpers) for line in _marked(part, mark)]
        if found and mark == "others" and hasattr(self.module, "average"):
            found += _marked(self.module.average, mark)
        return found

    @property
    def description(self) -> str:
        """The first sentence of the docstring."""
        return (self.body.__doc__ or "").strip().splitlines()[0]


def _marked(part: Any, mark: str) -> list[int]:
    text, first = inspect.getsourcelines(part)
    wanted = re.compile(rf"#\s*{mark}\s*$")
    return [first + k for k, line in enumerate(text) if wanted.search(line)]


_programs: dict[str, Program] = {}


def fault(
    kind: str,
    *,
    ranks: int,
    culprits: Sequence[int] = (),
    words: Sequence[str] = (),
    **more,
) -> Callable[[Body], Body]:
    """Enter a faulty program. `culprits` are the ranks that must be named."""
    assert kind in KINDS, kind

    def enter(body: Body) -> Body:
        name = f"{body.__module__.rpartition('.')[2]}.{body.__name__}"
        assert name not in _programs, f"two programs are called {name}"
        _programs[name] = Program(name, body, kind, ranks, tuple(culprits), tuple(words), **more)
        return body

    return enter


def alike(*, ranks: int, like: str, **more) -> Callable[[Body], Body]:
    """Enter a correct program that looks like a fault of kind `like`."""
    assert like in KINDS, like
    return fault("none", ranks=ranks, code=0, like=like, **more)


@functools.cache
def modules() -> list[ModuleType]:
    """The files of the corpus, imported."""
    names = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
    return [importlib.import_module(f"tests.faults.programs.{name}") for name in names]


def programs(chosen: Sequence[str] = ()) -> list[Program]:
    """All programs in the order of their files, or those whose names begin with one of `chosen`."""
    modules()
    found = [p for p in _programs.values() if not chosen or p.name.startswith(tuple(chosen))]
    missing = [c for c in chosen if not any(p.name.startswith(c) for p in found)]
    if missing:
        raise SystemExit(f"no program's name begins with {', '.join(missing)}")
    return found


def find(name: str) -> Program:
    """One program by its name; only its own file is imported."""
    importlib.import_module(f"tests.faults.programs.{name.partition('.')[0]}")
    return _programs[name]
