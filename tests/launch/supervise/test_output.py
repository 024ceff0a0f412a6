"""The screen of a job: whole lines with their rank, bars and prompts of rank 0."""

from __future__ import annotations

import io
import time

import pytest

from launch.supervise.output import Printer


class Screen:
    """A printer over two ranks whose stdout and stderr are one buffer."""

    def __init__(self, tmp_path=None, prefix: bool = True, tty: bool = False, ranks: int = 2):
        self.sink = io.BytesIO()
        self.sink.isatty = lambda: tty  # type: ignore[method-assign]
        log_dir = str(tmp_path) if tmp_path else None
        self.printer = Printer(ranks, self.sink, self.sink, prefix, log_dir)

    def feed(self, rank: int, text: str, kind: bytes = b"o") -> None:
        self.printer.feed(rank, kind, text.encode())

    @property
    def text(self) -> str:
        return self.sink.getvalue().decode()


@pytest.fixture
def screen() -> Screen:
    return Screen()


def test_lines_of_two_ranks_do_not_mix(screen: Screen):
    screen.feed(0, "half a")
    screen.feed(1, "other\nand ")
    screen.feed(0, " line\n")
    screen.feed(1, "more\n")
    assert screen.text == "r1 | other\nr0 | half a line\nr1 | and more\n"


def test_an_unfinished_line_comes_out_at_the_end(screen: Screen):
    screen.feed(1, "the last words")
    assert screen.text == ""
    screen.printer.finish(1)
    assert screen.text == "r1 | the last words\n"


def test_ranks_line_up():
    screen = Screen(ranks=11)
    screen.feed(3, "a\n")
    screen.feed(10, "b\n")
    assert screen.text == "r3  | a\nr10 | b\n"


def test_no_prefix():
    screen = Screen(prefix=False)
    screen.feed(1, "plain\n")
    assert screen.text == "plain\n"


def test_a_bar_of_rank_0_lives_and_ends(screen: Screen):
    for text in ("\r 10%", "\r 50%", "\r100%", "\ndone\n"):
        screen.feed(0, text, b"e")
    assert screen.text == "\rr0 |  10%\rr0 |  50%\rr0 | 100%\nr0 | done\n"


def test_a_bar_gives_way_to_a_line_and_comes_back():
    screen = Screen(tty=True)
    screen.feed(0, "\r 10%", b"e")
    screen.feed(1, "note\n")
    screen.feed(0, "\r 20%", b"e")
    wipe = "\r\x1b[K"
    assert screen.text == f"{wipe}r0 |  10%{wipe}r1 | note\n{wipe}r0 |  20%"


def test_of_another_ranks_bar_the_last_state_is_shown(screen: Screen):
    for text in ("\r 10%", "\r 50%", "\r100%", "\n"):
        screen.feed(1, text, b"e")
    assert screen.text == "r1 | 100%\n"


def test_a_prompt_of_rank_0_is_shown_before_its_answer(screen: Screen):
    screen.feed(0, "(Pdb) ")
    screen.printer.idle()
    assert screen.text == ""  # it may be the start of a line
    screen.printer.streams[0, b"o"].since = time.monotonic() - 1
    screen.printer.idle()
    screen.feed(1, "meanwhile\n")
    screen.feed(0, "42\n")
    assert screen.text == "r0 | (Pdb) \nr1 | meanwhile\nr0 | 42\n"


def test_windows_line_ends_are_line_ends(screen: Screen):
    screen.feed(1, "a\r\nb\r\n")
    assert screen.text == "r1 | a\nr1 | b\n"


def test_bytes_that_are_no_text_pass(screen: Screen):
    screen.printer.feed(1, b"e", b"\xff\xfe\n")
    assert screen.sink.getvalue() == b"r1 | \xff\xfe\n"


def test_logs_hold_each_rank_as_it_wrote(tmp_path):
    screen = Screen(tmp_path=tmp_path)
    screen.feed(0, "\r 1%\r 2%\n")
    screen.feed(1, "x\n")
    screen.printer.finish(0)
    screen.printer.finish(1)
    assert (tmp_path / "rank-0.log").read_bytes() == b"\r 1%\r 2%\n"
    assert (tmp_path / "rank-1.log").read_bytes() == b"x\n"


# ---- lines of several ranks, of some ranks, of several hosts ------------------------------------


def printer(sink: io.BytesIO, ranks: int, **options) -> Printer:
    return Printer(ranks, sink, sink, True, **options)


def test_a_line_that_all_ranks_say_is_printed_once():
    sink = io.BytesIO()
    screen = printer(sink, 4, collapse=True)
    for rank in (2, 0, 3):
        screen.feed(rank, b"o", b"loading\n")
    assert sink.getvalue() == b""
    screen.feed(1, b"o", b"loading\n")
    assert sink.getvalue() == b"r0-3 | loading\n"


def test_each_ranks_lines_keep_their_order():
    sink = io.BytesIO()
    screen = printer(sink, 3, collapse=True)
    screen.feed(0, b"o", b"a\nb\n")
    screen.feed(2, b"o", b"x\na\nb\n")
    screen.feed(1, b"o", b"a\nb\n")
    screen.close()
    lines = sink.getvalue().decode().splitlines()
    for rank, said in ((0, ["a", "b"]), (1, ["a", "b"]), (2, ["x", "a", "b"])):
        of_rank = [line for line in lines if str(rank) in _ranks_of(line)]
        assert [line.partition(" | ")[2] for line in of_rank] == said, lines


def _ranks_of(line: str) -> list[str]:
    found: list[str] = []
    for word in line.partition(" | ")[0][1:].split(","):
        first, _, last = word.partition("-")
        found += [str(r) for r in range(int(first), int(last or first) + 1)]
    return found


def test_a_line_of_some_ranks_waits_only_a_moment():
    sink = io.BytesIO()
    screen = printer(sink, 4, collapse=True)
    for rank in (0, 2, 3):
        screen.feed(rank, b"o", b"mine\n")
    deadline = time.monotonic() + 30
    while not sink.getvalue() and time.monotonic() < deadline:
        screen.idle()
    assert sink.getvalue() == b"r0,2-3 | mine\n"


def test_only_some_ranks(tmp_path):
    sink = io.BytesIO()
    screen = printer(sink, 3, only=(1,), log_dir=str(tmp_path))
    for rank in range(3):
        screen.feed(rank, b"e", b"line one\nline")
        screen.feed(rank, b"e", b" two\n")
    assert sink.getvalue() == b"r1 | line one\nr1 | line two\n"
    # The others are in their logs, and their last words are known if they fail.
    assert (tmp_path / "rank-2.log").read_bytes() == b"line one\nline two\n"
    assert screen.tail(2) == ["line one", "line two"]
    screen.show_always(2)
    screen.feed(2, b"o", b"(Pdb) \n")
    assert sink.getvalue().endswith(b"r2 | (Pdb) \n")
    screen.feed(0, b"e", b"no end")
    for rank in range(3):
        screen.finish(rank)
    assert screen.tail(0)[-1] == "no end" and b"no end" not in sink.getvalue()


def test_hosts_are_named_where_there_are_several():
    sink = io.BytesIO()
    screen = printer(sink, 2, name_hosts=True)
    screen.hosts.update({0: "node1", 1: "node2"})
    screen.feed(1, b"o", b"here\n")
    assert sink.getvalue() == b"node2:r1 | here\n"
