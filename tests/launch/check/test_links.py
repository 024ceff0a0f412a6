"""The link test: what it measures, and which link it points at."""

from __future__ import annotations

import socket

from launch.check.links import Link, measure, slow_links, table
from spmd.transport.threads import LocalGroup


def link(first: int, second: int, micros: float = 10.0, rate: float = 4.0, same: bool = True):
    return Link(first, second, micros, rate, same)


def test_a_link_is_compared_with_those_of_its_kind():
    links = [link(0, 1), link(0, 2, micros=50.0), link(1, 2, rate=1.0)]
    assert slow_links(links) == [
        "ranks 0 and 2: 50 µs, where 10 µs is usual",
        "ranks 1 and 2: 1.00 GB/s, where 4.00 GB/s is usual",
    ]
    between = [link(0, k, micros=100.0, rate=1.0, same=False) for k in (3, 4, 5)]
    assert slow_links([link(0, 1), link(0, 2), link(1, 2), *between]) == []
    assert slow_links([link(0, 1), link(0, 2, micros=50.0)]) == []  # too few to tell


def test_all_ranks_learn_all_links():
    first, *others = LocalGroup(3).run(measure)
    assert [(k.first, k.second) for k in first] == [(0, 1), (0, 2), (1, 2)]
    assert all(k.micros > 0 and k.rate > 0 and k.same_host for k in first)
    assert all(found == first for found in others), socket.gethostname()


def test_the_table_has_a_row_a_rank():
    rows = table([link(0, 1, 1.5), link(0, 2, 2.5), link(1, 2, 3.5)], 3, lambda k: k.micros)
    assert [row.split() for row in rows.splitlines()] == [
        ["1", "2"],
        ["0", "1.50", "2.50"],
        ["1", "3.50"],
    ]
