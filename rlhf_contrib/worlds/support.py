"""The default world: replies of a customer-support desk, judged by a program.

    Maria writes: my blue kettle arrived broken. Reply to her.
    Hello Maria, I am sorry to hear that. I checked your blue kettle. We will send a replacement. Thank you for writing.

Writers of mixed quality write the demonstrations and pairs; an annotator with Bradley-Terry noise labels the pairs.
The gold reward reads only text and facts, and only evaluation prompts carry facts (as their label): no stage can
train on it. A sentence counts only if it matches, word for word, a known sentence of the desk with its slots
filled, so strings of good words earn nothing.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlhf_contrib.worlds.support_phrases import (
    APOLOGIES,
    BLAMES,
    BLANK_GREETINGS,
    COLOURS,
    FILLERS,
    GREETINGS,
    ITEMS,
    MEN,
    PROBLEMS,
    REMEDIES,
    THANKS,
    THINGS,
    WOMEN,
)
from rlhf_core.config.data import SupportWorld
from rlhf_core.data.tables import Demonstration, Preference, Tables, content_id
from rlhf_core.errors import RewardError, explain
from rlhf_core.types import Generation, Message, Prompt, derive_seed

SOURCE = "support"

GREETED = 1.0
APOLOGISED = 1.0
NAMED_ITEM = 1.0
RIGHT_REMEDY = 1.5
CLOSED_WITH_THANKS = 0.5
BLAMED = -1.5
FILLER = -0.5
REPEATED = -1.0
WRONG_FACT = -1.0
UNKNOWN = -0.5
"""For an unknown sentence, and again for every further `UNKNOWN_WORDS` words of it."""
UNKNOWN_WORDS = 8
FREE_WORDS = 30
EXTRA_WORD = -0.05
EMPTY = -2.0
FLOOR = -5.0
REPETITIONS = (1, 1, 2, 4)
BEST = GREETED + APOLOGISED + NAMED_ITEM + RIGHT_REMEDY + CLOSED_WITH_THANKS


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a customer's message.

    >>> Facts("Maria", "blue kettle", "broken").label
    '{"item": "blue kettle", "name": "Maria", "problem": "broken"}'
    """

    name: str
    item: str
    problem: str

    @property
    def label(self) -> str:
        """The facts as the JSON that an evaluation prompt carries."""
        return json.dumps({"name": self.name, "item": self.item, "problem": self.problem}, sort_keys=True)


def gold_reward(generations: Sequence[Generation]) -> list[float]:
    """Score each generation in [-5, 5]; RewardError if the prompt's label has no facts."""
    return [sum_of(gold_components(row.completion.text, facts_of(row.prompt))) for row in generations]


def facts_of(prompt: Prompt) -> Facts:
    """Parse the facts of an evaluation prompt; RewardError for a prompt without facts."""
    try:
        return Facts(**json.loads(prompt.label))
    except (ValueError, TypeError) as error:
        raise RewardError(
            explain(
                f"prompt[{prompt.id}].label", prompt.label, "has no facts", "only evaluation prompts have a gold reward"
            )
        ) from error


def sum_of(components: dict[str, float]) -> float:
    """Sum the components of the gold reward, with lower bound `FLOOR`."""
    return max(FLOOR, sum(components.values()))


def gold_components(text: str, facts: Facts) -> dict[str, float]:
    """The value of each property of the reply `text`, positive or negative; absent properties are left out.

    >>> gold_components("Hello Maria, We will send a replacement.", Facts("Maria", "blue kettle", "broken"))
    {'greeted': 1.0, 'right_remedy': 1.5}
    """
    sentences = [part.strip() for part in re.findall(r"[^.,!?]+[.,!?]?", text) if part.strip()]
    if not sentences:
        return {"empty": EMPTY}
    found: dict[str, float] = {}
    for place, sentence in enumerate(sentences):
        name, value = _judge(sentence, facts, first=place == 0, last=place == len(sentences) - 1)
        if value > 0:
            found[name] = value  # each virtue counts once
        elif value < 0:
            found[name] = found.get(name, 0.0) + value
    repeats = len(sentences) - len(set(sentences))
    if repeats:
        found["repeated"] = REPEATED * repeats
    extra = len(text.split()) - FREE_WORDS
    if extra > 0:
        found["long"] = EXTRA_WORD * extra
    return found


def make_tables(config: SupportWorld, *, seed: int) -> tuple[Tables, dict[str, float]]:
    """Build all tables and facts: the mean gold reward of the demonstrations and the annotator's agreement.

    Each evaluation prompt has a combination of name and item that no training prompt has.
    """
    train, held_out = _cases(seed)
    demonstrations = _demonstrations(train, config.demonstrations, config, random.Random(derive_seed(seed, "demos")))
    pairs, agreement = _preferences(train, config.preferences, config, random.Random(derive_seed(seed, "pairs")))
    prompts = [_prompt(next(train)[1], label="") for _ in range(config.prompts)]
    eval_prompts = []
    for _ in range(config.eval_prompts):
        facts, text = next(held_out)
        eval_prompts.append(_prompt(text, label=facts.label))
    writer = random.Random(derive_seed(seed, "eval"))
    eval_demonstrations = _demonstrations(held_out, config.eval_demonstrations, config, writer)
    eval_pairs = [_clean_pair(*next(held_out), config, writer) for _ in range(config.eval_preferences)]
    gold = [sum_of(gold_components(row.messages[-1].content, facts)) for facts, row in demonstrations]
    tables = Tables(
        demonstrations=tuple(row for _, row in demonstrations),
        eval_demonstrations=tuple(row for _, row in eval_demonstrations),
        preferences=tuple(pairs),
        eval_preferences=tuple(eval_pairs),
        prompts=tuple(prompts),
        eval_prompts=tuple(eval_prompts),
    )
    return tables, {"gold/demonstrations_mean": sum(gold) / len(gold), "annotator/agreement": agreement}


def write_reply(facts: Facts, config: SupportWorld, rng: random.Random) -> str:
    """Write a reply of mixed quality: each virtue with `good_probability`, each vice with `bad_probability`.

    Wrong facts are slips, with `slip_probability`. Some of the writers who repeat themselves continue to do so for a
    while: a reward model that has never seen rambling would let a policy ramble.
    """

    def good() -> bool:
        return rng.random() < config.good_probability

    def bad() -> bool:
        return rng.random() < config.bad_probability

    def slip() -> bool:
        return rng.random() < config.slip_probability

    sentences: list[str] = []
    if good():
        sentences.append(rng.choice(GREETINGS).format(name=facts.name))
    elif slip():
        sentences.append(rng.choice(GREETINGS).format(name=_other(WOMEN + MEN, facts.name, rng)))
    elif bad():
        sentences.append(rng.choice(BLANK_GREETINGS))
    if good():
        sentences.append(rng.choice(APOLOGIES))
    if good():
        sentences.append(rng.choice(ITEMS).format(item=facts.item))
    elif slip():
        sentences.append(rng.choice(ITEMS).format(item=_wrong_item(facts.item, rng)))
    if bad():
        sentences.append(rng.choice(BLAMES))
    if good():
        sentences.append(rng.choice(REMEDIES[facts.problem]))
    elif slip():
        sentences.append(rng.choice(REMEDIES[_other(list(REMEDIES), facts.problem, rng)]))
    if bad():
        sentences.insert(rng.randint(len(sentences[:1]), len(sentences)), rng.choice(FILLERS))
    body = [sentence for sentence in sentences if sentence.endswith(".")]
    if body and bad():
        again = rng.choice(body)
        place = sentences.index(again) + 1
        sentences[place:place] = [again] * rng.choice(REPETITIONS)
    if good() or not body:
        sentences.append(rng.choice(THANKS))
    return " ".join(sentences)


# ---------------------------------------------------------------- private: judging


def _pattern(templates: Sequence[str]) -> re.Pattern[str]:
    slots = {r"\{name\}": "(?P<name>[A-Z][a-z]+)", r"\{item\}": "(?P<item>[a-z]+ [a-z]+)"}
    options = []
    for number, template in enumerate(templates):
        option = re.escape(template)
        for slot, regex in slots.items():
            option = option.replace(
                slot, regex.replace("P<name>", f"P<name{number}>").replace("P<item>", f"P<item{number}>")
            )
        options.append(option)
    return re.compile("|".join(options))


_GREETING = _pattern(GREETINGS)
_ITEM = _pattern(ITEMS)
_REMEDY_OF = {sentence: problem for problem, sentences in REMEDIES.items() for sentence in sentences}


def _judge(sentence: str, facts: Facts, *, first: bool, last: bool) -> tuple[str, float]:
    """Judge one sentence as (property, value); greetings count only in the first sentence, thanks only in the last."""
    if sentence in APOLOGIES:
        return "apologised", APOLOGISED
    if sentence in THANKS:
        return "closed_with_thanks", CLOSED_WITH_THANKS if last else 0.0
    if sentence in _REMEDY_OF:
        right = _REMEDY_OF[sentence] == facts.problem
        return ("right_remedy", RIGHT_REMEDY) if right else ("wrong_remedy", WRONG_FACT)
    if sentence in BLAMES:
        return "blamed", BLAMED
    if sentence in FILLERS:
        return "filler", FILLER
    if sentence in BLANK_GREETINGS and first:
        return "blank_greeting", 0.0
    greeting = _slot(_GREETING, sentence)
    if greeting is not None and first:
        return ("greeted", GREETED) if greeting == facts.name else ("wrong_name", WRONG_FACT)
    item = _slot(_ITEM, sentence)
    if item is not None:
        return ("named_item", NAMED_ITEM) if item == facts.item else ("wrong_item", WRONG_FACT)
    return "unknown", UNKNOWN * math.ceil(len(sentence.split()) / UNKNOWN_WORDS)


def _slot(pattern: re.Pattern[str], sentence: str) -> str | None:
    match = pattern.fullmatch(sentence)
    return None if match is None else next(value for value in match.groups() if value is not None)


# ---------------------------------------------------------------- private: writing


def _cases(seed: int) -> tuple[Iterator[tuple[Facts, str]], Iterator[tuple[Facts, str]]]:
    """Endless iterators over training and held-out (facts, prompt text); one in eight name-item pairs is held out."""
    rng = random.Random(derive_seed(seed, "cases"))
    pairs = [(name, thing) for name in WOMEN + MEN for thing in THINGS]
    rng.shuffle(pairs)
    border = len(pairs) // 8
    return _endless(_spelled(pairs[border:]), rng), _endless(_spelled(pairs[:border]), rng)


def _spelled(pairs: Sequence[tuple[str, str]]) -> list[tuple[Facts, str]]:
    cases = []
    for name, thing in pairs:
        pronoun = "her" if name in WOMEN else "him"
        for colour in COLOURS:
            for problem, wordings in PROBLEMS.items():
                for wording in wordings:
                    text = f"{name} writes: my {colour} {thing} {wording}. Reply to {pronoun}."
                    cases.append((Facts(name, f"{colour} {thing}", problem), text))
    return cases


def _endless(cases: list[tuple[Facts, str]], rng: random.Random) -> Iterator[tuple[Facts, str]]:
    rng.shuffle(cases)
    while True:
        yield from cases


def _demonstrations(
    cases: Iterator[tuple[Facts, str]], count: int, config: SupportWorld, rng: random.Random
) -> list[tuple[Facts, Demonstration]]:
    rows = []
    for _ in range(count):
        facts, text = next(cases)
        messages = (Message("user", text), Message("assistant", write_reply(facts, config, rng)))
        rows.append((facts, Demonstration(content_id(SOURCE, messages), messages, SOURCE)))
    return rows


def _preferences(
    cases: Iterator[tuple[Facts, str]], count: int, config: SupportWorld, rng: random.Random
) -> tuple[list[Preference], float]:
    """Write pairs labeled with Bradley-Terry noise; also returns the fraction that agree with the gold reward."""
    rows, agreed = [], 0
    for _ in range(count):
        facts, text = next(cases)
        better, worse, difference = _ranked(facts, config, rng)
        right = rng.random() < 1.0 / (1.0 + math.exp(-difference / config.annotator_temperature))
        agreed += right
        rows.append(_pair(text, better, worse) if right else _pair(text, worse, better))
    return rows, agreed / count


def _clean_pair(facts: Facts, text: str, config: SupportWorld, rng: random.Random) -> Preference:
    better, worse, _ = _ranked(facts, config, rng)
    return _pair(text, better, worse)


def _ranked(facts: Facts, config: SupportWorld, rng: random.Random) -> tuple[str, str, float]:
    """Write (better reply, worse reply, gold difference); pairs below the minimum gap are rewritten."""
    while True:
        scored = [
            (sum_of(gold_components(reply, facts)), reply) for reply in (write_reply(facts, config, rng) for _ in "ab")
        ]
        (low, worse), (high, better) = sorted(scored)
        if high - low >= config.minimum_gap:
            return better, worse, high - low


def _pair(text: str, chosen: str, rejected: str) -> Preference:
    return Preference(
        content_id(SOURCE, text, chosen, rejected),
        (Message("user", text),),
        (Message("assistant", chosen),),
        (Message("assistant", rejected),),
        0.0,
        SOURCE,
    )


def _prompt(text: str, *, label: str) -> Prompt:
    messages = (Message("user", text),)
    return Prompt(content_id(SOURCE, messages), messages, label, SOURCE)


def _other(values: Sequence[str], value: str, rng: random.Random) -> str:
    return rng.choice([other for other in values if other != value])


def _wrong_item(item: str, rng: random.Random) -> str:
    colour, thing = item.split()
    if rng.random() < 0.5:
        return f"{_other(COLOURS, colour, rng)} {thing}"
    return f"{colour} {_other(THINGS, thing, rng)}"
