"""Render `preview.md`, which shows rows as the model sees them with the trained tokens marked."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.tables import Tables
from rlhf_core.types import TokenSample

_UNLIMITED = 1 << 40


def preview(tables: Tables, chat: ChatTemplate, *, rows: int) -> str:
    """Return Markdown with the first `rows` rows of each table, with the trained tokens inside 【 】."""
    demonstrations = [
        sample for row in tables.demonstrations[:rows] for sample in chat.examples(row.messages, max_length=_UNLIMITED)
    ]
    chosen, rejected = (
        [
            chat.continuation(row.prompt, getattr(row, answer), max_length=_UNLIMITED)
            for row in tables.preferences[:rows]
        ]
        for answer in ("chosen", "rejected")
    )
    judged = [
        _shown([chat.continuation(row.prompt, row.answer("\n"), max_length=_UNLIMITED)], chat)
        + _block(f"labels: {', '.join(f'{label:g}' for label in row.labels)}")
        for row in tables.steps[:rows]
    ]
    feedback = [
        _shown([chat.continuation(row.prompt, row.answer, max_length=_UNLIMITED)], chat)
        + _block(f"desirable: {str(row.desirable).lower()}")
        for row in tables.feedback[:rows]
    ]
    pairs = [sample for pair in zip(chosen, rejected, strict=True) for sample in pair]
    sections = [
        ("Demonstrations", _shown(demonstrations, chat)),
        ("Preferences (chosen, then rejected)", _shown(pairs, chat)),
        ("Feedback (answers judged on their own)", "".join(feedback)),
        ("Steps (one a line, then the label of each)", "".join(judged)),
        ("Prompts", _decoded([chat.prompt_ids(row.messages) for row in tables.prompts[:rows]], chat)),
        ("Evaluation prompts", _decoded([chat.prompt_ids(row.messages) for row in tables.eval_prompts[:rows]], chat)),
    ]
    body = "\n".join(f"## {title}\n\n{text}" for title, text in sections if text)
    return f"# What the model sees\n\nTrained tokens are inside 【 】.\n\n{body}"


def _shown(samples: Sequence[TokenSample | None], chat: ChatTemplate) -> str:
    return "".join(_block(chat.preview(sample)) for sample in samples if sample is not None)


def _decoded(prompts: Sequence[tuple[int, ...]], chat: ChatTemplate) -> str:
    return "".join(_block(chat.preview(TokenSample(ids, (0,) * len(ids)))) for ids in prompts)


def _block(text: str) -> str:
    # The block is indented instead of fenced because rows may contain fences themselves.
    return "".join(f"    {line}\n" for line in text.splitlines()) + "\n"
