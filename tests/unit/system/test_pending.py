"""Requests that wait for an answer."""

from __future__ import annotations

from sgpu_magic.system.message_stream import Pending


def test_each_request_is_answered_once():
    pending = Pending[int, str]()
    pending[1] = "a"
    pending[2] = "b"
    assert pending.get(2) == "b"
    assert pending.pop(2) == "b"
    assert pending.pop(2, None) is pending.get(2) is None
    assert pending == {1: "a"}


def test_those_that_nobody_will_answer_are_taken_in_the_order_of_asking():
    pending = Pending[str, int]()
    for key, value in (("x", 3), ("y", 4), ("z", 5)):
        pending[key] = value
    assert pending.take_all(lambda value: value != 4) == [3, 5]
    assert pending == {"y": 4}


def test_a_request_may_be_added_while_others_are_looked_at():
    pending = Pending[int, int]()
    pending[0] = 0
    for each in list(pending):
        pending[each + 1] = each + 1
    assert list(pending) == [0, 1]
