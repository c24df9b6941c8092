"""Detects secrets by name or by form, and redacts them in text.

A false positive costs little: a parameter is not recorded, a word in a text becomes `***`. A miss leaks a password.
"""

from __future__ import annotations

import enum
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import quote, unquote

BLANK = "***"

# with these names any value is a secret, except switches and empty values
_SURE_NAMES = (
    "password", "passwd", "passphrase", "passcode", "pwd", "secret", "secrets", "apikey", "credential", "credentials",
    "api key", "private key", "access key", "secret key", "signing key", "encryption key", "account key", "ssh key",
    "auth key", "deploy key", "license key", "service key", "shared key", "storage key", "sas token", "access token",
)  # fmt: skip
# with these names a value is a secret unless it is plainly something else, such as a number or `<pad>`
_LIKELY_NAMES = ("token", "pat", "bearer")
# short forms of "password" as a name's last word: REDIS_PASS, DB_PW; `first_pass` and `pass_rate` are something else
_SHORT_NAMES = frozenset({"pass", "pw", "pswd", "passw", "pword"})
# the URL of a webhook permits posting to it; checked before `_HARMLESS_LAST_WORDS`, which contains "url"
_WEBHOOK_NAMES = ("webhook", "webhooks", "web hook", "incoming hook")
# endings of a compound word, as in PGPASSWORD
_SURE_ENDS = ("password", "passwd", "passphrase", "apikey", "secret")
_LIKELY_ENDS = ("token",)
# with these names a value is a secret if it looks opaque
_POSSIBLE_NAMES = ("auth", "session", "cookie", "cookies", "key", "signature", "sig", "jwt", "authorization", "creds")
# names with such a last word describe a location or a property, not the secret itself
_HARMLESS_LAST_WORDS = frozenset({
    "file", "files", "path", "dir", "directory", "sock", "socket", "pid", "type", "name", "url", "uri", "host", "port",
    "length", "count", "len", "class", "desktop", "manager", "seat", "method", "mode", "version", "provider", "address",
})  # fmt: skip
_SWITCHES = frozenset({"", "0", "1", "true", "false", "yes", "no", "on", "off", "none", "null"})

# token formats as issuers document them and secret scanners match them
_FORMS = re.compile(
    r"""
      \bhf_[A-Za-z0-9]{16,}                                     # Hugging Face
    | \bapi_org_[A-Za-z0-9]{16,}
    | \bgh[pousr]_[A-Za-z0-9]{16,} | \bgithub_pat_\w{16,}       # GitHub
    | \bglpat-[\w-]{16,}                                        # GitLab
    | \bsk-[\w-]{16,} | \b[sr]k_(?:live|test)_[A-Za-z0-9]{10,}  # OpenAI, Anthropic, Stripe
    | \bxox[abeoprs]-[\w-]{10,} | \bxapp-[\w-]{10,}             # Slack
    | \b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{16}\b                   # AWS
    | \bAIza[\w-]{35} | \bya29\.[\w-]{20,} | \bGOCSPX-[\w-]{20,}  # Google
    | \bdapi[0-9a-f]{32}(?:-\d+)?\b | \bdose[0-9a-f]{32}\b      # Databricks
    | \bnpm_[A-Za-z0-9]{30,} | \bpypi-[\w-]{20,} | \bdckr_pat_[\w-]{20,}
    | \br8_[A-Za-z0-9]{30,} | \bnvapi-[\w-]{20,} | \bgsk_[A-Za-z0-9]{30,} | \bSG\.[\w-]{16,}\.[\w-]{16,}
    | \bhvs\.[\w-]{20,} | \bshp(?:at|ca|pa|ss)_[a-fA-F0-9]{16,} | \bdo[op]_v1_[a-f0-9]{32,}
    | \bglsa_[\w]{20,} | \blin_api_[A-Za-z0-9]{20,} | \bATATT3[\w=-]{20,} | \bxkeysib-[\w-]{20,}
    | \bsntrys_[\w+/=-]{20,} | \bsecret_[A-Za-z0-9]{40,} | \bntn_[A-Za-z0-9]{30,}
    | \b\d{8,10}:AA[\w-]{33}\b                                # Telegram's bots
    | \beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*                      # JSON web tokens
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----(?:.*?-----END[ ][A-Z ]*PRIVATE[ ]KEY-----|.*)
    """,
    re.VERBOSE | re.DOTALL,
)
# every match of `_FORMS` contains one of these
_MARKS = (
    "hf_", "api_org_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "sk-", "sk_", "rk_", "xox",
    "xapp-", "AKIA", "ASIA", "AROA", "AIDA", "AIza", "ya29.", "GOCSPX-", "dapi", "dose", "npm_", "pypi-", "dckr_pat_",
    "r8_", "nvapi-", "gsk_", "SG.", "eyJ", "PRIVATE KEY",
    "hvs.", "shpat_", "shpca_", "shppa_", "shpss_", "dop_v1_", "doo_v1_", "glsa_", "lin_api_", "ATATT3", "xkeysib-",
    "sntrys_", "secret_", "ntn_", ":AA",
)  # fmt: skip
# webhooks: the URL itself is the secret; the part that identifies the service is kept
_WEBHOOKS = re.compile(
    r"""(?ix)
    ( https?:// (?:
        hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/
      | [\w.-]+\.webhook\.office\.com/webhookb2/ | outlook\.office(?:365)?\.com/webhook/          # Teams
      | [\w.-]+\.(?:logic\.azure\.com|powerplatform\.com)(?::\d+)?/[^\s"'<>]*?(?:workflows|triggers)/  # Teams, Azure
      | (?:[\w-]+\.)?discord(?:app)?\.com/api/(?:v\d+/)?webhooks/
      | chat\.googleapis\.com/v1/spaces/
      | hooks\.zapier\.com/hooks/catch/ | [\w.-]*hook[\w-]*\.(?:integromat|make)\.com/
      | maker\.ifttt\.com/(?:use/|trigger/[^/\s]+/(?:json/)?with/key/)
      | api\.telegram\.org/bot
      | events\.pagerduty\.com/integration/
      | [\w.-]+(?::\d+)?/hooks/(?=[a-z0-9]{26}\b)                                                # Mattermost
    ) )
    ( [^\s"'<>]+ )
    """
)
_URL_CREDENTIALS = re.compile(r"://([^/?#\s\"'<>@]*(?:@[^/?#\s\"'<>@]*)*)@")
# connection strings, headers and signed URLs: the secret follows the label
_LABELLED = re.compile(
    r"""(?ix)
    ( \b(?: password | passwd | pwd | accountkey | sharedaccesskey | secret | client_secret | api[_-]?key
          | access_token | auth_token | x-amz-signature | x-amz-security-token | x-goog-signature | sig
        ) \s*=\s*
    | \b(?: bearer | basic ) \s+ (?=\S{8,})
    )
    ( [^\s&;"'<>]+ )
    """
)
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_NUMBER = re.compile(r"[-+]?[\d.,_]+(?:e[-+]?\d+)?", re.IGNORECASE)
_SPECIAL_TOKEN = re.compile(r"<.*>|\[.*\]|\s*|.{1,3}")
_PATH = re.compile(r"(?:~|\.{1,2})?/[\w./ +@~-]*|[A-Za-z]:\\.*")
_OPAQUE = re.compile(r"[A-Za-z0-9+/_=.:~-]{16,}")
_ALPHABET = re.compile(r"[A-Za-z0-9+/_=-]{32,}")
_CLASSES = re.compile(r"[a-z]+|[A-Z]+|[0-9]+")
# neighbours in a random string of letters and digits change class six times in ten, in names one to three times
_RANDOM_CHANGES = 0.4
_SET_LINE = re.compile(r"^(\s*%(?:set_)?env\s+)([^\s=]+)(\s*=\s*|\s+)(\S.*?)([ \t]*)$", re.MULTILINE)
# no match of `_FORMS` and `_LABELLED` is shorter
_SHORTEST_FORM = 6
# shorter values would redact unrelated words
_SHORTEST = 4
_SHORTEST_WITHIN_WORDS = 8


@functools.lru_cache(maxsize=5_000)
def is_secret(name: str, value: str) -> bool:
    """Whether a variable or parameter is a secret, by its name or its value."""
    return is_probably_secret(value) or _is_named_secret(name, value)


def is_probably_secret(value: str) -> bool:
    """Whether a value looks like a secret: a known kind of token, a password in a URL, a random string."""
    if len(value) < _SHORTEST_FORM:
        return "@" in value and bool(_url_secrets(value))
    return (
        (any(mark in value for mark in _MARKS) and _FORMS.search(value) is not None)
        or ("@" in value and bool(_url_secrets(value)))
        or ("://" in value and _WEBHOOKS.search(value) is not None)
        or (("=" in value or " " in value) and _LABELLED.search(value) is not None)
        or _is_random(value)
    )


def find_secrets(variables: Mapping[str, str]) -> frozenset[str]:
    """Return the names of the variables that are secrets."""
    return frozenset(name for name, value in variables.items() if is_secret(name, value))


def hidden_values(variables: Mapping[str, str], given: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the values that nothing which leaves a rank may show: those of secrets, and all that `--env` sets.

    Args:
        variables: The rank's variables.
        given: Names of the variables that `--env` sets. Their switches, such as `true`, are shown.
    """
    hidden = find_secrets(variables)
    hidden |= {name for name in given if variables.get(name, "").strip().lower() not in _SWITCHES}
    return tuple(variables[name] for name in sorted(hidden))


class Blanker:
    """Redacts secrets in error messages, log lines, command lines and files that sgpu-magic writes.

    Args:
        secrets: Values known to be secret; their URL-encoded and JSON forms are redacted too. Known kinds of tokens and
            passwords in URLs are always redacted.

    Attributes:
        clear: Returns a text with its secrets redacted and the same number of lines. Takes 20 us for 1,000 characters,
            less than 1 us for a cached text.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        forms = {form for secret in secrets for form in _written_forms(secret)}
        # longest first: one may contain another
        self._forms = sorted(forms, key=len, reverse=True)
        # cells are often run again
        self.clear = functools.lru_cache(maxsize=200)(self._clear)

    def _clear(self, text: str) -> str:
        for form in self._forms:
            if form not in text:
                continue
            blank = BLANK + "\n" * form.count("\n")
            if len(form) >= _SHORTEST_WITHIN_WORDS:
                text = text.replace(form, blank)
            else:
                text = re.sub(rf"(?<![A-Za-z0-9_]){re.escape(form)}(?![A-Za-z0-9_])", lambda _, to=blank: to, text)
        text = without_url_credentials(text)
        if any(mark in text for mark in _MARKS):
            text = _FORMS.sub(lambda match: BLANK + "\n" * match[0].count("\n"), text)
        if "://" in text:
            text = _WEBHOOKS.sub(lambda match: match[1] + BLANK, text)
        return text

    def is_in(self, data: bytes) -> bool:
        """Whether `data` contains a known secret."""
        return any(
            len(form) >= _SHORTEST_WITHIN_WORDS and form.encode("utf-8", "surrogateescape") in data
            for form in self._forms
        )


def without_secrets(text: str, secrets: Iterable[str] = ()) -> str:
    """Return `text` with every secret redacted; `secrets` as for `Blanker`."""
    return Blanker(secrets).clear(text)


def without_url_credentials(text: str) -> str:
    """Return `text` with user and password of every URL redacted: `https://***@host/`. Keeps `ssh://git@`."""
    if "@" not in text or "://" not in text:
        return text
    return _URL_CREDENTIALS.sub(lambda match: f"://{BLANK}@" if _tells(match[1]) else match[0], text)


class SecretsOf:
    """Caches the `Blanker` of an environment's secrets until the environment changes. Not thread-safe."""

    def __init__(self) -> None:
        self._of: Mapping[str, str] = {}
        self._given: frozenset[str] = frozenset()
        self._blanker = Blanker()

    def blanker(self, environ: Mapping[str, str], given: frozenset[str] = frozenset()) -> Blanker:
        """Return a `Blanker` for `hidden_values(environ, given)`. Takes 10 us if nothing has changed."""
        if environ != self._of or given != self._given:
            self._of, self._given = dict(environ), given
            self._blanker = Blanker(hidden_values(environ, given))
        return self._blanker


def blanked_settings(body: str, clear: Callable[[str], str]) -> str:
    """Return a cell's text redacted by `clear`, and with the secrets in `%env NAME=value` lines redacted too."""
    if "%env" in body or "%set_env" in body:
        body = _SET_LINE.sub(_without_secret_value, body)
    return clear(body)


# ---------------------------------------------------------------- internals


class _Says(enum.Enum):
    """What a name implies about its value."""

    NOTHING = 0
    SECRET_WHEN_OPAQUE = 1
    SECRET_UNLESS_PLAIN = 2
    SECRET = 3


@functools.lru_cache(maxsize=2000)
def _meaning_of(name: str) -> _Says:
    words = [word.lower() for word in _WORDS.findall(name)]
    spaced = f" {' '.join(words)} "
    if any(f" {known} " in spaced for known in _WEBHOOK_NAMES):
        return _Says.SECRET_UNLESS_PLAIN
    if not words or words[-1] in _HARMLESS_LAST_WORDS:
        return _Says.NOTHING
    if words[-1] in _SHORT_NAMES:
        # a name in capitals is an environment variable, which is secret even if its value is a number
        return _Says.SECRET if name.isupper() else _Says.SECRET_UNLESS_PLAIN
    if any(f" {known} " in spaced for known in _SURE_NAMES) or any(word.endswith(_SURE_ENDS) for word in words):
        return _Says.SECRET
    if any(f" {known} " in spaced for known in _LIKELY_NAMES) or any(word.endswith(_LIKELY_ENDS) for word in words):
        return _Says.SECRET_UNLESS_PLAIN
    if any(f" {known} " in spaced for known in _POSSIBLE_NAMES):
        return _Says.SECRET_WHEN_OPAQUE
    return _Says.NOTHING


def _is_named_secret(name: str, value: str) -> bool:
    meaning = _meaning_of(name)
    if meaning is _Says.NOTHING or value.strip().lower() in _SWITCHES or _PATH.fullmatch(value):
        return False
    if meaning is _Says.SECRET:
        return True
    if _NUMBER.fullmatch(value) or _SPECIAL_TOKEN.fullmatch(value):
        return False
    if meaning is _Says.SECRET_UNLESS_PLAIN:
        return True
    return _OPAQUE.fullmatch(value) is not None and any(letter.isdigit() for letter in value)


def _is_random(value: str) -> bool:
    """Whether a value looks like a long random string of upper-case letters, lower-case letters and digits."""
    if _ALPHABET.fullmatch(value) is None or value.startswith("/"):
        return False
    runs = _CLASSES.findall(value)
    # a run of characters is lower case, upper case, or digits
    if len({(run.islower(), run.isupper()) for run in runs}) < 3:
        return False
    return len(runs) / len(value) >= _RANDOM_CHANGES


def _url_secrets(text: str) -> list[str]:
    """Return the credentials of the URLs in `text`, each both whole and as the password alone."""
    found: list[str] = []
    for match in _URL_CREDENTIALS.finditer(text):
        credentials = match[1]
        if _tells(credentials):
            user, has_password, password = credentials.partition(":")
            found += [credentials, password if has_password and password else user]
    return found


def _tells(credentials: str) -> bool:
    """Whether the part before a URL's `@` is more than a user name: it may be a token without a password."""
    user, _, password = credentials.partition(":")
    return bool(password) or _FORMS.search(user) is not None or len(user) >= 20 or _is_random(user)


def _written_forms(secret: str) -> Iterable[str]:
    """Yield the forms in which a secret may occur in a text: plain, URL-encoded, JSON, single lines, its parts."""
    parts = {secret, secret.strip()}
    parts.update(_url_secrets(secret))
    parts.update(match[2] for match in _LABELLED.finditer(secret))
    if "\n" in secret:
        parts.update(line.strip() for line in secret.splitlines() if len(line.strip()) >= 16)
    for part in parts:
        # a variable's value may be invalid UTF-8
        quoted = [quote(part, safe=safe, errors="surrogateescape") for safe in ("", "/")]
        for form in (part, unquote(part), *quoted, json.dumps(part)[1:-1], repr(part)[1:-1]):
            if len(form) >= _SHORTEST:
                yield form


def _without_secret_value(match: re.Match[str]) -> str:
    head, name, between, value, rest = match.groups()
    if not find_secrets({name: value.strip("'\"")}):
        return match[0]
    return f"{head}{name}{between}{BLANK}{rest}"
