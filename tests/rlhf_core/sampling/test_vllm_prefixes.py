"""vLLM with prefix caching: what is found again within a version of the weights, and never across an update."""

import json
from pathlib import Path

import pytest

from rlhf_core.config.models import InitModel
from rlhf_core.models.initialize import initialize_llama, train_tokenizer
from tests.rlhf_core.sampling.conftest import vllm_environment
from tests.support.warm_programs import start_program

pytestmark = pytest.mark.engine
pytest.importorskip("vllm", reason="vLLM is not installed")

PROGRAM = Path(__file__).with_name("prefix_program.py")
LONG = InitModel(
    vocab_size=320, hidden_size=128, layers=2, heads=2, kv_heads=2, intermediate_size=256, max_positions=320
)  # fmt: skip


def test_a_prefix_is_computed_once_for_each_version_of_the_weights(tmp_path):
    policy = tmp_path / "policy"
    train_tokenizer(["numbers 0 1 2 3 4 5 6 7 8 9 and words"] * 5, vocab_size=320, folder=policy)
    initialize_llama(LONG, policy, seed=7)
    result = tmp_path / "seen.json"
    program = start_program("vllm", [PROGRAM, policy, result], vllm_environment(), tmp_path / "said")
    _, errors = program.communicate(timeout=400)
    assert program.returncode == 0, errors[-4000:]
    seen = json.loads(result.read_text())
    first, again, updated, *adapted = seen["cached"]
    assert first[0] == updated[0] == 0  # nobody has computed it with these weights
    assert min(again) >= 128  # whole blocks of the 300 tokens that the requests share
    assert seen["same_tokens"]
    assert seen["other_logprobs"]
    # Two versions of an adapter, each loaded twice: nothing is found across loads.
    assert [one[0] for one in adapted] == [0, 0, again[0], 0, 0, again[0]]
    for theirs, ours in zip(seen["adapted"], seen["expected"], strict=True):
        assert theirs == pytest.approx(ours, abs=1e-4)  # some tens of roundings of a log-prob of about -6 in float32
    assert seen["adapted"][0] != pytest.approx(seen["adapted"][4], abs=1e-2)  # an update moves them by far more
