"""Proposal of comparisons: which pairs of the policies' answers are worth a judgment.

A budget of judgments is spent on the prompts evenly; among the pairs of a prompt the strategy decides.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from rlhf_core.annotation.proposing import (
    Candidate,
    Comparison,
    candidates,
    chosen,
    comparisons,
    require_components,
    write_comparisons,
)
from rlhf_core.data.shards import read_rollouts
from rlhf_core.errors import DataError
from rlhf_core.interfaces import Metrics
from rlhf_core.stage.context import StageContext
from rlhf_core.types import ComparisonsRef, Rollout, RolloutsRef
from stages.propose_comparisons import ProposeComparisonsConfig

TABLE_ROWS = 16  # in the tracker


def run(config: ProposeComparisonsConfig, *, rollouts: dict[str, RolloutsRef], context: StageContext) -> ComparisonsRef:
    """Choose the comparisons for annotators; `rollouts` holds the scored answers of each policy."""
    rows = {name: whole_answers(config, read_rollouts(context.path(ref))) for name, ref in rollouts.items()}
    if config.strategy == "disagreement":
        require_components(rows)
    by_prompt = candidates(rows)
    pairs = chosen(
        by_prompt, strategy=config.strategy, budget=config.budget, per_prompt=config.pairs_per_prompt, seed=context.seed
    )
    if not pairs:
        rule = f"the answers to {len(by_prompt)} prompts hold no two different valid ones"
        raise DataError(context.label, config.strategy, rule, "sample more answers per prompt")
    asked = comparisons(
        pairs, repeat_fraction=config.repeat_fraction, attention_fraction=config.attention_fraction, seed=context.seed
    )
    write_comparisons(context.out, asked)
    record_table(asked, context)
    return context.commit(ComparisonsRef, metrics=proposal_metrics(by_prompt, pairs, asked))


def whole_answers(config: ProposeComparisonsConfig, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts whose answers may be shown."""
    return [row for row in rollouts if not (config.drop_truncated and row.completion.finish_reason == "length")]


def proposal_metrics(
    by_prompt: Mapping[str, Sequence[Candidate]], pairs: Sequence[Candidate], asked: Sequence[Comparison]
) -> Metrics:
    """Numbers of possible and of proposed pairs, and how the proposed pairs differ from all."""
    everything = [pair for found in by_prompt.values() for pair in found]
    return {
        "prompts": float(len(by_prompt)),
        "candidates": float(len(everything)),
        "pairs": float(len(pairs)),
        "comparisons": float(len(asked)),
        "margin/all": fmean(pair.margin for pair in everything),
        "margin/asked": fmean(pair.margin for pair in pairs),
        "disagreement/all": fmean(pair.disagreement for pair in everything),
        "disagreement/asked": fmean(pair.disagreement for pair in pairs),
    }


def record_table(asked: Sequence[Comparison], context: StageContext) -> None:
    rows = [[one.prompt[-1].content, one.first, one.second] for one in asked[:TABLE_ROWS]]
    context.tracker.table("samples/comparisons", ["prompt", "first", "second"], rows)
