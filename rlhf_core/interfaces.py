"""The seams: what a stage sees of the engines. Implementations live in training, sampling, runtime and tracking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from rlhf_core.config.engines import LoraConfig, OptimizerConfig, SamplingConfig
from rlhf_core.types import (
    Completion,
    DistillationSample,
    Generation,
    PolicySample,
    PreferenceSample,
    RewardPair,
    SamplingRequest,
    StepSample,
    TokenSample,
    TopLogprobs,
    ValueSample,
)

Role = Literal["policy", "reference", "value_model", "reward_model", "teacher"]
Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which weights a role loads and which head it wears.

    `head`: `lm` for policy and reference, `score` for a reward model, `value` for a value model. A `score` or `value`
    model may be made from a causal LM's folder: the head is then initialised from `seed`.
    """

    path: str
    head: Literal["lm", "score", "value"]
    lora: LoraConfig | None
    seed: int


@dataclass(frozen=True, slots=True)
class Weights:
    """An opaque, versionless set of weights on its way from a trainer to a sampler.

    `payload` belongs to the runtime (an object reference, a folder, a mapping of tensors); `digest` is the sha256 of
    the probe tensors, which the receiver recomputes.
    """

    payload: Any
    digest: str


class Objective(Protocol):
    """A loss with its scalars, as `rlhf_core.training.objectives.base` defines them (picklable, frozen)."""

    def denominators(self, samples: Sequence[Any]) -> Metrics: ...


class Trainer(Protocol):
    """One role's model: trained if it has an optimizer, frozen otherwise. Calls return when the work is done."""

    def forward_backward(
        self,
        samples: Sequence[TokenSample]
        | Sequence[RewardPair]
        | Sequence[StepSample]
        | Sequence[PreferenceSample]
        | Sequence[PolicySample]
        | Sequence[ValueSample]
        | Sequence[DistillationSample],
        objective: Objective,
    ) -> Metrics:
        """Accumulate the gradient of `objective` over `samples` (all of one optimizer step); return its metrics."""
        ...

    def optim_step(self, *, learning_rate: float) -> Metrics:
        """Clip, update and clear the gradient; return `grad_norm` and `learning_rate`."""
        ...

    def logprobs(self, samples: Sequence[TokenSample], *, temperature: float) -> list[tuple[float, ...]]:
        """Return log p(token t | tokens < t), one value per token of each sample, 0.0 where the mask is 0."""
        ...

    def top_logprobs(self, samples: Sequence[TokenSample], *, k: int, temperature: float) -> list[TopLogprobs]:
        """Return the `k` likeliest tokens at each masked position of each sample; all of them, in order, for k = 0."""
        ...

    def values(self, samples: Sequence[TokenSample]) -> list[tuple[float, ...]]:
        """Return the value before each token, 0.0 where the mask is 0."""
        ...

    def scores(self, sequences: Sequence[tuple[int, ...]]) -> list[float]:
        """Return one reward-model score per token sequence, read at its last token."""
        ...

    def step_scores(self, samples: Sequence[TokenSample]) -> list[tuple[float, ...]]:
        """Return the process reward model's logit at each masked token of each sample: one per step, in order."""
        ...

    def loss(self, samples: Sequence[Any], objective: Objective) -> Metrics:
        """Return the metrics of `objective` without gradients (evaluation)."""
        ...

    def weights(self) -> Weights:
        """Return the full, merged weights for a sampler."""
        ...

    def save(self, folder: Path) -> None:
        """Copy weights, optimizer and every rank's random state, so that `load` goes on bitwise from here.

        The copies are written to `folder` in the background: a `Checkpoints.saving` is sealed only when they are whole.
        """
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        ...

    def export(self, folder: Path) -> None:
        """Write the model in Hugging Face layout (safetensors, LoRA merged), with its tokenizer."""
        ...


class Sampler(Protocol):
    """Draws completions from the policy that it last loaded."""

    def generate(self, requests: Sequence[SamplingRequest], sampling: SamplingConfig) -> list[Completion]:
        """Return one completion per request, in order; the same request gives the same completion."""
        ...

    def advance(
        self, new: Sequence[tuple[int, SamplingRequest]], sampling: SamplingConfig
    ) -> list[tuple[int, Completion]]:
        """Add numbered requests to those being sampled, run until one has finished, return those that have.

        `generate` and `load_weights` drop what is still being sampled.
        """
        ...

    def load_weights(self, weights: Weights, *, version: int) -> None:
        """Replace the policy; later completions carry `version`."""
        ...


class Runtime(Protocol):
    """Where engines live. Handles are leases on warm workers: leaving the `with` block frees the role, not the process."""

    def trainer(
        self, role: Role, model: ModelSpec, optimizer: OptimizerConfig | None
    ) -> AbstractContextManager[Trainer]: ...

    def sampler(self, policy: Path) -> AbstractContextManager[Sampler]: ...

    def prewarm(self, *, trainer: bool, sampler: bool) -> None:
        """Start workers in the background so that the first stage that needs them does not wait for imports."""
        ...

    def engines(self) -> dict[str, str]:
        """Return name -> version of the engines that really served so far (provenance of a manifest)."""
        ...

    def close(self) -> None: ...


class RewardFunction(Protocol):
    """A user's or built-in reward: one finite float per generation, higher is better."""

    def __call__(self, generations: Sequence[Generation]) -> list[float]: ...


# ---------------------------------------------------------------- tracking


class StageTracker(Protocol):
    """Where one stage records what happened. Never raises for an unreachable server: records are kept and replayed."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record values at a step; names read `stage/area/name`."""
        ...

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Record a table of samples; `name` without extension, e.g. `samples/step_0010`."""
        ...

    def file(self, path: Path, folder: str) -> None:
        """Record a file (plot, report) under `folder`."""
        ...

    def dataset(self, name: str, digest: str, context: str) -> None:
        """Record a dataset that the stage reads; `context` is `training` or `evaluation`."""
        ...

    def model(self, name: str, digest: str, uri: str) -> None:
        """Record a model that the stage made, by reference."""
        ...

    def input_model(self, digest: str) -> None:
        """Record a model that the stage reads."""
        ...

    def register(self, name: str, digest: str, *, aliases: Sequence[str], tags: Mapping[str, str]) -> str:
        """Register the model of `digest` under `name`; return the version."""
        ...
