"""Completion of the magic's options, types and names, and of runs where a magic takes one."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
import re

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher
from IPython.core.interactiveshell import InteractiveShell

from sgpu_magic.config import load_settings
from sgpu_magic.errors import SgpuError
from sgpu_magic.magics.arguments import RETRY_CHOICES, UI_CHOICES, parser
from sgpu_magic.protocol.device_types import KNOWN_TYPES
from sgpu_magic.protocol.ids import is_valid_id, short

_LINE = re.compile(r"\s*%%?distributed\s")
_TAKES_RUN = re.compile(r"\s*%?sgpu_(?:attach|detach|stacks|status)\s+(?P<word>[0-9a-fA-F]*)$")
_MAX_RUNS = 50
_VALUES = {
    "--type": ("any", "cpu", *KNOWN_TYPES),
    "--ui": UI_CHOICES,
    "--retry-on": RETRY_CHOICES,
    "--pool": ("local",),
}
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
            runs = [run for run in _newest_runs() if run.startswith(word.lower())]
            return SimpleMatcherResult(
                completions=[SimpleCompletion(text=run, type="run") for run in runs],
                matched_fragment=word,
                ordered=True,
                suppress=True,
            )
        if context.cursor_line != 0 or not _LINE.match(before):
            return SimpleMatcherResult(completions=[], suppress=False)
        word = re.split(r"[\s,]", before)[-1]
        found = [text for text in _candidates(shell, before[: len(before) - len(word)]) if text.startswith(word)]
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


def _candidates(shell: InteractiveShell, before: str) -> list[str]:
    """Return what may stand after `before`, which ends where a word begins."""
    options = [option for action in parser()._actions for option in action.option_strings]  # pyright: ignore[reportPrivateUsage]
    words = before.replace(",", " ").split()
    after = next((word for word in reversed(words) if word.startswith("-")), "")
    if words[-1] in _VALUES:
        return list(_VALUES[words[-1]])
    if after in _NAMES and (words[-1] == after or before.endswith(",")):
        return [name for name in shell.user_ns if not name.startswith("_")]
    return options
