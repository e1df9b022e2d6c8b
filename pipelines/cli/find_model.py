"""Find the policy or reward model that a command names: a label, a digest, a folder, or `champion`."""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pipelines.execution.plan import DIGITS
from pipelines.flows.inputs import find_artifact
from pipelines.flows.profile import load_profile, profile_digest
from pipelines.services.home import Home
from pipelines.services.run_notes import RunRecord, runs_with, whereabouts
from pipelines.services.user_servers import tracking_uri
from rlhf_core.errors import ConfigError
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import CHAMPION, PolicyRef, RewardModelRef

M = TypeVar("M", PolicyRef, RewardModelRef)


def find_policy(name: str, profile: str, store: ArtifactStore, home: Home) -> tuple[PolicyRef, str]:
    """Find the policy for `champion`, `champion:MODEL` or another name, and a line about it (see `find_model`)."""
    digest = champion_digest(name, store, home)
    if not digest:
        return find_model(PolicyRef, name, profile, store, home)
    return find_artifact(store, PolicyRef, digest, given=name), f"{name}: {digest[:DIGITS]}"


def find_model(kind: type[M], name: str, profile: str, store: ArtifactStore, home: Home) -> tuple[M, str]:
    """Find the policy or reward model for a label, a digest or a folder, and a line that describes it.

    A label means the model of the newest run that has one, or of the newest run of `profile`. Raises ConfigError if
    that profile has made none.
    """
    digest = origin = ""
    is_label = not ("." in name or re.fullmatch("[0-9a-f]{8,}", name) or Path(name).is_dir())
    runs = runs_with(home, store.root, name) if is_label else []
    made = store.latest(name) if is_label else None
    if profile and is_label:
        config = load_profile(profile)
        runs = [one for one in runs if (one.profile or one.digest) in (whereabouts(profile), profile_digest(config))]
        made = store.latest(name, config.name)
        if not runs and made is None:
            rule = f"no run of {profile} has it"
            raise ConfigError("model", name, rule, f"`rlhf run {profile}` makes it; `rlhf runs` lists the runs")
    if runs:
        digest, origin = runs[0].policies[name], _origin(name, runs)
    elif made is not None:  # by a run that another folder, or an earlier version, has recorded
        digest, origin = made.handle.digest, f", made {made.made}"
    ref = find_artifact(store, kind, digest or name, given=name)
    return ref, f"{name}: {ref.digest[:DIGITS]}{origin}"


def _origin(name: str, runs: Sequence[RunRecord]) -> str:
    """The run, profile and time of the newest run, and other profiles whose policy of this name differs."""
    run = runs[0]
    at = time.strftime("%Y-%m-%d %H:%M", time.gmtime(run.began))
    others = {one.profile for one in runs if one.policies[name] != run.policies[name]} - {run.profile, ""}
    more = f"; --profile chooses another: {', '.join(sorted(others))}" if others else ""
    return f", of the run {run.name} of {run.profile or 'a deployment'}, {at} UTC{more}"


def champion_digest(policy: str, store: ArtifactStore, home: Home) -> str:
    """Digest of the champion for `champion` or `champion:MODEL`; "" for other names."""
    word, _, wanted = policy.partition(":")
    if word != CHAMPION:
        return ""
    from rlhf_core.tracking.champions import champion_digests  # with MLflow's parts

    uri = tracking_uri(home)
    name = model_name(uri, wanted)
    digest, _ = champion_digests(uri, name)
    if not digest:
        rule = f"{name} has no champion"
        raise ConfigError("policy", policy, rule, "publish a policy whose gate holds, or name a policy")
    return digest


def model_name(uri: str, given: str) -> str:
    """The given name, or the name of the only model that has a champion."""
    from rlhf_core.tracking.champions import model_names

    if given:
        return given
    names = model_names(uri)
    if len(names) != 1:
        rule = f"several models have champions: {', '.join(names)}" if names else "no model has a champion yet"
        remedy = "name one of them" if names else "publish a policy whose gate holds"
        raise ConfigError("champion", given, rule, remedy)
    return names[0]
