"""The reward model tells good from bad, carries its contract, and loads with plain transformers."""

import json
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

import stages.compare_reward_models.run
import stages.reward_model.run
from rlhf_core.config.data import Suite
from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.config.models import LoraConfig
from rlhf_core.config.policy import LoopConfig
from rlhf_core.data.tables import Preference
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.evaluation.reward_report import SuiteRow, read_suite
from rlhf_core.interfaces import ModelSpec
from rlhf_core.rewards.model import Contract, verify_contract
from rlhf_core.runtime.local_runtime import LocalRuntime
from rlhf_core.types import Message, PolicyRef, TokenSample
from stages.compare_reward_models import CompareRewardModelsConfig
from stages.reward_model import Member, RewardModelConfig
from stages.reward_model.run import member_seed, without_fold
from stages.suites import suite_digests
from tests.support.policies import RUNTIME, SHAPE
from tests.support.tolerances import near, of_model
from tests.support.training import killed_and_resumed, preferences, thumbs
from tests.support.workshop import workshop

CONFIG = RewardModelConfig(
    max_length=48,
    loop=LoopConfig(batch_size=4, epochs=2, eval_every=8, checkpoint_every=3),
    optimizer=OptimizerConfig(learning_rate=3e-3),
)


def test_it_separates_the_pairs_and_transformers_returns_the_same_scores(tmp_path, policy):
    from transformers import AutoModelForSequenceClassification

    shop = workshop(tmp_path)
    inputs = {"policy": shop.store.external(PolicyRef, policy), "preferences": preferences(shop.store, tmp_path)}
    ref, decision = shop.run("reward_model", CONFIG, inputs)
    metrics = shop.metrics(decision)
    assert (metrics["eval/accuracy"], metrics["held_out/accuracy"]) == (1.0, 1.0)
    assert metrics["dropped_pairs"] == 0

    folder = shop.store.path(ref)
    contract = json.loads((folder / "contract.json").read_text())
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for ids, score in zip(contract["probe"], contract["probe_scores"], strict=True):
        with torch.no_grad():
            assert model(torch.tensor([ids])).logits.item() == near(score, of_model(SHAPE))


def test_probes_and_calibration_are_in_the_report_and_in_the_metrics(tmp_path, policy):
    shop = workshop(tmp_path)
    rows = preferences(shop.store, tmp_path, 20, held_out=20, prompts=20)
    inputs = {"policy": shop.store.external(PolicyRef, policy), "preferences": rows}
    config = CONFIG.model_copy(update={"probe_answers": 5, "max_length": 256})
    ref, decision = shop.run("reward_model", config, inputs)
    report = json.loads((shop.store.path(ref) / "report.json").read_text())
    metrics = shop.metrics(decision)
    refused = report["probes"]["refusal/instead"]
    assert report["probes"]["answers"] == refused["answers"] == 5
    assert metrics["probes/refusal/instead"] == pytest.approx(refused["effect"]) and refused["low"] <= refused["effect"]
    assert "not_applicable" in report["probes"]["position"]
    assert metrics["held_out/temperature"] == pytest.approx(report["calibration"]["temperature"])
    assert report["calibration"]["pairs"] == report["calibration"]["fitted_pairs"] == 10


def test_the_report_tells_the_sources_apart(tmp_path, policy):
    shop = workshop(tmp_path)
    rows = preferences(shop.store, tmp_path, 8, held_out=5, sources=("forum", "shop"))
    inputs = {"policy": shop.store.external(PolicyRef, policy), "preferences": rows}
    ref, _ = shop.run("reward_model", CONFIG, inputs)
    slices = json.loads((shop.store.path(ref) / "report.json").read_text())["slices"]
    counts = {name: row["pairs"] for name, row in slices.items() if name.startswith("source: ")}
    assert counts == {"source: forum": 3, "source: shop": 2}


@pytest.mark.parametrize("held_out", [0, 1])
def test_few_held_out_pairs_do_not_end_the_stage(tmp_path, policy, held_out):
    shop = workshop(tmp_path)
    rows = preferences(shop.store, tmp_path, 4, held_out=held_out)
    inputs = {"policy": shop.store.external(PolicyRef, policy), "preferences": rows}
    _, decision = shop.run("reward_model", CONFIG, inputs)
    assert ("held_out/accuracy" in shop.metrics(decision)) == (held_out > 0)


def test_single_answers_are_refused_before_any_model_is_loaded(tmp_path, policy):
    shop = workshop(tmp_path, runtime=None)
    inputs = {"policy": shop.store.external(PolicyRef, policy), "preferences": thumbs(shop.store, tmp_path)}
    with pytest.raises(DataError, match=r"reward_model\.preferences = 0.*the data has 6 single labeled answers.*'kto'"):
        shop.run("reward_model", CONFIG, inputs)


@pytest.mark.full
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_a_killed_run_ends_with_the_same_weights(tmp_path, policy, lora):
    weights, config = [], CONFIG.model_copy(update={"lora": lora})
    for name in ("whole", "killed"):
        shop = workshop(tmp_path / name)
        inputs = {
            "policy": shop.store.external(PolicyRef, policy),
            "preferences": preferences(shop.store, tmp_path / name),
        }
        made = shop.run("reward_model", config, inputs)[0] if name == "whole" else None
        ref = made or killed_and_resumed(shop, "reward_model", config, inputs, at=8)
        weights.append((shop.store.path(ref) / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_merged_adapters_give_the_scores_of_the_contract_in_bfloat16_too(tmp_path, policy):
    runtime = RUNTIME.model_copy(update={"trainer": TrainerConfig(engine="torch", dtype="bfloat16")})
    shop = workshop(tmp_path, runtime=LocalRuntime(runtime))
    inputs = {"policy": shop.store.external(PolicyRef, policy), "preferences": preferences(shop.store, tmp_path)}
    ref, _ = shop.run("reward_model", CONFIG.model_copy(update={"lora": LoraConfig(rank=4)}), inputs)
    folder = shop.store.path(ref)
    with shop.runtime.trainer("reward_model", ModelSpec(str(folder), "score", None, 0), None) as trainer:
        verify_contract(trainer, Contract.read(folder))


def test_an_average_of_weights_is_refused_since_the_contract_is_of_the_weights():
    with pytest.raises(ValidationError, match=r"optimizer\.ema_decay = 0\.9: the report and the probe scores"):
        RewardModelConfig.model_validate({"optimizer": {"ema_decay": 0.9}})


def test_a_sequence_is_scored_where_its_answer_ends():
    # a template that writes a newline (9) after the end of the turn (2): sampled answers end at 2
    assert TokenSample((5, 6, 7, 2, 9), (0, 0, 1, 1, 0)).until_trained() == (5, 6, 7, 2)


def test_suites_are_scored_by_subset_and_their_content_is_in_the_key(tmp_path, policy):
    path = tmp_path / "suite.jsonl"
    row = {"prompt": "Hi", "chosen": "Hello.", "rejected": "No.", "subset": "chat"}
    path.write_text(json.dumps(row) + "\n")
    config = CONFIG.model_copy(update={"suites": {"rb": Suite(path=str(path))}})
    planned = suite_digests(config)
    shop = workshop(tmp_path)
    inputs = {"policy": shop.store.external(PolicyRef, policy), "preferences": preferences(shop.store, tmp_path, 4)}
    ref, decision = shop.run("reward_model", config, inputs, files=planned)
    report = json.loads((shop.store.path(ref) / "suites.json").read_text())
    assert report["rb"]["subsets"]["chat"]["rows"] == 1
    assert shop.metrics(decision)["suites/rb/chat/accuracy"] == report["rb"]["accuracy"]
    path.write_text(json.dumps(row | {"chosen": "Hey."}) + "\n")
    assert suite_digests(config) != planned
    with pytest.raises(ConfigError, match=r"suites.rb.*has changed since the run was planned"):
        shop.run("reward_model", config.model_copy(update={"max_length": 40}), inputs, files=planned)
    with pytest.raises(ConfigError, match="is not a file; give a local file"):
        suite_digests(CONFIG.model_copy(update={"suites": {"rb": Suite(path=str(tmp_path / "none.jsonl"))}}))


def test_a_suite_that_changes_while_it_is_read_is_refused(tmp_path, policy, monkeypatch):
    path = tmp_path / "suite.jsonl"
    planned_text = json.dumps({"prompt": "Hi", "chosen": "Hello.", "rejected": "No."}) + "\n"
    path.write_text(planned_text)
    suites = {"rb": Suite(path=str(path))}
    planned = suite_digests(CONFIG.model_copy(update={"suites": suites}))

    def other_rows(name: str, suite: Suite) -> list[SuiteRow]:
        path.write_text(planned_text.replace("Hello", "Hey"))
        rows = read_suite(name, suite)
        path.write_text(planned_text)
        return rows

    shop = workshop(tmp_path)
    inputs = {"policy": shop.store.external(PolicyRef, policy), "preferences": preferences(shop.store, tmp_path, 4)}
    for stage in (stages.reward_model.run, stages.compare_reward_models.run):
        monkeypatch.setattr(stage, "read_suite", other_rows)
    changed = r"suites.rb.path = .*suite.jsonl': changed while it was read; run again when no other process"
    with pytest.raises(ConfigError, match=changed):
        shop.run("reward_model", CONFIG.model_copy(update={"suites": suites}), inputs, files=planned)
    with pytest.raises(ConfigError, match=changed):
        stages.compare_reward_models.run.run(
            CompareRewardModelsConfig(suites=suites),
            reward_models={},
            preferences=None,
            context=SimpleNamespace(files=planned),
        )


def pair(number: int) -> Preference:
    turns = (Message("user", f"question {number}"),), (Message("assistant", "A"),), (Message("assistant", "B"),)
    return Preference(f"p{number}", *turns, 0.0, "s")


def test_members_by_folds_leave_out_each_prompt_once_and_members_by_seeds_none():
    rows = [pair(number) for number in range(90)]
    folds = [CONFIG.model_copy(update={"member": Member(number=n, of=3, by="folds")}) for n in (1, 2, 3)]
    left_out = [{row.id for row in rows} - {row.id for row in without_fold(rows, config)} for config in folds]
    assert set.union(*left_out) == {row.id for row in rows} and sum(map(len, left_out)) == 90
    assert all(15 < len(fold) < 45 for fold in left_out)
    seeds = CONFIG.model_copy(update={"member": Member(number=1, of=3)})
    assert without_fold(rows, seeds) == without_fold(rows, CONFIG) == rows
    assert len({member_seed(config, 17) for config in (CONFIG, *folds)}) == 4 and member_seed(CONFIG, 17) == 17


def test_a_member_is_one_of_them():
    with pytest.raises(ValidationError, match="number = 4: there are 3 members; give one of 1 to 3"):
        Member(number=4, of=3)
