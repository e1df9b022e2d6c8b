"""Evaluation from answers in the store to the report, with and without engines."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.data.shards import read_generations, write_generations, write_index
from rlhf_core.data.tables import Prompt, write_prompts
from rlhf_core.errors import ConfigError, DataError, RewardError
from rlhf_core.schema.base import keyed
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import Completion, Generation, GenerationsRef, Message, PolicyRef, PromptsRef, RewardModelRef
from stages.evaluate import EvaluateConfig
from tests.support.policies import SHAPE, make_policy
from tests.support.tolerances import near, of_model
from tests.support.training import demonstrations
from tests.support.workshop import Workshop, workshop

GOLD = """
import time

def length(generations):
    return [float(len(g.completion.text)) for g in generations]

def broken(generations):
    return [float("nan") for _ in generations]

def slow(generations):
    time.sleep(60)
"""


def answers(
    store: ArtifactStore, folder: Path, policy: str, texts: dict[str, list[str]], **sampling: float
) -> GenerationsRef:
    rows = [
        Generation(
            Prompt(prompt, (Message("user", prompt),), "", "test"),
            (1, 2),
            Completion((5, 6), (-0.5, -0.5), text, "stop", 0, 0),
        )
        for prompt, group in texts.items()
        for text in group
    ]
    folder.mkdir(parents=True)
    write_generations(folder, 0, rows)
    write_index(folder, {"count": len(rows), "policy": policy, "sampling": sampling})
    return store.external(GenerationsRef, folder)


@pytest.fixture
def shop(tmp_path) -> Workshop:
    return workshop(tmp_path)


@pytest.fixture
def gold(tmp_path) -> str:
    (tmp_path / "gold.py").write_text(GOLD)
    return f"{tmp_path / 'gold.py'}:length"


def three_policies(shop: Workshop, folder: Path) -> dict[str, GenerationsRef]:
    texts = {
        "base": {"p1": ["x"], "p2": ["xx"]},
        "sft": {"p1": ["xx", "xxxx"], "p2": ["xx", "xx"]},
        "ppo": {"p1": ["xxxx"], "p2": ["xxxx"]},
    }
    return {name: answers(shop.store, folder / name, f"digest-{name}", texts[name]) for name in texts}


def report_of(shop: Workshop, ref: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((shop.store.path(ref) / "report.json").read_text())
    return content


def test_policies_are_compared_by_gold_reward_without_any_engine(shop, gold, tmp_path):
    inputs = {"generations": three_policies(shop, tmp_path)}
    ref, decision = shop.run("evaluate", EvaluateConfig(gold=gold), inputs)
    report = report_of(shop, ref)
    rows = report["policies"]
    assert report["order"] == ["base", "sft", "ppo"]
    assert [rows[name]["gold"]["mean"] for name in rows] == [1.5, 2.5, 4.0]
    # sft against base (the policy before the reference): p1 both longer: 1; p2 both equal: 1/2
    assert (rows["sft"]["win_rate"]["mean"], rows["sft"]["win_rate"]["against"]) == (0.75, "base")
    # ppo against sft: p1 one win and one tie: 3/4; p2: 1
    assert (rows["ppo"]["win_rate"]["mean"], rows["ppo"]["win_rate"]["against"]) == (0.875, "sft")
    assert rows["ppo"]["improvement"]["mean"] == 1.5
    assert "win_rate" not in rows["base"]
    assert "kl" not in rows["ppo"]
    assert shop.metrics(decision)["ppo/gold"] == 4.0
    assert shop.runtime.engines() == {}


def test_every_policy_is_compared_with_the_champion_prompt_by_prompt(shop, gold, tmp_path):
    inputs = three_policies(shop, tmp_path)
    texts = {"p1": ["xxx"], "p2": ["xxx"]}
    inputs["champion"] = answers(shop.store, tmp_path / "champion", "digest-old", texts)
    ref, decision = shop.run("evaluate", EvaluateConfig(gold=gold), {"generations": inputs})
    rows = report_of(shop, ref)["policies"]
    # ppo: 4 - 3 on both prompts; sft: p1 (2 + 4) / 2 - 3 = 0 and p2 2 - 3 = -1
    better, worse = rows["ppo"]["gold_over_champion"], rows["sft"]["gold_over_champion"]
    assert better == {"mean": 1.0, "prompts": 2, "against": "champion"}  # two alike show no interval
    assert worse["mean"] == -0.5 and worse["low"] < -1.0 and worse["high"] > 0.0  # and two apart a wide one
    assert "reward_model_over_champion" not in rows["ppo"] and "gold_over_champion" not in rows["champion"]
    assert (shop.store.path(ref) / "report.html").exists() and shop.metrics(decision)["champion/gold"] == 3.0


def test_the_artifact_holds_page_figures_and_the_tracker_has_the_same(shop, gold, tmp_path):
    ref, _ = shop.run("evaluate", EvaluateConfig(gold=gold), {"generations": three_policies(shop, tmp_path)})
    folder = shop.store.path(ref)
    assert {
        path.relative_to(folder).as_posix() for path in folder.rglob("*.*") if path.suffix in (".html", ".png")
    } == {
        "report.html",
        "figures/length.png",
    }
    assert ("figures", "length.png") in shop.tracker.files
    assert ("", "report.html") in shop.tracker.files
    columns, rows = shop.tracker.tables["samples"]
    assert columns == ("prompt", "policy", "answer", "gold", "reward model")
    kept = json.loads((folder / "samples.json").read_text())
    assert (tuple(kept["columns"]), [tuple(row) for row in kept["data"]]) == (columns, rows)
    assert rows[:3] == [("p1", "base", "x", 1.0, ""), ("p1", "sft", "xx", 2.0, ""), ("p1", "ppo", "xxxx", 4.0, "")]
    assert [name for name, _, context in shop.tracker.datasets if context == "evaluation"] == [
        "generations/base",
        "generations/ppo",
        "generations/sft",
    ]


def with_failures(shop: Workshop, folder: Path, ref: GenerationsRef, failed: set[str]) -> GenerationsRef:
    """Return the answers with the episodes to the prompts `failed` broken off."""
    rows = [
        replace(one, completion=replace(one.completion, text="", failure="the world ended"))
        if one.prompt.id in failed
        else one
        for one in read_generations(shop.store.path(ref))
    ]
    folder.mkdir()
    write_generations(folder, 0, rows)
    write_index(folder, {"count": len(rows), "policy": "played", "sampling": {}})
    return shop.store.external(GenerationsRef, folder)


def test_episodes_that_failed_are_counted_and_not_measured(shop, gold, tmp_path):
    whole = answers(shop.store, tmp_path / "whole", "d", {"p1": ["xxxx"], "p2": ["xx"]})
    made = {"sft": whole, "ppo": with_failures(shop, tmp_path / "ppo", whole, {"p1"})}
    ref, decision = shop.run("evaluate", EvaluateConfig(gold=gold), {"generations": made})
    rows = report_of(shop, ref)["policies"]
    assert (rows["ppo"]["gold"]["mean"], rows["ppo"]["samples"], rows["ppo"]["failed"]) == (2.0, 1, 1)
    assert rows["ppo"]["win_rate"]["mean"] == 0.5  # a tie on p2, where a half-played p1 would lose
    assert "failed" not in rows["sft"]
    assert shop.metrics(decision)["ppo/failed"] == 1.0


def test_a_policy_whose_episodes_all_failed_is_refused(shop, gold, tmp_path):
    whole = answers(shop.store, tmp_path / "whole", "d", {"p1": ["xxxx"], "p2": ["xx"]})
    made = {"sft": whole, "ppo": with_failures(shop, tmp_path / "ppo", whole, {"p1", "p2"})}
    with pytest.raises(DataError, match=r"generations = 'ppo': all 2 episodes failed; the first: the world ended"):
        shop.run("evaluate", EvaluateConfig(gold=gold), {"generations": made})


def test_parents_change_who_is_compared_with_whom(shop, gold, tmp_path):
    config = EvaluateConfig(gold=gold, parents={"ppo": "base"})
    ref, _ = shop.run("evaluate", config, {"generations": three_policies(shop, tmp_path)})
    assert report_of(shop, ref)["policies"]["ppo"]["win_rate"]["against"] == "base"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"parents": {"dpo": "sft"}}, r"evaluate.parents.dpo = 'dpo': is not evaluated \(base, sft, ppo\)"),
        ({"parents": {"ppo": "dpo"}}, "evaluate.parents.ppo = 'dpo'"),
        ({"best_of": {"dpo": 8}}, "evaluate.best_of.dpo"),
        ({"best_of": {"sft": 2}}, "needs a reward model"),
    ],
)
def test_a_name_or_a_wish_that_cannot_be_met_is_refused(shop, tmp_path, config, message):
    with pytest.raises(ConfigError, match=message):
        shop.run("evaluate", EvaluateConfig(**config), {"generations": three_policies(shop, tmp_path)})


def test_a_gold_reward_that_fails_is_never_scored_zero(shop, gold, tmp_path):
    config = EvaluateConfig(gold=gold.replace("length", "broken"))
    with pytest.raises(RewardError, match="must be finite"):
        shop.run("evaluate", config, {"generations": three_policies(shop, tmp_path)})


def test_a_gold_reward_that_hangs_is_killed_at_its_deadline(shop, gold, tmp_path):
    config = EvaluateConfig(gold=gold.replace("length", "slow"), gold_timeout_s=1.0)
    with pytest.raises(RewardError, match=r"rewards\.gold = .* took longer than 1 s"):
        shop.run("evaluate", config, {"generations": three_policies(shop, tmp_path)})


def test_the_deadline_of_the_gold_reward_is_not_part_of_the_key():
    assert keyed(EvaluateConfig(gold_timeout_s=1.0)) == keyed(EvaluateConfig())


def prompts_in(shop: Workshop, folder: Path) -> PromptsRef:
    folder.mkdir()
    write_prompts(folder, [Prompt(f"p{n}", (Message("user", f"What is {n} + {n}?"),), "", "test") for n in range(6)])
    return shop.store.external(PromptsRef, folder)


def test_kl_and_scores_are_those_of_the_models(shop, gold, tmp_path):
    """A policy and a reference of random weights: KL against transformers' own logits, best-of-4 by the scores."""
    import torch
    from transformers import AutoModelForCausalLM

    from rlhf_core.config.engines import SamplingConfig
    from rlhf_core.interfaces import ModelSpec
    from stages.generate import GenerateConfig

    policy = shop.store.external(PolicyRef, make_policy(tmp_path / "policy"))
    reference = shop.store.external(PolicyRef, other_policy(tmp_path / "reference"))
    reward_model = shop.store.external(RewardModelRef, make_reward_model(shop, tmp_path / "policy", tmp_path / "rm"))
    sampling = SamplingConfig(temperature=0.7, max_tokens=8)
    generate = GenerateConfig(samples_per_prompt=4, sampling=sampling)
    prompts = prompts_in(shop, tmp_path / "prompts")
    made = {
        name: shop.run("generate", generate, {"policy": ref, "prompts": prompts})[0]
        for name, ref in (("sft", reference), ("ppo", policy))
    }
    config = EvaluateConfig(gold=gold, best_of={"sft": 4})
    ref, _ = shop.run("evaluate", config, {"generations": made, "reference": reference, "reward_model": reward_model})
    rows = report_of(shop, ref)["policies"]

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "reference")
    ratios = []
    for one in read_generations(shop.store.path(made["ppo"])):
        ids = torch.tensor([one.prompt_ids + one.completion.token_ids])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0] / 0.7, dim=-1)
        start = len(one.prompt_ids)
        expected = sum(float(logprobs[start + t - 1, token]) for t, token in enumerate(one.completion.token_ids))
        ratios.append(sum(one.completion.logprobs) - expected)
    assert rows["ppo"]["kl"]["mean"] == pytest.approx(sum(ratios) / len(ratios), abs=1e-4)
    assert rows["ppo"]["kl"]["mean"] > 0.01
    assert rows["sft"]["kl"]["mean"] == pytest.approx(0.0, abs=1e-4)  # a policy to itself
    assert rows["best-of-4 (sft)"]["kl"]["mean"] == pytest.approx(math.log(4) - 3 / 4)

    answers_sft = read_generations(shop.store.path(made["sft"]))
    with shop.runtime.trainer("reward_model", ModelSpec(str(tmp_path / "rm"), "score", None, 17), None) as trainer:
        scores = trainer.scores([one.prompt_ids + one.completion.token_ids for one in answers_sft])
    best = [max(scores[start : start + 4]) for start in range(0, len(scores), 4)]
    assert rows["best-of-4 (sft)"]["reward_model"]["mean"] == near(sum(best) / 6, of_model(SHAPE))
    assert rows["sft"]["reward_model"]["mean"] == near(sum(scores) / 24, of_model(SHAPE))
    assert (shop.store.path(ref) / "figures" / "frontier.png").exists()
    assert [node["label"] for node in report_of(shop, ref)["lineage"]] == ["generate", "generate"]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 5}])
def test_greedy_and_filtered_answers_have_no_kl(shop, gold, tmp_path, sampling):
    reference = shop.store.external(PolicyRef, make_policy(tmp_path / "policy"))
    made = {"sft": answers(shop.store, tmp_path / "sft", reference.digest, {"p1": ["x"]}, **sampling)}
    ref, _ = shop.run("evaluate", EvaluateConfig(gold=gold), {"generations": made, "reference": reference})
    assert "kl" not in report_of(shop, ref)["policies"]["sft"]


def test_the_reference_goes_by_the_name_of_the_policy_that_it_is(shop, gold, tmp_path):
    reference = shop.store.external(PolicyRef, make_policy(tmp_path / "policy"))
    made = {
        "base": answers(shop.store, tmp_path / "base", reference.digest, {"p1": ["x"]}),
        "ppo": answers(shop.store, tmp_path / "ppo", "other", {"p1": ["xx"]}),
    }
    ref, _ = shop.run("evaluate", EvaluateConfig(gold=gold), {"generations": made, "reference": reference})
    report = report_of(shop, ref)
    assert report["reference"] == "base"
    assert report["policies"]["ppo"]["win_rate"]["against"] == "base"


def test_training_curves_of_the_ancestors_are_drawn(tmp_path, monkeypatch):
    from rlhf_core.evaluation import plots
    from stages.evaluate.run import training_figures

    drawn: list[str] = []
    monkeypatch.setattr(plots, "curves", lambda shown, **given: drawn.append(given["color"]) or b"")
    path = tmp_path / "metrics.jsonl"
    labels = ("sft", "iterative_dpo/round_1/dpo", "reward_model")
    rows = [
        {"step": step, "values": {f"{label}/train/{name}": 1 / step for label in labels for name in ("loss", "grad")}}
        for step in range(1, 9)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = training_figures(dict.fromkeys(labels, path), {"sft": "#1", "iterative_dpo": "#2"})
    assert list(figures) == ["training_sft", "training_iterative_dpo_round_1_dpo", "training_reward_model"]
    assert figures["training_sft"][0] == "Training of sft"
    assert drawn == ["#1", "#2", plots.INK]  # the policies' own colors


def test_only_training_stages_have_a_training_curve(shop, tmp_path):
    from rlhf_core.config.engines import SamplingConfig
    from rlhf_core.config.policy import LoopConfig
    from rlhf_core.store import attempts
    from stages.generate import GenerateConfig
    from stages.sft import SFTConfig

    base = shop.store.external(PolicyRef, make_policy(tmp_path / "policy"))
    training = {"policy": base, "demonstrations": demonstrations(shop.store, tmp_path)}
    sft, _ = shop.run("sft", SFTConfig(max_length=48, loop=LoopConfig(batch_size=8)), training)
    prompts = prompts_in(shop, tmp_path / "prompts")
    generate = GenerateConfig(sampling=SamplingConfig(max_tokens=8))
    made, decision = shop.run("generate", generate, {"policy": sft, "prompts": prompts})
    rows = [{"step": step, "values": {"generate/reward/mean": float(step)}} for step in range(3)]
    logged = attempts.metrics(shop.store.attempts(decision.key))
    logged.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ref, _ = shop.run("evaluate", EvaluateConfig(), {"generations": {"sft": made}})
    assert [path.name for path in (shop.store.path(ref) / "figures").iterdir()] == ["training_sft.png"]


def test_importing_the_configurations_imports_no_engine_and_no_plotting():
    program = (
        "import sys, stages.evaluate, stages.publish;"
        "print([m for m in ('torch', 'matplotlib', 'mlflow', 'ray', 'vllm', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def other_policy(folder: Path) -> Path:
    from rlhf_core.models.initialize import initialize_llama
    from tests.support.policies import SHAPE

    make_policy(folder)
    initialize_llama(SHAPE, folder, seed=8)
    return folder


def make_reward_model(shop: Workshop, policy: Path, folder: Path) -> Path:
    """A reward model whose head is drawn from a seed, with its contract."""
    from rlhf_core.interfaces import ModelSpec

    with shop.runtime.trainer("reward_model", ModelSpec(str(policy), "score", None, 3), None) as trainer:
        folder.mkdir()
        trainer.export(folder)
    probe = [[1, 2, 3], [4, 5, 6, 7]]
    with shop.runtime.trainer("reward_model", ModelSpec(str(folder), "score", None, 3), None) as trainer:
        scores = trainer.scores([tuple(ids) for ids in probe])
    contract = {"max_length": 64, "eos_token_id": 0, "probe": probe, "probe_scores": scores, "mean": 0.0, "std": 1.0}
    (folder / "contract.json").write_text(json.dumps(contract))
    return folder


def test_a_policy_whose_opponent_is_not_there_is_compared_with_the_reference():
    config = EvaluateConfig(parents={"sft": "base", "ppo": "champion", "dpo": "sft"}, best_of={"sft": 8, "dpo": 2})
    assert config.of(["base", "sft", "ppo"]) == EvaluateConfig(parents={"sft": "base"}, best_of={"sft": 8})
    assert config.of(["base", "sft", "ppo", "champion", "dpo"]) == config
