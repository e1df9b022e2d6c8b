"""Import a reward model from outside: check it, copy it, and write the contract that every use checks.

Its scores equal the scores of transformers for the same tokens: r = w . h(last token).
"""

import json
import math
import shutil
from pathlib import Path
from statistics import fmean, pstdev

from rlhf_core.data.chat import ChatTemplate
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import ModelSpec
from rlhf_core.rewards.model import check_classifier, probe_messages, single_output
from rlhf_core.stage.context import StageContext
from rlhf_core.store.fingerprint import hash_files, tree_digest
from rlhf_core.types import Column, Message, PolicyRef, RewardModelRef
from stages.import_reward_model import ImportRewardModelConfig, copied


def run(config: ImportRewardModelConfig, *, policy: PolicyRef, context: StageContext) -> RewardModelRef:
    """Copy the reward model and write its contract; ConfigError if it reads other tokens than `policy` writes."""
    folder = Path(config.path).expanduser()
    check_classifier(folder, template=config.template == "own")
    names = copied(folder)
    for name in names:
        shutil.copyfile(folder / name, context.out / name)
    check_copy(names, config, context)
    stored = json.loads((context.out / "config.json").read_text(encoding="utf-8"))
    (context.out / "config.json").write_text(json.dumps(single_output(stored), indent=2), encoding="utf-8")

    policys = ChatTemplate.load(context.path(policy))
    if config.template == "policy":
        (context.out / "chat_template.jinja").write_text(policys.tokenizer.chat_template, encoding="utf-8")
    chat = ChatTemplate.load(context.out)
    check_tokens(chat, policys, config)
    probe = probes(chat, config.max_length)
    spec = ModelSpec(path=str(context.out), head="score", lora=None, seed=context.seed)
    with context.runtime.trainer("reward_model", spec, None) as trainer:
        scores = trainer.scores(probe)
    if not all(map(math.isfinite, scores)):
        rule = f"its scores of the probe texts are {scores}"
        raise ConfigError("import_reward_model.path", config.path, rule, "its weights are damaged; download it again")
    contract = {
        "max_length": config.max_length,
        "eos_token_id": chat.eos_id,
        "pad_token_id": chat.pad_id,
        "bos_token_id": chat.tokenizer.bos_token_id,
        "starts_with_bos": all(ids[0] == chat.tokenizer.bos_token_id for ids in probe),
        "template": chat.digest,
        "probe": [list(ids) for ids in probe],
        "probe_scores": scores,
        "mean": fmean(scores),
        "std": pstdev(scores),
    }
    (context.out / "contract.json").write_text(json.dumps(contract), encoding="utf-8")
    metrics = {"probe/mean": fmean(scores), "probe/std": pstdev(scores), "probes": len(probe)}
    return context.commit(RewardModelRef, metrics=metrics)


def check_copy(names: list[str], config: ImportRewardModelConfig, context: StageContext) -> None:
    """Raise ConfigError unless the copied bytes match the digest in the key."""
    planned = context.files  # empty: run without a pipeline
    if planned and tree_digest(hash_files(context.out, names)) != planned["reward_model"]:
        rule = "its files have changed since the run was planned"
        remedy = "run again when no other process writes to it"
        raise ConfigError("import_reward_model.path", config.path, rule, remedy)


def check_tokens(chat: ChatTemplate, policys: ChatTemplate, config: ImportRewardModelConfig) -> None:
    """Raise ConfigError unless both render the probes to the same tokens: a policy's tokens are scored as sampled."""
    for messages, answer in probe_messages():
        theirs, ours = (
            (one.prompt_ids(messages), one.tokenizer(answer, add_special_tokens=False)["input_ids"], one.eos_id)
            for one in (chat, policys)
        )
        if theirs != ours:
            rule = f"its tokenizer or chat template turns {messages[0].content!r} into other tokens than the policy's"
            remedy = 'use one trained from a model of the policy\'s family, or serve it as text: type = "remote"'
            raise ConfigError("import_reward_model.path", config.path, rule, remedy)


def probes(chat: ChatTemplate, max_length: int) -> list[Column[int]]:
    """Tokens of the probes up to the end of each answer, where a sampled answer ends too."""
    found = []
    for messages, answer in probe_messages():
        sample = chat.continuation(messages, (Message("assistant", answer),), max_length=max_length)
        if sample is not None:
            found.append(sample.until_trained())
    if not found:
        rule = "it leaves no room for an answer in any probe text"
        raise ConfigError("import_reward_model.max_length", max_length, rule, "raise it")
    return found
