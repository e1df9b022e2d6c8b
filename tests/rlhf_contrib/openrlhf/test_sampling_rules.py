import json
import tomllib
from collections import Counter

import pytest
from datasets import Dataset, interleave_datasets

from pipelines.flows.profile import PipelineConfig, parse
from rlhf_contrib.openrlhf.translate import Translation, translate
from rlhf_core.data.files import make_tables
from rlhf_core.data.limits import DropReport
from rlhf_core.types import derive_seed

TRAIN = "--train_batch_size 32 --zero_stage 3 --bf16 --apply_chat_template"
GENERATE = (
    "python -m openrlhf.cli.batch_inference --eval_task generate_vllm --pretrain $POLICY --dataset prompts.jsonl "
    "--input_key question --apply_chat_template --max_new_tokens 256 --prompt_max_len 128 --temperature 0.9 "
    "--best_of_n 4 --iter $iter --rollout_batch_size 2048 --output_path gen.jsonl\n"
)
SCORE = (
    "deepspeed --module openrlhf.cli.batch_inference --eval_task rm --pretrain rm --max_len 384 --dataset gen.jsonl "
    "--dataset_probs 1.0 --output_path best.jsonl --post_processor {}\n"
)


def read(script: str) -> tuple[PipelineConfig, Translation]:
    translation = translate(script, name="x", template_file="x.jinja")
    return parse(tomllib.loads(translation.profile), origin="x"), translation


def fate(translation: Translation, command: str, flag: str) -> str:
    return next(one.fate for one in translation.outcomes if (one.command, one.flag) == (command, flag))


def test_rounds_of_generate_score_and_dpo_are_one_section():
    config, translation = read(
        "TRAINING_ITERS=5\nPOLICY=models/sft\niter=0\nwhile (($iter < $TRAINING_ITERS)); do\n"
        "if ((iter > 0)); then\n POLICY=out\nfi\n"
        + GENERATE
        + SCORE.format("iter_dpo")
        + "deepspeed --module openrlhf.cli.train_dpo --dataset best.jsonl --dataset_probs 1.0 --prompt_key prompt "
        f"--pretrain $POLICY --ref_pretrain models/sft --save_path out --max_len 384 --learning_rate 5e-7 {TRAIN}\n"
        "iter=$((iter + 1))\ndone"
    )
    assert config.dpo is None and config.iterative_dpo
    flow = config.iterative_dpo
    assert (flow.rounds, flow.start_from, flow.reference) == (5, "base", "initial")
    assert (flow.generate.samples_per_prompt, flow.generate.max_prompts) == (4, 2048)
    assert flow.generate.sampling.temperature == 0.9 and flow.generate.sampling.max_tokens == 256
    assert flow.select.type == "pairs" and flow.dpo.loop.batch_size == 32 and flow.dpo.max_length == 384
    assert config.prepare_data.max_tokens == 384
    assert [source.use.prompts for source in config.prepare_data.data.sources] == [1.0]
    assert fate(translation, "train_dpo", "--dataset") == "translated"


@pytest.mark.parametrize("command", ["train_sft --dataset", "train_ppo_ray --reward_pretrain rm --prompt_data"])
def test_small_data_sets_of_a_mixture_are_repeated_until_all_are_exhausted(command):
    flag = command.rpartition("--")[2]
    script = (
        f"python -m openrlhf.cli.{command} a.jsonl,b.jsonl --{flag}_probs 0.9,0.1 --pretrain base --input_key question"
    )
    config, translation = read(script)
    data = config.prepare_data.data
    assert [one.weight for one in data.sources] == [0.9, 0.1]
    assert (data.mixture, data.stopping_strategy) == ("weights", "all_exhausted")
    assert fate(translation, command.split()[0], f"--{flag}_probs") == "translated"


def test_an_imported_mixture_has_as_many_prompts_of_each_data_set_as_interleaving_draws(tmp_path):
    counts, paths = {"a": 4, "b": 60}, []
    for name, count in counts.items():
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps({"question": f"{name} {at}?"}) + "\n" for at in range(count)))
    config, _ = read(
        "python -m openrlhf.cli.train_ppo_ray --reward_pretrain rm --pretrain base --input_key question "
        f"--prompt_data {','.join(map(str, paths))} --prompt_data_probs 0.5,0.5"
    )
    tables = make_tables(config.prepare_data.data, seed=3, report=DropReport(), folder=tmp_path)[0]
    theirs = interleave_datasets(  # as in openrlhf/datasets/utils.py, blending_datasets; each table has its own seed
        [Dataset.from_dict({"source": [name] * count}) for name, count in counts.items()],
        [0.5, 0.5],
        seed=derive_seed(3, "prompts"),
        stopping_strategy="all_exhausted",
    )
    assert Counter(row.source for row in tables.prompts) == Counter(theirs["source"])
    assert len(tables.prompts) > 100, "b has 60 rows and half of the draws"


def test_the_best_of_n_are_imitated_by_rejection_sampling():
    config, _ = read(
        "POLICY=models/sft\n" + GENERATE + SCORE.format("rs") + "deepspeed --module openrlhf.cli.train_sft "
        f"--dataset best.jsonl --input_key input --output_key output --pretrain $POLICY --max_len 384 {TRAIN}"
    )
    assert config.sft is None and config.rejection_sampling
    assert config.rejection_sampling.select.type == "best_of_n"
    assert config.rejection_sampling.sft.max_length == 384


def test_answers_without_training_are_those_of_the_evaluation():
    config, translation = read("POLICY=models/sft\n" + GENERATE)
    assert config.evaluate and config.evaluate.generate.samples_per_prompt == 4
    assert config.evaluate.evaluate.reference == "base"
    config, translation = read("POLICY=models/sft\n" + GENERATE + SCORE.format("rs"))
    assert fate(translation, "batch_inference", "--post_processor") == "not translatable"


@pytest.mark.parametrize(
    ("task", "penalty", "is_"), [("generate", 1.2, "translated"), ("generate_vllm", 1.0, "ignored")]
)
def test_a_penalty_of_repetitions_is_read_by_the_task_that_reads_it(task, penalty, is_):
    command = f"--eval_task {task} --pretrain m --dataset q.jsonl --apply_chat_template --repetition_penalty 1.2"
    config, translation = read(f"deepspeed --module openrlhf.cli.batch_inference {command}\n")
    assert config.evaluate and config.evaluate.generate.sampling.repetition_penalty == penalty
    assert fate(translation, "batch_inference", "--repetition_penalty") == is_


def test_the_commands_of_a_lifecycle_hand_their_results_on():
    config, translation = read(
        f"deepspeed --module openrlhf.cli.train_sft --pretrain base --dataset d.jsonl --output_key a --save_path sft {TRAIN}\n"
        f"deepspeed --module openrlhf.cli.train_rm --pretrain sft --dataset p.jsonl --save_path rm {TRAIN}\n"
        f"deepspeed --module openrlhf.cli.train_dpo --pretrain sft --dataset p.jsonl --save_path dpo {TRAIN}\n"
        f"python -m openrlhf.cli.train_ppo_ray --pretrain dpo --reward_pretrain rm --prompt_data d.jsonl {TRAIN} --seed 3"
    )
    assert config.sft and config.reward_model and config.dpo and config.ppo
    assert (config.dpo.start_from, config.ppo.start_from) == ("sft", "dpo")
    assert config.prepare_data.model.path == "base"
    assert fate(translation, "train_ppo_ray", "--reward_pretrain") == "translated"
    uses = [source.use.model_dump(exclude_defaults=True) for source in config.prepare_data.data.sources]
    assert uses == [{"demonstrations": 1.0}, {"preferences": 1.0}, {"prompts": 1.0}]


def test_a_run_has_one_value_of_what_is_the_runs():
    both = "deepspeed --module openrlhf.cli.train_{} --pretrain base --dataset d.jsonl --apply_chat_template --zero_stage {}\n"
    config, translation = read(both.format("sft", 2) + both.format("rm", 3))
    assert config.runtime.trainer.zero_stage == 2
    outcome = next(one for one in translation.outcomes if (one.command, one.flag) == ("train_rm", "--zero_stage"))
    assert outcome.fate == "not translatable" and "--zero_stage 2" in outcome.what[0]


def test_one_data_set_for_two_tables_is_shared_between_them():
    calls = "deepspeed --module openrlhf.cli.batch_inference --eval_task generate --pretrain m --dataset q.jsonl --apply_chat_template\n"
    ppo = "python -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data q.jsonl --apply_chat_template\n"
    config, _ = read(ppo + calls)
    [source] = config.prepare_data.data.sources
    assert source.use.model_dump(exclude_defaults=True) == {"prompts": 0.5, "eval_prompts": 0.5}
