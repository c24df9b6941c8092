"""One rank as the agent holds it: its process, its output, its stack file, its socket."""

from __future__ import annotations

import contextlib
import os
import select
import signal

from sgpu_magic.agent.ranks.output import RankOutput
from sgpu_magic.agent.watch.stacks import StackFile
from sgpu_magic.system.message_stream import MessageStream
from sgpu_magic.wire.rank import FromRank


class RankProcess:
    """What the agent has of one rank, also when the process is no more."""

    def __init__(self, rank: int, output: RankOutput, stack_file: StackFile) -> None:
        self.rank = rank
        self.output = output
        self.stack_file = stack_file
        self.pid: int | None = None
        self.pidfd: int | None = None
        # it had been reaped before the agent could watch it; the zygote has yet to report its status
        self.is_reaped = False
        # it was to be killed before it was forked
        self.is_doomed = False
        self.exit_status: int | None = None
        self.peak_bytes = 0
        self.stream: MessageStream[FromRank] | None = None

    @property
    def alive(self) -> bool:
        return self.pid is not None and self.exit_status is None

    def is_dead(self) -> bool:
        """Whether it has ended, also when the zygote has not yet told so."""
        if self.exit_status is not None or self.pidfd is None:
            return not self.alive
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Free what the agent holds of it; the process must be gone or about to go."""
        if self.stream is not None:
            self.stream.close()
            self.stream = None
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        self.output.close()
        self.stack_file.close()

    def signal(self, number: int, *, whole_session: bool = False) -> None:
        """Signal the rank, or with it all that stayed in its process group.

        One that is not forked yet is killed as soon as it is; other signals do not reach it. The zygote reaps a dead
        rank before the agent hears of it; the pidfd says for sure that the pid is still its.
        """
        if self.pid is None:
            self.is_doomed = self.is_doomed or number == signal.SIGKILL
            return
        if self.exit_status is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if whole_session:
                if self.pidfd is not None:
                    signal.pidfd_send_signal(self.pidfd, 0)
                # before its first steps it has none of its own
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, number)
                    return
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, number)
            else:
                os.kill(self.pid, number)
