"""Shipped profiles keep their bytes: what they are read as, and what of it enters keys.

A digest that differs says that stored results are no longer found. A change that is meant to do so brings its new digests
along, and a line in the changelog.
"""

from __future__ import annotations

import pytest

from pipelines.flows.profile import load_profile, profile_names
from rlhf_core.schema.base import keyed
from rlhf_core.store.fingerprint import canonical_json, sha256_text

PROFILES = {
    "multi_node/full": ("97cabdb36f81473f", "28b8430c0a076a83"),
    "one_gpu/full": ("0153353b870a66ce", "39d682bd52d534fd"),
    "one_node/full": ("db2b43696a003bec", "eddc867d83ea4b4e"),
    "smollm2/full": ("74acb8be1799b1ad", "871aa43b7f3af37a"),
    "smollm2/grpo": ("8deca61514ecefe5", "f822917271ec9075"),
    "tiny/conditional": ("a8e85124c3e6c985", "a13428eb950a527e"),
    "tiny/distill": ("000f655209411057", "b6dd41c14406feca"),
    "tiny/full": ("972e6749c86868f1", "c649581593d3f06e"),
    "tiny/prm": ("ef9215d04df277e6", "74c0afbdfbcdf77a"),
    "tiny/rlvr": ("12153749b94e7de2", "7555bc4995507c2a"),
}
"""Profile -> the first digits of the digests of its JSON and of what of it belongs to keys."""


def digits(text: str) -> str:
    return sha256_text(text)[:16]


@pytest.mark.parametrize("profile", profile_names())
def test_a_profile_is_read_as_before(profile: str) -> None:
    config = load_profile(profile)
    assert (digits(config.model_dump_json()), digits(canonical_json(keyed(config)))) == PROFILES[profile]
