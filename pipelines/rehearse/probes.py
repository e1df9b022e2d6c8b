"""Call every reward on written answers of many kinds, to find rewards that fail, are constant, or lack arguments.

The output of a random model says little about a reward: a rule for right answers gives 0 to all of it.
"""

import re
from collections import defaultdict
from collections.abc import (
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.flows.nodes import (
    Node,
    prepared_part,
    rewards_in,
)
from pipelines.rehearse.problems import (
    GROUPS,
    REWARD_ARGUMENTS,
    REWARD_CONSTANT,
    REWARD_FAILS,
    Rehearsal,
)
from pipelines.rehearse.rows import ASKED
from pipelines.rehearse.servers import MOST_REQUESTS, Route
from rlhf_core.algorithms.advantage.base import GroupAdvantage
from rlhf_core.config.policy import PPOConfig
from rlhf_core.config.rewards import (
    FunctionReward,
    JudgeReward,
    RemoteReward,
    RewardsConfig,
)
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.tables import Demonstration, Preference
from rlhf_core.errors import explain
from rlhf_core.rewards.batches import BatchedReward
from rlhf_core.rewards.scoring import Scorer
from rlhf_core.rewards.terms import identity, open_elsewhere
from rlhf_core.types import (
    Completion,
    Generation,
    Message,
    Prompt,
    floats,
    ids,
    label_fields,
)

Probed = FunctionReward | RemoteReward | JudgeReward
PROMPTS = 4
"""Prompts of each source."""
TEXTS = 4
"""Answers to other prompts of the source."""
LABEL_FORMS = (
    "{}",
    "The answer is {}.",
    "= {}",
    "#### {}",
    "\\boxed{{{}}}",
    "<answer>{}</answer>",
    "<think>So.</think>\n{}",
)
OTHERS = (
    "",
    "I do not know",
    "yes",
    "Yes, of course!",
    "yes of course and here is what you need to know about it!",
    "Größe: 你好",
    '{"answer": 1, "score": 3}',
    "```python\nprint(1)\n```",
    "First one thing, then another, and in the end a third. " * 8,
)
_LAST_NUMBER = re.compile(r"-?\d+(?!.*\d)", re.DOTALL)
_LACKS = re.compile(r"missing \d+ required .*argument|nothing gives its parameter")
"""Messages of Python about a call that lacks an argument, and of a plan about a function before it is called."""


@dataclass(frozen=True)
class WrittenAnswers:
    """The answers of demonstrations and of preferred sides, by their prompt and by their source."""

    by_prompt: Mapping[tuple[Message, ...], list[str]]
    by_source: Mapping[str, list[str]]

    @classmethod
    def of(cls, rows: Iterable[Demonstration | Preference]) -> "WrittenAnswers":
        """The answers of rows."""
        by_prompt: dict[tuple[Message, ...], list[str]] = defaultdict(list)
        by_source: dict[str, list[str]] = defaultdict(list)
        for row in rows:
            turns = row.messages if isinstance(row, Demonstration) else (*row.prompt, *row.chosen)
            by_prompt[turns[:-1]].append(turns[-1].content)
            by_source[row.source].append(turns[-1].content)
        return cls(by_prompt, by_source)

    def to(self, prompt: Prompt) -> list[str]:
        """Answers to a prompt: its own ones, its label in several forms, answers to other prompts, and other texts."""
        fields = label_fields(prompt.label).values()
        plain = [str(value) for value in fields if isinstance(value, (str, int, float))]
        labels = dict.fromkeys([prompt.label, *plain])
        forms = [form.format(label) for label in labels if label for form in LABEL_FORMS]
        others = self.by_source.get(prompt.source, [])[:TEXTS]
        # A demonstration with the right result is right in the form of the data.
        right = [_LAST_NUMBER.sub(lambda _: prompt.label, text) for text in others if prompt.label]
        own = self.by_prompt.get(prompt.messages, [])[:TEXTS]
        return list(dict.fromkeys([*own, *forms, *right, *others, *OTHERS]))

    def few_prompts(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """A few prompts of each source, prompts with an answer first."""
        chosen: dict[str, list[Prompt]] = defaultdict(list)
        for row in sorted(prompts, key=lambda row: row.messages not in self.by_prompt):
            if len(chosen[row.source]) < PROMPTS:
                chosen[row.source].append(row)
        return [row for found in chosen.values() for row in found]


def generation(
    prompt: Prompt,
    text: str,
    chat: ChatTemplate,
) -> Generation:
    """An answer with the tokens that it has in the base model's tokenizer."""
    tokens = chat.tokenizer(text, add_special_tokens=False)["input_ids"] + [chat.eos_id]
    said = Completion(
        ids(tokens),
        floats([0.0] * len(tokens)),
        text,
        "stop",
        policy_version=0,
        seed=0,
    )
    return Generation(prompt, ids(chat.prompt_ids(prompt.messages)), said)


def probe_rewards(
    nodes: Sequence[Node],
    prompts: Mapping[str, Sequence[Prompt]],
    written: WrittenAnswers,
    chat: ChatTemplate,
    routes: Sequence[Route],
    folder: Path,
    found: Rehearsal,
) -> None:
    """Add the problems of all rewards of the nodes, on prompts (by their table) that a node reads.

    A judge is asked about few answers, since each one costs.
    """
    answers = {
        name: [generation(row, text, chat) for row in written.few_prompts(rows) for text in written.to(row)]
        for name, rows in prompts.items()
    }
    made = {name: node for node in nodes for name in (node.label, *node.names)}
    seen: set[str] = set()
    for node in nodes:
        table, sources = table_behind(node, made)
        asked = [one for one in answers.get(table, ()) if not sources or one.prompt.source in sources]
        for key, rewards in rewards_judging(node).items() if asked else ():
            with ExitStack() as leases:
                opened: dict[str, BatchedReward] = {}
                for name, term in rewards.terms.items():
                    same = f"{identity(term)} {term.sources}"
                    if isinstance(term, (FunctionReward, RemoteReward, JudgeReward)) and name != "rehearsal":
                        path = f"{key}.terms.{name}" if name != "gold" else key
                        values = (
                            []
                            if same in seen
                            else list(
                                probe_term(
                                    path,
                                    term,
                                    asked,
                                    folder,
                                    leases,
                                    opened,
                                    found,
                                )
                            )
                        )
                        check_values(
                            path,
                            term,
                            values,
                            routes,
                            found,
                        )
                        seen.add(same)
                if opened.keys() == rewards.terms.keys():
                    check_groups(
                        node,
                        rewards,
                        opened,
                        asked,
                        found,
                    )


def table_behind(node: Node, made: Mapping[str, Node]) -> tuple[str, set[str]]:
    """The table of prompts whose answers a node judges, and their sources, none for all of them.

    The table is `prompts`, `eval_prompts`, or "" for another one.
    """
    config: Any = node.config
    mixtures = config.mixtures.values() if isinstance(config, PPOConfig) else [getattr(config, "mixture", {})]
    own = {source for mixture in mixtures for source in mixture} | set(getattr(config, "sources", ()))
    read = node.reads()
    kinds = (
        "prompts",
        "generations",
        "rollouts",
        "pool",
        "tables",
    )
    for name in (name for kind in kinds for name in read.get(kind, ())):
        if prepared_part(name)[1] in ASKED:
            return prepared_part(name)[1], own
        if name in made:
            table, sources = table_behind(made[name], made)
            return table, own & sources if own and sources else own | sources
    return "", own


def rewards_judging(node: Node) -> dict[str, RewardsConfig]:
    """The rewards of a node by key, and its gold reward as rewards of one term."""
    found = {f"{node.path}.{key}": rewards for key, rewards in rewards_in(node.config).items()}
    gold = getattr(node.config, "gold", "")
    if gold:
        found[f"{node.path}.gold"] = RewardsConfig(terms={"gold": FunctionReward(function=gold)})
    return found


def as_written(term: Probed) -> str:
    """The function of a term, or its type if it has none."""
    return term.function if isinstance(term, FunctionReward) else term.type


def probe_term(
    key: str,
    term: Probed,
    answers: Sequence[Generation],
    folder: Path,
    leases: ExitStack,
    opened: dict[str, BatchedReward],
    found: Rehearsal,
) -> Iterator[float | None]:
    """Yield the values of a term. A term that fails is a problem."""
    wanted = [one for one in answers if not term.sources or one.prompt.source in term.sources]
    if isinstance(term, JudgeReward):
        wanted = wanted[:: max(1, len(wanted) // MOST_REQUESTS)][:MOST_REQUESTS]
        term = term.model_copy(update={"concurrency": 1, "corrections": 0})
    name = key.rpartition(".")[2]
    try:
        reward = open_elsewhere(
            name,
            term,
            folder,
            leases,
        )
        outcome = reward(wanted)
    except Exception as error:  # of the user's code or server, in any form
        text = " ".join(str(error).split())
        lacks = bool(_LACKS.search(text))
        remedy = f"give them as {key}.arguments" if lacks else "mend it; `rlhf try-reward` calls it once"
        kind = REWARD_ARGUMENTS if lacks else REWARD_FAILS
        # The end of a traceback names the error.
        found.add(
            kind,
            explain(
                key,
                as_written(term),
                f"fails: {text[-300:]}",
                remedy,
            ),
        )
        return
    opened[name] = reward
    for at, why in list(outcome.failures.items())[:1]:
        rule = f"fails for {len(outcome.failures)} of {len(wanted)} answers, such as {wanted[at].completion.text[:40]!r}: {why}"
        found.add(
            REWARD_FAILS,
            explain(
                key,
                as_written(term),
                rule,
                "mend it",
            ),
        )
    yield from outcome.values


def check_values(
    key: str, term: Probed, values: Sequence[float | None], routes: Sequence[Route], found: Rehearsal
) -> None:
    """Add a problem for a term that gives all written answers the same value, or none at all."""
    made_up = any(one.problem and one.key.startswith(key) for one in routes)
    different = {value for value in values if value is not None}
    if len(values) < 2 or made_up or len(different) > 1:
        return
    rule = "does not apply to any"
    if different:
        rule = f"is {different.pop():g} for each"
    remedy = "check which columns it reads (docs/score.md), and the labels of the prompts"
    said = f"{rule} of {len(values)} written answers, good and bad ones, so nothing can be learned from it"
    found.add(
        REWARD_CONSTANT,
        explain(
            key,
            as_written(term),
            said,
            remedy,
        ),
    )


def check_groups(
    node: Node,
    rewards: RewardsConfig,
    opened: Mapping[str, BatchedReward],
    answers: Sequence[Generation],
    found: Rehearsal,
) -> None:
    """Add a problem if the answers to each prompt have the same reward, and an estimator compares them."""
    config = node.config
    if not isinstance(config, PPOConfig) or not isinstance(config.estimator, GroupAdvantage):
        return
    if any(problem.text.startswith(f"{node.path}.rewards.") for problem in found.problems):
        return
    plain = rewards.model_copy(update={"overlong": None, "truncated": None})
    few = answers if not any(isinstance(term, JudgeReward) for term in rewards.terms.values()) else []
    groups: dict[str, set[float]] = {}
    for rollout in Scorer(plain, opened)(few):
        if not rollout.invalid:
            groups.setdefault(rollout.prompt.id, set()).add(round(rollout.reward, 9))
    if groups and all(len(different) == 1 for different in groups.values()):
        rule = f"the written answers to each of {len(groups)} prompts have the same reward"
        remedy = "let the reward depend on the answer, and check clip, gates and weights"
        found.add(
            GROUPS,
            explain(
                f"{node.path}.rewards",
                list(rewards.terms),
                rule,
                remedy,
            ),
        )
