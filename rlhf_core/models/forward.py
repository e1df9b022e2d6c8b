"""Compute log-probabilities, values and scores of a batch with one forward pass of a model.

Legend: N samples, B rows, L positions, H hidden, V vocabulary, T the positions that the loss mask selects (for experts
all positions of the rows), C positions of one chunk, E experts, K experts per token.

With right padding, a real token never sees padding under causal attention, so rows with one sample run as plain causal
attention (the fast kernel) without a mask. Samples that share a row are separated by their restarting `position_ids`,
from which transformers builds a block-diagonal causal mask; only samples that share their first tokens need a custom
mask. None of it works for every architecture: `check_rows` and `rlhf_core.models.batches` refuse the others.
"""

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rlhf_core.errors import ConfigError
from rlhf_core.models.architecture import length_limit, padding_id, stated_positions, too_long, unknown_token
from rlhf_core.models.batches import TokenBatch, check_packing, keeps_apart, prefix_width, shared_rows, to_device
from rlhf_core.models.packages import VALUE_HEAD_FILE
from rlhf_core.models.piece_sizes import LOGPROB_ELEMENTS
from rlhf_core.models.router_replay import replay_experts
from rlhf_core.sequences import ROUTED_EXPERTS

# ---------------------------------------------------------------- one call of the head

# Under ZeRO 3, a module's weights are gathered when it is called, released, and gathered again in its backward pass. These
# are collective calls, so every rank must make the same number in the same order, but the number of chunks depends on a
# rank's tokens. The loop over the chunks therefore runs inside a single call of the head, where its weights stay gathered,
# also while a chunk is recomputed in the backward pass.

R = TypeVar("R", Tensor, tuple[Tensor, ...])


def in_one_call(head: nn.Module, compute: Callable[[Callable[[Tensor], Tensor], Tensor], R], hidden_TH: Tensor) -> R:
    """Run `compute(apply, hidden_TH)` as one call of `head`. `apply` is the head's own forward pass.

    For a backward pass, `compute` must return exactly one tensor on every rank, because DeepSpeed gathers weights at
    each tensor that receives a gradient, and records each time.
    """
    any_head: Any = head
    apply = any_head.forward
    # Set on the instance, so that `head(...)` runs all its hooks around `compute`.
    replaced = vars(head).get("forward")
    any_head.forward = lambda hidden: compute(apply, hidden)
    try:
        return any_head(hidden_TH)  # type: ignore[no-any-return]
    finally:
        if replaced is None:
            del any_head.forward
        else:
            any_head.forward = replaced


# ---------------------------------------------------------------- drawn tokens

# With a large vocabulary, the time goes into matrices of [tokens, vocabulary] that are written once and read once. The
# formulas of autograd write one for each of their steps. Here the forward pass keeps one, and needs another one for the
# entropy; the backward pass adds one, or two where the entropy has a gradient.


def logprobs_and_entropy(
    logits_CV: Tensor, targets_C: Tensor, *, temperature: float, with_entropy: bool, entropy_gradient: bool
) -> Tensor:
    """Compute [C, 2]: log p(target) under softmax(logits / temperature) in nats, and entropy (0 if not wanted).

    The entropy has a gradient only with `entropy_gradient`. The gradient cannot be differentiated again.
    """
    logprobs_C, entropy_C = _DrawnTokens.apply(logits_CV, targets_C, temperature, with_entropy)
    if not (with_entropy and entropy_gradient):
        entropy_C = entropy_C.detach()
    return torch.stack([logprobs_C, entropy_C], dim=1)


class _DrawnTokens(torch.autograd.Function):
    """The two outputs of `logprobs_and_entropy`, with s = logits / temperature, p = softmax(s) and H the entropy."""

    @staticmethod
    def forward(
        ctx: Any, logits_CV: Tensor, targets_C: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        every_CV = torch.log_softmax(logits_CV if temperature == 1 else logits_CV / temperature, dim=-1)  # log p
        logprobs_C = every_CV.gather(-1, targets_C.unsqueeze(-1)).squeeze(-1)
        entropy_C = torch.zeros_like(logprobs_C)
        if with_entropy:
            # H = -sum p log p; a product of matrices would be bfloat16 under autocast
            entropy_C = -every_CV.exp().mul_(every_CV).sum(-1)
        ctx.save_for_backward(every_CV, targets_C, entropy_C)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs_C, entropy_C

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, of_logprobs_C: Tensor | None, of_entropy_C: Tensor | None) -> tuple[Tensor | None, ...]:
        every_CV, targets_C, entropy_C = ctx.saved_tensors
        of_logprobs_C = torch.zeros_like(entropy_C) if of_logprobs_C is None else of_logprobs_C
        gradient_CV = every_CV.exp()  # p
        if of_entropy_C is None:
            gradient_CV.mul_(-of_logprobs_C.unsqueeze(-1))
        else:
            # dH / ds = -p (log p + H)
            slope_CV = (every_CV + entropy_C.unsqueeze(-1)).mul_(-of_entropy_C.unsqueeze(-1))
            gradient_CV.mul_(slope_CV.sub_(of_logprobs_C.unsqueeze(-1)))
        # d log p(target) / ds = onehot - p
        gradient_CV.scatter_add_(-1, targets_C.unsqueeze(-1), of_logprobs_C.unsqueeze(-1))
        if ctx.temperature != 1:
            gradient_CV.div_(ctx.temperature)
        return gradient_CV, None, None, None


# ---------------------------------------------------------------- heads


class Float32Linear(nn.Linear):
    """A linear layer with float32 outputs for any precision of its weight, its input or autocast.

    A bfloat16 number above 8 is a multiple of 0.0625, so that close scores would be equal.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute hidden @ weight.T + bias in float32."""
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), self.weight.float(), None if self.bias is None else self.bias.float())


def compute_in_float32(head: nn.Module) -> None:
    """Turn a linear head into a `Float32Linear` with the same weight, which may be tied. Raises ConfigError for others."""
    if type(head).forward is not nn.Linear.forward:
        rule = f"the LM head is a {type(head).__name__}, not a linear layer alone"
        raise ConfigError("fp32_lm_head", True, rule, "set it to false, or leave the head out of the adapters")
    head.__class__ = Float32Linear


class ValueModel(nn.Module):
    """A model that computes V(state) = w . hidden, or the score of a text where transformers has no class for it.

    `rlhf_core.models.forward.token_values` shifts the values so that values[t] is *before* token t. The head has no
    bias, like a reward model's head, so that it can start from one.
    """

    def __init__(self, backbone: nn.Module, head_1H: Tensor) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = Float32Linear(head_1H.shape[1], 1, bias=False)
        self.value_head.weight = nn.Parameter(head_1H.detach().clone())

    @property
    def base_model(self) -> nn.Module:
        """The backbone, under the name that transformers models use."""
        return self.backbone

    @property
    def score(self) -> nn.Module:
        """The head, under the name that sequence classifiers of transformers use."""
        return self.value_head

    @property
    def config(self) -> Any:
        """The backbone's configuration."""
        return self.backbone.config

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Compute values_BL of the states *after* each token."""
        hidden_BLH = self.backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        return self.value_head(hidden_BLH).squeeze(-1)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any]) -> None:
        """Recompute the backbone's activations in the backward pass."""
        backbone: Any = self.backbone
        backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs=gradient_checkpointing_kwargs)


def initial_head(hidden_size: int, *, seed: int) -> Tensor:
    """Draw head_1H from N(0, 1/(hidden + 1)) (arXiv 2009.01325), independent of the global random state."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((1, hidden_size), generator=generator) / (hidden_size + 1) ** 0.5


def read_head(folder: Path) -> Tensor | None:
    """Load the scalar head_1H of a value model or reward model in a folder, or None for the folder of a causal LM."""
    if (folder / VALUE_HEAD_FILE).is_file():
        return _read(folder / VALUE_HEAD_FILE, "weight")
    for file in sorted(folder.glob("*.safetensors")):
        head_1H = _read(file, "score.weight")
        if head_1H is not None:
            return head_1H
    return None


def with_head(model: Any, folder: Path, *, seed: int, dtype: torch.dtype) -> nn.Module:
    """Attach the scalar head of `folder`, or an initial one: a classifier's `score`, else in a `ValueModel`."""
    head_1H = read_head(folder)
    if head_1H is None:
        head_1H = initial_head(model.config.get_text_config().hidden_size, seed=seed)
    if not type(model).__name__.endswith("ForSequenceClassification"):
        return ValueModel(model, head_1H.to(dtype))
    model.score.weight = nn.Parameter(head_1H.to(dtype, copy=True))
    compute_in_float32(model.score)
    return model  # type: ignore[no-any-return]


def _read(file: Path, name: str) -> Tensor | None:
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(name) if name in tensors.keys() else None  # noqa: SIM118


# ---------------------------------------------------------------- balance of experts

# The load-balancing loss of a mixture of experts (arXiv 2101.03961) per sequence (arXiv 2405.04434): a product of two
# averages over one sample's tokens. Over a micro-batch, as in transformers, it would depend on the micro-batches; here it
# is a sum over samples, like any other loss.


class Routing:
    """The routing balance of the samples that passed through a model inside `watching`."""

    def __init__(self) -> None:
        self._balance: list[Tensor] = []

    def add(self, router_logits: Sequence[Tensor], batch: TokenBatch, *, experts_per_token: int) -> None:
        """Add the samples of `batch`. `router_logits` are [T, E] per layer, with the rows concatenated."""
        layers = [_balance(logits, batch, experts_per_token) for logits in router_logits]
        self._balance.append(torch.stack(layers).mean())

    def total(self) -> Tensor:
        """Sum over samples of the layers' mean of E * sum_e (fraction sent to e) * (mean probability of e).

        A sample contributes K if its tokens are spread evenly over the experts, and more if not, but at most E.
        """
        return torch.stack(self._balance).sum()


_watched: ContextVar[Routing | None] = ContextVar("watched", default=None)


@contextmanager
def watching() -> Iterator[Routing]:
    """Collect the routing of every batch whose hidden states are computed inside this context."""
    routing = Routing()
    token = _watched.set(routing)
    try:
        yield routing
    finally:
        _watched.reset(token)


def check_routers(model: nn.Module) -> None:
    """Raise ConfigError unless `model` is a mixture of experts with a load-balancing loss in transformers."""
    any_model: Any = model
    config = any_model.config.get_text_config()
    if not hasattr(config, "router_aux_loss_coef") or not hasattr(config, "num_experts_per_tok"):
        rule = f"{type(model).__name__} has no experts with a load-balancing loss"
        remedy = "set it to 0, or train a mixture of experts"
        raise ConfigError("runtime.trainer.router_aux_coef", "> 0", rule, remedy)


def _balance(logits: Tensor, batch: TokenBatch, experts_per_token: int) -> Tensor:
    """Sum of the balances of the samples of `batch` in one layer, in fp32."""
    experts = logits.shape[-1]
    probs_TE = torch.softmax(logits.reshape(-1, experts).float(), dim=-1)
    chosen_TK = probs_TE.detach().topk(experts_per_token, dim=-1).indices
    sent_TE = torch.zeros_like(probs_TE).scatter_(1, chosen_TK, 1.0)
    sample_T, length_N1 = _samples(batch)
    zeros_NE = probs_TE.new_zeros((len(batch.rows) + 1, experts))
    sent_NE = zeros_NE.index_add(0, sample_T, sent_TE)[:-1] / length_N1
    probs_NE = zeros_NE.index_add(0, sample_T, probs_TE)[:-1] / length_N1
    return experts * (sent_NE * probs_NE).sum()  # sum over samples of E sum_e (fraction sent) (mean probability)


def _samples(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """The sample of each position (N for padding), and the lengths of the samples as a column."""
    sample_BL = torch.full(batch.token_ids_BL.shape, len(batch.rows), dtype=torch.int64)
    for index, (row, start, length) in enumerate(batch.rows):
        sample_BL[row, start : start + length] = index
    device = batch.token_ids_BL.device
    lengths = torch.tensor([[float(length)] for _, _, length in batch.rows])
    return to_device(sample_BL.reshape(-1), device), to_device(lengths, device)


# ---------------------------------------------------------------- measurements of a batch

logger = logging.getLogger(__name__)


CHUNK_ELEMENTS = 2**24
"""Maximum number of logits in memory at once: 64 MiB in fp32, and as much for each matrix that is made of them. Fewer are
computed in one chunk, and not again in the backward pass."""
INFLUENCE = 1e-5
"""Maximum influence of later tokens on an earlier state, relative to the influence of earlier tokens. It is 0 under a
mask; sums by Fourier transform leave 1e-7, and adding 0.001 of a mean over the row gives 1e-4."""
ROUNDING = {True: 1e-4, False: 0.25}
"""Maximum relative difference caused by other kernels and groups of experts, in float32 (True) and lower precision
(False). One unit in the last place in each of 48 layers of experts made 0.06 to 0.12 in bfloat16. Unrelated states
differ by about 1.4."""
FIRST = 1e-2
"""Maximum relative difference at the first token, where nothing is rounded differently."""


def token_logprobs(
    model: nn.Module, batch: TokenBatch, *, temperature: float, with_entropy: bool, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Compute `logprobs_BL` and, if requested, `entropy_BL` of the distribution that each token was drawn from.

    `logprobs_BL[:, t]` is log p(token t | tokens < t) in fp32 from logits / temperature, and 0 where the loss mask is
    0. The entropy has a gradient only with `entropy_gradient`. The LM head runs only over the masked positions, in
    chunks that are recomputed in the backward pass, so the [tokens, vocabulary] matrix never exists. `model` is a
    causal LM of `load_model`. Raises ConfigError if temperature <= 0.
    """
    if temperature <= 0:
        rule = "must be > 0"
        raise ConfigError("temperature", temperature, rule, "a greedy policy has no log-probabilities")
    hidden_BLH = hidden_states(model, batch)
    rows_T, before_T = batch.masked_positions(start=1)
    hidden_TH = hidden_BLH[rows_T, before_T]
    targets_T = batch.token_ids_BL[rows_T, before_T + 1]
    compute = partial(
        logprobs_and_entropy, temperature=temperature, with_entropy=with_entropy, entropy_gradient=entropy_gradient
    )
    both_T2 = _by_chunks(model, hidden_TH, compute, targets_T, elements=LOGPROB_ELEMENTS)
    logprobs_T, entropy_T = both_T2.unbind(dim=1)
    logprobs_BL = _scatter(logprobs_T, rows_T, before_T + 1, batch)
    return logprobs_BL, _scatter(entropy_T, rows_T, before_T + 1, batch) if with_entropy else None


def over_logits(model: nn.Module, batch: TokenBatch, compute: Callable[..., R], *inputs_T: Tensor) -> R:
    """Apply `compute(logits_CV, targets_C, *inputs_C)` to all chunks of the masked positions, and concatenate along
    dimension 0 in the order of rows and tokens.

    The logits are fp32 and predict `targets_C`. Chunks are recomputed in the backward pass, so that the full logits
    never exist at once if `compute` returns less than it is given. It returns one tensor, or several without gradients.
    If nothing is masked, there is one empty chunk.
    """
    rows_T, before_T = batch.masked_positions(start=1)
    hidden_TH = hidden_states(model, batch)[rows_T, before_T]
    targets_T = batch.token_ids_BL[rows_T, before_T + 1]
    return _by_chunks(model, hidden_TH, compute, targets_T, *inputs_T, elements=CHUNK_ELEMENTS)


def token_values(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Compute `values_BL`, the value of the state *before* token t (read at t - 1), fp32, 0 where the mask is 0.

    `model` is a `rlhf_core.models.forward.ValueModel`.
    """
    value_model: Any = model
    rows_T, before_T = batch.masked_positions(start=1)
    hidden_TH = hidden_states(model, batch)[rows_T, before_T]
    values_T = value_model.value_head(hidden_TH).squeeze(-1)
    return _scatter(values_T, rows_T, before_T + 1, batch)


def sequence_scores(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Compute `scores_N`, one score per sample in fp32, read at its last token, in the order of the samples.

    `model` is one of `load_model` with `head="score"`.
    """
    classifier: Any = model
    device = batch.token_ids_BL.device
    rows_N = to_device(torch.tensor([row for row, _, _ in batch.rows]), device)
    last_N = to_device(torch.tensor([start + length - 1 for _, start, length in batch.rows]), device)
    hidden_NH = hidden_states(model, batch)[rows_N, last_N]
    return classifier.score(hidden_NH).squeeze(-1)  # type: ignore[no-any-return]


def step_scores(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Compute `logits_BL`, the score *at* each token that the loss mask selects (a step's last), fp32 and 0 elsewhere.

    `model` is one of `load_model` with `head="score"`. At a sequence's last token the value equals `sequence_scores`.
    """
    classifier: Any = model
    rows_T, at_T = batch.masked_positions()
    hidden_TH = hidden_states(model, batch)[rows_T, at_T]
    return _scatter(classifier.score(hidden_TH).squeeze(-1), rows_T, at_T, batch)


@torch.no_grad()
def check_head(model: nn.Module) -> None:
    """Compare the logits that `token_logprobs` computes with the model's own on four tokens.

    Raises ConfigError if they differ. The architecture then changes the output of its LM head in an unsupported way,
    and every log-probability would be wrong.
    """
    any_model: Any = model
    ids_1L = torch.arange(4, device=any_model.device).unsqueeze(0)
    own_1LV = any_model(input_ids=ids_1L, use_cache=False).logits.float()
    hidden_1LH = backbone_of(model)(input_ids=ids_1L, use_cache=False).last_hidden_state
    # A wrong scale or cap is off by far more than the rounding of bfloat16.
    ours_1LV = HeadScaling.of(model)(any_model.get_output_embeddings()(hidden_1LH))
    if not torch.allclose(ours_1LV, own_1LV, rtol=1e-2, atol=1e-2 * own_1LV.abs().max().item()):
        rule = "its logits differ from the output of its LM head with the known scalings"
        remedy = "add the scaling of this architecture to rlhf_core.models.forward, or use another model"
        raise ConfigError("model.path", type(model).__name__, rule, remedy)


@torch.no_grad()
def check_rows(model: nn.Module) -> None:
    """Check on eight tokens that rows need no attention mask. Raises ConfigError if they do.

    No hidden state may depend on a later token, since otherwise later tokens and padding would change a token's
    log-probability. Positions that count from 0 must also be the model's own.
    """
    backbone = backbone_of(model)
    # Some models count only tokens that are not padding when they number positions.
    real = [token for token in range(9) if token != padding_id(backbone.config)][:8]
    ids_BL = torch.tensor([real, 2 * real[:4]], device=backbone.device)
    positions_BL = torch.arange(8, device=backbone.device).repeat(2, 1) if _takes_positions(backbone) else None
    remedy = "use a causal language model (some are one only with is_decoder = true in config.json)"

    def check(one: Tensor, other: Tensor, tolerance: float, rule: str) -> None:
        if not float((one.float() - other.float()).norm()) <= tolerance * float(one.float().norm()):
            raise ConfigError("model.path", type(model).__name__, rule, remedy)

    rounding = ROUNDING[backbone.dtype == torch.float32]
    sees = "its tokens attend to later tokens, so padding would change log-probabilities"
    ours_BLH = _run(backbone, ids_BL, positions_BL).last_hidden_state
    check(ours_BLH[0, :4], ours_BLH[1, :4], rounding, sees)
    if _influence(backbone, ids_BL, positions_BL, until=4) > INFLUENCE:
        raise ConfigError("model.path", type(model).__name__, sees, remedy)
    counts = "it does not number positions from 0, so log-probabilities would be wrong"
    check(backbone(input_ids=ids_BL, use_cache=False).last_hidden_state, ours_BLH, rounding, counts)
    # The attention to a single token is 1 in every kernel, so the first position needs no tolerance for rounding.
    own_11H = backbone(input_ids=ids_BL[:1, :1], use_cache=False).last_hidden_state
    first_11 = None if positions_BL is None else positions_BL[:1, :1]
    check(own_11H, _run(backbone, ids_BL[:1, :1], first_11).last_hidden_state, FIRST, counts)


def _influence(backbone: Any, ids_BL: Tensor, positions_BL: Tensor | None, *, until: int) -> float:
    """Measure how much the hidden states before the position `until` depend on the embeddings from there on, relative
    to their dependence on the embeddings before it, or 0 if this cannot be measured.

    The dependence is measured with a gradient. Masked attention passes none, so the gradient is exactly 0, for any
    precision, depth, kernels and experts: rounding neither hides a leak nor looks like one. A dependence by choice
    alone (experts that choose their tokens) has no gradient; comparison finds it where it exceeds `ROUNDING`.
    """
    embeddings: list[Tensor] = []

    def opened(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[-1].clone()  # a model may scale it in place

    # Without gradients of the weights, this costs one forward and backward pass over a few tokens and no memory.
    trained = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
    hook = backbone.get_input_embeddings().register_forward_hook(opened)
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        with torch.enable_grad():
            hidden_BPH = _run(backbone, ids_BL, positions_BL).last_hidden_state[:, :until].float()
            # Any direction works, except directions that a norm removes, as LayerNorm removes the mean.
            draw = torch.randn(hidden_BPH.shape, generator=torch.Generator().manual_seed(0))
            total = (hidden_BPH * draw.to(hidden_BPH.device)).sum()
            (gradient_BLH,) = torch.autograd.grad(total, embeddings)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # Kernels and weights made for inference have no backward pass.
        logger.warning("%s: causal attention could be checked only approximately: %s", type(backbone).__name__, error)
        return 0.0
    finally:
        hook.remove()
        for parameter in trained:
            parameter.requires_grad_(True)
    before, after = (float(part.float().norm()) for part in gradient_BLH.split([until, len(ids_BL[0]) - until], dim=1))
    return after / before if after and math.isfinite(before) and math.isfinite(after) and before else 0.0


def backbone_of(model: Any) -> Any:
    """The part of `model` below its head."""
    base = model.base_model
    # Llama 4 names an attribute that only its multimodal form has.
    return model.model if base is model and hasattr(model, "model") else base


@dataclass(frozen=True)
class HeadScaling:
    """Three families change the output of their head: Cohere multiplies, Granite divides, Gemma 2 caps."""

    factor: float | None
    divisor: float | None
    cap: float | None

    @classmethod
    def of(cls, model: Any) -> Self:
        """The scaling that the configuration of `model` states."""
        config = model.config.get_text_config()
        names = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        return cls(*(getattr(config, name, None) for name in names))

    def __call__(self, logits_CV: Tensor) -> Tensor:
        """Compute the fp32 logits as the model's own forward pass does."""
        logits_CV = logits_CV.float()
        if self.factor is not None:
            logits_CV = logits_CV * self.factor
        if self.divisor is not None:
            logits_CV = logits_CV / self.divisor
        if self.cap is not None:
            logits_CV = torch.tanh(logits_CV / self.cap) * self.cap
        return logits_CV


@dataclass(frozen=True)
class ModelRules:
    """Properties of a model's batches that follow from its configuration and code, the same in every forward pass."""

    keeps_apart: bool
    prefix_width: int
    longest: int | None
    """`length_limit`."""
    stated: int | None
    """Number of positions that a model with rotary positions states, and beyond which it computes all the same."""
    vocabulary: int
    takes_positions: bool
    is_flash: bool
    scaling: HeadScaling


_RULES: WeakKeyDictionary[nn.Module, ModelRules] = WeakKeyDictionary()


def model_rules(model: nn.Module) -> ModelRules:
    """The rules of a model, made at the first call: after that its attention may not be changed."""
    if model not in _RULES:
        backbone = backbone_of(model)
        of = backbone.config
        _RULES[model] = ModelRules(
            keeps_apart=keeps_apart(of),
            prefix_width=prefix_width(of),
            longest=length_limit(of),
            stated=stated_positions(of),
            vocabulary=of.get_text_config().vocab_size,
            takes_positions=_takes_positions(backbone),
            is_flash=of._attn_implementation.startswith("flash"),
            scaling=HeadScaling.of(model),
        )
    return _RULES[model]


def hidden_states(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Compute the backbone's last hidden states `hidden_BLH`. Samples that share a row do not see each other.

    If the lengths of the samples differ much, or samples begin with the same tokens, unpacked rows are computed in
    fewer, shared rows.
    """
    backbone, rules, routing = backbone_of(model), model_rules(model), _watched.get()
    if batch.packed and not rules.keeps_apart:
        check_packing(backbone.config)
    _check_batch(batch, rules, backbone.config)
    experts_BLW = batch.fields.get(ROUTED_EXPERTS)
    replay_experts(backbone, experts_BLW)
    # The logits of routers are needed in the rows of the batch, and each sample may go to different experts.
    shared = None
    if routing is None and experts_BLW is None and rules.keeps_apart and len(batch.rows) > 1:
        shared = shared_rows(batch, prefixes_of=rules.prefix_width)
    ids_BL, positions_BL = batch.token_ids_BL, batch.position_ids_BL
    if shared is not None:
        ids_BL, positions_BL = shared.token_ids_RL, shared.position_ids_RL
    shape = ids_BL.shape
    if (batch.packed or shared is not None) and rules.is_flash:
        # The variable-length kernels find sample boundaries only in the position IDs of a single long row.
        ids_BL, positions_BL = ids_BL.reshape(1, -1), positions_BL.reshape(1, -1)
    further: dict[str, Any] = {} if routing is None else {"output_router_logits": True}
    if shared is not None and shared.mask_R1LL is not None:
        further["attention_mask"] = shared.mask_R1LL
    output = _run(backbone, ids_BL, positions_BL if rules.takes_positions else None, **further)
    if routing is not None:
        experts_per_token = backbone.config.get_text_config().num_experts_per_tok
        routing.add(output.router_logits, batch, experts_per_token=experts_per_token)
    hidden_BLH = output.last_hidden_state.reshape(*shape, -1)
    return hidden_BLH if shared is None else shared.restore(hidden_BLH, batch)


def _check_batch(batch: TokenBatch, rules: ModelRules, config: Any) -> None:
    """Raise ConfigError for rows that are longer than the model allows, and for tokens beyond its vocabulary."""
    if (largest := int(batch.on_host.token_ids_BL.max())) >= rules.vocabulary:
        raise unknown_token(largest, rules.vocabulary)
    length = int(batch.on_host.position_ids_BL.max()) + 1
    if rules.longest is not None and length > rules.longest:
        raise too_long("max_length", length, config, rules.longest)
    if rules.stated is not None and length > rules.stated:
        warn_of_positions(rules.stated)


@lru_cache  # once in a process, not in each batch
def warn_of_positions(stated: int) -> None:
    """Warn that rows have more tokens than the model has positions: most rotary models are poor beyond these."""
    remedy = (
        f"set max_tokens to {stated} or less, or give config.json rope_parameters and max_position_embeddings for more"
    )
    logger.warning(
        "max_tokens: a row has more tokens than the %d positions that the model was made for; %s", stated, remedy
    )


def _run(backbone: Any, ids_BL: Tensor, positions_BL: Tensor | None, **further: Any) -> Any:
    if positions_BL is not None:
        further["position_ids"] = positions_BL
    return backbone(input_ids=ids_BL, use_cache=False, **further)


def _takes_positions(backbone: nn.Module) -> bool:
    return "position_ids" in inspect.signature(backbone.forward).parameters


def _scatter(x_T: Tensor, rows_T: Tensor, positions_T: Tensor, batch: TokenBatch) -> Tensor:
    # index_put keeps the graph even if nothing is masked, so that every rank can call backward.
    zeros_BL = torch.zeros(batch.token_ids_BL.shape, dtype=torch.float32, device=x_T.device)
    return zeros_BL.index_put((rows_T, positions_T), x_T)


def _by_chunks(model: nn.Module, hidden_TH: Tensor, compute: Callable[..., R], *inputs_T: Tensor, elements: int) -> R:
    any_model: Any = model
    rules = model_rules(model)
    chunk = max(1, elements // rules.vocabulary)

    def over_chunks(apply: Callable[[Tensor], Tensor], hidden_TH: Tensor) -> R:
        def piece(hidden_CH: Tensor, *inputs_C: Tensor) -> R:
            return compute(rules.scaling(apply(hidden_CH)), *inputs_C)

        if len(hidden_TH) <= chunk:
            return piece(hidden_TH, *inputs_T)
        recompute = torch.is_grad_enabled() and hidden_TH.requires_grad
        pieces: list[Any] = []
        for parts in zip(hidden_TH.split(chunk), *(input_T.split(chunk) for input_T in inputs_T), strict=True):
            if recompute:
                pieces.append(checkpoint(piece, *parts, use_reentrant=False, preserve_rng_state=False))
            else:
                pieces.append(piece(*parts))
        if isinstance(pieces[0], Tensor):
            return torch.cat(pieces)  # type: ignore[return-value]  # R is what `compute` returns
        return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))  # type: ignore[return-value]

    return in_one_call(any_model.get_output_embeddings(), over_chunks, hidden_TH)
