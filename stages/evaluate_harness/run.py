"""Tasks of EleutherAI's evaluation harness on one policy: log-likelihoods by the trainer, answers by the sampler."""

import json
from dataclasses import replace
from pathlib import Path

from rlhf_core.errors import ConfigError
from rlhf_core.models.architecture import length_limit, read_config
from rlhf_core.pretrained import load_tokenizer
from rlhf_core.stage.context import StageContext
from rlhf_core.suites.harness import harness_result
from rlhf_core.suites.results import check_suite_rows, record_suite
from rlhf_core.types import PolicyRef, ReportRef
from stages.evaluate_harness import HarnessSuite, content_digests

RESULTS = "lm_eval.json"


def run(config: HarnessSuite, *, policy: PolicyRef, context: StageContext) -> ReportRef:
    """Evaluate one policy: report.json, rows.jsonl with a line per document, and the harness's own numbers."""
    # The optional package lm_eval: that it is installed was checked when the run was planned.
    from rlhf_core.suites.harness import Engines, run_tasks

    check_files(config, context)
    folder = context.path(policy)
    model = context.model(policy)
    architecture = read_config(folder)
    positions = int(architecture.get_text_config().max_position_embeddings)
    max_length = min(positions, length_limit(architecture) or positions)
    engines = Engines(
        tokenizer=load_tokenizer(folder),
        trainer=lambda: context.runtime.trainer("reference", model, None),
        sampler=lambda: context.runtime.sampler(folder),
        max_length=max_length,
        max_sampled_length=min(max_length, context.sampler_length or max_length),
        seed=context.seed,
    )
    results = run_tasks(
        engines,
        config.tasks,
        include_path=str(Path(config.include_path).expanduser()) if config.include_path else "",
        num_fewshot=None if config.num_fewshot < 0 else config.num_fewshot,
        limit=config.limit or None,
        apply_chat_template=config.apply_chat_template,
        headline=config.headline,
    )
    own = {name: results[name] for name in ("results", "versions", "n-shot", "higher_is_better", "n-samples")}
    for folder in (context.work, context.out):  # the first survives a refusal of the numbers below
        (folder / RESULTS).write_text(json.dumps(own, indent=2, default=str), encoding="utf-8")
    check_files(config, context)
    result = harness_result(results, headline=config.headline)
    check_suite_rows(result.rows, rule="the tasks have no documents", remedy="name other tasks")
    facts = {"documents": len(result.rows), "versions": results["versions"], "n-shot": results["n-shot"]}
    metrics = record_suite(replace(result, facts=facts), kind=config.type, policy=policy.digest, context=context)
    return context.commit(ReportRef, metrics=metrics)


def check_files(config: HarnessSuite, context: StageContext) -> None:
    """Raise ConfigError unless the harness version and the task files match the digests in the key."""
    if context.files and content_digests(config) != context.files:
        rule, remedy = "has changed since the run was planned", "run again: the new content gets its own key"
        key = f"evaluate.suites.{config.name}.include_path"
        raise ConfigError(key, config.include_path, rule, remedy)
