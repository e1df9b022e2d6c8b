"""Tiny policies and reward models, and the runtimes that tests train them in. Imports no stage and no pipeline."""

from pathlib import Path
from typing import Literal

from rlhf_core.config.engines import TrainerConfig
from rlhf_core.config.models import InitModel
from rlhf_core.config.runtime import HFSamplerConfig, RuntimeConfig, VllmSamplerConfig
from rlhf_core.interfaces import ModelSpec

RUNTIME = RuntimeConfig(type="local", trainer=TrainerConfig(engine="torch"), sampler=HFSamplerConfig())
TWO_RANKS = RuntimeConfig(
    train_workers=2,
    cpu_threads=1,
    worker_timeout_s=400,
    trainer=TrainerConfig(engine="deepspeed", zero_stage=2, micro_batch=2),
    sampler=VllmSamplerConfig(max_model_len=96, kv_cache_gib=0.25),
)
"""Real engines on Ray, of a runtime that tests share (`tests/support/sharing.py`)."""
SHAPE = InitModel(vocab_size=320, hidden_size=32, layers=1, heads=2, kv_heads=2, intermediate_size=64, max_positions=64)


def make_policy(folder: Path) -> Path:
    """Write a Llama of one layer with its tokenizer; 0.1 s."""
    from rlhf_core.models.initialize import initialize_llama, train_tokenizer

    train_tokenizer(["What is 12 + 30? It is 42."] * 5, vocab_size=320, folder=folder)
    initialize_llama(SHAPE, folder, seed=7)
    return folder


def make_reward_model(folder: Path, policy: Path, *, head: Literal["score", "value"] = "score") -> Path:
    """Write a policy with a scalar head in place of its LM head."""
    from rlhf_core.models.loading import export_model, load_model

    spec = ModelSpec(str(policy), head, None, seed=3)
    model = load_model(spec, dtype="float32", attention="sdpa", gradient_checkpointing=False, device="cpu")
    export_model(model, folder, tokenizer_from=policy)
    return folder
