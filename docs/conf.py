"""Sphinx's settings for the site: `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import sgpu_magic  # noqa: E402  the checkout's own

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "sgpu-magic"
author = "the sgpu-magic contributors"
copyright = author
version = release = sgpu_magic.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["build"]
html_theme = "pydata_sphinx_theme"
html_title = project
html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["drawings.css"]
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
}
html_sidebars = {"index": []}

# the pages show the outputs that are stored in the notebooks
nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
# IPython's cells are no plain Python where they begin with a magic
suppress_warnings = ["misc.highlighting_failure", "mystnb.unknown_mime_type"]

# docstrings are Markdown in small: code has single backticks, examples are indented
default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
copybutton_exclude = ".linenos, .gp, .go"

# `make docs-links`: addresses that are there only on the reader's machine, or nowhere
linkcheck_ignore = [r"https?://(localhost|127\.0\.0\.1|[\w.]*example\.org)\b"]
linkcheck_timeout = 20
linkcheck_retries = 2


def setup(app: Sphinx) -> None:
    """Write the pages that are made from the code, the help pages and the notebooks before Sphinx looks for pages."""
    import reference

    app.connect("builder-inited", lambda _: reference.write(HERE))
    # before napoleon reads the sections
    app.connect("autodoc-process-docstring", _mark_examples, priority=400)


def _mark_examples(_app: Sphinx, _what: str, _name: str, _of: object, _options: object, lines: list[str]) -> None:
    """Put `::` before what is indented below the first sentences."""
    for at, line in enumerate(lines):
        if line in ("Args:", "Attributes:", "Raises:", "Returns:", "Yields:"):
            return
        if line.startswith("    ") and at and not lines[at - 1] and not lines[at - 2].startswith("    "):
            lines[at:at] = ["::", ""]
            return
