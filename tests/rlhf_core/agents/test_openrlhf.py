from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.agents.episodes import Episode, play
from rlhf_core.agents.openrlhf import as_result
from rlhf_core.agents.process import Environments
from rlhf_core.agents.transcript import Played
from rlhf_core.config.agents import OpenRLHFAgent
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.errors import ConfigError
from rlhf_core.types import SamplingRequest
from tests.rlhf_core.agents.scripted import ScriptedSampler, chat, chat_folder, prompt

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
) -> tuple[list[Played], ScriptedSampler]:
    config = environments.config.model_copy(update={"retries": 0} | limits)
    template, sampling = chat(), SamplingConfig(max_tokens=12)
    sampler = ScriptedSampler(template, script)
    prompts = [prompt(number, label) for number, label in enumerate(labels)]
    episodes = [Episode(one, template.prompt_ids(one.messages), 100 + i) for i, one in enumerate(prompts)]
    return play(sampler, template, episodes, environments, config, sampling), sampler


def test_an_agent_file_of_openrlhf_is_played_unchanged(opened: Opened) -> None:
    def script(request: SamplingRequest, turn: int) -> str:
        return f"It is {turn}."

    episodes, sampler = played(opened("openrlhf_agent.py"), ["1", "x", "0"], script)
    again, _ = played(opened("openrlhf_agent.py"), ["1", "x", "0"], script)
    first, second, third = (episode.completion for episode in episodes)
    assert [one.failure for one in (first, second, third)] == [""] * 3
    assert episodes == again  # its random.randint is the episode's own
    assert [span.reward for span in first.spans] == [0.0, 1.0] and len(third.spans) == 1
    assert first.extras == {"tries": 2.0, "score": 1.0}
    template = chat()
    between = first.token_ids[first.spans[0].end : first.spans[1].start]
    raw = template.tokenizer("\n\nHuman: no, again\nAssistant: ", add_special_tokens=False)["input_ids"]
    assert between == tuple(raw)  # exactly that text, tokenised alone
    for episode in episodes:
        whole = episode.prompt_ids + episode.completion.token_ids
        for span in episode.completion.spans:
            start, end = (len(episode.prompt_ids) + bound for bound in (span.start, span.end))
            assert sampler.said[whole[:start]] == whole[start:end]


def test_an_executor_that_says_no_reward_has_failed(opened: Opened) -> None:
    (episode,), _ = played(opened("openrlhf_executor.py"), ["unpaid"], lambda request, turn: "ab")
    assert "without any reward" in episode.completion.failure


def test_a_step_limit_ends_it_with_what_it_earned_so_far(opened: Opened) -> None:
    episodes, _ = played(opened("openrlhf_agent.py"), ["x"], lambda request, turn: "no", max_turns=1)
    completion = episodes[0].completion
    assert completion.finish_reason == "length" and len(completion.spans) == 1 and not completion.failure


def test_an_executor_of_its_own_names_the_turns_that_count_and_may_not_change_their_tokens(opened: Opened) -> None:
    asked: set[tuple[int, ...]] = set()

    def script(request: SamplingRequest, turn: int) -> str:
        second = request.prompt_ids in asked
        asked.add(request.prompt_ids)
        return "cd" if second else "ab"

    episodes, sampler = played(opened("openrlhf_executor.py"), ["kept", "forged", "hot"], script)
    kept, forged, hot = (episode.completion for episode in episodes)
    assert kept.text == "cd" and len(kept.spans) == 1 and kept.spans[0].reward == 0.25 and kept.extras == {"score": 0.5}
    assert kept.logprobs and all(kept.logprobs)
    assert "are not as they were sampled" in forged.failure
    assert "sampling_params.temperature = 2.0" in hot.failure
    assert [request.max_tokens for request in sampler.batches[0]] == [9, 9]


def test_a_file_without_an_executor_is_refused(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("class Agent: ...\n")
    with pytest.raises(ConfigError, match=r"agent\.file"):
        Environments(OpenRLHFAgent(file=str(tmp_path / "agent.py")), tokenizer=chat_folder())


def test_a_result_without_the_conversation_is_an_error() -> None:
    with pytest.raises(KeyError, match="observation_tokens"):
        as_result({"reward": 1.0})
