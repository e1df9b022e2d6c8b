"""Define the interfaces through which a stage uses engines; training, sampling, runtime and tracking implement them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

from rlhf_core.types import (
    Column,
    Completion,
    Generation,
    SamplingRequest,
    TokenSample,
    TopLogprobs,
)

# A plan imports this module, and has no use for NumPy; stages without engines for none of their options.
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rlhf_core.config.engines import BaseSamplerConfig, OptimizerConfig, SamplingConfig
    from rlhf_core.config.models import LoraConfig
    from rlhf_core.sequences import Samples, Sequences, Subset

Role = Literal["policy", "reference", "value_model", "reward_model", "teacher"]
Metrics = dict[str, float]
Transfer = Literal["", "nccl", "ipc"]
"""Transport of weights to an engine: the backend of vLLM's weight transfer, or "" for host memory."""
TransferVerb = Literal["init", "start", "update", "finish"]
"""The steps of vLLM's weight transfer, in order."""
Probes = Mapping[str, tuple[tuple[int, ...], object]]
"""Tensor name -> (shape of the whole tensor, float32 CPU tensor of some of its rows)."""
T = TypeVar("T")
C = TypeVar("C", bound="BaseSamplerConfig")
C_contra = TypeVar("C_contra", bound="BaseSamplerConfig", contravariant=True)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The weights that a role loads, and its head.

    `head` is `lm` for policy and reference, `score` for a reward model, `value` for a value model. A `score` or `value`
    model may be loaded from a causal LM's folder: the head is then initialized from `seed`.
    """

    path: str
    head: Literal["lm", "score", "value"]
    lora: LoraConfig | None
    seed: int


@dataclass(frozen=True, slots=True)
class Adapters:
    """Data of adapters that are sent alone: the folder of the model that they change, and their form."""

    base: str
    lora: LoraConfig


@dataclass(frozen=True, slots=True)
class Weights:
    """An opaque set of weights, without a version, in transfer from a trainer to a sampler.

    `payload` belongs to the runtime (an object reference, a folder, a mapping of tensors); `digest` is the sha256 of
    the probe tensors, which the receiver recomputes. With `adapters` they are adapter weights alone, by peft's names;
    only a sampler with `EngineNeeds.adapters` gets such.
    """

    payload: object
    digest: str
    adapters: Adapters | None = None


class WeightsInParts(Protocol):
    """Name -> tensor of all weights, one at a time (`rlhf_core.models.lora.WeightStream`, declared without torch)."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Map name -> meta tensor of the dtype and shape of each weight, in the order of iteration."""

    def __iter__(self) -> Iterator[tuple[str, Any]]: ...

    def digest(self) -> str:
        """Digest of all weights, computed as in `Weights`."""


class Objective(Protocol):
    """A loss with its scalars, declared without torch. It is picklable and frozen, because it is sent to every rank."""

    def denominators(self, samples: Any) -> Metrics:
        """Counts by which the losses of all micro-batches on all ranks are divided."""

    def compute(self, model: Any, samples: Any, denominators: Mapping[str, float]) -> Any:
        """Compute the share of `samples`, one micro-batch, in the step's loss and metrics, which include `loss`.

        `model` is a `PlacedModel` of `rlhf_core.training.objectives.base`; the result is a `LossOutput`.
        """


class Trainer(Protocol):
    """One role's model, trained if it has an optimizer and frozen otherwise. Calls return when the work is done.

    `LocalTrainer` does the work. `RayTrainer`, `TrainWorker` and `DistillationTrainer` forward each method by its
    signature here, in one line.
    """

    def forward_backward(
        self,
        samples: Samples,
        objective: Objective,
    ) -> Metrics:
        """Accumulate the gradient of `objective` over `samples` (all of one optimizer step); return its metrics."""

    def optim_step(self, *, learning_rate: float) -> Metrics:
        """Clip the gradient, update the weights and clear the gradient; return `grad_norm` and `learning_rate`."""

    def logprobs(
        self, samples: Sequences | Subset, *, temperature: float, adapters: bool = True
    ) -> NDArray[np.float32]:
        """Compute log p(token t | tokens < t) of every token [S], 0.0 where the mask is 0."""

    def top_logprobs(self, samples: Sequence[TokenSample], *, k: int, temperature: float) -> list[TopLogprobs]:
        """Compute the `k` likeliest tokens at each masked position of each sample; all of them, in order, for k = 0."""

    def values(self, samples: Sequences | Subset) -> NDArray[np.float32]:
        """Compute the value before every token [S], 0.0 where the mask is 0."""

    def keep(self, sequences: Sequences) -> Sequences:
        """Move sequences to where all ranks read them. Nobody may write to the arrays of the result."""

    def compute(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a picklable function in the process of rank 0, so that the calling process does not compute."""

    def scores(self, sequences: Sequence[Column[int]]) -> list[float]:
        """Score each token sequence with the reward model, read at its last token."""

    def step_scores(self, samples: Sequence[TokenSample]) -> list[Column[float]]:
        """The process reward model's logit at each masked token of each sample: one per step, in order."""

    def loss(self, samples: Samples, objective: Objective) -> Metrics:
        """Evaluate the metrics of `objective` without gradients."""

    def weights(self) -> Weights:
        """Collect the full, merged weights for a sampler, or adapters alone for a sampler that accepts them."""

    def save(self, folder: Path) -> None:
        """Copy weights, optimizer and every rank's random state, so that training resumes bitwise after `load`.

        The copies are written to `folder` in the background; `Checkpoints.saving` seals it only when all are whole.
        """

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote."""

    def damage(self, folder: Path) -> str:
        """Name a damaged file of that state, or ""; each rank reads the files that it loads."""

    def export(self, folder: Path) -> None:
        """Write the model in Hugging Face layout (safetensors, LoRA merged), with its tokenizer."""


def logprob_rows(trainer: Trainer, samples: Sequence[TokenSample], *, temperature: float = 1.0) -> list[list[float]]:
    """The log-probs of each sample's tokens as Python floats, whose sums are in float64."""
    from rlhf_core.sequences import Sequences

    tokens = Sequences.of(samples)
    return [row.tolist() for row in tokens.split(trainer.logprobs(tokens, temperature=temperature))]


class RankTrainer(Trainer, Protocol):
    """One rank's share of a `Trainer`, driven by a runtime."""

    def forward_backward(
        self, samples: Samples, objective: Objective, denominators: Mapping[str, float] | None = None
    ) -> Metrics:
        """Accumulate the gradient over this rank's `samples`; `denominators` count the samples of all ranks.

        Without `denominators`, `samples` is the whole optimizer step.
        """

    def loss(self, samples: Samples, objective: Objective, denominators: Mapping[str, float] | None = None) -> Metrics:
        """This rank's share of the metrics of `objective`, without gradients."""

    @property
    def adapters(self) -> Adapters | None:
        """Describe the adapters if `stream` has adapters alone."""

    def stream(self) -> WeightsInParts:
        """Stream the content of `weights`, to be iterated by every rank."""

    def rest(self) -> int:
        """Move all state kept between steps to host memory; return the number of bytes freed on the device."""

    def wake(self) -> None:
        """Move back the state that `rest` moved, bit for bit."""

    def close(self) -> None:
        """Free the model, the optimizer and their device memory."""


# ---------------------------------------------------------------- samplers


class Sampler(Protocol):
    """The sampler as a stage sees it, which draws completions from the policy that it last loaded."""

    def generate(self, requests: Sequence[SamplingRequest], sampling: SamplingConfig) -> list[Completion]:
        """Sample one completion per request, in order; the same request gives the same completion.

        Raises SamplingError, naming the request, if a request does not fit the policy's vocabulary or context.
        """

    def advance(
        self, new: Sequence[tuple[int, SamplingRequest]], sampling: SamplingConfig
    ) -> list[tuple[int, Completion]]:
        """Add numbered requests to those in progress, run until at least one finishes, and return the finished ones.

        `generate` and `load_weights` drop the requests in progress. Returns nothing if none is in progress.
        """

    def load_weights(self, weights: Weights, *, version: int) -> None:
        """Replace the policy; later completions carry `version`.

        Raises SamplingError if the weights differ from the trainer's, or have another architecture.
        """


@runtime_checkable
class SleepingSampler(Sampler, Protocol):
    """A sampler whose engines may sleep between the calls."""

    def expect_weights(self) -> None:
        """Note that `load_weights` precedes the next sampling, so that engines that sleep need not keep their weights."""


class EngineSampler(Sampler, Protocol):
    """A sampler in a process of the runtime, which keeps it warm between leases.

    The payload of `load_weights` is here a mapping of Hugging Face names to CPU tensors, which must not be modified.
    """

    def accepts(self, policy: Path) -> bool:
        """Whether `load_policy` can serve `policy`, a Hugging Face folder, faster than a new sampler."""

    def load_policy(self, policy: Path) -> None:
        """Load the weights of a folder that this sampler `accepts`; later completions carry version 0.

        Raises SamplingError if the engine refuses them.
        """

    def versions(self) -> dict[str, str]:
        """Versions of the engines that sample, by package name (provenance of a manifest)."""

    def close(self) -> None:
        """Free the engine's memory, processes and files. Call nothing else afterwards."""


@runtime_checkable
class DeviceSampler(EngineSampler, Protocol):
    """A sampler whose engine shares GPUs with trainers, or takes weights from their GPUs.

    It is needed if `EngineNeeds.sleeps` or `device_transfer` is true. An update calls `transfer` with "init" (once),
    "start", "update" (once or more) and "finish", then `check_probes` and `adopt`.
    """

    def sleep(self, *, keep_weights: bool = True) -> None:
        """Free the GPU memory of weights and KV cache. Does nothing while requests are in progress.

        Without `keep_weights`, new weights are loaded before anything is sampled.
        """

    def wake(self, *, kv_cache: bool = True) -> None:
        """Restore the memory that `sleep` freed; without `kv_cache` only the weights' memory, to load new ones.

        Call it before any other method of a sleeping sampler.
        """

    def transfer(self, verb: TransferVerb, info: object) -> None:
        """Run one step of vLLM's weight transfer; `info` is vLLM's own message for "init" and "update"."""

    def check_probes(self, probes: Probes) -> None:
        """Raise SamplingError if the engine's weights differ from `probes`."""

    def adopt(self, version: int) -> None:
        """Set the version of the transferred weights; later completions carry it."""


class OpenSampler(Protocol[C_contra]):
    """A function that opens a sampler in the calling process."""

    def __call__(self, policy: Path, config: C_contra, *, threads: int, transfer: Transfer) -> EngineSampler:
        """Open a sampler of `policy`, a Hugging Face folder, at version 0.

        `threads` is the number of CPU threads it may use; `transfer` is "" unless `EngineNeeds.device_transfer`.
        Raises ConfigError if the folder is not a policy, and SamplingError if the engine does not start.
        """


class ImportEngine(Protocol[C_contra]):
    """A function that imports an engine without opening it."""

    def __call__(self, config: C_contra, *, threads: int) -> None:
        """Set the variables that the engine reads at import, and import it, so that opening it later is fast."""


def _import_nothing(config: BaseSamplerConfig, *, threads: int) -> None:
    """Do nothing: the module of the sampler has imported everything."""


@dataclass(frozen=True)
class SamplerEngine(Generic[C]):
    """The functions that start samplers of one configuration class: `ENGINE` in the module `BaseSamplerConfig.module`.

    `built_for` returns the device type that the engine is built for ("cpu", "cuda"), "" if it runs wherever torch does.
    """

    open: OpenSampler[C]
    warm: ImportEngine[C] = _import_nothing
    built_for: Callable[[], str] = str


class Runtime(Protocol):
    """The owner of the engines. Handles lease warm workers: leaving a `with` block frees the role, not the process."""

    def trainer(
        self, role: Role, model: ModelSpec, optimizer: OptimizerConfig | None
    ) -> AbstractContextManager[Trainer]: ...

    def sampler(self, policy: Path) -> AbstractContextManager[Sampler]: ...

    def together(self, *work: Callable[[], T]) -> list[T]:
        """Make calls of trainers and collect their results; models in separate pools run at the same time."""

    def prewarm(self, *, trainer: bool, sampler: bool) -> None:
        """Start workers in the background so that the first stage that needs them does not wait for imports."""

    def engines(self) -> dict[str, str]:
        """Versions, by name, of the engines that have been used so far (provenance of a manifest)."""

    def close(self) -> None: ...


class RewardFunction(Protocol):
    """A user's or built-in reward: returns one finite float per generation, higher is better."""

    def __call__(self, generations: Sequence[Generation]) -> list[float]: ...


# ---------------------------------------------------------------- tracking


@dataclass(frozen=True)
class RegistryState:
    """Champions of one model in the registry: digests of weights."""

    champion: str = ""
    """The current champion; "" without one."""
    rolled_back: frozenset[str] = frozenset()
    """Digests of versions that were champion until a rollback."""


class StageTracker(Protocol):
    """The record of one stage's run. It never raises for an unreachable server: records are kept and replayed later."""

    @property
    def uri(self) -> str:
        """Address of the tracking server or database; "" without one. It may contain a password."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record values at a step; names have the form `stage/area/name`."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Record a table of samples; `name` without extension, e.g. `samples/step_0010`."""

    def file(self, path: Path, folder: str) -> None:
        """Record a file (plot, report) under `folder`."""

    def dataset(self, name: str, digest: str, context: str) -> None:
        """Record a dataset that the stage reads; `context` is `training` or `evaluation`."""

    def model(self, name: str, digest: str, uri: str) -> None:
        """Record, by reference, a model that the stage made."""

    def input_model(self, digest: str) -> None:
        """Record a model that the stage reads."""

    def set_tags(self, values: Mapping[str, str]) -> None:
        """Set tags of the stage's run."""

    def register(
        self, name: str, digest: str, *, aliases: Sequence[str], tags: Mapping[str, str], uri: str = ""
    ) -> str:
        """Register the model with this `digest`, which lies at `uri`, under `name`; return the new version."""

    def champions(self, name: str) -> RegistryState | None:
        """Look up the champions of a registered model; None if the registry does not answer."""
