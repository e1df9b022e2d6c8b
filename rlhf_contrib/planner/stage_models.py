"""List the models that each stage of a plan holds at the same time, as `memory.Role`s; without torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.execution.plan import HELD, PENDING, PlannedStage
from rlhf_contrib.planner.memory import Role
from rlhf_contrib.planner.sizes import ModelShape, shape_of, shape_of_init
from rlhf_core.config.models import InitModel, PretrainedModel
from rlhf_core.config.policy import DynamicSampling, PPOConfig
from rlhf_core.config.runtime import RuntimeConfig
from rlhf_core.errors import ConfigError
from rlhf_core.models.packages import local_folder
from rlhf_core.stage.key import StageSpec
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import ArtifactRef, PolicyRef
from stages.distill import DistillConfig
from stages.dpo import DPOConfig
from stages.prepare_data import PrepareDataConfig
from stages.process_reward_model import ProcessRewardModelConfig
from stages.reward_model import RewardModelConfig
from stages.sft import SFTConfig


@dataclass(frozen=True, slots=True)
class Phase:
    """Models that a stage holds at the same time, in the order in which they are opened."""

    roles: tuple[Role, ...] = ()
    sampled: ModelShape | None = None
    """Shape of the model that the engines sample from."""
    samples_first: bool = False
    """Whether the engines start before the last trained model, as in policy optimization."""
    samples_again: bool = False
    """Whether a step samples with the same weights again after other models have measured its answers."""


@dataclass(frozen=True, slots=True)
class Step:
    """Upper bounds for the tokens of one step: all rows have their maximum length."""

    trained: int = 0
    """Tokens of the samples that a step trains on, counted once."""
    epochs: int = 1
    answers: int = 0
    """Answers that a step samples, each of `answer_tokens` after `prompt_tokens`."""
    answer_tokens: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    """Steps of the stage; 0 if the number of rows determines them."""
    length: int = 0
    """Tokens of a row, the span of attention."""
    longest: int = 0
    """Tokens of the longest answer if `answer_tokens` is an average; 0: all have the same length."""


class Shapes:
    """The shapes of the models of a plan: models in artifacts, and models that the stages will produce."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self._made: dict[str, ModelShape] = {}
        self._read: dict[str, ModelShape] = {}

    def of(self, ref: ArtifactRef) -> ModelShape:
        """Shape of the model at `ref`. Raises ConfigError if it is not known before the run."""
        if ref.uri.startswith((PENDING, HELD)):
            label = ref.uri.partition("://")[2]
            if label not in self._made:
                rule = "its shape is not known before it is made"
                raise ConfigError("--estimate", label, rule, "estimate again when this stage has run")
            return self._made[label]
        if ref.uri not in self._read:
            self._read[ref.uri] = shape_of(self._store.path(ref))
        return self._read[ref.uri]

    def note(self, spec: StageSpec) -> None:
        """Remember the shape of the model that `spec` will produce."""
        model = getattr(spec.config, "model", None)
        if isinstance(spec.config, PrepareDataConfig) or isinstance(model, PretrainedModel):
            self._made[spec.label] = _configured(model, spec.label)
        elif "policy" in spec.inputs and isinstance(spec.inputs["policy"], ArtifactRef):
            self._made[spec.label] = self.of(spec.inputs["policy"])
        elif isinstance(policies := spec.inputs.get("policies"), dict) and policies:
            self._made[spec.label] = self.of(next(iter(policies.values())))


def _configured(model: Any, label: str) -> ModelShape:
    """Shape of a model that a profile names. Raises ConfigError for a GGUF file, which is not read here."""
    if isinstance(model, InitModel):
        return shape_of_init(model)
    folder = local_folder(model)
    if folder is None:
        folder = _in_cache(model)
    if model.gguf_file and not (folder / "config.json").is_file():
        rule = "a GGUF file has no config.json beside it"
        raise ConfigError(f"{label}.model.gguf_file", model.gguf_file, rule, "run prepare_data first, then estimate")
    return shape_of(folder)


def _in_cache(model: PretrainedModel) -> Path:
    """Folder of a Hub model in this machine's cache; nothing is downloaded. ConfigError if it is not cached."""
    from huggingface_hub import try_to_load_from_cache  # 0.3 s, for models of the Hub alone

    found = try_to_load_from_cache(model.path, "config.json", revision=model.revision)
    if not isinstance(found, str):
        rule = "its config.json is not in the cache of this machine"
        raise ConfigError("model.path", model.path, rule, f"run: hf download {model.path} config.json")
    return Path(found).parent


# ---------------------------------------------------------------- stages


def phases(spec: StageSpec, shapes: Shapes, runtime: RuntimeConfig, prompt_tokens: int) -> list[Phase]:
    """The models that the stage holds, one phase after another; [] for a stage without engines."""
    if not {"trainer", "sampler"} & spec.engines.keys():
        return []
    config = spec.config
    rows = runtime.trainer.micro_batch
    if isinstance(config, PPOConfig):
        return [_policy_optimization(spec, config, shapes, runtime, prompt_tokens)]
    if isinstance(config, DistillConfig):
        return [_distillation(spec, config, shapes, runtime, prompt_tokens)]
    if isinstance(config, SFTConfig):
        tokens = rows * config.max_length if config.packing else _tokens(runtime, config.max_length)
        return [Phase((Role("policy", _input(spec, "policy", shapes), True, tokens, lora=config.lora),))]
    if isinstance(config, DPOConfig):
        tokens = _tokens(runtime, config.max_length)
        policy = Role("policy", _input(spec, "policy", shapes), True, 2 * tokens, lora=config.lora)
        reference = Role("reference", _input(spec, "reference", shapes), False, tokens)
        return [*([Phase((reference,))] if config.loss.uses_reference else []), Phase((policy,))]
    if isinstance(config, RewardModelConfig | ProcessRewardModelConfig):
        sides = 2 if isinstance(config, RewardModelConfig) else 1
        shape = _input(spec, "policy", shapes).without_head()
        tokens = sides * _tokens(runtime, config.max_length)
        return [Phase((Role("reward_model", shape, True, tokens, lora=config.lora, logits=False),))]
    return _measuring(spec, shapes, runtime, prompt_tokens)


def _measuring(spec: StageSpec, shapes: Shapes, runtime: RuntimeConfig, prompt_tokens: int) -> list[Phase]:
    """Phases of a stage without training: the engines, then each measuring model by itself."""
    found: list[Phase] = []
    policy = spec.inputs.get("policy")
    if "sampler" in spec.engines and isinstance(policy, ArtifactRef):
        found.append(Phase(sampled=shapes.of(policy)))
    longest = getattr(runtime.sampler, "max_model_len", None) or getattr(spec.config, "max_length", None)
    tokens = _tokens(runtime, longest or prompt_tokens)
    for role in _scorers(spec, shapes, tokens) if "trainer" in spec.engines else ():
        found.append(Phase((role,)))
    reference = spec.inputs.get("reference")
    if "trainer" in spec.engines and isinstance(reference, ArtifactRef):
        found.append(Phase((Role("reference", shapes.of(reference), False, tokens),)))
    return found


def _policy_optimization(
    spec: StageSpec, config: PPOConfig, shapes: Shapes, runtime: RuntimeConfig, prompt_tokens: int
) -> Phase:
    """The models of a policy optimization, all held from the first step to the last."""
    policy = _input(spec, "policy", shapes)
    answer = config.most_tokens  # the longest answers that a schedule allows need the most memory
    length = config.agent.max_episode_tokens if config.agent else prompt_tokens + answer
    length = min(length, getattr(runtime.sampler, "max_model_len", None) or length)
    tokens = _tokens(runtime, length)
    answered = tokens if config.agent else _tokens(runtime, length) * answer // length
    roles: list[Role] = []
    if config.uses_values:
        scoring = (ref for ref in _refs(spec.inputs.get("reward_models")).values() if not isinstance(ref, PolicyRef))
        start = spec.inputs.get("critic") or next(scoring, None) or spec.inputs["policy"]
        shape = shapes.of(start) if isinstance(start, ArtifactRef) else policy
        scalar = Role("value_model", shape.without_head(), True, tokens, lora=config.value.lora, logits=False)
        roles.append(scalar)
    lends = config.uses_reference and config.lends_reference(spec.inputs["reference"], spec.inputs["policy"])
    actor = Role("policy", policy, True, tokens, config.lora, vocabulary_tokens=answered, measures=1 + lends)
    roles.append(actor)
    if config.uses_reference and not lends:
        roles.append(Role("reference", _input(spec, "reference", shapes), False, tokens, vocabulary_tokens=answered))
    roles += _scorers(spec, shapes, tokens)
    roles += _teachers(spec, shapes, tokens)
    greedy = config.estimator is not None and config.estimator.asks_greedy
    again = greedy or isinstance(config.ahead, DynamicSampling)
    return Phase(tuple(roles), policy, samples_first=True, samples_again=again)


def _distillation(
    spec: StageSpec, config: DistillConfig, shapes: Shapes, runtime: RuntimeConfig, prompt_tokens: int
) -> Phase:
    """The models of a distillation: the student and its teachers."""
    policy = _input(spec, "policy", shapes)
    length = prompt_tokens + config.sampling.max_tokens if config.on_policy else config.max_length
    tokens = _tokens(runtime, length)
    student = Role("policy", policy, True, tokens, lora=config.lora)
    sampled = policy if config.on_policy else None
    return Phase((student, *_teachers(spec, shapes, tokens)), sampled, samples_first=config.on_policy)


def _teachers(spec: StageSpec, shapes: Shapes, tokens: int) -> Iterator[Role]:
    """The teachers of a stage. They have names only if there are several."""
    refs = _refs(spec.inputs.get("teachers")) or _refs(spec.inputs.get("teacher"))
    for name, ref in refs.items():
        yield Role("teacher", shapes.of(ref), False, tokens, which=name if len(refs) > 1 else "")


def _scorers(spec: StageSpec, shapes: Shapes, tokens: int) -> Iterator[Role]:
    refs = _refs(spec.inputs.get("reward_models")) or _refs(spec.inputs.get("reward_model"))
    for name, ref in refs.items():
        judges = isinstance(ref, PolicyRef)
        shape = shapes.of(ref) if judges else shapes.of(ref).without_head()
        yield Role("reward_model", shape, False, tokens, logits=judges, which=name if len(refs) > 1 else "")


def _input(spec: StageSpec, name: str, shapes: Shapes) -> ModelShape:
    ref = spec.inputs[name]
    assert isinstance(ref, ArtifactRef)
    return shapes.of(ref)


def _refs(value: Any) -> Mapping[str, ArtifactRef]:
    if value is None:
        return {}
    return value if isinstance(value, Mapping) else {"": value}


def _tokens(runtime: RuntimeConfig, length: int) -> int:
    """Tokens of the largest forward pass of one rank, for rows of `length` tokens."""
    trainer = runtime.trainer
    tokens = max(trainer.micro_tokens, length) if trainer.micro_tokens else trainer.micro_batch * length
    return -(-tokens // trainer.sequence_parallel)


def step_of(planned: PlannedStage, prompt_tokens: int) -> Step | None:
    """Tokens of one step; None for a stage whose work depends only on its data."""
    config = planned.spec.config
    if isinstance(config, PPOConfig):
        answers, tokens = config.prompts_per_step * config.samples_per_prompt, config.most_tokens
        length = config.agent.max_episode_tokens if config.agent else prompt_tokens + tokens
        return Step(answers * length, config.epochs, answers, tokens, length - tokens, config.steps, length)
    if not isinstance(config, SFTConfig | DPOConfig | RewardModelConfig | ProcessRewardModelConfig | DistillConfig):
        return None
    sides = 2 if isinstance(config, DPOConfig | RewardModelConfig) else 1
    tokens = config.loop.batch_size * sides * config.max_length
    return Step(tokens, steps=config.loop.max_steps or 0, length=config.max_length)
