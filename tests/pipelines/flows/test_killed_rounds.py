"""A run that is killed inside of rounds and started again makes the same artifacts as one that is left alone."""

from pathlib import Path

import pytest

from pipelines.execution.executor import RunOptions
from pipelines.execution.opening import open_run
from pipelines.execution.run import run_stages
from pipelines.flows.full import lifecycle
from pipelines.flows.profile import PipelineConfig, load_profile
from pipelines.services.home import Home
from rlhf_core.stage.key import StageSpec
from rlhf_core.tracking.memory import MemoryTracker
from rlhf_core.types import ArtifactRef
from tests.support.listener import Notes
from tests.support.small_pipeline import write_mini

ITERATIVE = """
[reward_model]
loop = {batch_size = 16}
[iterative_dpo]
rounds = 2
generate = {samples_per_prompt = 2, sampling = {max_tokens = 8}}
score = {}
select = {type = "pairs", drop_truncated = false, eval_fraction = 0.0}
dpo = {loop = {batch_size = 4, checkpoint_every = 1}}
"""
ONLINE = """
[reward_model]
loop = {batch_size = 16}
[online]
rounds = 2
generate = {samples_per_prompt = 2, sampling = {max_tokens = 8}}
propose = {strategy = "random", budget = 8, drop_truncated = false}
reward_model = {loop = {batch_size = 16, checkpoint_every = 1}}
[online.collect]
annotator = {type = "program", function = "rlhf_contrib.worlds.support_readers:reader_reward"}
[online.ppo]
steps = 2
prompts_per_step = 4
sampling = {max_tokens = 8}
rewards = {terms = {reward_model = {type = "reward_model"}}}
checkpoint_every = 1
"""
STEPS = """
[recipe.first]
stage = "sft"
policy = "base"
loop = {batch_size = 16, epochs = 1}
[rounds.again]
count = 2
start = {policy = "first", pairs = "preferences"}
[rounds.again.steps.model]
stage = "reward_model"
policy = "first"
preferences = {all = "pairs"}
loop = {batch_size = 16, checkpoint_every = 1}
[rounds.again.steps.answers]
stage = "generate"
policy = "previous.policy"
samples_per_prompt = 2
sampling = {max_tokens = 8}
[rounds.again.steps.scored]
stage = "score"
generations = "answers"
rewards.terms.reward = {type = "reward_model", model = "model"}
[rounds.again.steps.pairs]
stage = "select"
type = "pairs"
rollouts = "scored"
drop_truncated = false
eval_fraction = 0.0
[rounds.again.steps.policy]
stage = "dpo"
policy = "previous.policy"
preferences = "pairs"
loop = {batch_size = 4, checkpoint_every = 1}
"""


def run(config: PipelineConfig, home: Home, *, killed_in: str = "") -> tuple[dict[str, str], dict[str, str]]:
    """Run a profile; return the digests and the decisions by label. The first step of `killed_in` interrupts it."""

    def interrupt(done: int, total: int, message: str) -> None:
        if done == 1 and not message.startswith("reference"):
            raise KeyboardInterrupt

    def run_stage(spec: StageSpec, kind: type[ArtifactRef]) -> ArtifactRef:
        return opened.stage(spec, interrupt if spec.label == killed_in else lambda *_: None).ref

    notes = Notes()
    with open_run(config, lifecycle, RunOptions(), home=home, tracker=MemoryTracker(), listener=notes) as opened:
        made = run_stages(opened, lifecycle, run_stage, tags={})
    decisions = {str(label): str(action) for label, action in notes.of("started")}
    return {label: ref.digest for label, ref in made.items()}, decisions


@pytest.mark.parametrize(
    ("tables", "without", "label", "killed"),
    [
        (ITERATIVE, (), "iterative_dpo", ("generate", "dpo")),
        (ONLINE, (), "online", ("reward_model", "ppo")),
        (STEPS, ("sft",), "again", ("model", "policy")),
    ],
    ids=["iterative_dpo", "online", "rounds"],
)
def test_a_run_killed_inside_rounds_ends_with_the_same_bytes(
    home: Home, tmp_path: Path, tables: str, without: tuple[str, ...], label: str, killed: tuple[str, str]
) -> None:
    """It is killed in a stage of the first round, and after a restart in one of the second."""
    left_out = [f"{name}=none" for name in ("ppo", "evaluate", *without)]
    config = load_profile(write_mini(tmp_path, tables), left_out)
    expected, _ = run(config, Home(tmp_path / "undisturbed").make())
    for number, name in enumerate(killed, start=1):
        with pytest.raises(KeyboardInterrupt):
            run(config, home, killed_in=f"{label}/round_{number}/{name}")
    made, decisions = run(config, home)
    assert made == expected
    last = f"{label}/round_2/{killed[1]}"
    assert decisions[last] == "RESUME"
    assert decisions[f"{label}/round_1/{killed[0]}"] == "HIT"
