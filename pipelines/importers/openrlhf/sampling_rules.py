"""Translate batch_inference (the answers and scores of rejection sampling, iterative DPO and conditional SFT), serve_rm
and lora_combiner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipelines.importers.openrlhf.arguments import Arguments
from pipelines.importers.openrlhf.data_rules import chat, datasets
from pipelines.importers.openrlhf.draft import Sheet
from pipelines.importers.openrlhf.training_rules import attention, base_model, precision, start_from, workers

FLOWS = {"rs": "rejection_sampling", "iter_dpo": "iterative_dpo", "csft": "conditional_sft"}
"""Value of --post_processor -> the section that replaces the whole flow."""
_LAST = {"rejection_sampling": "sft", "iterative_dpo": "dpo", "conditional_sft": "sft"}
_OWN_SECTIONS = {
    "sft": "sft",
    "rm": "reward_model",
    "dpo": "dpo",
    "kto": "dpo",
    "prm": "process_reward_model",
    "kd": "distill",
    "ppo": "ppo",
    "infer": "evaluate",
    "serve": "",
    "combine": "",
}


def sections(commands: Sequence[Arguments]) -> list[str]:
    """Return the section of each command: its own, or the flow formed by a generate, a score and a train command."""
    found = [_OWN_SECTIONS[one.command] for one in commands]
    for last, training in enumerate(commands):
        scoring = _writer(commands, training, last)
        generating = _writer(commands, commands[scoring], scoring) if scoring is not None else None
        if scoring is None or generating is None:
            continue
        flow = FLOWS.get(_text(commands[scoring], "post_processor"), "")
        if flow and _LAST[flow] == training.command:
            found[generating] = found[scoring] = found[last] = flow
    return found


def _writer(commands: Sequence[Arguments], reader: Arguments, before: int) -> int | None:
    """Return the last command before `before` whose output `reader` reads."""
    written = [
        number
        for number, one in enumerate(commands[:before])
        if one.command == "infer"
        and _text(one, "output_path")
        and _text(one, "output_path") == _text(reader, "dataset")
    ]
    return written[-1] if written else None


def _text(one: Arguments, name: str) -> str:
    return one.given[name].text if name in one.given else ""


def generate(one: Sheet, section: str) -> None:
    """Write the sampling of a flow; outside a flow it answers the prompts of [evaluate]."""
    _engines(one)
    table = "eval_prompts" if section == "evaluate" else "prompts"
    datasets(one, table, row_format="prompt", columns={"prompt": "input_key"})
    chat(one)
    if section == "iterative_dpo":
        start_from(one, section, ("base", "sft", "rejection_sampling"))
    elif (start := base_model(one)) not in ("base", "sft"):
        one.refuse("pretrain", f"[{section}] starts from sft or the base model, not {start}", "sft")
    if section == "evaluate":
        one.put("evaluate.evaluate.reference", "base")
    key = f"{section}.generate"
    one.put(f"{key}.samples_per_prompt", one.integer("best_of_n"), "best_of_n")
    if one.has("greedy_sampling"):
        one.put(f"{key}.sampling.temperature", 0.0, "greedy_sampling")
        one.ignore("temperature", "greedy answers have none")
    else:
        one.put(f"{key}.sampling.temperature", one.number("temperature"), "temperature")
    one.put(f"{key}.sampling.top_p", one.number("top_p"), "top_p")
    _lengths(one, key)
    if one.has("iter") and one.has("rollout_batch_size"):
        one.put(f"{key}.max_prompts", one.integer("rollout_batch_size"), "rollout_batch_size")
    one.ignore("rollout_batch_size", "is read only with --iter")
    _named(one)
    one.ignore("output_key", "is read only by --eval_task rm")
    one.ignore("max_len", "is read only by --eval_task rm")
    one.ignore("normalize_reward", "is read only by --eval_task rm")
    one.ignore("post_processor", "is read only by --eval_task rm")


def _lengths(one: Sheet, key: str) -> None:
    prompt, answer = one.integer("prompt_max_len"), one.integer("max_new_tokens")
    one.put(f"{key}.sampling.max_tokens", answer, "max_new_tokens")
    one.put("prepare_data.max_prompt_tokens", prompt, "prompt_max_len")
    one.put("prepare_data.max_tokens", prompt + answer, "prompt_max_len", "max_new_tokens")
    one.put("runtime.sampler.max_model_len", prompt + answer, "prompt_max_len", "max_new_tokens")


def score(one: Sheet, section: str) -> None:
    """Write the rewards of a flow and the selection by them."""
    if section == "evaluate":
        for name in one.arguments.given:
            one.refuse(name, "scores are part of a flow", "[rejection_sampling], [iterative_dpo] or [conditional_sft]")
        return
    _engines(one)
    reward_model(one, "pretrain", f"{section}.score.rewards")
    if one.has("normalize_reward"):
        note = "by the mean and spread of all rewards so far"
        one.put(f"{section}.score.rewards.normalise", "running", "normalize_reward", note=note)
    match section:
        case "rejection_sampling":
            one.put(f"{section}.select.type", "best_of_n", "post_processor")
        case "iterative_dpo":
            one.put(f"{section}.select.type", "pairs", "post_processor")
            one.put(f"{section}.select.rule", "max_min", "post_processor")
        case "conditional_sft":
            one.says(
                "post_processor", "the section [conditional_sft]; the prompt states the reward as one of its levels"
            )
    for name in ("dataset", "dataset_probs", "dataset_split", "input_key", "output_key"):
        one.says(name, f"the answers of [{section}.generate]")
    one.put("prepare_data.max_tokens", one.integer("max_len") if one.has("max_len") else 8, "max_len")
    for name in one.arguments.given:
        one.ignore(name, f"the answers of [{section}.generate] are scored as they are")
    _named(one)


def reward_model(one: Sheet, name: str, key: str) -> None:
    """Write a reward term for the profile's reward model: one that the script trains, or an external one, imported."""
    path = one.text(name)
    one.put(f"{key}.terms.reward_model.type", "reward_model", *([name] if path in one.draft.made else []))
    if path in one.draft.made:
        return
    if not path:
        one.draft.note(f"the script names no reward: say in [{key}.terms] what an answer is rewarded for")
        return
    if any(value.startswith("reward_model.") for value in one.draft.values):
        one.refuse(
            name, "the script trains a reward model too, and a profile has one", "[reward_model], or take it out"
        )
        return
    first = path.split(",")[0].strip()
    one.put("import_reward_model.path", first, name)
    if not Path(first).expanduser().is_dir():
        one.draft.note(f"the reward model {first} is not a folder here: download it, and set import_reward_model.path")


def serve(one: Sheet, section: str) -> None:
    """Note the command that serves a reward model: no profile has one."""
    path = one.needed("reward_pretrain")
    made = one.draft.made.get(path, path)
    words = ["rlhf serve-reward --reward-model", made, "--port", str(one.integer("port"))]
    one.says("reward_pretrain", f"--reward-model {made}")
    one.says("port", f"--port {one.text('port')}")
    if one.has("batch_size"):
        words += ["--max-batch", str(one.integer("batch_size"))]
        one.says("batch_size", f"--max-batch {one.text('batch_size')}")
    if one.text("host") not in ("127.0.0.1", "localhost"):
        words += ["--host", one.text("host"), "--token-env", "REWARD_TOKEN"]
        one.says("host", f"--host {one.text('host')}, for those who have the token in --token-env")
    one.ignore("host", "is the default")
    one.refuse("normalize_reward", "scores are served as the model gives them", "ppo.rewards.normalise of the reader")
    one.refuse("max_len", "answers are read up to the length of the reward model", "reward_model.max_length")
    one.refuse("load_in_4bit", "reward models are served whole", "a smaller reward model")
    for name in ("bf16", "param_dtype", "attn_implementation"):
        one.ignore(name, "the model is served in the precision of its weights")
    where = f"{made} is the stage's label after the run" if path in one.draft.made else f"{path} is a folder"
    one.draft.note(f"serve_rm: `{' '.join(words)}` serves the same contract ({where})")


def combine(one: Sheet, section: str) -> None:
    """Record that adapters are merged on export; those from outside are merged before, by peft."""
    base, adapter, out = (one.needed(name) for name in ("model_path", "lora_path", "output_path"))
    one.ignore("is_rm", "reward models are trained whole")
    one.ignore("bf16", "an export has the precision of training")
    if adapter in one.draft.made:
        made = one.draft.made[out] = one.draft.made[adapter]
        for name in ("model_path", "lora_path", "output_path"):
            one.says(name, f"[{made}] exports its policy with the adapters merged in")
        return
    nearest = f"`rlhf serve {base} --adapter {adapter}`, or peft's merge_and_unload() into {out}"
    for name in ("model_path", "lora_path", "output_path"):
        one.refuse(name, "adapters from outside are not merged by a run", nearest)
    one.draft.note(f"lora_combiner: merge {adapter} into {base} beforehand; nearest: {nearest}")


def _engines(one: Sheet) -> None:
    workers(one)
    attention(one)
    precision(one)
    one.ignore("zero_stage", "scores need no partitioned optimizer")
    prefix_caching(one)
    if one.has("max_num_seqs"):
        one.put("runtime.sampler.max_num_seqs", one.integer("max_num_seqs"), "max_num_seqs")
    if one.has("seed"):
        one.put("seed", one.integer("seed"), "seed")


def prefix_caching(one: Sheet) -> None:
    """Write whether engines keep the common prefixes of prompts."""
    if one.has("enable_prefix_caching"):
        one.put("runtime.sampler.prefix_caching", True, "enable_prefix_caching")


def _named(one: Sheet) -> None:
    one.says("eval_task", "the stage of the flow")
    one.says("output_path", "the artifact that the next stage reads")
