"""Threads that run tasks one after the other."""

from __future__ import annotations

import threading

import pytest
from waiting import eventually

from sgpu_magic.system.serial_threads import SerialExecutor


def test_tasks_run_one_after_the_other_and_none_after_the_end():
    executor = SerialExecutor("sgpu-test-tasks")
    begun, go = threading.Event(), threading.Event()
    done: list[int] = []

    def first() -> None:
        begun.set()
        go.wait(30)
        done.append(1)

    assert executor.is_idle
    executor.put(first)
    executor.put(lambda: done.append(2))
    assert begun.wait(30)
    assert not executor.is_idle
    # the running task finishes, and the queued one is dropped
    threading.Timer(0.05, go.set).start()
    executor.close()
    assert done == [1]
    executor.put(lambda: done.append(3))
    eventually(lambda: executor.is_idle, what="the thread ends")
    assert done == [1]


def test_a_task_that_raises_is_logged_and_the_next_one_runs(caplog: pytest.LogCaptureFixture):
    executor = SerialExecutor("sgpu-test-tasks")
    done = threading.Event()

    def broken() -> None:
        raise OSError("the page is gone")

    executor.put(broken)
    executor.put(done.set)
    assert done.wait(30)
    assert "OSError: the page is gone" in caplog.text
    eventually(lambda: executor.is_idle, what="the thread ends")
