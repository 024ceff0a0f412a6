"""One rank's guard: starts the program, passes its output on, and reports how it ended.

mpirun starts it (`launch/guard.py`) once a rank; it needs the standard library only. The program is
its child in a session of its own, so that ending the rank ends all that it started. The guard and
spmdrun talk over a socket in frames: one letter, the length of the payload, the payload. The guard
passes output on, tells changes of the rank's flight page, and looks closer when asked.
When spmdrun is gone the socket closes, and the guard ends its program.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator

from . import gpus
from .inspection import LOST, STACK_SIGNAL, Subject, ended_by_kernel, out_of_memory_kills

HEADER = struct.Struct("!cI")
# Exit codes of programs that were not started, as shells have the first.
NOT_STARTED, NOT_BOUND = 127, 2
# Messages of a guard: it is there; it wants the input; the program's output; changes of its page;
# results of a closer look; its flight file; its end.
HELLO, STDIN, STDOUT, STDERR = b"h", b"i", b"o", b"e"
PULSE, LOOK, FLIGHT, EXIT = b"p", b"l", b"f", b"x"
# Messages of spmdrun: end the program, with this signal; pass this signal on; look closer.
END, SIGNAL, ASK = b"E", b"S", b"?"

CHANNEL, TOKEN, SETTINGS = "SPMDRUN_CHANNEL", "SPMDRUN_TOKEN", "SPMDRUN_SETTINGS"
REPORT_FILE = "SPMD_FAILURE_REPORT"
FLIGHT_FOLDER = "SPMD_FLIGHT_DIR"
STACKS = "SPMD_STACKS"
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "SPMD_NUM_THREADS",
)

PULSE_SECONDS = 0.5
# The longest wait of a guard for spmdrun to hear from all ranks.
LINGER_SECONDS = 10.0
# Seconds for output that is still in the pipes when the program has ended.
DRAIN_SECONDS = 0.5
_READ_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1


def frame(kind: bytes, payload: bytes) -> bytes:
    """One message to spmdrun."""
    return HEADER.pack(kind, len(payload)) + payload


def take_frames(buffer: bytearray) -> Iterator[tuple[bytes, bytes]]:
    """Take the whole messages out of the bytes that have come so far."""
    while len(buffer) >= HEADER.size:
        kind, length = HEADER.unpack_from(buffer)
        end = HEADER.size + length
        if len(buffer) < end:
            return
        payload = bytes(buffer[HEADER.size : end])
        del buffer[:end]
        yield kind, payload


def place(environ: dict[str, str]) -> tuple[int, int, int]:
    """This rank, its number among the ranks of its host, and how many those are (0: unknown)."""
    rank = _first(environ, "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
    local = _first(environ, "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
    size = _first(
        environ, "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE"
    )
    return rank or 0, rank or 0 if local is None else local, size or 0


def _first(environ: dict[str, str], *names: str) -> int | None:
    found = (environ[name] for name in names if name in environ)  # Slurm writes 4(x2)
    return next(
        (int(text) for text in (t.partition("(")[0] for t in found) if text.isdigit()), None
    )


# ---- cores -------------------------------------------------------------------------------------


def by_core(cpus: list[int]) -> list[int]:
    """Order CPUs so that hardware threads of one core, and cores of one package, are neighbours."""

    def where(cpu: int) -> tuple[int, int, int]:
        folder = f"/sys/devices/system/cpu/cpu{cpu}/topology"
        try:
            with (
                open(f"{folder}/physical_package_id") as package,
                open(f"{folder}/core_id") as core,
            ):
                return int(package.read()), int(core.read()), cpu
        except (OSError, ValueError):
            return 0, cpu, cpu

    return sorted(cpus, key=where)


def share(cpus: list[int], local_rank: int, local_size: int) -> list[int]:
    """The CPUs of one of `local_size` ranks: equal neighbouring parts, or one shared by several."""
    if local_size >= len(cpus):
        return [cpus[local_rank % len(cpus)]]
    each = len(cpus) // local_size
    return cpus[local_rank * each : (local_rank + 1) * each]


def _ranges(cpus: list[int]) -> str:
    """CPUs as text: 0-3,8."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


# ---- the program -------------------------------------------------------------------------------


class Guard:
    """Runs one program and forwards its output."""

    def __init__(self, command: list[str], settings: dict, channel: socket.socket | None):
        self.rank, self.local_rank, self.local_size = place(dict(os.environ))
        self.local_size = self.local_size or settings["ranks"]
        self.command = command
        self.settings = settings
        self.channel = channel
        self.heard = bytearray()  # of spmdrun's words, up to the next whole frame
        self.stopping: float | None = None
        self.report = ""
        self.subject = Subject(0)
        self.pulse_at = 0.0
        self.kills_before = out_of_memory_kills()
        self.cores: list[int] = []
        self.gpus: list[gpus.Gpu] = []

    def environment(self, cpus: list[int]) -> dict[str, str]:
        """The input that the program sees."""
        environ = {name: v for name, v in os.environ.items() if not name.startswith("SPMDRUN_")}
        for name in THREAD_VARIABLES:
            environ.setdefault(name, str(len(cpus)))
        if self.settings["bind"]:
            may_share = self.settings.get("share_gpus", False)
            self.gpus = gpus.bind(environ, self.local_rank, self.local_size, may_share)
        environ.setdefault("PYTHONUNBUFFERED", "1")  # the last line before a crash must get out
        environ.setdefault("PYTHONFAULTHANDLER", "1")
        if self.channel is not None:
            folder = self.settings["folder"]
            folder = folder if os.path.isdir(folder) else "/tmp"
            self.report = os.path.join(folder, f"rank-{self.rank}-{os.getpid()}.json")
            environ[REPORT_FILE] = self.report
            stacks = os.path.join(folder, f"rank-{self.rank}-{os.getpid()}.stacks")
            environ.setdefault(FLIGHT_FOLDER, self.settings["flight"])
            environ[STACKS] = f"{STACK_SIGNAL}:{stacks}"
            os.makedirs(environ[FLIGHT_FOLDER], exist_ok=True)
            flight = os.path.join(environ[FLIGHT_FOLDER], f"rank-{self.rank}.flight")
            self.subject = Subject(0, flight, stacks)
        return environ

    def start(self) -> subprocess.Popen:
        cpus = by_core(sorted(os.sched_getaffinity(0)))
        mine = self.cores = share(cpus, self.local_rank, self.local_size)
        if self.settings["bind"]:
            os.sched_setaffinity(0, mine)
        libc = ctypes.CDLL(None)
        pipe = None if self.channel is None else subprocess.PIPE
        return subprocess.Popen(
            self.command,
            stdin=self.standard_input(),
            stdout=pipe,
            stderr=pipe,
            env=self.environment(mine),
            # A session, not only a group: a terminal's Ctrl-C must pass through spmdrun.
            start_new_session=True,
            close_fds=False,  # MPICH's ranks reach their manager through an inherited descriptor
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )

    def standard_input(self) -> int | None:
        """The input of one rank: spmdrun's own, be it a terminal, handed over as it is."""
        if self.channel is None or self.channel.family != socket.AF_UNIX:
            return None  # mpirun forwards it if it can
        if self.rank != self.settings.get("stdin", 0):
            return subprocess.DEVNULL
        self.channel.sendall(frame(STDIN, b""))
        said, handed, _, _ = socket.recv_fds(self.channel, 1, 1)
        if handed:
            return handed[0]
        self.heard += said  # the first letter of something else: the end, perhaps
        return subprocess.DEVNULL

    def run(self) -> int:
        """Run the program to its end; returns its exit code, 128 + n for signal n."""
        try:
            program = self.start()
        except OSError as error:
            return self.refuse(f"{self.command[0]}: {error.strerror}", NOT_STARTED)
        except gpus.BindingError as error:
            host = f"spmdrun: {socket.gethostname()}"
            return self.refuse(f"{host}: {error}" if not self.local_rank else "", NOT_BOUND)
        self.subject.pid = program.pid
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self.stop(program, signal.SIGTERM))
        self.hello(program.pid)
        self.forward(program)
        code = program.wait()
        _kill_group(program.pid, signal.SIGKILL)  # processes left running end with it
        if code:
            self.send_flight()
        self.send(EXIT, json.dumps(self.ending(code)).encode())
        self.remove_files()
        if code:
            self.linger()
        if code < 0 and self.settings.get("survives"):
            # mpirun ends all ranks when one ends badly, but not when one was killed.
            os.kill(os.getpid(), signal.SIGKILL)
        return code if code >= 0 else 128 - code

    def refuse(self, text: str, code: int) -> int:
        """Say why the program was not started; gives the exit code."""
        self.hello(None)
        self.send(STDERR, f"{text}\n".encode() if text else b"")
        if self.channel is None and text:
            sys.stderr.write(f"{text}\n")
        self.send(EXIT, json.dumps({"code": code, "stopped": False}).encode())
        return code

    def hello(self, group: int | None) -> None:
        """Tell spmdrun that this rank is here; `group`: the processes that are to end with it."""
        said = {"rank": self.rank, "host": socket.gethostname(), "group": group}
        if self.gpus and gpus.wants(dict(os.environ)):
            said |= {"gpus": gpus.rows(self.gpus), "cores": _ranges(self.cores)}
        self.send(HELLO, json.dumps(said).encode())

    def ending(self, code: int) -> dict:
        """How the program ended, with the report that spmd wrote if it raised."""
        ending = {"code": code, "stopped": self.stopping is not None}
        page = self.subject.page()
        if page:
            ending["lost"] = page[LOST]
        if code == -signal.SIGKILL and self.stopping is None:
            ending["why"] = ended_by_kernel(self.subject.pid, self.kills_before)
        try:
            with open(self.report, encoding="utf-8") as file:
                ending["report"] = json.load(file)
            os.unlink(self.report)
        except (OSError, ValueError):
            pass  # no exception, or none that spmd saw
        return ending

    def remove_files(self) -> None:
        """Remove the files for spmdrun, which has it now; a folder of the user's stays."""
        left = [self.subject.stacks]
        if os.path.dirname(self.subject.flight) == self.settings["flight"]:
            left.append(self.subject.flight)
        for path in filter(None, left):
            try:
                os.unlink(path)
            except OSError:
                pass  # the program did not come so far
        try:
            os.rmdir(self.settings["flight"])
        except OSError:
            pass  # it holds other ranks' files, which they remove

    def linger(self) -> None:
        """Wait for spmdrun to hang up.

        mpirun ends all ranks as soon as this process ends badly; the others must have had their
        time to clean up and to say how they ended.
        """
        if self.channel is None:
            return
        self.channel.settimeout(LINGER_SECONDS)
        try:
            while self.channel.recv(1024):
                pass
        except OSError:
            pass  # it took too long, or spmdrun was killed

    def stop(self, program: subprocess.Popen, number: int) -> None:
        """Ask the program to end; `forward` ends it if it does not."""
        if self.stopping is None:
            self.stopping = time.monotonic()
            _kill_group(program.pid, number)
            _kill_group(program.pid, signal.SIGCONT)  # one that is stopped would not hear of it

    def listen(self, program: subprocess.Popen, data: bytes) -> None:
        """Follow the messages of spmdrun; end if it is gone."""
        self.heard += data
        if not data:
            self.stop(program, signal.SIGTERM)
        for kind, payload in take_frames(self.heard):
            if kind == END:
                self.stop(program, int(payload))
            elif kind == SIGNAL and program.poll() is None:
                os.kill(program.pid, int(payload))
            elif kind == ASK:
                self.send_flight()
                self.send(LOOK, json.dumps(self.subject.look()).encode())

    def send_flight(self) -> None:
        """Send the rank's flight file as it is now; most of it is empty, and packs well."""
        try:
            with open(self.subject.flight, "rb") as file:
                self.send(FLIGHT, zlib.compress(file.read(), 1))
        except OSError:
            pass  # it has not joined the job

    def pulse(self) -> None:
        """Tell the changes of the rank's page."""
        now = time.monotonic()
        if now < self.pulse_at or self.channel is None:
            return
        self.pulse_at = now + PULSE_SECONDS
        page = self.subject.pulse()
        if page is not None:
            # Of a program that a script started: look at it, not at the shell.
            if os.path.exists(f"/proc/{page['pid']}"):
                self.subject.pid = page["pid"]
            self.send(PULSE, json.dumps(page).encode())

    def send(self, kind: bytes, payload: bytes) -> None:
        """Tell spmdrun."""
        if self.channel is None or not payload:
            return
        try:
            self.channel.sendall(frame(kind, payload))
        except OSError:
            self.channel = None  # spmdrun is gone; `forward` notices too

    def forward(self, program: subprocess.Popen) -> None:
        """Pass output on until the program has ended and said all."""
        if self.channel is None:
            self.wait_quietly(program)
            return
        waiting = selectors.DefaultSelector()
        waiting.register(program.stdout, selectors.EVENT_READ, STDOUT)
        waiting.register(program.stderr, selectors.EVENT_READ, STDERR)
        waiting.register(self.channel, selectors.EVENT_READ, None)
        ended = None
        pipes = 2
        while pipes:
            ready = [key for key, _ in waiting.select(0.05)]
            for key in ready:
                data = os.read(key.fd, _READ_BYTES)
                if key.data is None:
                    self.listen(program, data)
                else:
                    self.send(key.data, data)
                if not data:
                    waiting.unregister(key.fileobj)
                    pipes -= key.data is not None
            self.enforce(program)
            self.pulse()
            if program.poll() is not None:
                ended = ended or time.monotonic()
                # A process that the program left behind may hold the pipes open.
                if not ready or time.monotonic() > ended + DRAIN_SECONDS:
                    return

    def wait_quietly(self, program: subprocess.Popen) -> None:
        while program.poll() is None:
            time.sleep(0.05)
            self.enforce(program)

    def enforce(self, program: subprocess.Popen) -> None:
        if self.stopping is not None and time.monotonic() > self.stopping + self.settings["grace"]:
            _kill_group(program.pid, signal.SIGKILL)


def _kill_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass


# ---- start -------------------------------------------------------------------------------------


def connect(address: str, token: str) -> socket.socket | None:
    """Reach spmdrun at `unix:PATH` or `tcp:HOST:PORT`; None where that fails."""
    kind, _, where = address.partition(":")
    try:
        if kind == "unix":
            channel = socket.socket(socket.AF_UNIX)
            channel.connect(where)
        else:
            host, _, port = where.rpartition(":")
            channel = socket.create_connection((host, int(port)), timeout=20)
            channel.settimeout(None)
        channel.sendall(token.encode())
        return channel
    except OSError:
        # The output then takes mpirun's way, without prefixes: better than none.
        return None


def main() -> int:
    settings = json.loads(os.environ[SETTINGS])
    channel = connect(os.environ[CHANNEL], os.environ[TOKEN])
    return Guard(sys.argv[1:], settings, channel).run()
