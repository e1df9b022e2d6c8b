"""The profiles of published pipelines: which node reads what, with which shares, and three of them to the end."""

from functools import cache

import pytest

from pipelines.execution.executor import RunOptions
from pipelines.execution.opening import open_run
from pipelines.execution.plan import all_specs
from pipelines.execution.run import run_stages
from pipelines.flows.full import graph, lifecycle
from pipelines.flows.nodes import listed
from pipelines.flows.profile import load_profile, profile_names
from rlhf_core.tracking.memory import MemoryTracker
from tests.support.listener import Notes

REPORTS = [name for name in profile_names() if name.startswith("reports/")]
READS = [
    # profile, node, the names of one of its inputs, options
    (
        "deepseek_r1",
        "cold_start/demonstrations",
        ["readable", "demonstrations"],
        {"shares": {"readable": 1.0, "demonstrations": 4.0}, "sources": ("arithmetic",)},
    ),
    ("deepseek_r1", "zero_answers/prompts", ["prompts"], {"sources": ("arithmetic",)}),
    (
        "deepseek_r1",
        "second_sft/demonstrations",
        ["right", "general"],
        {"shares": {"right": 3.0, "general": 1.0}, "stopping_strategy": "all_exhausted"},
    ),
    (
        "llama3",
        "llama/round_4/reward_model/preferences",
        ["preferences", "llama/round_1/pairs", "llama/round_2/pairs", "llama/round_3/pairs"],
        {},
    ),
    (
        "llama3",
        "llama/round_6/best",
        ["llama/round_6/scored", "llama/round_5/scored", "llama/round_6/expert_scored"],
        {"type": "best_of_n"},
    ),
    ("llama3", "llama/round_1/pairs", ["llama/round_1/scored", "first_scored"], {"across": "policies"}),
    ("llama3", "llama/round_4/dpo", ["llama/round_4/pairs"], {"nll_coef": 0.2}),  # the newest pairs alone
    ("llama3", "llama/round_4/expert_answers", ["capability"], {}),
    ("llama3", "llama/round_4/expert_answers/prompts", ["prompts"], {"sources": ("arithmetic",)}),
    (
        "llama3",
        "llama/round_2/sft/demonstrations",
        ["llama/round_2/best", "llama/round_1/best", "demonstrations"],
        {"shares": {"best": 4.0, "previous.best": 1.0, "demonstrations": 2.0}},
    ),
    ("tulu3", "sft/demonstrations", ["demonstrations"], {"mixture": {"arithmetic": 0.6, "support": 0.4}}),
    ("tulu3", "pool", ["judged", "desk_judged", "sums_judged"], {"across": "policies", "rule": "max_random"}),
    ("tulu3", "pairs", ["pool", "preferences"], {"kind": "preferences", "shares": {}}),
    ("tulu3", "rlvr/prompts", ["prompts"], {"kind": "prompts", "sources": ("arithmetic",)}),
    ("olmo3", "delta", ["big_scored", "small_scored"], {"chosen": "big", "rejected": "small"}),
    ("olmo3", "dpo/preferences", ["delta", "preferences"], {"shares": {"delta": 2.0, "preferences": 1.0}}),
    (
        "qwen3",
        "fusion/demonstrations",
        ["thinking", "plain"],
        {"chat_template_kwargs": {"arithmetic": {"enable_thinking": True}, "support": {"enable_thinking": False}}},
    ),
    (
        "smollm3",
        "sft/demonstrations",
        ["demonstrations"],
        {
            "mixture": {"arithmetic": 0.5, "support": 0.5},
            "chat_template_kwargs": {"arithmetic": {"enable_thinking": True}, "support": {"enable_thinking": False}},
        },
    ),
    ("nemotron3", "sums_sft/demonstrations", ["demonstrations"], {"sources": ("arithmetic",)}),
    ("nemotron3", "sums_answers/prompts", ["prompts"], {"sources": ("arithmetic",)}),
    ("nemotron3", "warm/demonstrations", ["sums_answers", "desk_answers"], {"shares": {}}),
    ("kimi_k2", "rl/prompts", ["moderate", "desk"], {"kind": "prompts"}),
    ("kimi_k2", "sft/demonstrations", ["demonstrations", "kept"], {"shares": {"demonstrations": 1.0, "kept": 1.0}}),
    ("mimo_v2", "desk_sft/demonstrations", ["demonstrations"], {"sources": ("support",)}),
]


@cache
def nodes_of(profile):
    return {node.label: node for node in graph(load_profile(f"reports/{profile}"))}


@pytest.mark.parametrize("profile", REPORTS)
def test_a_report_is_planned(profile):
    config = load_profile(profile)
    assert [node.label for node in graph(config)] == list(all_specs(config, lifecycle))


@pytest.mark.parametrize(("profile", "label", "read", "options"), READS, ids=lambda value: str(value)[:40])
def test_a_node_reads_the_rows_of_the_report(profile, label, read, options):
    node = nodes_of(profile)[label]
    assert read in [listed(names) for names in node.inputs.values()]
    assert {name: getattr(node.config, name) for name in options} == options


@pytest.mark.parametrize(
    ("profile", "step", "changes"),
    [
        ("deepseek_r1", "r1", [({"arithmetic": 1.0}, None, None), ({"arithmetic": 0.5, "support": 0.5}, None, 0.7)]),
        ("olmo3", "rlvr", [({}, 24, None), ({}, 32, None)]),
        (
            "nemotron3",
            "rlvr",
            [({"arithmetic": 0.25, "support": 0.75}, 24, None), ({"arithmetic": 0.75, "support": 0.25}, 32, None)],
        ),
        ("kimi_k2", "rl", [({}, None, 1.0), ({}, None, 0.8), ({}, None, 0.6)]),
    ],
)
def test_a_policy_optimization_has_the_schedule_of_the_report(profile, step, changes):
    parts = load_profile(f"reports/{profile}").recipe[step].schedule
    assert [(part.mixture, part.sampling.max_tokens, part.sampling.temperature) for part in parts] == changes


def test_the_soup_of_smollm3_is_of_the_checkpoints_of_its_preference_optimization():
    found = nodes_of("smollm3")
    assert list(found["soup"].inputs["policies"]) == ["apo_3", "apo_6", "apo"]
    assert found["mid"].inputs["demonstrations"] == "traces.demonstrations"
    assert found["smollm3"].config.weights == {"soup": 0.9, "mid": 0.1}


def test_the_student_of_deepseek_r1_has_another_base():
    found = nodes_of("deepseek_r1")
    assert found["student"].inputs["policy"] == "other.base"
    assert found["student/demonstrations"].config.shares == {"right": 3.0, "general": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    # The second round is the first that reads what a round has made; `READS` has the later ones of six.
    [("deepseek_r1", []), ("llama3", ["rounds.llama.count=2"]), ("tulu3", [])],
    ids=["deepseek_r1", "llama3", "tulu3"],
)
def test_a_report_runs_to_the_end(name, changes, home):
    config, notes = load_profile(f"reports/{name}", changes), Notes()
    with open_run(config, lifecycle, RunOptions(), home=home, tracker=MemoryTracker(), listener=notes) as opened:
        run_stages(opened, lifecycle, opened.directly, tags={})
    assert [label for label, _ in notes.of("started")] == [node.label for node in graph(config)]
