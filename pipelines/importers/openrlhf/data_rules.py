"""Translate the flags for inputs: data sets with their columns, limits in tokens, chat templates."""

from __future__ import annotations

import json
from pathlib import PurePosixPath

from pipelines.importers.openrlhf.draft import Sheet, Source

_ALL_ROWS = 1_000_000
"""OpenRLHF's default of --max_samples for offline commands; this many or more means every row."""
_FILES = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".gz", ".py")


def datasets(one: Sheet, use: str, *, row_format: str, columns: dict[str, str], head: str = "dataset") -> None:
    """Write each data set of a comma-separated list as a source of the table `use`; `columns` names the flags."""
    paths = [path.strip() for path in one.needed(head).split(",") if path.strip()]
    probabilities = f"{head}_probs"
    weights = one.numbers(probabilities, ",")
    for number, path in enumerate(paths):
        fields = source(one, path, row_format=row_format, columns=columns)
        split = {"prompt_data": "prompt_split", "pretrain_data": "pretrain_split"}.get(head, "dataset_split")
        fields["split"] = one.text(split)
        one.says(split, f'split = "{fields["split"]}"')
        if len(weights) == len(paths) > 1:
            fields["weight"] = weights[number]
        add_source(one, fields, use, f"{one.flag(head)} {path}")
    one.says(head, f"{', '.join(paths)} for the {use}")
    if len(weights) > 1:
        one.put("prepare_data.data.mixture", "weights", probabilities)
    one.ignore(probabilities, "one data set is taken whole")
    max_rows(one)


def add_source(one: Sheet, fields: dict[str, object], use: str, comment: str) -> None:
    """Add a source, or add a use to an identical one."""
    for known in one.draft.sources:
        if {**known.fields, "name": ""} == {**fields, "name": ""}:
            known.uses += [] if use in known.uses else [use]
            known.comment += "" if comment in known.comment else f", {comment}"
            return
    names = {known.fields["name"] for known in one.draft.sources}
    stem = str(fields["name"])
    same = [f"{stem}-{number}" for number in range(2, len(names) + 3)]
    fields["name"] = next(name for name in (stem, *same) if name not in names)
    one.draft.sources.append(Source(fields, comment, [use]))


def source(one: Sheet, path: str, *, row_format: str, columns: dict[str, str]) -> dict[str, object]:
    """Return the fields of a source except its use; a source on the Hub needs a commit."""
    location, _, folder = path.partition("@")
    name = PurePosixPath(location).name or "data"
    for suffix in reversed(_FILES):
        name = name.removesuffix(suffix)
    fields: dict[str, object] = {"name": name, "path": location, "format": row_format}
    if folder:
        one.draft.note(f"{path}: what follows @ is a folder of the data set; give the path of its files")
    if location.count("/") == 1 and not location.startswith((".", "/", "~")) and not location.endswith(_FILES):
        fields["revision"] = ""
        one.draft.note(f"set `revision` of the source {name} to the commit of {location}, or its path to a local file")
    for ours, flag in columns.items():
        one.says(flag, f'columns.{ours} = "{one.text(flag)}"')
    own = {ours: one.text(flag) for ours, flag in columns.items()}
    fields["columns"] = {ours: theirs for ours, theirs in own.items() if theirs not in ("", ours)}
    return fields


def max_rows(one: Sheet) -> None:
    """Write the maximum number of rows; both sides count per table, after mixing."""
    if not one.has("max_samples"):
        return
    rows = one.integer("max_samples")
    if one.arguments.command != "ppo" and rows >= _ALL_ROWS:
        one.ignore("max_samples", "so many samples mean every row")
    else:
        one.put("prepare_data.data.max_rows", rows, "max_samples")


def held_out(one: Sheet) -> None:
    """Report that held-out rows are a share of the training data; offline commands may name another data set."""
    nearest = "prepare_data.data.eval_fraction, a share of the prompts"
    one.refuse("eval_dataset", "rows for evaluation are held out of the training data", nearest)
    if one.has("eval_dataset"):
        one.refuse("eval_split", "rows for evaluation are held out of the training data", nearest)
    one.ignore("eval_split", "rows for evaluation are held out of the training data")


def chat(one: Sheet) -> None:
    """Write the chat template: the model's, the one in the flags, or one equivalent to the input template."""
    if one.has("tokenizer_chat_template"):
        one.draft.template = one.text("tokenizer_chat_template")
        one.put(
            "prepare_data.chat_template",
            one.draft.template_file,
            "tokenizer_chat_template",
            note="in a file of its own",
        )
        one.says("apply_chat_template", "prepare_data.chat_template")
    elif one.has("apply_chat_template"):
        one.put("prepare_data.chat_template", "model", "apply_chat_template")
    else:
        _raw_text(one)
        return
    one.ignore("input_template", "the chat template is applied instead")


def _raw_text(one: Sheet) -> None:
    """Write a template for text that OpenRLHF uses unchanged, with the input template around each prompt."""
    template = one.text("input_template") or "{}"
    if one.arguments.command in ("sft", "kto", "kd") and not one.has("input_template"):
        template = "User: {}\nAssistant: "
    if "{}" not in template:
        one.ignore("input_template", "OpenRLHF does not use it without {}")
        template = "{}"
    before, _, after = template.partition("{}")
    asked = "{{ " + f"{json.dumps(before)} + message['content'] + {json.dumps(after)}" + " }}"
    answered = "{{ message['content'] + eos_token }}"
    jinja = f"{{% for message in messages %}}{{% if message['role'] == 'assistant' %}}{answered}{{% else %}}{asked}"
    jinja += "{% endif %}{% endfor %}"
    if one.draft.template and one.draft.template != jinja:
        one.refuse("input_template", "a profile has one chat template", "the template of the first command")
        return
    one.draft.template = jinja
    one.put("prepare_data.chat_template", one.draft.template_file, "input_template", note="in a file of its own")
