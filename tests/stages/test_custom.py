"""Losses and estimators of the user's: those of the page, against the built-in ones of the same formula."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from rlhf_core.algorithms.advantage.base import GroupRewards
from rlhf_core.algorithms.advantage.group import CustomAdvantage
from rlhf_core.algorithms.policy.clip import ClipLoss
from rlhf_core.algorithms.policy.weighted import CustomPolicyLoss
from rlhf_core.algorithms.preference.dpo import CustomPreferenceLoss, DPOLoss
from rlhf_core.config.policy import PPOConfig
from rlhf_core.errors import ConfigError
from rlhf_core.schema.base import CustomFunction
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import PolicyRef
from rlhf_core.user_code.dependencies import UserFunction, user_code_digest
from stages.dpo import DPOConfig
from tests.stages.test_dpo import CONFIG as DPO
from tests.stages.test_ppo import config as ppo
from tests.support.losses import of_pairs, of_tokens
from tests.support.training import preferences, shop_and_inputs
from tests.support.workshop import Workshop

PAGE = Path(__file__).parents[2] / "docs" / "custom.md"
LENGTHS: Any = {"chosen_lengths": torch.tensor([3.0, 2.0]), "rejected_lengths": torch.tensor([4.0, 1.0])}


@pytest.fixture
def file(tmp_path) -> Path:
    """The file of the page."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    path = tmp_path / "my_losses.py"
    path.write_text(blocks[0])
    return path


def loaded(file: Path, name: str) -> Any:
    spec = f"{file}:{name}"
    return UserFunction.of(spec, user_code_digest(spec)).load(key="loss.function")


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def compare(function: Any, rewards: Tensor) -> Tensor:
    groups = GroupRewards(rewards=rewards, lengths=torch.ones_like(rewards), function=function)
    return CustomAdvantage(function="mine.py:advantages").compare(groups)


def test_the_pair_loss_of_the_page_is_dpo_where_its_margin_is_0(file):
    four = [normal(2, seed=seed).requires_grad_() for seed in range(4)]
    arguments = {"beta": 0.3, "margin": 0.0}
    loss = of_pairs(CustomPreferenceLoss, loaded(file, "margin_loss"))
    found = loss(*four, **LENGTHS, function="mine.py:loss", arguments=arguments, pairs=6.0)
    wanted = of_pairs(DPOLoss)(*four, beta=0.3, pairs=6.0)
    assert torch.equal(found.loss, wanted.loss)
    assert found.metrics["rewards/margin"] * 0.3 == pytest.approx(float(wanted.metrics["rewards/margin"]), rel=1e-6)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "constant"])
def test_the_policy_loss_of_the_page_is_the_clipped_one(file, aggregation):
    logprobs, old, advantages, weights = (normal(3, 5, seed=seed) for seed in range(4))
    logprobs.requires_grad_()
    mask = torch.tensor([[1.0, 1, 1, 0, 0], [0, 1, 0, 1, 1], [1, 1, 1, 1, 1]])
    counts: Any = {
        "aggregation": aggregation,
        "num_tokens": 20.0,
        "sequences": 4.0,
        "max_length": 8.0,
        "weights": weights,
    }
    four = (logprobs, old, advantages, mask)
    loss = of_tokens(CustomPolicyLoss, loaded(file, "clipped"))
    found = loss(*four, function="mine.py:loss", arguments={"clip": 0.2}, **counts)
    wanted = of_tokens(ClipLoss)(*four, clip_low=0.2, clip_high=0.2, **counts)
    (gradient,) = torch.autograd.grad(found.loss, logprobs)
    (expected,) = torch.autograd.grad(wanted.loss, logprobs)
    assert torch.allclose(found.loss, wanted.loss, rtol=1e-6) and torch.allclose(
        gradient, expected, rtol=1e-5, atol=1e-8
    )
    assert bool((gradient[mask == 0] == 0).all())
    for name in ("approx_kl", "ratio_max"):
        assert torch.equal(found.metrics[name], wanted.metrics[name])


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda one: one.mean(), r"'shape \(\)': must be a tensor of shape \(2,\)"),
        (lambda one: one.tolist(), "'list': must be a tensor"),
        (lambda one: one.detach(), "has no gradient"),
    ],
)
def test_a_loss_that_is_no_term_for_each_pair_is_refused(returned, message):
    four = [normal(2, seed=seed).requires_grad_() for seed in range(4)]
    with pytest.raises(ConfigError, match=message):
        loss = of_pairs(CustomPreferenceLoss, lambda chosen, *others, **named: returned(chosen))
        loss(*four, **LENGTHS, function="mine.py:loss")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda rewards, lengths: rewards.sum(dim=1), r"\(2,\): must be a tensor of shape \(2, 3\)"),
        (lambda rewards, lengths: rewards / 0 * 0, "are not finite"),
    ],
)
def test_advantages_that_are_none_are_refused(function, message):
    with pytest.raises(ConfigError, match=message):
        compare(function, torch.ones(2, 3))


def test_an_estimator_cannot_change_the_rewards_that_others_see():
    rewards = torch.ones(2, 3)
    compare(lambda rewards, lengths: rewards.mul_(2), rewards)
    assert torch.equal(rewards, torch.ones(2, 3))


def trained(folder: Path, policy: Path, config: DPOConfig, functions: tuple[str, ...] = ()) -> tuple[str, str]:
    """Return the digest of what the stage made, and its key."""
    shop = Workshop(ArtifactStore(folder / "store"))
    base = shop.store.external(PolicyRef, policy)
    inputs = {"policy": base, "reference": base, "preferences": preferences(shop.store, folder)}
    ref, decision = shop.run("dpo", config, inputs, callables=functions)
    return ref.digest, decision.key


def test_dpo_with_the_users_function_makes_the_weights_of_dpo_and_an_edit_another_key(tmp_path, policy, file):
    spec = f"{file}:margin_loss"
    loss = CustomPreferenceLoss(function=spec, arguments={"beta": 0.5, "margin": 0.0})
    custom = DPO.model_copy(update={"loss": loss})
    (tmp_path / "data.txt").write_text("")
    file.write_text(f"open({str(tmp_path / 'data.txt')!r})\n{file.read_text()}")
    made, key = trained(tmp_path / "custom", policy, custom, (spec,))
    record = ArtifactStore(tmp_path / "custom" / "store").record(key)
    assert record is not None and record.unseen == (f"reads {tmp_path / 'data.txt'}",)
    assert made == trained(tmp_path / "own", policy, DPO.model_copy(update={"loss": DPOLoss(beta=0.5)}))[0]
    file.write_text(file.read_text() + "\n# a comment\n")
    assert trained(tmp_path / "comment", policy, custom, (spec,)) == (made, key)
    file.write_text(file.read_text().replace("beta * h - margin", "2 * beta * h - margin"))
    other, other_key = trained(tmp_path / "edited", policy, custom, (spec,))
    assert other_key != key and other != made


def test_without_a_reference_none_is_asked():
    assert CustomPreferenceLoss(function="a.py:loss").uses_reference
    assert not CustomPreferenceLoss(function="a.py:loss", reference=False).uses_reference


def test_ppo_with_the_users_loss_and_estimator_learns_as_with_the_built_in_ones(tmp_path, policy, file):
    functions = (f"{file}:clipped", f"{file}:leave_one_out", "tests.support.token_rewards:small_is_good")
    custom = {
        "loss": {"type": "custom", "function": functions[0], "arguments": {"clip": 0.2}},
        "advantage": {"type": "custom", "function": functions[1]},
    }
    found = []
    for name, changes in (("custom", custom), ("own", {"advantage": "rloo"})):
        shop, inputs = shop_and_inputs(tmp_path / name, policy)
        given = shop.run("ppo", ppo(**changes), inputs, callables=functions)[1]
        found.append(shop.metrics(given))
    ours, builtin = found
    assert ours.keys() == builtin.keys()
    # Sums in another order: 4 steps of Adam at 5e-3 carry a rounding of 1e-7 on to about 1e-5 of the log-probs.
    assert ours["policy/approx_kl"] == pytest.approx(builtin["policy/approx_kl"], rel=1e-3, abs=1e-6)
    assert ours["reward/mean"] == pytest.approx(builtin["reward/mean"], abs=1e-6), "the same answers were sampled"


def test_a_function_that_changed_since_the_stage_began_is_refused(file):
    spec = f"{file}:clipped"
    function = UserFunction.of(spec, user_code_digest(spec))
    file.write_text(file.read_text().replace("-torch.minimum", "torch.minimum"))
    with pytest.raises(ConfigError, match="has changed since the stage began"):
        function.load(key="ppo.loss.function")


def test_a_file_is_found_from_any_folder(file, monkeypatch, tmp_path):
    monkeypatch.chdir(file.parent)
    function = UserFunction.of("my_losses.py:clipped", user_code_digest("my_losses.py:clipped"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert function.load(key="ppo.loss.function").__name__ == "clipped"


@pytest.mark.parametrize("function", ["", "loss", "file.py:", ":loss", "file.py:no such name"])
def test_what_names_no_function_is_refused(function):
    with pytest.raises(ValidationError, match="String should match pattern"):
        CustomFunction(function=function)


def test_the_profile_of_the_page_loads():
    import tomllib

    (block,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    table = tomllib.loads(block)
    config = PPOConfig(**table["ppo"], samples_per_prompt=2)
    assert (config.loss.type, config.advantage.type) == ("custom", "custom")
    assert DPOConfig(**table["dpo"]).loss.type == "custom"
