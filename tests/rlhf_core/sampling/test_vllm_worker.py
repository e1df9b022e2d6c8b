from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from torch import nn

from rlhf_core.models.lora import weights_digest
from rlhf_core.sampling.vllm_worker import WeightReload, probe_weights, read_tensors


class Held(nn.Module):
    """A norm as it came, an embedding padded from 70 to 72 rows, and a fused projection of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.arange(6.0))
        self.embed_tokens = nn.Parameter(torch.arange(72.0 * 2).reshape(72, 2))
        self.proj = nn.Parameter(torch.zeros(4, 2))


def worker(model: nn.Module) -> WeightReload:
    probe = WeightReload()
    probe.model_runner = SimpleNamespace(get_model=lambda: model)
    return probe


def sent() -> dict[str, torch.Tensor]:
    return {"norm": torch.arange(6.0), "embed_tokens": torch.arange(70.0 * 2).reshape(70, 2), "proj": torch.ones(2, 2)}


def test_what_the_engine_holds_as_it_was_sent_matches():
    assert worker(Held()).mismatched_weights(probe_weights(sent())) == []


def test_a_stale_norm_and_a_stale_embedding_are_named():
    tensors = sent()
    tensors["norm"][3] += 0.5
    tensors["embed_tokens"][69] += 1
    assert worker(Held()).mismatched_weights(probe_weights(tensors)) == ["norm", "embed_tokens"]


def test_weights_are_compared_in_the_precision_of_the_engine():
    tensors = sent()
    tensors["norm"] += 1e-4  # 3 + 1e-4 is 3 in bfloat16
    tensors["norm"][0] = 0
    assert worker(Held().bfloat16()).mismatched_weights({"norm": probe_weights(tensors)["norm"]}) == []


# ---------------------------------------------------------------- weights in a folder


class Reloading(WeightReload):
    """A worker whose engine reloads, or goes on with what it has."""

    def __init__(self, model: nn.Module, *, stale: bool) -> None:
        self.model_runner = SimpleNamespace(get_model=lambda: model)
        self._model = model
        self._stale = stale

    def reload_weights(self, *, weights_path: str) -> None:
        if not self._stale:
            self._model.load_state_dict(read_tensors(Path(weights_path)), strict=False)


def in_a_folder(folder: Path) -> tuple[str, str]:
    """Return a folder of two files and the digest of the weights in it."""
    tensors = {"norm": torch.arange(6.0) + 1, "embed_tokens": torch.ones(72, 2), "proj": torch.ones(2, 2)}
    save_file({"norm": tensors["norm"]}, folder / "model-1.safetensors")
    save_file({name: tensors[name] for name in ("embed_tokens", "proj")}, folder / "model-2.safetensors")
    return str(folder), weights_digest(tensors)


class Unfused(Held):
    """As `Held`, but its projection loads as it is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Parameter(torch.zeros(2, 2))


def test_a_folder_of_several_files_is_loaded(tmp_path):
    model = Unfused()
    assert Reloading(model, stale=False).load_folder(*in_a_folder(tmp_path)) == []
    assert model.norm[0] == 1


def test_a_folder_of_other_weights_is_not_loaded(tmp_path):
    folder, digest = in_a_folder(tmp_path)
    model = Unfused()
    (problem,) = Reloading(model, stale=False).load_folder(folder, "f" * 64)
    assert problem == f"the files in {folder} have the digest {digest[:12]}, not ffffffffffff"
    assert model.norm[0] == 0


def test_an_engine_that_goes_on_with_its_old_weights_is_found_out(tmp_path):
    problems = Reloading(Unfused(), stale=True).load_folder(*in_a_folder(tmp_path))
    assert problems == ["norm has other values than those sent", "embed_tokens has other values than those sent"]


def test_the_settings_are_those_that_decide_about_logprobs():
    told = WeightReload()
    model = SimpleNamespace(
        dtype=torch.bfloat16, head_dtype=torch.float32, max_model_len=96, logprobs_mode="raw_logprobs", seed=3
    )
    told.vllm_config = SimpleNamespace(model_config=model)
    assert told.settings() == {
        "dtype": "bfloat16",
        "head_dtype": "float32",
        "max_model_len": 96,
        "logprobs_mode": "raw_logprobs",
    }
