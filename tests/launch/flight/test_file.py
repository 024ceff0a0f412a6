"""The reader of flight files: whole ones, truncated ones, and those that are being written."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from launch.flight import file as flight_file
from launch.flight.file import FlightFileError, parse, read
from launch.supervise.last_collective import last_call
from spmd.transport import flight_recorder as flight
from tests.launch.flight.flight_files import GATHER, MS, PSUM, calls, flight_bytes, write


def test_reader_and_writer_know_one_layout():
    for name in ("MAGIC", "VERSION", "PAGE", "TEXT", "RECORDS", "LABELS", "NO_GROUP"):
        assert getattr(flight_file, name) == getattr(flight, name), name
    for name in ("HOST", "TRACING", "COMPILING", "PROGRAM", "COLLECTIVE", "DATA", "BREAKPOINT"):
        assert getattr(flight_file, name) == getattr(flight, name), name
    assert len(flight_file.PHASES) == flight.BREAKPOINT + 1
    assert flight.FILE_BYTES == len(flight_bytes(0, 1))


def test_a_whole_file():
    found = parse(flight_bytes(1, 4, calls(1, 2, open_last=True), phase=4, step=7, text="why"))
    assert (found.rank, found.size, found.count, found.step, found.text) == (1, 4, 2, 7, "why")
    assert found.host == "node1" and found.groups[0].ranks == (0, 1, 2, 3)
    first, second = found.collectives()
    assert first.name == "psum train.py:88" and first.completed - first.began == MS
    assert found.last_completed == first and found.open == second
    assert found.call(0, 2) == second and found.last_call(0) == 2 and found.last_call(5) == 0


@pytest.mark.parametrize("nbytes", [0, 10, 4095])
def test_less_than_a_page_is_no_file(nbytes: int):
    with pytest.raises(FlightFileError, match=f"{nbytes} bytes are no flight file"):
        parse(flight_bytes(0, 1)[:nbytes])


def test_another_file_and_another_version():
    with pytest.raises(FlightFileError, match="does not begin with SPMDFLT1"):
        parse(b"x" * 8192)
    data = bytearray(flight_bytes(0, 1))
    struct.pack_into("<q", data, 8, 9)
    with pytest.raises(FlightFileError, match="of version 9"):
        parse(bytes(data))


@pytest.mark.parametrize("nbytes", [4096, 4096 + 63, 4096 + 64 * 2, 4096 + 64 * 4096 + 300])
def test_a_truncated_file_gives_what_is_left(nbytes: int):
    found = parse(flight_bytes(0, 2, calls(1, 2, 3))[:nbytes])
    assert found.rank == 0
    assert len(found.records) == min(3, (nbytes - 4096) // 64)


def test_a_torn_label_is_unknown():
    data = bytearray(flight_bytes(0, 2, [(0, 0, 5, 6, 1), (1, 0, 7, 8, 2)]))
    at = data.index(b'"all_gather"')
    data[at : at + 300] = bytes(300)  # a rank that was killed while it wrote its last label
    names = [record.name for record in parse(bytes(data)).records]
    assert names == ["psum train.py:88", "an unknown collective"]


def test_label_0_is_no_name():
    """The recorder gives it to records whose label found no room in the table."""
    assert parse(flight_bytes(0, 1, [(-2, 0, 5, 6, 1)])).records[0].name == "an unknown collective"


def test_a_full_ring_keeps_the_youngest():
    numbers = range(1, 4101)
    found = parse(flight_bytes(0, 2, calls(*numbers)))
    # The oldest of the 4096 may be half overwritten.
    assert [r.call for r in found.records] == list(range(6, 4101))
    assert found.last_completed is not None and found.last_completed.call == 4100


def test_a_record_that_is_being_written_is_left_out():
    data = bytearray(flight_bytes(0, 2, calls(*range(1, 4097))))
    # The next record replaces the first: its fields are there, its number not yet.
    struct.pack_into("<7q", data, 4096 + 8, 3, 99, 0, 1, 1, 0, 4097)
    found = parse(bytes(data))
    assert 4097 not in [r.call for r in found.records]
    assert [r.sequence for r in found.records] == list(range(2, 4097))
    # A number from another place of the ring is torn too.
    struct.pack_into("<q", data, 4096 + 64 * 7, 99)
    assert 8 not in [r.sequence for r in parse(bytes(data)).records]


def test_senseless_words_do_no_harm():
    found = parse(flight_bytes(0, 2, [(77, 0, 5, 6, 1)], state=99, phase=-3))
    assert found.state == flight_file.RUNNING and found.phase == flight_file.HOST
    assert found.records[0].label == flight_file.UNKNOWN


def test_whether_the_process_runs(tmp_path: Path):
    program = (
        "import sys, time\n"
        "from spmd.transport.flight_recorder import FLIGHT\n"
        "FLIGHT.join(0, 2, sys.argv[1]); print('ready', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        path = tmp_path / "rank-0.flight"
        found = read(path)
        assert found.alive and found.process == child.pid and found.now is not None
        copied = tmp_path / "copy.flight"
        copied.write_bytes(path.read_bytes())
        assert read(copied).alive is False  # the process has another file in its memory
    finally:
        child.kill()
        child.communicate()
    assert read(path).alive is False


def test_the_newest_file_of_a_rank(tmp_path: Path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, text in ((first, "old"), (second, "new")):
        folder.mkdir()
        write(folder, 0, 1, text=text)
    data = bytearray((second / "rank-0.flight").read_bytes())
    (second / "rank-0.flight").write_bytes(data.replace(b"1700000000", b"1800000000"))
    flights, problems = flight_file.read_all([second, first])
    assert [f.text for f in flights] == ["new"] and not problems
    (tmp_path / "rank-3.flight").write_text("rubbish")
    flights, problems = flight_file.read_all([first, tmp_path])
    assert len(flights) == 1 and "rubbish" not in problems[0] and "7 bytes" in problems[0]


def test_the_reader_needs_the_standard_library_only():
    """Guards run isolated, without site packages."""
    folder = Path(flight_file.__file__).parents[1]
    program = (
        f"import sys; sys.path.insert(0, {os.fspath(folder.parent)!r})\n"
        "from launch.flight import file as flightfile, diagnosis as verdict\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('spmd', 'numpy')))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True
    )
    assert done.stdout == "[]\n", done.stderr


def test_labels_in_words():
    assert flight_file.operand(GATHER) == "float32[4]"
    assert flight_file.operand({"kind": "psum", "dtype": "bool", "shape": [], "op": "sum"}) == (
        "bool[] sum"
    )
    assert flight_file.label_name({"kind": "barrier"}) == "barrier"
    label = {"kind": "psum", "dtype": "bool", "shape": [], "path": "grads['w']", "axes": ["i"]}
    assert flight_file.operand(label) == "bool[] of grads['w'] over i"


def test_of_several_in_flight_the_first_is_the_one_that_is_open():
    flying = {**PSUM, "overlapped": True}
    records = [(0, 0, 10, 20, 1), (0, 0, 30, 0, 2), (0, 0, 40, 0, 3)]
    flight = parse(flight_bytes(0, 2, records, (flying, GATHER)))
    assert flight.open is not None and flight.open.call == 2 and flight.open.is_overlapped


def test_what_was_left_open_by_an_error_is_not_where_the_rank_is():
    records = [(0, 0, 10, 0, 1), (0, 0, 30, 40, 2)]
    assert parse(flight_bytes(0, 2, records)).open is None


@pytest.mark.parametrize("phase, waits", [(3, False), (4, True)], ids=["computes", "waits"])
def test_one_in_flight_holds_nobody_up_while_the_program_computes(
    tmp_path: Path, phase: int, waits: bool
):
    flying = {**PSUM, "overlapped": True}
    path = write(tmp_path, 0, 2, records=[(0, 0, 10, 0, 1)], labels=(flying,), phase=phase)
    call, _ = last_call(path)
    assert call is not None and call.done is not waits
