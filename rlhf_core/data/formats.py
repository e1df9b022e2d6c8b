"""Convert rows of the supported dataset formats to `Example`s, with one adapter per format.

Column names are TRL's (https://huggingface.co/docs/trl/dataset_formats). Turns may be `role`/`content` or ShareGPT's
`from`/`value`. Prompts and answers may be text or turns. Raw HH-RLHF transcripts and GSM8K are supported unchanged.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rlhf_core.data.chat_templates import common_beginning
from rlhf_core.data.columns import LabelReading, Reading, alpaca_turns, prompt_name, prompt_turns, verdict_of
from rlhf_core.data.limits import Origin
from rlhf_core.data.row_functions import Row
from rlhf_core.data.turns import (
    TRANSCRIPT_TURN,
    Turns,
    annotator,
    calls_tools,
    holds_turns,
    is_text_of_turns,
    label,
    margin,
    probability,
    rating,
    refuse_calls,
    string,
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
    annotator: str = ""
    conversational: bool = False
    """Whether the row has the prompt as a list of turns."""
    unread: tuple[str, ...] = ()
    """Columns and keys of turns that were not read."""


class Tie(Exception):
    """Raised for a valid pair whose answers were rated equally good."""


def convert(row: Row, format_name: str, *, labels: LabelReading = "answer") -> Example:
    """Convert `row` from the format `format_name`.

    With `labels = "verdict"` the label of a row with one answer decides whether the answer is good. The column `system`
    becomes the system message. Raises DataError for an invalid row, and Tie if its answers are rated equally good.
    """
    row = row.again() if isinstance(row, Reading) else Reading(row)
    refuse_calls(row)
    try:
        if format_name in ("preference", "implicit_preference", "hh"):
            row = _with_margin(row)
        example = ADAPTERS[format_name](row)
    except KeyError as error:
        raise DataError(f"missing column: {error.args[0]!r}; the row has {sorted(row)}") from error
    _check_example(example)
    if labels == "verdict":
        example = _judged(example, row)
    example = _with_tools(_with_system(example, row), row)
    conversational = format_name == "messages" or holds_turns(_prompt_cell(row, format_name))
    who = annotator(row)
    return replace(example, annotator=who, conversational=conversational, unread=tuple(row.unread()))


# ---------------------------------------------------------------- adapters


def _messages(row: Row) -> Example:
    """Split a conversation into prompt and answer, or a prompt alone if its last turn is not the assistant's."""
    turns = turns_of(row["messages"] if "messages" in row else row["conversations"], role="")
    if turns[-1].role == "assistant":
        return Example(turns[:-1], turns[-1:], label=label(row))
    return Example(turns, label=label(row))


def _text(row: Row) -> Example:
    """Read running text as one answer without a prompt."""
    return Example((), turns_of(row["text"], role="assistant"))


def _prompt(row: Row) -> Example:
    return Example(prompt_turns(row), label=label(row))


def _prompt_completion(row: Row) -> Example:
    prompt = prompt_turns(row)
    return Example(prompt, _answer(row["completion"], prompt), label=label(row))


def _alpaca(row: Row) -> Example:
    """Read an instruction with its input, the turns of `history` before it, and its output."""
    answer = turns_of(row["completion"] if "completion" in row else row["output"], role="assistant")
    return Example(alpaca_turns(row), answer, label=label(row))


def _preference(row: Row) -> Example:
    prompt = prompt_turns(row, prompt_name(row) or "prompt")
    chosen, rejected = (_answer(row[name], prompt) for name in ("chosen", "rejected"))
    return _pair(prompt, chosen, rejected, row)


def _implicit_preference(row: Row) -> Example:
    """Read a pair whose prompt is the longest common beginning of both sides."""
    chosen, rejected = row["chosen"], row["rejected"]
    if isinstance(chosen, str) and isinstance(rejected, str) and not is_text_of_turns(chosen):
        border = _common_words(chosen, rejected)
        prompt = turns_of(chosen[:border].strip(), role="user")
        better, worse = (turns_of(side[border:].strip(), role="assistant") for side in (chosen, rejected))
        return _pair(prompt, better, worse, row)
    return _split_pair(turns_of(chosen, role=""), turns_of(rejected, role=""), row)


def _stepwise(row: Row) -> Example:
    """Read the steps and their joined answer, which is good if every step is more likely right than wrong."""
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


def _question_answer(row: Row) -> Example:
    """Read a question with its answer. The label is the text after `####` (GSM8K), or else the whole answer."""
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
}


def _with_system(example: Example, row: Row) -> Example:
    """Add the row's `system` as system message. Raises DataError if the turns have another one."""
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
    """Add the row's tools to the first turn of `example`, from where the template shows them to the policy."""
    tools = tools_of(row.get("tools")) or tools_of(row.get("functions"))
    if not tools:
        return example
    if example.prompt:
        return replace(example, prompt=with_tools(example.prompt, tools))
    return replace(example, chosen=with_tools(example.chosen, tools))


def _judged(example: Example, row: Row) -> Example:
    """Mark the only answer of a row as good or bad, by the row's label."""
    if example.judged or example.rejected or not example.chosen:
        return example
    if truth(verdict_of(row)):
        return replace(example, label="", judged=True)
    if not example.prompt:
        raise DataError("no prompt: a bad answer is compared with others to its prompt")
    return replace(example, chosen=(), rejected=example.chosen, label="", judged=True)


def _prompt_cell(row: Row, format_name: str) -> Any:
    """The part of a row with its prompt: the prompt column, or else the chosen side, which begins with it."""
    if format_name == "preference":
        return row.get(prompt_name(row) or "prompt", "")
    return row.get({"implicit_preference": "chosen", "alpaca": "instruction"}.get(format_name, "prompt"), "")


def _split_pair(chosen: Turns, rejected: Turns, row: Row) -> Example:
    """Split a pair into the common turns as prompt and the rest as answers.

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
    """Remove the prompt from an answer; some datasets repeat it there as turns or as a transcript."""
    turns = turns_of(value, role="assistant")
    if isinstance(value, str) and TRANSCRIPT_TURN.match(value):
        whole = transcript(value)
        turns = whole if whole[: len(prompt)] == prompt else turns
    return turns[len(prompt) :] or turns if turns[: len(prompt)] == prompt else turns


def _common_words(left: str, right: str) -> int:
    """The length of the longest common beginning that ends between words."""
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


def _with_margin(row: Reading) -> Reading:
    """Set the margin of a pair to the difference of its two scores.

    Raises Tie for equal scores, and DataError if the chosen answer is rated below the rejected one.
    """
    better, worse = (rating(row.get(name)) for name in ("score_chosen", "score_rejected"))
    if better is None or worse is None:
        return row
    if better < worse:
        raise DataError(f"chosen is rated below rejected: score_chosen is {better:g}, score_rejected is {worse:g}")
    if better == worse:
        raise Tie("tie: no answer is better than the others")
    return row if "margin" in row else row.changed("margin", better - worse)
