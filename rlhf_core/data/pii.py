"""Find and mask personal data in text: emails, phone numbers, credit cards, IP addresses, keys and tokens.

Patterns find candidates, and rules confirm them: the checksum of cards (Luhn), `ipaddress`, and `phonenumbers` (Google's
libphonenumber). What has no form, as names and addresses, is not found.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_KEY = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\bgh[pousr]_[A-Za-z0-9]{36,}|\bgithub_pat_[A-Za-z0-9_]{40,}|\bglpat-[A-Za-z0-9_-]{20,}"
    r"|\bsk-[A-Za-z0-9_-]{20,}|\bhf_[A-Za-z0-9]{30,}|\bAIza[A-Za-z0-9_-]{35}|\bxox[abprs]-[A-Za-z0-9-]{10,}"
    r"|\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}",
    re.DOTALL,
)
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}\b")
_CARD = re.compile(r"(?<![\d.-])[2-6]\d{3}(?:[ -]?\d){9,15}(?![\d-])")
_IP4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?!\.?\d)")
_IP6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:])")


@dataclass(frozen=True, slots=True)
class Found:
    """Personal data at `start` to `end` (exclusive) of a text. `kind` is key, email, card, ip or phone."""

    kind: str
    start: int
    end: int


def find(text: str, *, phone_region: str) -> list[Found]:
    """Return the personal data in `text` in order, without overlaps.

    >>> find("Write to jo@example.com.", phone_region="")
    [Found(kind='email', start=9, end=23)]
    """
    found: list[Found] = []
    for one in _candidates(text, phone_region):
        if all(one.end <= other.start or one.start >= other.end for other in found):
            found.append(one)
    return sorted(found, key=lambda one: one.start)


def mask(text: str, *, phone_region: str) -> tuple[str, Counter[str]]:
    """Return `text` with `[EMAIL]` and the like in place of personal data, and how many pieces of each kind.

    >>> mask("Write to jo@example.com.", phone_region="")[0]
    'Write to [EMAIL].'
    """
    found = find(text, phone_region=phone_region)
    for one in reversed(found):
        text = f"{text[: one.start]}[{one.kind.upper()}]{text[one.end :]}"
    return text, Counter(one.kind for one in found)


def mask_json(value: Any, *, phone_region: str, counts: Counter[str]) -> Any:
    """Return a JSON value with its keys, texts and numbers masked; `counts` is increased.

    Keys that masks would make equal are numbered, so that no value is lost.
    """
    if isinstance(value, dict):
        masked: dict[str, Any] = {}
        for number, (key, item) in enumerate(value.items(), start=1):
            name = mask_json(key, phone_region=phone_region, counts=counts)
            name = f"{name} {number}" if name in masked else name
            masked[name] = mask_json(item, phone_region=phone_region, counts=counts)
        return masked
    if isinstance(value, list):
        return [mask_json(item, phone_region=phone_region, counts=counts) for item in value]
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return value
    text, found = mask(str(value), phone_region=phone_region)
    counts.update(found)
    return text if found else value


def luhn(digits: str) -> bool:
    """Return whether the checksum of a card number is right (ISO/IEC 7812-1).

    >>> luhn("4111111111111111"), luhn("4111111111111112")
    (True, False)
    """
    doubled = [int(digit) * 2 if place % 2 else int(digit) for place, digit in enumerate(reversed(digits))]
    return sum(value - 9 if value > 9 else value for value in doubled) % 10 == 0


# ---------------------------------------------------------------- private


def _candidates(text: str, phone_region: str) -> Iterator[Found]:
    """Yield what is found, the kinds that are told most surely first."""
    yield from _matches("key", _KEY, text, lambda _: True)
    yield from _matches("email", _EMAIL, text, lambda _: True)
    yield from _matches("card", _CARD, text, lambda number: luhn(re.sub(r"\D", "", number)))
    yield from _matches("ip", _IP4, text, _is_address)
    yield from _matches("ip", _IP6, text, _is_address)
    if sum(map(str.isdigit, text)) >= 6:  # the shortest that libphonenumber finds
        import phonenumbers

        for match in phonenumbers.PhoneNumberMatcher(text, phone_region or None):
            yield Found("phone", match.start, match.end)


def _matches(kind: str, pattern: re.Pattern[str], text: str, confirmed: Callable[[str], bool]) -> Iterator[Found]:
    return (Found(kind, match.start(), match.end()) for match in pattern.finditer(text) if confirmed(match.group()))


def _is_address(text: str) -> bool:
    """Return whether `text` is an IP address of some machine, and not `::` or this machine's own."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    # Names in C++ (`a::b`) are addresses too.
    named = address.version == 6 and sum(map(bool, text.split(":"))) < 3
    return not (address.is_loopback or address.is_unspecified or named)
