"""Mutants of rendered kernels: a barrier removed, a bound of an index shifted by one.

A mutant has a symbol of its own, so that many are one module. Barriers in the head that all modules
begin with are removed one at a time, which makes a module of its own for each.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from spmd.base.errors import CudaError
from spmd.base.record import record
from spmd.compile.cuda.kernel import PRELUDE, module_text, render, render_product
from spmd.compile.cuda.launch import Function, Rendered
from tests.compile.cuda import test_attention, test_sort, test_windows
from tests.compile.cuda.corpus import (
    operation_cases,
    program_kernels,
    with_inputs,
    written_cases,
)
from tests.compile.cuda.emulated import Emulator
from tests.compile.cuda.large_kernels import LARGE, large_inputs
from tests.compile.cuda.test_matmul import CASES, of_programs
from tests.compile.kernel.interpret import interpret
from tests.compile.kernel.interpret_products import interpret_product
from tests.compile.kernel.op_kernels import assert_close
from tests.compile.kernel.random_kernels import Case

BARRIER = "__syncthreads();"
# Comparisons of indices with sizes. Not those of values (v0 < 7), of registers of a thread
# (for (int i = 0; i < 8; i++)), and of the steps over a depth, whose last is often not full.
_NAMES = r"(?:point|lane|element|wanted|member|row \+ i|column \+ i|first \+ k|d\d+|t|k)"
_BOUND = re.compile(rf"\b({_NAMES} (?:<|>=) )(\d+)\b")
_FUNCTION_OF_HEAD = r"^(?:template .* )?(?:T|void) (\w+)\("
_OF_REGISTERS = re.compile(r"for \(int \w+ = \d+; \w+ < \d+; \w+\+\+\)")


@record(eq=False)
class Subject:
    """A rendered kernel with arrays, and the check that the arrays are right afterwards."""

    rendered: Rendered
    arrays: list[np.ndarray]
    check: Callable[[list[np.ndarray]], None]


@record(eq=False)
class Mutant:
    """A function of a subject with a mistake in one line."""

    subject: Subject
    function: Function
    broken: Function
    line: str


def _of_case(case: Case) -> Subject:
    rendered = render(case.kernel)

    def check(got: list[np.ndarray]) -> None:
        expected = [x.copy() for x in case.arrays]
        interpret(case.kernel, expected)
        with np.errstate(all="ignore"):
            assert_close(case.kernel, expected, got)

    return Subject(rendered, case.arrays, check)


def _of_product(case) -> Subject:
    rendered = render_product(case.product)

    def check(got: list[np.ndarray]) -> None:
        expected = [x.copy() for x in case.arrays]
        interpret_product(case.product, *expected)
        with np.errstate(all="ignore"):
            assert_close(case.product.epilogue, expected[1:], got[1:], loose=4)

    return Subject(rendered, case.arrays, check)


@functools.cache
def subjects() -> list[Subject]:
    """All kernels and products of the corpus that have functions, equal ones once."""
    cases = [*written_cases(), *operation_cases(), *map(with_inputs, program_kernels())]
    kernels = [make() for make, _ in LARGE.values()]
    cases += [Case(kernel, large_inputs(kernel)) for kernel in kernels]
    found: dict[tuple[str, ...], Subject] = {}
    products = map(_of_product, (*CASES, *of_programs()))
    others = [*test_sort.cases(), *test_windows.cases(), *test_attention.cases(True)]
    others += test_attention.walks()
    others = [Subject(case.rendered, case.arrays, case.check) for case in others]
    for subject in (*map(_of_case, cases), *products, *others):
        found.setdefault(tuple(f.symbol for f in subject.rendered.functions), subject)
    found.pop((), None)
    return list(found.values())


def barriers() -> Iterator[Mutant]:
    """Each barrier in the text of a function removed."""
    for subject, function in _functions():
        for k, match in enumerate(re.finditer(re.escape(BARRIER), function.text)):
            yield _mutant(subject, function, f"b{k}", match.start(), match.end(), "")


def bounds() -> Iterator[Mutant]:
    """Each bound of an index raised by one."""
    for subject, function in _functions():
        for k, match in enumerate(_BOUND.finditer(function.text)):
            start = function.text.rindex("\n", 0, match.start()) + 1
            line = function.text[start : function.text.index("\n", match.end())]
            if line.startswith("//") or _OF_REGISTERS.search(line):
                continue
            more = str(int(match[2]) + 1)
            yield _mutant(subject, function, f"i{k}", match.start(2), match.end(2), more)


def equivalent_barrier(mutant: Mutant) -> str:
    """Why a kernel does not need a barrier that it has; "" if it does."""
    text = mutant.broken.text
    loop = re.search(r"for \(int first = 0; first < (\d+); first \+= (\d+)\)", text)
    if loop and int(loop[1]) <= int(loop[2]) and re.search("^// (product|contraction)", text):
        return "the last barrier of a loop with one step"
    if "// for each element of the row" in text and text.count("tile") == 0:
        return "a thread reads only elements of the row that it wrote itself"
    tiles = re.findall(r"const \w+ (v\d+) = .*tile\d\[", text)
    if tiles and not any(re.search(rf"[(=\] ]{v}\b(?! =)", text) for v in tiles):
        return "nothing depends on what is read from the tile"
    return ""


def equivalent_bound(mutant: Mutant) -> str:
    """Why a bound may be larger by one; "" if it may not."""
    for form, reason in _HARMLESS.items():
        if re.search(form, mutant.line):
            return reason
    return ""


_HARMLESS = {
    r"^for \(int t = thread; ": "thread 0 writes an element that it writes again",
    r"^for \(int k = threadIdx.y; ": "the point behind the tile is left out, or of the next tile",
    r"= wanted < \d+;$": "the grid has no thread behind the rows, or it does what the last does",
    r"\? load\(&[ab]\[": "elements behind the depth meet zeros of the other operand",
    r"^const bool inside = ": "elements behind the depth meet zeros of the other operand",
    r"^if \((d\d+|point|lane) >= \d+": "the grid has no thread for it, or a value that is not used",
    r"^if \(element >= \d+\) break;$": "no thread has a further element",
    r"^if \(d\d+ < \d+ && d\d+ < \d+\) tile": "an element of the tile that is not used",
    r"^for \(int element = member; ": "no thread has a further element",
}


def heads() -> Iterator[tuple[str, str, list[Subject]]]:
    """Each barrier of the head removed: its function, the head, and the subjects that call it."""
    for match in re.finditer(re.escape(BARRIER), PRELUDE):
        name = re.findall(_FUNCTION_OF_HEAD, PRELUDE[: match.start()], re.M)[-1]
        calling = [s for s in subjects() if any(f"{name}<" in f.text for f in s.rendered.functions)]
        line = PRELUDE[: match.start()].count("\n") + 1
        broken = PRELUDE[: match.start()] + " " * len(BARRIER) + PRELUDE[match.end() :]
        yield f"{name}, line {line}", broken, calling


def _functions() -> Iterator[tuple[Subject, Function]]:
    seen = set()
    for subject in subjects():
        for function in subject.rendered.functions:
            if function.symbol not in seen:
                seen.add(function.symbol)
                yield subject, function


def _mutant(
    subject: Subject, function: Function, name: str, start: int, end: int, into: str
) -> Mutant:
    text = function.text[:start] + into + function.text[end:]
    line = text[text.rindex("\n", 0, start) + 1 :].partition("\n")[0].strip()
    symbol = f"{function.symbol}_{name}"
    text = text.replace(f"{function.symbol}(", f"{symbol}(")
    return Mutant(subject, function, replace(function, symbol=symbol, text=text), line)


def outcomes(mutants: Sequence[Mutant], emulator: Emulator | None = None) -> list[str]:
    """Each mutant run: what was reported, or "wrong" values, or "equal"."""
    emulator = emulator or emulator_of(mutants)
    found = []
    for mutant in mutants:
        functions = tuple(
            mutant.broken if f.symbol == mutant.function.symbol else f
            for f in mutant.subject.rendered.functions
        )
        rendered = replace(mutant.subject.rendered, functions=functions)
        found.append(outcome(emulator, rendered, mutant.subject))
    return found


def emulator_of(mutants: Sequence[Mutant]) -> Emulator:
    """The functions of mutants, as one module."""
    return Emulator([m.broken for m in mutants] + _others(mutants))


def _others(mutants: Iterable[Mutant]) -> list[Function]:
    """The functions that are launched beside mutants."""
    return [f for m in mutants for f in m.subject.rendered.functions if f is not m.function]


def outcome(emulator: Emulator, rendered: Rendered, subject: Subject) -> str:
    """What becomes of a subject if other functions run in the place of its own."""
    got = [x.copy() for x in subject.arrays]
    try:
        emulator.run(rendered, got)
        subject.check(got)
    except CudaError as error:
        return error.text
    except AssertionError:
        return "wrong"
    return "equal"


def outcomes_of_head(head: str, calling: Sequence[Subject]) -> list[str]:
    """The same for subjects behind another head."""
    functions = {f.symbol: f for s in calling for f in s.rendered.functions}
    source = head + module_text(functions.values()).removeprefix(PRELUDE)
    emulator = Emulator(functions.values(), source)
    return [outcome(emulator, s.rendered, s) for s in calling]
