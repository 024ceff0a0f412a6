"""Runs a job: starts mpirun, listens to the guards of the ranks, ends everything when one fails.

One thread, one `select` loop. The supervisor lives outside the failure domain: it shares nothing
with the ranks but sockets, so it can report on a rank that was killed or hangs.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from ..flight.file import BREAKPOINT, COLLECTIVE
from ..flight.timeline import merge_if_wanted
from ..options import Options
from ..pipes import NO_READER
from . import mpirun_command as commands
from . import report
from .cleanup import sweep, sweep_flights
from .find_mpi import Mpi
from .gpus import table as gpu_table
from .last_collective import last_call
from .output import Printer
from .rank import (
    ASK,
    END,
    EXIT,
    FLIGHT,
    HELLO,
    LOOK,
    PULSE,
    SIGNAL,
    STDERR,
    STDIN,
    STDOUT,
    frame,
    take_frames,
)
from .stall import FINISHED, Call, Verdict, View
from .watchdog import Watch

TIMED_OUT = 124
# Seconds for ranks that saw the first failure to report it and to clean up.
SECONDS_FOR_PEERS = 1.0
# Seconds after that in which the guards end their ranks, before spmdrun kills them.
SECONDS_TO_END = 2.5
# How often the ranks' pages are looked at; the guards send changes about as often.
SECONDS_BETWEEN_LOOKS = 0.25
_TOKEN_BYTES = 16
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Link:
    """The connection to a guard, and its reports."""

    channel: socket.socket
    buffer: bytearray = field(default_factory=bytearray)
    trusted: bool = False
    rank: int | None = None
    group: int | None = None
    host: str = ""
    page: dict = field(default_factory=dict)
    page_at: float = 0.0
    look: dict = field(default_factory=dict)
    last: Call | None = None
    asked: bool = False


# The link of a rank whose guard has not connected, or has hung up.
NO_LINK = Link(socket.socket())


class Supervisor:
    """One job from its start to its exit code."""

    def __init__(self, options: Options, mpi: Mpi | None, attempt: int = 0, survives: bool = False):
        self.options = options
        self.survives = survives  # whether ranks can go on after the death of one
        self.mpi = mpi
        self.attempt = attempt
        self.printer = Printer(
            options.ranks,
            sys.stdout.buffer,
            sys.stderr.buffer,
            options.prefix,
            options.log_dir,
            only=options.only_ranks,
            collapse=options.collapse,
            name_hosts=options.hostfile is not None,
            again=attempt > 0,
        )
        self.endings = [report.Ending(rank) for rank in range(options.ranks)]
        self.watch = Watch(commands.stall_timeout(options))
        self.verdict: Verdict | None = None  # of a job that was ended because it hung
        self.looked_at = 0.0
        self.folder = ""
        self.links: list[Link] = []
        self.token = secrets.token_hex(_TOKEN_BYTES)
        self.select = selectors.DefaultSelector()
        self.mpirun_said = bytearray()
        self.began = time.monotonic()
        self.began_at = time.time()
        self.code: int | None = None  # decided by us: a signal, the time limit
        self.ask_at: float | None = None  # when to ask the ranks to end
        self.force_at: float | None = None
        self.end_signal = int(signal.SIGTERM)
        self.to_pass_on: list[int] = []
        self.signals = 0
        self.hellos = 0  # guards that have reported
        # By rank its host, its GPUs and its cores.
        self.gpus: dict[int, tuple[str, list[list[str]], str]] = {}

    # ---- the job -------------------------------------------------------------------------------

    def run(self) -> int:
        """Run the job; returns the exit code of spmdrun."""
        folder = self.folder = tempfile.mkdtemp(prefix="spmdrun-")
        flight = commands.flight_folder(folder)
        sweep_flights()
        try:
            return self.run_in(folder, flight)
        finally:
            self.select.close()
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(flight, ignore_errors=True)

    def run_in(self, folder: str, flight: str) -> int:
        """Run the job with these folders for the files of guards and ranks."""
        listener, address = self.listen(folder)
        with listener:
            environ = commands.environment(
                self.options,
                address,
                self.token,
                folder,
                flight=flight,
                attempt=self.attempt,
                survives=self.survives,
            )
            line = commands.command(self.options, self.mpi, environ, folder, self.survives)
            if self.options.verbose:
                self.printer.note(f"spmdrun: {' '.join(line)}")
            mpirun = self.start(line, environ)
            previous = self.catch_signals()
            try:
                self.loop(mpirun, listener)
            finally:
                self.end_by_force(mpirun)
                for number, handler in previous.items():
                    signal.signal(number, handler)
            self.read_what_is_left(flight)
            merge_if_wanted(environ)
            code = self.conclude(mpirun.returncode)
            if code:
                sweep(self.began_at)
            return code

    def listen(self, folder: str) -> tuple[socket.socket, str]:
        """Start to listen for the guards: at a file on one host, a port where there are several."""
        if not self.options.hostfile:
            path = os.path.join(folder, "channel")
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(path)
            address = f"unix:{path}"
        else:
            hosts = commands.read_hostfile(self.options.hostfile)
            listener = socket.create_server(("", 0))
            address = f"tcp:{own_address(hosts[0].name)}:{listener.getsockname()[1]}"
        listener.listen(self.options.ranks)
        self.select.register(listener, selectors.EVENT_READ, listener)
        return listener, address

    def start(self, line: list[str], environ: dict[str, str]) -> subprocess.Popen[bytes]:
        libc = ctypes.CDLL(None)
        mpirun = subprocess.Popen(
            line,
            env=environ,
            # On one host rank 0 gets our input itself; mpirun must not read from it too.
            stdin=None if self.options.hostfile else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches us alone; we end the ranks in order
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )
        for pipe in (mpirun.stdout, mpirun.stderr):
            self.select.register(pipe, selectors.EVENT_READ, pipe)
        return mpirun

    def loop(self, mpirun: subprocess.Popen[bytes], listener: socket.socket) -> None:
        """Listen until mpirun and all guards are gone."""
        gone_at = None
        while True:
            for key, _ in self.select.select(0.05):
                if key.data is listener:
                    self.accept(listener)
                elif isinstance(key.data, Link):
                    self.hear(key.data)
                else:
                    self.hear_mpirun(key.data, mpirun)
            self.printer.idle()
            self.pass_signals_on()
            self.watch_the_ranks()
            self.watch_the_clock(mpirun)
            if mpirun.poll() is None:
                continue
            gone_at = gone_at or time.monotonic()
            # Guards outlive mpirun for a moment, to say how their rank ended.
            patience = self.options.grace + SECONDS_TO_END
            if not self.links or time.monotonic() > gone_at + patience:
                return

    def watch_the_clock(self, mpirun: subprocess.Popen[bytes]) -> None:
        now = time.monotonic()
        limit = self.options.timeout
        if limit is not None and now > self.began + limit and self.code is None:
            self.code = TIMED_OUT
            self.printer.note(f"spmdrun: the time limit of {limit:g} s has passed")
            self.ask_at = now
        if not self.printer.has_reader and self.code is None:
            self.code, self.ask_at = NO_READER, now  # as a pipe ends a single process
        if self.ask_at is not None and now >= self.ask_at and self.force_at is None:
            self.force_at = now + self.options.grace + SECONDS_TO_END
            self.ask_to_end()
        if self.force_at is not None and now > self.force_at:
            self.end_by_force(mpirun)

    # ---- the guards ----------------------------------------------------------------------------

    def accept(self, listener: socket.socket) -> None:
        channel, _ = listener.accept()
        link = Link(channel)
        self.links.append(link)
        self.select.register(channel, selectors.EVENT_READ, link)

    def hear(self, link: Link) -> None:
        if link not in self.links:
            return  # another guard's message in this same round made us hang up
        try:
            data = link.channel.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self.drop(link)
            return
        link.buffer += data
        if not link.trusted:
            token, rest = link.buffer[: 2 * _TOKEN_BYTES], link.buffer[2 * _TOKEN_BYTES :]
            if len(token) < 2 * _TOKEN_BYTES:
                return
            if not secrets.compare_digest(bytes(token), self.token.encode()):
                self.drop(link)
                return
            link.trusted, link.buffer = True, rest
        for kind, payload in take_frames(link.buffer):
            self.handle(link, kind, payload)

    def handle(self, link: Link, kind: bytes, payload: bytes) -> None:
        if kind == HELLO:
            self.note_begin(link, json.loads(payload))
        elif kind == STDIN:
            socket.send_fds(link.channel, [STDIN], [sys.stdin.fileno()])
        elif kind in (STDOUT, STDERR) and link.rank is not None:
            self.printer.feed(link.rank, kind, payload)
        elif kind == PULSE:
            link.page, link.page_at = json.loads(payload), time.monotonic()
        elif kind == LOOK:
            link.look, link.asked = json.loads(payload), False
        elif kind == FLIGHT and link.rank is not None:
            self.flight_file(link.rank).write_bytes(zlib.decompress(payload))
            link.last, _ = last_call(self.flight_file(link.rank))
        elif kind == EXIT:
            self.note_end(link, json.loads(payload))

    def note_begin(self, link: Link, hello: dict) -> None:
        rank = link.rank = int(hello["rank"])
        link.group, link.host = hello["group"], hello["host"]
        self.hellos += 1
        ending = self.endings[rank]
        ending.host, ending.device = link.host, commands.device(self.options, rank)
        self.printer.hosts[rank] = link.host
        if "gpus" in hello:
            self.gpus[rank] = link.host, hello["gpus"], hello["cores"]
        if self.gpus and self.hellos == self.options.ranks:
            for line in gpu_table(self.gpus):
                self.printer.note(line)
        if self.force_at is not None:
            self.tell_to_end(link)  # it came when the end had been called

    def note_end(self, link: Link, said: dict) -> None:
        if link.rank is None:
            return
        ending = self.endings[link.rank]
        ending.code, ending.at = said["code"], time.monotonic() - self.began
        ending.stopped, ending.report = said["stopped"], said.get("report", {})
        ending.why, link.asked = said.get("why", ""), False
        self.printer.finish(link.rank)
        ending.lost = said.get("lost", 0)
        if ending.died and self.may_go_on():
            ending.left_behind = True
            self.drop(link)
        elif ending.failed and self.ask_at is None:
            if ending.died and self.survives:
                self.note(f"spmdrun: fewer than --elastic {self.options.elastic} ranks are left")
            self.ask_at = time.monotonic() + SECONDS_FOR_PEERS
        if self.ask_at is not None and all(self.has_ended(other) for other in self.links):
            for other in list(self.links):
                self.drop(other)  # guards of failed ranks wait for this

    def may_go_on(self) -> bool:
        """Whether enough ranks are left, now that one died, and can go on."""
        left = sum(not ending.died for ending in self.endings if ending.code is not None)
        left += sum(ending.code is None for ending in self.endings)
        return self.survives and self.ask_at is None and left >= (self.options.elastic or 1)

    def has_ended(self, link: Link) -> bool:
        """Whether nothing more is to be heard from a guard."""
        return link.rank is not None and self.endings[link.rank].code is not None

    def drop(self, link: Link) -> None:
        self.select.unregister(link.channel)
        link.channel.close()
        self.links.remove(link)
        if link.rank is not None:
            self.printer.finish(link.rank)
            if self.endings[link.rank].code is None and self.ask_at is None:
                self.ask_at = time.monotonic() + SECONDS_FOR_PEERS

    def hear_mpirun(self, pipe, mpirun: subprocess.Popen[bytes]) -> None:
        data = os.read(pipe.fileno(), 1 << 16)
        if not data:
            self.select.unregister(pipe)
        elif pipe is mpirun.stdout and self.hellos < self.options.ranks and self.ask_at is None:
            sys.stdout.buffer.write(data)  # of a rank whose guard did not find its way to us
            sys.stdout.buffer.flush()
        else:
            self.mpirun_said += data

    def flight_file(self, rank: int) -> Path:
        """The path of the copy of a rank's flight file that its guard sent."""
        return Path(self.folder, f"rank-{rank}.flight")

    # ---- the watch -----------------------------------------------------------------------------

    def watch_the_ranks(self) -> None:
        now = time.monotonic()
        if now < self.looked_at + SECONDS_BETWEEN_LOOKS or self.ask_at is not None:
            return
        self.looked_at = now
        self.watch.tick(self, now)
        for link in self.links:
            if link.rank is not None and link.page.get("phase") == BREAKPOINT:
                self.printer.show_always(link.rank)  # it talks to a person

    def views(self, now: float) -> list[View]:
        """All that is known of the ranks; of those without a guard, how they ended."""
        links = {link.rank: link for link in self.links}
        found = []
        for ending in self.endings:
            rank = ending.rank
            link = links.get(rank, NO_LINK)
            view = View(rank, ending.where, page=link.page, look=link.look, last=link.last)
            if ending.code is not None:
                view.ended = FINISHED if ending.code == 0 else ending.cause()
            if link.page:
                view.idle = now - link.page_at
                if link.page["phase"] == COLLECTIVE:
                    view.idle += link.page["age"]
            found.append(view)
        return found

    def look_closer(self) -> None:
        """See `watch.Job`."""
        for link in list(self.links):
            link.asked = True
            self.tell(link, ASK)

    def have_looked(self) -> bool:
        """See `watch.Job`."""
        return not any(link.asked for link in self.links)

    def note(self, text: str) -> None:
        """See `watch.Job`."""
        self.printer.note(text)

    def marks(self) -> dict[int, str]:
        """See `watch.Job`."""
        return {e.rank: f"rank {e.rank}{f' ({e.where})' if e.where else ''}" for e in self.endings}

    def stalled(self, verdict: Verdict) -> None:
        """See `watch.Job`."""
        self.code, self.verdict, self.ask_at = TIMED_OUT, verdict, time.monotonic()

    # ---- the end -------------------------------------------------------------------------------

    def catch_signals(self) -> dict:
        def on_signal(number: int, _frame) -> None:
            if number in (signal.SIGUSR1, signal.SIGUSR2):
                self.to_pass_on.append(number)
                return
            self.signals += 1
            self.end_signal = number
            self.code = 128 + number
            self.ask_at = time.monotonic()
            if self.signals > 1:
                self.force_at = self.ask_at  # asked twice: no more patience

        numbers = (
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGHUP,
            signal.SIGUSR1,
            signal.SIGUSR2,
        )
        return {number: signal.signal(number, on_signal) for number in numbers}

    def pass_signals_on(self) -> None:
        """Hand signals that are the program's own business to all ranks."""
        numbers, self.to_pass_on = self.to_pass_on, []
        for number in numbers:
            for link in list(self.links):
                self.tell(link, SIGNAL, str(number).encode())

    def ask_to_end(self) -> None:
        for link in list(self.links):
            self.tell_to_end(link)

    def tell_to_end(self, link: Link) -> None:
        self.tell(link, END, str(self.end_signal).encode())

    def tell(self, link: Link, kind: bytes, payload: bytes = b"") -> None:
        try:
            link.channel.sendall(frame(kind, payload))
        except OSError:
            pass  # it has ended already

    def end_by_force(self, mpirun: subprocess.Popen[bytes]) -> None:
        """Kill the rest, by process group; on other hosts the closing channels do it."""
        here = socket.gethostname()
        groups = [link.group for link in self.links if link.group and link.host == here]
        if mpirun.poll() is None:
            mpirun.send_signal(signal.SIGTERM)
            try:
                mpirun.wait(2.0)
            except subprocess.TimeoutExpired:
                groups.append(mpirun.pid)
        for group in groups:
            try:
                os.killpg(group, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        mpirun.wait()

    def read_what_is_left(self, flight: str) -> None:
        """Find the files of ranks whose guards were killed before they could pass them on."""
        for path in Path(self.folder).glob("rank-*.json"):
            try:
                said = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            self.endings[said["rank"]].report = said
        for ending in self.endings:
            copy = self.flight_file(ending.rank)
            if not copy.exists():
                try:
                    shutil.copyfile(Path(flight, copy.name), copy)
                except OSError:
                    continue  # it never joined the job, or it ended well
            ending.last, ending.step = last_call(copy)

    def conclude(self, mpirun_code: int) -> int:
        """Report the end, and choose the exit code."""
        self.printer.close()
        said = self.mpirun_said.decode(errors="replace").strip("\0 \n")
        for ending in self.endings:
            if ending.code == 1 and not ending.report and not ending.stopped:
                found = report.read_traceback(self.printer.tail(ending.rank))
                ending.report = found and {**found, "time": self.began_at + ending.at}
        went_on = report.survived(self.endings)
        first = None if went_on else report.first_failure(self.endings)
        nobody_came = self.hellos == 0
        if said and (self.options.verbose or (nobody_came and self.code is None)):
            for line in said.splitlines():
                self.note(f"mpirun | {line}")
        if self.code is not None:
            return self.conclude_own_end()
        if nobody_came:
            self.note(f"spmdrun: mpirun started no rank (its exit code: {mpirun_code})")
            return abs(mpirun_code) or 1
        if went_on:
            self.note(f"spmdrun: {went_on}")
            return 0
        if first is None:
            return 0 if mpirun_code == 0 else abs(mpirun_code)
        mark = self.printer.mark(first.rank).decode()
        tail = self.printer.tail(first.rank)
        for line in report.lines(self.endings, tail, mark, self.printer.shows):
            self.note(line)
        self.keep_flights()
        return first.exit_code

    def conclude_own_end(self) -> int:
        """Report the end of a job that this process ended: on a signal, on time, or a stall."""
        ranks = [e.rank for e in self.endings if e.stopped or e.code is None]
        if self.code == NO_READER:
            self.note("spmdrun: nothing reads the output any more")
        self.note(f"spmdrun: ended {len(ranks)} of {self.options.ranks} ranks")
        if self.verdict is not None:
            self.keep_flights()
            self.note(f"spmdrun: {report.stall_summary(self.verdict, self.marks())}")
        return self.code or 0

    def keep_flights(self) -> None:
        """Leave the ranks' flight files beside their logs."""
        folder = self.options.log_dir
        copies = [c for e in self.endings if (c := self.flight_file(e.rank)).exists()]
        if folder and copies:
            for copy in copies:
                shutil.copyfile(copy, Path(folder, copy.name))

    @property
    def may_restart(self) -> bool:
        """Whether the job failed by itself: not by a signal to us, nor by the time limit."""
        return self.code is None or self.verdict is not None


def own_address(peer: str) -> str:
    """The address of this host as `peer` sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))
            return probe.getsockname()[0]
        except OSError:
            return socket.gethostname()
