"""Sampling: seeds, shards, resumption and the metrics, with a tiny policy in this process."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.shards import count_rows, read_generations, read_index, shards
from rlhf_core.data.tables import write_prompts
from rlhf_core.errors import DataError
from rlhf_core.sampling.hf_sampler import HFSampler
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import (
    Completion,
    Generation,
    Message,
    PolicyRef,
    Prompt,
    PromptsRef,
    SamplingRequest,
    chunks,
    derive_seed,
)
from stages.generate import GenerateConfig
from stages.generate.run import chosen, generation_metrics
from tests.support.policies import SHAPE
from tests.support.tolerances import near, of_model
from tests.support.workshop import Workshop, generation

CONFIG = GenerateConfig(samples_per_prompt=3, shard_size=2, sampling=SamplingConfig(max_tokens=6))
PROMPTS = [Prompt(f"p{number}", (Message("user", f"What is {number}?"),), "", "test") for number in range(5)]


def workshop(root: Path, policy: Path, prompts: list[Prompt]) -> tuple[Workshop, dict[str, Any]]:
    store = ArtifactStore(root / "store")
    write_prompts(root / "prompts", prompts)
    inputs = {"policy": store.external(PolicyRef, policy), "prompts": store.external(PromptsRef, root / "prompts")}
    return Workshop(store), inputs


def test_every_prompt_gets_its_samples_from_their_own_seeds(tmp_path, policy):
    shop, inputs = workshop(tmp_path, policy, PROMPTS)
    ref, decision = shop.run("generate", CONFIG, inputs)
    made = read_generations(shop.store.path(ref))
    assert [one.prompt.id for one in made] == [f"p{number}" for number in range(5) for _ in range(3)]
    assert [one.completion.seed for one in made[:3]] == [derive_seed(17, "generate", 0, "p0", i) for i in range(3)]
    assert made[0].prompt_ids == ChatTemplate.load(policy).prompt_ids(PROMPTS[0].messages)
    assert len({one.completion.token_ids for one in made}) > 10  # a policy from nothing hardly repeats itself
    assert [path.name for path in shards(shop.store.path(ref))] == [
        f"shard-0000{number}.parquet" for number in range(3)
    ]
    index = read_index(shop.store.path(ref))
    assert (index["count"], index["policy"]) == (15, inputs["policy"].digest)
    assert shop.metrics(decision) == pytest.approx(generation_metrics(made))
    assert 5.0 < shop.metrics(decision)["entropy"] < 6.5  # ln 320 = 5.77: it is nearly uniform
    assert len(shop.tracker.tables["samples/generations"][1]) == 15


def test_a_resumed_run_asks_in_the_batches_of_an_uninterrupted_one(tmp_path, policy, monkeypatch):
    """Equal bits need equal batches: who is asked together must not depend on what an earlier attempt has done."""
    asked: list[list[SamplingRequest]] = []
    generate = HFSampler.generate

    def noted(self: HFSampler, requests: Sequence[SamplingRequest], sampling: SamplingConfig) -> list[Completion]:
        asked.append(list(requests))
        return generate(self, requests, sampling)

    def interrupt(done: int, total: int, message: str) -> None:
        if done == 1 and len(asked) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(HFSampler, "generate", noted)
    shop, inputs = workshop(tmp_path / "killed", policy, PROMPTS)
    with pytest.raises(KeyboardInterrupt):
        shop.run("generate", CONFIG, inputs, progress=interrupt)
    shop.run("generate", CONFIG, inputs)
    killed, asked[:] = list(asked), []
    shop, inputs = workshop(tmp_path / "in_peace", policy, PROMPTS)
    shop.run("generate", CONFIG, inputs)
    assert [len(batch) for batch in asked] == [6, 6, 3]
    assert killed == asked


@pytest.mark.parametrize("other", [1, 3, 8])
def test_a_stage_is_found_and_resumed_with_other_shards(tmp_path, policy, other):
    """The shards that are there keep their rows; what they do not answer is cut anew."""
    recut = CONFIG.model_copy(update={"shard_size": other})

    def interrupt(done: int, total: int, message: str) -> None:
        if done == 1:
            raise KeyboardInterrupt

    shop, inputs = workshop(tmp_path / "killed", policy, PROMPTS)
    with pytest.raises(KeyboardInterrupt):
        shop.run("generate", CONFIG, inputs, progress=interrupt)
    ref, decision = shop.run("generate", recut, inputs)
    assert decision.action == "RESUME"
    sizes = {1: [6, 3, 3, 3], 3: [6, 9], 8: [6, 9]}  # rows, three for each of the 5 prompts
    assert [count_rows(path) for path in shards(shop.store.path(ref))] == sizes[other]
    assert shop.run("generate", CONFIG, inputs)[1].action == "HIT"

    fresh, inputs = workshop(tmp_path / "in_peace", policy, PROMPTS)
    uncut, _ = fresh.run("generate", CONFIG, inputs)
    made, expected = (
        [asdict(one) for one in read_generations(one_shop.store.path(one))]
        for one_shop, one in ((shop, ref), (fresh, uncut))
    )
    assert made == near(expected, of_model(SHAPE))


def test_a_shard_that_somebody_removed_is_made_again(tmp_path, policy):
    def interrupt(done: int, total: int, message: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    shop, inputs = workshop(tmp_path, policy, PROMPTS)
    with pytest.raises(KeyboardInterrupt):
        shop.run("generate", CONFIG, inputs, progress=interrupt)
    folder = next(shop.store.layout.attempts.rglob("shard-00001.parquet")).parent
    (folder / "shard-00001.parquet").unlink()
    ref, _ = shop.run("generate", CONFIG, inputs)
    made = [one.prompt.id for one in read_generations(shop.store.path(ref))]
    assert made == [f"p{number}" for number in range(5) for _ in range(3)]


def test_the_order_of_prompts_does_not_change_what_is_drawn_and_the_round_does(tmp_path, policy):
    def drawn(name: str, prompts: list[Prompt], config: GenerateConfig) -> dict[str, list[str]]:
        shop, inputs = workshop(tmp_path / name, policy, prompts)
        ref, _ = shop.run("generate", config, inputs)
        texts: dict[str, list[str]] = {}
        for one in read_generations(shop.store.path(ref)):
            texts.setdefault(one.prompt.id, []).append(one.completion.text)
        return texts

    forward = drawn("forward", PROMPTS, CONFIG)
    assert drawn("backward", PROMPTS[::-1], CONFIG) == forward
    assert drawn("later", PROMPTS, CONFIG.model_copy(update={"round": 1})) != forward


def test_the_prompts_are_cut_into_shards_and_limited():
    assert [len(piece) for piece in chunks(PROMPTS, 2)] == [2, 2, 1]
    assert chosen(PROMPTS, CONFIG) == PROMPTS
    assert chosen(PROMPTS, CONFIG.model_copy(update={"max_prompts": 3})) == PROMPTS[:3]


def test_no_prompts_are_an_error():
    with pytest.raises(DataError, match="there are no prompts to answer"):
        chosen([], CONFIG)


def test_the_metrics_match_hand_computed_numbers():
    prompt = generation("b", "").prompt
    rows = [
        generation("a", "x", tokens=2),
        generation("a", "x", tokens=4, finish_reason="length"),
        Generation(prompt, (1,), Completion((5, 6), (-2.0, -1.0), "y", "stop", 0, 0)),
        Generation(prompt, (1,), Completion((), (), "z", "stop", 0, 0)),
    ]
    assert generation_metrics(rows) == {
        "length_mean": 2.0,  # (2 + 4 + 2 + 0) / 4
        "entropy": 0.75,  # (6 * 0.5 + 3) / 8
        "truncated": 0.25,
        "distinct": 0.75,  # (1/2 + 2/2) / 2
    }


def test_what_a_policy_is_asked_instead_changes_the_answer_and_not_the_prompt(tmp_path, policy):
    shop, inputs = workshop(tmp_path, policy, PROMPTS)
    asked = [Prompt(one.id, (Message("user", "What is 12 + 30?"),), "", "test") for one in PROMPTS[:1]]
    write_prompts(tmp_path / "asked", asked)
    inputs["asked"] = shop.store.external(PromptsRef, tmp_path / "asked")
    made = read_generations(shop.store.path(shop.run("generate", CONFIG, inputs)[0]))

    del inputs["asked"]
    plain = read_generations(shop.store.path(shop.run("generate", CONFIG, inputs)[0]))
    assert [(one.prompt, one.prompt_ids) for one in made] == [(one.prompt, one.prompt_ids) for one in plain]
    # The other prompts are asked as they are. They share a batch with another text, so their log-probs are rounded anew.
    assert [asdict(one) for one in made[3:]] == near([asdict(one) for one in plain[3:]], of_model(SHAPE))
    # What was sampled, from the same seed, is what the model says of the other text.
    chat = ChatTemplate.load(policy)
    with shop.runtime.sampler(policy) as sampler:
        request = SamplingRequest(chat.prompt_ids(asked[0].messages), made[0].completion.seed)
        answer = sampler.generate([request], CONFIG.sampling)[0]
    assert answer.logprobs == near(made[0].completion.logprobs, of_model(SHAPE))
    assert made[0].completion.logprobs != near(plain[0].completion.logprobs, of_model(SHAPE))
