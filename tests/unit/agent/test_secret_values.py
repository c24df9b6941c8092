"""What counts as a secret, and texts from which they are blanked."""

from __future__ import annotations

import json
import secrets as random_secrets

import pytest

from sgpu_magic.agent import failures as failure_blanking
from sgpu_magic.packages.secrets import find_secrets, is_secret, without_secrets, without_url_credentials
from sgpu_magic.runs.submit.cell_source import without_values
from sgpu_magic.wire.attachments import PackedLayout
from sgpu_magic.wire.base import FailureKind
from sgpu_magic.wire.rank_events import Failure

LAYOUT = PackedLayout(pickle_size=7, buffers=(), mac=b"")

# made up; written in parts so that no scanner of repositories takes them for real ones
_GITHUB = "ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8"
_JWT = "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiJtYXJrZWQifQ." + "c2lnbmF0dXJl"

SECRETS = [
    ("HF_TOKEN", "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEFGH"),
    ("MY_VARIABLE", "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEFGH"),
    ("GITHUB", _GITHUB),
    ("OPENAI", "sk-" + "proj-abcdefghijklmnop1234"),
    ("AWS_ACCESS_KEY_ID", "AKIA" + "IOSFODNN7EXAMPLE"),
    ("whatever", "AKIA" + "IOSFODNN7EXAMPLE"),
    ("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),
    ("AWS_SESSION_TOKEN", "FwoGZXIvYXdzEBYaDH1hcmtlZA=="),
    ("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567"),
    ("MLFLOW_TRACKING_PASSWORD", "letmein"),
    ("MLFLOW_TRACKING_TOKEN", "some-words-as-token"),
    ("PGPASSWORD", "hunter2"),
    ("DB_PASSWD", "12345"),
    ("GPG_PASSPHRASE", "correct horse battery staple"),
    ("client_secret", "s3cr3t"),
    ("apiKey", "a1b2c3"),
    ("AZURE_STORAGE_CONNECTION_STRING", "AccountName=a;AccountKey=Zm9vYmFyYmF6;EndpointSuffix=core"),
    ("DATABASE_URL", "postgresql://user:pa55@db.example/x"),
    ("UV_INDEX_URL", "https://me:p%40ss@index.example/simple"),
    ("GIT_URL", f"https://{_GITHUB}@git.example/a/b.git"),
    ("HEADER", "Authorization: Bearer abcdefgh12345678"),
    ("X", _JWT),
    (
        "DEPLOY",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAABG5vbmU=\n-----END OPENSSH PRIVATE KEY-----",
    ),
    ("SESSION_KEY", "abc123def456abc123def456"),
    ("COOKIE_VALUE", "a7f3e9c1b2d48f60"),
    ("DATABRICKS_TOKEN", "dapi" + "0123456789abcdef0123456789abcdef"),
    ("SIGNED", "https://bucket.example/a?X-Amz-Signature=0a1b2c3d4e"),
    ("SOMETHING", random_secrets.token_urlsafe(40)),
]

HARMLESS = [
    ("PATH", "/usr/local/bin:/usr/bin"),
    ("TOKENIZERS_PARALLELISM", "false"),
    ("tokenizer", "bert-base-uncased"),
    ("max_tokens", "4096"),
    ("pad_token", "<pad>"),
    ("eos_token", "<|endoftext|>"),
    ("cls_token", "[CLS]"),
    ("token_id", "50256"),
    ("num_token", "128"),
    ("author", "Ada Lovelace"),
    ("GIT_AUTHOR_NAME", "Ada Lovelace"),
    ("XAUTHORITY", "/home/ada/.Xauthority"),
    ("SSH_AUTH_SOCK", "/tmp/ssh-XXXXabcd/agent.1234"),
    ("GOOGLE_APPLICATION_CREDENTIALS", "/home/ada/key.json"),
    ("XDG_SESSION_ID", "12"),
    ("XDG_SESSION_TYPE", "wayland"),
    ("DESKTOP_SESSION", "gnome"),
    ("DBUS_SESSION_BUS_ADDRESS", "unix:path=/run/user/1000/bus"),
    ("JPY_SESSION_NAME", "/home/ada/notebooks/train.ipynb"),
    ("SESSION_MANAGER", "local/host:@/tmp/.ICE-unix/1,unix/host:/tmp/.ICE-unix/1"),
    ("key", "train_loss"),
    ("monkey", "see"),
    ("keyboard", "qwerty"),
    ("learning_rate", "0.001"),
    ("seed", "12345678901234567890"),
    ("model", "meta-llama/Meta-Llama-3.1-8B-Instruct-2024-final-version"),
    ("class_name", "GradientBoostingClassifierWithEarlyStopping1"),
    ("git_commit", "0123456789abcdef0123456789abcdef01234567"),
    ("digest", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
    ("run_id", "f81d4fae-7dec-11d0-a765-00a0c91e6bf6"),
    ("date", "2026-11-22T06:40:16.123456+00:00"),
    ("URL", "https://files.example/simple/torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl"),
    ("REPOSITORY", "ssh://git@git.example/ada/project.git"),
    ("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000"),
    ("NCCL_DEBUG", "INFO"),
    ("OMP_NUM_THREADS", "4"),
    ("LS_COLORS", "rs=0:di=01;34:ln=01;36:mh=00:pi=40;33:so=01;35:do=01;35:bd=40;33;01:cd=40;33;01"),
    ("USE_AUTH", "1"),
    ("HF_TOKEN", ""),
    ("patience", "3"),
    ("compat", "3.11"),
    ("HTTP_PROXY", "http://proxy.example:3128"),
]


@pytest.mark.parametrize(
    ("name", "value"), SECRETS, ids=[f"{number} {name}" for number, (name, _) in enumerate(SECRETS)]
)
def test_secrets_are_seen(name: str, value: str) -> None:
    assert is_secret(name, value)


@pytest.mark.parametrize(("name", "value"), HARMLESS, ids=lambda text: str(text)[:24])
def test_other_values_are_not_taken_for_secrets(name: str, value: str) -> None:
    assert not is_secret(name, value)


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
    text = f"Failed to fetch https://u:pw@index.example/simple/x/ with {_GITHUB}"
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


def test_a_token_in_an_exceptions_type_name_is_blanked() -> None:
    token = "hf_" + "Ab1" * 10
    failure = Failure(kind=FailureKind.USER_CODE, message="m", type_name=f"__main__.{token}", exception=LAYOUT)
    cleared, frames = failure_blanking.without_secrets(failure, [b"pickled"], {})
    assert (cleared.type_name, cleared.exception, frames) == ("__main__.***", None, ())
    other = Failure(kind=FailureKind.USER_CODE, message="m", type_name="__main__.Own", exception=LAYOUT)
    assert failure_blanking.without_secrets(other, [b"pickled"], {}) == (other, [b"pickled"])
