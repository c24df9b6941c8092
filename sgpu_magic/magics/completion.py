"""Completion of the magic's options, types and names, and of runs where a magic takes one."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
import re
from argparse import SUPPRESS

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher
from IPython.core.interactiveshell import InteractiveShell

from sgpu_magic.client.pool_choosing import KINDS, RESERVED
from sgpu_magic.client.pools_file import LOCAL, read_pools
from sgpu_magic.config import load_settings
from sgpu_magic.errors import SgpuError
from sgpu_magic.options.argparse_form import LINE_PARSERS, NO_SESSION, parser
from sgpu_magic.options.table import OPTIONS
from sgpu_magic.packages import named_environments
from sgpu_magic.packages.named_environments import BASE_NAMES
from sgpu_magic.runs.sessions import registry, run_in
from sgpu_magic.views import help as help_pages
from sgpu_magic.wire.ids import is_valid_id, short

_CELL = re.compile(r"\s*%%?(?P<magic>distributed|rank|ray_launch)\s")
_LINE = re.compile(r"\s*(?:[\w,\s]+=\s*)?%?(?P<magic>sgpu_(?:connect|disconnect|pull|push|restart|auto|env))\s")
_TAKES_RUN = re.compile(r"\s*%?sgpu_(?:attach|detach|stacks|status)\s+(?P<word>[\w.-]*)$")
_TAKES_TOPIC = re.compile(r"\s*%?sgpu_help\s+(?P<word>[\w-]*)$")
_MAX_RUNS = 50
_VALUES = {f"--{name}": found for name, option in OPTIONS.items() if (found := option.choices or option.offered)}
_NAMES = ("--in", "--out", "--exclude")
_matchers: dict[int, object] = {}


def install(shell: InteractiveShell) -> None:
    """Offer the options on the magic's line, and nothing else there: `--t` is no expression of Python."""

    @context_matcher(identifier="sgpu_magic.options", priority=1000)  # pyright: ignore[reportUntypedFunctionDecorator]
    def match(context: CompletionContext) -> SimpleMatcherResult:
        before = context.text_until_cursor
        takes_run = _TAKES_RUN.match(before)
        if takes_run is not None:
            word = takes_run["word"]
            known = [*registry.names(), *_newest_runs()] if "status" in before else _newest_runs()
            runs = [run for run in known if run.lower().startswith(word.lower())]
            return SimpleMatcherResult(
                completions=[SimpleCompletion(text=run, type="run") for run in runs],
                matched_fragment=word,
                ordered=True,
                suppress=True,
            )
        takes_topic = _TAKES_TOPIC.match(before)
        if takes_topic is not None:
            word = takes_topic["word"]
            pages = [SimpleCompletion(text=each) for each in help_pages.topics() if each.startswith(word)]
            return SimpleMatcherResult(completions=pages, matched_fragment=word, suppress=True)
        line = (_CELL.match(before) if context.cursor_line == 0 else None) or _LINE.match(before)
        if line is None:
            return SimpleMatcherResult(completions=[], suppress=False)
        word = re.split(r"[\s,]", before)[-1]
        known = _candidates(shell, line["magic"], before[: len(before) - len(word)], word)
        found = [text for text in known if text.startswith(word)]
        return SimpleMatcherResult(
            completions=[SimpleCompletion(text=text, type="magic option") for text in found],
            matched_fragment=word,
            ordered=True,
            suppress=True,
        )

    shell.Completer.custom_matchers.append(match)
    _matchers[id(shell)] = match


def remove(shell: InteractiveShell) -> None:
    """Take the completion away again."""
    match = _matchers.pop(id(shell), None)
    if match in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.remove(match)


def _newest_runs() -> list[str]:
    """Return the ids of the newest runs that are kept, as people write them; no pool is asked."""
    try:
        with os.scandir(load_settings().runs_path) as entries:
            kept = [(entry.stat().st_mtime, entry.name) for entry in entries if is_valid_id(entry.name)]
    except (OSError, SgpuError):
        # no run yet, or one that is being removed: there is only less to offer
        return []
    return list(dict.fromkeys(short(name) for _, name in sorted(kept, reverse=True)[:_MAX_RUNS]))


def _candidates(shell: InteractiveShell, magic: str, before: str, word: str) -> list[str]:
    """Return what may stand after `before`, which ends where a word begins; of files those that begin with `word`."""
    made = LINE_PARSERS[magic]() if magic in LINE_PARSERS else parser(f"%%{magic}")
    actions = made._actions  # pyright: ignore[reportPrivateUsage]
    options = [option for action in actions if action.help != SUPPRESS for option in action.option_strings]
    words = before.replace(",", " ").split()
    after = next((word for word in reversed(words) if word.startswith("-")), "")
    if words[-1] == "--session":
        return [*registry.names(), *([NO_SESSION] if magic in ("distributed", "rank") else [])]
    if words[-1] in ("--env-version", "--diff"):
        return _environments(with_none=words[-1] == "--env-version")
    if words[-1] == "--pool":
        return _pools()
    if words[-1] == "--upload":
        return _paths(word)
    if words[-1] in _VALUES:
        return list(_VALUES[words[-1]])
    if after in _NAMES and (words[-1] == after or before.endswith(",")):
        return _users_names(shell)
    match magic:
        case "sgpu_auto":
            return ["on", "off", *options]
        case "sgpu_env" if len(words) == 1:
            return ["save", *options]
        case "sgpu_disconnect":
            return [*registry.names(), *options]
        case "sgpu_push" if not after:
            return [*_users_names(shell), *options]
        case "sgpu_pull" if not after:
            return [*_names_on_ranks(), *options]
        case _:
            return options


def _users_names(shell: InteractiveShell) -> list[str]:
    return [name for name in shell.user_ns if not name.startswith("_")]


def _paths(word: str) -> list[str]:
    """Return the files and folders that a path may go on with, folders with `/` behind."""
    folder = word[: word.rfind("/") + 1]
    try:
        with os.scandir(os.path.expanduser(folder) or os.curdir) as entries:
            return sorted(
                f"{folder}{entry.name}{'/' if entry.is_dir() else ''}"
                for entry in entries
                if word[len(folder) :].startswith(".") or not entry.name.startswith(".")
            )
    except OSError:
        return []


def _pools() -> list[str]:
    """Return what `--pool` takes."""
    try:
        listed = read_pools()
    except SgpuError:
        listed = ()
    kinds = [kind for kind in KINDS if any(entry.reserved == (kind == RESERVED) for entry in listed)]
    return [LOCAL, *(entry.name for entry in listed), *kinds]


def _environments(*, with_none: bool) -> list[str]:
    """Return what `--env-version` takes beside files."""
    try:
        kept = named_environments.saved_names(load_settings())
    except SgpuError:
        kept = []
    return [*BASE_NAMES, *(["none"] if with_none else []), *kept]


def _names_on_ranks() -> list[str]:
    """Return what the current session's ranks have; none while they are busy."""
    session = registry.idle()
    there = run_in.names_on(session, 0) if session is not None else None
    return sorted(name for name in there or () if not name.startswith("_"))
