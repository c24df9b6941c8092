"""One rank as the agent sees it: its process, its socket, its stack file, its output."""

from __future__ import annotations

import contextlib
import os
import select
import signal

from sgpu_magic.agent.ranks.rank_output import RankOutput
from sgpu_magic.agent.watch.stacks import StackFile
from sgpu_magic.system.message_stream import MessageStream
from sgpu_magic.wire.rank import FromRank


class RankProcess:
    """The agent's resources for one rank; they outlive the process."""

    def __init__(self, rank: int, output: RankOutput, stack_file: StackFile) -> None:
        self.rank = rank
        self.output = output
        self.stack_file = stack_file
        self.pid: int | None = None
        self.pidfd: int | None = None
        # reaped before the agent could open a pidfd; the zygote has yet to report its status
        self.is_reaped = False
        # killed as soon as it is forked
        self.is_doomed = False
        self.exit_status: int | None = None
        self.peak_bytes = 0
        self.stream: MessageStream[FromRank] | None = None

    @property
    def alive(self) -> bool:
        return self.pid is not None and self.exit_status is None

    def is_dead(self) -> bool:
        """Whether it has ended, even if the zygote has not reported it yet."""
        if self.exit_status is not None or self.pidfd is None:
            return not self.alive
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Free the agent's resources; the process must be gone or exiting."""
        if self.stream is not None:
            self.stream.close()
            self.stream = None
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        self.output.close()
        self.stack_file.close()

    def signal(self, number: int, *, whole_session: bool = False) -> None:
        """Signal the rank, or its whole process group.

        SIGKILL to a rank that is not forked yet is sent after the fork; other signals are dropped. The zygote may reap
        a dead rank before the agent knows; the pidfd guarantees that the pid is still the rank's.

        Args:
            number: The signal.
            whole_session: Whether to signal the rank's process group.
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
                # just after the fork it has no process group of its own yet
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, number)
                    return
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, number)
            else:
                os.kill(self.pid, number)
