"""The table of options of runs and sessions: spelling, reader, target field and help of each.

The options of an interface are a sequence of names in the order of its help, such as `CELL`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Generator, Mapping
from typing import Any

import msgspec

from sgpu_magic.errors import SgpuError
from sgpu_magic.options import rank_lists, values
from sgpu_magic.options.option_records import Devices, EnvironmentOptions
from sgpu_magic.options.values import MOST_RANKS, STRATEGIES, TORCH_CHOICES
from sgpu_magic.wire.devices import KNOWN_TYPES
from sgpu_magic.wire.option_text import OptionName

UI_CHOICES = ("auto", "widget", "text", "none")
"""Values of `--ui`: how a run is shown."""

RETRY_CHOICES = ("failure", "any")
MOST_RETRIES = 100

Reader = Callable[[str, Any], Any]
"""Takes an option as it was written, such as `--timeout`, and its value; raises UsageError."""

DEVICES = ("gpus", "type", "min-memory", "nodes", "placement")
PACKAGES = ("env-version", "torch", "allow-build", "upload", "no-track", "max-cost")
POOL_OPTIONS = ("pool", "ui", "allow-busy")
OF_RANKS_THAT_STAY = ("ranks", "fresh", "reload", "session", "profile")
"""Options that `%%ray_launch` does not have: they need ranks that execute the cell themselves."""
_RUN = ("exclude", "env", "timeout", "wait", "grace", "retries", "retry-on")
_WAYS = ("detach", "nowait", "here", "group")
CELL = (*DEVICES, "out", "in", *_RUN, *_WAYS, *OF_RANKS_THAT_STAY, *PACKAGES, "files", "name", *POOL_OPTIONS)
CALL = (*DEVICES, *_RUN, *PACKAGES, "profile", "name", *POOL_OPTIONS)
SESSION = (*DEVICES, "name", "idle", "wait", "timeout", "env", *PACKAGES, *POOL_OPTIONS)
REPLAY = ("gpus", "type", "env", "here", "timeout", "detach", "name")


class Option(msgspec.Struct, frozen=True):
    """One option.

    Args:
        asks: The field that it sets in a record of `option_records`, with the prefix `devices.` or `environment.` for
            nested records.
        help: Help text on a command line.
        metavar: Placeholder of its value in the help; None for its name in capitals.
        short: Short form.
        type: Converts the word of a command line, as in argparse.
        read: Converts the given value to the field's; None keeps it.
        choices: All possible values.
        offered: Values for completion besides `choices`.
        switch: Whether it has no value.
        repeats: Whether it may be given several times.
        default: Default on a command line.
        python: Its name in Python, if that differs.
        is_number: Whether its value is a number in Python.
    """

    asks: str
    help: str
    metavar: str | None = None
    short: str = ""
    type: Callable[[str], object] | None = None
    read: Reader | None = None
    choices: tuple[str, ...] | None = None
    offered: tuple[str, ...] = ()
    switch: bool = False
    repeats: bool = False
    default: str | None = None
    python: str = ""
    is_number: bool = False

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for argparse's `add_argument`."""
        if self.switch:
            return {"action": "store_true", "help": self.help}
        found: dict[str, Any] = {"help": self.help, "metavar": self.metavar}
        if self.repeats:
            return found | {"action": "append", "default": []}
        return found | {"type": self.type, "choices": self.choices, "default": self.default}


def _count(least: int, most: int, what: str) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of {what} from {least} to {most}")
        return int(text)

    return read


OPTIONS: Mapping[str, Option] = {
    "gpus": Option(
        "devices.ranks",
        "number of ranks, one per GPU (default: all GPUs, or 2 ranks on CPU)",
        "N",
        short="-n",
        type=_count(1, MOST_RANKS, "ranks"),
        read=values.rank_count,
        is_number=True,
    ),
    "type": Option(
        "devices.device_type",
        "GPU type: a10, a100, h100, ..., cpu or any (default: what the pool has)",
        "TYPE",
        read=values.device_type,
        offered=("any", "cpu", *KNOWN_TYPES),
        python="gpu_type",
    ),
    "min-memory": Option(
        "devices.min_memory_bytes",
        "memory that each GPU must have; without --type, the cheapest such type is used",
        "40GB",
        read=values.memory_bytes,
    ),
    "nodes": Option(
        "devices.nodes",
        "number of nodes to spread the ranks evenly over (default: the pool decides)",
        "N",
        read=values.node_count,
        is_number=True,
    ),
    "placement": Option(
        "devices.strategy",
        "use as few nodes as possible, exactly one, or many (default: pack)",
        "|".join(STRATEGIES),
        read=values.strategy_of,
        offered=STRATEGIES,
    ),
    "allow-busy": Option("devices.allow_busy", "also use GPUs that other programs are using", switch=True),
    "out": Option(
        "outputs",
        "variables to bring back: A from rank 0, B from every rank",
        "A,B:all",
        read=lambda option, given: values.outputs_from(given, option),
        repeats=True,
    ),
    "in": Option(
        "extra", "further names to ship, e.g. those that only eval uses", "NAMES", read=values.names, repeats=True
    ),
    "exclude": Option("exclude", "names to leave in the notebook", "NAMES", read=values.names, repeats=True),
    "env": Option(
        "variables",
        "set an environment variable on the ranks (repeatable)",
        "KEY=VALUE",
        read=lambda _, given: values.for_ranks(values.key_values(given)),
        repeats=True,
    ),
    "timeout": Option("timeout_s", "time limit (default and maximum: 7d)", "90s|30m|2h", read=values.timeout_s),
    "wait": Option(
        "wait_s",
        "maximum time in the queue; 0: run now or fail (default: unlimited)",
        "10m|0",
        read=values.duration_s,
    ),
    "grace": Option(
        "grace_s",
        "time between SIGTERM and SIGKILL when the run is stopped (default: 5s; 0s after a failure)",
        "60s",
        read=values.duration_s,
    ),
    "idle": Option(
        "idle_s",
        "end the session after this long without cells; 0: never (default: 60m)",
        "60m",
        read=values.duration_s,
    ),
    "retries": Option(
        "retries",
        "restart the ranks up to N times after a worker or node failure (default: 0)",
        "N",
        type=_count(0, MOST_RETRIES, "retries"),
        is_number=True,
    ),
    "retry-on": Option(
        "retry_on_any",
        "any: also restart after an error in the cell itself (default: failure)",
        read=lambda _, given: given == "any",
        choices=RETRY_CHOICES,
    ),
    "detach": Option("detach", "return at once; the run continues without this notebook", switch=True),
    "nowait": Option(
        "nowait", "return at once with the run's handle: .result(), .cancel(); the notebook goes on", switch=True
    ),
    "here": Option("here", "run the cell in the notebook first, then on the ranks", switch=True),
    "group": Option("group", "show what the ranks printed rank by rank at the end", switch=True),
    "ranks": Option(
        "selected", "run on these ranks of the session only (default: all)", "0,2-3", read=rank_lists.parse_ranks
    ),
    "fresh": Option("fresh", "run in new processes on the session's devices, beside its ranks", switch=True),
    "reload": Option("reload", "reload edited local modules in the session first", switch=True),
    "session": Option("session", "session to run in (default: the last one connected)", "NAME|none", default=""),
    "profile": Option("profile", "record a torch.profiler trace on every rank", switch=True),
    "env-version": Option(
        "environment.env_version",
        "packages of the ranks: a base environment, a requirements or pylock file, or an environment saved with "
        "%%sgpu_env; none: the notebook's own (default: the setting env_version, else none)",
        "4|ai-4|none|FILE|NAME",
        read=lambda _, given: str(given).strip(),
    ),
    "torch": Option(
        "environment.torch_mine",
        "torch of a run whose packages are installed: the notebook's, or the one on the node (default: node)",
        read=lambda _, given: values.is_torch_mine(given),
        choices=TORCH_CHOICES,
    ),
    "allow-build": Option("environment.allow_build", "build packages that have no wheel from source", switch=True),
    "upload": Option(
        "environment.uploads",
        "file or folder to copy to the ranks, found there by sgpu_magic.runtime.upload_path(PATH) (repeatable)",
        "PATH",
        read=lambda _, given: values.paths(given),
        repeats=True,
    ),
    "files": Option(
        "environment.files",
        "auto: take files of at most 50 MB along that the cell names, if ranks can't read the notebook's folder",
        choices=("auto", "off"),
    ),
    "no-track": Option(
        "environment.track",
        "do not log the run to MLflow",
        read=lambda _, given: False if given else None,
        switch=True,
        python="track",
    ),
    "max-cost": Option(
        "max_cost",
        "stop the run before it costs more than this, at the configured prices",
        "5",
        read=values.cost_limit,
        is_number=True,
    ),
    "name": Option("name", "name of the run (default: that of the function or cell)", default=""),
    "pool": Option(
        "pool",
        "pool to run on (default: the setting pool, else a reserved pool with that type, on-demand, local)",
        "NAME|reserved|on-demand",
        default="",
    ),
    "ui": Option("ui", "how to display the run (default: auto)", choices=UI_CHOICES, default="auto"),
}


def read(given: Mapping[str, Any], spelled: Callable[[str], str], readers: Mapping[str, Reader]) -> dict[str, Any]:
    """Convert given options to the fields of a record of `option_records`.

    Args:
        given: Values by option; None if not given.
        spelled: Returns an option's spelling for error messages.
        readers: Readers that replace those of the table, by option.

    Raises:
        UsageError: A value is invalid.
    """
    parts: dict[str, dict[str, Any]] = {"": {}, "devices": {}, "environment": {}}
    for name, value in given.items():
        if value is None:
            continue
        option = OPTIONS[name]
        reader = readers.get(name, option.read)
        part, _, field = option.asks.rpartition(".")
        parts[part][field] = value if reader is None else reader(spelled(name), value)
    return {
        **parts[""],
        "devices": Devices(**parts["devices"]),
        "environment": EnvironmentOptions(**parts["environment"]),
    }


def check_devices(devices: Devices) -> None:
    """Check that the ranks can be spread over nodes as requested, as far as that is known.

    Raises:
        UsageError: They can't.
    """
    if devices.ranks is not None or devices.strategy == "strict_pack":
        values.check_spread(devices.ranks, devices.nodes, devices.strategy)


@contextlib.contextmanager
def options_spelled(spell: Callable[[OptionName], str]) -> Generator[None]:
    """Spell the options that an error names as `spell` does: `as_argument`, `as_job_key`."""
    try:
        yield
    except SgpuError as error:
        error.spell_options(spell)
        raise


def in_python(name: str) -> str:
    """Return an option's name in Python."""
    return OPTIONS[name].python or name.replace("-", "_")


def as_argument(named: OptionName) -> str:
    """Return an option in a text as the Python API spells it: `gpus`, `gpus=4`, `gpu_type="a10"`, `track=False`."""
    name = in_python(named.name)
    option = OPTIONS[named.name]
    if option.switch:
        return f"{name}={not named.name.startswith('no-')}"
    if named.value is None:
        return name
    return f"{name}={named.value}" if option.is_number else f"{name}={json.dumps(str(named.value))}"


def as_job_key(named: OptionName) -> str:
    """Return an option in a text as a job file spells it: `gpus`, `gpus: 4`, `min_memory: 40GB`."""
    key = named.name.replace("-", "_")
    return key if named.value is None else f"{key}: {named.value}"
