"""The phases of a run from its events, and the options from its spec."""

from __future__ import annotations

from msgspec.structs import replace
from stories import Run

from sgpu_magic.views.chosen_options import chosen_options
from sgpu_magic.views.phases import RunPhases
from sgpu_magic.wire import events as ev
from sgpu_magic.wire.base import RunKind, RunState
from sgpu_magic.wire.devices import Placement
from sgpu_magic.wire.rank_events import RanksFinishing, RankUnfinished


def _phases(*bodies: tuple[float, ev.EventBody], now: float = 0.0) -> list[tuple[str, float, bool]]:
    phases = RunPhases(submitted_at=100.0)
    for seq, (at, body) in enumerate(bodies):
        phases.apply(ev.Event(run_id="7f3a90c1", seq=seq, at=at, body=body))
    return [(phase.name, phase.seconds, phase.current) for phase in phases.in_order(now)]


def _state(state: RunState) -> ev.StateChanged:
    return ev.StateChanged(state=state)


STARTED = (
    (102.0, _state(RunState.PREPARING)),
    (105.0, _state(RunState.STARTING)),
    (106.0, _state(RunState.RUNNING)),
)


def test_phases_are_measured_between_the_events_and_the_current_one_goes_on():
    assert _phases(now=101.5) == [("queued", 1.5, True)]
    assert _phases(*STARTED, now=110.0) == [
        ("queued", 2.0, False),
        ("preparing", 3.0, False),
        ("starting", 1.0, False),
        ("running", 4.0, True),
    ]


def test_a_further_attempt_adds_to_its_phases():
    again = ((116.0, _state(RunState.STARTING)), (118.0, _state(RunState.RUNNING)))
    assert _phases(*STARTED, *again, now=119.0)[2:] == [("starting", 3.0, False), ("running", 11.0, True)]


def test_what_ranks_finish_after_the_cell_is_a_phase_of_its_own_and_the_end_stops_the_clock():
    finishing = RanksFinishing(ranks=(RankUnfinished(rank=0, work=()),))
    ended = ev.RunEnded(state=RunState.SUCCEEDED)
    found = _phases(*STARTED, (108.0, finishing), (112.5, ended), now=500.0)
    assert found[3:] == [("running", 2.0, False), ("finishing", 4.5, False)]


def test_options_are_spelled_as_the_caller_writes_them():
    options = {"wait_s": 0.0, "detach": True, "env_names": ("HF_TOKEN",)}
    cell = Run(4, outputs=("model",), **options).view.spec
    assert chosen_options(cell) == [
        ("--gpus", "4"),
        ("--out", "model"),
        ("--env", "HF_TOKEN"),
        ("--timeout", "90 s"),
        ("--wait", "0 s"),
        ("--detach", ""),
    ]
    call = Run(2, kind=RunKind.CALL, **options).view.spec
    assert chosen_options(call)[0] == ("gpus", "2")
    assert chosen_options(call)[-1] == ("detach", "True")


def test_devices_of_a_session_are_not_the_cells_options():
    spec = Run(2, session="5e551011", session_name="work", only=(1,)).view.spec
    assert chosen_options(spec) == [("--session", "work"), ("--ranks", "1"), ("--timeout", "90 s")]


def test_requested_devices_are_listed_unless_they_are_the_default():
    spec = Run(2).view.spec
    asked = Placement(ranks=2, device_type="a10", nodes=2, strategy="spread", min_memory_bytes=24_000_000_000)
    found = dict(chosen_options(replace(spec, placement=asked)))
    assert found["--type"] == "a10"
    assert found["--nodes"] == "2"
    assert found["--placement"] == "spread"
    assert found["--min-memory"] == "24.0 GB"
    assert "--allow-busy" not in found
