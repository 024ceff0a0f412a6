"""The native functions behind the steps of a CUDA program: launches, copies, waits, exchanges.

The one idea: the executor only adds up addresses and calls `f(args, sizes, begin, end)`. These
hand what it found to the driver, so no Python runs between launches. The first argument of each is
the device's record of the program, an array of 64-bit words:

    STATUS    0, or the error code of the first driver call that failed; nothing is called after it
    STEP      the number of the step that failed
    CONTEXT   the handle of the device's context
    STREAM + k              handles of its streams: that for computing, that for exchanges
    CURRENT ... WAIT_EVENT  addresses of the driver's functions, see `driver.Entries`
    DEVICE    the number of the device in the program
    APART     the bytes from its record to that of the next device
    EVENTS    the first word with the handle of an event
    MAILS     the first word of a mail: an address, and how often the device has told one
    FUNCTIONS...            the handles of the program's functions on this device

In an exchange a device tells the others an address (`tell`), they copy from there once an event of
the device has happened (`pull`), and the device waits until they have (`settle`). The executor
begins none of the three before all devices have done the one before it.
"""

from __future__ import annotations

from collections.abc import Callable

from spmd.compile.native.llvm.compiler import compile_texts
from spmd.compile.native.llvm.function_builder import Function, Value

# A program has at most so many loops on predicates whose bodies become graphs.
MOST_BODIES = 8

STATUS, STEP, CONTEXT, STREAM, EXCHANGE, *_rest = range(18 + 2 * MOST_BODIES)
CURRENT, LAUNCH, COPY, WAIT, RECORD, WAIT_EVENT, GRAPH, CAPTURE, *_rest = _rest
DEVICE, APART, EVENTS, MAILS, BODIES, *_rest, FUNCTIONS = _rest
COUNTS = BODIES + MOST_BODIES

# Streams as steps name them, from STREAM on.
COMPUTING, EXCHANGING = 0, 1
# The words of a mail.
MAIL_WORDS = 2
# The status of a device that found another one not there: no driver gives such a code.
MISMATCH = -1
# That of one whose body of a loop was not captured.
NOT_CAPTURED = -2
# The body of a loop is captured in its so-manieth iteration over the same frame.
CAPTURED_AT = 8

# The host's part of a step.
LAUNCH_NS = 2000.0

# The sizes of each function behind the number of its step.
LAUNCH_SYMBOL = "spmd_cuda_launch"  # stream, function, grid, block x, y, shared bytes, arguments
COPY_SYMBOL = "spmd_cuda_copy"  # stream, bytes; behind the record: target, source
WAIT_SYMBOL = "spmd_cuda_wait"  # the host waits for the stream for computing
RECORD_SYMBOL = "spmd_cuda_record"  # stream, event
WAIT_EVENT_SYMBOL = "spmd_cuda_wait_event"  # stream, event
TELL_SYMBOL = "spmd_cuda_tell"  # mail; behind the record: the address
# mail, event, count, and for each: device, source device, source, target, bytes, whether it is the
# first from there; behind the record: the target.
PULL_SYMBOL = "spmd_cuda_pull"
SETTLE_SYMBOL = "spmd_cuda_settle"  # event, count, and for each: device, reader
PULL_WORDS, SETTLE_WORDS = 6, 2
# The host waits for the predicate of a loop; behind the record: its place in staging memory.
PREDICATE_SYMBOL = "spmd_cuda_predicate"
# Around the steps of a body that may become a graph, and in their place: the number of the body.
BEGIN_BODY_SYMBOL, END_BODY_SYMBOL = "spmd_cuda_begin_body", "spmd_cuda_end_body"
REPLAY_SYMBOL = "spmd_cuda_replay"


class _Step(Function):
    """A function that does nothing after a failure, and notes its own.

    It may run on any thread, so it says first which device is meant.
    """

    def __init__(self, symbol: str):
        super().__init__(symbol, "void", ["ptr", "ptr", "i64", "i64"])
        self.args, self.sizes = self.params[:2]
        self.record = self.load("ptr", self.args)
        if symbol not in _ALWAYS:
            self.ret_if(self.word(STATUS).differs(0))
        self.call(self.word(CURRENT, "ptr"), "i32", self.word(CONTEXT, "ptr"))

    def word(self, index: int, kind: str = "i64") -> Value:
        """A word of the record."""
        return self.load(kind, self.record, 8 * index)

    def size(self, index: int) -> Value:
        """A number of the step, behind its own."""
        return self.load("i64", self.sizes, 8 * (1 + index))

    def stream(self, number: Value) -> Value:
        """The handle of a stream."""
        return self.load("ptr", self.at(self.record, number * 8), 8 * STREAM)

    def event(self, record: Value, number: Value) -> Value:
        """The handle of an event of a device, by its record."""
        first = self.load("i64", record, 8 * EVENTS)
        return self.load("ptr", record, (first + number) * 8)

    def mail(self, record: Value, number: Value) -> Value:
        """The place of a mail of a device, by its record."""
        return self.at(record, (self.load("i64", record, 8 * MAILS) + number * MAIL_WORDS) * 8)

    def peer(self, device: Value) -> Value:
        """The record of another device of the program."""
        return self.at(self.record, (device - self.word(DEVICE)) * self.word(APART))

    def fail(self, status: Value) -> None:
        """Note a failure, and return."""
        self.store(status, self.record, 8 * STATUS)
        self.store(self.load("i64", self.sizes), self.record, 8 * STEP)
        self.ret()

    def ask(self, entry: int, *operands: Value) -> None:
        """Call a function of the driver."""
        code = self.call(self.word(entry, "ptr"), "i32", *operands)
        with self.if_(code.differs(0)):
            self.fail(self.convert("zext", code, "i64"))


def _launch(f: _Step) -> None:
    function, count = f.size(1), f.size(6)
    grid, x, y, shared = (f.convert("trunc", f.size(k), "i32") for k in range(2, 6))
    parameters, one = f.stack_bytes(count * 8), f.value("i32", 1)
    with f.range(0, count) as k:
        f.store(f.at(f.args, k * 8 + 8), parameters, k * 8)
    handle = f.load("ptr", f.at(f.record, function * 8), 8 * FUNCTIONS)
    given = handle, grid, one, one, x, y, one, shared, f.stream(f.size(0)), parameters, f.null()
    f.ask(LAUNCH, *given)


def _copy(f: _Step) -> None:
    target, source = (f.load("i64", f.args, 8 * k) for k in (1, 2))
    f.ask(COPY, target, source, f.size(1), f.stream(f.size(0)))


def _wait(f: _Step) -> None:
    f.ask(WAIT, f.word(STREAM, "ptr"))


def _record(f: _Step) -> None:
    f.ask(RECORD, f.event(f.record, f.size(1)), f.stream(f.size(0)))


def _wait_event(f: _Step) -> None:
    f.ask(WAIT_EVENT, f.stream(f.size(0)), f.event(f.record, f.size(1)), f.value("i32", 0))


def _tell(f: _Step) -> None:
    mail = f.mail(f.record, f.size(0))
    f.store(f.load("i64", f.args, 8), mail)
    f.store(f.load("i64", mail, 8) + 1, mail, 8)


def _pull(f: _Step) -> None:
    mail, event, target = f.size(0), f.size(1), f.load("i64", f.args, 8)
    told, stream = f.load("i64", f.mail(f.record, mail), 8), f.word(EXCHANGE, "ptr")
    with f.range(0, f.size(2)) as k:
        row = f.at(f.sizes, (k * PULL_WORDS + 4) * 8)
        with f.if_(f.load("i64", row).equals(f.word(DEVICE))):
            peer = f.peer(f.load("i64", row, 8))
            place = f.mail(peer, mail)
            with f.if_(f.load("i64", row, 40).differs(0)):
                with f.if_(f.load("i64", place, 8).differs(told)):
                    f.fail(f.value("i64", MISMATCH))
                f.ask(WAIT_EVENT, stream, f.event(peer, event), f.value("i32", 0))
            source = f.load("i64", place) + f.load("i64", row, 16)
            f.ask(COPY, target + f.load("i64", row, 24), source, f.load("i64", row, 32), stream)


def _settle(f: _Step) -> None:
    with f.range(0, f.size(1)) as k:
        row = f.at(f.sizes, (k * SETTLE_WORDS + 3) * 8)
        with f.if_(f.load("i64", row).equals(f.word(DEVICE))):
            done = f.event(f.peer(f.load("i64", row, 8)), f.size(0))
            f.ask(WAIT_EVENT, f.word(EXCHANGE, "ptr"), done, f.value("i32", 0))


def _predicate(f: _Step) -> None:
    """A loop whose steps failed ends: its predicate is false."""
    with f.if_(f.word(STATUS).equals(0)):
        code = f.call(f.word(WAIT, "ptr"), "i32", f.word(STREAM, "ptr"))
        with f.if_(code.equals(0)):
            f.ret()
        f.store(f.convert("zext", code, "i64"), f.record, 8 * STATUS)
        f.store(f.load("i64", f.sizes), f.record, 8 * STEP)
    f.store(f.value("i8", 0), f.load("ptr", f.args, 8))


def _body(f: _Step, index: int) -> Value:
    """The place of a word of the body that a step is about."""
    return f.at(f.record, (f.size(0) + index) * 8)


def _capture(f: _Step, ends: int) -> Value:
    """Begin or end the capture of a body, in Python; gives 0 if all went well."""
    given = f.record, f.size(0), f.value("i64", ends)
    return f.call(f.word(CAPTURE, "ptr"), "i32", *given)


def _begin_body(f: _Step) -> None:
    place = _body(f, COUNTS)
    count = f.load("i64", place)
    f.ret_if(count >= CAPTURED_AT)
    f.store(count + 1, place)
    with f.if_((count + 1).equals(CAPTURED_AT)):
        with f.if_(_capture(f, 0).differs(0)):
            f.fail(f.value("i64", NOT_CAPTURED))


def _end_body(f: _Step) -> None:
    """The end of a capture, whatever happened in it, and the work of this iteration."""
    place = _body(f, COUNTS)
    f.ret_if(f.load("i64", place).differs(CAPTURED_AT))
    code = _capture(f, 1)
    f.store(f.value("i64", CAPTURED_AT + 1), place)
    f.ret_if(f.word(STATUS).differs(0))
    with f.if_(code.differs(0)):
        f.fail(f.value("i64", NOT_CAPTURED))
    _replay(f)


def _replay(f: _Step) -> None:
    f.ask(GRAPH, f.load("ptr", _body(f, BODIES)), f.word(STREAM, "ptr"))


# Functions that run after a failure too.
_ALWAYS = PREDICATE_SYMBOL, END_BODY_SYMBOL

_FUNCTIONS: dict[str, Callable[[_Step], None]] = {
    LAUNCH_SYMBOL: _launch,
    COPY_SYMBOL: _copy,
    WAIT_SYMBOL: _wait,
    RECORD_SYMBOL: _record,
    WAIT_EVENT_SYMBOL: _wait_event,
    TELL_SYMBOL: _tell,
    PULL_SYMBOL: _pull,
    SETTLE_SYMBOL: _settle,
    PREDICATE_SYMBOL: _predicate,
    BEGIN_BODY_SYMBOL: _begin_body,
    END_BODY_SYMBOL: _end_body,
    REPLAY_SYMBOL: _replay,
}


def stream_steps() -> dict[str, int]:
    """The addresses of the functions, by symbol."""
    texts = []
    for symbol, write in _FUNCTIONS.items():
        f = _Step(symbol)
        write(f)
        texts.append(f.text())
    return dict(compile_texts(["\n".join(texts)]))
