"""Configurations keep their bytes: what a profile is read as, what of it enters keys, and the schema that forms are made of.

A digest that differs says that stored results are no longer found, or that a form has changed. A change that is meant to do
so brings its new digests along.
"""

from __future__ import annotations

from typing import Any

import pytest

from pipelines.flows.profile import load_profile, profile_names
from rlhf_core.config.policy import PPOConfig
from rlhf_core.schema.base import Config, keyed
from rlhf_core.store.fingerprint import canonical_json, sha256_text
from stages.dpo import DPOConfig

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
SCHEMAS: dict[type[Config], str] = {DPOConfig: "6a2d09babb163a67", PPOConfig: "a0358644bfab9e24"}
"""Configuration -> the first digits of the digest of its schema, without descriptions."""


def digits(text: str) -> str:
    return sha256_text(text)[:16]


def without_descriptions(schema: Any) -> Any:
    """Return the schema as nested pairs, so that the order of properties and of the members of a union counts, too."""
    if isinstance(schema, dict):
        return [
            [name, without_descriptions(value)]
            for name, value in schema.items()
            if not (name == "description" and isinstance(value, str))
        ]
    return [without_descriptions(item) for item in schema] if isinstance(schema, list) else schema


@pytest.mark.parametrize("profile", profile_names())
def test_a_profile_is_read_as_before(profile: str) -> None:
    config = load_profile(profile)
    assert (digits(config.model_dump_json()), digits(canonical_json(keyed(config)))) == PROFILES[profile]


@pytest.mark.parametrize("kind", SCHEMAS, ids=lambda kind: kind.__name__)
def test_the_schema_of_a_form_is_as_before(kind: type[Config]) -> None:
    assert digits(canonical_json(without_descriptions(kind.model_json_schema()))) == SCHEMAS[kind]
