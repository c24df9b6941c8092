"""What a panel shows, as JSON: pools and their runs, and a notebook's kernel with its packages and sessions."""

from __future__ import annotations

from typing import Literal

from sgpu_magic.runs.choice.schema import Choice
from sgpu_magic.views.live.schema import Message

VERSION = 2
"""Version of what the panel receives. A front end only draws its own version."""

PoolState = Literal["up", "none", "lost", "other-version", "problem"]
"""`none`: never started, or stopped after being idle; `lost`: it was running and does not answer."""

Remedy = Literal["", "start", "retry"]
"""The action of the button below the sentence: start the pool, or poll it again."""

MAX_RUNS = 1000
"""Number of newest runs that a panel lists; older active ones are listed too."""


class PoolChoice(Message, frozen=True):
    """A pool that can be chosen.

    Args:
        name: As in `--pool`.
        about: `this machine`, or its current state: `reserved · 4 of 8 H100 free · $3.90`.
        reserved: Its devices are already paid for, so it is listed before the others.
        default: It is used when no pool is named, among those that can be reached.
        reachable: Whether it has answered, or has not been asked yet.
    """

    name: str
    about: str
    reserved: bool
    default: bool
    reachable: bool


class PanelHistory(Message, frozen=True, kw_only=True):
    """The last ten minutes of a device, or the mean of a type's devices.

    There is a value for each 10 s up to now, oldest first, from the first measurement on.

    Args:
        utilization_pct: 0 to 100; None where it was not measured.
        memory_pct: Memory in use, 0 to 100; None where it was not measured.
        runs: The runs that held the device, newest first, as `7f3a train.ipynb`; at most three.
    """

    utilization_pct: tuple[int | None, ...]
    memory_pct: tuple[int | None, ...]
    runs: tuple[str, ...] = ()


class PanelType(Message, frozen=True):
    """A type of device that the pool has.

    Args:
        type: As in `--type`: `a10`, `cpu`.
        label: `A10`, `CPU`.
        total: Number of devices, or of CPU slots.
        free: Number of these that are free now.
        memory_bytes: Memory of one device, 0 when unknown.
        price: Price of one device per hour, None without one.
        currency: Currency of the price.
        simulated: CPU processes simulate it.
        reserved: The price is that of reserved devices.
        waits_s: For each number of devices from 1 to `total`, estimated seconds until that many are free, from the
            durations of earlier runs: 0 when they are free now, None when unknown.
        history: The mean of its devices; None in pools whose devices have a history each.
    """

    type: str
    label: str
    total: int
    free: int
    memory_bytes: int
    price: float | None
    currency: str
    simulated: bool
    reserved: bool
    waits_s: tuple[float | None, ...]
    history: PanelHistory | None = None


class PanelDevice(Message, frozen=True, kw_only=True):
    """One device.

    Args:
        uuid: Its key.
        type: As in `--type`.
        label: `A10 · 0`.
        simulated: CPU processes simulate it.
        utilization_pct: 0 to 100; None when unknown.
        used_bytes: Memory in use; None when unknown.
        memory_bytes: Total memory, 0 when unknown.
        run_id: The run that holds it, "" for none.
        kernel: The Jupyter kernel of that run, "" when there is none.
        user: The text beside it: `train_digits · rank 0`, `eval.ipynb`, `free`, or why it counts as used from outside.
        free: The pool can grant it to a run.
        history: None if it was not measured in the last ten minutes, and in pools with more than 64 devices.
    """

    uuid: str
    type: str
    label: str
    simulated: bool
    utilization_pct: float | None
    used_bytes: int | None
    memory_bytes: int
    run_id: str = ""
    kernel: str = ""
    user: str
    free: bool
    history: PanelHistory | None = None


class RunParameter(Message, frozen=True):
    """An argument or variable of a run, as text."""

    name: str
    value: str


class RunRow(Message, frozen=True):
    """One run of the list.

    Args:
        run_id: Its key.
        short_id: The id as magics accept it.
        name: Function or cell.
        kind: `cell`, `call`, `session`, `push`, `pull` ...
        session: The session in whose ranks or on whose devices it runs, "" for none.
        state: `RunState`'s value.
        tone: `waiting`, `going`, `good`, `bad` or `plain`: the dot's colour and shape.
        final: The run will not change any more.
        reason: Why it waits, failed or was ended: `waits for 1 A10, position 1`, `rank 1: ValueError`; "" for none.
        ranks: Number of ranks.
        device_type: As in `--type`.
        simulated: CPU processes simulate the devices.
        submitted_at: Seconds since the epoch, like the following times.
        started_at: When its ranks started; None before.
        ended_at: None before its end.
        metered_at: When metering began; None while it costs nothing.
        hourly: Cost per hour, None without a price.
        cost: Final cost; None while it runs, and without a price.
        currency: Currency of both.
        notebook: The notebook's file name, "" for none.
        kernel: The Jupyter kernel that submitted it, "" for none.
        user: The user who submitted it.
        idle_ends_at: When an idle session ends by itself; None for other runs.
        dead_ranks: A session's ranks that are dead until they are restarted.
        tracked_url: The URL of its MLflow page, "" when there is no web page.
        here: Its directory is on the server's machine, so log, stacks and result are available.
        parameters: Its scalar arguments and variables, for comparing runs; only of runs that are `here`.
    """

    run_id: str
    short_id: str
    name: str
    kind: str
    session: str
    state: str
    tone: str
    final: bool
    reason: str
    ranks: int
    device_type: str
    simulated: bool
    submitted_at: float
    started_at: float | None
    ended_at: float | None
    metered_at: float | None
    hourly: float | None
    cost: float | None
    currency: str
    notebook: str
    kernel: str
    user: str
    idle_ends_at: float | None
    dead_ranks: tuple[int, ...]
    tracked_url: str
    here: bool
    parameters: tuple[RunParameter, ...]


class PanelPool(Message, frozen=True, kw_only=True):
    """A pool without its runs.

    Args:
        version: `VERSION`.
        pool: Its name.
        state: Its `PoolState`.
        sentence: What is wrong or worth knowing, "" for nothing. Never empty unless `state` is `up`.
        remedy: The button's action.
        remedy_words: The button's label.
        now: The server's clock, seconds since the epoch; running times are computed from it.
        about: `local · this machine · 16 CPU ranks`.
        types: Most expensive first, CPU last.
        devices: In the order of `types`, then of the machine.
        cpu_slots: Number of CPU slots.
        cpu_slots_free: Number of these that are free now.
        usage: `This month 41.2 GPU h · $118 of $300`, "" when there is nothing to show.
        notes: Sentences about the pool: a driver problem, a budget that is nearly used up, when an idle pool stops.
    """

    version: int
    pool: str
    state: PoolState
    sentence: str = ""
    remedy: Remedy = ""
    remedy_words: str = ""
    now: float
    about: str
    types: tuple[PanelType, ...] = ()
    devices: tuple[PanelDevice, ...] = ()
    cpu_slots: int = 0
    cpu_slots_free: int = 0
    usage: str
    notes: tuple[str, ...] = ()


# ------------------------------------------------------------------ updates (websocket, or a widget's messages)


class PoolUpdate(Message, frozen=True, tag_field="kind", tag="pool"):
    """The pool's state, sent first and whenever it changes."""

    snapshot: PanelPool


class RunsUpdate(Message, frozen=True, tag_field="kind", tag="runs"):
    """Runs that are new or have changed since the last update; newest first.

    Args:
        pool: The runs' pool.
        whole: These are all runs; discard earlier ones.
        changed: The runs.
        gone: Ids of runs that are no longer listed.
    """

    pool: str
    whole: bool
    changed: tuple[RunRow, ...]
    gone: tuple[str, ...]


class PoolRuns(Message, frozen=True):
    """The active and the newest runs of a pool, newest first; of a pool that can't be reached, the last known ones."""

    pool: str
    runs: tuple[RunRow, ...]


class PoolsUpdate(Message, frozen=True, tag_field="kind", tag="pools"):
    """Pools that can be chosen, and their runs.

    Args:
        pools: Reserved ones first, then the default, then by name.
        runs: The runs of each pool that has any; empty if this machine's pool is the only one.
    """

    pools: tuple[PoolChoice, ...]
    runs: tuple[PoolRuns, ...] = ()


StateUpdate = PoolsUpdate | PoolUpdate | RunsUpdate


class BaseChoice(Message, frozen=True):
    """A base environment that can be chosen.

    Args:
        name: As in `--env-version`; "" for this notebook's packages.
        label: Its name and what it is: `this notebook's packages, Python 3.12`, `4: Databricks serverless GPU, Python
            3.12`.
        about: `Python 3.12 · 168 packages`.
    """

    name: str
    label: str
    about: str


class PackageLine(Message, frozen=True):
    """A difference between the notebook's environment and its base, or a pending change.

    Args:
        sign: `+` added, `-` removed, `~` another version.
        name: The distribution.
        words: `peft 0.17.1`, `transformers 4.56.1 → 4.57.0`.
        removable: A button can undo it.
    """

    sign: Literal["+", "-", "~"]
    name: str
    words: str
    removable: bool


class PanelSession(Message, frozen=True):
    """A session of this kernel.

    Args:
        run_id: Its run, one of the pool's runs.
        name: `main`.
        current: `%%distributed` cells without options run in it.
        state: `RunState`'s value.
        words: For example `2 on A10`.
    """

    run_id: str
    name: str
    current: bool
    state: str
    words: str


class VariableForm(Message, frozen=True):
    """What some ranks have under a name; "" for what the value does not have.

    Args:
        type: Its class's name without the module; `not set` for ranks without it, `others` for the remaining ranks.
        shape: `(10, 4)`, `len 1,200`.
        dtype: `float32`.
        device: `cuda:0-3` where each rank has it on its own GPU.
        size: `1.2 MB`.
        ranks: `0, 2`; "" where all ranks have the same.
    """

    type: str
    shape: str
    dtype: str
    device: str
    size: str
    ranks: str


class PanelVariable(Message, frozen=True):
    """A variable of a session's ranks.

    Args:
        name: Its name.
        forms: One if all ranks have the same.
    """

    name: str
    forms: tuple[VariableForm, ...]


class PanelVariables(Message, frozen=True, kw_only=True):
    """The variables on the ranks of a kernel's current session.

    Args:
        session: The session's name, "" if there is none.
        busy: A cell runs in it, so its variables can't be listed now.
        variables: Sorted by name.
        more: Number of variables that are not listed.
        notes: Why ranks are missing, or that the session is not connected yet.
    """

    session: str
    busy: bool = False
    variables: tuple[PanelVariable, ...] = ()
    more: int = 0
    notes: tuple[str, ...] = ()


class PanelKernel(Message, frozen=True):
    """A kernel that has loaded sgpu-magic.

    Args:
        version: `VERSION`.
        package_version: The version of sgpu-magic.
        pool: The pool in the settings.
        choice: The choice in effect; None without one.
        choice_words: `2 on A10, local, this notebook's packages`, "" without a choice.
        confirmed: The user has confirmed the choice.
        bases: Environments that can be chosen.
        python: `Python 3.12.3 · torch 2.7.1`, of the chosen base or of the notebook.
        packages: Number of packages.
        differences: Differences from the chosen base; for the notebook's own packages, changes since kernel start.
        more_differences: Number of differences that are not listed.
        sessions: This kernel's sessions that have not ended.
        notes: Sentences: packages with known problems, imported modules that are older than the installed version.
    """

    version: int
    package_version: str
    pool: str
    choice: Choice | None
    choice_words: str
    confirmed: bool
    bases: tuple[BaseChoice, ...]
    python: str
    packages: int
    differences: tuple[PackageLine, ...]
    more_differences: int
    sessions: tuple[PanelSession, ...]
    notes: tuple[str, ...]


class PanelPlan(Message, frozen=True, kw_only=True):
    """What applying a choice would do.

    Args:
        sentences: `2 packages will be installed, about 20 s.`, `Session main restarts.`, `Nothing is running.`
        loses: Something would be lost, so the button says Confirm.
        problem: Why it can't be applied, "" when it can.
        button: `Apply`, `Apply and connect`, `Connect`.
    """

    sentences: tuple[str, ...] = ()
    loses: bool = False
    problem: str = ""
    button: str
