"""Ranks whose collectives behave as NCCL's do: silence in place of an error, an abort that hangs, a watchdog."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import nccl_manners
import pytest
from ranks import Session, Zygote
from waiting import eventually

from sgpu_magic.agent.ranks.stop import catches
from sgpu_magic.wire.codec import STACK_SIGNAL
from sgpu_magic.wire.rank import AskCollectives, Collectives, Renew, Renewed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory files, /proc")


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def pair(zygote: Zygote) -> Iterator[Session]:
    """Two ranks with a session's error handling."""
    made = Session(zygote, 2)
    made.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    made.connect()
    made.run(nccl_manners.SOURCE)
    yield made
    made.leave()


def fail_on_rank_1(session: Session, body: str) -> None:
    """Execute a cell in which rank 1 fails while rank 0 is in a collective; `body` follows the collective."""
    session.execute(
        "print('BEGIN')\nif rank == 1:\n    raise ValueError('broken off')\n"
        "loss = torch.ones(1)\nprint('MARK', flush=True)\n" + body
    )
    assert session.failure(1).failure.message == "broken off"
    eventually(lambda: is_in_collective(session), 10, "rank 0 does not wait")


def is_in_collective(session: Session) -> bool:
    pid = session.ranks[0].pid
    with open(f"/proc/{pid}/task/{pid}/wchan") as file:
        waits = file.read().startswith("futex")
    return "MARK" in session.ranks[0].printed.rpartition("BEGIN")[2] and waits


def test_the_backend_works(pair: Session):
    code = "t = torch.ones(1)\ndist.all_reduce(t)\ndist.barrier()\nt.item(), dist.get_backend()"
    assert [found["value"] for found in pair.run(code)] == [(2.0, "nccl_manners")] * 2


def test_no_line_after_a_released_collective_runs(pair: Session, tmp_path: Path):
    """The collective ends without an error and leaves NaN, which must not overwrite a good checkpoint."""
    checkpoint = tmp_path / "best"
    checkpoint.write_text("0.5")
    fail_on_rank_1(
        pair,
        "behave(blocks=True)\n"
        "try:\n"
        "    dist.all_reduce(loss)\n"
        f"    open({str(checkpoint)!r}, 'w').write(str(loss.item()))\n"
        "except Exception:\n"
        f"    open({str(checkpoint)!r}, 'w').write('handled')\n",
    )
    pair.release()
    assert pair.failure(0, deadline_s=10).failure.type_name == "builtins.KeyboardInterrupt"
    assert checkpoint.read_text() == "0.5"
    assert [found["value"] for found in pair.run("'stays'", only=[0])] == ["stays"]


def test_a_rank_of_a_session_outlives_the_abort(pair: Session):
    fail_on_rank_1(pair, "model = 'kept'\nbehave(blocks=True, tears_down=True)\ndist.all_reduce(loss)")
    pair.release()
    pair.failure(0, deadline_s=10)
    assert [found["value"] for found in pair.run("model", only=[0])] == ["kept"]


def test_an_abort_that_hangs_leaves_the_rank_answering(pair: Session):
    fail_on_rank_1(pair, "behave(blocks=True, hangs=True)\ndist.all_reduce(loss)")
    pair.release()
    # the collective does not end, but the helper thread still replies
    pair.ranks[0].send(AskCollectives(request=3))
    assert pair.ranks[0].expect(Collectives, deadline_s=10).request == 3
    # an interrupt does not end it either; the stack can be read
    pair.ranks[0].interrupt()
    os.kill(pair.ranks[0].pid, STACK_SIGNAL)
    eventually(lambda: b"allreduce" in stack_of(pair), 10, "the stack is not written")
    pair.ranks[0].kill()


def stack_of(session: Session) -> bytes:
    return os.pread(session.ranks[0].stack_file.fd, 1 << 20, 0)


def test_a_renewal_after_a_hanging_abort_says_so(zygote: Zygote, monkeypatch: pytest.MonkeyPatch):
    """The collective itself may end although the abort, in another thread, does not."""
    session = Session(zygote, 1).connect()
    session.run(nccl_manners.SOURCE)
    session.run("from sgpu_magic.worker.group import renewal\nrenewal._ABORT_PATIENCE_S = 0.2\nbehave(hangs=True)")
    session.release()
    store = os.memfd_create("store")
    session.ranks[0].send(Renew(), (), [store])
    os.close(store)
    problem = session.ranks[0].expect(Renewed, deadline_s=10).problem
    assert "were not aborted within" in problem
    assert "Restart the ranks" in problem
    session.leave()


def test_a_collective_that_holds_the_interpreters_lock_can_be_looked_at_and_killed(pair: Session):
    pair.execute("print('MARK', flush=True)\nbehave(holds=True)\ndist.barrier()", only=[0])
    eventually(lambda: "MARK" in pair.ranks[0].printed, 10, "the cell does not begin")
    assert catches(pair.ranks[0].pid, signal.SIGINT)

    def is_held() -> bool:
        os.kill(pair.ranks[0].pid, STACK_SIGNAL)
        return b"_call" in stack_of(pair)

    eventually(is_held, 10, "the stack is not written")
    pair.ranks[0].interrupt()
    pair.release()
    assert is_held()
    pair.ranks[0].kill()
