"""`auto` becomes a precision when a configuration is read: that of the GPUs, or what the processor multiplies."""

from pathlib import Path
from types import MappingProxyType

import pytest

from rlhf_core.config import engines
from rlhf_core.config.engines import TrainerConfig, multiplies_bfloat16
from rlhf_core.config.runtime import RuntimeConfig, VllmSamplerConfig, VllmServerSamplerConfig
from rlhf_core.schema.base import keyed

ZEN_4 = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 avx512vl\n\nprocessor\t: 1\nflags\t\t: fpu avx2\n"
HASWELL = "processor\t: 0\nmodel name\t: bf16 in a name\nflags\t\t: fpu avx2 fma\nbugs\t\t: bf16\n"
GRAVITON_3 = "processor\t: 0\nFeatures\t: fp asimd sve i8mm bf16\n"


def cpu(folder: Path, text: str) -> Path:
    file = folder / "cpuinfo"
    file.write_text(text)
    return file


@pytest.mark.parametrize(("text", "found"), [(ZEN_4, True), (GRAVITON_3, True), (HASWELL, False), ("", False)])
def test_the_processor_says_whether_it_multiplies_bfloat16(tmp_path, text, found):
    assert multiplies_bfloat16(cpu(tmp_path, text)) is found


def test_a_system_that_says_nothing_computes_in_float32(tmp_path):
    assert multiplies_bfloat16(tmp_path / "absent") is False


@pytest.mark.parametrize(("native", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_auto_is_what_the_processor_multiplies(monkeypatch, native, dtype):
    monkeypatch.setattr(engines, "multiplies_bfloat16", lambda: native)
    runtime = RuntimeConfig.model_validate({"trainer": {"dtype": "auto"}, "sampler": {"type": "hf", "dtype": "auto"}})
    assert (runtime.trainer.dtype, runtime.sampler.dtype) == (dtype, dtype)


def test_auto_is_bfloat16_on_gpus_whatever_plans_the_run(monkeypatch):
    monkeypatch.setattr(engines, "multiplies_bfloat16", lambda: False)
    auto = {"trainer": {"dtype": "auto"}, "sampler": {"type": "vllm", "dtype": "auto"}}
    runtime = RuntimeConfig.model_validate(auto | {"gpus_per_train_worker": 1})
    assert (runtime.trainer.dtype, runtime.sampler.dtype) == ("bfloat16", "float32")
    runtime = RuntimeConfig.model_validate(MappingProxyType(auto))
    assert (runtime.trainer.dtype, runtime.sampler.dtype) == ("float32", "float32")
    runtime = RuntimeConfig.model_validate(auto | {"gpus_per_engine": 0.5, "gpus_per_train_worker": 0.5})
    assert (runtime.trainer.dtype, runtime.sampler.dtype) == ("bfloat16", "bfloat16")


def test_a_server_has_the_precision_that_it_was_started_with():
    with pytest.raises(ValueError, match="'float32' or 'bfloat16'"):
        VllmServerSamplerConfig(urls=("http://node:8000",), weights_folder="/shared", dtype="auto")


def test_keys_have_the_precision_and_not_auto(monkeypatch):
    monkeypatch.setattr(engines, "multiplies_bfloat16", lambda: True)
    for kind in (TrainerConfig, VllmSamplerConfig):
        assert keyed(kind.model_validate({"dtype": "auto"})) == keyed(kind.model_validate({"dtype": "bfloat16"}))
        assert keyed(kind.model_validate({"dtype": "auto"})) != keyed(kind())


def test_another_precision_is_refused():
    with pytest.raises(ValueError, match="'float32' or 'bfloat16'"):
        TrainerConfig.model_validate({"dtype": "float16"})
