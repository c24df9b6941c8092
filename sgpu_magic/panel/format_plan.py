"""Formats a plan as the sentences that a panel shows."""

from __future__ import annotations

from collections.abc import Iterable

from sgpu_magic.formatting import count_of, names_text
from sgpu_magic.panel.plan import MOST_NAMED, DeviceShortage, PackageChanges, Plan, Restart, SessionStep
from sgpu_magic.panel.pool_state import as_sentence
from sgpu_magic.panel.schema import PanelPlan
from sgpu_magic.wire.devices import CPU, type_label


def panel_plan(plan: Plan) -> PanelPlan:
    """Return what a panel shows of a plan."""
    notes = [as_sentence(note) for note in plan.pool_notes]
    return PanelPlan(
        # the choice of a pool and the choice of a type may have the same note
        sentences=tuple(dict.fromkeys([*notes, *_about_packages(plan.packages), *_about_sessions(plan)])),
        loses=plan.problem is None and plan.loses,
        problem="" if plan.problem is None else as_sentence(plan.problem.message),
        button=_button(plan.connect, plan.is_known and not plan.changes_packages),
    )


def _button(connect: bool, known: bool) -> str:
    if not connect:
        return "Apply"
    return "Connect" if known else "Apply and connect"


def _about_packages(packages: PackageChanges) -> list[str]:
    sentences: list[str] = []
    if (ranks := packages.for_ranks) is not None:
        where = f"{_many(ranks.count)} will be installed where the ranks run, when they start"
        sentences.append(f"About {where}, unless they are there already." if ranks.is_estimate else f"{where}.")
    if packages.added:
        sentences.append(f"{_coming(packages)}, in this notebook's environment.")
    if packages.removed:
        sentences.append(f"{_list_names(packages.removed)} will be removed from this notebook's environment.")
    if packages.ignored_setting is not None:
        sentences.append(f"The setting env_version ({packages.ignored_setting}) does not apply to this notebook.")
    return sentences


def _coming(packages: PackageChanges) -> str:
    count = len(packages.added)
    if not packages.coming:
        return f"{_many(count)} and {'its' if count == 1 else 'their'} dependencies will be installed"
    named = f": {_list_names([name for name in packages.coming if name])}" if packages.coming[0] else ""
    return f"{_many(len(packages.coming))} will be installed{named}"


def _about_sessions(plan: Plan) -> list[str]:
    name = "" if plan.session is None else plan.session.name
    match plan.step:
        case SessionStep.NONE_RUNS:
            return ["Nothing is running."]
        case SessionStep.OTHERS_STAY:
            return ["Sessions stay as they are."]
        case SessionStep.STAYS_WITHOUT_CHOICE:
            return [f"Session {name} stays as it is; the choice applies to the next one."]
        case SessionStep.SEES_NEW_PACKAGES_LATER:
            return [f"Session {name} continues; its ranks see the installed packages after %sgpu_restart."]
        case SessionStep.IS_CONNECTED:
            return [f"Session {name} is already connected with this choice."]
        case SessionStep.CONNECTS:
            return _about_new_session(plan)
        case SessionStep.CONTINUES | None:
            return []


def _about_new_session(plan: Plan) -> list[str]:
    sentences = [] if plan.restart is None else [_about_restart(plan.restart)]
    if plan.devices is None:
        return [*sentences, "The pool is started first."]
    if plan.devices.type_note is not None:
        sentences.append(as_sentence(plan.devices.type_note))
    if plan.devices.shortage is not None:
        sentences.append(_about_shortage(plan.devices.shortage))
    return sentences


def _about_restart(restart: Restart) -> str:
    text = f"Session {restart.session.name} restarts"
    if restart.has_state:
        text += ": its ranks' variables are lost" + (f" ({_list_names(restart.lost)})" if restart.lost else "")
    if restart.running:
        text += f", and what runs in it is stopped ({_list_names(restart.running)})"
    return f"{text}."


def _about_shortage(shortage: DeviceShortage) -> str:
    if shortage.free <= 0:
        one = "CPU rank" if shortage.device_type == CPU else type_label(shortage.device_type)
        return f"No {one} is free now: the session waits in the queue."
    many = "CPU ranks" if shortage.device_type == CPU else type_label(shortage.device_type)
    are = "is" if shortage.free == 1 else "are"
    return (
        f"{shortage.free} of the {shortage.wanted} {many} that this needs {are} free now: the session waits in the "
        "queue."
    )


def _list_names(names: Iterable[str]) -> str:
    return names_text(names, MOST_NAMED)


def _many(packages: int) -> str:
    return count_of(packages, "package")
