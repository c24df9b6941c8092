"""Stories of runs, told to a view event by event: for tests of what is drawn of them."""

from __future__ import annotations

import json
import math

from sgpu_magic.config import host_name
from sgpu_magic.protocol import events as ev
from sgpu_magic.protocol.records import (
    CellSource,
    Collective,
    Failure,
    InlinePayload,
    Lease,
    OutputName,
    Owner,
    PackedLayout,
    Payload,
    Placement,
    RankResult,
    RankSample,
    RankStack,
    RunSpec,
    Shipped,
    StackFrame,
)
from sgpu_magic.protocol.states import FailureKind, RunState
from sgpu_magic.render.items import LineItem
from sgpu_magic.render.view import RunView

RUN_ID = "7f3a90c1"

TRACEBACK = """\
---------------------------------------------------------------------------
ValueError                                Traceback (most recent call last)
Cell In[7], line 14
     12 for x, y in loader:
     13     if x.isnan().any():
---> 14         raise ValueError(f"NaN in batch {step}")
     15     loss = step_fn(x, y)

ValueError: NaN in batch 118
"""


class Run:
    """A view that is told a run's story."""

    def __init__(
        self,
        ranks: int = 4,
        outputs: tuple[str, ...] = (),
        shipped: Shipped | None = None,
        limit: int = 200_000,
        pool: str = "local",
        run_id: str = RUN_ID,
        cell: CellSource | None = None,
        retries: int = 0,
    ) -> None:
        self.seq = 0
        self.view = RunView(
            RunSpec(
                run_id=run_id,
                name="train_digits",
                cell=cell or CellSource(body="", execution_count=9),
                placement=Placement(ranks=ranks),
                outputs=tuple(OutputName(name) for name in outputs),
                owner=Owner(pid=1, host="h", user="u"),
                timeout_s=90.0,
                retries=retries,
                shipped=shipped or Shipped(names=("model", "loader", "cfg"), total_bytes=45_100_000, seconds=0.038),
            ),
            limit,
            pool,
        )

    def tell(self, *bodies: ev.EventBody, at: float = 100.0) -> Run:
        for body in bodies:
            self.seq += 1
            self.view.apply(ev.Event(run_id=self.view.run_id, seq=self.seq, at=at, body=body))
        return self

    def start(
        self, device_type: str = "cpu", simulated: bool = False, at: float = 100.0, labels: tuple[str, ...] = ()
    ) -> Run:
        ranks = self.view.ranks
        return self.tell(
            ev.Placed(
                lease=Lease(lease_id="l", device_type=device_type, ranks=ranks, simulated=simulated),
                host=host_name(),
                labels=labels,
            ),
            ev.StateChanged(state=RunState.STARTING),
            ev.RanksStarted(pids=tuple(range(ranks)), warm="standby"),
            ev.StateChanged(state=RunState.RUNNING),
            at=at,
        )

    def say(self, rank: int, text: str, stream: str = "stdout", skipped: int = 0) -> Run:
        return self.tell(
            ev.OutputWritten(
                rank=rank,
                stream=stream,
                text=text,
                start=0,
                end=len(text),
                skipped_lines=skipped,
                skipped_bytes=skipped * 10,
            )
        )

    def show(self, rank: int, display_id: str = "", update: bool = False, **bundle: str) -> Run:
        data = {key.replace("_", "/"): value for key, value in bundle.items()}
        return self.tell(
            ev.DisplayPublished(rank=rank, bundle=json.dumps(data).encode(), display_id=display_id, update=update)
        )

    def sample(self, seconds: int, *, idle_ranks: tuple[int, ...] = (), kind: str = "gpu", at: float = 100.0) -> Run:
        """A sample of every rank each second: GPUs that are 85 to 95 % busy, those of `idle_ranks` 1 to 3 %."""
        for second in range(seconds):
            wave = math.sin(second / 3)
            samples = [
                RankSample(
                    rank=rank,
                    kind=kind,
                    uuid=f"GPU-{rank:08x}-1111-2222-3333-444444444444",
                    utilization_pct=2 + wave if rank in idle_ranks else 90 + 5 * wave,
                    own_utilization_pct=2 + wave if rank in idle_ranks else 89 + 5 * wave,
                    used_bytes=18_200_000_000,
                    own_bytes=17_900_000_000,
                    total_bytes=24_000_000_000,
                    power_w=200 + 10 * wave,
                    temperature_c=64 + 2 * wave,
                    cpu_cores=1.2,
                    rss_bytes=3_100_000_000,
                )
                if kind == "gpu"
                else RankSample(rank=rank, kind=kind, cpu_cores=1.2 + wave / 10, rss_bytes=400_000_000 + rank)
                for rank in range(self.view.ranks)
            ]
            self.tell(ev.Sampled(seconds=1.0, samples=tuple(samples)), at=at + second + 1)
        return self

    def end(
        self,
        state: RunState = RunState.SUCCEEDED,
        seconds: float = 12.4,
        failure: Failure | None = None,
        others: tuple[Failure, ...] = (),
        results: tuple[RankResult, ...] = (),
        queued: float = 0.0,
        stacks: tuple[RankStack, ...] = (),
    ) -> Run:
        return self.tell(
            ev.RunEnded(
                state=state,
                stacks=stacks,
                failure=failure,
                others=others,
                results=results,
                queued_s=queued,
                total_s=seconds + queued,
            )
        )

    @property
    def lines(self) -> list[str]:
        return [item.text for item in self.view.items if isinstance(item, LineItem)]


def released(*ranks: int, where: str = "all_reduce", line: int | None = 15) -> tuple[Failure, ...]:
    return tuple(
        Failure(
            kind=FailureKind.USER_CODE,
            message="Connection reset by peer",
            type_name="RuntimeError",
            rank=rank,
            where=where,
            line=line,
            is_consequence=True,
        )
        for rank in ranks
    )


def value_error(host: str = "") -> Failure:
    return Failure(
        kind=FailureKind.USER_CODE,
        message="NaN in batch 118",
        rank=1,
        host=host or host_name(),
        type_name="builtins.ValueError",
        traceback_text=TRACEBACK,
        traceback_ansi=TRACEBACK.replace("ValueError", "\x1b[31mValueError\x1b[39m"),
        line=14,
    )


def result(rank: int, size: int) -> RankResult:
    layout = PackedLayout(pickle_size=size, buffers=(), mac=b"")
    return RankResult(rank=rank, payload=Payload(source=InlinePayload(), layout=layout))


def succeeded() -> Run:
    run = Run(outputs=("history",)).start()
    run.say(0, "epoch 1  train 0.412  held-out 0.901\n").say(1, "epoch 1  train 0.409  held-out 0.899\n")
    return run.end(results=(result(0, 1200), result(1, 900)))


def failed() -> Run:
    others = released(0, 2, 3, where="all_reduce #118")
    run = Run(run_id="7f400000").start().say(0, "epoch 1\n")
    return run.end(RunState.FAILED, 9.2, value_error(), others)


def died() -> Run:
    message = "was killed by SIGKILL: most likely out of memory (it held 21.8 of 24 GB)"
    failure = Failure(kind=FailureKind.WORKER_DIED, message=message, rank=2, line=6, where="build", exit_status=-9)
    run = Run().start("a10").say(2, "step 1180  loss 0.22\n")
    return run.end(RunState.FAILED, 31, failure, released(0, 1, 3))


def cancelled() -> Run:
    return Run().start().say(0, "epoch 1\n").end(RunState.CANCELLED, 3.1)


def timed_out() -> Run:
    failure = Failure(kind=FailureKind.TIMEOUT, message="")
    return Run().start("h100", simulated=True).end(RunState.TIMED_OUT, 90, failure)


def queued() -> Run:
    return Run(pool="team").tell(ev.QueueMoved(position=2, reason="needs 1 more A10"))


def gapped() -> Run:
    run = Run(limit=400).start()
    for step in range(1000):
        run.say(step % 4, f"step {step:04d}  loss 0.22\n")
    return run.end()


def running() -> Run:
    run = Run(pool="team").start("a10")
    run.say(0, "epoch 1\n").say(1, "\r 10%|█", "stderr").say(1, "\r 62%|██████▏   |", "stderr")
    return run


CELL = CellSource(
    magic_line="%%distributed -n 4",
    body="def load_batch(f):\n    # a slow disk\n    x = f.read()\n    return x\n\nwhile True:\n    loss.backward()\n",
    execution_count=7,
)
LAUNCHER = (
    StackFrame("/env/IPython/core/interactiveshell.py", 3100, "run_code"),
    StackFrame("/env/sgpu_magic/worker/rank.py", 150, "run"),
)
IN_BACKWARD = (
    StackFrame("/env/torch/autograd/graph.py", 841, "_engine_run_backward"),
    StackFrame("/env/torch/_tensor.py", 630, "backward"),
    StackFrame("<ipython-input-7-0a1b2c>", 8, "<module>"),
    *LAUNCHER,
)
IN_LOAD = (
    StackFrame("<ipython-input-7-0a1b2c>", 4, "load_batch"),
    StackFrame("<ipython-input-7-0a1b2c>", 8, "<module>"),
    *LAUNCHER,
)


def waiting(rank: int, seq: int = 41, name: str = "all_reduce", pending: bool = True) -> RankStack:
    return RankStack(rank=rank, frames=IN_BACKWARD, collective=Collective(name=name, seq=seq, pending=pending))


def loading(rank: int, seq: int = 40) -> RankStack:
    return RankStack(
        rank=rank, frames=IN_LOAD, collective=Collective(name="all_reduce", seq=seq, pending=False) if seq else None
    )


STUCK = (waiting(0), loading(1), waiting(2), waiting(3))


def stalled() -> Run:
    return Run(cell=CELL).start().say(0, "epoch 1\n").tell(ev.Stalled(seconds=30.0, stacks=STUCK))


def timed_out_in_a_collective() -> Run:
    failure = Failure(kind=FailureKind.TIMEOUT, message="")
    return stalled().end(RunState.TIMED_OUT, 90, failure, stacks=STUCK)


def failed_when_stalled() -> Run:
    failure = Failure(kind=FailureKind.WORKER_DIED, message="", rank=1, exit_status=-9, pid=4711)
    return stalled().end(RunState.FAILED, 61, failure)


def started_again() -> Run:
    failure = Failure(kind=FailureKind.WORKER_DIED, message="was killed by SIGKILL", rank=2, exit_status=-9)
    run = Run(retries=2).start().say(2, "step 7")
    run.tell(ev.AttemptFailed(attempt=1, attempts=3, failure=failure), at=109.0)
    return run.start(at=110.0).say(2, "from step 5\n")


def left_alone() -> Run:
    run = running()
    run.view.leave("run 7f3a goes on without this notebook")
    return run


FORMS = {
    form.__name__: form
    for form in (
        succeeded, failed, died, cancelled, timed_out, queued, gapped, running, stalled, timed_out_in_a_collective,
        failed_when_stalled, started_again, left_alone,
    )
}  # fmt: skip
