"""Partial rollouts: every step has its groups, whole, whatever the lengths; every token is known by who sampled it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.data.shards import Pool
from rlhf_core.errors import SamplingError
from rlhf_core.rollouts.answers import PartialAnswers
from rlhf_core.types import Generation, SamplingRequest, derive_seed
from tests.rlhf_core.rollouts.fake_engines import PROMPT_LENGTH, PROMPTS, FakeChat, FakeSampler


def answers(
    sampler: FakeSampler, *, prompts: int, group: int, tokens: int, rounds: int, in_flight: int
) -> PartialAnswers:
    return PartialAnswers(
        engine=sampler,
        chat=FakeChat(),
        prompts=PROMPTS,
        sampling=SamplingConfig(max_tokens=tokens * rounds),
        groups=prompts,
        group_size=group,
        seed=3,
        tokens=tokens,
        in_flight_groups=in_flight,
    )


def steps_of(sampler: FakeSampler, count: int, **sizes: int) -> list[tuple[list[Generation], Pool]]:
    """Return what `count` steps draw, each under a new version."""
    draw, pool, made = answers(sampler, **sizes), Pool(), []
    for version in range(count):
        sampler.version = version
        drawn, pool = draw(version, pool)
        made.append((drawn, pool))
    return made


def of_the_state(most: int, salt: int) -> FakeSampler:
    """A sampler whose answers are as long as a draw from prompt and tokens so far says."""

    def length(request: SamplingRequest) -> int:
        made = len(request.prompt_ids) - PROMPT_LENGTH
        return made + 1 + derive_seed(salt, request.seed) % (2 * most)

    return FakeSampler(length)


sizes = {
    "prompts": st.integers(1, 5),
    "group": st.integers(1, 3),
    "tokens": st.integers(1, 4),
    "rounds": st.integers(2, 4),
    "more": st.integers(0, 9),
    "salt": st.integers(0, 1000),
}


@settings(max_examples=150)
@given(**sizes)
def test_no_sizes_and_no_lengths_lock_up_and_no_group_is_lost_torn_or_older_than_the_bound(
    prompts, group, tokens, rounds, more, salt
):
    in_flight = prompts + more
    given = {"prompts": prompts, "group": group, "tokens": tokens, "rounds": rounds, "in_flight": in_flight}
    sampler = of_the_state(tokens * rounds, salt)
    taken: list[int] = []
    for step, (drawn, pool) in enumerate(steps_of(sampler, 9, **given)):
        assert len(drawn) == prompts * group
        assert len(pool.samples) == (in_flight - prompts) * group
        assert pool.begun == in_flight + step * prompts
        for start in range(0, len(drawn), group):
            members = drawn[start : start + group]
            assert len({one.prompt.id for one in members}) == 1
            taken.append(members[0].completion.seed)
            for one in members:
                made = one.completion
                assert made.finish_reason == "stop" or len(made.token_ids) == tokens * rounds
                assert [span.start for span in made.spans] == [0, *(span.end for span in made.spans[:-1])]
                assert made.spans[-1].end == len(made.token_ids)
                for span in made.spans:  # ids and log-probs are those of the version that the span names
                    assert set(made.token_ids[span.start : span.end]) == {100 + span.policy_version}
                    assert set(made.logprobs[span.start : span.end]) == {-1.0 - span.policy_version}
                oldest = made.spans[0].policy_version
                assert step - oldest <= rounds - 1 + (in_flight - 1) // prompts
    assert len(taken) == len(set(taken))
    per_version = [sum(version == step for version, _ in sampler.batches) for step in range(9)]
    assert max(per_version) <= rounds


def test_an_answer_goes_on_from_its_own_tokens_with_a_seed_of_its_own_per_segment():
    sampler = FakeSampler(lambda request: 4)
    ((drawn, pool),) = steps_of(sampler, 1, prompts=1, group=2, tokens=2, rounds=2, in_flight=1)
    (_, first), (_, second) = sampler.batches
    assert [request.prompt_ids for request in second] == [(*request.prompt_ids, 100, 100) for request in first]
    assert len({request.seed for request in first + second}) == 4
    assert [one.completion.seed for one in drawn] != [request.seed for request in first]
    assert drawn[0].completion.text == "100 100 100 100"
    assert pool == Pool(begun=1)


def test_prompts_come_in_their_order_and_a_prompt_that_comes_again_has_other_seeds():
    steps = steps_of(FakeSampler(), 2, prompts=7, group=1, tokens=1, rounds=2, in_flight=7)
    drawn = [one for step, _ in steps for one in step]
    assert sorted(one.prompt.id for one in drawn[:7]) == sorted(one.prompt.id for one in drawn[7:])
    assert len({one.completion.seed for one in drawn}) == 14


def test_a_sampler_that_cuts_answers_short_ends_in_an_error_and_not_in_a_loop():
    class Short(FakeSampler):
        def _answer(self, request: SamplingRequest, most: int):
            return super()._answer(request, 1)

    with pytest.raises(SamplingError, match=r"ahead\.tokens = 4: the sampler ended answers early: 0 of 1 groups"):
        steps_of(Short(lambda request: 99), 1, prompts=1, group=1, tokens=4, rounds=2, in_flight=1)
