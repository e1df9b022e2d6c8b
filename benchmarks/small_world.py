"""A small in-process support desk: data, SFT policy and reward models, and policy optimization on them.

The engines are plain torch and transformers, without Ray and vLLM, so that a run of policy optimization takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_core.config.data import SupportWorld
from rlhf_core.config.engines import OptimizerConfig, SamplingConfig, TrainerConfig
from rlhf_core.config.models import InitModel
from rlhf_core.config.monitors import HeldOutConfig
from rlhf_core.config.policy import LoopConfig, PPOConfig
from rlhf_core.config.rewards import FunctionReward, RewardModelReward, RewardsConfig
from rlhf_core.config.runtime import HFSamplerConfig, RuntimeConfig
from rlhf_core.data.tables import read_preferences, write_preferences
from rlhf_core.evaluation.plots import read_curves
from rlhf_core.interfaces import ModelSpec, Role, Runtime, Sampler, Trainer
from rlhf_core.runtime.local_runtime import LocalRuntime
from rlhf_core.schema.base import Config
from rlhf_core.stage.run import execute
from rlhf_core.store import attempts
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.tracking.memory import MemoryStageTracker
from rlhf_core.types import ArtifactRef, PreferencesRef, PreparedDataRef
from stages.prepare_data import PrepareDataConfig
from stages.reward_model import RewardModelConfig
from stages.sft import SFTConfig
from stages.table import STAGES

RUNTIME = RuntimeConfig(
    type="local", trainer=TrainerConfig(engine="torch", micro_batch=32), sampler=HFSamplerConfig(batch_size=128)
)
DATA = PrepareDataConfig(
    data=SupportWorld(
        demonstrations=2400, preferences=1200, prompts=320, eval_prompts=64, eval_demonstrations=16, eval_preferences=64
    ),
    model=InitModel(
        vocab_size=512, hidden_size=64, layers=2, heads=4, kv_heads=4, intermediate_size=192, max_positions=192
    ),
    max_prompt_tokens=96,
    max_tokens=192,
)
LOOP = LoopConfig(batch_size=16, epochs=1, eval_every=500, checkpoint_every=500)
GOLD = RewardsConfig(
    terms={"gold": FunctionReward(function="rlhf_contrib.worlds.support_readers:reader_reward", timeout_s=600.0)}
)
"""Judgment of a person who reads message and reply; it is never trained on."""
SEED = 17
"""Seed of data, SFT and reward models; runs of policy optimization have separate seeds."""


@dataclass
class SmallWorld:
    """A store with the artifacts that runs start from; existing artifacts are not computed again."""

    store: ArtifactStore
    inputs: dict[str, Any] = field(default_factory=dict)
    data: PreparedDataRef | None = None

    @classmethod
    def at(cls, state: Path, *, hidden: int = 64) -> SmallWorld:
        """Open the world in the store below `state`; at first, data and SFT policy take a minute.

        Rows and tokenizer are the same for any number of `hidden` units of the policy.
        """
        world = cls(ArtifactStore(state / "store"))
        world.store.create()
        assert isinstance(DATA.model, InitModel)
        sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden}
        data = world.run("prepare_data", DATA.model_copy(update={"model": DATA.model.model_copy(update=sizes)}), {})
        assert isinstance(data, PreparedDataRef)
        world.data = data
        sft = SFTConfig(max_length=192, loop=LOOP, optimizer=OptimizerConfig(learning_rate=5e-3, weight_decay=0.01))
        policy = world.run("sft", sft, {"policy": data.base, "demonstrations": data.demonstrations})
        world.inputs = {"policy": policy, "reference": policy, "prompts": data.prompts, "reward_models": {}}
        return world

    def reward_model(self, pairs: int, *, hidden: int = 64, seed: int = SEED) -> ArtifactRef:
        """A reward model trained on the first `pairs` pairs, from an SFT policy with `hidden` units."""
        assert self.data is not None and self.data.preferences is not None
        folder = self.store.path(self.data.preferences)
        rows = read_preferences(folder / "train.parquet")[:pairs]
        first = self.store.layout.root.parent / f"pairs-{pairs}"
        write_preferences(first / "train.parquet", rows)
        write_preferences(first / "eval.parquet", read_preferences(folder / "eval.parquet"))
        config = RewardModelConfig(
            max_length=192, loop=LOOP, optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.01)
        )
        start = SmallWorld.at(self.store.layout.root.parent, hidden=hidden).inputs["policy"]
        given = {"policy": start, "preferences": self.store.external(PreferencesRef, first)}
        return self.run("reward_model", config, given, seed=seed)

    def run(
        self,
        name: str,
        config: Config,
        inputs: dict[str, Any],
        *,
        seed: int = SEED,
        runtime: Runtime | None = None,
        tracker: MemoryStageTracker | None = None,
        fresh: bool = False,
    ) -> ArtifactRef:
        """Run a stage in this process, or use the store's result unless `fresh` is set."""
        spec = STAGES[name].spec(config, inputs, label=name, seed=seed, engines={})
        own = runtime or LocalRuntime(RUNTIME)
        try:
            ref, _ = execute(
                self.store,
                spec,
                runtime=own,
                tracker=tracker or MemoryStageTracker(),
                progress=lambda done, total, text: None,
                force=fresh,
            )
        finally:
            own.close()
        return ref

    def curves(self, ref: ArtifactRef) -> dict[str, dict[int, float]]:
        """Logged metrics of the run that trained a policy: metric -> step -> value."""
        (record,) = [record for record in self.store.records() if record.handle == ref]
        curves = read_curves(attempts.metrics(self.store.attempts(record.key)))
        return {name.removeprefix("ppo/"): dict(points) for name, points in curves.items()}

    def report(self, ref: ArtifactRef) -> dict[str, Any]:
        """The `monitors.json` of a policy."""
        found: dict[str, Any] = json.loads((self.store.path(ref) / "monitors.json").read_text(encoding="utf-8"))
        return found


def ppo(*, steps: int, **changes: Any) -> PPOConfig:
    """RLOO against the reward model, with held-out evaluations judged by the gold reward."""
    settings: dict[str, Any] = {
        "steps": steps,
        "prompts_per_step": 12,
        "samples_per_prompt": 2,
        "sampling": SamplingConfig(max_tokens=48),
        "advantage": {"type": "rloo"},
        "rewards": RewardsConfig(terms={"reward_model": RewardModelReward()}),
        "optimizer": OptimizerConfig(learning_rate=1e-4, schedule="constant"),
        "kl": {"coef": 0.05},
        "checkpoint_every": 1000,
        "evaluate": HeldOutConfig(every=2, prompts=24, independent=GOLD, export="last"),
    }
    return PPOConfig(**(settings | changes))


class WrappedRuntime(LocalRuntime):
    """In-process engines, each passed through a function before the stage gets it."""

    def __init__(self, *, trainer: Callable[[Role, Trainer], Trainer], sampler: Callable[[Sampler], Sampler]) -> None:
        super().__init__(RUNTIME)
        self._wrap_trainer = trainer
        self._wrap_sampler = sampler

    @contextmanager
    def trainer(self, role: Role, model: ModelSpec, optimizer: OptimizerConfig | None) -> Iterator[Trainer]:
        """Lease a trainer, wrapped."""
        with super().trainer(role, model, optimizer) as engine:
            yield self._wrap_trainer(role, engine)

    @contextmanager
    def sampler(self, policy: Path) -> Iterator[Sampler]:
        """Lease a sampler, wrapped."""
        with super().sampler(policy) as engine:
            yield self._wrap_sampler(engine)
