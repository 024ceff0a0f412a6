"""What spmdrun does with the words of its guards, without ranks."""

from __future__ import annotations

import json
import selectors
import socket

from launch import options
from launch.supervise.rank import EXIT, HELLO, frame
from launch.supervise.supervisor import Link, Supervisor


def guard(supervisor: Supervisor, rank: int) -> tuple[Link, socket.socket]:
    """A guard that has said hello, as the supervisor knows it, and its own end of the line."""
    near, far = socket.socketpair()
    link = Link(near, trusted=True)
    supervisor.links.append(link)
    supervisor.select.register(near, selectors.EVENT_READ, link)
    say(far, HELLO, rank=rank, group=None, host="here")
    supervisor.hear(link)
    return link, far


def say(channel: socket.socket, kind: bytes, **words) -> None:
    channel.sendall(frame(kind, json.dumps(words).encode()))


def test_guards_that_end_in_one_round():
    """The last to end makes the supervisor hang up on all, of whom some were just to be heard."""
    supervisor = Supervisor(options.parse(["-n", "2", "true"]), mpi=None)
    (first, its_end), (last, last_end) = guard(supervisor, 0), guard(supervisor, 1)
    supervisor.ask_at = 0.0  # the end was asked for, as on a signal
    say(its_end, EXIT, code=0, stopped=True)
    supervisor.hear(first)
    its_end.close()
    say(last_end, EXIT, code=0, stopped=True)
    heard = {key.data.rank for key, _ in supervisor.select.select(1.0)}
    assert heard == {0, 1}
    supervisor.hear(last)
    supervisor.hear(first)
    assert supervisor.links == []
    assert [ending.code for ending in supervisor.endings] == [0, 0]
    supervisor.select.close()
    last_end.close()
