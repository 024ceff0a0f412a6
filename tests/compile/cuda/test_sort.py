"""Sorts as launches on an emulated GPU, in checked mode, against NumPy's stable sorts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd import numpy as snp
from spmd.base.config import config
from spmd.compile.cuda.kernel import module_text
from spmd.compile.cuda.launch import SHARED_WITHOUT_ASKING, Rendered
from spmd.compile.cuda.nvrtc import compile_cubin
from spmd.compile.cuda.sort import TILE, render_sort
from spmd.compile.kernel.dtypes import DTYPES
from spmd.compile.lower.steps import TEMP, Buffer, Ref, Sort, SortRows
from tests.compile.cuda.emulated import Emulator

# Rows and their lengths: one key, rows that share a block, the edges of tiles, an odd number of
# runs, and a run whose neighbour is short.
SHAPES = [(1, 1), (5, 1), (40, 7), (3, 64), (9, 65), (2, TILE), (3, TILE + 1), (1, 3 * TILE)]
SHAPES += [(2, 2 * TILE + 5)]
NUMBERS = ("f32", "f64", "i32", "u32", "i64", "u64")


def refs(count: int) -> tuple[Ref, ...]:
    """Places that are told apart, and nothing else."""
    return tuple(Ref(Buffer(TEMP, 0, k)) for k in range(count))


@dataclass(eq=False)
class Case:
    """A sort as launches, its arrays, and what the first `kept` keys of the result rows are."""

    rendered: Rendered
    arrays: list[np.ndarray]
    wanted: np.ndarray

    def check(self, got: list[np.ndarray]) -> None:
        rows = got[-1].reshape(len(self.wanted), -1)[:, : self.wanted.shape[1]]
        assert rows.tobytes() == np.ascontiguousarray(self.wanted).tobytes()


def numbers_case(dtype: str, rows: int, size: int) -> Case:
    """Numbers with many that are equal, and NaNs and zeros with other bits."""
    rng = np.random.default_rng(rows * size)
    given = rng.integers(0, max(size // 3, 2), (rows, size)).astype(DTYPES[dtype].numpy)
    if dtype[0] in "if":
        given = given - given.dtype.type(size // 6)
    if dtype[0] == "f":
        given[rng.random(given.shape) < 0.1] = -0.0
        given[rng.random(given.shape) < 0.1] = np.nan
        given[rng.random(given.shape) < 0.1] *= -1  # NaNs of both signs
        given[rng.random(given.shape) < 0.02] = -np.inf
    order = np.argsort(given, axis=1, kind="stable")
    step = SortRows(rows, size, dtype, refs(2))
    arrays = [given.reshape(-1), np.zeros(rows * size, given.dtype)]
    return Case(render_sort(step), arrays, np.take_along_axis(given, order, 1))


def words_case(rows: int, size: int, kept: int | None) -> Case:
    """Words with few upper halves and any lower ones: only a stable sort gets them right."""
    rng = np.random.default_rng(rows + size)
    upper = rng.integers(0, 1 + size // 4, (rows, size), np.uint64) << np.uint64(32)
    words = upper | rng.integers(0, 1 << 32, (rows, size), np.uint64)
    step = Sort(rows, size, kept, refs(1))
    if kept is None:
        order = np.argsort(words >> np.uint64(32), axis=1, kind="stable")
        wanted = np.take_along_axis(words, order, 1)
    else:
        wanted = np.sort(words, axis=1)[:, :kept]
    return Case(render_sort(step), [words.reshape(-1)], wanted)


def cases() -> list[Case]:
    found = [numbers_case("f32", *shape) for shape in SHAPES]
    found += [numbers_case(dtype, 2, TILE + 300) for dtype in NUMBERS]
    found += [words_case(*shape, None) for shape in SHAPES]
    found += [words_case(*shape, 1) for shape in SHAPES]
    return found + [words_case(2, size, 64) for size in (64, 200, TILE + 3, 20 * TILE + 70)]


def functions(made: list[Case]):
    return list({f.symbol: f for case in made for f in case.rendered.functions}.values())


@pytest.mark.parametrize("mode", ["plain", "checked"])
def test_rows_come_in_order_and_equal_keys_in_the_order_they_came(mode):
    made = cases()
    emulator = Emulator(functions(made), mode=mode)
    for case in made:
        got = [x.copy() for x in case.arrays]
        emulator.run(case.rendered, got)
        case.check(got)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_sorts_compile_without_spills(arch):
    found = functions(cases())
    usage = compile_cubin(module_text(found), arch).usage
    for function in found:
        assert usage[function.symbol].spill_stores == 0, function.text
        assert function.launch.shared <= SHARED_WITHOUT_ASKING


def test_the_least_words_of_long_rows_are_not_merged():
    """Each tile keeps a few, so that a row is read once; all else is a sixteenth of it."""
    rendered = render_sort(Sort(1, 1 << 20, 64, refs(1)))
    assert [f.launch.grid for f in rendered.functions] == [1024, 64, 4, 1]
    assert [elements for _, elements in rendered.temporaries] == [1 << 16, 1 << 12, 1 << 8]


def test_a_sort_of_more_elements_than_an_int_counts():
    function = render_sort(SortRows(3, 1 << 30, "i32", refs(2))).functions[-1]
    assert "i64" in function.text and "int>" not in function.text


# ---- programs ----------------------------------------------------------------------------------

X = np.array([[3, -1, np.nan, 0.0, -0.0, 2, np.inf, -1], [1, 1, 0, 5, 4, 4, -2, 0]], np.float32)
RNG = np.random.default_rng(0)
DTYPE_NAMES = [
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "bool"),
]


def of_dtype(name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = RNG.integers(0, 9, shape)
    if "complex" in name:
        values = values % 3 + 1j * (values // 3)
    return values.astype(snp.dtype(name))


PROGRAMS = {
    "sort": (snp.sort, (X,)),
    "sort along the first dim": (lambda x: snp.sort(x, axis=0), (X,)),
    "descending": (lambda x: snp.sort(x, descending=True), (X,)),
    "argsort": (snp.argsort, (X,)),
    "top_k": (lambda x: lax.top_k(x, 3), (X,)),
    "top_k of all": (lambda x: lax.top_k(x, 100), (RNG.standard_normal((3, 100)),)),
    "three operands": (lambda x, y: lax.sort((x, y, x * 2), num_keys=1), (X, RNG.random(X.shape))),
    "two keys": (
        lambda x, y: lax.sort((x, y, x + y), num_keys=2),
        (of_dtype("int32", (3, 50)), of_dtype("float64", (3, 50))),
    ),
    "median and unique": (lambda x: (snp.median(x), snp.unique(x, size=6)), (X[1],)),
    "in a loop": (
        lambda x: lax.fori_loop(0, 3, lambda i, y: snp.sort(y * -1 + i, axis=-1), x),
        (of_dtype("int32", (4, 30)),),
    ),
    "vmapped": (spmd.vmap(lambda x: lax.sort_key_val(x, x[::-1])), (of_dtype("int16", (4, 30)),)),
    "gradient": (spmd.grad(lambda x: (snp.sort(x) * snp.arange(8.0)).sum()), (X[1],)),
} | {
    f"{what.__name__} of {name}": (what, (of_dtype(name, (3, 40)),))
    for what, name in itertools.product((snp.sort, snp.argsort), DTYPE_NAMES)
}


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("group", range(4))
def test_programs_sort_as_those_of_the_cpu_without_a_step_of_the_host(group):
    names = list(PROGRAMS)[group::4]
    assert names

    def all_of(arrays):
        return [PROGRAMS[name][0](*given) for name, given in zip(names, arrays, strict=True)]

    arrays = [PROGRAMS[name][1] for name in names]
    with config.override("enable_x64", True):
        check(names, all_of, arrays)


def check(names: list[str], all_of: Callable[..., Any], arrays: list[Any]) -> None:
    compiled = spmd.jit(all_of).lower(arrays).compile()
    assert compiled.runtime_executable().backend.platform == "cuda"
    text = compiled.as_text()
    assert "host" not in text, text
    found = compiled(arrays)
    with config.override("platform", "cpu"):
        wanted: Any = spmd.jit(all_of)(arrays)
    for name, x, y in zip(names, found, wanted, strict=True):
        leaves = zip(*map(spmd.tree_util.tree_leaves, (x, y)), strict=True)
        for got, value in leaves:
            assert got.device.platform == "gpu"
            assert got.dtype == value.dtype
            assert np.asarray(got).tobytes() == np.asarray(value).tobytes(), name
