"""Units of texts and the threads that compile them: nothing depends on how fast a thread is."""

import ctypes
import sys
import threading
import time

import pytest

from spmd.compile.native.llvm import compiler, modules
from spmd.compile.native.llvm.compiler import Loader
from spmd.compile.native.llvm.modules import (
    CONTROL,
    SWITCH_SECONDS,
    Stream,
    Team,
    into_units,
    symbols_of,
)
from tests.compile.native.llvm.emissions import replace_emit
from tests.threads import in_threads


def constant(name: str, number: int, lines: int = 0) -> str:
    filling = "  ; as long as code\n" * lines
    return f"define i64 @{name}() {{\n{filling}  ret i64 {number}\n}}\n"


def call(address: int) -> int:
    return ctypes.CFUNCTYPE(ctypes.c_int64)(address)()


# ---- texts and units ---------------------------------------------------------------------------


def test_symbols_are_the_definitions_that_are_not_private():
    text = (
        "@shared = global i64 0\n@table = internal constant i64 1\n@known = constant i64 2\n"
        "declare void @elsewhere()\n"
        "define internal i64 @helper() {\n  ret i64 0\n}\n"
        "define private void @hidden() {\n  ret void\n}\n"
        "define dso_local i64 @open(ptr %p) {\n  %x = load i64, ptr @known\n  ret i64 %x\n}\n"
    )
    assert sorted(symbols_of(text)) == ["known", "open", "shared"]
    assert symbols_of("define void @first() {\n  ret void\n}") == ("first",)


def test_a_stream_closes_a_unit_when_it_is_long_enough():
    stream, closed = Stream(), []
    texts = [(constant(f"f{k}", k, lines=100), False) for k in range(40)]
    for text in texts:
        unit = stream.add(text)
        if unit is not None:
            closed.append(unit)
    assert len(closed) == stream.closed > 2 and stream.open
    assert [t for unit in (*closed, stream.open) for t in unit] == texts
    work = [sum(map(modules.work_of, unit)) for unit in closed]
    assert work == sorted(work) and work[0] >= modules.FIRST_UNIT


def test_a_long_text_is_a_unit_at_once_and_closes_no_other():
    stream = Stream()
    small, large = (constant("small", 1), False), (constant("large", 2, lines=2000), False)
    assert stream.add(small) is None
    assert stream.add(large) == [large]
    assert stream.open == [small]


def test_work_counts_blocks_and_registers():
    def add(element: str, block: str = "") -> modules.Source:
        # `block` and its filling have one length and as many lines.
        filling = block or " ;"
        return f"define void @f() {{\n{filling}\n  %x = fadd {element} %a, %b\n}}\n", False

    one, two, four = (modules.work_of(add(f"<{n} x float>")) for n in (16, 32, 64))
    assert two > one
    assert four - one == pytest.approx(3 * (two - one)), "three registers more than one"
    assert modules.work_of(add("float", "b:")) > modules.work_of(add("float"))
    control = f"{CONTROL}\n{constant('walk', 0, lines=100)}"
    assert modules.work_of((control, True)) < modules.work_of((control[1:], True))


def test_a_stream_separates_equal_symbols_and_control():
    stream = Stream()
    control = (f"{CONTROL}\n{constant('walk', 0)}", True)
    first, second = (constant("same", 1), False), (constant("same", 2), False)
    assert stream.add(first) is None
    assert stream.add(control) is None
    assert stream.add(second) == [first]
    assert stream.open == [control, second]


def test_few_texts_are_few_units():
    texts = [(constant(f"f{k}", k, lines=40), False) for k in range(12)]
    assert len(into_units(texts, 2)) == 2
    long = [(constant(f"f{k}", k, lines=400), False) for k in range(12)]
    assert len(into_units(long, 2)) == 2 * modules.UNITS_PER_WORKER
    assert len(into_units(texts[:1], 2)) == 1


# ---- threads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cores", [1, 2, 4])
def test_a_team_returns_the_code_of_all_units_in_order(cores):
    team = Team(lambda unit: unit[0][0].encode(), cores)
    for k in range(5):
        team.put([(f"put{k}", False)])
    codes = team.finish([[(f"last{k}", False)] for k in range(5)])
    assert codes == [f"put{k}".encode() for k in range(5)] + [f"last{k}".encode() for k in range(5)]


def test_a_team_works_before_it_is_asked_to_finish():
    begun = threading.Event()

    def emit(unit):
        begun.set()
        return b""

    team = Team(emit, 2)
    team.put([("text", False)])
    assert begun.wait(60)
    assert team.finish([]) == [b""]


def test_an_error_in_a_unit_is_raised_by_finish():
    def emit(unit):
        if unit[0][0] == "bad":
            raise RuntimeError("does not parse")
        return b""

    team = Team(emit, 3)
    for name in ("fine", "bad", "fine"):
        team.put([(name, False)])
    with pytest.raises(RuntimeError, match="does not parse"):
        team.finish([[("fine", False)]])


def test_finish_compiles_all_units_where_no_thread_can_start(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    team = Team(lambda unit: unit[0][0].encode(), 3)
    for k in range(3):
        team.put([(f"put{k}", False)])
    assert team.finish([[("last", False)]]) == [b"put0", b"put1", b"put2", b"last"]


def test_a_dropped_team_begins_nothing_more_and_leaves_no_thread():
    inside, go, seen = threading.Event(), threading.Event(), []

    def emit(unit):
        seen.append(unit[0][0])
        inside.set()
        assert go.wait(60)
        return b""

    team = Team(emit, 2)
    team.put([("first", False)])
    assert inside.wait(60)
    team.put([("second", False)])
    team.drop()
    go.set()
    for thread in threading.enumerate():
        if thread.name == "spmd-compile":
            thread.join(60)
            assert not thread.is_alive()
    assert seen == ["first"]


def test_the_switch_interval_is_put_back():
    before = sys.getswitchinterval()
    inside, go = threading.Barrier(3), threading.Event()

    def emit(unit):
        inside.wait(60)
        assert go.wait(60)
        return b""

    team = Team(emit, 3)
    team.put([("one", False)])
    team.put([("other", False)])
    inside.wait(60)
    assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    go.set()
    team.finish([])
    assert sys.getswitchinterval() == pytest.approx(before)


def test_waiting_units_are_compiled_longest_first():
    inside, go, seen = threading.Event(), threading.Event(), []

    def emit(unit):
        seen.append(unit[0][0])
        if unit[0][0] == "first":
            inside.set()
            assert go.wait(60)
        elif len(seen) == 4:
            go.set()
        return b""

    team = Team(emit, 2)
    team.put([("first", False)])
    assert inside.wait(60)
    team.put([("short", False)])
    team.finish([[("long" * 9, False)], [("middle" * 3, False)]])
    assert seen == ["first", "long" * 9, "middle" * 3, "short"]


# ---- batches -----------------------------------------------------------------------------------


@pytest.fixture
def no_cache(monkeypatch):
    monkeypatch.setattr(compiler, "available_cores", lambda: 2)
    monkeypatch.setattr(compiler.object_cache, "load", lambda key: None)
    monkeypatch.setattr(compiler.object_cache, "store", lambda key, payload: None)


@pytest.mark.parametrize("slow", ["nobody", "helpers", "the last"])
def test_units_of_a_batch_do_not_depend_on_time(no_cache, monkeypatch, slow):
    main, seen = threading.get_ident(), []

    def change(emit):
        def delayed(sources):
            seen.append([text for text, _ in sources])
            helping = threading.get_ident() != main
            if slow != "nobody" and helping == (slow == "helpers"):
                time.sleep(0.02)
            return emit(sources)

        return delayed

    replace_emit(monkeypatch, change)
    texts = [constant(f"f{k}", k, lines=100) for k in range(30)]
    batch = Loader().batch()
    for text in texts:
        batch.add(text)
        batch.add(text)
    addresses = batch.finish()
    assert [call(addresses[f"f{k}"]) for k in range(30)] == list(range(30))
    stream, expected = Stream(), []
    for text in texts:
        unit = stream.add((text, False))
        expected += [] if unit is None else [unit]
    expected += into_units(stream.open, 2)
    assert sorted(seen) == sorted([text for text, _ in unit] for unit in expected)


def test_a_batch_uses_loaded_texts(no_cache, monkeypatch):
    loader = Loader()
    known = loader.compile_texts([constant("known", 1)])
    batch = loader.batch()
    batch.add(constant("known", 1))
    batch.add(constant("new", 2))
    both = batch.finish()
    assert both["known"] == known["known"] and call(both["new"]) == 2


def test_batches_of_several_threads_may_hold_the_same_texts(no_cache):
    loader = Loader()
    texts = [constant(f"f{k}", k, lines=100) for k in range(20)]
    found = []

    def compile_all(_):
        batch = loader.batch()
        for text in texts:
            batch.add(text)
        addresses = batch.finish()
        found.append([call(addresses[f"f{k}"]) for k in range(20)])

    in_threads(compile_all, range(3))
    assert found == [list(range(20))] * 3
