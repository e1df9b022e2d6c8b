"""Train and measure a model on one rank with any engine, with micro-batches and global denominators.

A runtime with several ranks computes the denominators over all samples, passes them to every rank with its `shard`, and
combines the metrics of `forward_backward` and `loss` with `reduce`.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlhf_core.algorithms.token_math import LossOutput
from rlhf_core.config.engines import OptimizerConfig, TrainerConfig, check_lora_sync
from rlhf_core.errors import TrainingError
from rlhf_core.interfaces import Adapters, Metrics, ModelSpec, Objective, Weights
from rlhf_core.models.architecture import padding_id
from rlhf_core.models.batches import TokenBatch, unpack_rows
from rlhf_core.models.forward import model_rules, sequence_scores, step_scores, token_logprobs, token_values, watching
from rlhf_core.models.loading import export_model
from rlhf_core.models.lora import WeightStream, weights_digest, without_adapters
from rlhf_core.models.micro_batches import micro_batches
from rlhf_core.sequences import Samples, Sequences, Subset, take
from rlhf_core.stage.checkpoints import damaged_archive, wait_for_parts, write_part
from rlhf_core.training.batching import is_maximum
from rlhf_core.training.engines.base import Engine, open_engine
from rlhf_core.training.engines.offload import HostCopies, keep_freed_memory, release_cached, release_if_short
from rlhf_core.training.objectives.base import PlacedModel, RoutedObjective, SftObjective
from rlhf_core.training.objectives.distillation import top_logprobs
from rlhf_core.training.state import (
    engine_settings,
    is_read_by,
    load_state,
    random_file,
    random_state,
    rank_and_world,
    resume_random_state,
    trained_parameters,
    write_states,
)
from rlhf_core.types import Column, TokenSample, TopLogprobs, floats, ids, mask

# ---------------------------------------------------------------- Compute the exponential moving average of a model's trained weights


class WeightAverage:
    """A float32 average of weights that starts at the initial weights.

    After every update, average <- decay * average + (1 - decay) * weights.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = model.weight.data.fill_(1.0)
    >>> average = WeightAverage(model, decay=0.75)
    >>> _ = model.weight.data.fill_(3.0)
    >>> average.update(model)
    >>> average.state()["weight"].item()
    1.5
    """

    def __init__(self, module: nn.Module, *, decay: float) -> None:
        self._decay = decay
        self._average = {name: weight.float().clone() for name, weight in trained_parameters(module).items()}

    def update(self, module: nn.Module) -> None:
        """Add the weights of `module` to the average after an optimizer update."""
        for name, weight in trained_parameters(module).items():
            self._average[name].lerp_(weight.float(), 1 - self._decay)  # a <- decay a + (1 - decay) w

    def tensors(self) -> Iterator[Tensor]:
        yield from self._average.values()

    def state(self) -> dict[str, Tensor]:
        """Copies of the average on the CPU, for a checkpoint."""
        return {name: weight.to("cpu", copy=True) for name, weight in self._average.items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        for name, weight in self._average.items():
            weight.copy_(state[name])

    @contextmanager
    def in_place(self, module: nn.Module) -> Iterator[None]:
        """Replace the weights of `module` with the average, rounded to their precision, inside this context."""
        weights = trained_parameters(module)
        own = {name: weight.clone() for name, weight in weights.items()}
        try:
            for name, weight in weights.items():
                weight.copy_(self._average[name])
            yield
        finally:
            for name, weight in weights.items():
                weight.copy_(own[name])


def average_of(module: nn.Module, *, decay: float, rank: int) -> WeightAverage | None:
    """Create the average on rank 0 if `decay` is not 0, else None. One is enough, as all ranks hold whole weights."""
    if decay == 0 or rank > 0:
        return None
    with torch.no_grad():
        return WeightAverage(module, decay=decay)


# ---------------------------------------------------------------- trainer

AVERAGE_FILE = "average.pt"

T = TypeVar("T")


class LocalTrainer:
    """A `Trainer` of one role on this rank. The model is frozen if there is no optimizer.

    `engine` defaults to the engine that `config` names. The launcher's environment variables determine the rank. With
    `adapters_alone` a sampler gets the adapters without the other weights.

    >>> trainer = LocalTrainer(spec, OptimizerConfig(), TrainerConfig(engine="torch"))  # doctest: +SKIP
    >>> trainer.forward_backward(samples, SftObjective(pack_to=None))["loss"]  # doctest: +SKIP
    6.93
    """

    def __init__(
        self,
        spec: ModelSpec,
        optimizer: OptimizerConfig | None,
        config: TrainerConfig,
        *,
        engine: Engine | None = None,
        adapters_alone: bool = False,
    ) -> None:
        self._spec = spec
        self._adapters_alone = adapters_alone
        self._trained = optimizer is not None
        self._rows = config.micro_batch
        self._padded_tokens = config.micro_tokens
        self._router_aux = config.router_aux_coef if self._trained else 0.0
        self._engine = open_engine(spec, optimizer, config) if engine is None else engine
        self._keeps_memory = self._engine.device.type == "cpu" and keep_freed_memory()
        self._together = model_rules(self._engine.module).prefix_width
        self._average = average_of(
            self._engine.module, decay=optimizer.ema_decay if optimizer else 0.0, rank=self._engine.rank
        )
        self._copies = HostCopies()
        # Any token can be the padding token, because no sample ever sees its padding.
        any_module: Any = self._engine.module
        self._pad_id = padding_id(any_module.config) or 0

    # ------------------------------------------------------------ training

    def forward_backward(
        self, samples: Samples, objective: Objective, denominators: Mapping[str, float] | None = None
    ) -> Metrics:
        """Accumulate the gradient of `objective` over `samples` and return their share of its metrics.

        `denominators` count the whole optimizer step; without them, `samples` are the whole step. A micro-batch with a
        non-finite loss makes the whole gradient non-finite on every rank, and `optim_step` then skips the update.
        Raises TrainingError for a frozen model.
        """
        self._check_trained("forward_backward")
        return self._run(samples, objective, denominators, backward=True)

    def optim_step(self, *, learning_rate: float) -> Metrics:
        """Clip the gradient, update the weights, clear the gradient and return the metrics.

        The metrics are `grad_norm` (before clipping), `learning_rate` and `skipped`. If the gradient is not finite,
        nothing changes, `skipped` is 1 and `grad_norm` is infinite.
        """
        self._check_trained("optim_step")
        grad_norm = self._engine.step(learning_rate)
        if self._keeps_memory:
            release_if_short()
        skipped = not math.isfinite(grad_norm)
        if self._average and not skipped:
            self._average.update(self._engine.module)
        return {"grad_norm": grad_norm, "learning_rate": learning_rate, "skipped": float(skipped)}

    def loss(self, samples: Samples, objective: Objective, denominators: Mapping[str, float] | None = None) -> Metrics:
        """Evaluate the metrics of `objective` over `samples` without computing gradients."""
        with torch.no_grad():
            return self._run(samples, objective, denominators, backward=False)

    # ------------------------------------------------------------ measuring

    def logprobs(
        self, samples: Sequences | Subset, *, temperature: float, adapters: bool = True
    ) -> NDArray[np.float32]:
        """Compute log p(token t | tokens < t) of every token [S], 0.0 where the mask is 0.

        Without its `adapters`, a model with LoRA equals the model before training.
        """

        def compute(module: nn.Module, batch: TokenBatch) -> list[Tensor]:
            return unpack_rows(
                token_logprobs(module, batch, temperature=temperature, with_entropy=False)[0].cpu(), batch
            )

        with nullcontext() if adapters else without_adapters(self._engine.module):
            return self._measure_tokens(samples, compute)

    def top_logprobs(self, samples: Sequence[TokenSample], *, k: int, temperature: float) -> list[TopLogprobs]:
        """Compute the `k` most likely tokens at each masked position of each sample, or all in order for k = 0."""

        def compute(module: nn.Module, batch: TokenBatch) -> list[TopLogprobs]:
            return top_logprobs(module, batch, k=k, temperature=temperature)

        return self._measure(samples, compute)

    def values(self, samples: Sequences | Subset) -> NDArray[np.float32]:
        """Compute the value before every token [S], 0.0 where the mask is 0."""

        def compute(module: nn.Module, batch: TokenBatch) -> list[Tensor]:
            return unpack_rows(token_values(module, batch).cpu(), batch)

        return self._measure_tokens(samples, compute)

    def scores(self, sequences: Sequence[Column[int]]) -> list[float]:
        """Score each token sequence with the reward model, read at its last token."""

        def compute(module: nn.Module, batch: TokenBatch) -> list[Tensor]:
            return list(sequence_scores(module, batch).cpu())

        return [float(score) for score in self._measure(Sequences.from_token_ids(sequences), compute)]

    def step_scores(self, samples: Sequence[TokenSample]) -> list[Column[float]]:
        """The process reward model's logits at the masked tokens of each sample, one per step, in order."""

        def compute(module: nn.Module, batch: TokenBatch) -> list[Tensor]:
            logits, masks = (
                unpack_rows(step_scores(module, batch).cpu(), batch),
                unpack_rows(batch.on_host.loss_mask_BL, batch),
            )
            return [row[mask != 0] for row, mask in zip(logits, masks, strict=True)]

        return [floats(row.numpy()) for row in self._measure(samples, compute)]

    def keep(self, sequences: Sequences) -> Sequences:
        """The same sequences, which this process reads."""
        return sequences

    def compute(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function` in this process."""
        return function(*arguments)

    # ------------------------------------------------------------ weights and state

    def weights(self) -> Weights:
        """Collect the weights of `stream`, as CPU tensors separate from the model's.

        Every rank must call it. Rank 0 gets the weights and the others none, so that a node holds them once.
        """
        payload: dict[str, Tensor] = {}
        for name, tensor in self.stream():
            if self._engine.rank == 0:
                payload[name] = tensor.to("cpu", copy=True)
        return Weights(payload=payload, digest=weights_digest(payload), adapters=self.adapters)

    @property
    def adapters(self) -> Adapters | None:
        """Describe the adapters if they are sent alone; None if whole weights are sent."""
        lora = self._spec.lora
        return Adapters(self._spec.path, lora) if self._adapters_alone and lora else None

    def stream(self) -> WeightStream:
        """Stream the weights for a sampler one at a time; every rank must iterate it.

        They are the full weights (LoRA merged) by Hugging Face name, or the adapters alone. Raises ConfigError where these
        cannot be sent.
        """
        if not self._adapters_alone:
            return self._engine.stream()
        check_lora_sync(self._spec.lora, key="lora")
        return WeightStream(self._engine.module, whole=self._engine.stream().whole, adapters_alone=True)

    def save(self, folder: Path) -> None:
        """Copy weights, optimizer and this rank's random state, and write the copies to `folder` in the background.

        Offloaded states are written from host memory, without a copy, before this returns. Every rank must call it with the same folder. `checkpoint_parts.wait_for_parts` waits for all of them.
        """
        folder.mkdir(parents=True, exist_ok=True)
        states = self._engine.snapshot(folder) | {random_file(folder, self._engine.rank): random_state()}
        if self._average:
            states[folder / AVERAGE_FILE] = self._average.state()
        writer = write_part(folder, f"rank_{self._engine.rank:05d}", partial(write_states, states))
        if self._engine.writes_in_place:
            writer.join()

    def load(self, folder: Path) -> None:
        """Restore the state of `save`. Raises TrainingError if it belongs to another model or other engine settings.

        The number of ranks may differ. New ranks get a random state from the model's seed.
        """
        wait_for_parts(folder)
        self._engine.load(folder)
        if self._average:
            self._average.restore(load_state(folder / AVERAGE_FILE))
        resume_random_state(folder, self._engine.rank, seed=self._spec.seed)

    def damage(self, folder: Path) -> str:
        """Name a damaged file of a saved state, among the files that this rank loads; "" if none is."""
        return damaged_archive(folder, partial(is_read_by, rank_and_world(), engine_settings(folder)))

    def export(self, folder: Path) -> None:
        """Write the model in Hugging Face layout with its tokenizer. Every rank must call it, and rank 0 writes.

        With `ema_decay`, the averaged weights are written.
        """
        averaged = self._average.in_place(self._engine.module) if self._average else nullcontext()
        source, engine = Path(self._spec.path), self._engine
        with averaged:
            export_model(engine.module, folder, tokenizer_from=source, stream=engine.stream(), write=engine.rank == 0)

    # ------------------------------------------------------------ a GPU that is shared

    def rest(self) -> int:
        """Move everything kept between steps to host memory and return the number of bytes freed on the device.

        Only `wake` and `close` may be called until it is restored.
        """
        averaged = self._average.tensors() if self._average else ()
        return self._copies.take(itertools.chain(self._engine.tensors(), averaged), self._engine.device)

    def wake(self) -> None:
        """Restore the tensors that `rest` moved, bit for bit."""
        self._copies.give_back()

    def close(self) -> None:
        """Free the model and the optimizer, and release their memory to other processes on the device."""
        self._engine.close()
        self._average = None
        self._copies.forget()
        release_cached()

    # ------------------------------------------------------------ private

    def _run(
        self,
        samples: Samples,
        objective: Objective,
        denominators: Mapping[str, float] | None,
        *,
        backward: bool,
    ) -> Metrics:
        pack_to = objective.pack_to if isinstance(objective, SftObjective) else None
        if self._router_aux:
            objective = RoutedObjective(objective, self._router_aux)
        counts = objective.denominators(samples) if denominators is None else denominators
        if isinstance(samples, Subset):
            samples = samples.copy()
        total = _Total()
        for batch in self._passes(samples, pack_to=pack_to):

            def compute(module: nn.Module, batch: list[int] = batch) -> LossOutput:
                if not batch:
                    return self._idle(module)
                return objective.compute(self._placed(module), take(samples, batch), counts)

            output = self._engine.forward(compute)
            total.add(output.metrics)
            if backward:
                # NaN in all gradients if it is not finite: an infinite loss can have a finite gradient, and the other
                # ranks detect the problem by the NaN in every gradient.
                self._engine.backward(output.loss * torch.where(torch.isfinite(output.loss.detach()), 1.0, torch.nan))
        return total.floats()

    def _measure(self, samples: Samples, compute: Callable[[nn.Module, TokenBatch], list[T]]) -> list[T]:
        """Run `compute` on each sample; results are in the order of `samples`."""
        if isinstance(samples, Subset):
            samples = samples.copy()
        results: dict[int, T] = {}
        for indices in self._passes(samples, pack_to=None):
            rows = take(samples, indices) if indices else [self._idle_sample()]
            batch = self._placed(self._engine.module).batch(rows)
            with torch.no_grad():
                answers = self._engine.forward(lambda module, batch=batch: compute(module, batch))  # type: ignore[misc]
            results.update(zip(indices, answers, strict=False))
        return [results[index] for index in range(len(samples))]

    def _measure_tokens(
        self, samples: Samples, compute: Callable[[nn.Module, TokenBatch], list[Tensor]]
    ) -> NDArray[np.float32]:
        return np.concatenate([[], *self._measure(samples, compute)], dtype=np.float32)  # a rank may have no samples

    def _passes(self, samples: Sequences | Sequence[Any], *, pack_to: int | None) -> Iterator[list[int]]:
        """Yield the indices of each micro-batch, then empty lists while other ranks are still working."""
        batches = micro_batches(
            samples, rows=self._rows, pack_to=pack_to, padded_tokens=self._padded_tokens, together=self._together
        )
        # Agreed before the first pass: ZeRO 2 and 3 communicate during passes, and a call in between would deadlock.
        idle = self._engine.passes(len(batches)) - len(batches)
        yield from batches
        yield from ([] for _ in range(idle))

    def _idle(self, module: nn.Module) -> LossOutput:
        """A zero loss that depends on the weights, so that this rank joins the reductions of the others."""
        batch = self._placed(module).batch([self._idle_sample()])
        # The routers must take part if they do in the losses of other ranks: ZeRO 3 records where gradients come in.
        with watching() if self._router_aux else nullcontext() as routing:
            match self._spec.head:
                case "lm":
                    value = token_logprobs(module, batch, temperature=1.0, with_entropy=False)[0]
                case "score":
                    value = sequence_scores(module, batch)
                case "value":
                    value = token_values(module, batch)
        loss = value.sum() * 0.0  # a gradient of 0 in every weight
        return LossOutput(loss if routing is None else loss + routing.total() * 0.0, {})

    def _placed(self, module: nn.Module) -> PlacedModel:
        return PlacedModel(module, self._pad_id, self._engine.device)

    def _idle_sample(self) -> TokenSample:
        return TokenSample(ids((self._pad_id, self._pad_id)), mask((0, 1)))

    def _check_trained(self, verb: str) -> None:
        if not self._trained:
            rule = "the model is frozen: it has no optimizer"
            raise TrainingError(f"trainer.{verb}", self._spec.path, rule, "give the role an optimizer")


class _Total:
    """The metrics of micro-batches, combined on the device and read once at the end."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        for name, value in metrics.items():
            value = value.detach().double()
            if name in self._values:
                value = (torch.maximum if is_maximum(name) else torch.add)(self._values[name], value)
            self._values[name] = value

    def floats(self) -> Metrics:
        if not self._values:
            return {}
        return dict(zip(self._values, torch.stack(list(self._values.values())).tolist(), strict=True))
