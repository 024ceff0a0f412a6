"""One rank's guard: starts the program, passes its output on, and reports how it ended.

mpirun starts this file, by its path, once a rank; it imports the standard library only. The program
is its child in a session of its own, so that ending the rank ends all that it started. The
guard talks to spmdrun over a socket in frames: one letter, the length of the payload, the payload.
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

HEADER = struct.Struct("!cI")
HELLO, STDIN, STDOUT, STDERR, EXIT = b"h", b"i", b"o", b"e", b"x"

CHANNEL, TOKEN, SETTINGS = "SPMDRUN_CHANNEL", "SPMDRUN_TOKEN", "SPMDRUN_SETTINGS"
REPORT_FILE = "SPMD_FAILURE_REPORT"
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "SPMD_NUM_THREADS",
)

# Between asking a program to end and ending it.
GRACE_SECONDS = 1.5
# Until spmdrun has heard from all ranks.
LINGER_SECONDS = 10.0
# For output that is still under way when the program has ended.
DRAIN_SECONDS = 0.5
_READ_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1


def frame(kind: bytes, payload: bytes) -> bytes:
    """One message to spmdrun."""
    return HEADER.pack(kind, len(payload)) + payload


def place(environ: dict[str, str]) -> tuple[int, int, int]:
    """This rank, its number among the ranks of its host, and how many those are (0: unknown)."""
    rank = _first(environ, "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
    local = _first(environ, "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
    size = _first(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    return rank or 0, rank or 0 if local is None else local, size or 0


def _first(environ: dict[str, str], *names: str) -> int | None:
    return next((int(environ[name]) for name in names if name in environ), None)


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


# ---- the program -------------------------------------------------------------------------------


class Guard:
    """Runs one program and forwards what it says."""

    def __init__(self, command: list[str], settings: dict, channel: socket.socket | None):
        self.rank, self.local_rank, self.local_size = place(dict(os.environ))
        self.local_size = self.local_size or settings["ranks"]
        self.command = command
        self.settings = settings
        self.channel = channel
        self.stopping: float | None = None
        self.report = ""

    def environment(self, cpus: list[int]) -> dict[str, str]:
        """What the program sees."""
        environ = {name: v for name, v in os.environ.items() if not name.startswith("SPMDRUN_")}
        for name in THREAD_VARIABLES:
            environ.setdefault(name, str(len(cpus)))
        environ.setdefault("PYTHONUNBUFFERED", "1")  # the last line before a crash must get out
        environ.setdefault("PYTHONFAULTHANDLER", "1")
        if self.channel is not None:
            folder = self.settings["folder"]
            folder = folder if os.path.isdir(folder) else "/tmp"
            self.report = os.path.join(folder, f"rank-{self.rank}-{os.getpid()}.json")
            environ[REPORT_FILE] = self.report
        return environ

    def start(self) -> subprocess.Popen:
        cpus = by_core(sorted(os.sched_getaffinity(0)))
        mine = share(cpus, self.local_rank, self.local_size)
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
        """What rank 0 reads from: spmdrun's own input, be it a terminal, handed over as it is."""
        if self.channel is None or self.channel.family != socket.AF_UNIX:
            return None  # mpirun forwards what it can
        if self.rank:
            return subprocess.DEVNULL
        self.channel.sendall(frame(STDIN, b""))
        _, handed, _, _ = socket.recv_fds(self.channel, 1, 1)
        return handed[0] if handed else subprocess.DEVNULL

    def run(self) -> int:
        """Run the program to its end; returns its exit code, 128 + n for signal n."""
        try:
            program = self.start()
        except OSError as error:
            self.send(STDERR, f"{self.command[0]}: {error.strerror}\n".encode())
            self.send(EXIT, json.dumps({"code": 127}).encode())
            return 127
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self.stop(program))
        hello = {"rank": self.rank, "host": socket.gethostname(), "group": program.pid}
        self.send(HELLO, json.dumps(hello).encode())
        self.forward(program)
        code = program.wait()
        _kill_group(program.pid, signal.SIGKILL)  # what the program left running ends with it
        self.send(EXIT, json.dumps(self.ending(code)).encode())
        if code:
            self.linger()
        return code if code >= 0 else 128 - code

    def ending(self, code: int) -> dict:
        """How the program ended, with the report that spmd wrote if it raised."""
        ending = {"code": code, "stopped": self.stopping is not None}
        try:
            with open(self.report, encoding="utf-8") as file:
                ending["report"] = json.load(file)
            os.unlink(self.report)
        except (OSError, ValueError):
            pass  # no exception, or none that spmd saw
        return ending

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

    def stop(self, program: subprocess.Popen) -> None:
        """Ask the program to end; `forward` ends it if it does not."""
        if self.stopping is None:
            self.stopping = time.monotonic()
            _kill_group(program.pid, signal.SIGTERM)

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
                if key.data is None:  # any word from spmdrun means: end; and so does silence
                    self.stop(program)
                else:
                    self.send(key.data, data)
                if not data:
                    waiting.unregister(key.fileobj)
                    pipes -= key.data is not None
            self.enforce(program)
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
        if self.stopping is not None and time.monotonic() > self.stopping + GRACE_SECONDS:
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


if __name__ == "__main__":
    sys.exit(main())
