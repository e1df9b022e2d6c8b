"""Configure parts of a step of policy optimization: resampling, mixed-in demonstrations, the reference's weights."""

from __future__ import annotations

from pydantic import Field

from rlhf_core.schema.base import Config


class DynamicSampling(Config):
    """Resampling of whole groups whose answers all get the same reward: DAPO, arXiv 2503.14476, section 3.2.

    A prompt is judged by the shaped rewards of its answers or, as in OpenRLHF, by the `scores` that an agent, a reward
    function or a server returns besides rewards, if it is the only term with a weight. With several terms the reward
    decides. If only some answers to a prompt have a score, the stage ends with an error.
    """

    low: float | None = None
    """Lower bound: a prompt is kept only if the mean of its scores, or rewards, is above it."""
    high: float | None = None
    """Upper bound: a prompt is kept only if the mean of its scores, or rewards, is below it. Without either bound a prompt is
    kept if its scores, or rewards, differ."""
    max_rounds: int = Field(3, ge=2)
    """Maximum number of sampling rounds in a step; after that missing groups are replaced by rejected ones."""


class PtxConfig(Config):
    """Demonstrations mixed into every update to preserve what SFT taught: PPO-ptx, arXiv 2203.02155 eq. 2."""

    coef: float = Field(0.1, gt=0)
    batch_size: int = Field(16, ge=1)
    """Number of demonstrations per optimizer step."""
    max_length: int = Field(256, ge=8)


class ReferenceSync(Config):
    """A reference that follows the policy: TR-DPO, arXiv 2404.09656."""

    every: int = Field(ge=1)
    """Number of steps after which the reference takes over weights of the policy."""
    mix: float = Field(1.0, gt=0, le=1)
    """Part of the policy in the new reference: 1 takes its weights as they are, less the weighted mean."""
