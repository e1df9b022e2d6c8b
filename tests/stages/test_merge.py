"""Merged policies: whole folders in one or several files, and policies that do not belong together."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from rlhf_core.errors import ConfigError
from rlhf_core.models.initialize import initialize_llama
from rlhf_core.store.layout import MANIFEST
from rlhf_core.types import PolicyRef
from stages.merge import MergeConfig
from tests.support.policies import SHAPE, make_policy
from tests.support.workshop import workshop


def moved(policy: Path, folder: Path, by: float, *, files: int = 1) -> Path:
    """Write a policy whose weights are those of `policy` plus `by`, in so many files."""
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text("{}")  # as policies of the store have one
    for path in policy.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    weights = {name: value + by for name, value in load_file(policy / "model.safetensors").items()}
    home = {name: f"model-{i % files + 1:05}-of-{files:05}.safetensors" for i, name in enumerate(sorted(weights))}
    for file in set(home.values()):
        chosen = {name: value for name, value in weights.items() if home[name] == file}
        save_file(chosen, folder / (file if files > 1 else "model.safetensors"), metadata={"format": "pt"})
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": home}))
    return folder


def merged(root: Path, config: MergeConfig, folders: dict[str, Path]) -> Path:
    shop = workshop(root)
    refs = {name: shop.store.external(PolicyRef, folder) for name, folder in folders.items()}
    inputs: dict[str, Any] = {"policies": {name: refs[name] for name in config.weights}}
    if config.uses_base:
        inputs["base"] = refs["start"]
    ref, _ = shop.run("merge", config, inputs)
    return shop.store.path(ref)


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ({"type": "linear"}, 0.25 * 0.5 + 0.75 * -0.25),
        ({"type": "task_arithmetic"}, 0.25 * 0.5 + 0.75 * -0.25),  # of weights that add up to 1
        ({"type": "ties", "density": 1.0}, -0.25),  # the second one's sign is that of the sum
    ],
)
def test_every_tensor_of_a_policy_is_merged(tmp_path, policy, files, method, expected):
    folders = {
        "start": policy,
        "up": moved(policy, tmp_path / "up", 0.5, files=files),
        "down": moved(policy, tmp_path / "down", -0.25),
    }
    config = MergeConfig(weights={"up": 0.25, "down": 0.75}, method=method)
    folder = merged(tmp_path, config, folders)
    start = load_file(policy / "model.safetensors")
    made = {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
    assert made.keys() == start.keys()
    for name, value in made.items():
        # Values below 1 plus 1/2 and minus 1/4 round to 2^-24; the merge rounds three times more.
        assert torch.allclose(value, start[name] + expected, rtol=0, atol=4 * 2**-24 * 2), name
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(folder) is not None


def test_policies_that_do_not_belong_together_are_refused(tmp_path, policy):
    wide = make_policy(tmp_path / "wide")
    initialize_llama(SHAPE.model_copy(update={"hidden_size": 2 * SHAPE.hidden_size}), wide, seed=7)
    with pytest.raises(
        ConfigError, match=r"merge\.weights = 'wide': .* has shape \[.*\], and \[.*\] in ours; merge policies"
    ):
        merged(tmp_path, MergeConfig(weights={"ours": 1.0, "wide": 1.0}), {"ours": policy, "wide": wide})
    far = MergeConfig(weights={"ours": 1.0, "up": 1.0}, method={"type": "task_arithmetic", "scale": 1e39})
    folders = {"start": policy, "ours": policy, "up": moved(policy, tmp_path / "up", 0.5)}
    with pytest.raises(ConfigError, match=r"merge\.weights = '.*': the merged values are not finite in torch.float32"):
        merged(tmp_path / "far", far, folders)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"weights": {"a": 1.0}}, "at least 2 items"),
        ({"weights": {"a": 1.0, "b": 0.0}}, "greater than 0"),
        ({"weights": {"a": 1e308, "b": 1e308}}, "their sum is too large; give smaller ones"),
        (
            {"weights": {"a": 1.0, "b": 1.0, "c": 1.0}, "method": {"type": "slerp"}},
            "slerp interpolates between two policies, and there are 3",
        ),
    ],
)
def test_weights_that_mean_no_merge_are_refused(table, message):
    with pytest.raises(ValidationError, match=message):
        MergeConfig.model_validate(table)


def test_a_policy_called_base_is_not_the_base(tmp_path, policy):
    folders = {
        "start": policy,
        "base": moved(policy, tmp_path / "base", 0.5),
        "other": moved(policy, tmp_path / "other", 0.25),
    }
    folder = merged(
        tmp_path, MergeConfig(weights={"base": 1.0, "other": 1.0}, method={"type": "task_arithmetic"}), folders
    )
    start, made = load_file(policy / "model.safetensors"), load_file(folder / "model.safetensors")
    assert all(torch.allclose(made[name], start[name] + 0.75, rtol=0, atol=8 * 2**-24) for name in start)
