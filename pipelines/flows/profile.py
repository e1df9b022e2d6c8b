"""Define the configuration of a pipeline run, and load it from a TOML profile.

A section that a profile leaves out switches that part of the pipeline off. A profile may extend another one: `extends =
"full.toml"` (a relative path) or `"tiny/full"` (a shipped profile). Tables are merged, everything else is replaced, and
`"none"` removes a key of any table; a misspelt one is an error. A table with another `type` keeps nothing of the other
profile's; a step with another `stage` has to give its inputs again. Where the other profile has a list of tables
(`[[gates]]`), a table changes or removes the entries that its keys name (`[gates]`, `quality = "none"`).
"""

from __future__ import annotations

import ast
import copy
import difflib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, TypeGuard, get_origin

from pydantic import ValidationError, model_validator

from pipelines.flows.nodes import Node
from pipelines.flows.profile_errors import check_removal, fields_of, first_error, models_at, shown_value
from pipelines.flows.profile_paths import relative_to_profile
from pipelines.flows.prompt_sources import check_measured_sources, check_step_sources
from pipelines.flows.recipe import GraphConfig
from pipelines.flows.run_rules import (
    BudgetConfig,
    DeploymentsConfig,
    GateConfig,
    NotifyConfig,
    ProjectConfig,
    TrackConfig,
)
from pipelines.flows.sections import POLICY_SECTIONS, DistillationConfig, EvaluationConfig
from rlhf_core.config.former_names import FORMER, renamed
from rlhf_core.config.monitors import is_named, remedy_of
from rlhf_core.errors import ConfigError, nearest
from rlhf_core.schema.base import OPERATIONAL, OTHER_SPELLING, added_option, as_written, by_type, tag_of
from rlhf_core.store.fingerprint import sha256_text
from rlhf_core.store.layout import read_regular
from rlhf_core.types import CHAMPION, PolicyRef, encodable
from stages.evaluate import policy_numbers
from stages.evaluate_suite import JudgeSuite
from stages.publish import PublishConfig
from stages.sft import SFTConfig


class PipelineConfig(GraphConfig):
    """The configuration of a pipeline run."""

    evaluate: EvaluationConfig | None = None
    publish: PublishConfig | None = None
    gates: Annotated[tuple[GateConfig, ...], OPERATIONAL] = added_option(())
    """Conditions on finished stages that block the stages after them."""
    budget: Annotated[BudgetConfig, OPERATIONAL] = added_option(BudgetConfig())
    notify: Annotated[NotifyConfig | None, OPERATIONAL] = added_option(None)
    """Notification when a run has ended or waits."""
    track: Annotated[TrackConfig, OPERATIONAL] = added_option(TrackConfig())
    deployments: Annotated[DeploymentsConfig, OPERATIONAL] = added_option(DeploymentsConfig())
    project: Annotated[ProjectConfig, OPERATIONAL] = added_option(ProjectConfig())

    @property
    def experiment(self) -> str:
        """Name of the experiment in MLflow."""
        return f"{self.project.name}/{self.name}" if self.project.name else self.name

    @model_validator(mode="after")
    def _check_gate_names(self) -> PipelineConfig:
        names = [gate.title for gate in self.gates]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise ValueError(
                    f"gates[{index}].name = {name!r}: is the name of two gates; give this one another name"
                )
        return self

    @model_validator(mode="after")
    def _check_starts(self) -> PipelineConfig:
        if self.import_reward_model is not None and self.reward_model is not None:
            raise ValueError(
                "import_reward_model = {...}: takes the place of [reward_model]; remove one of the two sections"
            )
        for section in ("dpo", "iterative_dpo", "online", "ppo", "distill"):
            config = getattr(self, section)
            if config and config.start_from != "base" and getattr(self, config.start_from) is None:
                raise ValueError(
                    f"{section}.start_from = {config.start_from!r}: the profile has no [{config.start_from}]; "
                    "add that section or start from 'base'"
                )
        steps = self.steps()
        for step in steps:
            self._check_windows(step)
        check_step_sources(steps, self.prepare_data.data, self.evaluate)
        judged = {f"gates.{one.title}.metric": one.metric for one in self.gates if one.after == "evaluate"}
        checks = self.publish.gate if self.publish else ()
        judged |= {f"publish.gate[{at}].metric": one.metric.replace(".", "/") for at, one in enumerate(checks)}
        check_measured_sources(judged, self.prepare_data.data)
        if self.distill is not None:
            self._check_teachers(self.distill)
        if self.evaluate is not None:
            reference = self.evaluate.evaluate.reference
            if reference not in self.policies():
                raise ValueError(
                    f"evaluate.evaluate.reference = {reference!r}: this profile makes {', '.join(self.policies())}; "
                    "name one of them"
                )
            self._check_candidates(self.evaluate)
            self._check_compared(self.evaluate)
        if self.online is not None and self.reward_model is None and self.import_reward_model is None:
            raise ValueError(
                "online = {...}: its first round scores answers with a reward model; add [reward_model] or "
                "[import_reward_model]"
            )
        if self.publish is not None:
            if self.evaluate is None:
                raise ValueError("publish = {...}: its gate reads the report of [evaluate]; add that section")
            self._check_gates(self.publish, self.evaluate)
            if self.publish.policy not in ("", *self.policies()):
                raise ValueError(
                    f"publish.policy = {self.publish.policy!r}: this profile makes {', '.join(self.policies())}; "
                    "name one of them"
                )
        return self

    def _check_windows(self, step: Node) -> None:
        """Raise ValueError if a step uses windows and no document can be longer than one window."""
        config, longest = step.config, self.prepare_data.max_tokens
        reads_data = isinstance(config, SFTConfig) and step.inputs["demonstrations"] == "demonstrations"
        if isinstance(config, SFTConfig) and reads_data and config.window_overlap and longest <= config.max_length:
            rule = f"prepare_data.max_tokens = {longest} drops documents that are longer than a window ({config.max_length})"
            raise ValueError(f"{step.path}.window_overlap = {config.window_overlap}: {rule}; raise max_tokens")

    def _check_teachers(self, distill: DistillationConfig) -> None:
        """Raise ValueError for a teacher that no section makes, and for a teacher that is also the student."""
        for name in distill.sections():
            key = (
                f"distill.teachers.{name} = {distill.teachers[name]}"
                if distill.teachers
                else f"distill.teacher = {name!r}"
            )
            if name not in self.policies():
                raise ValueError(f"{key}: the profile has no [{name}]; add that section or name another policy")
            if name == distill.start_from:
                raise ValueError(f"{key}: the student starts from the same policy; name another policy")

    def _check_candidates(self, evaluate: EvaluationConfig) -> None:
        """Raise ValueError for a baseline named like a policy or a stage, and for a missing opponent of a judge."""
        taken = [*self.policies(), CHAMPION, "parent", "suites", "prompts"]
        for index, baseline in enumerate(evaluate.baselines):
            if baseline.name in taken:
                raise ValueError(
                    f"evaluate.baselines[{index}].name = {baseline.name!r}: is a name of the pipeline; give it another"
                )
        known = ["parent", CHAMPION, *self.policies(), *(baseline.name for baseline in evaluate.baselines)]
        for index, suite in enumerate(evaluate.suites):
            if not isinstance(suite, JudgeSuite):
                continue
            key = f"evaluate.suites[{index}].against = {suite.against!r}"
            if suite.against not in known:
                raise ValueError(f"{key}: there is no such policy; name one of {', '.join(known)}")
            if suite.against == CHAMPION and (self.publish is None or self.publish.challenge is None):
                raise ValueError(f"{key}: only a run with [publish.challenge] reads the champion; add that section")

    def _check_compared(self, evaluate: EvaluationConfig) -> None:
        """Raise ValueError for a name in `parents` or `best_of` that no policy has, and for a parent that is not made.

        Entries of a policy whose section or round was removed may stay: it is not compared.
        """
        made, compared = self._evaluated(), evaluate.evaluate
        sections = [name for name in POLICY_SECTIONS if name != "online"]  # whose policies are online_1, online_2, ...
        known = list(dict.fromkeys([*made, *sections]))
        rounds = "|".join(["online", *(name for name, step in self.recipe.items() if step.stage == "online")])
        named = [(f"best_of.{name}", name, known) for name in compared.best_of]
        for ours, theirs in compared.parents.items():
            named.append((f"parents.{ours}", ours, known))
            named.append((f"parents.{ours}", theirs, made if ours in made else known))
        for key, name, allowed in named:
            if name not in allowed and not (allowed is known and re.fullmatch(rf"({rounds})_\d+", name)):
                near = nearest(name, allowed)
                raise ValueError(f"evaluate.evaluate.{key} = {name!r}: this profile makes no such policy; {near}")

    def _check_gates(self, publish: PublishConfig, evaluate: EvaluationConfig) -> None:
        """Raise ValueError for a gate that reads a number, or compares with a policy, that the report will not have."""
        made = self._evaluated()
        known = [*made, *(f"best-of-{n} ({name})" for name, n in evaluate.evaluate.best_of.items() if name in made)]
        numbers = policy_numbers(
            gold=bool(evaluate.evaluate.gold),
            reward_model=bool(self.judge()),
            champion=publish.challenge is not None,
        )
        for index, threshold in enumerate(publish.gate):
            if threshold.than and threshold.than not in known:
                rule = f"the report has no such policy; {nearest(threshold.than, known)}"
                raise ValueError(f"publish.gate[{index}].than = {threshold.than!r}: {rule}")
            if not is_named(threshold.metric.replace(".", "/"), [*numbers, *(f"sources/*/{one}" for one in numbers)]):
                rule = f"the report has no such number of a policy; {remedy_of(threshold.metric, numbers)}"
                raise ValueError(f"publish.gate[{index}].metric = {threshold.metric!r}: {rule}")
        if publish.challenge is not None and f"{publish.challenge.metric}/mean" not in numbers:
            remedy = "set evaluate.evaluate.gold" if publish.challenge.metric == "gold" else "train a reward model"
            rule = f"answers are not judged by it; {remedy}, or choose another metric"
            raise ValueError(f"publish.challenge.metric = {publish.challenge.metric!r}: {rule}")

    def _evaluated(self) -> list[str]:
        challenged = self.publish is not None and self.publish.challenge is not None
        return [*self.policies(), *([CHAMPION] if challenged else [])]

    def published(self) -> str:
        """The published policy: the configured one, or the last policy from which no other is made."""
        if self.publish is not None and self.publish.policy:
            return self.publish.policy
        makers = [step for step in self.steps() if step.output is PolicyRef] if self.recipe or self.rounds else []
        read = {name for step in makers for name in step.reads_names()}
        return ([name for name in self.policies() if name not in read] or self.policies())[-1]


# ---------------------------------------------------------------- loading

POLICY_TABLES = (("ppo",), ("online", "ppo"))
"""Tables whose options may have their former names."""
NAMES = ("name", "title", "after", "metric", "type", "path")
"""Keys that name an entry of a list of tables; the first one that it has counts."""


def load_profile(profile: str | Path, overrides: Sequence[str] = ()) -> PipelineConfig:
    """Load the configuration of a profile, by path or shipped name, with `dotted.key=value` overrides.

    >>> load_profile("tiny/full", ["ppo.kl.coef=0.1"]).ppo.kl.coef
    0.1
    """
    return parse(profile_table(profile, overrides), origin=str(profile))


def profile_table(profile: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read the table of a profile, merged with the profiles that it extends, and with overrides."""
    return with_overrides(_read_tree(find_profile(profile), seen=()), overrides)


def parse(tree: Mapping[str, Any], *, origin: str) -> PipelineConfig:
    """Parse the table of a profile; errors name the dotted key, the rule and the remedy."""
    try:
        return PipelineConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(first_error(error, tree, PipelineConfig, origin=origin)) from None


def with_overrides(table: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply `dotted.key=value` changes to the table of a profile. Raises ConfigError for an impossible change."""
    tree = copy.deepcopy(dict(table))
    for override in overrides:
        _apply(tree, override)
    return _without_removed_steps(table, tree)


def profile_digest(config: PipelineConfig) -> str:
    """Digest of a configuration, which tells configurations of the same name apart."""
    return sha256_text(config.model_dump_json())


def find_profile(profile: str | Path) -> Path:
    """Find the file of a profile: a path, or the name of a shipped one such as `tiny/full`."""
    name = str(profile)
    for candidate in _candidates(name, Path()):
        if _is_file(candidate):
            return candidate
    raise ConfigError(f"profile = {name!r}: no such file or shipped profile; {_nearest_profile(name, Path())}")


def _candidates(name: str, folder: Path) -> list[Path]:
    return [place / one for place in (folder, shipped_profiles()) for one in (name, f"{name}.toml")]


def _nearest_profile(name: str, folder: Path) -> str:
    """Suggest the profile that was probably meant, from `folder` or the shipped ones; else list all shipped ones."""
    place, stem, shipped = Path(name).parent, name.removesuffix(".toml"), profile_names()
    beside = {
        str(place / path.stem): str(place / path.name)
        for path in (folder / place).glob("*.toml")
        if path.stem != "pyproject"
    }
    near = [beside[one] for one in difflib.get_close_matches(stem, beside, n=1)]
    near += difflib.get_close_matches(stem, shipped, n=1, cutoff=0.5)
    near += beside.values() if len(beside) == 1 else ()
    return f"did you mean {near[0]}?" if near else f"the shipped profiles are {', '.join(shipped)}"


def shipped_profiles() -> Path:
    """Folder of the shipped profiles."""
    return shipped("profiles")


def shipped(name: str) -> Path:
    """A folder that is shipped with the code: inside the installed package, or at the root of a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / name
    return inside if inside.is_dir() else package.parent / name


def profile_names() -> list[str]:
    """Names of the shipped profiles, such as `tiny/full`."""
    root = shipped_profiles()
    return sorted(str(path.relative_to(root).with_suffix("")) for path in root.rglob("*.toml"))


def _read_tree(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    path = Path(os.path.realpath(path))
    if path in seen:
        raise ConfigError(
            f"extends = {path.name!r}: {' -> '.join(p.name for p in (*seen, path))} is a cycle; remove one of these `extends`"
        )
    try:
        tree = _parse_toml(read_regular(path).removeprefix("\ufeff"))  # editors on Windows begin files with it
    except FileNotFoundError:
        folder = seen[-1].parent
        named, rule = os.path.relpath(path, folder), f"there is neither such a file, relative to {folder}"
        remedy = _nearest_profile(named, folder)
        raise ConfigError(f"extends = {named!r}: {rule}, nor a shipped profile of that name; {remedy}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}; a profile is a TOML file in UTF-8") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}; strings are quoted, tables are [in.brackets]") from None
    if not path.is_relative_to(shipped_profiles()) and path.parent != Path.cwd():
        tree = relative_to_profile(tree, path.parent)
    if "extends" not in tree:
        return _with_current_names(tree, below={})
    named = tree.pop("extends")
    if not isinstance(named, str) or "\0" in named:
        remedy = f"give the path of a profile, or a shipped one: {', '.join(profile_names())}"
        raise ConfigError(f"extends = {shown_value('extends', named)}: must be the name of a file; {remedy}")
    base = _read_tree(next(filter(_is_file, _candidates(named, path.parent)), path.parent / named), (*seen, path))
    return _without_removed_steps(base, _merge(base, _with_current_names(tree, below=base)))


def _without_removed_steps(before: Mapping[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    """Remove entries of `evaluate` on the policies of steps that were there `before` and have been removed."""
    removed = "|".join(map(re.escape, _table_at(before, ["recipe"]).keys() - _table_at(tree, ["recipe"]).keys()))
    compared = dict(_table_at(tree, ["evaluate", "evaluate"]))
    for kind in {"parents", "best_of"} & compared.keys() if removed else ():
        entries = _table_at(compared, [kind]).items()
        compared[kind] = {name: one for name, one in entries if not re.fullmatch(rf"({removed})(_\d+)?", name)}
        tree = tree | {"evaluate": tree["evaluate"] | {"evaluate": compared}}
    return tree


def _with_current_names(tree: dict[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    """Rename former keys of a profile, or of changes to the profile `below`, to their current names."""
    for *above, last in policy_tables(tree):
        tables, under = _table_at(tree, above), _table_at(below, above)
        if isinstance(tables.get(last), Mapping):
            try:
                tables[last] = renamed(tables[last], _table_at(under, [last]))
            except ValueError as error:
                raise ConfigError(f"{'.'.join([*above, last])}.{error}") from None
    return tree


def policy_tables(tree: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The places where a profile has the options of policy optimization."""
    recipe = [("recipe", name) for name in _table_at(tree, ["recipe"])]
    return [*POLICY_TABLES, *recipe, *((*step, "ppo") for step in recipe)]


def _table_at(tree: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree if isinstance(tree, Mapping) else {}


def _parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML text. Raises ValueError if it is invalid or exceeds the parser's limits."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name too long for the file system
        return False


def _merge(base: Mapping[Any, Any], changes: Mapping[Any, Any], path: tuple[str, ...] = ()) -> dict[Any, Any]:
    merged = dict(base)
    for written, value in changes.items():
        key = _spelled_as_below(written, path, base)
        here = (*path, str(key))
        before = _as_table(merged.get(key), here)
        if value == "none":
            _remove(merged, key, here)
        elif isinstance(value, Mapping) and _is_table_list(before):
            merged[key] = _merge_list(before, value, here)
        elif isinstance(value, Mapping):
            if not before and value:
                _check_entries(here, [*value][:1], value)
            known = before if isinstance(before, Mapping) else {}
            if _of_another_type(known, value):
                _check_other_stage(known, value, here)
                known = {}
            merged[key] = _merge(known, value, here)
        else:
            merged[key] = value
    return merged


def _remove(table: dict[Any, Any], key: Any, path: Sequence[str]) -> None:
    if key in table:
        del table[key]
    else:
        check_removal(path, table, PipelineConfig)


def _is_table_list(value: Any) -> TypeGuard[list[Mapping[str, Any]]]:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, Mapping) for entry in value)


def _merge_list(entries: Sequence[Mapping[str, Any]], changes: Mapping[str, Any], path: tuple[str, ...]) -> list[Any]:
    """Apply changes to a list of tables, by the names of its entries. Raises ConfigError for an unknown name."""
    changed = {_entry(entries, [name], value, ".".join(path))[0]: value for name, value in changes.items()}
    return list(_merge(dict(enumerate(entries)), changed, path).values())


def _entry(entries: Sequence[Mapping[str, Any]], keys: Sequence[str], value: Any, dotted: str) -> tuple[int, int]:
    """Index of the entry that the first keys select by name or by position, and the number of keys in its name."""
    names = [entry_name(entry) for entry in entries]
    for used in range(len(keys), 0, -1):
        if names.count(".".join(keys[:used])) == 1:
            return names.index(".".join(keys[:used])), used
    name = keys[0]
    if name.isdecimal() and int(name) < len(entries):
        return int(name), 1
    rule, remedy = "no entry of the list has this name", nearest(name, names)
    if name in names:
        places = [f"{dotted}.{place}" for place, other in enumerate(names) if other == name]
        rule, remedy = "several entries have this name", f"give the place of one: {', '.join(places)}"
    raise ConfigError(f"{dotted}.{'.'.join(keys)} = {shown_value(keys[-1], value)}: {rule}; {remedy}")


def entry_name(entry: Mapping[str, Any]) -> str:
    """Name of an entry of a list of tables, such as a gate; "" if it has none."""
    key = _name_key(entry)
    return as_written(str(entry[key])) if key else ""


def _name_key(entry: Mapping[str, Any]) -> str:
    return next((key for key in NAMES if entry.get(key)), "")


def _with_name(value: Any, before: Mapping[str, Any]) -> Any:
    """A new entry of a list, under the name of the one before if it gives none."""
    key = _name_key(before)
    return {key: before[key], **value} if isinstance(value, Mapping) and key else value


def _check_entries(place: Sequence[str], named: Sequence[str], value: Any) -> None:
    """Raise ConfigError for a name of an entry in an option that is a list of tables, and has none."""
    kinds = [fields_of(one).get(place[-1]) for one in models_at(place[:-1], PipelineConfig)]
    if any(kind is not None and get_origin(kind.annotation) is tuple for kind in kinds):
        dotted, remedy = ".".join(place), f"give one with all its keys as [[{'.'.join(place)}]]"
        shown = shown_value(named[-1], value)
        raise ConfigError(f"{dotted}.{'.'.join(named)} = {shown}: the list has no entries yet; {remedy}")


def _as_table(value: Any, keys: Sequence[str]) -> Any:
    """Expand a bare name to the table that it stands for: `loss = "ipo"` is `loss = {type = "ipo"}`; else the value."""
    if isinstance(value, str) and any(tag_of(one)[0] == "type" for one in models_at(keys, PipelineConfig)):
        return by_type(value)
    return value


def _spelled_as_below(key: Any, path: Sequence[str], below: Mapping[Any, Any]) -> Any:
    """An option under the spelling, former or present, that the table below has; names chosen by users stay."""
    other = OTHER_SPELLING.get(key, key)
    if key in below or other not in below:
        return key
    return other if any({key, other} & one.model_fields.keys() for one in models_at(path, PipelineConfig)) else key


def _of_another_type(table: Mapping[str, Any], changes: Mapping[str, Any]) -> bool:
    """Whether `changes` select another `type` or `stage`: the options of the previous one do not apply to it."""
    return any(tag in changes and tag in table and changes[tag] != table[tag] for tag in ("type", "stage"))


def _check_other_stage(step: Mapping[str, Any], changes: Mapping[str, Any], path: Sequence[str]) -> None:
    """Raise ConfigError for a step that becomes another stage, if the other profile gave inputs or options of it, too."""
    stage = changes.get("stage")
    kinds = [one for one in models_at(path, PipelineConfig) if ("stage", (stage,)) == tag_of(one)]
    lost = [
        key for key in step if key != "stage" and key not in changes and any(key in fields_of(one) for one in kinds)
    ]
    if lost:
        rule = f"nothing of the stage {step['stage']!r} that the extended profile has here is kept"
        remedy = f"""give {", ".join(lost)} here, too, or "none" for their defaults"""
        raise ConfigError(f"{'.'.join(path)}.stage = {stage!r}: {rule}; {remedy}")


def _apply(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    key, text = key.strip(), text.strip()
    if not separator or not key:
        raise ConfigError(f"--set {shown_value('', override)}: must read key=value; for example --set ppo.kl.coef=0.1")
    if encodable(override) != override:
        raise ConfigError(f"--set {shown_value('', override)}: must be valid UTF-8; type it again")
    value = _value(key, text)
    keys = _keys(key)
    if any(
        keys[: len(path)] == [*path] and set(keys[len(path) : len(path) + 1]) & FORMER.keys()
        for path in policy_tables(tree)
    ):
        layer = reduce(lambda inner, name: {name: inner}, reversed(keys), value)
        tree.update(_merge(tree, _with_current_names(layer, below=tree)))
        return
    _set(tree, keys, value)


def _keys(dotted: str) -> list[str]:
    """Split a dotted key into its parts, some of which may be quoted as in TOML.

    >>> _keys('gates."v1.2 final".value')
    ['gates', 'v1.2 final', 'value']
    """
    if not {'"', "'"} & {*dotted}:
        return dotted.split(".")
    try:
        keys, tree = list[str](), _parse_toml(f"{dotted} = 0")
    except ValueError as error:
        raise ConfigError("--set", dotted, f"is no key: {error}", "close its quotes, or leave them out") from None
    while isinstance(tree, dict):
        [(key, tree)] = tree.items()
        keys.append(key)
    return keys


def _set(tree: Any, keys: Sequence[str], value: Any) -> None:
    """Set the value of a key in place, or remove it if it is "none"; entries of lists are reached by name or place."""
    key: Any
    dotted, at, option = ".".join(keys), 0, tuple[str, ...]()  # `option` has the places of entries for their names
    while True:
        in_list = isinstance(tree, list)
        key, used = _entry(tree, keys[at:], value, ".".join(keys[:at])) if in_list else (keys[at], 1)
        at, option = at + used, (*option, str(key))
        if at == len(keys):
            break
        if value == "none" and not in_list and key not in tree:
            return check_removal((*option, *keys[at:]), {}, PipelineConfig)  # and nothing is created
        known = tree[key] if in_list or tree.get(key) is not None else {}  # a dump in JSON names absent sections, too
        tree[key] = inner = _as_table(known, option)
        if not isinstance(inner, (dict, list)) or (inner and not isinstance(inner, dict) and not _is_table_list(inner)):
            rule = f"{keys[at - 1]} is a value, not a table, and has no keys; remove what follows it"
            raise ConfigError(f"{dotted} = {shown_value(dotted, value)}: {rule}")
        if not inner:
            _check_entries(option, keys[at:], value)
        tree = inner
    if not in_list:
        key = _spelled_as_below(key, option[:-1], tree)
    if in_list:
        tree[key : key + 1] = [] if value == "none" else [_with_name(value, tree[key])]
    elif value == "none":
        _remove(tree, key, option)
    else:
        tree[key] = value
    return None


_PYTHON = re.compile(r"True|False|[+-]?(\d+\.|\d*\.\d+)([eE][+-]?\d+)?")
"""Booleans and numbers in spellings that Python has and TOML lacks."""


def _value(key: str, text: str) -> Any:
    """Parse the value of `--set` as TOML, or as plain text if it is not TOML.

    >>> _value("lr", ".5"), _value("refresh", "True"), _value("policy", "sft")
    (0.5, True, 'sft')
    """
    try:
        tree = _parse_toml(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return ast.literal_eval(text) if _PYTHON.fullmatch(text) else text
    except ValueError as error:
        raise ConfigError(f"--set {key} = {text[:40]!r} ...: cannot be read: {error}; give a shorter value") from None
    return tree["value"] if len(tree) == 1 else text
