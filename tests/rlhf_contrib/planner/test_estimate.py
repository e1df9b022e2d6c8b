"""What `rlhf plan --estimate` predicts and refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.cli.main import main
from pipelines.execution.plan import plan_stages
from pipelines.flows.profile import load_profile
from rlhf_contrib.planner.estimate import estimate, estimates, kv_token_bytes, products, refusal
from rlhf_contrib.planner.hardware import HARDWARE, hardware_of
from rlhf_contrib.planner.memory import Role
from rlhf_contrib.planner.sizes import shape_of_init
from rlhf_contrib.planner.stage_models import Phase, Step
from rlhf_contrib.planner.verb import warn_of_memory
from rlhf_core.config.models import InitModel, LoraConfig
from rlhf_core.config.runtime import HFSamplerConfig
from rlhf_core.errors import ConfigError
from rlhf_core.runtime.cluster import available_memory
from rlhf_core.store.artifacts import ArtifactStore

LARGE = shape_of_init(InitModel(vocab_size=300, hidden_size=4096, layers=36, heads=32, intermediate_size=14336))
APART = ["runtime.trainer.offload_optimizer=false"]
COLOCATED = [
    *APART,
    "runtime.train_workers=8",
    "runtime.gpus_per_train_worker=0.5",
    "runtime.gpus_per_engine=0.5",
    "runtime.sampler.engines=8",
    "runtime.sampler.gpu_memory_fraction=0.35",
]
REFUSED = {
    "runtime.trainer.offload_optimizer = False: ppo needs 95.2": ("one_node/full", APART, "set it to true"),
    "runtime.sampler.sleep = False": (
        "one_node/full",
        [*COLOCATED, "runtime.sampler.gpu_memory_fraction=0.4"],
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
    "prepare_data.model = '69.5B parameters'": (
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
    planned, hardware = plan_stages(config, store), hardware_of(on, config.runtime)
    given = config.runtime, hardware, config.prepare_data.max_prompt_tokens
    found = estimates(planned, store, *given)
    return {one.label: one for one in found}, refusal(found, planned, store, *given)


@pytest.mark.parametrize("error", REFUSED)
def test_what_does_not_fit_is_refused_with_the_key_that_mends_it(tmp_path, error):
    profile, changes, remedy = REFUSED[error]
    refused = of(profile, changes, tmp_path)[1]
    assert str(refused).startswith(error) and remedy in str(refused)


@pytest.mark.parametrize("profile", ["one_gpu/full", "one_node/full", "multi_node/full"])
@pytest.mark.parametrize("on", ["h100", "a100", "a100-80g", "rtx6000", "h200", "b200"])
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


def seconds(*, row=1024, lora=None, settings=()):
    """Seconds of training 8,192 tokens of rows of `row` on one GPU, whose speed is 0.4 of 989e12."""
    runtime = load_profile("one_gpu/full", [*settings, "runtime.trainer.gradient_checkpointing=false"]).runtime
    phase = Phase((Role("policy", LARGE, True, 2048, lora=lora),))
    return estimate("sft", [phase], Step(8192, length=row), runtime, HARDWARE["h100"]).seconds["train"]


def test_attention_grows_with_the_length_of_rows():
    # 36 layers, queries of 4096: a token is multiplied with the keys and values of half a row, 2 of each, three times
    pairs = 8192 * 6 * 36 * 4096 / (0.4 * 989e12)
    assert seconds(row=32768) - seconds(row=1024) == pytest.approx(pairs * (32768 - 1024))
    # Adapters save the gradients of weights: 2 of 6 of the linear products, none of attention.
    weights = 8192 * 2 * LARGE.active / (0.4 * 989e12)
    assert seconds() - seconds(lora=LoraConfig(rank=8)) == pytest.approx(weights)


def test_a_mixture_of_experts_is_slower_than_its_products():
    sparse = replace(LARGE, parameters=4 * LARGE.parameters)
    assert sparse.sparse and not LARGE.sparse
    step, roles = Step(8192, length=1024), [Role("policy", shape, True, 2048) for shape in (sparse, LARGE)]
    assert products(roles[0], step, linear=6) == pytest.approx(products(roles[1], step, linear=6) / 0.4)


def test_a_gather_takes_the_time_of_nccl():
    runtime = load_profile("multi_node/full").runtime
    role, step = Role("policy", LARGE, True, 16), Step(16 * 16 * 100, length=16)
    found = estimate("sft", [Phase((role,))], step, runtime, HARDWARE["h100"]).seconds["train"]
    # 100 micro-batches a rank, three gathers each of 15 of 16 parts at 200 GB/s; 6 bytes a parameter over PCIe at 50
    gathers = 100 * 3 * 2 * LARGE.parameters * 15 / 16 / 200e9
    assert found == pytest.approx(gathers + 6 * LARGE.parameters / 16 / 50e9)


def test_sleeping_takes_seconds_and_host_memory(tmp_path):
    awake, asleep, both = (
        of(
            "one_node/full", [*COLOCATED, f"runtime.sampler.sleep={sleeps}", f"runtime.trainer.sleep={rests}"], tmp_path
        )[0]["ppo"]
        for sleeps, rests in (("false", "false"), ("true", "false"), ("true", "true"))
    )
    weights = 2.0 * awake.roles[1][0].shape.parameters
    assert "sleep" not in awake.seconds
    assert "sleep" not in asleep.seconds and "engine weights, asleep" not in node(asleep).terms  # they are dropped
    moved = sum(memory.total for _, memory in both.roles)
    assert both.seconds["sleep"] == pytest.approx(2 * moved / 50e9)
    again = ["runtime.sampler.sleep=true", "ppo.ahead.type=dynamic", "ppo.samples_per_prompt=2"]
    kept = of("one_node/full", [*COLOCATED, *again], tmp_path)[0]["ppo"]
    assert kept.seconds["sleep"] == pytest.approx(2 * weights / 50e9)
    assert node(kept).terms["engine weights, asleep"] == pytest.approx(8 * weights)
    assert node(both).terms["train workers, asleep"] == pytest.approx(8 * moved)


def node(made):
    return next(load for load in made.loads if load.where == "node")


def test_engines_elsewhere_have_the_buffers_of_a_transfer(tmp_path):
    found = of("one_node/full", [], tmp_path)[0]["ppo"]
    engine = next(load for load in found.loads if load.where == "engine GPU")
    assert engine.terms["buffers of a sync"] == 2 * 2**30
    assert "weights handed out" not in node(found).terms  # they do not pass through host memory


def test_offloaded_states_are_not_copied_for_a_checkpoint(tmp_path):
    kept, offloaded = (
        node(of("one_node/full", [f"runtime.trainer.offload_optimizer={value}"], tmp_path)[0]["ppo"])
        for value in ("false", "true")
    )
    # 12 bytes a parameter of both trained models
    roles = [role for role, _ in of("one_node/full", [], tmp_path)[0]["ppo"].roles if role.trained]
    assert kept.terms["checkpoint copies"] == pytest.approx(12 * sum(role.parameters for role in roles))
    assert "checkpoint copies" not in offloaded.terms


def test_pools_fill_a_node_once():
    runtime = load_profile(
        "one_node/full",
        [
            "runtime.train_workers=8",
            "runtime.pools.critic.workers=8",
            "runtime.pools.critic.gpus_per_worker=1",
            'runtime.pools.critic.roles=["value_model"]',
        ],
    ).runtime
    roles = Role("value_model", LARGE, True, 2048, logits=False), Role("policy", LARGE, True, 2048)
    made = node(estimate("ppo", [Phase(roles)], None, runtime, HARDWARE["h100"]))
    kept = sum(size for name, size in made.terms.items() if "offloaded" in name)
    assert kept == pytest.approx(16 * LARGE.parameters)  # eight GPUs, of one model


def test_an_engine_of_two_gpus_shares_them_with_train_workers(tmp_path):
    parallel = ["runtime.sampler.engines=4", "runtime.sampler.tensor_parallel=2", "runtime.sampler.sleep=true"]
    found, refused = of("one_node/full", [*COLOCATED, *parallel], tmp_path)
    shared = next(load for load in found["ppo"].loads if load.where == "shared GPU")
    assert refused is None and shared.fits
    assert found["ppo"].kv_tokens > 0
    with pytest.raises(
        ConfigError, match=r"train_workers = 8: engines of several GPUs share each of them .*have 4; set it"
    ):
        load_profile("one_node/full", [*COLOCATED, *parallel, "runtime.sampler.engines=2"])


@pytest.mark.parametrize(
    ("name", "size"),
    [("rtx4090", 24), ("a100-40g", 40), ("l40s", 48), ("a100", 80), ("h100", 80), ("rtx6000", 96), ("h200", 141)],
)
def test_cards_have_their_names(name, size):
    assert hardware_of(name, load_profile("one_gpu/full").runtime).memory == size * 1e9


def test_host_memory_is_what_a_user_says(tmp_path, monkeypatch, capsys):
    gpus, none = load_profile("one_node/full").runtime, load_profile("tiny/full").runtime
    assert hardware_of("h100", gpus, host_gib=256).host == 256 * 2**30
    with pytest.raises(ConfigError, match=r"--host-gib = 64: the profile uses no GPUs, .*; leave it out"):
        hardware_of("", none, host_gib=64)
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    assert main(["plan", "one_node/full", "--estimate", "--host-gib", "128"]) == 2
    assert "GB on each node of 137.4" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--on", "h100"], ["--host-gib", "128"], ["--terms"]])
def test_an_option_of_the_estimate_is_refused_without_it(words, capsys):
    assert main(["plan", "one_gpu/full", *words]) == 2
    assert "belongs to an estimate; add --estimate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/user/job", {"memory.max": "max", "user/memory.max": "3000000"}),
        ("5:cpu:/a\n7:memory:/job", {"memory/job/memory.limit_in_bytes": "3000000"}),
    ],
)
def test_the_limit_of_a_control_group_is_the_host_memory(tmp_path, groups, files):
    for name, limit in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(limit + "\n")
    (tmp_path / "cgroup").write_text(groups + "\n")
    assert available_memory(tmp_path / "cgroup", tmp_path) == 3e6
    assert available_memory(tmp_path / "none", tmp_path) > 3e6


def test_a_run_warns_of_host_memory_that_is_not_there(tmp_path, monkeypatch, caplog):
    config, store = load_profile("one_node/full"), ArtifactStore(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("rlhf_contrib.planner.verb.available_memory", lambda: 64e9)
    warn_of_memory(config, plan_stages(config, store), store)
    assert "GB of host memory by estimate, and this machine or its control group gives 64.0" in caplog.text
    caplog.clear()
    monkeypatch.setattr("rlhf_contrib.planner.verb.available_memory", lambda: 2e12)
    warn_of_memory(config, plan_stages(config, store), store)
    assert caplog.text == ""


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
