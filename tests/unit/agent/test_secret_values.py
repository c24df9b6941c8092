"""Which values count as secrets, and how they are removed from texts."""

from __future__ import annotations

import json
import secrets as random_secrets

import pytest
from secret_corpus import GITHUB_TOKEN, HARMLESS, SECRETS, WEBHOOKS

from sgpu_magic.agent import failures as failure_blanking
from sgpu_magic.packages.secrets import find_secrets, is_secret, without_secrets, without_url_credentials
from sgpu_magic.runs.submit.cell_source import without_values
from sgpu_magic.wire.attachments import PackedLayout
from sgpu_magic.wire.base import FailureKind
from sgpu_magic.wire.rank_events import Failure

LAYOUT = PackedLayout(pickle_size=7, buffers=(), mac=b"")


@pytest.mark.parametrize(
    ("name", "value"), SECRETS, ids=[f"{number} {name}" for number, (name, _) in enumerate(SECRETS)]
)
def test_secrets_are_seen(name: str, value: str) -> None:
    assert is_secret(name, value)


@pytest.mark.parametrize(("name", "value"), HARMLESS, ids=lambda text: str(text)[:24])
def test_other_values_are_not_taken_for_secrets(name: str, value: str) -> None:
    assert not is_secret(name, value)


@pytest.mark.parametrize("url", WEBHOOKS, ids=lambda url: url.split("/")[2])
def test_the_url_of_a_webhook_is_a_secret_wherever_it_stands(url: str) -> None:
    assert is_secret("whatever", url)
    cleared = without_secrets(f"404 for {url} (POST)")
    assert cleared.endswith("*** (POST)")
    # the host, which identifies the service, is kept
    assert url.split("/")[2] in cleared
    assert url.rpartition("/")[2] not in cleared


def test_random_strings_are_seen_nearly_always() -> None:
    seen = sum(is_secret("x", random_secrets.token_urlsafe(36)) for _ in range(2000))
    assert seen > 1960


def test_find_secrets_names_them() -> None:
    assert find_secrets(dict([*SECRETS[:1], *HARMLESS[:5]])) == {"HF_TOKEN"}


def test_a_known_value_is_blanked_wherever_it_stands() -> None:
    secret = "pä ss/w0rd&x"
    text = f"could not open https://me@host/?q=p%C3%A4%20ss%2Fw0rd%26x with {secret!r}, {json.dumps(secret)}"
    cleared = without_secrets(text, [secret])
    assert cleared == "could not open https://me@host/?q=*** with '***', \"***\""


def test_a_short_value_does_not_blank_other_words() -> None:
    assert without_secrets("maintain the main branch, main", ["main"]) == "maintain the *** branch, ***"
    assert without_secrets("a b c", ["b", ""]) == "a b c"


def test_the_password_of_a_url_is_blanked_by_itself_too() -> None:
    text = "401 for user me with p@ss and p%40ss at https://me:p%40ss@index.example/simple"
    cleared = without_secrets(text, ["https://me:p%40ss@index.example/simple"])
    assert "p@ss" not in cleared
    assert "p%40ss" not in cleared
    assert "me" in cleared


def test_unknown_tokens_and_urls_are_blanked_by_their_form() -> None:
    text = f"Failed to fetch https://u:pw@index.example/simple/x/ with {GITHUB_TOKEN}"
    assert without_secrets(text) == "Failed to fetch https://***@index.example/simple/x/ with ***"
    assert without_url_credentials("git+ssh://git@host/a") == "git+ssh://git@host/a"
    assert without_url_credentials("see https://a:b@c.d@host/e") == "see https://***@host/e"


def test_lines_of_a_key_are_blanked_one_by_one() -> None:
    key = "-----BEGIN X-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASC\nMORELINESOFTHEKEY0123456\n-----END X-----"
    cleared = without_secrets("line 2: MIIEvQIBADANBgkqhkiG9w0BAQEFAASC", [key])
    assert cleared == "line 2: ***"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ('%%distributed -n 2 --env "AUTH=Bearer abc123"', "%%distributed -n 2 --env AUTH=***"),
        ("%%distributed --env='A=b c' --name 'my run'", "%%distributed --env=A=*** --name 'my run'"),
        ("%%distributed --env A=b\\ c --env B= # x", "%%distributed --env A=*** --env B=***"),
        ("%%distributed --env 'A=it'\"'\"'s' -n 1", "%%distributed --env A=*** -n 1"),
        ("%%distributed  -n 2 --name 'as  typed'", "%%distributed  -n 2 --name 'as  typed'"),
    ],
)
def test_values_of_env_do_not_stand_in_the_recorded_line(line: str, shown: str) -> None:
    assert without_values(line) == shown


def test_every_value_of_env_is_hidden_in_a_failure() -> None:
    environ = {"DSN": "hostname-alpha-77", "LEVEL": "True", "OTHER": "hostname-beta-78"}
    failure = Failure(
        kind=FailureKind.USER_CODE,
        message="no route to hostname-alpha-77, nor hostname-beta-78",
        traceback_text="connect('hostname-alpha-77', True)",
        exception=LAYOUT,
    )
    cleared, frames = failure_blanking.without_secrets(failure, [b"hostname-alpha-77"], environ, ("DSN", "LEVEL"))
    assert cleared.message == "no route to ***, nor hostname-beta-78"
    assert cleared.traceback_text == "connect('***', True)"
    assert (cleared.exception, frames) == (None, ())


def test_a_token_in_an_exceptions_type_name_is_blanked() -> None:
    token = "hf_" + "Ab1" * 10
    failure = Failure(kind=FailureKind.USER_CODE, message="m", type_name=f"__main__.{token}", exception=LAYOUT)
    cleared, frames = failure_blanking.without_secrets(failure, [b"pickled"], {})
    assert (cleared.type_name, cleared.exception, frames) == ("__main__.***", None, ())
    other = Failure(kind=FailureKind.USER_CODE, message="m", type_name="__main__.Own", exception=LAYOUT)
    assert failure_blanking.without_secrets(other, [b"pickled"], {}) == (other, [b"pickled"])
