import asyncio
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rlhf_core.agents.environment import StepResult
from rlhf_core.agents.episodes import Episode, play_episodes
from rlhf_core.agents.process import Environments
from rlhf_core.agents.tools import ToolEnvironment, load_tools, parse_calls
from rlhf_core.config.agents import ToolsAgent
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.errors import ConfigError
from rlhf_core.types import SamplingRequest
from tests.rlhf_core.agents.scripted import WORLDS, ScriptedSampler, chat_folder, prompt

TEMPLATE = (
    "{% if tools %}{{ '<|system|>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|end|>' }}{% endif %}"
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def stepped(environment: ToolEnvironment, action: str) -> StepResult:
    return asyncio.run(environment.step(action))


def environment(max_tool_calls: int = 8) -> ToolEnvironment:
    functions = {name: tool.function for name, tool in load_tools((f"{WORLDS}:add", f"{WORLDS}:shout")).items()}
    return ToolEnvironment(functions, max_tool_calls=max_tool_calls)


def test_each_call_is_answered_by_a_turn_of_the_tool():
    result = stepped(environment(), f"Let me see. {call('add', a=2, b=3)}{call('shout', text='ja')}")
    assert result.observation == [{"role": "tool", "content": "5"}, {"role": "tool", "content": "JA"}]
    assert not result.done and result.extras == {"tool_calls": 2.0, "tool_failures": 0.0}


def test_an_answer_without_a_call_ends_the_episode():
    assert stepped(environment(), "It is 5.").done


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<tool_call>{add}</tool_call>", "the call is no JSON"),
        ('<tool_call>{"name": "add"', "the call is no JSON"),
        ('<tool_call>["add"]</tool_call>', 'the call must read {"name": ...'),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "the arguments must be an object"),
        (f"<tool_call>{'[' * 5000}</tool_call>", "brackets too deep"),
        (f'<tool_call>{{"name": "add", "arguments": {{"a": {"1" * 5000}}}}}</tool_call>', "a number too long"),
        (call("ad", a=1, b=2), "did you mean add?"),
        (call("add", a=1), "missing a required argument: 'b'"),
        (call("add", a=1, b="x"), "TypeError"),
    ],
)
def test_what_is_wrong_with_a_call_is_told_to_the_policy(text, told):
    result = stepped(environment(), text)
    assert not isinstance(result.observation, str)
    assert result.observation[0]["content"].startswith("error: ") and told in result.observation[0]["content"]
    assert result.extras["tool_failures"] == 1.0 and not result.done


def test_calls_past_the_limit_are_refused():
    result = stepped(environment(max_tool_calls=1), call("add", a=1, b=1) * 2)
    assert [turn["content"] for turn in result.observation if isinstance(turn, dict)] == [
        "2",
        "error: no tool call is left of 1; give your answer",
    ]


def test_a_function_without_types_has_no_schema():
    with pytest.raises(ConfigError, match="no schema can be derived"):
        load_tools((f"{WORLDS}:undocumented",))


def test_tools_of_one_file_share_what_it_keeps(tmp_path):
    described = '    """Do it.\n\n    Args:\n        item: what\n    """\n'
    (tmp_path / "cart.py").write_text(
        f"CART = []\ndef put(item: str) -> str:\n{described}    CART.append(item)\n    return 'put'\n"
        f"def has(item: str) -> bool:\n{described}    return item in CART\n"
    )
    tools = load_tools((f"{tmp_path}/cart.py:put", f"{tmp_path}/cart.py:has"))
    tools["put"].function("tea")
    assert tools["has"].function("tea")


def test_calls_are_found_among_other_text():
    assert [one.name for one in parse_calls(f"a {call('x')} b {call('y', z=1)} c")] == ["x", "y"]


@pytest.fixture(scope="module")
def tool_chat(tmp_path_factory) -> ChatTemplate:
    tokenizer = AutoTokenizer.from_pretrained(chat_folder(), local_files_only=True)
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("tools")
    tokenizer.save_pretrained(folder)
    return ChatTemplate.load(Path(folder))


def test_tools_are_shown_called_and_answered_through_the_template(tool_chat):
    config = ToolsAgent(tools=(f"{WORLDS}:add",))

    def script(request: SamplingRequest, turn: int) -> str:
        return call("add", a=19, b=23) if turn == 0 else "42"

    sampler = ScriptedSampler(tool_chat, script)
    with Environments(config, tokenizer="") as environments:
        shown = tool_chat.with_tools(environments.tools)
        one = prompt(1, "42")
        episode = Episode(one, shown.prompt_ids(one.messages), 7)
        sampling = SamplingConfig(max_tokens=200)
        (played,) = play_episodes(sampler, shown, [episode], environments, config, sampling)
    text = shown.tokenizer.decode(list(played.prompt_ids + played.completion.token_ids))
    assert '"name": "add"' in text and "Add two numbers." in text
    assert text.endswith(f"<|assistant|>{call('add', a=19, b=23)}<|end|><|tool|>42<|end|><|assistant|>42<|end|>")
    assert played.completion.extras == {"tool_calls": 1.0, "tool_failures": 0.0}


def test_a_template_that_shows_no_tools_is_refused():
    template = ChatTemplate.load(Path(chat_folder()))
    with pytest.raises(ConfigError, match="does not render tools"):
        template.with_tools([{"type": "function", "function": {"name": "add"}}])


@pytest.mark.parametrize("name", ["parameters", "args", "input", "params", "kwargs"])
def test_arguments_under_another_name_reach_the_tool(name):
    action = f"<tool_call>{json.dumps({'name': 'add', name: {'a': 2, 'b': 3}})}</tool_call>"
    assert stepped(environment(), action).observation == stepped(environment(), call("add", a=2, b=3)).observation


@pytest.mark.parametrize("body", [{"name": "add", "a": 2}, {"name": "add", "args": {"a": 2}, "arguments": {"a": 3}}])
def test_a_call_without_arguments_that_can_be_found_is_a_mistake(body):
    (found,) = parse_calls(f"<tool_call>{json.dumps(body)}</tool_call>")
    assert "arguments" in found.problem
