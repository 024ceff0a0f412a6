"""The flight recorder: what stands in memory after which call, read as plain words."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from spmd.transport import flight_recorder as flight
from spmd.transport.flight_recorder import RECORDS, Flight, GroupLog
from spmd.transport.single import SingleCommunicator
from spmd.transport.threads import LocalGroup


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Flight:
    """A record of its own in place of this process's."""
    made = Flight()
    monkeypatch.setattr(flight, "FLIGHT", made)
    return made


def words(recorder: Flight, first: int, count: int) -> list[int]:
    return list(struct.unpack_from(f"<{count}q", recorder.bytes, 8 * first))


def record(recorder: Flight, number: int) -> list[int]:
    return words(recorder, flight.RING_WORD + 8 * (number % RECORDS), 8)


def labels(recorder: Flight) -> list[dict]:
    used = recorder.words[flight.LABEL_BYTES]
    text = bytes(recorder.bytes[flight.LABELS : flight.LABELS + used]).decode()
    return [json.loads(line) for line in text.splitlines()]


def test_the_file_of_a_rank_holds_its_state_and_labels(recorder: Flight, tmp_path: Path):
    address = recorder.address
    before = recorder.label("compile", program="f")
    recorder.join(3, 8, str(tmp_path))
    raw = (tmp_path / "rank-3.flight").read_bytes()
    assert len(raw) == 4096 + 64 * 4096 + 512 * 1024
    magic, version, pid, rank, size, count, state, phase = struct.unpack_from("<8q", raw)
    assert magic.to_bytes(8, "little") == b"SPMDFLT1" and version == 1
    assert (pid, rank, size, count, state, phase) == (os.getpid(), 3, 8, 0, 0, 0)
    assert struct.unpack_from("<q", raw, 80) == (-1,)
    # The file holds what was written before there was one, and what is written from now on.
    assert labels(recorder)[before] == {"id": 0, "kind": "compile", "program": "f"}
    assert recorder.address == address
    recorder.set_step(17)
    recorder.end(flight.RAISED, "rank 3: ValueError at train.py:4: ∞")
    raw = (tmp_path / "rank-3.flight").read_bytes()
    assert struct.unpack_from("<q", raw, 80) == (17,)
    assert struct.unpack_from("<q", raw, 48) == (flight.RAISED,)
    assert raw[1024:4096].split(b"\0")[0].decode() == "rank 3: ValueError at train.py:4: ∞"


def test_a_folder_that_cannot_be_had_is_no_failure(recorder: Flight, tmp_path: Path, capsys):
    (tmp_path / "file").write_text("")
    recorder.join(0, 2, str(tmp_path / "file" / "below"))
    assert "not recorded there" in capsys.readouterr().err
    assert recorder.words[flight.SIZE] == 2 and recorder.path is None


def test_records_begin_are_entered_and_complete(recorder: Flight):
    log = GroupLog(flight.WORLD, "world", range(4))
    label = recorder.label("psum", dtype="float32", source="train.py:8")
    place = log.begin(label, 400)
    sequence, of, nbytes, group, enqueued, entered, completed, call = record(recorder, 0)
    assert (sequence, of, nbytes, group, call) == (1, label, 400, 0, 1)
    assert enqueued > 0 and entered == completed == 0
    assert recorder.words[flight.PHASE] == flight.COLLECTIVE
    recorder.entered(place)
    log.completed(place)
    *_, enqueued, entered, completed, _ = record(recorder, 0)
    assert enqueued <= entered <= completed
    assert recorder.words[flight.PHASE] == flight.HOST
    assert recorder.words[flight.COUNT] == 1


def test_the_ring_keeps_the_last_records(recorder: Flight):
    for k in range(RECORDS + 3):
        recorder.completed(recorder.begin(0, k, 0, k, entered=True))
    assert recorder.words[flight.COUNT] == RECORDS + 3
    assert [record(recorder, k)[0] for k in (0, 1, 2, 3)] == [4097, 4098, 4099, 4]
    assert record(recorder, 2)[2] == RECORDS + 2


def test_labels_are_written_once_and_a_full_table_is_no_failure(recorder: Flight):
    first = recorder.label("psum", dtype="float32", op="")
    assert recorder.label("psum", dtype="float32", op="") == first
    assert labels(recorder) == [{"id": first, "kind": "psum", "dtype": "float32"}]
    many = [recorder.label("psum", source="x" * 1000 + str(k)) for k in range(600)]
    assert many[0] == 1 and many[-1] == 0
    assert recorder.words[flight.LABEL_BYTES] <= flight.LABEL_TABLE_BYTES
    assert labels(recorder)[-1]["id"] == len(labels(recorder)) - 1


@pytest.mark.parametrize(
    "said",
    [
        *("a plain text", 'C:\\runs\\"new"', "a\tb\n", "\x7f", "größe", "\ud800"),
        *(-3, True, 0.5, [], [4, 0], ["a", ["b\n", 1]]),
    ],
)
def test_labels_hold_any_text_and_numbers(recorder: Flight, said: object):
    recorder.label("psum", said=said if not isinstance(said, list) else json_tuple(said))
    assert labels(recorder) == [{"id": 0, "kind": "psum", "said": said}]


def json_tuple(items: list) -> tuple:
    """The tuple, of tuples, that JSON reads back as this list."""
    return tuple(json_tuple(item) if isinstance(item, list) else item for item in items)


def test_each_call_of_a_communicator_is_one_record(recorder: Flight):
    comm = SingleCommunicator()
    comm.log = GroupLog(flight.WORLD, "world", [0])
    comm.all_reduce(np.ones(3, np.float32))
    found = record(recorder, 0)
    said = labels(recorder)[found[1]]
    assert found[2] == 12 and found[6] >= found[5] > 0
    assert said["kind"] == "all_reduce" and said["dtype"] == "float32" and said["shape"] == [3]
    assert said["source"].startswith(f"{__file__}:")
    comm.all_gather_object({"any": "thing"})
    comm.barrier()
    assert recorder.words[flight.COUNT] == 3  # what a call does inside is part of it


def test_a_program_s_collective_is_one_record(recorder: Flight):
    comm = SingleCommunicator()
    log = comm.log = GroupLog(flight.WORLD, "world", [0])
    place = log.begin(recorder.label("psum"), 4)
    assert record(recorder, 0)[5] == 0
    comm.all_reduce(np.ones(1))
    assert record(recorder, 0)[5] > 0  # entered when its data was on the way
    log.completed(place)
    assert recorder.words[flight.COUNT] == 1


def test_the_record_of_a_call_that_raised_stays_open(recorder: Flight):
    comm = SingleCommunicator()
    comm.log = GroupLog(flight.WORLD, "world", [0])

    with pytest.raises((AttributeError, pickle.PicklingError)):
        comm.all_gather_object(lambda: "no function without a name can be pickled")
    assert record(recorder, 0)[6] == 0
    assert recorder.words[flight.PHASE] == flight.HOST
    comm.all_reduce(np.ones(1))
    assert record(recorder, 1)[6] > 0


def test_groups_have_the_same_number_on_all_their_ranks(recorder: Flight):
    def body(comm):
        comm.log = GroupLog(flight.WORLD, "world", range(4))
        rows, columns = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
        return [(part.log.group, part.log.ranks) for part in (rows, columns)]

    found = LocalGroup(4).run(body)
    assert [rows[1] for rows, _ in found] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [columns[1] for _, columns in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    by_ranks: dict = {}
    for group, ranks in [part for both in found for part in both]:
        by_ranks.setdefault(ranks, set()).add(group)
    assert all(len(groups) == 1 for groups in by_ranks.values())
    assert len({group for groups in by_ranks.values() for group in groups}) == 4


def test_simulated_ranks_leave_no_records(recorder: Flight):
    LocalGroup(3).run(lambda comm: comm.barrier())
    assert recorder.words[flight.COUNT] == 0


def test_phases_of_threads_end_in_any_order(recorder: Flight):
    first, second = (
        recorder.phase(flight.TRACING),
        recorder.phase(flight.COMPILING),
    )
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert recorder.words[flight.PHASE] == flight.COMPILING
    with recorder.phase(flight.TRACING), recorder.phase(flight.COMPILING):
        pass
    assert recorder.words[flight.PHASE] == flight.COMPILING
    second.__exit__(None, None, None)
    assert recorder.words[flight.PHASE] == flight.HOST


def test_phases_nest(recorder: Flight):
    with recorder.phase(flight.TRACING):
        with recorder.phase(flight.COMPILING, "compile", "step"):
            assert recorder.words[flight.PHASE] == flight.COMPILING
        assert recorder.words[flight.PHASE] == flight.TRACING
    assert recorder.words[flight.PHASE] == flight.HOST
    found = record(recorder, 0)
    assert found[3] == flight.NO_GROUP and found[6] >= found[4] == found[5] > 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_writes_nowhere(recorder: Flight, tmp_path: Path):
    recorder.join(0, 2, str(tmp_path))
    child = os.fork()
    if not child:
        recorder.forget()
        recorder.completed(recorder.begin(0, 1, 0, 1, entered=True))
        os._exit(recorder.words[flight.COUNT])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert recorder.words[flight.COUNT] == 0
