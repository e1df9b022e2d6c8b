"""A world of everyday questions with instructions that a program can check, for real pretrained models.

    Tell me about cats. Use at most 12 words. Avoid commas.

Held-out prompts are of three kinds, named in their source: topics that occur in no training prompt, pairs and
triples of instructions that no training prompt combines, and kinds of instructions that no training prompt has. All of
them are about held-out topics. A prompt's label contains the instructions and the topic of its answer
(`rlhf_core.rewards.library.instructions`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from rlhf_contrib.worlds.instruction_phrases import (
    CLOSERS,
    COUNTS,
    EXCLUDES,
    KEYWORDS,
    NEW_KINDS,
    NEW_PAIRS,
    NEW_TOPICS,
    OPENERS,
    PHRASES,
    TOPICS,
)
from rlhf_contrib.worlds.instruction_writer import write_answer
from rlhf_core.config.data import HELD_OUT_INSTRUCTIONS, InstructionsWorld
from rlhf_core.data.tables import Demonstration, Tables, content_id
from rlhf_core.errors import ConfigError, explain
from rlhf_core.types import Message, Prompt, derive_seed

Kinds = tuple[str, ...]
_OPTIONS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "at_most_words": lambda rng: {"count": rng.choice(COUNTS)},
    "first_word": lambda rng: {"word": rng.choice(OPENERS)},
    "last_word": lambda rng: {"word": rng.choice(CLOSERS)},
    "keyword": lambda rng: {"word": rng.choice(KEYWORDS)},
    "json": lambda rng: {"key": "answer"},
    "sentences": lambda rng: {"count": 1},
}


def make_tables(config: InstructionsWorld, *, seed: int) -> tuple[Tables, dict[str, float]]:
    """Build the prompts for sampling and the held-out prompts, all different."""
    rng = random.Random(derive_seed(seed, "kinds"))
    seen = [kind for kind in PHRASES if kind not in NEW_KINDS and (not config.kinds or kind in config.kinds)]
    trained: list[Kinds] = [(kind,) for kind in seen for _ in range(config.singles)]
    for count in range(2, config.combined + 1):
        trained += [kinds for kinds in combinations(seen, count) if allowed(kinds) and not _is_new(kinds)]
    triples: list[Kinds] = [three for three in combinations(seen, 3) if allowed(three) and _is_new(three)]
    pairs = sorted(pair for pair in _NEW_PAIRS if set(pair) <= set(seen))
    kinds: dict[str, list[Kinds]] = {
        "new_topics": trained,
        "new_combinations": [*pairs, *rng.sample(triples, k=min(len(pairs), len(triples)))],
        "new_kinds": [(kind,) for kind in NEW_KINDS],
    }
    rng = random.Random(derive_seed(seed, "prompts"))
    prompts = [one.prompt for one in _draw(TOPICS, trained, "seen", config.prompts, config.min_words, rng)]
    if len(prompts) < config.prompts:
        raise _too_few("prompts", config.prompts, f"these kinds allow {len(prompts)}", "more kinds")
    rng = random.Random(derive_seed(seed, "eval_prompts"))
    sources = [source for source in HELD_OUT_INSTRUCTIONS if kinds[source]]
    share = config.eval_prompts // len(sources)
    held_out: list[Prompt] = []
    for source in sources:
        count = share if held_out else config.eval_prompts - share * (len(sources) - 1)
        drawn = _draw(NEW_TOPICS, kinds[source], source, count, config.min_words, rng)
        if len(drawn) < count:
            rule = f"{count} of them have the source {source}, of which there are {len(drawn)}"
            raise _too_few("eval_prompts", config.eval_prompts, rule)
        held_out += [one.prompt for one in drawn]
    rng = random.Random(derive_seed(seed, "demonstrations"))
    wanted = config.demonstrations + (config.eval_demonstrations if config.demonstrations else 0)
    written = _write(trained, wanted, config.min_words, rng)
    if len(written) < wanted:
        rule = f"these kinds, with min_words = {config.min_words}, allow {len(written)} with the held-out ones"
        raise _too_few("demonstrations", config.demonstrations, rule, "more kinds", "a smaller min_words")
    train, held = written[: config.demonstrations], written[config.demonstrations :]
    return Tables(tuple(train), tuple(held), (), (), tuple(prompts), tuple(held_out)), {}


def _too_few(name: str, asked: int, rule: str, *remedies: str) -> ConfigError:
    """The error for a table that cannot have as many rows as requested."""
    remedy = " or ".join(["ask for fewer", *remedies])
    return ConfigError(explain(f"prepare_data.data.{name}", asked, rule, remedy))


def _write(kinds: Sequence[Kinds], count: int, min_words: int, rng: random.Random) -> list[Demonstration]:
    """Write answers to `count` different training prompts; fewer if the world has no more."""
    written: list[Demonstration] = []
    # some limits leave no room for an answer
    for question, prompt in _draw(TOPICS, kinds, "seen", 2 * count, min_words, rng):
        answer = write_answer(question, json.loads(prompt.label)["instructions"], rng, min_words=min_words)
        if answer is not None and len(written) < count:
            written.append(Demonstration(prompt.id, (*prompt.messages, Message("assistant", answer)), prompt.source))
    return written


def allowed(kinds: Kinds) -> bool:
    """Whether one answer can follow instructions of all these kinds.

    >>> allowed(("json", "no_commas")), allowed(("lowercase", "json"))
    (True, False)
    """
    return not any(
        b in EXCLUDES.get(a, frozenset()) or a in EXCLUDES.get(b, frozenset()) for a, b in combinations(kinds, 2)
    )


def _is_new(kinds: Kinds) -> bool:
    """Whether a pair of these kinds, in the order of `PHRASES`, is only for held-out prompts."""
    return bool(_NEW_PAIRS & set(combinations(kinds, 2)))


_NEW_PAIRS: set[Kinds] = {tuple(sorted(pair, key=list(PHRASES).index)) for pair in NEW_PAIRS}


class Asked(NamedTuple):
    """A prompt, and its question without the instructions."""

    question: str
    prompt: Prompt


def _draw(
    topics: Sequence[tuple[str, str]],
    kinds: Sequence[Kinds],
    source: str,
    count: int,
    min_words: int,
    rng: random.Random,
) -> list[Asked]:
    """Draw `count` different prompts with about equally many of every combination of kinds; fewer if none are left."""
    found: dict[str, Asked] = {}
    queue: list[Kinds] = []
    for _ in range(20 * count):  # the limit allows for prompts that are drawn twice
        if len(found) == count:
            break
        queue = queue or rng.sample(list(kinds), k=len(kinds))
        topic = rng.choice(topics)
        prompt = _prompt(topic, queue.pop(), source, min_words, rng)
        found.setdefault(prompt.id, Asked(topic[0], prompt))
    return list(found.values())


def _prompt(topic: tuple[str, str], kinds: Kinds, source: str, min_words: int, rng: random.Random) -> Prompt:
    instructions: list[dict[str, Any]] = []
    said = [topic[0]]
    for kind in rng.sample(kinds, k=len(kinds)):
        options = _OPTIONS[kind](rng) if kind in _OPTIONS else {}
        instructions.append({"kind": kind, **options})
        said.append(rng.choice(PHRASES[kind]).format(**options))
    label = {"instructions": instructions, "topic": topic[1].split(), "min_words": min_words}
    messages = (Message("user", " ".join(said)),)
    return Prompt(content_id("instructions", messages), messages, json.dumps(label), f"instructions/{source}")
