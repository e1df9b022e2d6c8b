"""Damage scripts of OpenRLHF commands: as bytes, and word by word."""

from __future__ import annotations

import io
import random
import re
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from rich.console import Console

from campaigns.fuzz.campaign import Wrong
from campaigns.fuzz.mutations import ODD_TEXTS, damaged, written
from pipelines.flows.profile import load_profile
from rlhf_contrib.openrlhf.flags import COMMANDS
from rlhf_contrib.openrlhf.translate import import_script

# Typical scripts for OpenRLHF 0.6 to 0.10; the translator's tests also use them.
SFT_06 = r"""
set -x
read -r -d '' training_commands <<EOF
openrlhf.cli.train_sft \
   --max_len 4096 --dataset data/orca.jsonl --input_key question --output_key response \
   --train_batch_size 256 --micro_train_batch_size 2 --max_samples 500000 \
   --pretrain meta-llama/Meta-Llama-3-8B --save_path ./checkpoint/sft --save_steps -1 --eval_steps -1 \
   --zero_stage 2 --max_epochs 1 --bf16 --flash_attn --learning_rate 5e-6 --packing_samples --gradient_checkpointing
EOF
    # --use_wandb [WANDB_TOKENS]
if [[ ${1} != "slurm" ]]; then
    deepspeed --num_gpus 8 --module $training_commands
fi
"""
DPO_08 = r"""
MODEL=models/sft
deepspeed --module openrlhf.cli.train_dpo --pretrain ${MODEL} --ref_pretrain "$MODEL" --dataset a.jsonl,b.jsonl \
   --dataset_probs 0.7,0.3 --apply_chat_template --chosen_key better --rejected_key worse --train_batch_size 64 \
   --learning_rate=5e-7 --ipo --beta 0.2 --label_smoothing 0.1 --max_len 2048 --lora_rank 16 --lora_alpha 32 \
   --target_modules q_proj v_proj --lora_dropout 0.05 --zero_stage 3 --adam_offload --ring_attn_size 2 --seed 7
"""
GRPO_09 = r"""
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"working_dir": "/openrlhf"}' \
   -- python3 -m openrlhf.cli.train_ppo_ray \
   --actor_num_nodes 2 --actor_num_gpus_per_node 4 --ref_num_nodes 2 --ref_num_gpus_per_node 4 \
   --vllm_num_engines 8 --vllm_tensor_parallel_size 1 --colocate_all_models --vllm_gpu_memory_utilization 0.4 \
   --advantage_estimator group_norm --use_kl_loss --kl_estimator k3 --init_kl_coef 1e-3 --eps_clip_low_high 0.2 0.28 \
   --pretrain models/base --remote_rm_url reward_func.py --save_path ckpt --use_wandb True \
   --train_batch_size 128 --rollout_batch_size 64 --n_samples_per_prompt 8 --max_samples 6400 --num_episodes 2 \
   --prompt_max_len 512 --generate_max_len 1536 --param_dtype bf16 --prompt_data data/maths.jsonl \
   --input_key problem --label_key answer --apply_chat_template --dynamic_filtering --vllm_enable_sleep
"""
SFT_010 = r"""
python -m torch.distributed.run --nproc_per_node 4 -m openrlhf.cli.train_sft \
   --data.max_len 2048 --data.dataset data/chats.jsonl --data.input_key conversation --data.apply_chat_template \
   --data.multiturn --train.batch_size 32 --model.model_name_or_path models/base --adam.lr 2e-5 --adam.betas 0.9 0.999 \
   --adam.weight_decay 0.01 --lr_scheduler linear --lr_warmup_ratio 0.1 --train.max_epochs 3 --ckpt.save_steps 100 \
   --eval.steps 50 --ds.zero_stage 3 --ds.param_dtype bf16 --logger.tensorboard_dir logs
"""
RM_010 = r"""
deepspeed --module openrlhf.cli.train_rm --model.model_name_or_path models/sft --data.dataset data/pairs.parquet \
   --data.prompt_key prompt --data.chosen_key chosen --data.rejected_key rejected --data.apply_chat_template \
   --model.margin_loss_enable --model.loss_type logexp --train.batch_size 256 --data.max_len 8192 --adam.lr 9e-6 \
   --ds.lora.rank 8 --ds.attn_implementation flash_attention_2 --ckpt.output_dir ./rm --eval.dataset data/test.jsonl
"""
SCRIPTS = (
    SFT_06,
    DPO_08,
    GRPO_09,
    SFT_010,
    RM_010,
    r"""
BATCH=$((8 * 16)); ROUNDS=(1 2)
python3 -m openrlhf.cli.train_ppo_ray --actor.num_gpus_per_node 4 --vllm.num_engines 2 --vllm.tensor_parallel_size 2 \
   --actor.model_name_or_path models/sft --reward.model_name_or_path models/rm --train.batch_size $BATCH \
   --rollout.batch_size 512 --data.max_len 3072 --rollout.max_new_tokens 2048 --actor.adam.lr 5e-7 --critic.adam.lr 9e-6 \
   --critic.lr_warmup_ratio 0.1 --algo.advantage.lambd 0.95 --algo.advantage.gamma 0.99 --critic.freezing_steps 10 \
   --actor.dual_clip 3.0 --reward.clip_range -5 5 --data.prompt_dataset data/prompts.jsonl --data.apply_chat_template \
   --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop --train.enable_ema \
   --reward.overlong_buffer_len 512 --train.num_episodes 3 --vllm.enforce_eager --data.input_template $'User: {}\nYou: '
""",
)
_WORD = re.compile(rb"\S+")


class Target:
    """Damaged scripts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._flags = sorted({flag for script in SCRIPTS for flag in re.findall(r"--[\w.]+", script)})

    def attempt(self, rng: random.Random) -> None:
        """Translate one script, and load the resulting profile."""
        script, profile = self._folder / "script.sh", self._folder / "made.toml"
        for path in (profile, profile.with_suffix(".jinja")):
            path.unlink(missing_ok=True)
        data = rng.choice(SCRIPTS).encode()
        script.write_bytes(damaged(data, rng) if rng.random() < 0.5 else self._other_words(data, rng))
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            console = Console(file=io.StringIO(), width=160)
            made = import_script(str(script), out=str(profile), lenient=rng.random() < 0.5, console=console)
        load_profile(profile)
        if not made.outcomes and b"openrlhf.cli.train" in script.read_bytes():
            raise Wrong(f"no flag is accounted for: {script.read_bytes()[:1000]!r}")

    def _other_words(self, data: bytes, rng: random.Random) -> bytes:
        """A script with some words removed, doubled, or replaced by other flags, commands and values."""
        for _ in range(rng.choice((1, 2, 4))):
            words = list(_WORD.finditer(data))
            if not words:
                return data
            word = rng.choice(words)
            others = (b"", word[0] + b" " + word[0], self._odd_word(rng), word[0] + b"=" + self._odd_word(rng))
            data = data[: word.start()] + rng.choice(others) + data[word.end() :]
        return data

    def _odd_word(self, rng: random.Random) -> bytes:
        text = rng.choice((rng.choice(self._flags), f"openrlhf.cli.{rng.choice([*COMMANDS])}", rng.choice(ODD_TEXTS)))
        return written(f'"{text}"').strip('"').encode("utf-8", "surrogatepass")
