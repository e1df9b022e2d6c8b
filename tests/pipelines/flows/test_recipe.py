"""Recipes: steps by name and their inputs, and the sections of a profile as shorthand for them."""

import re
import tomllib
from typing import Any

import pytest

from pipelines.execution.plan import all_specs, placeholder, plan_stages
from pipelines.flows.checks import warn_unread
from pipelines.flows.full import lifecycle
from pipelines.flows.graph import Stages
from pipelines.flows.nodes import PARTS
from pipelines.flows.profile import load_profile, parse, shipped_profiles, with_overrides
from pipelines.flows.prompt_sources import data_sources
from pipelines.flows.recipe import drawn
from rlhf_contrib.worlds.mixed import make_world
from rlhf_core.config.data import ArithmeticWorld, InstructionsWorld, SupportWorld
from rlhf_core.errors import ConfigError
from rlhf_core.schema.base import keyed
from rlhf_core.stage.key import StageSpec
from rlhf_core.stage.run import execute
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import Message, PolicyRef, Prompt
from tests.support.toy_stage import NoEngines, RecordingTracker, ToyConfig, stage_key, toy_spec

MODELS = {"reward_models": ["reward_model"]}


def as_recipe() -> dict[str, Any]:
    """Return tiny/full with its sections written as steps, the last one first."""
    tree = tomllib.loads((shipped_profiles() / "tiny/full.toml").read_text(encoding="utf-8"))
    inputs: dict[str, dict[str, Any]] = {
        "ppo": {"policy": "iterative_dpo", **MODELS},
        "iterative_dpo": {"policy": "sft", **MODELS},
        "rejection_sampling": {"policy": "sft", "prompts": "prepare_data.prompts", **MODELS},
        "reward_model": {"policy": "sft"},
        "sft": {"policy": "base"},
    }
    sections = {name: tree.pop(name) for name in inputs}
    for table in sections.values():
        table.pop("start_from", None)
    tree["recipe"] = {name: {"stage": name, **sections[name], **given} for name, given in inputs.items()}
    return tree


def specs(tree: dict[str, Any], *overrides: str) -> dict[str, StageSpec]:
    return all_specs(parse(with_overrides(tree, overrides), origin="recipe"), lifecycle)


def read(spec: StageSpec, name: str) -> Any:
    found = spec.inputs[name]
    return {key: ref.uri for key, ref in found.items()} if isinstance(found, dict) else found.uri  # type: ignore[union-attr]


def small(**steps: dict[str, Any]) -> dict[str, Any]:
    """Return a profile of tiny/full's data with the steps of a recipe."""
    tree = tomllib.loads((shipped_profiles() / "tiny/full.toml").read_text(encoding="utf-8"))
    loop = {"sft": {"loop": {"batch_size": 4}}, "dpo": {}, "reward_model": {}}
    return {
        **{name: tree[name] for name in ("name", "runtime", "prepare_data")},
        "recipe": {name: loop.get(step.get("stage", ""), {}) | step for name, step in steps.items()},
    }


VERDICT = {"type": "generative_reward_model", "template": "{prompt} {completion} Good?"}
SUM = {"type": "function", "function": "rlhf_core.rewards.library.math:math_reward"}
PPO: dict[str, Any] = {
    "stage": "ppo",
    "steps": 2,
    "samples_per_prompt": 4,
    "advantage": {"type": "rloo"},
    "rewards": {"terms": {"correct": SUM}},
}
OWN: dict[str, Any] = {"generate": {"samples_per_prompt": 2}, "score": {}}
TOOLS = {"type": "tools", "tools": ["rlhf_core.rewards.library.math:math_reward"], "sources": ["sums"]}
REJECTION: dict[str, Any] = {"stage": "rejection_sampling", **OWN, "select": {"type": "best_of_n"}, "sft": {}}


def test_a_lifecycle_written_as_a_recipe_has_the_same_stages_and_keys():
    ours, theirs = specs(as_recipe()), all_specs(load_profile("tiny/full"), lifecycle)
    assert set(ours) == set(theirs) and len(ours) == 23
    for label, spec in ours.items():
        other = theirs[label]
        assert stage_key(spec) == stage_key(other), label
        assert keyed(spec.config) == keyed(other.config), label
        assert (spec.inputs, spec.engines, spec.seed) == (other.inputs, other.engines, other.seed), label


def test_the_shapes_of_published_recipes_can_be_written():
    r1 = small(
        cold_start={"stage": "sft", "policy": "base"},
        reason={**PPO, "policy": "cold_start"},
        rewrite={**REJECTION, "policy": "reason", "score": {"rewards": {"terms": {"correct": SUM}}}},
        align={**PPO, "policy": "rewrite", "reference": "cold_start", "kl": {"coef": 0.1}},
    )
    found = specs(r1)
    assert list(found)[1:] == [
        "cold_start",
        "reason",
        "rewrite/generate",
        "rewrite/score",
        "rewrite/select",
        "rewrite/sft",
        "align",
    ]
    assert read(found["align"], "policy") == "pending://rewrite/sft"
    assert read(found["align"], "reference") == "pending://cold_start"
    rounds: dict[str, dict[str, Any]] = {
        "sft": {"stage": "sft", "policy": "base"},
        "rm": {"stage": "reward_model", "policy": "sft"},
    }
    start = "sft"
    for number in (1, 2, 3):
        best, pairs = f"best_{number}", f"dpo_{number}"
        rounds[best] = {**REJECTION, "policy": start, "reward_models": ["rm"]}
        rounds[pairs] = {"stage": "dpo", "policy": best}
        start = pairs
    llama = specs(small(**rounds))
    assert read(llama["best_3/score"], "reward_models") == {"reward_model": "pending://rm"}
    assert (
        read(llama["dpo_3"], "policy") == "pending://best_3/sft"
        and read(llama["best_3/generate"], "policy") == "pending://dpo_2"
    )
    branches = small(
        soup={"stage": "merge", "weights": {"math": 1.0, "desk": 1.0}, "method": {"type": "ties"}, "base": "base"},
        distilled={"stage": "distill", "policy": "base", "teachers": {"math": 1.0, "desk": 2.0}},
        math={**PPO, "policy": "base"},
        desk={**PPO, "policy": "base", "steps": 3},
    )
    assert list(specs(branches))[1:] == ["math", "desk", "soup", "distilled"]
    assert read(specs(branches)["soup"], "policies") == {"math": "pending://math", "desk": "pending://desk"}
    assert read(specs(branches)["distilled"], "teachers") == {"math": "pending://math", "desk": "pending://desk"}


def test_answers_are_sampled_scored_and_selected_step_by_step():
    found = specs(
        small(
            sft={"stage": "sft", "policy": "base"},
            answers={"stage": "generate", "policy": "sft", "samples_per_prompt": 4},
            scored={"stage": "score", "generations": "answers", "rewards": {"terms": {"correct": SUM}}},
            pairs={"stage": "select", "type": "pairs", "rollouts": "scored"},
            dpo={"stage": "dpo", "policy": "sft", "preferences": "pairs"},
            hard={"stage": "select", "type": "prompts", "term": "correct", "rollouts": "scored"},
            ppo={**PPO, "policy": "dpo", "prompts": "hard"},
        )
    )
    assert list(found)[1:] == ["sft", "answers", "scored", "pairs", "dpo", "hard", "ppo"]
    assert read(found["dpo"], "preferences") == "pending://pairs" and read(found["ppo"], "prompts") == "pending://hard"


def test_policy_optimization_may_learn_from_teachers_alone_in_a_recipe_and_as_a_section():
    taught = {"steps": 2, "kl": {"coef": 0.0}, "distill": {"teachers": {"one": 1.0}}}
    one = {"one": {"stage": "sft", "policy": "base"}}
    tree = small(**one, student={"stage": "ppo", "policy": "base", **taught}) | {
        "ppo": {"start_from": "base", **taught}
    }
    found = specs(tree)
    assert found["student"].inputs.keys() == {"policy", "reference", "prompts", "reward_models", "teachers"}
    assert read(found["student"], "teachers") == read(found["ppo"], "teachers") == {"one": "pending://one"}
    assert keyed(found["student"].config)["rewards"]["terms"] == {}
    with pytest.raises(ConfigError, match=r"ppo\.distill\.teachers\.one = 'one': there is no such step"):
        parse(small() | {"ppo": tree["ppo"]}, origin="")
    with pytest.raises(ConfigError, match=r"recipe\.a\.rewards\.terms = \{\}: there is nothing to score with"):
        specs(small(a={"stage": "score", "generations": "b", "rewards": {"terms": {}}}))


def test_a_policy_of_a_step_or_of_a_section_judges_answers():
    """Which is an edge of the graph: it comes first, is in the key, and is no successor of what it judges."""
    judged = {"rewards": {"terms": {"j": VERDICT | {"model": "grader"}}}}
    steps = {
        "rl": {**PPO, "policy": "sft", **judged},
        "tried": SAMPLED,
        "marked": {"stage": "score", "generations": "tried", **judged},
        "best": {
            "stage": "rejection_sampling",
            "policy": "sft",
            "generate": {},
            "score": judged,
            "select": {},
            "sft": SFT_LOOP,
        },
        "sft": {"stage": "sft", "policy": "base"},
        "grader": {"stage": "sft", "policy": "sft"},
        "old": {**PPO, "policy": "sft", "rewards": {"terms": {"j": VERDICT | {"model": "store:0123456789ab"}}}},
    }
    steps["best"]["select"] = {"type": "best_of_n"}
    found = specs(small(**steps))
    for label in ("rl", "marked", "best/score"):
        assert read(found[label], "reward_models") == {"grader": "pending://grader"}, label
    assert list(found).index("grader") < list(found).index("rl")
    assert isinstance(found["old"].inputs["reward_models"]["store:0123456789ab"], PolicyRef)  # type: ignore[index]
    tree = tomllib.loads((shipped_profiles() / "tiny/full.toml").read_text(encoding="utf-8"))
    tree["ppo"]["rewards"] = {"terms": {"j": VERDICT | {"model": "sft"}, "rm": {"type": "reward_model"}}}
    models = {"reward_model": "pending://reward_model", "sft": "pending://sft"}
    assert read(specs(tree)["ppo"], "reward_models") == models


def test_synthesized_rows_are_demonstrations_or_prompts_of_other_steps():
    page = (shipped_profiles().parent / "docs/stages.md").read_text(encoding="utf-8")
    written = tomllib.loads(re.findall(r"```toml\n(.*?)```", page, re.DOTALL)[0])["recipe"]
    tree = small(
        **written,
        a={"stage": "sft", "policy": "base", "demonstrations": "revised"},
        b={**PPO, "policy": "a", "prompts": "harder"},
    )
    found = specs(tree)
    assert found["revised"].inputs.keys() == {"prompts"} and found["harder"].inputs.keys() == {"prompts", "policy"}
    assert (
        read(found["a"], "demonstrations") == "pending://revised" and read(found["b"], "prompts") == "pending://harder"
    )
    with pytest.raises(
        ConfigError, match=r"a\.demonstrations = 'harder': is prompts, and demonstrations must be demonst"
    ):
        specs(tree, "recipe.a.demonstrations=harder")


def test_a_step_of_a_recipe_may_read_a_section_and_is_compared_with_its_start():
    tree = tomllib.loads((shipped_profiles() / "tiny/full.toml").read_text(encoding="utf-8"))
    tree["recipe"] = {"polish": {"stage": "sft", "policy": "ppo", "loop": {"batch_size": 4}}}
    del tree["publish"]
    found = specs(tree, "recipe.polish.max_length=64")
    assert found["polish"].config.model_dump()["max_length"] == 64
    assert found["evaluate"].config.model_dump()["parents"]["polish"] == "ppo"
    assert parse(tree, origin="").published() == "polish"


def test_what_the_evaluation_has_on_a_removed_step_goes_with_it():
    tree = as_recipe()
    loop = tomllib.loads((shipped_profiles() / "tiny/online.toml").read_text(encoding="utf-8"))["online"]
    del tree["publish"], loop["start_from"]
    tree["recipe"]["loop"] = {"stage": "online", "policy": "sft", **loop}
    tree["evaluate"]["evaluate"]["parents"] |= {"loop_2": "loop_1", "ppo": "iterative_dpo"}
    tree["evaluate"]["evaluate"]["best_of"] = {"ppo": 1, "sft": 8}
    fewer = parse(with_overrides(tree, ["recipe.loop.rounds=1", "recipe.ppo=none"]), origin="")
    assert fewer.evaluate is not None and "ppo" not in fewer.evaluate.evaluate.parents
    assert fewer.evaluate.evaluate.best_of == {"sft": 8}
    none = parse(with_overrides(tree, ["recipe.loop=none"]), origin="").evaluate
    assert none is not None and "loop_2" not in none.evaluate.parents and "ppo" in none.evaluate.parents
    with pytest.raises(
        ConfigError, match=r"parents\.pppo = 'pppo': this profile makes no such policy; did you mean ppo"
    ):
        parse(with_overrides(tree, ["evaluate.evaluate.parents.pppo=sft"]), origin="")
    with pytest.raises(ConfigError, match=r"parents\.ppo = 'iterative_dpo': this profile makes no such policy"):
        parse(with_overrides(tree, ["recipe.iterative_dpo=none", "recipe.ppo.policy=sft"]), origin="")


RECIPE_ERRORS: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "unknown input": (
        {"a": {"stage": "sft", "policy": "bse"}},
        r"recipe\.a\.policy = 'bse': there is no such step; did you mean base\?",
    ),
    "another kind": (
        {"a": {"stage": "sft", "policy": "base"}, "b": {"stage": "dpo", "policy": "a", "preferences": "a"}},
        r"recipe\.b\.preferences = 'a': is a policy, and preferences must be preferences; name one of preferences",
    ),
    "cycle": (
        {
            "a": {"stage": "sft", "policy": "b"},
            "b": {"stage": "sft", "policy": "c"},
            "c": {"stage": "sft", "policy": "a"},
        },
        r"recipe\.\w = \{\.\.\.\}: \w -> \w -> \w -> \w is a cycle; change an input",
    ),
    "itself": ({"a": {"stage": "sft", "policy": "a"}}, r"recipe\.a = \{\.\.\.\}: a -> a is a cycle"),
    "removal as a name": ({"none": {"stage": "sft", "policy": "base"}}, r"recipe\.none = .*another meaning"),
    "spaces in a name": (
        {"a b": {"stage": "sft", "policy": "base"}},
        r"recipe\.a b = \{\.\.\.\}: a name has letters, digits, _ and -",
    ),
    "reserved name": ({"base": {"stage": "sft", "policy": "base"}}, r"recipe\.base = .*another meaning"),
    "no such stage": (
        {"a": {"stage": "sfft", "policy": "base"}},
        r"recipe\.a\.stage = 'sfft': there is no such stage; did you mean",
    ),
    "no stage": (
        {"a": {"policy": "base"}},
        r"recipe\.a\.stage: missing, and it has no default; choose one of .*import_policy",
    ),
    "no policy": ({"a": {"stage": "sft"}}, r"recipe\.a\.policy: missing"),
    "empty policy": ({"a": {"stage": "sft", "policy": ""}}, r"recipe\.a\.policy = '': names no input"),
    "unknown option": (
        {"a": {"stage": "sft", "policy": "base", "max_lenght": 3}},
        r"recipe\.a\.max_lenght = 3: unknown key; did you mean recipe\.a\.max_length\?",
    ),
    "option of a nested table": (
        {"a": {"stage": "sft", "policy": "base", "loop": {"batchsize": 3}}},
        r"recipe\.a\.loop\.batchsize = 3: unknown key; did you mean recipe\.a\.loop\.batch_size\?",
    ),
    "no such reward model": (
        {"a": {**PPO, "policy": "base", "rewards": {"terms": {"m": {"type": "reward_model", "model": "rm"}}}}},
        r"recipe\.a\.reward_models = 'rm': there is no such step",
    ),
    "a judge that there is not": (
        {"a": {**PPO, "policy": "base", "rewards": {"terms": {"j": VERDICT | {"model": "bse"}}}}},
        r"recipe\.a\.reward_models = 'bse': there is no such step; did you mean base\?",
    ),
    "a judge that is a reward model": (
        {
            "a": {**PPO, "policy": "base", "rewards": {"terms": {"j": VERDICT | {"model": "r"}}}},
            "r": {"stage": "reward_model", "policy": "base"},
        },
        r"recipe\.a\.reward_models = 'r': is a reward model, and reward_models must be a policy; name one of base",
    ),
    "a reward model that is a policy": (
        {"a": {**PPO, "policy": "base", "rewards": {"terms": {"m": {"type": "reward_model", "model": "base"}}}}},
        r"recipe\.a\.reward_models = 'base': is a policy, and reward_models must be a reward model; add such a step",
    ),
    "a judge of itself": (
        {"a": {**PPO, "policy": "base", "rewards": {"terms": {"j": VERDICT | {"model": "a"}}}}},
        r"recipe\.a = \{\.\.\.\}: a -> a is a cycle",
    ),
    "teacher and teachers": (
        {
            "a": {"stage": "distill", "policy": "base", "teacher": "t", "teachers": {"t": 1.0}},
            "t": {"stage": "sft", "policy": "base"},
        },
        r"recipe\.a\.teacher = 't': is not read beside teachers",
    ),
    "policy optimization with a teacher that there is not": (
        {
            "a": {**PPO, "policy": "base", "kl": {"coef": 0.0}, "distill": {"teachers": {"sfft": 1.0}}},
            "sft": {"stage": "sft", "policy": "base"},
        },
        r"recipe\.a\.distill\.teachers\.sfft = 'sfft': there is no such step; did you mean sft\?",
    ),
    "critic of no value model": (
        {"a": {**PPO, "policy": "base", "critic": "base"}},
        r"recipe\.a\.critic = 'base': there is no value model that could start from it; remove it, or set advantage",
    ),
    "critic that is no model": (
        {"a": {**PPO, "policy": "base", "advantage": {"type": "gae"}, "critic": "prompts"}},
        r"recipe\.a\.critic = 'prompts': is prompts, and critic must be a model; name one of base",
    ),
    "merge without a base": (
        {
            "s": {"stage": "merge", "weights": {"base": 1.0, "a": 1.0}, "method": {"type": "ties"}},
            "a": {"stage": "sft", "policy": "base"},
        },
        r"recipe\.s\.base = '': names no input; name a step",
    ),
    "weight of no step": (
        {"s": {"stage": "merge", "weights": {"base": 1.0, "bse": 1.0}}},
        r"recipe\.s\.weights\.bse = 'bse': there is no such step; did you mean base\?",
    ),
    "unread reference": (
        {
            "a": {**PPO, "policy": "base", "reference": "sfft", "kl": {"coef": 0.0}},
            "sft": {"stage": "sft", "policy": "base"},
        },
        r"recipe\.a\.reference = 'sfft': there is no such step; did you mean sft\?",
    ),
    "no demonstrations": (
        {"a": {"stage": "sft", "policy": "base", "demonstrations": ""}},
        r"recipe\.a\.demonstrations = '': names no input",
    ),
    "select without a type": (
        {"a": {"stage": "select", "rollouts": "b"}},
        r"recipe\.a\.type: missing, and it has no default; choose one of best_of_n",
    ),
    "select of no type": (
        {"a": {"stage": "select", "type": "pair", "rollouts": "b"}},
        r"recipe\.a\.type = 'pair': there is no such type; did you mean pairs\?",
    ),
    "no teacher": ({"a": {"stage": "distill", "policy": "base"}}, r"recipe\.a\.teacher = '': there is no teacher"),
    "student is the teacher": (
        {"a": {"stage": "distill", "policy": "t", "teacher": "t"}, "t": {"stage": "sft", "policy": "base"}},
        r"recipe\.a\.policy = 't': is a teacher, too",
    ),
    "a label of the store": (
        {"a": {"stage": "sft", "policy": "store:sft"}},
        r"recipe\.a\.policy = 'store:sft': must be a digest",
    ),
    "no published model": (
        {"a": {"stage": "sft", "policy": "champion "}},
        r"recipe\.a\.policy = 'champion ': there is no such step; did you mean champion",
    ),
    "mixture of a source that the data lack": (
        {"a": {**PPO, "policy": "base", "mixture": {"suport": 1.0}}},
        r"recipe\.a\.mixture\.suport = 1\.0: no prompt has this source; did you mean support\?",
    ),
    "term of a source that the data lack": (
        {
            "g": {"stage": "generate", "policy": "base"},
            "s": {"stage": "score", "generations": "g", "rewards": {"terms": {"c": SUM | {"sources": ["sums"]}}}},
        },
        r"recipe\.s\.rewards\.terms\.c\.sources = \['sums'\]: no prompt has this source; choose from support",
    ),
    "route of a source that the data lack": (
        {
            "t": {"stage": "sft", "policy": "base"},
            "a": {"stage": "distill", "policy": "base", "teachers": {"t": 1.0}, "route": {"t": ["support", "sums"]}},
        },
        r"recipe\.a\.route\.t = \['support', 'sums'\]: no prompt has the source 'sums'; choose from support",
    ),
    "agent of a source that the data lack": (
        {"a": {"stage": "generate", "policy": "base", "agents": {"x": TOOLS}}},
        r"recipe\.a\.agents\.x\.sources = \['sums'\]: no prompt has the source 'sums'",
    ),
    "order by a difficulty that was not measured": (
        {"a": {**PPO, "policy": "base", "order": "easy_first"}},
        r"recipe\.a\.order = 'easy_first': prompts come without their difficulty; read the prompts of a select step",
    ),
    "difficulty of a moved reward": (
        {
            "g": {"stage": "generate", "policy": "base"},
            "s": {"stage": "score", "generations": "g", "rewards": {"terms": {"c": SUM}, "normalize": "running"}},
            "p": {"stage": "select", "type": "prompts", "rollouts": "s"},
        },
        r"recipe\.p\.term = '': recipe\.s\.rewards\.normalize = 'running' changes the reward; name a term",
    ),
    "difficulty by a term that is not scored": (
        {
            "g": {"stage": "generate", "policy": "base"},
            "s": {"stage": "score", "generations": "g", "rewards": {"terms": {"correct": SUM}}},
            "p": {"stage": "select", "type": "prompts", "rollouts": "s", "term": "corect"},
        },
        r"recipe\.p\.term = 'corect': recipe\.s\.rewards have no such term; did you mean correct\?",
    ),
    "no registered model": (
        {"a": {"stage": "sft", "policy": "models:/"}},
        r'recipe\.a\.policy = \'models:/\': must be "models:/NAME/VERSION" or "models:/NAME@champion"',
    ),
    "policies on the way that no stage reads": (
        {"a": REJECTION | {"policy": "base", "sft": {"export_every": 2, "loop": {"max_steps": 4}}}},
        r"recipe\.a\.sft\.export_every = 2: no stage reads policies on the way of this training",
    ),
    "policies on the way after the end": (
        {"a": {"stage": "sft", "policy": "base", "export_every": 4, "loop": {"max_steps": 4}}},
        r"recipe\.a\.export_every = 4: there is no such step before the end \(loop\.max_steps = 4\)",
    ),
    "name with a slash": ({"a/b": {"stage": "sft", "policy": "base"}}, r"recipe"),
}


@pytest.mark.parametrize("case", RECIPE_ERRORS)
def test_a_recipe_that_cannot_run_is_refused_by_its_key(case):
    steps, message = RECIPE_ERRORS[case]
    with pytest.raises(ConfigError, match=message):
        parse(small(**steps), origin="recipe.toml")


SAMPLED = {"stage": "generate", "policy": "sft", "sampling": {"max_tokens": 8}}
JUDGE = {
    "type": "judge",
    "url": "http://a/v1",
    "model": "m",
    "template": "{completion} {rubric}",
    "rubric_column": "rubric",
}
ROUND: dict[str, Any] = {"rounds": 1, "generate": {}, "select": {"type": "pairs"}, "dpo": {}}
SFT_LOOP = {"loop": {"batch_size": 4}}
JUDGED = {"rewards": {"terms": {"judge": JUDGE}}}


@pytest.mark.parametrize(
    ("steps", "key"),
    [
        ({"a": {**PPO, "policy": "sft", **JUDGED}}, "a.rewards"),
        ({"a": SAMPLED, "b": {"stage": "score", "generations": "a", **JUDGED}}, "b.rewards"),
        ({"a": {"stage": "iterative_dpo", "policy": "sft", **ROUND, "score": JUDGED}}, "a.score.rewards"),
    ],
)
def test_a_prompt_without_its_rubric_is_refused_before_anything_is_trained_or_sampled(steps, key):
    config = parse(small(sft={"stage": "sft", "policy": "base"}, **steps), origin="")
    made: list[str] = []

    def note(spec: StageSpec, kind: Any) -> Any:
        made.append(spec.label)
        return placeholder(spec, kind)

    row = Prompt("p7", (Message("user", "Is it late?"),), '{"answer": 1}', "support")
    stages = Stages(note, seed=17, runtime=config.runtime, prompts=lambda ref: [row])
    rule = r"rubric_column = 'rubric': prompt p7 \('Is it late\?'\) has no such column"
    with pytest.raises(ConfigError, match=rf"recipe\.{key}\.terms\.judge\.{rule}"):
        lifecycle(config, stages)
    assert made == ["prepare_data"]


def test_a_selection_may_leave_out_the_prompts_of_a_source():
    tree = tomllib.loads((shipped_profiles() / "tiny/recipe.toml").read_text(encoding="utf-8"))
    terms = {"correct": SUM | {"sources": ["arithmetic"]}, "polite": SUM | {"sources": ["support"]}}
    tree["recipe"] |= {
        "g": {"stage": "generate", "policy": "sft"},
        "s": {"stage": "score", "generations": "g", "rewards": {"terms": terms}},
        "p": {"stage": "select", "type": "prompts", "rollouts": "s", "term": "correct"},
        "a": {**PPO, "policy": "sft", "prompts": "p", "rewards": {"terms": {"correct": terms["correct"]}}},
    }
    parse(tree, origin="test")
    tree["recipe"]["a"]["prompts"] = "prompts"
    with pytest.raises(ConfigError, match=r"recipe\.a\.rewards\.terms = 'support': no term with a weight applies"):
        parse(tree, origin="test")


def test_a_step_whose_name_a_section_has_is_refused():
    tree = as_recipe() | {"sft": {"loop": {"batch_size": 4}}}
    with pytest.raises(
        ConfigError, match=r"recipe\.sft = \{\.\.\.\}: makes what \[sft\] makes; give the step another name"
    ):
        parse(tree, origin="recipe.toml")


def test_options_of_a_step_are_overridden_as_those_of_a_section():
    found = specs(as_recipe(), "recipe.ppo.kl.coef=0.2", "recipe.ppo.steps=3", "recipe.rejection_sampling=none")
    assert keyed(found["ppo"].config)["kl_coef"] == 0.2 and keyed(found["ppo"].config)["steps"] == 3
    assert "rejection_sampling/sft" not in found


def test_the_recipe_of_the_documentation_can_be_planned():
    page = (shipped_profiles().parent / "docs/recipes.md").read_text(encoding="utf-8")
    written, _, pool, *_, mixed = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    several = {
        f"{name}{end}": step
        for name in ("sums", "desk", "sft")
        for end, step in {
            "": {"stage": "sft", "policy": "base"},
            "_answers": {"stage": "generate", "policy": name, "sampling": {"max_tokens": 8}},
            "_scored": {"stage": "score", "generations": f"{name}_answers", "rewards": {"terms": {"x": SUM}}},
        }.items()
    }
    parse(small(**several, **tomllib.loads(pool)["recipe"]), origin="docs/recipes.md")
    full = tomllib.loads((shipped_profiles() / "tiny/full.toml").read_text(encoding="utf-8"))
    sources = [{"name": name, "path": "x.jsonl", "use": {"prompts": 1.0}} for name in ("gsm8k", "support")]
    full["prepare_data"]["data"] = {"type": "files", "sources": sources}
    parse(full | {"ppo": {**full["ppo"], **tomllib.loads(mixed)["ppo"]}}, origin="docs/recipes.md")
    config = parse(small() | tomllib.loads(written), origin="docs/recipes.md")
    assert list(all_specs(config, lifecycle))[1:] == ["cold_start", "math", "helpful", "desk", "student"]
    assert list(drawn(config.steps()))[-1] == "student    <- cold_start, math, desk, demonstrations (distill)"


def test_an_input_may_be_an_artifact_of_an_earlier_run(tmp_path):
    store = ArtifactStore(tmp_path)
    spec = toy_spec(ToyConfig(), label="sft")
    made, _ = execute(store, spec, runtime=NoEngines(), tracker=RecordingTracker(), progress=lambda *_: None)[:2]
    config = parse(small(more={"stage": "sft", "policy": f"store:{made.digest[:12]}"}), origin="")
    planned = {stage.label: stage.spec for stage in plan_stages(config, store)}
    assert planned["more"].inputs["policy"] == made
    absent = parse(small(more={"stage": "sft", "policy": "store:0123456789"}), origin="")
    with pytest.raises(
        ConfigError, match=r"recipe\.more\.policy = 'store:0123456789': a policy of this digest .* is not in the store"
    ):
        plan_stages(absent, store)


def test_a_single_reward_model_serves_terms_that_name_none_of_the_steps() -> None:
    rm = {"stage": "reward_model", "policy": "base"}
    unnamed = {"terms": {"x": {"type": "reward_model"}, "y": {"type": "reward_model", "model": "kind"}}}
    ppo = {**PPO, "policy": "base", "rewards": unnamed, "reward_models": ["kind"]}
    assert read(specs(small(kind=rm, a=ppo))["a"], "reward_models") == {
        "reward_model": "pending://kind",
        "kind": "pending://kind",
    }
    both = specs(small(kind=rm, reward_model=rm, a=ppo))["a"]
    assert read(both, "reward_models") == {"reward_model": "pending://reward_model", "kind": "pending://kind"}
    only = specs(small(kind=rm, a={**PPO, "policy": "base", "reward_models": ["kind"]}))["a"]
    assert read(only, "reward_models") == {"kind": "pending://kind"}, "the value model starts from it"


def test_the_policy_without_a_successor_is_published_and_every_round_has_its_parent() -> None:
    tree = small(
        sft={"stage": "sft", "policy": "prepare_data.base"},
        kind={"stage": "reward_model", "policy": "sft"},
        rl={**PPO, "policy": "sft"},
        side={**PPO, "policy": "sft", "steps": 3},
        answers={"stage": "generate", "policy": "side"},
    )
    full = tomllib.loads((shipped_profiles() / "tiny/full.toml").read_text(encoding="utf-8"))
    tree["evaluate"] = {
        "generate": full["evaluate"]["generate"],
        "evaluate": {"gold": full["evaluate"]["evaluate"]["gold"]},
    }
    config = parse(tree, origin="")
    assert config.published() == "side" and config.judge() == "kind"
    found = all_specs(config, lifecycle)["evaluate"]
    assert found.config.model_dump()["parents"] == {"sft": "base", "rl": "sft", "side": "sft"}
    assert read(found, "reward_model") == "pending://kind"
    del tree["recipe"]["rl"], tree["recipe"]["side"], tree["recipe"]["answers"]
    assert parse(tree, origin="").published() == "sft"


def test_policies_on_the_way_of_a_training_are_steps_that_others_read_and_evaluations_compare() -> None:
    loop = {"batch_size": 4, "max_steps": 5}
    first = {"stage": "sft", "policy": "base", "export_every": 2, "loop": loop}
    later = PPO | {"stage": "ppo", "policy": "first_2", "steps": 4, "export_every": 3}
    full = tomllib.loads((shipped_profiles() / "tiny/full.toml").read_text(encoding="utf-8"))
    evaluate = {"generate": full["evaluate"]["generate"], "evaluate": {"gold": full["evaluate"]["evaluate"]["gold"]}}
    tree = small(first=first, later=later) | {
        "evaluate": evaluate | {"evaluate": evaluate["evaluate"] | {"reference": "base"}}
    }
    profile = parse(tree, origin="test")
    assert profile.policies() == ["base", "first_2", "first_4", "first", "later_3", "later"]
    made = specs(tree)
    assert made["first_4"].name == "checkpoint" and read(made["first_4"], "policy") == "pending://first"
    assert read(made["later"], "policy") == "pending://first_2"
    parents = made["evaluate"].config.model_dump()["parents"]
    assert parents == {"first_2": "base", "first_4": "base", "first": "base", "later_3": "first_2", "later": "first_2"}
    with pytest.raises(ConfigError, match="export_every = 2: the policies are named by their steps"):
        parse(small(first=first | {"loop": {"batch_size": 4}}), origin="test")
    with pytest.raises(ConfigError, match=r"makes what \S+ makes"):
        parse(small(first=first, first_4=first), origin="test")


def test_what_no_step_reads_is_pointed_out(caplog):
    warn_unread.cache_clear()
    parse(small(rm={"stage": "reward_model", "policy": "base"}), origin="")
    assert "recipe.rm: no other step reads what it makes" in caplog.text


def test_errors_of_stages_name_the_table_of_the_step(tmp_path):
    bad = {
        **PPO,
        "policy": "base",
        "rewards": {"terms": {"mine": {"type": "function", "function": "nowhere.py:reward"}}},
    }
    with pytest.raises(ConfigError, match=r"recipe\.mine\.rewards\.terms\.mine\.function"):
        specs(small(mine=bad))


@pytest.mark.parametrize("kind", [SupportWorld, ArithmeticWorld, InstructionsWorld])
def test_the_sources_of_a_world_are_known_before_its_rows(kind):
    sizes = {"demonstrations": 9, "preferences": 9, "prompts": 9, "eval_prompts": 9}
    world = kind(**{name: size for name, size in sizes.items() if name in kind.model_fields})
    tables, _ = make_world(world, seed=1)
    rows = {name: {row.source for row in found} for name, found in tables.named().items() if found and name in PARTS}
    assert {"prompts", "eval_prompts"} <= rows.keys()
    assert {name: data_sources(world, name) for name in rows} == rows
