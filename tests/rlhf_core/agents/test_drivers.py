"""Programs' conversations are held against what was sampled; what environments are told of a prompt."""

import pytest

from rlhf_core.agents.drivers import EnvironmentDriver, ProgramDriver, Rules, prompt_columns, with_added
from rlhf_core.agents.environment import StepResult
from rlhf_core.agents.programs import Ask, EpisodeFailed, ProgramResult
from rlhf_core.config.agents import EnvironmentAgent
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.types import ActionSpan, Completion, Message, SamplingRequest, label_fields
from tests.rlhf_core.agents.scripted import chat, prompt


def rules(**limits: int) -> Rules:
    return Rules(chat(), EnvironmentAgent(environment="m:E", **limits), SamplingConfig(max_tokens=8))


def said(*token_ids: int, logprob: float = -0.5) -> Completion:
    return Completion(token_ids, (logprob,) * len(token_ids), "", "stop", 4, 0)


def game(*turns: tuple[tuple[int, ...], Completion], **limits: int) -> ProgramDriver:
    """A program that asked for each prompt and was given each completion."""
    made = ProgramDriver((10, 11), 7, rules(**limits))
    for asked, completion in turns:
        assert isinstance(made.on_observation("asks", Ask(asked)), SamplingRequest)
        made.on_completion(completion)
    return made


TURNS = (((10, 11), said(20, 21)), ((10, 11, 20, 21, 30), said(22, 23)))


def test_turns_that_follow_each_other_become_one_completion():
    made = game(*TURNS)
    assert made.on_observation("finished", ProgramResult((0.25, 1.0), extras={"calls": 2})) is None
    completion = made.result().completion
    assert completion.token_ids == (20, 21, 30, 22, 23) and completion.logprobs == (-0.5, -0.5, 0.0, -0.5, -0.5)
    assert completion.spans == (ActionSpan(0, 2, 4, 0.25), ActionSpan(3, 5, 4, 1.0))
    assert completion.extras == {"calls": 2.0} and completion.finish_reason == "stop"


def test_one_reward_for_all_stands_at_the_last_turn():
    made = game(*TURNS)
    made.on_observation("finished", ProgramResult((0.75,), truncated=True))
    completion = made.result().completion
    assert [span.reward for span in completion.spans] == [0.0, 0.75] and completion.finish_reason == "length"


def test_a_past_that_was_tokenised_again_fails_and_is_never_trained_on():
    made = game(TURNS[0], ((10, 11, 99, 30), said(22)))  # one token 99 where 20, 21 were sampled
    with pytest.raises(EpisodeFailed, match="turn 2 was requested with another history"):
        made.on_observation("finished", ProgramResult((1.0,)))
    assert made.result("why").completion.token_ids == (20, 21)


def test_ranges_name_the_turns_that_count():
    made = game(((10, 11), said(1, 1)), *TURNS)
    tokens = (10, 11, 20, 21, 30, 22, 23)
    made.on_observation("finished", ProgramResult((1.0,), token_ids=tokens, actions=((2, 4), (5, 7))))
    assert made.result().completion.token_ids == (20, 21, 30, 22, 23)


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (ProgramResult((1.0,), token_ids=(10, 11, 20, 99), actions=((2, 4),)), "not as they were sampled"),
        (ProgramResult((1.0,), token_ids=(10, 11, 20), actions=((2, 3),)), "not as they were sampled"),
        (ProgramResult((1.0, 1.0, 1.0)), "3 rewards for 2 turns"),
        (ProgramResult((float("inf"),)), "must be finite"),
    ],
)
def test_a_result_that_does_not_fit_fails(result, reason):
    with pytest.raises(EpisodeFailed, match=reason):
        game(*TURNS).on_observation("finished", result)


def test_a_program_without_a_turn_fails():
    with pytest.raises(EpisodeFailed, match="without a turn"):
        game().on_observation("finished", ProgramResult((1.0,)))


def test_what_is_past_a_limit_is_refused_and_the_rest_of_the_budget_is_granted():
    assert game(TURNS[0], max_turns=1).on_observation("asks", Ask((10, 11, 20))) == (
        "answer",
        ("max_turns = 1 turns were taken",),
    )
    short = game(TURNS[0], max_episode_tokens=6)
    assert short.on_observation("asks", Ask((10, 11, 20, 21, 30, 31)))[0] == "answer"
    granted = short.on_observation("asks", Ask((10, 11, 20, 21, 30), max_tokens=5))
    assert isinstance(granted, SamplingRequest) and granted.max_tokens == 1


def test_a_turn_that_ended_with_another_stop_token_is_closed_by_the_template_s_own():
    shared = rules()
    one = prompt(1, "1")
    made = EnvironmentDriver(one, shared.chat.prompt_ids(one.messages), 7, shared)
    made.on_observation("observed", None)
    made.on_completion(said(20, 5))  # not the template's end of turn
    request = made.on_observation("stepped", StepResult("go on"))
    assert isinstance(request, SamplingRequest)
    tail = (20, 5, shared.chat.eos_id, *shared.chat.turn_ids([Message("user", "go on")]))
    assert request.prompt_ids[-len(tail) :] == tail


def test_columns_of_a_label_that_is_json_do_not_hide_the_prompt_s_own():
    columns = prompt_columns(prompt(3, '{"secret": 4, "id": "forged"}'), "text")
    assert (columns["secret"], columns["id"], columns["text"]) == (4, "q3", "text")
    assert label_fields("42") == {} and label_fields("{not json") == {}
    assert label_fields(f'{{"n": {"1" * 5000}}}') == {}, "more digits than Python reads"
    assert label_fields('{"n": ' + "[" * 5000) == {}


def test_an_addition_to_a_prompt_that_ends_with_another_role_is_a_turn_of_its_own():
    messages = (Message("user", "Hi"), Message("assistant", "Hello"))
    assert with_added(messages, "Guess.") == (*messages, Message("user", "Guess."))
