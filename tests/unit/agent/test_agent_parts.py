"""The agent's parts by themselves: root cause, marked output, rank connections, leftover processes, the keeper."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import itertools
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path

import psutil
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import eventually

from sgpu_magic.agent.failures import find_root_cause
from sgpu_magic.agent.rank_deaths import describe_death
from sgpu_magic.agent.ranks import rank_output
from sgpu_magic.agent.ranks.group import Group
from sgpu_magic.agent.ranks.rank_output import RankOutput
from sgpu_magic.agent.ranks.run_processes import RUN_VARIABLE, kill_marked, processes_of
from sgpu_magic.agent.ranks.stop import connections_between
from sgpu_magic.agent.runs.run_memory import BackgroundCopier, CopyJob
from sgpu_magic.system.message_stream import MessageStream, StreamConnection
from sgpu_magic.wire import codec
from sgpu_magic.wire.base import FailureKind
from sgpu_magic.wire.codec import STDERR_BEGIN, STDERR_END
from sgpu_magic.wire.rank import Exit, Fork, FromRank, Joined, Remarked, StandsBy, ToRank
from sgpu_magic.wire.rank_events import Failure, OutputWritten

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# ---------------------------------------------------------------- the root cause


def failure(rank: int, at: float, *, victim: bool = False, stopped: bool = False, message: str = "") -> Failure:
    return Failure(
        kind=FailureKind.USER_CODE, message=message, rank=rank, at=at, is_consequence=victim, after_stop=stopped
    )


def died(status: int, rank: int = 0, pid: int | None = None) -> Failure:
    return Failure(kind=FailureKind.WORKER_DIED, message="", rank=rank, at=1.0, exit_status=status, pid=pid)


def test_nothing_failed():
    assert find_root_cause([]) is None


def test_the_first_failure_is_to_blame():
    first, second = failure(3, 1.0), failure(0, 2.0)
    assert find_root_cause([second, first]) == (first, (second,))


def test_a_victim_is_not_to_blame_although_it_was_first():
    victim, culprit, late = failure(0, 1.0, victim=True), failure(2, 1.5), failure(1, 1.7, victim=True)
    assert find_root_cause([victim, culprit, late]) == (culprit, (victim, late))


def test_with_victims_only_the_earliest_is_shown():
    one, two = failure(1, 5.0, victim=True), failure(0, 4.0, victim=True)
    assert find_root_cause([one, two]) == (two, (one,))


def test_every_combination_of_three_failures():
    # own failures, consequences of collectives and failures after the stop, in every order of time
    facts = [(False, False), (False, True), (True, False), (True, True)]
    for kinds in itertools.product(facts, repeat=3):
        for times in itertools.permutations((1.0, 2.0, 3.0)):
            failures = [
                failure(rank, at, victim=victim, stopped=stopped)
                for rank, ((stopped, victim), at) in enumerate(zip(kinds, times, strict=True))
            ]
            found = find_root_cause(failures)
            assert found is not None
            cause, others = found
            assert sorted([cause, *others], key=lambda one: one.at) == sorted(failures, key=lambda one: one.at)
            for other in others:
                # own failures come before failed collectives, and both before failures after the stop
                assert (cause.after_stop, cause.is_consequence) <= (other.after_stop, other.is_consequence)
                if (cause.after_stop, cause.is_consequence) == (other.after_stop, other.is_consequence):
                    assert cause.at < other.at


@given(st.lists(st.tuples(st.floats(0, 10), st.booleans()).map(lambda p: failure(0, p[0], victim=p[1])), min_size=1))
def test_the_culprit_is_never_a_victim_when_there_is_another(failures: list[Failure]):
    found = find_root_cause(failures)
    assert found is not None
    culprit, others = found
    assert len(others) == len(failures) - 1
    assert [other.at for other in others] == sorted(other.at for other in others)
    causes = [one.at for one in failures if not one.is_consequence]
    assert culprit.is_consequence == (not causes)
    assert culprit.at == min(causes or [one.at for one in failures])


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (
            -signal.SIGKILL,
            "rank 2 of 4 (process 4711) was killed by SIGKILL: out of memory, or another process killed it",
        ),
        (-signal.SIGSEGV, "rank 2 of 4 (process 4711) was killed by SIGSEGV: a crash in C code"),
        (-63, "rank 2 of 4 (process 4711) was killed by signal 63"),
        (7, "rank 2 of 4 (process 4711) exited with code 7 before its cell ended"),
        (0, "rank 2 of 4 (process 4711) exited with code 0 before its cell ended"),
    ],
)
def test_a_death_tells_how(status: int, says: str):
    reported = describe_death(
        died(status, rank=2, pid=4711), 4, last_line="Cell In[9], line 6: work()", last_output="one\nlast words\n"
    )
    assert reported.message.startswith(says)
    assert reported.death is not None
    assert (reported.death.last_line, reported.death.line_age_s) == ("Cell In[9], line 6: work()", 0.0)
    assert reported.death.last_output == ("one", "last words")
    # no sample is taken while C code holds the interpreter
    old = describe_death(died(-signal.SIGKILL), 2, last_line="Cell In[9], line 6: work()", line_age_s=1.23)
    assert old.death is not None
    assert old.death.line_age_s == 1.23
    assert (reported.kind, reported.rank, reported.exit_status, reported.pid) == (
        FailureKind.WORKER_DIED,
        2,
        status,
        4711,
    )


def test_a_death_of_which_nothing_is_known_says_nothing_more():
    assert describe_death(died(-signal.SIGTERM), 1).message == (
        "rank 0 of 1 was killed by SIGTERM: another process asked it to end"
    )


def test_what_is_known_of_a_signal_takes_the_place_of_what_it_usually_means():
    reported = describe_death(died(-signal.SIGKILL), 1, meaning="the system's out-of-memory killer ended it")
    assert reported.message == "rank 0 of 1 was killed by SIGKILL: the system's out-of-memory killer ended it"


# ---------------------------------------------------------------- output


def fail_on_log_end(rank: int, problem: str) -> None:
    pytest.fail(f"the log of rank {rank} ended: {problem}")


def through_pipes(
    chunks: list[tuple[int, bytes]],
    log: Path | None = None,
    whole_bytes: int = 1 << 20,
    log_ended: Callable[[int, str], None] = fail_on_log_end,
) -> tuple[list[OutputWritten], RankOutput]:
    """Write each chunk into the rank's pipe 0 or 1 and read it before the next, as a busy agent does."""
    batches: list[OutputWritten] = []

    async def run() -> RankOutput:
        output = RankOutput(0, whole_bytes, batches.append, log_ended)
        if log is not None:
            output.begin_log(str(log))
        for pipe, data in chunks:
            os.write(output.child_ends[pipe], data)
            output.drain()
        output.drain(last=True)
        output.close()
        return output

    return batches, asyncio.run(run())


def text_of(batches: list[OutputWritten], stream: str) -> str:
    return "".join(batch.text for batch in batches if batch.stream == stream)


def with_ends(written: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the expected output, with a line end wherever the other stream interrupts a line."""
    runs = [(stream, "".join(text for _, text in group)) for stream, group in itertools.groupby(written, itemgetter(0))]
    parted: list[tuple[str, str]] = []
    for at, (stream, text) in enumerate(runs):
        line = text.rpartition("\n")[2]
        end = "" if not line or at == len(runs) - 1 else "\r" if "\r" in line else "\n"
        parted.append((stream, text + end))
    return parted


texts = st.text(st.sampled_from("ab\n\r\x1b]é🙂sgpu;12\x07"), min_size=1)
pieces = st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), texts), max_size=6)


@settings(deadline=None, max_examples=examples(150))
@given(written=pieces, cuts=st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_marked_output_cut_anywhere_is_the_same_text(written: list[tuple[str, str]], cuts: list[int]):
    # leave out programs that print a mark themselves
    written = [(stream, text) for stream, text in written if "\x1b]sgpu;" not in text]
    marked = b"".join(
        text.encode() if stream == "stdout" else STDERR_BEGIN + text.encode() + STDERR_END for stream, text in written
    )
    chunks: list[tuple[int, bytes]] = []
    rest, turn = marked, 0
    while rest:
        size = cuts[turn % len(cuts)]
        chunks.append((0, rest[:size]))
        rest, turn = rest[size:], turn + 1
    batches, output = through_pipes(chunks)
    parted = with_ends(written)
    for stream in ("stdout", "stderr"):
        assert text_of(batches, stream) == "".join(text for its, text in parted if its == stream)
    everything = "".join(text for _, text in parted)
    assert output.total_bytes == len(everything.encode())
    assert output.lines == everything.count("\n")


def test_what_python_prints_to_both_streams_keeps_its_order():
    data = b"one\n" + STDERR_BEGIN + b"two\n" + STDERR_END + b"three\n"
    batches, _ = through_pipes([(0, data)])
    assert [(batch.stream, batch.text) for batch in batches] == [
        ("stdout", "one\n"),
        ("stderr", "two\n"),
        ("stdout", "three\n"),
    ]


def test_an_unfinished_line_ends_before_the_other_streams_and_a_bar_gives_way(tmp_path: Path):
    bar = STDERR_BEGIN + b"\r 25%|##   | 1/4" + STDERR_END
    batches, output = through_pipes(
        [(0, b"loading" + bar + b"epoch 1\n" + bar + STDERR_BEGIN + b"\n" + STDERR_END), (1, b"half"), (0, b"end")],
        tmp_path / "log",
    )
    log = b"loading\n\r 25%|##   | 1/4\repoch 1\n\r 25%|##   | 1/4\nhalf\nend"
    assert (tmp_path / "log").read_bytes() == log
    assert (output.lines, output.total_bytes) == (4, len(log))
    assert [batch.start for batch in batches] == [0, *(batch.end for batch in batches)][:-1]
    assert "".join(batch.text for batch in batches).encode() == log


def test_stderr_of_c_code_does_not_cut_a_line_that_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch):
    # only `drain` ends the batch
    monkeypatch.setattr(rank_output, "BATCH_INTERVAL_S", 1e9)

    async def run() -> list[OutputWritten]:
        batches: list[OutputWritten] = []
        output = RankOutput(0, 1 << 20, batches.append, fail_on_log_end)
        for pipe, data in ((0, b"a li"), (1, b"warning\n"), (0, b"ne\n"), (1, b"more\n"), (0, b"begun"), (1, b"end\n")):
            os.write(output.child_ends[pipe], data)
            for _ in range(3):
                await asyncio.sleep(0)
        output.drain()
        output.close()
        return batches

    assert [(batch.stream, batch.text) for batch in asyncio.run(run())] == [
        ("stdout", "a line\n"),
        ("stderr", "warning\nmore\n"),
        ("stdout", "begun\n"),
        ("stderr", "end\n"),
    ]


def test_the_second_pipe_is_stderr_of_c_code():
    batches, _ = through_pipes([(0, b"python\n"), (1, b"child process\n")])
    assert text_of(batches, "stderr") == "child process\n"


def test_output_that_ends_like_a_mark_begins_is_not_lost(tmp_path: Path):
    batches, _ = through_pipes([(0, b"end" + STDERR_BEGIN[:1])], tmp_path / "log")
    assert text_of(batches, "stdout") == "end\x1b"
    assert (tmp_path / "log").read_bytes() == b"end\x1b"


def test_a_half_mark_that_never_ends_is_not_lost():
    batches, _ = through_pipes([(0, b"text" + STDERR_BEGIN[:4]), (0, b"more\n")])
    assert text_of(batches, "stdout") == "text" + STDERR_BEGIN[:4].decode() + "more\n"


def test_a_character_cut_in_two_reads_whole():
    first, last = "é".encode()[:1], "é".encode()[1:]
    batches, _ = through_pipes([(0, first), (0, last + b"\n")])
    assert text_of(batches, "stdout") == "é\n"


def test_bytes_that_are_no_text_are_shown_as_such_and_kept_as_they_are(tmp_path: Path):
    batches, _ = through_pipes([(0, b"a\xff\xfeb\n")], tmp_path / "log")
    assert text_of(batches, "stdout") == "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}b\n"
    assert (tmp_path / "log").read_bytes() == b"a\xff\xfeb\n"


def test_a_flood_is_cut_in_what_is_sent_and_whole_in_the_log(tmp_path: Path):
    lines = b"".join(b"line %06d\n" % number for number in range(20_000))
    chunks = [(0, lines[begin : begin + 60_000]) for begin in range(0, len(lines), 60_000)]
    batches, output = through_pipes(chunks, tmp_path / "log", whole_bytes=10_000)
    assert (tmp_path / "log").read_bytes() == lines
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    assert (output.lines, output.total_bytes) == (20_000, len(lines))
    shown = sum(batch.text.count("\n") for batch in batches)
    assert shown + sum(batch.skipped_lines for batch in batches) == 20_000
    assert shown < 10_000
    ends = [batch.end for batch in batches]
    assert [batch.start for batch in batches] == [0, *ends[:-1]]
    assert ends[-1] == len(lines)
    assert all(batch.text.startswith("line ") for batch in batches if batch.skipped_bytes)


def test_what_a_standby_rank_printed_belongs_to_no_run(tmp_path: Path):
    async def run() -> tuple[list[OutputWritten], int]:
        batches: list[OutputWritten] = []
        output = RankOutput(0, 1 << 20, batches.append, fail_on_log_end)
        os.write(output.child_ends[0], b"import noise\n")
        output.begin_log(str(tmp_path / "log"))
        os.write(output.child_ends[0], b"the run\n")
        output.drain()
        output.close()
        return batches, output.lines

    batches, lines = asyncio.run(run())
    assert (text_of(batches, "stdout"), lines) == ("the run\n", 1)
    assert (tmp_path / "log").read_bytes() == b"the run\n"


def test_the_end_does_not_wait_for_a_child_that_holds_the_pipe():
    async def run() -> int | None:
        output = RankOutput(0, 1 << 20, lambda batch: None, fail_on_log_end)
        with subprocess.Popen(["sleep", "60"], stdout=output.child_ends[0]) as child:
            output.close_child_ends()
            output.drain()
            output.close()
            ended = child.poll()
            child.kill()
        return ended

    assert asyncio.run(run()) is None, "it holds the pipe still"


def test_what_a_drain_has_taken_is_no_end_of_the_pipe():
    async def run() -> str:
        batches: list[OutputWritten] = []
        output = RankOutput(0, 1 << 20, batches.append, fail_on_log_end)
        os.write(output.child_ends[0], b"first\n")
        # runs before the loop calls the reader that it has found ready
        asyncio.get_running_loop().call_soon(output.drain)
        await asyncio.sleep(0.01)
        os.write(output.child_ends[0], b"second\n")
        until = time.monotonic() + 10
        while "second" not in (text := text_of(batches, "stdout")) and time.monotonic() < until:
            await asyncio.sleep(0.001)
        output.close()
        return text

    assert asyncio.run(run()) == "first\nsecond\n"


def test_a_child_that_never_stops_writing_stops_nothing():
    async def run() -> tuple[int, float, float]:
        output = RankOutput(0, 1 << 20, lambda batch: None, fail_on_log_end)
        with subprocess.Popen(["yes"], stdout=output.child_ends[0]) as child:
            output.close_child_ends()
            loop, slowest, took = asyncio.get_running_loop(), 0.0, 0.0
            until = loop.time() + 1.0
            # in this thread's processor time: other work on the machine is not measured
            while loop.time() < until:
                before = time.thread_time()
                await asyncio.sleep(0)
                slowest = max(slowest, time.thread_time() - before)
            begin = time.thread_time()
            output.drain(last=True)
            took = time.thread_time() - begin
            child.kill()
        output.close()
        return output.total_bytes, slowest, took

    read, slowest, took = asyncio.run(run())
    # back pressure: the rest waits in the rank's pipe
    assert read < 200 << 20
    assert max(slowest, took) < 0.5


@linux_only
def test_a_full_disk_stops_the_log_and_not_the_rank():
    reported: list[tuple[int, str]] = []
    chunks = [(0, b"kept\n"), (0, b"still sent\n")]
    batches, _ = through_pipes(chunks, Path("/dev/full"), log_ended=lambda rank, why: reported.append((rank, why)))
    assert text_of(batches, "stdout") == "kept\nstill sent\n"
    assert reported == [(0, "No space left on device")]


# ---------------------------------------------------------------- streams


def test_a_stream_goes_on_after_faults_and_carries_any_number_of_descriptors():
    problems: list[str] = []
    received: list[tuple[int, int]] = []
    large = [os.urandom(1 << 20)]

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: problems.append(repr(context["exception"])))
        ours, theirs = socket.socketpair()

        def take(message: FromRank, frames: Sequence[bytes]) -> None:
            assert isinstance(message, Remarked)
            if message.text == "1":
                raise RuntimeError("a fault")
            descriptors = reader.take_descriptors(300) if message.text == "3" else []
            for descriptor in descriptors:
                os.close(descriptor)
            received.append((int(message.text), len(descriptors) or len(frames)))

        reader = MessageStream[FromRank](theirs, codec.from_rank, take, lambda: None)
        writer = MessageStream[FromRank](
            ours, codec.from_rank, lambda message, frames: None, lambda: None, gathers=True
        )
        writer.send(Remarked(text="1"), large)
        writer.send(Exit())
        with open(os.devnull) as nothing:
            writer.send(Remarked(text="3"), descriptors=[nothing.fileno()] * 300)
        writer.send(Remarked(text="4"), large)
        deadline = loop.time() + 10
        while len(received) < 2 and loop.time() < deadline:
            await asyncio.sleep(0.01)
        writer.close()
        reader.close()

    asyncio.run(run())
    assert received == [(3, 300), (4, 1)]
    assert len(problems) == 2
    assert problems[0] == "RuntimeError('a fault')"
    assert problems[1].startswith("ValidationError")


def test_who_sends_to_a_side_that_is_gone_hears_of_it_later_and_after_its_last_words():
    async def run() -> None:
        ours, theirs = socket.socketpair()
        received: list[str] = []
        stream = MessageStream[FromRank](
            ours, codec.from_rank, lambda message, frames: received.append("message"), lambda: received.append("closed")
        )
        theirs.sendall(codec.frame(Remarked(text="1")))
        theirs.close()
        stream.send(Remarked(text="2"))
        stream.send(Remarked(text="3"))
        assert received == []
        deadline = asyncio.get_running_loop().time() + 10
        while "closed" not in received and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        assert received == ["message", "closed"]

    asyncio.run(run())


# ---------------------------------------------------------------- release


CONNECT = """
import os, socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print(s.fileno(), flush=True)
s.recv(1)
print("released", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def peer(address: str, port: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process connected to us, and the number of its descriptor."""
    with subprocess.Popen(
        [sys.executable, "-c", CONNECT, address, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@linux_only
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_connections_between_ranks_are_found_and_no_others(address: str):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        server = socket.create_server((address, 0), family=family)
    except OSError as error:
        pytest.skip(f"no {address} here: {error}")
    with server, peer(address, server.getsockname()[1]) as (rank, fd):
        ours, _ = server.accept()
        with ours, peer(address, server.getsockname()[1]) as (stranger, _):
            theirs, _ = server.accept()
            with theirs:
                found = connections_between([os.getpid(), rank.pid])
                # the stranger's connection, the listener and this process's other sockets are not included
                assert found == {os.getpid(): (ours.fileno(),), rank.pid: (fd,)}
                assert connections_between([rank.pid, stranger.pid]) == {}
                assert connections_between([rank.pid]) == {}
                ours.shutdown(socket.SHUT_RDWR)
                assert rank.stdout is not None
                assert rank.stdout.readline() == "released\n"
                assert stranger.stdout is not None
                assert not select.select([stranger.stdout], [], [], 0)[0]


@linux_only
def test_a_process_that_is_gone_has_no_connections():
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    assert connections_between([gone.pid, 2**22 - 1]) == {}


# ---------------------------------------------------------------- leftovers


@contextlib.contextmanager
def sleeper(*, session: bool, mark: str = "", nested: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    """A sleeping process, in its own session or in ours, optionally marked as part of a run."""
    environ = {**os.environ, **({RUN_VARIABLE: mark} if mark else {})}
    command = ["sleep", "300"]
    if nested:
        command = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '300'])"]
    with subprocess.Popen(command, env=environ, start_new_session=session) as process:
        try:
            # empty for a moment after Popen returns: exec closes Popen's error pipe before it writes the environment
            eventually(Path(f"/proc/{process.pid}/environ").read_bytes, 5, "the process's variables")
            yield process
        finally:
            process.kill()


@linux_only
def test_processes_are_a_runs_by_its_mark_where_parentage_is_lost():
    with (
        sleeper(session=True, mark="abcd1234") as marked,
        sleeper(session=True, mark="abcd1235") as of_another_run,
        sleeper(session=True) as stranger,
    ):
        kill_marked("abcd1234")
        assert marked.wait(5) == -signal.SIGKILL
        assert [of_another_run.poll(), stranger.poll()] == [None, None]


@linux_only
def test_processes_are_a_runs_by_parentage():
    with sleeper(session=True, nested=True) as rank_like, sleeper(session=True):
        found = eventually(lambda: len(found := processes_of({rank_like.pid})) == 2 and found, 10)
        assert rank_like.pid in found
        (child,) = found - {rank_like.pid}
        os.kill(child, signal.SIGKILL)


# ---------------------------------------------------------------- the keeper


@pytest.fixture
def keeper() -> Iterator[BackgroundCopier]:
    made = BackgroundCopier()
    yield made
    made.close()


def kept(keeper: BackgroundCopier, job: CopyJob) -> str:
    """Return why nothing was kept."""
    copying = keeper.keep(job)
    assert copying is not None
    # the keeper copies at idle priority
    return copying.result(60)


def memory_file(data: bytes) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(descriptor, data)
    return descriptor


needs_memfd = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory files")


@needs_memfd
def test_a_payload_is_kept_whole_and_private(keeper: BackgroundCopier, tmp_path: Path):
    data = os.urandom(40 << 20)
    source = memory_file(data)
    assert kept(keeper, CopyJob(source, len(data), tmp_path / "payload.bin")) == ""
    assert (tmp_path / "payload.bin").read_bytes() == data
    assert (tmp_path / "payload.bin").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["payload.bin"]
    with pytest.raises(OSError):
        os.fstat(source)


@needs_memfd
def test_a_timer_that_is_still_due_when_the_agent_ends_copies_nothing(keeper: BackgroundCopier, tmp_path: Path):
    source = memory_file(b"x")
    keeper.close()
    assert keeper.keep(CopyJob(source, 1, tmp_path / "payload.bin")) is None
    with pytest.raises(OSError):
        os.fstat(source)
    assert os.listdir(tmp_path) == []


@needs_memfd
@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda job: job.given_up.set(), "the notebook's next run used the same memory"),
        (lambda job: os.ftruncate(job.source, 10), "the memory file was truncated"),
    ],
)
def test_what_can_not_be_kept_leaves_nothing(
    keeper: BackgroundCopier, tmp_path: Path, prepare: Callable[[CopyJob], None], says: str
):
    job = CopyJob(memory_file(b"x" * 100_000), 100_000, tmp_path / "payload.bin")
    prepare(job)
    assert says in kept(keeper, job)
    assert os.listdir(tmp_path) == []


@needs_memfd
def test_the_keeper_goes_on_after_a_failure(keeper: BackgroundCopier, tmp_path: Path):
    assert kept(keeper, CopyJob(memory_file(b"a"), 1, tmp_path / "missing" / "payload.bin"))
    assert kept(keeper, CopyJob(memory_file(b"b"), 1, tmp_path / "payload.bin")) == ""


# ---------------------------------------------------------------- a standby group


class NothingForked:
    """Accepts fork orders; the test does the forking."""

    def fork(self, order: Fork, descriptors: list[int], listener: Group) -> None: ...

    def forget(self, group_id: str) -> None: ...


class ConnectedRanks(NothingForked):
    """Accepts fork orders too; the test sends what ranks send.

    Attributes:
        ranks: The ranks' ends of their connections to the agent.
    """

    def __init__(self) -> None:
        self.ranks: dict[int, StreamConnection[ToRank]] = {}

    def fork(self, order: Fork, descriptors: list[int], listener: Group) -> None:
        # the group closes its own descriptor when this returns
        connection = socket.socket(fileno=os.dup(descriptors[0]))
        self.ranks[order.rank] = StreamConnection(connection, codec.to_rank)

    def forget(self, group_id: str) -> None:
        """Close the connections: the group is closed."""
        for rank in self.ranks.values():
            rank.close()


class HeardMessages:
    """Listens to a group: what its ranks have said, with whether their processes were known by then."""

    def __init__(self, group: Group) -> None:
        self.messages: list[tuple[int, FromRank, Sequence[bytes], bool]] = []
        self._group = group

    def on_rank_message(self, rank: int, message: FromRank, frames: Sequence[bytes]) -> None:
        self.messages.append((rank, message, tuple(map(bytes, frames)), self._group.rank(rank).alive))

    async def until(self, count: int) -> None:
        """Let the loop run until so many messages were heard."""
        async with asyncio.timeout(10):
            while len(self.messages) < count:
                await asyncio.sleep(0.001)


@contextlib.contextmanager
def two_processes() -> Iterator[list[int]]:
    """The pids of two processes that run until the block ends."""
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as one,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as two,
    ):
        # leaving `Popen` closes their standard input; both exit at its end
        yield [one.pid, two.pid]


@linux_only
def test_a_rank_that_was_reaped_before_it_could_be_watched_is_dead(tmp_path: Path):
    with subprocess.Popen(["true"]) as ended, subprocess.Popen(["cat"], stdin=subprocess.PIPE) as alive:
        ended.wait()

        async def dead_after(pid: int) -> bool:
            group = Group(NothingForked(), 1, False, 1000, tmp_path)  # pyright: ignore[reportArgumentType]
            try:
                group.forked(0, pid)
                return group.has_dead_rank()
            finally:
                group.close()

        assert asyncio.run(dead_after(ended.pid))
        assert not asyncio.run(dead_after(alive.pid))
        assert alive.stdin is not None
        alive.stdin.close()


def test_a_rank_that_speaks_before_its_fork_is_reported_is_heard_after_it(tmp_path: Path):
    async def received(pids: list[int]) -> list[tuple[int, FromRank, Sequence[bytes], bool]]:
        zygote = ConnectedRanks()
        group = Group(zygote, 2, False, 1000, tmp_path)  # pyright: ignore[reportArgumentType]
        group.listener = listener = HeardMessages(group)  # pyright: ignore[reportAttributeAccessIssue]
        try:
            group.forked(0, pids[0])
            zygote.ranks[1].send(Joined(), [b"frame"])
            # the agent has read what rank 1 sent when it has read what was sent after it
            zygote.ranks[0].send(Joined(), [b"other"])
            await listener.until(1)
            group.forked(1, pids[1])
            zygote.ranks[1].send(Remarked(text="later"))
            await listener.until(3)
            return listener.messages
        finally:
            group.close()

    with two_processes() as pids:
        assert asyncio.run(received(pids)) == [
            (0, Joined(), (b"other",), True),
            (1, Joined(), (b"frame",), True),
            (1, Remarked(text="later"), (), True),
        ]


def test_ranks_are_paused_once_all_stand_by_and_continued_before_anything_else(tmp_path: Path):
    def states(group: Group) -> set[str]:
        return {psutil.Process(pid).status() for pid in group.pids}

    async def pause_and_resume(pids: list[int]) -> None:
        zygote = ConnectedRanks()
        group = Group(zygote, 2, True, 1000, tmp_path, warm_up=True)  # pyright: ignore[reportArgumentType]
        group.listener = listener = HeardMessages(group)  # pyright: ignore[reportAttributeAccessIssue]
        try:
            for rank, pid in enumerate(pids):
                group.forked(rank, pid)
            # a remark tells when the message before it was read
            for message in (StandsBy(), Remarked(text="stands by")):
                zygote.ranks[0].send(message)
            await listener.until(1)
            group.pause()
            assert psutil.STATUS_STOPPED not in states(group), "rank 1 is still rehearsing"
            for message in (StandsBy(), Remarked(text="stands by")):
                zygote.ranks[1].send(message)
            await listener.until(2)
            for go_on in (group.resume, group.dismiss):
                group.pause()
                eventually(lambda: states(group) == {psutil.STATUS_STOPPED}, 5, "both are stopped")
                go_on()
                eventually(lambda: psutil.STATUS_STOPPED not in states(group), 5, "both go on")
        finally:
            group.close()

    with two_processes() as pids:
        asyncio.run(pause_and_resume(pids))


# a message with the maximum number of parts, 4 GiB each
TERABYTES = struct.pack("<I4096Q", 4096, *[4 << 30] * 4096)


@linux_only
@pytest.mark.parametrize("does", ["announces terabytes", "sends files that belong to nothing"])
def test_a_rank_that_sends_without_bound_fails_its_run_and_costs_the_agent_nothing(tmp_path: Path, does: str):
    broken: list[tuple[FailureKind, str]] = []

    class Listener:
        def group_broken(self, kind: FailureKind, message: str) -> None:
            broken.append((kind, message))

    class HandsOver(NothingForked):
        def fork(self, order: Fork, descriptors: list[int], listener: Group) -> None:
            ends.append(socket.socket(fileno=os.dup(descriptors[0])))

    async def flood(pids: list[int]) -> None:
        before = len(os.listdir("/proc/self/fd"))
        group = Group(HandsOver(), 2, False, 1000, tmp_path)  # pyright: ignore[reportArgumentType]
        group.listener = Listener()  # pyright: ignore[reportAttributeAccessIssue]
        try:
            for rank, pid in enumerate(pids):
                group.forked(rank, pid)
            had = len(os.listdir("/proc/self/fd"))
            with contextlib.suppress(BrokenPipeError), open(os.devnull) as nothing:
                if does == "announces terabytes":
                    ends[1].sendall(TERABYTES)
                else:
                    # the message itself is never complete
                    ends[1].sendall(struct.pack("<IQ", 1, 1 << 20))
                    for _ in range(20):
                        socket.send_fds(ends[1], [b"x"], [nothing.fileno()] * 10)
            deadline = asyncio.get_running_loop().time() + 10
            while not broken and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.01)
            assert [kind for kind, _ in broken] == [FailureKind.WORKER_DIED]
            assert "rank 1 was ended: what it sent to the agent can't be read" in broken[0][1]
            # the connection's own descriptor is closed too
            assert len(os.listdir("/proc/self/fd")) == had - 1
            eventually(lambda: not psutil.pid_exists(pids[1]) or is_zombie(pids[1]), 5, "it is killed")
            assert not is_zombie(pids[0])
        finally:
            group.close()
            for end in ends:
                end.close()
        assert len(os.listdir("/proc/self/fd")) == before

    def is_zombie(pid: int) -> bool:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

    ends: list[socket.socket] = []
    with two_processes() as pids:
        asyncio.run(flood(pids))


@linux_only
def test_a_group_for_which_there_are_not_enough_descriptors_leaves_none_open(tmp_path: Path):
    def is_made(limit: int) -> bool:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            Group(NothingForked(), 2, False, 1000, tmp_path).close()  # pyright: ignore[reportArgumentType]
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            return False
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return True

    async def make() -> int:
        had = os.listdir("/proc/self/fd")
        lowest = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest)
        # keep existing objects out of each collection
        gc.freeze()
        for more in itertools.count():
            made = is_made(lowest + more)
            # the exception's traceback may still hold a socket
            gc.collect()
            assert os.listdir("/proc/self/fd") == had, f"with {more} descriptors"
            if made:
                return more
        raise AssertionError

    try:
        assert asyncio.run(make()) > 10
    finally:
        gc.unfreeze()
