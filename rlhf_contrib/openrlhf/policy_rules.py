"""Translate the training flags of train_ppo and train_ppo_ray: advantages, losses, KL, rewards."""

from rlhf_contrib.openrlhf.draft import Sheet, Value

_ADVANTAGES = {
    "gae": "gae",
    "reinforce": "reinforce++",
    "rloo": "rloo",
    "reinforce_baseline": "reinforce++-baseline",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
    "flash_reinforce": "flash_reinforce",
}
_LOSS_OF_GROUPS = "an estimator that divides by the spread of a group"
_AGGREGATIONS = {"token-mean": "token_mean", "seq-mean-token-mean": "seq_mean_token_mean"}


def advantage(one: Sheet) -> None:
    """Write the estimator. OpenRLHF reads gamma only for gae and reinforce, and lambda only for gae."""
    said = one.text("advantage_estimator")
    ours = _ADVANTAGES.get(said, "reinforce++")
    if said in _ADVANTAGES:
        one.put("ppo.advantage.type", ours, "advantage_estimator")
    else:
        one.put("ppo.advantage.type", ours)
        one.refuse("advantage_estimator", f"no estimator is {said}", f'ppo.advantage.type = "{ours}"')
    if said in ("gae", "reinforce"):
        one.put("ppo.advantage.gamma", one.number("gamma"), "gamma")
    if said == "gae":
        note = "" if one.has("lambd") else "0.95 before 0.6.4"
        one.put("ppo.advantage.gae_lambda", one.number("lambd"), "lambd", note=note)
    if said == "group_norm":
        one.put("ppo.advantage.eps", 1e-9, note="OpenRLHF's")
    one.ignore("gamma", f"OpenRLHF takes 1 for {said}")
    one.ignore("lambd", f"{said} does not read it")
    if said in ("gae", "reinforce", "reinforce_baseline"):
        reason = "advantages are centered and scaled together"
        one.refuse("no_advantage_std_norm", reason, 'ppo.advantage.type = "dr_grpo" (only centered)')
    one.ignore("no_advantage_std_norm", f"{said} does not read it")


def policy_loss(one: Sheet) -> None:
    """Write the clipped loss. Two bounds take precedence over one, and gspo has a separate aggregation."""
    kind = "gspo" if one.text("policy_loss_type") == "gspo" else "clip"
    one.put("ppo.loss.type", kind, "policy_loss_type")
    name = "eps_clip_low_high" if one.has("eps_clip_low_high") else "eps_clip"
    low, high = one.pair(name) if name == "eps_clip_low_high" else (one.number(name), one.number(name))
    one.put("ppo.loss.clip_low", low, name)
    one.put("ppo.loss.clip_high", high, name)
    one.ignore("eps_clip", f"{one.flag('eps_clip_low_high')} wins")
    if kind == "gspo":
        one.refuse("dual_clip", "gspo has no second bound", 'ppo.loss.type = "clip"')
        one.ignore("actor.loss_agg_mode", "gspo takes the mean over sequences")
        return
    if one.has("dual_clip"):
        one.put("ppo.loss.dual_clip", one.number("dual_clip"), "dual_clip")
    if one.has("actor.loss_agg_mode"):
        said = one.text("actor.loss_agg_mode")
        if said in _AGGREGATIONS:
            one.put("ppo.loss.aggregation", _AGGREGATIONS[said], "actor.loss_agg_mode")
        else:
            one.refuse("actor.loss_agg_mode", f"known are {', '.join(_AGGREGATIONS)}", 'aggregation = "token_mean"')


def kl(one: Sheet) -> None:
    """Write the KL penalty: k1 in the reward; in the loss k2, k3 unchanged, or any value with the gradient of k2."""
    one.put("ppo.kl.coef", one.number("init_kl_coef"), "init_kl_coef")
    estimator = "k3" if one.has("use_kl_estimator_k3") else one.text("kl_estimator")
    name = "use_kl_estimator_k3" if one.has("use_kl_estimator_k3") else "kl_estimator"
    grouped = one.text("advantage_estimator") == "group_norm" and one.number("init_kl_coef") > 0
    in_loss = one.has("use_kl_loss") or grouped
    if grouped and not one.has("use_kl_loss"):
        note = "grpo divides by the spread of a group, so the penalty is no part of the reward"
        one.put("ppo.kl.in", "loss", note=note)
        one.draft.note(f"OpenRLHF takes the penalty off the reward of group_norm, here it is in the loss: {note}")
    else:
        one.put("ppo.kl.in", "loss" if in_loss else "reward", "use_kl_loss" if in_loss else name)
    if not in_loss and one.text("advantage_estimator") in ("rloo", "reinforce_baseline", "dr_grpo", "flash_reinforce"):
        one.put("ppo.kl.credit", "token", note="the baseline first, then the penalty on every token")
    if one.has("use_kl_loss") and one.number("init_kl_coef") > 0:
        _kl_in_loss(one, name, estimator)
    elif one.has("use_kl_loss"):
        one.ignore(name, "a coefficient of 0 is no penalty")
    elif estimator == ("k2" if in_loss else "k1"):
        one.elsewhere(name, f"{estimator} is the estimator of ppo.kl.in")
    elif in_loss:
        one.refuse(name, f"{estimator} in the reward is no part of {_LOSS_OF_GROUPS}", 'ppo.kl.in = "loss"')
    else:
        one.refuse(name, "the penalty in the reward is k1", 'k1, by kl.in = "reward"')
    one.ignore("kl_estimator", "--use_kl_estimator_k3 wins")
    one.ignore("algo.kl.unbiased_gradient", "is read only with a penalty in the loss")
    if one.has("kl_target"):
        reason = "OpenRLHF's target is nats per token, ppo.kl.target per sequence"
        one.refuse("kl_target", reason, "ppo.kl.target = that * the mean length of an answer")
        one.refuse("kl_horizon", reason, f"ppo.kl.horizon = {one.text('kl_horizon')} with ppo.kl.target")
    one.ignore("kl_horizon", "is read only with a target")


def _kl_in_loss(one: Sheet, name: str, estimator: str) -> None:
    """Write the estimator of a penalty in the loss; with `unbiased_gradient` every estimator has the gradient of k2."""
    unbiased = "algo.kl.unbiased_gradient"
    if one.has(unbiased):
        one.put(
            "ppo.kl.estimator", estimator, name, unbiased, note="with the gradient of k2, not weighted by pi / pi_old"
        )
    elif estimator == "k1":
        one.refuse(
            name, "the gradient of k1 as a loss is zero on average", 'kl.estimator = "k1", with the gradient of k2'
        )
    elif estimator == "k3":
        one.put("ppo.kl.estimator", "k3_direct", name)
    else:
        one.put("ppo.kl.estimator", estimator, name)


def correction(one: Sheet) -> None:
    """Write the importance weights between sampler and trainer, from the flags of 0.8.11, 0.9.2 or 0.11.2."""
    level, mode = "algo.advantage.is_correction_level", "algo.advantage.is_correction_mode"
    gating = "algo.advantage.is_correction_gating"
    names = ("vllm_is_correction_type", "vllm_is_truncated_threshold", "use_icepop", mode, gating)
    switch = "enable_vllm_is_correction"
    if not one.has(switch) and (not one.has(level) or one.text(level) == "off"):
        one.put("ppo.correction.level", "off", level if one.has(level) else switch)
        for name in names:
            one.ignore(name, "the correction is off")
        return
    if one.has(gating) and one.text(gating) != "ratio":
        _divergence(one, level, mode, gating)
        return
    kind = "icepop" if one.has("use_icepop") else one.text("vllm_is_correction_type")
    sequence = kind == "seq-mask-tis" or (one.has(level) and one.text(level) == "seq")
    masks = kind != "tis" or (one.has(level) and one.text(mode) != "clip")  # 0.11.2 masks unless told to clip
    bounds = one.numbers("vllm_is_truncated_threshold")
    from_type = "use_icepop" if one.has("use_icepop") else "vllm_is_correction_type"
    value = "geometric" if sequence else "token"
    one.put("ppo.correction.level", value, switch, level, "vllm_is_correction_type")
    one.put("ppo.correction.mode", "mask" if masks else "truncate", mode, from_type)
    one.put("ppo.correction.cap", bounds[-1], "vllm_is_truncated_threshold")
    if sequence and masks:
        note = "tokens of a sequence that is kept weigh their own ratio, up to this; OpenRLHF has no bound"
        one.put("ppo.correction.token_cap", bounds[-1], note=note)
    if masks and len(bounds) > 1:
        one.put("ppo.correction.low", bounds[0], "vllm_is_truncated_threshold")
    elif masks:
        one.put("ppo.correction.low", 0.0, "vllm_is_truncated_threshold", note="one bound is the upper one")
    elif len(bounds) > 1 and bounds[0] > 0:
        one.draft.note(
            "importance weights are bounded above only; OpenRLHF's truncation raises small ones to its lower bound"
        )
    one.elsewhere(gating, "the ratio itself is judged")
    one.ignore("vllm_is_correction_type", "--use_icepop wins")


def _divergence(one: Sheet, level: str, mode: str, gating: str) -> None:
    """Write the mask by sampler-trainer divergence; the tokens it keeps are weighted by their ratio (0.11.2)."""
    said, bounds = one.text(gating), one.numbers("vllm_is_truncated_threshold")
    gates = {"binary_kl": "kl", "tv": "tv"}
    one.put("ppo.correction.level", "sequence" if one.text(level) == "seq" else "token", level)
    one.put("ppo.correction.mode", "mask", *([] if one.text(mode) == "clip" else [mode]))
    if one.text(mode) == "clip":
        one.refuse(mode, "a divergence is no weight", 'ppo.correction.mode = "mask"')
    if said in gates:
        one.put("ppo.correction.gate", gates[said], gating)
    else:
        one.refuse(gating, f"known are ratio, {', '.join(gates)}", 'ppo.correction.gate = "ratio"')
    one.put("ppo.correction.max_divergence", bounds[-1], "vllm_is_truncated_threshold")
    one.put("ppo.correction.cap", 1e9, note="OpenRLHF has no bound for the ratio of a token that is kept")
    if len(bounds) > 1 and bounds[0] > 0:
        reason = "small divergences are kept"
        one.refuse("vllm_is_truncated_threshold", reason, f"ppo.correction.max_divergence = {bounds[-1]:g}")
    for name in ("enable_vllm_is_correction", "use_icepop", "vllm_is_correction_type"):
        one.ignore(name, f"{one.flag(gating)} {said} chooses what is dropped")


def shaping(one: Sheet, answer_tokens: int) -> None:
    """Write the changes to a reward: normalization, clipping, and the penalty for overlong answers."""
    if one.has("normalize_reward") and one.has("dynamic_filtering"):
        reason = "the bounds of dynamic sampling are of rewards as they are"
        one.refuse("normalize_reward", reason, "reward_model.centering_coef, or ppo.rewards.clip")
    elif one.has("normalize_reward"):
        note = "by the mean and spread of all rewards so far, not the reward model's own"
        one.put("ppo.rewards.normalize", "running", "normalize_reward", note=note)
    low, high = one.pair("reward_clip_range")
    if low == -high:
        one.put("ppo.rewards.clip", high, "reward_clip_range")
    else:
        one.refuse(
            "reward_clip_range", "rewards are clipped to +- one number", f"ppo.rewards.clip = {max(-low, high):g}"
        )
    if one.has("stop_properly_penalty_coef"):
        cut_off(one, one.number("stop_properly_penalty_coef"))
    if not one.has("overlong_buffer_len"):
        one.ignore("overlong_penalty_factor", "is read only with --overlong_buffer_len")
        return
    one.put("ppo.rewards.overlong.max_tokens", answer_tokens, note="sampling.max_tokens")
    one.put("ppo.rewards.overlong.buffer_tokens", one.integer("overlong_buffer_len"), "overlong_buffer_len")
    one.put("ppo.rewards.overlong.factor", one.number("overlong_penalty_factor"), "overlong_penalty_factor")


def cut_off(one: Sheet, coefficient: float) -> None:
    """Write the reward of truncated answers: OpenRLHF multiplies by a coefficient >= 0, and sets a negative one."""
    name = "stop_properly_penalty_coef"
    if coefficient >= 1:
        one.ignore(name, "1 changes no reward")
        return
    one.put("ppo.rewards.truncated.type", "scale" if coefficient >= 0 else "value", name)
    note = "rewards below 0 stay, where OpenRLHF multiplies them, too" if coefficient >= 0 else ""
    one.put("ppo.rewards.truncated.amount", coefficient, name, note=note)


def extras(one: Sheet) -> None:
    """Write entropy bonus, value clip, warm-up of the value model, moving average, dynamic sampling."""
    if one.has("entropy_loss_coef"):
        one.put("ppo.entropy_coef", one.number("entropy_loss_coef"), "entropy_loss_coef")
    if one.text("advantage_estimator") == "gae":
        note = "" if one.has("value_clip") else "0.2 before 0.8.3"
        one.put("ppo.value.clip", one.number("value_clip"), "value_clip", note=note)
        one.put("ppo.value.warmup_steps", max(0, one.integer("freezing_actor_steps")), "freezing_actor_steps")
    for name in ("value_clip", "freezing_actor_steps"):
        one.ignore(name, "there is no value model")
    if one.has("enable_ema"):
        one.put("ppo.optimizer.ema_decay", one.number("ema_beta"), "ema_beta")
        one.elsewhere("enable_ema", "ppo.optimizer.ema_decay")
    one.ignore("ema_beta", "is read only with --enable_ema")
    if one.has("dynamic_filtering"):
        low, high = one.pair("dynamic_filtering_reward_range")
        one.put("ppo.ahead.type", "dynamic", "dynamic_filtering")
        one.put("ppo.ahead.low", low, "dynamic_filtering_reward_range", "dynamic_filtering")
        one.put("ppo.ahead.high", high, "dynamic_filtering_reward_range", "dynamic_filtering")
    one.ignore("dynamic_filtering_reward_range", "is read only with --dynamic_filtering")


# ---------------------------------------------------------------- training rules

_SCHEDULES = {
    "cosine_with_min_lr": "cosine",
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_ATTENTION = ("sdpa", "eager", "flash_attention_2")


def base_model(one: Sheet) -> str:
    """Write the initial model of a command. Returns the section that produced it; "base" is an external model."""
    path = one.needed("pretrain")
    if path in one.draft.made:
        one.elsewhere("pretrain", f"the result of [{one.draft.made[path]}]")
        return one.draft.made[path]
    one.put("prepare_data.model.type", "pretrained")
    external_model(one, "prepare_data.model", "pretrain")
    return "base"


def external_model(one: Sheet, key: str, name: str) -> None:
    """Write an external model, named by the flag `name`: its folder, or its name on the Hub and a commit to fill in."""
    path = one.text(name)
    one.put(f"{key}.path", path, name)
    if path.count("/") == 1 and not path.startswith((".", "/", "~")):
        one.put(f"{key}.revision", "", note="the commit of the model, if it is one of the Hub")
        one.draft.note(f"set {key}.revision to the commit of {path}, or its path to a local folder")


def start_from(one: Sheet, section: str, allowed: tuple[str, ...]) -> None:
    """Write the initial policy of a section, also its reference in both projects. `allowed` lists valid sections."""
    start = base_model(one)
    if start in allowed:
        one.put(f"{section}.start_from", start, "pretrain")
    else:
        one.put(f"{section}.start_from", "base")
        one.refuse("pretrain", f"[{section}] cannot start from {start}", f'{section}.start_from = "sft"')


def trainer(one: Sheet) -> None:
    """Write the trainer's settings; rows per rank and partitioning mean the same in both projects."""
    precision(one)
    one.put("runtime.trainer.zero_stage", one.integer("zero_stage"), "zero_stage")
    one.put("runtime.trainer.micro_batch", one.integer("micro_train_batch_size"), "micro_train_batch_size")
    if one.has("use_dynamic_batch"):
        names = ("train_max_tokens_per_gpu", "use_dynamic_batch")
        note = "padding counts, and longer rows are passed alone"
        one.put("runtime.trainer.micro_tokens", one.count("train_max_tokens_per_gpu"), *names, note=note)
        one.ignore("rollout_max_tokens_per_gpu", "forward passes take the trainer's micro_tokens too")
    for name in ("train_max_tokens_per_gpu", "rollout_max_tokens_per_gpu"):
        one.ignore(name, "is read only with --use_dynamic_batch")
    if one.has("adam_offload"):
        one.put("runtime.trainer.offload_optimizer", True, "adam_offload")
    if one.has("gradient_checkpointing"):
        one.put("runtime.trainer.gradient_checkpointing", True, "gradient_checkpointing")
    if one.has("aux_loss_coef") and one.number("aux_loss_coef") > 0:
        one.put("runtime.trainer.router_aux_coef", one.number("aux_loss_coef"), "aux_loss_coef")
    one.ignore("aux_loss_coef", "0 leaves the balancing loss out")
    if one.has("use_liger_kernel"):
        one.put("runtime.trainer.liger", True, "use_liger_kernel")
    split(one)
    attention(one)


def split(one: Sheet) -> None:
    """Write how many workers share a row or a weight. Rows are split by heads (Ulysses) instead of in a ring."""
    ring, tensor = _parts(one, "ring_attn_size"), _parts(one, "ds_tensor_parallel_size")
    if "runtime.train_workers" not in one.draft.values and ring * tensor > 1:
        one.put("runtime.train_workers", ring * tensor, note="the fewest that can share")
    if ring > 1:
        one.put("runtime.trainer.sequence_parallel", ring, "ring_attn_size", note="Ulysses: it has to divide the heads")
    if tensor > 1 and one.integer("zero_stage") in (1, 2) and ring == 1:
        one.put("runtime.trainer.tensor_parallel", tensor, "ds_tensor_parallel_size")
    elif tensor > 1:
        reason = "weights are shared with ZeRO 1 or 2 and whole rows"
        one.refuse("ds_tensor_parallel_size", reason, "runtime.trainer.zero_stage = 3")
    one.ignore("ring_attn_size", "1 shares no row")
    one.ignore("ring_head_stride", "there is no ring")
    one.ignore("ds_tensor_parallel_size", "1 shares no weight")


def precision(one: Sheet) -> None:
    """Write the precision of training, and of sampling if any: always bfloat16, regardless of the flags."""
    name = "bf16" if one.has("bf16") and not one.has("param_dtype") else "param_dtype"
    names = [name] if name == "bf16" or one.text(name) == "bf16" else []
    one.put("runtime.trainer.dtype", "bfloat16", *names)
    if one.arguments.command in ("ppo", "infer"):
        one.put("runtime.sampler.type", "vllm")
        one.put("runtime.sampler.dtype", "bfloat16", *names)
    if not names:
        one.refuse("param_dtype", "models are trained in float32 or bfloat16", 'runtime.trainer.dtype = "bfloat16"')
    one.ignore("bf16", "--param_dtype sets it, too")


def attention(one: Sheet) -> None:
    """Write the implementation of attention, if the script names one."""
    if not one.has("attn_implementation"):
        return
    if _parts(one, "ring_attn_size") > 1:
        one.refuse("attn_implementation", "rows are shared with sdpa alone", 'runtime.trainer.attention = "sdpa"')
    elif one.text("attn_implementation") in _ATTENTION:
        one.put("runtime.trainer.attention", one.text("attn_implementation"), "attn_implementation")
    else:
        one.refuse("attn_implementation", f"known are {', '.join(_ATTENTION)}", 'runtime.trainer.attention = "sdpa"')


def workers(one: Sheet) -> None:
    """Write the number of training workers from the launcher of a command that is not a Ray job."""
    counts = {"--num_gpus": 0, "--nproc_per_node": 0, "--nproc-per-node": 0, "--num_nodes": 1, "--nnodes": 1}
    found = {}
    for given in one.arguments.launcher:
        if given.flag in counts and given.text.isdecimal():
            found[given.flag] = int(given.text)
            one.extra(given, "translated", "runtime.train_workers is the product of GPUs and nodes")
        else:
            one.extra(given, "ignored", "the runtime starts and places the workers")
    gpus = [number for flag, number in found.items() if counts[flag] == 0]
    nodes = [number for flag, number in found.items() if counts[flag] == 1]
    if gpus:
        one.put("runtime.train_workers", gpus[0] * (nodes[0] if nodes else 1), note="GPUs * nodes of the launcher")
        one.put("runtime.gpus_per_train_worker", 1.0, note="a worker a GPU")
    elif one.arguments.command not in ("ppo", "infer"):
        one.draft.note(
            "set runtime.train_workers to the number of GPUs (not in the script), gpus_per_train_worker to 1"
        )


def optimizer(one: Sheet, key: str, *, head: str = "") -> None:
    """Write an optimizer; `head` is "" for offline commands, "actor" or "critic" for policy optimization."""
    rate = f"{head}_learning_rate" if head else "learning_rate"
    one.put(f"{key}.learning_rate", one.number(rate), rate)
    betas = _of_head(one, head, "adam_betas", "adam.betas")
    one.put(f"{key}.betas", list(one.pair(betas)), betas)
    for name, dotted, ours in (
        ("adam.eps", "adam.eps", "eps"),
        ("l2", "adam.weight_decay", "weight_decay"),
        ("max_norm", "max_norm", "max_grad_norm"),
    ):
        read = _of_head(one, head, name, dotted)
        one.put(f"{key}.{ours}", one.number(read), read)
    schedule(one, key, head=head)


def schedule(one: Sheet, key: str, *, head: str) -> None:
    """Write the learning-rate schedule: OpenRLHF's "constant" has no warm-up, "cosine" and "linear" end at zero."""
    name = _of_head(one, head, "lr_scheduler", "lr_scheduler")
    said = one.text(name)
    if said not in _SCHEDULES:
        one.refuse(name, f"known are {', '.join(_SCHEDULES)}", f'{key}.schedule = "cosine"')
        said = "cosine_with_min_lr"
    one.put(f"{key}.schedule", _SCHEDULES[said], name)
    warmup = _of_head(one, head, "lr_warmup_ratio", "lr_warmup_ratio")
    least = _of_head(one, head, "min_lr_ratio", "min_lr_ratio")
    if said == "constant":
        one.put(f"{key}.warmup_fraction", 0.0, name)
        one.ignore(warmup, "the constant schedule has no warm-up")
    else:
        one.put(f"{key}.warmup_fraction", one.number(warmup), warmup)
    if said == "cosine_with_min_lr":
        one.put(f"{key}.min_lr_fraction", one.number(least), least)
    else:
        one.put(f"{key}.min_lr_fraction", 0.0, name)
        one.ignore(least, f"{said} does not read it")


def loop(one: Sheet, key: str) -> None:
    """Write the training loop; in both projects a batch is one optimizer step over all ranks."""
    one.put(f"{key}.batch_size", one.integer("train_batch_size"), "train_batch_size")
    one.put(f"{key}.epochs", one.integer("max_epochs"), "max_epochs")
    for name, ours, otherwise in (
        ("save_steps", "checkpoint_every", "every stage saves; `checkpoint_every` sets the interval"),
        ("eval_steps", "eval_every", "there is always an evaluation at the end; `eval_every` adds more"),
        ("logging_steps", "log_every", "every step is tracked"),
    ):
        if one.has(name) and one.integer(name) > 0:
            one.put(f"{key}.{ours}", one.integer(name), name)
        else:
            one.ignore(name, otherwise)


def exports(one: Sheet, key: str) -> None:
    """Write how often training exports the policy; OpenRLHF does it with every checkpoint.

    Exported policies are named by their steps, so only training with a known number of steps has them.
    """
    every = one.integer("save_steps") if one.has("save_steps") else 0
    if not one.has("save_hf_ckpt") or every < 1:
        one.ignore("save_hf_ckpt", "every policy is exported in Hugging Face layout")
        return
    steps = one.draft.values[f"{key}.steps"] if key == "ppo" else None
    if steps and every < steps.value:
        one.put(f"{key}.export_every", every, "save_hf_ckpt", "save_steps")
    elif steps and steps.given:
        one.ignore("save_hf_ckpt", f"there is no such step before the last, {steps.value}, whose policy is exported")
    elif key in ("sft", "dpo", "ppo"):
        number = f"{key}.steps" if key == "ppo" else f"{key}.loop.max_steps"
        reason = "policies on the way are named by their steps, whose number is not in the script"
        one.refuse("save_hf_ckpt", reason, f"{key}.export_every = {every} once {number} is set")
    else:
        one.refuse("save_hf_ckpt", f"[{key}] exports its last model alone", "the model at the end")


def trackers(one: Sheet) -> None:
    """Write the additional trackers that receive metrics. A W&B key is not copied to the profile."""
    before = one.draft.values.get("track.also")
    names = {"wandb": "use_wandb", "tensorboard": "use_tensorboard"}
    asked = {ours: one.flag(theirs) for ours, theirs in names.items() if one.has(theirs)}
    also = [ours for ours in names if ours in asked or (before and ours in before.value)]
    if asked:
        comment = ", ".join(([before.comment] if before else []) + list(asked.values()))
        one.draft.values["track.also"] = Value(also, comment, True)
        one.draft.note("[track] also needs pip install 'rlhf-lifecycle[trackers]'; `wandb sync` uploads its runs")
    for ours, theirs in names.items():
        one.elsewhere(theirs, f'track.also has "{ours}", which writes offline; MLflow stays the record')


def adapters(one: Sheet, key: str) -> None:
    """Write the adapters of a model."""
    others = ("lora_alpha", "target_modules")
    if one.integer("lora_rank") == 0:
        for name in ("lora_rank", *others):
            one.ignore(name, "rank 0 has no adapters")
        one.refuse("load_in_4bit", "weights in 4 bits are not trained themselves", "adapters: lora.quantize")
        return
    one.put(f"{key}.rank", one.integer("lora_rank"), "lora_rank")
    one.put(f"{key}.alpha", one.number("lora_alpha"), "lora_alpha")
    if one.has("load_in_4bit"):
        one.put(f"{key}.quantize", "nf4", "load_in_4bit")
    modules = one.text("target_modules").split()
    one.put(f"{key}.target_modules", "all-linear" if modules in ([], ["all-linear"]) else modules, "target_modules")


def _parts(one: Sheet, name: str) -> int:
    return one.integer(name) if one.has(name) else 1


def _of_head(one: Sheet, head: str, older: str, dotted: str) -> str:
    """The flag that an optimizer's head reads; only the dotted flags have one for the value model."""
    return f"critic.{dotted}" if head == "critic" and (one.arguments.dotted or one.has(f"critic.{dotted}")) else older
