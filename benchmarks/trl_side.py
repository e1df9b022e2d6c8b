"""Run TRL's side of `train_step` and `grpo_step`. Only an interpreter that has TRL runs this file.

The trainers are TRL's, with the settings of the comparison: float32, no gradient checkpointing, the rows of a step as
the whole dataset. A callback blocks `train` between steps until it is this side's turn. The time is measured from TRL's
start of a step to its end, so loading and padding of batches is not counted.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer  # type: ignore[import-not-found]

from benchmarks.sides import Clock, Turn, peak_gib, root, share_of_even

PAST_THE_END = 10**6


class Done(Exception):
    """No more steps are requested."""


class Hold(TrainerCallback):  # type: ignore[misc]
    """Lets the first step run as a warm-up, and each further one on request."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._clock = Clock()
        self._took: dict[str, float] = {}
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for this side's turn; before that, respond for the finished step."""
        if state.global_step == 1:
            first = self.trainer.state.log_history[0]
            self._turn.answer(loss=first["loss"], grad_norm=float(first["grad_norm"]))
        elif state.global_step > 1:
            self._turn.answer(**self._took, **counted(self.trainer))
        if state.global_step and not self._turn.comes():
            self._turn.answer(peak_gib=peak_gib())
            raise Done
        self._clock = Clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop the clock."""
        self._took = self._clock.read()


def work(job: dict[str, Any], turn: Turn) -> None:
    """Train with TRL as long as steps are requested."""
    torch.manual_seed(17)
    hold = Hold(turn)
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    make = {"sft": sft_trainer, "dpo": dpo_trainer, "policy": policy_trainer, "grpo": grpo_trainer}[job["kind"]]
    hold.trainer = make(job, model, tokenizer, hold)
    with suppress(Done):
        hold.trainer.train()


def sft_trainer(job: dict[str, Any], model: Any, tokenizer: Any, hold: Hold) -> Any:
    """A trainer whose step has all rows: padded, flattened into one row per micro-batch, or packed by TRL."""
    rows = [{"input_ids": row["prompt_ids"] + row["answer_ids"], "labels": labels(row)} for row in job["rows"]]
    layout = job["layout"]
    options = arguments(job, count=len(rows))
    if layout == "packed":
        # One packed row per pass: TRL joins the rows of a pass into one, whose mask grows with its square.
        packed = {"packing": True, "max_length": job["pack_to"], "per_device_train_batch_size": 1}
        options |= packed | {"gradient_accumulation_steps": packed_rows(job)}
    else:
        options |= {"padding_free": layout == "flat", "max_length": None}
    return SFTTrainer(
        model, SFTConfig(**options), train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[hold]
    )


def dpo_trainer(job: dict[str, Any], model: Any, tokenizer: Any, hold: Hold) -> Any:
    """A trainer with the reference's log-probs computed beforehand, as in our trainer."""

    class PreparedRows(DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset  # TRL's would tokenize text; these rows are token ids

    config = DPOConfig(
        **arguments(job, count=len(job["rows"])), beta=0.1, precompute_ref_log_probs=True, max_length=None
    )
    return PreparedRows(
        model, args=config, train_dataset=Dataset.from_list(job["rows"]), processing_class=tokenizer, callbacks=[hold]
    )


def policy_trainer(job: dict[str, Any], model: Any, tokenizer: Any, hold: Hold) -> Any:
    """A GRPO trainer with given rollouts, padded over the whole step as TRL pads its generations."""
    batches = rollout_batches(job, tokenizer.pad_token_id)

    class GivenRollouts(GRPOTrainer):  # type: ignore[misc]
        def _prepare_inputs(self, generation_batch: Any) -> Any:
            return batches[self._step % len(batches)]

    config = GRPOConfig(
        **arguments(job, count=len(job["rows"])), num_generations=2, beta=0.0, epsilon=0.2, loss_type="dapo"
    )
    prompts = Dataset.from_list([{"prompt": "a"}] * len(job["rows"]))
    return GivenRollouts(
        model, no_reward, args=config, train_dataset=prompts, processing_class=tokenizer, callbacks=[hold]
    )


def grpo_trainer(job: dict[str, Any], model: Any, tokenizer: Any, hold: Hold) -> Any:
    """A GRPO trainer that generates with transformers and uses the same reward as ours."""

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [share_of_even(ids) for ids in completion_ids]

    class GivenPrompts(GRPOTrainer):  # type: ignore[misc]
        def _tokenize_prompts(self, prompts: list[str]) -> Any:
            return [job["prompts"][int(number)] for number in prompts], None, {}

    config = GRPOConfig(
        **arguments(job, count=len(job["prompts"]) * job["group"]),
        num_generations=job["group"],
        max_completion_length=job["answer"],
        temperature=1.0,
        top_k=0,
        beta=job["kl_coef"],
        loss_type="dapo",
        epsilon=0.2,
    )
    prompts = Dataset.from_list([{"prompt": str(number)} for number in range(len(job["prompts"]))])
    return GivenPrompts(model, reward, args=config, train_dataset=prompts, processing_class=tokenizer, callbacks=[hold])


def arguments(job: dict[str, Any], *, count: int) -> dict[str, Any]:
    """The settings that all trainers share: a step of `count` rows in micro-batches, AdamW, float32."""
    return {
        "output_dir": job["folder"],
        "per_device_train_batch_size": job["micro_batch"],
        "gradient_accumulation_steps": count // job["micro_batch"],
        "learning_rate": job["learning_rate"],
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "max_steps": PAST_THE_END,
        "logging_first_step": True,
        "logging_steps": PAST_THE_END,
        "gradient_checkpointing": False,
        "bf16": job.get("device") == "cuda",
        "use_cpu": job.get("device") != "cuda",
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 17,
    }


def rollout_batches(job: dict[str, Any], pad_id: int) -> list[dict[str, Any]]:
    """The micro-batches of a step in the form in which GRPOTrainer keeps its rollouts."""
    rows = job["rows"]
    prompts = padded([row["prompt_ids"] for row in rows], pad_id, left=True)
    answers = padded([row["answer_ids"] for row in rows], pad_id, left=False)
    whole = {
        "prompt_ids": prompts[0],
        "prompt_mask": prompts[1],
        "completion_ids": answers[0],
        "completion_mask": answers[1],
        "advantages": torch.tensor([row["advantage"] for row in rows]),
        "old_per_token_logps": padded([[row["logprob"]] * len(row["answer_ids"]) for row in rows], 0.0, left=False)[0],
    }
    tokens = answers[1].sum()
    size = job["micro_batch"]
    return [
        {name: value[start : start + size] for name, value in whole.items()} | {"num_items_in_batch": tokens}
        for start in range(0, len(rows), size)
    ]


def padded(rows: list[list[Any]], filler: float, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows as one padded tensor, and the mask of real tokens."""
    width = max(map(len, rows))
    pads = [width - len(row) for row in rows]
    values = [[filler] * n + row if left else row + [filler] * n for row, n in zip(rows, pads, strict=True)]
    masks = [[0] * n + [1] * len(row) if left else [1] * len(row) + [0] * n for row, n in zip(rows, pads, strict=True)]
    return torch.tensor(values), torch.tensor(masks)


def labels(row: dict[str, Any]) -> list[int]:
    """The answer's tokens as labels; prompt tokens are masked."""
    return [-100] * len(row["prompt_ids"]) + list(row["answer_ids"])


def packed_rows(job: dict[str, Any]) -> int:
    """The number of rows after TRL's packing of the step's rows."""
    from trl import pack_dataset  # type: ignore[import-not-found]

    rows = Dataset.from_list([{"input_ids": row["prompt_ids"] + row["answer_ids"]} for row in job["rows"]])
    return len(pack_dataset(rows, job["pack_to"], "bfd"))


def counted(trainer: Any) -> dict[str, float]:
    """The number of tokens sampled for the last step, if the trainer samples."""
    lengths = getattr(trainer, "_metrics", {}).get("train", {}).get("completions/mean_length", [])
    return {"mean_length": float(lengths[-1])} if lengths else {}


def no_reward(completions: list[str], **_: Any) -> list[float]:
    """Constant 0, because the advantages are given."""
    return [0.0] * len(completions)


if __name__ == "__main__":
    with suppress(ImportError):
        import deepspeed  # noqa: F401  # accelerate imports it: do this once, before the forks
    root(work)
