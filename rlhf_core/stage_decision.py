"""What to do with a stage, and why: take the result that is there, wait for it, go on with it, or run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_core import attempts
from rlhf_core.artifacts import ArtifactStore
from rlhf_core.checkpoints import Checkpoints
from rlhf_core.fingerprint import canonical_json, module_digests
from rlhf_core.leases import living_owner
from rlhf_core.records import KeyRecord
from rlhf_core.stage_key import StageSpec, code_policy, key_payload, payload_key
from rlhf_core.store_layout import CHECKPOINTS, read_json, write_json

Action = Literal["HIT", "ATTACH", "RESUME", "RUN", "BLOCKED"]

_SHOWN = 4
_MISSING = "nothing"


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to a stage and why. `step` is the checkpoint's step of a RESUME.

    >>> Decision("RUN", "ppo.kl_coef: 0.05 -> 0.1", "3f2a", None).action
    'RUN'
    """

    action: Action
    reason: str
    key: str
    step: int | None


@dataclass(frozen=True, slots=True)
class Target:
    """The key that a spec means now, the payload that it is the hash of, and the digests of its code's modules."""

    key: str
    payload: dict[str, Any]
    code: dict[str, str]


def decide(store: ArtifactStore, spec: StageSpec, *, force: bool = False, strict_code: bool = False) -> Decision:
    """Return what `execute` would do with the stage now, without doing it."""
    target = target_of(store, spec, strict_code=strict_code)
    if not force:
        record = store.record(target.key)
        if record is not None:
            return hit(target, record)
        owner = living_owner(store.layout.leases, target.key)
        if owner is not None:
            return Decision("ATTACH", f"{owner} is computing it", target.key, None)
    return decide_work(store, spec, target, force=force)


def target_of(store: ArtifactStore, spec: StageSpec, *, strict_code: bool) -> Target:
    """Return the key that the spec means.

    With `strict_code` a stage whose code normally only warns gets its code into the key; a result that was made
    without that option, but by exactly this code, still counts.
    """
    payload = key_payload(spec)
    code = module_digests(spec.module)
    target = Target(payload_key(payload), payload, code)
    if not strict_code or code_policy(spec) == "strict":
        return target
    record = store.record(target.key)
    if record is not None and record.code == code:
        return target
    payload = key_payload(spec, strict_code=True)
    return Target(payload_key(payload), payload, code)


def hit(target: Target, record: KeyRecord) -> Decision:
    """Return the HIT on a record, saying loudly if the code has changed since."""
    reason = f"made {record.started[:16].replace('T', ' ')} UTC in {record.seconds:.1f} s"
    changed = changed_modules(record.code, target.code)
    if changed:
        reason += f"; code changed since ({', '.join(changed)})"
    return Decision("HIT", reason, target.key, None)


def decide_work(store: ArtifactStore, spec: StageSpec, target: Target, *, force: bool) -> Decision:
    """Return RESUME or RUN for a key that has no usable record and no living owner."""
    if force:
        return Decision("RUN", "forced", target.key, None)
    folder = store.layout.attempt(target.key)
    past = attempts.history(folder)
    number = past[-1].number if past else 0
    checkpoint = Checkpoints(folder / CHECKPOINTS).latest()
    if checkpoint is not None:
        return Decision("RESUME", f"from step {checkpoint.step} of attempt {number}", target.key, checkpoint.step)
    work = attempts.unfinished_work(folder)
    if work:
        return Decision("RESUME", f"from what attempt {number} left in {', '.join(work[:3])}", target.key, None)
    return Decision("RUN", _why_run(store, spec, target, past), target.key, None)


def starts_over(store: ArtifactStore, key: str, *, force: bool) -> bool:
    """Return whether an attempt at `key` has nothing to do with earlier ones: it was asked for, or those had ended."""
    past = attempts.history(store.layout.attempt(key))
    return force or (bool(past) and past[-1].status == "committed")


def remember(store: ArtifactStore, spec: StageSpec, target: Target) -> None:
    """Note what the stage with this label is now, so that the next decision can say what changed."""
    path = store.layout.label(spec.label)
    table = {"label": spec.label, "key": target.key, "payload": target.payload, "code": target.code}
    if read_json(path) != json.loads(json.dumps(table)):
        write_json(path, table, durable=False)


def changed_modules(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return the names of the modules that were changed, added or removed."""
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


# ---------------------------------------------------------------- why a stage runs


def _why_run(store: ArtifactStore, spec: StageSpec, target: Target, past: list[attempts.Attempt]) -> str:
    if past and past[-1].status == "committed":
        return _lost(store, target.key)
    if past:
        failure = f" ({past[-1].failure})" if past[-1].failure else ""
        return f"attempt {past[-1].number} left no checkpoint{failure}"
    last = read_json(store.layout.label(spec.label))
    if last is None:
        return "first run"
    if last["key"] == target.key:
        return _lost(store, target.key)
    changes = list(differences(spec.label, last["payload"], target.payload, last["code"], target.code))
    more = f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
    return ", ".join(changes[:_SHOWN]) + more


def _lost(store: ArtifactStore, key: str) -> str:
    damage = store.damage(key)
    return f"its artifact cannot be used: {damage}" if damage else "its artifact is gone"


def differences(
    label: str,
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    old_code: Mapping[str, str],
    new_code: Mapping[str, str],
) -> Iterator[str]:
    """Yield one phrase for each thing that differs between two key payloads of the stage called `label`."""
    for name in ("stage", "version", "seed", "schema"):
        if old.get(name) != new[name]:
            yield f"{name}: {_shown(old.get(name))} -> {_shown(new[name])}"
    for path, before, after in _changes(label, old["config"], new["config"]):
        yield f"{path}: {_shown(before)} -> {_shown(after)}"
    for path, before, after in _changes("input", old["inputs"], new["inputs"]):
        yield f"{path.replace('.', ' ', 1)} changed: {_short(before)} -> {_short(after)}"
    for path, before, after in _changes("engines", old["engines"], new["engines"]):
        yield f"{path}: {_shown(before)} -> {_shown(after)}"
    for name in sorted(old["callables"].keys() | new["callables"].keys()):
        if old["callables"].get(name) != new["callables"].get(name):
            yield f"{name} changed: {_short(old['callables'].get(name))} -> {_short(new['callables'].get(name))}"
    if old.get("code") != new.get("code"):
        modules = changed_modules(old_code, new_code)
        yield f"code changed ({', '.join(modules)})" if modules else "code counts in the key now, or no longer"


def _changes(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted path, old value, new value) for every leaf that differs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in [*new, *(name for name in old if name not in new)]:
            yield from _changes(f"{path}.{name}", old.get(name, _ABSENT), new.get(name, _ABSENT))
    elif isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _changes(f"{path}[{index}]", before, after)
    elif old is _ABSENT or new is _ABSENT or canonical_json(old) != canonical_json(new):
        yield path, old, new


class _Absent:
    def __str__(self) -> str:
        return _MISSING


_ABSENT = _Absent()


def _shown(value: Any) -> str:
    text = str(value) if isinstance(value, (str, _Absent)) else json.dumps(value, sort_keys=True)
    return (text if text else '""') if len(text) <= 60 else f"{text[:57]}..."


def _short(value: Any) -> str:
    """Return the first digits of a digest, and of several the first digits of each."""
    if isinstance(value, str):
        return value[:8]
    if isinstance(value, Mapping):
        value = list(value.values())
    return ",".join(_short(item) for item in value) if isinstance(value, (list, tuple)) else _MISSING
