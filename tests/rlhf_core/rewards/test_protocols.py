"""Reward functions as OpenRLHF, TRL and our own protocol have them, called unchanged."""

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Any

import pytest
import torch

from rlhf_core.config.rewards import FunctionProtocol
from rlhf_core.errors import ConfigError
from rlhf_core.rewards.batches import RewardOutcome
from rlhf_core.rewards.protocols import adapt
from rlhf_core.types import ActionSpan, Generation, Message, Prompt
from rlhf_core.user_code.modules import load_callable
from tests.rlhf_core.rewards.answers import answer


def generation(text: str, label: str = "4", *, conversational: bool = False) -> Generation:
    return answer(text, asked="2+2?", label=label, tokens=(3, 9), conversational=conversational)


def scored(
    function: Callable[..., Any],
    *generations: Generation,
    protocol: FunctionProtocol = "auto",
    arguments: dict[str, Any] | None = None,
) -> RewardOutcome:
    adapted = adapt(function, protocol=protocol, arguments=arguments or {})
    with asyncio.Runner() as runner:
        return adapted.outcomes([list(generations)], runner)[0]


# ---------------------------------------------------------------- ours


def test_our_protocol_gets_text_labels_and_columns():
    def reward(prompts: list[str], completions: list[str], labels: list[str], **columns: Any) -> list[float | None]:
        assert prompts == ["2+2?", "2+2?"]
        assert columns["level"] == [3, None]
        assert columns["source"] == ["test", "test"]
        assert columns["completion_ids"] == [[3, 9], [3, 9]]
        assert columns["messages"] == [[{"role": "user", "content": "2+2?"}]] * 2
        assert columns["finish_reason"] == ["stop", "stop"]
        return [float(text == label) if label else None for text, label in zip(completions, labels, strict=True)]

    given = generation("4", '{"level": 3}'), generation("4", "4")
    assert scored(reward, *given).values == (0.0, 1.0)


def test_an_environments_tokens_are_told_from_the_policys():
    def reward(completions: list[str], labels: list[str], action_mask: list[list[int]]) -> list[float]:
        assert action_mask == [[1, 1], [0, 1]]
        return [0.0, 0.0]

    one = generation("4")
    scored(reward, one, replace(one, completion=replace(one.completion, spans=(ActionSpan(1, 2, 0),))))


def test_a_column_that_no_label_has_is_named():
    def reward(completions: list[str], labels: list[str], level: list[int]) -> list[float]:
        return [float(one) for one in level]

    assert scored(reward, generation("4", '{"level": 3}')).values == (3.0,)
    with pytest.raises(TypeError, match="'level'"):
        scored(reward, generation("4", "4"))


def test_arguments_go_in_by_name():
    def reward(completions: list[str], labels: list[str], *, unit: float = 1.0, **columns: Any) -> list[float]:
        return [len(text) * unit for text in completions]

    def older(generations: Sequence[Generation], unit: float) -> list[float]:
        return [len(one.completion.text) * unit for one in generations]

    assert scored(reward, generation("abc"), arguments={"unit": 2.0}).values == (6.0,)
    assert scored(older, generation("abc"), arguments={"unit": 2.0}).values == (6.0,)
    with pytest.raises(
        ConfigError, match=r"arguments\.units = 2\.0: is not a parameter of the function; use one of generations, unit"
    ):
        adapt(older, protocol="auto", arguments={"units": 2.0})


def test_a_table_gives_rewards_and_what_is_to_be_logged():
    def reward(completions: list[str], labels: list[str]) -> dict[str, Any]:
        logs = {"hits": [1, 0, 1, 1], "temperature": 0.5, "broken": [float("nan")] * 4}
        return {"rewards": [1, None, True, 0.25], "scores": [1, 0, 1, 0], "extra_logs": logs}

    outcome = scored(reward, *[generation("x")] * 4)
    assert outcome.values == (1.0, None, 1.0, 0.25)
    assert outcome.logs == {"hits": (3.0, 4), "temperature": (2.0, 4), "scores": (2.0, 4)}
    assert outcome.scores == (1.0, 0.0, 1.0, 0.0)


def test_what_is_logged_has_plain_names_and_costs_no_reward():
    class Name(StrEnum):
        HITS = "hits"

    logs = {"kind": ["sum"], "unit": "apples", "table": {"a": 1}, Name.HITS: [3.0]}
    outcome = scored(lambda completions, labels: {"rewards": [1.0], "extra_logs": logs}, generation("4"))
    assert outcome == RewardOutcome((1.0,), logs={"hits": (3.0, 1)}) and [type(name) for name in outcome.logs] == [str]
    silent = scored(lambda completions, labels: {"rewards": [1.0], "extra_logs": None}, generation("4"))
    assert silent == RewardOutcome((1.0,))


def test_an_async_function_is_awaited_also_behind_a_partial():
    async def reward(completions: list[str], labels: list[str], *, unit: float) -> list[float]:
        await asyncio.sleep(0)
        return [len(text) * unit for text in completions]

    assert scored(reward, generation("abc"), arguments={"unit": 2.0}).values == (6.0,)
    assert scored(functools.partial(reward, unit=3.0), generation("abc")).values == (9.0,)


def test_a_function_that_is_not_async_may_run_a_loop_of_its_own():
    async def judge(text: str) -> float:
        return float(len(text))

    def reward(completions: list[str], labels: list[str]) -> list[float]:
        return [asyncio.run(judge(text)) for text in completions]

    assert scored(reward, generation("abc")).values == (3.0,)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (["good"], "must be a number or None"),
        ({"scores": [1.0]}, "no 'rewards'"),
        ([[1.0, 2.0]], r"a number or None, not \[1.0, 2.0\]"),
        (["1"], "'1'"),
        ("1", "'1'"),
        ([(1.0, "why")], r"not \(1.0, 'why'\)"),
        ([{"score": 1.0}], "not {'score': 1.0}"),
        ((value for value in [1.0]), "not <generator"),
        ([1j], "not 1j"),
        (None, "returned None and no list of numbers: does it end without `return`"),
        ({"rewards": None}, "returned None and no list"),
    ],
)
def test_what_holds_no_numbers_is_refused(returned, message):
    with pytest.raises((ValueError, TypeError), match=message):
        scored(lambda generations: returned, generation("x"))


# ---------------------------------------------------------------- OpenRLHF

OPENRLHF = '''
import re
import torch

def reward_func(queries, prompts, labels, **kwargs):
    """Right answers in a box count 1, others 0."""
    print(queries)
    found = [re.search(r"boxed{(.*?)}", query[len(prompt):]) for query, prompt in zip(queries, prompts)]
    right = torch.tensor([float(m is not None and m.group(1) == label) for m, label in zip(found, labels)])
    has_box = torch.tensor([m is not None for m in found]).float()
    return {"rewards": right * 2 - 1, "scores": right, "extra_logs": {"has_box": has_box, "size": torch.tensor(5.0)}}
'''


def test_an_openrlhf_file_runs_unchanged(tmp_path):
    file = tmp_path / "reward_func.py"
    file.write_text(OPENRLHF)
    given = [generation(r"so \boxed{4}"), generation(r"so \boxed{5}"), generation("4")]
    outcome = scored(load_callable("function", f"{file}:reward_func"), *given)
    assert outcome.values == (1.0, -1.0, -1.0)
    assert outcome.logs == {"has_box": (2.0, 3), "size": (15.0, 3), "scores": (1.0, 3)}
    assert outcome.scores == (1.0, 0.0, 0.0)


def test_a_function_for_one_query_at_a_time_runs_with_batches_of_one():
    def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> Any:
        return torch.tensor([[1.0]]) if labels[0] in queries[0] else torch.tensor(-1.0)

    assert scored(reward_func, generation("it is 4")).values == (1.0,)
    assert scored(reward_func, generation("it is 5", "7")).values == (-1.0,)


def test_a_query_begins_with_its_prompt_and_a_conversation_names_its_roles():
    seen: list[str] = []

    def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
        assert all(query.startswith(prompt) for query, prompt in zip(queries, prompts, strict=True))
        seen.extend(queries)
        return [0.0] * len(queries)

    talk = (Message("system", "Be brief."), Message("user", "2+2?"))
    one = generation("4")
    scored(reward_func, one, Generation(Prompt("p", talk, "", ""), (1,), one.completion))
    assert seen == ["2+2?4", "system: Be brief.\n\nuser: 2+2?\n\n4"]


# ---------------------------------------------------------------- TRL

TRL = '''
import re

def accuracy(completions, solution, log_extra=None, log_metric=None, **kwargs):
    """None where the solution has no number to compare with."""
    texts = [completion[0]["content"] for completion in completions]
    rewards = []
    for text, gold in zip(texts, solution):
        numbers = re.findall(r"\\d+", text)
        rewards.append(None if not gold.isdigit() else float(bool(numbers) and numbers[-1] == gold))
    if log_extra:
        log_extra("gold", list(solution))
        log_extra("length", [len(text) for text in texts])
    if log_metric:
        log_metric("accuracy", sum(r or 0 for r in rewards) / len(rewards))
    return rewards

def think_format(completions: list[list[dict[str, str]]], **kwargs) -> list[float]:
    pattern = r"^<think>(?!.*<think>)(.*?)</think>.*$"
    return [1.0 if re.match(pattern, c[0]["content"], re.DOTALL) else 0.0 for c in completions]

def overlong(completion_ids, **kwargs):
    return [-max(0.0, len(ids) - 1.0) for ids in completion_ids]

async def by_level(prompts, completions, completion_ids, level, trainer_state, **kwargs):
    assert trainer_state is None
    assert prompts[0] == [{"role": "user", "content": "2+2?"}]
    assert completions[0] == [{"role": "assistant", "content": "4"}]
    return [n if n is not None else None for n in level]

class Weighted:
    def __init__(self, factor):
        self.factor = factor
        self.__name__ = "weighted"
    def __call__(self, completions, **kwargs):
        return [self.factor * len(c[0]["content"]) for c in completions]

doubled = Weighted(2.0)
'''


TEXT_OR_MESSAGES = """
def quickstart(completions, **kwargs):
    return [len(set(c)) for c in completions]

def length(completions, log_extra, **kwargs):
    log_extra("length", [len(c) for c in completions])
    return [float(len(c)) for c in completions]

def with_prompts(prompts, completions, solution, **kwargs):
    return [float(len(p) + len(c) + len(s)) for p, c, s in zip(prompts, completions, solution)]

async def later(completions, **kwargs):
    return [float(len(c)) for c in completions]

def first_letter(completions, **kwargs):
    return [float(c[0] == "A") for c in completions]

def judged(completions, ask=lambda messages: {"message": {"content": messages[0]["content"]}}, **kwargs):
    return [float(len(ask([{"role": "user", "content": "Rate: " + c}])["message"]["content"])) for c in completions]

def any_type(completions, **kwargs):
    return [float(isinstance(c, str)) for c in completions]

def reads_turns(completions, **kwargs):
    return [float(len(c[0]["content"])) for c in completions]

async def reads_turns_later(completions, **kwargs):
    return [float(len(c[-1].get("content"))) for c in completions]

class Reads:
    def _text(self, turns):
        return turns[-1]["content"]
    def __call__(self, completions, **kwargs):
        return [float(len(self._text(c))) for c in completions]

reads = Reads()
"""


turns = partial(generation, conversational=True)


@pytest.fixture(scope="module")
def trl(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("trl") / "trl_rewards.py"
    file.write_text(TRL + TEXT_OR_MESSAGES)
    return str(file)


def test_a_trl_function_gets_messages_columns_and_its_loggers(trl):
    given = [turns("so 4"), turns("so 5"), turns("?", "four"), turns("7", '{"solution": "7"}')]
    outcome = scored(load_callable("function", f"{trl}:accuracy"), *given)
    assert outcome.values == (1.0, 0.0, None, 1.0)
    assert outcome.logs == {"length": (10.0, 4), "accuracy": (0.5, 1)}  # the column of text is left out


def test_trl_functions_of_other_shapes(trl):
    thought = turns("<think>hm</think>4")
    assert scored(load_callable("function", f"{trl}:think_format"), thought, turns("4")).values == (1.0, 0.0)
    assert scored(load_callable("function", f"{trl}:overlong"), thought).values == (-1.0,)
    given = turns("4", '{"level": 3}'), turns("4")
    assert scored(load_callable("function", f"{trl}:by_level"), *given).values == (3.0, None)
    assert scored(load_callable("function", f"{trl}:doubled"), turns("444")).values == (6.0,)


@pytest.mark.parametrize(
    ("name", "of_text", "of_turns"),
    [
        ("quickstart", 3.0, TypeError),  # TRL's quickstart: set() of messages, which it is handed there too
        ("length", 4.0, 1.0),
        ("with_prompts", 9.0, 3.0),
        ("later", 4.0, 1.0),
        ("first_letter", 1.0, 0.0),
        ("judged", 10.0, TypeError),  # it names "content", and reads text all the same
        ("any_type", 1.0, 0.0),
        ("reads_turns", 4.0, 4.0),
        ("reads_turns_later", 4.0, 4.0),
        ("reads", 4.0, 4.0),
    ],
)
def test_trl_functions_get_text_where_prompts_are_text_and_messages_where_they_are_turns(trl, name, of_text, of_turns):
    function = load_callable("function", f"{trl}:{name}")
    text, talk = generation("ABBC"), turns("ABBC")
    assert scored(function, text).values == (of_text,)
    if of_turns is TypeError:
        with pytest.raises(TypeError):
            scored(function, talk)
    else:
        assert scored(function, talk).values == scored(function, text, protocol="trl_messages").values == (of_turns,)


def test_a_function_that_gets_text_and_messages_in_one_batch_is_named_once(trl, caplog):
    adapted = adapt(load_callable("function", f"{trl}:length"), protocol="auto", arguments={})
    with asyncio.Runner() as runner:
        for batch in ([generation("ABBC")], [generation("ABBC"), turns("ABBC")], [generation("ABBC"), turns("ABBC")]):
            adapted.outcomes([batch], runner)
    (record,) = caplog.records
    assert "length gets text for some prompts and messages for others; set protocol = 'trl_text'" in record.message


def test_a_function_that_fails_on_one_text_is_not_taken_for_one_that_reads_messages():
    def first_letter(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(c[0] == "A") for c in completions]

    with pytest.raises(IndexError):
        scored(first_letter, generation("A"), generation(""))


# ---------------------------------------------------------------- telling them apart


@pytest.mark.parametrize(
    ("function", "protocol"),
    [
        (lambda generations: [], "generations"),
        (lambda rows: [], "generations"),
        (lambda generations, labels=None: [], "generations"),
        (lambda queries, prompts, labels: [], "openrlhf"),
        (lambda prompts, completions, labels, **columns: [], "columns"),
        (lambda labels, generations: [], "columns"),
        (lambda prompts, completions, **kwargs: [], "trl"),
        (lambda completions, solution: [], "trl"),
        (lambda completion_ids, **kwargs: [], "trl"),
    ],
)
def test_the_names_of_the_parameters_tell_the_protocol(function, protocol):
    assert adapt(function, protocol="auto", arguments={}).protocol == protocol


def test_a_function_of_no_protocol_is_refused():
    with pytest.raises(ConfigError, match=r"function = '\(data_source, solution_str\)'.*set protocol"):
        adapt(lambda data_source, solution_str: 0.0, protocol="auto", arguments={})


@pytest.mark.parametrize(
    "function",
    [lambda queries: [], lambda queries, prompts: [], lambda *, generations: [], partial(lambda a: [], None)],
)
def test_a_function_that_cannot_take_what_its_protocol_passes_is_refused(function):
    with pytest.raises(ConfigError, match="in order: "):
        adapt(function, protocol="generations" if isinstance(function, partial) else "auto", arguments={})


def test_queries_in_another_place_are_not_openrlhfs():
    def reward(prompts: list[str], queries: list[str], labels: list[str]) -> list[float]:
        return []

    assert (
        adapt(reward, protocol="auto", arguments={}).protocol == "columns"
    )  # which has no queries: refused at the plan


def test_a_label_cannot_take_the_place_of_a_completion():
    def reward(completions: list[Any], completion_ids: list[Any], **kwargs: Any) -> list[float]:
        assert completions == ["4"]
        assert completion_ids == [[3, 9]]
        return [1.0]

    assert scored(reward, generation("4", '{"completions": 1, "completion_ids": 2, "prompts": 3}')).values == (1.0,)
