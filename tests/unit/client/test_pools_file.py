"""`pools.toml`: read with exact errors, and written without losing manual edits."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from sgpu_magic.client.pools_file import (
    PoolEntry,
    add_pool,
    default_pool,
    new_entry,
    pools_path,
    read_pools,
    remove_pool,
    unknown_pool,
)
from sgpu_magic.errors import UsageError
from sgpu_magic.system.secure_sockets import new_key_pair

KEY = new_key_pair().public
TEAM = PoolEntry("team", "tcp://gpu1.example.org:8700", KEY, True, ("a10", "h100"), {"a10": 1.2, "h100": 3.9})
CLOUD = PoolEntry("cloud", "tcp://[2001:db8::1]:443", KEY)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "made" / "pools.toml"


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text.replace("KEY", KEY))
    path.chmod(0o600)
    return path


def output(path: Path, text: str) -> str:
    """The error for this text."""
    with pytest.raises(UsageError) as raised:
        read_pools(written(path, text))
    assert "\n" not in raised.value.message
    return raised.value.message


# ---------------------------------------------------------------- location


def test_it_lies_beside_the_settings():
    assert pools_path({"SGPU_CONFIG": "/etc/sgpu/config.toml"}) == Path("/etc/sgpu/pools.toml")
    assert pools_path({"SGPU_POOLS_FILE": "/x/y.toml", "SGPU_CONFIG": "/etc/sgpu/config.toml"}) == Path("/x/y.toml")


def test_no_file_is_no_pools(file: Path):
    assert read_pools(file) == ()


# ---------------------------------------------------------------- written and read


def test_what_is_written_is_read(file: Path):
    add_pool(TEAM, file)
    add_pool(CLOUD, file)
    assert read_pools(file) == (TEAM, CLOUD)
    assert (TEAM.kind, CLOUD.kind) == ("reserved", "on demand")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(file.parent) == ["pools.toml"]
    assert remove_pool("team", file) == TEAM
    assert read_pools(file) == (CLOUD,)


def test_every_key_there_can_be_survives_the_file(file: Path):
    for number in range(40):
        add_pool(PoolEntry(f"p{number}", "tcp://h:1", new_key_pair().public), file)
    assert len({entry.key for entry in read_pools(file)}) == 40


def test_what_a_person_wrote_stays(file: Path):
    text = """# ours
[team] # of the group
address = "tcp://a:1"
key = "KEY"
prices = {a10 = 1}

# bought by the hour, ask Eve first
["cloud"]
  key = "KEY"   # from Eve
  address = 'tcp://b:2'
  [cloud.prices]
  h100 = 4.5
# the end
"""
    written(file, text)
    before = file.read_text()
    add_pool(PoolEntry("third", "tcp://c:3", KEY), file)
    assert file.read_text().startswith(before)
    assert [entry.name for entry in read_pools(file)] == ["team", "cloud", "third"]
    assert read_pools(file)[1].prices == {"h100": 4.5}
    remove_pool("team", file)
    assert "# bought by the hour, ask Eve first" in file.read_text()
    assert "# of the group" not in file.read_text()
    remove_pool("cloud", file)
    assert [entry.name for entry in read_pools(file)] == ["third"]
    assert "4.5" not in file.read_text()
    assert "# the end" in file.read_text()
    remove_pool("third", file)
    assert read_pools(file) == ()


def test_one_takes_the_place_of_another_only_when_that_is_asked_for(file: Path):
    add_pool(TEAM, file)
    moved = PoolEntry("team", "tcp://elsewhere:1", KEY)
    with pytest.raises(UsageError, match=r"a pool named 'team' is already in .*`sgpu pool remove team`"):
        add_pool(moved, file)
    assert read_pools(file) == (TEAM,)
    add_pool(moved, file, replace=True)
    assert read_pools(file) == (moved,)


def test_what_can_not_be_changed_line_by_line_is_left_alone(file: Path):
    written(file, 'team = {address = "tcp://a:1", key = "KEY"}\nother.address = "tcp://b:2"\nother.key = "KEY"\n')
    before = file.read_text()
    assert [entry.name for entry in read_pools(file)] == ["team", "other"]
    with pytest.raises(UsageError) as raised:
        add_pool(PoolEntry("team", "tcp://c:3", KEY), file, replace=True)
    assert "can't be" in raised.value.message
    assert file.read_text() == before


def test_a_link_to_the_file_stays_one(file: Path, tmp_path: Path):
    add_pool(TEAM, file)
    link = tmp_path / "link.toml"
    link.symlink_to(file)
    add_pool(CLOUD, link)
    assert link.is_symlink()
    assert read_pools(file) == (TEAM, CLOUD)


def test_many_at_once_lose_nothing(file: Path):
    program = (
        "import sys, pathlib\n"
        "from sgpu_magic.client.pools_file import add_pool\n"
        "from sgpu_magic.client.pools_file import PoolEntry\n"
        "for n in range(8):\n"
        "    add_pool(PoolEntry(f'{sys.argv[1]}{n}', 'tcp://h:1', sys.argv[3]), pathlib.Path(sys.argv[2]))\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, each, str(file), KEY]) for each in "abc"]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert {entry.name for entry in read_pools(file)} == {f"{each}{n}" for each in "abc" for n in range(8)}


def test_a_folder_that_can_not_be_written_is_told(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"the list of pools .*pools\.toml can't be written: .*File exists"):
        add_pool(TEAM, tmp_path / "file" / "pools.toml")


# ---------------------------------------------------------------- errors in the file


def test_a_slip_is_told_with_its_line(file: Path):
    assert re.search(r"can't be read: .*line 3", output(file, '[team]\naddress = "tcp://a:1"\nkey = KEY\n'))
    good = '# one\n[good]\naddress = "tcp://a:1"\nkey = "KEY"\n'
    assert "'team' in" in (reported := output(file, f'{good}[team]\naddress = "tcp://a"\nkey = "KEY"\n'))
    assert "(line 5) can't be used: its address is 'tcp://a'; one such as 'ssh://gpubox' or 'tcp://gpu1" in reported
    assert "Fix it there, or delete its lines and add it again with `sgpu pool add`." in reported


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('address = "tcp://a:1"', "its key is missing: 40 characters, which `sgpu pool serve` prints"),
        ('address = "tcp://a:1"\nkey = "short"', "its key is invalid"),
        ('key = "KEY"', "its address is None"),
        ('address = "tcp://a:70000"\nkey = "KEY"', "its address is 'tcp://a:70000'"),
        ('address = "ipc:///tmp/x"\nkey = "KEY"', "its address is 'ipc:///tmp/x'"),
        ('address = "tcp://a:1"\nkey = "KEY"\nreserved = "yes"', "reserved is 'yes'; true or false"),
        ('address = "tcp://a:1"\nkey = "KEY"\ntype = "a10"', "'type' is not a field of a pool; the fields are address"),
        ('address = "tcp://a:1"\nkey = "KEY"\ntypes = "a10"', "types is 'a10'; a list such as"),
        ('address = "tcp://a:1"\nkey = "KEY"\ntypes = ["any"]', "'any' is not a device type"),
        ('address = "tcp://a:1"\nkey = "KEY"\nprices = 3', "prices is 3; a table such as"),
        ('address = "tcp://a:1"\nkey = "KEY"\nprices = {a10 = -1}', "a10"),
    ],
)
def test_a_table_that_means_nothing_is_told(file: Path, lines: str, words: str):
    reported = output(file, f"[team]\n{lines}\n")
    assert "the pool 'team' in" in reported
    assert "(line 1)" in reported
    assert words in reported


@pytest.mark.parametrize(("name", "words"), [
    ("local", "'local' is the name of this machine's own pool"),
    ("Reserved", "`--pool reserved` means any pool of that kind"),
    ("on-demand", "`--pool on-demand` means any pool of that kind"),
    ("-x", "a pool's name begins with a letter"), ("a b", "a pool's name begins with a letter"),
    ("x" * 41, "a pool's name begins with a letter"),
])  # fmt: skip
def test_names_that_would_mean_something_else(name: str, words: str):
    with pytest.raises(UsageError) as raised:
        new_entry(name, "tcp://a:1", KEY)
    assert words in raised.value.message


def test_a_file_that_others_may_write_is_not_believed(file: Path):
    add_pool(TEAM, file)
    file.chmod(0o620)
    with pytest.raises(UsageError, match=r"is writable by other users.*chmod 600") as raised:
        read_pools(file)
    assert str(file) in raised.value.message
    file.chmod(0o644)
    assert read_pools(file) == (TEAM,)


def test_types_and_prices_as_people_write_them():
    entry = new_entry("t", "tcp://a:1", KEY, types="A10, NVIDIA H100 80GB HBM3,cpu", prices="A10=1.20,h100=4.50")
    assert entry.types == ("a10", "h100", "cpu")
    assert entry.prices == {"a10": 1.2, "h100": 4.5}
    with pytest.raises(
        UsageError, match=r"the price 'x/a10' names a pool, but these prices are of this one: write 'a10'"
    ):
        new_entry("t", "tcp://a:1", KEY, prices="x/a10=1")
    with pytest.raises(UsageError, match="the pool 't' can't be added: "):
        new_entry("t", "tcp://a:1", KEY, prices="a10")


# ---------------------------------------------------------------- names


def test_an_unknown_name_is_told_with_those_that_are_near():
    assert unknown_pool("tema", ["team", "cloud"]).message == ("there is no pool named `tema`. Did you mean `team`?")
    assert unknown_pool("zzz", ["team"]).message == (
        "there is no pool named `zzz`. You have: local, team. `sgpu pool add` lists another one."
    )


def test_the_pool_that_is_meant_where_none_is_named():
    both = (CLOUD, TEAM)
    assert [default_pool(setting, both) for setting in ("", "reserved", "on-demand", "cloud", "local")] == [
        "team", "team", "cloud", "cloud", "local",
    ]  # fmt: skip
    assert default_pool("", ()) == "local"
