"""Cut a profile down to a rehearsal: the same graph, with tiny models, short answers and a few steps.

The rules are by the class of an option, so they hold wherever a profile has it: in a section, a step, or a round.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipelines.flows.profile import PipelineConfig
from pipelines.flows.run_rules import BudgetConfig, TrackConfig
from rlhf_core.algorithms.advantage.base import GroupAdvantage
from rlhf_core.config.annotators import (
    FileAnnotator,
    ProgramAnnotator,
    ReviewAnnotator,
)
from rlhf_core.config.data import (
    ArithmeticWorld,
    InstructionsWorld,
    SupportWorld,
)
from rlhf_core.config.engines import SamplingConfig, TrainerConfig
from rlhf_core.config.models import InitModel, LoraConfig
from rlhf_core.config.monitors import HeldOutConfig
from rlhf_core.config.policy import (
    LoopConfig,
    PartialRollouts,
    PPOConfig,
    PtxConfig,
)
from rlhf_core.config.rewards import FunctionReward, WeightedSum
from rlhf_core.config.runtime import (
    RuntimeConfig,
    VllmSamplerConfig,
    VllmServerSamplerConfig,
)
from rlhf_core.config.schedule import ScheduledSampling, SchedulePart
from rlhf_core.schema.base import Config
from stages.collect_preferences import CollectPreferencesConfig
from stages.condition import ConditionConfig
from stages.evaluate import EvaluateConfig
from stages.evaluate_harness import HarnessSuite
from stages.generate import GenerateConfig
from stages.propose_comparisons import ProposeComparisonsConfig
from stages.score import ScoreConfig
from stages.select import Pairs, PromptsInBand, Selection, Threshold
from stages.suite_prompts import SuitePromptsConfig
from stages.synthesize import SynthesizeConfig

STEPS = 2
BATCH = 4
TOKENS = 16
"""Most tokens of a sampled answer."""
ROWS = 1000
"""Most rows of a table of a synthetic world. They are cut further once the limits in tokens were applied."""
ANSWERS = 4
"""Most answers to a prompt."""
STAND_INS = "pipelines.rehearse.stand_ins"

Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Cut:
    """An option that the rehearsal changed."""

    key: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.key}: {in_few_words(self.before)} -> {in_few_words(self.after)}"


def in_few_words(value: object) -> str:
    """A value in a few words."""
    if isinstance(value, Config):
        return str(getattr(value, "type", type(value).__name__))
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def lower(config: Any, **limits: float) -> Changes:
    """The options of `config` that are above a limit, at this limit."""
    return {name: limit for name, limit in limits.items() if getattr(config, name) > limit}


# ---------------------------------------------------------------- models and engines


def cut_model(config: InitModel) -> Changes:
    """Two layers of width 128. The vocabulary and the context stay, since rows depend on them."""
    kv_heads = 4 if config.kv_heads == config.heads else 2
    shape = {
        "heads": 4,
        "kv_heads": kv_heads,
        "layers": min(2, config.layers),
    }
    # vLLM on a CPU needs heads of width 32.
    return shape | {"hidden_size": 128, "intermediate_size": 256}


def cut_runtime(config: RuntimeConfig) -> Changes:
    """One worker and one engine in this process's machine, without GPUs. DeepSpeed, Ray and vLLM stay."""
    one = {
        "train_workers": 1,
        "gpus_per_train_worker": 0,
        "gpus_per_engine": 0,
        "pools": {},
    }
    sampler = config.sampler
    if isinstance(sampler, VllmServerSamplerConfig):
        sampler = VllmSamplerConfig(max_model_len=sampler.max_model_len, kv_cache_gib=0.25, max_num_seqs=16)
    return {
        **one,
        "execution": "inline",
        "retries": 0,
        "time_limit_s": 0.0,
        "sampler": sampler,
    }


def cut_trainer(config: TrainerConfig) -> Changes:
    """Float32 with the attention that a CPU has."""
    parallel = {"sequence_parallel": 1, "tensor_parallel": 1}
    on_gpu = {
        "dtype": "float32",
        "fp32_reduce": False,
        "liger": False,
        "offload_optimizer": False,
        "sleep": False,
    }
    attention = "sdpa" if config.attention == "flash_attention_2" else config.attention
    return {
        **parallel,
        **on_gpu,
        "attention": attention,
        **lower(config, micro_batch=BATCH),
    }


def cut_vllm(config: VllmSamplerConfig) -> Changes:
    """One small engine."""
    one = {
        "engines": 1,
        "tensor_parallel": 1,
        "dtype": "float32",
        "enforce_eager": True,
        "sleep": False,
        "routed_experts": False,
    }
    return {**one, **lower(config, max_num_seqs=16, kv_cache_gib=0.25)}


def cut_lora(config: LoraConfig) -> Changes:
    """Adapters of the same modules on whole weights: 4-bit layers need a GPU."""
    return {"quantize": "", **lower(config, rank=8)}


# ---------------------------------------------------------------- training


def cut_loop(config: LoopConfig) -> Changes:
    """Two optimizer steps of small batches. Policies that are exported on the way are made at other steps."""
    once = {
        "epochs": 1,
        "max_steps": STEPS,
        "eval_every": 1,
        "checkpoint_every": 1,
    }
    return {**once, **lower(config, batch_size=BATCH)}


def cut_policy_optimization(config: PPOConfig) -> Changes:
    """Two steps, or one for each part of the schedule and for each policy that is exported."""
    steps = max(
        STEPS,
        len(config.schedule),
        len(config.exported_steps) + 1,
        config.staleness + 1,
    )
    least = config.advantage.least_group if isinstance(config.advantage, GroupAdvantage) else 1
    samples = min(config.samples_per_prompt, max(ANSWERS, least))
    found: dict[str, Any] = {
        "steps": steps,
        "samples_per_prompt": samples,
        "checkpoint_every": 1,
        "router_replay": False,
    }
    found |= lower(
        config,
        prompts_per_step=BATCH,
        minibatches=2,
        epochs=2,
    )
    found["minibatches"] = min(config.minibatches, 2, samples * min(config.prompts_per_step, BATCH))
    if config.exported_steps:
        found["export_every"] = 1
    found["value"] = config.value.model_copy(update=lower(config.value, warmup_steps=1))
    # Random weights make every monitor fire: they are evaluated, and only warn.
    found["monitors"] = tuple(one.model_copy(update={"action": "warn"}) for one in config.monitors)
    if isinstance(config.ahead, PartialRollouts):
        half = min(config.sampling.max_tokens, TOKENS) // 2
        found["ahead"] = config.ahead.model_copy(update={"tokens": half, "in_flight_groups": 0})
    return found


def cut_evaluation(config: EvaluateConfig) -> Changes:
    """Fewer answers to choose the best from."""
    return {"best_of": {name: min(count, 2) for name, count in config.best_of.items()}}


def cut_suite(config: HarnessSuite) -> Changes:
    """Two documents of each task."""
    return {"limit": STEPS}


# ---------------------------------------------------------------- data and answers


def cut_world(config: Any) -> Changes:
    """Fewer rows of a synthetic world."""
    tables = (name for name in type(config).model_fields if name.removeprefix("eval_") in TABLES)
    return lower(config, **dict.fromkeys(tables, ROWS))


TABLES = (
    "demonstrations",
    "preferences",
    "prompts",
    "steps",
)


def cut_sampling(config: SamplingConfig) -> Changes:
    """Short answers."""
    return lower(config, max_tokens=TOKENS)


def cut_schedule(config: SchedulePart) -> Changes:
    """One step of each part."""
    most = config.sampling.max_tokens
    sampling = config.sampling if most is None else ScheduledSampling(max_tokens=min(most, TOKENS))
    return {"steps": 1, "sampling": sampling.model_copy(update={"temperature": config.sampling.temperature})}


def cut_answers(config: Any) -> Changes:
    """Fewer answers to each prompt."""
    return lower(config, samples_per_prompt=ANSWERS)


def cut_scoring(config: ScoreConfig) -> Changes:
    """Differences too small to matter between answers of equal reward, so that a selection finds best answers and pairs."""
    if not config.rewards.terms:
        return {}
    tie = FunctionReward(function=f"{STAND_INS}:break_ties", weight=1e-6)
    terms = {**config.rewards.terms, "rehearsal": tie}
    return {
        "rewards": config.rewards.model_copy(
            update={
                "terms": terms,
                "composition": WeightedSum(),
                "clip": 0.0,
            }
        )
    }


def cut_selection(config: Any) -> Changes:
    """Selections that keep rows: random weights earn little, and do not end their answers."""
    found: dict[str, Any] = {}
    if isinstance(
        config,
        (
            Selection,
            ConditionConfig,
            ProposeComparisonsConfig,
            SynthesizeConfig,
        ),
    ):
        found["drop_truncated"] = False
    if isinstance(config, Threshold):
        found["minimum"] = -1e9
    if isinstance(config, Pairs):
        found["margin_threshold"] = 0.0
    if isinstance(config, PromptsInBand):
        found |= {"low": -1e9, "high": 1e9}
    if isinstance(config, SynthesizeConfig):
        # The output of random weights matches no pattern.
        found |= {} if config.server else {"pattern": ""}
        found |= {
            "min_characters": 1,
            "max_characters": 0,
            **cut_answers(config),
        }
    return found


def cut_collection(config: CollectPreferencesConfig) -> Changes:
    """Few comparisons of which some are held out: one simulated annotator, whose judgments all count."""
    found: dict[str, Any] = {"min_attention": 0.0}
    found["eval_fraction"] = max(config.eval_fraction, 0.5) if config.eval_fraction else 0.0
    if isinstance(config.annotator, ProgramAnnotator):
        found["annotator"] = config.annotator.model_copy(update={"annotators": 1, "tie_below": 0.0})
    return found


RULES: tuple[tuple[type | tuple[type, ...], Callable[[Any], Changes]], ...] = (
    (InitModel, cut_model),
    (RuntimeConfig, cut_runtime),
    (TrainerConfig, cut_trainer),
    (VllmSamplerConfig, cut_vllm),
    (LoraConfig, cut_lora),
    (LoopConfig, cut_loop),
    (PPOConfig, cut_policy_optimization),
    (PtxConfig, lambda config: lower(config, batch_size=BATCH)),
    (
        HeldOutConfig,
        lambda config: {
            "every": 1,
            "patience": 0,
            **lower(config, prompts=3),
        },
    ),
    (EvaluateConfig, cut_evaluation),
    (HarnessSuite, cut_suite),
    ((SupportWorld, ArithmeticWorld, InstructionsWorld), cut_world),
    (SamplingConfig, cut_sampling),
    (SchedulePart, cut_schedule),
    (GenerateConfig, cut_answers),
    (ScoreConfig, cut_scoring),
    (SuitePromptsConfig, lambda config: {"max_prompts": ANSWERS}),
    (ProposeComparisonsConfig, lambda config: lower(config, budget=8)),
    (CollectPreferencesConfig, cut_collection),
    (
        (
            Selection,
            PromptsInBand,
            ConditionConfig,
            ProposeComparisonsConfig,
            SynthesizeConfig,
        ),
        cut_selection,
    ),
)
"""Classes of options, and the options that a rehearsal changes there."""


# ---------------------------------------------------------------- the whole profile


@dataclass
class Cutter:
    """Applies the rules to all options of a profile, and notes the changes.

    `replace` exchanges whole options: pretrained models, and servers, which need more than their options.
    """

    replace: Callable[[Any, str], Any]
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of policies that are exported at steps, and their names in the rehearsal."""
    cuts: list[Cut] = field(default_factory=list)

    def __call__(self, value: Any, key: str) -> Any:
        """The value of an option with all options below it cut."""
        if isinstance(value, Config):
            return self.replace(self._cut_options(value, key), key)
        if isinstance(value, dict):
            return {self.names.get(name, name): self(one, dotted(key, str(name))) for name, one in value.items()}
        if isinstance(value, tuple):
            return tuple(self(one, f"{key}[{at}]") for at, one in enumerate(value))
        return self.names.get(value, value) if isinstance(value, str) else value

    def _cut_options(self, config: Config, key: str) -> Config:
        options = {name: getattr(config, name) for name in type(config).model_fields}
        below = {name: self(value, dotted(key, name)) for name, value in options.items()}
        cut = config.model_copy(update={name: value for name, value in below.items() if value != options[name]})
        for kind, rule in RULES:
            if isinstance(cut, kind):
                changes = {name: value for name, value in rule(cut).items() if value != getattr(cut, name)}
                for name, value in changes.items():
                    self.cuts += changed_options(dotted(key, name), options[name], value)
                cut = cut.model_copy(update=changes)
        return cut


def changed_options(key: str, before: Any, after: Any) -> Iterator[Cut]:
    """Yield the options that differ, below options of the same kind each by its own key."""
    if isinstance(before, Config) and type(before) is type(after):
        before = {name: getattr(before, name) for name in type(before).model_fields}
        after = {name: getattr(after, name) for name in before}
    if isinstance(before, dict) and isinstance(after, dict):
        for name, value in after.items():
            yield from changed_options(dotted(key, str(name)), before.get(name), value)
    elif before != after:
        yield Cut(key, before, after)


def dotted(key: str, name: str) -> str:
    """The key of an option below another one."""
    return f"{key}.{name}" if key else name


def exported_names(config: PipelineConfig) -> dict[str, str]:
    """The names of policies that trainings export on their way, and their names after the cut: a step apart."""
    found: dict[str, str] = {}
    for node in config.steps():
        # A step of rounds is `policy` in its round and `rounds.policy` outside.
        for name in (node.label, node.label.rpartition("/")[2], *node.names):
            found |= {f"{name}_{step}": f"{name}_{at}" for at, step in enumerate(node.exported, start=1)}
    return found


def cut_profile(config: PipelineConfig, replace: Callable[[Any, str], Any]) -> tuple[PipelineConfig, list[Cut]]:
    """The profile as the rehearsal runs it, and the options that differ.

    Gates, the budget and further trackers are left out: the numbers of random weights decide nothing.
    """
    cutter = Cutter(replace, exported_names(config))
    cut = cutter(config, "")
    outside: dict[str, Any] = {
        "store": "",
        "gates": (),
        "budget": BudgetConfig(),
        "notify": None,
    }
    outside["track"] = TrackConfig()
    changed = {name: value for name, value in outside.items() if getattr(config, name) != value}
    cutter.cuts += [Cut(name, getattr(config, name), value) for name, value in changed.items()]
    cut = cut.model_copy(update=outside)
    for node in config.steps():
        if node.exported and hasattr(node.config, "loop"):
            cut = with_steps(cut, node.path, len(node.exported) + 1)
    assert isinstance(cut, PipelineConfig)
    return cut, cutter.cuts


def with_steps(
    config: Any,
    path: str,
    steps: int,
) -> Any:
    """The profile with so many steps of the training at `path`, after each of which but the last it exports a policy."""
    name, _, rest = path.partition(".")
    inner = config[name] if isinstance(config, dict) else getattr(config, name)
    if rest:
        inner = with_steps(inner, rest, steps)
    else:
        loop = inner.loop.model_copy(update={"max_steps": steps})
        inner = inner.model_copy(update={"loop": loop, "export_every": 1})
    return config | {name: inner} if isinstance(config, dict) else config.model_copy(update={name: inner})


def simulate_people(config: Any) -> Any:
    """A program in place of people; any other annotator unchanged."""
    if isinstance(config, (FileAnnotator, ReviewAnnotator)):
        return ProgramAnnotator(function=f"{STAND_INS}:break_ties")
    return config
