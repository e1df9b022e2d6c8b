"""Shipped profiles keep their bytes: what they are read as, and what of it enters keys.

A digest that differs says that stored results are no longer found. A change that is meant to do so brings its new digests
along, and a line in the changelog.
"""

import pytest

from pipelines.flows.profile import load_profile, profile_names
from rlhf_core.config import engines
from rlhf_core.schema.base import keyed
from rlhf_core.store.fingerprint import canonical_json, sha256_text
from rlhf_core.user_code.dependencies import user_code_digest

PROFILES = {
    "multi_node/full": ("bf75dde65ccfced6", "d9bb2cc3bf094a91"),
    "one_gpu/full": ("2e7fcb5ccb623de5", "88fa6ecf866de733"),
    "one_node/full": ("562149b4ffe2494e", "1707abdc186658c1"),
    "reports/base": ("226964ad1db32c66", "ad9467476a249113"),
    "reports/deepseek_r1": ("c37296c2aeddaf44", "4d6e215df37b3ca7"),
    "reports/kimi_k2": ("ec41f8b129e87e7a", "22c81002909d3dc2"),
    "reports/llama3": ("a3af150ba704ed0b", "24115b7ceb8a6377"),
    "reports/mimo_v2": ("ad5f04ccbd63b80f", "9867a69b4c7ff1f8"),
    "reports/nemotron3": ("edb676c95aeaa76f", "a6aa0982f5bee7bb"),
    "reports/olmo3": ("6c358362ca0eb05f", "d1aed01a4a882b9b"),
    "reports/qwen3": ("055d12cfadebb1a5", "68a25649badc9d4a"),
    "reports/smollm3": ("c8e88a7e82dd81b3", "aa2e24877c367f0c"),
    "reports/tulu3": ("fd82d73c13392615", "cadd742c12999fe4"),
    "smollm2/full": ("da6fa35a9dbecb0d", "f709ffae50375c17"),
    "smollm2/grpo": ("bfd71a46e4da1f48", "dc28c6d2313e01ce"),
    "smollm2/instructions": ("c144572b74f80fa6", "4236826d1ca80ca8"),
    "smollm2/instructions_hacked": ("77ecefcf41d90dd9", "15ed618cc2366939"),
    "smollm2/one_word": ("78915a2ce5f0dada", "8fc4cb350cee48b3"),
    "tiny/conditional": ("43a52036577ff84e", "fbc0faa66eb0e821"),
    "tiny/distill": ("7d8fddac13e9be6f", "959f436b7a78b67f"),
    "tiny/full": ("aefd1a2d169374ad", "b7242249ee6bca6a"),
    "tiny/online": ("6eaa62e1070b9748", "6ccdde836a3146c9"),
    "tiny/people": ("8d046c89e82f6d82", "71c554baaa3b5cfa"),
    "tiny/prm": ("5fd834349dbb6ed7", "30ed789a43b9ec80"),
    "tiny/recipe": ("b0d3d8eb84f83c63", "01c720a4fcd5a8d5"),
    "tiny/rlvr": ("e088898987ceb8de", "13eabbeee1959916"),
}
"""Profile -> the first digits of the digests of its JSON and of what of it belongs to keys."""


def digits(text: str) -> str:
    return sha256_text(text)[:16]


@pytest.mark.parametrize("profile", profile_names())
def test_a_profile_is_read_as_before(monkeypatch, profile):
    monkeypatch.setattr(engines, "multiplies_bfloat16", lambda: False)  # else `auto` depends on the machine
    config = load_profile(profile)
    assert (digits(config.model_dump_json()), digits(canonical_json(keyed(config)))) == PROFILES[profile]


FUNCTIONS = {
    "rlhf_core.data.worlds.arithmetic:exact_match": "2f22273ffaba6ad9",
    "rlhf_core.data.worlds.support:gold_reward": "76f7d3bfe4d48fe3",
    "rlhf_core.data.worlds.support_readers:reader_reward": "8f96713256ee82ee",
    "rlhf_core.rewards.library.instructions:instructions_followed": "222a45e03a6739e0",
    "rlhf_core.rewards.library.instructions:on_topic": "222a45e03a6739e0",
    "rlhf_core.rewards.library.text:exact_match": "cec520f3b672cb19",
    "rlhf_core.rewards.verifiable:final_line_format": "a6559d49b4eea814",
    "rlhf_core.rewards.verifiable:final_number": "a6559d49b4eea814",
}
"""Reward function of ours -> the first digits of its digest. Keys contain it, docstrings and messages of its module included."""


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_reward_function_of_ours_keeps_its_digest(function):
    assert user_code_digest(function)[:16] == FUNCTIONS[function]
