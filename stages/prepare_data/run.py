"""Prepare the data and the base model: read or invent rows, clean, split, check against the tokenizer, write tables.

In order: rows -> clean and split (a prompt is in one split only) -> base model with its tokenizer -> limits in tokens
-> parquet, `validation.json` (every dropped row and why), `preview.md` (the text that the model sees).
"""

import json
import logging
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from rlhf_core.config.data import HELD_OUT, DataConfig, Files
from rlhf_core.config.models import PretrainedModel
from rlhf_core.data.chat import CHATML_LIKE, ChatTemplate
from rlhf_core.data.chat_templates import SHIPPED
from rlhf_core.data.files import make_tables as from_files
from rlhf_core.data.limits import DropReport, Origin, TokenLimits, limit, parts
from rlhf_core.data.mixing import trained
from rlhf_core.data.rows import RowProgress
from rlhf_core.data.suite_overlap import OVERLAPS, Overlaps, without_prompts
from rlhf_core.data.tables import (
    Feedback,
    Tables,
    preview,
    read_prompts,
    write_demonstrations,
    write_feedback,
    write_preferences,
    write_prompts,
    write_steps,
)
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.models.initialize import initialize_llama, train_tokenizer
from rlhf_core.models.materialize import materialize
from rlhf_core.stage.context import StageContext
from rlhf_core.types import (
    ArtifactRef,
    DemonstrationsRef,
    PolicyRef,
    PreferencesRef,
    PreparedDataRef,
    PromptsRef,
    StepsRef,
)
from rlhf_core.user_code.dependencies import check_functions
from stages.planned_files import read_as_planned
from stages.prepare_data import (
    CHATML_TEMPLATE,
    MODEL_TEMPLATE,
    PrepareDataConfig,
    content_digests,
    local_files,
)

logger = logging.getLogger(__name__)

MANY_DROPPED = 0.05
"""Share of dropped rows from which the summary is a warning; `max_bad_fraction` has the same default."""
MOST_REASONS = 8  # of dropped rows in the log; all are in validation.json


def run(
    config: PrepareDataConfig, *, suites: dict[str, PromptsRef] | None = None, context: StageContext
) -> PreparedDataRef:
    """Write the tables and the base model; return one handle with a separate handle for each part.

    With `suite_ngram`, training rows that have prompts of `suites` are left out.
    """
    steps = RowProgress(context.progress, 4)
    steps.begin(0, "reading rows")
    with read_as_planned(local_files(config), lambda: content_digests(config), context.files, DataError):
        tables, facts, origins, report = _rows(config.data, steps, seed=context.seed, folder=context.work)
        check_functions(context.functions, key="prepare_data.data.sources")
        if suites:
            prompts = {name: read_prompts(context.path(ref)) for name, ref in sorted(suites.items())}
            tables, overlaps = without_prompts(tables, prompts, config.suite_ngram, origins, report)
            facts |= write_overlaps(overlaps, context)
        steps.begin(1, "making the base model")
        _base_model(config, tables, context.out / "base", seed=context.seed)
    chat = ChatTemplate.load(context.out / "base")
    steps.begin(2, "checking rows against the tokenizer")
    tables = limit(
        tables,
        chat,
        TokenLimits(
            config.max_prompt_tokens, config.max_tokens, config.data.min_tokens if isinstance(config.data, Files) else 1
        ),
        origins=origins,
        report=report,
    )
    del origins  # as large as the tables that are written below
    for table, line in _without_rows(tables, report, config.data).items():
        if table in HELD_OUT:  # training would continue without the evaluation that the source is for
            raise DataError("prepare_data.data.sources", table, line, "mend the rows, or remove the source")
    steps.begin(3, "writing tables")
    children = _write(tables, report, context.out)
    (context.out / "validation.json").write_text(
        json.dumps(report.to_json(), indent=1, ensure_ascii=False), encoding="utf-8"
    )
    (context.out / "preview.md").write_text(preview(tables, chat, rows=config.preview_rows), encoding="utf-8")
    _show(tables, report, config, context)
    steps.begin(4, "done")
    made = context.commit(PreparedDataRef, children=children, metrics=facts | _metrics(tables, report, chat))
    _summarize(tables, report, config, context.label, context.path(made))
    return made


# ---------------------------------------------------------------- rows and model


def _rows(
    data: DataConfig, steps: RowProgress, *, seed: int, folder: Path
) -> tuple[Tables, dict[str, float], dict[str, Origin], DropReport]:
    """Read the tables, facts about them, the origin of each row (by id), and the report of dropped rows so far.

    Rows of files are in temporary files in `folder`, and `steps` shows the loops over them.
    """
    report = DropReport()
    if isinstance(data, Files):
        tables, origins = from_files(data, seed=seed, report=report, folder=folder, progress=steps)
        return tables, {}, origins, report
    # The topic of `rlhf_contrib` that the configuration names; the key contains its code.
    tables, facts = import_module(data.module).make_tables(data, seed=seed)
    report.rows_read[data.type] = sum(len(rows) for rows in tables.named().values())
    return tables, facts, {row.id: Origin(data.type, 0) for rows in tables.named().values() for row in rows}, report


def _base_model(config: PrepareDataConfig, tables: Tables, folder: Path, *, seed: int) -> None:
    """Write the base model to `folder`: initialized from nothing, or a pretrained one in one common layout."""
    template = _template(config.chat_template)
    if isinstance(config.model, PretrainedModel):
        materialize(config.model, folder, chat_template=template, add_bos=config.chat_template == CHATML_TEMPLATE)
        return
    if template is not None:
        raise ConfigError(
            "prepare_data.chat_template",
            config.chat_template,
            "an initialized model has its own template",
            f'set it to "{MODEL_TEMPLATE}"',
        )
    train_tokenizer(tables.training_texts(), vocab_size=config.model.vocab_size, folder=folder)
    initialize_llama(config.model, folder, seed=seed)


def _template(name: str) -> str | None:
    """The chat template called `name`; None for the model's own."""
    if name == MODEL_TEMPLATE:
        return None
    if name == CHATML_TEMPLATE:
        return CHATML_LIKE
    if name in SHIPPED:
        return SHIPPED[name]
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(
            "prepare_data.chat_template",
            name,
            "is not a file",
            f'give "model", "chatml", {", ".join(map(repr, SHIPPED))} or a Jinja file',
        )
    return path.read_text(encoding="utf-8")


# ---------------------------------------------------------------- files and previews


def write_overlaps(overlaps: Overlaps, context: StageContext) -> dict[str, float]:
    """Write the report on the overlap with suites, and log it; return the rows that were left out for each suite."""
    (context.out / OVERLAPS).write_text(
        json.dumps(overlaps.to_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    context.tracker.file(context.out / OVERLAPS, "data")
    for line in overlaps.lines():
        logger.warning("%s: %s", context.label, line)
    return {f"contaminated/{name}": float(count) for name, count in overlaps.rows().items()}


def _write(tables: Tables, report: DropReport, out: Path) -> dict[str, tuple[str, type[ArtifactRef]]]:
    """Write the tables that have rows; return the handles to make."""
    children: dict[str, tuple[str, type[ArtifactRef]]] = {"base": ("base", PolicyRef)}
    if tables.demonstrations:
        write_demonstrations(out / "demonstrations" / "train.parquet", tables.demonstrations)
        write_demonstrations(out / "demonstrations" / "eval.parquet", tables.eval_demonstrations)
        children["demonstrations"] = ("demonstrations", DemonstrationsRef)
    if tables.preferences or tables.feedback:
        write_preferences(out / "preferences" / "train.parquet", tables.preferences)
        write_preferences(out / "preferences" / "eval.parquet", tables.eval_preferences)
        if tables.feedback or tables.eval_feedback:
            write_feedback(out / "preferences", "train", tables.feedback)
            write_feedback(out / "preferences", "eval", tables.eval_feedback)
        children["preferences"] = ("preferences", PreferencesRef)
    if tables.steps:
        write_steps(out / "steps" / "train.parquet", tables.steps)
        write_steps(out / "steps" / "eval.parquet", tables.eval_steps)
        children["steps"] = ("steps", StepsRef)
    for name, prompts in (("prompts", tables.prompts), ("eval_prompts", tables.eval_prompts)):
        if prompts:
            write_prompts(out / name, prompts)
            children[name] = (name, PromptsRef)
    if len(children) == 1:
        raise DataError(
            "prepare_data.data", 0, "no rows are left", f"raise the limits or fix the data; reasons: {report.counts()}"
        )
    return children


def _metrics(tables: Tables, report: DropReport, chat: ChatTemplate) -> dict[str, float]:
    """Rows per table, drops per reason, and mean tokens of prompts and demonstrations."""
    metrics: dict[str, float] = {f"rows/{name}": len(rows) for name, rows in tables.named().items()}
    metrics["dropped/all"] = len(report.drops)
    metrics |= {f"dropped/{reason.replace(' ', '_')}": count for reason, count in report.counts().items()}
    metrics |= {f"masked/{kind}": count for kind, count in report.masked.items()}
    prompts = [len(chat.prompt_ids(row.messages)) for row in tables.prompts[:1000]]
    answers = [
        sample.loss_mask.count(1)
        for row in tables.demonstrations[:1000]
        for sample in chat.examples(row.messages, max_length=1 << 40)
    ]
    for name, lengths in (("prompt", prompts), ("answer", answers)):
        if lengths:
            metrics[f"tokens/{name}_mean"] = sum(lengths) / len(lengths)
            metrics[f"tokens/{name}_max"] = max(lengths)
    return metrics


def _summarize(tables: Tables, report: DropReport, config: PrepareDataConfig, label: str, folder: Path) -> None:
    """Log rows, drops by reason, tables without rows and the files to read; a warning if people should look at them."""
    rows = {name: len(found) for name, found in tables.named().items() if found}
    read, dropped = report.rows_read.total(), len(report.drops)
    missing = _without_rows(tables, report, config.data).values()
    lines = [
        f"{label}: {dropped:,} of {read:,} rows are dropped ({dropped / max(read, 1):.0%})",
        *map(str, report.reasons()[:MOST_REASONS]),
        *missing,
        f"tables: {', '.join(f'{name} {count:,}' for name, count in rows.items())}",
        f"rows as the model sees them: {folder / 'preview.md'}",
        f"every dropped row: {folder / 'validation.json'}",
    ]
    level = logging.WARNING if missing or dropped > MANY_DROPPED * read else logging.INFO
    logger.log(level, "%s", "\n  ".join(lines))


def _without_rows(tables: Tables, report: DropReport, data: DataConfig) -> dict[str, str]:
    """A line for each table, naming the sources that have a share and no remaining rows."""
    if not isinstance(data, Files):
        return {}
    rows = tables.named()
    lines = {}
    for table in data.filled():
        if rows[table] or (trained(table) == "preferences" and _feedback_serves(table, rows)):
            continue
        sources = [source for source in data.sources if getattr(source.use, table)]
        reasons = sorted((one for source in sources for one in report.reasons(source.name)), key=lambda one: -one.rows)
        count = sum(report.rows_read[source.name] for source in sources)
        why = f"most are dropped as {reasons[0].rule}" if reasons else "its share of `use` is too small for them"
        if table == "eval_preferences" and tables.eval_feedback:
            why = "they are answers judged alone, and those to train on are pairs"
        lines[table] = (
            f"no row is left for {table} of the {count:,} rows in {', '.join(s.name for s in sources)}: {why}"
        )
    return lines


def _feedback_serves(table: str, rows: Mapping[str, Sequence[object]]) -> bool:
    """Whether feedback can replace missing pairs in `table`.

    Held-out feedback is of use only together with feedback to train on.
    """
    feedback = rows[table.replace("preferences", "feedback")]
    return bool(feedback and rows["feedback"])


def _show(tables: Tables, report: DropReport, config: PrepareDataConfig, context: StageContext) -> None:
    """Send samples of each table, the preview and the drop report to the tracker."""
    for name, rows in tables.named().items():
        shown = []
        for row in rows[: config.preview_rows]:
            prompt, answers = parts(row)
            texts = ["\n".join(message.content for message in turns) for turns in (prompt, *answers)]
            if isinstance(row, Feedback) and not row.desirable:
                texts.insert(1, "")
            shown.append([row.id, row.source, *texts, *[""] * (3 - len(texts))])
        if shown:
            columns = ["id", "source", "prompt", "answer or chosen", "rejected"]
            context.tracker.table(f"samples/{name}", columns, shown)
    for source, unread in report.not_read.items():
        if unread:
            names = ", ".join(f"{name} ({count})" for name, count in unread.most_common())
            logger.warning(
                "%s: columns and keys of source %s that are not read (rows): %s", context.label, source, names
            )
    if report.drops:
        context.tracker.table("dropped", ["reason", "rows"], [*map(list, report.counts().items())])
    context.tracker.file(context.out / "preview.md", "data")
    context.tracker.file(context.out / "validation.json", "data")
