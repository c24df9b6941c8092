"""What a run has around it, in words: its packages while they are made, and its place in MLflow."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

from sgpu_magic.views.units import count_of, format_seconds
from sgpu_magic.views.view import RunView
from sgpu_magic.wire.states import RunState

_MAX_URL_CHARS = 2000
_BEFORE_RANKS = (RunState.QUEUED, RunState.PREPARING)


class Link(NamedTuple):
    """A page, and the words that lead there."""

    text: str
    url: str


def label_text(view: RunView) -> str:
    """Return `packages ai-4`: whose packages the ranks have, "" for the notebook's own."""
    return f"packages {view.spec.environment_label}" if view.spec.environment_label else ""


def packages_text(view: RunView) -> str:
    """Return how far a run's packages are: `packages: installing, 41 of 80 · 12.0 s · gpu-node-2`.

    "" where nothing is made, and once there are ranks.
    """
    moved = view.environment
    if moved is None or view.is_final or view.state not in (*_BEFORE_RANKS, RunState.STARTING):
        return ""
    name = label_text(view) or "packages"
    if moved.ready:
        return f"{name}: ready after {format_seconds(moved.seconds)}" if moved.built else ""
    if view.state not in _BEFORE_RANKS:
        return ""
    count = f"{moved.done} of {count_of(moved.packages, 'package')}" if moved.packages else ""
    step = ", ".join(part for part in (moved.step, count.removesuffix(" packages").removesuffix(" package")) if part)
    said = " · ".join(part for part in (step, format_seconds(moved.seconds), moved.host) if part)
    return f"{name}: {said}"


def tracked_link(view: RunView) -> Link | None:
    """Return the page of the MLflow run; None where its store has no server, or nothing is known of it."""
    tracked = view.tracked
    if tracked is None or not _is_page(tracked.url):
        return None
    where = f"{tracked.experiment}/{view.name}" if tracked.experiment else tracked.mlflow_run_id
    return Link(f"MLflow run {where}", tracked.url)


def tracked_text(view: RunView) -> str:
    """Return `MLflow run http://...`, without a server `MLflow run digits/0a1b2c...`; "" where it is not tracked."""
    tracked = view.tracked
    if tracked is None:
        return ""
    if _is_page(tracked.url):
        return f"MLflow run {tracked.url}"
    where = f"{tracked.experiment}/" if tracked.experiment else ""
    return f"MLflow run {where}{tracked.mlflow_run_id}"


def _is_page(url: str) -> bool:
    """Only what a browser fetches from a server is a link; `javascript:` and the like are not."""
    if len(url) > _MAX_URL_CHARS or not url.isprintable() or any(char.isspace() for char in url):
        return False
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc)
