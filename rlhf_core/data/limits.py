"""Check rows with the policy's tokenizer: limits in tokens, and control tokens in the content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.chat_templates import is_content, structure
from rlhf_core.data.tables import Demonstration, Feedback, Preference, SteppedAnswer, Tables
from rlhf_core.data.validation import DropReport, Origin
from rlhf_core.errors import DataError
from rlhf_core.types import Message, Prompt

Row = TypeVar("Row", Demonstration, Preference, Prompt, SteppedAnswer, Feedback)

_UNLIMITED = 1 << 40
_PROBE = (Message("user", "Hi"),)


def limit(
    tables: Tables,
    chat: ChatTemplate,
    *,
    max_prompt_tokens: int,
    max_tokens: int,
    min_answer_tokens: int,
    origins: Mapping[str, Origin],
    report: DropReport,
) -> Tables:
    """Return `tables` without the rows that exceed a limit, and add each dropped row to `report`.

    The length of a prompt includes its generation prompt, and the length of a row is that with its longest answer. An
    answer is counted by its trained tokens, including the end-of-turn token. Rows whose content spells a control token
    of the tokenizer are dropped, because it would forge turns.
    """
    control = control_tokens(chat)

    def kept(rows: Sequence[Row]) -> tuple[Row, ...]:
        good: list[Row] = []
        for row in rows:
            reason = _broken(
                row,
                chat,
                control,
                max_prompt_tokens=max_prompt_tokens,
                max_tokens=max_tokens,
                min_answer_tokens=min_answer_tokens,
            )
            if reason is None:
                good.append(row)
            else:
                report.add(row.source, origins[row.id], reason)
        return tuple(good)

    return Tables(
        demonstrations=kept(tables.demonstrations),
        eval_demonstrations=kept(tables.eval_demonstrations),
        preferences=kept(tables.preferences),
        eval_preferences=kept(tables.eval_preferences),
        prompts=kept(tables.prompts),
        eval_prompts=kept(tables.eval_prompts),
        steps=kept(tables.steps),
        eval_steps=kept(tables.eval_steps),
        feedback=kept(tables.feedback),
        eval_feedback=kept(tables.eval_feedback),
    )


def control_tokens(chat: ChatTemplate) -> list[str]:
    """Return the texts of the tokens that only a chat template may write: special ones, ends, and those around turns.

    Most tokenizers give names to a few of their special tokens (`all_special_tokens`). Those of Llama 3 and Gemma 3 leave
    out tokens around turns, and DeepSeek's around turns are not special. Line breaks are tokens of Gemma's vocabulary.
    Tokens around reasoning and tool calls are an answer's own, whether they are special or not.
    """
    written = chat.ends.union(chat.prompt_ids(_PROBE))
    never = structure(chat.tokenizer, chat.ends)
    added = chat.tokenizer.added_tokens_decoder.items()
    found = {number: token.content for number, token in added if token.special or number in written}
    found |= zip(chat.tokenizer.all_special_ids, chat.tokenizer.all_special_tokens, strict=True)
    return sorted(
        {text for number, text in found.items() if text.strip() and (number in never or not is_content(text))}
    )


def parts(
    row: Demonstration | Preference | Prompt | SteppedAnswer | Feedback,
) -> tuple[tuple[Message, ...], tuple[tuple[Message, ...], ...]]:
    """Return (prompt, answers) of a row.

    The prompt of a demonstration is everything before its last turn. Steps are joined with one per line.
    """
    if isinstance(row, SteppedAnswer):
        return row.prompt, (row.answer("\n"),)
    if isinstance(row, Feedback):
        return row.prompt, (row.answer,)
    if isinstance(row, Preference):
        return row.prompt, (row.chosen, row.rejected)
    if isinstance(row, Demonstration):
        return row.messages[:-1], (row.messages[-1:],)
    return row.messages, ()


def _broken(
    row: Demonstration | Preference | Prompt | SteppedAnswer | Feedback,
    chat: ChatTemplate,
    control: Sequence[str],
    *,
    max_prompt_tokens: int,
    max_tokens: int,
    min_answer_tokens: int,
) -> str | None:
    """Return the reason to drop `row`, or None to keep it."""
    prompt, answers = parts(row)
    for message in (*prompt, *(message for answer in answers for message in answer)):
        for token in control:
            if token in message.content or token in message.tool_fields:
                return f"content holds a control token: {token}"
    try:
        samples = [chat.continuation(prompt, answer, max_length=_UNLIMITED) for answer in answers]
        length = 0 if answers else len(chat.prompt_ids(prompt))
        if isinstance(row, Demonstration) and any(message.role == "assistant" for message in prompt):
            chat.examples(row.messages, max_length=_UNLIMITED)  # SFT trains earlier answers, too, so each needs a mask
    except DataError as error:
        return f"chat template: {error}"
    for sample in samples:
        if sample is None or sum(sample.loss_mask) < min_answer_tokens:
            return f"answer too short: fewer than {min_answer_tokens} trained tokens"
        length = sample.loss_mask.index(1)  # the answer begins where its prompt ends
    if length > max_prompt_tokens:
        return f"prompt too long: {length} tokens, at most {max_prompt_tokens}"
    for sample in samples:
        if sample is not None and len(sample.token_ids) > max_tokens:
            return f"conversation too long: {len(sample.token_ids)} tokens, at most {max_tokens}"
    return None
