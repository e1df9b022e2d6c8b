"""Translate the commands that learn from rows: train_sft, train_rm, train_dpo, train_kto, train_prm, train_kd."""

from __future__ import annotations

from pipelines.importers.openrlhf.data_rules import chat, datasets, held_out
from pipelines.importers.openrlhf.draft import Sheet
from pipelines.importers.openrlhf.training_rules import (
    adapters,
    base_model,
    external_model,
    loop,
    optimizer,
    start_from,
    trainer,
    workers,
)

STARTS = ("base", "sft", "rejection_sampling")
"""Policies from which [dpo] may start."""
TEACHERS = (*STARTS[1:], "dpo", "iterative_dpo", "ppo")
"""Sections whose policies may teach."""
MADE_BY_SELECTION = "the rows are made by [{section}.select]"


def sft(one: Sheet, section: str) -> None:
    """Write supervised fine-tuning. `section` is "sft", or the flow on whose answers it trains."""
    key = "sft" if section == "sft" else f"{section}.sft"
    _training(one, key)
    _seed_and_lengths(one, f"{key}.max_length")
    adapters(one, f"{key}.lora")
    plain_text = not one.text("output_key") and not one.has("apply_chat_template")
    if one.has("pretrain_mode") or (plain_text and section == "sft"):
        one.put(f"{key}.train_on", "all", "pretrain_mode")
    if one.has("packing_samples"):
        one.put(f"{key}.packing", True, "packing_samples")
    if section != "sft":
        _made_rows(one, section, ("input_key", "output_key"))
        return
    _demonstrations(one, plain_text=plain_text)
    base_model(one)
    chat(one)


def reward_model(one: Sheet, section: str) -> None:
    """Write the reward model; both of its losses are -log sigmoid of the margin."""
    _training(one, section)
    _seed_and_lengths(one, f"{section}.max_length")
    adapters(one, None)
    if one.has("margin_loss"):
        one.put(f"{section}.use_margin", True, "margin_loss")
    one.ignore("loss", "sigmoid and logexp are one function")
    _preferences(one)
    start = base_model(one)
    if start not in ("base", "sft"):
        one.refuse("pretrain", f"a reward model starts from sft or the base model, not {start}", "sft")
    elif start == "base" and "sft.max_length" in one.draft.values:
        one.draft.note("the reward model starts from the sft policy here, not from the base model")
    chat(one)


def dpo(one: Sheet, section: str) -> None:
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
            one.refuse(
                "ref_pretrain", "the reference is the policy that it starts from", "--pretrain of the same model"
            )
        one.ignore("ref_pretrain", "the reference is the policy that it starts from")
        _preferences(one)
        chat(one)
        return
    base_model(one)
    one.put(f"{section}.reference", "initial", "ref_pretrain")
    _made_rows(one, section, ("prompt_key", "chosen_key", "rejected_key"))


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
    held_out(one)
    chat(one)


def process_reward_model(one: Sheet, section: str) -> None:
    """Write the process reward model. OpenRLHF judges a step by the token at a placeholder, we by a scalar head."""
    _training(one, section)
    _seed_and_lengths(one, f"{section}.max_length")
    adapters(one, None)
    held_out(one)
    datasets(one, "steps", row_format="stepwise", columns={})
    reason = "a row has columns prompt, completions (the steps) and labels (one for each step)"
    nearest = f"split the text at {one.text('placeholder_token') or 'the placeholder'}; a label is true or false, or in [0, 1]"
    for name in ("input_key", "label_key", "placeholder_token", "reward_tokens"):
        one.refuse(name, reason, nearest)
    one.draft.note(f"write the rows of {one.text('dataset')} anew: {reason}; {nearest}")
    start = base_model(one)
    if start not in ("base", "sft"):
        one.refuse("pretrain", f"a process reward model starts from sft or the base model, not {start}", "sft")
    chat(one)


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
    one.refuse("pretrain_mode", "the answers' tokens are learnt", 'sft.train_on = "all", without a teacher')
    start_from(one, section, (*STARTS, "dpo", "iterative_dpo"))
    _demonstrations(one, plain_text=False)
    chat(one)


# ---------------------------------------------------------------- private


def _demonstrations(one: Sheet, *, plain_text: bool) -> None:
    """Write demonstrations: prompt and answer in two columns, a text, or conversations."""
    held_out(one)
    if one.text("output_key"):
        columns = {"prompt": "input_key", "completion": "output_key"}
        datasets(one, "demonstrations", row_format="prompt_completion", columns=columns)
    elif plain_text:
        datasets(one, "demonstrations", row_format="text", columns={"text": "input_key"})
    else:
        datasets(one, "demonstrations", row_format="messages", columns={"messages": "input_key"})


def _training(one: Sheet, key: str) -> None:
    trainer(one)
    workers(one)
    loop(one, f"{key}.loop")
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
    held_out(one)
    answers = {"chosen": "chosen_key", "rejected": "rejected_key"}
    if one.text("prompt_key"):
        datasets(one, "preferences", row_format="preference", columns={"prompt": "prompt_key", **answers})
    elif one.has("apply_chat_template"):
        datasets(one, "preferences", row_format="implicit_preference", columns=answers)
    else:
        datasets(one, "preferences", row_format="auto", columns=answers)


def _made_rows(one: Sheet, section: str, columns: tuple[str, ...]) -> None:
    """Record that the flow itself makes the rows."""
    for name in ("dataset", "dataset_probs", "dataset_split", *columns):
        one.says(name, MADE_BY_SELECTION.format(section=section))
    for name in ("max_samples", "eval_dataset", "eval_split", "input_template", "apply_chat_template"):
        one.ignore(name, MADE_BY_SELECTION.format(section=section))
    one.ignore("tokenizer_chat_template", "the flow has the template of its prompts")
    if section != "iterative_dpo":
        base_model(one)
