"""Recognize secrets, and remove them from everything that is written or shown."""

import base64
import logging
import re
import traceback
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl, quote, quote_plus, urlsplit, urlunsplit

HIDDEN = "***"
SHORTEST_KNOWN = 6
"""Shortest value that is searched for in texts: shorter ones, such as `yes`, would be found everywhere."""
REFERENCE = re.compile(r"env:([A-Za-z_]\w*)")
"""Pattern of a value that refers to an environment variable."""
REFERENCE_INSIDE = re.compile(r"\$\{env:([A-Za-z_]\w*)\}")
"""Pattern of such a reference inside a longer text."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_WORDS = frozenset([
    "secret", "secrets", "password", "passwords", "passwd", "pwd", "passphrase", "credential", "credentials",
    "authorization", "bearer", "cookie", "apikey", "apikeys"
])  # fmt: skip
_KINDS_OF_KEY = frozenset(
    ["api", "access", "private", "secret", "auth", "account", "signing", "subscription", "encryption"]
)
_KINDS_OF_TOKEN = frozenset(["api", "access", "auth", "bearer", "refresh"])
_NO_SECRET_TOKENS = frozenset([
    "bos", "eos", "eot", "eom", "pad", "unk", "sep", "cls", "mask", "begin", "start", "end", "stop", "think",
    "thinking", "step", "separator", "split", "image", "audio", "video", "special", "placeholder", "first",
    "last", "next", "previous", "new", "final", "prompt", "answer", "target", "reward", "yes", "no", "good",
    "bad", "positive", "negative", "system", "assistant", "role", "tool", "space", "newline", "max", "min",
    "per", "each", "any"
])  # fmt: skip
"""Words before `token` that make it a token of text."""
_SECRET_PARAMETERS = frozenset({"key", "sig", "signature", "auth"})
"""Names that are secret only in the query of an address."""
_SPACE = r"(?:\s+|%20|\+)"
_64URL = "[A-Za-z0-9_-]"
# No form may look ahead without a bound, or begin inside a word: a model may write a million letters.
_FORMS = {
    "Hugging Face": r"\bhf_[A-Za-z0-9]{16,}",
    "OpenAI, Anthropic": r"\bsk-(?=[A-Za-z_-]{0,99}\d)[A-Za-z0-9_-]{16,}",
    "GitHub": r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,})",
    "GitLab": r"\bglpat-[A-Za-z0-9_-]{16,}",
    "AWS": r"\bA[KS]IA[A-Z0-9]{16}\b",
    "Slack": r"\b(?:xox[abeoprs]|xapp)-[A-Za-z0-9-]{10,}|\bhooks\.slack\.com/services/[\w/]{20,}",
    "Google": r"\bAIza[A-Za-z0-9_-]{30,}|\bya29\.[A-Za-z0-9_-]{20,}",
    "npm, NVIDIA, W&B": r"\bnpm_[A-Za-z0-9]{30,}|\bnvapi-[A-Za-z0-9_-]{20,}|\bwandb_v1_\w{20,}",
    # Header, then payload and signature (JWS), or key, nonce, text and tag (JWE); payload and key may be empty.
    "JWT": rf"(?<![\w-])eyJ{_64URL}{{5,}}+\.{_64URL}*+\.{_64URL}{{10,}}+(?:\.{_64URL}++){{0,2}}",
    "Bearer": rf"\b(?:Bearer{_SPACE}|(?i:bearer){_SPACE}(?=[\w.~+/-]{{0,99}}(?:\d|[a-z][A-Z])))[A-Za-z0-9._~+/=-]{{16,}}",
    # The characters of base64, with a digit or a capital inside a word: it is no word.
    "Basic": rf"\b(?i:basic){_SPACE}(?=[A-Za-z+/]{{0,99}}(?:\d|[a-z][A-Z]))(?:(?:[A-Za-z0-9+/_-]|%2[BbFf]){{11,}}"
    r"(?:=|%3[Dd]){0,2}|[A-Za-z0-9+/_-]{6,}(?:=|%3[Dd]){1,2})",
    "private key": r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?:(?!-----)[\s\S])*+"
    r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----)?",
}
"""Issuer -> the form of its credentials, wherever they stand."""
_SECRET_VALUE = re.compile("|".join(_FORMS.values()))
_USER = re.compile(r"""(\b\w+://)([^\s/@:?#"<>]*(?::(?!\d{1,5}[/?#])[^\s/@"<>]+)?(?:@[^\s/@?#"<>]+)*)@(?!sha256:)""")
"""User and password of an address. The password may have an `@`; an image may have a tag and a digest."""
_TOKEN_AS_USER = 16
"""Characters from which a user without a password is a token, as in `git+ssh://TOKEN@host`."""
_NAMED = re.compile(
    r"""
    (?<![\w-]) (?P<name> (?P<option>--?)? [A-Za-z][\w-]{2,60}+ )
    (?P<between> \\?["']? [ \t]{0,3} (?: : | %3[AaDd] | (?<=[a-z"'\s]) = | , (?=\s{0,3}b?\\?["']) | (?(option) \s (?=[^\s-]) | (?!) ) ) [ \t]{0,3} | = )
    (?: b?\\?["'] (?P<quoted> [^"'\\]{1,4000} )
      | (?P<bare> (?: (?i:apikey|aws4-hmac-sha256|basic|bearer|digest|key|negotiate|token)\s )? [^\s"'&,;(){}\[\]<>|\\]{1,1000} ) )
    """,
    re.VERBOSE,
)
"""A name and its value: of a query, header, option or environment; in Python, in JSON, or in JSON inside a text."""
_NO_VALUE = re.compile(r"env:|\$|%|\*|-|(?:none|null|true|false|\d|\.\.\.)$", re.IGNORECASE)
"""Beginning of a value that names, formats or hides a secret, or that means none."""
_DIGIT = re.compile(r"\d")
_NUMBER = re.compile(r"[\d.,:eE+-]+")
_LEAST_OF_TOKEN = 16
"""Characters from which the value of a token is no word of a text, which a token may also be."""
_TOKEN_OF_A_TEXT = re.compile(r"\s|^<.*>$|^\[.*\]$|^$")


# ---------------------------------------------------------------- recognizing


def is_secret_name(name: str) -> bool:
    """Whether a value with this name is a secret, by the last words of the name.

    >>> [is_secret_name(name) for name in ("api_key", "X-Api-Key", "hf_token", "OPENAI_KEY", "dbPassword")]
    [True, True, True, True, True]
    >>> [is_secret_name(name) for name in ("max_tokens", "stop_token", "tokenizer", "sort_key", "token_env")]
    [False, False, False, False, False]
    """
    words = [word.lower() for word in _WORD.findall(name)]
    before, last = ["", "", *words][-2:]
    if last in ("key", "keys"):
        return before in _KINDS_OF_KEY or (name.isupper() and bool(before))  # environment variables: OPENAI_KEY
    if last == "token":
        return before not in _NO_SECRET_TOKENS
    return last in _SECRET_WORDS or (last == "tokens" and before in _KINDS_OF_TOKEN)


def is_plain_secret(name: str, value: str) -> bool:
    """Whether `value` is a secret in clear, by its name or its form; a reference is not a secret.

    >>> is_plain_secret("api_key", "hunter2"), is_plain_secret("api_key", "env:JUDGE_KEY")
    (True, False)
    >>> is_plain_secret("url", "https://host/v1?token=hunter2"), is_plain_secret("token", "<|end|>")
    (True, False)
    """
    if not value or REFERENCE.fullmatch(value):
        return False
    if is_secret_name(name):
        of_a_text = name.lower().endswith("token") and _TOKEN_OF_A_TEXT.search(value)
        return not of_a_text and not REFERENCE_INSIDE.search(value)
    return bool(_SECRET_VALUE.search(value)) or _is_address_with_secret(value)


def _is_address_with_secret(value: str) -> bool:
    if not re.match(r"\w+://\S+$", value):
        return False
    try:
        parts = urlsplit(value)
    except ValueError:
        return False
    user, _, _ = parts.netloc.rpartition("@")
    if user and not REFERENCE_INSIDE.search(user):
        return True
    return any(
        (is_secret_name(name) or name.lower() in _SECRET_PARAMETERS) and not REFERENCE_INSIDE.search(text)
        for name, text in parse_qsl(parts.query)
    )


# ---------------------------------------------------------------- texts without it


def without_secrets(text: str) -> str:
    """Remove from `text` the secrets known to this process, and everything that looks like a secret.

    >>> without_secrets("postgresql://me:hunter2@db/mlflow")
    'postgresql://***@db/mlflow'
    """
    if _Known.pattern is not None:
        text = _Known.pattern.sub(HIDDEN, text)
    return _without_named(_USER.sub(_without_user, _SECRET_VALUE.sub(HIDDEN, text)))


def hidden(key: str, value: Any) -> Any:
    """Remove the secrets from a plain value. They are recognized by name, by form, or because they are known.

    >>> hidden("arguments", {"hf_token": "abc", "url": "https://me:hunter2@host", "eos_token": "</s>"})
    {'hf_token': '***', 'url': 'https://***@host', 'eos_token': '</s>'}
    """
    if isinstance(value, Mapping):
        return {name: hidden(str(name), item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(hidden(key, item) for item in value)
    if not isinstance(value, str):
        return value
    if is_plain_secret(key, value):
        if _is_address_with_secret(value):
            return shown(value)
        if is_secret_name(key):
            return HIDDEN
    return without_secrets(value)


def shown(url: str) -> str:
    """Format an address for printing: without user, password and query.

    >>> shown("https://me:hunter2@prefect.example:4200/api?token=x")
    'https://***@prefect.example:4200/api'
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return "an unreadable address"
    _, at, host = parts.netloc.rpartition("@")
    return urlunsplit((parts.scheme, f"{HIDDEN}@{host}" if at else host, parts.path, "", ""))


def know(value: str) -> None:
    """Remove `value` from now on from all texts and from every log record of this process."""
    if len(value) < SHORTEST_KNOWN or value in _Known.values:
        return
    hide_in_logs()
    # As it stands in a text, in an address, in a form, and in the text of a Python or JSON value.
    escaped = {quote(value, safe=""), quote(value), quote_plus(value)}
    escaped |= {re.sub("%[0-9A-F]{2}", lambda found: found[0].lower(), one) for one in escaped}
    _Known.values |= {value, *escaped, repr(value)[1:-1], base64.b64encode(value.encode()).decode()}
    longest_first = sorted(_Known.values, key=len, reverse=True)
    _Known.pattern = re.compile("|".join(map(re.escape, longest_first)))


class ErrorWithoutSecrets(Exception):
    """Stands for an error whose text has a secret elsewhere than in `args`, with its class name and cleaned text."""


def hide_in(error: BaseException) -> BaseException:
    """The error to raise in place of `error`: `error` itself, if no text of it or of its causes has a secret.

    Otherwise that is `error` with clean texts and without causes; if its text does not come from `args` (as in
    pydantic), an `ErrorWithoutSecrets`. Interruptions are always returned unchanged.
    """
    if _is_clean(error):
        return error
    error.args = tuple(without_secrets(value) if isinstance(value, str) else value for value in error.args)
    error.__cause__ = error.__context__ = None
    if _is_clean(error) or not isinstance(error, Exception):
        return error
    text = f"{type(error).__name__}: {without_secrets(str(error))}"
    return ErrorWithoutSecrets(text).with_traceback(error.__traceback__)


def _is_clean(error: BaseException) -> bool:
    text = "".join(traceback.format_exception(error, limit=0)) + repr(error)  # limit=0: no lines of the program
    return without_secrets(text) == text


class _Known:
    """The secrets that this process has read."""

    values: frozenset[str] = frozenset()
    pattern: re.Pattern[str] | None = None


def _without_user(found: re.Match[str]) -> str:
    scheme, user = found[1], found[2]
    is_plain = ":" not in user and "%3a" not in user.lower()  # as in ssh://git@host
    if REFERENCE_INSIDE.search(user) or (
        is_plain and len(user) < _TOKEN_AS_USER and not (user and scheme.startswith("http"))
    ):
        return found[0]
    return f"{scheme}{HIDDEN}@"


def _without_named(text: str) -> str:
    """Remove values whose names are names of secrets from `text`. A value that is kept may itself contain a name."""
    parts, done, at = [], 0, 0
    while found := _NAMED.search(text, at):
        value = "bare" if found["quoted"] is None else "quoted"
        at = found.end("name")
        if _is_named_secret(found, found[value]):
            parts += [text[done : found.start(value)], HIDDEN]
            done = at = found.end(value)
    return "".join([*parts, text[done:]])


def _is_named_secret(found: re.Match[str], value: str) -> bool:
    name, between = found["name"].lstrip("-"), found["between"]
    in_query = found.string[max(0, found.start() - 1) : found.start()] in ("?", "&")
    is_parameter = in_query and name.rpartition("-")[2].lower() in _SECRET_PARAMETERS
    if not (is_parameter or is_secret_name(name)) or _NO_VALUE.match(value) or REFERENCE_INSIDE.search(value):
        return False
    if (in_query and between[-1] == " ") or (name.lower().endswith("token") and _TOKEN_OF_A_TEXT.search(value)):
        return False
    *_, before, last = ["", "", *(word.lower() for word in _WORD.findall(name))]
    if last in ("credential", "credentials", "pwd") and value.startswith(("/", "~", "./", "../")):
        return False
    if "," in between and not ("-" in found["name"] or found.string[found.end("between")] == "b"):
        return False  # two words of a list, and no header or option
    if in_query or ("=" in between and (found["option"] or name.isupper())):
        return True
    if last == "token" and before not in _KINDS_OF_TOKEN:
        return len(value) >= _LEAST_OF_TOKEN and not value.isalpha() and not _NUMBER.fullmatch(value)
    return found["quoted"] is not None or (len(value) >= SHORTEST_KNOWN and bool(_DIGIT.search(value)))


class _SafeRecords:
    """A factory of log records without secrets."""

    def __init__(self, factory: Callable[..., logging.LogRecord]) -> None:
        self._factory = factory

    def __call__(self, *arguments: Any, **named: Any) -> logging.LogRecord:
        record = self._factory(*arguments, **named)
        try:
            message = record.getMessage()
        except Exception:  # arguments that do not fit the format: the handler reports it
            return record
        safe = without_secrets(message)
        if safe != message and isinstance(record.args, tuple):  # uvicorn's formatter of requests reads them again
            record.args = tuple(without_secrets(one) if isinstance(one, str) else one for one in record.args)
        if safe != message and record.getMessage() != safe:
            record.msg, record.args = safe, ()
        if record.exc_info and record.exc_info[0] is not None:
            record.exc_text = without_secrets(logging.Formatter().formatException(record.exc_info))
        if record.stack_info:
            record.stack_info = without_secrets(record.stack_info)
        return record


def hide_in_logs() -> None:
    """Remove secrets from the log records of this process; unlike a filter, this covers all loggers, also of libraries."""
    factory = logging.getLogRecordFactory()
    if not isinstance(factory, _SafeRecords):
        logging.setLogRecordFactory(_SafeRecords(factory))
