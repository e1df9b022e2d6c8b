"""A stage of the rehearsal: a few rows of each source, and the longest row, of each prepared table."""

import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from rlhf_core.data.chat import UNLIMITED, ChatTemplate
from rlhf_core.data.limits import parts
from rlhf_core.data.tables import (
    Demonstration,
    Preference,
    Prompt,
    SteppedAnswer,
    read_demonstrations,
    read_feedback,
    read_preferences,
    read_prompts,
    read_steps,
    write_demonstrations,
    write_feedback,
    write_preferences,
    write_prompts,
    write_steps,
)
from rlhf_core.errors import DataError
from rlhf_core.models.loading import export_model
from rlhf_core.pretrained import load_tokenizer
from rlhf_core.schema.base import Config
from rlhf_core.stage.context import StageContext
from rlhf_core.store.layout import write_json
from rlhf_core.types import (
    ArtifactRef,
    DemonstrationsRef,
    PolicyRef,
    PreferencesRef,
    PreparedDataRef,
    PromptsRef,
    StepsRef,
)

Row = Demonstration | Preference | SteppedAnswer | Prompt
SPLITS: dict[str, tuple[type[ArtifactRef], Callable[..., Any], Callable[..., Any]]] = {
    "demonstrations": (DemonstrationsRef, read_demonstrations, write_demonstrations),
    "preferences": (PreferencesRef, read_preferences, write_preferences),
    "steps": (StepsRef, read_steps, write_steps),
}
"""Tables with training and held-out rows."""
ASKED = ("prompts", "eval_prompts")
MEASURED = 32
"""Rows, the longest by their characters, of which the tokens are counted."""
LENGTHS = "lengths.json"


class RowsConfig(Config):
    """The number of rows that are kept."""

    trained: int = 8
    """Most training rows, and prompts to train on, of a source."""
    asked: int = 3
    """Most held-out rows and prompts of a source."""
    unused_tokens: bool = True
    """Whether the model keeps the weights of tokens that its tokenizer lacks. A model from nothing has many."""


def run(
    config: RowsConfig,
    *,
    data: PreparedDataRef,
    context: StageContext,
) -> PreparedDataRef:
    """Write the rows and the base model, and the most tokens of prompt and row of each whole table."""
    assert data.base is not None
    if config.unused_tokens:
        shutil.copytree(context.path(data.base), context.out / "base")
    else:
        write_used_tokens(context.path(data.base), context.out / "base")
    chat = ChatTemplate.load(context.out / "base")
    children: dict[str, tuple[str, type[ArtifactRef]]] = {"base": ("base", PolicyRef)}
    lengths: dict[str, dict[str, Any]] = {}
    for name, (kind, read, write) in SPLITS.items():
        ref = getattr(data, name)
        if ref is None:
            continue
        children[name] = (name, kind)
        for split, most in (("train", config.trained), ("eval", config.asked)):
            rows = read(context.path(ref) / f"{split}.parquet")
            lengths[f"{name}/{split}"] = measure_rows(rows, chat)
            write(context.out / name / f"{split}.parquet", few(rows, most))
            if name == "preferences":
                copy_feedback(
                    context.path(ref),
                    context.out / name,
                    split,
                    most,
                )
    for name in ASKED:
        ref = getattr(data, name)
        if ref is not None:
            children[name] = (name, PromptsRef)
            rows = read_prompts(context.path(ref))
            lengths[name] = measure_rows(rows, chat)
            # Some prompts are held out of the training prompts for evaluations on the way.
            most = config.trained if name == "prompts" else config.asked
            write_prompts(context.out / name, few(rows, most))
    write_json(context.out / LENGTHS, lengths)
    return context.commit(PreparedDataRef, children=children)


def write_used_tokens(source: Path, target: Path) -> None:
    """Write the model in `source` with a row of its embeddings for each token of its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=False)
    model.resize_token_embeddings(len(load_tokenizer(source)))
    export_model(model, target, tokenizer_from=source)


def copy_feedback(
    source: Path,
    target: Path,
    split: str,
    most: int,
) -> None:
    """Write a few of the single judged answers, if there are any."""
    rows = read_feedback(source, split)
    if rows:
        write_feedback(target, split, few(rows, most))


def few(rows: Sequence[Any], most: int) -> list[Any]:
    """At most `most` rows of each source, the longest of all first, then the sources in turn.

    >>> from rlhf_core.types import Message
    >>> asked = [Prompt(str(at), (Message("user", "a" * at),), "", "even odd".split()[at % 2]) for at in range(5)]
    >>> [row.id for row in few(asked, 1)]
    ['4', '1']
    """
    if not rows:
        return []
    longest = max(rows, key=row_characters)
    of_source: dict[str, list[Any]] = defaultdict(list)
    for row in (longest, *(row for row in rows if row is not longest)):
        if len(of_source[row.source]) < most:
            of_source[row.source].append(row)
    return [row for row in chain.from_iterable(zip_longest(*of_source.values())) if row is not None]


def row_characters(row: Any) -> int:
    """The characters of a row with its longest answer."""
    prompt, answers = parts(row)
    return text_size(prompt) + max(map(text_size, answers), default=0)


def text_size(turns: Sequence[Any]) -> int:
    """The characters of turns, with their tool fields."""
    return sum(len(message.content) + len(message.tool_fields) for message in turns)


def measure_rows(rows: Sequence[Any], chat: ChatTemplate) -> dict[str, Any]:
    """The most tokens of a prompt and of a whole row, and the id of the longest row."""
    found: dict[str, Any] = {
        "rows": len(rows),
        "prompt": 0,
        "row": 0,
        "id": "",
    }
    for row in sorted(rows, key=row_characters, reverse=True)[:MEASURED]:
        prompt, answers = parts(row)
        try:
            asked = len(chat.prompt_ids(prompt)) if prompt else 0
            samples = [chat.continuation(prompt, answer, max_length=UNLIMITED) for answer in answers]
        except DataError:
            continue  # documents without roles have no prompt
        tokens = max([asked, *(len(sample.token_ids) for sample in samples if sample is not None)])
        found["prompt"] = max(found["prompt"], asked)
        if tokens > found["row"]:
            found |= {"row": tokens, "id": row.id}
    return found
