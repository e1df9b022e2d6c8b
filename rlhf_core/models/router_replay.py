"""Record the experts that a model's routers choose, and send tokens to recorded experts.

Rollout routing replay, R3 (arXiv 2510.11370): where two experts are nearly equal, rounding decides, so sampler and trainer
send some tokens to different experts, and their log-probs differ. With replay the trainer uses the sampler's choice. The
weights of the experts still come from the trainer's own logits, and routers are trained through them.

Legend: T tokens of a forward pass, J layers of the model, E experts, K experts per token, W = J * K.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlhf_core.errors import ConfigError
from rlhf_core.models.architecture import read_config

OWN = -1
"""The number that stands for the router's own choice, which is not recorded."""

# ---------------------------------------------------------------- weights of chosen experts

# Each function repeats what the family's router does after its choice: (router, logits_TE, experts_TK) -> weights_TK.


def _softmax_of_all(router: Any, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """w = softmax(logits) at the experts, divided by their sum if the model does so (Mixtral always)."""
    weights_TK = F.softmax(logits_TE, dim=-1, dtype=torch.float32).gather(-1, experts_TK)
    return weights_TK / weights_TK.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights_TK


def _softmax_of_chosen(router: Any, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """w = softmax(logits at the experts)."""
    return F.softmax(logits_TE.gather(-1, experts_TK), dim=-1)


def _sigmoid(router: Any, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """w = factor * sigmoid(logits) at the experts, divided by their sum if the model does so."""
    weights_TK = logits_TE.sigmoid().gather(-1, experts_TK)
    if router.norm_topk_prob:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)  # transformers' guard against 0
    return weights_TK * router.routed_scaling_factor


WEIGHTS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    **dict.fromkeys(("flex_olmo", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"), _softmax_of_all),
    **dict.fromkeys(("deepseek_v3", "glm4_moe"), _sigmoid),
    "gpt_oss": _softmax_of_chosen,
}
"""`model_type` of the architectures whose routing can be replayed."""


def check_router_replay(policy: Path, *, key: str) -> None:
    """Raise ConfigError, naming `key`, if the routing of the model in the folder `policy` cannot be replayed."""
    _check_type(read_config(policy), key)


def _check_type(config: Any, key: str) -> None:
    kind = config.get_text_config().model_type
    if kind not in WEIGHTS:
        rule = f"a model of type {kind} has no experts, or routers that are not known here"
        raise ConfigError(key, True, rule, f"set it to false, or train one of {', '.join(sorted(WEIGHTS))}")


# ---------------------------------------------------------------- hooks

_ROUTER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def _routers(backbone: nn.Module) -> list[tuple[int, Any]]:
    """The routers with the numbers of their layers. Other layers are dense."""
    config: Any = backbone.config
    _check_type(config, "router_replay")
    found = []
    for name, module in backbone.named_modules():
        layer = _ROUTER.search(name)
        if layer and type(module).__name__.lower().endswith("topkrouter"):
            found.append((int(layer[1]), module))
    if not found:
        rule = "none of its layers has experts"
        raise ConfigError("router_replay", True, f"{type(backbone).__name__}: {rule}", "set it to false")
    return found


class ExpertRecorder:
    """Records the experts that the routers of a model choose in each forward pass, until it is closed."""

    def __init__(self, backbone: Any) -> None:
        self._layers = int(backbone.config.get_text_config().num_hidden_layers)
        self._chosen: dict[int, Tensor] = {}
        self._hooks = [router.register_forward_hook(partial(self._note, at)) for at, router in _routers(backbone)]

    def take(self, rows: int) -> list[Tensor]:
        """Collect the experts [L, W] of each row of the last pass, int16 in host memory; -1 for dense layers."""
        some_TK = next(iter(self._chosen.values()))
        dense_TK = torch.full_like(some_TK, OWN)
        whole_TJK = torch.stack([self._chosen.get(layer, dense_TK) for layer in range(self._layers)], dim=1)
        return list(whole_TJK.to(torch.int16).cpu().reshape(rows, -1, self._layers * some_TK.shape[-1]))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, layer: int, router: nn.Module, inputs: Any, output: Any) -> None:
        self._chosen[layer] = output[2]


_HOOKS: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()


def replay_experts(backbone: nn.Module, experts_BLW: Tensor | None) -> None:
    """Send the tokens of the next forward pass of `backbone` to these experts; None leaves all to the routers.

    It holds until the next call, so also while layers are computed again in the backward pass of that forward pass. -1
    leaves a token to the router. Raises ConfigError for a model whose routing cannot be replayed, or of another width.
    """
    for handle in _HOOKS.pop(backbone, ()):
        handle.remove()
    if experts_BLW is None:
        return
    config: Any = backbone.config
    routers, text = _routers(backbone), config.get_text_config()
    expected, width = text.num_hidden_layers * text.num_experts_per_tok, experts_BLW.shape[-1]
    if width != expected:
        rule = f"the sampler recorded {width} experts of each token, and the model has {expected}"
        raise ConfigError("router_replay", True, rule, "sample the model that is trained")
    experts_TJK = experts_BLW.reshape(-1, text.num_hidden_layers, text.num_experts_per_tok).long()
    weigh = WEIGHTS[text.model_type]
    _HOOKS[backbone] = [
        router.register_forward_hook(partial(_send, weigh, experts_TJK[:, layer])) for layer, router in routers
    ]


def _send(weigh: Callable[..., Tensor], experts_TK: Tensor, router: nn.Module, inputs: Any, output: Any) -> Any:
    """Replace the choice of a router: a forward hook."""
    logits_TE, weights_TK, chosen_TK = output
    experts_TK = torch.where(experts_TK == OWN, chosen_TK, experts_TK)
    return logits_TE, weigh(router, logits_TE, experts_TK).to(weights_TK.dtype), experts_TK
