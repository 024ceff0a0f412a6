"""The native functions behind the steps of a CUDA program: a launch, a copy, a wait.

The one idea: the executor only adds up addresses and calls `f(args, sizes, begin, end)`. These
three hand what it found to the driver, so no Python runs between launches. The first argument of
each is the device's record of the program, an array of 64-bit words:

    STATUS    0, or the error code of the first driver call that failed; nothing is called after it
    STEP      the number of the step that failed
    CONTEXT, STREAM        handles of the device's context and stream
    CURRENT, LAUNCH, COPY, WAIT     addresses of the driver's functions, see `driver.Entries`
    FUNCTIONS...           the handles of the program's functions on this device
"""

from __future__ import annotations

from spmd.compile.native.llvm.compiler import compile_texts

STATUS, STEP, CONTEXT, STREAM, CURRENT, LAUNCH, COPY, WAIT, FUNCTIONS = range(9)

# The host's part of a step.
LAUNCH_NS = 2000.0

LAUNCH_SYMBOL, COPY_SYMBOL, WAIT_SYMBOL = "spmd_cuda_launch", "spmd_cuda_copy", "spmd_cuda_wait"


def _word(name: str, array: str, index: int | str, kind: str = "i64") -> str:
    return f"""
  %{name}.at = getelementptr i64, ptr {array}, i64 {index}
  %{name} = load {kind}, ptr %{name}.at, align 8"""


def _function(symbol: str, step_at: int, body: str) -> str:
    """A function that does nothing after a failure, and notes its own; `body` makes %code.

    It may run on any thread, so it says first which device is meant.
    """
    context = _word("context", "%record", CONTEXT, "ptr")
    context += _word("current", "%record", CURRENT, "ptr")
    context += "\n  %set = call i32 %current(ptr %context)"
    return f"""
define void @{symbol}(ptr %args, ptr %sizes, i64 %begin, i64 %end) nounwind {{
  %record = load ptr, ptr %args, align 8{_word("status", "%record", STATUS)}
  %good = icmp eq i64 %status, 0
  br i1 %good, label %go, label %out
go:{context}{_word("stream", "%record", STREAM, "ptr")}{_word("step", "%sizes", step_at)}{body}
  %bad = icmp ne i32 %code, 0
  br i1 %bad, label %note, label %out
note:
  %wide = zext i32 %code to i64
  store i64 %wide, ptr %status.at, align 8
  %step.out = getelementptr i64, ptr %record, i64 {STEP}
  store i64 %step, ptr %step.out, align 8
  br label %out
out:
  ret void
}}
"""


def _launch() -> str:
    """sizes: step, function, grid, block x, block y, shared bytes, count of arguments."""
    sizes = "".join(
        _word(name, "%sizes", k)
        for k, name in enumerate(("function", "grid", "x", "y", "shared", "count"), 1)
    )
    narrow = "".join(
        f"\n  %{name}.i = trunc i64 %{name} to i32" for name in ("grid", "x", "y", "shared")
    )
    call = (
        "call i32 %launch(ptr %handle, i32 %grid.i, i32 1, i32 1, i32 %x.i, i32 %y.i, i32 1, "
        "i32 %shared.i, ptr %stream, ptr %parameters, ptr null)"
    )
    body = f"""{sizes}{narrow}
  %number = add i64 %function, {FUNCTIONS}{_word("handle", "%record", "%number", "ptr")}
  %parameters = alloca ptr, i64 %count, align 8
  br label %next
next:
  %k = phi i64 [0, %go], [%k.next, %fill]
  %more = icmp ult i64 %k, %count
  br i1 %more, label %fill, label %call
fill:
  %k.next = add i64 %k, 1
  %argument = getelementptr ptr, ptr %args, i64 %k.next
  %parameter = getelementptr ptr, ptr %parameters, i64 %k
  store ptr %argument, ptr %parameter, align 8
  br label %next
call:{_word("launch", "%record", LAUNCH, "ptr")}
  %code = {call}"""
    return _function(LAUNCH_SYMBOL, 0, body)


def _copy() -> str:
    """sizes: step, bytes; behind the record: target, source."""
    words = _word("target", "%args", 1, "i64") + _word("source", "%args", 2, "i64")
    words += _word("nbytes", "%sizes", 1) + _word("copy", "%record", COPY, "ptr")
    call = "call i32 %copy(i64 %target, i64 %source, i64 %nbytes, ptr %stream)"
    return _function(COPY_SYMBOL, 0, f"{words}\n  %code = {call}")


def _wait() -> str:
    """sizes: step."""
    body = _word("wait", "%record", WAIT, "ptr")
    return _function(WAIT_SYMBOL, 0, f"{body}\n  %code = call i32 %wait(ptr %stream)")


def stream_steps() -> dict[str, int]:
    """The addresses of the three functions, by symbol."""
    return dict(compile_texts([_launch() + _copy() + _wait()]))
