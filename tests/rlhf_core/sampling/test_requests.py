"""What a sampler reads of a policy's folder, which requests and weights it refuses, and what it makes of an engine's tokens."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.errors import ConfigError, SamplingError
from rlhf_core.interfaces import Weights
from rlhf_core.models.lora import weights_digest
from rlhf_core.sampling.requests import (
    PolicyFolder,
    architecture,
    check_requests,
    received_tensors,
    stop_token_ids,
    tensors_of,
)
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


def test_it_is_read_as_it_was_written(policies):
    folder = PolicyFolder.read(policies[0], max_model_len=96)
    assert (folder.path, folder.vocab_size, folder.max_model_len) == (policies[0], 320, 96)
    assert folder.stops and folder.decode(folder.stops) == ""


def test_the_language_model_of_a_nested_config_counts(policies, tmp_path):
    text = {"vocab_size": 320, "max_position_embeddings": 64}
    nested = changed(policies[0], tmp_path / "nested", vocab_size=7, text_config=text)
    assert PolicyFolder.read(nested, max_model_len=64).vocab_size == 320
    with pytest.raises(ConfigError, match=r"max_model_len = 65: the policy has 64 positions"):
        PolicyFolder.read(nested, max_model_len=65)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        PolicyFolder.read(tmp_path, max_model_len=8)


def test_an_answer_keeps_its_tokens_and_shows_its_text_without_special_ones():
    done = FOLDER.completion(REQUEST, (0, 2), (-0.5, -0.25), version=3)
    assert (done.token_ids, done.logprobs, done.text) == ((0, 2), (-0.5, -0.25), "a")
    assert (done.finish_reason, done.policy_version, done.seed) == ("stop", 3, 50)
    assert FOLDER.completion(REQUEST, (2, 0), (-0.5, -0.25), version=3).finish_reason == "length"


def test_an_answer_of_nothing_or_of_a_diverged_policy_is_none():
    with pytest.raises(SamplingError, match=r"seed 50.*no tokens were returned"):
        FOLDER.completion(REQUEST, (), (), version=0)
    with pytest.raises(SamplingError, match=r"seed 50.*diverged"):
        FOLDER.completion(REQUEST, (0,), (float("nan"),), version=0)


def test_experts_of_the_tokens_that_an_engine_read_are_kept_up_to_the_end_of_the_answer():
    asking = SamplingRequest((5, 6), seed=50, routed_experts=True)
    experts = np.arange(8, dtype=np.uint8).reshape(4, 2, 1)  # two tokens of the prompt, and two of the three drawn
    tokens, logprobs = (0, 1, 2), (-0.5, -0.25, -0.5)
    done = FOLDER.completion(asking, tokens, logprobs, version=0, experts=experts)
    assert done.routed_experts == (*range(8), -1, -1)
    cut = FOLDER.completion(asking, tokens, logprobs, version=0, stop=("a",), experts=experts)
    assert (cut.token_ids, cut.routed_experts) == ((0,), tuple(range(6)))
    assert not FOLDER.completion(REQUEST, tokens, logprobs, version=0, experts=experts).routed_experts
    with pytest.raises(
        SamplingError, match=r"seed 50\)\.routed_experts = True: the engine recorded no experts; set runtime"
    ):
        FOLDER.completion(asking, tokens, logprobs, version=0)


def test_policies_of_one_shape_share_an_architecture_and_others_do_not(policies, tmp_path):
    again = changed(policies[1], tmp_path / "again", dtype="bfloat16", transformers_version="0", eos_token_id=3)
    wider = changed(policies[1], tmp_path / "wider", hidden_size=256)
    assert architecture(policies[0]) == architecture(policies[1]) == architecture(again) != architecture(wider)


# ---------------------------------------------------------------- requests


def check(*prompts: tuple[int, ...], max_tokens: int = 4) -> None:
    requests = [SamplingRequest(prompt, seed=50 + index) for index, prompt in enumerate(prompts)]
    check_requests(requests, vocab_size=10, max_tokens=max_tokens, max_model_len=8)


def test_an_overlong_request_is_named_with_its_seed_and_lengths():
    with pytest.raises(
        SamplingError, match=r"requests\[1\] \(seed 51\) = 9: 5 prompt tokens \+ max_tokens 4 exceed .* 8"
    ):
        check((1,), (1, 2, 3, 4, 5))


@pytest.mark.parametrize(("prompt", "message"), [((), "no tokens"), ((3, 10), r"\[0, 10\)"), ((-1,), r"\[0, 10\)")])
def test_a_prompt_that_the_policy_cannot_read_is_refused(prompt, message):
    with pytest.raises(SamplingError, match=message):
        check(prompt)


def test_stop_tokens_are_those_of_the_model_and_of_the_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert stop_token_ids(tmp_path, tokenizer_eos=5) == (2, 5, 7)


def test_a_policy_without_any_stop_token_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        stop_token_ids(tmp_path, tokenizer_eos=None)


def test_a_request_that_asks_for_fewer_tokens_needs_less_room():
    request = SamplingRequest((1, 2, 3, 4, 5), seed=50, max_tokens=3)
    check_requests([request], vocab_size=10, max_tokens=4, max_model_len=8)  # 5 + 3 = 8
    FOLDER.check([REQUEST], SamplingConfig(max_tokens=4))  # 2 + 4 = 6


# ---------------------------------------------------------------- weights through host memory


SENT = {"norm": torch.ones(8), "head": torch.arange(12.0).reshape(3, 4)}


def test_the_tensors_that_were_sent_are_returned():
    assert received_tensors(Weights(SENT, weights_digest(SENT))) is SENT


def test_other_tensors_than_were_sent_are_refused():
    changed = SENT | {"norm": torch.zeros(8)}
    with pytest.raises(
        SamplingError, match=r"weights\.digest = .*: the trainer sent .*please report this as a bug in the transfer"
    ):
        received_tensors(Weights(changed, weights_digest(SENT)))


def test_a_payload_that_is_no_mapping_is_refused():
    with pytest.raises(SamplingError, match=r"weights\.payload = 'list': must map names to tensors; resolve it first"):
        tensors_of(Weights([], ""))
