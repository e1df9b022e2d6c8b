"""Compute log-probabilities, values and scores of a batch.

Legend: N samples, B rows, L positions, H hidden, V vocabulary, T the positions that the loss mask selects.

With right padding, a real token never sees padding under causal attention, so rows with one sample run as plain causal
attention (the fast kernel) without a mask. Samples that share a row are separated by their restarting `position_ids`,
from which transformers builds a block-diagonal causal mask; only samples that share their first tokens need a mask of
our own. None of it works for every architecture: `check_rows` and `rlhf_core.models.shared_rows` refuse the others.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlhf_core.errors import ConfigError, explain
from rlhf_core.models.architecture import backbone_of, check_batch, padding_id
from rlhf_core.models.batches import TokenBatch
from rlhf_core.models.drawn_tokens import logprobs_and_entropy
from rlhf_core.models.head_pass import in_one_call
from rlhf_core.models.routing import note_routing, routing_arguments
from rlhf_core.models.shared_rows import check_packing, keeps_apart, prefix_width, shared_rows

logger = logging.getLogger(__name__)

R = TypeVar("R", Tensor, tuple[Tensor, ...])

CHUNK_ELEMENTS = 2**24
"""Maximum number of logits in memory at once: 64 MiB in fp32, and as much for each matrix that is made of them. Fewer are
computed in one chunk, and not again in the backward pass."""
LOGPROB_ELEMENTS = 2 * CHUNK_ELEMENTS
"""The same for log-probabilities, which take few such matrices (`rlhf_core.models.drawn_tokens`)."""
INFLUENCE = 1e-5
"""Maximum influence of later tokens on an earlier state, relative to that of earlier tokens. It is 0 under a mask; sums
by Fourier transform leave 1e-7, and adding 0.001 of a mean over the row gives 1e-4."""
ROUNDING = {True: 1e-4, False: 0.25}
"""Maximum relative difference caused by other kernels and groups of experts, in float32 (True) and lower precision
(False). One unit in the last place in each of 48 layers of experts made 0.06 to 0.12 in bfloat16. Unrelated states
differ by about 1.4."""
FIRST = 1e-2
"""Maximum relative difference at the first token, where nothing is rounded differently."""


def token_logprobs(
    model: nn.Module, batch: TokenBatch, *, temperature: float, with_entropy: bool, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return `logprobs_BL` and, if requested, `entropy_BL` of the distribution that each token was drawn from.

    `logprobs_BL[:, t]` is log p(token t | tokens < t) in fp32 from logits / temperature, and 0 where the loss mask is
    0. The entropy has a gradient only with `entropy_gradient`. The LM head runs only over the masked positions, in
    chunks that are recomputed in the backward pass, so the [tokens, vocabulary] matrix never exists. `model` is a
    causal LM of `load_model`. Raises ConfigError if temperature <= 0.
    """
    if temperature <= 0:
        raise ConfigError(
            explain("temperature", temperature, "must be > 0", "a greedy policy has no log-probabilities")
        )
    hidden_BLH = hidden_states(model, batch)
    rows_T, before_T = _masked_positions(batch)
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
    """Return `compute(logits_CV, targets_C, *inputs_C)` of all chunks of the masked positions, concatenated along
    dimension 0 in the order of rows and tokens.

    The logits are fp32 and predict `targets_C`. Chunks are recomputed in the backward pass, so that the full logits
    never exist at once if `compute` returns less than it is given. It returns one tensor, or several without gradients.
    If nothing is masked, there is one empty chunk.
    """
    rows_T, before_T = _masked_positions(batch)
    hidden_TH = hidden_states(model, batch)[rows_T, before_T]
    targets_T = batch.token_ids_BL[rows_T, before_T + 1]
    return _by_chunks(model, hidden_TH, compute, targets_T, *inputs_T, elements=CHUNK_ELEMENTS)


def token_values(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Return `values_BL`, the value of the state *before* token t (read at t - 1), fp32 and 0 where the loss mask is 0.

    `model` is a `rlhf_core.models.heads.ValueModel`.
    """
    value_model: Any = model
    rows_T, before_T = _masked_positions(batch)
    hidden_TH = hidden_states(model, batch)[rows_T, before_T]
    values_T = value_model.value_head(hidden_TH).squeeze(-1)
    return _scatter(values_T, rows_T, before_T + 1, batch)


def sequence_scores(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Return `scores_N`, one score per sample in fp32, read at its last token, in the order of the samples.

    `model` is one of `load_model` with `head="score"`.
    """
    classifier: Any = model
    device = batch.token_ids_BL.device
    rows_N = torch.tensor([row for row, _, _ in batch.rows], device=device)
    last_N = torch.tensor([start + length - 1 for _, start, length in batch.rows], device=device)
    hidden_NH = hidden_states(model, batch)[rows_N, last_N]
    return classifier.score(hidden_NH).squeeze(-1)  # type: ignore[no-any-return]


def step_scores(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Return `logits_BL`, the score *at* each token that the loss mask selects (a step's last), fp32 and 0 elsewhere.

    `model` is one of `load_model` with `head="score"`. At a sequence's last token the value equals that
    of `sequence_scores`.
    """
    classifier: Any = model
    rows_T, at_T = torch.nonzero(batch.loss_mask_BL, as_tuple=True)
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
    if not torch.allclose(_logits(model, hidden_1LH), own_1LV, rtol=1e-2, atol=1e-2 * own_1LV.abs().max().item()):
        raise ConfigError(
            explain(
                "model.path",
                type(model).__name__,
                "its logits differ from the output of its LM head with the known scalings",
                "add the scaling of this architecture to rlhf_core.models.forward, or use another model",
            )
        )


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
    positions_BL = torch.arange(8, device=backbone.device).repeat(2, 1)
    remedy = "use a causal language model (some are one only with is_decoder = true in config.json)"

    def check(one: Tensor, other: Tensor, tolerance: float, rule: str) -> None:
        if not float((one.float() - other.float()).norm()) <= tolerance * float(one.float().norm()):
            raise ConfigError(explain("model.path", type(model).__name__, rule, remedy))

    rounding = ROUNDING[backbone.dtype == torch.float32]
    sees = "its tokens attend to later tokens, so padding would change log-probabilities"
    ours_BLH = _run(backbone, ids_BL, positions_BL, {}).last_hidden_state
    check(ours_BLH[0, :4], ours_BLH[1, :4], rounding, sees)
    if _influence(backbone, ids_BL, positions_BL, until=4) > INFLUENCE:
        raise ConfigError(explain("model.path", type(model).__name__, sees, remedy))
    counts = "it does not number positions from 0, so log-probabilities would be wrong"
    check(backbone(input_ids=ids_BL, use_cache=False).last_hidden_state, ours_BLH, rounding, counts)
    # The attention to a single token is 1 in every kernel, so the first position needs no tolerance for rounding.
    own_11H = backbone(input_ids=ids_BL[:1, :1], use_cache=False).last_hidden_state
    check(own_11H, _run(backbone, ids_BL[:1, :1], positions_BL[:1, :1], {}).last_hidden_state, FIRST, counts)


def _influence(backbone: Any, ids_BL: Tensor, positions_BL: Tensor, *, until: int) -> float:
    """Return how much the hidden states before the position `until` depend on the embeddings from there on, relative to
    their dependence on those before it, or 0 if this cannot be measured.

    The dependence is measured with a gradient. Masked attention passes none, so the gradient is exactly 0, whatever the
    precision, the depth, the kernels and the experts: rounding neither hides a leak nor looks like one. A dependence by
    choice alone (experts that choose their tokens) has no gradient; comparison finds it where it exceeds `ROUNDING`.
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
            hidden_BPH = _run(backbone, ids_BL, positions_BL, {}).last_hidden_state[:, :until].float()
            # Any direction works, except one that a norm removes, as LayerNorm removes the mean.
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


def hidden_states(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Return the backbone's last hidden states `hidden_BLH`. Samples that share a row do not see each other.

    If the lengths of the samples differ much, or samples begin with the same tokens, unpacked rows are computed in
    fewer, shared rows.
    """
    backbone = backbone_of(model)
    if batch.packed:
        check_packing(backbone.config)
    check_batch(backbone.config, batch.token_ids_BL, batch.position_ids_BL)
    routing = routing_arguments()
    # Code that watches the routers expects their logits in the rows of the batch.
    shared = None
    if not routing and keeps_apart(backbone.config):
        shared = shared_rows(batch, prefixes_of=prefix_width(backbone.config))
    ids_BL, positions_BL = batch.token_ids_BL, batch.position_ids_BL
    if shared is not None:
        ids_BL, positions_BL = shared.token_ids_RL, shared.position_ids_RL
    shape = ids_BL.shape
    if (batch.packed or shared is not None) and _is_flash(backbone):
        # The variable-length kernels find sample boundaries only in the position IDs of a single long row.
        ids_BL, positions_BL = ids_BL.reshape(1, -1), positions_BL.reshape(1, -1)
    output = _run(backbone, ids_BL, positions_BL, routing, mask_B1LL=shared.mask_R1LL if shared else None)
    note_routing(backbone, output, batch)
    hidden_BLH = output.last_hidden_state.reshape(*shape, -1)
    return hidden_BLH if shared is None else shared.restore(hidden_BLH, batch)


def _run(
    backbone: Any,
    ids_BL: Tensor,
    positions_BL: Tensor,
    routing: Mapping[str, bool],
    *,
    mask_B1LL: Tensor | None = None,
) -> Any:
    positions = {"position_ids": positions_BL} if _takes_positions(backbone) else {}
    mask = {} if mask_B1LL is None else {"attention_mask": mask_B1LL}
    return backbone(input_ids=ids_BL, use_cache=False, **positions, **mask, **routing)


def _takes_positions(backbone: nn.Module) -> bool:
    return "position_ids" in inspect.signature(backbone.forward).parameters


def _is_flash(backbone: Any) -> bool:
    return backbone.config._attn_implementation.startswith("flash")


def _masked_positions(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return rows_T and before_T, the positions t - 1 whose hidden states predict the masked tokens t."""
    rows_T, before_T = torch.nonzero(batch.loss_mask_BL[:, 1:], as_tuple=True)
    return rows_T, before_T


def _scatter(x_T: Tensor, rows_T: Tensor, positions_T: Tensor, batch: TokenBatch) -> Tensor:
    # index_put keeps the graph even if nothing is masked, so that every rank can call backward.
    zeros_BL = torch.zeros(batch.token_ids_BL.shape, dtype=torch.float32, device=x_T.device)
    return zeros_BL.index_put((rows_T, positions_T), x_T)


def _by_chunks(model: nn.Module, hidden_TH: Tensor, compute: Callable[..., R], *inputs_T: Tensor, elements: int) -> R:
    any_model: Any = model
    chunk = max(1, elements // any_model.config.get_text_config().vocab_size)

    def over_chunks(apply: Callable[[Tensor], Tensor], hidden_TH: Tensor) -> R:
        def piece(hidden_CH: Tensor, *inputs_C: Tensor) -> R:
            return compute(_scaled(model, apply(hidden_CH)), *inputs_C)

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
            return torch.cat(pieces)
        return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))

    return in_one_call(any_model.get_output_embeddings(), over_chunks, hidden_TH)


def _logits(model: nn.Module, hidden_CH: Tensor) -> Tensor:
    """Return the fp32 logits that the model's own forward pass computes from hidden states."""
    any_model: Any = model
    return _scaled(model, any_model.get_output_embeddings()(hidden_CH))


def _scaled(model: nn.Module, logits_CV: Tensor) -> Tensor:
    any_model: Any = model
    config = any_model.config.get_text_config()
    logits_CV = logits_CV.float()
    # Three families scale or squash after the head: Cohere multiplies, Granite divides, Gemma 2 caps.
    if hasattr(config, "logit_scale") and config.logit_scale is not None:
        logits_CV = logits_CV * config.logit_scale
    if hasattr(config, "logits_scaling"):
        logits_CV = logits_CV / config.logits_scaling
    if hasattr(config, "final_logit_softcapping") and config.final_logit_softcapping is not None:
        logits_CV = torch.tanh(logits_CV / config.final_logit_softcapping) * config.final_logit_softcapping
    return logits_CV
