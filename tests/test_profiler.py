"""Timelines of one process: what is kept, and what is not while none is under way."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

import spmd
from launch.flight.file import parse_trace
from spmd.errors import ArgumentError
from spmd.transport import flight_recorder as flight
from spmd.transport import trace_export
from spmd.transport.flight_recorder import FLIGHT


def kept(folder: Path) -> list[tuple[str, str]]:
    """Kind and name of the records of a timeline, by their begin."""
    found, lost = parse_trace((folder / "rank-0.trace").read_bytes())
    assert lost == 0
    assert all(record.completed >= record.enqueued > 0 for record in found.records)
    return [(r.label["kind"], r.label.get("program", "")) for r in found.records]


def test_programs_compiles_and_names(tmp_path: Path):
    def double_it(x):
        return x * 2

    f = spmd.jit(double_it)
    f(np.float32(1)), f(np.float32(1)), f(np.float32(1))  # calls made ready before
    with spmd.profiler.trace(tmp_path):
        for k in range(4):
            with spmd.profiler.StepTraceAnnotation("train", step_num=k):
                f(np.float32(k))
        with spmd.profiler.TraceAnnotation("augment", images=3):
            spmd.jit(lambda x: x - 1)(np.float32(1))
        with spmd.debug.loading():
            pass
    f(np.float32(1))
    found = kept(tmp_path)
    assert [name for kind, name in found if kind == "step"] == [f"train {k}" for k in range(4)]
    assert found.count(("program", "double_it")) == 4
    at = found.index(("annotation", "augment (images=3)"))
    assert found[at + 1 :] == [
        ("trace", "<lambda>"),
        ("compile", "<lambda>"),
        ("program", "<lambda>"),
        ("data", ""),
    ]
    names = {e["name"] for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"train 3", "double_it", "compile <lambda>", "augment (images=3)"} <= names


def test_without_a_timeline_programs_leave_no_record():
    f = spmd.jit(lambda x: x + 1)
    for _ in range(3):
        f(np.float32(1))
    count = FLIGHT.words[flight.COUNT]
    with spmd.profiler.TraceAnnotation("nothing"):
        f(np.float32(1))
    assert FLIGHT.words[flight.COUNT] == count


def test_mapped_programs(tmp_path: Path):
    f = spmd.pmap(lambda x: x * 2, axis_name="i")
    x = np.ones((2, 3), np.float32)
    with spmd.profiler.trace(tmp_path):
        for _ in range(4):
            f(x)
    assert [kind for kind, _ in kept(tmp_path)].count("program") == 4


def test_more_records_than_the_ring_holds(tmp_path: Path):
    tracer = trace_export.start(tmp_path)
    label = FLIGHT.label("annotation", program="many")
    outer = FLIGHT.begin(FLIGHT.label("annotation", program="outer"), 0)
    for _ in range(3 * flight.RECORDS // 1000):
        for _ in range(1000):
            FLIGHT.completed(FLIGHT.begin(label, 0))
        tracer.drain()
    FLIGHT.completed(outer)
    spmd.profiler.stop_trace()
    found, lost = parse_trace((tmp_path / "rank-0.trace").read_bytes())
    names = [r.label["program"] for r in found.records]
    # The outer one was overwritten before it ended: that is said, not hidden.
    assert names.count("many") == 12_000 and "outer" not in names and lost == 1


def test_a_record_that_never_ends_is_kept(tmp_path: Path):
    spmd.profiler.start_trace(tmp_path)
    FLIGHT.begin(FLIGHT.label("annotation", program="open"), 0)
    spmd.profiler.stop_trace()
    (record,) = parse_trace((tmp_path / "rank-0.trace").read_bytes())[0].records
    assert record.completed == 0
    (event,) = [
        e
        for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if e["ph"] == "X"
    ]
    assert event["args"]["note"] == "still open at the end"


def test_what_a_former_job_left_is_not_merged(tmp_path: Path):
    for name in ("rank-0.trace", "rank-1.trace", "trace.json"):
        (tmp_path / name).write_text("old")
    with spmd.profiler.trace(tmp_path):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.trace", "trace.json"]
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["ranks"] == 1


def test_mistakes(tmp_path: Path):
    with pytest.raises(RuntimeError, match="no timeline is under way"):
        spmd.profiler.stop_trace()
    with spmd.profiler.trace(tmp_path):
        with pytest.raises(RuntimeError, match=f"a timeline is under way in {tmp_path}"):
            spmd.profiler.start_trace(tmp_path)
    with pytest.raises(ArgumentError, match="number=-1 must be at least 0"):
        spmd.debug.step(-1)


def test_names_of_functions(tmp_path: Path):
    @spmd.profiler.TraceAnnotation("shuffle")
    def shuffled(n):
        return list(range(n)) if n < 2 else shuffled(n - 1)

    with spmd.profiler.trace(tmp_path):
        assert shuffled(3) == [0]
        assert spmd.profiler.annotate_function(abs)(-2) == 2
    assert kept(tmp_path) == [("annotation", "shuffle")] * 3 + [("annotation", "abs")]


def test_profile_of_memory_counts_the_arrays_that_are_alive(tmp_path: Path):
    kept = [spmd.numpy.zeros((3, 1117), np.float32) + k for k in range(2)]
    spmd.profiler.save_device_memory_profile(tmp_path / "memory.prof")
    profile = gzip.decompress((tmp_path / "memory.prof").read_bytes())
    fields = list(messages(profile))
    texts = [value.decode() for number, value in fields if number == 6]
    assert texts[:5] == ["", "allocations", "count", "space", "bytes"]
    samples = [dict(messages(value)) for number, value in fields if number == 2]
    functions = dict(numbers(value) for number, value in fields if number == 5)
    named = {tuple(texts[functions[k]] for k in s[1]): varints(s[2]) for s in samples}
    assert named["f32[3,1117]", "cpu:0"] == [2, 2 * 3 * 1117 * 4]
    del kept


def messages(data: bytes):
    """Number and value of the fields of a protocol buffer, a varint or bytes each."""
    while data:
        tag, data = varint(data)
        value, data = varint(data)
        if tag & 7 == 2:
            value, data = data[:value], data[value:]
        yield tag >> 3, value


def numbers(data: bytes) -> list[int]:
    return [value for _, value in messages(data)]


def varint(data: bytes) -> tuple[int, bytes]:
    length = next(k for k, byte in enumerate(data) if byte < 128) + 1
    return sum((b & 127) << 7 * k for k, b in enumerate(data[:length])), data[length:]


def varints(data: bytes) -> list[int]:
    out = []
    while data:
        value, data = varint(data)
        out.append(value)
    return out
