"""The process reward model judges steps, carries its contract, and gives the same scores wherever it is read."""

import json
import math
from pathlib import Path

import pytest
import torch

from rlhf_core.config.engines import OptimizerConfig, SamplingConfig
from rlhf_core.config.policy import LoopConfig
from rlhf_core.config.rewards import ProcessRewardModelReward, RewardsConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.shards import read_rollouts, write_generations, write_index
from rlhf_core.data.tables import SteppedAnswer, StepSplitter
from rlhf_core.errors import ArtifactError, DataError
from rlhf_core.types import (
    ArtifactRef,
    Completion,
    Generation,
    GenerationsRef,
    Message,
    PolicyRef,
    ProcessRewardModelRef,
    Prompt,
)
from stages.ppo import PPOConfig
from stages.process_reward_model import ProcessRewardModelConfig
from stages.process_reward_model.run import judgements, step_samples
from stages.score import ScoreConfig
from tests.support.policies import SHAPE
from tests.support.tolerances import near, of_model
from tests.support.training import killed_and_resumed, prompts, question, steps
from tests.support.workshop import Workshop, workshop

CONFIG = ProcessRewardModelConfig(
    max_length=48,
    loop=LoopConfig(batch_size=6, epochs=6, eval_every=12, checkpoint_every=5),
    optimizer=OptimizerConfig(learning_rate=5e-3),
)
ANSWERS = ("It is 4.\nIt is 4.", "It is 4.\nWhat? 4 + 30?", "What? 4 + 30?", "It is 4.\nIt", "It is 4.\n" * 9)
"""Of one step and of several, cut off inside a step, and longer than the model reads."""


@pytest.fixture(scope="module")
def trained(policy: Path, tmp_path_factory) -> tuple[Workshop, ArtifactRef, dict[str, float]]:
    root = tmp_path_factory.mktemp("trained")
    shop = workshop(root)
    inputs = {"policy": shop.store.external(PolicyRef, policy), "steps": steps(shop.store, root)}
    ref, decision = shop.run("process_reward_model", CONFIG, inputs)
    return shop, ref, shop.metrics(decision)


def generations(shop: Workshop, policy: Path, folder: Path) -> tuple[GenerationsRef, list[Generation]]:
    chat = ChatTemplate.load(policy)
    prompt = Prompt("p", question(4), "", "test")
    made = []
    for number, text in enumerate(ANSWERS):
        tokens = (*chat.tokenizer(text, add_special_tokens=False)["input_ids"], *([chat.eos_id] if number < 3 else []))
        said = Completion(tuple(tokens), (-1.0,) * len(tokens), text, "stop" if number < 3 else "length", 0, 0)
        made.append(Generation(prompt, chat.prompt_ids(prompt.messages), said))
    write_generations(folder, 0, made)
    write_index(folder, {"count": len(made)})
    return shop.store.external(GenerationsRef, folder), made


def test_it_tells_right_steps_from_wrong_ones(trained):
    shop, ref, metrics = trained
    assert isinstance(ref, ProcessRewardModelRef)
    assert (metrics["eval/accuracy"], metrics["held_out/accuracy"]) == (1.0, 1.0)
    assert metrics["held_out/first_error_accuracy"] == metrics["held_out/f1"] == 1.0
    assert (metrics["train_answers"], metrics["train_steps"], metrics["dropped_answers"]) == (36, 72, 0)
    report = json.loads((shop.store.path(ref) / "report.json").read_text())
    assert (report["answers"], report["steps"], report["right_steps"]) == (6, 12, 6)
    assert (shop.store.path(ref) / "figures" / "reliability.png").is_file()
    assert shop.tracker.tables["samples/steps"][1][1][1] == "[1.0, 0.0]"


@pytest.mark.parametrize("reduce", ["model", "mean", "last", "product"])
def test_the_reward_is_read_from_the_tokens_as_sampled(trained, policy, tmp_path, reduce):
    from transformers import AutoModelForSequenceClassification

    shop, ref, _ = trained
    given, made = generations(shop, policy, tmp_path / "answers")
    term = ProcessRewardModelReward.model_validate({"reduce": reduce})
    config = ScoreConfig(rewards=RewardsConfig(terms={"steps": term}))
    rollouts, _ = shop.run("score", config, {"generations": given, "reward_models": {"process_reward_model": ref}})
    rewards = [one.reward for one in read_rollouts(shop.store.path(rollouts))]

    chat = ChatTemplate.load(policy)
    newline = chat.tokenizer("\n", add_special_tokens=False)["input_ids"][0]
    model = AutoModelForSequenceClassification.from_pretrained(shop.store.path(ref)).eval()
    expected = []
    for generation in made:  # one sequence a call, neither padded nor shared with another; ends found by hand
        ids, start = generation.prompt_ids + generation.completion.token_ids, len(generation.prompt_ids)
        ids = ids[: CONFIG.max_length]
        ends = [place for place in range(start, len(ids) - 1) if ids[place] == newline]
        probabilities = []
        for end in (*ends, len(ids) - 1):
            with torch.no_grad():
                probabilities.append(1 / (1 + math.exp(-model(torch.tensor([ids[: end + 1]])).logits.item())))
        of = {"mean": sum(probabilities) / len(probabilities), "last": probabilities[-1]}
        expected.append(of | {"model": min(probabilities), "product": math.prod(probabilities)})
    assert rewards == near([row[reduce] for row in expected], of_model(SHAPE))
    assert len(made[-1].prompt_ids + made[-1].completion.token_ids) > CONFIG.max_length
    if reduce == "model":
        assert rewards[0] > 0.5 > max(rewards[1:3])


def test_policy_optimisation_is_rewarded_for_its_steps_and_its_value_model_starts_from_the_judge(
    trained, policy, tmp_path
):
    shop, ref, _ = trained
    base = shop.store.external(PolicyRef, policy)
    config = PPOConfig(
        steps=1,
        prompts_per_step=2,
        samples_per_prompt=2,
        sampling=SamplingConfig(max_tokens=6),
        rewards=RewardsConfig(terms={"steps": ProcessRewardModelReward()}),
    )
    inputs = {"policy": base, "reference": base, "prompts": prompts(shop.store, tmp_path)}
    _, decision = shop.run("ppo", config, inputs | {"reward_models": {"process_reward_model": ref}})
    assert decision.action == "RUN"
    (reward,) = [values["ppo/reward/mean"] for _, values in shop.tracker.points if "ppo/reward/mean" in values]
    assert 0 < reward < 1  # a probability


def test_a_model_whose_step_scores_moved_is_refused(trained, policy, tmp_path):
    import shutil

    shop, ref, _ = trained
    shutil.copytree(shop.store.path(ref), tmp_path / "moved")
    path = tmp_path / "moved" / "contract.json"
    path.chmod(0o644)
    contract = json.loads(path.read_text())
    contract["probe_step_scores"][1][1] += 0.01
    path.write_text(json.dumps(contract))
    inputs = {
        "generations": generations(shop, policy, tmp_path / "answers")[0],
        "reward_models": {"process_reward_model": shop.store.external(ProcessRewardModelRef, tmp_path / "moved")},
    }
    config = ScoreConfig(rewards=RewardsConfig(terms={"steps": ProcessRewardModelReward()}))
    with pytest.raises(ArtifactError, match=r"process_reward_model\.probe\[3\]"):
        shop.run("score", config, inputs)


@pytest.mark.full
def test_a_killed_run_ends_with_the_same_weights(trained, policy, tmp_path):
    whole = trained[0].store.path(trained[1]) / "model.safetensors"
    shop = workshop(tmp_path)
    inputs = {"policy": shop.store.external(PolicyRef, policy), "steps": steps(shop.store, tmp_path)}
    ref = killed_and_resumed(shop, "process_reward_model", CONFIG, inputs, at=13)
    assert (shop.store.path(ref) / "model.safetensors").read_bytes() == whole.read_bytes()


def row(*texts: str, labels: tuple[float, ...]) -> SteppedAnswer:
    return SteppedAnswer("s", (Message("user", "1"),), texts, labels, "test")


def test_labels_stand_at_the_last_token_of_each_step(policy):
    chat = ChatTemplate.load(policy)
    ((_, sample),) = step_samples(chat, StepSplitter(chat, "\n"), [row("12", "3", labels=(1.0, 0.25))], CONFIG)
    # <|user|>1<|end|><|assistant|>12\n3<|end|>: the answer begins at 4, its newline is token 6, its end token 8
    assert len(sample.token_ids) == 9
    assert sample.loss_mask == (0, 0, 0, 0, 0, 0, 1, 0, 1)
    assert sample.labels == (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.25)


def test_steps_beyond_the_limit_are_cut_and_answers_without_any_are_dropped(policy):
    chat = ChatTemplate.load(policy)
    rows = [row("12", "3", labels=(1.0, 0.0)), row("123456789", "3", labels=(1.0, 0.0))]
    config = CONFIG.model_copy(update={"max_length": 8})
    ((_, sample),) = step_samples(chat, StepSplitter(chat, "\n"), rows, config)
    assert (len(sample.token_ids), judgements(sample)) == (7, (1.0,))


def test_a_step_that_holds_the_separator_drops_its_answer_and_too_many_end_the_stage(policy, tmp_path):
    chat = ChatTemplate.load(policy)
    assert step_samples(chat, StepSplitter(chat, "\n"), [row("1\n2", "3", labels=(1.0, 0.0))], CONFIG) == []
    shop = workshop(tmp_path)
    inputs = {"policy": shop.store.external(PolicyRef, policy), "steps": steps(shop.store, tmp_path)}
    with pytest.raises(DataError, match=r"separator = 'is': none of the 36 answers can be split into its steps"):
        shop.run("process_reward_model", CONFIG.model_copy(update={"separator": "is"}), inputs)
