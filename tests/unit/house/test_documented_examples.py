"""Every example of README and the site is valid: Python compiles, and the product's parsers take its command lines.

`tests/e2e/test_readme.py` and `test_documented_pages.py` run them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from page_snippets import README, ROOT, SITE, check_syntax, missing_lines, site_pages, snippets, unread_comments

from sgpu_magic.errors import UsageError

FOLDERS = ("", "learn", "do", "coming-from", "understand", "troubleshooting")
PAGES = [README, *site_pages(*FOLDERS)]
# examples in other languages: settings, units, job files
DATA = {"toml", "ini", "yaml", "json"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_are_valid(page: Path):
    assert unread_comments(page) == []
    for snippet in snippets(page):
        assert snippet.language in {"python", "shell", *DATA}, snippet
        try:
            check_syntax(snippet)
        except (SyntaxError, UsageError) as error:
            pytest.fail(f"{snippet}: {error}")


def test_the_site_has_many_lines_to_parse():
    assert sum(check_syntax(snippet) for page in PAGES for snippet in snippets(page)) > 100


@pytest.mark.parametrize(
    ("block", "error"),
    [
        ("python\n%%distributed --gpu 4\npass\n", UsageError),
        ("python\nsession = %sgpu_connect --gpu 4\n", UsageError),
        ("python\n%%distributed --gpus 4\nx = = 1\n", SyntaxError),
        ("python\n!sgpu pool keygen --forced\n", UsageError),
        ("shell\nexport A=1 && sgpu runs --nothing   # a comment\n", UsageError),
    ],
)
def test_an_invalid_example_is_found(tmp_path: Path, block: str, error: type[Exception]):
    page = tmp_path / "page.md"
    page.write_text(f"```{block}```\n")
    with pytest.raises(error):
        check_syntax(snippets(page)[0])


def test_what_a_page_says_about_an_example_is_read(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "Text.\n\n<!-- not run: needs a cluster -->\n```shell\nsgpu types\n```\n\n"
        "<!-- fails: ValueError -->\n```python\n# train.py\nraise ValueError\n```\n\n"
        "```text\nsucceeded in 57 ms · start 1 s · run 5d05\n```\n\n<!-- not runn: a typo -->\n```python\n1\n```\n"
    )
    shell, python, other = snippets(page)
    assert (shell.line, shell.not_run, shell.fails, shell.shown) == (4, "needs a cluster", "", "")
    assert (python.not_run, python.fails, python.file_name) == ("", "ValueError", "train.py")
    assert missing_lines(python, "succeeded in 3 s · run 12345678") == []
    assert missing_lines(python, "failed after 3 s · run 12345678") == [python.shown.rstrip("\n")]
    assert (other.not_run, unread_comments(page)) == ("", ["<!-- not runn: a typo -->"])


def test_no_page_is_left_out():
    assert {page.parent.name for page in SITE.glob("*/*.md")} - {"reference"} <= {*FOLDERS}
