"""Name the measures of each stage: the metrics of its record and the numbers of its report.json.

Only names that are known before the stage runs are listed. The plan checks gates and sweeps against them, and the tests
of the stages compare them with the recorded results.

`*` in a name stands for any text, such as a user's own name. Whether a run has one of the numbers may depend on data.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_core.config.monitors import ROW_LOSS, evaluation_metrics, step_metrics
from rlhf_core.stage.key import StageSpec

Specs = Mapping[str, StageSpec]
"""Label -> stage, of a whole pipeline."""

SPLITS = ("train", "eval")
ENDS = ("low", "high", "prompts")
MEAN = ("mean", *ENDS)
SAMPLES = ("length_mean", "entropy", "truncated", "distinct", "rollout/turns", "rollout/failed_episodes", "episode/*")
SYNTHESIZED = ("replies", "kept", "truncated", "without_match", "too_short", "too_long", "repeated", *SPLITS)
JUDGED = ("agreement", "consistency", "attention", "first_chosen", "gold")
BY_JUDGE = ("changed", "toward_first", "toward_second")
MODEL = ("pairs", "prompts", "accuracy", "accuracy_low", "accuracy_high", "ece", "length_correlation",
         "length_rank_correlation", "margin_length_correlation", "margin_mean", "margin_std", "score_mean",
         "score_std")  # fmt: skip
CALIBRATION = ("ece_before", "ece_after", "ece_change")


class Numbers(NamedTuple):
    """The names of the metrics of a stage's record, and of the numbers in its report.json."""

    record: Sequence[str]
    report: Sequence[str] = ()


# ---------------------------------------------------------------- private


def prepare_data(spec: StageSpec, specs: Specs) -> Numbers:
    tokens = [f"tokens/{part}_{figure}" for part in ("prompt", "answer") for figure in ("mean", "max")]
    return Numbers([*tokens, "rows/*", "dropped/*", "contaminated/*", "masked/*", *_FACTS])


_FACTS = ("gold/demonstrations_mean", "gold/demonstrations_right", "annotator/agreement")
"""Of worlds."""


def training(*own: str) -> Callable[[StageSpec, Specs], Numbers]:
    def names(spec: StageSpec, specs: Specs) -> Numbers:
        custom = getattr(getattr(spec.config, "loss", None), "type", "") == "custom"
        losses = ("*",) if custom else ROW_LOSS
        return Numbers([*own, "steps", *(f"{when}eval/{name}" for when in ("", "before/") for name in losses)])

    return names


def _of_model(prefix: str, *, suites: Iterable[str]) -> list[str]:
    """Numbers in the report of a reward model."""
    probes = ("answers", "effect", *ENDS, "raised", "moved")
    return [
        f"{prefix}{name}"
        for name in (
            *MODEL,
            *(f"calibration/{name}" for name in ("temperature", "fitted_pairs", "pairs", "prompts")),
            *(f"calibration/{name}/{figure}" for name in CALIBRATION for figure in ("value", "low", "high")),
            *(f"slices/*/{name}" for name in ("accuracy", "low", "high", "pairs", "prompts")),
            *("probes/answers", "probes/spread", *(f"probes/*/{name}" for name in probes)),
            *_of_suites(suites),
        )
    ]


def _of_suites(suites: Iterable[str]) -> list[str]:
    figures = ("accuracy", *ENDS)
    return [
        f"suites/{suite}/{name}"
        for suite in suites
        for name in (*figures, "macro_accuracy", "rows", "cut", *(f"*/{figure}" for figure in (*figures, "rows")))
    ]


def reward_model(spec: StageSpec, specs: Specs) -> Numbers:
    headline = ("accuracy", "accuracy_low", "accuracy_high", "prompts", "ece", "length_correlation", "temperature")
    ends = ("", "_low", "_high")
    config: Any = spec.config
    record = [
        *training("train_pairs", "dropped_pairs")(spec, specs).record,
        *(f"held_out/{name}" for name in headline),
        *(f"held_out/{name}{end}" for name in CALIBRATION for end in ends),
        *(f"probes/*/*{end}" for end in (*ends, "_prompts")),
        *_of_suites(config.suites),
    ]
    return Numbers(record, _of_model("", suites=()))


def process_reward_model(spec: StageSpec, specs: Specs) -> Numbers:
    rates = [f"{name}{end}" for name in ("accuracy", "first_error_accuracy") for end in ("", "_low", "_high")]
    more = ("first_error_accuracy_with_error", "first_error_accuracy_without_error", "answers", "steps", "right_steps")
    headline = (*rates, "prompts", "f1", "ece")
    of_training = training("train_answers", "train_steps", "dropped_answers")(spec, specs).record
    return Numbers([*of_training, *(f"held_out/{name}" for name in headline)], [*headline, *more])


def score(spec: StageSpec, specs: Specs) -> Numbers:
    names = ("mean", "std", "min", "max", "best", "undecided", "invalid")
    return Numbers([*(f"reward/{name}" for name in names), "reward_component/*"])


def select(spec: StageSpec, specs: Specs) -> Numbers:
    if getattr(spec.config, "type", "") == "prompts":
        counts = ("kept", "too_hard", "too_easy", "without_term", "failed", "above_limit")
        return Numbers(["prompts", *counts, *(f"source/*/{count}" for count in counts)])
    kept = ("prompts", "truncated", "invalid", "too_few", "ties", "below_margin", "margin", *SPLITS)
    rewards = [f"reward/{name}" for name in ("all", "selected", "chosen", "rejected")]
    return Numbers([*kept, *rewards, "length/chosen", "length/rejected"])


def propose_comparisons(spec: StageSpec, specs: Specs) -> Numbers:
    shares = [f"{name}/{which}" for name in ("margin", "disagreement") for which in ("all", "asked")]
    return Numbers(["prompts", "candidates", "pairs", "comparisons", *shares])


def collect_preferences(spec: StageSpec, specs: Specs) -> Numbers:
    by_judge = [f"judge/{name}" for name in (*BY_JUDGE, "malformed", "failed", "questions")]
    pairs = ("ties", "disagreed", "unjudged", *SPLITS, "judgments/trusted", "judgments/all")
    report = [
        *("alpha", *by_judge, "judgments", "comparisons", "choices/*"),
        *(f"{name}/{figure}" for name in JUDGED for figure in (*MEAN, "count")),
        *(f"judge/{name}/{figure}" for name in BY_JUDGE for figure in (*MEAN, "count")),
        *(f"annotators/*/{name}" for name in ("judgments", *JUDGED[1:], "median_seconds")),
    ]
    return Numbers([*pairs, "alpha", *JUDGED, *by_judge], report)


def compare_reward_models(spec: StageSpec, specs: Specs) -> Numbers:
    config: Any = spec.config
    names, suites = list(named_inputs(spec, "reward_models")), config.suites
    over = [(name, other) for name in names for other in names if name != other]
    headline = ("accuracy", "accuracy_low", "accuracy_high", "prompts", "ece", "length_correlation")
    record = [
        "pairs",
        *(f"{name}/{figure}" for name in names for figure in (*headline, *_of_suites(suites))),
        *(f"{name}/over/{other}{end}" for name, other in over for end in ("", *(f"_{end}" for end in ENDS))),
    ]
    report = [
        *(number for name in names for number in _of_model(f"{name}/", suites=suites)),
        *(f"{name}/over/{other}/{figure}" for name, other in over for figure in MEAN),
    ]
    return Numbers(record, report)


def ppo(spec: StageSpec, specs: Specs) -> Numbers:
    config: Any = spec.config
    evaluated = evaluation_metrics(config.rewards, config.evaluate.independent) if config.evaluate else ()
    complaints = [f"monitor/{monitor.label}" for monitor in config.monitors]
    guarded = ("exported_step", "alarms", "stopped_early", *complaints) if evaluated or complaints else ()
    steps = step_metrics(config.rewards, custom_loss=config.loss.type == "custom")
    return Numbers(["steps", *guarded, *steps, *evaluated])


def _suite_measures(config: Any) -> tuple[str, ...]:
    match config.type:
        case "pass_at_k":
            return tuple(f"pass_at_{k}" for k in config.k)
        case "custom":
            return (config.measure,)
        case "instructions":
            return tuple(f"{what}_level_{how}_acc" for what in ("prompt", "inst") for how in ("strict", "loose"))
        case "refusal":
            return ("over_refusal", "unsafe_compliance")
        case "judge":
            return ("win_rate", "length_controlled_win_rate")
    return (config.type,)


def _measures(spec: StageSpec) -> tuple[str, ...]:
    return ("*/*",) if spec.name == "evaluate_harness" else _suite_measures(spec.config)


def suite(spec: StageSpec, specs: Specs) -> Numbers:
    names = _measures(spec)
    record = ["prompts", *(f"{name}{end}" for name in names for end in ("", *(f"_{end}" for end in ENDS)))]
    report = [f"{where}/{name}/{figure}" for where in ("measures", "slices/*") for name in names for figure in MEAN]
    return Numbers(record, [*report, "level", "facts/*"])


def report_suites(spec: StageSpec, specs: Specs) -> Numbers:
    record, report = list[str](), ["level", "regressions/*"]
    kinds = ("", *(f"_{end}" for end in ENDS))
    for name in named_inputs(spec, "results"):
        suite, _, policy = name.partition("/")
        label = f"{spec.label}/{name}"
        for measure in _measures(specs[label]) if label in specs else ("*",):
            record += [f"{name}/{measure}{what}{end}" for what in ("", "_difference") for end in kinds]
            above = f"suites/{suite}/policies/{policy}"
            report += [
                f"{above}/{part}/{measure}/{one}" for part in ("measures", "difference", "slices/*") for one in MEAN
            ]
        report += [f"suites/{suite}/policies/{policy}/facts/*"]
    return Numbers(record, report)


def mix(spec: StageSpec, specs: Specs) -> Numbers:
    rows = [f"tables/*/*/{name}" for name in ("taken", "repeated", "left_out")]
    return Numbers((*SPLITS, "repeated", "moved", "left_out"), ("rows", *rows))


def fixed(*names: str) -> Callable[[StageSpec, Specs], Numbers]:
    return lambda spec, specs: Numbers(names)


def named_inputs(spec: StageSpec, name: str) -> Mapping[str, Any]:
    value = spec.inputs[name] if name in spec.inputs else {}
    return value if isinstance(value, Mapping) else {}
