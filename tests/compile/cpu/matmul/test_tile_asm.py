"""Register tiles written as assembly: bit for bit what LLVM makes of the same tiles."""

import ctypes
from itertools import product

import numpy as np
import pytest

from spmd.compile.cpu.matmul.tile_asm import can_assemble
from spmd.compile.cpu.matmul.tile_ir import Tile
from spmd.compile.native.llvm.compiler import Host, Loader, loader
from spmd.compile.native.llvm.modules import is_control, symbols_of
from spmd.compile.native.llvm.vectors import vectors

WIDE, NARROW = 64, 32
DTYPES = {"f32": np.float32, "f64": np.float64}
# Rows and vectors; both ways of keeping operands in registers, the most rows and registers, and one
# k or two a round.
TILES = {
    WIDE: [(1, 8, 1), (3, 8, 2), (6, 4, 2), (6, 4, 1), (8, 3, 1), (8, 2, 1), (7, 1, 1)],
    NARROW: [(1, 8, 1), (2, 6, 1), (3, 4, 2), (4, 3, 1), (6, 2, 2), (6, 1, 1)],
}
FUNCTION = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p, *[ctypes.c_int64] * 10])

pytestmark = pytest.mark.skipif(
    not (can_assemble(loader.host) and loader.host.vector_bytes == WIDE),
    reason="this processor has no AVX-512, or this system other calls",
)


@pytest.fixture(scope="module")
def loaders():
    """Two, as the tiles of both have the same names."""
    return Loader(), Loader()


def function_of(tile: Tile, own: Loader):
    return FUNCTION(own.compile_texts([tile.text()], optimize=True)[tile.symbol])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("carried", DTYPES)
@pytest.mark.parametrize("vector_bytes", TILES)
def test_tiles_have_the_bits_of_those_of_llvm(vector_bytes, carried, masked, loaders):
    rng = np.random.default_rng(vector_bytes)
    v, dtype = vectors(carried, vector_bytes), DTYPES[carried]
    for rows, width, steps in TILES[vector_bytes]:
        shape = (v, rows, width, masked, steps)
        functions = [
            function_of(Tile(*shape, assembled), own)
            for assembled, own in zip((False, True), loaders, strict=True)
        ]
        cuts = (1, v.lanes - 1, v.lanes) if masked else (v.lanes,)
        present = range(max(rows - 2, 1), rows + 1)
        for k, there, cut, adds in product((0, 2, 6, 34), present, cuts, (0, 1)):
            columns = (width - 1) * v.lanes + cut
            # B ends where it ends: elements behind it would be found in the sums.
            a = rng.standard_normal((k + 1, there)).astype(dtype).T
            b = rng.standard_normal((k + 1, columns)).astype(dtype)
            frame = rng.standard_normal((there + 2, width * v.lanes + 9)).astype(dtype)
            results = []
            for function in functions:
                made = frame.copy()
                c = made[1:, 4:]
                left, right = (a.ctypes.data, *a.strides), (b.ctypes.data, b.strides[0], k)
                function(*left, *right, c.ctypes.data, c.strides[0], there, columns, adds)
                results.append(made)
            np.testing.assert_array_equal(*(r.view(f"u{v.nbytes}") for r in results))
            inside = np.zeros(frame.shape, bool)
            inside[1 : there + 1, 4 : columns + 4] = True
            np.testing.assert_array_equal(results[1][~inside], frame[~inside])
            expected = (a[:, :k] @ b[:k]) + adds * frame[inside].reshape(there, columns)
            np.testing.assert_allclose(
                results[1][inside].reshape(there, columns), expected, rtol=1e-3, atol=1e-4
            )


def test_registers_of_the_caller_are_as_they_were(loaders):
    """All rows and columns of a product of the widest tiles, called by code of LLVM."""
    v = vectors("f32", WIDE)
    made = Tile(v, 8, 3, True, 1, True).text()
    pushed = [line.split("%")[1] for line in made.split('"') if line.startswith("push")]
    popped = [line.split("%")[1] for line in made.split('"') if line.startswith("pop")]
    assert pushed == popped[::-1]
    named = {r for r in ("rbx", "rbp", "r12", "r13", "r14", "r15") if f"%{r}" in made}
    assert named == set(pushed)


def test_assembly_needs_no_decisions_of_llvm():
    tile = Tile(vectors("f32", WIDE), 6, 4, False, 2, True)
    assert is_control((tile.text(), True))
    assert symbols_of(tile.text()) == (tile.symbol,)


@pytest.mark.parametrize(
    "features, expected",
    [
        ("+avx2,+fma", True),
        ("+avx2", False),
        ("+sse4.2,+fma", False),
        ("+avx512f,+avx512vl,+fma,+bmi2", True),
        ("+avx512f,+avx512vl,+fma", False),
    ],
)
def test_processors_without_the_instructions_have_the_tiles_of_llvm(features, expected):
    assert can_assemble(Host("x86-64", features, "22.1.0")) is expected
