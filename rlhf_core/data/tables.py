"""Define the Parquet layouts of the datasets passed between stages, and the types of their rows.

The layouts of generations and rollouts are in `rlhf_core.data.shards`.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from rlhf_core.data.chat import UNLIMITED, ChatTemplate
from rlhf_core.data.pieces import encode, token_text
from rlhf_core.data.shards import CONVERSATIONAL, MESSAGES, MESSAGES_WITH_TOOLS, read_rows, write_rows
from rlhf_core.errors import ConfigError
from rlhf_core.types import Message, Prompt, TokenSample, mask

PROMPTS_FILE = "prompts.parquet"
DIFFICULTY = "difficulty.json"
"""File next to prompts that were selected by their mean reward, with these means."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation to imitate, with every assistant turn trained on.

    >>> Demonstration("d1", (Message("user", "Hi"), Message("assistant", "Hello.")), "world").messages[-1].content
    'Hello.'
    """

    id: str
    messages: tuple[Message, ...]
    source: str


@dataclass(frozen=True, slots=True)
class Preference:
    """Two answers to one prompt. `chosen` and `rejected` contain only the answer's turns; `margin` is 0.0 if unknown.

    >>> Preference("p1", (Message("user", "Hi"),), (Message("assistant", "Hello."),), (Message("assistant", "No."),),
    ...            0.0, "world").margin
    0.0
    """

    id: str
    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    margin: float
    source: str
    annotator: str = ""
    """Pseudonym of the person who judged; empty if unknown or if several did."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """One answer that was judged on its own and could not be joined to a pair.

    >>> Feedback("f1", (Message("user", "Hi"),), (Message("assistant", "Hello."),), True, "thumbs").desirable
    True
    """

    id: str
    prompt: tuple[Message, ...]
    answer: tuple[Message, ...]
    desirable: bool
    source: str
    annotator: str = ""


@dataclass(frozen=True, slots=True)
class SteppedAnswer:
    """An answer in steps, each with the probability that it is right (0.0 or 1.0 if a person judged it)."""

    id: str
    prompt: tuple[Message, ...]
    steps: tuple[str, ...]
    labels: tuple[float, ...]
    source: str

    def answer(self, separator: str) -> tuple[Message, ...]:
        """Join the steps by `separator` to an assistant turn."""
        return (Message("assistant", separator.join(self.steps)),)


@dataclass(frozen=True, slots=True)
class Tables:
    """All rows that `prepare_data` writes, in tuples or in files (`StoredRows`). The data have no table without rows."""

    demonstrations: Sequence[Demonstration]
    eval_demonstrations: Sequence[Demonstration]
    preferences: Sequence[Preference]
    eval_preferences: Sequence[Preference]
    prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt]
    steps: Sequence[SteppedAnswer] = ()
    eval_steps: Sequence[SteppedAnswer] = ()
    feedback: Sequence[Feedback] = ()
    eval_feedback: Sequence[Feedback] = ()

    def named(self) -> dict[str, Sequence[Demonstration | Preference | Prompt | SteppedAnswer | Feedback]]:
        """The tables by name, in the order of the fields."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def training_texts(self) -> Iterator[str]:
        """Yield the texts to train a tokenizer on: demonstrations (all other rows if there are none) and steps."""
        if self.demonstrations:
            turns: Iterable[Message] = (message for row in self.demonstrations for message in row.messages)
        else:
            pairs = (message for row in self.preferences for message in (*row.prompt, *row.chosen, *row.rejected))
            judged = (message for row in self.feedback for message in (*row.prompt, *row.answer))
            turns = chain(pairs, judged, (message for prompt in self.prompts for message in prompt.messages))
        yield from (message.content for message in turns)
        yield from (message.content for row in self.steps for message in (*row.prompt, *row.answer("\n")))


def content_id(*parts: object) -> str:
    """A stable ID of the content: the first 16 hex digits of the SHA-256 of the JSON of `parts`.

    >>> content_id("a", 1)
    '2657442bb4a48d62'
    """
    return hashlib.sha256(json.dumps(parts, ensure_ascii=False, default=_fields).encode()).hexdigest()[:16]


def _fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass.

    Without tool calls, messages keep the IDs of older versions, which had no `tool_fields`.
    """
    found = {field.name: getattr(value, field.name) for field in fields(value)}  # `asdict` would copy texts
    return {name: item for name, item in found.items() if name != "tool_fields" or item}


def pseudonym(annotator: str, source: str) -> str:
    """A stable pseudonym for an annotator of `source`; empty for the empty name.

    >>> pseudonym("jo@example.com", "desk") == pseudonym("jo@example.com", "desk") != pseudonym("jo@example.com", "hh")
    True
    """
    return f"annotator-{content_id(source, annotator)[:8]}" if annotator else ""


# ---------------------------------------------------------------- files

TEXT = pa.string()
DEMONSTRATIONS_SCHEMA = pa.schema({"id": TEXT, "messages": MESSAGES, "source": TEXT})
TOOL_DEMONSTRATIONS_SCHEMA = DEMONSTRATIONS_SCHEMA.set(1, pa.field("messages", MESSAGES_WITH_TOOLS))
"""Schema with which demonstrations are written; tables without calls have the one above."""
PREFERENCES_SCHEMA = pa.schema(
    {"id": TEXT, "prompt": MESSAGES, "chosen": MESSAGES, "rejected": MESSAGES, "margin": pa.float64(), "source": TEXT}
)
FEEDBACK_SCHEMA = pa.schema(
    {"id": TEXT, "prompt": MESSAGES, "answer": MESSAGES, "desirable": pa.bool_(), "source": TEXT}
)
STEPS_SCHEMA = pa.schema(
    {"id": TEXT, "prompt": MESSAGES, "steps": pa.list_(TEXT), "labels": pa.list_(pa.float64()), "source": TEXT}
)
PROMPTS_SCHEMA = pa.schema({"id": TEXT, "messages": MESSAGES, "label": TEXT, "source": TEXT})
ANNOTATOR = pa.field("annotator", TEXT)  # column of pairs and feedback that is written only if a row has an annotator


def write_demonstrations(path: Path, rows: Iterable[Demonstration]) -> None:
    """Write `rows` to the parquet file `path`."""
    write_rows(path, TOOL_DEMONSTRATIONS_SCHEMA, rows)


def read_demonstrations(path: Path) -> list[Demonstration]:
    """Read the rows of the parquet file `path` (`train.parquet` or `eval.parquet`), in order."""
    return read_rows(path, DEMONSTRATIONS_SCHEMA, Demonstration)


def write_preferences(path: Path, rows: Iterable[Preference]) -> None:
    """Write `rows` to the parquet file `path`."""
    write_rows(path, PREFERENCES_SCHEMA, rows, optional=ANNOTATOR)


def read_preferences(path: Path) -> list[Preference]:
    """Read the rows of the parquet file `path` (`train.parquet` or `eval.parquet`), in order."""
    return read_rows(path, PREFERENCES_SCHEMA, Preference, optional=ANNOTATOR)


def write_feedback(folder: Path, split: str, rows: Iterable[Feedback]) -> None:
    """Write `rows` to `folder`, in a file next to the pairs of `split` (`train` or `eval`)."""
    write_rows(_feedback_file(folder, split), FEEDBACK_SCHEMA, rows, optional=ANNOTATOR)


def read_feedback(folder: Path, split: str) -> list[Feedback]:
    """Read the single judged answers next to the pairs of `split` in `folder`, in order; most datasets have none."""
    path = _feedback_file(folder, split)
    return read_rows(path, FEEDBACK_SCHEMA, Feedback, optional=ANNOTATOR) if path.exists() else []


def _feedback_file(folder: Path, split: str) -> Path:
    return folder / f"feedback_{split}.parquet"


def write_steps(path: Path, rows: Iterable[SteppedAnswer]) -> None:
    """Write `rows` to the parquet file `path`."""
    write_rows(path, STEPS_SCHEMA, rows)


def read_steps(path: Path) -> list[SteppedAnswer]:
    """Read the rows of the parquet file `path` (`train.parquet` or `eval.parquet`), in order."""
    return read_rows(path, STEPS_SCHEMA, SteppedAnswer)


def write_prompts(folder: Path, rows: Iterable[Prompt]) -> None:
    """Write `rows` to `folder/prompts.parquet`."""
    write_rows(folder / PROMPTS_FILE, PROMPTS_SCHEMA, rows, optional=CONVERSATIONAL)


def read_prompts(folder: Path) -> list[Prompt]:
    """Read the rows of `folder/prompts.parquet`, in order."""
    return read_rows(folder / PROMPTS_FILE, PROMPTS_SCHEMA, Prompt, optional=CONVERSATIONAL)


# ---------------------------------------------------------------- steps


class StepSplitter:
    """A splitter of answers at `separator`, which is searched in the concatenated texts of their tokens.

    Raises ConfigError if the token texts do not spell the separator, as when a tokenizer splits one of its characters.

    >>> StepSplitter(chat, "\\n").ends(chat.tokenizer("1+2=3\\n3+4=7")["input_ids"])    # doctest: +SKIP
    (5, 10)
    """

    def __init__(self, chat: ChatTemplate, separator: str) -> None:
        self._separator = separator
        self._tokenizer: Any = chat.tokenizer
        self._shown = chat.decode.shown
        self._texts: dict[int, str] = {}
        probe = encode(self._tokenizer, f"a{separator}b")
        if not separator or len(self.ends(probe)) != 2:
            rule = f"the tokens of {self._tokenizer.name_or_path} cannot spell it"
            raise ConfigError("separator", separator, rule, "use another one, such as a newline")

    def ends(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Find the position of each step's last token: the token that completes its separator, or the answer's last.

        A piece without text (a blank line, the end token) belongs to the step before it. An answer without the
        separator is one step, and an answer without tokens has no step.
        """
        ends: list[int] = []
        written = False  # whether the latest step has text
        for position, has_text in self._pieces(token_ids):
            if ends and (not (written and has_text) or position == ends[-1]):
                ends[-1] = position
            else:
                ends.append(position)
            written = written or has_text
        last = len(token_ids) - 1
        return (*ends[:-1], last) if token_ids else ()

    def _pieces(self, token_ids: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """Yield each piece's last token position and whether it has text. Pieces end with a separator or the answer."""
        texts = [self._text(token) for token in token_ids]
        text = "".join(texts)
        start = position = 0
        reached = len(texts[0]) if texts else 0
        while start < len(text):
            found = text.find(self._separator, start)
            stop = len(text) if found < 0 else found + len(self._separator)
            while reached < stop:
                position += 1
                reached += len(texts[position])
            yield position, bool(text[start:stop].strip())
            start = stop

    def _text(self, token: int) -> str:
        if token not in self._texts:
            hidden = token not in self._shown
            self._texts[token] = token_text(self._tokenizer, token, skip_special_tokens=hidden)
        return self._texts[token]


# ---------------------------------------------------------------- preview


def preview(tables: Tables, chat: ChatTemplate, *, rows: int) -> str:
    """Render the first `rows` rows of each table as Markdown, with the trained tokens inside 【 】."""

    def answered(prompt: Sequence[Message], answer: Sequence[Message]) -> str:
        sample = chat.continuation(prompt, answer, max_length=UNLIMITED)
        return "" if sample is None else _block(chat.preview(sample))

    def asked(prompts: Sequence[Prompt]) -> str:
        found = [chat.prompt_ids(row.messages) for row in prompts[:rows]]
        return "".join(_block(chat.preview(TokenSample(ids, mask(bytes(len(ids)))))) for ids in found)

    shown = [
        sample for row in tables.demonstrations[:rows] for sample in chat.examples(row.messages, max_length=UNLIMITED)
    ]
    pairs = [answered(row.prompt, side) for row in tables.preferences[:rows] for side in (row.chosen, row.rejected)]
    feedback = [
        answered(row.prompt, row.answer) + _block(f"desirable: {str(row.desirable).lower()}")
        for row in tables.feedback[:rows]
    ]
    judged = [
        answered(row.prompt, row.answer("\n")) + _block(f"labels: {', '.join(f'{label:g}' for label in row.labels)}")
        for row in tables.steps[:rows]
    ]
    sections = [
        ("Demonstrations", "".join(_block(chat.preview(sample)) for sample in shown)),
        ("Preferences (chosen, then rejected)", "".join(pairs)),
        ("Feedback (answers judged on their own)", "".join(feedback)),
        ("Steps (one a line, then the label of each)", "".join(judged)),
        ("Prompts", asked(tables.prompts)),
        ("Evaluation prompts", asked(tables.eval_prompts)),
    ]
    body = "\n".join(f"## {title}\n\n{text}" for title, text in sections if text)
    return f"# What the model sees\n\nTrained tokens are inside 【 】.\n\n{body}"


def _block(text: str) -> str:
    # The block is indented instead of fenced because rows may contain fences themselves.
    return "".join(f"    {line}\n" for line in text.splitlines()) + "\n"
