"""Score with a trained reward model, on inputs formatted as in its training.

Check reward models from outside: the contents that their folders need, and the probes of their contracts.

A reward model of ours is a decoder with a linear head `score` of one output, read at a sequence's last token, and a
tokenizer with a chat template. `AutoModelForSequenceClassification` writes such folders, and so does OpenRLHF, which
leaves the number of outputs out of `config.json`.
"""

from __future__ import annotations

import difflib
import json
import logging
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, cast, get_args

from safetensors import SafetensorError, safe_open

from rlhf_core.algorithms.token_math import StepReduction, loaded_torch, reduce_steps
from rlhf_core.config.rewards import GenerativeReward, ProcessRewardModelReward, RewardsConfig, models_of
from rlhf_core.errors import ArtifactError, ConfigError
from rlhf_core.interfaces import Trainer
from rlhf_core.models.packages import VALUE_HEAD_FILE, refuse_adapter
from rlhf_core.types import (
    Column,
    Generation,
    Message,
    ModelRef,
    PolicyRef,
    ProcessRewardModelRef,
    RewardModelRef,
    TokenSample,
    ids,
    mask,
)

logger = logging.getLogger(__name__)

FLOAT32_TOLERANCE = 1e-4  # kernels and machines differ by rounding
BFLOAT16_TOLERANCE = 1e-1
"""Largest difference of a probe score, relative above 1. Training keeps float32 weights under autocast and serving rounds
them to bfloat16; a head that is not the trained one is off by about 1."""
RENDERED = 8
"""Prompts per batch whose rendering is compared with the policy's."""


class PromptRenderer(Protocol):
    """The part of a chat template that scoring needs."""

    def prompt_ids(self, messages: Sequence[Message]) -> Column[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Contract:
    """`contract.json` of a reward model: the longest input, and its probe scores after training."""

    max_length: int
    probe: tuple[Column[int], ...]
    probe_scores: tuple[float, ...]

    @classmethod
    def read(cls, folder: Path) -> Contract:
        """Load the contract of the reward model in `folder`; ArtifactError if it is missing or not readable."""
        with _contract_in(folder, "reward_model", "is not a valid contract") as content:
            return cls(
                max_length=content["max_length"],
                probe=tuple(map(ids, content["probe"])),
                probe_scores=tuple(content["probe_scores"]),
            )


@contextmanager
def _contract_in(folder: Path, kind: str, rule: str) -> Iterator[dict[str, Any]]:
    """Yield the contract in `folder`; ArtifactError with `rule` if it is missing, or if reading it in the block fails."""
    path = folder / "contract.json"
    try:
        yield json.loads(path.read_text(encoding="utf-8"))
    except (OSError, KeyError, TypeError, ValueError) as error:
        remedy = f"train the {kind.replace('_', ' ')} again"
        raise ArtifactError(kind, str(path), f"{rule} ({error!r})", remedy) from error


def verify_contract(trainer: Trainer, contract: Contract) -> None:
    """Score the probe sequences again; ArtifactError if a score differs: wrong head, wrong padding, other weights."""
    check_scores("reward_model", trainer.scores(contract.probe), contract.probe_scores)


def check_scores(kind: str, scores: Sequence[float], expected: Sequence[float]) -> None:
    """Raise ArtifactError if a probe score is not the `expected` one, as close as the precision of both allows."""
    reduced = _in_bfloat16(scores) or _in_bfloat16(expected)
    tolerance = BFLOAT16_TOLERANCE if reduced else FLOAT32_TOLERANCE
    for index, (score, wanted) in enumerate(zip(scores, expected, strict=True)):
        if not abs(score - wanted) <= tolerance * max(1.0, abs(wanted)):  # NaN fails too
            rule = f"was {wanted!r} after training, and differs by more than the tolerance of {tolerance:g}"
            remedy = "load the model with the score head, padding and precision it was trained with, or train it again"
            raise ArtifactError(f"{kind}.probe[{index}]", score, rule, remedy)


def score_with_reward_model(
    trainer: Trainer, chat: PromptRenderer, generations: Sequence[Generation], *, max_length: int
) -> list[float]:
    """Score prompt and completion of each generation, tokens as sampled, with the head's output at the last token.

    Nothing is decoded and tokenized again, and no end token is added to an answer that was cut off. Beyond `max_length`
    tokens the sequence is cut, as in training. ConfigError when `chat`, the reward model's own template, reads prompts
    or tokens in another way than the policy (`check_rendering`).
    """
    check_rendering(chat, generations)
    sequences = [generation.prompt_ids + generation.completion.token_ids for generation in generations]
    cut = sum(len(sequence) > max_length for sequence in sequences)
    if cut:
        logger.warning("truncated %d of %d sequences to the reward model's %d tokens", cut, len(sequences), max_length)
    return trainer.scores([sequence[:max_length] for sequence in sequences])


def check_rendering(chat: PromptRenderer, generations: Sequence[Generation]) -> None:
    """Raise ConfigError if `chat` renders one of the first prompts to other tokens than the policy saw.

    An agent may have added tools or text to the prompt, which no template renders from the prompt alone: for a completion
    with spans it is enough that the tokens mean the same text.
    """
    for generation in generations[:RENDERED]:
        _check_rendering(chat, generation)


def _in_bfloat16(scores: Sequence[float]) -> bool:
    """Whether every score is exactly a bfloat16 number, which indicates that the model computes in bfloat16."""
    return all(struct.pack(">f", score)[2:] == b"\0\0" for score in scores)


def _check_rendering(chat: PromptRenderer, generation: Generation) -> None:
    if chat.prompt_ids(generation.prompt.messages) == generation.prompt_ids:
        return
    completion = generation.completion
    rule = "the reward model's tokenizer or chat template turns it into other tokens than the policy's"
    remedy = "train the reward model from a model with the policy's tokenizer and template"
    if completion.spans:
        if chat.decode(completion.token_ids) == completion.text:
            return
        rule = "the reward model's tokenizer decodes the tokens of the episode to another text"
        remedy = "train the reward model from a model with the policy's tokenizer"
    raise ConfigError("reward_model", f"prompt {generation.prompt.id}", rule, remedy)


# ---------------------------------------------------------------- process model


class Splitter(Protocol):
    """Finds where steps end, as `rlhf_core.data.tables.StepSplitter` does."""

    def ends(self, token_ids: Sequence[int]) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class ProcessContract:
    """`contract.json` of a process reward model: how answers are split into steps, and its probe scores."""

    max_length: int
    separator: str
    reduce: StepReduction
    probe: tuple[TokenSample, ...]
    probe_scores: tuple[tuple[float, ...], ...]
    """The logit of each step."""

    @classmethod
    def read(cls, folder: Path) -> ProcessContract:
        """Load the contract of the model in `folder`; ArtifactError if it is missing or for another kind of model."""
        rule = "is not a valid contract of a process reward model"
        with _contract_in(folder, "process_reward_model", rule) as content:
            if content["reduce"] not in get_args(StepReduction):
                raise ValueError(f"reduce is {content['reduce']!r}")
            probe = zip(content["probe"], content["probe_step_ends"], strict=True)
            return cls(
                max_length=content["max_length"],
                separator=content["separator"],
                reduce=cast(StepReduction, content["reduce"]),
                probe=tuple(step_ends_sample(ids, ends) for ids, ends in probe),
                probe_scores=tuple(tuple(scores) for scores in content["probe_step_scores"]),
            )


def verify_process_contract(trainer: Trainer, contract: ProcessContract) -> None:
    """Score the probes' steps again; ArtifactError if a score differs: wrong head, wrong padding, other weights."""
    found, expected = trainer.step_scores(contract.probe), contract.probe_scores
    scores = [score for row in found for score in row]
    check_scores("process_reward_model", scores, [score for row in expected for score in row])


def score_with_process_reward_model(
    trainer: Trainer,
    chat: PromptRenderer,
    splitter: Splitter,
    generations: Sequence[Generation],
    *,
    max_length: int,
    reduce: StepReduction,
) -> list[float]:
    """Score each generation: `reduce` over the probabilities that its steps are right, on the tokens as sampled.

    A step that the token limit or `max_length` cut off is read at its last token. ConfigError when `chat`, the model's
    own template, reads prompts or tokens in another way than the policy (`check_rendering`).
    """
    check_rendering(chat, generations)
    samples = [judged(generation, splitter, max_length=max_length) for generation in generations]
    cut = sum(len(generation.prompt_ids + generation.completion.token_ids) > max_length for generation in generations)
    if cut:
        rule = "truncated %d of %d sequences to the process reward model's %d tokens"
        logger.warning(rule, cut, len(samples), max_length)
    logits = trainer.step_scores(samples)
    return [float(reduce_steps(loaded_torch().tensor(row).sigmoid(), how=reduce)) for row in logits]


def judged(generation: Generation, splitter: Splitter, *, max_length: int) -> TokenSample:
    """Prompt and completion as one sample, cut to `max_length` tokens, with the mask at the last token of each step.

    Only the policy's text has steps: each of its turns is split alone, and text of an environment between them has
    none. A completion without tokens is read at the prompt's last token.
    """
    before = len(generation.prompt_ids)
    completion = generation.completion
    tokens = generation.prompt_ids + completion.token_ids
    last = min(len(tokens), max_length) - 1
    turns = [
        (before + start, splitter.ends(completion.token_ids[start:end]))
        for start, end in turns_of(completion.action_mask)
    ]
    ends = [start + end for start, ends in turns for end in ends if start + end < last]
    sampled = last >= before and completion.action_mask[last - before]
    return step_ends_sample(tokens[: last + 1], [*ends, last] if sampled or not ends else ends)


def turns_of(action_mask: Sequence[int]) -> list[tuple[int, int]]:
    """Start and end (exclusive) of each run of sampled tokens.

    >>> turns_of((1, 1, 0, 1))
    [(0, 2), (3, 4)]
    """
    borders = [at for at, pair in enumerate(pairwise((0, *action_mask, 0))) if pair[0] != pair[1]]
    return list(zip(borders[::2], borders[1::2], strict=True))


def step_ends_sample(token_ids: Sequence[int], ends: Sequence[int]) -> TokenSample:
    """`token_ids` as a sample with mask 1 at the positions `ends`.

    >>> step_ends_sample((5, 6, 7), [1, 2]).loss_mask
    (0, 1, 1)
    """
    places = set(ends)
    return TokenSample(ids(token_ids), mask([position in places for position in range(len(token_ids))]))


# ---------------------------------------------------------------- external

HEAD = "score.weight"
OTHER_HEADS = ("value_head.weight", "v_head.summary.weight", "classifier.weight", "classifier.out_proj.weight")
"""Heads of OpenRLHF up to 0.5, TRL's value models, and encoders."""

GIT_LFS = b"version https://git-lfs"
"""First bytes of a Git LFS pointer, which stands in place of a file that was not fetched."""

PROBES = (
    ("What is 12 + 30?", "12 + 30 is 42."),
    ("What is 12 + 30?", "I do not know, and I do not care."),
    ("Name a color of the rainbow.", "Green."),
    ("Name a color of the rainbow.", "The rainbow is a bow of rain. Rain is wet. Wet is not dry."),
    ("How do I boil an egg?", "Put it in boiling water for eight minutes, then cool it under the tap."),
    ("How do I boil an egg?", "egg egg egg egg egg egg egg egg"),
    ("Write a sentence about the sea.", "The sea was calm, and the boats came home before dark."),
    ("Is the earth flat?", "No. It is very nearly a sphere, a little wider at the equator."),
)
"""Questions and answers that are scored at the import, so that every later use can check that it computes the same."""


def has_scalar_head(folder: Path) -> bool:
    """Whether a folder, if it can be read, has the weights of a reward model or value model."""
    try:
        return HEAD in _shapes(folder)
    except ConfigError:  # damaged, or a pointer to an unfetched file: the reader of the weights names it
        return False


def check_classifier(folder: Path, *, template: bool = True) -> None:
    """Raise ConfigError with a remedy for a folder that is no readable reward model. No weight is loaded.

    Without `template`, its tokenizer needs no chat template.
    """
    refuse_adapter(folder)
    if not (folder / "config.json").is_file():
        raise _refused(folder, "is not a folder with a config.json", "download the model first, and give its folder")
    config = _table(folder, "config.json")
    if "auto_map" in config:
        raise _refused(folder, "needs its own code (auto_map)", 'serve it, and configure the server: type = "remote"')
    shapes = _shapes(folder)
    if not shapes:
        raise _refused(
            folder, "contains no safetensors files", "load it with transformers and save it with save_pretrained"
        )
    if HEAD not in shapes:
        own = [f"{config['value_head_prefix']}.weight"] if config.get("value_head_prefix") else []
        other = next((name for name in (*own, *OTHER_HEADS) if name in shapes), "")
        if other:
            raise _refused(folder, f"its head is {other}", f"only a decoder's {HEAD} is read; rename a decoder's")
        remedy = "use a sequence classifier; to train one from a language model, use [reward_model]"
        raise _refused(folder, f"has no score head ({HEAD}): it is probably a language model", remedy)
    outputs = shapes[HEAD][0]
    if outputs != 1:
        raise _refused(folder, f"has {outputs} outputs", "use a reward model with one output (num_labels = 1)")
    if "score.bias" in shapes:
        raise _refused(folder, "its score head has a bias, which would be ignored", 'serve it: type = "remote"')
    if config.get("normalize_reward") and (config.get("mean", 0.0), config.get("std", 1.0)) != (0.0, 1.0):
        rule = f"OpenRLHF subtracts {config.get('mean')} from its scores and divides by {config.get('std')}, which this program does not"
        remedy = 'set normalize_reward to false in its config.json and normalize = "running" in the reward\'s term'
        raise _refused(folder, rule, remedy)
    _check_tokenizer(folder, template=template)


def single_output(config: dict[str, Any]) -> dict[str, Any]:
    """A `config.json` with `num_labels` 1, because transformers would otherwise assume 2."""
    return {**config, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def probe_messages() -> list[tuple[tuple[Message, ...], str]]:
    """The probes as prompts and answers."""
    return [((Message("user", question),), answer) for question, answer in PROBES]


def _check_tokenizer(folder: Path, *, template: bool) -> None:
    tokenizer = folder / "tokenizer_config.json"
    if not tokenizer.is_file():
        raise _refused(
            folder, "contains no tokenizer", "save the tokenizer that it was trained with in the same folder"
        )
    inside = "chat_template" in _table(folder, tokenizer.name)
    if template and not inside and not (folder / "chat_template.jinja").is_file():
        remedy = "add the template that it was trained with as chat_template.jinja"
        raise _refused(folder, "its tokenizer has no chat template", remedy)


def _shapes(folder: Path) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy") as tensors:
                shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise _unreadable(folder, file.name, f"is not a safetensors file ({error})") from error
    if (folder / VALUE_HEAD_FILE).is_file() and "weight" in shapes:
        shapes[HEAD] = shapes.pop("weight")
    return shapes


def _table(folder: Path, name: str) -> dict[str, Any]:
    try:
        table = json.loads((folder / name).read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON, or of UTF-8
        raise _unreadable(folder, name, f"is not valid JSON ({error})") from error
    if not isinstance(table, dict):
        raise _unreadable(folder, name, f"must be a JSON object, not {type(table).__name__}")
    return table


def _unreadable(folder: Path, name: str, rule: str) -> ConfigError:
    with (folder / name).open("rb") as file:
        pointer = file.read(len(GIT_LFS)) == GIT_LFS
    if pointer:
        return _refused(
            folder, f"its {name} is a git-lfs pointer, not the file itself", "run `git lfs pull` in that folder"
        )
    return _refused(folder, f"its {name} {rule}", "download the file again")


def _refused(folder: Path, rule: str, remedy: str) -> ConfigError:
    return ConfigError("import_reward_model.path", str(folder), rule, remedy)


# ---------------------------------------------------------------- model inputs


def check_reward_models(config: RewardsConfig, reward_models: Mapping[str, ModelRef]) -> None:
    """Raise ConfigError if a term names a model that is not among the inputs, or a model of the wrong kind."""
    for name, spec in config.terms.items():
        for key, model in models_of(spec):
            if model not in reward_models:
                near = difflib.get_close_matches(model, reward_models, n=1)
                given = f"did you mean {near[0]}?" if near else f"the stage has {sorted(reward_models) or 'none'}"
                rule = "the stage was not given this reward model"
                raise ConfigError(f"rewards.terms.{name}.{key}", model, rule, given)
            ref, generative = reward_models[model], isinstance(spec, GenerativeReward)
            rule, remedy = "", ""
            if isinstance(ref, ProcessRewardModelRef) and not isinstance(spec, ProcessRewardModelReward):
                rule, remedy = "it scores steps, not whole answers", 'set type = "process_reward_model"'
            elif generative and isinstance(ref, RewardModelRef):
                rule, remedy = "it gives scores, not verdicts", 'set type = "reward_model"'
            elif not generative and isinstance(ref, PolicyRef):
                rule, remedy = "it is a policy, which gives no scores", 'set type = "generative_reward_model"'
            if rule:
                raise ConfigError(f"rewards.terms.{name}.{key}", model, rule, remedy)
