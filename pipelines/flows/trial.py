"""Call the losses and estimators of a user once on small tensors when a run is planned, not after hours of sampling."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from pydantic import BaseModel

from rlhf_core.algorithms.advantage.base import GroupRewards
from rlhf_core.algorithms.advantage.group import CustomAdvantage
from rlhf_core.algorithms.policy.clip import PolicyBatch
from rlhf_core.algorithms.policy.weighted import CustomPolicyLoss
from rlhf_core.algorithms.preference.base import PairBatch
from rlhf_core.algorithms.preference.dpo import CustomPreferenceLoss
from rlhf_core.algorithms.token_math import Tensor, loaded_torch
from rlhf_core.errors import ConfigError
from rlhf_core.user_code.dependencies import user_code_digest
from rlhf_core.user_code.modules import load_callable

ROWS, POSITIONS = 2, 3
"""Shape of a trial; the two differ, so that a transposed result is noticed."""
CONTRACT = "compare its parameters and its result with docs/custom.md"


def try_custom_functions(config: BaseModel, key: str) -> None:
    """Raise ConfigError, naming the key, for a custom loss or estimator that fails on small tensors.

    It fails by an exception, a result of another shape or type, numbers that are not finite, or a missing gradient. Torch
    is loaded only for a configuration with such a function.
    """
    for name, part in _custom_parts(config, key):
        group = config.samples_per_prompt if isinstance(part, CustomAdvantage) else 0  # type: ignore[attr-defined]
        digest = user_code_digest(part.function, key=f"{name}.function")
        _try(name, type(part), part.model_dump_json(), digest, group)


def _custom_parts(
    config: BaseModel, key: str
) -> Iterator[tuple[str, CustomPolicyLoss | CustomPreferenceLoss | CustomAdvantage]]:
    for name in ("loss", "advantage"):
        part = getattr(config, name, None)
        if isinstance(part, CustomPolicyLoss | CustomPreferenceLoss | CustomAdvantage):
            yield f"{key}.{name}", part


@lru_cache(maxsize=64)  # the rounds of a pipeline have the same function
def _try(key: str, kind: type[Any], dumped: str, digest: str, group: int) -> None:
    part = kind.model_validate_json(dumped)
    function = load_callable(f"{key}.function", part.function, code={part.function: digest})
    torch = loaded_torch()
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            if isinstance(part, CustomAdvantage):
                _check_advantages(part, function, group)
            elif isinstance(part, CustomPolicyLoss):
                _check_policy_loss(part, function)
            else:
                _check_preference_loss(part, function)
    except ConfigError as error:  # names the part, not where it stands
        raise ConfigError(f"{key.rpartition('.')[0]}.{error}") from None
    except Exception as error:  # of the user's code
        rule = f"fails on small tensors with {error!r}"
        raise ConfigError(f"{key}.function", part.function, rule, CONTRACT) from error


def _check_advantages(part: CustomAdvantage, function: Callable[..., Tensor], group: int) -> None:
    torch = loaded_torch()
    rewards_PG = torch.arange(float(ROWS * group)).reshape(ROWS, group).cos()
    lengths_PG = torch.full((ROWS, group), float(POSITIONS))

    def checked(*given: Tensor, **arguments: Any) -> Tensor:
        returned = function(*given, **arguments)
        if isinstance(returned, torch.Tensor) and not returned.is_floating_point():
            raise ConfigError("advantage.function returned", str(returned.dtype), "must be floats", CONTRACT)
        return returned

    part.compare(GroupRewards(rewards=rewards_PG, lengths=lengths_PG, function=checked))


def _check_policy_loss(part: CustomPolicyLoss, function: Callable[..., Tensor]) -> None:
    torch = loaded_torch()
    ones_BL = torch.ones(ROWS, POSITIONS)
    logprobs_BL = (-ones_BL).requires_grad_()
    batch = PolicyBatch(
        logprobs=logprobs_BL,
        old_logprobs=-1.1 * ones_BL,  # a ratio of exp(0.1), inside usual clips, so that there is a gradient
        advantages=torch.tensor([[1.0], [-0.5]]) * ones_BL,
        loss_mask=ones_BL,
        weights=ones_BL,
        num_tokens=float(ROWS * POSITIONS),
        sequences=float(ROWS),
        max_length=float(POSITIONS),
        function=function,
    )
    _check_gradient(part.loss(batch).loss, [logprobs_BL])


def _check_preference_loss(part: CustomPreferenceLoss, function: Callable[..., Tensor]) -> None:
    torch = loaded_torch()
    chosen_B, rejected_B = (torch.tensor(sums).requires_grad_() for sums in ([-3.0, -4.0], [-3.5, -3.75]))
    reference_B = torch.full((ROWS,), -3.25 if part.reference else 0.0)
    batch = PairBatch(
        chosen_logprobs=chosen_B,
        rejected_logprobs=rejected_B,
        ref_chosen_logprobs=reference_B,
        ref_rejected_logprobs=reference_B.clone(),
        chosen_lengths=torch.full((ROWS,), float(POSITIONS)),
        rejected_lengths=torch.full((ROWS,), float(POSITIONS + 1)),
        pairs=float(ROWS),
        tokens=float(ROWS * POSITIONS),
        function=function,
    )
    _check_gradient(part.loss(batch).loss, [chosen_B, rejected_B])


def _check_gradient(loss: Tensor, logprobs: list[Tensor]) -> None:
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [one.grad for one in logprobs if one.grad is not None]
    if not all(bool(one.isfinite().all()) for one in (loss, *gradients)):
        rule = "its loss or gradient is not finite on small tensors"
        raise ConfigError("loss.function returned", "a tensor", rule, "check for divisions by 0 and logs of 0")
