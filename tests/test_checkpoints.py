"""Checkpoints: what is saved comes back bit for bit, and a damaged file is never used."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import checkpoints, random
from spmd.base import dtypes
from spmd.base.errors import ArgumentError


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
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002.npz", "step-00000010.npz"]
    assert checkpoints.latest_step(tmp_path) == 10
    assert checkpoints.restore(tmp_path, 0) == (10, 10)
    assert checkpoints.restore(tmp_path, 0, step=2) == (2, 2)
    assert checkpoints.restore(tmp_path, 0, step=1) is None


def test_flipped_bytes_are_noticed(tmp_path: Path, capsys):
    x = np.arange(8.0)
    checkpoints.save(tmp_path, 1, x)
    checkpoints.save(tmp_path, 2, x)
    file = tmp_path / "step-00000002.npz"
    whole = file.read_bytes()
    for at in range(0, len(whole), 5):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        step, found = checkpoints.restore(tmp_path, x)
        # Some bytes mean nothing (dates, attributes); no wrong value may come out.
        assert step in (1, 2) and np.array_equal(found, x)
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert checkpoints.restore(tmp_path, x)[0] == 1
    assert "step-00000002.npz is damaged, not used" in capsys.readouterr().err


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
