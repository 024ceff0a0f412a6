"""The schedule of a program's collectives: what is in it, and what ranks that differ are told."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.base.errors import CollectiveError
from spmd.base.record import replace
from spmd.collectives.order_check import Schedule, agree, difference, needed, order_of
from spmd.compile.passes.pipeline import PASSES_ACROSS, Report, run_passes
from spmd.transport.call_signature import (
    CALL_BYTES,
    LAW_BYTES,
    Kind,
    call_text,
    make_call,
    mismatch,
)
from spmd.transport.origin import Origin
from spmd.transport.threads import LocalCommunicator, LocalGroup

X = np.ones((4, 3), np.float32)
MESH = "axes 'i': 4 over devices of ranks 0, 1, 2, 3"


def schedule(f: Callable[..., Any], *args: Any, name: str = "step") -> Schedule:
    """The schedule of a pmapped function, as a rank would make it."""
    (mapped,) = spmd.pmap(f, axis_name="i").trace(*args).jaxpr.eqns
    closed = mapped.params["jaxpr"]
    report = Report()
    final = run_passes(closed, report, PASSES_ACROSS)
    simple = report.jaxprs["simplify"]
    named = type(simple)(simple.jaxpr.replace(arg_names=closed.jaxpr.arg_names), simple.consts)
    return order_of(named, final, name, "train.py:30", MESH)[0]


def whole_psum(x: Any) -> Any:
    return lax.psum(x, "i")


# ---- what is in a schedule ---------------------------------------------------------------------


def test_entries_hold_what_must_agree():
    def f(tree: Any) -> Any:
        total = lax.psum(tree, "i")
        largest = lax.pmax(tree["w"] * 2 + tree["b"], "i", axis_index_groups=[[0, 1], [2, 3]])
        return total, largest, lax.ppermute(largest, "i", [(0, 1), (1, 0)])

    found = schedule(f, {"w": X, "b": X}).entries
    assert [e.kind for e in found] == ["psum", "psum", "pmax", "ppermute"]
    assert [e.operand for e in found] == ["['b']", "['w']", "", ""]
    assert {e.source.split(":")[0] for e in found} == {"test_order_check.py"}
    assert found[2].options == "groups=0>1;2>3"
    assert found[3].options == "perm=0>1;1>0"
    assert (found[0].dtype, found[0].shape, found[0].axes) == ("f32", "[3]", "'i'")


def test_small_sums_are_entries_of_their_own_and_one_exchange():
    found = schedule(lambda t: lax.psum(t, "i"), {"w": X, "b": X[:, :2]})
    assert [e.shape for e in found.entries] == ["[2]", "[3]"]
    assert [e.shape for e in found.exchanges] == ["[5]"]
    assert found.exchanges[0].operand == "2 arrays joined"


def test_entries_know_the_loops_and_branches_around_them():
    def f(x: Any) -> Any:
        x = lax.scan(lambda c, _: (lax.psum(c, "i"), None), x, None, length=7)[0]
        x = lax.cond(x[0] > 0, whole_psum, lambda x: lax.pmax(x, "i"), x)
        return lax.while_loop(lambda c: snp.sum(lax.pmin(c, "i")) < 3, whole_psum, x)

    within = [e.within.partition(" at ")[0] for e in schedule(f, X).entries]
    assert within == [
        "in a loop of 7 rounds",
        "in branch 0 of the cond",
        "in branch 1 of the cond",
        "in the condition of the while_loop",
        "in the body of the while_loop",
    ]


def test_arguments_are_known_by_the_users_names():
    found = schedule(lambda params, x: lax.psum(params["w"] * x, "i"), {"w": X}, X)
    assert found.arguments == (("params['w']", "f32[1,3]"), ("x", "f32[1,3]"))


def test_the_digest_depends_on_all_but_names_and_callers():
    one = schedule(whole_psum, X)
    assert one.digest == schedule(whole_psum, X, name="other").digest
    assert one.digest != schedule(whole_psum, X[:, :2]).digest
    assert one.digest != schedule(lambda x: lax.psum(x, "i"), X).digest  # another line
    for field in ("kind", "dtype", "shape", "axes", "options", "within", "source", "operand"):
        changed = _changed(one, **{field: "something else"})
        assert changed.digest != one.digest, field


def _changed(found: Schedule, **changes: str) -> Schedule:
    import dataclasses

    entry = dataclasses.replace(found.entries[0], **changes)
    return dataclasses.replace(found, entries=(entry,), exchanges=(entry,))


# ---- what ranks are told -----------------------------------------------------------------------


def kinds(rank: int) -> Callable[..., Any]:
    return lambda x: (lax.pmin if rank == 1 else lax.pmax)(x, "i")


def an_extra_call(rank: int) -> Callable[..., Any]:
    def f(x: Any) -> Any:
        x = lax.psum(x, "i")
        if rank == 2:
            x = lax.all_gather(x, "i")[0]
        return lax.pmax(x, "i")

    return f


def fewer_rounds(rank: int) -> Callable[..., Any]:
    length = 5 if rank == 0 else 4
    return lambda x: lax.scan(lambda c, _: (lax.psum(c, "i"), None), x, None, length=length)[0]


def another_order(rank: int) -> Callable[..., Any]:
    keys = "ba" if rank == 1 else "ab"
    return lambda x, y: [lax.psum({"a": x, "b": y}[k], "i") for k in keys]


def another_permutation(rank: int) -> Callable[..., Any]:
    step = 2 if rank == 1 else 1
    return lambda x: lax.ppermute(x, "i", [(k, (k + step) % 4) for k in range(4)])


DIFFERENCES = {f.__name__: f for f in (kinds, an_extra_call, fewer_rounds, another_permutation)}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_each_difference_between_ranks_has_its_text(golden: Any, name: str):
    found = [schedule(DIFFERENCES[name](rank), X) for rank in range(3)]
    golden(f"order_check/{name}.txt", _without_lines(str(difference(found))))


def test_another_order_of_collectives_is_named(golden: Any):
    found = [schedule(another_order(rank), X, X) for rank in range(2)]
    golden("order_check/another_order.txt", _without_lines(str(difference(found))))


def test_ranks_may_reduce_results_of_different_computations():
    def f(rank: int) -> Callable[..., Any]:
        return lambda x: lax.psum(x * x.sum() if rank else -x, "i")

    negated, product = (schedule(f(rank), X) for rank in range(2))
    assert [entry.argument for entry in negated.entries] == ["x"]
    assert [entry.argument for entry in product.entries] == [""]
    assert negated.digest == product.digest


def test_another_shape_names_the_argument(golden: Any):
    found = [
        schedule(lambda batch: lax.psum(batch["x"], "i"), {"x": x, "y": X})
        for x in (X, X, X[:, :2], X)
    ]
    golden("order_check/another_shape.txt", _without_lines(str(difference(found))))


def test_another_program_is_named(golden: Any):
    found = [schedule(whole_psum, X), schedule(kinds(1), X, name="evaluate")]
    golden("order_check/another_program.txt", _without_lines(str(difference(found))))


def test_the_rest_of_the_differences_on_request(monkeypatch: pytest.MonkeyPatch):
    def f(rank: int) -> Callable[..., Any]:
        which = lax.psum if rank else lax.pmax
        return lambda x: [which(x * k, "i") for k in range(1, 4)]

    found = [schedule(f(rank), X) for rank in range(2)]
    short = difference(found)
    assert "collective 1 of 3 differs in kind" in str(short)
    assert "collective 3 of 3" not in str(short) and "collective 3 of 3" in short.diff
    assert "2 more differences" in str(short)
    monkeypatch.setattr(spmd.config, "debug", "collectives")
    assert "collective 3 of 3 differs in kind" in str(difference(found))


def _without_lines(text: str) -> str:
    """The text with this file's line numbers taken out, which change with every edit."""

    return re.sub(r"test_order_check\.py:\d+", "test_order_check.py:N", text) + "\n"


def test_every_rank_raises_the_same():
    def body(comm: LocalCommunicator) -> str:
        agree(comm, schedule(kinds(0), X))
        with pytest.raises(CollectiveError) as caught:
            agree(comm, schedule(kinds(comm.rank), X))
        agree(comm, schedule(kinds(0), X))  # and may go on
        return str(caught.value)

    texts = LocalGroup(3).run(body)
    assert len(set(texts)) == 1
    assert "rank 1: pmin" in texts[0] and "ranks 0, 2: pmax" in texts[0]


def test_a_rank_alone_with_a_new_program_is_named():
    def body(comm: LocalCommunicator) -> str:
        with pytest.raises(CollectiveError) as caught:
            if comm.rank == 2:
                agree(comm, schedule(whole_psum, X))
            else:
                comm.all_reduce(np.ones(3), origin=Origin("psum f64[3] at train.py:7", "train"))
        return str(caught.value)

    texts = LocalGroup(3).run(body)
    assert len(set(texts)) == 1
    assert "ranks 0, 1: psum f64[3] at train.py:7 in train" in texts[0]
    begins = r"rank 2: a new program, which begins with psum .* at test_order_check.py:\d+ in step"
    assert re.search(begins + r" \(called at train.py:30\)", texts[0])
    assert "Only rank 2 compiled a new program here" in texts[0]


def _partitioned(f: Callable[..., Any], code: str) -> tuple[Schedule, Any]:
    """A schedule of a program for one device, which the compiler would partition, and it."""
    return replace(schedule(whole_psum, X), code=code), spmd.make_jaxpr(f)(X)


def test_programs_with_the_same_collectives_differ_in_a_line():
    def body(comm: LocalCommunicator) -> str:
        by = 3.0 if comm.rank == 1 else 2.0
        mine = _partitioned(lambda x: snp.sum(snp.tanh(x)) * by, str(by))
        with pytest.raises(CollectiveError) as caught:
            agree(comm, *mine)
        return str(caught.value)

    texts = LocalGroup(3).run(body)
    assert len(set(texts)) == 1
    assert "line 3 of the program differs:" in texts[0]
    assert "ranks 0, 2: d:f32[] = mul c 2.0:f32[] at test_order_check.py:" in texts[0]
    assert "rank 1: d:f32[] = mul c 3.0:f32[] at test_order_check.py:" in texts[0]
    assert "pass it as an argument" in texts[0]


def test_one_rank_may_print_what_others_do_not():
    def f(x: Any, prints: bool) -> Any:
        if prints:
            spmd.debug.print("{}", x * 3)
        return x * 2

    one, other = (spmd.make_jaxpr(lambda x, p=p: f(x, p))(X) for p in (True, False))
    assert len(one.eqns) > len(other.eqns)
    assert str(needed(one)) == str(needed(other)) == str(other)
    assert len(needed(spmd.make_jaxpr(lambda x: (x, x * 2))(X)).eqns) == 1


def test_codes_that_differ_in_what_no_text_shows_are_no_error():
    def body(comm: LocalCommunicator) -> str:
        agree(comm, *_partitioned(snp.tanh, f"code {comm.rank}"))
        return "peace"

    assert LocalGroup(3).run(body) == ["peace"] * 3


# ---- calls -------------------------------------------------------------------------------------


def test_a_call_is_known_by_its_place_in_its_program():
    def call(**changes: Any) -> Any:
        known = {"text": "psum at a.py:1", "program": "f", "schedule": 7, "position": 0}
        return make_call(Kind.ALL_REDUCE, None, "float32", 3, "", Origin(**(known | changes)))

    assert len(call().packed) == CALL_BYTES
    assert call().digest == call().digest
    assert call().digest == call(program="called from another line").digest
    for changes in ({"text": "psum at a.py:2"}, {"schedule": 8}, {"position": 1}):
        assert call(**changes).digest != call().digest
        assert call(**changes).packed[:LAW_BYTES] != call().packed[:LAW_BYTES]


def test_long_texts_are_cut_for_reading_and_compared_as_a_whole():
    long = "x" * 500
    calls = [
        make_call(Kind.PERMUTE, None, "int8", 1, long + end, Origin(long + end)) for end in "ab"
    ]
    assert calls[0].digest != calls[1].digest
    text = str(mismatch(3, [c.packed for c in calls]))
    assert "collective #3 differs between ranks" in text and " ... " in text


def test_a_text_that_is_cut_keeps_the_call_and_the_line():
    ring = ";".join(f"{k}>{(k + 1) % 99}" for k in range(99))
    text = f"ppermute f32[3] over 'i' with perm={ring} at train.py:7"
    call = make_call(Kind.PERMUTE, None, "float32", 3, "", Origin(text, "step (called at a.py:9)"))
    shown = call_text(call.packed)
    assert shown.startswith("ppermute f32[3] over 'i' with perm=0>1;")
    assert shown.endswith("at train.py:7 in step (called at a.py:9)")
