"""What `rlhf plan --estimate` predicts and refuses."""

import json
from pathlib import Path

import pytest

from pipelines.cli.main import main
from pipelines.execution.plan import plan
from pipelines.flows.profile import load_profile
from rlhf_contrib.planner.estimate import estimate, estimates, kv_token_bytes, refusal
from rlhf_contrib.planner.hardware import HARDWARE, hardware_of
from rlhf_contrib.planner.memory import Role
from rlhf_contrib.planner.sizes import shape_of_init
from rlhf_contrib.planner.stage_models import Phase
from rlhf_core.config.models import InitModel, LoraConfig
from rlhf_core.config.runtime import HFSamplerConfig
from rlhf_core.errors import ConfigError
from rlhf_core.store.artifacts import ArtifactStore

LARGE = shape_of_init(InitModel(vocab_size=300, hidden_size=4096, layers=36, heads=32, intermediate_size=14336))
APART = ["runtime.trainer.offload_optimizer=false"]
COLOCATED = [
    *APART,
    "runtime.train_workers=8",
    "runtime.gpus_per_train_worker=0.5",
    "runtime.gpus_per_engine=0.5",
    "runtime.sampler.engines=8",
    "runtime.sampler.gpu_memory_fraction=0.4",
]
REFUSED = {
    "runtime.trainer.offload_optimizer = False: ppo needs 88.9": ("one_node/full", APART, "set it to true"),
    "runtime.sampler.sleep = False": (
        "one_node/full",
        [*COLOCATED, "runtime.sampler.gpu_memory_fraction=0.45"],
        "set it to true",
    ),
    "runtime.trainer.zero_stage = 1": (
        "one_node/full",
        [*APART, "runtime.trainer.zero_stage=1"],
        "set it to 3 and runtime.trainer.offload_optimizer = true",
    ),
    "runtime.sampler.gpu_memory_fraction = 0.2": (
        "one_node/full",
        ["runtime.sampler.gpu_memory_fraction=0.2"],
        "raise it, or raise runtime.sampler.tensor_parallel",
    ),
    "runtime.sampler.kv_cache_gib = 1e-05": ("tiny/full", ["runtime.sampler.kv_cache_gib=1e-5"], "raise it"),
    "runtime.trainer.micro_batch = 64": (
        "one_gpu/full",
        ["runtime.trainer.micro_batch=64", "runtime.trainer.gradient_checkpointing=true"],
        "set it to ",
    ),
    "prepare_data.model = '68.5B parameters'": (
        "one_node/full",
        [
            "prepare_data.model.hidden_size=8192",
            "prepare_data.model.layers=80",
            "prepare_data.model.intermediate_size=28672",
            "prepare_data.model.heads=64",
        ],
        "take a smaller model, or GPUs with more memory",
    ),
}


def of(profile, changes, tmp_path, on=""):
    config = load_profile(profile, changes)
    store = ArtifactStore(tmp_path)
    planned, hardware = plan(config, store), hardware_of(on, config.runtime)
    given = config.runtime, hardware, config.prepare_data.max_prompt_tokens
    found = estimates(planned, store, *given)
    return {one.label: one for one in found}, refusal(found, planned, store, *given)


@pytest.mark.parametrize("error", REFUSED)
def test_what_does_not_fit_is_refused_with_the_key_that_mends_it(tmp_path, error):
    profile, changes, remedy = REFUSED[error]
    refused = of(profile, changes, tmp_path)[1]
    assert str(refused).startswith(error) and remedy in str(refused)


@pytest.mark.parametrize("profile", ["one_gpu/full", "one_node/full", "multi_node/full"])
@pytest.mark.parametrize("on", ["h100", "a100-80g"])
def test_shipped_profiles_fit_their_gpus(tmp_path, profile, on):
    found, refused = of(profile, [], tmp_path, on)
    assert refused is None and all(one.fits for one in found.values())


@pytest.mark.parametrize("key", ["gpus_per_train_worker", "gpus_per_engine"])
def test_models_on_cpus_beside_others_on_gpus_are_not_estimated_as_on_gpus(tmp_path, key):
    with pytest.raises(ConfigError, match=rf"runtime\.{key} = 0: .*give both GPUs or none, or leave --estimate out"):
        of("one_node/full", [f"runtime.{key}=0"], tmp_path)


def test_a_cache_without_room_beside_a_train_worker_is_refused():
    # bfloat16 weights of 8B are 16 GB, and 0.1 of a shared GPU is 8 GB.
    runtime = load_profile("one_gpu/full", ["runtime.sampler.gpu_memory_fraction=0.1"]).runtime
    phase = Phase((Role("policy", LARGE, True, 2048, lora=LoraConfig(rank=8)),), sampled=LARGE)
    made = estimate("ppo", [phase], None, runtime, HARDWARE["h100"])
    assert made.fits and [load.where for load in made.loads] == ["shared GPU", "node"] and made.kv_tokens == 0
    refused = refusal([made], [], ArtifactStore(Path()), runtime, HARDWARE["h100"], 1024)
    assert str(refused).startswith("runtime.sampler.gpu_memory_fraction = 0.1: leaves ppo a KV cache of 0 tokens")


def test_each_of_several_reward_models_has_its_weights():
    runtime = load_profile("one_node/full").runtime
    one, two = (Role("reward_model", LARGE, False, 2048, logits=False, which=which) for which in ("help", "harm"))
    alone, both = (estimate("ppo", [Phase(roles)], None, runtime, HARDWARE["h100"]) for roles in ((one,), (one, two)))
    # ZeRO 3 on four ranks: 2 P/4 bytes more
    assert both.loads[0].total - alone.loads[0].total == pytest.approx(2 * LARGE.parameters / 4)
    assert [role.label for role, _ in both.roles] == ["reward_model help", "reward_model harm"]


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2)])
def test_a_sampler_of_transformers_has_its_weights_and_no_cache(dtype, size):
    given = load_profile("one_gpu/full").runtime
    runtime = given.model_copy(update={"sampler": HFSamplerConfig(dtype=dtype)})
    made = estimate("generate", [Phase(sampled=LARGE)], None, runtime, HARDWARE["h100"])
    assert made.loads[0].where == "engine GPU" and made.loads[0].terms["engine weights"] == size * LARGE.parameters
    assert made.kv_tokens is None


def test_eight_ranks_that_share_their_gpus_with_sleeping_engines_need_no_offload(tmp_path):
    found, refused = of("one_node/full", [*COLOCATED, "runtime.sampler.sleep=true"], tmp_path)
    assert refused is None
    shared = next(load for load in found["ppo"].loads if load.where == "shared GPU")
    parameters = found["ppo"].roles[1][0].parameters
    assert sum(size for name, size in shared.terms.items() if name.startswith("policy")) == pytest.approx(
        18 * parameters / 8 + 2 * 2e8
    )
    assert shared.terms["reference weights, partitioned"] == pytest.approx(2 * parameters / 8)


def test_a_token_of_the_cache_by_hand():
    shape = shape_of_init(InitModel(vocab_size=300, hidden_size=4096, layers=36, heads=32, kv_heads=8))
    assert kv_token_bytes(shape, "bfloat16") == 2 * 36 * 8 * 128 * 2


def test_hardware_goes_with_the_profile():
    gpus, none = load_profile("one_node/full").runtime, load_profile("tiny/full").runtime
    assert hardware_of("", gpus).name == "h100" and hardware_of("", none).name == "cpu"
    for name, runtime in (("cpu", gpus), ("h100", none)):
        with pytest.raises(ConfigError, match=rf"--on = '{name}': the profile uses .*; leave --on out"):
            hardware_of(name, runtime)
    with pytest.raises(ConfigError, match=r"--on = 'h10': no such hardware; did you mean h100\?"):
        hardware_of("h10", gpus)


def test_the_command_prints_a_table_and_exits_with_one_line_for_what_does_not_fit(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    assert main(["plan", "one_node/full", "--estimate", "--terms"]) == 0
    shown = capsys.readouterr().out
    assert "| ppo | train GPU |" in shown and "nothing of this was measured on a GPU" in shown
    words = ["plan", "one_node/full", "--estimate", "--json", "--set", *APART]
    assert main(words) != 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["refused"] == printed.err.strip() and printed.err.count("\n") == 1
    assert next(one for one in found["stages"] if one["stage"] == "ppo")["fits"] is False
