import json
from pathlib import Path

import pytest

from benchmarks.train_step import Size, check_equal, work

SHAPE = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 16, "vocab_size": 100,
}  # fmt: skip


@pytest.fixture
def size(tmp_path: Path) -> Size:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return Size(tmp_path, rows=400, mean=64, longest=256, micro_batch=4)


def test_work_counts_weights_attention_and_the_head_of_the_answer(size: Size) -> None:
    # per layer: q and o 8 x 8 each, k and v 8 x 4 each = 192; mlp 3 x 8 x 16 = 384; two layers: 1152
    # 5 tokens: 6 x 1152 x 5 = 34560; attention 12 x 2 x 8 x 25 / 2 = 2400; head 6 x 8 x 100 x 3 = 14400
    row = {"prompt_ids": [1, 2], "answer_ids": [3, 4, 5]}
    assert work(size, [row], shares=False) == (5, 34560 + 2400 + 14400) == work(size, [row], shares=True)


def test_a_prompt_that_is_computed_once_counts_once_as_work_and_its_tokens_for_each_answer(size: Size) -> None:
    # the second answer: 3 tokens of 5: 6 x 1152 x 3 = 20736; attention 12 x 2 x 8 x (25 - 4) / 2 = 2016; head 14400
    first, second = {"prompt_ids": [1, 2], "answer_ids": [3, 4, 5]}, {"prompt_ids": [1, 2], "answer_ids": [6, 7, 8]}
    assert work(size, [first, second], shares=True) == (10, 51360 + 20736 + 2016 + 14400)
    assert work(size, [first, second], shares=False) == (10, 2 * 51360)
    pair = {"prompt_ids": [1, 2], "chosen_ids": [3, 4, 5], "rejected_ids": [6, 7, 8]}
    assert work(size, [pair], shares=True) == work(size, [first, second], shares=True)


def test_sides_with_other_gradients_are_refused() -> None:
    check_equal({"ours": {"grad_norm": 1.0}, "plain": {"grad_norm": 1.0005}})
    with pytest.raises(SystemExit, match="do not do the same"):
        check_equal({"ours": {"grad_norm": 1.0}, "plain": {"grad_norm": 1.01}, "TRL": {"grad_norm": 1.0}})
