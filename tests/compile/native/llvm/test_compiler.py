"""The loader: symbols, errors, the disk cache, threads, and what the code may refer to."""

import ctypes
import itertools
import os
import platform
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from spmd.compile.native.llvm import compiler, modules, target
from spmd.compile.native.llvm.compiler import Host, Loader, Written, compile_texts, host
from spmd.compile.native.llvm.function_builder import Function
from spmd.compile.native.llvm.modules import CONTROL
from spmd.compile.native.llvm.object_cache import ObjectCache
from tests.compile.native.llvm.emissions import note_emissions, refuse_emissions, replace_emit
from tests.threads import in_threads


def constant(name: str, number: int) -> str:
    return f"define i64 @{name}() {{\n  ret i64 {number}\n}}\n"


def call(address: int) -> int:
    return ctypes.CFUNCTYPE(ctypes.c_int64)(address)()


def test_compiled_functions_can_be_called(folder):
    addresses = Loader().compile_texts([constant("one", 1), constant("two", 2)])
    assert {name: call(address) for name, address in addresses.items()} == {"one": 1, "two": 2}


def test_equal_texts_are_compiled_once(folder):
    loader = Loader()
    first = loader.compile_texts([constant("same", 5)] * 3)
    assert loader.compile_texts([constant("same", 5)]) == first


def test_one_symbol_may_be_defined_in_different_calls(folder):
    loader = Loader()
    first = loader.compile_texts([constant("f", 1)])["f"]
    second = loader.compile_texts([constant("f", 2)])["f"]
    assert (call(first), call(second)) == (1, 2)


def test_one_symbol_twice_in_a_call_is_refused(folder):
    with pytest.raises(ValueError, match="define the symbol 'f'"):
        Loader().compile_texts([constant("f", 1), constant("f", 2)])


@pytest.mark.parametrize("workers", [1, 3])
def test_many_texts_are_compiled_at_once(folder, monkeypatch, workers):
    monkeypatch.setattr(compiler, "available_cores", lambda: workers)
    texts = [constant(f"many{workers}_{i}", i * i) for i in range(40)]
    addresses = Loader().compile_texts(texts)
    assert [call(addresses[f"many{workers}_{i}"]) for i in range(40)] == [i * i for i in range(40)]


def test_threads_compile_side_by_side(folder):
    loader, results = Loader(), {}

    def work(seed: int) -> None:
        for i in range(10):
            name = f"t{seed}_{i}"
            results[name] = call(loader.compile_texts([constant(name, seed * 100 + i)])[name])

    in_threads(work, range(4))
    assert results == {f"t{s}_{i}": s * 100 + i for s in range(4) for i in range(10)}


def test_a_call_does_not_wait_for_what_another_thread_compiles(folder, monkeypatch):
    loader, begun, may_end = Loader(), threading.Event(), threading.Event()

    def change(emit):
        def slow(sources):
            if any("slow" in text for text, _ in sources):
                begun.set()
                assert may_end.wait(60)
            return emit(sources)

        return slow

    replace_emit(monkeypatch, change)
    found = {}
    thread = threading.Thread(
        target=lambda: found.update(loader.compile_texts([constant("slow", 1), constant("own", 2)]))
    )
    thread.start()
    assert begun.wait(60)
    assert call(loader.compile_texts([constant("quick", 3)])["quick"]) == 3
    own = loader.compile_texts([constant("own", 2)])["own"]
    may_end.set()
    thread.join()
    assert [call(found[name]) for name in ("slow", "own")] == [1, 2] and call(own) == 2


def test_private_symbols_are_not_global(folder):
    text = (
        "@shared = global i64 7\n@table = constant [2 x i64] [i64 3, i64 4]\n"
        "@hidden = internal global i64 1\n"
        "define internal i64 @helper() { ret i64 1 }\n"
        'define i64 @visible() nounwind "frame-pointer"="none" {\n'
        "  %x = call i64 @helper()\n  %y = load i64, ptr @shared\n"
        "  %z = add i64 %x, %y\n  ret i64 %z\n}\n"
    )
    addresses = Loader().compile_texts([text])
    assert sorted(addresses) == ["shared", "table", "visible"]
    assert ctypes.c_int64.from_address(addresses["shared"]).value == 7
    ctypes.c_int64.from_address(addresses["shared"]).value = 40
    assert call(addresses["visible"]) == 41


def test_code_may_call_the_c_library(folder):
    text = (
        "declare double @cbrt(double)\n"
        "define double @root(double %x) {\n  %y = call double @cbrt(double %x)\n"
        "  ret double %y\n}\n"
    )
    address = Loader().compile_texts([text])["root"]
    assert ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)(address)(27.0) == pytest.approx(3.0)


@pytest.mark.parametrize(
    "text, message",
    [
        ("define i64 @f() {", "does not parse"),
        ("define i64 @f() { ret i32 1 }", "does not parse"),
        (
            "define i64 @f() {\na:\n br label %b\nb:\n %x = phi i64 [1, %c]\n ret i64 %x\nc:\n"
            " br label %b\n}",
            "is not valid",
        ),
    ],
)
def test_broken_texts_are_shown(folder, text, message):
    with pytest.raises(RuntimeError, match=message) as caught:
        Loader().compile_texts([text])
    assert text in str(caught.value)


def test_a_missing_symbol_is_an_error_not_a_crash(folder):
    text = (
        "declare void @there_is_no_such_function()\n"
        "define void @f() {\n  call void @there_is_no_such_function()\n  ret void\n}\n"
    )
    loader = Loader()
    with pytest.raises(RuntimeError, match=r"Failed to materialize.* f "):
        loader.compile_texts([text])
    assert call(loader.compile_texts([constant("after", 3)])["after"]) == 3


def test_the_second_process_loads_what_the_first_compiled(folder, monkeypatch):
    texts = [constant("cached", 9), constant("cached_too", 10)]
    Loader().compile_texts(texts)
    refuse_emissions(monkeypatch)
    fresh = Loader()
    assert call(fresh.compile_texts(texts)["cached"]) == 9
    with pytest.raises(AssertionError, match="compiled again"):
        fresh.compile_texts(texts, optimize=True)


def test_a_damaged_entry_is_compiled_again(folder):
    Loader().compile_texts([constant("damaged", 11)])
    for path in folder.rglob("*.o"):
        path.write_bytes(path.read_bytes()[:-10])
    assert call(Loader().compile_texts([constant("damaged", 11)])["damaged"]) == 11


def counting_loop() -> str:
    """The sum of the numbers below n, in a stack variable."""
    f = Function("count", "i64", ["i64"])
    total = f.var("i64", 0)
    with f.range(0, f.params[0]) as i:
        total.set(total.get() + i)
    f.ret(total.get())
    return f.text()


def test_optimized_code_keeps_its_variables_in_registers(folder):
    text, loader = counting_loop(), Loader()
    assert "rsp" in loader.emit_assembly(text) or sys.platform != "linux"
    assert "rsp" not in loader.emit_assembly(text, optimize=True)
    address = loader.compile_texts([text], optimize=True)["count"]
    assert ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address)(10) == 45


def test_the_host_is_described():
    assert host().cpu and host().vector_bytes in (16, 32, 64)
    assert Host("x", "+avx2,-avx512f", "1").vector_bytes == 32
    assert Host("x", "+avx2,+avx512f,+avx512vl", "1").vector_bytes == 64
    assert not Host("x", "+avx2", "1").has("avx")


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """How often LLVM is asked for the processor, by `find()`, with files to be described by."""
    cpuinfo, library = tmp_path / "cpuinfo", tmp_path / "llvmlite" / "binding" / "libllvmlite.so"
    told = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags")
    lines = [f"{name}\t: {name} of it" for name in told]
    cpuinfo.write_text("\n".join(["processor\t: 0", *lines, "", "processor\t: 1", ""]))
    library.parent.mkdir(parents=True)
    library.write_text("code")
    origin = SimpleNamespace(origin=str(tmp_path / "llvmlite" / "__init__.py"))
    monkeypatch.setattr(
        target,
        "open",
        lambda path, *args, **more: open(
            cpuinfo if path == "/proc/cpuinfo" else path, *args, **more
        ),
        raising=False,
    )
    monkeypatch.setattr(target.importlib.util, "find_spec", lambda name: origin)
    monkeypatch.setattr(target.sys, "platform", "linux")
    times = []

    def find() -> int:
        cache = ObjectCache(lambda: tmp_path / "cache")
        made = Host("one", "+avx2", "22.1.0")
        found = target.find_host(cache, lambda: times.append(1) or made)
        assert (found.cpu, found.features, found.llvm_version) == ("one", "+avx2", "22.1.0")
        return len(times)

    return find, cpuinfo, library


def test_the_host_is_asked_for_once_per_processor_and_library(asked):
    find, cpuinfo, library = asked
    text = cpuinfo.read_text()
    assert [find(), find()] == [1, 1]
    cpuinfo.write_text(text.replace("processor\t: 0", "processor\t: 7"))  # another core
    assert find() == 1
    cpuinfo.write_text(text.replace("flags of it", "other flags"))
    assert [find(), find()] == [2, 2]
    library.write_text("other code")
    assert [find(), find()] == [3, 3]


def test_where_the_processor_is_not_described_llvm_is_asked(asked):
    find, cpuinfo, library = asked
    text = cpuinfo.read_text()
    for less in (text.replace("flags\t", "other\t"), text.rstrip().partition("\n\n")[0], ""):
        cpuinfo.write_text(less)
        before = find()
        assert find() == before + 1
    cpuinfo.unlink()
    assert find() == find() - 1
    cpuinfo.write_text(text)
    library.unlink()
    assert find() == find() - 1


def test_llvmlite_is_imported_by_the_first_compile_only(tmp_path):
    program = (
        "import sys\nimport spmd.compile.native.llvm.compiler as loader\n"
        "assert 'llvmlite' not in sys.modules\n"
        "loader.compile_texts(['define void @f() nounwind { ret void }'])\n"
        "assert loader.host().vector_bytes\n"
        "print('llvmlite' in sys.modules)\n"
    )
    env = {**os.environ, "SPMD_CACHE_DIR": str(tmp_path)}
    found = []
    for _ in range(2):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=env, timeout=60, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.strip())
    on_disk = sys.platform == "linux" and platform.machine() == "x86_64"
    assert found == ["True", str(not on_disk)]


def test_loaded_code_stays():
    name = "stays"
    address = compile_texts([constant(name, 77)])[name]
    for i in range(30):
        compile_texts([constant(f"other{i}", i)])
    assert call(address) == 77


def test_some_texts_of_a_call_are_optimized(folder):
    f = Function("counted", "i64", ["i64"])
    total = f.var("i64", 0)
    with f.range(0, f.params[0]) as i:
        total.set(total.get() + i)
    f.ret(total.get())
    loader = Loader()
    addresses = loader.compile_texts([constant("beside", 4)], optimized=[f.text()])
    assert call(addresses["beside"]) == 4
    alone = Loader().compile_texts([f.text()], optimize=True)["counted"]
    assert addresses["counted"].entry == alone.entry  # the same code, found by the same name


def test_entries_that_define_one_symbol_are_loaded_apart(folder):
    first = Loader()
    entries = [first.compile_texts([constant("f", k)])["f"].entry for k in range(3)]
    fresh = Loader()
    assert fresh.load_entries({entry: ("f",) for entry in entries})
    assert [call(fresh.loaded(entry)["f"]) for entry in entries] == [0, 1, 2]


# ---- units -------------------------------------------------------------------------------------


def helped(name: str, number: int) -> str:
    """A function with a helper and a table of its own, under names that all such texts use."""
    return (
        f"@table = internal constant i64 {number}\n"
        "define internal i64 @helper() noinline {\n  %x = load i64, ptr @table\n  ret i64 %x\n}\n"
        f"define i64 @{name}() #0 {{\n  %x = call i64 @helper()\n  ret i64 %x\n}}\n"
        'attributes #0 = { nounwind "frame-pointer"="none" }\n'
    )


@pytest.fixture
def emitted(monkeypatch):
    """The texts of each module that is compiled."""
    monkeypatch.setattr(compiler, "available_cores", lambda: 2)
    monkeypatch.setattr(modules, "LEAST_UNIT", 1)
    return note_emissions(monkeypatch)


def test_new_texts_share_modules(folder, emitted):
    texts = [helped(f"shared{k}", k) for k in range(40)]
    loader = Loader()
    addresses = loader.compile_texts(texts)
    assert [call(addresses[f"shared{k}"]) for k in range(40)] == list(range(40))
    assert len(emitted) == 6 and sorted(itertools.chain(*emitted)) == sorted(texts)
    # One more text is a module of its own, and brings nothing of the others.
    assert list(loader.compile_texts([texts[3], constant("more", 1)])) == ["shared3", "more"]
    assert emitted[6:] == [[constant("more", 1)]]


def test_a_part_of_a_unit_is_found_by_its_own_name(folder, emitted):
    texts = [helped(f"part{k}", k) for k in range(20)]
    Loader().compile_texts(texts)
    emitted.clear()
    loader = Loader()
    for k in (7, 8, 7):
        assert call(loader.compile_texts([texts[k]])[f"part{k}"]) == k
    addresses = loader.compile_texts(texts)
    assert [call(addresses[f"part{k}"]) for k in range(20)] == list(range(20))
    assert not emitted


def test_texts_whose_unit_is_gone_are_compiled_again(folder, emitted):
    texts = [helped(f"gone{k}", k) for k in range(20)]
    entries = {a.entry for a in Loader().compile_texts(texts).values()}
    assert len(entries) == len(emitted) == 6
    for path in folder.rglob("*.o"):
        if b"ELF" in path.read_bytes():
            path.unlink()
    emitted.clear()
    assert not Loader().load_entries({entry: () for entry in entries})
    addresses = Loader().compile_texts(texts)
    assert [call(addresses[f"gone{k}"]) for k in range(20)] == list(range(20))
    assert sorted(itertools.chain(*emitted)) == sorted(texts)


def test_an_entry_that_points_to_a_unit_is_not_loaded_as_code(folder, emitted, monkeypatch):
    texts = [helped(f"both{k}", k) for k in range(20)]
    (alone,) = Loader().compile_texts(texts[:1]).values()
    assert Loader().load_entries({alone.entry: ("both0",)})
    # The other was as quick, and is the later one to write.
    with monkeypatch.context() as blind:
        blind.setattr(ObjectCache, "load", lambda self, key: None)
        Loader().compile_texts(texts)
    assert not Loader().load_entries({alone.entry: ("both0",)})
    assert call(Loader().compile_texts(texts[:1])["both0"]) == 0


def test_texts_that_define_one_symbol_are_never_in_one_module(folder, emitted):
    both = [constant("twice", 1), constant("twice", 2)]
    with pytest.raises(ValueError, match="define the symbol 'twice'"):
        Loader().compile_texts([*both, *(constant(f"beside{k}", k) for k in range(20))])
    assert not any(set(both) <= set(module) for module in emitted)


def test_control_is_compiled_apart(folder, emitted):
    control = [f"{CONTROL}\n{constant(f'control{k}', k)}" for k in range(3)]
    others = [constant(f"other{k}", 10 + k) for k in range(4)]
    loader = Loader()
    addresses = loader.compile_texts(others, optimized=control)
    assert [call(addresses[f"control{k}"]) for k in range(3)] == [0, 1, 2]
    assert [call(addresses[f"other{k}"]) for k in range(4)] == [10, 11, 12, 13]
    # All control is in one module, whatever passes are asked for.
    assert [sorted(m) for m in emitted if set(m) & set(control)] == [control]
    again = Loader().compile_texts([], optimized=control)
    assert [call(again[f"control{k}"]) for k in range(3)] == [0, 1, 2]


def test_no_pass_runs_over_control():
    text, loader = counting_loop(), Loader()
    for optimize in (False, True):
        control = loader.emit_assembly(f"{CONTROL}\n{text}", optimize=optimize)
        assert "rsp" in control or sys.platform != "linux"
    assert "rsp" not in loader.emit_assembly(text, optimize=True)


def test_an_error_on_a_helping_thread_is_raised(folder, emitted):
    with pytest.raises(RuntimeError, match="does not parse"):
        Loader().compile_texts([*(constant(f"fine{k}", k) for k in range(20)), "define nothing"])
    assert call(Loader().compile_texts([constant("fine", 3)])["fine"]) == 3


# ---- texts that take long to write -------------------------------------------------------------


def test_a_text_is_written_once_for_the_files_that_it_depends_on(folder, monkeypatch):
    written = []

    def write():
        written.append(1)
        return helped("long", 5)

    for _ in range(3):
        assert call(Loader().compile_written(Written("test", write))["long"]) == 5
    assert len(written) == 1
    assert call(Loader().compile_texts([write()], optimize=True)["long"]) == 5
    monkeypatch.setattr(compiler, "source_digest", lambda: "other files")
    assert call(Loader().compile_written(Written("test", write))["long"]) == 5
    monkeypatch.setattr(compiler, "source_digest", lambda: "")  # as in an archive
    assert [call(Loader().compile_written(Written("test", write))["long"]) for _ in range(2)] == [
        5,
        5,
    ]
    assert len(written) == 5


def test_a_text_whose_code_is_gone_is_written_again(folder, emitted):
    Loader().compile_written(Written("test", lambda: helped("lost", 6)))
    for path in folder.rglob("*.o"):
        if b"ELF" in path.read_bytes():
            path.unlink()
    assert call(Loader().compile_written(Written("test", lambda: helped("lost", 6)))["lost"]) == 6
    assert len(emitted) == 2
