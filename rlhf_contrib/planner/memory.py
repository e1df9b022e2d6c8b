"""Predict the memory of a rank from the settings of the trainer and the shape of a model: arithmetic without torch.

The terms follow the allocations of `rlhf_core.training.engines`, each under a separate name. With P parameters of the
model, T of them trained (all, or the adapters), R ranks that share them, s bytes of the precision and B = `BUCKET`, the
largest are

    ZeRO 3, bfloat16    2 P/R + 16 T/R + 2 B between steps (float32: 4 P/R + 16 T/R + 4 B)
    ZeRO 1, bfloat16    2 P   + 12 T/R + 4 T,  and 8 T to send gradients
    ZeRO 1, 2, float32  4 P   + 12 T/R,        and 4 T (2: 4 T/R) of gradients with a bucket
    torch, float32      4 P   +  8 T,          and 4 T of gradients

`benchmarks/planner.py` compares them with the memory of real processes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhf_contrib.planner.sizes import ModelShape
from rlhf_core.config.engines import TrainerConfig
from rlhf_core.config.models import LoraConfig
from rlhf_core.models.piece_sizes import BUCKET, LOGPROB_ELEMENTS

BYTES = {"float32": 4, "bfloat16": 2}
LIVE = 1_000_000_000
"""Elements of gathered parameters that ZeRO 3 keeps (`stage3_max_live_parameters`), and of its groups in a step."""

Bytes = Mapping[str, float]
"""Name of a term -> bytes."""


@dataclass(frozen=True, slots=True)
class Role:
    """A model on the train workers; `tokens` is the maximum number of tokens in a forward pass of one rank."""

    name: str
    shape: ModelShape
    trained: bool
    tokens: int
    lora: LoraConfig | None = None
    logits: bool = True
    """Whether an LM head computes logits; a reward or value model has none."""
    vocabulary_tokens: int = 0
    """Tokens of a forward pass whose logits are computed; 0 means all of them."""
    measures: int = 1
    """Forward passes over the answers of a step, in addition to training."""
    which: str = ""
    """Distinguishes models that have the same `name`."""

    @property
    def label(self) -> str:
        """Unique name of the model within its stage."""
        return f"{self.name} {self.which}" if self.which else self.name

    @property
    def trained_parameters(self) -> int:
        """Number of parameters that the optimizer updates."""
        return 0 if not self.trained else self.shape.adapters(self.lora) if self.lora else self.shape.parameters

    @property
    def parameters(self) -> int:
        """Number of parameters, including adapters."""
        return self.shape.parameters + (self.shape.adapters(self.lora) if self.lora else 0)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of one role on one rank, in bytes."""

    resident: Bytes
    """Between steps, on the device."""
    moments: Mapping[str, Bytes]
    """Moment (`open`, `train`, `measure`, `sync`, `save`) -> temporary memory in addition to `resident`."""
    host: Bytes = field(default_factory=dict)
    """Between steps, in host memory: optimizer states moved there by `offload_optimizer`."""
    host_moments: Mapping[str, Bytes] = field(default_factory=dict)
    """Moment -> temporary memory in addition to `host`: copies of weights and of checkpoints."""

    @property
    def total(self) -> float:
        """Bytes on the device between steps."""
        return sum(self.resident.values())

    @property
    def peak(self) -> float:
        """Bytes on the device at the worst moment of this role alone."""
        return self.total + max((sum(terms.values()) for terms in self.moments.values()), default=0.0)


def rank_memory(role: Role, config: TrainerConfig, ranks: int, *, on_cpu: bool = False) -> RankMemory:
    """Memory of `role` on one of `ranks` train workers.

    Set `on_cpu` for processes without a GPU. Their pages are allocated on first write, so a bucket takes no more memory
    than its gradients, and Gloo copies the tensors that it reduces.
    """
    stage = zero_stage(role, config)
    if stage is None:
        return _plain(role, config)
    return _partitioned(role, config, ranks, on_cpu) if stage == 3 else _flat(role, config, ranks, stage)


def zero_stage(role: Role, config: TrainerConfig) -> int | None:
    """The ZeRO stage used for `role`, None for the plain engine; follows the choice of `open_engine`.

    In bfloat16, stage 0 runs as stage 1.
    """
    if config.engine != "deepspeed" or not (role.trained or config.zero_stage == 3):
        return None
    return max(config.zero_stage, 1) if config.dtype == "bfloat16" else config.zero_stage


def _plain(role: Role, config: TrainerConfig) -> RankMemory:
    """Memory of `TorchEngine`: full weights, in float32 unless they are frozen models of a DeepSpeed run."""
    trained = float(role.trained_parameters)
    mixed = config.engine == "torch" and config.dtype == "bfloat16"
    size = 4 if config.engine == "torch" else BYTES[config.dtype]
    cast = {"weights in bfloat16": 2.0 * role.shape.active} if mixed else {}
    resident: dict[str, float] = {"weights": float(size * role.parameters)}
    moments: dict[str, Bytes] = {"open": {}, "measure": cast | activations(role, config, backward=False)}
    if not role.trained:
        return RankMemory(resident, moments)
    resident["moments"] = 8.0 * trained
    moments |= {"train": {"gradients": 4.0 * trained} | cast | activations(role, config), "save": {}}
    moments["sync"] = merged(role, size)
    host_moments = {"sync": {"weights handed out": 4.0 * role.parameters}, "save": {"checkpoint": 12.0 * trained}}
    return RankMemory(resident, moments, host_moments=host_moments)


def merged(role: Role, size: int) -> dict[str, float]:
    """Temporary memory for merging adapted expert stacks of a layer: the new values, one of them also in float32."""
    stacks = role.shape.adapted_stacks(role.lora)
    return {"merged stacks": size * sum(stacks) / role.shape.layers + 4.0 * max(stacks)} if stacks else {}


def _flat(role: Role, config: TrainerConfig, ranks: int, stage: int) -> RankMemory:
    """Memory of ZeRO 0, 1 and 2: full weights, and a rank's share of the optimizer states (all of them at stage 0).

    In bfloat16, stage 1 is DeepSpeed's `BF16_Optimizer`, which keeps all gradients in float32 between steps.
    """
    size, whole, trained = BYTES[config.dtype], role.parameters, float(role.trained_parameters)
    if config.tensor_parallel > 1:
        shared = role.shape.parameters - role.shape.embedding - role.shape.head
        whole -= round(shared * (1 - 1 / config.tensor_parallel))
        trained = float(whole)
    parts = 1 if stage == 0 else max(1, ranks // config.tensor_parallel)
    resident: dict[str, float] = {"weights": float(size * whole)}
    states = ({"master weights": 4.0 * trained / parts} if stage else {}) | {"moments": 8.0 * trained / parts}
    host: dict[str, float] = {}
    if config.offload_optimizer:
        host |= {f"{name}, offloaded": number for name, number in states.items()}
        host["gradients, offloaded"] = 4.0 * trained / parts
    else:
        resident |= states
    work = activations(role, config)
    if size == 2 and stage == 1:
        resident["gradients"] = 4.0 * trained
        # All gradients of a group are flattened into one tensor, which is cast before it is sent.
        sent = {"gradients in bfloat16": 2.0 * trained, "gradients being sent": 6.0 * trained}
        train = larger({"gradients in bfloat16": 2.0 * trained} | work, sent)
    else:
        kept = size * trained if stage < 2 else 4.0 * trained / parts
        part = {"gradients of a part": 0.0 if config.offload_optimizer or not stage else 4.0 * trained / parts}
        reduced = size + 4 if config.fp32_reduce else size
        bucket = float(reduced * min(BUCKET, trained)) if ranks > 1 or stage == 2 else 0.0
        train = {"gradients": kept} | larger({"bucket": bucket} | work, part)
    moments: dict[str, Bytes] = {
        "open": {},
        "train": train,
        "measure": activations(role, config, backward=False),
        "sync": merged(role, size),
        "save": {},
    }
    # Offloaded states are written directly from host memory.
    saved = (0.0 if config.offload_optimizer else 12.0 * trained / parts) + (size * trained if stage else 0.0)
    host_moments = {"sync": {"weights handed out": float(size * whole)}, "save": {"checkpoint": saved}}
    return RankMemory(resident, moments, host, host_moments)


def _partitioned(role: Role, config: TrainerConfig, ranks: int, on_cpu: bool) -> RankMemory:
    """Memory of ZeRO 3, which shards everything and gathers weights for computation."""
    size, whole, trained = BYTES[config.dtype], role.parameters, float(role.trained_parameters)
    # A layer is gathered even if it exceeds the limit on live parameters, as stacks of experts do.
    live = {"gathered": float(size * min(whole, max(LIVE, role.shape.layer))) if ranks > 1 else 0.0}
    resident: dict[str, float] = {"weights, partitioned": size * whole / ranks}
    host: dict[str, float] = {}
    host_moments: dict[str, Bytes] = {}
    moments: dict[str, Bytes] = {"measure": live | activations(role, config, backward=False)}
    if role.trained:
        states = {
            "master weights": 4.0 * trained / ranks,
            "moments": 8.0 * trained / ranks,
            "gradients": 4.0 * trained / ranks,
        }
        flat = {"gradients of a group": 4.0 * min(trained, LIVE) / ranks}
        if config.offload_optimizer:
            # torch's AdamW allocates new intermediate results for a whole group.
            host = {f"{name}, offloaded": number for name, number in states.items()}
            host_moments["train"] = {"update": 8.0 * min(trained, LIVE) / ranks} | flat
            flat = {}
        else:
            resident |= states
        resident["bucket"] = float(size * min(BUCKET, trained if on_cpu else 2 * trained))
        sent = {"gradients being sent": float((size + 4 if config.fp32_reduce else size) * min(BUCKET, trained))}
        received = {"gradients in float32": 4.0 * min(BUCKET, trained) / ranks if size == 2 else 0.0}
        copied = {"Gloo's copy": sent["gradients being sent"] if on_cpu else 0.0}
        sent |= larger(received, copied)
        work = activations(role, config)
        # More gradients than a bucket holds are sent while the activations of other layers still wait.
        moments["train"] = live | sent | work if trained > BUCKET else larger(live | sent, live | work, flat)
        # One is yielded while the next is gathered; separate experts are copied out of the stack that has them.
        gathered = {"weights being gathered": 2.0 * size * role.shape.largest}
        moments |= {"sync": gathered | merged(role, size), "save": {}}
        host_moments["sync"] = {"weights handed out": float(size * whole)}
        # Offloaded states are written directly from host memory.
        host_moments["save"] = {"checkpoint": 0.0 if config.offload_optimizer else 12.0 * trained / ranks}
    # The states come into being when these are gone. Adapters are whole, and tried out on a few tokens, before they are
    # partitioned; that gathers one layer at a time. The rare models that `open_parts` refuses are loaded whole instead.
    states_then = sum(resident.values()) - size * whole / ranks
    adapters = role.shape.adapters(role.lora) if role.lora else 0
    changed = sum(role.shape.adapted_stacks(role.lora)) / role.shape.layers
    loaded = adapters + max(role.shape.largest, role.shape.layer + changed if role.lora else 0)
    moments["open"] = {"weights before they are partitioned": max(0.0, size * loaded - states_then)}
    return RankMemory(resident, moments, host, host_moments)


def larger(*choices: Bytes) -> dict[str, float]:
    """The set of terms with the largest sum, for moments that follow one another.

    >>> larger({"forward": 3.0}, {"update": 1.0, "norm": 1.0})
    {'forward': 3.0}
    """
    most: Bytes = max(choices, key=lambda terms: sum(terms.values()))
    return dict(most)


def activations(role: Role, config: TrainerConfig, *, backward: bool = True) -> dict[str, float]:
    """Memory of the activations that a forward pass keeps and, with `backward`, of its backward pass.

    In a layer of width h, with query width q, key width k and MLP width m, each token stores two norms with a float32
    copy of their input, the normalized value (unless only adapters are trained) and the output; queries, keys, values
    and the attention output (twice); the four matrices of a gated MLP. Liger's norms keep only input and output, and
    its MLP recomputes the activated matrix. Gradient checkpointing keeps the input of each layer and recomputes one
    layer at a time. A stack of experts with adapters is computed as a modified copy, which has a separate gradient.
    """
    shape, size = role.shape, 2 if config.dtype == "bfloat16" else 4
    norm = 2 * size if config.liger else 4 + (1 if role.lora else 2) * size
    norms = 2 * shape.hidden * norm
    matrices = 3 if config.liger else 4
    attention = size * (3 * shape.query_width + 2 * shape.key_width)
    layer = float(role.tokens * (norms + attention + size * matrices * shape.intermediate))
    row = float(role.tokens * shape.hidden * size)
    logit_tokens = role.vocabulary_tokens or role.tokens
    chunk = min(LOGPROB_ELEMENTS, logit_tokens * shape.vocabulary) if role.logits else 0
    # log-probabilities that are kept, their gradient and one intermediate matrix; bfloat16 has its logits, too
    logits = {"logits": float(chunk * (12 + (2 if size == 2 else 0)))} if chunk else {}
    stacks = shape.adapted_stacks(role.lora)
    copies, gradient = float(size * sum(stacks)), float(size * max(stacks, default=0))

    def changed(number: float) -> dict[str, float]:
        return {"changed stacks": number} | logits if stacks else logits

    if not backward:
        return {"one layer": layer} | changed(copies / shape.layers)
    if not config.gradient_checkpointing:
        return {"activations": shape.layers * layer} | changed(copies + gradient)
    recomputed = layer + float(role.tokens * 3 * size * shape.intermediate)
    return {"inputs of layers": shape.layers * row, "one layer": recomputed} | changed(copies / shape.layers + gradient)


def human(number: float) -> str:
    """Format bytes as GB (1e9).

    >>> human(18_250_000_000), human(40_000_000)
    ('18.2', '0.04')
    """
    giga = number / 1e9
    return f"{giga:.1f}" if giga >= 0.95 else f"{giga:.2g}" if giga else "0"
