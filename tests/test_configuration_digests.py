"""Shipped profiles keep their bytes: what they are read as, and what of it enters keys.

A digest that differs says that stored results are no longer found. A change that is meant to do so brings its new digests
along, and a line in the changelog.
"""

import pytest

from pipelines.flows.profile import load_profile, profile_names
from rlhf_core.config import engines
from rlhf_core.errors import ConfigError
from rlhf_core.schema.base import keyed
from rlhf_core.store.fingerprint import canonical_json, sha256_text
from rlhf_core.user_code.dependencies import user_code_digest
from rlhf_core.user_code.former_digests import FORMER_DIGESTS
from rlhf_core.user_code.modules import load_callable

PROFILES = {
    "multi_node/full": ("bf75dde65ccfced6", "d9bb2cc3bf094a91"),
    "one_gpu/full": ("2e7fcb5ccb623de5", "88fa6ecf866de733"),
    "one_node/full": ("562149b4ffe2494e", "1707abdc186658c1"),
    "reports/base": ("36f8e271ca6595f3", "c329c4d3e1c1ae95"),
    "reports/deepseek_r1": ("33c0c734491b2334", "7e8ec59ef4e28142"),
    "reports/kimi_k2": ("15a0d7f2d3aaa293", "979286f3ad5d61c5"),
    "reports/llama3": ("d22e7e246c6237c4", "dbbccb8d54a05d30"),
    "reports/mimo_v2": ("ca432ab020f19ff5", "5ef4d7cd76e455ec"),
    "reports/nemotron3": ("1fc6a77efbdbc6e1", "5a7562e0c99be0fa"),
    "reports/olmo3": ("528cf716c15e070f", "3b675373c5c673ac"),
    "reports/qwen3": ("2640c6ed6b709a60", "8670e3d91fbf05cc"),
    "reports/smollm3": ("bd8fd6ae966f8f6c", "c09dc2c6ad746033"),
    "reports/tulu3": ("b649f017ea482700", "7b71b823a56436ae"),
    "smollm2/full": ("916ec48637a14d9b", "9ffc434958979021"),
    "smollm2/grpo": ("bfd71a46e4da1f48", "dc28c6d2313e01ce"),
    "smollm2/instructions": ("c144572b74f80fa6", "4236826d1ca80ca8"),
    "smollm2/instructions_hacked": ("77ecefcf41d90dd9", "15ed618cc2366939"),
    "smollm2/one_word": ("78915a2ce5f0dada", "8fc4cb350cee48b3"),
    "tiny/conditional": ("8aebe9c7ad55527c", "66c54cb16b503324"),
    "tiny/distill": ("14fc70126f9da1f1", "7359c7b685a0243a"),
    "tiny/full": ("a706f55ef42b52e2", "1cc8ca60307b669b"),
    "tiny/online": ("1a4e8f60a54e4b71", "fee23a86e198f020"),
    "tiny/people": ("67e7148a01d57a6a", "f0988f67b2d0818c"),
    "tiny/prm": ("208e49ac39dabf5a", "bb28ad3f665143c7"),
    "tiny/recipe": ("76e139d842eab4c8", "b20c5e3f2dcbfc61"),
    "tiny/rlvr": ("d82b63cdb63f9490", "463936a3bc5d6ac3"),
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
    "rlhf_contrib.sandbox.code:code_reward": "04c3c2029e959385",
    "rlhf_contrib.worlds.arithmetic:exact_match": "2f22273ffaba6ad9",
    "rlhf_contrib.worlds.mixed:gold_reward": "f35a719e30c16314",
    "rlhf_contrib.worlds.support:gold_reward": "76f7d3bfe4d48fe3",
    "rlhf_contrib.worlds.support_readers:reader_reward": "8f96713256ee82ee",
    "rlhf_core.rewards.library.instructions:instructions_followed": "222a45e03a6739e0",
    "rlhf_core.rewards.library.instructions:on_topic": "222a45e03a6739e0",
    "rlhf_core.rewards.library.math:math_reward": "0e8a5832d8057cf5",
    "rlhf_core.rewards.library.reasoning_gym:reasoning_gym_reward": "8a981912ade8527c",
    "rlhf_core.rewards.library.structure:think_format": "8c77b0ac9344600a",
    "rlhf_core.rewards.library.text:exact_match": "cec520f3b672cb19",
    "rlhf_core.rewards.verifiable:final_line_format": "8ce79c227c3ea600",
    "rlhf_core.rewards.verifiable:final_number": "8ce79c227c3ea600",
}
"""Reward function of ours -> the first digits of its digest, which keys contain. Until 0.2 docstrings and messages of its module
counted, so the digest of its code now is in `FORMER_DIGESTS`."""
FORMER_FUNCTIONS = {
    "rlhf_core.rewards.library.code:code_reward": "rlhf_contrib.sandbox.code:code_reward",
    "rlhf_core.data.worlds.arithmetic:exact_match": "rlhf_contrib.worlds.arithmetic:exact_match",
    "rlhf_core.data.worlds.mixed:gold_reward": "rlhf_contrib.worlds.mixed:gold_reward",
    "rlhf_core.data.worlds.support:gold_reward": "rlhf_contrib.worlds.support:gold_reward",
    "rlhf_core.data.worlds.support_readers:reader_reward": "rlhf_contrib.worlds.support_readers:reader_reward",
}
"""Path of a function in profiles of before -> its present path."""


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_reward_function_of_ours_keeps_its_digest(function):
    assert user_code_digest(function)[:16] == FUNCTIONS[function]


def test_every_former_digest_is_that_of_a_function_in_the_table():
    """Otherwise a module has changed since then, and its entry keeps no key."""
    assert {digest[:16] for digest in FORMER_DIGESTS.values()} == set(FUNCTIONS.values())


@pytest.mark.parametrize("former", FORMER_FUNCTIONS)
def test_a_function_that_moved_has_its_digest_under_both_paths_and_loads_with_a_warning(former):
    present = FORMER_FUNCTIONS[former]
    with pytest.warns(FutureWarning, match="the former name works until 0.4"):
        digest = user_code_digest(former)
    assert digest[:16] == FUNCTIONS[present]
    # Digests are compared when a function is loaded, too.
    with pytest.warns(FutureWarning, match="the former name works until 0.4"):
        loaded = load_callable("gold", former, code={former: digest})
    assert loaded is load_callable("gold", present, code={present: digest})
    with pytest.raises(ConfigError, match="has changed since the stage began"):
        load_callable("gold", former, code={former: "0" * 64})
