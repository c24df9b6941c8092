"""What a panel draws, as JSON: pools and their runs, and a notebook's kernel with its packages and sessions."""

from __future__ import annotations

from typing import Literal

from sgpu_magic.runs.choice.schema import Choice
from sgpu_magic.views.live.schema import Message

PoolState = Literal["up", "none", "lost", "other-version", "problem"]
"""`none`: nobody has started it, or it has given its processes back; `lost`: it was there and does not answer."""

Remedy = Literal["", "start", "retry"]
"""What a button below the sentence does: start the pool, look again."""


class PoolChoice(Message, frozen=True):
    """A pool that may be chosen.

    Args:
        name: As in `--pool`.
        about: `this machine`, or what is known of it now: `reserved · 4 of 8 H100 free · $3.90`.
        reserved: Its devices are paid for anyway: it comes before the others.
        default: It is meant where none is named.
    """

    name: str
    about: str
    reserved: bool
    default: bool


class TypePicture(Message, frozen=True):
    """A type of device that the pool has.

    Args:
        type: As in `--type`: `a10`, `cpu`.
        label: `A10`, `CPU`.
        total: Devices, or slots of CPU.
        free: Of these, now.
        memory_bytes: Of one device, 0 when unknown.
        price: Of one device for an hour, None without one.
        currency: Of the price.
        simulated: CPU processes stand in for it.
        reserved: Its price is that of reserved devices.
        waits_s: For each number of devices from 1 to `total`, seconds until so many will be free by what earlier runs
            have taken: 0 when they are free now, None when nothing is known.
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


class DevicePicture(Message, frozen=True):
    """One device.

    Args:
        uuid: Its key.
        type: As in `--type`.
        label: `A10 · 0`.
        simulated: As of its type.
        utilization_pct: 0 to 100; None when nobody tells.
        used_bytes: Memory in use; None when nobody tells.
        memory_bytes: Total, 0 when unknown.
        run_id: Who holds it, "" nobody.
        kernel: The Jupyter kernel of that run, "" when there is none.
        user: What stands beside it: `train_digits · rank 0`, `eval.ipynb`, `free`, why it counts as in use outside.
        free: The pool may give it away.
    """

    uuid: str
    type: str
    label: str
    simulated: bool
    utilization_pct: float | None
    used_bytes: int | None
    memory_bytes: int
    run_id: str
    kernel: str
    user: str
    free: bool


class RunRow(Message, frozen=True):
    """One run of the list.

    Args:
        run_id: Its key.
        short_id: As magics take it.
        name: Function or cell.
        kind: `cell`, `call`, `session`, `push`, `pull` ...
        session: The session in whose ranks or on whose devices it runs, "" for none.
        state: `RunState`'s value.
        tone: `waiting`, `going`, `good`, `bad` or `plain`: the dot's colour and shape.
        final: Nothing changes any more.
        words: What stands below the name, without times that go on: `2 ranks`, `4 ranks · waits for 1 A10, position 1`,
            `rank 1: ValueError`.
        ranks: Their number.
        device_type: As in `--type`.
        simulated: CPU stands in.
        submitted_at: Seconds since the epoch, like the next ones.
        started_at: None before its ranks were there.
        ended_at: None before its end.
        metered_at: When its meter began; None while it costs nothing.
        hourly: What an hour of it costs, None without a price.
        cost: The final one; None while it goes on, and without a price.
        currency: Of both.
        notebook: The notebook's file name, "" for none.
        kernel: The Jupyter kernel that has submitted it, "" for none.
        user: Whose.
        idle_ends_at: Of a session in which nothing runs: when it ends by itself; None else.
        tracked_url: Its page in MLflow when that is a web page, else "".
        here: Its directory is on the server's machine: log, stacks and result can be looked at.
    """

    run_id: str
    short_id: str
    name: str
    kind: str
    session: str
    state: str
    tone: str
    final: bool
    words: str
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
    tracked_url: str
    here: bool


class PoolPicture(Message, frozen=True):
    """A pool without its runs.

    Args:
        version: `VERSION`.
        pool: Its name.
        state: As above.
        sentence: What is wrong or worth knowing, "" for nothing. Never empty unless `state` is `up`.
        remedy: The button's.
        remedy_words: What is written on it.
        now: The server's clock, seconds since the epoch: times that go on are counted from it.
        about: `local · this machine · 16 CPU slots`.
        types: Dearest first, CPU last.
        devices: In the order of types and of the machine.
        cpu_slots: CPU slots in all.
        cpu_slots_free: Of these, now.
        usage: `This month 41.2 GPU h · $118 of $300`, "" when there is nothing to tell.
        notes: Sentences about the pool: a driver's problem, a budget that is nearly used, when it gives its processes
            back.
    """

    version: int
    pool: str
    state: PoolState
    sentence: str
    remedy: Remedy
    remedy_words: str
    now: float
    about: str
    types: tuple[TypePicture, ...]
    devices: tuple[DevicePicture, ...]
    cpu_slots: int
    cpu_slots_free: int
    usage: str
    notes: tuple[str, ...]


# ------------------------------------------------------------------ what is told (websocket, or a widget's messages)


class PoolTold(Message, frozen=True, tag_field="kind", tag="pool"):
    """The pool has changed, or is told for the first time."""

    picture: PoolPicture


class RunsTold(Message, frozen=True, tag_field="kind", tag="runs"):
    """Runs that are new or have changed since the last word; newest first.

    Args:
        pool: Whose.
        whole: These are all: what was told before is forgotten.
        changed: The runs.
        gone: Ids of runs that are listed no more.
    """

    pool: str
    whole: bool
    changed: tuple[RunRow, ...]
    gone: tuple[str, ...]


class PoolsTold(Message, frozen=True, tag_field="kind", tag="pools"):
    """Pools that may be chosen: reserved ones first, then the default, then by name."""

    pools: tuple[PoolChoice, ...]


PanelTold = PoolsTold | PoolTold | RunsTold

MAX_RUNS = 1000
"""Runs that a panel lists."""


class BaseChoice(Message, frozen=True):
    """A base environment that may be chosen.

    Args:
        name: As in `--env-version`; "" is this notebook's packages.
        label: `this notebook's packages`, `4`, `ai-4`, a saved one's name.
        about: `Python 3.12 · 168 packages`.
    """

    name: str
    label: str
    about: str


class PackageLine(Message, frozen=True):
    """A difference of the notebook's environment to its base, or a pending change.

    Args:
        sign: `+` added, `-` removed, `~` another version.
        name: The distribution.
        words: `peft 0.17.1`, `transformers 4.56.1 → 4.57.0`.
        removable: A button takes it back.
    """

    sign: Literal["+", "-", "~"]
    name: str
    words: str
    removable: bool


class SessionPicture(Message, frozen=True):
    """A session of this kernel.

    Args:
        run_id: Its run, found among the pool's runs.
        name: `main`.
        current: Bare `%%distributed` cells run in it.
        state: `RunState`'s value.
        words: for example `2 on A10`.
    """

    run_id: str
    name: str
    current: bool
    state: str
    words: str


class KernelPicture(Message, frozen=True):
    """A kernel that has loaded sgpu-magic.

    Args:
        version: `picture.VERSION`.
        package_version: Of sgpu-magic.
        pool: The settings' pool.
        choice: In effect; None without one.
        choice_words: `2 on A10, local, this notebook's packages`, "" without a choice.
        confirmed: The choice is this user's.
        bases: Environments that may be chosen.
        python: `Python 3.12.3 · torch 2.7.1`, of the chosen base or of the notebook.
        packages: Their number.
        differences: To the chosen base; of the notebook's own packages: what has changed since the kernel began.
        more_differences: So many others are not listed.
        sessions: Those of this kernel that have not ended.
        notes: Sentences: packages that are known to break, modules that are older than what is installed.
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
    sessions: tuple[SessionPicture, ...]
    notes: tuple[str, ...]


class PlanPicture(Message, frozen=True):
    """What applying a choice would do.

    Args:
        sentences: `2 packages will be installed, about 20 s.`, `Session main restarts.`, `Nothing is running.`
        loses: Something would be lost: the button says Confirm.
        problem: Why it can't be applied, "" when it can.
        button: `Apply`, `Apply and connect`, `Connect`.
    """

    sentences: tuple[str, ...]
    loses: bool
    problem: str
    button: str
