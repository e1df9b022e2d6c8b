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
    "multi_node/full": ("5cd43ee768c8734f", "8381e15b9815b27e"),
    "one_gpu/full": ("14a9d24ba98c717c", "b79d4c949e7ada29"),
    "one_node/full": ("832eb91cdd28b736", "b37130a8a96d9c4d"),
    "smollm2/full": ("0fdca359f77f7d8b", "60373be1cb851b84"),
    "smollm2/grpo": ("e5bb4bc7be2e7ce2", "dc28c6d2313e01ce"),
    "tiny/conditional": ("46fd1f413031ac8f", "fbc0faa66eb0e821"),
    "tiny/distill": ("5db2405b744c158c", "959f436b7a78b67f"),
    "tiny/full": ("ce854760bbb476b4", "703b60e326131298"),
    "tiny/online": ("f83fce10805cc52c", "6ccdde836a3146c9"),
    "tiny/prm": ("c922ab4333ce90e5", "30ed789a43b9ec80"),
    "tiny/rlvr": ("960996c781bb816a", "13eabbeee1959916"),
}
"""Profile -> the first digits of the digests of its JSON and of what of it belongs to keys."""


def digits(text: str) -> str:
    return sha256_text(text)[:16]


@pytest.mark.parametrize("profile", profile_names())
def test_a_profile_is_read_as_before(profile: str) -> None:
    config = load_profile(profile)
    assert (digits(config.model_dump_json()), digits(canonical_json(keyed(config)))) == PROFILES[profile]
