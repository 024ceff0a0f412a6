"""Stored programs: programs on the disk, loaded without passes, lowering or code generation.

The one idea: a compiled program is words, and only the addresses of functions among them differ
between two processes. A stored program is the words, the symbols whose addresses they need, and the
entries of the object cache that define the symbols. It is found by everything that determines it:
the program's fingerprint, the processor, the settings, and the files of spmd. If its object code is
gone or does not fit, the program is compiled.
"""

from __future__ import annotations

import marshal
import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from spmd.base.config import SETTINGS, config
from spmd.base.record import record
from spmd.compile.lower.host_steps import find, keep, keep_dtype
from spmd.compile.native.llvm.compiler import loader
from spmd.compile.native.llvm.cores import available_cores
from spmd.compile.native.llvm.object_cache import entry_key, object_cache, source_digest
from spmd.compile.native.program.encoded import Encoded
from spmd.compile.native.program.frames import Frames
from spmd.compile.native.program.steps import Host, Slot, View
from spmd.core.aval import ShapedArray
from spmd.core.ir import ClosedJaxpr
from spmd.core.trace import to_numpy

# Constants that passes made are stored with a program up to so many bytes; larger ones are not
# worth the disk.
MOST_CONST_BYTES = 2**20
# Addresses are above this on every 64-bit system, sizes, costs and offsets below. A word above it
# that is not known to be an address makes a program one that cannot be kept.
_LEAST_ADDRESS = 2**44

# Settings that do not change the compiled form of a program.
_IRRELEVANT = {
    "cache_dir",
    "debug",
    "log_compiles",
    "collective_timeout",
    "disable_jit",
    "overlap",
}
_settings_of = attrgetter(*(s.name for s in SETTINGS if s.name not in _IRRELEVANT))
# The facts about a program in `Encoded`, in built-in types.
_FACTS = tuple(n for n in Encoded.__match_args__ if n not in ("words", "steps", "places"))


@record
class StoredProgram:
    """A program without its schedule, in built-in types only, for `marshal`.

    `results` has for each result the number of the input that it equals, or None. A constant is
    the number of one of the traced jaxpr's, or its bytes on each device. `entries` are
    keys of the object cache with the symbols that their code defines; `places` are words that are
    addresses: (word, number of the entry, symbol).
    """

    memory: tuple[Any, ...]  # the fields of `Frames`
    results: tuple[int | None, ...]
    takes: dict[int, int]
    consts: tuple[int | tuple[bytes, ...], ...]
    words: bytes
    places: tuple[tuple[int, int, str], ...]
    entries: tuple[tuple[str, tuple[str, ...]], ...]
    facts: dict[str, Any]  # of the `Encoded` program, as it has them
    # Steps that call Python: their number, what they run (see `lower/host_steps.py`), and the shape
    # and dtype of each input and each output.
    hosts: tuple[tuple[int, Any, tuple[Any, ...], tuple[Any, ...]], ...]
    kept: Any  # what the platform keeps of it, see `NativeProgram.kept`

    @property
    def frames(self) -> Frames:
        """The memory behind its frames."""
        return Frames(*self.memory)

    def encoded(self, closed: ClosedJaxpr) -> Encoded:
        """The program's words with the addresses of this process; its entries are loaded.

        `closed` is the program as it was traced.
        """
        words = np.frombuffer(self.words, np.int64).copy()
        tables = [loader.loaded(entry) for entry, _ in self.entries]
        places = tuple((word, tables[k][symbol]) for word, k, symbol in self.places)
        for word, address in places:
            words[word] = address
        return Encoded(
            words=words,
            steps={number: _host_step(host, closed) for number, *host in self.hosts},
            places=places,
            **self.facts,
        )

    def constants(
        self, given: Sequence[Any], own: Callable[[list[np.ndarray]], list[Any]]
    ) -> list[Any]:
        """The program's constants; `own` takes those of its own, arrays of bytes of each device."""
        return [
            given[c] if isinstance(c, int) else own([np.frombuffer(b, np.uint8).copy() for b in c])
            for c in self.consts
        ]


# ---- the key -----------------------------------------------------------------------------------


def program_key(
    fingerprint: Callable[[], str | None],
    donated: tuple[bool, ...],
    platform: str,
    mesh: Any = None,
) -> str | None:
    """The name under which a program is stored; None if it has none.

    `platform` is that of its devices; `mesh` has the other facts behind a program of several, in
    built-in types.
    """
    # With dumps of passes or kernels enabled, always compile.
    if not object_cache.is_on or config.check or set("34") & set(config.debug):
        return None
    text = fingerprint()
    if text is None:
        return None
    host = loader.host
    where = (host.cpu, host.features, host.llvm_version, available_cores())
    # Where NumPy lies, too: machine code calls the LAPACK that came with it.
    tools = (sys.version, np.__version__, np.__file__, source_digest())
    return entry_key(
        "stored", text, platform, repr((donated, mesh)), repr((_settings_of(config), where, tools))
    )


# ---- to and from the disk ----------------------------------------------------------------------


def save_program(
    key: str,
    encoded: Encoded,
    frames: Frames,
    results: tuple[int | None, ...],
    takes: dict[int, int],
    consts: Sequence[Any],
    closed: ClosedJaxpr,
    kept: Any,
) -> None:
    """Keep a program, if it may be run by other processes.

    `consts` are numbers of the traced jaxpr's constants, or lists of each device's array; `kept` is
    what the platform keeps of it.
    """
    hosts = _kept_hosts(encoded, closed)
    if hosts is None:
        return
    arrays = [c for c in consts if not isinstance(c, int)]
    if sum(a.nbytes for each in arrays for a in each) > MOST_CONST_BYTES:
        return
    places = [place for place, _ in encoded.places]
    if not set(places).issuperset(np.flatnonzero(encoded.words >= _LEAST_ADDRESS).tolist()):
        return
    words = encoded.words.copy()
    words[places] = 0
    numbers = {
        entry: k for k, entry in enumerate(dict.fromkeys(a.entry for _, a in encoded.places))
    }
    stored = StoredProgram(
        memory=tuple(getattr(frames, name) for name in Frames.__match_args__),
        results=results,
        takes=takes,
        consts=tuple(c if isinstance(c, int) else _bytes_of(c) for c in consts),
        words=words.tobytes(),
        places=tuple((place, numbers[a.entry], a.symbol) for place, a in encoded.places),
        entries=tuple((entry, tuple(loader.loaded(entry))) for entry in numbers),
        facts={name: getattr(encoded, name) for name in _FACTS},
        hosts=hosts,
        kept=kept,
    )
    object_cache.store(
        key, marshal.dumps([getattr(stored, name) for name in StoredProgram.__match_args__])
    )


def _kept_hosts(encoded: Encoded, closed: ClosedJaxpr) -> tuple[Any, ...] | None:
    """The steps that call Python as they are stored; None if one of them cannot be kept."""
    made = []
    for number, step in enumerate(encoded.steps):
        if isinstance(step, Host):
            kept = None if step.together else keep(step.function, closed)
            views = [
                [(v.shape, keep_dtype(v.dtype)) for v in s] for s in (step.inputs, step.outputs)
            ]
            if kept is None or any(dtype is None for each in views for _, dtype in each):
                return None
            made.append((number, kept, *map(tuple, views)))
    return tuple(made)


def _host_step(host: Sequence[Any], closed: ClosedJaxpr) -> Host[Slot]:
    """A step that calls Python; its words know where its operands lie."""
    kept, *views = host
    ins, outs = (tuple(View(Slot(0), s, np.dtype(d)) for s, d in each) for each in views)
    function = find(kept, closed)
    return Host(function, ins, outs, name=function.prim.name)


def _bytes_of(const: Sequence[Any]) -> tuple[bytes, ...]:
    # NumPy's arrays have the program's dtypes, which may be wider than those of users' arrays.
    arrays = (c if type(c) is np.ndarray else np.asarray(to_numpy(c)) for c in const)
    return tuple(array.tobytes() for array in arrays)


def among_given(
    closed: ClosedJaxpr,
    consts: Sequence[tuple[Any, ShapedArray]],
    made: Callable[[Any, ShapedArray], list[Any]],
) -> list[Any]:
    """The stored form of constants: the number of one that the jaxpr was given, or what is `made`.

    `consts` are their values and types as the schedule has them; `made` gives one on each device.
    """
    pairs = zip(closed.consts, closed.jaxpr.constvars, strict=True)
    given = {(id(value), var.aval.dtype): k for k, (value, var) in enumerate(pairs)}
    found = ((given.get((id(value), aval.dtype)), value, aval) for value, aval in consts)
    return [made(value, aval) if k is None else k for k, value, aval in found]


def load_program(key: str) -> StoredProgram | None:
    """A program and its code, or None if one of the two is not there."""
    data = object_cache.load(key)
    if data is None:
        return None
    stored = StoredProgram(*marshal.loads(data))
    return stored if loader.load_entries(dict(stored.entries)) else None
