"""Translate the flags that all training commands share: model, workers, trainer, optimizer, loop, adapters."""

from __future__ import annotations

from pipelines.importers.openrlhf.draft import Sheet

_SCHEDULES = {
    "cosine_with_min_lr": "cosine",
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_ATTENTION = ("sdpa", "eager", "flash_attention_2")


def base_model(one: Sheet) -> str:
    """Write the model that a command starts from; return the section that made it, "base" for an external model."""
    path = one.needed("pretrain")
    if path in one.draft.made:
        one.says("pretrain", f"the result of [{one.draft.made[path]}]")
        return one.draft.made[path]
    one.put("prepare_data.model.type", "pretrained")
    external_model(one, "prepare_data.model", "pretrain")
    return "base"


def external_model(one: Sheet, key: str, name: str) -> None:
    """Write a model from outside, given by the flag `name`: its folder, or its name on the Hub and a commit to be set."""
    path = one.text(name)
    one.put(f"{key}.path", path, name)
    if path.count("/") == 1 and not path.startswith((".", "/", "~")):
        one.put(f"{key}.revision", "", note="the commit of the model, if it is one of the Hub")
        one.draft.note(f"set {key}.revision to the commit of {path}, or its path to a local folder")


def start_from(one: Sheet, section: str, allowed: tuple[str, ...]) -> None:
    """Write the policy that a section starts from, also its reference on both sides; some results are not allowed."""
    start = base_model(one)
    if start in allowed:
        one.put(f"{section}.start_from", start, "pretrain")
    else:
        one.put(f"{section}.start_from", "base")
        one.refuse("pretrain", f"[{section}] cannot start from {start}", f'{section}.start_from = "sft"')


def trainer(one: Sheet) -> None:
    """Write the trainer's settings; rows per rank and partitioning mean the same on both sides."""
    precision(one)
    one.put("runtime.trainer.zero_stage", one.integer("zero_stage"), "zero_stage")
    one.put("runtime.trainer.micro_batch", one.integer("micro_train_batch_size"), "micro_train_batch_size")
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
    """Write how many workers share a row or a weight; rows are split by heads (Ulysses), not in a ring."""
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
    """Write the precision of training, and of sampling if there is any: always bfloat16, whatever the flags say."""
    name = "bf16" if one.has("bf16") and not one.has("param_dtype") else "param_dtype"
    names = [name] if name == "bf16" or one.text(name) == "bf16" else []
    one.put("runtime.trainer.dtype", "bfloat16", *names)
    if one.arguments.command in ("ppo", "infer"):
        one.put("runtime.sampler.type", "vllm")
        one.put("runtime.sampler.dtype", "bfloat16", *names)
    if not names:
        one.refuse("param_dtype", "models are trained in float32 or bfloat16", 'runtime.trainer.dtype = "bfloat16"')
    one.ignore("bf16", "--param_dtype says it too")


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
        if given.flag in counts and given.text.isdigit():
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
            "set runtime.train_workers to the number of GPUs (the script does not say), gpus_per_train_worker to 1"
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
    """Write the training loop; a batch is one optimizer step over all ranks on both sides."""
    one.put(f"{key}.batch_size", one.integer("train_batch_size"), "train_batch_size")
    one.put(f"{key}.epochs", one.integer("max_epochs"), "max_epochs")
    for name, ours, otherwise in (
        ("save_steps", "checkpoint_every", "every stage saves; `checkpoint_every` says how often"),
        ("eval_steps", "eval_every", "there is always an evaluation at the end; `eval_every` asks for more"),
        ("logging_steps", "log_every", "every step is tracked"),
    ):
        if one.has(name) and one.integer(name) > 0:
            one.put(f"{key}.{ours}", one.integer(name), name)
        else:
            one.ignore(name, otherwise)


def adapters(one: Sheet, key: str | None) -> None:
    """Write the adapters; `key` is None if the stage's models have none."""
    others = ("lora_alpha", "target_modules")
    if one.integer("lora_rank") == 0:
        for name in ("lora_rank", *others):
            one.ignore(name, "rank 0 has no adapters")
        one.refuse("load_in_4bit", "weights in 4 bits are not trained themselves", "adapters: lora.quantise")
        return
    if key is None:
        for name in ("lora_rank", *others, "load_in_4bit"):
            one.refuse(name, "reward models are trained whole", "gradient_checkpointing and offload_optimizer")
        return
    one.put(f"{key}.rank", one.integer("lora_rank"), "lora_rank")
    one.put(f"{key}.alpha", one.number("lora_alpha"), "lora_alpha")
    if one.has("load_in_4bit"):
        one.put(f"{key}.quantise", "nf4", "load_in_4bit")
    modules = one.text("target_modules").split()
    one.put(f"{key}.target_modules", "all-linear" if modules in ([], ["all-linear"]) else modules, "target_modules")


def _parts(one: Sheet, name: str) -> int:
    return one.integer(name) if one.has(name) else 1


def _of_head(one: Sheet, head: str, older: str, dotted: str) -> str:
    """Return the flag that a head's optimizer reads: only the dotted flags have one for the value model."""
    return f"critic.{dotted}" if head == "critic" and (one.arguments.dotted or one.has(f"critic.{dotted}")) else older
