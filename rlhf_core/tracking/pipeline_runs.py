"""Find a pipeline run in MLflow, with its configuration and the keys of its stages."""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.tracking.mlflow_client import FLOW_RUN_TAG, is_missing_database, open_client, tracking_errors
from rlhf_core.tracking.mlflow_delivery import KEY_TAG, NOTE_TAG, RUN_TAG, STAGE_TAG, STAGES_TAG

_ID = re.compile(r"[0-9a-f]{32}")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackedRun:
    """A pipeline run: its name, its configuration as dotted keys, and the keys of its stages by label."""

    name: str
    run_id: str
    params: Mapping[str, str]
    keys: Mapping[str, str]


def find_run(uri: str, wanted: str) -> TrackedRun | None:
    """Find the newest pipeline run with this id or name; the part of a name in brackets may be left out.

    Returns None if none matches. Raises TrackingError if MLflow does not answer.
    """
    if is_missing_database(uri):
        return None
    with tracking_errors(uri):
        client = open_client(uri)
        found = _search(client, wanted)
        return None if found is None else _tracked(client, found)


def close_runs(uri: str, flow_runs: Sequence[str]) -> None:
    """Tag the unfinished MLflow runs of these Prefect runs as closed, because a later run has finished their work.

    MLflow's status records how a process ended; it is kept unless the run waits. A tracker that does not answer is
    logged.
    """
    try:
        client = open_client(uri)
        experiments = [one.experiment_id for one in client.search_experiments()]
        for flow_run in flow_runs:
            for run in client.search_runs(experiments, filter_string=f"tags.`{FLOW_RUN_TAG}` = '{flow_run}'"):
                if run.info.status in ("KILLED", "FAILED", "SCHEDULED") and RUN_TAG in run.data.tags:
                    client.set_tag(run.info.run_id, "state", "Closed")
                    client.set_tag(run.info.run_id, "state.message", "a later run has finished it")
                    if run.info.status == "SCHEDULED":  # nothing is left to wait for
                        client.set_terminated(run.info.run_id, status="FINISHED", end_time=run.info.end_time)
    except Exception as error:  # the run has finished, even if its page does not show it
        logger.warning("tracking: earlier runs may be shown as unfinished: %s", error)


def rewrite_tags(uri: str, tag: str, rewrite: Callable[[str], str]) -> int:
    """Rewrite this tag, and the description that repeats it, of all runs that have it; return how many have changed.

    Raises TrackingError if MLflow does not answer.
    """
    if is_missing_database(uri):
        return 0
    changed = 0
    with tracking_errors(uri):
        client = open_client(uri)
        experiments, page = [one.experiment_id for one in client.search_experiments()], None
        while True:
            found = client.search_runs(experiments, filter_string=f"tags.`{tag}` LIKE 'http%'", page_token=page)
            for run in found:
                old = {key: run.data.tags[key] for key in (tag, NOTE_TAG) if key in run.data.tags}
                new = {key: value for key, text in old.items() if (value := rewrite(text)) != text}
                for key, value in new.items():
                    client.set_tag(run.info.run_id, key, value)
                changed += bool(new)
            page = found.token
            if not page:
                return changed


def stage_runs(tags: Mapping[str, str]) -> dict[str, str]:
    """The runs of the stages by label, by the tags of a pipeline's run, also of one by an earlier version."""
    found: dict[str, str] = json.loads(tags.get(STAGES_TAG, "{}"))
    return found | {tag.removeprefix(STAGE_TAG): run for tag, run in tags.items() if tag.startswith(STAGE_TAG)}


def _search(client: Any, wanted: str) -> Any:
    if "'" in wanted or "%" in wanted:  # no name of ours has them, and the filter has no way to quote them
        return None
    experiments = [one.experiment_id for one in client.search_experiments()]
    by_id = _ID.fullmatch(wanted) is not None
    conditions = [f"attributes.run_name = '{wanted}'", f"attributes.run_name LIKE '{wanted} (%'"]
    if by_id:
        conditions = [f"attributes.run_id = '{wanted}'"]
    newest = ["attributes.start_time DESC"]
    runs = [
        run
        for condition in conditions
        for run in client.search_runs(experiments, filter_string=condition, order_by=newest)
        if RUN_TAG in run.data.tags and (by_id or _means(wanted, run.info.run_name))
    ]
    return max(runs, key=lambda run: run.info.start_time, default=None)


def _means(wanted: str, name: str) -> bool:
    """Whether `wanted` is this name, or the name without its part in brackets.

    In the filter, `_` stands for any letter, and databases differ in whether case counts.
    """
    return name == wanted or re.fullmatch(rf"{re.escape(wanted)} \([^()]*\)", name) is not None


def _tracked(client: Any, run: Any) -> TrackedRun:
    keys = {}
    for label, value in stage_runs(run.data.tags).items():
        stage_run = _ID.match(value)
        tags = {} if stage_run is None else client.get_run(stage_run.group()).data.tags
        if KEY_TAG in tags:
            keys[label] = tags[KEY_TAG]
    return TrackedRun(run.info.run_name, run.info.run_id, dict(run.data.params), keys)
