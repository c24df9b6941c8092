"""Writes the pages that have one source elsewhere: options, commands, settings, errors, messages, help, notebooks.

    python docs/reference.py DOCS

They are made anew whenever the site is built and are not kept in the repository.
"""

from __future__ import annotations

import argparse
import enum
import inspect
import re
import sys
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from docstring_parser import DocstringStyle, parse

from sgpu_magic import errors
from sgpu_magic.cli import json_records
from sgpu_magic.cli.main import CommandParser, command_parser
from sgpu_magic.config import Settings
from sgpu_magic.options.argparse_form import LINE_PARSERS, RAY, parser
from sgpu_magic.wire import client, events, files, node, rank, tracking

ROOT = Path(__file__).resolve().parents[1]
HELP = ROOT / "sgpu_magic" / "views" / "help"
CELL_MAGICS = ("%%distributed", "%%rank", RAY)

# by link: its title, what it carries, and the unions of its messages
LINKS = {
    "Client to pool service": ("ZeroMQ; CurveZMQ between machines.", client.ClientMessage),
    "Pool service to client": ("The same link.", client.PoolMessage),
    "What happened to a run": (
        "The events inside `Event`, as the run's `events.msgpack` keeps them.",
        events.EventBody,
    ),
    "Pool service to agent": ("A Unix socket on one machine, ZeroMQ with CURVE keys to a Ray node.", node.ToAgent),
    "Agent to pool service": ("The same link.", node.FromAgent),
    "Agent to zygote": ("A Unix socket.", rank.ToZygote),
    "Zygote to agent": ("The same link.", rank.FromZygote),
    "Agent to rank": ("A Unix socket.", rank.ToRank),
    "Rank to agent": ("The same link.", rank.FromRank),
    "Pool service to tracking process": ("A Unix socket.", tracking.ToTracker),
    "Tracking process to pool service": ("The same link.", tracking.FromTracker),
}

TAGS = {
    "sgpu.run_id": "The run's id.",
    "sgpu.kind": "`cell`, `call`, `session` ...",
    "sgpu.state": "The run's state, final when it is over.",
    "sgpu.notebook": "The notebook's path, or the script's.",
    "sgpu.cell": "The cell's id in the notebook.",
    "sgpu.cell_number": "Its execution count.",
    "sgpu.pool": "The pool's name.",
    "sgpu.host": "The machine of rank 0.",
    "sgpu.client_host": "The machine that submitted the run.",
    "sgpu.devices": "The devices by name.",
    "sgpu.simulated": "`true` on simulated devices.",
    "sgpu.devices_measured": "`cpu` where the system metrics of simulated devices are those of the ranks' processes.",
    "sgpu.environment": "Digest of the packages.",
    "sgpu.environment_label": "What the packages were asked for as: a base environment, a file or a saved name.",
    "sgpu.session": "The session's run id, of a cell in a session.",
    "sgpu.session_name": "The session's name.",
    "sgpu.replay_of": "The run that was launched again.",
    "sgpu.attempts": "`2 of 4`: which attempt it is on, with `--retries`.",
    "sgpu.reason": "Who or what cancelled it.",
    "sgpu.currency": "Of `sgpu/cost`.",
    "sgpu.failure_kind": "The failure's class.",
    "sgpu.failure": "The root cause in one line.",
    "sgpu.failed_rank": "The rank that failed first.",
    "sgpu.logged": "Your code logged something in the run.",
    "sgpu.param": "`sgpu.param.NAME`: a parameter that ranks logged with a second value; MLflow keeps the first.",
    "sgpu.refused": "Names that MLflow refused.",
    "sgpu.left_out": "Files above 200 MB that stay in the run's directory.",
}
METRICS = {
    "sgpu/gpu_seconds": "Seconds of devices that were billed, of all together.",
    "sgpu/cost": "Their cost.",
    "sgpu/queued_seconds": "Time in the queue.",
    "sgpu/starting_seconds": "From the lease to all ranks in their group.",
    "sgpu/running_seconds": "From there to the end of the last rank.",
    "sgpu/total_seconds": "From submission to the end.",
    "system/nodeN/gpu_I_utilization_percentage": "Utilization of the run's device I on node N, in rank order.",
    "system/nodeN/gpu_I_memory_usage_megabytes": "Its used memory.",
    "system/nodeN/gpu_I_memory_usage_percentage": "The same in percent.",
    "system/nodeN/gpu_I_power_usage_watts": "Its power.",
    "system/nodeN/cpu_utilization_percentage": "Processor use of the run's processes on node N.",
    "system/nodeN/system_memory_usage_megabytes": "Their memory.",
    "system/nodeN/rank_R_cpu_utilization_percentage": "Processor use of rank R.",
    "system/nodeN/rank_R_memory_usage_megabytes": "Its memory.",
}
RUN_FILES = {
    "settings.json": "The notebook's process-wide settings, such as dtypes and log levels, by module.",
    "run.json": "What was asked for: the `RunSpec`, as JSON. Secrets are blanked.",
    "cell.py": "The cell, or the function's call. Secrets are blanked.",
    files.PAYLOAD: "The captured variables, up to the setting `keep_payload`.",
    files.KEY: "The key that signs payload and results, mode 0600.",
    files.EVENTS: "What happened, one framed msgpack message after the other; see [the events](wire.md).",
    "rank-N.log": "What rank N printed. A rank that prints nothing leaves none.",
    "error-N.txt": "The whole text of rank N's exception, where that was cut.",
    "results/": "Results that are kept for a later `%sgpu_attach`.",
    files.REQUIREMENTS: "The notebook's packages as exact pins. Shared by runs of the same packages.",
    "pylock.toml": "The same with sources and hashes (PEP 751), once uv has looked them up.",
    files.TRACKING: "Which MLflow run it is, and how far its events are written there.",
    "profile/": "`rank-N.pt.trace.json.gz`, with `--profile`.",
    "checkpoints/": "`runtime.checkpoint_dir()`.",
    "artifacts/": "What your code logged with MLflow while its server was away.",
    files.WORK: "The ranks' working directory on a node that does not see the notebook's files.",
    "_air.py": "Runs the cell again: `torchrun --nproc-per-node 4 _air.py`.",
}


INTRODUCTIONS = {
    "magics": """# Magics

Load them with `%load_ext sgpu_magic`. Each magic prints its options with `-h`, and names and types complete with Tab.
As for every magic, IPython replaces `{expression}` in the line by its value: `%%distributed --gpus {n}`.
""",
    "settings": """# Settings

Each setting may be in `config.toml` in the platform's configuration directory (`~/.config/sgpu-magic/` on Linux;
`SGPU_CONFIG` names another file) or in the environment as `SGPU_` and its name in capitals. The environment wins.
A pool reads its settings when it starts: after a change, `sgpu pool stop`, and the next run starts one with the new
values. `env_version`, `variables`, `track`, `tracking_uri`, `code_warn_bytes`, `code_limit_bytes`, `output_limit`,
`stand_in`, `lone_training` and `session_idle_s` belong to the notebook: `%env SGPU_TRACK=off` in a running one counts
from the next run.
""",
    "completion": """## Completion in a shell

Tab completes commands, options and their values, the ids of runs and jobs, pools and GPU types. Candidates come from
files on this machine: no pool is asked or started.

| shell | in its startup file |
|---|---|
| bash | `eval "$(register-python-argcomplete sgpu)"` |
| zsh | `autoload -U bashcompinit && bashcompinit`, then `eval "$(register-python-argcomplete sgpu)"` |
| fish | `register-python-argcomplete --shell fish sgpu \\| source` |

`register-python-argcomplete` is installed beside `sgpu`. See [argcomplete](https://kislyuk.github.io/argcomplete/) for
completion of all programs that use it.
""",
    "json": """# JSON of the `sgpu` command

With `--json` these commands print one JSON document on standard output and nothing else; `sgpu logs --json` prints one
document per line, also with `--follow`. Exit codes are those without `--json`, and an error is a sentence on standard
error.

    sgpu runs --json | jq -r '.runs[] | select(.state == "failed") | .id'
    sgpu logs 7f3a --follow --json | jq -r 'select(.rank == 0) | .text'
""",
    "errors": """# Errors

All of them are in `sgpu_magic.errors`. An exception that your code raises on a rank is raised in the notebook as its
own type, with the attributes `rank`, `run_id`, `remote_traceback` and `failures`.
""",
    "tracking": """# Metrics and tags

What [an MLflow run](../do/tracking.md) has beside what your code logs.
""",
    "files": """# A run's directory

`result.directory`, in `runs/` below the setting `state_dir`.
""",
    "wire": """# Wire protocol

Every message is one frozen, typed `msgspec.Struct`, encoded as a msgpack map with its tag under `type`; fields with
their default value are left out. Large bytes follow as raw frames. The modules are in `sgpu_magic.wire`.
""",
}


def write(docs: Path) -> None:
    """Write all of them below `docs`."""
    pages = docs / "reference"
    pages.mkdir(exist_ok=True)
    made = {
        "magics": _magics(),
        "command": _command(),
        "json": _json(),
        "settings": _settings(),
        "errors": _errors(),
        "tracking": _tracking(),
        "files": _files(),
        "wire": _wire(),
    }
    for name, lines in made.items():
        _put(pages / f"{name}.md", "\n".join(lines) + "\n")
    help_pages = docs / "troubleshooting"
    help_pages.mkdir(exist_ok=True)
    for page in sorted(HELP.glob("*.md")):
        _put(help_pages / page.name, page.read_text())
    notebooks = docs / "learn" / "notebooks"
    notebooks.mkdir(exist_ok=True)
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        _put(notebooks / notebook.name, _with_links_of_the_site(notebook.read_text()))


def _with_links_of_the_site(notebook: str) -> str:
    """Jupyter's anchors keep a heading's capitals and apostrophes; help pages have another place here."""

    def anchor(found: re.Match[str]) -> str:
        return f"](#{re.sub('[^a-z0-9-]', '', found[1].lower())})"

    notebook = notebook.replace("(../sgpu_magic/views/help/", "(../../troubleshooting/")
    return re.sub(r"\]\(#([^)]*)\)", anchor, notebook)


def _put(path: Path, text: str) -> None:
    """Write a file unless it is there as it is: Sphinx reads anew what is newer."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


# ---------------------------------------------------------------- options


def _magics() -> Iterator[str]:
    from sgpu_magic import magics  # noqa: F401  fills LINE_PARSERS

    yield INTRODUCTIONS["magics"]
    for name in CELL_MAGICS:
        yield from _parser(f"`{name}`", parser(name))
    for name, make in sorted(LINE_PARSERS.items()):
        yield from _parser(f"`%{name}`", make())
    yield "## `%sgpu_help [TOPIC]`\n"
    yield "Shows the page of help that an error names. Without a topic it lists all of them.\n"


def _command() -> Iterator[str]:
    whole = command_parser([])
    yield "# The `sgpu` command\n"
    yield f"{whole.description}\n"
    yield f"{whole.epilog}\n"
    yield "`--json` prints what a command lists for other programs: [the documents](json.md).\n"
    yield INTRODUCTIONS["completion"]
    for name in _commands(whole):
        yield from _parser(f"`sgpu {name}`", _commands(command_parser([name]))[name])


def _commands(made: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in made._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _parser(title: str, made: argparse.ArgumentParser, depth: int = 2) -> Iterator[str]:
    """A parser's description and options, and after them its commands."""
    yield f"{'#' * depth} {title}\n"
    if made.description:
        yield f"{made.description}\n"
    rows = [_option(action) for action in made._actions if _is_shown(action)]
    if rows:
        yield from _table(("option", "meaning"), rows)
    if made.epilog:
        yield f"{made.epilog}\n"
    if isinstance(made, CommandParser):
        yield f"    {made.example}\n"
    for name, command in _commands(made).items():
        yield from _parser(f"`{command.prog}`" if name in command.prog else f"`{name}`", command, depth + 1)


def _is_shown(action: argparse.Action) -> bool:
    return (
        action.help != argparse.SUPPRESS
        and action.dest != "help"
        and not isinstance(action, argparse._SubParsersAction)
    )


def _option(action: argparse.Action) -> tuple[str, str]:
    names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    takes = action.nargs != 0 and bool(action.option_strings)
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    written = f"{names} {value}" if takes else names
    # argparse formats help, where a per cent sign is written twice
    return f"`{written}`", (action.help or "").replace("%%", "%")


# ---------------------------------------------------------------- JSON

JSON_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "datetime": "time"}


def json_record_classes() -> list[type[msgspec.Struct]]:
    """The records of `--json`, in the order in which they are written."""
    found = [value for value in vars(json_records).values() if isinstance(value, type)]
    return [value for value in found if issubclass(value, msgspec.Struct) and value is not json_records.Document]


def _json() -> Iterator[str]:
    yield INTRODUCTIONS["json"]
    told = parse(inspect.getdoc(json_records) or "", DocstringStyle.GOOGLE)
    yield f"{told.long_description}\n"
    documents = [(f"`{command} --json`", _link(record)) for command, record in json_records.DOCUMENTS.items()]
    yield from _table(("command", "document"), documents)
    for record in json_record_classes():
        yield f"## {record.__name__}\n"
        yield f"{_paragraphs(parse(inspect.getdoc(record) or '', DocstringStyle.GOOGLE))}\n"
        described = arguments_of(json_records.Document) | arguments_of(record)
        hints = typing.get_type_hints(record)
        rows = [(f"`{name}`", _json_type(hints[name]), described[name]) for name in record.__struct_fields__]
        yield from _table(("field", "type", "meaning"), rows)


def _json_type(hint: Any) -> str:
    """The type of a field in words."""
    members = typing.get_args(hint)
    if type(None) in members:
        (given,) = [member for member in members if member is not type(None)]
        return f"{_json_type(given)} or null"
    if typing.get_origin(hint) is tuple:
        return f"list: {_json_type(members[0])}"
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{member}`" for member in members)
    if issubclass(hint, enum.Enum):
        return ", ".join(f"`{member.value}`" for member in hint)
    return JSON_TYPES.get(hint.__name__) or _link(hint)


def _link(record: type) -> str:
    return f"[{record.__name__}](#{record.__name__.lower()})"


# ---------------------------------------------------------------- settings, errors


def _settings() -> Iterator[str]:
    described = arguments_of(Settings)
    default = Settings()
    yield INTRODUCTIONS["settings"]
    rows = [
        (f"`{name}`", _value(getattr(default, name)), described.get(name, "")) for name in Settings.__struct_fields__
    ]
    yield from _table(("setting", "default", "meaning"), rows)


def _value(value: object) -> str:
    if value == "":
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:,}`" if isinstance(value, int) else f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def error_classes() -> list[type[errors.SgpuError]]:
    """The classes of `sgpu_magic.errors`, in the order in which they are written."""
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    return [value for value in found if issubclass(value, errors.SgpuError)]


def _errors() -> Iterator[str]:
    yield INTRODUCTIONS["errors"]
    drawn = inspect.getdoc(errors) or ""
    tree = [line[4:] for line in drawn.splitlines() if line.startswith("    ")]
    yield "```text\n" + "\n".join(tree) + "\n```\n"
    for error in error_classes():
        yield f"## `{error.__name__}`\n"
        told = parse(inspect.getdoc(error) or "", DocstringStyle.GOOGLE)
        yield f"{_paragraphs(told)}\n"
        yield f"More: [{error.topic}](../troubleshooting/{error.topic}.md)\n"


def arguments_of(record: type) -> dict[str, str]:
    """The sentences of a class's `Args` and `Attributes`, by name."""
    told = parse(inspect.getdoc(record) or "", DocstringStyle.GOOGLE)
    return {found.arg_name: " ".join((found.description or "").split()) for found in told.params}


def _paragraphs(told: Any) -> str:
    return "\n\n".join(text for text in (told.short_description, told.long_description) if text)


# ---------------------------------------------------------------- tracking, files, messages


def _tracking() -> Iterator[str]:
    yield INTRODUCTIONS["tracking"]
    yield "## Tags\n"
    yield from _table(("tag", "value"), [(f"`{name}`", sentence) for name, sentence in TAGS.items()])
    yield "MLflow's own tags have the commit, branch, dirty flag and user.\n"
    yield "## Metrics\n"
    yield "System metrics: each second in the first minute, then averages of 10 s. `nodeN` numbers the run's nodes.\n"
    yield from _table(("metric", "meaning"), [(f"`{name}`", sentence) for name, sentence in METRICS.items()])


def _files() -> Iterator[str]:
    yield INTRODUCTIONS["files"]
    yield from _table(("file", "holds"), [(f"`{name}`", sentence) for name, sentence in RUN_FILES.items()])


def records_of(union: Any) -> list[type[msgspec.Struct]]:
    """The records of a union, each once; those of an `Event`'s body are another page's part."""
    members = typing.get_args(union) or (union,)
    return list(dict.fromkeys(members))


def _wire() -> Iterator[str]:
    yield INTRODUCTIONS["wire"]
    for title, (carries, union) in LINKS.items():
        yield f"## {title}\n"
        yield f"{carries}\n"
        for record in records_of(union):
            told = parse(inspect.getdoc(record) or "", DocstringStyle.GOOGLE)
            yield f"### `{record.__name__}` (`{record.__struct_config__.tag}`)\n"
            yield f"{_paragraphs(told)}\n"
            described = arguments_of(record)
            rows = [(f"`{name}`", described[name]) for name in record.__struct_fields__ if name in described]
            if rows:
                yield from _table(("field", "meaning"), rows)
            others = ", ".join(f"`{name}`" for name in record.__struct_fields__ if name not in described)
            if others:
                yield f"{'Further fields' if rows else 'Fields'}: {others}.\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


if __name__ == "__main__":
    write(Path(sys.argv[1]))
