"""Show a stage on Prefect's pages: its progress while it runs, then its card with metrics and samples."""

import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import get_args
from urllib.parse import quote
from uuid import UUID

from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.context import SettingsContext, get_settings_context
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_UI_URL

from pipelines.execution.executor import StageOutcome
from pipelines.execution.summary import markdown_table
from pipelines.services.flow_runs import FLOW_NAME
from pipelines.services.home import Home
from rlhf_core.errors import readable
from rlhf_core.stage.decision import Decision
from rlhf_core.stage.gate_decisions import Answer, GateDecisions, Question
from rlhf_core.stage.key import StageInput, StageSpec
from rlhf_core.stage.stopping import RunHalted, StageWaiting
from rlhf_core.store import attempts
from rlhf_core.store.opening import open_store
from rlhf_core.types import ArtifactRef, kind_of, title

logger = logging.getLogger(__name__)

PROGRESS_EVERY_S, CURVES_EVERY_S = 5.0, 10.0
"""An update takes a twentieth of a second, in which a stage computes nothing."""
CURVES = {
    "reward/mean": "reward",
    "kl/per_sequence": "KL to the reference, nats per answer",
    "rollout/length": "length, tokens",
    "rollout/entropy": "entropy, nats per token",
    "train/loss": "loss",
    "eval/loss": "held-out loss",
}
"""Metric of a training step -> its name on the card."""
REWARD_OF_SOURCE = re.compile(r"/source/(.+)/reward$")
BLOCKS = "▁▂▃▄▅▆▇█"
LONGEST_CURVE = 40
AWAY_S = 60.0


def artifact_key(*parts: str) -> str:
    """A key that Prefect accepts: lower-case letters, digits and dashes.

    >>> artifact_key("stage", "iterative_dpo/round_1/dpo")
    'stage-iterative-dpo-round-1-dpo'
    """
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


class Curves:
    """The curves of a stage, read from the file of its metrics.

    The file grows while the stage runs, in this or another process.
    """

    def __init__(self, attempt: Callable[[], attempts.AttemptFolder]) -> None:
        self._attempt = attempt
        self._file, self._read = Path(), 0
        self._values: dict[str, list[float]] = {}

    def markdown(self) -> str:
        """Format first and last values and a curve of each of `CURVES` that was recorded; "" without one."""
        self._update()
        shown = [
            [heading, readable(values[0], 3), f"**{readable(values[-1], 3)}**", sparkline(values)]
            for heading, values in self._titled()
            if len(values) > 1
        ]
        return markdown_table(["", "first", "now", "over the steps"], shown) if shown else ""

    def _titled(self) -> Iterator[tuple[str, list[float]]]:
        for name, heading in CURVES.items():
            for metric, values in self._values.items():
                if metric.endswith(f"/{name}") and f"/before/{name}" not in metric:
                    yield heading, values
        for metric, values in self._values.items():
            if found := REWARD_OF_SOURCE.search(metric):
                yield f"reward, {found[1]}", values

    def _update(self) -> None:
        file = attempts.metrics(self._attempt())
        if not file.is_file():
            return
        if file != self._file:  # of an attempt that starts over
            self._file, self._read, self._values = file, 0, {}
        with file.open("rb") as stream:
            stream.seek(self._read)
            whole = stream.read()
        whole = whole[: whole.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            for metric, value in json.loads(line)["values"].items():
                if math.isfinite(value):
                    self._values.setdefault(metric, []).append(value)


def sparkline(values: Sequence[float]) -> str:
    """Draw a curve of blocks, each the mean of the values at its place.

    >>> sparkline([0.0, 1.0, 2.0, 7.0])
    '▁▂▃█'
    """
    count = min(len(values), LONGEST_CURVE)
    means = [fmean(values[len(values) * place // count : len(values) * (place + 1) // count]) for place in range(count)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(BLOCKS[round((mean - low) / span * (len(BLOCKS) - 1))] for mean in means)


def show_stage(spec: StageSpec, outcome: StageOutcome, curves: Curves) -> None:
    """Attach the card of a stage to its task run: decision, key, inputs, curves, metrics, links and samples."""
    decision = outcome.decision
    lines = [
        f"# {spec.label}",
        f"**{decision.action}**: {decision.reason}",
        "",
        f"key `{decision.key}`" + ("" if decision.action == "HIT" else f", {outcome.seconds:.1f} s"),
        "",
        f"made {title(type(outcome.ref))} `{outcome.ref.digest}`",
    ]
    lines += [f"- from {name}: {_shown(value)}" for name, value in spec.inputs.items()]
    if outcome.tracking_url:
        lines += ["", f"[MLflow run]({outcome.tracking_url})"]
    if decision.action != "HIT":
        lines += ["", _quietly(curves.markdown, 1) or ""]
    if outcome.metrics:
        rows = [[name, f"{value:.6g}"] for name, value in sorted(outcome.metrics.items())]
        lines += ["", markdown_table(["metric", "value"], rows)]
    lines += [sample_block(row) for row in outcome.samples]
    _quietly(create_markdown_artifact, 1, key=artifact_key("stage", spec.label), markdown="\n".join(lines))


def sample_block(row: Mapping[str, str]) -> str:
    """Format a sample as a block of code, in which no text is read as Markdown or HTML.

    >>> print(sample_block({"prompt": "Hello\\n# there", "reward": "1.0"}))
    <BLANKLINE>
    ---
    <BLANKLINE>
        prompt: Hello
        # there
        reward: 1.0
    """
    lines = "\n".join(f"{name}: {text}" for name, text in row.items()).splitlines()
    return "\n---\n\n" + "\n".join("    " + line for line in lines)


def show_plan(rows: list[tuple[str, Decision]]) -> None:
    """Attach the plan to the flow run, because Prefect draws no node before it runs."""
    cells = [[label, decision.action, decision.reason] for label, decision in rows]
    _quietly(create_markdown_artifact, key="plan", markdown=markdown_table(["stage", "decision", "why"], cells))


def show_results(name: str, description: str, page: str) -> None:
    """Attach the results of the run to the flow run: the table with intervals, and links to the stages' results."""
    text = f"# {name}\n\n[MLflow run]({page})\n\n{description}"
    _quietly(create_markdown_artifact, 1, key="results", markdown=text)


def show_halt(error: RunHalted, *, run: str) -> None:
    """Attach why a run waits or is blocked; the questions of gates with links to the form that answers them."""
    lines = [f"# {error.state}", "", str(error)]
    if isinstance(error, StageWaiting) and "questions" in error.condition:
        decisions = GateDecisions(open_store(Path(error.condition["store"])))
        found = [one for one in map(decisions.find, error.condition["questions"]) if one is not None]
        form = _quietly(_form, key="the form for answers")
        if form:
            store = error.condition["store"]
            lines += [f"- {one.question.gate}: {_answers(form, one.question, run, store)}" for one in found]
    _quietly(create_markdown_artifact, key=artifact_key(error.state), markdown="\n".join(lines))


def _form(key: str) -> str:
    """Address of the form of `rlhf-pipeline/approve`."""
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(f"{FLOW_NAME}/approve")
    return f"{PREFECT_UI_URL.value()}/deployments/deployment/{deployment.id}/run"


def _answers(form: str, question: Question, run: str, store: str) -> str:
    """Links to the form with everything filled in except the person and the reason."""
    links = []
    for decision in get_args(Answer):
        filled = {"run": run, "gate": question.gate, "decision": decision, "question": question.id}
        filled |= {} if Path(store) == Home.here().store.resolve() else {"store": store}
        links.append(f"[{decision}]({form}?parameters={quote(quote(json.dumps(filled)))})")
    return " or ".join(links)


class ProgressCard:
    """A progress bar on the task run and a table of its curves, updated every few seconds and removed at the end."""

    def __init__(self, label: str, curves: Curves) -> None:
        self._label = label
        self._curves = curves
        self._bar: UUID | None = None
        self._table: UUID | None = None
        self._last = self._last_table = 0.0

    def show(self, done: int, total: int, message: str) -> None:
        now = time.monotonic()
        if total <= 0 or (now - self._last < PROGRESS_EVERY_S and done < total):
            return
        self._last = now
        percent = min(100.0, 100.0 * done / total)
        if self._bar is None:
            key = artifact_key("progress", self._label)
            self._bar = _quietly(create_progress_artifact, progress=percent, key=key, description=message)
        else:
            _quietly(update_progress_artifact, artifact_id=self._bar, progress=percent, description=message)
        if now - self._last_table >= CURVES_EVERY_S:
            self._last_table = now
            self._show_curves(f"# {self._label}: {done} of {total}")

    def _show_curves(self, title: str) -> None:
        curves = _quietly(self._curves.markdown)
        if not curves:
            return
        text = f"{title}\n\n{curves}"
        if self._table is None:
            self._table = _quietly(create_markdown_artifact, key=artifact_key("live", self._label), markdown=text)
        else:
            _quietly(_rewrite_artifact, artifact=self._table, text=text)

    def close(self) -> None:
        """Remove bar and table: the graph has room for one card of a stage."""
        for artifact in (self._bar, self._table):
            if artifact is not None:
                _quietly(_delete_artifact, 1, key=artifact)
        self._bar = self._table = None


def _rewrite_artifact(artifact: UUID, text: str) -> None:
    with get_client(sync_client=True) as client:
        client.update_artifact(artifact, ArtifactUpdate(data=text))


def _delete_artifact(key: UUID) -> None:
    with get_client(sync_client=True) as client, suppress(ObjectNotFound):
        client.delete_artifact(key)


class _Away:
    """Time until which no request is sent to a server that did not answer."""

    until = 0.0


def _quietly(call, retries=0, **arguments):  # type: ignore[no-untyped-def]  # five functions without a common type
    """Call a Prefect function and log its errors: a failed page update must neither end nor delay a stage of hours.

    `retries` is for pages that are written once, and would stay empty if the database was busy at that moment.
    """
    if not retries and time.monotonic() < _Away.until:
        return None
    try:
        with _with_retries(retries):
            return call(**arguments)
    except Exception as error:
        _Away.until = time.monotonic() + AWAY_S
        shown = arguments["key"] if "key" in arguments else "progress"
        logger.warning("Prefect could not show %s, trying again in %.0f s: %s", shown, AWAY_S, error)
        return None


def _with_retries(retries: int) -> SettingsContext:
    """Prefect's settings with another number of retries. Its own `temporary_settings` checks all settings anew."""
    active = get_settings_context()
    client = active.settings.client.model_copy(update={"max_retries": retries})
    return SettingsContext(profile=active.profile, settings=active.settings.model_copy(update={"client": client}))


def _shown(value: StageInput) -> str:
    if isinstance(value, ArtifactRef):
        return f"{kind_of(type(value))} `{value.digest[:12]}`"
    named = value.items() if isinstance(value, dict) else enumerate(value)
    return ", ".join(f"{name}: {_shown(ref)}" for name, ref in named)
