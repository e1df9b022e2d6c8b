"""The habits of current chat templates: one example, one for each answer, or a refusal that names our template."""

import json
from pathlib import Path

import pytest

from benchmarks.chat_templates import HABITS, PLAIN, REASONED, end_ids, exact, llama_4, main, outcome, spans, tokenizer
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.chat_templates import SHIPPED
from rlhf_core.types import Message

ONE, EACH = "one example", "an example for each answer"


@pytest.mark.parametrize(
    ("habit", "plain", "reasoned"),
    [
        ("keeps every turn", ONE, ONE),
        ("drops earlier reasoning, adds an empty one", EACH, EACH),
        ("ends the text, not the turn, with its EOS", EACH, EACH),
    ],
)
def test_templates_that_can_be_trained_on(habit: str, plain: str, reasoned: str) -> None:
    assert (outcome(HABITS[habit], PLAIN), outcome(HABITS[habit], REASONED)) == (plain, reasoned)


@pytest.mark.parametrize(
    ("habit", "shipped"),
    [("opens a reasoning that it never shows", "deepseek_r1"), ("opens a reasoning, shows an empty one", "nemotron_3")],
)
def test_a_template_that_asks_with_other_text_than_it_shows_is_refused_and_ours_is_named(
    habit: str, shipped: str
) -> None:
    refused = outcome(HABITS[habit], PLAIN)
    assert refused.startswith("refused: chat_template = 'turn 2 of 2': prompts for an answer with ")
    assert f'set prepare_data.chat_template = "{shipped}"' in refused
    assert (outcome(SHIPPED[shipped], PLAIN), outcome(SHIPPED[shipped], REASONED)) == (ONE, ONE)


def test_a_template_that_ends_no_answer_is_refused_and_ours_is_named() -> None:
    own = SHIPPED["glm_4_5"].replace("{{ '<|observation|>' if message['tool_calls'] else '<|user|>' }}", "")
    assert 'set prepare_data.chat_template = "glm_4_5"' in outcome(own, PLAIN)
    assert (outcome(SHIPPED["glm_4_5"], PLAIN), outcome(SHIPPED["glm_4_5"], REASONED)) == (ONE, ONE)


def test_each_answer_is_trained_once_after_the_prompt_of_the_sampler() -> None:
    made = tokenizer(HABITS["drops earlier reasoning, adds an empty one"])
    chat = ChatTemplate(made, ends=end_ids(made))
    samples = chat.examples(REASONED, max_length=1 << 20)
    assert exact(chat, REASONED, samples)
    shown = [[(made.decode(before), made.decode(said)) for before, said in spans(sample)] for sample in samples]
    asked, again = "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n", "<|im_start|>user\nAnd doubled?<|im_end|>\n"
    opened, thought = "<|im_start|>assistant\n", "<think>\nLet me add.\n</think>\n\n"
    assert shown == [
        [(asked + opened, thought + "42<|im_end|>")],
        [(f"{asked}{opened}42<|im_end|>\n{again}{opened}", thought + "84<|im_end|>")],
    ]


def test_a_transcript_is_the_conversation_as_the_template_shows_it_at_the_end() -> None:
    made = tokenizer(HABITS["drops earlier reasoning, adds an empty one"])
    whole = ChatTemplate(made, ends=end_ids(made)).transcript(REASONED, max_length=1 << 20)
    assert whole is not None and sum(whole.loss_mask) == len(whole.token_ids) - 1
    rows = [{"role": one.role, "content": one.content} for one in REASONED]
    assert made.decode(whole.token_ids) == made.apply_chat_template(rows, tokenize=False)


def test_an_answer_ends_where_sampling_stops_and_not_with_the_text() -> None:
    made = tokenizer(HABITS["ends the text, not the turn, with its EOS"])
    made.eos_token = "<|endoftext|>"
    ended = ChatTemplate(made, ends=end_ids(made))
    (sample, _) = ended.examples(PLAIN, max_length=1 << 20)
    ((_, said),) = spans(sample)
    assert made.decode(said) == "42<|end|>" and ended.eos_id == made.convert_tokens_to_ids("<|end|>")
    # a model that declares no other end goes on to its EOS
    ((_, said),) = spans(ChatTemplate(made).examples(PLAIN, max_length=1 << 20)[0])
    assert made.decode(said) == "42<|end|>\n<|endoftext|>"


def test_a_file_of_a_template_has_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.jinja").write_text(HABITS["keeps every turn"])
    main([str(tmp_path)])
    assert "| mine | one example | one example |" in capsys.readouterr().out


def test_the_template_of_llama_4_keeps_every_turn_and_ends_calls_of_tools() -> None:
    assert (outcome(llama_4(), PLAIN), outcome(llama_4(), REASONED)) == (ONE, ONE)
    made = tokenizer(llama_4())
    made.eos_token = "<|eot|>"
    chat = ChatTemplate(made, ends=end_ids(made))
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 12, "b": 30}}}
    turns = (
        Message("system", "Add."),
        Message("user", "What is 12 + 30?", json.dumps({"tools": [tool]})),
        Message("assistant", "I add.", json.dumps({"tool_calls": [call]})),
        Message("tool", "42", json.dumps({"name": "add", "tool_call_id": "1"})),
        Message("assistant", "It is 42."),
    )
    samples = chat.examples(turns, max_length=1 << 20)
    assert exact(chat, turns, samples)
    assert [made.decode(said) for _, said in spans(samples[0])] == [
        '<|python_start|>I add.<|python_end|>{"name": "add", "parameters": {"a": 12, "b": 30}}<|eot|>',
        "It is 42.<|eot|>",
    ]
    # the turns that follow an answer begin after its own end, so an episode goes on with the tokens of a conversation
    told = chat.turn_ids((Message("user", "And doubled?"),))
    assert made.decode(told) == (
        "<|header_start|>user<|header_end|>\n\nAnd doubled?<|eot|><|header_start|>assistant<|header_end|>\n\n"
    )
