"""What a stage would refuse after hours is refused at the plan."""

import json

import pytest

from pipelines.execution.executor import RunOptions
from pipelines.execution.opening import open_run
from pipelines.execution.plan import PlannedStage, plan_stages
from pipelines.execution.reward_arguments import FIRST_ROWS, check_rewards
from pipelines.flows.full import lifecycle
from pipelines.flows.profile import PipelineConfig, load_profile
from rlhf_core.errors import ConfigError
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.tracking.memory import MemoryTracker
from tests.support.listener import Notes

FUNCTIONS = """
import functools
def needs_difficulty(completions, difficulty, **kwargs): return [1.0] * len(completions)
def takes_all(completions, **kwargs): return [1.0] * len(completions)
def has_a_default(completions, difficulty=0): return [1.0] * len(completions)
def of_trl(prompts, completions, completion_ids, trainer_state, log_extra, log_metric): return [1.0] * len(completions)
def with_solution(completions, solution, prompt_id, *, finish_reason): return [1.0] * len(completions)
def of_generations(generations, scale): return [1.0] * len(generations)
def of_openrlhf(queries, prompts, labels, scale): return [1.0] * len(queries)
def fits_nothing(text, other): return 1.0
partial = functools.partial(needs_difficulty, difficulty=1)
short = lambda completions, difficulty: [1.0]
hidden_well = [takes_all][0]
def unnamed(completions, /, prompts): return [1.0]
def of_generations_alone(generations, /): return [1.0]
"""


def profile(tmp_path, function: str, *overrides: str) -> PipelineConfig:
    hidden = "globals()['hidden'] = needs_difficulty" if function == "hidden" else ""
    (tmp_path / "rewards.py").write_text(FUNCTIONS + hidden)
    term = f'{{type = "function", function = "{tmp_path}/rewards.py:{function}"}}'
    return load_profile("tiny/rlvr", [f"ppo.rewards.terms = {{right = {term}}}", *overrides])


def planned(tmp_path, function: str, *overrides: str) -> list[PlannedStage]:
    return plan_stages(profile(tmp_path, function, *overrides), ArtifactStore(tmp_path / "store"))


@pytest.mark.parametrize("function", ["takes_all", "has_a_default", "of_trl", "with_solution", "partial"])
def test_a_function_that_gets_its_arguments_is_planned(tmp_path, function):
    found = planned(tmp_path, function)
    assert "ppo" in {stage.label for stage in found}


@pytest.mark.parametrize(
    ("function", "parameter"),
    [("needs_difficulty", "difficulty"), ("of_generations", "scale"), ("of_openrlhf", "scale")],
)
def test_a_function_with_an_argument_that_nothing_gives_is_refused(tmp_path, function, parameter):
    rule = rf"^ppo\.rewards\.terms\.right\.function = .*: nothing gives its parameter '{parameter}'; set arguments\.{parameter}"
    with pytest.raises(ConfigError, match=rule) as refused:
        planned(tmp_path, function)
    assert "\n" not in str(refused.value)
    planned(tmp_path, function, f"ppo.rewards.terms.right.arguments = {{{parameter} = 2}}")


def test_a_function_is_refused_for_an_argument_that_it_does_not_take_or_parameters_of_no_protocol(tmp_path):
    with pytest.raises(ConfigError, match=r"right\.arguments\.scael = 2: is not a parameter"):
        planned(tmp_path, "of_generations", "ppo.rewards.terms.right.arguments = {scael = 2}")
    with pytest.raises(ConfigError, match=r"right\.function = .*: the names of its parameters match no protocol"):
        planned(tmp_path, "fits_nothing")


FIELD = {"difficulty": 3}
LABELS = {
    "text": [{"label": json.dumps(FIELD)}] * 20,
    "an object": [{"label": FIELD}] * 20,
    "an object in another": [{"reward_model": {"style": "rule", "ground_truth": FIELD}}] * 20,
    "late rows": [{"label": "3"}] * (FIRST_ROWS + 1) + [{"label": FIELD}],
    "no row": [{"label": "3"}] * 20,
}


@pytest.mark.parametrize("kind", LABELS)
def test_a_field_of_the_labels_is_an_argument(tmp_path, kind):
    rows = [{"prompt": f"{at} + 1?", "completion": f"{at + 1}"} | label for at, label in enumerate(LABELS[kind])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    use = "{demonstrations = 0.5, prompts = 0.3, eval_prompts = 0.2}"
    source = f'{{name = "rows", path = "{tmp_path}/rows.jsonl", use = {use}}}'
    data = f'prepare_data.data = {{type = "files", sources = [{source}]}}'
    if kind != "no row":
        planned(tmp_path, "needs_difficulty", data)
        return
    with pytest.raises(ConfigError, match="nothing gives its parameter 'difficulty'"):
        planned(tmp_path, "needs_difficulty", data)


def test_a_lambda_is_refused_like_a_function(tmp_path):
    rule = r"^ppo\.rewards\.terms\.right\.function = .*: nothing gives its parameter 'difficulty'; set arguments\.difficulty"
    with pytest.raises(ConfigError, match=rule):
        planned(tmp_path, "short")
    planned(tmp_path, "short", "ppo.rewards.terms.right.arguments = {difficulty = 2}")


def test_the_function_of_a_suite_is_refused_too(tmp_path):
    suite = f'{{name = "own", type = "custom", function = "{tmp_path}/rewards.py:needs_difficulty"}}'
    with pytest.raises(
        ConfigError, match=r"^evaluate\.suites\.own\.function = .*: nothing gives its parameter 'difficulty'"
    ):
        planned(tmp_path, "takes_all", f"evaluate.suites = [{suite}]")


def test_a_parameter_that_takes_no_name_is_refused_where_names_are_passed(tmp_path):
    planned(tmp_path, "of_generations_alone")
    with pytest.raises(
        ConfigError, match=r"by name, which its parameter 'completions' does not take; remove the / after it"
    ):
        planned(tmp_path, "unnamed")


def test_what_only_loading_tells_is_refused_at_the_start_of_the_run_in_the_same_words(tmp_path, home):
    def start(function: str) -> None:
        stages = planned(tmp_path, function)  # says nothing
        config = profile(tmp_path, function)
        tracker, notes = MemoryTracker(), Notes()
        with open_run(config, lifecycle, RunOptions(), home=home, tracker=tracker, listener=notes, planned=stages):
            pass

    with pytest.raises(ConfigError) as at_the_plan:
        planned(tmp_path, "needs_difficulty")
    with pytest.raises(ConfigError) as at_the_start:
        start("hidden")
    assert str(at_the_start.value) == str(at_the_plan.value)
    specs = [stage.spec for stage in planned(tmp_path, "hidden_well")]
    check_rewards(specs, specs, load=True)
