"""Translate the commands that train on rows: train_sft, train_rm, train_dpo, train_kto, train_prm, train_kd."""

import json
from pathlib import PurePosixPath

from rlhf_contrib.openrlhf.draft import Sheet, SheetSource
from rlhf_contrib.openrlhf.policy_rules import (
    adapters,
    base_model,
    exports,
    external_model,
    loop,
    optimizer,
    start_from,
    trainer,
    workers,
)

# ---------------------------------------------------------------- data rules

_LONGEST_DOCUMENT = 100_000_000  # tokens: more than a book, so no document is dropped
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
        one.elsewhere(split, f'split = "{fields["split"]}"')
        if len(weights) == len(paths) > 1:
            fields["weight"] = weights[number]
        add_source(one, fields, use, f"{one.flag(head)} {path}")
    one.elsewhere(head, f"{', '.join(paths)} for the {use}")
    if len(weights) > 1:
        note = "small data sets are repeated until every row was taken"
        one.put("prepare_data.data.mixture", "weights", probabilities)
        one.put("prepare_data.data.stopping_strategy", "all_exhausted", probabilities, note=note)
    one.ignore(probabilities, "one data set is taken whole")
    max_rows(one)
    if head == "dataset":
        translate_held_out(one, use, row_format=row_format, columns=columns)


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
    one.draft.sources.append(SheetSource(fields, comment, [use]))


def source(one: Sheet, path: str, *, row_format: str, columns: dict[str, str]) -> dict[str, object]:
    """The fields of a source except its use; a source on the Hub needs a commit."""
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
        one.elsewhere(flag, f'columns.{ours} = "{one.text(flag)}"')
    own = {ours: one.text(flag) for ours, flag in columns.items()}
    fields["columns"] = {ours: theirs for ours, theirs in own.items() if theirs not in ("", ours)}
    return fields


def max_rows(one: Sheet) -> None:
    """Write the maximum number of rows. Both projects count per table, after mixing."""
    if not one.has("max_samples"):
        return
    rows = one.integer("max_samples")
    if one.arguments.command != "ppo" and rows >= _ALL_ROWS:
        one.ignore("max_samples", "so many samples mean every row")
    else:
        one.put("prepare_data.data.max_rows", rows, "max_samples")


def translate_held_out(one: Sheet, use: str, *, row_format: str, columns: dict[str, str]) -> None:
    """Write each data set of --eval_dataset as held-out rows of the table `use`, in the format of the training rows."""
    for path in [path.strip() for path in one.text("eval_dataset").split(",") if path.strip()]:
        fields = source(one, path, row_format=row_format, columns=columns)
        fields["split"] = one.text("eval_split")
        same = [
            known
            for known in one.draft.sources
            if {**known.fields, **fields, "name": ""} == known.fields | {"name": ""}
        ]
        if any(use in known.uses for known in same):
            reason = f"{path} is trained on, and a row is in one table only"
            one.refuse("eval_dataset", reason, "prepare_data.data.eval_fraction, a share of its prompts")
            continue
        add_source(one, fields, f"eval_{use}", f"{one.flag('eval_dataset')} {path}")
        one.elsewhere("eval_dataset", f"{path} for the held-out {use}")
        one.elsewhere("eval_split", f'split = "{fields["split"]}"')
    one.ignore("eval_split", "there is no data set for evaluation alone")


def translate_chat(one: Sheet) -> None:
    """Write the chat template: the model's, the one in the flags, or one equivalent to the input template."""
    if _documents(one):
        for name in ("apply_chat_template", "tokenizer_chat_template", "input_template"):
            one.ignore(name, "documents are read as they are")
        _raw_text(one)
        return
    if one.has("tokenizer_chat_template"):
        one.draft.template = one.text("tokenizer_chat_template")
        one.put(
            "prepare_data.chat_template",
            one.draft.template_file,
            "tokenizer_chat_template",
            note="in a file of its own",
        )
        one.elsewhere("apply_chat_template", "prepare_data.chat_template")
    elif one.has("apply_chat_template"):
        one.put("prepare_data.chat_template", "model", "apply_chat_template")
    else:
        _raw_text(one)
        return
    one.ignore("input_template", "the chat template is applied instead")


def _documents(one: Sheet) -> bool:
    """Whether an SFT command trains on all tokens of documents (--pretrain_mode)."""
    return one.arguments.command == "sft" and one.has("pretrain_mode")


def _raw_text(one: Sheet) -> None:
    """Write a template for text that OpenRLHF uses unchanged, with the input template around each prompt."""
    template = one.text("input_template") or "{}"
    if _documents(one):
        template = "{}"
    elif one.arguments.command in ("sft", "kto", "kd") and not one.has("input_template"):
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


# ---------------------------------------------------------------- offline rules

STARTS = ("base", "sft", "rejection_sampling")
"""Policies from which [dpo] may start."""
TEACHERS = (*STARTS[1:], "dpo", "iterative_dpo", "ppo")
"""Sections whose policies may be teachers."""
MADE_BY_SELECTION = "the rows are made by [{section}.select]"


def translate_sft(one: Sheet, section: str) -> None:
    """Write supervised fine-tuning. `section` is "sft", or the flow whose answers it trains on."""
    key = "sft" if section == "sft" else f"{section}.sft"
    _training(one, key)
    _seed_and_lengths(one, f"{key}.max_length")
    adapters(one, f"{key}.lora")
    documents = _documents(one) and section == "sft"
    plain_text = documents or (not one.text("output_key") and not one.has("apply_chat_template"))
    if one.has("pretrain_mode") or (plain_text and section == "sft"):
        one.put(f"{key}.train_on", "all", "pretrain_mode")
    if documents:
        note = "OpenRLHF trains on the first --max_len tokens of a document alone, as 0 does"
        one.put(f"{key}.window_overlap", 1, "pretrain_mode", note=note)
        one.put("prepare_data.max_tokens", _LONGEST_DOCUMENT, "pretrain_mode", note="whole documents, for the windows")
    if one.has("packing_samples"):
        one.put(f"{key}.packing", True, "packing_samples")
    if section != "sft":
        _made_rows(one, section, ("input_key", "output_key"))
        return
    _demonstrations(one, plain_text=plain_text)
    base_model(one)
    translate_chat(one)


def translate_reward_model(one: Sheet, section: str) -> None:
    """Write the reward model; both of its losses are -log sigmoid of the margin."""
    _training(one, section)
    _seed_and_lengths(one, f"{section}.max_length")
    adapters(one, f"{section}.lora")
    if one.has("margin_loss"):
        one.put(f"{section}.use_margin", True, "margin_loss")
    one.ignore("loss", "sigmoid and logexp are one function")
    _preferences(one)
    start = base_model(one)
    if start not in ("base", "sft"):
        one.refuse("pretrain", f"a reward model starts from sft or the base model, not {start}", "sft")
    elif start == "base" and "sft.max_length" in one.draft.values:
        one.draft.note("the reward model starts from the sft policy here, not from the base model")
    translate_chat(one)


def translate_dpo(one: Sheet, section: str) -> None:
    """Write DPO, cDPO or IPO (on summed log-probs): `section` is "dpo" or "iterative_dpo"."""
    key = "dpo" if section == "dpo" else f"{section}.dpo"
    preference_loss(one, key)
    if one.has("nll_loss_coef"):
        one.put(f"{key}.nll_coef", one.number("nll_loss_coef"), "nll_loss_coef")
    _training(one, key)
    _seed_and_lengths(one, f"{key}.max_length")
    adapters(one, f"{key}.lora")
    same = one.text("ref_pretrain") in ("", one.text("pretrain"))
    if section == "dpo":
        start_from(one, section, STARTS)
        if not same:
            reference(one)
        one.ignore("ref_pretrain", "the reference is the policy that it starts from")
        _preferences(one)
        translate_chat(one)
        return
    base_model(one)
    one.put(f"{section}.reference", "initial", "ref_pretrain")
    _made_rows(one, section, ("prompt_key", "chosen_key", "rejected_key"))


def reference(one: Sheet) -> None:
    """Write the reference of DPO if it differs from the initial policy."""
    made = one.draft.made.get(one.text("ref_pretrain"), "")
    if not made:
        one.put("recipe.reference.stage", "import_policy")
        external_model(one, "recipe.reference.model", "ref_pretrain")
    one.put("dpo.reference", made or "reference", "ref_pretrain")


def preference_loss(one: Sheet, key: str) -> None:
    """Write the loss of DPO; with --ipo OpenRLHF ignores the label smoothing."""
    if one.has("ipo"):
        one.put(f"{key}.loss.type", "ipo", "ipo")
        one.put(f"{key}.loss.length_average", False, "ipo", note="OpenRLHF sums log-probs")
        one.ignore("label_smoothing", "ipo does not read it")
    elif one.has("label_smoothing") and one.number("label_smoothing") > 0:
        one.put(f"{key}.loss.type", "cdpo", "label_smoothing")
        one.put(f"{key}.loss.label_smoothing", one.number("label_smoothing"), "label_smoothing")
    else:
        one.put(f"{key}.loss.type", "dpo", "label_smoothing" if one.has("label_smoothing") else "beta")
    one.put(f"{key}.loss.beta", one.number("beta"), "beta")


def kto(one: Sheet, section: str) -> None:
    """Write KTO, which is a loss of [dpo]."""
    one.put("dpo.loss.type", "kto", note="train_kto")
    one.put("dpo.loss.beta", one.number("beta"), "beta")
    one.put("dpo.loss.desirable_weight", one.number("desirable_loss_weight"), "desirable_loss_weight")
    one.put("dpo.loss.undesirable_weight", one.number("undesirable_loss_weight"), "undesirable_loss_weight")
    _training(one, "dpo")
    _seed_and_lengths(one, "dpo.max_length")
    adapters(one, "dpo.lora")
    columns = {"prompt": "input_key", "completion": "output_key", "label": "label_key"}
    datasets(one, "preferences", row_format="unpaired_preference", columns=columns)
    start_from(one, "dpo", STARTS)
    translate_chat(one)


def translate_process_reward_model(one: Sheet, section: str) -> None:
    """Write the process reward model. OpenRLHF scores a step by a placeholder's logits, we by a scalar head."""
    _training(one, section)
    _seed_and_lengths(one, f"{section}.max_length")
    adapters(one, f"{section}.lora")
    datasets(one, "steps", row_format="stepwise", columns={})
    reason = "a row has columns prompt, completions (the steps) and labels (one for each step)"
    nearest = f"split the text at {one.text('placeholder_token') or 'the placeholder'}; a label is true or false, or in [0, 1]"
    for name in ("input_key", "label_key", "placeholder_token", "reward_tokens"):
        one.refuse(name, reason, nearest)
    one.draft.note(f"write the rows of {one.text('dataset')} anew: {reason}; {nearest}")
    start = base_model(one)
    if start not in ("base", "sft"):
        one.refuse("pretrain", f"a process reward model starts from sft or the base model, not {start}", "sft")
    translate_chat(one)


def distillation(one: Sheet, section: str) -> None:
    """Write distillation: the cross-entropy with the teacher has the gradient of the forward divergence."""
    _training(one, section)
    _seed_and_lengths(one, f"{section}.max_length")
    adapters(one, f"{section}.lora")
    one.put(f"{section}.kl_weight", one.number("kd_coef"), "kd_coef")
    one.put(f"{section}.divergence.kind", "forward", note="train_kd")
    one.put(f"{section}.divergence.top_k", 0, note="the whole vocabulary, as in train_kd; 64 costs less memory")
    path = one.needed("teacher_model")
    if one.draft.made.get(path) in TEACHERS:
        one.put(f"{section}.teacher", one.draft.made[path], "teacher_model")
    else:
        one.put(f"{section}.teachers.teacher", 1.0, note="the weight of the only teacher")
        external_model(one, f"{section}.external.teacher", "teacher_model")
    one.refuse("pretrain_mode", "the answers' tokens are learned", 'sft.train_on = "all", without a teacher')
    start_from(one, section, (*STARTS, "dpo", "iterative_dpo"))
    _demonstrations(one, plain_text=False)
    translate_chat(one)


# ---------------------------------------------------------------- private


def _demonstrations(one: Sheet, *, plain_text: bool) -> None:
    """Write demonstrations: prompt and answer in two columns, a text, or conversations."""
    if plain_text:
        one.ignore("output_key", "documents are the text of --input_key alone")
        datasets(one, "demonstrations", row_format="text", columns={"text": "input_key"})
    elif one.text("output_key"):
        columns = {"prompt": "input_key", "completion": "output_key"}
        datasets(one, "demonstrations", row_format="prompt_completion", columns=columns)
    else:
        datasets(one, "demonstrations", row_format="messages", columns={"messages": "input_key"})


def _training(one: Sheet, key: str) -> None:
    trainer(one)
    workers(one)
    loop(one, f"{key}.loop")
    exports(one, key)
    optimizer(one, f"{key}.optimizer")


def _seed_and_lengths(one: Sheet, key: str) -> None:
    """Write the seed and the length limit, which covers prompt and answer together on both sides."""
    one.put("seed", one.integer("seed"), "seed")
    length = one.integer("max_len")
    one.put(key, length, "max_len")
    one.put("prepare_data.max_tokens", length, "max_len")
    one.put("prepare_data.max_prompt_tokens", length - 1, "max_len", note="an answer of a token or more has to fit")


def _preferences(one: Sheet) -> None:
    """Write preference pairs: with a column for the prompt, or with the prompt inside both answers."""
    answers = {"chosen": "chosen_key", "rejected": "rejected_key"}
    if one.text("prompt_key"):
        datasets(one, "preferences", row_format="preference", columns={"prompt": "prompt_key", **answers})
    elif one.has("apply_chat_template"):
        datasets(one, "preferences", row_format="implicit_preference", columns=answers)
    else:
        datasets(one, "preferences", row_format="auto", columns=answers)


def _made_rows(one: Sheet, section: str, columns: tuple[str, ...]) -> None:
    """Record that the flow itself produces the rows."""
    for name in ("dataset", "dataset_probs", "dataset_split", *columns):
        one.elsewhere(name, MADE_BY_SELECTION.format(section=section))
    for name in ("max_samples", "eval_dataset", "eval_split", "input_template", "apply_chat_template"):
        one.ignore(name, MADE_BY_SELECTION.format(section=section))
    one.ignore("tokenizer_chat_template", "the flow has the template of its prompts")
    if section != "iterative_dpo":
        base_model(one)
