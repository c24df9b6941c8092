"""Completion of options, types, names and runs on a magic's line, and completion by a rank in a session's cells.

`RankQuestions` replaces `do_complete` and `do_inspect` on the kernel object, which the shell channel of ipykernel 6.31
to 7.4 calls, and restores them when the extension is unloaded.
"""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import contextlib
import inspect
import os
import re
from argparse import SUPPRESS
from collections.abc import Awaitable, Callable
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher
from IPython.core.interactiveshell import InteractiveShell

from sgpu_magic.client.pool_choosing import KINDS, RESERVED
from sgpu_magic.client.pools_file import LOCAL, read_pools
from sgpu_magic.config import load_settings
from sgpu_magic.errors import SgpuError
from sgpu_magic.magics.auto_mode import AutoMode
from sgpu_magic.options import argparse_form
from sgpu_magic.options.argparse_form import LINE_PARSERS, NO_SESSION, parser
from sgpu_magic.options.table import OPTIONS
from sgpu_magic.packages import named_environments
from sgpu_magic.packages.named_environments import BASE_NAMES
from sgpu_magic.runs.sessions import cell_runner, registry
from sgpu_magic.runs.sessions.session import Session
from sgpu_magic.views import help as help_pages
from sgpu_magic.wire.base import is_valid_id, short
from sgpu_magic.wire.decoding import load_json
from sgpu_magic.wire.run import RankAnswer, RankQuestion

_CELL = re.compile(r"\s*%%?(?P<magic>distributed|rank|ray_launch)\s")
_LINE = re.compile(r"\s*(?:[\w,\s]+=\s*)?%?(?P<magic>sgpu_(?:connect|disconnect|pull|push|who|restart|auto|env))\s")
_TAKES_RUN = re.compile(r"\s*%?sgpu_(?:attach|detach|stacks|status)\s+(?P<word>[\w.-]*)$")
_TAKES_TOPIC = re.compile(r"\s*%?sgpu_help\s+(?P<word>[\w-]*)$")
_MAX_RUNS = 50
_VALUES = {f"--{name}": found for name, option in OPTIONS.items() if (found := option.choices or option.offered)}
_NAMES = ("--in", "--out", "--exclude")
_matchers: dict[int, object] = {}
# the user waits for it while typing
TIMEOUT_S = 0.3
_TYPES = "_jupyter_types_experimental"
_MAGIC = re.compile(r"(%%(?:distributed|rank))(?:[ \t]+([^\n]*))?\n")


def install(shell: InteractiveShell) -> None:
    """Install the matcher for lines of magics; it suppresses others there, since `--t` is not a Python expression."""

    @context_matcher(identifier="sgpu_magic.options", priority=1000)  # pyright: ignore[reportUntypedFunctionDecorator]
    def match(context: CompletionContext) -> SimpleMatcherResult:
        before = context.text_until_cursor
        kind = "magic option"
        if found := _TAKES_RUN.match(before):
            word, kind = found["word"], "run"
            known = [*(registry.names() if "status" in before else ()), *_newest_runs()]
            texts = [run for run in known if run.lower().startswith(word.lower())]
        elif found := _TAKES_TOPIC.match(before):
            word, kind = found["word"], None
            texts = [topic for topic in help_pages.topics() if topic.startswith(word)]
        elif found := (_CELL.match(before) if context.cursor_line == 0 else None) or _LINE.match(before):
            word = re.split(r"[\s,]", before)[-1]
            known = _candidates(shell, found["magic"], before[: len(before) - len(word)], word)
            texts = [text for text in known if text.startswith(word)]
        else:
            return SimpleMatcherResult(completions=[], suppress=False)
        completions = [SimpleCompletion(text=text, type=kind) for text in texts]
        return SimpleMatcherResult(completions=completions, matched_fragment=word, ordered=True, suppress=True)

    shell.Completer.custom_matchers.append(match)
    _matchers[id(shell)] = match


def remove(shell: InteractiveShell) -> None:
    """Remove the matcher."""
    match = _matchers.pop(id(shell), None)
    if match in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.remove(match)


def _newest_runs() -> list[str]:
    """Return the short ids of the newest runs with a local directory."""
    try:
        with os.scandir(load_settings().runs_path) as entries:
            kept = [(entry.stat().st_mtime, entry.name) for entry in entries if is_valid_id(entry.name)]
    except (OSError, SgpuError):
        # no run yet, or a directory is being removed
        return []
    return list(dict.fromkeys(short(name) for _, name in sorted(kept, reverse=True)[:_MAX_RUNS]))


def _candidates(shell: InteractiveShell, magic: str, before: str, word: str) -> list[str]:
    """Return the candidates after `before`, which ends where a word begins; for paths, only those that match `word`."""
    made = LINE_PARSERS[magic]() if magic in LINE_PARSERS else parser(f"%%{magic}")
    actions = made._actions  # pyright: ignore[reportPrivateUsage]
    options = [option for action in actions if action.help != SUPPRESS for option in action.option_strings]
    words = before.replace(",", " ").split()
    after = next((word for word in reversed(words) if word.startswith("-")), "")
    if words[-1] == "--session":
        return [*registry.names(), *([NO_SESSION] if magic in ("distributed", "rank") else [])]
    if words[-1] in ("--env-version", "--diff"):
        return [*_environments(), *(["none"] if words[-1] == "--env-version" else [])]
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
        case "sgpu_pull" | "sgpu_who" if not after:
            return [*_names_on_ranks(), *options]
        case _:
            return options


def _users_names(shell: InteractiveShell) -> list[str]:
    return [name for name in shell.user_ns if not name.startswith("_")]


def _paths(word: str) -> list[str]:
    """Return the completions of a path, folders with a trailing `/`."""
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
    """Return the values of `--pool`."""
    try:
        listed = read_pools()
    except SgpuError:
        listed = ()
    kinds = [kind for kind in KINDS if any(entry.reserved == (kind == RESERVED) for entry in listed)]
    return [LOCAL, *(entry.name for entry in listed), *kinds]


def _environments() -> list[str]:
    """Return the names of base and saved environments."""
    with contextlib.suppress(SgpuError):
        return [*BASE_NAMES, *named_environments.saved_names(load_settings())]
    return [*BASE_NAMES]


def _names_on_ranks() -> list[str]:
    """Return the names on rank 0 of the current session; empty while it is busy."""
    session = registry.idle()
    there = cell_runner.names_on(session, 0) if session is not None else None
    return sorted(name for name in there or () if not name.startswith("_"))


class RankQuestions:
    """Wraps the kernel's completion and inspection, and asks a rank first in a session's cells.

    Args:
        kernel: The ipykernel.
        auto: Decides which plain cells go to the ranks.
    """

    def __init__(self, kernel: Any, auto: AutoMode) -> None:
        self._kernel = kernel
        self._auto = auto
        self._complete: Callable[..., Any] = kernel.do_complete
        self._inspect: Callable[..., Any] = kernel.do_inspect
        self._own = {name: kernel.__dict__[name] for name in ("do_complete", "do_inspect") if name in kernel.__dict__}
        # bound methods kept as objects, so that `remove` can compare them by identity
        self._ours = {"do_complete": self.complete, "do_inspect": self.inspect}
        for name, ours in self._ours.items():
            setattr(kernel, name, ours)

    def remove(self) -> None:
        """Restore the kernel's own methods."""
        for name, ours in self._ours.items():
            # else wrapped by another extension, which still calls ours: without a session it only delegates
            if self._kernel.__dict__.get(name) is ours:
                delattr(self._kernel, name)
                if name in self._own:
                    setattr(self._kernel, name, self._own[name])

    def complete(self, code: str, cursor_pos: int | None) -> Any:
        """Replace the kernel's `do_complete`: matches of the rank come before the kernel's."""
        cursor = len(code) if cursor_pos is None else cursor_pos
        answer, begin = self._ask("complete", code, cursor)
        found = self._complete(code, cursor_pos)
        if answer is None:
            return found
        merge: Callable[..., Any] = _merged_later if inspect.isawaitable(found) else _merged
        return merge(found, answer, begin, code)

    def inspect(self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        """Replace the kernel's `do_inspect`: the rank's object of that name, else the kernel's."""
        answer, _ = self._ask("inspect", code, cursor_pos, detail_level)
        if answer is None or not answer.bundle:
            return self._inspect(code, cursor_pos, detail_level, omit_sections)
        data: dict[str, Any] = load_json(answer.bundle)
        if not self._kernel.shell.enable_html_pager:
            data.pop("text/html", None)
        reply = {"status": "ok", "found": True, "data": data, "metadata": {}}
        return _later(reply) if inspect.iscoroutinefunction(self._inspect) else reply

    def _ask(self, what: str, code: str, cursor: int, detail: int = 0) -> tuple[RankAnswer | None, int]:
        """Ask a rank; the answer is None if the cell does not run on ranks, or the rank does not answer in time."""
        position = self._position(code, cursor)
        if position is None:
            return None, 0
        session, rank, begin = position
        question = RankQuestion(rank=rank, what=what, code=code[begin:], cursor=cursor - begin, detail=detail)
        answer = session.pool.ask_rank(session.run_id, question, TIMEOUT_S)
        return (None if answer.problem else answer), begin

    def _position(self, code: str, cursor: int) -> tuple[Session, int, int] | None:
        """Return the session and the rank that answer, and the offset at which the rank's code begins."""
        session, found = registry.idle(), _MAGIC.match(code)
        if session is not None and found is None and self._auto.takes(code):
            return session, _lowest_living(session, ()), 0
        if session is None or found is None or cursor < found.end():
            return None
        try:
            options = argparse_form.parse(found[2] or "", found[1])
        except SgpuError:
            return None
        if options is None or options.session == argparse_form.NO_SESSION or options.fresh:
            return None
        if options.session and options.session != session.name:
            session = registry.find(options.session)
        if session is None or not session.is_idle:
            return None
        try:
            only = session.only(options.selected or None)
        except SgpuError:
            return None
        return session, _lowest_living(session, only), found.end()


def _lowest_living(session: Session, only: tuple[int, ...]) -> int:
    ranks = session.ranks_of(only)
    return next((rank for rank in ranks if rank not in session.dead), ranks[0])


def _merged(reply: dict[str, Any], answer: RankAnswer, begin: int, code: str) -> dict[str, Any]:
    """Return the kernel's reply with the rank's matches before its own."""
    if not answer.matches:
        return reply
    start, end = answer.start + begin, answer.end + begin
    own_start, own_end = int(reply["cursor_start"]), int(reply["cursor_end"])
    first = min(start, own_start) if reply["matches"] else start
    own: list[dict[str, Any]] = reply.get("metadata", {}).get(_TYPES) or [{"text": each} for each in reply["matches"]]
    found = [(start, {"text": match.text, "type": match.type or "<unknown>"}) for match in answer.matches]
    found += [(own_start, entry) for entry in own] if own_end == end else []
    # each text once, first as the rank gives it
    entries: dict[str, dict[str, Any]] = {}
    for at, entry in found:
        text = code[first:at] + entry["text"]
        span = {"start": first, "end": end, "text": text}
        entries.setdefault(text, {"type": "<unknown>", "signature": "", **entry, **span})
    return {
        **reply,
        "matches": list(entries),
        "cursor_start": first,
        "cursor_end": end,
        "metadata": {**reply.get("metadata", {}), _TYPES: list(entries.values())},
    }


async def _merged_later(reply: Awaitable[dict[str, Any]], answer: RankAnswer, begin: int, code: str) -> dict[str, Any]:
    return _merged(await reply, answer, begin, code)


async def _later(reply: dict[str, Any]) -> dict[str, Any]:
    return reply
