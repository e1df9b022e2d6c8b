"""Rows of several sources come in the sequence of `datasets.interleave_datasets`."""

import pytest
from datasets import Dataset, interleave_datasets

from rlhf_core.data.interleaving import interleave


@pytest.mark.parametrize("stopping_strategy", ["first_exhausted", "all_exhausted"])
@pytest.mark.parametrize("seed", [0, 17, 42])
@pytest.mark.parametrize(
    ("lengths", "shares"),
    [
        ({"a": 6, "b": 10}, {"a": 0.75, "b": 0.25}),
        ({"a": 3, "b": 5, "c": 2000}, {"a": 0.2, "b": 0.3, "c": 0.5}),  # more than one block of 1,000 draws
        ({"a": 1, "b": 30}, {"a": 0.98, "b": 0.02}),
        ({"a": 4}, {"a": 1.0}),
    ],
)
def test_the_sequence_is_that_of_datasets(lengths, shares, seed, stopping_strategy):
    tables = [Dataset.from_dict({"row": [f"{name}{one}" for one in range(count)]}) for name, count in lengths.items()]
    probabilities = list(shares.values())
    theirs = interleave_datasets(tables, probabilities, seed=seed, stopping_strategy=stopping_strategy)["row"]
    ours = interleave(lengths, shares, stopping_strategy=stopping_strategy, seed=seed)
    assert [f"{name}{position}" for name, position in ours] == list(theirs)


def test_shares_need_not_add_up_to_one():
    lengths = {"a": 6, "b": 10}
    one, many = (
        list(interleave(lengths, shares, stopping_strategy="all_exhausted", seed=5))
        for shares in ({"a": 0.75, "b": 0.25}, {"a": 3, "b": 1})
    )
    assert one == many
