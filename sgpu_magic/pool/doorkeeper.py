"""Counts the connections of a listening socket, and turns away those that are too many."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import zmq
from zmq.utils.monitor import recv_monitor_message

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
# of all users, and of strangers until their handshake's time is over
MOST_CONNECTIONS = 1000


class Doorkeeper:
    """Watches a socket's connections, in the loop's thread.

    Args:
        listening: The socket, before it is bound.
        most: So many are let in at once.
    """

    def __init__(self, listening: zmq.Socket[bytes], most: int = MOST_CONNECTIONS) -> None:
        self._listening = listening
        self._most = most
        self._loop = asyncio.get_running_loop()
        self._descriptors: set[int] = set()
        self._monitor = listening.get_monitor_socket(_EVENTS)
        self._loop.add_reader(self._monitor.fileno(), self._look)
        self._look()

    def close(self) -> None:
        self._loop.remove_reader(self._monitor.fileno())
        self._listening.disable_monitor()
        self._monitor.close(0)

    def _look(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            descriptor = event["value"]
            if event["event"] != zmq.Event.ACCEPTED:
                self._descriptors.discard(descriptor)
                continue
            self._descriptors.add(descriptor)
            if len(self._descriptors) > self._most:
                _turn_away(descriptor)


def _turn_away(descriptor: int) -> None:
    # it may be gone already
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.shutdown(socket.SHUT_RDWR)
