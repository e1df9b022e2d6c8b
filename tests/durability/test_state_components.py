"""A killed run ends like an undisturbed one: a row for each component of state that a run resumes from.

A row is the shortest run whose result depends on its component. Its controls resume the same killed run without one part
of the component, as if the checkpoint lacked it, and must end differently. So a component that is not saved, or not
restored, is found by its row.

The rows are compared with the code and with real checkpoints: a class that saves and loads, a key that is read from a
checkpoint, or a file in one fails a test here until a part of a row, or a reason, names it.
"""

import ast
import copy
import functools
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.engines import OptimizerConfig, SamplingConfig
from rlhf_core.config.policy import LoopConfig
from rlhf_core.config.rewards import EpisodeReward, RewardsConfig
from rlhf_core.data.shards import Drawn, read_drawn
from rlhf_core.models.initialize import initialize_llama
from rlhf_core.monitoring.bands import History
from rlhf_core.rewards.scoring import Scorer
from rlhf_core.rollouts import answers
from rlhf_core.rollouts.answers import AheadSampler, OnPolicySampler
from rlhf_core.rollouts.best_checkpoint import BestCheckpoint
from rlhf_core.rollouts.monitors import Monitors
from rlhf_core.rollouts.prompts import BandOrder
from rlhf_core.schema.base import Config
from rlhf_core.stage.checkpoints import Checkpoints
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.fingerprint import hash_file
from rlhf_core.store.layout import CHECKPOINTS
from rlhf_core.training.adamw import ClippedAdamW
from rlhf_core.training.distillation_trainer import DistillationTrainer
from rlhf_core.training.exports import Exports
from rlhf_core.training.moving_reference import MovingReference
from rlhf_core.training.objectives.preference import RunningShift
from rlhf_core.training.trainer import LocalTrainer, WeightAverage
from rlhf_core.types import ActionSpan, Completion, PolicyRef
from stages.distill import DistillConfig, DivergenceConfig
from stages.dpo import DPOConfig
from stages.ppo import PPOConfig
from stages.sft import SFTConfig
from tests.rlhf_core.agents.scripted import WORLDS
from tests.support.policies import SHAPE, make_policy
from tests.support.training import demonstrations, preferences, prompts, untimed
from tests.support.workshop import Workshop

ROOT = Path(__file__).resolve().parents[2]
Forget = Callable[[pytest.MonkeyPatch, Path], None]
"""Makes the next run resume without a part: patches the code that reads it, or changes the folder of the killed attempt."""


# ---------------------------------------------------------------- rows


@dataclass(frozen=True)
class Part:
    """A part of a component: its entry in the folder of an attempt (`entries`), and how a run resumes without it."""

    entry: str
    forget: Forget
    owner: type | None = None
    """The class that saves and loads it."""


def unread(entry: str, owner: type, method: str = "restore", *, folder: str = "") -> Part:
    """A part that `owner` does not read, so that it stays as at the start. `folder`: only in this folder of a checkpoint."""
    load = getattr(owner, method)

    @functools.wraps(load)
    def skip(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if folder and arguments[0].name != folder:
            return load(self, *arguments, **keywords)
        return None

    return Part(entry, lambda patch, work: patch.setattr(owner, method, skip), owner)


def at_the_start(key: str, value: Any) -> Part:
    """The key of `state.json`, with the value that it has when a run begins."""

    def forget(patch: pytest.MonkeyPatch, work: Path) -> None:
        folder = newest_checkpoint(work)
        marker, noted = (json.loads((folder / name).read_text()) for name in ("COMPLETE", "state.json"))
        *path, last = key.split(".")
        holder = functools.reduce(lambda held, name: held[name], path, noted)
        assert last in holder and holder[last] != value
        holder[last] = value
        (folder / "state.json").write_text(json.dumps(noted))
        marker["sizes"]["state.json"] = (folder / "state.json").stat().st_size
        marker["sha256"]["state.json"] = hash_file(folder / "state.json")
        (folder / "COMPLETE").write_text(json.dumps(marker))

    return Part(key, forget)


def remove_exports(patch: pytest.MonkeyPatch, work: Path) -> None:
    shutil.rmtree(work / "exports")


def of_episodes(field: str, value: Callable[[Completion], Any]) -> Part:
    """A field of the episodes among the rollouts drawn ahead, with the value that a file without it would give back."""

    def read(folder: Path) -> dict[int, Drawn]:
        found = read_drawn(folder)
        for drawn in found.values():
            drawn.generations[:] = [
                replace(one, completion=replace(one.completion, **{field: value(one.completion)}))
                for one in drawn.generations
            ]
        return found

    return Part(f"episode.{field}", lambda patch, work: patch.setattr(answers, "read_drawn", read))


def one_turn(made: Completion) -> tuple[ActionSpan]:
    """One turn with the reward of all, so that the observations count as tokens of the policy."""
    return (ActionSpan(0, len(made.token_ids), made.policy_version, sum(span.reward for span in made.spans)),)


SMALL_IS_GOOD = {"type": "function", "function": "tests.support.token_rewards:small_is_good"}
SMALL = RewardsConfig(terms={"small": SMALL_IS_GOOD})
FAST = OptimizerConfig(learning_rate=5e-3, schedule="constant")
LOOP = LoopConfig(batch_size=4, epochs=1, max_steps=2, checkpoint_every=1)
WORLD = {"type": "environment", "environment": f"{WORLDS}:Readable", "max_episode_tokens": 64}
EVALUATE = {"prompts": 3, "samples": 1, "every": 1}
UNSEEN = {"count": 0, "mean": 0.0, "squares": 0.0}
"""The running mean and variance of no rewards."""
LENGTH = {"type": "band", "metric": "rollout/length", "high": 0.5, "for_steps": 1}
"""A monitor with an alarm at every step, because each answer has a token."""


def ppo(**changes: Any) -> PPOConfig:
    settings: dict[str, Any] = {
        "steps": 2,
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "sampling": SamplingConfig(max_tokens=4),
        "rewards": SMALL,
        "advantage": "rloo",
        "optimizer": FAST,
        "kl": {"coef": 0.0},
        "checkpoint_every": 1,
    }
    return PPOConfig(**(settings | changes))


@dataclass(frozen=True)
class Row:
    """A run of two steps that is killed when the checkpoint of `killed_after` steps is complete."""

    stage: str
    config: Config
    parts: Mapping[str, Part]
    killed_after: int = 1


ROWS = {
    "policy": Row(
        "ppo",
        ppo(optimizer=FAST.model_copy(update={"ema_decay": 0.5})),
        {
            "weights and optimizer": unread("policy/training_state.pt", LocalTrainer, "load", folder="policy"),
            "optimizer": unread("policy/training_state.pt", ClippedAdamW, "load_state_dict"),
            "average": unread("policy/average.pt", WeightAverage),
        },
    ),
    "value model": Row(
        "ppo",
        ppo(advantage="gae", value={"optimizer": FAST}),
        {"value model": unread("value_model/training_state.pt", LocalTrainer, "load", folder="value_model")},
    ),
    "reference": Row(
        "ppo",
        ppo(kl={"in": "loss", "coef": 0.5, "target": 0.1, "horizon": 2, "reference_sync": {"every": 1, "mix": 0.5}}),
        {
            "reference": unread("reference", MovingReference, "load"),
            "its coefficient": at_the_start("state.kl.coef", 0.5),
        },
    ),
    "rollouts drawn ahead": Row(
        "ppo",
        ppo(ahead={"type": "staleness", "steps": 1}),
        {"rollouts drawn ahead": unread("rollouts/step-N", AheadSampler, "load")},
    ),
    "partial rollouts": Row(
        "ppo",
        ppo(ahead={"type": "partial", "tokens": 2, "in_flight_groups": 4}),
        {"pool": unread("rollouts/pool", OnPolicySampler, "load")},
    ),
    "difficulty band": Row("ppo", ppo(order="band"), {"band": unread("state.band", BandOrder)}),
    "run guard": Row(
        "ppo",
        ppo(evaluate=EVALUATE, monitors=[LENGTH | {"action": "rollback", "max_rollbacks": 1}]),
        {
            "monitors": unread("state.guard.watch", Monitors),
            "rollbacks": at_the_start("state.guard.watch.rollbacks", {"band": 0}),
            "rates": at_the_start("state.guard.rates", {"learning_rate": 1.0, "kl_coef": 1.0}),
            "events": at_the_start("state.guard.events", []),
            "evaluations": at_the_start("state.guard.evaluations", []),
        },
    ),
    "run guard with patience": Row(
        "ppo",
        # Of 4 tokens of 320 hardly any ends an answer: no evaluation is better than the first.
        ppo(
            evaluate=EVALUATE | {"metric": "eval/truncated", "patience": 2},
            monitors=[LENGTH | {"window": 2}, LENGTH | {"name": "twice", "for_steps": 2}],
        ),
        {
            "best evaluation": unread("state.guard.best", BestCheckpoint),
            "history": unread("state.guard.watch.history", History),
            "streaks": at_the_start("state.guard.watch.streaks", {"band": 0, "twice": 0}),
        },
    ),
    "run guard at its end": Row(
        "ppo",
        ppo(evaluate=EVALUATE, monitors=[LENGTH | {"action": "stop"}]),
        {"end": at_the_start("state.guard.ended", {}), "last metrics": at_the_start("state.metrics", {})},
    ),
    "agents": Row(
        "ppo",
        ppo(
            agent=WORLD,
            rewards=RewardsConfig(terms={"won": EpisodeReward()}),
            ahead={"type": "staleness"},
            # Any of these letters ends a turn, so that a second one follows.
            sampling=SamplingConfig(max_tokens=12, stop=tuple("aehinotsrd")),
        ),
        {"turns": of_episodes("spans", one_turn), "reports": of_episodes("extras", lambda made: {})},
    ),
    "distillation": Row(
        "distill",
        DistillConfig(divergence=DivergenceConfig(top_k=16), max_length=48, loop=LOOP, optimizer=FAST),
        {"student": unread("training_state.pt", DistillationTrainer, "load")},
    ),
    "scorer": Row(
        "ppo",
        ppo(rewards=RewardsConfig(terms={"small": SMALL_IS_GOOD | {"normalize": "running"}}, normalize="running")),
        {
            "scorer": unread("state.rewards", Scorer),
            "of all": at_the_start("state.rewards.normaliser", UNSEEN),
            "of terms": at_the_start("state.rewards.terms", {"small": UNSEEN}),
        },
    ),
    "exports": Row("ppo", ppo(export_every=1), {"exports": Part("attempt/exports", remove_exports, Exports)}),
    "data position": Row(
        "dpo",
        DPOConfig(loss={"type": "bco"}, max_length=48, loop=LOOP, optimizer=FAST),
        {
            "step": at_the_start("step", 0),
            "running means": unread("state.carried", RunningShift),
        },
    ),
    "data position at the end": Row(
        "sft",
        SFTConfig(max_length=48, loop=LOOP, optimizer=FAST),
        {
            "first evaluation": at_the_start("state.initial", {}),
            "last evaluation": at_the_start("state.final", {}),
        },
        killed_after=2,
    ),
}


# ---------------------------------------------------------------- runs


@dataclass(frozen=True)
class Outcome:
    """The artifact of a run, its final metrics, and all that it logged on the way."""

    digest: str
    final: Mapping[str, float]
    points: list[tuple[int, dict[str, float]]]


class Runs:
    """Runs of a row in one folder: undisturbed, killed, and resumed any number of times from where it was killed."""

    def __init__(self, row: Row, root: Path, policy: Path) -> None:
        self._row = row
        self._root = root
        self._policy = policy
        self._logged = Workshop(ArtifactStore(root / "killed")).tracker

    def undisturbed(self) -> Outcome:
        return self._outcome(*self._opened("undisturbed"), action="RUN")

    def kill(self) -> Path:
        """Run until the kill, and return the folder of the attempt that is left."""
        shop, inputs = self._opened("killed")
        saving = Checkpoints.saving

        @contextmanager
        def killing(own: Checkpoints, step: int, *arguments: Any, **keywords: Any) -> Iterator[Path]:
            with saving(own, step, *arguments, **keywords) as folder:
                yield folder
            if step == self._row.killed_after:
                own.settle()
                raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Checkpoints, "saving", killing)
            shop.run(self._row.stage, self._row.config, inputs)
        self._logged = shop.tracker
        shutil.copytree(self._root / "killed", self._root / "kept", symlinks=True)
        return self._work()

    def resume(self, forget: Forget | None = None) -> Outcome:
        """Resume the killed run with new engines, as another process would."""
        shutil.rmtree(self._root / "killed")
        shutil.copytree(self._root / "kept", self._root / "killed", symlinks=True)
        with pytest.MonkeyPatch.context() as patch:
            shop, inputs = self._opened("killed")
            shop.tracker = copy.deepcopy(self._logged)
            if forget:
                forget(patch, self._work())
            return self._outcome(shop, inputs, action="RESUME")

    def missed(self, parts: Mapping[str, Part], expected: Outcome) -> list[str]:
        """The parts without which the killed run ends as `expected`, too."""

        def resume(part: Part) -> Outcome | None:
            with suppress(FileNotFoundError):  # a file that the artifact needs
                return self.resume(part.forget)
            return None

        return [name for name, part in parts.items() if resume(part) == expected]

    def _opened(self, name: str) -> tuple[Workshop, dict[str, Any]]:
        root = self._root / name
        shop = Workshop(ArtifactStore(root))
        data = self._root / f"data of {name}"
        base = shop.store.external(PolicyRef, self._policy)
        inputs: dict[str, Callable[[], dict[str, Any]]] = {
            "ppo": lambda: {"reference": base, "prompts": prompts(shop.store, data), "reward_models": {}},
            "dpo": lambda: {"reference": base, "preferences": preferences(shop.store, data, held_out=4)},
            "sft": lambda: {"demonstrations": demonstrations(shop.store, data)},
            "distill": lambda: {"teacher": self._teacher(shop), "demonstrations": demonstrations(shop.store, data)},
        }
        return shop, {"policy": base} | inputs[self._row.stage]()

    def _teacher(self, shop: Workshop) -> PolicyRef:
        folder = self._root / "teacher"
        if not folder.exists():
            initialize_llama(SHAPE, make_policy(folder), seed=8)
        return shop.store.external(PolicyRef, folder)

    def _outcome(self, shop: Workshop, inputs: dict[str, Any], *, action: str) -> Outcome:
        ref, decision = shop.run(self._row.stage, self._row.config, inputs)
        assert decision.action == action
        return Outcome(ref.digest, shop.metrics(decision), untimed(shop.tracker.points))

    def _work(self) -> Path:
        (work,) = (self._root / "killed").glob("attempts/*/work-*")
        return work


def newest_checkpoint(work: Path) -> Path:
    return max((work / CHECKPOINTS).glob("step-*"))


def entries(work: Path) -> set[str]:
    """The files of an attempt from which another one resumes, without numbers, and the keys of its newest checkpoint."""
    newest = newest_checkpoint(work)
    files = {path.relative_to(newest).as_posix() for path in newest.rglob("*") if path.is_file()}
    others = {path.relative_to(work) for path in work.rglob("*") if path.is_file()}
    files |= {f"attempt/{path.as_posix()}" for path in others if path.parts[0] != CHECKPOINTS}
    found = {re.sub(r"\d+", "N", name) for name in files}
    state = json.loads((newest / "state.json").read_text())["state"]
    held = {f"{holder}.{key}" for holder in HOLDERS for key in value_at(state, holder)}
    return (found - {"COMPLETE", "state.json"}) | {f"state.{key}" for key in state.keys() | held}


def value_at(state: Mapping[str, Any], path: str) -> Any:
    """The value at "guard.watch"; {} if a run has no such key."""
    return functools.reduce(lambda held, name: held.get(name, {}), path.split("."), state)


# ---------------------------------------------------------------- names


HOLDERS = ("guard", "guard.watch", "rewards")
"""Keys of the state below which each key is an entry."""
NO_PART = {
    "state.rewards.logs": "begin anew with each step, as the next two; kept for the log of rollouts",
    "state.rewards.failed": "begin anew with each step",
    "state.rewards.ranges": "begin anew with each step",
    "state.skipped_in_a_row": "only ends a run whose updates are all skipped",
    "random_state_N.pt": "no layer draws numbers while it trains; tests/rlhf_core/training/test_state.py",
    "episode.failure": "is sampled again; test_episodes_that_all_failed_are_not_kept_in_a_checkpoint_for_ever",
    "episode.score": "decides about groups of dynamic sampling, which draws nothing ahead; tests/rlhf_core/data/test_shards.py",
    "episode.routed_experts": "of single answers drawn ahead: test_a_resumed_run_replays_the_same_experts",
    "attempt/rollouts": "a copy that saves sampling: test_rollouts_made_since_the_last_checkpoint_are_not_made_again",
    "attempt/reference": "is written anew from the checkpoint",
    "attempt/reference_logprobs_eval.json": "is computed again",
    "attempt/reference_logprobs_train.json": "is computed again",
    "attempt/failures.jsonl": "counts for the record; tests/rlhf_core/store/test_failures.py",
    "attempt/metrics.jsonl": "logged points; tests/rlhf_core/stage/test_run.py",
}
"""Entry of an attempt, or field of an episode in it, and why no row resumes without it."""
NO_OWNER = {
    "TorchEngine": "the part of LocalTrainer that holds the model",
    "DeepSpeedEngine": "the same with ZeRO; tests/rlhf_core/training/engines/test_deepspeed_engine.py",
    "RayTrainer": "LocalTrainer in other processes; tests/stages/test_invariants_engines.py",
    "TrainWorker": "LocalTrainer in other processes; tests/stages/test_invariants_engines.py",
}
"""Class that saves and loads, and why no row resumes without it."""
PAIRS = (
    {"state", "restore"},
    {"state", "restored"},
    {"save", "load"},
    {"snapshot", "load"},
    {"after_step", "deliver"},
    {"state_dict", "load_state_dict"},
)
PARTS = [part for row in ROWS.values() for part in row.parts.values()]


def has_part(entry: str) -> bool:
    """True if a part or a reason covers an entry, a part of it, or the folder that holds it."""
    named = [part.entry for part in PARTS] + list(NO_PART)
    entry = entry.removeprefix("policy/").removeprefix("value_model/") if "random_state" in entry else entry
    return any(
        one == entry or one.startswith((f"{entry}.", f"{entry}/")) or entry.startswith(f"{one}/") for one in named
    )


def declarations() -> list[ast.AST]:
    """The classes, subscripts, operations and calls of all code that runs in stages."""
    files = [
        path for package in ("rlhf_core", "stages", "rlhf_contrib") for path in sorted((ROOT / package).rglob("*.py"))
    ]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return [node for node in nodes if isinstance(node, ast.ClassDef | ast.Subscript | ast.BinOp | ast.Call)]


def saving_classes(code: Sequence[ast.AST]) -> set[str]:
    """The classes with a method that saves and one that loads; not the protocols that they implement."""
    found = set()
    for node in code:
        if isinstance(node, ast.ClassDef) and "Protocol" not in map(ast.unparse, node.bases):
            names = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
            names |= {ast.unparse(name) for one in node.body if isinstance(one, ast.Assign) for name in one.targets}
            found |= {node.name} if any(pair <= names for pair in PAIRS) else set()
    return found


def read_entries(code: Sequence[ast.AST]) -> set[str]:
    """The keys and folders that code reads by name: `checkpoint.state["kl"]`, `.get("kl")`, `checkpoint.path / "policy"`."""
    found = set()
    for node in code:
        match node:
            case (
                ast.Subscript(value=ast.Attribute(attr="state"), slice=ast.Constant(value=str(name)))
                | ast.Call(
                    func=ast.Attribute(value=ast.Attribute(attr="state"), attr="get"),
                    args=[ast.Constant(value=str(name)), *_],
                )
            ):
                found.add(f"state.{name}")
            case ast.BinOp(left=ast.Attribute(attr="path"), op=ast.Div(), right=ast.Constant(value=str(name))):
                found.add(name)
    return found


def episode_fields() -> set[str]:
    """The fields of a completion that answers of one turn leave at their defaults."""
    optional = [one for one in fields(Completion) if one.default is not MISSING or one.default_factory is not MISSING]
    return {f"episode.{one.name}" for one in optional}


# ---------------------------------------------------------------- tests


@pytest.mark.parametrize("name", ROWS)
def test_a_killed_run_ends_like_an_undisturbed_one_and_differently_without_a_part(name, tmp_path, policy):
    runs = Runs(ROWS[name], tmp_path, policy)
    expected, left = runs.undisturbed(), entries(runs.kill())
    assert [entry for entry in sorted(left) if not has_part(entry)] == []
    assert runs.resume() == expected
    assert runs.missed(ROWS[name].parts, expected) == []


def test_each_class_that_saves_and_loads_and_each_name_that_is_read_has_a_row():
    code = declarations()
    classes = saving_classes(code)
    owners = {part.owner.__name__ for part in PARTS if part.owner}
    assert sorted(classes - owners - NO_OWNER.keys()) == []
    assert sorted(NO_OWNER.keys() - classes) == []
    read = read_entries(code) | episode_fields()
    assert {"state.kl", "state.carried", "policy", "rollouts", "episode.spans"} <= read
    assert sorted(name for name in read if not has_part(name)) == []
