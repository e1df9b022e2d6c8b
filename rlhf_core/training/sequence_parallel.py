"""Implement Ulysses sequence parallelism (arXiv 2309.14509), in which each rank of a group holds a part of every row.

Every rank of a group gets the same samples. Its backbone runs over its own part of their positions, so the activations
are divided by the size of the group. Around attention, the ranks exchange parts of the sequence with all heads for the
whole sequence with a part of the heads, and back. The last hidden states are gathered, so that losses need no changes
and are the same on every rank of the group.

DeepSpeed's own implementation (`UlyssesSPAttentionHF`) is not used because it fixes the number of rows of a batch and
the heads of one model for the whole process, and with sdpa lets packed samples see each other.

Legend: N ranks of a group, B rows, L positions, S = L / N positions of a rank, A heads, D size of a head, H hidden.
"""

import inspect
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from rlhf_core.errors import ConfigError
from rlhf_core.models.forward import backbone_of
from rlhf_core.training.state import join, rank_and_world

KEY = "runtime.trainer.sequence_parallel"
ATTENTION = "ulysses_sdpa"
UNKNOWN = ("sliding_window", "softcap", "s_aux")
"""Arguments of attention that plain causal attention does not support."""


@dataclass(frozen=True)
class Rows:
    """The rows of one forward pass, with their length before padding and the attention mask if samples share rows."""

    group: Any
    length: int
    mask_B1LL: Tensor | None


def spread_rows(model: nn.Module, size: int) -> None:
    """Distribute the sequences of `model` over groups of `size` consecutive ranks.

    Raises ConfigError if `size` does not divide the number of ranks or heads, or if the architecture does not pass
    position IDs and keyword arguments to its attention.
    """
    backbone = backbone_of(model)
    _, world = rank_and_world()
    if world % size != 0:
        raise ConfigError(KEY, size, f"does not divide the {world} train workers", "use a divisor of them")
    heads = backbone.config.get_text_config().num_attention_heads
    if heads % size != 0:
        rule = f"does not divide the {heads} attention heads of {type(model).__name__}"
        raise ConfigError(KEY, size, rule, "use a divisor of them")
    parameters = inspect.signature(backbone.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_any or "position_ids" not in parameters:
        rule = f"{type(backbone).__name__} does not pass position ids and keyword arguments to its attention"
        raise ConfigError(KEY, size, rule, "set it to 1")
    _register()
    join()
    group = _group(size)
    backbone.set_attn_implementation(ATTENTION)
    backbone.register_forward_pre_hook(lambda module, args, kwargs: (args, _cut(kwargs, group)), with_kwargs=True)
    backbone.register_forward_hook(_put_together, with_kwargs=True)


@lru_cache(maxsize=1)
def _register() -> None:
    AttentionInterface.register(ATTENTION, _attention)


@lru_cache(maxsize=8)
def _group(size: int) -> Any:
    """The group of this rank. Every rank creates all groups in the same order."""
    rank, world = rank_and_world()
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    return groups[rank // size]


# ---------------------------------------------------------------- around the backbone


def _cut(kwargs: dict[str, Any], group: Any) -> dict[str, Any]:
    """Cut the backbone's arguments to this rank's part of the rows, which are padded to a multiple of N."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    ids_BL, positions_BL = kwargs["input_ids"], kwargs["position_ids"]
    length = ids_BL.shape[1]
    extra = -length % size  # so that N divides L + extra
    part = (length + extra) // size  # S = L / N
    ids_BL = F.pad(ids_BL, (0, extra))
    # Positions continue into the padding: it belongs to the last sample and comes after everything that is read.
    more = positions_BL[:, -1:] + torch.arange(1, extra + 1, device=positions_BL.device)
    positions_BL = torch.cat([positions_BL, more], dim=1)
    own = slice(rank * part, (rank + 1) * part)
    rows = Rows(group, length, _mask(positions_BL))
    return kwargs | {"input_ids": ids_BL[:, own], "position_ids": positions_BL[:, own], "ulysses": rows}


def _mask(positions_BL: Tensor) -> Tensor | None:
    """Whether position l (third) sees position m (last) of its sample, or None if rows are not shared."""
    starts_BL = positions_BL == 0
    if not bool(starts_BL[:, 1:].any()):
        return None
    sample_BL = starts_BL.cumsum(dim=1)  # number of the sample at each position
    same_BLL = sample_BL.unsqueeze(2) == sample_BL.unsqueeze(1)
    return same_BLL.tril().unsqueeze(1)


def _put_together(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    rows: Rows = kwargs["ulysses"]
    whole_BLH = _Gather.apply(output.last_hidden_state, rows.group)
    output.last_hidden_state = whole_BLH[:, : rows.length]
    return output


# ---------------------------------------------------------------- attention


def _attention(
    module: nn.Module,
    query_BASD: Tensor,
    key_BASD: Tensor,
    value_BASD: Tensor,
    attention_mask: Tensor | None,
    *,
    ulysses: Rows | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the heads' outputs [B, S, A, D] at this rank's positions for transformers. Keys may have fewer heads."""
    unsupported = {name: kwargs[name] for name in UNKNOWN if name in kwargs and kwargs[name] is not None}
    if ulysses is None or unsupported:
        rule = (
            f"{type(module).__name__} asks for {unsupported}"
            if unsupported
            else f"{type(module).__name__} did not receive the layout of the rows"
        )
        raise ConfigError(KEY, "> 1", rule, "set it to 1 for this architecture")
    group, size = ulysses.group, dist.get_world_size(ulysses.group)
    if key_BASD.shape[1] % size != 0:
        repeats = query_BASD.shape[1] // key_BASD.shape[1]
        key_BASD, value_BASD = (x.repeat_interleave(repeats, dim=1) for x in (key_BASD, value_BASD))
    query, key, value = (_whole_sequence(x, group, size) for x in (query_BASD, key_BASD, value_BASD))
    out_BALD = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=ulysses.mask_B1LL,
        is_causal=ulysses.mask_B1LL is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return _all_heads(out_BALD, group, size), None


def _whole_sequence(x_BASD: Tensor, group: Any, size: int) -> Tensor:
    """Gather the whole sequence [B, A / N, L, D] of this rank's heads."""
    rows, heads, part, width = x_BASD.shape
    by_heads = x_BASD.reshape(rows, size, heads // size, part, width).transpose(0, 1)
    by_parts = _Exchange.apply(by_heads, group)
    return by_parts.permute(1, 2, 0, 3, 4).reshape(rows, heads // size, size * part, width)


def _all_heads(x_BALD: Tensor, group: Any, size: int) -> Tensor:
    """Gather all heads [B, S, A, D] of this rank's part of the sequence."""
    rows, heads, length, width = x_BALD.shape
    by_parts = x_BALD.reshape(rows, heads, size, length // size, width).permute(2, 0, 1, 3, 4)
    by_heads = _Exchange.apply(by_parts, group)
    return by_heads.permute(1, 3, 0, 2, 4).reshape(rows, length // size, size * heads, width)


# ---------------------------------------------------------------- between ranks


class _Exchange(torch.autograd.Function):
    """An exchange that sends x[n] to rank n of the group and returns the tensor of rank m at [m]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grads[0], ctx.group), None


class _Gather(torch.autograd.Function):
    """A concatenation of the parts of all ranks along dimension 1.

    All ranks of the group compute the same from the whole, so the gradient of a part, which is the sum over ranks, is N
    times the gradient of one rank.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        size, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return grads[0].chunk(size, dim=1)[rank] * size, None  # dL/dx = N * own part: see above
