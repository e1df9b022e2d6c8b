from rlhf_core.models.micro_batches import micro_batches, ordered
from rlhf_core.training.batching import averaged, reduce, shares
from rlhf_core.types import PreferenceSample, RewardPair, TokenSample


def sample(*ids: int) -> TokenSample:
    return TokenSample(ids, (0,) * len(ids))


def test_samples_are_ordered_longest_first_and_then_by_their_tokens():
    samples = [sample(3, 1), sample(9), sample(2, 8), sample(1, 1, 1)]
    assert ordered(samples) == [3, 2, 0, 1]


def test_a_micro_batch_holds_the_same_samples_whatever_order_they_come_in():
    samples = [sample(3, 1), sample(9, 9), sample(2, 8), sample(1, 1), sample(4, 4)]
    shuffled = [samples[i] for i in (4, 2, 0, 3, 1)]
    one = [[samples[i].token_ids for i in batch] for batch in micro_batches(samples, rows=2, pack_to=None)]
    other = [[shuffled[i].token_ids for i in batch] for batch in micro_batches(shuffled, rows=2, pack_to=None)]
    assert one == other == [[(1, 1), (2, 8)], [(3, 1), (4, 4)], [(9, 9)]]


def test_a_pair_counts_as_one_row_as_long_as_its_longer_side():
    pairs = [RewardPair((1, 2), (1,), 0.0), RewardPair((1,), (1, 2, 3), 0.0)]
    assert micro_batches(pairs, rows=1, pack_to=None) == [[1], [0]]
    preferences = [
        PreferenceSample(sample(1, 2), sample(1), 0.0, 0.0),
        PreferenceSample(sample(1), sample(1, 2, 3), 0.0, 0.0),
    ]
    assert micro_batches(preferences, rows=2, pack_to=None) == [[1, 0]]


def test_packed_micro_batches_are_cut_by_their_tokens():
    # rows * pack_to = 8 tokens: 4 + 3 fit, 2 more do not; then 2 + 1
    samples = [sample(1), sample(1, 2), sample(1, 2, 3), sample(1, 2, 3, 4)]
    assert micro_batches(samples, rows=2, pack_to=4) == [[3, 2], [1, 0]]


def test_no_samples_make_no_micro_batches():
    assert micro_batches([], rows=2, pack_to=None) == []


def test_a_budget_of_tokens_counts_the_padding_and_lets_a_long_row_through_alone():
    samples = [sample(*range(length)) for length in (9, 4, 3, 2, 2, 1)]
    # 9 > 8 alone; 2 rows of 4 are 8; 2, 2 and 1 padded to 2 are 6
    assert micro_batches(samples, rows=1, pack_to=None, padded_tokens=8) == [[0], [1, 2], [3, 4, 5]]


def test_ranks_share_the_work_by_length_and_a_rank_may_have_none():
    # longest first: 6, 5 | 4, 3 | 2, 1 dealt there and back: 6 + 3 + 2 and 5 + 4 + 1
    assert shares([5, 1, 4, 2, 3, 6], 2) == [[3, 4, 5], [0, 1, 2]]
    assert shares([5, 9, 7], 1) == [[0, 1, 2]]
    assert shares([5], 2) == [[0], []]


def test_metrics_of_ranks_add_up_except_maxima_and_a_rank_without_samples_has_none():
    parts = [{"loss": 0.25, "ratio_max": 1.5}, {}, {"loss": 0.5, "ratio_max": 1.25}]
    assert reduce(parts) == {"loss": 0.75, "ratio_max": 1.5}


def test_metrics_of_optimizer_steps_are_means_except_maxima():
    steps = [{"policy/loss": 0.25, "policy/ratio_max": 1.5}, {"policy/loss": 0.75, "policy/ratio_max": 1.25}]
    assert averaged(steps) == {"policy/loss": 0.5, "policy/ratio_max": 1.5}


def test_samples_that_begin_alike_come_together_at_the_place_of_the_longest():
    one, other = (1, 2, 3, 4), (5, 6, 7, 8)
    samples = [sample(*one, 9), sample(*other, 9, 9, 9), sample(7, 7, 7, 7, 7, 7), sample(*other), sample(*one, 8)]
    assert ordered(samples, together=64) == [1, 3, 2, 4, 0]
    assert ordered(samples) == [1, 2, 4, 0, 3]
    assert micro_batches(samples, rows=2, pack_to=None, together=64) == [[1, 3], [2, 4], [0]]
    # 7 + 7 <= 14 tokens, padded to the longest, which need not be the first
    assert micro_batches(samples, rows=1, pack_to=None, padded_tokens=14, together=64) == [[1, 3], [2, 4], [0]]
    assert micro_batches(samples, rows=2, pack_to=7, together=64) == micro_batches(samples, rows=2, pack_to=7)


def test_pairs_stay_in_the_order_of_their_length():
    pairs = [RewardPair((1, 2, 3), (1, 2), 0.0), RewardPair((4,), (4, 5, 6, 7), 0.0), RewardPair((1, 2), (1,), 0.0)]
    assert ordered(pairs, together=64) == ordered(pairs) == [1, 0, 2]
