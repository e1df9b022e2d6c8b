"""Generations to rollouts: terms, composition and shaping in their order."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any

import pytest

from rlhf_core.config.rewards import (
    EnsembleReward,
    FunctionReward,
    GatedProduct,
    Gdpo,
    OverlongPenalty,
    ProcessRewardModelReward,
    RewardModelReward,
    RewardsConfig,
    TruncatedReward,
    WeightedSum,
    check_sources,
)
from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.rewards.batches import BatchedReward, RewardOutcome
from rlhf_core.rewards.model import check_reward_models
from rlhf_core.rewards.scoring import (
    Scorer,
    component_means,
    compose,
    gated_product,
    in_group,
    weighted_sum,
)
from rlhf_core.rewards.shaping import RunningNormalizer, linear_weight, soft_overlong
from rlhf_core.types import ActionSpan, Generation, ProcessRewardModelRef, RewardModelRef
from tests.rlhf_core.rewards.answers import answer

TERMS = {
    "length": FunctionReward(function="m:length", weight=1.0),
    "constant": FunctionReward(function="m:constant", weight=2.0),
}


def failing(reason: str) -> Callable[[Sequence[Generation]], RewardOutcome]:
    """A reward that fails for answers of three tokens and does not apply to those of four."""

    def ask(generations: Sequence[Generation]) -> RewardOutcome:
        sizes = [len(one.completion.token_ids) for one in generations]
        failures = {at: reason for at, size in enumerate(sizes) if size == 3}
        return RewardOutcome(
            tuple(None if size in (3, 4) else 1.0 for size in sizes), failures, {"seen": (6.0, len(sizes))}
        )

    return ask


def part(ask: Callable[[Sequence[Generation]], RewardOutcome]) -> BatchedReward:
    return BatchedReward("part", [ask], batch_size=0, retries=0, on_failure="invalid")


def length(generations: Sequence[Generation]) -> RewardOutcome:
    return RewardOutcome(tuple(float(len(one.completion.token_ids)) for one in generations))


def constant(generations: Sequence[Generation]) -> RewardOutcome:
    return RewardOutcome((0.5,) * len(generations))


def answers(*lengths: int) -> list[Generation]:
    made = [answer("text", tokens=(3,) * size) for size in lengths]
    return [replace(one, completion=replace(one.completion, seed=seed)) for seed, one in enumerate(made)]


def scorer(config: RewardsConfig) -> Scorer:
    return Scorer(config, {"length": length, "constant": constant})


def test_a_rollout_keeps_its_completion_and_its_unweighted_components():
    generations = answers(2, 4)
    rollouts = scorer(RewardsConfig(terms=TERMS))(generations)
    assert [rollout.reward for rollout in rollouts] == [3.0, 5.0]  # length + 2 * 0.5
    assert rollouts[1].reward_components == {"length": 4.0, "constant": 0.5}
    assert [rollout.completion for rollout in rollouts] == [one.completion for one in generations]


def test_the_clip_comes_before_the_overlong_penalty():
    overlong = OverlongPenalty(max_tokens=10, buffer_tokens=4, factor=1.0)
    rollouts = scorer(RewardsConfig(terms=TERMS, clip=4.0, overlong=overlong))(answers(2, 8))
    # length 8: clip(9, 4) = 4, penalty -(8 - 6)/4 = -0.5
    assert [rollout.reward for rollout in rollouts] == [3.0, 3.5]
    assert [rollout.reward_components["overlong"] for rollout in rollouts] == [0.0, -0.5]


def test_the_words_of_an_environment_are_not_the_policys_length():
    overlong = OverlongPenalty(max_tokens=10, buffer_tokens=4, factor=1.0)
    (one,) = answers(12)
    episode = replace(one, completion=replace(one.completion, spans=(ActionSpan(0, 3, 0), ActionSpan(8, 12, 0))))
    (rollout,) = scorer(RewardsConfig(terms=TERMS, overlong=overlong))([episode])
    assert rollout.reward_components["overlong"] == -0.25  # 7 sampled tokens: -(7 - 6)/4


def test_running_normalisation_goes_on_from_a_checkpoint():
    config = RewardsConfig(terms=TERMS, normalize="running")
    whole = scorer(config)
    whole(answers(1, 3))
    expected = [rollout.reward for rollout in whole(answers(5))]
    first = scorer(config)
    assert [rollout.reward for rollout in first(answers(1, 3))] == pytest.approx([-1.0, 1.0], rel=1e-6)
    resumed = scorer(config)
    kept = json.loads(json.dumps(first.state()))
    del kept["failed"]  # as an earlier version kept it
    resumed.restore(kept)
    # 1, 3, 5 (+1 each): mean 3, variance 8/3
    assert expected == pytest.approx([2 / (8 / 3) ** 0.5], rel=1e-6)
    assert [rollout.reward for rollout in resumed(answers(5))] == expected


def test_a_reward_that_is_not_a_number_names_its_term():
    wrong = RewardOutcome((math.nan,))
    broken = Scorer(RewardsConfig(terms=TERMS), {"length": length, "constant": lambda _: wrong})
    with pytest.raises(RewardError, match=r"rewards\.constant\[prompt p\]"):
        broken(answers(1))


def test_a_term_whose_reward_model_was_not_given_is_refused_with_the_nearest():
    config = RewardsConfig(terms={"quality": RewardModelReward(model="reward_modle")})
    given = {"reward_model": RewardModelRef(uri="store://a", digest="a")}
    with pytest.raises(
        ConfigError, match=r"rewards\.terms\.quality\.model = 'reward_modle'.*did you mean reward_model"
    ):
        check_reward_models(config, given)
    with pytest.raises(ConfigError, match="the stage has none"):
        check_reward_models(config, {})


def test_every_model_of_every_kind_of_term_must_be_there_and_of_its_kind():
    judge, model = ProcessRewardModelRef(uri="store://j", digest="j"), RewardModelRef(uri="store://a", digest="a")
    given = {"reward_model": model, "process_reward_model": judge}
    good = {"steps": ProcessRewardModelReward(), "both": EnsembleReward(models=("reward_model", "reward_model"))}
    check_reward_models(RewardsConfig(terms=good), given)
    missing = EnsembleReward(models=("reward_model", "other"))
    with pytest.raises(ConfigError, match=r"rewards\.terms\.e\.models\[1\] = 'other'"):
        check_reward_models(RewardsConfig(terms={"e": missing}), given)
    whole = RewardModelReward(model="process_reward_model")
    with pytest.raises(
        ConfigError, match=r"terms\.w\.model .* scores steps, not whole answers; .*type = \"process_reward_model\""
    ):
        check_reward_models(RewardsConfig(terms={"w": whole}), given)


PART = {"type": "function", "function": "m:part", "on_failure": "invalid"}


def config_of(**terms: dict[str, Any]) -> RewardsConfig:
    return RewardsConfig.model_validate({"terms": terms})


def test_a_term_that_failed_makes_its_rollout_invalid_and_not_zero():
    config = config_of(part=PART, length=TERMS["length"].model_dump())
    rollouts = Scorer(config, {"part": part(failing("took too long")), "length": length})(answers(2, 3, 5))
    assert [one.invalid for one in rollouts] == ["", "part: took too long", ""]
    assert [one.reward for one in rollouts if not one.invalid] == [3.0, 6.0]
    assert math.isnan(rollouts[1].reward)
    assert rollouts[1].reward_components == {"length": 3.0}


def test_a_term_that_does_not_apply_is_left_out_and_without_any_the_rollout_is_invalid():
    config = config_of(part=PART)
    rollouts = Scorer(config, {"part": part(failing(""))})(answers(4, 2))
    assert rollouts[0].invalid == "no reward applies"
    assert rollouts[0].reward_components == {}
    assert (rollouts[1].invalid, rollouts[1].reward) == ("", 1.0)


def test_a_term_without_a_weight_may_fail():
    config = config_of(part=PART | {"weight": 0.0}, length=TERMS["length"].model_dump())
    scorer = Scorer(config, {"part": part(failing("broken")), "length": length})
    assert [one.reward for one in scorer(answers(3, 2))] == [3.0, 2.0]
    assert scorer.logs()["reward_failed/part"] == 0.5


def test_what_failed_in_a_step_is_counted_over_its_rounds_and_outlives_a_kill():
    scorer = Scorer(config_of(part=PART), {"part": part(failing("broken"))})
    good, bad = answers(2, 3)
    lost = replace(good, completion=replace(good.completion, failure="the environment closed"))
    scorer.at_step(0)
    scorer([good, bad, lost])
    scorer([good, bad])
    counts = {"agent": (1, 5), "rewards.terms.part": (2, 4)}  # an episode that failed is shown to no term
    assert scorer.failed() == counts
    kept = json.loads(json.dumps(scorer.state()))
    scorer.at_step(1)
    assert scorer.failed() == {}
    scorer.restore(kept)
    assert scorer.failed() == counts


def test_an_episode_that_failed_is_shown_to_no_reward_whatever_its_policy():
    shown: list[int] = []

    def watching(generations: Sequence[Generation]) -> RewardOutcome:
        shown.extend(one.completion.seed for one in generations)
        return RewardOutcome((1.0,) * len(generations))

    good, bad = answers(2, 2)
    bad = replace(bad, completion=replace(bad.completion, failure="the environment closed"))
    config = config_of(length=TERMS["length"].model_dump())
    rollouts = Scorer(config, {"length": watching})([bad, good])
    assert shown == [good.completion.seed]
    assert [one.invalid for one in rollouts] == ["the environment closed", ""]
    assert rollouts[0].reward_components == {}
    (alone,) = Scorer(config, {"length": watching})([bad])
    assert alone.invalid == "the environment closed"


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (1.0, 0.0, [9.0, 3.0, 1.0]),  # 8 * (1, 1/4, 0) + 2 * 0.5
        (0.0, 1.0, [1.0, 7.0, 9.0]),  # a term counts whose weight begins at 0: 8 * (0, 3/4, 1) + 2 * 0.5
    ],
)
def test_weights_move_with_the_steps(start, end, expected):
    spec = TERMS["length"].model_dump() | {"weight": start, "weight_end": end, "weight_steps": 4}
    scorer = Scorer(
        config_of(length=spec, constant=TERMS["constant"].model_dump()), {"length": length, "constant": constant}
    )
    rewards = []
    for step in (0, 3, 8):
        scorer.at_step(step)
        rewards += [one.reward for one in scorer(answers(8))]
    assert rewards == expected


def test_a_term_is_normalised_then_clipped_then_weighted_and_kept_as_it_was():
    spec = TERMS["length"].model_copy(update={"normalize": "group", "clip": 0.8, "weight": 10.0})
    rollouts = Scorer(config_of(length=spec), {"length": length})(answers(2, 4, 12))
    # mean 6, deviation sqrt((16 + 4 + 36) / 2) = 5.29: -0.756, -0.378, 1.134 -> 0.8
    assert [one.reward for one in rollouts] == pytest.approx([-40 / 28**0.5, -20 / 28**0.5, 8.0])
    assert [one.reward_components["length"] for one in rollouts] == [2.0, 4.0, 12.0]


def test_the_normaliser_of_a_term_and_the_logs_of_the_step_go_on_from_a_checkpoint():
    config = config_of(part=PART, length=TERMS["length"].model_copy(update={"normalize": "running"}))

    def new() -> Scorer:
        return Scorer(config, {"part": part(failing("late")), "length": length})

    whole, first, second = new(), new(), new()
    for one in (whole, first):
        one.at_step(0)
        one(answers(1, 3))
    second.restore(json.loads(json.dumps(first.state())))
    expected = {"reward_extra/part/seen": 3.0, "reward_failed/part": 0.5, "reward_constant/length": 0.0}
    assert second.logs() == whole.logs() == expected
    whole.at_step(1)
    second.at_step(1)
    assert second.logs() == {}
    assert second(answers(5)) == whole(answers(5))


def test_a_term_that_is_constant_over_a_step_is_a_warning_by_name_once_and_a_metric(caplog):
    scorer = Scorer(RewardsConfig(terms=TERMS), {"length": length, "constant": constant})
    for step, (batches, equal) in enumerate(
        [([(2,), (4,)], (0.0, 1.0)), ([(3, 3)], (1.0, 1.0)), ([(3,)], ()), ([(3, 3), (3,)], (1.0, 1.0))]
    ):
        scorer.at_step(step)
        for lengths in batches:  # of a step that samples in rounds
            scorer(answers(*lengths))
        found = scorer.logs()
        assert tuple(found.get(f"reward_constant/{name}") for name in TERMS if equal) == equal
    warned = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert warned == ["rewards.terms.constant = 0.5", "rewards.terms.length = 3.0"]


@pytest.mark.parametrize(
    ("term", "shape", "expected"),
    [
        ({}, {"clip": 3.0}, [2.0, 3.0]),  # nothing is normalized, so the bound stays
        ({"clip": 3.0}, {"normalize": "running"}, [2.0, 3.0]),
        ({}, {"normalize": "running", "clip": 1.0}, [2.0, 6.0]),
        ({"normalize": "running", "clip": 1.0}, {}, [2.0, 6.0]),
        ({"normalize": "group", "clip": 1.0}, {"clip": 1.0}, [2.0, 6.0]),
        ({}, {"composition": {"type": "gdpo"}, "clip": 1.0}, [2.0, 6.0]),
    ],
)
def test_a_comparable_scorer_has_no_bounds_of_normalised_values(term, shape, expected):
    config = RewardsConfig(terms={"length": TERMS["length"].model_copy(update=term)}, **shape)
    rollouts = Scorer(config, {"length": length}).comparable()(answers(2, 6))
    assert [one.reward for one in rollouts] == expected


def test_the_means_of_components_are_over_the_rollouts_that_they_apply_to():
    config = config_of(part=PART, length=TERMS["length"].model_dump())
    rollouts = Scorer(config, {"part": part(failing("")), "length": length})(answers(4, 2))
    means = {"reward_component/length": 3.0, "reward_component/part": 1.0}
    assert component_means(rollouts) == means
    invalid = replace(rollouts[0], invalid="other: crashed", reward=math.nan, reward_components={"length": 99.0})
    assert component_means([*rollouts, invalid]) == means


def test_a_weight_that_passes_through_0_leaves_a_reward_and_one_that_is_always_0_gives_none():
    spec = TERMS["length"].model_dump() | {"weight": 1.0, "weight_end": -1.0, "weight_steps": 2}
    noted = TERMS["constant"].model_dump() | {"weight": 0.0}
    only_noted = Scorer(
        config_of(length=spec, constant=noted), {"length": lambda _: RewardOutcome((None,)), "constant": constant}
    )
    passing = Scorer(config_of(length=spec, constant=noted), {"length": length, "constant": constant})
    rewards = []
    for step in (0, 1, 2):
        passing.at_step(step)
        rewards += [(one.reward, one.invalid) for one in passing(answers(8))]
    assert rewards == [(8.0, ""), (0.0, ""), (-8.0, "")]
    assert only_noted(answers(8))[0].invalid == "no reward applies"


def graded(generations: Sequence[Generation]) -> RewardOutcome:
    """+-1 by length, with the scores 1 and 0 beside them."""
    right = [len(one.completion.token_ids) > 3 for one in generations]
    return RewardOutcome(tuple(1.0 if r else -1.0 for r in right), scores=tuple(float(r) for r in right))


def test_a_rollout_has_the_score_that_the_only_term_with_a_weight_gave():
    overlong = OverlongPenalty(max_tokens=10, buffer_tokens=4, factor=1.0)
    watched = TERMS["constant"].model_copy(update={"weight": 0.0})
    alone = RewardsConfig(terms={"graded": TERMS["length"], "constant": watched}, overlong=overlong)
    rollouts = Scorer(alone, {"graded": graded, "constant": constant})(answers(2, 8))
    assert [(one.reward, one.score) for one in rollouts] == [(-1.0, 0.0), (0.5, 1.0)]
    both = RewardsConfig(terms={"graded": TERMS["length"], "constant": TERMS["constant"]})
    mixed = Scorer(both, {"graded": graded, "constant": constant})(answers(2, 8))
    assert [one.score for one in mixed] == [None, None]
    plain = Scorer(RewardsConfig(terms={"length": TERMS["length"]}), {"length": length})
    assert [one.score for one in plain(answers(2))] == [None]


def test_an_answer_that_was_cut_off_earns_less_before_the_penalty_for_long_ones():
    ended, cut = answers(8, 8)
    cut = replace(cut, completion=replace(cut.completion, finish_reason="length"))
    overlong = OverlongPenalty(max_tokens=10, buffer_tokens=4, factor=1.0)
    for truncated, reward in (
        (TruncatedReward(type="scale", amount=0.5), 4.5),
        (TruncatedReward(amount=3.0), 6.0),
        (TruncatedReward(type="value", amount=-1.0), -1.0),
    ):
        config = RewardsConfig(terms=TERMS, overlong=overlong, truncated=truncated)
        one, other = scorer(config)([ended, cut])
        assert (one.reward, one.reward_components["truncated"]) == (8.5, 0.0)  # 8 + 1 - 0.5
        assert (other.reward, other.reward_components["truncated"]) == (reward - 0.5, reward - 9.0)


def test_an_invalid_answer_that_was_cut_off_has_no_reward():
    cut = [replace(one, completion=replace(one.completion, finish_reason="length")) for one in answers(3, 8)]
    config = RewardsConfig(terms={"part": TERMS["length"]}, truncated=TruncatedReward(type="value", amount=-1.0))
    none, some = Scorer(config, {"part": part(failing("no answer"))})(cut)
    assert none.invalid and math.isnan(none.reward) and none.reward_components["truncated"] == 0.0
    assert not some.invalid and some.reward == -1.0


# ---------------------------------------------------------------- composition

COMPONENTS = {"form": [1.0, 0.0, 0.5], "quality": [2.0, 2.0, 4.0], "brevity": [-1.0, -1.0, 0.0]}


def test_a_weighted_sum():
    # 0.5 * form + 2 * quality + 1 * brevity
    assert weighted_sum(COMPONENTS, {"form": 0.5, "quality": 2.0, "brevity": 1.0}) == [3.5, 3.0, 8.25]


def test_a_gate_lets_the_other_terms_through_or_gives_the_closed_reward():
    weights = {"form": 9.0, "quality": 2.0, "brevity": 1.0}  # the gate's own weight is not used
    # sums 3, 3, 8; gates 1, 0, 0.5
    assert gated_product(COMPONENTS, weights, gates=["form"], closed=-4.0) == [3.0, -4.0, 2.0]


def test_a_gate_outside_the_unit_interval_is_refused():
    with pytest.raises(RewardError, match=r"rewards\.quality = 2\.0: a gate must be in \[0, 1\]"):
        gated_product(COMPONENTS, {"brevity": 1.0}, gates=["quality"], closed=0.0)


def test_the_configuration_chooses_the_composition():
    weights = dict.fromkeys(COMPONENTS, 1.0)
    groups = ["p", "p", "p"]
    assert compose(COMPONENTS, WeightedSum(), weights, groups) == [2.0, 1.0, 4.5]
    gated = GatedProduct(gates=("form",), closed=-1.0)
    assert compose(COMPONENTS, gated, weights, groups) == [1.0, -1.0, 1.5]  # sums 1, 1, 4; 0.5 * 4 + 0.5 * -1


def test_what_does_not_apply_adds_nothing_and_where_nothing_applies_there_is_no_reward():
    values = {"maths": [1.0, None, None], "code": [None, 0.5, None], "noted": [7.0, 7.0, 7.0]}
    assert weighted_sum(values, {"maths": 1.0, "code": 4.0}) == [1.0, 2.0, None]
    assert weighted_sum(values, {"maths": 0.0}) == [0.0, None, None], "it applies, and counts for nothing just now"


def test_a_gate_that_does_not_apply_is_open_and_a_shut_one_needs_no_sum():
    values = {"form": [None, 0.0, 1.0, 0.5], "quality": [2.0, None, None, None]}
    assert gated_product(values, {"quality": 1.0}, gates=["form"], closed=-1.0) == [2.0, -1.0, None, None]


def test_gdpo_puts_every_term_on_one_scale_within_the_answers_of_a_prompt():
    # of p: quality 0, 1000: -+ 0.707; form 1, 0: +- 0.707, so equal weights cancel exactly. Of q: quality 5, 5: no difference.
    values = {"quality": [0.0, 5.0, 1000.0, 5.0], "form": [1.0, 0.0, 0.0, 1.0]}
    rewards = compose(values, Gdpo(), {"quality": 1.0, "form": 1.0}, ["p", "q", "p", "q"])
    assert rewards == pytest.approx([0.0, -(0.5**0.5), 0.0, 0.5**0.5])
    heavier = compose(values, Gdpo(), {"quality": 3.0, "form": 1.0}, ["p", "q", "p", "q"])
    assert heavier[0] == pytest.approx(-2 * 0.5**0.5)


def test_in_a_group_only_the_answers_it_applies_to_count():
    found = in_group([2.0, None, 4.0, 6.0, 9.0], ["p", "p", "p", "p", "q"])
    assert found == pytest.approx([-1.0, None, 0.0, 1.0, 0.0])  # mean 4, sample deviation 2; q is alone


def test_equal_values_are_exactly_zero_and_not_rounding_noise_over_noise():
    assert in_group([0.1, 0.1, 0.1], ["p", "p", "p"]) == [0.0, 0.0, 0.0]


# ---------------------------------------------------------------- shaping


def test_the_running_statistics_are_those_of_everything_seen():
    batches = [[1.0, 2.0, 4.0], [10.0], [], [-3.0, 0.5]]
    normaliser = RunningNormalizer.empty()
    for batch in batches:
        normaliser = normaliser.updated(batch)
    everything = [value for batch in batches for value in batch]
    assert normaliser.mean == pytest.approx(fmean(everything), rel=1e-12)
    assert normaliser.normalized([2.0])[0] == pytest.approx((2.0 - fmean(everything)) / pstdev(everything), rel=1e-6)


def test_equal_rewards_normalise_to_zero_and_not_to_noise():
    assert RunningNormalizer.empty().updated([0.7, 0.7]).normalized([0.7, 5.0]) == [0.0, 0.0]


def test_a_large_offset_does_not_cost_precision():
    normaliser = RunningNormalizer.empty().updated([1e9, 1e9 + 1]).updated([1e9 + 2])
    assert normaliser.squares == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize(("length", "penalty"), [(0, 0.0), (80, 0.0), (85, -0.5), (90, -1.0), (100, -2.0), (120, -2.0)])
def test_the_overlong_penalty_falls_linearly_over_the_buffer(length, penalty):
    assert soft_overlong(length, max_tokens=100, buffer_tokens=20, factor=2.0) == penalty


def test_a_weight_moves_in_a_straight_line_and_then_stays():
    weights = [linear_weight(step, start=1.0, end=3.0, steps=4) for step in (0, 1, 4, 9)]
    assert weights == [1.0, 1.5, 3.0, 3.0]


# ---------------------------------------------------------------- terms of some sources


def of_sources(*sources: str) -> list[Generation]:
    """Return answers of 1, 2, 3, ... tokens to prompts of these sources."""
    made = answers(*range(1, len(sources) + 1))
    return [replace(one, prompt=replace(one.prompt, id=str(at), source=sources[at])) for at, one in enumerate(made)]


def test_a_term_of_some_sources_is_not_shown_the_prompts_of_others():
    shown: list[list[int]] = []

    def seen(generations: Sequence[Generation]) -> RewardOutcome:
        sizes = [len(one.completion.token_ids) for one in generations]
        shown.append(sizes)
        return RewardOutcome(tuple(None if size == 3 else float(size) for size in sizes), {sizes.index(3): "late"})

    terms = {"length": TERMS["length"].model_copy(update={"sources": ("sums",)}), "constant": TERMS["constant"]}
    whole = Scorer(RewardsConfig(terms=terms), {"length": part(seen), "constant": constant})
    rollouts = whole(of_sources("desk", "sums", "sums", "desk"))
    assert shown == [[2, 3]]
    assert [one.reward_components for one in rollouts] == [
        {"constant": 0.5}, {"length": 2.0, "constant": 0.5}, {"constant": 0.5}, {"constant": 0.5},
    ]  # fmt: skip
    assert [one.reward for one in rollouts][:2] == [1.0, 3.0] and rollouts[2].invalid == "length: late"
    assert whole.failed()["rewards.terms.length"] == (1, 2) and whole.logs()["reward_failed/length"] == 0.5


def test_the_running_statistics_of_a_term_are_of_its_own_sources():
    terms = {
        "length": FunctionReward(function="m:length", normalize="running", sources=("sums",)),
        "constant": TERMS["constant"],
    }
    rollouts = scorer(RewardsConfig(terms=terms))(of_sources("sums", "desk", "sums", "desk"))
    # (1 - 2) / 1 + 1 and (3 - 2) / 1 + 1, where 1e-8 is added to the variance
    assert [one.reward for one in rollouts] == pytest.approx([0.0, 1.0, 2.0, 1.0], abs=1e-7)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (("sum",), r"rewards\.terms\.length\.sources = \['sum'\]: no prompt has this source; did you mean sums\?"),
        (("sums",), r"rewards\.terms = 'desk': no term with a weight applies to prompts of this source"),
    ],
)
def test_every_source_needs_a_term_and_every_term_a_source(sources, message):
    terms = {"length": TERMS["length"].model_copy(update={"sources": sources})}
    with pytest.raises(ConfigError, match=message):
        check_sources(RewardsConfig(terms=terms), {"desk", "sums"})
    gated = RewardsConfig(terms=terms | {"gate": TERMS["constant"]}, composition=GatedProduct(gates=("gate",)))
    with pytest.raises(ConfigError, match=message):
        check_sources(gated, {"desk", "sums"})
    check_sources(RewardsConfig(terms=terms | {"constant": TERMS["constant"]}), {"desk", "sum", "sums"})
