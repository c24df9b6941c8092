"""Sample runs, applied to a view event by event, for tests of the views."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import msgspec

from sgpu_magic.config import host_name
from sgpu_magic.views import ansi
from sgpu_magic.views.bundle import render_segment_text
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.output import ShownDisplay, TextSegment, last_text, segments
from sgpu_magic.views.output_buffer import LineItem, display_text
from sgpu_magic.wire import events as ev
from sgpu_magic.wire import rank_events
from sgpu_magic.wire.attachments import InlinePayload, PackedLayout, Payload
from sgpu_magic.wire.base import FailureKind, RunKind, RunLimit, RunState
from sgpu_magic.wire.devices import Lease, NodeShare, Placement
from sgpu_magic.wire.rank_events import (
    Collective,
    Death,
    Failure,
    RankMemory,
    RankSample,
    RankStack,
    StackFrame,
    TensorUse,
)
from sgpu_magic.wire.run import CellSource, OutputName, Owner, RankResult, RunSpec, Shipped
from sgpu_magic.wire.tracking import MetricPoint, TrackedRun

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
    """A view to which a run's events are applied."""

    def __init__(
        self,
        ranks: int = 4,
        outputs: tuple[str, ...] = (),
        shipped: Shipped | None = None,
        limit: int = 100_000,
        pool: str = "local",
        run_id: str = RUN_ID,
        cell: CellSource | None = None,
        retries: int = 0,
        name: str = "train_digits",
        **spec: object,
    ) -> None:
        self.seq = 0
        self.view = RunView(
            RunSpec(
                run_id=run_id,
                name=name,
                cell=cell or CellSource(body="", execution_count=9),
                placement=Placement(ranks=ranks),
                outputs=tuple(OutputName(name) for name in outputs),
                owner=Owner(pid=1, host="h", user="u"),
                timeout_s=90.0,
                retries=retries,
                shipped=shipped or Shipped(names=("model", "loader", "cfg"), total_bytes=45_100_000, seconds=0.038),
                **spec,
            ),
            limit,
            pool,
        )

    def apply(self, *bodies: ev.EventBody, at: float = 100.0) -> Run:
        for body in bodies:
            self.seq += 1
            self.view.apply(ev.Event(run_id=self.view.run_id, seq=self.seq, at=at, body=body))
        return self

    def start(
        self,
        device_type: str = "cpu",
        simulated: bool = False,
        at: float = 100.0,
        labels: tuple[str, ...] = (),
        shares: tuple[NodeShare, ...] = (),
    ) -> Run:
        ranks = self.view.ranks
        return self.apply(
            ev.Placed(
                lease=Lease(lease_id="l", device_type=device_type, ranks=ranks, simulated=simulated, shares=shares),
                host=host_name(),
                labels=labels,
            ),
            ev.StateChanged(state=RunState.STARTING),
            ev.RanksStarted(pids=tuple(range(ranks)), warm="standby"),
            ev.StateChanged(state=RunState.RUNNING),
            at=at,
        )

    def say(self, rank: int, text: str, stream: str = "stdout", skipped: int = 0) -> Run:
        return self.apply(
            rank_events.OutputWritten(
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
        return self.apply(
            rank_events.DisplayPublished(
                rank=rank, bundle=json.dumps(data).encode(), display_id=display_id, update=update
            )
        )

    def sample(self, seconds: int, *, idle_ranks: tuple[int, ...] = (), kind: str = "gpu", at: float = 100.0) -> Run:
        """Add a sample of every rank each second: GPUs are 85 to 95 % busy, those of `idle_ranks` 1 to 3 %."""
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
                for rank in self.view.rank_numbers
            ]
            self.apply(rank_events.Sampled(seconds=1.0, samples=tuple(samples)), at=at + second + 1)
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
        at: float = 100.0,
        **ended: object,
    ) -> Run:
        return self.apply(
            ev.RunEnded(
                state=state,
                **ended,
                stacks=stacks,
                failure=failure,
                others=others,
                results=results,
                queued_s=queued,
                total_s=seconds + queued,
            ),
            at=at,
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
    failure = Failure(
        kind=FailureKind.WORKER_DIED,
        message=message,
        death=Death(what=message),
        rank=2,
        line=6,
        where="build",
        exit_status=-9,
    )
    run = Run().start("a10").say(2, "step 1180  loss 0.22\n")
    return run.end(RunState.FAILED, 31, failure, released(0, 1, 3))


def cancelled() -> Run:
    return Run().start().say(0, "epoch 1\n").end(RunState.CANCELLED, 3.1)


def timed_out() -> Run:
    failure = Failure(kind=FailureKind.TIMEOUT, message="")
    return Run().start("h100", simulated=True).end(RunState.TIMED_OUT, 90, failure)


def queued() -> Run:
    return Run(pool="team").apply(ev.QueueMoved(position=2, reason="needs 1 more A10"))


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
    StackFrame("/env/sgpu_magic/worker/process/rank.py", 150, "run"),
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


def loading(rank: int, seq: int = 40, *, pending: bool = False, queued: bool = False) -> RankStack:
    collective = Collective(name="all_reduce", seq=seq, pending=pending, queued=queued)
    return RankStack(rank=rank, frames=IN_LOAD, collective=collective if seq else None)


STUCK = (waiting(0), loading(1), waiting(2), waiting(3))


def stalled() -> Run:
    return Run(cell=CELL).start().say(0, "epoch 1\n").apply(rank_events.Stalled(seconds=30.0, stacks=STUCK))


def timed_out_in_a_collective() -> Run:
    failure = Failure(kind=FailureKind.TIMEOUT, message="")
    return stalled().end(RunState.TIMED_OUT, 90, failure, stacks=STUCK)


def failed_when_stalled() -> Run:
    failure = Failure(kind=FailureKind.WORKER_DIED, message="", rank=1, exit_status=-9, pid=4711)
    return stalled().end(RunState.FAILED, 61, failure)


def started_again() -> Run:
    failure = Failure(
        kind=FailureKind.WORKER_DIED,
        message="was killed by SIGKILL",
        death=Death(what="was killed by SIGKILL"),
        rank=2,
        exit_status=-9,
    )
    run = Run(retries=2).start().say(2, "step 7")
    run.apply(ev.AttemptFailed(attempt=1, attempts=3, failure=failure), at=109.0)
    return run.start(at=110.0).say(2, "from step 5\n")


SHARES = (NodeShare(node="n1", host="ml-1", ranks=2), NodeShare(node="n2", host="ml-2", ranks=2))


def on_two_nodes() -> Run:
    return Run(pool="team").start("a10", shares=SHARES).say(0, "epoch 1\n").say(3, "epoch 1\n")


def lost_a_node() -> Run:
    message = "the node ml-2 was lost: it does not answer; the run's processes were ended"
    failure = Failure(kind=FailureKind.NODE_LOST, message=message, host="ml-2")
    return on_two_nodes().end(RunState.FAILED, 12.0, failure, released(0, 1))


def left_alone() -> Run:
    run = running()
    run.view.stop_following("run 7f3a continues without this notebook")
    return run


# ---------------------------------------------------------------- sessions

SESSION_ID = "5e551234"
NONE_SHIPPED = Shipped()
LABELS = tuple(f"A10 · {index}" for index in range(4))


def cell_in_session(only: tuple[int, ...] = (), shipped: Shipped = NONE_SHIPPED, **options: object) -> Run:
    """Return a cell on the ranks of session `work`; `start` starts it."""
    return Run(shipped=shipped, session=SESSION_ID, session_name="work", only=only, **options)


def in_session() -> Run:
    run = cell_in_session((0, 2, 3), outputs=("history",)).start("a10", labels=LABELS)
    for rank in (0, 2, 3):
        run.say(rank, f"epoch 1  train 0.41{rank}\n")
    return run.end(seconds=1.2, results=tuple(result(rank, 1000 + rank) for rank in (0, 2, 3)))


def in_session_on_one_rank() -> Run:
    run = cell_in_session((2,)).start("a10", labels=LABELS).say(2, "42\n").show(2, text_plain="plot")
    return run.end(seconds=0.05)


def in_session_running() -> Run:
    run = cell_in_session((0, 2, 3)).start("a10", labels=LABELS).say(0, "epoch 1\n").say(3, "epoch 1 of rank 3\n")
    return run.sample(3)


def waits_in_session() -> Run:
    why = "run 7f3a (train) is still running in its session"
    return cell_in_session().apply(ev.QueueMoved(position=1, reason=why))


def sent_by_auto() -> Run:
    return cell_in_session(name="cell 12", auto=True).start().say(0, "0.93\n").end(seconds=0.02)


def fresh_in_session() -> Run:
    return Run(session=SESSION_ID, session_name="work", fresh=True).start("a10").say(0, "epoch 1\n").end()


def renewed(lost: str = "") -> Run:
    run = cell_in_session(run_id="7f400000").start().say(0, "step 118\n")
    run.apply(ev.GroupRenewed(reason="rank 1 failed while the others were in all_reduce", lost=lost))
    return run.end(RunState.FAILED, 9.2, value_error(), released(0, 2, 3, where="all_reduce #118"))


def unstopped() -> Run:
    run = cell_in_session().start().say(1, "in C\n")
    return run.end(RunState.CANCELLED, 3.1, unstopped=(1,), reason="interrupted")


def refused_by_session() -> Run:
    message = "rank 2 of session work is dead. %sgpu_restart --rank 2 starts it anew; --ranks 0-1,3 leaves it out."
    return cell_in_session().end(RunState.FAILED, 0.0, Failure(kind=FailureKind.SESSION, message=message))


def pushed() -> Run:
    shipped = Shipped(names=("cfg", "loader"), total_bytes=1_200_000, seconds=0.01)
    return cell_in_session(name="", shipped=shipped, kind=RunKind.PUSH).start().end(seconds=0.02)


def pulled() -> Run:
    run = cell_in_session(name="", kind=RunKind.PULL, outputs=("history",)).start()
    return run.end(seconds=0.02, results=(result(0, 1200),))


def called() -> Run:
    run = Run(name="train", kind=RunKind.CALL, outputs=("__sgpu_result__",)).start().say(0, "epoch 1\n")
    return run.end(results=tuple(result(rank, 300) for rank in range(4)))


def session(name: str = "work", **options: object) -> Run:
    """Return a session that has not started yet."""
    return Run(run_id=SESSION_ID, name=name, kind=RunKind.SESSION, shipped=NONE_SHIPPED, pool="team", **options)


def session_waits() -> Run:
    return session().apply(ev.QueueMoved(position=2, reason="needs 1 more A10"))


def session_connected() -> Run:
    return session(idle_s=3600.0).start("a10", labels=LABELS).sample(30, idle_ranks=(0, 1, 2, 3))


def session_working() -> Run:
    run = session().start("a10", labels=LABELS).sample(60)
    run.apply(ev.SessionMoved(cells=14, running=("train",)), at=160.0)
    return run.say(1, "a thread says this between two cells\n")


def session_with_a_dead_rank() -> Run:
    run = session().start("a10", labels=LABELS).sample(60)
    killed = Failure(
        kind=FailureKind.WORKER_DIED,
        message="was killed by SIGKILL",
        death=Death(what="was killed by SIGKILL"),
        rank=2,
        exit_status=-9,
    )
    run.apply(ev.SessionMoved(cells=14, running=("train",)), at=150.0)
    run.apply(rank_events.RankFailed(failure=killed), ev.SessionMoved(cells=14, dead=(2,)), at=160.0)
    return run.say(1, "a thread says this between two cells\n")


def session_mended() -> Run:
    lost = "its variables and what was on its GPU are lost"
    return session_with_a_dead_rank().apply(
        ev.RanksRestarted(ranks=(2,), pids=(4712,), lost=lost),
        ev.GroupRenewed(reason="rank 2 is new"),
        ev.SessionMoved(cells=14),
        at=170.0,
    )


def session_ended() -> Run:
    run = session_mended()
    return run.end(RunState.CANCELLED, 734.0, reason="disconnected", at=834.0)


def session_lost() -> Run:
    failure = Failure(kind=FailureKind.NODE_LOST, message="the agent of this machine (process 4711) died")
    return session_working().end(RunState.FAILED, 734.0, failure, at=834.0)


def memory_of(rank: int, used: int, largest: tuple[TensorUse, ...] = (), device: str = "") -> RankMemory:
    return RankMemory(
        device=device or f"cuda:{rank}",
        used_bytes=used,
        reserved_bytes=used + 1_100_000_000,
        free_bytes=24_000_000_000 - used - 1_800_000_000,
        total_bytes=24_000_000_000,
        largest=largest,
    )


def out_of_memory() -> Run:
    tensors = tuple(
        TensorUse(name=name, shape=shape, dtype=dtype, device="cuda:1", size_bytes=size)
        for name, shape, dtype, size in (
            ("cache[3]", (8, 4096, 4096), "float32", 536_870_912),
            ("model.layers.0.attention.weight", (4096, 4096), "bfloat16", 33_554_432),
            ("batch (in train, line 14)", (512, 3, 224), "float32", 1_376_256),
            ("", (7,), "int64", 56),
        )
    )
    failure = Failure(
        kind=FailureKind.USER_CODE,
        message="CUDA out of memory. Tried to allocate 2.00 GiB.",
        rank=1,
        host=host_name(),
        type_name="torch.OutOfMemoryError",
        traceback_text=TRACEBACK.replace("ValueError: NaN in batch 118", "OutOfMemoryError: CUDA out of memory."),
        line=14,
        out_of_memory=True,
        memory=memory_of(1, 21_800_000_000, tensors),
    )
    others = tuple(
        msgspec.structs.replace(other, memory=memory_of(other.rank or 0, 11_000_000_000))
        for other in released(0, 2, 3, where="all_reduce #118")
    )
    run = cell_in_session(run_id="7f400000").start("a10", labels=LABELS).say(1, "step 117\n")
    return run.end(RunState.FAILED, 9.2, failure, others)


def out_of_memory_on_cpu() -> Run:
    memory = RankMemory(device="cpu", used_bytes=5_100_000_000, free_bytes=900_000_000, total_bytes=16_000_000_000)
    failure = Failure(
        kind=FailureKind.WORKER_DIED,
        message="was killed by SIGKILL: most likely out of memory",
        death=Death(what="was killed by SIGKILL: most likely out of memory"),
        rank=0,
        exit_status=-9,
        out_of_memory=True,
        memory=memory,
    )
    return Run(ranks=2).start().end(RunState.FAILED, 9.2, failure, released(1))


# ---------------------------------------------------------------- costs, packages, MLflow runs

TRACKED = TrackedRun(
    uri="http://mlflow:5000",
    mlflow_run_id="0a1b2c3d4e5f60718293a4b5c6d7e8f9",
    experiment_id="7",
    experiment="digits",
    url="http://mlflow:5000/#/experiments/7/runs/0a1b2c3d4e5f60718293a4b5c6d7e8f9",
)
IN_A_FILE = TrackedRun(
    uri="sqlite:///mlflow.db", mlflow_run_id=TRACKED.mlflow_run_id, experiment_id="7", experiment="digits"
)


def with_price(simulated: bool = False, at: float = 100.0, **spec: object) -> Run:
    run = Run(outputs=("history",), pool="team", **spec)
    lease = Lease(lease_id="l", device_type="a10", ranks=run.view.ranks, simulated=simulated)
    run.apply(ev.Placed(lease=lease, host=host_name(), hourly=4.8, currency="USD"), at=at)
    run.apply(
        ev.StateChanged(state=RunState.STARTING),
        ev.RanksStarted(pids=tuple(range(run.view.ranks)), warm="standby"),
        ev.StateChanged(state=RunState.RUNNING),
        at=at,
    )
    return run.say(0, "epoch 1  train 0.412\n")


def priced_and_tracked() -> Run:
    run = with_price().apply(ev.Tracked(tracked=TRACKED))
    return run.end(seconds=449.2, results=(result(0, 1200),), gpu_s=1800.0, cost=2.4, currency="USD")


def priced_in_a_file_store() -> Run:
    run = with_price(simulated=True, environment_label="ai-4").apply(ev.Tracked(tracked=IN_A_FILE))
    return run.end(seconds=1.6, results=(result(0, 1200),), gpu_s=8.0, cost=8 * 1.2 / 3600, currency="USD")


def points(key: str, values: Sequence[float], step: int = 1) -> tuple[MetricPoint, ...]:
    """Return points that were logged ten milliseconds apart, `step` steps apart."""
    return tuple(MetricPoint(key, value, 10 * at, step * at) for at, value in enumerate(values))


def logged_metrics() -> Run:
    run = Run(ranks=2).start().say(0, "epoch 1\n")
    for rank in range(2):
        losses = [2.0 / (step + 1) + rank / 10 for step in range(5)]
        run.apply(rank_events.MetricsLogged(rank=rank, metrics=points("train/loss", losses)))
    norms = [0.5, math.nan, 3.25, math.inf]
    run.apply(rank_events.MetricsLogged(rank=0, metrics=points("grad norm", norms)))
    run.apply(rank_events.MetricsLogged(rank=0, metrics=points("rows/s", [1200.0, 1250.5, 1225.0], step=0)))
    odd = (MetricPoint("<b>score</b> $1$", 0.75, 50, 4), MetricPoint("system/gpu_0_power", 200.0, 50, 0))
    return run.apply(rank_events.MetricsLogged(rank=0, metrics=odd)).end()


def too_dear() -> Run:
    message = (
        "its cost limit of $0.02 is reached (--max-cost 0.02): 4 A10 at $4.80 an hour cost $0.02 in 15 s. Raise "
        "--max-cost, or take fewer devices with --gpus or cheaper ones with --type"
    )
    failure = Failure(kind=FailureKind.TIMEOUT, message=message)
    run = with_price(max_cost=0.02).apply(ev.Noted(text="80 % of its cost limit of $0.02 is used"))
    priced = {"gpu_s": 64.0, "cost": 64 * 1.2 / 3600, "currency": "USD"}
    return run.end(RunState.TIMED_OUT, 15.2, failure, limit=RunLimit.COST, **priced)


def making_packages() -> Run:
    run = Run(environment_label="ai-4")
    run.apply(ev.StateChanged(state=RunState.PREPARING))
    return run.apply(
        ev.EnvironmentMoved(host="gpu-node-2", step="installing", done=41, packages=80, seconds=12.0), at=112.0
    )


FORMS = {
    form.__name__: form
    for form in (
        succeeded, failed, died, cancelled, timed_out, queued, gapped, running, stalled, timed_out_in_a_collective,
        failed_when_stalled, started_again, left_alone, on_two_nodes, lost_a_node,
        in_session, in_session_on_one_rank, in_session_running, waits_in_session, sent_by_auto, fresh_in_session,
        renewed, unstopped, refused_by_session, pushed, pulled, called, session_waits, session_connected,
        session_working, session_with_a_dead_rank, session_mended, session_ended, session_lost, out_of_memory,
        out_of_memory_on_cpu, priced_and_tracked, priced_in_a_file_store, too_dear, making_packages,
        logged_metrics,
    )
}  # fmt: skip


def render_text(view: RunView) -> str:
    """Return the whole run as text: header, lines with their ranks, summary or failure."""
    parts = segments(view)
    end = last_text(parts)
    drawn: list[str] = []
    for at, part in enumerate(parts):
        if isinstance(part, ShownDisplay):
            drawn += [f"[{part.item.rank}] {ansi.plain(line)}" for line in display_text(part.item).split("\n")]
        elif isinstance(part, TextSegment):
            drawn.append(render_segment_text(view, part, at == 0, at == end))
    return "\n".join(text for text in drawn if text)
