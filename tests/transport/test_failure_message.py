"""The line in which a rank says why it ends."""

from __future__ import annotations

from spmd.errors import CollectiveError, PeerError
from spmd.transport.failure_message import failure_text, first_error


def handled(last: type[Exception], hides: bool = False) -> Exception:
    """The error of a collective that a `finally` makes while another error is under way."""
    try:
        try:
            raise ValueError("bad label")
        except ValueError as error:
            if hides:
                raise last("ranks disagree") from None
            raise last("ranks disagree") from error
    except last as error:
        return error


def test_the_error_before_a_disagreement_is_the_ranks_failure():
    first = first_error(handled(CollectiveError))
    assert failure_text(1, first).startswith("rank 1: ValueError at test_failure_message.py:")


def test_a_hidden_error_and_the_failure_of_another_rank_stay():
    for error in (handled(CollectiveError, hides=True), handled(PeerError), handled(KeyError)):
        assert first_error(error) is error
