"""What is said about a job, from what its ranks wrote down: one line that explains it."""

from __future__ import annotations

import json

import pytest

from launch.flight.diagnosis import Verdict, explain
from launch.flight.file import COLLECTIVE, COMPILING, LEFT, RAISED, Flight, parse
from launch.spmd_command import main
from tests.launch.flight.flight_files import GATHER, MS, PSUM, calls, flight_bytes, write

WAITS = {"phase": COLLECTIVE}
NOW = 5000 * MS


def flight(rank: int, size: int, alive: bool | None = True, **given) -> Flight:
    made = parse(flight_bytes(rank, size, **given))
    made.alive = alive
    return made


def waiting(rank: int, size: int, **given) -> Flight:
    """A rank that waits in its third call since 30 ms."""
    return flight(rank, size, records=calls(1, 2, 3, open_last=True), **WAITS, **given)


def judge(*flights: Flight, now: int | None = NOW) -> Verdict:
    return explain(flights, now)


def test_a_rank_that_never_came():
    late = flight(1, 3, records=calls(1, 2), since=2000 * MS, step=118)
    found = judge(waiting(0, 3), late, waiting(2, 3))
    assert found.kind == "waiting"
    assert found.headline == (
        "rank 1 never came to psum train.py:88, where ranks 0, 2 wait for 5.0 s: rank 1 is in "
        "host code for 3.0 s, after psum train.py:88 (call 2) in step 118"
    )
    assert [(c.rank, c.kind) for c in found.culprits] == [(1, "host")]
    assert found.waits[0].ranks == (0, 2) and found.waits[0].missing == (1,)
    assert found.divergence is None


def test_a_rank_that_compiles_is_named_so():
    found = judge(waiting(0, 2), flight(1, 2, records=calls(1), phase=COMPILING))
    assert found.culprits[0].kind == "compiling" and "compiling a program" in found.headline


def test_a_rank_that_raised_comes_first():
    text = "rank 1: KeyError at loader.py:41: 'x'"
    stopped = [waiting(r, 3, state=RAISED, text=f"stopped: {text}") for r in (0, 2)]
    found = judge(*stopped, flight(1, 3, records=calls(1, 2), state=RAISED, text=text, step=9))
    assert found.kind == "raised"
    assert found.headline == (
        "rank 1 raised KeyError at loader.py:41: 'x' in step 9; "
        "ranks 0, 2 were waiting in psum train.py:88"
    )


def test_the_first_of_two_failures():
    flights = [
        flight(r, 2, state=RAISED, text=f"rank {r}: E{r} at a.py:{r}", since=(9 - r) * MS)
        for r in (0, 1)
    ]
    assert judge(*flights).headline.startswith("rank 1 raised E1 at a.py:1; rank 0 raised E0")


def test_a_rank_that_was_killed():
    gone = flight(1, 2, alive=False, records=calls(1, 2))
    found = judge(waiting(0, 2), gone)
    assert found.kind == "gone" and found.culprits[0].kind == "gone"
    assert "rank 1 ended without a word (killed?) in host code" in found.headline
    # The other one noticed and stopped.
    stopped = waiting(0, 2, state=RAISED, text="stopped: rank 1 (process 5) ended", alive=False)
    assert judge(stopped, gone).culprits[0].kind == "gone"


def test_after_a_job_that_was_ended_as_a_whole_nobody_was_killed():
    """All processes are gone; who waited for whom is what counts."""
    waits = waiting(0, 2, alive=False)
    found = judge(waits, flight(1, 2, alive=False, records=calls(1, 2)), now=None)
    assert found.kind == "waiting"
    assert found.headline == (
        "rank 1 never came to psum train.py:88, where rank 0 was waiting: rank 1 was in host "
        "code, after psum train.py:88 (call 2)"
    )


def test_a_rank_that_left():
    text = "left the program (exit code 0)"
    found = judge(waiting(0, 2), flight(1, 2, records=calls(1, 2), state=LEFT, text=text))
    assert found.culprits[0].kind == "left" and text in found.headline


def test_a_rank_without_a_file():
    found = judge(waiting(0, 2))
    assert found.culprits[0].kind == "never joined"
    assert "rank 1 left no flight file" in found.headline
    assert found.ranks[1].state == "left no flight file"


def test_other_collectives_at_the_same_call():
    records = [*calls(1, 2), *calls(3, label=1, open_last=True)]
    found = judge(waiting(0, 2), flight(1, 2, records=records, **WAITS))
    assert found.kind == "mismatch"
    assert found.headline == (
        "call 3 of world differs: rank 0 came to psum train.py:88 float32[4] over i and rank 1 "
        "came to all_gather train.py:90 float32[4]"
    )


def test_the_first_difference_is_the_one_that_counts():
    """A rank that skipped a call pairs with the next one, and both go on with wrong numbers."""
    labels = (PSUM, GATHER)
    one = [(k % 2, 0, 10 * k * MS, 10 * k * MS + 1, k) for k in range(1, 9)]
    other = [((k + (k > 4)) % 2, 0, 10 * k * MS, 10 * k * MS + 1, k) for k in range(1, 9)]
    found = judge(
        flight(0, 2, records=one, labels=labels), flight(1, 2, records=other, labels=labels)
    )
    assert found.kind == "mismatch" and found.divergence is not None
    assert found.divergence.call == 5


@pytest.mark.parametrize(
    "field, value",
    [("dtype", "int32"), ("shape", [5]), ("op", "max"), ("axes", ["j"]), ("detail", "root=1")],
)
def test_what_must_be_equal(field: str, value):
    other = flight(1, 2, records=calls(1), labels=({**PSUM, field: value},))
    assert judge(flight(0, 2, records=calls(1)), other).kind == "mismatch"


def test_lines_may_differ():
    """The same call from two places of a program is no mistake."""
    other = flight(1, 2, records=calls(1), labels=({**PSUM, "source": "/a/train.py:99"},))
    assert judge(flight(0, 2, records=calls(1)), other).kind == "running"


def test_a_label_that_found_no_room_differs_from_nothing():
    other = flight(1, 2, records=[(-2, 0, 10 * MS, 11 * MS, 1)])
    assert judge(flight(0, 2, records=calls(1)), other).divergence is None


def test_groups_that_wait_for_each_other():
    """Ranks 0 and 1 meet in two groups, and came to them in a different order."""
    groups = [{"kind": "group", "group": g, "name": f"world/{g}", "ranks": [0, 1]} for g in (7, 8)]
    first = flight(0, 2, records=[(0, 7, 10 * MS, 0, 1)], labels=(PSUM, GATHER, *groups), **WAITS)
    second = flight(1, 2, records=[(1, 8, 10 * MS, 0, 1)], labels=(PSUM, GATHER, *groups), **WAITS)
    found = judge(first, second)
    assert found.kind == "order"
    assert "ranks wait for each other: rank 0 in psum train.py:88" in found.headline
    assert {c.rank for c in found.culprits} == {0, 1}


def test_a_chain_of_waits_ends_at_the_one_that_waits_for_nobody():
    """Ranks 0 and 1 wait for 2, which waits for 3 in another group; 3 reads data."""
    part = {"kind": "group", "group": 9, "name": "world/1", "ranks": [2, 3]}
    labels = (PSUM, GATHER, part)
    flights = [flight(r, 4, records=[(0, 0, MS, 0, 1)], labels=labels, **WAITS) for r in (0, 1)]
    flights.append(flight(2, 4, records=[(1, 9, MS, 0, 1)], labels=labels, **WAITS))
    flights.append(flight(3, 4, labels=labels, phase=5))
    found = judge(*flights)
    assert [(c.rank, c.kind) for c in found.culprits] == [(3, "data")]
    assert "rank 3 is waiting for data" in found.headline


def test_jobs_without_trouble():
    text = "left the program (exit code 0)"
    done = [flight(r, 2, records=calls(1, 2), state=LEFT, text=text, alive=False) for r in (0, 1)]
    assert judge(*done).headline == "all 2 ranks left after 2 collectives, last psum train.py:88"
    runs = [flight(r, 2, records=calls(1, 2)) for r in (0, 1)]
    assert judge(*runs).headline == "nobody waits: ranks 0, 1 in host code"
    together = [waiting(0, 2), waiting(1, 2)]
    assert judge(*together).kind == "running" and not judge(*together).culprits
    assert judge().kind == "empty"


def test_an_exception_that_was_caught_is_no_wait():
    """The record of a collective that raised stays open; the rank went on in host code."""
    flights = [flight(r, 2, records=calls(1, 2, open_last=True)) for r in (0, 1)]
    assert judge(*flights).waits == ()


# ---- the command -------------------------------------------------------------------------------


def test_spmd_flight(tmp_path, capsys):
    write(tmp_path, 0, 2, records=calls(1, 2, 3, open_last=True), **WAITS)
    write(tmp_path, 1, 2, records=calls(1, 2))
    assert main(["flight", str(tmp_path), "--last", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("rank 1 never came to psum train.py:88, where rank 0 was waiting: ")
    assert "rank 0, its last 2 collectives:" in out and "still in it" in out
    assert main(["flight", "--json", str(tmp_path / "rank-0.flight")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["culprits"][0]["kind"] == "never joined" and found["waits"][0]["call"] == 3


def test_spmd_flight_of_nothing(tmp_path, capsys):
    assert main(["flight", str(tmp_path)]) == 1
    assert "no flight files (rank-N.flight)" in capsys.readouterr().err
    (tmp_path / "rank-0.flight").write_bytes(b"short")
    assert main(["flight", str(tmp_path)]) == 1
    assert "5 bytes are no flight file" in capsys.readouterr().err
