"""Synthesis: a policy, or a model at a server, replies to each prompt; replies become demonstrations or prompts.

Every reply is written to disk as it arrives, so that a killed stage asks only for the missing ones. A policy is asked
in shards, as in `generate`, with a separate seed for each conversation; replies of a server are kept as they arrive.
"""

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from rlhf_core.config.rewards import ChatServer
from rlhf_core.data.chat import UNLIMITED, ChatTemplate
from rlhf_core.data.mixing import split_by_prompt
from rlhf_core.data.shards import write_generations, write_index
from rlhf_core.data.tables import (
    Demonstration,
    Preference,
    content_id,
    read_prompts,
    write_demonstrations,
    write_preferences,
    write_prompts,
)
from rlhf_core.errors import ConfigError, DataError, RewardError
from rlhf_core.interfaces import Metrics
from rlhf_core.rewards.judge import ChatEndpoint, ChatFailed
from rlhf_core.rewards.protocols import prompt_text
from rlhf_core.stage.context import StageContext
from rlhf_core.types import (
    ArtifactRef,
    Completion,
    DemonstrationsRef,
    FinishReason,
    Generation,
    GenerationsRef,
    Message,
    PolicyRef,
    PreferencesRef,
    Prompt,
    PromptsRef,
    SamplingRequest,
    chunks,
    derive_seed,
    floats,
    ids,
)
from stages.synthesize import SynthesizeConfig

LOOK_EVERY_S = 0.5  # seconds between looks whether the stage shall stop
TABLE_ROWS = 16  # in the tracker
_PLACE = re.compile(r"\{(prompt|label)\}")

Conversation: TypeAlias = tuple[str, int]
"""A prompt's ID, and the number of the conversation about it."""


class Reply(NamedTuple):
    """The last reply of a conversation."""

    text: str
    truncated: bool
    """Whether the token limit cut it off; for pairs, this reply or the first one."""
    first: str = ""
    """The first reply; only for pairs."""


Ask: TypeAlias = Callable[[Sequence[Sequence[Message]], Sequence[int]], list[Reply]]
"""Replies to several conversations, by seeds."""


@dataclass(frozen=True)
class Kept:
    """The kept part of a reply to a prompt."""

    prompt: Prompt
    text: str
    truncated: bool = False
    first: str = ""


def run(
    config: SynthesizeConfig, *, prompts: PromptsRef, policy: PolicyRef | None = None, context: StageContext
) -> ArtifactRef:
    """Rows made of the replies about `prompts`; the replies are in `replies.jsonl`."""
    rows = read_prompts(context.path(prompts))
    rows = rows[: config.max_prompts] if config.max_prompts else rows
    if not rows:
        raise DataError(f"{context.label}.prompts", 0, "there are no prompts to ask about", "prepare more prompts")
    journal = Journal(context.work / "replies.jsonl")
    if policy is None and config.uses_policy:
        rule = "there is neither a policy nor a server to ask, or generations have no tokenizer"
        raise ConfigError(f"{context.label}.policy", None, rule, "give a policy")
    if config.server is not None:
        ask_server(config, config.server, rows, journal, context)
    elif policy is not None:
        ask_policy(config, policy, rows, journal, context)
    kept, counts = filtered(config, rows, journal.replies)
    if not kept:
        why = ", ".join(f"{name} {count:.0f}" for name, count in counts.items() if count)
        rule = f"none of the {len(journal.replies)} replies is kept ({why})"
        raise DataError(context.label, 0, rule, "read replies.jsonl, and change the template or the filters")
    journal.copy(context.out / "replies.jsonl", rows, config)
    shown = [[prompt_text(one.prompt.messages), one.text] for one in kept[:TABLE_ROWS]]
    context.tracker.table("samples/replies", ["prompt", "kept"], shown)
    left_out = sum(counts.values())
    metrics = {"replies": len(kept) + left_out, "kept": float(len(kept)), **counts}
    if config.make == "generations" and policy is not None:
        return write_answers(config, kept, metrics, policy, prompts, context)
    return write(config, kept, metrics, context)


class Journal:
    """The replies so far, in a file that grows reply by reply."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._writing = path, threading.Lock()
        self.replies: dict[Conversation, Reply] = {}
        # Not `splitlines`: a reply may have other characters that end lines, such as U+2028, which JSON keeps.
        for line in path.read_text(encoding="utf-8").split("\n") if path.is_file() else ():
            try:
                row = json.loads(line)
                self.replies[row["prompt"], row["number"]] = Reply(row["reply"], row["truncated"], row.get("first", ""))
            except (ValueError, KeyError, TypeError):  # a line that a kill left half written
                continue

    def add(self, replies: Mapping[Conversation, Reply]) -> None:
        """Write replies down; threads may share the journal."""
        # The newline comes first: it ends a line that a kill left half written.
        text = "".join(f"\n{_line(conversation, reply)}" for conversation, reply in replies.items())
        with self._writing, self._path.open("a", encoding="utf-8") as stream:
            stream.write(text)
            self.replies.update(replies)

    def copy(self, path: Path, rows: Sequence[Prompt], config: SynthesizeConfig) -> None:
        """Write the replies to `path`, in the order of the prompts."""
        lines = [_line(one, self.replies[one]) for one in conversations(config, rows)]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _line(conversation: Conversation, reply: Reply) -> str:
    """A line of the journal. Only pairs have `first`, so that other journals keep their bytes."""
    prompt, number = conversation
    row = {"prompt": prompt, "number": number, "reply": reply.text, "truncated": reply.truncated}
    if reply.first:
        row["first"] = reply.first
    return json.dumps(row, ensure_ascii=False)


def conversations(config: SynthesizeConfig, rows: Sequence[Prompt]) -> list[Conversation]:
    """All conversations; conversations about the same prompt are consecutive."""
    return [(row.id, number) for row in rows for number in range(config.samples_per_prompt)]


# ---------------------------------------------------------------- ask


def ask_policy(
    config: SynthesizeConfig, policy: PolicyRef, rows: Sequence[Prompt], journal: Journal, context: StageContext
) -> None:
    """Ask `policy` in shards.

    A shard with a missing reply is asked again as a whole, so that its replies are the same.
    """
    shards = chunks(rows, config.shard_size)
    missing = [shard for shard in shards if not journal.replies.keys() >= {*conversations(config, shard)}]
    if not missing:
        return
    chat = ChatTemplate.load(context.path(policy))
    with ExitStack() as leases:
        sampler = leases.enter_context(context.runtime.sampler(context.path(policy)))

        def ask(asked: Sequence[Sequence[Message]], seeds: Sequence[int]) -> list[Reply]:
            ids = [chat.prompt_ids(messages) for messages in asked]
            requests = [SamplingRequest(tokens, seed) for tokens, seed in zip(ids, seeds, strict=True)]
            made = sampler.generate(requests, config.sampling)
            return [Reply(one.text, one.finish_reason == "length") for one in made]

        for done, shard in enumerate(missing, start=len(shards) - len(missing) + 1):
            journal.add(replies_of(config, shard, conversations(config, shard), ask, seed=context.seed))
            context.progress(done, len(shards), f"{len(journal.replies)} replies")
            if context.stopping():
                context.stop()


def ask_server(
    config: SynthesizeConfig, server: ChatServer, rows: Sequence[Prompt], journal: Journal, context: StageContext
) -> None:
    """Ask the model at `server` for the replies that the journal lacks. RewardError if it does not answer one."""
    asked = conversations(config, rows)
    missing = [one for one in asked if one not in journal.replies]
    ended = threading.Event()
    key = f"{context.label.replace('/', '.')}.server"
    endpoint = ChatEndpoint(key, server, pause=ended.wait)

    def ask(messages: Sequence[Sequence[Message]], seeds: Sequence[int]) -> list[Reply]:
        return [Reply(*endpoint.reply(one, seed=seed)) for one, seed in zip(messages, seeds, strict=True)]

    def answered(one: Conversation) -> None:
        try:
            journal.add(replies_of(config, rows, [one], ask, seed=context.seed))
        except (ChatFailed, ValueError) as error:
            rule, remedy = "gave no reply, and the others are kept", "start or fix the server, and run again"
            raise RewardError(key, str(error), rule, remedy) from None

    pool = ThreadPoolExecutor(server.concurrency, thread_name_prefix="synthesize")
    try:
        waiting: set[Future[None]] = {pool.submit(answered, one) for one in missing}
        while waiting:
            done, waiting = wait(waiting, timeout=LOOK_EVERY_S, return_when=FIRST_COMPLETED)
            for one in done:
                one.result()
            context.progress(len(asked) - len(waiting), len(asked), "replies")
            if waiting and context.stopping():
                context.stop()
    finally:
        ended.set()  # no pause before a retry is waited for
        pool.shutdown(wait=True, cancel_futures=True)
        endpoint.close()


def replies_of(
    config: SynthesizeConfig, rows: Sequence[Prompt], asked: Sequence[Conversation], ask: Ask, *, seed: int
) -> dict[Conversation, Reply]:
    """Last reply of each conversation; `ask` is called once for each turn."""
    prompts = {row.id: row for row in rows}
    spoken = [request(config.template, prompts[name]) for name, _ in asked]
    first: list[Reply] = []
    for turn, further in enumerate((*config.turns, None)):
        seeds = [derive_seed(seed, "synthesize", name, number, turn) for name, number in asked]
        replies = ask(spoken, seeds)
        first = first or (replies if config.make == "pairs" else first)
        if further is None:
            if first:
                replies = [
                    Reply(last.text, truncated=last.truncated or one.truncated, first=one.text)
                    for one, last in zip(first, replies, strict=True)
                ]
            return dict(zip(asked, replies, strict=True))
        spoken = [
            (*messages, Message("assistant", reply.text), Message("user", further))
            for messages, reply in zip(spoken, replies, strict=True)
        ]
    raise AssertionError("the last turn returns")


def request(template: str, prompt: Prompt) -> tuple[Message, ...]:
    """Build the request for a prompt. Placeholders inside the prompt's own text are not replaced."""
    if not template:
        return prompt.messages
    filled = {"prompt": prompt_text(prompt.messages), "label": prompt.label}
    return (Message("user", _PLACE.sub(lambda place: filled[place.group(1)], template)),)


# ---------------------------------------------------------------- keep


def filtered(
    config: SynthesizeConfig, rows: Sequence[Prompt], replies: Mapping[Conversation, Reply]
) -> tuple[list[Kept], dict[str, float]]:
    """Filter the replies, in the order of the prompts, and count the ones left out by reason.

    `repeated` counts texts that another reply to the prompt (for new prompts: any prompt) already has. A reply that
    could be left out for several reasons counts for the first of them.
    """
    counts = Counter[str](truncated=0, without_match=0, too_short=0, too_long=0, repeated=0)
    prompts = {row.id: row for row in rows}
    known = {prompt_text(row.messages).strip() for row in rows} if config.make == "prompts" else set()
    kept: list[Kept] = []
    for name, number in conversations(config, rows):
        reply, cut, begun = replies[name, number]
        text = matched(config.pattern, reply)
        first = begun.strip()
        identity = (text or "") if config.make == "prompts" else f"{name} {text}"
        reason = ""
        if cut and config.drop_truncated:
            reason = "truncated"
        elif text is None:
            reason = "without_match"
        elif len(text) < config.min_characters:
            reason = "too_short"
        elif config.max_characters and len(text) > config.max_characters:
            reason = "too_long"
        elif identity in known or (config.make == "pairs" and text == first):
            reason = "repeated"
        if reason or text is None:
            counts[reason] += 1
            continue
        known.add(identity)
        kept.append(Kept(prompts[name], text, cut, first))
    return kept, {reason: float(count) for reason, count in counts.items()}


def matched(pattern: str, reply: str) -> str | None:
    """Last match of `pattern`, or its group, without white space around it; None if nothing matches.

    >>> matched(r"Q: (.*)", "Here you are. Q: Why? "), matched("", " all "), matched("Q", "no")
    ('Why?', 'all', None)
    """
    if not pattern:
        return reply.strip()
    found = re.findall(pattern, reply)
    return found[-1].strip() if found else None


def write_answers(
    config: SynthesizeConfig,
    kept: Sequence[Kept],
    metrics: Metrics,
    policy: PolicyRef,
    prompts: PromptsRef,
    context: StageContext,
) -> GenerationsRef:
    """Write the kept replies as answers in the tokens of `policy`, and commit them.

    Unknown log-probs are written as 0.
    """
    chat = ChatTemplate.load(context.path(policy))
    found = []
    for one in kept:
        prompt_ids = chat.prompt_ids(one.prompt.messages)
        answer = chat.continuation(one.prompt.messages, (Message("assistant", one.text),), max_length=UNLIMITED)
        token_ids = () if answer is None else answer.token_ids[len(prompt_ids) :]
        trained = 0 if answer is None else sum(answer.loss_mask) - int(one.truncated)  # without tokens after the end
        logprobs = (0.0,) * trained
        reason: FinishReason = "length" if one.truncated else "stop"
        made = Completion(ids(token_ids[:trained]), floats(logprobs), one.text, reason, policy_version=0, seed=0)
        found.append(Generation(one.prompt, prompt_ids, made))
    write_generations(context.out, 0, found)
    facts = {"count": len(found), "samples_per_prompt": config.samples_per_prompt, "template": chat.digest}
    author = policy.digest if config.server is None else config.server.model
    write_index(context.out, facts | {"policy": author, "prompts": prompts.digest})
    return context.commit(GenerationsRef, metrics=metrics)


def write(config: SynthesizeConfig, kept: Sequence[Kept], metrics: Metrics, context: StageContext) -> ArtifactRef:
    """Write the rows made of the kept replies, and commit them."""
    metrics = dict(metrics)
    if config.make == "prompts":
        made = [
            Prompt(content_id("synthesize", one.text), (Message("user", one.text),), "", one.prompt.source)
            for one in kept
        ]
        write_prompts(context.out, made)
        return context.commit(PromptsRef, metrics=metrics)
    splits = split_by_prompt(kept, lambda one: one.prompt.id, fraction=config.eval_fraction, seed=context.seed)
    for split, rows in splits.items():
        metrics[split] = float(len(rows))
        if config.make == "pairs":
            write_preferences(context.out / f"{split}.parquet", [preference(one) for one in rows])
            continue
        answers = [(*one.prompt.messages, Message("assistant", one.text)) for one in rows]
        shown = [
            Demonstration(content_id(turns), turns, one.prompt.source) for turns, one in zip(answers, rows, strict=True)
        ]
        write_demonstrations(context.out / f"{split}.parquet", shown)
    return context.commit(PreferencesRef if config.make == "pairs" else DemonstrationsRef, metrics=metrics)


def preference(one: Kept) -> Preference:
    """The last reply of a conversation, preferred to the first."""
    chosen, rejected = (Message("assistant", one.text),), (Message("assistant", one.first),)
    name = content_id(one.prompt.messages, one.text, one.first)
    return Preference(name, one.prompt.messages, chosen, rejected, 0.0, one.prompt.source)
