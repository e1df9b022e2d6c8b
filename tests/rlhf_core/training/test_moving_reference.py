"""A reference that follows the policy: when it moves, how weights are mixed, and what a checkpoint brings back."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_core.config.policy import ReferenceSync
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import ModelSpec
from rlhf_core.training.moving_reference import MovingReference, mix_weights


def write(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def weight(folder: Path) -> float:
    return load_file(folder / "model.safetensors")["w"].item()


class Policy:
    """A trainer with one weight."""

    def __init__(self, value: float) -> None:
        self.value = value

    def export(self, folder: Path) -> None:
        write(folder, w=torch.tensor([self.value]))


class Folders:
    """A runtime whose trainers are the weight of their folder as it was when they were leased."""

    def __init__(self) -> None:
        self.open = 0

    @contextmanager
    def trainer(self, role: str, model: ModelSpec, optimizer: None) -> Iterator[float]:
        assert role == "reference" and self.open == 0, "two references at once"
        self.open += 1
        yield weight(Path(model.path))
        self.open -= 1


def now(reference: MovingReference) -> Any:
    return reference._trainer


def test_the_reference_moves_at_its_steps_and_a_checkpoint_brings_it_back(tmp_path):
    runtime: Any = Folders()
    initial = write(tmp_path / "initial", w=torch.tensor([1.0]))
    first, later = tmp_path / "first", tmp_path / "later"
    with ExitStack() as leases:
        sync = ReferenceSync(every=2, mix=0.25)
        reference = MovingReference(runtime, initial, tmp_path / "work", sync, seed=0, leases=leases)
        policy: Any = Policy(5.0)
        reference.after_step(1, policy)
        reference.save(first)
        assert now(reference) == 1.0 and not first.exists()
        (tmp_path / "work").mkdir()
        reference.after_step(2, policy)  # 0.25 * 5 + 0.75 * 1
        assert now(reference) == 2.0
        reference.save(later)
        policy.value = 10.0
        reference.after_step(4, policy)  # 0.25 * 10 + 0.75 * 2
        assert now(reference) == 4.0
        reference.load(later)
        assert now(reference) == 2.0
        reference.after_step(6, policy)
        assert now(reference) == 4.0 and weight(later / "reference") == 2.0, "the checkpoint is as it was"
        reference.load(first)
        assert now(reference) == 1.0 and weight(initial) == 1.0
    assert runtime.open == 0


def test_weights_are_mixed_in_float32_by_name_wherever_they_lie(tmp_path):
    mine = write(tmp_path / "mine", a=torch.tensor([1.0, 3.0], dtype=torch.bfloat16), b=torch.tensor([2.0]))
    other = write(tmp_path / "other", a=torch.tensor([0.0, 1.0]))
    save_file({"b": torch.tensor([-2.0])}, other / "second.safetensors")
    mix_weights(mine, other, part=0.5)
    mixed = load_file(mine / "model.safetensors")
    assert mixed["a"].tolist() == [0.5, 2.0] and mixed["a"].dtype == torch.float32 and mixed["b"].tolist() == [0.0]


def test_many_small_steps_of_half_precision_weights_move_the_mean(tmp_path):
    """One step of 1/512 of the way from 1 to 2 is less than half a unit of bfloat16, which would stay at 1 for ever."""
    kept = write(tmp_path / "kept", w=torch.ones(1, dtype=torch.bfloat16))
    for step in range(20):
        mine = write(tmp_path / f"{step}", w=torch.full((1,), 2.0, dtype=torch.bfloat16))
        mix_weights(mine, kept, part=1 / 512)
        kept = mine
    assert weight(kept) == pytest.approx(2 - (1 - 1 / 512) ** 20, rel=1e-6)
    assert load_file(kept / "model.safetensors")["w"].to(torch.bfloat16).item() > 1


def test_a_reference_of_another_architecture_is_refused(tmp_path):
    mine = write(tmp_path / "mine", a=torch.zeros(2))
    with pytest.raises(ConfigError, match=r"reference_sync = 'a': the reference has no such tensor"):
        mix_weights(mine, write(tmp_path / "other", b=torch.zeros(2)), part=0.5)
    with pytest.raises(ConfigError, match=r"reference_sync = 'a \(2,\)'"):
        mix_weights(mine, write(tmp_path / "third", a=torch.zeros(3)), part=0.5)
