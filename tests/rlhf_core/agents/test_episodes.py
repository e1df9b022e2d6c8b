from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from rlhf_core.agents.conversation import EpisodeResult
from rlhf_core.agents.episodes import Episode, play
from rlhf_core.agents.process import Environments
from rlhf_core.config.agents import EnvironmentAgent
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.types import SamplingRequest
from tests.rlhf_core.agents.scripted import WORLDS, ScriptedSampler, chat, chat_folder, prompt


def played(
    name: str, labels: list[str], script: Callable[[SamplingRequest, int], str], **settings: Any
) -> tuple[list[EpisodeResult], ScriptedSampler]:
    """Play one episode per label with `script`; settings of the sampling stand among the agent's."""
    sampling = SamplingConfig(max_tokens=settings.pop("max_tokens", 24))
    config = EnvironmentAgent(environment=f"{WORLDS}:{name}", **settings)
    template = chat()
    sampler = ScriptedSampler(template, script)
    episodes = [
        Episode(one, template.prompt_ids(one.messages), 100 + number)
        for number, one in enumerate(prompt(number, label) for number, label in enumerate(labels))
    ]
    with Environments(config, tokenizer=chat_folder()) as environments:
        return play(sampler, template, episodes, environments, config, sampling), sampler


def numbered(request: SamplingRequest, turn: int) -> str:
    return f"It is {turn}."


@pytest.mark.parametrize("scheduling", ["lockstep", "continuous"])
def test_an_environment_is_played_until_it_is_done(scheduling: str) -> None:
    (first, second), _ = played("Echo", ["1", "7"], numbered, scheduling=scheduling)
    assert len(first.completion.spans) == 2 and len(second.completion.spans) == 3
    assert [span.reward for span in first.completion.spans] == [0.0, 1.0]
    assert [span.reward for span in second.completion.spans] == [0.0, 0.0, 0.0]
    assert first.completion.extras == {"said": 1.0} and first.completion.finish_reason == "stop"


def test_what_is_trained_is_what_was_sampled_though_encoding_its_text_gives_other_tokens() -> None:
    (episode,), sampler = played("Echo", ["7"], numbered)
    template, completion = chat(), episode.completion
    whole = episode.prompt_ids + completion.token_ids
    for span in completion.spans:
        start, end = (len(episode.prompt_ids) + bound for bound in (span.start, span.end))
        assert sampler.said[whole[:start]] == whole[start:end]
        text = template.tokenizer.decode(list(whole[start : end - 1]))
        assert tuple(template.tokenizer(text, add_special_tokens=False)["input_ids"]) != whole[start : end - 1]
    assert completion.action_mask.count(0) == 2 * len(template.turn_ids(messages("turn 0")))


def messages(text: str) -> list[Any]:
    from rlhf_core.types import Message

    return [Message("user", text)]


def test_each_request_is_all_that_was_said_before_and_the_environment_s_turn() -> None:
    _, sampler = played("Echo", ["7"], numbered)
    template = chat()
    requests = [batch[0].prompt_ids for batch in sampler.batches]
    for number, (before, after) in enumerate(itertools.pairwise(requests)):
        assert after == before + sampler.said[before] + template.turn_ids(messages(f"turn {number}"))
    assert template.tokenizer.decode(list(requests[1])).endswith(
        "<|assistant|>It is 0.<|end|><|user|>turn 0<|end|><|assistant|>"
    )


def test_the_log_probabilities_of_the_environment_s_tokens_are_0_and_the_others_the_sampler_s() -> None:
    (episode,), _ = played("Echo", ["7"], numbered)
    completion = episode.completion
    assert all((value == 0.0) == (sampled == 0) for value, sampled in zip(completion.logprobs, completion.action_mask))


def test_lockstep_makes_the_same_batches_again() -> None:
    labels = ["0", "1", "2", "7"]
    first, one = played("Patient", labels, numbered, processes=2)
    second, other = played("Patient", labels, numbered, processes=1)
    assert one.batches == other.batches and first == second
    assert len(one.batches) == 2 and all(len(batch) == 4 for batch in one.batches)


def test_an_environment_s_global_randomness_is_its_own() -> None:
    together, _ = played("Patient", ["0", "1"], numbered)
    alone, _ = played("Patient", ["0"], numbered)
    assert alone[0] == together[0]
    assert together[0].prompt_ids != together[1].prompt_ids  # other seeds, other numbers drawn


def test_what_reset_returns_is_added_to_the_prompt() -> None:
    (episode,), _ = played("Patient", ["0"], numbered)
    text = chat().tokenizer.decode(list(episode.prompt_ids))
    assert text.startswith("<|user|>What is 0?\n\nDraw ") and text.endswith(".<|end|><|assistant|>")


def test_a_turn_that_is_cut_is_judged_and_ends_the_episode_as_too_long() -> None:
    (episode,), sampler = played("Echo", ["It"], numbered, max_tokens=3)
    assert episode.completion.finish_reason == "length" and len(sampler.batches) == 1
    assert episode.completion.spans[0].reward == 1.0 and not episode.completion.failure


def test_the_step_limit_ends_an_episode_as_too_long() -> None:
    (episode,), _ = played("Echo", ["7"], numbered, max_turns=2)
    assert len(episode.completion.spans) == 2 and episode.completion.finish_reason == "length"


def test_the_budget_of_tokens_ends_an_episode_as_too_long() -> None:
    (whole,), _ = played("Echo", ["7"], numbered)
    size = len(whole.prompt_ids) + whole.completion.spans[1].end
    (episode,), _ = played("Echo", ["7"], numbered, max_episode_tokens=size + 4)
    assert episode.completion.finish_reason == "length"
    assert episode.completion.token_ids == whole.completion.token_ids[: whole.completion.spans[1].end]


def test_the_last_turn_is_given_no_more_tokens_than_the_budget_has() -> None:
    (whole,), _ = played("Echo", ["7"], numbered)
    start = len(whole.prompt_ids) + whole.completion.spans[1].start
    (episode,), sampler = played("Echo", ["7"], numbered, max_episode_tokens=start + 2)
    assert sampler.batches[1][0].max_tokens == 2
    assert len(episode.prompt_ids + episode.completion.token_ids) == start + 2


def test_a_prompt_that_fills_the_budget_fails_by_name() -> None:
    (episode,), sampler = played("Echo", ["7"], numbered, max_episode_tokens=4)
    assert "max_episode_tokens = 4 leaves none to sample" in episode.completion.failure and not sampler.batches


def test_the_first_turn_is_what_plain_sampling_would_ask_for() -> None:
    _, sampler = played("Echo", ["7"], numbered)
    template = chat()
    request = sampler.batches[0][0]
    assert (request.prompt_ids, request.seed) == (template.prompt_ids(prompt(0, "").messages), 100)
    assert len({batch[0].seed for batch in sampler.batches}) == 3


def test_the_deadline_of_an_episode_holds_for_an_environment_that_never_awaits() -> None:
    (episode,), _ = played("Dawdling", ["0.3"], numbered, retries=0, max_turns=4, episode_timeout_s=0.5)
    assert "episode_timeout_s = 0.5 was over" in episode.completion.failure


def test_a_step_that_ends_after_its_deadline_is_late_though_it_never_awaits() -> None:
    (episode,), _ = played("Dawdling", ["0.5"], numbered, retries=0, step_timeout_s=0.2)
    assert "step_timeout_s = 0.2" in episode.completion.failure


def test_what_no_file_can_hold_is_taken_out_of_a_failure() -> None:
    (episode,), _ = played("Faulty", ["surrogate"], numbered, retries=0)
    assert episode.completion.failure.endswith("half a ?") and episode.completion.failure.encode()
