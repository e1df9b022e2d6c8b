"""What of the engines enters a key, and how their unions are told apart."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from rlhf_core.config.base import keyed
from rlhf_core.config.engines import (
    BaseModelConfig,
    HFSamplerConfig,
    InitModel,
    PretrainedModel,
    RuntimeConfig,
    VllmSamplerConfig,
)


def test_workers_and_micro_batches_are_not_in_the_key_but_precision_and_sampler_are() -> None:
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


def test_a_base_model_is_chosen_by_its_type() -> None:
    adapter: TypeAdapter[object] = TypeAdapter(BaseModelConfig)
    assert adapter.validate_python({"type": "init", "layers": 2}) == InitModel(layers=2)
    with pytest.raises(ValidationError, match=r"'(init|pretrained)', '(init|pretrained)'"):
        adapter.validate_python({"type": "inti"})


def test_code_that_comes_with_a_model_is_never_run() -> None:
    with pytest.raises(ValidationError, match="trust_remote_code"):
        PretrainedModel.model_validate({"path": "models/mine", "trust_remote_code": True})
