"""Scoring: numbers, resumption by shard, and the tables."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

import stages.score.run
from rlhf_core.config.rewards import FunctionReward, RewardsConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.shards import read_index, read_rollouts, write_generations, write_index
from rlhf_core.errors import ArtifactError, ConfigError, RewardError
from rlhf_core.interfaces import ModelSpec, logprob_rows
from rlhf_core.stage.decision import Decision
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import (
    Completion,
    Generation,
    GenerationsRef,
    Message,
    PolicyRef,
    Prompt,
    RewardModelRef,
    TokenSample,
)
from stages.score import ScoreConfig
from stages.score.run import reward_metrics
from tests.support.policies import SHAPE, make_policy
from tests.support.tolerances import near, of_model
from tests.support.workshop import Workshop, generation, rollout, workshop

COUNTING = """
from pathlib import Path

HERE = Path({folder!r})

def length(generations):
    ids = [g.prompt.id for g in generations]
    with (HERE / "calls.txt").open("a") as calls:
        calls.write(" ".join(ids) + "\\n")
    if "p3" in ids and not (HERE / "mended").exists():
        raise RuntimeError("p3 is too hard")
    return [float(len(g.completion.text)) for g in generations]
"""


def generations_in(store: ArtifactStore, folder: Path) -> GenerationsRef:
    write_generations(folder, 0, [generation(f"p{number}", "x" * (number + 1)) for number in range(6)])
    write_index(folder, {"count": 6, "policy": "abc"})
    return store.external(GenerationsRef, folder)


def config_in(folder: Path, *, normalize: str = "none") -> ScoreConfig:
    file = folder / "reward.py"
    file.write_text(COUNTING.format(folder=str(folder)))
    terms = {"length": FunctionReward(function=f"{file}:length", weight=0.5)}
    return ScoreConfig(rewards=RewardsConfig.model_validate({"terms": terms, "normalize": normalize}))


def test_every_generation_gets_its_reward(tmp_path):
    shop = workshop(tmp_path)
    (tmp_path / "mended").touch()
    inputs = {"generations": generations_in(shop.store, tmp_path / "generations"), "reward_models": {}}
    ref, decision = shop.run("score", config_in(tmp_path), inputs)
    rollouts = read_rollouts(shop.store.path(ref))
    assert [one.reward for one in rollouts] == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert rollouts[3].reward_components == {"length": 4.0}
    assert rollouts[3].completion == generation("p3", "xxxx").completion
    assert read_index(shop.store.path(ref))["policy"] == "abc"
    assert read_index(shop.store.path(ref))["rewards"]["terms"]["length"]["weight"] == 0.5
    columns, rows = shop.tracker.tables["samples/rewards"]
    assert columns == ("rank", "prompt", "completion", "reward", "components")
    assert rows[0] == ("best", "question p5", "xxxxxx", 3.0, '{"length": 6.0}')
    assert rows[6][:4] == ("worst", "question p0", "x", 0.5)
    assert shop.metrics(decision)["reward_component/length"] == 3.5
    assert shop.runtime.engines() == {}


def test_the_record_names_what_the_function_read_and_the_key_does_not_see(tmp_path):
    shop = workshop(tmp_path)
    inputs = {"generations": generations_in(shop.store, tmp_path / "generations"), "reward_models": {}}
    file, data = tmp_path / "reward.py", tmp_path / "data.txt"
    data.write_text("2")
    file.write_text(f"def f(generations): return [float(open({str(data)!r}).read())] * len(generations)\n")
    config = ScoreConfig(rewards=RewardsConfig(terms={"mine": FunctionReward(function=f"{file}:f")}))
    decision = shop.run("score", config, inputs, callables=(f"{file}:f",))[1]
    record = shop.store.record(decision.key)
    assert record is not None and record.unseen == (f"reads {data}",)
    file.write_text(f"DEPENDS_ON = ('data.txt',)\n{file.read_text()}")
    decision = shop.run("score", config, inputs, callables=(f"{file}:f",))[1]
    record = shop.store.record(decision.key)
    assert record is not None and record.unseen == ()


@pytest.mark.parametrize("normalize", ["none", "running"])
def test_a_failed_run_goes_on_after_its_last_shard(tmp_path, monkeypatch, normalize):
    monkeypatch.setattr(stages.score.run, "SHARD_ROWS", 2)
    shop = workshop(tmp_path)
    config = config_in(tmp_path, normalize=normalize)
    inputs = {"generations": generations_in(shop.store, tmp_path / "generations"), "reward_models": {}}
    with pytest.raises(RewardError, match=r"(?s)rewards\.length = 'prompts p2 to p3'.*p3 is too hard"):
        shop.run("score", config, inputs)
    (tmp_path / "mended").touch()
    ref, decision = shop.run("score", config, inputs)
    assert decision.action == "RESUME"
    assert (tmp_path / "calls.txt").read_text().splitlines() == ["p0 p1", "p2 p3", "p2 p3", "p4 p5"]

    fresh = Workshop(ArtifactStore(tmp_path / "fresh"))
    uninterrupted, _ = fresh.run("score", config, inputs)
    assert read_rollouts(shop.store.path(ref)) == read_rollouts(fresh.store.path(uninterrupted))
    assert ref.digest == uninterrupted.digest


def test_a_reward_model_that_was_not_given_is_refused_before_anything_is_read(tmp_path):
    shop = workshop(tmp_path)
    inputs = {"generations": generations_in(shop.store, tmp_path / "generations"), "reward_models": {}}
    with pytest.raises(ConfigError, match=r"rewards\.terms\.reward_model\.model"):
        shop.run("score", ScoreConfig(), inputs)


def test_the_metrics_say_what_selection_could_gain():
    metrics = reward_metrics(
        [rollout("a", "x", 1.0), rollout("a", "y", 3.0), rollout("b", "x", 2.0), rollout("b", "y", 2.0)]
    )
    assert metrics == {
        "reward/mean": 2.0,
        "reward/std": 0.5**0.5,
        "reward/min": 1.0,
        "reward/max": 3.0,
        "reward/best": 2.5,
        "reward/undecided": 0.5,
        "reward/invalid": 0.0,
        "reward_component/quality": 2.0,
    }


PROBE = [[1, 70, 80], [1, 90, 91, 92, 93]]


def reward_model_in(shop: Workshop, folder: Path, *, moved: float = 0.0, seed: int = 3) -> RewardModelRef:
    """A reward model as training leaves it: exported weights, and probe scores (moved by so much)."""
    policy = make_policy(folder / "policy")
    spec = ModelSpec(path=str(policy), head="score", lora=None, seed=seed)
    with shop.runtime.trainer("reward_model", spec, None) as trainer:
        trainer.export(folder / "model")
        scores = trainer.scores([tuple(ids) for ids in PROBE])
    contract = {"max_length": 64, "probe": PROBE, "probe_scores": [scores[0], scores[1] + moved]}
    (folder / "model" / "contract.json").write_text(json.dumps(contract))
    return shop.store.external(RewardModelRef, folder / "model")


def answers_in(shop: Workshop, folder: Path, policy: Path) -> tuple[GenerationsRef, list[Generation]]:
    prompt = Prompt("p", (Message("user", "What is 12?"),), "", "test")
    ids = ChatTemplate.load(policy).prompt_ids(prompt.messages)
    made = [
        Generation(prompt, ids, Completion(tokens, (-1.0,) * len(tokens), str(tokens), "length", 0, 0))
        for tokens in [(70, 71, 4), (99, 98, 97, 96, 95), (70,)]
    ]
    write_generations(folder, 0, made)
    write_index(folder, {"count": 3})
    return shop.store.external(GenerationsRef, folder), made


def test_a_reward_model_scores_the_tokens_as_sampled(tmp_path):
    shop = workshop(tmp_path)
    reward_model = reward_model_in(shop, tmp_path)
    generations, made = answers_in(shop, tmp_path / "answers", tmp_path / "policy")
    inputs = {"generations": generations, "reward_models": {"reward_model": reward_model}}
    ref, _ = shop.run("score", ScoreConfig(), inputs)
    spec = ModelSpec(path=str(shop.store.path(reward_model)), head="score", lora=None, seed=0)
    with shop.runtime.trainer("reward_model", spec, None) as trainer:
        alone = [trainer.scores([one.prompt_ids + one.completion.token_ids])[0] for one in made]
    rewards = [one.reward for one in read_rollouts(shop.store.path(ref))]
    assert rewards == near(alone, of_model(SHAPE))
    assert len({round(reward, 4) for reward in rewards}) == 3


def test_a_reward_model_that_does_not_keep_its_contract_is_refused(tmp_path):
    shop = workshop(tmp_path)
    reward_model = reward_model_in(shop, tmp_path, moved=0.01)
    generations, _ = answers_in(shop, tmp_path / "answers", tmp_path / "policy")
    inputs = {"generations": generations, "reward_models": {"reward_model": reward_model}}
    with pytest.raises(ArtifactError, match=r"reward_model\.probe\[1\]"):
        shop.run("score", ScoreConfig(), inputs)


def test_an_ensemble_of_reward_models_scores_as_its_members_do(tmp_path):
    shop = workshop(tmp_path)
    models = {name: reward_model_in(shop, tmp_path / name, seed=seed) for name, seed in (("one", 3), ("two", 4))}
    generations, _ = answers_in(shop, tmp_path / "answers", tmp_path / "one" / "policy")
    inputs = {"generations": generations, "reward_models": models}
    terms = {
        "one": {"type": "reward_model", "model": "one"},
        "two": {"type": "reward_model", "model": "two", "weight": 0.0},
        "least": {"type": "ensemble", "models": ["one", "two"], "reduce": "min"},
    }
    ref, _ = shop.run("score", ScoreConfig(rewards=RewardsConfig.model_validate({"terms": terms})), inputs)
    found = [one.reward_components for one in read_rollouts(shop.store.path(ref))]
    assert [row["least"] for row in found] == pytest.approx([min(row["one"], row["two"]) for row in found], abs=1e-6)
    assert all(row["one"] != row["two"] for row in found)


def test_a_policy_that_judges_is_asked_with_its_own_template(tmp_path):
    """The reward is softmax(log p of the replies), whose tokens and end are scored after the question, by a plain forward pass."""
    shop = workshop(tmp_path)
    folder = make_policy(tmp_path / "judge")
    judge = shop.store.external(PolicyRef, folder)
    generations, made = answers_in(shop, tmp_path / "answers", folder)
    term = {
        "type": "generative_reward_model",
        "model": "judge",
        "template": "{prompt} {completion} 12?",
        "verdicts": ITS,
    }
    inputs = {"generations": generations, "reward_models": {"judge": judge}}
    ref, _ = shop.run("score", ScoreConfig(rewards=RewardsConfig.model_validate({"terms": {"good": term}})), inputs)
    chat = ChatTemplate.load(folder)
    spec = ModelSpec(path=str(folder), head="lm", lora=None, seed=0)
    expected = []
    with shop.runtime.trainer("policy", spec, None) as trainer:
        for one in made:
            ids = chat.prompt_ids([Message("user", f"What is 12? {one.completion.text} 12?")])
            replies = [(*chat.tokenizer(text)["input_ids"], chat.eos_id) for text in ITS]
            samples = [TokenSample(ids + one, (0,) * len(ids) + (1,) * len(one)) for one in replies]
            p, q = (math.exp(math.fsum(row)) for row in logprob_rows(trainer, samples))
            expected.append((p * 2.0 - q) / (p + q))
    rewards = [one.reward for one in read_rollouts(shop.store.path(ref))]
    assert rewards == near(expected, of_model(SHAPE)) and len({round(reward, 6) for reward in rewards}) == 3


ITS = {"It is 2": 2.0, "It is 4": -1.0}


def test_invalid_rollouts_are_counted_and_do_not_enter_any_mean():
    broken = replace(rollout("a", "z", math.nan), invalid="crashed", reward_components={})
    metrics = reward_metrics([rollout("a", "x", 1.0), broken, rollout("b", "y", 2.0)])
    assert metrics["reward/mean"] == 1.5
    assert metrics["reward/invalid"] == pytest.approx(1 / 3)
    assert reward_metrics([broken]) == {"reward/invalid": 1.0}


LOGGING = """
def reward(prompts, completions, labels, **columns):
    if "xxx" in completions:
        raise RuntimeError("three is too hard")
    return {"rewards": [float(len(text)) for text in completions], "extra_logs": {"seen": [1.0] * len(completions)}}
"""


def test_a_reward_that_fails_for_one_answer_costs_only_that_one(tmp_path):
    shop = workshop(tmp_path)
    file = tmp_path / "logging_reward.py"
    file.write_text(LOGGING)
    spec = FunctionReward(function=f"{file}:reward", on_failure="invalid")
    inputs = {"generations": generations_in(shop.store, tmp_path / "generations"), "reward_models": {}}
    ref, decision = shop.run("score", ScoreConfig(rewards=RewardsConfig(terms={"length": spec})), inputs)
    rollouts = read_rollouts(shop.store.path(ref))
    assert [one.invalid for one in rollouts] == ["", "", "length: raised RuntimeError: three is too hard", "", "", ""]
    assert math.isnan(rollouts[2].reward)
    assert rollouts[2].reward_components == {}
    metrics = {
        name.removeprefix("score/"): value for _, values in shop.tracker.points for name, value in values.items()
    }
    assert (
        metrics["reward/mean"] == shop.metrics(decision)["reward/mean"] == 3.6
    )  # (1 + 2 + 4 + 5 + 6) / 5: nothing is scored 0
    assert [metrics["reward/invalid"], metrics["reward_failed/length"]] == pytest.approx([1 / 6, 1 / 6])
    assert metrics["reward_extra/length/seen"] == 1.0


def test_a_shard_without_any_reward_does_not_end_the_stage(tmp_path, monkeypatch):
    monkeypatch.setattr(stages.score.run, "SHARD_ROWS", 1)
    shop = workshop(tmp_path)
    file = tmp_path / "logging_reward.py"
    file.write_text(LOGGING)
    spec = FunctionReward(function=f"{file}:reward", on_failure="invalid", retries=0)
    inputs = {"generations": generations_in(shop.store, tmp_path / "generations"), "reward_models": {}}
    ref, _ = shop.run("score", ScoreConfig(rewards=RewardsConfig(terms={"length": spec})), inputs)
    assert [bool(one.invalid) for one in read_rollouts(shop.store.path(ref))] == [False, False, True] + [False] * 3


def test_a_run_without_any_reward_is_refused_and_its_next_attempt_scores_again(tmp_path):
    shop = workshop(tmp_path)
    file = tmp_path / "down.py"
    mended = tmp_path / "mended"
    file.write_text(
        "from pathlib import Path\n\n"
        "def reward(generations):\n"
        f"    assert Path({str(mended)!r}).exists(), 'the server is down'\n"
        "    return [1.0] * len(generations)\n"
    )
    spec = FunctionReward(function=f"{file}:reward", on_failure="invalid", retries=0)
    config = ScoreConfig(rewards=RewardsConfig(terms={"one": spec}))
    inputs = {"generations": generations_in(shop.store, tmp_path / "generations"), "reward_models": {}}
    with pytest.raises(RewardError, match=r"(?s)the server is down.*none of the rollouts has a reward"):
        shop.run("score", config, inputs)
    mended.touch()
    ref, _ = shop.run("score", config, inputs)
    assert [one.reward for one in read_rollouts(shop.store.path(ref))] == [1.0] * 6


def test_stored_rollouts_are_scored_again_by_another_reward_without_generating(tmp_path):
    shop = workshop(tmp_path)
    (tmp_path / "mended").touch()
    inputs = {"generations": generations_in(shop.store, tmp_path / "generations"), "reward_models": {}}
    first, _ = shop.run("score", config_in(tmp_path), inputs)
    assert isinstance(first, GenerationsRef)  # so a person may name it where generations are asked for
    other = FunctionReward(function="rlhf_core.rewards.verifiable:finished")
    config = ScoreConfig(rewards=RewardsConfig(terms={"ended": other}))
    again, _ = shop.run("score", config, {"generations": first, "reward_models": {}})
    before, after = (read_rollouts(shop.store.path(ref)) for ref in (first, again))
    assert [one.completion for one in after] == [one.completion for one in before]
    assert [one.reward for one in after] == [1.0] * 6
    assert read_index(shop.store.path(again))["policy"] == "abc"


BEST_OF_A_CALL = """
def reward(prompts, completions, labels, **columns):
    longest = max(len(text) for text in completions)
    return [float(len(text) == longest) for text in completions]
"""


@pytest.mark.parametrize(
    ("compares", "expected"),
    [("group", [0.0, 0.0, 1.0, 0.0, 1.0, 1.0]), ("batch", [0.0, 0.0, 0.0, 0.0, 0.0, 1.0])],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_function_that_compares_has_the_same_result_for_any_workers_and_batches(
    tmp_path, compares, expected, asynchronous
):
    file = tmp_path / "compared.py"
    file.write_text(BEST_OF_A_CALL.replace("def", "async def") if asynchronous else BEST_OF_A_CALL)
    texts = [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("b", 4), ("c", 5)]
    write_generations(tmp_path / "generations", 0, [generation(name, "x" * length) for name, length in texts])
    write_index(tmp_path / "generations", {"count": 6, "policy": "abc"})
    runs: list[dict[str, int]] = [{}, {"workers": 2}, {"workers": 3}]
    for number, how in enumerate(runs if compares == "group" else runs[:1]):
        shop = Workshop(ArtifactStore(tmp_path / f"store-{number}"))
        inputs = {"generations": shop.store.external(GenerationsRef, tmp_path / "generations"), "reward_models": {}}
        spec = FunctionReward.model_validate({"function": f"{file}:reward", "compares": compares, **how})
        ref, _ = shop.run("score", ScoreConfig(rewards=RewardsConfig(terms={"best": spec})), inputs)
        assert [one.reward for one in read_rollouts(shop.store.path(ref))] == expected


SLOW = """
import time

def reward(prompts, completions, labels, **columns):
    time.sleep(3 * any(len(text) > 4 for text in completions))
    return [float(len(text)) for text in completions]
"""


def test_answers_that_were_late_are_asked_again_with_another_deadline(tmp_path):
    shop = workshop(tmp_path)
    file = tmp_path / "slow.py"
    file.write_text(SLOW)
    inputs = {"generations": generations_in(shop.store, tmp_path / "generations"), "reward_models": {}}

    def run(**settings: object) -> tuple[list[bool], Decision]:
        spec = FunctionReward.model_validate({"function": f"{file}:reward", "batch_size": 1, **settings})
        ref, decision = shop.run("score", ScoreConfig(rewards=RewardsConfig(terms={"length": spec})), inputs)
        return [bool(one.invalid) for one in read_rollouts(shop.store.path(ref))], decision

    late, first = run(timeout_s=1.0, on_failure="invalid")
    assert late == [False] * 4 + [True] * 2
    again, decision = run(timeout_s=1.0, on_failure="invalid")
    assert (again, decision.action) == (late, "HIT")
    assert decision.reason.endswith("; 2 of 6 answers failed (rewards.terms.length)")
    found, decision = run(timeout_s=30.0, on_failure="invalid")
    assert (found, decision.action) == ([False] * 6, "RUN")
    why = "score.rewards.terms.length: 2 of 6 answers failed under timeout_s = 1.0, now 30.0"
    assert decision.reason == why
    for settings in ({"timeout_s": 40.0}, {"timeout_s": 30.0, "retries": 3}, {"cache": True}):  # nothing failed there
        assert run(**settings)[1].action == "HIT"
    assert run(timeout_s=1.0, on_failure="invalid")[1].key == first.key


EDITS_ITSELF = """
import os
from pathlib import Path

import helping

HERE = Path(__file__)

def reward(prompts, completions, labels, **columns):
    if not (HERE.parent / "died").exists():
        (HERE.parent / "died").touch()
        edited = HERE.parent / "helping.py"
        edited.write_text(edited.read_text() + "MORE = 1\\n")   # a person, in the meantime
        os._exit(3)
    return [helping.VALUE] * len(completions)
"""


def test_a_reward_whose_code_changes_while_it_runs_ends_the_stage_at_the_next_load(tmp_path):
    (tmp_path / "helping.py").write_text("VALUE = 1.0\n")
    file = tmp_path / "edited.py"
    file.write_text(EDITS_ITSELF)
    shop = workshop(tmp_path)
    inputs = {"generations": generations_in(shop.store, tmp_path / "generations"), "reward_models": {}}
    spec = FunctionReward(function=f"{file}:reward", retries=1, on_failure="invalid")
    config = ScoreConfig(rewards=RewardsConfig(terms={"mine": spec}))
    with pytest.raises(
        ConfigError, match=r"rewards\.mine\.function = .*edited\.py:reward': its code.*has changed since"
    ):
        shop.run("score", config, inputs, callables=(spec.function,))
    ref, decision = shop.run("score", config, inputs, callables=(spec.function,))  # the new code has another key
    assert decision.action == "RUN" and "mine.function: reward@" in decision.reason
    assert [one.reward for one in read_rollouts(shop.store.path(ref))] == [1.0] * 6
