"""Checks parts of a page with axe-core: contrast, names, roles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from browsers import OpenNotebook

BAD = ("serious", "critical")


def axe_problems(
    notebook: OpenNotebook, front_end: Path, places: list[str], least_texts: int = 5, *, undecided: bool = True
) -> list[str]:
    """Return the accessibility problems that axe finds: where, and why.

    Args:
        notebook: The page.
        front_end: The folder of the front end with its packages installed.
        places: Selectors of the parts to read; those that are not on the page are left out.
        undecided: Also return colours that axe can't decide about, such as where something covers a part of a text.
        least_texts: The least number of texts whose contrast must have been checked.
    """
    page = notebook.page
    if not page.evaluate("typeof axe === 'object'"):
        page.evaluate((front_end / "node_modules" / "axe-core" / "axe.min.js").read_text())
        # JupyterLab's body has no height and hides its overflow; to axe, everything would be hidden
        page.add_style_tag(content="body { height: 100vh }")
    include = [[context] for context in places if page.locator(context).filter(visible=True).count()]
    found: dict[str, Any] = page.evaluate("include => axe.run({ include })", include)
    contrasts = [node for rule in found["passes"] if rule["id"] == "color-contrast" for node in rule["nodes"]]
    assert len(contrasts) >= least_texts, "axe has not seen the texts"
    unclear = [rule for rule in found["incomplete"] if undecided and rule["id"] == "color-contrast"]
    return [
        f"{rule['id']} ({rule['impact']}): {node['target']}: {node['failureSummary']}\n{node['html']}"
        for rule in [*found["violations"], *unclear]
        for node in rule["nodes"]
        if rule["impact"] in BAD
    ]
