"""SFT learns, reports its losses, and a killed run ends with the same bytes."""

from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.config.policy import LoopConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.errors import ConfigError
from rlhf_core.types import Message, PolicyRef, TokenSample
from stages.checkpoint import CheckpointConfig
from stages.sft import SFTConfig
from stages.sft.run import dropped_answers, windows
from tests.support.training import demonstrations, killed_and_resumed, stopped_and_resumed
from tests.support.workshop import Workshop, workshop

CONFIG = SFTConfig(
    max_length=48,
    loop=LoopConfig(batch_size=4, epochs=2, eval_every=4, checkpoint_every=2),
    optimizer=OptimizerConfig(learning_rate=5e-3),
)


def shop_and_inputs(root: Path, policy: Path) -> tuple[Workshop, dict[str, Any]]:
    shop = workshop(root)
    base = shop.store.external(PolicyRef, policy)
    return shop, {"policy": base, "demonstrations": demonstrations(shop.store, root)}


def test_the_evaluation_loss_falls_and_the_policy_changes(tmp_path, policy):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    ref, decision = shop.run("sft", CONFIG, inputs)
    metrics = shop.metrics(decision)
    # 24 samples in batches of 4, twice
    assert (metrics["steps"], metrics["train_samples"], metrics["dropped_answers"]) == (12, 24, 0)
    assert metrics["before/eval/loss"] == pytest.approx(5.8, abs=0.2)  # ln 320 = 5.77: nothing is known yet
    assert metrics["eval/loss"] < metrics["before/eval/loss"] - 1
    assert ref.digest != inputs["policy"].digest
    assert "【It is 0.<|end|>】" in shop.tracker.tables["preview"][1][0][0]


def test_answers_beyond_the_longest_length_are_counted():
    ask, reply = Message("user", "q"), Message("assistant", "a")
    rows = [(ask, reply, ask, reply), (ask, reply)]
    whole, cut = TokenSample((1,) * 6, (0, 1, 1, 0, 1, 1)), TokenSample((1,) * 4, (0, 1, 1, 0))
    assert dropped_answers(rows, [whole, cut]) == 0
    assert dropped_answers(rows, [cut, cut]) == 1 and dropped_answers(rows, [cut]) == 2


def test_models_on_the_way_are_artifacts_of_their_own_and_the_same_after_a_kill(tmp_path, policy):
    loop = CONFIG.loop.model_copy(update={"max_steps": 10, "checkpoint_every": 3})
    config = SFTConfig.model_validate(CONFIG.model_dump() | {"loop": loop.model_dump(), "export_every": 4})
    made = []
    for name in ("whole", "killed"):
        shop, inputs = shop_and_inputs(tmp_path / name, policy)
        ref = shop.run("sft", config, inputs)[0] if name == "whole" else None
        ref = ref or killed_and_resumed(shop, "sft", config, inputs, at=5)  # the export of step 4 comes again
        made.append([ref, *(shop.run("checkpoint", CheckpointConfig(step=at), {"policy": ref})[0] for at in (4, 8))])
    assert [one.digest for one in made[0]] == [one.digest for one in made[1]]
    assert len({one.digest for one in made[0]}) == 3
    assert ChatTemplate.load(shop.store.path(made[1][1])).digest == ChatTemplate.load(policy).digest
    with pytest.raises(ConfigError, match=r"checkpoint\.step = 5: .* but step_000004, step_000008; set export_every"):
        shop.run("checkpoint", CheckpointConfig(step=5), {"policy": ref})
    longer = config.model_copy(update={"loop": loop.model_copy(update={"max_steps": 99})})
    with pytest.raises(ConfigError, match=r"sft\.loop\.max_steps = 99: there are 12 steps in the data"):
        shop.run("sft", longer, inputs)


def test_a_stage_that_is_asked_to_stop_saves_and_loses_no_step(tmp_path, policy):
    rarely = CONFIG.model_copy(update={"loop": CONFIG.loop.model_copy(update={"checkpoint_every": 100})})
    digests = []
    for name in ("whole", "stopped"):
        shop, inputs = shop_and_inputs(tmp_path / name, policy)
        if name == "whole":
            digests.append(shop.run("sft", rarely, inputs)[0].digest)
        else:
            ref, step = stopped_and_resumed(shop, "sft", rarely, inputs, at=7)
            assert step == 7
            digests.append(ref.digest)
    assert digests[0] == digests[1]


def test_the_best_checkpoint_is_what_is_kept(tmp_path, policy):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    # A rate that ruins the model after a good start: the best evaluation is not the last one.
    config = CONFIG.model_copy(
        update={
            "loop": LoopConfig(batch_size=4, epochs=2, eval_every=2, keep_best=1),
            "optimizer": OptimizerConfig(learning_rate=0.3, schedule="constant", warmup_fraction=0.0),
        }
    )
    _, decision = shop.run("sft", config, inputs)
    losses = [values["sft/eval/loss"] for _, values in shop.tracker.points if "sft/eval/loss" in values]
    assert shop.metrics(decision)["eval/loss"] == pytest.approx(min(losses[1:]))


def test_dft_learns_and_says_the_plain_loss_too(tmp_path, policy):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    # Each token counts by its own probability, 1/320 at first: a small gradient, which Adam scales.
    _, decision = shop.run("sft", CONFIG.model_copy(update={"loss": "dft"}), inputs)
    metrics = shop.metrics(decision)
    assert metrics["before/eval/loss"] == pytest.approx(metrics["before/eval/nll"] / 320, rel=0.5)
    assert metrics["eval/nll"] < metrics["before/eval/nll"] - 1


@pytest.mark.parametrize("length", range(2, 9))
@pytest.mark.parametrize("tokens", range(2, 30))
def test_windows_train_every_token_once_and_have_the_tokens_before_it_as_context(length, tokens):
    whole = TokenSample(tuple(range(tokens)), (0,) + (1,) * (tokens - 1))
    for overlap in range(1, length):
        parts = windows(whole, length=length, overlap=overlap)
        pairs = [zip(part.token_ids, part.loss_mask, strict=True) for part in parts]
        assert [token for part in pairs for token, trained in part if trained] == list(range(1, tokens))
        assert all(part.loss_mask[0] == 0 and len(part.token_ids) <= length for part in parts)
        assert len(parts) == max(1, -(-(tokens - overlap) // (length - overlap)))


def test_documents_longer_than_a_window_are_trained_whole(tmp_path, policy):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    options = {"train_on": "all", "max_length": 8, "loop": LoopConfig(batch_size=8, epochs=1)}
    cut = SFTConfig(**options)
    whole = SFTConfig(**options, window_overlap=2)
    numbers = {}
    for config in (cut, whole):
        _, decision = shop.run("sft", config, inputs)
        numbers[config.window_overlap] = shop.metrics(decision)
    assert numbers[0]["train_samples"] == numbers[2]["train_documents"] == 24
    assert numbers[2]["train_samples"] > 24 and numbers[2]["steps"] == numbers[2]["train_samples"] // 8
    assert "train_documents" not in numbers[0]


def test_all_tokens_are_trained_on_if_asked_for(tmp_path, policy):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    shop.run("sft", CONFIG.model_copy(update={"train_on": "all", "loop": LoopConfig(max_steps=1)}), inputs)
    assert shop.tracker.tables["preview"][1][0][0] == "<|user|>【What is 0?<|end|><|assistant|>It is 0.<|end|>】"
