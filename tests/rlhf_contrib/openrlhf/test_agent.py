import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_contrib.openrlhf.agent import MODULES, AgentExecutorBase, as_result, open_agent, provide_modules
from rlhf_core.agents.conversation import EpisodeResult
from rlhf_core.agents.episodes import Episode, play_episodes
from rlhf_core.agents.process import Environments
from rlhf_core.config.agents import OpenRLHFAgent
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.policy import DynamicSampling
from rlhf_core.config.rewards import EpisodeReward, RewardsConfig
from rlhf_core.errors import ConfigError
from rlhf_core.rewards.scoring import Scorer
from rlhf_core.rewards.terms import episode_reward
from rlhf_core.rollouts.scored_step import is_decided
from rlhf_core.types import Generation, SamplingRequest
from tests.rlhf_core.agents.scripted import ScriptedSampler, chat, chat_folder, prompt, sampled_as_it_stands

HERE = Path(__file__).parent
Opened = Callable[[str], Environments]


@pytest.fixture(scope="module")
def opened() -> Iterator[Opened]:
    """One process per file: its imports take seconds."""
    started: dict[str, Environments] = {}

    def environments(file: str) -> Environments:
        if file not in started:
            started[file] = Environments(OpenRLHFAgent(file=str(HERE / file)), tokenizer=chat_folder())
        return started[file]

    yield environments
    for one in started.values():
        one.close()


def played(
    environments: Environments, labels: list[str], script: Callable[[SamplingRequest, int], str], **limits: Any
) -> tuple[list[EpisodeResult], ScriptedSampler]:
    config = environments.config.model_copy(update={"retries": 0} | limits)
    template, sampling = chat(), SamplingConfig(max_tokens=12)
    sampler = ScriptedSampler(template, script)
    prompts = [prompt(number, label) for number, label in enumerate(labels)]
    episodes = [Episode(one, template.prompt_ids(one.messages), 100 + i) for i, one in enumerate(prompts)]
    return play_episodes(sampler, template, episodes, environments, config, sampling), sampler


AGAIN = "\n\nHuman: no, again\nAssistant: "


@pytest.mark.slow  # the first with a file starts its process
@pytest.mark.parametrize(
    ("file", "script"),
    [
        ("openrlhf_agent.py", "It is {}."),
        ("openrlhf_step.py", "number {}."),  # of 0.8: its globals are those of each episode
        ("openrlhf_constructed.py", "It is {}."),
    ],
)
def test_an_agent_file_of_openrlhf_is_played_unchanged(opened, file, script):
    def say(request: SamplingRequest, turn: int) -> str:
        return script.format(turn)

    episodes, sampler = played(opened(file), ["1", "x", "0"], say)
    again, _ = played(opened(file), ["1", "x", "0"], say)
    first, second, third = (episode.completion for episode in episodes)
    assert [one.failure for one in (first, second, third)] == [""] * 3
    assert episodes == again  # its random.randint is the episode's own
    assert [span.reward for span in first.spans] == [0.0, 1.0] and [span.reward for span in third.spans] == [1.0]
    assert first.extras == {"tries": 2.0, "score": 1.0} and third.extras == {"tries": 1.0, "score": 1.0}
    between = first.token_ids[first.spans[0].end : first.spans[1].start]
    assert between == tuple(
        chat().tokenizer(AGAIN, add_special_tokens=False)["input_ids"]
    )  # that text, tokenized alone
    assert sampled_as_it_stands(episodes, sampler)


def test_a_folder_of_the_same_name_on_the_import_path_is_not_taken_for_openrlhf(tmp_path, monkeypatch):
    (tmp_path / "openrlhf").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "openrlhf"]:
        monkeypatch.delitem(sys.modules, name)
    importlib.import_module("openrlhf")  # as one who looked for it left it behind
    provide_modules()
    try:
        assert importlib.import_module("openrlhf.utils.agent").AgentExecutorBase is AgentExecutorBase
    finally:
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.mark.slow  # the first with a file starts its process
@pytest.mark.parametrize(
    ("file", "label", "failure"),
    [
        ("openrlhf_executor.py", "unpaid", "without any reward"),
        ("openrlhf_executor.py", "forged", "are not as they were sampled"),
        ("openrlhf_executor.py", "hot", "sampling_params.temperature = 2.0"),
        ("openrlhf_executor.py", "garbled", "scores = 'good': must be one finite number, or None"),
        ("openrlhf_step.py", "rewrites", "must begin with observation + action"),
        ("openrlhf_constructed.py", "silent", "ended without putting an episode on result_queue"),
    ],
)
def test_what_an_episode_fails_for_is_named(opened, file, label, failure):
    (episode,), _ = played(opened(file), [label], lambda request, turn: "a number")
    assert failure in episode.completion.failure


@pytest.mark.slow  # the first with a file starts its process
def test_a_step_limit_ends_it_with_what_it_earned_so_far(opened):
    episodes, _ = played(opened("openrlhf_agent.py"), ["x"], lambda request, turn: "no", max_turns=1)
    completion = episodes[0].completion
    assert completion.finish_reason == "length" and len(completion.spans) == 1 and not completion.failure


@pytest.mark.slow  # the first with a file starts its process
def test_an_executor_of_its_own_names_the_turns_that_count(opened):
    asked: set[tuple[int, ...]] = set()

    def script(request: SamplingRequest, turn: int) -> str:
        second = request.prompt_ids in asked
        asked.add(request.prompt_ids)
        return "cd" if second else "ab"

    (episode,), sampler = played(opened("openrlhf_executor.py"), ["kept"], script)
    kept = episode.completion
    assert kept.text == "cd" and len(kept.spans) == 1 and kept.spans[0].reward == 0.25 and kept.extras == {"score": 0.5}
    assert kept.logprobs and all(kept.logprobs)
    assert [request.max_tokens for request in sampler.batches[0]] == [9]
    (own,), sampler = played(opened("openrlhf_constructed.py"), ["own"], script)
    assert own.completion.spans[0].reward == 0.25 and own.completion.extras == {"score": 0.5}
    assert sampled_as_it_stands([own], sampler)


@pytest.mark.slow  # the first with a file starts its process
def test_a_prompt_is_kept_by_the_scores_beside_its_rewards(opened):
    episodes, _ = played(opened("openrlhf_executor.py"), ["won", "lost"], lambda request, turn: "ab")
    made = [Generation(prompt(0, ""), one.prompt_ids, one.completion) for one in episodes]
    rollouts = Scorer(RewardsConfig(terms={"won": EpisodeReward()}), {"won": episode_reward})(made)
    assert [one.reward for one in rollouts] == [1.0, -1.0]
    # Their mean is 0, which is not above 0; that of the scores, 1 and 0, lies between the bounds.
    assert is_decided(rollouts, DynamicSampling(low=0.0, high=1.0))


@pytest.mark.slow  # the first with a file starts its process
def test_a_step_function_of_the_first_0_8_returns_a_tuple(opened):
    episodes, sampler = played(opened("openrlhf_first_step.py"), ["a", "b"], lambda request, turn: f"turn {turn}")
    for episode in episodes:
        completion = episode.completion
        assert completion.failure == "" and completion.extras == {"score": 0.75}
        assert [span.reward for span in completion.spans] == [0.25, 0.5]
    assert sampled_as_it_stands(episodes, sampler)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("class Agent: ...\n", "neither a class AgentExecutor nor a function"),
        ("def step(observation, action, label): ...\n", "neither a class AgentExecutor nor a function"),
        (
            "class AgentExecutor:\n    def __init__(self, max_steps, secret): ...\n    async def execute(self): ...\n",
            r"AgentExecutor\(max_steps, secret\) can be constructed neither",
        ),
    ],
)
def test_a_file_that_no_version_of_openrlhf_could_play_is_refused(tmp_path, content, rule):
    (tmp_path / "agent.py").write_text(content)
    with pytest.raises(ConfigError, match=rf"agent\.file.*{rule}"):
        open_agent(OpenRLHFAgent(file=str(tmp_path / "agent.py")), tokenizer=chat_folder())


def test_what_is_digested_is_what_the_file_defines():
    names = {file: OpenRLHFAgent(file=str(HERE / file)).callables()[0].rpartition(":")[2] for file in (
        "openrlhf_agent.py", "openrlhf_step.py", "openrlhf_constructed.py", "nowhere.py"
    )}  # fmt: skip
    assert names == {
        "openrlhf_agent.py": "AgentExecutor",
        "openrlhf_step.py": "step",
        "openrlhf_constructed.py": "AgentExecutor",
        "nowhere.py": "AgentExecutor",  # where the error says what is looked for
    }


def test_a_result_without_the_conversation_is_an_error():
    with pytest.raises(KeyError, match="observation_tokens"):
        as_result({"reward": 1.0})
