"""Decide for each stage, with a reason: reuse its result, wait for another process, resume, or run."""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from rlhf_core.config.former_names import present_option
from rlhf_core.secrets.redaction import hidden
from rlhf_core.stage.checkpoints import Checkpoints
from rlhf_core.stage.corrections import CORRECTIONS
from rlhf_core.stage.failures import failure_misfit, failure_settings, noted_failures
from rlhf_core.stage.key import StageSpec, Strictness, key_payload, payload_key, stage_code, user_functions
from rlhf_core.stage.versions import other_versions, versions
from rlhf_core.store import attempts
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.fingerprint import canonical_json
from rlhf_core.store.leases import Lease
from rlhf_core.store.records import KeyRecord
from rlhf_core.store.typed_json import Stored, parse

Action = Literal["HIT", "ATTACH", "RESUME", "RUN", "BLOCKED"]

logger = logging.getLogger(__name__)

_SHOWN = 4  # changes in a reason, which is one line of a table
_CODE = re.compile(r"@([0-9a-f]{8})[0-9a-f]{56}$")  # a function's digest, of which a reason shows the beginning
_MISSING = "nothing"


@dataclass(frozen=True, slots=True)
class Decision:
    """The action for a stage and its reason. `step` is the checkpoint's step of a RESUME.

    >>> Decision("RUN", "ppo.kl.coef: 0.05 -> 0.1", "3f2a", None).action
    'RUN'
    """

    action: Action
    reason: str
    key: str
    step: int | None


def _is_payload(payload: dict[str, Any]) -> dict[str, Any]:
    parts = [name for name in ("config", "inputs", "engines", "callables") if not isinstance(payload.get(name), dict)]
    if parts:
        raise ValueError(f"has no table {parts[0]}")
    canonical_json(payload)  # raises ConfigError, a ValueError, for values that no payload can contain
    return payload


class _Note(Stored):
    """The key, payload and code of the stage with a label at its last decision, and the key of its last result."""

    key: str
    made: str = ""
    payload: Annotated[dict[str, Any], AfterValidator(_is_payload)]
    code: dict[str, str]


@dataclass(frozen=True, slots=True)
class Target:
    """The current key of a spec, the payload whose hash it is, and the digests of its code's modules.

    `functions` holds the digests of the user's functions that entered the key.
    """

    key: str
    payload: dict[str, Any]
    code: dict[str, str]
    functions: dict[str, str]


def decide(
    store: ArtifactStore, spec: StageSpec, *, force: bool = False, strict: Strictness = Strictness()
) -> Decision:
    """Predict the decision of `execute` for the stage, without executing it."""
    target = target_of(store, spec, strict=strict)
    if not force:
        record = fitting_record(store, spec, target.key)
        if record is not None:
            return hit(target, record)
        owner = store.living_owner(target.key)
        if owner is not None:
            return Decision("ATTACH", owner.claim, target.key, None)
    return decide_work(store, spec, target, force=force)


def target_of(store: ArtifactStore, spec: StageSpec, *, strict: Strictness) -> Target:
    """Compute the current key of the spec.

    `strict.code` adds the code of a stage that normally only warns to the key, `strict.env` the versions of the
    libraries that compute; a result made without these options, but by exactly this code and these versions, still
    counts.
    """
    functions = user_functions(spec)
    payload = key_payload(spec, functions=functions)
    code = stage_code(spec)
    target = _fitting(store, spec, Target(payload_key(payload), payload, code, functions))
    adds_code = strict.code and spec.code != "strict"
    if not adds_code and not strict.env:
        return target
    record = store.record(target.key)
    same_code = record is not None and (not adds_code or (record.code == code and not record.earlier_code))
    if record is not None and same_code and not (strict.env and other_versions(record.environment)):
        return target
    payload = key_payload(spec, strict_code=strict.code, functions=functions)
    if strict.env:
        payload |= {"environment": versions()}
    return _fitting(store, spec, Target(payload_key(payload), payload, code, functions))


def _fitting(store: ArtifactStore, spec: StageSpec, target: Target) -> Target:
    """The target with a fitting result: `target`, or a numbered take that an earlier version kept, else `target`."""
    take = target
    for number in count(2):
        if not unfit(spec, store.record(take.key)):
            return take
        payload = target.payload | {"take": number}
        take = replace(target, key=payload_key(payload), payload=payload)
        if store.record(take.key) is None:
            break
    return target


def fitting_record(store: ArtifactStore, spec: StageSpec, key: str, lease: Lease | None = None) -> KeyRecord | None:
    """The record of a key, unless answers failed in its result and the settings of `spec` for them have changed."""
    record = store.record(key, lease)
    return None if unfit(spec, record) else record


def unfit(spec: StageSpec, record: KeyRecord | None) -> str:
    """Describe the answers that failed in a result under other settings than those in `spec`; "" if none did."""
    if record is None or not record.failures:
        return ""
    return failure_misfit(record.failures, failure_settings(spec.config), label=spec.label)


def hit(target: Target, record: KeyRecord) -> Decision:
    """The HIT on a record; its reason names failed answers and changed code or versions."""
    reason = f"made {record.made} in {record.seconds:.1f} s"
    for path, failed in record.failures.items():
        reason += f"; {failed.share()} ({path})"
    changed = changed_modules(record.code, target.code)
    if changed:
        reason += f"; code changed since ({_first(changed, 2)})"
    others = other_versions(record.environment)
    if others:
        reason += f"; other versions now ({_first(others, 2)})"
    return Decision("HIT", reason, target.key, None)


def decide_work(
    store: ArtifactStore, spec: StageSpec, target: Target, *, force: bool, lease: Lease | None = None
) -> Decision:
    """Choose RESUME or RUN for a key that has no usable record and no living owner."""
    folder = store.attempts(target.key, lease)
    past = attempts.history(folder)
    if force and not _goes_on(past, target):
        changed = changed_modules(past[-1].code, target.code) if _may_go_on(past) else []
        return Decision(
            "RUN", f"forced; code changed ({_first(changed, 2)})" if changed else "forced", target.key, None
        )
    number = past[-1].number if past else 0
    changed = changed_modules(past[-1].code, target.code) if past and past[-1].code else []
    failed = noted_failures(attempts.latest_work(folder), {})
    notes = [f"its code has changed since ({_first(changed, 2)})"] if changed else []
    notes += [f"{one.share()} so far ({path})" for path, one in failed.items()]
    said = f"; {', '.join(notes)}: --force starts over" if notes else ""
    checkpoint = Checkpoints(attempts.checkpoints(folder)).latest()
    if checkpoint is not None:
        return Decision("RESUME", f"from step {checkpoint.step} of attempt {number}{said}", target.key, checkpoint.step)
    work = attempts.unfinished_work(folder)
    if work:
        return Decision("RESUME", f"from the files of attempt {number}: {', '.join(work[:3])}{said}", target.key, None)
    why = unfit(spec, store.record(target.key, lease)) or _why_run(store, spec, target, past)
    return Decision("RUN", why, target.key, None)


def starts_over(folder: attempts.AttemptFolder, target: Target, *, force: bool) -> bool:
    """Whether an attempt at the target's key ignores the work of earlier ones.

    It does if `force` is set, or if the last attempt committed. A forced attempt that waits is resumed, unless the code
    has changed.
    """
    past = attempts.history(folder)
    if force and not _goes_on(past, target):
        return True
    return bool(past) and past[-1].status == "committed"


def _goes_on(past: Sequence[attempts.Attempt], target: Target) -> bool:
    """Whether the command that forced the last attempt resumes it: it has waited, and runs the same code."""
    return _may_go_on(past) and not (past[-1].code and changed_modules(past[-1].code, target.code))


def _may_go_on(past: Sequence[attempts.Attempt]) -> bool:
    """Whether the last attempt was forced and waits, or resumed such an attempt and has not committed."""
    last = past[-1] if past else None
    return last is not None and last.forced and last.status != "committed" and (last.halted or last.continues)


def remember(store: ArtifactStore, spec: StageSpec, target: Target, *, is_hit: bool = False) -> None:
    """Save the stage's key, payload and code under its label, so that the next decision can name the changes.

    On a hit, a label that this node has just noted is not read again. A disk that cannot be written is only logged,
    because only reasons depend on it.
    """
    table = {"label": spec.label, "key": target.key, "payload": target.payload, "code": target.code}
    noted = json.loads(json.dumps(table))
    try:
        for pipeline in {"", spec.pipeline}:
            if not (is_hit and store.has_noted(spec.label, pipeline, noted)):
                last = _note(store, spec.label, pipeline)
                made = "" if last is None else last.key if store.record(last.key) is not None else last.made
                store.note_label(spec.label, pipeline, noted | {"made": made})
    except OSError as error:
        logger.warning("%s: could not record its current key and configuration: %s", spec.label, error)


def _note(store: ArtifactStore, label: str, pipeline: str) -> _Note | None:
    return parse(store.label(label, pipeline), _Note)


def changed_modules(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Names of the modules that were changed, added or removed."""
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


# ---------------------------------------------------------------- why a stage runs


def _why_run(store: ArtifactStore, spec: StageSpec, target: Target, past: list[attempts.Attempt]) -> str:
    if past and past[-1].status == "committed":
        return _lost(store, target.key)
    if past:
        failure = f" ({past[-1].failure})" if past[-1].failure else ""
        return f"attempt {past[-1].number} left no checkpoint{failure}"
    last = _note(store, spec.label, spec.pipeline)
    if last is None and store.label(spec.label, spec.pipeline) is not None:
        return "the record of its last configuration cannot be read"
    if last is None:
        return f"first run of {spec.pipeline}" if store.label(spec.label) is not None else "first run"
    if last.key == target.key:
        return _lost(store, target.key)
    made = store.record(last.key) if "environment" in target.payload else None
    then = {} if made is None else {"environment": made.environment}
    changes = list(differences(spec.label, then | last.payload, target.payload, last.code, target.code))
    return _first(changes, _SHOWN) or "the versions it was made with are unknown, or no longer part of the key"


def _first(phrases: Sequence[str], count: int) -> str:
    """Join the first phrases in one line, with the number of those left out."""
    more = f" and {len(phrases) - count} more" if len(phrases) > count else ""
    return ", ".join(phrases[:count]) + more


def _lost(store: ArtifactStore, key: str) -> str:
    damage = store.damage(key)
    return f"its artifact cannot be used: {damage}" if damage else "its artifact is gone"


def differences(
    label: str, old: Mapping[str, Any], new: Mapping[str, Any], old_code: Mapping[str, str], new_code: Mapping[str, str]
) -> Iterator[str]:
    """Yield one phrase for each thing that differs between two key payloads of the stage called `label`."""
    for name in ("stage", "version", "seed", "schema"):
        if old.get(name) != new[name]:
            yield f"{name}: {_shown(old.get(name))} -> {_shown(new[name])}"
    for name in new.get("corrections", ()):
        if name in CORRECTIONS and name not in old.get("corrections", ()):
            yield f"corrected since, {CORRECTIONS[name].about}"
    for path, before, after in _changes(label, old["config"], new["config"]):
        # Payloads saved by earlier versions may contain secrets in clear.
        yield f"{present_option(path)}: {_shown(hidden(path, before))} -> {_shown(hidden(path, after))}"
    for path, before, after in _changes("input", old["inputs"], new["inputs"]):
        yield f"{path.replace('.', ' ', 1)} changed: {_short(before)} -> {_short(after)}"
    for path, before, after in _changes("engines", old["engines"], new["engines"]):
        yield f"{path}: {_shown(before)} -> {_shown(after)}"
    for name in sorted(old["callables"].keys() | new["callables"].keys()):
        if old["callables"].get(name) != new["callables"].get(name):
            yield f"{name} changed: {_short(old['callables'].get(name))} -> {_short(new['callables'].get(name))}"
    if "environment" in new:
        yield from other_versions(old.get("environment", {}), new["environment"])
    if old.get("code") != new.get("code"):
        modules = changed_modules(old_code, new_code)
        yield (
            f"code changed ({_first(modules, _SHOWN)})"
            if modules
            else "the code was added to the key, or removed from it"
        )


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
    text = _CODE.sub(r"@\1", text)
    return (text if text else '""') if len(text) <= 60 else f"{text[:57]}..."


def _short(value: Any) -> str:
    """Abbreviate a digest, or each of several digests, to its first digits."""
    if isinstance(value, str):
        return value[:8]
    if isinstance(value, Mapping):
        value = list(value.values())
    return ",".join(_short(item) for item in value) if isinstance(value, (list, tuple)) else _MISSING
