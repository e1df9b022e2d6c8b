"""Selection from rollouts: what is kept, what is dropped, and that it is counted."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from rlhf_core.data.shards import write_index, write_rollouts
from rlhf_core.data.tables import read_demonstrations, read_preferences, read_prompts
from rlhf_core.errors import DataError
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import ActionSpan, Message, Rollout, RolloutsRef
from stages.select import BestOfN, Pairs, PromptsInBand, SelectConfig, Threshold, TopK
from stages.select.run import best, by_prompt, demonstrations, make_pairs, pair_metrics, preference, splits
from tests.support.workshop import Workshop, rollout, workshop

GROUP = [rollout("p", "a", 1.0), rollout("p", "b", 3.0), rollout("p", "b", 3.0), rollout("p", "c", 2.0)]


def texts(rollouts: list[Rollout]) -> list[str]:
    return [one.completion.text for one in rollouts]


def test_best_of_n_keeps_one_answer():
    assert texts(best(GROUP, BestOfN())) == ["b"]


def test_of_equally_good_answers_the_first_is_kept():
    assert texts(best([rollout("p", "x", 1.0), rollout("p", "y", 1.0)], BestOfN())) == ["x"]


def test_top_k_keeps_different_answers_only():
    assert texts(best(GROUP, TopK(k=2))) == ["b", "c"]


def test_a_threshold_keeps_what_reaches_it():
    assert texts(best(GROUP, Threshold(minimum=2.0))) == ["b", "c"]
    assert best(GROUP, Threshold(minimum=3.1)) == []


def test_truncated_answers_are_left_out_if_asked():
    rollouts = [rollout("p", "cut", 9.0, finish_reason="length"), rollout("p", "whole", 1.0)]
    assert [texts(group) for group in by_prompt(rollouts, drop_truncated=True)] == [["whole"]]
    assert [texts(group) for group in by_prompt(rollouts, drop_truncated=False)] == [["cut", "whole"]]


def test_a_demonstration_is_the_prompt_with_the_answer():
    first, second = demonstrations(GROUP[:2])
    assert first.messages == (Message("user", "question p"), Message("assistant", "a"))
    assert (first.id, second.id, first.source) == ("p/0", "p/1", "test")


def test_max_min_pairs_the_best_with_the_worst():
    (pair,), dropped = make_pairs([GROUP], Pairs(), seed=0)
    assert (pair.chosen.completion.text, pair.rejected.completion.text, pair.margin) == ("b", "a", 2.0)
    assert dropped == {"too_few": 0, "ties": 0, "below_margin": 0}


def test_ties_close_pairs_and_single_answers_are_counted():
    groups = [
        [rollout("tie", "x", 1.0), rollout("tie", "y", 1.0)],
        [rollout("near", "x", 1.0), rollout("near", "y", 1.4)],
        [rollout("same", "x", 1.0), rollout("same", "x", 1.0)],
        [],
        [rollout("far", "x", 1.0), rollout("far", "y", 1.5)],
    ]
    pairs, dropped = make_pairs(groups, Pairs(margin_threshold=0.5), seed=0)
    assert [pair.chosen.prompt.id for pair in pairs] == ["far"]
    assert dropped == {"too_few": 2, "ties": 1, "below_margin": 1}


def test_a_length_penalty_can_turn_a_pair_around():
    group = [rollout("p", "long", 2.0, tokens=20), rollout("p", "short", 1.5, tokens=5)]
    (pair,), _ = make_pairs([group], Pairs(length_penalty=0.1), seed=0)  # 2 - 2 = 0 against 1.5 - 0.5 = 1
    assert pair.chosen.completion.text == "short"
    assert pair.margin == pytest.approx(1.0)


def owned(**answers: list[tuple[str, float]]) -> tuple[list[Rollout], dict[int, str]]:
    """The answers of several policies to one prompt, and whose each is."""
    group = {name: [rollout("p", text, reward) for text, reward in given] for name, given in answers.items()}
    return [one for given in group.values() for one in given], {
        id(one): name for name, given in group.items() for one in given
    }


def pair_of(config: Pairs, **answers: list[tuple[str, float]]) -> tuple[str, str, float] | None:
    group, owners = owned(**answers)
    pairs, _ = make_pairs([group], config, owners, seed=0)
    return (pairs[0].chosen.completion.text, pairs[0].rejected.completion.text, pairs[0].margin) if pairs else None


def test_a_pair_across_policies_has_answers_of_two_policies():
    across = Pairs(across="policies")
    # The worst answer, "a" with 0, is also of `big`, whose "b" is the best.
    assert pair_of(across, big=[("a", 0.0), ("b", 3.0)], small=[("c", 1.0), ("d", 2.0)]) == ("b", "c", 2.0)
    assert pair_of(across, big=[("a", 0.0), ("b", 3.0)], small=[("b", 3.0)]) is None  # the same text is no pair
    assert pair_of(across, big=[("a", 0.0), ("b", 3.0)]) is None


def test_a_pair_across_policies_is_never_turned_against_the_reward():
    config = Pairs(across="policies", rule="random")
    for seed in range(20):
        group, owners = owned(big=[("a", 0.0), ("b", 3.0)], small=[("c", 1.0), ("d", 2.0)])
        ((pair,), _) = make_pairs([group], config, owners, seed=seed)
        assert pair.margin > 0 and owners[id(pair.chosen)] != owners[id(pair.rejected)]


def test_delta_learning_takes_each_side_from_its_policy_whatever_the_reward():
    delta = Pairs(chosen="big", rejected="small")
    assert pair_of(delta, big=[("a", 0.0), ("b", 1.0)], small=[("c", 2.0), ("d", 5.0)]) == ("b", "c", 0.0)
    assert pair_of(delta, small=[("a", 1.0)], big=[("a", 1.0), ("b", 0.5)]) is None  # "a" is best, and of both
    assert pair_of(delta, big=[("a", 0.0)], other=[("c", 2.0)]) is None


def test_a_pool_is_all_answers_to_a_prompt(store, tmp_path):
    given = {}
    for name, reward in (("big", 1.0), ("small", 2.0)):
        folder = tmp_path / name
        write_rollouts(folder, 0, [rollout(f"p{number}", f"{name} {number}", reward) for number in range(4)])
        write_index(folder, {"policy": name})
        given[name] = store.external(RolloutsRef, folder)
    shop = Workshop(store)
    made, _ = shop.run("select", BestOfN(eval_fraction=0.0), {"pool": given})
    best_answers = read_demonstrations(store.path(made) / "train.parquet")
    assert [one.messages[-1].content for one in best_answers] == [f"small {number}" for number in range(4)]
    made, _ = shop.run("select", Pairs(across="policies", eval_fraction=0.0), {"pool": given})
    (first, *_) = read_preferences(store.path(made) / "train.parquet")
    assert (first.chosen[0].content, first.rejected[0].content, first.margin) == ("small 0", "big 0", 1.0)
    made, _ = shop.run("select", Pairs(chosen="big", rejected="small", eval_fraction=0.0), {"pool": given})
    (first, *_) = read_preferences(store.path(made) / "train.parquet")
    assert (first.chosen[0].content, first.rejected[0].content, first.margin) == ("big 0", "small 0", 0.0)


def episode(text: str, reward: float, *, tokens: int) -> Rollout:
    """A rollout whose first two of `tokens` tokens the policy sampled, and an environment wrote the rest."""
    one = rollout("p", text, reward, tokens=tokens)
    return replace(one, completion=replace(one.completion, spans=(ActionSpan(0, 2, 0),)))


def test_the_length_of_an_episode_is_what_the_policy_said():
    group = [episode("much shown", 2.0, tokens=50), episode("little shown", 1.5, tokens=5)]
    (pair,), _ = make_pairs([group], Pairs(length_penalty=0.1), seed=0)
    assert (pair.chosen.completion.text, pair.margin) == ("much shown", 0.5)
    assert pair_metrics([pair])["length/chosen"] == pair_metrics([pair])["length/rejected"] == 2.0


def test_an_episode_becomes_neither_a_demonstration_nor_a_preference():
    group = [episode("won", 1.0, tokens=8), rollout("p", "lost", 0.0)]
    (pair,), _ = make_pairs([group], Pairs(), seed=0)
    for turned in (lambda: demonstrations(group), lambda: preference(pair)):
        with pytest.raises(DataError, match="6 of its 8 tokens come from an environment"):
            turned()


@pytest.mark.parametrize("rule", ["random", "max_random"])
def test_random_pairs_depend_on_the_seed_and_the_prompt_alone(rule):
    groups = [[rollout(f"p{number}", f"answer {i}", float(i)) for i in range(6)] for number in range(20)]
    pairs, _ = make_pairs(groups, Pairs(rule=rule), seed=1)
    assert make_pairs(groups[::-1], Pairs(rule=rule), seed=1)[0] == pairs[::-1]
    assert make_pairs(groups, Pairs(rule=rule), seed=2)[0] != pairs
    assert all(pair.margin > 0 for pair in pairs)
    assert {pair.chosen.reward for pair in pairs} == ({5.0} if rule == "max_random" else {1.0, 2.0, 3.0, 4.0, 5.0})


def test_no_prompt_is_in_both_splits():
    rows = [f"p{number}" for number in range(40) for _ in range(3)]
    split = splits(rows, str, BestOfN(eval_fraction=0.1), seed=3)
    assert (len(set(split["eval"])), len(split["train"])) == (4, 36 * 3)
    assert not set(split["train"]) & set(split["eval"])
    assert splits(rows[::-1], str, BestOfN(eval_fraction=0.1), seed=3)["eval"] == split["eval"][::-1]


def test_a_selection_that_keeps_nothing_is_an_error_with_a_remedy():
    with pytest.raises(DataError, match="lower minimum or margin_threshold"):
        splits([], str, Threshold(minimum=99.0), seed=0)


def test_the_configuration_is_chosen_by_type():
    adapter: TypeAdapter[Any] = TypeAdapter(SelectConfig)
    assert adapter.validate_python({"type": "top_k", "k": 3}) == TopK(k=3)


def rollouts_in(store: ArtifactStore, folder: Path) -> RolloutsRef:
    rows = [rollout(f"p{number}", f"answer {i}", float(i - number % 2)) for number in range(10) for i in range(3)]
    write_rollouts(folder, 0, [*rows, rollout("p0", "cut", 99.0, finish_reason="length")])
    return store.external(RolloutsRef, folder)


def test_the_stage_makes_demonstrations_and_is_done_once(tmp_path):
    shop = workshop(tmp_path)
    inputs = {"rollouts": rollouts_in(shop.store, tmp_path / "rollouts")}
    ref, decision = shop.run("select", BestOfN(eval_fraction=0.2), inputs)
    train = read_demonstrations(shop.store.path(ref) / "train.parquet")
    evaluation = read_demonstrations(shop.store.path(ref) / "eval.parquet")
    assert (len(train), len(evaluation)) == (8, 2)
    assert {row.messages[-1] for row in train + evaluation} == {Message("assistant", "answer 2")}
    assert shop.metrics(decision)["reward/selected"] == 1.5  # half the prompts top out at 2, half at 1
    assert shop.metrics(decision)["truncated"] == 1
    assert shop.tracker.tables["samples/selected"][1][0] == ("question p0", "answer 2", 2.0)
    assert shop.tracker.datasets == [("rollouts", inputs["rollouts"].digest, "training")]
    assert shop.runtime.engines() == {}
    again, decision = shop.run("select", BestOfN(eval_fraction=0.2), inputs)
    assert (decision.action, again) == ("HIT", ref)


def test_the_stage_makes_preferences(tmp_path):
    shop = workshop(tmp_path)
    inputs = {"rollouts": rollouts_in(shop.store, tmp_path / "rollouts")}
    ref, decision = shop.run("select", Pairs(eval_fraction=0.1), inputs)
    rows = read_preferences(shop.store.path(ref) / "train.parquet")
    assert len(rows) == 9
    assert {(row.chosen[0].content, row.rejected[0].content, row.margin) for row in rows} == {
        ("answer 2", "answer 0", 2)
    }
    assert type(ref).__name__ == "PreferencesRef"
    assert shop.metrics(decision)["margin"] == 2.0


# ---------------------------------------------------------------- prompts by difficulty


def of(prompt: str, source: str, *right: float | None) -> list[Rollout]:
    """Return answers to a prompt, with a component `correct` where it applies; the reward is one more."""
    made = [rollout(prompt, f"{prompt}{at}", 1.0 + (value or 0.0)) for at, value in enumerate(right)]
    return [
        replace(
            one,
            prompt=replace(one.prompt, source=source),
            reward_components={} if value is None else {"correct": value},
        )
        for one, value in zip(made, right, strict=True)
    ]


GRADED = [
    *of("never", "sums", 0.0, 0.0, 0.0, 0.0),
    *of("half", "sums", 0.0, 1.0, 1.0, 0.0),
    *of("once", "sums", 0.0, 1.0, 0.0, 0.0),
    *of("always", "sums", 1.0, 1.0, 1.0, 1.0),
    *of("chat", "desk", None, None, None, None),
    *(replace(one, reward=float("nan"), invalid="late") for one in of("lost", "desk", 1.0, 1.0)),
]


def selected(
    root: Path, config: PromptsInBand, rows: list[Rollout]
) -> tuple[list[str], dict[str, Any], dict[str, float]]:
    shop = workshop(root)
    (root / "rollouts").mkdir(parents=True)
    write_rollouts(root / "rollouts", 0, rows)
    ref, decision = shop.run("select", config, {"rollouts": shop.store.external(RolloutsRef, root / "rollouts")})
    folder = shop.store.path(ref)
    report = json.loads((folder / "difficulty.json").read_text(encoding="utf-8"))
    return [one.id for one in read_prompts(folder)], report, dict(shop.metrics(decision))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"term": "correct", "low": 0.25, "high": 0.75}, ["half", "once"]),
        ({"term": "correct", "low": 0.0, "high": 0.25}, ["never", "once"]),
        ({"term": "correct", "low": 0.5, "high": 1.0}, ["half", "always"]),
        ({"low": 1.0, "high": 1.4}, ["never", "once", "chat"]),
        ({"term": "correct", "low": 0.0, "high": 1.0, "per_source": 4}, ["never", "half", "once", "always"]),
    ],
)
def test_prompts_in_the_band_are_kept_in_their_order(tmp_path, options, kept):
    found, report, metrics = selected(tmp_path, PromptsInBand(**options), GRADED)
    assert found == kept and metrics["kept"] == len(kept) and metrics["prompts"] == 6 and metrics["failed"] == 1
    assert sum(sum(counts.values()) for counts in report["sources"].values()) == 6
    sums = report["sources"]["sums"]
    assert {name: metrics[f"source/sums/{name}"] for name in sums} == sums
    assert sum(report["histogram"]["sums"]) == 4 and sum(report["histogram"]["desk"]) == (0 if "term" in options else 1)
    if "term" in options:
        assert report["edges"][:3] == [0.0, 0.1, 0.2] and report["histogram"]["sums"] == [1, 0, 1, 0, 0, 1, 0, 0, 0, 1]
    means = {row["id"]: row["mean"] for row in report["prompts"]}
    assert means["once"] == (0.25 if "term" in options else 1.25) and means["chat"] == (
        None if "term" in options else 1.0
    )


def test_a_limit_of_a_source_is_the_same_choice_every_time(tmp_path):
    config = PromptsInBand(term="correct", low=0.0, high=1.0, per_source=2)
    first, report, _ = selected(tmp_path / "a", config, GRADED)
    assert len(first) == 2 and report["sources"]["sums"]["above_limit"] == 2
    assert selected(tmp_path / "b", config, GRADED)[0] == first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"term": "corect"}, r"select\.term = 'corect': no answer has this term; did you mean correct\?"),
        ({"term": "correct", "low": 0.8, "high": 0.9}, r'select\.low = 0\.8: no prompt has a mean .*"too_easy": 1'),
    ],
)
def test_a_band_without_prompts_is_an_error_with_the_counts(tmp_path, options, message):
    with pytest.raises(DataError, match=message):
        selected(tmp_path, PromptsInBand(**options), GRADED)
