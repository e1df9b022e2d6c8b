"""A sequence classifier from outside is checked, copied and scored as transformers scores it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelines.execution.plan import plan_stages
from pipelines.flows.profile import load_profile
from rlhf_contrib.openrlhf.translate import translate
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.errors import ConfigError
from rlhf_core.rewards.model import PROBES
from rlhf_core.stage.run import execute
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import PolicyRef, RewardModelRef
from stages.import_reward_model import ImportRewardModelConfig, content_digests
from stages.table import STAGES
from tests.support.workshop import Workshop, quiet, workshop


@pytest.fixture(scope="module")
def made(policy: Path, tmp_path_factory) -> Path:
    """What a user has: a classifier that transformers saved, with other weights than the policy's, and its tokenizer."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path_factory.mktemp("outside")
    tokenizer = AutoTokenizer.from_pretrained(policy)
    config = AutoConfig.from_pretrained(policy, num_labels=1, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(11)
    model = AutoModelForSequenceClassification.from_config(config)
    torch.nn.init.normal_(model.score.weight, std=1.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "optimizer.pt").write_bytes(b"not ours")
    return folder


@pytest.fixture
def outside(made: Path, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "outside"))


def imported(store: ArtifactStore, policy: Path, outside: Path, **changes: Any) -> Path:
    shop = Workshop(store)
    config = ImportRewardModelConfig(path=str(outside), **changes)
    ref, _ = shop.run("import_reward_model", config, {"policy": store.external(PolicyRef, policy)})
    assert isinstance(ref, RewardModelRef)
    return store.path(ref)


def test_its_scores_are_those_of_transformers_own_pipeline_on_the_same_text(tmp_path, policy, outside):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

    folder = imported(ArtifactStore(tmp_path / "store"), policy, outside)
    contract = json.loads((folder / "contract.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(outside)
    texts = [tokenizer.decode(ids) for ids in contract["probe"]]
    assert all(answer in text for text, (_, answer) in zip(texts, PROBES, strict=True))
    # The tiny tokenizer adds no special tokens of its own, so its pipeline reads the rendered text as it stands.
    assert [tokenizer(text)["input_ids"] for text in texts] == contract["probe"]
    model = AutoModelForSequenceClassification.from_pretrained(outside).eval()
    rewards = pipeline("text-classification", model=model, tokenizer=tokenizer, function_to_apply="none")
    wanted = [one["score"] for one in rewards(texts, batch_size=len(texts))]
    # Float32 on both sides, in other batches. The score is a sum of H = hidden_size products of terms of order 1, so the
    # order of summation alone moves it by about H * 2^-24, 8e-6 for H <= 128, times a few for the layer before the head.
    assert contract["probe_scores"] == pytest.approx(wanted, abs=5e-5)
    assert max(wanted) - min(wanted) > 0.01, "else any model would do"
    assert contract["mean"] == pytest.approx(sum(wanted) / len(wanted), abs=5e-5)
    assert contract["max_length"] == 2048 and contract["eos_token_id"] == tokenizer.eos_token_id
    assert not (folder / "optimizer.pt").exists()


def test_its_key_is_what_is_in_it_and_not_where_it_is(tmp_path, outside):
    elsewhere = shutil.copytree(outside, tmp_path / "elsewhere")
    (elsewhere / "optimizer.pt").write_bytes(b"another")
    digests = [content_digests(ImportRewardModelConfig(path=str(folder))) for folder in (outside, elsewhere)]
    assert digests[0] == digests[1]
    (elsewhere / "chat_template.jinja").write_text("{{ messages }}")
    assert content_digests(ImportRewardModelConfig(path=str(elsewhere))) != digests[0]


def rewrite(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    changed = change(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    save_file(
        {name: tensor.contiguous() for name, tensor in changed.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def renamed(name: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {name if key == "score.weight" else key: tensor for key, tensor in tensors.items()}


def without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "three outputs": (
        lambda folder: weights(
            folder, lambda one: {**one, "score.weight": torch.zeros(3, one["score.weight"].shape[1])}
        ),
        "has 3 outputs; use a reward model with one output",
    ),
    "a language model": (
        lambda folder: weights(folder, lambda one: {k: v for k, v in one.items() if k != "score.weight"}),
        r"has no score head \(score.weight\).*to train one from a language model, use \[reward_model\]",
    ),
    "an encoder": (lambda folder: weights(folder, renamed("classifier.weight")), "its head is classifier.weight"),
    "openrlhf with another head": (
        lambda folder: (rewrite(folder, value_head_prefix="r_head"), weights(folder, renamed("r_head.weight"))),
        "its head is r_head.weight; only a decoder's score.weight is read",
    ),
    "openrlhf, normalized": (
        lambda folder: rewrite(folder, normalize_reward=True, mean=1.5, std=2.0),
        'OpenRLHF subtracts 1.5 from its scores and divides by 2.0.*normalize = "running"',
    ),
    "no template": (without_template, "has no chat template; add the template"),
    "no safetensors": (lambda folder: (folder / "model.safetensors").unlink(), "contains no safetensors files"),
    "no model": (lambda folder: (folder / "config.json").unlink(), "is not a folder with a config.json; download"),
    "code": (lambda folder: rewrite(folder, auto_map={"AutoModel": "x.Y"}), "needs its own code"),
    "weights that git-lfs did not fetch": (
        lambda folder: (folder / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
        ),
        "its model.safetensors is a git-lfs pointer, not the file itself; run `git lfs pull` in that folder",
    ),
    "weights cut short": (
        lambda folder: os.truncate(folder / "model.safetensors", 100),
        "its model.safetensors is not a safetensors file .*; download the file again",
    ),
    "a broken config": (
        lambda folder: (folder / "config.json").write_text("{"),
        "its config.json is not valid JSON .*; download the file again",
    ),
    "a config that is a list": (
        lambda folder: (folder / "config.json").write_text("[]"),
        "its config.json must be a JSON object, not list",
    ),
    "a broken tokenizer": (
        lambda folder: (folder / "tokenizer_config.json").write_bytes(b'{"a": "\xff"}'),
        "its tokenizer_config.json is not valid JSON .*utf-8",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_is_none_of_ours_is_refused_with_what_to_do(outside, case):
    change, rule = REFUSED[case]
    change(outside)
    with pytest.raises(ConfigError, match=rf"import_reward_model\.path.*{rule}"):
        content_digests(ImportRewardModelConfig(path=str(outside)))


@pytest.mark.parametrize("changed", ["model.safetensors", "config.json", "added.json"])
def test_files_that_changed_between_the_plan_and_the_copy_are_refused(tmp_path, policy, outside, changed):
    store, shop = ArtifactStore(tmp_path / "store"), workshop(tmp_path)
    config = ImportRewardModelConfig(path=str(outside))
    inputs = {"policy": store.external(PolicyRef, policy)}
    files = {"files": content_digests(config)}
    spec = STAGES["import_reward_model"].spec(config, inputs, label="rm", seed=17, engines=files)

    def execute_it() -> None:
        execute(store, spec, runtime=shop.runtime, tracker=shop.tracker, progress=quiet)

    kept = (outside / changed).read_bytes() if (outside / changed).exists() else None
    if changed == "model.safetensors":
        weights(outside, lambda one: {**one, "score.weight": -one["score.weight"]})
    else:
        (outside / changed).write_bytes((kept or b"{}") + b"\n")
    with pytest.raises(
        ConfigError, match=r"import_reward_model\.path.*have changed since the run was planned; run again"
    ):
        execute_it()
    (outside / changed).unlink()
    if kept is not None:
        (outside / changed).write_bytes(kept)
    execute_it()  # what was planned is there again


def test_one_of_openrlhf_says_nothing_of_its_outputs_and_is_read_as_it_is(tmp_path, policy, outside):
    store = ArtifactStore(tmp_path / "store")
    plain = json.loads((imported(store, policy, outside) / "contract.json").read_text())
    rewrite(
        outside, architectures=["RewardModel"], id2label=None, label2id=None, value_head_prefix="score",
        normalize_reward=False, mean=0.5, std=2.0,
    )  # fmt: skip
    theirs = imported(store, policy, outside)
    assert json.loads((theirs / "contract.json").read_text())["probe_scores"] == pytest.approx(
        plain["probe_scores"], abs=5e-5
    )
    from transformers import AutoConfig

    assert AutoConfig.from_pretrained(theirs).num_labels == 1


def test_one_with_another_tokenizer_than_the_policys_is_refused_before_anything_is_trained(tmp_path, policy, outside):
    from rlhf_core.models.initialize import train_tokenizer

    train_tokenizer(["quite another text, with other pairs of letters"] * 5, vocab_size=300, folder=outside)
    with pytest.raises(ConfigError, match=r"turns 'What is 12 \+ 30\?' into other tokens than the policy's"):
        imported(ArtifactStore(tmp_path / "store"), policy, outside)


def test_one_without_roles_gets_the_template_of_the_policy(tmp_path, policy, outside):
    settings = json.loads((outside / "tokenizer_config.json").read_text())
    (outside / "tokenizer_config.json").write_text(
        json.dumps({k: v for k, v in settings.items() if k != "chat_template"})
    )
    (outside / "chat_template.jinja").unlink(missing_ok=True)
    shop, config = (
        workshop(tmp_path),
        ImportRewardModelConfig(path=str(outside), template="policy"),
    )
    inputs = {"policy": shop.store.external(PolicyRef, policy)}
    with pytest.raises(ConfigError, match="its tokenizer has no chat template"):
        content_digests(ImportRewardModelConfig(path=str(outside)))
    ref, _ = shop.run("import_reward_model", config, inputs, files=content_digests(config))
    assert ChatTemplate.load(shop.store.path(ref)).digest == ChatTemplate.load(policy).digest


def test_a_profile_that_openrlhfs_script_became_imports_its_reward_model(tmp_path, outside):
    (tmp_path / "d.jsonl").write_text('{"input": "hi"}\n')
    script = (
        f"python -m openrlhf.cli.train_ppo_ray --pretrain {outside} --reward_pretrain {outside} "
        f"--prompt_data {tmp_path}/d.jsonl --apply_chat_template --max_samples 64 --seed 3"
    )
    translation = translate(script, name="x", template_file="x.jinja")
    fates = {one.flag: one.fate for one in translation.outcomes}
    assert fates["--reward_pretrain"] == "translated"
    (tmp_path / "x.toml").write_text(translation.profile)
    config = load_profile(tmp_path / "x.toml")
    assert config.import_reward_model == ImportRewardModelConfig(path=str(outside))
    planned = plan_stages(config, ArtifactStore(tmp_path / "store"))
    assert [stage.label for stage in planned][:3] == ["prepare_data", "import_reward_model", "ppo"]
    assert list(planned[2].spec.inputs["reward_models"]) == ["reward_model"]


def test_a_run_has_one_reward_model():
    with pytest.raises(ConfigError, match="takes the place of \\[reward_model\\]"):
        load_profile("tiny/full", ["import_reward_model.path=rm"])
