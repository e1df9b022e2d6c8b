"""Rows by step and rounds: the nodes that they become, and the errors for wrong names."""

import pickle
import tomllib

import pytest

from pipelines.execution.plan import all_specs
from pipelines.flows.full import graph, lifecycle
from pipelines.flows.profile import parse, shipped_profiles
from rlhf_core.errors import ConfigError

SFT = {"stage": "sft", "policy": "base"}
ROUNDS = {
    "count": 3,
    "start": {"policy": "first", "pairs": "preferences"},
    "steps": {
        "model": {"stage": "reward_model", "policy": "first", "preferences": {"all": "pairs"}},
        "answers": {"stage": "generate", "policy": "previous.policy", "sampling": {"max_tokens": 8}},
        "scored": {
            "stage": "score",
            "generations": "answers",
            "rewards": {"terms": {"reward": {"type": "reward_model", "model": "model"}}},
        },
        "pairs": {"stage": "select", "type": "pairs", "rollouts": "scored"},
        "policy": {"stage": "dpo", "policy": "previous.policy", "preferences": "pairs"},
    },
}


EXACT = {"type": "function", "function": "rlhf_contrib.worlds.arithmetic:exact_match"}
BEST = {
    "scored": {"stage": "score", "generations": "answers", "rewards": {"terms": {"one": EXACT}}},
    "best": {"stage": "select", "type": "best_of_n", "rollouts": "scored"},
}


def small(rounds=None, **steps):
    tree = tomllib.loads((shipped_profiles() / "tiny/recipe.toml").read_text(encoding="utf-8"))
    for section in ("evaluate", "publish", "gates"):
        tree.pop(section, None)
    return tree | {"recipe": {"first": SFT, **steps}} | ({"rounds": {"llama": rounds}} if rounds else {})


def nodes(tree):
    return {node.label: node for node in graph(parse(tree, origin="test"))}


@pytest.mark.parametrize(
    ("rows", "tables", "options"),
    [
        ({"demonstrations": ["best", "demonstrations"]}, ["best", "demonstrations"], {}),
        (
            {"demonstrations": {"best": 3.0, "demonstrations": 1.0}, "stopping_strategy": "all_exhausted"},
            ["best", "demonstrations"],
            {"shares": {"best": 3.0, "demonstrations": 1.0}, "stopping_strategy": "all_exhausted"},
        ),
        ({"sources": ["arithmetic"]}, ["demonstrations"], {"sources": ("arithmetic",)}),
        (
            {"mixture": {"arithmetic": 0.7, "support": 0.3}},
            ["demonstrations"],
            {"mixture": {"arithmetic": 0.7, "support": 0.3}},
        ),
    ],
)
def test_rows_of_several_tables_are_mixed_before_the_step(rows, tables, options):
    answers = {"stage": "generate", "policy": "first", "sampling": {"max_tokens": 8}}
    found = nodes(small(answers=answers, **BEST, second={**SFT, **rows}))
    mix = found["second/demonstrations"]
    assert found["second"].inputs["demonstrations"] == "second/demonstrations"
    assert mix.stage == "mix" and list(mix.inputs["tables"].values()) == tables
    assert {name: getattr(mix.config, name) for name in options} == options
    assert mix.config.kind == "demonstrations"


def test_rows_of_a_step_are_rendered_by_their_source():
    modes = {"arithmetic": {"enable_thinking": True}, "support": {"enable_thinking": False}}
    mix = nodes(small(second={**SFT, "chat_template_kwargs": modes}))["second/demonstrations"]
    assert mix.config.settings("support") == {"enable_thinking": False}
    wrong = small(second={**SFT, "chat_template_kwargs": {"suport": {"enable_thinking": True}}})
    with pytest.raises(
        ConfigError, match=r"second\.chat_template_kwargs\.suport = .*: no row of .* did you mean support"
    ):
        parse(wrong, origin="test")


def test_one_name_stays_without_a_mix():
    found = nodes(small(second={**SFT, "demonstrations": ["demonstrations"]}))
    assert "second/demonstrations" not in found and found["second"].inputs["demonstrations"] == "demonstrations"


def test_a_section_reads_several_tables_or_sources():
    rows = {"demonstrations": {"best": 3.0, "demonstrations": 1.0}, "stopping_strategy": "all_exhausted"}
    tree = small(answers={"stage": "generate", "policy": "base", "sampling": {"max_tokens": 8}}, **BEST)
    found = nodes(tree | {"sft": rows, "reward_model": {"sources": ["arithmetic"]}})
    mix = found["sft/demonstrations"]
    assert list(mix.inputs["tables"].values()) == ["best", "demonstrations"]
    assert mix.config.shares == {"best": 3.0, "demonstrations": 1.0} and mix.path == "sft.demonstrations"
    assert found["sft"].inputs == {"policy": "base", "demonstrations": "sft/demonstrations"}
    pairs = found["reward_model/preferences"]
    assert (pairs.config.kind, pairs.config.sources) == ("preferences", ("arithmetic",))
    assert list(found).index("best") < list(found).index("sft/demonstrations") < list(found).index("sft")


def test_a_group_reads_several_tables_or_sources():
    rejection = {
        "stage": "rejection_sampling",
        "policy": "first",
        "prompts": ["prompts", "hard"],
        "sources": ["arithmetic"],
        "generate": {"sampling": {"max_tokens": 8}},
        "score": {"rewards": {"terms": {"one": EXACT}}},
        "select": {"type": "best_of_n"},
        "sft": {},
    }
    answers = {"stage": "generate", "policy": "first", "sampling": {"max_tokens": 8}}
    hard = {"stage": "select", "type": "prompts", "rollouts": "scored"}
    found = nodes(small(answers=answers, **BEST, hard=hard, own=rejection))
    mix = found["own/prompts"]
    assert list(mix.inputs["tables"].values()) == ["prompts", "hard"]
    assert (mix.config.kind, mix.config.sources) == ("prompts", ("arithmetic",))
    assert found["own/generate"].inputs["prompts"] == "own/prompts"


@pytest.mark.parametrize(
    ("section", "error"),
    [
        ({"demonstrations": "demonstratons"}, r"^sft\.demonstrations = 'demonstratons': there is no such step"),
        ({"demonstrations": ["first", "demonstrations"]}, r"^sft\.demonstrations = 'first': is a policy"),
        ({"sources": ["arithmetc"]}, r"sft\.sources = 'arithmetc': no row of demonstrations has this source"),
        ({"mixture": {"arithmetic": 0.0}}, r"^sft\.mixture\.arithmetic = 0: must be above 0"),
    ],
)
def test_wrong_tables_of_a_section_are_refused(section, error):
    with pytest.raises(ConfigError, match=error):
        parse(small() | {"sft": section}, origin="test")


def answers_of(policy):
    answers = {"stage": "generate", "policy": policy, "sampling": {"max_tokens": 8}}
    scored = {"stage": "score", "generations": f"{policy}_answers", "rewards": {"terms": {"one": EXACT}}}
    return {f"{policy}_answers": answers, f"{policy}_scored": scored}


POOL = answers_of("first") | answers_of("base")


@pytest.mark.parametrize(
    ("rollouts", "pool"),
    [
        (["first_scored", "base_scored"], {"first_scored": "first_scored", "base_scored": "base_scored"}),
        ({"big": "first_scored", "small": "base_scored"}, {"big": "first_scored", "small": "base_scored"}),
    ],
)
def test_a_selection_reads_the_answers_of_several_policies(rollouts, pool):
    node = nodes(small(**POOL, best={"stage": "select", "type": "best_of_n", "rollouts": rollouts}))["best"]
    assert node.inputs == {"pool": pool}


def test_a_selection_in_rounds_reads_the_answers_of_all_rounds_so_far():
    steps = ROUNDS["steps"] | {"best": {"stage": "select", "type": "best_of_n", "rollouts": {"all": "scored"}}}
    steps["pairs"] = {"stage": "select", "type": "pairs", "rollouts": ["scored", "previous.scored"]}
    start = ROUNDS["start"] | {"scored": "first_scored"}
    found = nodes(small(ROUNDS | {"steps": steps, "start": start}, **answers_of("first")))
    assert found["llama/round_1/best"].inputs == {"rollouts": "first_scored"}
    assert list(found["llama/round_3/best"].inputs["pool"].values()) == [
        "first_scored",
        "llama/round_1/scored",
        "llama/round_2/scored",
    ]
    assert list(found["llama/round_2/pairs"].inputs["pool"].values()) == [
        "llama/round_2/scored",
        "llama/round_1/scored",
    ]


@pytest.mark.parametrize(
    ("pairs", "error"),
    [
        ({"rollouts": "first_scored", "across": "policies"}, r"p\.across = 'policies': rollouts names one step"),
        (
            {"rollouts": ["first_scored", "base_scored"], "chosen": "first", "rejected": "base_scored"},
            r"p\.chosen = 'first': rollouts has no such name; did you mean first_scored",
        ),
        ({"rollouts": ["first_scored"], "chosen": "first_scored"}, r'p\.rejected = "": must name answers'),
        ({"rollouts": []}, r"p\.rollouts = '': names no input"),
        ({"rollouts": ["first_scored", "frist"]}, r"p\.rollouts = 'frist': there is no such step"),
        ({"rollouts": ["first_scored", "first"]}, r"p\.rollouts = 'first': is a policy, and rollouts must be"),
        (
            {"type": "prompts", "rollouts": "first_scored", "drop_truncated": False},
            r"type 'prompts' but of 'best_of_n', .*p='\{stage = \"select\", type = \"best_of_n\", drop_truncated = ",
        ),
    ],
)
def test_wrong_pools_are_refused(pairs, error):
    with pytest.raises(ConfigError, match=error):
        parse(small(**POOL, p={"stage": "select", "type": "pairs", **pairs}), origin="test")


def test_the_best_answers_of_three_policies_are_one_table():
    names = ["first_scored", "base_scored", "second_scored"]
    best = {"stage": "select", "type": "best_of_n", "rollouts": names}
    third = {**SFT, "demonstrations": {"best": 1.0, "demonstrations": 1.0}, "sources": ["arithmetic"]}
    found = nodes(small(**POOL, second=SFT, **answers_of("second"), best=best, third=third))
    assert list(found["best"].inputs["pool"].values()) == names
    mix = found["third/demonstrations"]
    assert list(mix.inputs["tables"].values()) == ["best", "demonstrations"]
    assert (mix.config.sources, mix.config.shares) == (("arithmetic",), {"best": 1.0, "demonstrations": 1.0})


def test_one_source_is_sampled():
    answers = {"stage": "generate", "policy": "first", "sources": ["support"], "sampling": {"max_tokens": 8}}
    found = nodes(small(answers=answers))
    assert found["answers"].inputs == {"policy": "first", "prompts": "answers/prompts"}
    mix = found["answers/prompts"]
    assert (mix.config.kind, mix.config.sources) == ("prompts", ("support",))


def test_a_preference_optimization_exports_policies_on_its_way():
    tuned = {"stage": "dpo", "policy": "first", "export_every": 2, "loop": {"max_steps": 6}}
    found = nodes(small(apo=tuned, soup={"stage": "merge", "weights": {"apo_2": 1.0, "apo_4": 1.0, "apo": 1.0}}))
    assert found["soup"].inputs["policies"] == {name: name for name in ("apo_2", "apo_4", "apo")}
    assert (found["apo_4"].stage, found["apo_4"].config.step) == ("checkpoint", 4)


def test_a_second_preparation_of_data_has_parts_by_name():
    more = {"stage": "prepare_data", "data": {"type": "arithmetic", "steps": 20}}
    tree = small(
        more=more,
        prm={"stage": "process_reward_model", "policy": "first", "steps": "more.steps"},
        second={**SFT, "demonstrations": ["demonstrations", "more.demonstrations"]},
        answers={"stage": "generate", "policy": "first", "prompts": "more.prompts", "sampling": {"max_tokens": 8}},
    )
    found = nodes(tree)
    config = parse(tree, origin="test")
    assert found["more"].config.model == config.prepare_data.model != type(config.prepare_data)().model
    assert list(found["second/demonstrations"].inputs["tables"].values()) == ["demonstrations", "more.demonstrations"]
    specs = all_specs(config, lifecycle)
    assert specs["prm"].inputs["steps"].uri == specs["answers"].inputs["prompts"].uri == "pending://more"
    assert list(specs).index("more") < list(specs).index("prm")


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ({**SFT, "demonstrations": "more.prompts"}, r"'more\.prompts': is prompts, and demonstrations must be"),
        ({**SFT, "demonstrations": "mor.demonstrations"}, r"there is no such step; did you mean more\.demonstrations"),
        ({**SFT, "demonstrations": "more"}, r"'more': is a prepared data, and demonstrations must be"),
        (
            {**SFT, "demonstrations": "more.demonstrations", "sources": ["support"]},
            r"no row of more\.demonstrations has",
        ),
    ],
)
def test_wrong_parts_of_a_second_preparation_are_refused(step, error):
    more = {"stage": "prepare_data", "data": {"type": "arithmetic"}}
    with pytest.raises(ConfigError, match=error):
        parse(small(more=more, a=step), origin="test")


def test_a_missing_part_of_a_second_preparation_is_named():
    more = {"stage": "prepare_data", "data": {"type": "arithmetic"}}
    prm = {"stage": "process_reward_model", "policy": "first", "steps": "more.steps"}
    with pytest.raises(ConfigError, match=r"^more\.steps: has no rows"):
        all_specs(parse(small(more=more, prm=prm), origin="test"), lifecycle)


def test_a_gate_reads_an_evaluation_in_the_middle_of_the_graph():
    middle = {
        "mid_answers": {
            "stage": "generate",
            "policy": "first",
            "prompts": "eval_prompts",
            "sampling": {"max_tokens": 8},
        },
        "mid": {
            "stage": "evaluate",
            "generations": {"first": "mid_answers"},
            "reference": "first",
            "gold": "rlhf_contrib.worlds.mixed:gold_reward",
        },
    }
    gate = {"after": "mid", "metric": "policies/first/gold/mean", "value": 0.1}
    config = parse(small(**middle) | {"gates": [gate]}, origin="test")
    assert all_specs(config, lifecycle)["mid"].inputs["generations"]["first"].uri == "pending://mid_answers"


def test_a_step_can_be_sent_to_another_process():
    step = parse(small(), origin="test").recipe["first"]
    assert pickle.loads(pickle.dumps(step)) == step


def test_rounds_read_the_round_before_and_all_rounds_so_far():
    found = nodes(small(ROUNDS))
    assert found["llama/round_1/model"].inputs["preferences"] == "preferences"
    third = found["llama/round_3/model/preferences"]
    assert list(third.inputs["tables"].values()) == ["preferences", "llama/round_1/pairs", "llama/round_2/pairs"]
    assert found["llama/round_1/answers"].inputs["policy"] == "first"
    assert found["llama/round_2/answers"].inputs["policy"] == "llama/round_1/policy"
    assert found["llama/round_2/scored"].inputs["reward_models"] == {"model": "llama/round_2/model"}
    assert found["llama/round_2/policy"].inputs["preferences"] == "llama/round_2/pairs"
    assert [found[f"llama/round_{number}/answers"].seed for number in (1, 2, 3)] == [0, 1, 2]


def test_the_last_round_has_names_outside():
    found = nodes(small(ROUNDS, after={**SFT, "policy": "llama.policy"}))
    assert "llama.policy" in found["llama/round_3/policy"].names and "after" in found


def steps_of_rounds(**steps):
    """The rounds with other steps, or with further ones."""
    return ROUNDS | {"steps": ROUNDS["steps"] | steps}


def test_policies_that_a_step_of_rounds_exports_have_names_inside_and_outside():
    policy = ROUNDS["steps"]["policy"] | {"export_every": 2, "loop": {"max_steps": 4}}
    soup = {"stage": "merge", "weights": {"policy_2": 1.0, "policy": 1.0}}
    last = {"stage": "merge", "weights": {"llama.policy_2": 1.0, "llama.soup": 1.0}}
    found = nodes(small(steps_of_rounds(policy=policy, soup=soup), last=last))
    second = {"policy_2": "llama/round_2/policy_2", "policy": "llama/round_2/policy"}
    assert found["llama/round_2/soup"].inputs["policies"] == second
    assert found["llama/round_3/policy_2"].config.step == 2
    assert "llama.policy_2" in found["llama/round_3/policy_2"].names and "last" in found


def test_a_step_of_rounds_prepares_data_with_the_model_of_all():
    more = {"stage": "prepare_data", "data": {"type": "arithmetic"}}
    sft = {**SFT, "demonstrations": ["more.demonstrations"]}
    tree = small(steps_of_rounds(more=more, sft=sft), last={**SFT, "demonstrations": "llama.more.demonstrations"})
    found = nodes(tree)
    assert found["llama/round_2/more"].config.model == parse(tree, origin="test").prepare_data.model
    assert found["llama/round_2/sft"].inputs["demonstrations"] == "llama/round_2/more.demonstrations"


def test_an_input_of_several_results_reads_those_of_all_rounds():
    compared = {"stage": "propose_comparisons", "rollouts": {"all": "scored"}}
    rounds = steps_of_rounds(compared=compared) | {"start": ROUNDS["start"] | {"scored": "first_scored"}}
    read = nodes(small(rounds, **answers_of("first")))["llama/round_2/compared"].inputs["rollouts"]
    assert list(read.values()) == ["first_scored", "llama/round_1/scored"]
    with pytest.raises(ConfigError, match=r"compared\.rollouts = \{'all': 'scored'\}: only a step of \[rounds"):
        parse(small(compared=compared), origin="test")


def test_shares_of_tables_of_earlier_rounds_may_be_dotted_keys():
    policy = ROUNDS["steps"]["policy"] | {"preferences": {"pairs": 2.0, "previous": {"pairs": 1.0}}}
    mix = nodes(small(steps_of_rounds(policy=policy)))["llama/round_2/policy/preferences"]
    assert mix.inputs["tables"] == {"pairs": "llama/round_2/pairs", "previous.pairs": "llama/round_1/pairs"}
    assert mix.config.shares == {"pairs": 2.0, "previous.pairs": 1.0}


def test_a_member_of_an_ensemble_in_rounds_is_that_of_its_round():
    model = ROUNDS["steps"]["model"] | {"ensemble": {"members": 2}}
    terms = {"terms": {"reward": {"type": "reward_model", "model": "model/2"}}}
    scored = ROUNDS["steps"]["scored"] | {"rewards": terms}
    found = nodes(small(ROUNDS | {"steps": ROUNDS["steps"] | {"model": model, "scored": scored}}))
    assert found["llama/round_2/scored"].inputs["reward_models"] == {"model/2": "llama/round_2/model/2"}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            {"start": {"policy": "first"}},
            r"model\.preferences = \{'all': 'pairs'\}: pairs must be a step .* key of start",
        ),
        ({"steps": ROUNDS["steps"] | {"all": SFT}}, r"rounds\.llama\.steps\.all = .*another meaning"),
        (
            {"steps": ROUNDS["steps"] | {"policy": {"stage": "dpo", "policy": "previous.polcy"}}},
            r"rounds\.llama\.steps\.policy\.policy = 'previous\.polcy': polcy must be a step",
        ),
        (
            steps_of_rounds(scored=ROUNDS["steps"]["scored"] | {"reward_models": ["previous.model"]}),
            r"scored\.reward_models = 'previous\.model': model must be a step .* key of start \(policy, pairs\)",
        ),
        (
            steps_of_rounds(soup={"stage": "merge", "weights": {"policy": 1.0, "previous.soup": 1.0}}),
            r"rounds\.llama\.steps\.soup\.weights\.previous\.soup = 'previous\.soup': soup must be a step",
        ),
        ({"start": {"policy": "frist", "pairs": "preferences"}}, r"'frist': there is no such step; did you mean first"),
    ],
)
def test_wrong_names_in_rounds_are_refused(change, error):
    with pytest.raises(ConfigError, match=error):
        parse(small(ROUNDS | change), origin="test")


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ({"demonstrations": {"first": 1.0, "demonstrations": 1.0}}, r"demonstrations\.first = 1\.0: is a policy"),
        ({"demonstrations": ["demonstratons", "x"]}, r"'demonstratons': there is no such step; did you mean demonstr"),
        ({"sources": ["arithmetc"]}, r"recipe\.a\.sources = 'arithmetc': no row of demonstrations .* mean arithmetic"),
        ({"mixture": {"sums": 1.0}}, r"recipe\.a\.mixture\.sums = 1\.0: no row of demonstrations has this source"),
        (
            {"demonstrations": {"demonstrations": 0.0}},
            r"recipe\.a\.demonstrations\.demonstrations = 0: must be above 0",
        ),
        (
            {"demonstrations": 3},
            r"^recipe\.a\.demonstrations = 3: must be a name, a list of names, a table of shares, or",
        ),
        ({"demonstrations": {"first": "1"}}, r"^recipe\.a\.demonstrations\.first = '1': must be a number, the share"),
        ({"demonstrations": {"all": "first"}}, r"recipe\.a\.demonstrations = \{'all': 'first'\}: only a step of"),
    ],
)
def test_wrong_names_in_mixes_are_refused(rows, error):
    with pytest.raises(ConfigError, match=error):
        parse(small(a={**SFT, **rows}), origin="test")


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ({"freeze": 1}, r"^recipe\.a\.freeze = 1: unknown key; remove it$"),  # `reduce` is an option of other stages
        ({"rank": 8}, r"^recipe\.a\.rank = 8: unknown key; did you mean recipe\.a\.lora\.rank\?$"),
        ({"stoping_strategy": 8}, r"unknown key; did you mean recipe\.a\.stopping_strategy\?$"),
        ({"rollouts": "x"}, r"^recipe\.a\.rollouts = 'x': unknown key; remove it$"),  # an option of other stages
    ],
)
def test_an_unknown_key_of_a_step_is_compared_with_the_options_of_its_stage(rows, error):
    with pytest.raises(ConfigError, match=error):
        parse(small(a={**SFT, **rows}), origin="test")
