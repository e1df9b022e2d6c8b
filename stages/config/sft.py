"""Configure supervised fine-tuning: `[sft]`, `[rejection_sampling.sft]`, `[conditional_sft.sft]`."""

from typing import Literal

from pydantic import Field

from rlhf_core.config.engines import LoraConfig, OptimizerConfig
from rlhf_core.config.policy import LoopConfig
from rlhf_core.schema.base import Config


class SFTConfig(Config):
    """Supervised fine-tuning on demonstrations."""

    max_length: int = Field(256, ge=8)
    """Maximum number of tokens of a conversation; longer ones are cut, and dropped if no trained token is left."""
    packing: bool = False
    """Whether conversations share rows of `max_length` tokens; attention and positions do not leak. Refused for
    architectures that are not known to keep conversations apart."""
    loss: Literal["nll", "dft"] = "nll"
    train_on: Literal["assistant", "all"] = "assistant"
    """Tokens to train on; `all` means every token but the first, including prompts and the template's own tokens."""
    loop: LoopConfig = LoopConfig(batch_size=32, epochs=2)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-5)
    lora: LoraConfig | None = None
