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


def make_mixture_of_experts(folder: Path, *, tied: bool = False) -> None:
    """Turn a policy into a Qwen3-MoE with eight experts in each of two layers, of which a token gets three.

    If `tied`, the routers' rows of two neighbors differ by one unit in the last place. A token gets one pair of them and
    one of a second pair, and rounding decides which.
    """
    import torch
    from transformers import LlamaConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    dense = LlamaConfig.from_pretrained(folder)
    torch.manual_seed(17)
    shape = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    shape |= {"head_dim": 64, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 3}
    shape |= {"max_position_embeddings": dense.max_position_embeddings}
    tokens = {name: getattr(dense, name) for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(norm_topk_prob=True, **shape, **tokens))
    if tied:
        with torch.no_grad():
            for layer in model.model.layers:
                rows_EH = layer.mlp.gate.weight.mul_(10)
                signs = 2 * torch.randint(0, 2, rows_EH[::2].shape) - 1
                rows_EH[1::2] = rows_EH[::2] * (1 + signs * 2.0**-23)
                for expert in layer.mlp.experts.parameters():
                    expert.mul_(5)  # so that it matters which of a pair computes
    model.save_pretrained(folder)


def make_reward_model(folder: Path, policy: Path, *, head: Literal["score", "value"] = "score") -> Path:
    """Write a policy with a scalar head in place of its LM head."""
    from rlhf_core.models.loading import export_model, load_model

    spec = ModelSpec(str(policy), head, None, seed=3)
    model = load_model(spec, dtype="float32", attention="sdpa", gradient_checkpointing=False, device="cpu")
    export_model(model, folder, tokenizer_from=policy)
    return folder
