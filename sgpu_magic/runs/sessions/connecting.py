"""A session begins: what was asked for is submitted, and the handle is there at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from sgpu_magic.errors import UsageError
from sgpu_magic.options.asked import Devices, SessionOptions, Wishes
from sgpu_magic.options.python_form import EnvVersion, of_session
from sgpu_magic.options.values import Upload
from sgpu_magic.packages.snapshot import take_snapshot
from sgpu_magic.payload.pack import new_key, pack_namespace
from sgpu_magic.runs.choice.default_choice import PYTHON_WAYS, with_choice
from sgpu_magic.runs.notebook import owner
from sgpu_magic.runs.sessions import registry
from sgpu_magic.runs.sessions.session import Session
from sgpu_magic.runs.submit.submit import Submission, submit
from sgpu_magic.runs.workplace import Workplace, workplace
from sgpu_magic.wire.ids import new_id
from sgpu_magic.wire.run import CellSource, RunSpec, Shipped
from sgpu_magic.wire.states import RunKind

# a cell and the panel may connect at the same time, and there is one session of a name
_beginning = threading.Lock()


def connect(
    gpus: int | None = None,
    gpu_type: str | None = None,
    *,
    name: str = "",
    idle: float | str | None = None,
    wait: float | str | None = None,
    timeout: float | str | None = None,
    env: Mapping[str, str] | None = None,
    env_version: EnvVersion | None = None,
    torch: str | None = None,
    allow_build: bool = False,
    track: bool | None = None,
    upload: Upload = (),
    max_cost: float | None = None,
    allow_busy: bool = False,
    min_memory: str | float | None = None,
    nodes: int | None = None,
    placement: str | None = None,
    pool: str = "",
    ui: str = "none",
) -> Session:
    """Connect: take devices and start ranks that stay. Returns at once; a context manager, and `await`able.

        with sgpu_magic.connect(4, "a10") as session:
            session.push(cfg=cfg)
            session.run("model = build(cfg).to(device)")
            losses = session.call(train, epochs=3)

    Args:
        gpus: Ranks, one per GPU. Default: 2 on CPU, else all GPUs of the pool's one type.
        gpu_type: `"a10"`, `"h100"` ..., `"cpu"` or `"any"` (default: what the pool has).
        name: Its name (default: `main`).
        idle: It ends after so long without a cell, seconds or a text such as `"60m"`; 0 never (default: the
            setting `session_idle_s`, an hour).
        wait: Longest time in the queue, 0 to get the devices now or fail (default: as long as it takes).
        timeout: Longest time that it may last (default and most: 7 days).
        env: Variables to set on the ranks.
        env_version: The ranks' packages: `"4"`, `"ai-4"`, a requirements or pylock file, or one that `%sgpu_env` has
            saved; `"none"` for this notebook's or program's own (default: the setting `env_version`, else `"none"`).
        torch: Where packages are installed for the run: `"node"` uses the node's torch (default), `"mine"` installs
            the notebook's.
        allow_build: Packages without a wheel may be built from source for the run.
        track: False: it does not become an MLflow run (default: the setting `track`).
        upload: A folder or file, or several, that the ranks find there too: `sgpu_magic.runtime.upload_path("data")`.
        max_cost: It is ended before it costs more, in the currency of the settings (default: no limit).
        allow_busy: Also take GPUs that other programs use.
        min_memory: Memory of each device, `"40GB"` or bytes; without `gpu_type` the cheapest type that has it.
        nodes: Nodes that the ranks are spread over evenly (default: the pool's choice).
        placement: `"pack"` on as few nodes as can be (default), `"strict_pack"` on one, `"spread"` over many.
        pool: The pool's name, or `"reserved"` or `"on-demand"` for any such (default: the setting `pool`, else a
            reserved pool that has the type, an on-demand one, this machine's own).
        ui: How the session itself is shown: `"auto"`, `"widget"`, `"text"` or `"none"`.

    Raises:
        UsageError: Something can't be meant, or a session of that name is connected.
        CapacityError: The pool can't give the devices.
        PoolError: The pool can't be reached.
    """
    ask = of_session(locals())
    place = workplace()
    place.wanted_pool(pool)
    return begin(place, with_choice(place, ask, PYTHON_WAYS), ui)


def begin(place: Workplace, ask: SessionOptions, ui: str, *, of_cell: bool = True) -> Session:
    """Submit a session and make it the current one. May be called by any thread; two do not get in each other's way.

    Args:
        place: This process's runs.
        ask: What is asked for.
        ui: How the session itself is shown.
        of_cell: The cell that is running asks for it.

    Raises:
        UsageError: A session of that name is connected.
    """
    with _beginning:
        return _begun(place, ask, ui, of_cell)


def _begun(place: Workplace, ask: SessionOptions, ui: str, of_cell: bool) -> Session:
    known = registry.find(ask.name)
    if known is not None:
        raise UsageError(
            f"session {ask.name} is connected already ({known.ranks} ranks). End it first (`%sgpu_disconnect "
            f"{ask.name}`, or close()), or give the new one another name."
        )
    found = place.find(place.wanted_pool(ask.pool), ask.devices)
    settings = place.current_settings()
    idle_s = settings.session_idle_s if ask.idle_s is None else ask.idle_s
    key = new_key()
    spec = RunSpec(
        run_id=new_id(),
        name=ask.name,
        cell=CellSource(body=""),
        placement=found.placement,
        outputs=(),
        owner=owner(place.shell, of_cell=of_cell),
        timeout_s=ask.timeout_s,
        wait_s=ask.wait_s,
        env_names=tuple(ask.variables),
        kind=RunKind.SESSION,
        idle_s=idle_s or None,
        max_cost=ask.max_cost,
        shipped=Shipped(notes=found.notes),
    )
    packed = pack_namespace({}, place.namespace, key)
    environ = {**os.environ, **ask.variables}
    submission = Submission(spec, packed, key, environ, ask.wishes, frozenset(ask.variables), pool=found.pool.name)
    # its ranks begin with these; after the submission an interrupt would find a session that nobody knows of yet
    packages = take_snapshot()
    run = submit(found.pool, submission)
    session = Session(place, place.followed(run, ui, error_follows=False), ask.variables, ask.wishes, packages)
    registry.add(session)
    if place.restarts is not None:
        place.restarts.before = registry.end_for_restart
    return session


def has_devices(session: Session, devices: Devices, pool: str) -> bool:
    """Whether a session has the devices that are asked for, in the pool that is named; "" is any."""
    placement = session.spec.placement
    return (
        devices.ranks in (None, session.ranks)
        and devices.device_type in (None, placement.device_type, session.device_type)
        and devices.min_memory_bytes in (0, placement.min_memory_bytes)
        and devices.nodes in (0, placement.nodes)
        and pool in ("", session.pool.name)
    )


def is_same(session: Session, ask: SessionOptions) -> bool:
    """Whether a session is what is asked for."""
    spec = session.spec
    return (
        has_devices(session, ask.devices, ask.pool)
        and ask.idle_s in (None, spec.idle_s or 0)
        and all(session.variables.get(name) == value for name, value in ask.variables.items())
        and ask.wishes in (Wishes(), session.wishes)
        and ask.max_cost in (None, spec.max_cost)
    )
