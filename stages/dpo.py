"""Direct preference optimisation (arXiv 2305.18290) and its kin: learn from pairs without a reward model in the loop.

With h = [log pi(y_c) - log pi_ref(y_c)] - [log pi(y_r) - log pi_ref(y_r)] the loss of a pair is
  dpo  -log sigmoid(beta h)          cdpo  the same with label smoothing          ipo  (h - 1/(2 beta))^2
The reference is evaluated once over the dataset; its log-probs are kept beside the checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import Config
from rlhf_core.config.engines import LoraConfig, OptimizerConfig
from rlhf_core.config.loop import LoopConfig
from rlhf_core.interfaces import ModelSpec
from rlhf_core.stage import StageContext
from rlhf_core.store_layout import write_json
from rlhf_core.types import PolicyRef, PreferenceSample, PreferencesRef, TokenSample

if TYPE_CHECKING:
    from rlhf_core.data.chat import ChatTemplate
    from rlhf_core.data.tables import Preference

NAME = "dpo"
VERSION = 1
CODE = "warn"

REFERENCE_CHUNK = 512


class DPOConfig(Config):
    """Preference optimisation on pairs, against a frozen reference."""

    loss: Literal["dpo", "cdpo", "robust", "ipo", "hinge"] = "dpo"
    beta: float = Field(0.1, gt=0)
    """Strength of the pull to the reference (inverse temperature of the implicit reward)."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed share of wrong labels; for `cdpo` and `robust`."""
    length_average: bool = True
    """`ipo` only: divide each answer's log-prob by its length (as TRL does)."""
    nll_coef: float = Field(0.0, ge=0)
    """Adds this much of the chosen answer's mean token loss (RPO)."""
    max_length: int = Field(256, ge=8)
    loop: LoopConfig = LoopConfig(batch_size=32, epochs=1)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-7)
    lora: LoraConfig | None = None

    @model_validator(mode="after")
    def _smoothing_belongs_to_its_losses(self) -> DPOConfig:
        if (self.loss in ("cdpo", "robust")) != (self.label_smoothing > 0):
            raise ValueError(
                f"label_smoothing = {self.label_smoothing}: must be > 0 for loss cdpo and robust and 0 for the others; "
                f"loss is {self.loss!r}"
            )
        return self


def run(
    config: DPOConfig, *, policy: PolicyRef, reference: PolicyRef, preferences: PreferencesRef, context: StageContext
) -> PolicyRef:
    """Train `policy` to prefer the chosen answers, held near `reference`; return the new policy."""
    from rlhf_core.data.chat import ChatTemplate
    from rlhf_core.data.tables import read_preferences
    from rlhf_core.training.fit import fit
    from rlhf_core.training.objectives import PreferenceObjective

    chat = ChatTemplate.load(context.path(policy))
    rows = {split: read_preferences(context.path(preferences) / f"{split}.parquet") for split in ("train", "eval")}
    pairs = {split: token_pairs(chat, rows[split], max_length=config.max_length) for split in rows}
    context.tracker.dataset("preferences", preferences.digest, "training")
    context.tracker.input_model(policy.digest)

    samples = with_reference(pairs, reference, context)
    objective = PreferenceObjective(
        loss=config.loss,
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        length_average=config.length_average,
        nll_coef=config.nll_coef,
    )
    model = ModelSpec(path=str(context.path(policy)), head="lm", lora=config.lora, seed=context.seed)
    with context.runtime.trainer("policy", model, config.optimizer) as trainer:
        result = fit(
            trainer,
            samples["train"],
            samples["eval"],
            objective,
            optimizer=config.optimizer,
            loop=config.loop,
            context=context,
        )
        trainer.export(context.out)
    metrics = {
        "steps": result.steps,
        "train_pairs": len(samples["train"]),
        "dropped_pairs": sum(len(rows[split]) - len(samples[split]) for split in rows),
    }
    return context.commit(PolicyRef, metrics=metrics | result.final)


def token_pairs(
    chat: ChatTemplate, rows: Sequence[Preference], *, max_length: int
) -> list[tuple[TokenSample, TokenSample]]:
    """Return (chosen, rejected) token samples; pairs that truncation makes identical or empty are left out."""
    pairs = []
    for row in rows:
        chosen = chat.continuation(row.prompt, row.chosen, max_length=max_length)
        rejected = chat.continuation(row.prompt, row.rejected, max_length=max_length)
        if chosen is not None and rejected is not None and chosen.token_ids != rejected.token_ids:
            pairs.append((chosen, rejected))
    return pairs


def with_reference(
    pairs: dict[str, list[tuple[TokenSample, TokenSample]]], reference: PolicyRef, context: StageContext
) -> dict[str, list[PreferenceSample]]:
    """Return the pairs with the reference's summed log-probs, computed once and kept for a resumed run."""
    sequences = {split: [side for pair in pairs[split] for side in pair] for split in pairs}
    logprobs = {split: _reference_logprobs(split, sequences[split], reference, context) for split in sequences}
    return {
        split: [
            PreferenceSample(chosen, rejected, logprobs[split][2 * i], logprobs[split][2 * i + 1])
            for i, (chosen, rejected) in enumerate(pairs[split])
        ]
        for split in pairs
    }


def _reference_logprobs(
    split: str, sequences: Sequence[TokenSample], reference: PolicyRef, context: StageContext
) -> list[float]:
    path = context.work / f"reference_logprobs_{split}.json"
    if path.exists():
        return list(json.loads(path.read_text())["logprobs"])
    model = ModelSpec(path=str(context.path(reference)), head="lm", lora=None, seed=context.seed)
    sums: list[float] = []
    with context.runtime.trainer("reference", model, None) as trainer:
        for start in range(0, len(sequences), REFERENCE_CHUNK):
            chunk = sequences[start : start + REFERENCE_CHUNK]
            sums.extend(sum(row) for row in trainer.logprobs(chunk, temperature=1.0))
            context.progress(len(sums), len(sequences), f"reference log-probs, {split}")
    write_json(path, {"logprobs": sums})
    return sums
