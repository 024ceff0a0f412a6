"""`spmd prepare`: what it leaves on the disk, a program that follows does not compile."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch import spmd_command
from spmd.base.errors import ArgumentError
from spmd.compile import precompile
from spmd.compile.native.llvm import compiler, object_cache
from spmd.compile.native.llvm.object_cache import ObjectCache

ROOT = Path(__file__).resolve().parents[2]

# Trains a small network by one step, with a convolution and a sort, and prints what was compiled.
PROGRAM = """
import numpy as np
import spmd, spmd.numpy as snp
from spmd import lax
from spmd.compile.native.llvm.modules import symbols_of
from pytest import MonkeyPatch
from tests.compile.native.llvm.emissions import note_emissions

emitted = note_emissions(MonkeyPatch())

def loss(w, v, x):
    h = snp.tanh(x @ w)
    image = lax.conv(h.reshape(1, 1, 30, 50), snp.ones((8, 1, 3, 3)), (1, 1), "SAME")
    waves = snp.sum(snp.sin(h) * snp.exp(-(h**2)) * snp.log(h**2 + 1) * snp.sqrt(2 + snp.tanh(h)))
    return snp.sum((h @ v) ** 2) + snp.sum(image) + snp.sort(h.reshape(-1))[3] + waves

w, v, x = np.ones((64, 50), "f"), np.ones((50, 10), "f"), np.ones((30, 64), "f")
spmd.jit(spmd.grad(loss, (0, 1, 2)))(w, v, x)
spmd.jit(lambda a, b: a @ b)(np.ones((300, 70)), np.ones((70, 1)))
print("made", *(name for texts in emitted for text in texts for name in symbols_of(text)))
"""
# Kernels are a program's own, whatever else it needs.
OWN = ("kernel_", "loop_")


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A process with a compile cache of its own."""
    variables = {**os.environ, "SPMD_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], env=variables, capture_output=True, text=True, timeout=300
    )


def compiled(folder: Path) -> list[str]:
    """What the program above compiles beside its own kernels."""
    done = run(folder, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    made = done.stdout.splitlines()[-1].split()[1:]
    assert any(name.startswith(OWN) for name in made), "the program was compiled, not found"
    return [name for name in made if not name.startswith(OWN)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> tuple[Path, str]:
    """A folder that `prepare` filled, and what it said."""
    folder = tmp_path_factory.mktemp("prepared") / "cache"
    done = run(folder, "-m", "spmd", "prepare")
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_after_it_a_program_compiles_only_its_own_kernels(prepared, tmp_path):
    folder, said = prepared
    copied = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert compiled(copied) == []
    assert any(name.startswith("tile_") for name in compiled(tmp_path / "other"))
    assert str(folder / "objects") in said and "products of f32" in said


def test_a_second_time_finds_all_of_it(prepared):
    folder, _ = prepared
    files = sorted(folder.rglob("*.o"))
    again = run(folder, "-m", "spmd", "prepare")
    assert again.returncode == 0, again.stderr
    assert " 0 compiled" in again.stdout.splitlines()[-1]
    assert sorted(folder.rglob("*.o")) == files


def test_a_folder_that_cannot_be_written_is_an_error_with_the_way_out(tmp_path):
    (tmp_path / "file").write_text("")
    done = run(tmp_path, "-m", "spmd", "prepare", "--cache-dir", str(tmp_path / "file" / "cache"))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "spmd prepare: cannot write to" in done.stderr and "SPMD_CACHE_DIR" in done.stderr


def test_the_command_spmd_passes_it_on(tmp_path, capfd):
    (tmp_path / "file").write_text("")
    wrong = str(tmp_path / "file")
    assert spmd_command.main(["prepare", "--cache-dir", wrong]) == 1
    assert f"cannot write to {wrong}" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        spmd_command.main(["trace", "anywhere", "--cache-dir", wrong])
    assert "unrecognized arguments: --cache-dir" in capfd.readouterr().err


def test_without_a_cache_there_is_nothing_to_prepare(monkeypatch):
    monkeypatch.setattr(precompile, "object_cache", ObjectCache(lambda: None))
    with pytest.raises(ArgumentError, match="the compile cache is switched off"):
        next(precompile.prepare())


def test_a_folder_that_others_may_write_to_is_refused(monkeypatch, tmp_path):
    tmp_path.chmod(0o777)
    monkeypatch.setattr(precompile, "object_cache", ObjectCache(lambda: tmp_path))
    with pytest.raises(ArgumentError, match="others may write to it"):
        next(precompile.prepare())


def test_what_root_made_is_read_by_others(monkeypatch, tmp_path):
    made = ObjectCache(lambda: tmp_path)
    made.store("ab" * 32, b"code")
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(object_cache.os, "getuid", lambda: owner + 1)
    for of_root, expected in ((True, b"code"), (False, None)):
        monkeypatch.setattr(object_cache, "ROOT_USER", owner if of_root else owner + 2)
        assert ObjectCache(lambda: tmp_path).load("ab" * 32) == expected


def test_texts_are_stored_one_by_one_and_not_loaded(monkeypatch, tmp_path):
    kept = ObjectCache(lambda: tmp_path)
    monkeypatch.setattr(compiler, "object_cache", kept)
    texts = [f"define i64 @stored{k}() {{\n  ret i64 {k}\n}}\n" for k in range(3)]
    first = compiler.Loader()
    assert first.host  # whose description is kept, too
    before = len(list(tmp_path.rglob("*.o")))
    first.store_texts(texts)
    assert first.compiled == 3 and len(list(tmp_path.rglob("*.o"))) == before + 3
    first.store_texts(texts)
    assert first.compiled == 3
    second = compiler.Loader()
    assert list(second.compile_texts([texts[1]])) == ["stored1"] and second.compiled == 0
