"""Requests that wait for an answer."""

from __future__ import annotations

from sgpu_magic.system.message_stream import Pending


def test_each_request_is_answered_once():
    pending = Pending[int, str]()
    pending.add(1, "a")
    pending.add(2, "b")
    assert pending.get(2) == "b"
    assert pending.take(2) == "b"
    assert pending.take(2) is pending.get(2) is None
    assert list(pending) == ["a"]


def test_those_that_nobody_will_answer_are_taken_in_the_order_of_asking():
    pending = Pending[str, int]()
    for key, value in (("x", 3), ("y", 4), ("z", 5)):
        pending.add(key, value)
    assert pending.take_all(lambda value: value != 4) == [3, 5]
    assert list(pending) == [4]


def test_a_request_may_be_added_while_others_are_looked_at():
    pending = Pending[int, int]()
    pending.add(0, 0)
    for each in pending:
        pending.add(each + 1, each + 1)
    assert list(pending) == [0, 1]
