"""Several hosts on one machine: network namespaces joined by a bridge that leads nowhere else.

Each host has a name, an address, a loopback and shared memory of its own; mpirun reaches them
through an agent that takes the place of ssh. Needs root, iproute2 and the right to make namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

# What mpirun runs instead of ssh: `agent [options] HOST COMMAND...`. The first line of the shell
# inside makes the namespace look like a host of its own.
AGENT = """#!/bin/sh
while case "$1" in -*) true;; *) false;; esac; do
    case "$1" in -l|-p|-o) shift;; esac
    shift
done
host=$1; shift
exec ip netns exec {prefix}-$host unshare --uts --ipc sh -c '
    hostname "$0" && mount --bind {hosts} /etc/hosts && mount -t tmpfs tmpfs /dev/shm || exit 99
    exec sh -c "$*"' "$host" "$@"
"""
NETWORK = "10.77.31"  # addresses that no route leads to
# Of MPI libraries that would recognise one machine behind all the hosts.
ENVIRONMENT = {
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_btl_tcp_if_include": "eth0",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_prte_if_include": "eth0",
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": "eth0",
    "FI_PROVIDER": "tcp",
    "FI_TCP_IFACE": "eth0",
    "HYDRA_LAUNCHER": "rsh",
    "HYDRA_IFACE": "eth0",
}


@functools.cache
def why_not() -> str | None:
    """Why this machine can have no pretend hosts; None where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "unshare", "mount") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (iproute2, util-linux)"
    try:
        with Hosts(1) as hosts:
            done = hosts.run(["hostname"], timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        return f"cannot make network namespaces: {str(said).strip()[:200]}"
    return None if done.stdout == "node0\n" else f"cannot enter a namespace: {done.stderr[:200]}"


class Hosts:
    """`count` hosts, called node0 upwards, while the `with` block runs."""

    def __init__(self, count: int):
        self.names = [f"node{k}" for k in range(count)]
        self.prefix = f"spmd{os.getpid()}"
        self.folder = Path(tempfile.mkdtemp(prefix="spmd-hosts-"))
        self.agent = self.folder / "agent"

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self.names, "switch"):
            space = f"{self.prefix}-{name}"
            pids = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True)
            for pid in pids.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _make(self) -> None:
        table = ["127.0.0.1 localhost"]
        switch = f"{self.prefix}-switch"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for k, name in enumerate(self.names):
            space, address = f"{self.prefix}-{name}", f"{NETWORK}.{k + 1}"
            _ip("netns", "add", space)
            _ip(
                "-n", switch, "link", "add", f"p{k}", "type", "veth", "peer", "eth0", "netns", space
            )
            _ip("-n", switch, "link", "set", f"p{k}", "master", "br0", "up")
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", space, "link", "set", device, "up")
            table.append(f"{address} {name}")
        hosts = self.folder / "hosts"
        hosts.write_text("\n".join(table) + "\n")
        self.agent.write_text(AGENT.format(prefix=self.prefix, hosts=hosts))
        self.agent.chmod(0o755)
        self._wait_until_up()

    def hostfile(self, slots: int = 1) -> str:
        """The path of a hostfile for spmdrun with `slots` ranks on each host."""
        path = self.folder / f"hostfile-{slots}"
        path.write_text("".join(f"{name} slots={slots}\n" for name in self.names))
        return str(path)

    def environment(self) -> dict[str, str]:
        """What mpirun and the MPI libraries must know to see hosts here."""
        agent = str(self.agent)
        return {**ENVIRONMENT, "PRTE_MCA_plm_ssh_agent": agent, "HYDRA_LAUNCHER_EXEC": agent}

    def command(self, command: Sequence[str]) -> list[str]:
        """`command` as it runs on the first host; its words must need no quotes."""
        return [str(self.agent), self.names[0], *command]

    def run(
        self, command: Sequence[str], environ: Mapping[str, str] = {}, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the first host."""
        return subprocess.run(
            self.command(command),
            env={**os.environ, **self.environment(), **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    @contextlib.contextmanager
    def slow_link(self, megabits: int, delay_ms: float = 0.0) -> Iterator[None]:
        """Limit what each host sends, and delay it where the kernel can (`sch_netem`)."""
        kind = (
            ["netem", "delay", f"{delay_ms}ms", "rate", f"{megabits}mbit"]
            if delay_ms
            else ["tbf", "rate", f"{megabits}mbit", "burst", "256kb", "latency", "50ms"]
        )
        spaces = [f"{self.prefix}-{name}" for name in self.names]
        for space in spaces:
            _run("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", "eth0", "root", *kind)
        try:
            yield
        finally:
            for space in spaces:
                _run("ip", "netns", "exec", space, "tc", "qdisc", "del", "dev", "eth0", "root")

    def _wait_until_up(self, seconds: float = 10.0) -> None:
        """Return when the link of every host is up: a bridge takes a moment."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            states = [
                _run("ip", "-n", f"{self.prefix}-{name}", "-br", "link", "show", "eth0")
                for name in self.names
            ]
            if all(" UP " in state for state in states):
                return
            time.sleep(0.05)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=20).stdout


def main() -> int:
    """Run spmdrun over pretend hosts: `2 --megabits 300 -- -n 2 -m program`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("hosts", type=int)
    parser.add_argument("--megabits", type=int, default=0, help="what each host may send a second")
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds, with --megabits")
    parser.add_argument("words", nargs="+", help="options of spmdrun and the program")
    given = parser.parse_args()
    with Hosts(given.hosts) as hosts:
        link = hosts.slow_link(given.megabits, given.delay) if given.megabits else None
        with link or contextlib.nullcontext():
            command = [sys.executable, "-m", "launch", "--hostfile", hosts.hostfile()]
            own = {"PYTHONPATH": os.getcwd()}
            done = hosts.run([*command, *given.words], own, timeout=600)
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
