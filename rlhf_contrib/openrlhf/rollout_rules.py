"""Translate the rollout flags of train_ppo and train_ppo_ray: batch sizes, placement and rewards.

Also translates batch_inference (answers and scores of rejection sampling, iterative DPO and conditional SFT), serve_rm
and lora_combiner.
"""

from collections.abc import Sequence
from pathlib import Path

from rlhf_contrib.openrlhf import policy_rules as policy
from rlhf_contrib.openrlhf.draft import Sheet
from rlhf_contrib.openrlhf.flags import Arguments
from rlhf_contrib.openrlhf.offline_rules import add_source, datasets, source, translate_chat
from rlhf_contrib.openrlhf.policy_rules import (
    adapters,
    attention,
    base_model,
    exports,
    external_model,
    optimizer,
    precision,
    start_from,
    trainer,
    workers,
)
from rlhf_core.rewards.model import has_scalar_head

# ---------------------------------------------------------------- sampling rules

FLOWS = {"rs": "rejection_sampling", "iter_dpo": "iterative_dpo", "csft": "conditional_sft"}
"""Value of --post_processor -> the section that replaces the whole flow of commands."""
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
    """The section of each command: a separate one, or the flow formed by a generate, a score and a train command."""
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
    """Index of the last command before `before` whose output `reader` reads; None if no command does."""
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


def translate_generate(one: Sheet, section: str) -> None:
    """Write the sampling of a flow. Outside of a flow, the command answers the prompts of [evaluate]."""
    _engines(one)
    table = "eval_prompts" if section == "evaluate" else "prompts"
    datasets(one, table, row_format="prompt", columns={"prompt": "input_key"})
    translate_chat(one)
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
    if one.has("repetition_penalty") and one.text("eval_task") == "generate":
        one.put(f"{key}.sampling.repetition_penalty", one.number("repetition_penalty"), "repetition_penalty")
    one.ignore("repetition_penalty", "is read only by --eval_task generate")
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


def translate_score(one: Sheet, section: str) -> None:
    """Write the rewards of a flow and the selection by reward."""
    if section == "evaluate":
        for name in one.arguments.given:
            one.refuse(name, "scores are part of a flow", "[rejection_sampling], [iterative_dpo] or [conditional_sft]")
        return
    _engines(one)
    reward_model_of_rollouts(one, "pretrain", f"{section}.score.rewards")
    if one.has("normalize_reward"):
        note = "by the mean and spread of all rewards so far"
        one.put(f"{section}.score.rewards.normalize", "running", "normalize_reward", note=note)
    match section:
        case "rejection_sampling":
            one.put(f"{section}.select.type", "best_of_n", "post_processor")
        case "iterative_dpo":
            one.put(f"{section}.select.type", "pairs", "post_processor")
            one.put(f"{section}.select.rule", "max_min", "post_processor")
        case "conditional_sft":
            one.elsewhere(
                "post_processor", "the section [conditional_sft]; the prompt states the reward as one of its levels"
            )
    for name in ("dataset", "dataset_probs", "dataset_split", "input_key", "output_key"):
        one.elsewhere(name, f"the answers of [{section}.generate]")
    one.put("prepare_data.max_tokens", one.integer("max_len") if one.has("max_len") else 8, "max_len")
    for name in one.arguments.given:
        one.ignore(name, f"the answers of [{section}.generate] are scored as they are")
    _named(one)


def reward_model_of_rollouts(one: Sheet, name: str, key: str) -> None:
    """Write a reward term for the profile's reward model: one trained by the script, or an imported external one."""
    path = one.text(name)
    one.put(f"{key}.terms.reward_model.type", "reward_model", *([name] if path in one.draft.made else []))
    if path in one.draft.made:
        return
    if not path:
        one.draft.note(f"the script names no reward: set one in [{key}.terms]")
        return
    if any(value.startswith("reward_model.") for value in one.draft.values):
        one.refuse(
            name, "the script trains a reward model too, and a profile has one", "[reward_model], or take it out"
        )
        return
    first = path.split(",")[0].strip()
    outside(one, "import_reward_model", first, name)
    if not Path(first).expanduser().is_dir():
        one.draft.note(f"the reward model {first} is not a folder here: download it, and set import_reward_model.path")


def outside(one: Sheet, key: str, path: str, name: str) -> None:
    """Write the import of a reward model, given by the flag `name`. OpenRLHF scores the policy's text unchanged."""
    one.put(f"{key}.path", path, name)
    if one.draft.template:
        one.put(f"{key}.template", "policy", note="the script applies no chat template")


def translate_serve(one: Sheet, section: str) -> None:
    """Note the command that serves a reward model; profiles do not contain servers."""
    path = one.needed("reward_pretrain")
    made = one.draft.made.get(path, path)
    words = ["rlhf serve-reward --reward-model", made, "--port", str(one.integer("port"))]
    one.elsewhere("reward_pretrain", f"--reward-model {made}")
    one.elsewhere("port", f"--port {one.text('port')}")
    if one.has("batch_size"):
        words += ["--max-batch", str(one.integer("batch_size"))]
        one.elsewhere("batch_size", f"--max-batch {one.text('batch_size')}")
    if one.text("host") not in ("127.0.0.1", "localhost"):
        words += ["--host", one.text("host"), "--token-env", "REWARD_TOKEN"]
        one.elsewhere("host", f"--host {one.text('host')}, for those who have the token in --token-env")
    one.ignore("host", "is the default")
    one.refuse("normalize_reward", "scores are served as the model gives them", "ppo.rewards.normalize of the reader")
    one.refuse("max_len", "answers are read up to the length of the reward model", "reward_model.max_length")
    one.refuse("load_in_4bit", "reward models are served whole", "a smaller reward model")
    for name in ("bf16", "param_dtype", "attn_implementation"):
        one.ignore(name, "the model is served in the precision of its weights")
    where = f"{made} is the stage's label after the run" if path in one.draft.made else f"{path} is a folder"
    one.draft.note(f"serve_rm: `{' '.join(words)}` serves the same contract ({where})")


def combine(one: Sheet, section: str) -> None:
    """Record that adapters are merged on export; external adapters are merged beforehand, with peft."""
    base, adapter, out = (one.needed(name) for name in ("model_path", "lora_path", "output_path"))
    one.ignore("is_rm", "exports are merged, those of reward models, too")
    one.ignore("bf16", "an export has the precision of training")
    if one.text("param_dtype") != "bf16":
        one.refuse("param_dtype", "an export has the precision of training", 'runtime.trainer.dtype = "bfloat16"')
    one.ignore("param_dtype", "an export has the precision of training, which is bfloat16")
    if adapter in one.draft.made:
        made = one.draft.made[out] = one.draft.made[adapter]
        for name in ("model_path", "lora_path", "output_path"):
            one.elsewhere(name, f"[{made}] exports its policy with the adapters merged in")
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
    one.elsewhere("eval_task", "the stage of the flow")
    one.elsewhere("output_path", "the artifact that the next stage reads")


# ---------------------------------------------------------------- rollout rules

_CRITIC = ("critic_learning_rate", "critic.adam.betas", "critic.adam.eps", "critic.adam.weight_decay")
_MOST_TURNS = 64
_CRITIC_SCHEDULE = ("critic.lr_scheduler", "critic.lr_warmup_ratio", "critic.min_lr_ratio", "critic.max_norm")


def translate_ppo(one: Sheet, section: str) -> None:
    """Write policy optimization, in the order of a step: prompts, answers, rewards, advantages, updates."""
    workers(one)
    placement(one)
    trainer(one)
    one.put("seed", one.integer("seed"), "seed")
    datasets(
        one, "prompts", row_format="prompt", columns={"prompt": "input_key", "label": "label_key"}, head="prompt_data"
    )
    translate_chat(one)
    start_from(one, section, ("base", "sft", "rejection_sampling", "dpo", "iterative_dpo"))
    answer_tokens = lengths(one)
    steps(one)
    rewards(one)
    policy.shaping(one, answer_tokens)
    policy.advantage(one)
    policy.policy_loss(one)
    policy.correction(one)
    policy.kl(one)
    policy.extras(one)
    overlap(one)
    optimizer(one, "ppo.optimizer", head="actor")
    value_model(one)
    adapters(one, "ppo.lora")
    translate_demonstrations(one)
    saving(one)
    evaluation(one, answer_tokens)


def lengths(one: Sheet) -> int:
    """Write the token limits; returns the maximum number of tokens of an answer.

    Up to 0.9.9, prompts and answers have separate limits; later versions limit both together and, if given, the answer.
    """
    total_is_said = one.arguments.dotted or one.has("max_new_tokens")
    names = ("max_len", "max_new_tokens") if total_is_said else ("prompt_max_len", "generate_max_len")
    if not total_is_said:
        prompt, answer = one.integer("prompt_max_len"), one.integer("generate_max_len")
        one.ignore("max_len", "the limits of prompt and answer add up")
    else:
        total = one.integer("max_len") if one.text("max_len") else 2048
        answer = one.integer("max_new_tokens") if one.text("max_new_tokens") else total // 2
        prompt = total - answer
        for name, part in (("prompt_max_len", "prompts"), ("generate_max_len", "answers")):
            one.refuse(name, "is not read beside --max_new_tokens", f"the limits of {part} in the profile")
        if not one.text("max_new_tokens"):
            one.draft.note(
                f"prompt and answer have {total} tokens together there; here {prompt} and {answer}: change the shares"
            )
    one.put("prepare_data.max_prompt_tokens", prompt, *names)
    one.put("prepare_data.max_tokens", prompt + answer, *names)
    if one.draft.values["runtime.sampler.type"].value == "vllm":
        one.put("runtime.sampler.max_model_len", prompt + answer, *names)
    one.put("ppo.sampling.max_tokens", answer, names[1] if one.text(names[1]) else names[0])
    one.put("ppo.sampling.temperature", one.number("temperature"), "temperature")
    if one.has("top_p") and one.number("top_p") < 1:
        one.refuse("top_p", "the ratios compare the whole distributions of sampler and trainer", "sampling.top_p = 1")
    one.ignore("top_p", "1 takes the whole distribution")
    return answer


def steps(one: Sheet) -> None:
    """Write the step: R prompts with n samples each, and optimizer steps over `train_batch_size` of R * n rollouts."""
    prompts, samples, batch = (
        one.count(name) for name in ("rollout_batch_size", "n_samples_per_prompt", "train_batch_size")
    )
    one.put("ppo.prompts_per_step", prompts, "rollout_batch_size")
    one.put("ppo.samples_per_prompt", samples, "n_samples_per_prompt")
    one.put("ppo.epochs", one.integer("max_epochs"), "max_epochs")
    rollouts = prompts * samples
    note = f"{prompts} * {samples} rollouts / {batch}"
    one.put("ppo.minibatches", max(1, rollouts // batch), "train_batch_size", note=note)
    if rollouts < batch:
        reason = f"a step has {rollouts} rollouts, and an optimizer step takes no more"
        one.refuse("train_batch_size", reason, f"ppo.prompts_per_step = {-(-batch // samples)}")
    elif rollouts % batch:
        one.draft.note(
            f"{rollouts} rollouts are no multiple of {batch}: the {rollouts // batch} optimizer steps share them all"
        )
    if one.has("max_samples"):
        per_episode = max(1, one.integer("max_samples") // prompts)
        number = per_episode * one.integer("num_episodes")
        note = f"episodes * prompts / {prompts}; fewer if the data has fewer prompts"
        one.put("ppo.steps", number, "num_episodes", "max_samples", note=note)
        return
    one.put("ppo.steps", 100, note="a guess: episodes * prompts / prompts_per_step")
    one.refuse(
        "num_episodes", "the script does not set the number of prompts", f"ppo.steps = episodes * prompts / {prompts}"
    )
    one.draft.note(f"set ppo.steps to {one.text('num_episodes')} * the number of prompts / {prompts}")


def pools(one: Sheet) -> None:
    """Write which models have GPUs separate from the policy's, following Ray's placement there."""
    scored = bool(one.text("reward_pretrain")) and not (one.text("remote_rm_url") or one.text("agent_func_path"))
    used = {
        "ref": one.number("init_kl_coef") > 0,
        "critic": one.text("advantage_estimator") == "gae",
        "reward": scored,
    }
    role = {"ref": "reference", "critic": "value_model", "reward": "reward_model"}
    beside: dict[str, tuple[str, str]] = {}
    if one.has("colocate_actor_ref"):
        beside["ref"] = "colocate_actor_ref", "the policy"
    if one.has("colocate_all_models"):
        beside = dict.fromkeys(used, ("colocate_all_models", "the policy"))
    # These two flags override even --colocate_all_models. Without a value model OpenRLHF ignores this flag.
    pair = used["critic"] and one.has("colocate_critic_reward")
    if pair:
        beside.pop("critic", None)
        beside["reward"] = "colocate_critic_reward", "the value model"
    for head, is_used in used.items():
        flags = (f"{head}_num_nodes", f"{head}_num_gpus_per_node")
        if head in beside or not is_used:
            name, whom = beside.get(head, ("", ""))
            reason = f"{one.flag(name)} puts it beside {whom}" if is_used else "the run has no such model"
            for flag in flags:
                one.ignore(flag, reason)
            continue
        roles = [role[head]]
        if head == "critic" and pair and scored:
            roles.append(role["reward"])
        one.put(f"runtime.pools.{head}.workers", one.count(flags[0]) * one.count(flags[1]), *flags)
        one.put(f"runtime.pools.{head}.gpus_per_worker", 1.0)
        one.put(f"runtime.pools.{head}.roles", roles)
    for flag, needed in (("colocate_actor_ref", used["ref"]), ("colocate_critic_reward", used["critic"])):
        if needed:
            one.elsewhere(flag, "runtime.pools: models that share GPUs are in one pool")
        one.ignore(flag, "the run has one of the two models at most")


def _engines_have_all(one: Sheet, tensor_parallel: int) -> bool:
    """Whether engines that span several GPUs use as many GPUs as training."""
    if one.arguments.module != "train_ppo_ray" or not one.has("vllm_num_engines"):
        return False
    trained = one.count("actor_num_nodes") * one.count("actor_num_gpus_per_node")
    return one.integer("vllm_num_engines") * tensor_parallel == trained


def placement(one: Sheet) -> None:
    """Write workers and engines. A shared GPU is split in half between a train worker and an engine."""
    if one.arguments.module == "train_ppo_ray":
        number = one.count("actor_num_nodes") * one.count("actor_num_gpus_per_node")
        one.put("runtime.train_workers", number, "actor_num_nodes", "actor_num_gpus_per_node")
        pools(one)
    tensor_parallel = one.integer("vllm_tensor_parallel_size")
    whole = tensor_parallel == 1 or _engines_have_all(one, tensor_parallel)
    share = one.has("colocate_all_models") and whole and not one.has("async_train")
    halves = ["colocate_all_models"] if share else []
    one.put("runtime.gpus_per_train_worker", 0.5 if share else 1.0, *halves)
    one.put("runtime.gpus_per_engine", 0.5 if share else float(tensor_parallel), *halves)
    if one.has("async_train"):
        what = "runtime.train_workers have the models; with --async_train the engines have GPUs of their own"
        one.elsewhere("colocate_all_models", what)
    elif not share:
        reason = f"engines of {tensor_parallel} GPUs share them only if they use each that trains"
        one.refuse("colocate_all_models", reason, "GPUs of their own, as written")
    if one.has("vllm_num_engines") and one.integer("vllm_num_engines") == 0:
        one.put("runtime.sampler.type", "hf", "vllm_num_engines")
        engine_flags = (
            "vllm_tensor_parallel_size",
            "vllm_gpu_memory_utilization",
            "enforce_eager",
            "vllm_enable_sleep",
        )
        for name in (*engine_flags, "deepspeed_enable_sleep", "enable_prefix_caching"):
            one.ignore(name, "there is no engine")
        return
    one.put("runtime.sampler.type", "vllm")
    if one.has("vllm_num_engines"):
        one.put("runtime.sampler.engines", one.integer("vllm_num_engines"), "vllm_num_engines")
    one.put("runtime.sampler.tensor_parallel", tensor_parallel, "vllm_tensor_parallel_size")
    fraction = one.number("vllm_gpu_memory_utilization")
    one.put("runtime.sampler.gpu_memory_fraction", fraction, "vllm_gpu_memory_utilization")
    if share and one.has("vllm_enable_sleep"):
        one.put("runtime.sampler.sleep", True, "vllm_enable_sleep")
    elif share and not one.has("vllm_gpu_memory_utilization"):
        one.put("runtime.sampler.gpu_memory_fraction", 0.4, note="no engine sleeps: the trainer needs the rest")
    elif share and fraction > 0.5:
        one.draft.note(f"no engine sleeps: {fraction:g} of a shared GPU may leave the trainer too little; lower it")
    if share and one.has("deepspeed_enable_sleep"):
        one.put("runtime.trainer.sleep", True, "deepspeed_enable_sleep")
    one.ignore("deepspeed_enable_sleep", "a train worker with GPUs of its own need not sleep")
    one.ignore("vllm_enable_sleep", "an engine with GPUs of its own need not sleep")
    one.put("runtime.sampler.enforce_eager", one.has("enforce_eager"), "enforce_eager")
    prefix_caching(one)


def rewards(one: Sheet) -> None:
    """Write the reward terms: an agent's rewards, a `reward_func` file or servers unchanged, or the reward model."""
    if one.text("agent_func_path").endswith(".py"):
        agent(one)
        return
    one.refuse("agent_func_path", "an agent is a Python file", 'ppo.agent.file = "agent.py"')
    url = one.text("remote_rm_url")
    if url.endswith(".py") or url.startswith(("http://", "https://")):
        term = "ppo.rewards.terms.remote"
        if url.endswith(".py"):
            one.put(f"{term}.type", "function", "remote_rm_url")
            one.put(f"{term}.function", f"{url}:reward_func", "remote_rm_url")
            one.put(f"{term}.batch_size", 1, note="as OpenRLHF calls it; more where the function takes lists")
        else:
            one.put(f"{term}.type", "remote", "remote_rm_url")
            one.put(f"{term}.urls", [part.strip() for part in url.split(",")], "remote_rm_url")
        one.ignore("reward_pretrain", "OpenRLHF uses the remote reward instead")
        return
    one.refuse("remote_rm_url", "rewards are a Python file or addresses", 'ppo.rewards.terms.remote.type = "remote"')
    reward_model_of_rollouts(one, "reward_pretrain", "ppo.rewards")
    for number, path in enumerate(one.text("reward_pretrain").split(",")[1:], start=2):  # OpenRLHF adds them
        name = f"reward_model_{number}"
        one.put(f"recipe.{name}.stage", "import_reward_model")
        outside(one, f"recipe.{name}", path.strip(), "reward_pretrain")
        one.put(f"ppo.rewards.terms.{name}.type", "reward_model")
        one.put(f"ppo.rewards.terms.{name}.model", name, "reward_pretrain")


def agent(one: Sheet) -> None:
    """Write the agent: its file is used unchanged, and its rewards are the only ones."""
    one.put("ppo.agent.type", "openrlhf", "agent_func_path")
    one.put("ppo.agent.file", one.text("agent_func_path"), "agent_func_path")
    one.put("ppo.agent.max_turns", _MOST_TURNS, note="OpenRLHF counts tokens and not turns")
    one.put("ppo.agent.max_episode_tokens", one.draft.values["runtime.sampler.max_model_len"].value, "max_len")
    one.put("ppo.rewards.terms.episode.type", "episode", "agent_func_path")
    for name in ("remote_rm_url", "reward_pretrain"):
        one.ignore(name, "OpenRLHF takes the agent's rewards instead")


def overlap(one: Sheet) -> None:
    """Write how far sampling may run ahead of training."""
    if one.has("async_train") and "ppo.ahead.low" in one.draft.values:
        for name in ("async_train", "async_queue_size"):
            one.refuse(
                name, "dynamic sampling draws again after a step is scored", '[ppo.ahead] of type "dynamic" alone'
            )
    elif one.has("async_train"):
        queue = one.integer("async_queue_size") if one.has("async_queue_size") else 1
        corrected = one.draft.values["ppo.correction.level"].value != "off"
        one.put("ppo.ahead.type", "staleness", "async_train")
        one.put("ppo.ahead.steps", min(4, queue) if corrected else 1, "async_train", "async_queue_size")
        if queue > 1 and not corrected:
            one.refuse("async_queue_size", "older answers need a correction", "ppo.correction, then ppo.ahead.steps")
    one.ignore("async_queue_size", "sampling and training take turns without --async_train")
    reason = "OpenRLHF changes the weights within an answer whenever they come"
    one.refuse("partial_rollout", reason, '[ppo.ahead] of type "partial", which does so after a number of tokens')


def critic(one: Sheet) -> None:
    """Write the initial model of the value model if it is not the first reward model."""
    path = one.text("critic_pretrain")
    made = one.draft.made.get(path, "base" if path == one.text("pretrain") else "")
    scoring = [part.strip() for part in one.text("reward_pretrain").split(",")]
    if not made and "ppo.rewards.terms.reward_model_2.type" in one.draft.values and path in scoring:
        made = f"reward_model_{scoring.index(path) + 1}"
    if not made and has_scalar_head(Path(path).expanduser()):
        one.put("recipe.critic.stage", "import_reward_model")
        outside(one, "recipe.critic", path, "critic_pretrain")
    elif not made:
        one.put("recipe.critic.stage", "import_policy")
        external_model(one, "recipe.critic.model", "critic_pretrain")
        if not Path(path).expanduser().is_dir():
            other = f'recipe.critic = {{stage = "import_reward_model", path = "{path}"}}'
            one.draft.note(f"the critic {path} is not a folder here: if it is a reward model, set {other}")
    one.put("ppo.critic", made or "critic", "critic_pretrain")


def value_model(one: Sheet) -> None:
    """Write the value model's optimizer. Both projects start the value model from the reward model, or the policy."""
    if one.text("advantage_estimator") == "gae":
        optimizer(one, "ppo.value.optimizer", head="critic")
        if one.text("critic_pretrain") not in ("", one.text("reward_pretrain").split(",")[0].strip()):
            critic(one)
        adapters(one, "ppo.value.lora")
    for name in (*_CRITIC, *_CRITIC_SCHEDULE):
        one.ignore(name, "there is no value model")
    one.ignore("critic_pretrain", "the value model starts from the reward model, or else from the policy")


def translate_demonstrations(one: Sheet) -> None:
    """Write the demonstrations of PPO-ptx (up to 0.7.0)."""
    if one.has("pretrain_data"):
        datasets(one, "demonstrations", row_format="auto", columns={}, head="pretrain_data")
        one.put("ppo.ptx.coef", one.number("ptx_coef"), "ptx_coef")
        one.put("ppo.ptx.batch_size", one.integer("train_batch_size"), "train_batch_size")
        one.put("ppo.ptx.max_length", one.integer("max_len") if one.text("max_len") else 2048, "max_len")
    for name in ("ptx_coef", "pretrain_split", "pretrain_data_probs"):
        one.ignore(name, "there is no --pretrain_data")


def saving(one: Sheet) -> None:
    """Write how often checkpoints are saved."""
    if one.has("save_steps") and one.integer("save_steps") > 0:
        one.put("ppo.checkpoint_every", one.integer("save_steps"), "save_steps")
    exports(one, "ppo")
    one.ignore("save_steps", "every stage saves; `checkpoint_every` sets the interval")
    one.ignore("logging_steps", "every step is tracked")


def evaluation(one: Sheet, answer_tokens: int) -> None:
    """Write the evaluation of the policy: a stage after training on the rows of --eval_dataset, and [ppo.evaluate]
    every --eval_steps on prompts that are held out of the training prompts."""
    if not one.has("eval_dataset"):
        for name in ("eval_split", "eval_temperature", "eval_n_samples_per_prompt", "eval_steps", "best_metric_key"):
            one.ignore(name, "there is no --eval_dataset")
        return
    if one.has("eval_steps") and one.integer("eval_steps") > 0:
        note = "on prompts held out of the training prompts; [evaluate] has the rows of --eval_dataset, after training"
        one.put("ppo.evaluate.every", one.integer("eval_steps"), "eval_steps", note=note)
        one.put("ppo.evaluate.samples", one.integer("eval_n_samples_per_prompt"), "eval_n_samples_per_prompt")
        best = one.has("best_metric_key") and one.text("best_metric_key") != "none"
        if best and one.has("enable_ema"):
            reason = "the average of the weights is the result"
            one.refuse("best_metric_key", reason, 'ppo.evaluate.export = "best" with ppo.optimizer.ema_decay = 0')
            best = False
        note = "of eval/reward/mean; OpenRLHF keeps the last one, too" if best else ""
        one.put("ppo.evaluate.export", "best" if best else "last", "best_metric_key", note=note)
    one.ignore("eval_steps", "[evaluate] judges the policy after training")
    one.ignore("best_metric_key", "is read only with --eval_steps")
    for path in one.text("eval_dataset").split(","):
        fields = source(one, path.strip(), row_format="prompt", columns={"prompt": "input_key", "label": "label_key"})
        fields["split"] = one.text("eval_split")
        add_source(one, fields, "eval_prompts", f"{one.flag('eval_dataset')} {path}")
    one.elsewhere("eval_dataset", "a source for the eval_prompts")
    one.elsewhere("eval_split", "split of the source for the eval_prompts")
    key = "evaluate.generate"
    one.put(f"{key}.samples_per_prompt", one.integer("eval_n_samples_per_prompt"), "eval_n_samples_per_prompt")
    one.put(f"{key}.sampling.temperature", one.number("eval_temperature"), "eval_temperature")
    one.put(f"{key}.sampling.max_tokens", answer_tokens, note="ppo.sampling.max_tokens")
    one.put("evaluate.evaluate.reference", one.draft.values["ppo.start_from"].value)
