"""Convert rows of the supported dataset formats to `Example`s, with one adapter per format.

Column names are TRL's (https://huggingface.co/docs/trl/dataset_formats). Turns may be `role`/`content` or ShareGPT's
`from`/`value`. Prompts and answers may be text or turns. Raw HH-RLHF transcripts and GSM8K are supported as they are.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_core.config.data import PreferenceCoding, RankingPairs
from rlhf_core.data.chat_templates import common_beginning
from rlhf_core.data.columns import LabelReading, Reading, alpaca_turns, prompt_name, prompt_turns, verdict_of
from rlhf_core.data.comparisons import (
    TRANSCRIPT_TURN,
    Row,
    Tie,
    Unrated,
    compared,
    overall,
    ranked,
    rated,
    score_margin,
)
from rlhf_core.data.limits import Origin
from rlhf_core.data.turns import (
    Turns,
    annotator,
    calls_tools,
    finite,
    holds_turns,
    is_text_of_turns,
    label,
    margin,
    probability,
    refuse_calls,
    string,
    thumbs_up,
    tools_of,
    transcript,
    truth,
    turns_of,
    with_tools,
)
from rlhf_core.errors import DataError
from rlhf_core.types import Message

SYSTEM = ("system", "system_prompt", "system_message")  # names of the column with the system message


@dataclass(frozen=True, slots=True)
class Example:
    """One row of any format: a prompt and up to two answers. A missing answer is the empty tuple.

    A row with `chosen` alone is a demonstration, with both a pair, with neither a bare prompt, and with `rejected`
    alone an answer labeled bad (KTO).

    >>> Example((Message("user", "2+2?"),), chosen=(Message("assistant", "4"),)).rejected
    ()
    """

    prompt: Turns
    chosen: Turns = ()
    rejected: Turns = ()
    label: str = ""
    margin: float = 0.0
    source: str = ""
    """Name of the source, and the row's place in it; adapters do not know them."""
    origin: Origin = Origin("", 0)
    steps: tuple[str, ...] = ()
    """Steps of the only answer, if the row judges each; `step_labels` are the probabilities that they are right."""
    step_labels: tuple[float, ...] = ()
    judged: bool = False
    """Whether the only answer has a label, good or bad."""
    reward: float | None = None
    """Reward of the only answer, if the row has one; meaningful only in comparison with rewards of other answers."""
    annotator: str = ""
    conversational: bool = False
    """Whether the row has the prompt as a list of turns."""
    tied: int = 0
    """Number of pairs of equally good answers in the row, counted at the first example of the row."""
    unread: tuple[str, ...] = ()
    """Columns and keys of turns that were not read, at the first example of the row."""


def convert_all(
    row: Row,
    format_name: str,
    *,
    coding: PreferenceCoding,
    ranking_pairs: RankingPairs,
    rating_weights: Mapping[str, float] | None = None,
    min_margin: float = 0.0,
    labels: LabelReading = "answer",
) -> list[Example]:
    """Return the examples of `row` in the format `format_name`: one, or one per pair for a ranking and for ratings.

    With `labels = "verdict"` the label of a row with one answer decides whether the answer is good. The column `system`
    becomes the system message. Raises DataError for an invalid row, and `comparisons.NoPreference` if its answers are
    equally good or were not judged.
    """
    row = row.again() if isinstance(row, Reading) else Reading(row)
    refuse_calls(row)
    if labels == "verdict" and format_name == "prompt_completion":
        format_name = "unpaired_preference"
    weights = rating_weights or {}
    rows: Sequence[Row] = [row]
    tied = 0
    try:
        if format_name == "comparison":
            rows, format_name = [compared(row, coding)], "preference"
        elif format_name == "ranking":
            rows, tied = ranked(row, ranking_pairs)
            format_name = "preference"
        elif format_name == "ratings":
            rows, tied = rated(row, pairs=ranking_pairs, weights=weights, min_margin=min_margin)
            format_name = "preference"
        elif format_name == "scored" and weights:
            rows = [row | {"reward": _weighted(row, weights)}]
        elif format_name in ("preference", "implicit_preference", "hh") and (margin := score_margin(row)) is not None:
            rows = [_with_margin(row, margin, min_margin)]
    except KeyError as error:
        raise DataError(f"missing column: {error.args[0]!r}; the row has {sorted(row)}") from error
    examples = examples_of(rows, format_name, row, tied=tied)
    if labels == "verdict":
        examples = [_judged(example, row) for example in examples]
    unread = tuple(row.unread())
    return [replace(examples[0], unread=unread), *examples[1:]] if unread else examples


def examples_of(rows: Sequence[Row], format_name: str, row: Row, *, tied: int) -> list[Example]:
    """Return the examples of `rows`, which were made from one `row`, with its system message, annotator and ties."""
    examples = [
        replace(
            _with_tools(_with_system(convert(one, format_name), row), row),
            annotator=annotator(one) or annotator(row),
            conversational=format_name == "messages" or holds_turns(_prompt_cell(row, format_name)),
        )
        for one in rows
    ]
    return [replace(examples[0], tied=tied), *examples[1:]] if tied else examples


def convert(row: Row, format_name: str) -> Example:
    """Return the example of `row` in a format with one example a row. Raises DataError for an invalid row."""
    try:
        example = ADAPTERS[format_name](row if isinstance(row, Reading) else Reading(row))
    except KeyError as error:
        raise DataError(f"missing column: {error.args[0]!r}; the row has {sorted(row)}") from error
    _check_example(example)
    return example


# ---------------------------------------------------------------- adapters


def _messages(row: Row) -> Example:
    """Return a conversation as prompt and answer, or as a prompt alone if its last turn is not the assistant's."""
    turns = turns_of(row["messages"] if "messages" in row else row["conversations"], role="")
    if turns[-1].role == "assistant":
        return Example(turns[:-1], turns[-1:], label=label(row))
    return Example(turns, label=label(row))


def _text(row: Row) -> Example:
    """Return running text as one answer without a prompt."""
    return Example((), turns_of(row["text"], role="assistant"))


def _prompt(row: Row) -> Example:
    return Example(prompt_turns(row), label=label(row))


def _prompt_completion(row: Row) -> Example:
    prompt = prompt_turns(row)
    return Example(prompt, _answer(row["completion"], prompt), label=label(row))


def _alpaca(row: Row) -> Example:
    """Return the instruction with its input, the turns of `history` before it, and its output."""
    answer = turns_of(row["completion"] if "completion" in row else row["output"], role="assistant")
    return Example(alpaca_turns(row), answer, label=label(row))


def _preference(row: Row) -> Example:
    prompt = prompt_turns(row, prompt_name(row) or "prompt")
    chosen, rejected = (_answer(row[name], prompt) for name in ("chosen", "rejected"))
    return _pair(prompt, chosen, rejected, row)


def _implicit_preference(row: Row) -> Example:
    """Return a pair whose prompt is the longest common beginning of both sides."""
    chosen, rejected = row["chosen"], row["rejected"]
    if isinstance(chosen, str) and isinstance(rejected, str) and not is_text_of_turns(chosen):
        border = _common_words(chosen, rejected)
        prompt = turns_of(chosen[:border].strip(), role="user")
        better, worse = (turns_of(side[border:].strip(), role="assistant") for side in (chosen, rejected))
        return _pair(prompt, better, worse, row)
    return _split_pair(turns_of(chosen, role=""), turns_of(rejected, role=""), row)


def _stepwise(row: Row) -> Example:
    """Return the steps and their joined answer, which is good if every step is more likely right than wrong."""
    steps, labels = row["completions"], row["labels"]
    if not isinstance(steps, (list, tuple)) or not isinstance(labels, (list, tuple)) or len(steps) != len(labels):
        raise DataError("completions and labels: must be lists of one length")
    texts = tuple(string(step, "completions") for step in steps)
    answer = turns_of("\n".join(texts), role="assistant")
    prompt = turns_of(row["prompt"], role="user")
    judged = tuple(probability(label) for label in labels)
    if all(label > 0.5 for label in judged):
        return Example(prompt, chosen=answer, steps=texts, step_labels=judged, judged=True)
    return Example(prompt, rejected=answer, steps=texts, step_labels=judged, judged=True)


def _scored(row: Row) -> Example:
    """Return an answer with its reward. The other answers to the prompt decide whether it is good."""
    reward = finite(row["reward"], "reward")
    if "instruction" in row and "output" in row:
        return replace(_alpaca(row), label="", reward=reward)
    prompt, answer = ("input", "output") if "input" in row else ("prompt", "completion")
    return Example(turns_of(row[prompt], role="user"), turns_of(row[answer], role="assistant"), reward=reward)


def _question_answer(row: Row) -> Example:
    """Return a question with its answer. The label is the text after `####` (GSM8K), or else the whole answer."""
    answer = string(row["answer"], "answer")
    _, mark, final = answer.rpartition("####")
    label = final.strip().replace(",", "") if mark else answer.strip()
    return Example(turns_of(row["question"], role="user"), turns_of(answer, role="assistant"), label=label)


ADAPTERS: dict[str, Callable[[Row], Example]] = {
    "messages": _messages,
    "text": _text,
    "prompt": _prompt,
    "prompt_completion": _prompt_completion,
    "alpaca": _alpaca,
    "preference": _preference,
    "implicit_preference": _implicit_preference,
    "hh": lambda row: _split_pair(transcript(row["chosen"]), transcript(row["rejected"]), row),
    "unpaired_preference": lambda row: _judged(_prompt_completion(row), row),
    "stepwise": _stepwise,
    "question_answer": _question_answer,
    "scored": _scored,
}


def _with_system(example: Example, row: Row) -> Example:
    """Return `example` with the row's `system` as system message. Raises DataError if the turns have another one."""
    name = next((name for name in SYSTEM if row.get(name) is not None), "")
    if not name or not string(row[name], name).strip():
        return example
    said = Message("system", row[name])
    first = example.prompt[:1]
    if not first or first[0].role != "system":
        return replace(example, prompt=(said, *example.prompt))
    if first[0].content.strip() != said.content.strip():
        raise DataError(f"two system messages: the column {name} and the first turn differ; keep one of them")
    return example


def _with_tools(example: Example, row: Row) -> Example:
    """Return `example` with the row's tools in its first turn, from where the template shows them to the policy."""
    tools = tools_of(row.get("tools")) or tools_of(row.get("functions"))
    if not tools:
        return example
    if example.prompt:
        return replace(example, prompt=with_tools(example.prompt, tools))
    return replace(example, chosen=with_tools(example.chosen, tools))


def _judged(example: Example, row: Row) -> Example:
    """Return the example of a row with one answer as one that was judged good or bad, by its thumbs or its label."""
    if example.judged or example.rejected or not example.chosen or example.reward is not None:
        return example
    good = thumbs_up(row["thumbs"]) if "thumbs" in row else truth(verdict_of(row))
    if good:
        return replace(example, label="", judged=True)
    if not example.prompt:
        raise DataError("no prompt: a bad answer is compared with others to its prompt")
    return replace(example, chosen=(), rejected=example.chosen, label="", judged=True)


def _prompt_cell(row: Row, format_name: str) -> Any:
    """Return the part of a row with its prompt: the prompt column, or else the chosen side, which begins with it."""
    if format_name == "preference":
        return row.get(prompt_name(row) or "prompt", "")
    return row.get({"implicit_preference": "chosen", "alpaca": "instruction"}.get(format_name, "prompt"), "")


def _split_pair(chosen: Turns, rejected: Turns, row: Row) -> Example:
    """Return an example with the common turns as prompt and the rest as answers.

    Raises DataError if the row has its prompt in a column too, and another one there.
    """
    common = common_beginning(chosen, rejected)
    name = prompt_name(row)
    if name and isinstance(row[name], str) and not any(row[name].strip() in turn.content for turn in chosen[:common]):
        raise DataError(f"two prompts: the column {name!r} is not among the turns that chosen and rejected begin with")
    return _pair(chosen[:common], chosen[common:], rejected[common:], row)


def _pair(prompt: Turns, chosen: Turns, rejected: Turns, row: Row) -> Example:
    if not chosen or not rejected:
        raise DataError("no answer: chosen and rejected each need one after the prompt")
    return Example(prompt, chosen, rejected, margin=margin(row))


def _answer(value: Any, prompt: Turns) -> Turns:
    """Return an answer without the prompt, which some datasets repeat in it as turns or as a transcript."""
    turns = turns_of(value, role="assistant")
    if isinstance(value, str) and TRANSCRIPT_TURN.match(value):
        whole = transcript(value)
        turns = whole if whole[: len(prompt)] == prompt else turns
    return turns[len(prompt) :] or turns if turns[: len(prompt)] == prompt else turns


def _common_words(left: str, right: str) -> int:
    """Return the length of the longest common beginning that ends between words."""
    common = left[: common_beginning(left, right)]
    return len(common) - len(re.split(r"\s", common)[-1])


def _check_example(example: Example) -> None:
    """Raise DataError for an example that cannot be rendered or compared. The reason begins with a fixed phrase."""
    for answer in (example.chosen, example.rejected):
        if answer and (answer[0].role != "assistant" or answer[-1].role != "assistant"):
            raise DataError("answer is not the assistant's: its turns must begin and end with the assistant")
    paired = bool(example.chosen and example.rejected)
    if paired and not example.prompt:
        raise DataError("no common prompt: chosen and rejected differ from the first word")
    if paired and example.chosen == example.rejected:
        raise DataError("chosen equals rejected")
    if not example.prompt and not example.chosen:
        raise DataError("empty row")
    if example.prompt and example.prompt[-1].role == "assistant":
        raise DataError("prompt ends with the assistant: a prompt must end with another's turn")
    for message in (*example.prompt, *example.chosen, *example.rejected):
        if not message.content.strip() and not calls_tools(message):
            raise DataError(f"empty turn: role {message.role}")


def _weighted(row: Row, weights: Mapping[str, float]) -> float:
    """Return the reward of an answer whose row has a column for each aspect (HelpSteer)."""
    value = overall(row, weights)
    if value is None:
        raise Unrated
    return value


def _with_margin(row: Reading, margin: float, min_margin: float) -> Row:
    """Return a pair with the difference of its two ratings as margin. Raises Tie if they are too close."""
    if margin == 0 or margin < min_margin:
        raise Tie
    return row if "margin" in row else row | {"margin": margin}
