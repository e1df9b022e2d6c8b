import itertools
from collections.abc import Callable
from typing import Any

import pytest

from rlhf_core.agents.conversation import EpisodeResult
from rlhf_core.agents.episodes import Episode, play_episodes
from rlhf_core.agents.process import Environments
from rlhf_core.config.agents import EnvironmentAgent
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.types import Message, SamplingRequest
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
        return play_episodes(sampler, template, episodes, environments, config, sampling), sampler


def numbered(request: SamplingRequest, turn: int) -> str:
    return f"It is {turn}."


@pytest.mark.parametrize("scheduling", ["lockstep", "continuous"])
def test_an_environment_is_played_until_it_is_done(scheduling):
    (first, second), _ = played("Echo", ["1", "7"], numbered, scheduling=scheduling)
    assert len(first.completion.spans) == 2 and len(second.completion.spans) == 3
    assert [span.reward for span in first.completion.spans] == [0.0, 1.0]
    assert [span.reward for span in second.completion.spans] == [0.0, 0.0, 0.0]
    assert first.completion.extras == {"said": 1.0} and first.completion.finish_reason == "stop"


def test_what_is_trained_is_what_was_sampled_though_encoding_its_text_gives_other_tokens():
    (episode,), sampler = played("Echo", ["7"], numbered)
    template, completion = chat(), episode.completion
    whole = episode.prompt_ids + completion.token_ids
    for span in completion.spans:
        start, end = (len(episode.prompt_ids) + bound for bound in (span.start, span.end))
        assert sampler.said[whole[:start]] == whole[start:end]
        text = template.tokenizer.decode(list(whole[start : end - 1]))
        assert tuple(template.tokenizer(text, add_special_tokens=False)["input_ids"]) != whole[start : end - 1]
    assert completion.action_mask.count(0) == 2 * len(template.turn_ids([Message("user", "turn 0")]))


def test_each_request_is_all_that_was_said_before_and_the_environment_s_turn():
    _, sampler = played("Echo", ["7"], numbered)
    template = chat()
    requests = [batch[0].prompt_ids for batch in sampler.batches]
    for number, (before, after) in enumerate(itertools.pairwise(requests)):
        assert after == before + sampler.said[before] + template.turn_ids([Message("user", f"turn {number}")])
    assert template.tokenizer.decode(list(requests[1])).endswith(
        "<|assistant|>It is 0.<|end|><|user|>turn 0<|end|><|assistant|>"
    )


def test_the_log_probabilities_of_the_environment_s_tokens_are_0_and_the_others_the_sampler_s():
    (episode,), _ = played("Echo", ["7"], numbered)
    completion = episode.completion
    assert all((value == 0.0) == (sampled == 0) for value, sampled in zip(completion.logprobs, completion.action_mask))


def test_lockstep_makes_the_same_batches_again():
    labels = ["0", "1", "2", "7"]
    first, one = played("Patient", labels, numbered, processes=2)
    second, other = played("Patient", labels, numbered, processes=1)
    assert one.batches == other.batches and first == second
    assert len(one.batches) == 2 and all(len(batch) == 4 for batch in one.batches)


def test_an_environment_s_global_randomness_is_its_own_and_its_words_are_added_to_the_prompt():
    together, _ = played("Patient", ["0", "1"], numbered)
    alone, _ = played("Patient", ["0"], numbered)
    assert alone[0] == together[0]
    assert together[0].prompt_ids != together[1].prompt_ids  # other seeds, other numbers drawn
    text = chat().tokenizer.decode(list(alone[0].prompt_ids))
    assert text.startswith("<|user|>What is 0?\n\nDraw ") and text.endswith(".<|end|><|assistant|>")


def test_a_turn_that_is_cut_is_judged_and_ends_the_episode_as_too_long():
    (episode,), sampler = played("Echo", ["It"], numbered, max_tokens=3)
    assert episode.completion.finish_reason == "length" and len(sampler.batches) == 1
    assert episode.completion.spans[0].reward == 1.0 and not episode.completion.failure


def test_the_limits_of_turns_and_tokens_end_an_episode_as_too_long():
    (whole,), _ = played("Echo", ["7"], numbered)
    _, second, _ = whole.completion.spans
    before = len(whole.prompt_ids)
    for limits, end in (
        ({"max_turns": 2}, second.end),
        ({"max_episode_tokens": before + second.end + 4}, second.end),  # less than the environment's turn
        ({"max_episode_tokens": before + second.start + 2}, second.start + 2),  # the last turn is given what is left
    ):
        (episode,), sampler = played("Echo", ["7"], numbered, **limits)
        assert episode.completion.finish_reason == "length" and len(sampler.batches) == 2
        assert episode.completion.token_ids == whole.completion.token_ids[:end]
    assert sampler.batches[1][0].max_tokens == 2


def test_the_first_turn_is_what_plain_sampling_would_ask_for():
    _, sampler = played("Echo", ["7"], numbered)
    template = chat()
    request = sampler.batches[0][0]
    assert (request.prompt_ids, request.seed) == (template.prompt_ids(prompt(0, "").messages), 100)
    assert len({batch[0].seed for batch in sampler.batches}) == 3
