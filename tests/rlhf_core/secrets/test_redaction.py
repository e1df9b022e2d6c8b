"""What a secret looks like, and what is left of a text without it."""

import logging
import subprocess
import time
from pathlib import Path

import httpx
import pydantic
import pytest

from rlhf_core.errors import RewardError
from rlhf_core.secrets.redaction import (
    ErrorWithoutSecrets,
    hidden,
    hide_in,
    hide_in_logs,
    is_secret_name,
    know,
    shown,
    without_secrets,
)


@pytest.mark.parametrize(
    ("key", "value", "seen"),
    [
        *(
            (key, "hunter2", "***")
            for key in ("token", "hub.hf_token", "db_password", "openai_api_key", "x.credentials")
        ),
        *(
            (key, value, value)
            for key, value in {"eos_token": "</s>", "max_tokens": "64", "x.pad_token": "<p>"}.items()
        ),
    ],
)
def test_secrets_are_hidden_and_tokens_of_a_tokenizer_are_not(key, value, seen):
    assert hidden(key, value) == seen


@pytest.mark.parametrize(
    "secret",
    [
        "glpat-abcdefghij0123456789",
        f"AIza{'Sy0-_aB' * 5}",
        f"npm_{'aB3' * 12}",
        "nvapi-abcdefghijklmnop0123",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N",
        "Basic cmxoZjpodW50ZXIy",
        "basic bWU6d29yZA==",
    ],
)
def test_credentials_of_other_services_are_hidden(secret):
    assert without_secrets(f"sent {secret}, and failed") == "sent ***, and failed"


JWT, PARTS = "eyJhbGciOiJkaXIiLCJlbmMiOiJBMjU2R0NNIn0", "48V1_ALb6US04U3b.5eym8TW_c8SuK0ltJ3rp.XFBoMYUZodetZdvTiFvSkQ"
DIGITS = "0123456789abcdef0123456789abcdef01234567"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA\n7hx/+q==\n-----END RSA PRIVATE KEY-----"
FORMS = {
    "Authorization: BASIC cmxoZjpodW50ZXIy failed": "Authorization: *** failed",
    "Basic%20bWU6d29yZA%3D%3D&x": "***&x",
    "BEARER mF_9.B5f-4.1JqM-and-more": "***",
    "bearer%20abcdefgh-ijkl-0123": "***",
    "https://user%3Apass@host/x": "https://***@host/x",
    "https://ghtoken@host/x": "https://***@host/x",
    f"git+ssh://{DIGITS}@host/x": "git+ssh://***@host/x",
    "postgresql://me:p@ss@db/x, by me@x": "postgresql://***@db/x, by me@x",
    "https://me:pa?ss@host": "https://***@host",
    f"{JWT}..{PARTS}, and": "***, and",
    f"{JWT}.OKOawDo13gRp2ojaHV7LFpZcgV7T6DVZ.{PARTS}.": "***.",
    "AKIAIOSFODNN7EXAMPLE and ASIAIOSFODNN7EXAMPLE": "*** and ***",
    "xoxe-1-abcdefghij xapp-1-A012-345": "*** ***",
    "https://hooks.slack.com/services/T00000000/B0000/XXXX": "https://***",
    f"github_pat_{'aB3' * 8} ghs_{'aB3' * 8}": "*** ***",
    "sk-ant-api03-abcdefghijklmnop": "***",
    f"a key\n{PEM}\nof Ada": "a key\n***\nof Ada",
    repr(PEM): "'***'",
    "{'Authorization': 'Bearer abc', 'x-api-key': 'short'}": "{'Authorization': '***', 'x-api-key': '***'}",
    '{"Authorization": "token ab12", "n": 1}': '{"Authorization": "***", "n": 1}',
    r'{"body": "{\"api_key\": \"abc\"}"}': r'{"body": "{\"api_key\": \"***\"}"}',
    "[(b'X-Api-Key', b'abcd'), (b'accept', b'a/b')]": "[(b'X-Api-Key', b'***'), (b'accept', b'a/b')]",
    "curl -H 'X-API-Key: abc12345' https://h/x?a=1&token=hunter2": "curl -H 'X-API-Key: ***' https://h/x?a=1&token=***",
    "/x?X-Amz-Signature=fe5f80f7&X-Amz-Date=2": "/x?X-Amz-Signature=***&X-Amz-Date=2",
    "/x?sv=2022&sig=aBc%3D&se=1": "/x?sv=2022&sig=***&se=1",
    f"wandb: api_key={DIGITS}, api_key: {DIGITS}": "wandb: api_key=***, api_key: ***",
    "['vllm', '--api-key', 'abc', '--port', '80']": "['vllm', '--api-key', '***', '--port', '80']",
    "vllm --api-key abc12345 --token=hunter": "vllm --api-key *** --token=***",
    "DB_PASSWORD=hunter python x.py": "DB_PASSWORD=*** python x.py",
    "AccountName=a;AccountKey=ab12+/==;x=1": "AccountName=a;AccountKey=***;x=1",
    "key: reason: token=abcdef0123456789": "key: reason: token=***",
}


@pytest.mark.parametrize(("text", "shown"), FORMS.items())
def test_a_credential_is_hidden_in_the_forms_of_headers_addresses_options_and_settings(text, shown):
    assert without_secrets(text) == shown == without_secrets(shown)
    assert without_secrets(f"at once ({text})") == f"at once ({shown})"


@pytest.mark.parametrize(
    "text",
    [
        *("Basic internationalization", "basic understanding of", "eyJ.eyJ.x", "npm_config_registry", "AIza"),
        *("BASIC INTERNATIONALIZATION", "bearer responsibilities-of-people", "eyJhbGciOi.tar.gz"),
        *(
            "ssh://git@github.com/x",
            "http://host:8000/x?by=a@b",
            "docker://image:tag@sha256:01",
            "s3://a/b@c",
            "https://@x",
        ),
        *(
            "password: wrong on host2",
            "--api-key must be set",
            "secret = None, token=True",
            "columns ('password', 'user')",
            "HF_TOKEN=\nHOME=/root2",
            "api_key:\n2026-11-30 started",
            "MLFLOW_TRACKING_TOKEN= URL2=x",
            "GET /x?token= HTTP/1.1",
            "PWD=/work2",
            "{'boi_token': '<start_of_image_2>'}",
        ),
        *(
            "Logprob(decoded_token='Hello', token='yes')",
            "per token: 0.00012345678901234",
            "max_tokens=64, eos_token=12",
        ),
        *(
            f"sha256:{DIGITS}{DIGITS[:24]}",
            f"key {DIGITS[:12]}",
            f"digest: {DIGITS}",
            f"/store/objects/{DIGITS}/model.bin",
        ),
        *("data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ", "token_env = 'HF_TOKEN': is not set"),
        *(
            "GOOGLE_APPLICATION_CREDENTIALS = '/home/u2/x.json': is no file",
            'login(token=token, api_key=environ["X1"])',
        ),
        *("https://h/?key=${env:KEY}", "api_key = 'env:KEY1': KEY1 is not set", "-----BEGIN CERTIFICATE-----\nMIIE01"),
    ],
)
def test_words_that_begin_like_credentials_are_kept(text):
    assert without_secrets(text) == text


def test_log_records_are_clean_before_any_secret_is_known_and_keep_the_arguments_that_formatters_read(monkeypatch):
    made = []
    monkeypatch.setattr(logging, "_logRecordFactory", logging.LogRecord)
    hide_in_logs()
    factory = logging.getLogRecordFactory()
    hide_in_logs()
    assert logging.getLogRecordFactory() is factory
    log = logging.Logger("uvicorn.access")
    log.addFilter(made.append)
    log.info('%s - "%s %s"', "127.0.0.1", "GET", "/x?token=hunter2")
    log.info("asked with --api-key=%s", "hunter2")
    assert made[0].args == ("127.0.0.1", "GET", "/x?token=***") and made[0].getMessage().endswith('GET /x?token=***"')
    assert made[1].getMessage() == "asked with --api-key=***", "it shows in the whole message alone"


STARTERS = {
    "rlhf_core/processes/guard.py",
    "rlhf_core/processes/warm_parent.py",
    "pipelines/services/parent_death_guard.py",
}
"""Processes that only start others, and log nothing."""


def test_all_processes_of_ours_hide_secrets_in_their_logs():
    root = Path(__file__).parents[3]
    texts = {path: path.read_text() for folder in ("rlhf_core", "pipelines") for path in (root / folder).rglob("*.py")}
    named = {
        str(path.relative_to(root))
        for path, text in texts.items()
        if "\nif __name__ " in text and "hide_in_logs()" not in text
    }
    assert named == STARTERS


def test_long_texts_that_begin_like_credentials_take_no_time():
    began = time.process_time()
    for text in ("eyJ-" * 50_000, "Basic " * 50_000, "eyJaaaaaa.eyJ" * 20_000):
        without_secrets(text)
    assert time.process_time() - began < 5


def test_a_known_secret_is_hidden_in_every_percent_form_and_in_base64():
    know("rlhf:p/ss w0rd")
    escaped = ("rlhf%3Ap%2Fss%20w0rd", "rlhf%3ap%2fss%20w0rd", "rlhf%3Ap/ss%20w0rd", "rlhf%3ap%2fss+w0rd")
    for text in (*escaped, "cmxoZjpwL3NzIHcwcmQ="):
        assert without_secrets(f"to {text} there") == "to *** there"


def test_a_secret_is_hidden_by_its_looks_wherever_it_stands():
    text = "git clone https://me:hunter2@host/x with hf_abcdefghijklmnopqrstuv and sk-abcdefghijklmnop1234"
    assert without_secrets(text) == "git clone https://***@host/x with *** and ***"


@pytest.mark.parametrize(
    ("url", "printed"),
    [
        ("http://me:hunter2@host:4200/api?key=hunter2", "http://***@host:4200/api"),
        ("https://hunter2@host/api", "https://***@host/api"),
        ("http://host:4200/api", "http://host:4200/api"),
        ("http://[hunter2", "an unreadable address"),
    ],
)
def test_an_address_is_printed_without_what_must_stay_secret(url, printed):
    assert shown(url) == printed


@pytest.mark.parametrize(
    "name",
    ["password", "X-Api-Key", "apiKey", "OPENAI_API_KEY", "WANDB_KEY", "HFToken", "api_key_2", "db.secret", "Cookie"],
)
def test_a_secret_is_known_by_the_last_words_of_its_name(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["max_tokens", "stop_token", "eosToken", "tokenizer", "key", "keyword", "monkey", "token_env", "secretary"]
)
def test_part_of_a_word_makes_no_secret(name):
    assert not is_secret_name(name)


def test_references_are_shown_wherever_a_secret_would_be_hidden():
    kept = {
        "api_key": "env:KEY",
        "headers": {"Authorization": "Bearer ${env:KEY}"},
        "url": "https://me:${env:KEY}@host",
    }
    assert hidden("arguments", kept) == kept
    assert without_secrets("asked https://me:${env:KEY}@host") == "asked https://me:${env:KEY}@host"


def test_log_records_of_any_logger_are_without_what_is_known(caplog):
    know("a-known-secret-of-logs")
    log = logging.getLogger("a.library")
    log.warning("%s with %d words: %s", "a-known-secret-of-logs", 3, ["a-known-secret-of-logs"])
    try:
        raise KeyError("a-known-secret-of-logs")
    except KeyError:
        log.exception("it failed")
    assert caplog.records[0].getMessage() == "*** with 3 words: ['***']"
    assert "KeyError: '***'" in caplog.text and "a-known-secret" not in caplog.text


def test_errors_are_without_it_and_without_their_causes():
    know("a-known-secret-of-errors")
    try:
        try:
            raise OSError("a-known-secret-of-errors")
        except OSError as cause:
            raise ValueError("said a-known-secret-of-errors") from cause
    except ValueError as error:
        assert hide_in(error) is error
        assert str(error) == "said ***" and error.__cause__ is None
    assert str(RewardError("our own: a-known-secret-of-errors")) == "our own: ***"


SECRET = "a-known-secret-elsewhere"


class OwnText(Exception):
    """As libraries have them: the text is made of attributes."""

    def __init__(self, address: str) -> None:
        super().__init__(f"never shown: {address}", {"address": address})
        self._place = {"address": [address]}

    def __str__(self) -> str:
        return f"cannot reach {self._place['address'][0]}"


class NeverChanged(Exception):
    def __str__(self) -> str:
        return f"cannot reach {SECRET}"


REQUEST = httpx.Request("GET", f"http://host/{SECRET}")


def raise_with_a_cause_of_its_own() -> None:
    try:
        pydantic.TypeAdapter(int).validate_python(SECRET)
    except ValueError as error:
        raise OwnText(SECRET) from error


def raise_clean_from_another() -> None:
    try:
        raise NeverChanged
    except NeverChanged as error:
        raise ValueError("no answer") from error


def raise_group() -> None:
    raise ExceptionGroup(f"said {SECRET}", [OwnText(SECRET), ExceptionGroup("inside", [NeverChanged()])])


@pytest.mark.parametrize(
    ("fails", "kind"),
    [
        (lambda: Path(f"/nowhere/{SECRET}").read_text(), "FileNotFoundError: "),
        (lambda: subprocess.run(["false", SECRET], check=True), "CalledProcessError: "),
        (lambda: httpx.Response(401, request=REQUEST).raise_for_status(), httpx.HTTPStatusError),
        (lambda: pydantic.TypeAdapter(int).validate_python(SECRET), "ValidationError: "),
        (raise_with_a_cause_of_its_own, "OwnText: "),
        (raise_group, "ExceptionGroup: "),
        (lambda: {}[SECRET], KeyError),
        (raise_clean_from_another, ValueError),
    ],
)
def test_errors_that_keep_their_text_elsewhere_are_replaced_and_others_keep_their_class(fails, kind):
    know(SECRET)
    with pytest.raises(Exception) as raised:  # of any class
        fails()
    assert SECRET in all_texts(raised.value)
    safe = hide_in(raised.value)
    assert safe is raised.value if isinstance(kind, type) else str(safe).startswith(kind)
    assert type(safe) is (kind if isinstance(kind, type) else ErrorWithoutSecrets) and safe.__traceback__ is not None
    assert SECRET not in all_texts(safe)


def all_texts(error: BaseException | None) -> str:
    if error is None:
        return ""
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    texts = [str(error), repr(error), *map(all_texts, (error.__cause__, error.__context__, *parts))]
    return "\n".join(texts)


def test_an_interruption_and_an_error_without_secrets_stay_as_they_are():
    know(SECRET)
    interruption = KeyboardInterrupt(SECRET)
    interruption.__context__ = NeverChanged()
    assert hide_in(interruption) is interruption and SECRET not in all_texts(interruption)
    error = OwnText("d")
    error.args = ("a", ["b", {"c": 1}])
    error.__cause__ = error  # it may come of itself
    assert hide_in(error) is error and error.args == ("a", ["b", {"c": 1}]) and error.__cause__ is error


@pytest.mark.parametrize(
    "text",
    [
        *("x" * 200_000, "sk-" * 60_000, "Bearer " * 40_000, "://a:" * 40_000, "hf_" * 60_000),
        *("api_key=" * 20_000, "--a-" * 50_000, "a://b:" * 40_000, "Basic+" * 40_000, "token: " * 40_000),
    ],
)
def test_a_long_text_takes_no_longer_than_its_length(text):
    began = time.process_time()
    assert without_secrets(text) == text
    assert time.process_time() - began < 2.0  # hundredths of a second; a minute where it goes by the square


def test_short_values_are_not_looked_for():
    know("yes")
    assert without_secrets("yesterday") == "yesterday"


def test_a_value_of_six_letters_is_looked_for():
    know("q7w8e9")
    assert without_secrets("it was q7w8e9 then") == "it was *** then"


@pytest.mark.parametrize("known_first", [0, 1])
def test_nothing_is_left_of_a_secret_that_contains_another(known_first):
    values = ["z9y8x7w6", "z9y8x7w6-and-more"]
    know(values[known_first])
    know(values[1 - known_first])
    assert without_secrets("z9y8x7w6-and-more, z9y8x7w6") == "***, ***"
