"""Check the sources that the options of steps name against those of the data, before anything runs."""

from collections.abc import Mapping, Sequence

from pipelines.flows.recipe import PARTS, Step, listed
from pipelines.flows.sections import EvaluationConfig
from rlhf_core.config.data import DataConfig, Files, InstructionsWorld, MixedWorlds
from rlhf_core.config.policy import PPOConfig
from rlhf_core.config.rewards import check_sources
from rlhf_core.errors import ConfigError, nearest
from stages.config.distill import DistillConfig
from stages.config.evaluate_harness import HarnessSuite
from stages.config.generate import GenerateConfig
from stages.config.score import ScoreConfig


def check_step_sources(steps: Sequence[Step], data: DataConfig, evaluate: EvaluationConfig | None) -> None:
    """Raise ConfigError for a source that no prompt of a step can have, and for one without a reward, teacher or agent.

    Steps whose prompts come from outside of the run are left out; they check their own.
    """
    made = {name: step for step in steps for name in step.made}
    for step in steps:
        read = "demonstrations" if isinstance(step.config, DistillConfig) and not step.config.on_policy else "prompts"
        read = "generations" if step.stage == "score" else read
        found = sources_of(str(step.inputs.get(read, "")), made, data)
        for key, config in {"": step.config, **dict(step.config)}.items() if found else ():
            check_config(config, *(found or (set(), False)), key=f"{step.path}.{key}".rstrip("."))
    if evaluate is None:
        return
    evaluate.generate.check_agents(data_sources(data, "eval_prompts"), key="evaluate.generate")
    for suite in evaluate.suites:  # the slices of a suite's own prompts are their sources
        if isinstance(suite, HarnessSuite) or suite.prompts is None or suite.prompts.slice:
            continue
        key = f"evaluate.suites.{suite.name}.generate"
        if suite.generate:
            suite.generate.check_agents({"all"}, key=key)
        elif any(agent.sources for agent in evaluate.generate.by_key.values()):
            rule = "the agents of evaluate.generate play sources that the prompts of this suite lack"
            raise ConfigError(key, None, rule, "give the suite a generate of its own")


def check_measured_sources(metrics: Mapping[str, str], data: DataConfig) -> None:
    """Raise ConfigError for a number of the report, by the key that names it, of a source that no held-out prompt has."""
    known = data_sources(data, "eval_prompts")
    for key, metric in metrics.items():
        _, named, number = f"/{metric}".partition("/sources/")
        if named and not any(number.startswith(f"{source}/") for source in known):
            rule = "no held-out prompt has this source"
            raise ConfigError(key, metric, rule, nearest(number.partition("/")[0], sorted(known)))


def check_config(config: object, sources: set[str], present: bool, *, key: str) -> None:
    """Raise ConfigError for a source in the options of a stage that is none of `sources`, or if `present` that they leave out."""
    used = sources if present else set[str]()
    match config:
        case PPOConfig():
            config.sources_used(sources, key=key, present=present)
        case DistillConfig():
            config.check_sources(used, known=sources, key=key)
        case GenerateConfig():
            config.check_agents(sources, key=key)
        case ScoreConfig():
            check_sources(config.rewards, used, known=sources, key=f"{key}.rewards")


def sources_of(name: str, made: Mapping[str, Step], data: DataConfig) -> tuple[set[str], bool] | None:
    """Return the sources that the prompts or demonstrations called `name` may have, and whether all of them are there.

    None if the profile does not decide them. Steps on the way may leave out all rows of a source.
    """
    if name in PARTS:
        return data_sources(data, name), True
    if name not in made:
        return None
    config, inputs = made[name].config, made[name].inputs
    before = next((inputs[kind] for kind in ("rollouts", "generations", "prompts") if kind in inputs), "")
    found = sources_of("".join(listed(before)), made, data)
    whole = isinstance(config, ScoreConfig) or (isinstance(config, GenerateConfig) and not config.max_prompts)
    return found and (found[0], found[1] and whole)


def data_sources(data: DataConfig, table: str) -> set[str]:
    """Return the sources that the rows of a table of the prepared data may have.

    >>> data_sources(InstructionsWorld(), "prompts")
    {'instructions/seen'}
    """
    match data:
        case Files():
            return {source.name for source in data.sources if getattr(source.use, table)}
        case MixedWorlds():
            return {source for world in data.worlds for source in data_sources(world, table)}
        case InstructionsWorld():
            from rlhf_core.data.worlds.instructions import SOURCES  # pyarrow, which other plans do without

            ends = SOURCES if table == "eval_prompts" else ("seen",)
            return {f"{data.type}/{end}" for end in ends}
        case _:
            return {data.type}
