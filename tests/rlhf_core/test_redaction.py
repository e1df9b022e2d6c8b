"""What a secret looks like, and what is left of a text without it."""

from __future__ import annotations

import logging

import pytest

from rlhf_core.errors import RewardError
from rlhf_core.redaction import hidden, hide_in, is_secret_name, know, shown, without_secrets


@pytest.mark.parametrize(
    "key", ["token", "hub.hf_token", "aws.secret", "db_password", "openai_api_key", "x.credentials"]
)
def test_the_value_of_a_secret_is_hidden(key: str) -> None:
    assert hidden(key, "hunter2") == "***"


@pytest.mark.parametrize(("key", "value"), [("eos_token", "</s>"), ("max_tokens", "64"), ("sampling.pad_token", "<p>")])
def test_tokens_of_a_tokenizer_are_no_secrets(key: str, value: str) -> None:
    assert hidden(key, value) == value


def test_a_secret_is_hidden_by_its_looks_wherever_it_stands() -> None:
    text = "git clone https://me:hunter2@host/x with hf_abcdefghijklmnopqrstuv and sk-abcdefghijklmnop1234"
    assert without_secrets(text) == "git clone https://***@host/x with *** and ***"


@pytest.mark.parametrize(
    ("url", "printed"),
    [
        ("http://me:hunter2@host:4200/api?key=hunter2", "http://***@host:4200/api"),
        ("https://hunter2@host/api", "https://***@host/api"),
        ("http://host:4200/api", "http://host:4200/api"),
        ("http://[hunter2", "an address that cannot be read"),
    ],
)
def test_an_address_is_printed_without_what_must_stay_secret(url: str, printed: str) -> None:
    assert shown(url) == printed


@pytest.mark.parametrize(
    "name", ["password", "X-Api-Key", "apiKey", "OPENAI_API_KEY", "WANDB_KEY", "HFToken", "api_key_2", "db.secret", "Cookie"]
)  # fmt: skip
def test_a_secret_is_known_by_the_last_words_of_its_name(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["max_tokens", "stop_token", "eosToken", "tokenizer", "key", "keyword", "monkey", "token_env", "secretary"]
)
def test_part_of_a_word_makes_no_secret(name: str) -> None:
    assert not is_secret_name(name)


def test_references_are_shown_wherever_a_secret_would_be_hidden() -> None:
    kept = {
        "api_key": "env:KEY",
        "headers": {"Authorization": "Bearer ${env:KEY}"},
        "url": "https://me:${env:KEY}@host",
    }
    assert hidden("arguments", kept) == kept
    assert without_secrets("asked https://me:${env:KEY}@host") == "asked https://me:${env:KEY}@host"


def test_log_records_of_any_logger_are_without_what_is_known(caplog: pytest.LogCaptureFixture) -> None:
    know("a-known-secret-of-logs")
    log = logging.getLogger("a.library")
    log.warning("%s with %d words: %s", "a-known-secret-of-logs", 3, ["a-known-secret-of-logs"])
    try:
        raise KeyError("a-known-secret-of-logs")
    except KeyError:
        log.exception("it failed")
    assert caplog.records[0].getMessage() == "*** with 3 words: ['***']"
    assert "KeyError: '***'" in caplog.text and "a-known-secret" not in caplog.text


def test_errors_are_without_it_with_all_that_they_came_of() -> None:
    know("a-known-secret-of-errors")
    try:
        try:
            raise OSError("a-known-secret-of-errors")
        except OSError as cause:
            raise ValueError("said a-known-secret-of-errors") from cause
    except ValueError as error:
        hide_in(error)
        assert str(error) == "said ***" and str(error.__cause__) == "***"
    assert str(RewardError("our own: a-known-secret-of-errors")) == "our own: ***"


def test_short_values_are_not_looked_for() -> None:
    know("yes")
    assert without_secrets("yesterday") == "yesterday"
