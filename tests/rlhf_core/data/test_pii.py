"""Personal data is found by form and confirmed by rule; what only looks like it stays."""

from __future__ import annotations

from collections import Counter

import pytest

from rlhf_core.data.cleaning import find, luhn, mask, mask_json

GITHUB = "ghp_" + "a1B2" * 9
TOKEN = ".".join(("eyJ" + "hbGciOiJI", "eyJ" + "zdWIiOiIx", "c2lnbmF0dXJl"))


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("Write to jo.doe+x@mail.example.co.uk, please.", "Write to [EMAIL], please."),
        ("card 4111 1111 1111 1111 or 5500-0055-5555-5559", "card [CARD] or [CARD]"),
        ("from 192.0.2.17 and 2001:db8::8a2e:370:7334", "from [IP] and [IP]"),
        (f"use {GITHUB} now", "use [KEY] now"),
        (f"Bearer {TOKEN}", "Bearer [KEY]"),
        ("id AKIA" + "ABCDEFGHIJKLMNOP!", "id [KEY]!"),
        ("-----BEGIN RSA " + "PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----\nbye", "[KEY]\nbye"),
        ("call +49 30 901820 today", "call [PHONE] today"),
    ],
)
def test_each_kind_is_masked(text: str, masked: str) -> None:
    assert mask(text, phone_region="")[0] == masked


@pytest.mark.parametrize(
    "text",
    [
        "order 4111 1111 1111 1112",  # the checksum is wrong
        "version 1.2.3.4.5, 999.1.1.1, at 12:30:45",
        "127.0.0.1, ::1 and std::vector, a::b",
        "see @example and me@here",
        "sk-short, 2024-07-26, 3.14159265358979",
        "call 650-253-0000",  # national numbers need a region
    ],
)
def test_what_only_looks_like_personal_data_stays(text: str) -> None:
    assert find(text, phone_region="") == []


def test_national_numbers_are_found_in_their_region() -> None:
    assert mask("call 650-253-0000", phone_region="US") == ("call [PHONE]", Counter(phone=1))


def test_json_stays_json() -> None:
    counts: Counter[str] = Counter()
    value = {"to": ["jo@example.com"], "card": 4111111111111111, "yes": True, "share": 0.5, "count": 7}
    assert mask_json(value, phone_region="", counts=counts) == value | {"to": ["[EMAIL]"], "card": "[CARD]"}
    assert counts == {"email": 1, "card": 1}


def test_keys_are_masked_and_no_value_is_lost() -> None:
    counts: Counter[str] = Counter()
    found = mask_json({"jo@example.com": 1, "ann@example.com": 2, "n": 3}, phone_region="", counts=counts)
    assert found == {"[EMAIL]": 1, "[EMAIL] 2": 2, "n": 3}
    assert counts == {"email": 2}


def test_the_checksum_of_the_standard() -> None:
    assert luhn("79927398713")
    assert not any(luhn(f"7992739871{digit}") for digit in "012456789")
