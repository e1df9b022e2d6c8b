"""The templates that we ship, and the ends that a policy declares."""

import json

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlhf_core.data.chat_templates import SHIPPED, declared_ends, other_opening, shipped_for


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_template_is_found_by_the_tokens_of_the_models_own(name):
    assert shipped_for(SHIPPED[name]) == name
    assert shipped_for("{{ messages }}") == ""


@pytest.mark.parametrize(
    "template",
    [
        "[gMASK]<sop>{{ '<|user|>' }}{{ '<|assistant|>\\n<think></think>\\n' }}",  # another template of GLM
        "{{'<｜User｜>' + text}}{{'<｜Assistant｜>'}}{%- if thinking %}{{'<think>'}}{%- else %}{{'</think>'}}{%- endif %}",
        "{{ '<｜Assistant｜>' }}",
    ],
    ids=["other turns", "DeepSeek-V3.1", "one token of two"],
)
def test_a_template_of_other_tokens_is_not_offered(template):
    assert shipped_for(template) == ""


def rendered(name: str, *rows: dict[str, str | None]) -> str:
    environment = ImmutableSandboxedEnvironment()

    def refuse(text: str) -> None:
        raise ValueError(text)

    return environment.from_string(SHIPPED[name]).render(messages=rows, raise_exception=refuse)


def test_nemotron_3_renders_empty_turns_and_refuses_those_of_other_roles():
    shown = rendered("nemotron_3", {"role": "system", "content": "s"}, {"role": "assistant", "content": None})
    assert shown == "<|im_start|>system\ns<|im_end|>\n<|im_start|>assistant\n<think></think><|im_end|>\n"
    with pytest.raises(ValueError, match="no turns of the role tool"):
        rendered("nemotron_3", {"role": "user", "content": "u"}, {"role": "tool", "content": "4"})


def test_the_first_difference_is_shown_and_no_template_is_offered_twice():
    rule, remedy = other_opening(
        "<｜User｜><｜Assistant｜> of the model", "<｜Assistant｜><think>\n", "<｜Assistant｜>42"
    )
    assert rule == "prompts for an answer with '<think>\\n' but renders one with '42', so there is no exact loss mask"
    assert remedy.startswith('set prepare_data.chat_template = "deepseek_r1"')
    _, remedy = other_opening(SHIPPED["deepseek_r1"], "ab", "ac")
    assert remedy.startswith("set prepare_data.chat_template to a template")


def test_an_answer_that_the_template_leaves_out_is_shown_as_nothing():
    rule, _ = other_opening("", "<|user|>1<|assistant|>\n", "<|user|>1")
    assert rule.startswith("prompts for an answer with '<|assistant|>\\n' but renders one with ''")


def test_a_policy_declares_one_end_or_several(tmp_path):
    assert declared_ends(tmp_path) == set()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 106]}))
    assert declared_ends(tmp_path) == {1, 2, 106}
