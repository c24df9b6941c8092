"""How a replay reports differences."""

from __future__ import annotations

from sgpu_magic.runs.replay.circumstances import Circumstances, differences

THEN = Circumstances(
    host="node1",
    python="3.11.7",
    version="0.1.0",
    digest="aa",
    packages={"numpy": "2.1.0", "pandas": "2.2.0"},
    commit="1234567890abcdef",
    dirty=False,
    cwd="/work",
)


def test_nothing_is_told_where_nothing_differs():
    assert differences(THEN, THEN) == []


def test_equal_digests_need_no_list_of_packages():
    now = Circumstances(**{**_fields(THEN), "packages": {}})
    assert differences(THEN, now) == []


def test_each_difference_is_a_sentence():
    now = Circumstances(
        host="node2",
        python="3.12.1",
        version="0.2.0",
        digest="bb",
        packages={"numpy": "2.2.0"},
        commit="fedcba0987654321",
        dirty=True,
        cwd="/elsewhere",
    )
    assert differences(THEN, now) == [
        "it ran on node1, and this machine is node2",
        "it ran under Python 3.11.7, and this is 3.12.1",
        "packages of another version: numpy 2.2.0 (was 2.1.0)",
        "packages that are not installed here: pandas 2.2.0",
        "it was run by sgpu-magic 0.1.0, and this is 0.2.0",
        "it was submitted at git commit 1234567890, and here fedcba0987 is checked out: imported modules may differ",
        "its directory /work does not exist here, so it starts in /elsewhere",
    ]


def test_uncommitted_changes_are_told():
    now = Circumstances(**{**_fields(THEN), "dirty": True})
    assert differences(THEN, now) == ["the git repository had uncommitted changes now: imported modules may differ"]


def test_unrecorded_packages_are_told():
    then = Circumstances(**{**_fields(THEN), "digest": "", "packages": {}})
    assert differences(then, THEN) == ["its packages were not recorded, so they could not be compared"]


def test_long_lists_are_cut():
    packages = {f"p{number}": "1" for number in range(10)}
    then = Circumstances(digest="aa", packages=packages)
    (reported,) = differences(then, Circumstances(digest="bb", packages={"other": "1"}))
    assert reported.endswith("p5 1 and 4 more")


def _fields(of: Circumstances) -> dict[str, object]:
    return {name: getattr(of, name) for name in Circumstances.__slots__}
