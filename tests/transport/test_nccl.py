"""NCCL: who may use it, what its result codes become, and what ends exchanges."""

from __future__ import annotations

import pytest

from spmd.base.config import config
from spmd.base.errors import CollectiveError, DeviceError, PeerError
from spmd.transport import nccl
from spmd.transport.origin import NOWHERE
from spmd.transport.threads import LocalGroup


def answers(monkeypatch, missing: str, gpus: tuple[str, str], setting: str = "auto") -> str:
    """What two ranks find out together: rank 1 may lack NCCL."""
    here = {0: "", 1: missing}

    def body(comm):
        monkeypatch.setattr(nccl, "missing", lambda: "")
        return nccl.disagreement(comm, [gpus[comm.rank]], here[comm.rank], NOWHERE)

    with config.override("nccl", setting):
        first, second = LocalGroup(2).run(body)
    assert first == second
    return first


@pytest.mark.parametrize(
    "missing, gpus, setting, reason",
    [
        ("", ("a 0", "a 1"), "auto", ""),
        ("", ("a 0", "b 0"), "always", ""),
        ("", ("a 0", "a 0"), "auto", "ranks 0, 1 share a GPU"),
        ("NCCL is missing", ("a 0", "a 1"), "auto", "rank 1: NCCL is missing"),
        ("", ("a 0", "a 1"), "never", "SPMD_NCCL=never"),
    ],
)
def test_ranks_agree_whether_they_use_it(monkeypatch, missing, gpus, setting, reason):
    assert answers(monkeypatch, missing, gpus, setting) == reason


def test_always_is_an_error_where_it_cannot_be(monkeypatch):
    monkeypatch.setattr(nccl.agreement, "reason", "ranks 0, 1 share a GPU")
    assert not nccl.is_agreed([], "", NOWHERE)
    with (
        config.override("nccl", "always"),
        pytest.raises(DeviceError, match="SPMD_NCCL=always: ranks 0, 1 share a GPU"),
    ):
        nccl.is_agreed([], "", NOWHERE)


class Library:
    """A part of CuPy's module."""

    available = True

    def __init__(self, version: int):
        self.get_version = lambda: version


def test_an_old_library_is_refused(monkeypatch):
    monkeypatch.setattr(nccl, "library", lambda: Library(20900))
    assert nccl.missing().startswith("NCCL is 20900, and spmd needs 21000 or newer")
    monkeypatch.setattr(nccl, "library", lambda: Library(22907))
    assert nccl.missing() == ""


class NcclError(RuntimeError):
    """As CuPy has it: it knows the codes up to 6."""

    def __init__(self, status: int):
        self.status = status
        super().__init__({k: f"NCCL_ERROR_{k}" for k in range(1, 7)}[status])


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 6, 7, 99])
def test_result_codes_are_errors_in_words(code):
    def call():
        raise NcclError(code)

    with pytest.raises(CollectiveError) as caught:
        nccl.attempt("add", call)
    meaning = nccl.CODES.get(code, "a code that spmd does not know")
    own = f"; NCCL_ERROR_{code}" if code < 7 else ""
    assert f"NCCL could not add: {meaning} (code {code}{own})" in caught.value.text


class Comm:
    """A communicator that can end."""

    def __init__(self, code: int = 0):
        self.code, self.ended = code, 0

    def check_async_error(self) -> None:
        if self.code:
            raise NcclError(self.code)

    def abort(self) -> None:
        self.ended += 1


def test_a_failure_ends_all_communicators(monkeypatch):
    watch = nccl.Watch()
    monkeypatch.setattr(nccl, "WATCH", watch)
    monkeypatch.setattr(nccl, "WORD_SECONDS", 0.01)
    monkeypatch.setattr(nccl, "LOOK_SECONDS", 0.0)
    good, bad = Comm(), Comm(6)
    nccl.NcclGroup({0: good, 1: bad})
    watch.add(lambda: True, 0)
    with pytest.raises(CollectiveError, match=r"failed \(code 6"):
        watch.settle()
    assert (good.ended, bad.ended) == (1, 1)
    watch.fail(PeerError("a later one"))
    assert good.ended == 1
    with pytest.raises(CollectiveError):
        watch.check()
