"""Values that ranks leave for each other under names, and barriers with names.

Rank 0 keeps the values; the others reach it by a socket. The calls are not collective: one rank
sets what another waits for, from any thread and at any time, beside collectives that are under
way. Libraries that write checkpoints in the background need this (JAX's coordination service).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from typing import Any

from spmd.base.background import start_thread
from spmd.base.errors import ArgumentError, CollectiveError, PeerError
from spmd.transport.call_signature import ranks_text

__all__ = ["KeyValueClient", "KeyValueStore", "RemoteStore", "Server", "start"]

# How long rank 0 stays at the end of its program for requests that it has not answered.
DRAIN_SECONDS = 5.0
CONNECT_SECONDS = 20


# ---- the store of rank 0 -----------------------------------------------------------------------


class _Barrier:
    """The ranks that have come to a barrier, and what became of it."""

    def __init__(self, members: frozenset[int]):
        self.members = members
        self.arrived: set[int] = set()
        self.passed = False
        self.failure = ""


class KeyValueStore:
    """Values by name, and barriers: the state that `size` ranks share, for threads of any rank.

    Names are paths, in which slashes at the ends and double slashes count for nothing.
    """

    def __init__(self, size: int):
        self._everyone = frozenset(range(size))
        self._values: dict[str, bytes] = {}
        self._barriers: dict[str, _Barrier] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes, allow_overwrite: bool) -> None:
        """Keep a value, and wake those that wait for it."""
        with self._changed:
            if not allow_overwrite and _normal(key) in self._values:
                raise CollectiveError(f"ALREADY_EXISTS: key {_normal(key)} already exists.")
            self._values[_normal(key)] = value
            self._changed.notify_all()

    def get(self, key: str, seconds: float) -> bytes:
        """A value, waiting for it if need be."""
        with self._changed:
            if not self._changed.wait_for(lambda: _normal(key) in self._values, seconds):
                raise CollectiveError(
                    f"DEADLINE_EXCEEDED: GetKeyValue() timed out with key: {_normal(key)} and "
                    f"duration: {round(seconds * 1000)}ms"
                )
            return self._values[_normal(key)]

    def try_get(self, key: str) -> bytes:
        """A value that is there."""
        with self._changed:
            if _normal(key) not in self._values:
                raise CollectiveError(f"NOT_FOUND: Config key {_normal(key)} not found.")
            return self._values[_normal(key)]

    def directory(self, key: str) -> list[tuple[str, bytes]]:
        """All names below one, with their values, in order."""
        with self._changed:
            start = _normal(key) + "/"
            return sorted(item for item in self._values.items() if item[0].startswith(start))

    def delete(self, key: str) -> None:
        """Forget a value, and all that are below its name."""
        with self._changed:
            name = _normal(key)
            for found in [k for k in self._values if k == name or k.startswith(name + "/")]:
                del self._values[found]

    def increment(self, key: str, by: int) -> int:
        """Add to a value that is a number in decimal digits; one that is not there is 0."""
        with self._changed:
            text = self._values.get(_normal(key), b"0").decode(errors="replace")
            try:
                number = int(text) + by
            except ValueError:
                raise CollectiveError(
                    f'FAILED_PRECONDITION: Failed to parse value "{text}" as an integer.'
                ) from None
            self._values[_normal(key)] = str(number).encode()
            self._changed.notify_all()
            return number

    def barrier(self, name: str, seconds: float, members: Iterable[int], rank: int) -> None:
        """Wait until all members have come; without members all ranks are meant."""
        wanted = frozenset(members) or self._everyone
        if not wanted <= self._everyone or rank not in wanted:
            raise CollectiveError(
                f"INVALID_ARGUMENT: barrier {name} of {ranks_text(sorted(wanted))}, called by rank "
                f"{rank} of {len(self._everyone)}: its members are ranks, the caller among them."
            )
        with self._changed:
            barrier = self._barriers.setdefault(name, _Barrier(wanted))
            if barrier.members != wanted:
                raise CollectiveError(
                    f"INVALID_ARGUMENT: barrier {name} is of {ranks_text(sorted(wanted))} for rank "
                    f"{rank}, and of {ranks_text(sorted(barrier.members))} for those that came "
                    "before."
                )
            barrier.arrived.add(rank)
            if barrier.arrived == wanted:
                barrier.passed = True
                self._barriers.pop(name)
                self._changed.notify_all()
            over = lambda: barrier.passed or barrier.failure  # noqa: E731
            if not self._changed.wait_for(over, seconds):
                barrier.failure = (
                    f"DEADLINE_EXCEEDED: Barrier timed out. Id: {name}. This usually happens "
                    "because a task triggered the barrier too early or too slowly. Waited "
                    f"{seconds:g} s for {ranks_text(sorted(wanted - barrier.arrived))}."
                )
                self._barriers.pop(name)
                self._changed.notify_all()
            if barrier.failure:
                raise CollectiveError(barrier.failure)


def _normal(key: str) -> str:
    return "/".join(part for part in key.split("/") if part)


# ---- the socket of rank 0 ----------------------------------------------------------------------


class Server:
    """Answers requests of other ranks, each connection in a thread of its own."""

    def __init__(self, store: KeyValueStore, host: str):
        self.store = store
        self.token = secrets.token_bytes(32)
        self._listener = Listener((host, 0), backlog=64)
        self.port = self._listener.address[1]
        self._busy = 0
        self._idle = threading.Condition()
        self._run(self._accept)
        atexit.register(self._drain)

    def _run(self, call: Callable[..., None], *args: Any) -> None:
        start_thread(partial(call, *args), "spmd key-value", daemon=True)

    def _accept(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # one that was broken off
                self._run(self._serve, self._listener.accept())

    def _serve(self, connection: Connection) -> None:
        # A stranger fails at the challenge.
        with contextlib.suppress(EOFError, OSError, AuthenticationError), connection:
            deliver_challenge(connection, self.token)
            answer_challenge(connection, self.token)
            while True:
                method, args = connection.recv()
                with self._answering():
                    try:
                        answer: tuple[bool, Any] = True, getattr(self.store, method)(*args)
                    except CollectiveError as error:
                        answer = False, error.text
                    connection.send(answer)

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        with self._idle:
            self._busy += 1
        try:
            yield
        finally:
            with self._idle:
                self._busy -= 1
                self._idle.notify_all()

    def _drain(self) -> None:
        """Others may still wait for the answer to what this rank has answered for itself."""
        with self._idle:
            self._idle.wait_for(lambda: not self._busy, DRAIN_SECONDS)


class RemoteStore:
    """The store of rank 0, seen from another rank: a connection for each call under way."""

    def __init__(self, hosts: Sequence[str], port: int, token: bytes):
        self._hosts, self._port, self._token = hosts, port, token
        self._process = os.getpid()
        self._idle: list[Connection] = []
        self._lock = threading.Lock()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args: self._ask(method, args)

    def _ask(self, method: str, args: tuple[Any, ...]) -> Any:
        with self._lock:
            if os.getpid() != self._process:  # a forked child shares no connection
                self._idle, self._process = [], os.getpid()
            connection = self._idle.pop() if self._idle else None
        try:
            connection = connection or self._connect()
            connection.send((method, args))
            done, result = connection.recv()
        except (EOFError, OSError, AuthenticationError) as error:
            raise PeerError(
                f"UNAVAILABLE: {method}{args[:1]}: rank 0, which keeps the values, has ended or "
                f"can't be reached ({type(error).__name__}: {error})"
            ) from error
        with self._lock:
            self._idle.append(connection)
        if not done:
            raise CollectiveError(result)
        return result

    def _connect(self) -> Connection:
        """Reach rank 0 at the first of its names that works."""
        error: OSError | None = None
        for host in self._hosts:
            try:
                socket.create_connection((host, self._port), CONNECT_SECONDS).close()
                return Client((host, self._port), authkey=self._token)
            except OSError as failed:
                error = failed
        raise error or OSError("rank 0 has no address")


# ---- what libraries see ------------------------------------------------------------------------


class KeyValueClient:
    """The store of this job, with the methods of JAX's `DistributedRuntimeClient`.

    Times are in milliseconds. Errors are `RuntimeError`s whose text begins with the status that
    gRPC has for the case: `NOT_FOUND`, `ALREADY_EXISTS`, `DEADLINE_EXCEEDED`, `INVALID_ARGUMENT`.
    """

    def __init__(self, store: Any, rank: int):
        self._store = store
        self._rank = rank

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Keep a text under a name; one that is taken is an error without `allow_overwrite`."""
        self._store.set(_text(key), _text(value, "value").encode(), bool(allow_overwrite))

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        """Keep bytes under a name."""
        if not isinstance(value, bytes):
            raise ArgumentError(f"key_value_set_bytes: value must be bytes, got {value!r}")
        self._store.set(_text(key), value, bool(allow_overwrite))

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """The text under a name, once a rank has set it."""
        return self.blocking_key_value_get_bytes(key, timeout_in_ms).decode()

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """The bytes under a name, once a rank has set them."""
        return self._store.get(_text(key), timeout_in_ms / 1000)

    def key_value_try_get(self, key: str) -> str:
        """The text under a name, which must be there."""
        return self.key_value_try_get_bytes(key).decode()

    def key_value_try_get_bytes(self, key: str) -> bytes:
        """The bytes under a name, which must be there."""
        return self._store.try_get(_text(key))

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """All names below one, with their texts."""
        return [(name, value.decode()) for name, value in self.key_value_dir_get_bytes(key)]

    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]:
        """All names below one, with their bytes."""
        return self._store.directory(_text(key))

    def key_value_increment(self, key: str, increment: int) -> int:
        """Add to the number under a name, and return the sum."""
        return self._store.increment(_text(key), int(increment))

    def key_value_delete(self, key: str) -> None:
        """Forget a name, and all below it."""
        self._store.delete(_text(key))

    def wait_at_barrier(
        self, barrier_id: str, timeout_in_ms: int, process_ids: Sequence[int] | None = None
    ) -> None:
        """Wait until all processes, or those that are given, have come to the barrier."""
        members = tuple(map(int, process_ids or ()))
        self._store.barrier(_text(barrier_id), timeout_in_ms / 1000, members, self._rank)


def _text(value: Any, what: str = "key") -> str:
    if not isinstance(value, str):
        raise ArgumentError(f"key_value: {what} must be a str, got {value!r}")
    return value


# ---- start -------------------------------------------------------------------------------------


def start(job: Any) -> KeyValueClient:
    """The client of this rank in a job of several. **Every rank must make the call.**"""
    comm = job.world
    if comm.rank:
        hosts, port, token = comm.all_gather_object(None)[0]
        return KeyValueClient(RemoteStore(hosts, port, token), comm.rank)
    one_host = job.local_size == comm.size
    server = Server(KeyValueStore(comm.size), "127.0.0.1" if one_host else "")
    hosts = ["127.0.0.1"] if one_host else _own_names()
    comm.all_gather_object((hosts, server.port, server.token))
    return KeyValueClient(server.store, 0)


def _own_names() -> list[str]:
    """Names under which other hosts may reach this one, the likeliest first."""
    name = socket.gethostname()
    found = [name]
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)]
    return list(dict.fromkeys(host for host in found if not host.startswith("127.")))
