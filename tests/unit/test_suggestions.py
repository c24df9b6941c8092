"""Similar names, the most similar first."""

from __future__ import annotations

import pytest

from sgpu_magic.errors import UsageError
from sgpu_magic.suggestions import did_you_mean


@pytest.mark.parametrize(
    ("given", "known", "most", "says"),
    [
        ("log", ["logs", "runs"], 1, "Did you mean `logs`?"),
        ("--gpu", ["--gpus", "--group"], 1, "Did you mean `--gpus`?"),
        ("TEMA", ["Team", "cloud"], 1, "Did you mean `Team`?"),
        ("h10", ["h100", "h200", "a10"], 2, "Did you mean `h100` or `a10`?"),
        ("h10", ["h100", "h101", "a10"], 3, "Did you mean `h101`, `h100` or `a10`?"),
        ("restart", ["status", "stop"], 1, None),
        ("--ab", ["--xb"], 1, None),
        ("", ["a"], 1, None),
        ("x", [], 1, None),
    ],
)
def test_a_suggestion(given: str, known: list[str], most: int, says: str | None):
    assert did_you_mean(given, known, most) == says


def test_an_error_with_a_suggestion_has_no_pointer_to_help():
    near = UsageError.of_unknown_name("there is no pool `tema`.", "tema", ["team"], otherwise="You have: team.")
    assert near.message == "there is no pool `tema`. Did you mean `team`?"
    assert near._render_traceback_() == [f"UsageError: {near.message}"]
    far = UsageError.of_unknown_name("there is no pool `zzz`.", "zzz", ["team"], otherwise="You have: team.")
    assert far.message == "there is no pool `zzz`. You have: team."
    assert "help usage" in far._render_traceback_()[-1]
    assert UsageError.of_unknown_name("no.", "zzz", ["team"]).message == "no."
