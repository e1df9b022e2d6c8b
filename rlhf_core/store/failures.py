"""Answers that failed while a stage ran, and under which settings: other settings might not have let them fail.

Deadlines, retries and addresses are not in a stage's key, since they change nothing where no answer fails. Where some did,
the result is one for these settings alone.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict

from rlhf_core.schema.base import FailureSetting
from rlhf_core.store.fingerprint import canonical_json

FAILURES = "failures.jsonl"

Settings: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Dotted path of what may fail (`rewards.terms.mine`, `agent`) -> the fields there that may be why."""
Counts: TypeAlias = Mapping[str, tuple[int, int]]
"""Path -> how many answers failed there, of how many."""


class Failed(BaseModel):
    """How many answers failed in one place, of how many, and the settings under which they did."""

    model_config = ConfigDict(frozen=True)
    failed: int
    answers: int
    settings: dict[str, Any]

    def share(self) -> str:
        """Return for a person how many failed."""
        return f"{self.failed} of {self.answers} answers failed"


def failure_settings(config: Any) -> dict[str, dict[str, Any]]:
    """Return what of a configuration may be why an answer fails, or decides what becomes of one that does."""
    return {path: fields for path, fields in _marked(config, "") if fields}


def note(folder: Path, step: int, counts: Counts, settings: Settings) -> None:
    """Note in the work folder `folder` what failed at a step, before its answers are kept; a step may be noted again."""
    known = {path: list(count) for path, count in counts.items() if path in settings}
    if not known:
        return
    used = {path: settings[path] for path, (failed, _) in known.items() if failed}
    line = json.dumps({"step": step, "counts": known, "settings": used})
    with (folder / FAILURES).open("a", encoding="utf-8") as stream:
        stream.write(f"\n{line}")  # after a kill the last line may be half written: it ends here


def noted(folder: Path) -> dict[str, Failed]:
    """Return by path what failed so far; {} where nothing did."""
    path = folder / FAILURES
    steps = {entry["step"]: entry for entry in _entries(path)} if path.is_file() else {}
    failed: defaultdict[str, int] = defaultdict(int)
    answers: defaultdict[str, int] = defaultdict(int)
    used: dict[str, dict[str, Any]] = {}
    for entry in steps.values():
        used |= entry["settings"]
        for name, (some, of) in entry["counts"].items():
            failed[name] += some
            answers[name] += of
    return {name: Failed(failed=failed[name], answers=answers[name], settings=used[name]) for name in sorted(used)}


def misfit(failures: Mapping[str, Failed], settings: Settings, *, label: str) -> str:
    """Return why a result with `failures` is none for `settings`, "" if it is one: nothing failed, or under the same."""
    for path, one in failures.items():
        changed = _changed(one.settings, settings.get(path, {}))
        if changed:
            return f"{label}.{path}: {one.share()} under {changed}"
    return ""


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return the fields that differ, as `timeout_s = 5.0, now 60.0`."""
    names = [name for name in new if name in old and canonical_json(old[name]) != canonical_json(new[name])]
    names += [name for name in (*old, *new) if (name in old) != (name in new)]
    return " and ".join(f"{name} = {_shown(old.get(name))}, now {_shown(new.get(name))}" for name in names)


def _shown(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)


def _marked(value: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path of every table in a configuration with its fields marked as a `FailureSetting`."""
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
