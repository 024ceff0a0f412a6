"""Checkpoints: what is saved comes back bit for bit, and a damaged file is never used."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import checkpoints, random
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, ShardingError
from spmd.checkpoints import folder, parts
from spmd.sharding import AxisType
from spmd.sharding import PartitionSpec as P


def example():
    return {
        "params": [{"w": random.normal(random.key(1), (3, 2)), "b": snp.zeros(2, snp.bfloat16)}],
        "count": snp.float32(7),
        "key": random.split(random.key(5), 3),
        "mask": np.array([True, False]),
        "loss": np.array([np.nan, -0.0, np.inf]),
        "epoch": 4,
        "rate": 0.1,
        "done": False,
    }


def is_key(leaf) -> bool:
    return hasattr(leaf, "dtype") and dtypes.is_key(leaf.dtype)


def bits(tree):
    def of(leaf):
        if is_key(leaf):
            leaf = random.key_data(leaf)
        array = np.asarray(leaf)
        return array.dtype.name, array.shape, array.tobytes(), type(leaf)

    return spmd.tree.map(of, tree)


def test_what_comes_back_is_what_was_saved(tmp_path: Path):
    checkpoints.save(tmp_path, 12, example())
    like = example() | {"done": True, "epoch": 0, "mask": np.ones(2, bool), "loss": np.ones(3)}
    like["params"] = spmd.tree.map(snp.ones_like, like["params"])
    step, tree = checkpoints.restore(tmp_path, like)
    assert step == 12
    assert bits(tree) == bits(example())


def test_the_newest_two_stay(tmp_path: Path):
    assert checkpoints.latest_step(tmp_path) is None
    assert checkpoints.restore(tmp_path / "nothing", 0) is None
    for step in (1, 2, 10):
        checkpoints.save(tmp_path, step, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000010"]
    assert checkpoints.latest_step(tmp_path) == 10
    assert checkpoints.restore(tmp_path, 0) == (10, 10)
    assert checkpoints.restore(tmp_path, 0, step=2) == (2, 2)
    assert checkpoints.restore(tmp_path, 0, step=1) is None


@pytest.mark.parametrize("name", ["manifest.json", "process-00000.safetensors"])
def test_flipped_bytes_are_noticed(tmp_path: Path, capsys, name: str):
    x = np.arange(8.0)
    checkpoints.save(tmp_path, 1, x)
    checkpoints.save(tmp_path, 2, x)
    file = tmp_path / "step-00000002" / name
    whole = file.read_bytes()
    for at in range(0, len(whole), 3):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        step, found = checkpoints.restore(tmp_path, x)
        assert step == 1 and np.array_equal(found, x)
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert checkpoints.restore(tmp_path, x)[0] == 1
    file.unlink()
    assert checkpoints.restore(tmp_path, x)[0] == 1
    assert "step-00000002 is damaged, not used" in capsys.readouterr().err


def test_a_kill_while_writing_leaves_the_former_one(tmp_path: Path, monkeypatch):
    checkpoints.save(tmp_path, 1, np.ones(3))

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(tmp_path, 2, np.zeros(3))
    monkeypatch.undo()
    assert checkpoints.restore(tmp_path, np.zeros(3))[0] == 1
    checkpoints.save(tmp_path, 3, np.zeros(3))
    assert not list(tmp_path.glob(".*"))  # what was left is swept


def test_a_step_that_is_saved_again_is_there_at_any_moment(tmp_path: Path, monkeypatch):
    checkpoints.save(tmp_path, 1, np.ones(3))
    rename, seen = os.replace, []

    def watched(source, target):
        rename(source, target)
        seen.append(checkpoints.restore(tmp_path, np.zeros(3)))

    monkeypatch.setattr(os, "replace", watched)
    checkpoints.save(tmp_path, 1, np.full(3, 2.0))
    assert [(step, x[0]) for step, x in seen] == [(1, 1), (1, 2)]
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_a_checkpoint_of_the_former_format_is_read_and_gives_way(tmp_path: Path):
    shutil.copy(Path(__file__).parent / "golden/checkpoints/step-00000007.npz", tmp_path)
    want = {
        "w": snp.arange(6, dtype=snp.float32).reshape(2, 3),
        "b": snp.array([1.5, -2], snp.bfloat16),
        "key": random.split(random.key(5), 3),
        "mask": np.array([True, False]),
        "epoch": 4,
        "loss": np.array([np.nan, -0.0]),
    }
    step, found = checkpoints.restore(tmp_path, want)
    assert step == 7 and bits(found) == bits(want)
    columns = spmd.NamedSharding(spmd.make_mesh((3,), ("x",)), spmd.P(None, "x"))
    like = want | {"w": spmd.ShapeDtypeStruct((2, 3), np.float32, sharding=columns)}
    w = checkpoints.restore(tmp_path, like)[1]["w"]
    assert w.sharding == columns
    np.testing.assert_array_equal(w, want["w"])
    checkpoints.save(tmp_path, 7, want)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000007"]
    assert bits(checkpoints.restore(tmp_path, want)[1]) == bits(want)


# ---- arrays over a mesh --------------------------------------------------------------------------

MESHES = {
    "one axis": ((4,), ("x",), AxisType.Auto, P("x")),
    "columns": ((4,), ("x",), AxisType.Explicit, P(None, "x")),
    "two axes": ((2, 2), ("x", "y"), AxisType.Explicit, P("y", "x")),
    "both of one dim": ((2, 2), ("x", "y"), AxisType.Auto, P(("x", "y"))),
    "replicated": ((2, 2), ("x", "y"), AxisType.Explicit, P("y")),
    "three devices": ((3,), ("z",), AxisType.Explicit, P("z")),
}


def sharding_of(name: str) -> spmd.NamedSharding:
    sizes, axes, kind, spec = MESHES[name]
    return spmd.NamedSharding(spmd.make_mesh(sizes, axes, kind), spec)


@pytest.mark.parametrize("there", MESHES)
@pytest.mark.parametrize("here", MESHES)
def test_arrays_come_back_over_another_mesh(tmp_path: Path, there: str, here: str):
    keys = random.split(random.key(0), (12, 4))
    values = {"w": snp.arange(48.0).reshape(12, 4), "h": snp.ones((12, 4), snp.bfloat16) / 3}
    tree = spmd.device_put(values | {"key": keys}, sharding_of(there))
    checkpoints.save(tmp_path, 1, tree)
    target = sharding_of(here)
    structs = spmd.tree.map(
        lambda x: spmd.ShapeDtypeStruct(x.shape, x.dtype, sharding=target), tree
    )
    placed = spmd.device_put(spmd.tree.map(snp.zeros_like, values) | {"key": keys}, target)
    for like in (structs, placed):
        _, found = checkpoints.restore(tmp_path, like)
        for name, x in found.items():
            assert x.sharding == target and spmd.typeof(x) is spmd.typeof(placed[name])
        assert bits(found) == bits(tree)
    assert bits(checkpoints.restore(tmp_path, values | {"key": keys})[1]) == bits(tree)


def test_each_element_is_written_once_and_only_what_is_needed_is_read(tmp_path: Path, monkeypatch):
    """Of a replicated array one copy; of files, the blocks that a process' devices need."""
    monkeypatch.setattr(parts, "BLOCK", 64)
    x = spmd.device_put(np.arange(256, dtype=np.float32).reshape(16, 16), sharding_of("replicated"))
    checkpoints.save(tmp_path, 1, x)
    opened = folder.open_step(tmp_path, 1)
    assert [part["box"] for part in opened.leaves[0]["parts"]] == [
        [[0, 8], [0, 16]],
        [[8, 16], [0, 16]],
    ]
    digests: list[int] = []
    digest = parts.digest_of_bytes
    monkeypatch.setattr(
        parts, "digest_of_bytes", lambda data: digests.append(len(data)) or digest(data)
    )
    found = opened.read(0, ((7, 9), (0, 16)))
    np.testing.assert_array_equal(found, np.asarray(x)[7:9])
    assert digests[1:] == [64, 64]  # after the head: a row of each part


def test_the_files_are_those_of_safetensors(tmp_path: Path):
    """Read by what the format's description says, and nothing else."""
    tree = {
        "w": spmd.device_put(snp.arange(8.0), sharding_of("one axis")),
        "b": snp.ones(3, snp.bfloat16),
        "i": np.arange(3, dtype=np.int8),
        "c": np.array([1 + 2j]),
        "key": random.key(3),
        "e": np.zeros((0, 2), np.float32),
    }
    checkpoints.save(tmp_path, 1, tree)
    data = (tmp_path / "step-00000001" / "process-00000.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert data[8:9] == b"{"
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    assert all(type(v) is str for v in header.pop("__metadata__").values())
    kinds = {"F32": np.float32, "BF16": snp.bfloat16, "I8": np.int8, "U8": np.uint8}
    kinds["U32"] = np.uint32
    spans = sorted(row["data_offsets"] for row in header.values())
    assert spans[0][0] == 0 and spans[-1][1] == len(rest)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))  # no holes
    arrays = {
        name: np.frombuffer(rest[slice(*row["data_offsets"])], kinds[row["dtype"]]).reshape(
            row["shape"]
        )
        for name, row in header.items()
    }
    for k in range(4):
        np.testing.assert_array_equal(arrays[f"['w'] {2 * k}:{2 * k + 2}"], [2 * k, 2 * k + 1])
    np.testing.assert_array_equal(arrays["['b']"], tree["b"])
    np.testing.assert_array_equal(arrays["['i']"], tree["i"])
    np.testing.assert_array_equal(arrays["['key']"], random.key_data(tree["key"]))
    np.testing.assert_array_equal(arrays["['c']"].view(np.complex128)[:, 0], tree["c"])
    assert arrays["['e']"].shape == (0, 2)


def test_arrays_that_cannot_be_saved_or_laid_out_are_named(tmp_path: Path):
    mesh = spmd.make_mesh((4,), ("x",))
    terms = spmd.reshard(snp.ones(4), spmd.NamedSharding(mesh, P(unreduced={"x"})))
    with pytest.raises(ArgumentError, match=r"tree\['t'\] is f32\[4\]\{U:x\}: .* Make the sum"):
        checkpoints.save(tmp_path, 1, {"t": terms})
    gone = snp.ones(3)
    gone.delete()
    with pytest.raises(ArgumentError, match=r"tree\['t'\] \(float32\[3\]\) was deleted"):
        checkpoints.save(tmp_path, 1, {"t": gone})
    checkpoints.save(tmp_path, 1, {"t": np.ones(6, np.float32)})
    rows = spmd.NamedSharding(mesh, P("x"))
    like = {"t": spmd.ShapeDtypeStruct((6,), np.float32, sharding=rows)}
    with pytest.raises(ShardingError, match=r"restore: tree\['t'\] .*6 is not a multiple of 4"):
        checkpoints.restore(tmp_path, like)


def test_what_does_not_fit_is_named(tmp_path: Path):
    checkpoints.save(tmp_path, 5, {"w": np.zeros((2, 3), np.float32), "b": 1})
    with pytest.raises(
        ArgumentError, match=r"tree\['w'\] is float32\[2, 3\] in the checkpoint of "
    ):
        checkpoints.restore(tmp_path, {"w": np.zeros((3, 2), np.float32), "b": 1})
    with pytest.raises(ArgumentError, match=r"it lacks tree\['v'\], and has tree\['w'\] besides"):
        checkpoints.restore(tmp_path, {"v": np.zeros(1), "b": 1})
    with pytest.raises(ArgumentError, match=r"tree\['w'\] is object; leaves are arrays"):
        checkpoints.save(tmp_path, 6, {"w": object()})
    with pytest.raises(ArgumentError, match="step=-1"):
        checkpoints.save(tmp_path, -1, 0)
