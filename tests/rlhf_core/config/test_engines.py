"""What of the engines enters a key, and how their unions are told apart."""

import pytest
from pydantic import TypeAdapter, ValidationError

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.models import BaseModelConfig, InitModel, PretrainedModel
from rlhf_core.config.runtime import HFSamplerConfig, RuntimeConfig, VllmSamplerConfig
from rlhf_core.schema.base import keyed

TWO = {"type": "vllm", "tensor_parallel": 2}


def test_workers_and_micro_batches_are_not_in_the_key_but_precision_and_sampler_are():
    small = RuntimeConfig()
    large = RuntimeConfig(train_workers=8, gpus_per_train_worker=1, cpu_threads=4, type="local")
    assert keyed(small) == keyed(large)
    assert keyed(small)["trainer"] == {
        "engine": "deepspeed",
        "dtype": "float32",
        "attention": "sdpa",
        "liger": False,
        "router_aux_coef": 0.0,
    }
    assert keyed(small) != keyed(RuntimeConfig(sampler=HFSamplerConfig()))
    assert keyed(small) != keyed(RuntimeConfig(sampler=VllmSamplerConfig(max_model_len=128)))


def test_a_float32_head_of_one_engine_alone_is_refused():
    trainer, sampler = {"dtype": "bfloat16", "fp32_lm_head": True}, {"type": "hf", "dtype": "bfloat16"}
    with pytest.raises(ValidationError, match=r"fp32_lm_head = True, False: .*set both"):
        RuntimeConfig.model_validate({"trainer": trainer, "sampler": sampler})
    for fits in ({"fp32_lm_head": True}, {"dtype": "float32"}):
        RuntimeConfig.model_validate({"trainer": trainer, "sampler": sampler | fits})


@pytest.mark.parametrize("temperature", [1e-6, 0.005, 0.0099])
def test_a_temperature_that_vllm_would_raise_is_refused(temperature):
    with pytest.raises(
        ValidationError, match=r"must be 0 \(greedy\) or at least 0\.01: vLLM would sample at 0\.01, but the trainer"
    ):
        SamplingConfig(temperature=temperature)
    assert [SamplingConfig(temperature=given).temperature for given in (0, 0.01)] == [0.0, 0.01]


def test_a_base_model_is_chosen_by_its_type():
    adapter: TypeAdapter[object] = TypeAdapter(BaseModelConfig)
    assert adapter.validate_python({"type": "init", "layers": 2}) == InitModel(layers=2)
    with pytest.raises(ValidationError, match=r"'(init|pretrained)', '(init|pretrained)'"):
        adapter.validate_python({"type": "inti"})


def test_code_that_comes_with_a_model_is_never_run():
    with pytest.raises(ValidationError, match="trust_remote_code"):
        PretrainedModel.model_validate({"path": "models/mine", "trust_remote_code": True})


@pytest.mark.parametrize(
    "other",
    [
        {"gpus_per_engine": 0, "gpus_per_train_worker": 0},
        {"gpus_per_engine": 1, "gpus_per_train_worker": 1},
        {"gpus_per_train_worker": 0},
        {"type": "local"},
    ],
)
def test_only_an_engine_that_shares_a_gpu_may_sleep(other):
    shared = {"sampler": {"type": "vllm", "sleep": True}, "gpus_per_engine": 0.4, "gpus_per_train_worker": 0.5}
    RuntimeConfig.model_validate(shared)
    with pytest.raises(ValidationError, match=r"sampler\.sleep = true: .*vLLM cannot sleep on CPU"):
        RuntimeConfig.model_validate(shared | other)


def test_only_a_train_worker_that_shares_a_gpu_may_sleep():
    shared = {"trainer": {"sleep": True}, "gpus_per_engine": 0.4, "gpus_per_train_worker": 0.5}
    assert keyed(RuntimeConfig.model_validate(shared)) == keyed(RuntimeConfig())
    for other in ({"gpus_per_engine": 1}, {"gpus_per_train_worker": 0}, {"type": "local"}):
        with pytest.raises(ValidationError, match=r"trainer\.sleep = true: .*set it to false"):
            RuntimeConfig.model_validate(shared | other)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"gpus_per_train_worker": 0.6, "gpus_per_engine": 0.5}, "their sum is more than 1; make it at most 1"),
        ({"gpus_per_train_worker": 2}, "less than or equal to 1"),
        ({"gpus_per_engine": 1.5}, "above 1 it must be a whole number"),
        ({"gpus_per_engine": 1, "sampler": TWO}, r"tensor_parallel = 2: runtime\.gpus_per_engine = 1 is smaller"),
        (
            {"gpus_per_train_worker": 0.5, "gpus_per_engine": 0.5, "sampler": TWO},
            "train_workers = 1: engines of several GPUs",
        ),
        ({"pools": {"a": {"roles": ["reference"]}, "b": {"roles": ["reference"]}}}, "pools.a.roles = 'reference'"),
        ({"pools": {"a": {"roles": ["policy"]}}}, "Input should be 'reference'"),
        ({"pools": {"a": {"roles": []}}}, "at least 1 item"),
        ({"pools": {"a": {"roles": ["teacher"], "gpus_per_worker": 1}}}, "give both GPUs or none"),
        ({"pools": {"a": {"roles": ["teacher"]}}, "gpus_per_train_worker": 1}, "give both GPUs or none"),
        (
            {"pools": {"a": {"roles": ["teacher"]}}, "trainer": {"sequence_parallel": 2}, "train_workers": 2},
            r"pools\.a\.workers = 1: trainer\.sequence_parallel, tensor_parallel = 2, 1 do not divide it",
        ),
        (
            {
                "pools": {"a": {"roles": ["teacher"], "workers": 2, "zero_stage": 3}},
                "trainer": {"tensor_parallel": 2, "zero_stage": 1},
                "train_workers": 2,
            },
            "tensor_parallel = 2: zero_stage = 3 cannot be combined with it",
        ),
    ],
)
def test_gpus_that_cannot_be_dealt_out_are_refused(fields, rule):
    with pytest.raises(ValidationError, match=rule):
        RuntimeConfig.model_validate(fields)


def test_a_role_is_in_its_pool_or_with_all_others_and_pools_are_in_no_key():
    pool = {"roles": ["value_model"], "workers": 4, "zero_stage": 3}
    config = RuntimeConfig.model_validate({"pools": {"critic": pool}, "trainer": {"zero_stage": 1, "micro_batch": 2}})
    assert [config.pool_of(role) for role in ("policy", "reference", "value_model")] == ["", "", "critic"]
    own = config.of("value_model")
    assert (own.train_workers, own.trainer.zero_stage, own.trainer.micro_batch) == (4, 3, 2)
    assert (config.of("policy"), own.pools) == (config, {})
    assert keyed(config) == keyed(RuntimeConfig())


def test_where_servers_are_is_not_in_the_key_but_their_precision_is():
    def servers(**fields: object) -> dict[str, object]:
        values = {"type": "vllm_server", "urls": ["http://a:8000"], "weights_folder": "/shared", **fields}
        return keyed(RuntimeConfig.model_validate({"sampler": values}))

    assert servers() == servers(
        urls=["http://b:8000", "https://c"], weights_folder="/other", token_env="KEY", retries=5
    )
    assert servers() != servers(dtype="bfloat16")
    assert servers() != servers(max_model_len=128)
    assert keyed(RuntimeConfig()) == keyed(RuntimeConfig(sampler=VllmSamplerConfig(sleep=False)))
    assert keyed(RuntimeConfig()) != keyed(RuntimeConfig(sampler=VllmSamplerConfig(prefix_caching=True)))


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("urls", [], "at least 1 item"),
        ("urls", ["http://a:8000/v1"], "should match pattern"),
        ("urls", ["a:8000"], "should match pattern"),
        ("weights_folder", "shared/weights", "must be an absolute path"),
    ],
)
def test_servers_are_named_without_a_path_and_their_folder_with_all_of_it(field, value, problem):
    servers = {"type": "vllm_server", "urls": ["http://a:8000"], "weights_folder": "/shared", field: value}
    with pytest.raises(ValidationError, match=problem):
        RuntimeConfig.model_validate({"sampler": servers})
