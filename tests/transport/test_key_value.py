"""Values under names and named barriers, between threads that stand for ranks."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from spmd.errors import ArgumentError, CollectiveError, PeerError
from spmd.transport import key_value


@pytest.fixture
def server():
    return key_value.Server(key_value.KeyValueStore(3), "127.0.0.1")


@pytest.fixture
def ranks(server):
    """Rank 0 with the store itself, and ranks 1 and 2 that reach it by a socket."""
    remote = [key_value.RemoteStore(["127.0.0.1"], server.port, server.token) for _ in range(2)]
    return [key_value.KeyValueClient(s, r) for r, s in enumerate([server.store, *remote])]


def test_a_rank_reads_what_another_has_set(ranks):
    ranks[1].key_value_set("a/b", "1")
    assert [r.key_value_try_get("a/b") for r in ranks] == ["1"] * 3
    for rank in ranks:
        with pytest.raises(RuntimeError, match=r"^ALREADY_EXISTS: key a/b already exists"):
            rank.key_value_set("a/b", "2")
    ranks[2].key_value_set("a/b", "3", allow_overwrite=True)
    ranks[0].key_value_set_bytes("/a//c/", b"\xff\0")
    assert ranks[1].key_value_dir_get_bytes("a/") == [("a/b", b"3"), ("a/c", b"\xff\0")]
    assert ranks[2].key_value_try_get_bytes("a/c") == b"\xff\0"
    ranks[1].key_value_set("ab", "beside")
    ranks[1].key_value_delete("a")
    ranks[1].key_value_delete("nothing")
    assert ranks[0].key_value_dir_get("a") == []
    assert ranks[0].key_value_try_get("ab") == "beside"
    with pytest.raises(RuntimeError, match=r"^NOT_FOUND: Config key a/b not found"):
        ranks[1].key_value_try_get("a/b")


def test_a_reader_waits_for_the_value(ranks):
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(r.blocking_key_value_get, "late", 20_000) for r in ranks]
        ranks[1].key_value_set("late", "here")
        assert [w.result() for w in waiting] == ["here"] * 3
    for rank in ranks[:2]:
        with pytest.raises(RuntimeError, match=r"^DEADLINE_EXCEEDED: .*key: never and .*20ms"):
            rank.blocking_key_value_get("never", 20)


def test_counters_are_sums_of_all_ranks(ranks):
    with ThreadPoolExecutor() as pool:
        sums = list(pool.map(lambda k: ranks[k % 3].key_value_increment("n", 2), range(30)))
    assert sorted(sums) == list(range(2, 62, 2))
    assert ranks[1].key_value_try_get("n") == "60"
    ranks[1].key_value_set("text", "z")
    with pytest.raises(RuntimeError, match='FAILED_PRECONDITION: Failed to parse value "z"'):
        ranks[2].key_value_increment("text", 1)


@pytest.mark.parametrize("members", [None, [0, 2], [2, 1]])
def test_a_barrier_waits_for_its_members(ranks, members):
    left = []
    chosen = members or [0, 1, 2]

    def come(k):
        ranks[k].wait_at_barrier("met", 20_000, process_ids=members)
        left.append(k)

    for _ in range(2):  # a name may be used again
        threads = [threading.Thread(target=come, args=(k,)) for k in chosen[:-1]]
        for thread in threads:
            thread.start()
        assert not left
        come(chosen[-1])
        for thread in threads:
            thread.join()
        assert sorted(left) == sorted(chosen)
        left.clear()


def test_a_barrier_fails_for_all_that_came_and_names_who_is_missing(ranks):
    with ThreadPoolExecutor() as pool:
        long = pool.submit(ranks[0].wait_at_barrier, "b", 20_000)
        short = pool.submit(ranks[1].wait_at_barrier, "b", 300)
        for waiting in (long, short):
            with pytest.raises(CollectiveError, match=r"^DEADLINE_EXCEEDED: Barrier timed out. Id"):
                waiting.result()
        assert "for rank" in str(long.exception()) and "2" in str(long.exception())


def test_barriers_of_others_are_refused(ranks):
    with pytest.raises(CollectiveError, match=r"INVALID_ARGUMENT: .*rank 1 of 3"):
        ranks[1].wait_at_barrier("b", 100, [0, 2])
    with pytest.raises(CollectiveError, match=r"INVALID_ARGUMENT: .*ranks 0, 3"):
        ranks[0].wait_at_barrier("b", 100, [0, 3])


@pytest.mark.parametrize("wrong", [3, b"a"])
def test_names_and_values_are_texts(ranks, wrong):
    with pytest.raises(ArgumentError, match="key must be a str"):
        ranks[0].key_value_set(wrong, "x")
    with pytest.raises(ArgumentError, match="value must be a str"):
        ranks[0].key_value_set("x", wrong)


def test_strangers_get_nothing(server, ranks):
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(b"\0\0\0\4abcd")
        ranks[1].key_value_set("x", "1")  # others are served all the while
    wrong = key_value.RemoteStore(["127.0.0.1"], server.port, b"guess")
    with pytest.raises(PeerError, match=r"^UNAVAILABLE: try_get"):
        key_value.KeyValueClient(wrong, 1).key_value_try_get("x")


def test_a_rank_hears_that_rank_0_is_gone():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    gone = key_value.KeyValueClient(key_value.RemoteStore(["127.0.0.1"], port, b"any"), 1)
    with pytest.raises(PeerError, match="rank 0, which keeps the values, has ended"):
        gone.key_value_try_get("x")
