"""`%sgpu_env --accept`: what somebody else has chosen is confirmed by the user."""

from __future__ import annotations

from sgpu_magic.errors import UsageError
from sgpu_magic.packages import snapshot
from sgpu_magic.packages.difference import versions
from sgpu_magic.packages.distributions import normalised
from sgpu_magic.panel.desk import accept
from sgpu_magic.panel.installing import install
from sgpu_magic.panel.plan import plan
from sgpu_magic.runs.choice import default_choice
from sgpu_magic.runs.choice.keeper import words_of
from sgpu_magic.runs.workplace import Workplace


def accept_choice(place: Workplace) -> str:
    """Confirm the notebook's choice, install what it asks for here, and return what was done.

    Raises:
        UsageError: There is nothing to confirm, or it is not possible here.
        EnvironmentFailed: Its packages can't be installed.
    """
    held = default_choice.keeper(place).now()
    choice = held.choice
    if choice is None:
        raise UsageError(
            held.problem or "this notebook's metadata ask for nothing, so there is nothing that could be confirmed."
        )
    words = words_of(choice, default_choice.pool_name(place))
    if held.confirmed:
        return f"this notebook asks for {words}; that is confirmed already."
    planned = plan(place, held, choice, connect=False, resolve=False)
    if planned.picture.problem:
        raise UsageError(planned.picture.problem)
    said: list[str] = []
    if planned.added:
        install(place.pool.settings, planned.added, ())
        said.append(f"{', '.join(planned.added)} installed.")
    accept(place, choice)
    if not choice.env_version and choice.removed:
        # what goes is the user's, and may be needed elsewhere
        there = [name for name in choice.removed if normalised(name) in versions(snapshot.take_snapshot())]
        if there:
            said.append(f"{', '.join(there)} stays installed: `%pip uninstall {' '.join(there)}` removes it.")
    return " ".join(
        [f"confirmed: this notebook asks for {words}, and a bare %%distributed uses that from now on.", *said]
    )
