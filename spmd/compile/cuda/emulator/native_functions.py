"""The native functions that translated kernels call, as texts that all of them share."""

from __future__ import annotations

from collections.abc import Callable

from spmd.compile.cuda.emulator import checks, coroutines, lanes, late_copies
from spmd.compile.cuda.emulator.declared import with_declarations
from spmd.compile.native.llvm.shared_functions import share


def _shared(name: str, write: Callable[[str], str]) -> str:
    """The symbol of a function whose text `write` gives for a symbol."""
    text = write("SYMBOL")
    return share(f"cuda_{name}", with_declarations(text), optimize=True)


REPORT = _shared("report", checks.report_text)
CHECK_GLOBAL = _shared("check_global", lambda s: checks.check_global_text(s, REPORT))
CHECK_SHARED = _shared("check_shared", lambda s: checks.check_shared_text(s, REPORT))
TRACE = _shared("trace", checks.trace_text)
BEGIN_BLOCK = _shared("begin_block", coroutines.begin_block_text)
RUN = _shared("run", lambda s: coroutines.run_text(s, BEGIN_BLOCK, REPORT))
SHUFFLE = {
    mode: _shared(f"shuffle_{mode}", lambda s, mode=mode: lanes.shuffle_text(s, mode))
    for mode in lanes.SHUFFLES
}
BALLOT = _shared("ballot", lanes.ballot_text)
MATRIX = {
    transposed: _shared(
        f"matrix_{transposed}", lambda s, transposed=transposed: lanes.matrix_text(s, transposed)
    )
    for transposed in (False, True)
}
MULTIPLY = {
    half: _shared(f"multiply_{half}", lambda s, half=half: lanes.multiply_text(s, half))
    for half in lanes.DEPTHS
}
_CHECKS = CHECK_GLOBAL, CHECK_SHARED, REPORT
RESET_COPIES = _shared("reset_copies", late_copies.reset_text)
COMMIT_COPIES = _shared("commit_copies", late_copies.commit_text)
# By whether accesses are checked.
LAND_COPIES = {
    checked: _shared(
        f"land_copies_{checked}",
        lambda s, checked=checked: late_copies.land_text(s, CHECK_SHARED if checked else None),
    )
    for checked in (False, True)
}
BEGIN_COPY = {
    checked: _shared(
        f"begin_copy_{checked}",
        lambda s, land=land, checked=checked: late_copies.begin_text(
            s, land, _CHECKS if checked else None
        ),
    )
    for checked, land in LAND_COPIES.items()
}
NOISE = _shared("noise", lanes.noise_text)
