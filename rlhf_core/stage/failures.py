"""Record the answers that failed while a stage ran, and the settings that its result counts for.

Deadlines, retries and addresses are not part of a stage's key, because they change nothing as long as no answer fails.
A result in which answers failed counts only for the settings that it was finished with; unfinished work, for any.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import BaseModel

from rlhf_core.schema.base import FailureSetting
from rlhf_core.store.attempts import FAILURES
from rlhf_core.store.fingerprint import canonical_json
from rlhf_core.store.records import Failed
from rlhf_core.types import Generation

Settings: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Dotted path of a part that may fail (`rewards.terms.mine`, `agent`) -> its fields that may be the cause."""
Counts: TypeAlias = Mapping[str, tuple[int, int]]
"""Path -> number of failed answers and number of all answers there."""
ONE_AGENT: Mapping[str, str] = {"": "agent"}
"""Keys of an agent that plays the prompts of all sources, if there is one."""


def failure_settings(config: Any) -> dict[str, dict[str, Any]]:
    """Select the settings that may make an answer fail, or that decide on the treatment of a failed answer."""
    return {path: fields for path, fields in _marked(config, "") if fields}


def failed_episodes(generations: Sequence[Generation], agents: Mapping[str, str]) -> Counts:
    """Count failed and all episodes by agent key; `agents` maps sources to keys (`AgentsBySource.agent_keys`)."""
    found: dict[str, tuple[int, int]] = {}
    for one in generations:
        if key := agents.get(one.prompt.source, agents[""]):
            failed, of = found.get(key, (0, 0))
            found[key] = (failed + bool(one.completion.failure), of + 1)
    return found


def note_failures(folder: Path, step: int, counts: Counts, settings: Settings) -> None:
    """Record the failures of a step in the work folder `folder`, before its answers are kept.

    The last record of a step counts.
    """
    known = {path: list(count) for path, count in counts.items() if path in settings}
    if not known:
        return
    line = json.dumps({"step": step, "counts": known})
    with (folder / FAILURES).open("a", encoding="utf-8") as stream:
        stream.write(f"\n{line}")  # the newline comes first: it ends a line that a kill left half written


def noted_failures(folder: Path, settings: Settings) -> dict[str, Failed]:
    """Load the failures so far by path, with the present settings there; {} if none are noted."""
    path = folder / FAILURES
    steps = {entry["step"]: entry["counts"] for entry in _entries(path)} if path.is_file() else {}
    failed, answers = Counter[str](), Counter[str]()
    for counts in steps.values():
        failed.update({name: some for name, (some, _) in counts.items()})
        answers.update({name: of for name, (_, of) in counts.items()})
    return {
        name: Failed(failed=failed[name], answers=answers[name], settings=dict(settings.get(name, {})))
        for name in sorted(failed)
        if failed[name]
    }


def failure_misfit(failures: Mapping[str, Failed], settings: Settings, *, label: str) -> str:
    """The reason why a result with `failures` does not count for `settings`; "" if it counts."""
    for path, one in failures.items():
        changed = _changed(one.settings, settings.get(path, {}))
        if changed:
            return f"{label}.{path}: {one.share()} under {changed}"
    return ""


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """List the fields that differ, as `timeout_s = 5.0, now 60.0`."""
    names = [name for name in new if name in old and canonical_json(old[name]) != canonical_json(new[name])]
    names += [name for name in (*old, *new) if (name in old) != (name in new)]
    return " and ".join(f"{name} = {_shown(old.get(name))}, now {_shown(new.get(name))}" for name in names)


def _shown(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)


def _marked(value: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path of every table in a configuration, with its fields that are marked as `FailureSetting`."""
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        marked = [name for name, field in fields.items() if any(isinstance(m, FailureSetting) for m in field.metadata)]
        yield path, {name: json.loads(json.dumps(getattr(value, name))) for name in marked}
        for name in fields:
            yield from _marked(getattr(value, name), f"{path}.{name}" if path else name)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _marked(item, f"{path}.{name}" if path else str(name))


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # empty, or cut off by a kill
            continue
