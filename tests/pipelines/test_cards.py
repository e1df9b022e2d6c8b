from __future__ import annotations

import pytest

from pipelines.cards import artifact_key


@pytest.mark.parametrize(
    ("parts", "key"),
    [
        (("stage", "iterative_dpo/round_1/dpo"), "stage-iterative-dpo-round-1-dpo"),
        (("samples", "PPO"), "samples-ppo"),
    ],
)
def test_keys_hold_only_what_prefect_accepts(parts: tuple[str, ...], key: str) -> None:
    assert artifact_key(*parts) == key
