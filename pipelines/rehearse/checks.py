"""Checks of a profile and of its rows that need no engine: packages, code, lengths, templates, and gates."""

import json
import re
from collections.abc import (
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import Any

from pipelines.flows.graph import reward_functions
from pipelines.flows.nodes import Node, prepared_part
from pipelines.flows.profile import PipelineConfig
from rlhf_core.algorithms.advantage.base import GroupAdvantage
from rlhf_core.config.agents import AgentsBySource
from rlhf_core.config.engines import LEAST_TEMPERATURE
from rlhf_core.config.policy import PPOConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.tables import Demonstration
from rlhf_core.errors import (
    DataError,
    RlhfError,
    explain,
)
from rlhf_core.models.architecture import length_limit, read_config
from rlhf_core.types import Message
from rlhf_core.user_code.dependencies import unseen_by_programs, unseen_reads

# ---------------------------------------------------------------- code


def unseen_code(nodes: Iterable[Node]) -> Iterator[str]:
    """Yield a problem for each read of a user's function or program that no key contains."""
    remedy = "name the files and variables in DEPENDS_ON (docs/keys.md), or raise a version"
    for node in nodes:
        for key, function in reward_functions(node.config, node.path).items():
            for phrase in unseen_reads(function, key=key):
                rule = f"{phrase}, which the key does not contain"
                yield explain(key, function, rule, remedy)
        agents = node.config.by_key if isinstance(node.config, AgentsBySource) else {}
        for name, agent in agents.items():
            for phrase in unseen_by_programs(agent.read_files()):
                rule = f"{phrase}, which the key does not contain"
                yield explain(f"{node.path}.{name}", agent.type, rule, "add it to files")


# ---------------------------------------------------------------- rows


def dropped_rows(label: str, folder: Path) -> Iterator[str]:
    """Yield a problem for each reason by which prepared data lack rows."""
    report = json.loads((folder / "validation.json").read_text(encoding="utf-8"))
    read = sum(report["rows_read"].values())
    remedy = f"`rlhf show {label} validation.json` lists them: mend the rows, or raise the limits"
    for reason, count in report["reasons"].items():
        drops = report["drops"]
        drop = next((one for one in drops if one["reason"].startswith(reason)), drops[0])
        place = f"{Path(drop['file']).name}:{drop['line']}" if drop["line"] else drop["source"]
        rule = f"{count:,} of {read:,} rows are dropped: {drop['reason']} (first at {place})"
        yield explain(
            f"{label}.data",
            drop["source"],
            rule,
            remedy,
        )


def cut_rows(nodes: Iterable[Node], lengths: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem for each training whose `max_length` cuts the longest row of its table."""
    for node in nodes:
        most = getattr(node.config, "max_length", None)
        for name in node.reads_names() if most else ():
            label, part = prepared_part(name)
            found = lengths.get(f"{label}/{part}/train")
            if found and found["row"] > most and not getattr(node.config, "window_overlap", 0):
                rule = f"row {found['id']} of {name} has {found['row']} tokens and loses its end"
                yield explain(
                    f"{node.path}.max_length",
                    most,
                    rule,
                    "raise it, or lower prepare_data.max_tokens",
                )


def long_prompts(
    nodes: Iterable[Node],
    lengths: Mapping[str, Any],
    context: int | None,
) -> Iterator[str]:
    """Yield a problem for each sampling whose longest prompt and answer exceed the context."""
    for node in nodes:
        for key, most, name in sampled(node):
            label, part = prepared_part(name)
            found = lengths.get(f"{label}/{part}") or lengths.get("prepare_data/prompts")
            if context and found and found["prompt"] + most > context:
                rule = f"the longest prompt of {name} has {found['prompt']} tokens, and the context holds {context}"
                remedy = "lower it or prepare_data.max_prompt_tokens, or raise runtime.sampler.max_model_len"
                yield explain(
                    key,
                    most,
                    rule,
                    remedy,
                )


def sampled(node: Node) -> Iterator[tuple[str, int, str]]:
    """Yield the key of the limit of an answer, the limit, and the name of the prompts, if a node samples in one turn."""
    config: Any = node.config
    sampling = getattr(config, "sampling", None)
    plays = isinstance(config, AgentsBySource) and bool(config.by_key)
    asks = getattr(config, "on_policy", True) and getattr(config, "uses_policy", True)
    if sampling is None or plays or not asks:
        return
    most = config.most_tokens if isinstance(config, PPOConfig) else sampling.max_tokens
    for name in node.reads().get("prompts", ()):
        yield f"{node.path}.sampling.max_tokens", most, name


def context_of(config: PipelineConfig, base: Path) -> int | None:
    """The most tokens that sampler and model take."""
    limits = (getattr(config.runtime.sampler, "max_model_len", None), length_limit(read_config(base)))
    positions = getattr(read_config(base).get_text_config(), "max_position_embeddings", None)
    return min((limit for limit in (*limits, positions) if limit), default=None)


# ---------------------------------------------------------------- templates


def silent_words(
    chat: ChatTemplate,
    rows: Iterable[Any],
    *,
    key: str,
    template: str,
) -> Iterator[str]:
    """Yield a problem for each kind of words that the chat template leaves out of rows."""
    seen = set()
    for row in rows:
        for kind, words in words_left_out(chat, row):
            if kind not in seen:
                seen.add(kind)
                rule = f"the template does not render {kind} of row {row.id}: {words[:60]!r}"
                remedy = "give a template that does (prepare_data.chat_template), or change the rows"
                yield explain(
                    key,
                    template,
                    rule,
                    remedy,
                )


def words_left_out(chat: ChatTemplate, row: Any) -> Iterator[tuple[str, str]]:
    """Yield the kind and the words of messages that a row's text, or its trained text, lacks."""
    try:
        for asked, answered, segments in renderings(chat, row):
            whole = squeeze("".join(text for text, _ in segments))
            trained = squeeze("".join(text for text, answer in segments if answer))
            # Earlier answers may be rewritten on purpose: only trained ones count.
            for message in asked:
                if message.role != "assistant" and squeeze(message.content) not in whole:
                    yield f"words of the role {message.role}", message.content
            for message in answered:
                for kind, words in parts_of_answer(message):
                    if squeeze(words) not in trained:
                        yield kind, words
    except DataError:
        return  # prepare_data drops such rows with this reason


def renderings(chat: ChatTemplate, row: Any) -> Iterator[tuple[Sequence[Message], Sequence[Message], Any]]:
    """Yield the turns that are read, the turns that are trained on, and the text of each example of a row."""
    if isinstance(row, Demonstration):
        examples = chat.example_segments(row.messages)
        answers = [message for message in row.messages if message.role == "assistant"]
        joined = [segment for segments in examples for segment in segments]
        yield row.messages, answers, joined
        return
    for answer in (row.chosen, row.rejected):
        trained = [message for message in answer if message.role == "assistant"]
        yield (*row.prompt, *answer), trained, chat.segments((*row.prompt, *answer), answers_from=len(row.prompt))


def parts_of_answer(message: Message) -> Iterator[tuple[str, str]]:
    """Yield thoughts, words and tool calls of an answer."""
    thoughts, closing, words = message.content.rpartition("</think>")
    if closing:
        yield "thoughts", thoughts.partition("<think>")[2]
    yield "words of the role assistant", words
    fields = json.loads(message.tool_fields) if message.tool_fields else {}
    for call in fields.get("tool_calls", ()):
        function = call.get("function", call)
        yield "tool calls", str(function["name"])
        arguments = function.get("arguments", {})
        for value in arguments.values() if isinstance(arguments, Mapping) else ():
            if isinstance(value, (str, int)):
                yield "tool calls", str(value)


def squeeze(text: str) -> str:
    """A text without white space, which templates trim."""
    return re.sub(r"\s+", "", text)


# ---------------------------------------------------------------- groups and gates


def flat_groups(nodes: Iterable[Node]) -> Iterator[str]:
    """Yield a problem for each optimization that compares answers to a prompt, and samples nearly the same ones."""
    for node in nodes:
        config = node.config
        compares = isinstance(config, PPOConfig) and isinstance(config.estimator, GroupAdvantage)
        if compares and config.sampling.temperature <= 5 * LEAST_TEMPERATURE:  # type: ignore[attr-defined]
            temperature = config.sampling.temperature  # type: ignore[attr-defined]
            rule = "the answers to a prompt are all the same, and so are their rewards"
            yield explain(
                f"{node.path}.sampling.temperature",
                temperature,
                rule,
                "raise it; 1.0 is usual",
            )


def missing_numbers(
    config: PipelineConfig,
    label: str,
    known: Mapping[str, float],
) -> Iterator[str]:
    """Yield a problem for each gate after a stage that reads a number which its result lacks."""
    for index, gate in enumerate(config.gates):
        # Rewards and agents log numbers of any name, which the plan cannot know.
        if gate.after == label and gate.metric and gate.metric not in known:
            rule = f"the result of {label} has no such number"
            remedy = f"name one of {', '.join(sorted(known)[:12])}"
            yield explain(
                f"gates[{index}].metric",
                gate.metric,
                rule,
                remedy,
            )


def text_of(error: BaseException, key: str) -> str:
    """An error as *key = value: rule; remedy*."""
    text = " ".join(str(error).split())
    if isinstance(error, RlhfError) and re.match(r"[\w.\[\]/-]+ = ", text):
        return text
    return explain(
        key,
        type(error).__name__,
        text[:500],
        "see the log of the rehearsal",
    )
