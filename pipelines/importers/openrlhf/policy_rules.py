"""Translate the training flags of train_ppo and train_ppo_ray: advantages, losses, KL, rewards."""

from __future__ import annotations

from pipelines.importers.openrlhf.draft import Sheet

_ADVANTAGES = {
    "gae": "gae",
    "reinforce": "reinforce++",
    "rloo": "rloo",
    "reinforce_baseline": "reinforce++-baseline",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
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
    """Write the clipped loss. Two bounds take precedence over one, and gspo has its own aggregation."""
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
    """Write the KL penalty: k1 in the reward; in the loss k2, k3 as it is, or any value with the gradient of k2."""
    one.put("ppo.kl_coef", one.number("init_kl_coef"), "init_kl_coef")
    estimator = "k3" if one.has("use_kl_estimator_k3") else one.text("kl_estimator")
    name = "use_kl_estimator_k3" if one.has("use_kl_estimator_k3") else "kl_estimator"
    grouped = one.text("advantage_estimator") == "group_norm" and one.number("init_kl_coef") > 0
    in_loss = one.has("use_kl_loss") or grouped
    if grouped and not one.has("use_kl_loss"):
        note = "grpo divides by the spread of a group, so the penalty is no part of the reward"
        one.put("ppo.kl_in", "loss", note=note)
        one.draft.note(f"OpenRLHF takes the penalty off the reward of group_norm, here it is in the loss: {note}")
    else:
        one.put("ppo.kl_in", "loss" if in_loss else "reward", "use_kl_loss" if in_loss else name)
    if not in_loss and one.text("advantage_estimator") in ("rloo", "reinforce_baseline", "dr_grpo"):
        one.put("ppo.kl_credit", "token", note="the baseline first, then the penalty on every token")
    if one.has("use_kl_loss") and one.number("init_kl_coef") > 0:
        _kl_in_loss(one, name, estimator)
    elif one.has("use_kl_loss"):
        one.ignore(name, "a coefficient of 0 is no penalty")
    elif estimator == ("k2" if in_loss else "k1"):
        one.says(name, f"{estimator} is the estimator of ppo.kl_in")
    elif in_loss:
        one.refuse(name, f"{estimator} in the reward is no part of {_LOSS_OF_GROUPS}", 'ppo.kl_in = "loss"')
    else:
        one.refuse(name, "the penalty in the reward is k1", 'k1, by kl_in = "reward"')
    one.ignore("kl_estimator", "--use_kl_estimator_k3 wins")
    one.ignore("algo.kl.unbiased_gradient", "is read only with a penalty in the loss")
    if one.has("kl_target"):
        reason = "OpenRLHF's target is nats per token, ppo.kl_target per sequence"
        one.refuse("kl_target", reason, "ppo.kl_target = that * the mean length of an answer")
        one.refuse("kl_horizon", reason, f"ppo.kl_horizon = {one.text('kl_horizon')} with ppo.kl_target")
    one.ignore("kl_horizon", "is read only with a target")


def _kl_in_loss(one: Sheet, name: str, estimator: str) -> None:
    """Write the estimator of a penalty in the loss; `unbiased_gradient` gives each of them the gradient of k2."""
    unbiased = "algo.kl.unbiased_gradient"
    if one.has(unbiased):
        one.put(
            "ppo.kl_estimator", estimator, name, unbiased, note="with the gradient of k2, not weighted by pi / pi_old"
        )
    elif estimator == "k1":
        one.refuse(
            name, "the gradient of k1 as a loss is zero on average", 'kl_estimator = "k1", with the gradient of k2'
        )
    elif estimator == "k3":
        one.put("ppo.kl_estimator", "k3_direct", name)
    else:
        one.put("ppo.kl_estimator", estimator, name)


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
    kind = "icepop" if one.has("use_icepop") else one.text("vllm_is_correction_type")
    sequence = kind == "seq-mask-tis" or (one.has(level) and one.text(level) == "seq")
    masks = kind != "tis" or (one.has(mode) and one.text(mode) == "mask")
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
    if one.has(gating) and one.text(gating) != "ratio":
        one.refuse(gating, "weights are judged by their ratio", 'ppo.correction.mode = "mask"')
    one.says(gating, "the ratio itself is judged")
    one.ignore("vllm_is_correction_type", "--use_icepop wins")


def shaping(one: Sheet, answer_tokens: int) -> None:
    """Write the changes to a reward: normalization, clip, penalty for overlong answers."""
    if one.has("normalize_reward") and one.has("dynamic_filtering"):
        reason = "the bounds of dynamic sampling are of rewards as they are"
        one.refuse("normalize_reward", reason, "reward_model.centering_coef, or ppo.rewards.clip")
    elif one.has("normalize_reward"):
        note = "by the mean and spread of all rewards so far, not the reward model's own"
        one.put("ppo.rewards.normalise", "running", "normalize_reward", note=note)
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
    """Write what an answer that was cut off earns: OpenRLHF multiplies by a coefficient >= 0, and sets a negative one."""
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
        one.put("ppo.value_clip", one.number("value_clip"), "value_clip", note=note)
        one.put("ppo.value_warmup_steps", max(0, one.integer("freezing_actor_steps")), "freezing_actor_steps")
    for name in ("value_clip", "freezing_actor_steps"):
        one.ignore(name, "there is no value model")
    if one.has("enable_ema"):
        one.put("ppo.optimizer.ema_decay", one.number("ema_beta"), "ema_beta")
        one.says("enable_ema", "ppo.optimizer.ema_decay")
    one.ignore("ema_beta", "is read only with --enable_ema")
    if one.has("dynamic_filtering"):
        low, high = one.pair("dynamic_filtering_reward_range")
        one.put("ppo.dynamic_sampling.low", low, "dynamic_filtering_reward_range", "dynamic_filtering")
        one.put("ppo.dynamic_sampling.high", high, "dynamic_filtering_reward_range", "dynamic_filtering")
    one.ignore("dynamic_filtering_reward_range", "is read only with --dynamic_filtering")
