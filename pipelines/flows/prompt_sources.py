"""Check the sources named in the options of steps against the sources of the data, before anything runs."""

from collections.abc import Mapping, Sequence

from pipelines.flows.nodes import PARTS, Node, listed, prepared_part
from pipelines.flows.sections import EvaluationConfig
from rlhf_core.config.data import HELD_OUT_INSTRUCTIONS, DataConfig, Files, InstructionsWorld, MixedWorlds
from rlhf_core.config.policy import PPOConfig
from rlhf_core.config.rewards import check_sources
from rlhf_core.errors import ConfigError, nearest
from stages.distill import DistillConfig
from stages.evaluate_harness import HarnessSuite
from stages.generate import GenerateConfig
from stages.mix import MixConfig
from stages.prepare_data import PrepareDataConfig
from stages.score import ScoreConfig


def check_step_sources(steps: Sequence[Node], data: DataConfig, evaluate: EvaluationConfig | None) -> None:
    """Raise ConfigError for a source that no prompt of a step can have, and for one without a reward, teacher or agent.

    Steps whose prompts come from outside of the run are left out; they check their own.
    """
    made = {name: step for step in steps for name in step.made}
    for step in steps:
        check_mix(step, made, data)
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


def check_mix(step: Node, made: Mapping[str, Node], data: DataConfig) -> None:
    """Raise ConfigError for a source that no row of the mixed tables has."""
    if not isinstance(step.config, MixConfig):
        return
    found = [sources_of(table, made, data) for table in listed(step.inputs["tables"])]
    if any(one is None for one in found):  # rows from outside of the run, whose sources the stage checks
        return
    known = {source for one in found if one is not None for source in one[0]}
    table = step.path.rpartition(".")[0] if step.mixes_input else step.path
    for option in ("sources", "mixture", "chat_template", "chat_template_kwargs"):
        given = getattr(step.config, option)
        for name in given:
            if name not in known:
                key, shown = (f"{option}.{name}", given[name]) if isinstance(given, Mapping) else (option, name)
                rule = f"no row of {', '.join(listed(step.inputs['tables']))} has this source"
                raise ConfigError(f"{table}.{key}", shown, rule, nearest(name, sorted(known)))


def sources_of(name: str, made: Mapping[str, Node], data: DataConfig) -> tuple[set[str], bool] | None:
    """Sources that the prompts or demonstrations called `name` may have, and whether all of them are there.

    None if the profile does not decide them. Steps on the way may leave out all rows of a source.
    """
    if name in PARTS:
        return data_sources(data, name), True
    if name not in made:
        return None
    config, inputs = made[name].config, made[name].inputs
    if isinstance(config, PrepareDataConfig):
        return data_sources(config.data, prepared_part(name)[1]), True

    # Any other step has the sources of the rows that it reads.
    kinds = ("tables", "rollouts", "pool", "generations", "prompts")
    before = next((inputs[kind] for kind in kinds if kind in inputs), "")
    found = [sources_of(one, made, data) for one in listed(before)]
    known = [one for one in found if one is not None]
    if not known or len(known) < len(found):
        return None
    sources = {source for one, _ in known for source in one}
    if isinstance(config, MixConfig):
        return sources & (set(config.sources or config.mixture) or sources), all(whole for _, whole in known)
    # Of the others only two keep all of the rows.
    answers_all = isinstance(config, GenerateConfig) and not config.max_prompts
    return sources, (isinstance(config, ScoreConfig) or answers_all) and known[0][1]


def data_sources(data: DataConfig, table: str) -> set[str]:
    """Sources that the rows of a table of the prepared data may have.

    >>> data_sources(InstructionsWorld(), "prompts")
    {'instructions/seen'}
    """
    match data:
        case Files():
            return {source.name for source in data.sources if getattr(source.use, table)}
        case MixedWorlds():
            return {source for world in data.worlds for source in data_sources(world, table)}
        case InstructionsWorld():
            ends = HELD_OUT_INSTRUCTIONS if table == "eval_prompts" else ("seen",)
            return {f"{data.type}/{end}" for end in ends}
        case _:
            return {data.type}
