from __future__ import annotations

from rlhf_core.training.batching import micro_batches, ordered, reduce, shard
from rlhf_core.types import PreferenceSample, RewardPair, TokenSample


def sample(*ids: int) -> TokenSample:
    return TokenSample(ids, (0,) * len(ids))


def test_samples_are_ordered_longest_first_and_then_by_their_tokens() -> None:
    samples = [sample(3, 1), sample(9), sample(2, 8), sample(1, 1, 1)]
    assert ordered(samples) == [3, 2, 0, 1]


def test_a_micro_batch_holds_the_same_samples_whatever_order_they_come_in() -> None:
    samples = [sample(3, 1), sample(9, 9), sample(2, 8), sample(1, 1), sample(4, 4)]
    shuffled = [samples[i] for i in (4, 2, 0, 3, 1)]
    one = [[samples[i].token_ids for i in batch] for batch in micro_batches(samples, rows=2, pack_to=None)]
    other = [[shuffled[i].token_ids for i in batch] for batch in micro_batches(shuffled, rows=2, pack_to=None)]
    assert one == other == [[(1, 1), (2, 8)], [(3, 1), (4, 4)], [(9, 9)]]


def test_a_pair_counts_as_one_row_as_long_as_its_longer_side() -> None:
    pairs = [RewardPair((1, 2), (1,), 0.0), RewardPair((1,), (1, 2, 3), 0.0)]
    assert micro_batches(pairs, rows=1, pack_to=None) == [[1], [0]]
    preferences = [
        PreferenceSample(sample(1, 2), sample(1), 0.0, 0.0),
        PreferenceSample(sample(1), sample(1, 2, 3), 0.0, 0.0),
    ]
    assert micro_batches(preferences, rows=2, pack_to=None) == [[1, 0]]


def test_packed_micro_batches_are_cut_by_their_tokens() -> None:
    # rows * pack_to = 8 tokens: 4 + 3 fit, 2 more do not; then 2 + 1
    samples = [sample(1), sample(1, 2), sample(1, 2, 3), sample(1, 2, 3, 4)]
    assert micro_batches(samples, rows=2, pack_to=4) == [[3, 2], [1, 0]]


def test_no_samples_make_no_micro_batches() -> None:
    assert micro_batches([], rows=2, pack_to=None) == []


def test_shards_deal_the_samples_out_in_turn_and_may_be_empty() -> None:
    assert [shard([5, 6, 7], rank, 2) for rank in range(2)] == [[5, 7], [6]]
    assert [shard([5], rank, 2) for rank in range(2)] == [[5], []]


def test_metrics_of_ranks_add_up_except_maxima_and_a_rank_without_samples_has_none() -> None:
    parts = [{"loss": 0.25, "ratio_max": 1.5}, {}, {"loss": 0.5, "ratio_max": 1.25}]
    assert reduce(parts) == {"loss": 0.75, "ratio_max": 1.5}
