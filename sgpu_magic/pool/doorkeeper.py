"""Counts the connections of a listening socket, and ends those that are too many.

Who has not said hello yet is a stranger. A handshake takes milliseconds: when strangers crowd the door, those who have
stood there longest are sent away, so that whoever has a listed key still gets in.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import zmq
from zmq.utils.monitor import recv_monitor_message

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
MOST_CONNECTIONS = 1000
MOST_STRANGERS = 200


class Doorkeeper:
    """Watches a socket's connections, in the loop's thread.

    Args:
        listening: The socket, before it is bound.
        most: So many are let in at once.
        most_strangers: So many of them may be strangers.
    """

    def __init__(
        self, listening: zmq.Socket[bytes], most: int = MOST_CONNECTIONS, most_strangers: int = MOST_STRANGERS
    ) -> None:
        self._listening = listening
        self._most = most
        self._most_strangers = most_strangers
        self._loop = asyncio.get_running_loop()
        self._known: set[int] = set()
        # their inodes, oldest first
        self._strangers: dict[int, int] = {}
        self._monitor = listening.get_monitor_socket(_EVENTS)
        self._loop.add_reader(self._monitor.fileno(), self._look)
        self._look()

    @property
    def strangers(self) -> int:
        """How many stand there."""
        return len(self._strangers)

    @property
    def descriptors(self) -> set[int]:
        """The sockets of all connections, in this process."""
        return self._known | self._strangers.keys()

    def knows(self, descriptor: int) -> None:
        """Somebody with a listed key has said hello over this connection."""
        if self._strangers.pop(descriptor, None) is not None:
            self._known.add(descriptor)

    def close(self) -> None:
        self._loop.remove_reader(self._monitor.fileno())
        self._listening.disable_monitor()
        self._monitor.close(0)

    def _look(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            descriptor = event["value"]
            self._known.discard(descriptor)
            self._strangers.pop(descriptor, None)
            if event["event"] == zmq.Event.ACCEPTED:
                # it may be gone already, which the next events tell
                with contextlib.suppress(OSError):
                    self._strangers[descriptor] = os.fstat(descriptor).st_ino
        while self._strangers and (
            len(self._strangers) > self._most_strangers or len(self._strangers) + len(self._known) > self._most
        ):
            oldest = next(iter(self._strangers))
            end_connection(oldest, self._strangers.pop(oldest))


def end_connection(descriptor: int, inode: int) -> None:
    """End a connection, which ZeroMQ has no way to say.

    Args:
        descriptor: Its socket in this process.
        inode: Of the same: the descriptor's number may be another's by now.
    """
    with contextlib.suppress(OSError):
        if os.fstat(descriptor).st_ino == inode:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
