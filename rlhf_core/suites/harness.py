"""Run tasks of EleutherAI's evaluation harness (lm_eval) on our trainer and sampler.

The harness requests log-likelihoods of continuations and answers up to a stop text. The trainer computes the first and
the sampler the second, from the tokens that the harness's own `hf` model would use, so that the numbers agree. Two things
differ: a document longer than the policy's context keeps one token less of its beginning, and stop texts are cut from the
finished answer instead of ending it.

This module needs the optional package lm_eval: import it late.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import lm_eval
import numpy as np
import torch
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.data.chat import Renderer, as_parts
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.evaluation.intervals import LEVEL, t_quantile
from rlhf_core.interfaces import Sampler, Trainer, logprob_rows
from rlhf_core.suites.results import Measured, PromptRow, shares_among
from rlhf_core.types import SamplingRequest, TokenSample, derive_seed, ids, mask

# ---------------------------------------------------------------- Read the results of EleutherAI's evaluation harness as those of a suite

NO_FILTER = "none"
TOLERANCE = 1e-9  # float64 sums of float64 in another order differ by less
Results = Mapping[str, Any]


def harness_result(results: Results, *, headline: str) -> Measured:
    """Convert the harness's numbers to `<task>/<metric>` (`<task>/<metric>/<filter>` where filters exist).

    A metric that is the mean over documents gets our interval over them. Any other metric gets the interval of the
    harness's standard error, if it has one above 0. Raises ConfigError for a `headline` that is none of the measures.
    """
    rows: dict[str, PromptRow] = {}
    for task, samples in results["samples"].items():
        for sample in samples:
            one = _row(task, sample)
            rows[one.id] = PromptRow(one.id, task, one.prompt, one.answer, {**_values(rows, one.id), **one.values})
    found = _numbers(results)
    _check_numbers(found, rows.values())
    kept = {name for name, (value, _) in found.items() if _is_mean(rows.values(), name, value)}
    if not found:
        raise DataError("evaluate.suites.tasks", list(results["results"]), "have no metric", "name other tasks")
    if headline and headline not in found:
        rule = f"is no measure of these tasks ({', '.join(found)})"
        raise ConfigError("evaluate.suites.headline", headline, rule, "name one of these")
    counts = Counter(row.slice for row in rows.values())
    others = {
        name: _interval(*number, documents=counts[name.partition("/")[0]])
        for name, number in found.items()
        if name not in kept
    }
    chosen = tuple(
        PromptRow(
            row.id,
            row.slice,
            row.prompt,
            row.answer,
            {name: value for name, value in row.values.items() if name in kept},
        )
        for row in rows.values()
    )
    shares = shares_among(chosen)
    return Measured(chosen, headline or next(iter(found)), _lower_is_better(results), others, shares=shares)


def _numbers(results: Results) -> dict[str, tuple[float, float]]:
    """Map measure -> (value, standard error or NaN), in the order of the harness."""
    found = {}
    for task, numbers in results["results"].items():
        for key, value in numbers.items():
            metric, _, filtered = key.partition(",")
            if filtered and not metric.endswith("_stderr") and isinstance(value, (int, float, np.number)):
                error = numbers[f"{metric}_stderr,{filtered}"] if f"{metric}_stderr,{filtered}" in numbers else None
                found[measure_name(task, metric, filtered)] = (
                    float(value),
                    float(error) if isinstance(error, (int, float, np.number)) else math.nan,
                )
    return found


def _check_numbers(found: Mapping[str, tuple[float, float]], rows: Iterable[PromptRow]) -> None:
    """Raise DataError for a measure that is no finite number, in all or at one document."""
    for name, value in [
        *((name, value) for name, (value, _) in found.items()),
        *(one for row in rows for one in row.values.items()),
    ]:
        if not math.isfinite(value):
            rule, remedy = "is no finite number", "leave out this task or metric; the harness's own numbers are kept"
            raise DataError(f"evaluate.suites.{name}", value, rule, remedy)


def _lower_is_better(results: Results) -> tuple[str, ...]:
    better = results["higher_is_better"]
    names = []
    for task, numbers in results["results"].items():
        for key in numbers:
            metric, _, filtered = key.partition(",")
            if filtered and task in better and metric in better[task] and better[task][metric] is False:
                names.append(measure_name(task, metric, filtered))
    return tuple(names)


def measure_name(task: str, metric: str, filtered: str) -> str:
    """The name of a metric of a task in our reports."""
    return f"{task}/{metric}" if filtered == NO_FILTER else f"{task}/{metric}/{filtered}"


def _interval(value: float, error: float, *, documents: int) -> dict[str, float]:
    """A measure with the interval of its standard error. An error that is missing, or 0 (all agree), gives none.

    A group of tasks has no documents: the normal distribution is used.
    """
    counted = {"mean": value} | ({"prompts": float(documents)} if documents else {})
    if math.isnan(error) or error <= 0 or documents == 1:
        return counted
    half = t_quantile(LEVEL, documents - 1 if documents else math.inf) * error  # mean +- t_{n-1} * SE
    return counted | {"low": value - half, "high": value + half}


def _row(task: str, sample: Mapping[str, Any]) -> PromptRow:
    """The row of a document; metrics that are no number per document are left out."""
    filtered = sample["filter"]
    values = {
        measure_name(task, metric, filtered): float(sample[metric])
        for metric in sample["metrics"]
        if isinstance(sample[metric], (bool, int, float, np.number))
    }
    identity = f"{task}:{sample['doc_id']}:{str(sample['doc_hash'])[:8]}"
    return PromptRow(identity, task, _prompt(sample["arguments"]), _answer(sample["filtered_resps"]), values)


def _values(rows: Mapping[str, PromptRow], identity: str) -> Mapping[str, float]:
    return rows[identity].values if identity in rows else {}


def _prompt(arguments: Any) -> str:
    """The context of the first request of a document."""
    first = next(iter(arguments.values())) if isinstance(arguments, Mapping) else arguments[0]
    found = first["arg_0"] if isinstance(first, Mapping) else first[0]
    return str(found)


def _answer(responses: Any) -> str:
    return responses[0] if len(responses) == 1 and isinstance(responses[0], str) else str(list(responses))


def _is_mean(rows: Iterable[PromptRow], name: str, value: float) -> bool:
    values = [row.values[name] for row in rows if name in row.values]
    return bool(values) and math.isclose(math.fsum(values) / len(values), value, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


# ---------------------------------------------------------------- harness

MAX_GEN_TOKENS = 256
"""Tokens of an answer where a task sets no limit; the default of the harness."""
BOOTSTRAP_ITERS = 1000
"""Resamples of the harness for the standard error of metrics that are no mean, such as F1."""
_OPTIONS = {"do_sample", "temperature", "top_p", "top_k", "until", "max_gen_toks"}


@dataclass(frozen=True, slots=True)
class Engines:
    """The policy behind the harness: its tokenizer, and leases of the trainer and the sampler."""

    tokenizer: Any
    trainer: Callable[[], AbstractContextManager[Trainer]]
    sampler: Callable[[], AbstractContextManager[Sampler]]
    max_length: int
    """Most tokens of the policy's context, at which trainer and sampler agree."""
    max_sampled_length: int
    """Most tokens of a question with its answer: the same, or the sampler's limit if that is less."""
    seed: int


def run_tasks(
    engines: Engines,
    tasks: Sequence[str],
    *,
    include_path: str,
    num_fewshot: int | None,
    limit: int | None,
    apply_chat_template: bool,
    headline: str = "",
) -> dict[str, Any]:
    """Run `tasks` on the policy behind `engines`: the harness's own results, with samples.

    Its seeds are the harness's defaults; the process's random states are restored afterwards. Raises ConfigError,
    before an engine is leased, for tasks that the engines cannot run and for a `headline` that is none of their measures.
    """
    manager = _task_manager(tasks, include_path)
    with _random_states_kept():
        loaded = _loaded(manager, tasks)
        _check_headline(loaded, headline)
        for task in loaded["tasks"].values():
            if task.get_config("output_type") == "generate_until":
                _sampling(engines, dict(task.get_config("generation_kwargs") or {}))
        results = lm_eval.simple_evaluate(
            model=EngineLM(engines),
            tasks=list(tasks),
            num_fewshot=num_fewshot,
            limit=limit,
            bootstrap_iters=BOOTSTRAP_ITERS,
            log_samples=True,
            apply_chat_template=apply_chat_template,
            task_manager=manager,
        )
    assert results is not None  # only on other ranks
    return dict(results)


def _task_manager(tasks: Sequence[str], include_path: str) -> TaskManager:
    """Index the tasks; the harness's own, thousands of files, only if `include_path` lacks a task."""
    if include_path:
        local = TaskManager(include_path=include_path, include_defaults=False)
        if all(local.match_tasks([name]) for name in tasks):
            return local
    manager = TaskManager(include_path=include_path or None)
    missing = [name for name in tasks if not manager.match_tasks([name])]
    if missing:
        remedy = "name a task of the harness, or one of a YAML file in include_path"
        raise ConfigError("evaluate.suites.tasks", missing[0], "there is no such task", remedy)
    return manager


def _loaded(manager: TaskManager, tasks: Sequence[str]) -> Mapping[str, Any]:
    """Load the tasks; raise ConfigError for a pattern, or a task that is named together with its group."""
    try:
        return dict(manager.load(list(tasks)))
    except (KeyError, ValueError) as error:
        # The harness reads the tasks' files and data here, too.
        remedy = "name each task or its group once, without patterns, or correct its files and data"
        rule = f"cannot be loaded ({error})"
        raise ConfigError("evaluate.suites.tasks", list(tasks), rule, remedy) from error


def _check_headline(loaded: Mapping[str, Any], headline: str) -> None:
    """Raise ConfigError for a measure that these tasks cannot have. Names created at run time are unknown."""
    task, _, measure = headline.partition("/")
    known: list[str] = []
    for name, one in loaded["tasks"].items():
        metrics = one.get_config("metric_list") or []
        if task == name and (one.get_config("process_results") or any(callable(it["metric"]) for it in metrics)):
            return
        filters = [found.name for found in one._filters]
        known += [measure_name(name, metric, found) for metric in one.aggregation() for found in filters]
    for name, group in loaded["groups"].items():
        known += [f"{name}/{one.metric}" for one in group.aggregate_metric_list or ()]
    of_group = f"{task}/{measure.partition('/')[0]}" if task in loaded["groups"] else ""  # with any filter
    if not headline or headline in known or of_group in known:
        return
    rule = f"is no measure of these tasks ({', '.join(known)})"
    raise ConfigError("evaluate.suites.headline", headline, rule, "name one of these")


class EngineLM(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """The harness's view of a policy; engines are leased only for requests that need them."""

    def __init__(self, engines: Engines) -> None:
        super().__init__()
        self.tokenizer = engines.tokenizer
        self._engines = engines

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: the beginning of text, or else its end."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """The name by which the harness caches requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Tokenize a text; a beginning-of-text token that the text already has is not added again."""
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        if add_special_tokens is None and string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            options = {"add_special_tokens": False}
        return list(self.tokenizer.encode(string, **options))

    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        samples = []
        for _, context, continuation in requests:
            tokens = ids([*context, *continuation][-self._engines.max_length :])
            scored = min(len(continuation), len(tokens) - 1)
            samples.append(TokenSample(tokens, mask(bytes(len(tokens) - scored) + b"\1" * scored)))
        return _scored(self._engines, samples)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text, in windows of the policy's context."""
        pairs, documents = [], []
        for document, (text,) in enumerate(request.args for request in requests):
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._engines.max_length - 1,  # our engines read the last token, too
                context_len=1,
            )
            found = [("", *utils.make_disjoint_window(window)) for window in windows]
            pairs += found
            documents += [document] * len(found)
        values: list[list[float]] = [[] for _ in requests]
        for document, (value, _) in zip(documents, self._loglikelihood_tokens(pairs), strict=True):
            values[document].append(value)
        return [math.fsum(of_document) for of_document in values]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Sample an answer to each request, up to its stop texts. Requests with the same options form one batch."""
        asked = [(request.args[0], dict(request.args[1])) for request in requests]
        texts: dict[int, str] = {}

        def options_of(place: int) -> str:
            return repr(sorted(asked[place][1].items()))

        for place in {options_of(place): place for place in range(len(asked))}.values():
            _sampling(self._engines, asked[place][1])  # a document may have different options
        eos = self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)
        with self._engines.sampler() as sampler:
            for _, group in groupby(sorted(range(len(asked)), key=options_of), key=options_of):
                places = list(group)
                options = asked[places[0]][1]
                contexts = {place: self.tok_encode(asked[place][0]) for place in places}
                answers = _sampled(self._engines, sampler, contexts, _sampling(self._engines, options))
                stops = handle_stop_sequences(normalize_gen_kwargs(options, MAX_GEN_TOKENS)["until"], eos=eos)
                texts |= {place: postprocess_generated_text(text, stops, None) for place, text in answers.items()}
        return [texts[place] for place in range(len(asked))]

    def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
        """Render a conversation with the policy's chat template."""
        return str(
            self.tokenizer.apply_chat_template(
                as_parts(chat_history) if Renderer(self.tokenizer).in_parts else chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )


def _scored(engines: Engines, samples: Sequence[TokenSample]) -> list[tuple[float, bool]]:
    """Log-likelihood of the masked tokens of each sample, and whether each of them is the likeliest."""
    with engines.trainer() as trainer:
        logprobs = logprob_rows(trainer, samples)
        likeliest = trainer.top_logprobs(samples, k=1, temperature=1.0)
    found = []
    for sample, values, top in zip(samples, logprobs, likeliest, strict=True):
        scored = [place for place, mask in enumerate(sample.loss_mask) if mask]
        greedy = [sample.token_ids[place] for place in scored] == [int(ids[0]) for ids in top.ids]
        found.append((math.fsum(values[place] for place in scored), greedy))
    return found


def _sampling(engines: Engines, kwargs: Mapping[str, Any]) -> SamplingConfig:
    """Translate the harness's generation options; raise ConfigError for unsupported ones."""
    options = normalize_gen_kwargs(dict(kwargs), MAX_GEN_TOKENS)
    unknown = sorted(set(options) - _OPTIONS)
    if unknown:
        key, rule = f"generation_kwargs.{unknown[0]}", "our samplers have no such option"
        raise ConfigError(key, options[unknown[0]], rule, "remove it from the task")
    tokens = int(options["max_gen_toks"])
    if tokens >= engines.max_sampled_length:
        rule = f"leaves no room for a question in the {engines.max_sampled_length} tokens of policy and sampler"
        raise ConfigError("generation_kwargs.max_gen_toks", tokens, rule, "lower it in the task")
    return SamplingConfig(
        temperature=float(options["temperature"]) if options["do_sample"] else 0.0,
        top_p=float(options["top_p"]) if "top_p" in options else 1.0,
        top_k=int(options["top_k"]) if "top_k" in options else 0,
        max_tokens=tokens,
    )


def _sampled(
    engines: Engines, sampler: Sampler, contexts: Mapping[int, Sequence[int]], sampling: SamplingConfig
) -> dict[int, str]:
    """Sample an answer to each context; contexts are cut at their start."""
    room = engines.max_sampled_length - sampling.max_tokens
    requests = [
        SamplingRequest(ids(context[-room:]), derive_seed(engines.seed, "lm_eval", place))
        for place, context in contexts.items()
    ]
    completions = sampler.generate(requests, sampling)
    return {place: one.text for place, one in zip(contexts, completions, strict=True)}


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Restore the random states that the harness seeds."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
