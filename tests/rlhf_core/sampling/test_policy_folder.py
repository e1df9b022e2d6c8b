"""What a sampler reads of a policy's folder, and what it makes of an engine's tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.errors import ConfigError, SamplingError
from rlhf_core.sampling.requests import PolicyFolder, architecture
from rlhf_core.types import SamplingRequest

REQUEST = SamplingRequest((5, 6), seed=50)


def letters(ids: Sequence[int]) -> str:
    """Decode tokens that are letters; 2 is special."""
    return "".join(chr(97 + one) for one in ids if one != 2)


FOLDER = PolicyFolder(Path("policy"), letters, stops=(2,), vocab_size=10, max_model_len=6)


def changed(policy: Path, folder: Path, **changes: Any) -> Path:
    """Return a copy of `policy` whose config has `changes`; None takes a key away."""
    shutil.copytree(policy, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_it_is_read_as_it_was_written(policies: tuple[Path, Path]) -> None:
    folder = PolicyFolder.read(policies[0], max_model_len=96)
    assert (folder.path, folder.vocab_size, folder.max_model_len) == (policies[0], 320, 96)
    assert folder.stops and folder.decode(folder.stops) == ""


def test_the_language_model_of_a_nested_config_counts(policies: tuple[Path, Path], tmp_path: Path) -> None:
    text = {"vocab_size": 320, "max_position_embeddings": 64}
    nested = changed(policies[0], tmp_path / "nested", vocab_size=7, text_config=text)
    assert PolicyFolder.read(nested, max_model_len=64).vocab_size == 320
    with pytest.raises(ConfigError, match=r"max_model_len = 65: the policy has 64 positions"):
        PolicyFolder.read(nested, max_model_len=65)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        PolicyFolder.read(tmp_path, max_model_len=8)


def test_a_request_must_fit_its_vocabulary_and_its_length() -> None:
    FOLDER.check([REQUEST], SamplingConfig(max_tokens=4))
    with pytest.raises(SamplingError, match="exceed"):
        FOLDER.check([REQUEST], SamplingConfig(max_tokens=5))
    with pytest.raises(SamplingError, match=r"\[0, 10\)"):
        FOLDER.check([SamplingRequest((10,), seed=50)], SamplingConfig(max_tokens=1))


def test_an_answer_keeps_its_tokens_and_shows_its_text_without_special_ones() -> None:
    done = FOLDER.completion(REQUEST, (0, 2), (-0.5, -0.25), version=3)
    assert (done.token_ids, done.logprobs, done.text) == ((0, 2), (-0.5, -0.25), "a")
    assert (done.finish_reason, done.policy_version, done.seed) == ("stop", 3, 50)
    assert FOLDER.completion(REQUEST, (2, 0), (-0.5, -0.25), version=3).finish_reason == "length"


def test_an_answer_of_nothing_or_of_a_diverged_policy_is_none() -> None:
    with pytest.raises(SamplingError, match=r"seed 50.*no tokens were returned"):
        FOLDER.completion(REQUEST, (), (), version=0)
    with pytest.raises(SamplingError, match=r"seed 50.*diverged"):
        FOLDER.completion(REQUEST, (0,), (float("nan"),), version=0)


def test_policies_of_one_shape_share_an_architecture_and_others_do_not(
    policies: tuple[Path, Path], tmp_path: Path
) -> None:
    again = changed(policies[1], tmp_path / "again", dtype="bfloat16", transformers_version="0", eos_token_id=3)
    wider = changed(policies[1], tmp_path / "wider", hidden_size=256)
    assert architecture(policies[0]) == architecture(policies[1]) == architecture(again) != architecture(wider)
