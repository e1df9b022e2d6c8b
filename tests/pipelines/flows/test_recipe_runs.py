"""Recipes in the shapes of published pipelines and imported scripts, run to their end with the engines of this process."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipelines.execution.executor import RunOptions, Tracker
from pipelines.execution.opening import open_run, open_tracker, store_of
from pipelines.execution.run import run_stages
from pipelines.flows.full import lifecycle
from pipelines.flows.profile import PipelineConfig, load_profile, parse, with_overrides
from pipelines.services.home import Home
from rlhf_contrib.openrlhf.translate import translate
from rlhf_core.data.tables import read_demonstrations, read_preferences
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.tracking.memory import MemoryTracker
from rlhf_core.types import ArtifactRef
from tests.support.listener import Notes
from tests.support.policies import make_policy, make_reward_model

BASE = """
name = "shapes"
[runtime]
type = "local"
trainer = {engine = "torch"}
sampler = {type = "hf"}
[prepare_data]
model = {type = "init", vocab_size = 400, hidden_size = 32, layers = 1, heads = 2, kv_heads = 2, intermediate_size = 64}
[prepare_data.data]
type = "mixed"
worlds = [
  {type = "support", demonstrations = 32, preferences = 32, prompts = 8, eval_demonstrations = 8, eval_preferences = 8, \
eval_prompts = 4},
  {type = "arithmetic", demonstrations = 16, preferences = 1, prompts = 8, eval_demonstrations = 8, \
eval_preferences = 1, eval_prompts = 4},
]
[evaluate]
generate = {samples_per_prompt = 2, sampling = {max_tokens = 8}}
evaluate = {gold = "rlhf_contrib.worlds.mixed:gold_reward"}
[recipe.sft]
stage = "sft"
policy = "base"
loop = {batch_size = 16}
"""
RM = """
[recipe.kind]
stage = "reward_model"
policy = "sft"
loop = {batch_size = 16}
"""
OPTIONS: dict[str, dict[str, Any]] = {
    "ppo": {
        "steps": 1,
        "prompts_per_step": 4,
        "samples_per_prompt": 2,
        "sampling": {"max_tokens": 8},
        "advantage": {"type": "rloo"},
        "entropy_coef": 0.1,
    },
    "sft": {"loop": {"batch_size": 4}},
    "generate": {"samples_per_prompt": 2, "sampling": {"max_tokens": 8}},
    "select": {"eval_fraction": 0, "drop_truncated": False},
    "dpo": {"loop": {"batch_size": 4}},
    "distill": {"on_policy": True, "sampling": {"max_tokens": 8}, "loop": {"batch_size": 4}},
}
"""Small sizes of the stages; what a step gives goes before. Entropy moves a policy that earns nothing yet, too."""
R1 = """
[recipe.reason]
stage = "ppo"
policy = "sft"
mixture = {arithmetic = 1.0}
rewards.terms.correct = {type = "function", function = "rlhf_contrib.worlds.arithmetic:exact_match"}
[recipe.rewrite]
stage = "rejection_sampling"
policy = "reason"
score.rewards.terms.finished = {type = "function", function = "rlhf_core.rewards.verifiable:finished"}
select.type = "best_of_n"
[recipe.align]
stage = "ppo"
policy = "rewrite"
reference = "sft"
rewards.terms.kind = {type = "reward_model", model = "kind", sources = ["support"]}
rewards.terms.correct = {type = "function", function = "rlhf_contrib.worlds.arithmetic:exact_match", \
sources = ["arithmetic"]}
"""
LLAMA = "".join(
    f"""
[recipe.best_{number}]
stage = "rejection_sampling"
policy = "{start}"
reward_models = ["kind"]
generate.round = {number}
select.type = "best_of_n"
[recipe.answers_{number}]
stage = "generate"
policy = "best_{number}"
[recipe.scored_{number}]
stage = "score"
generations = "answers_{number}"
reward_models = ["kind"]
[recipe.pairs_{number}]
stage = "select"
type = "pairs"
rollouts = "scored_{number}"
[recipe.dpo_{number}]
stage = "dpo"
policy = "best_{number}"
preferences = "pairs_{number}"
"""
    for number, start in ((1, "sft"), (2, "dpo_1"), (3, "dpo_2"))
)
SUMS = """
[recipe.sums]
stage = "ppo"
policy = "sft"
mixture = {arithmetic = 1.0}
rewards.terms.correct = {type = "function", function = "rlhf_contrib.worlds.arithmetic:exact_match"}
"""
DOMAINS = """
[recipe.form]
stage = "ppo"
policy = "sums"
rewards.terms.finished = {type = "function", function = "rlhf_core.rewards.verifiable:finished"}
[recipe.desk]
stage = "ppo"
policy = "form"
mixture = {support = 1.0}
reward_models = ["kind"]
"""
BRANCHES = """
[recipe.desk]
stage = "ppo"
policy = "sft"
mixture = {support = 1.0}
reward_models = ["kind"]
[recipe.student]
stage = "distill"
policy = "sft"
teachers = {sums = 1.0, desk = 1.0}
route = {sums = ["arithmetic"], desk = ["support"]}
[recipe.merged]
stage = "merge"
weights = {sums = 1.0, student = 1.0}
[publish]
policy = "student"
least_prompts = 4
gate = [{metric = "sources/arithmetic/tokens/mean", op = "<=", value = 8}]
[[gates]]
after = "evaluate"
metric = "policies/student/sources/support/gold/mean"
op = ">"
value = -100
least_prompts = 4
"""
DIFFICULTY = """
[recipe.tried]
stage = "generate"
policy = "sft"
[recipe.marked]
stage = "score"
generations = "tried"
rewards.terms.finished = {type = "function", function = "rlhf_core.rewards.verifiable:finished"}
[recipe.band]
stage = "select"
type = "prompts"
rollouts = "marked"
term = "finished"
low = 0
high = 0.9
[recipe.rl]
stage = "ppo"
policy = "sft"
prompts = "band"
order = "easy_first"
rewards.terms.finished = {type = "function", function = "rlhf_core.rewards.verifiable:finished"}
"""
JUDGE = """
[recipe.grader]
stage = "sft"
policy = "sft"
[recipe.tried]
stage = "generate"
policy = "sft"
[recipe.marked]
stage = "score"
generations = "tried"
rewards.terms.good = {good}
[recipe.pairs]
stage = "select"
type = "pairs"
rollouts = "marked"
[recipe.tuned]
stage = "dpo"
policy = "sft"
preferences = "pairs"
[recipe.best]
stage = "rejection_sampling"
policy = "tuned"
score.rewards.terms.good = {good}
select.type = "best_of_n"
[recipe.rl]
stage = "ppo"
policy = "best"
rewards.terms.good = {good}
""".replace(
    "{good}",
    '{type = "generative_reward_model", model = "grader", template = "{prompt} {completion} Is it good?"}',
)


def sized(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table of a step with small sizes."""
    if table.get("type") == "prompts":
        return table
    if table["stage"] == "rejection_sampling":
        parts = {part: OPTIONS[part] | table.get(part, {}) for part in ("generate", "select", "sft")}
        return {"score": {}, **table, **parts}
    return OPTIONS.get(table["stage"], {}) | table


def profile(*texts: str) -> dict[str, Any]:
    tree = tomllib.loads(BASE + "".join(texts))
    return tree | {"recipe": {name: sized(table) for name, table in tree["recipe"].items()}}


def run(
    home: Home, tree: dict[str, Any], *overrides: str, tracker: Tracker | None = None
) -> tuple[dict[str, ArtifactRef], dict[str, str], ArtifactStore]:
    """Run a profile; return the artifacts and the decisions by label, and the store."""
    return run_config(home, parse(with_overrides(tree, overrides), origin="recipe"), tracker=tracker)


def run_config(
    home: Home, config: PipelineConfig, *, tracker: Tracker | None = None
) -> tuple[dict[str, ArtifactRef], dict[str, str], ArtifactStore]:
    """Run a profile as it was read; return the same."""
    notes = Notes()
    with open_run(
        config, lifecycle, RunOptions(), home=home, tracker=tracker or MemoryTracker(), listener=notes
    ) as opened:
        results = run_stages(opened, lifecycle, opened.directly, tags={})
    decisions = {str(label): str(action) for label, action in notes.of("started")}
    return results, decisions, store_of(config, home)


SHAPES = {
    "R1: SFT, RL, rejection sampling, RL": (profile(RM, R1), ["base", "sft", "reason", "rewrite", "align"], 15),
    "Llama 3: rounds of rejection sampling and DPO": (
        profile(RM, LLAMA),
        ["base", "sft", "best_1", "dpo_1", "best_2", "dpo_2", "best_3", "dpo_3"],
        36,
    ),
    "RL in three domains": (profile(RM, SUMS, DOMAINS), ["base", "sft", "sums", "form", "desk"], 12),
    "prompts by difficulty": (profile(DIFFICULTY), ["base", "sft", "rl"], 10),
    "a policy judges": (profile(JUDGE), ["base", "sft", "grader", "tuned", "best", "rl"], 19),
    "specialists and merge": (profile(RM, SUMS, BRANCHES), ["base", "sft", "sums", "desk", "student", "merged"], 15),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_published_shape_runs_to_its_end_and_is_found_again(home, shape):
    tree, policies, stages = SHAPES[shape]
    results, decisions, store = run(home, tree)
    assert set(decisions.values()) == {"RUN"} and len(decisions) == stages, decisions
    report = json.loads((store.path(results["evaluate"]) / "report.json").read_text())
    assert report["order"] == policies
    assert len({row["digest"] for row in report["policies"].values()}) == len(policies), "every step has trained"
    assert all(set(row["sources"]) == {"support", "arithmetic"} for row in report["policies"].values())
    again, decisions, _ = run(home, tree)
    assert set(decisions.values()) == {"HIT"} and again == results


@pytest.mark.slow
def test_a_new_run_goes_on_from_the_champion_and_from_a_digest(home, monkeypatch):
    monkeypatch.setenv("RLHF_HOME", str(home.root))  # whose registry a plan reads
    first = profile('[publish]\nname = "desk"\nleast_prompts = 4\n')
    made, _, _ = run(home, first, tracker=open_tracker(parse(first, origin=""), home))
    later = {name: table for name, table in first.items() if name != "recipe"}
    later["evaluate"] = {**first["evaluate"], "evaluate": {**first["evaluate"]["evaluate"], "reference": "base"}}
    digest, loop = made["sft"].digest, {"batch_size": 4, "max_steps": 1}
    for policy, action in (("champion", "RUN"), (f"store:{digest[:12]}", "HIT"), ("models:/desk/1", "HIT")):
        later["recipe"] = {"more": {"stage": "sft", "policy": policy, "loop": loop}}
        tree = {name: table for name, table in later.items() if name != "publish" or policy == "champion"}
        results, decisions, _ = run(home, tree, tracker=open_tracker(parse(tree, origin=""), home))
        assert decisions["more"] == action, policy
        assert digest in results["more"].parents
    assert results["more"].digest != digest


# ---------------------------------------------------------------- imported scripts

IN_THIS_PROCESS = ('runtime.type="local"', 'runtime.trainer={engine="torch"}', 'runtime.sampler={type="hf"}')
OPENRLHF = "deepspeed --module openrlhf.cli."
PPO = "--advantage_estimator gae --vllm_num_engines 0 --rollout_batch_size 4 --train_batch_size 4 --max_samples 4"
PPO += " --prompt_max_len 32 --generate_max_len 8"
SMALL = "--max_len 64 --train_batch_size 4 --max_epochs 1"


def imported(folder: Path, script: str, *overrides: str) -> PipelineConfig:
    """Return the profile of a script of OpenRLHF in `folder`, with the engines of this process."""
    make_policy(folder / "base")
    made = translate(script, name="imported", template_file="imported.jinja")
    (folder / "imported.jinja").write_text(made.template)
    (folder / "imported.toml").write_text(made.profile)
    return load_profile(folder / "imported.toml", [*IN_THIS_PROCESS, *overrides])


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sums(first: int, count: int) -> list[dict[str, Any]]:
    return [
        {"input": f"{one} + 1?", "output": f"{one + 1}", "chosen": f"It is {one + 1}.", "rejected": "No."}
        for one in range(first, first + count)
    ]


@pytest.mark.slow
def test_long_documents_of_an_imported_command_are_trained_whole(home, tmp_path):
    write_rows(tmp_path / "texts.jsonl", [{"text": f"{one} " + "What is 12 + 30? " * 20} for one in range(6)])
    script = f"{OPENRLHF}train_sft --pretrain ./base --dataset ./texts.jsonl --input_key text --pretrain_mode {SMALL}"
    _, _, store = run_config(home, imported(tmp_path, script, "prepare_data.data.eval_fraction=0.01"))
    [record] = [record for record in store.records() if record.stage == "sft"]
    assert record.metrics["train_documents"] == 6 and record.metrics["train_samples"] > 12, record.metrics


@pytest.mark.slow
def test_adapters_of_an_imported_reward_model_and_of_the_value_model_that_starts_from_it_are_trained(home, tmp_path):
    write_rows(tmp_path / "train.jsonl", sums(0, 8))
    lora = "--lora_rank 4 --learning_rate 1e-3"
    pairs = f"--dataset ./train.jsonl --prompt_key input --chosen_key chosen --rejected_key rejected {SMALL} {lora}"
    script = f"""
{OPENRLHF}train_rm --pretrain ./base --save_path ./rm {pairs}
python -m openrlhf.cli.train_ppo_ray --pretrain ./base --reward_pretrain ./rm --prompt_data ./train.jsonl {PPO} --lora_rank 4
"""
    results, _, store = run_config(home, imported(tmp_path, script, "ppo.steps=1"))
    folder = store.path(results["reward_model"])
    assert not (folder / "adapter").exists() and (folder / "model.safetensors").is_file()
    assert (store.path(results["ppo"]) / "adapter/adapter_model.safetensors").is_file()
    base, made = (
        load_file(one / "model.safetensors") for one in (store.path(results["prepare_data"]) / "base", folder)
    )
    names = {name for name in base if name in made and not torch.equal(base[name], made[name])}
    assert names and all("proj" in name for name in names), "layers that are not adapted stay as they are"


@pytest.mark.slow
def test_the_value_model_of_an_imported_command_starts_from_a_reward_model_from_elsewhere(home, tmp_path):
    write_rows(tmp_path / "train.jsonl", sums(0, 8))
    (tmp_path / "reward.py").write_text(
        "def reward_func(queries, prompts, labels, **kwargs):\n    return {'rewards': [len(queries[0])]}\n"
    )
    folder = make_reward_model(tmp_path / "critic", make_policy(tmp_path / "base"), head="value")
    script = "python -m openrlhf.cli.train_ppo_ray --pretrain ./base --remote_rm_url ./reward.py --prompt_data ./train.jsonl "
    config = imported(tmp_path, f"{script} --critic_pretrain {folder} {PPO}", "ppo.steps=1")
    assert config.judge() == "", "the critic scores no answers"
    results, decisions, store = run_config(home, config)
    assert set(decisions) >= {"critic", "ppo"}
    assert results["critic"].digest in results["ppo"].parents
    assert (store.path(results["critic"]) / "contract.json").is_file()


@pytest.mark.slow
def test_rows_of_evaluation_files_are_those_that_imported_commands_evaluate(home, tmp_path):
    write_rows(tmp_path / "train.jsonl", sums(0, 8))
    write_rows(tmp_path / "test.jsonl", sums(100, 3))
    rows = "--dataset ./train.jsonl --eval_dataset ./test.jsonl"
    pairs = f"--pretrain ./sft --prompt_key input --chosen_key chosen --rejected_key rejected {rows} {SMALL}"
    script = f"""
{OPENRLHF}train_sft --pretrain ./base --save_path ./sft --output_key output {rows} {SMALL}
{OPENRLHF}train_rm --save_path ./rm {pairs}
{OPENRLHF}train_dpo --save_path ./dpo {pairs}
"""
    results, decisions, store = run_config(home, imported(tmp_path, script))
    assert {"sft", "reward_model", "dpo"} <= set(decisions)
    folder = store.path(results["prepare_data"])
    for table, read in (("demonstrations", read_demonstrations), ("preferences", read_preferences)):
        assert len(read(folder / table / "train.parquet")) == 8, "no row is held out of those to train on"
        assert len(read(folder / table / "eval.parquet")) == 3
    report = json.loads((store.path(results["reward_model"]) / "report.json").read_text())
    assert (report["pairs"], report["prompts"]) == (3, 3)
