"""Tags and JSON."""

import json

import pytest

from rlhf_core.errors import ConfigError, DataError
from rlhf_core.rewards.library.structure import json_schema, think_format

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("answer", "options", "expected"),
    [
        ("<think>hm</think>4", {}, 1.0),
        ("<think>hm</think>  ", {}, 0.0),
        ("<think></think>4", {}, 0.0),
        ("first <think>hm</think>4", {}, 0.0),
        ("<think>a</think><think>b</think>4", {}, 0.0),
        ("hm</think>4", {"opened": True}, 1.0),
        ("<think>hm</think>4", {"answer_tag": True}, 0.0),
        ("<think>hm</think>\n<answer>4</answer>\n", {"answer_tag": True}, 1.0),
    ],
)
def test_thoughts_come_once_and_first(answer, options, expected):
    assert think_format([""], [answer], [None], **options) == [expected]


def test_json_is_read_bare_or_from_the_last_fence():
    answers = ['{"age": 3}', 'Here:\n```json\n{"age": 3}\n```', '{"age": "3"}', "age 3", "[" * 100_000]
    assert json_schema([""] * 5, answers, [None] * 5, schema=SCHEMA) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_a_label_may_be_the_schema():
    assert json_schema([""] * 2, ["null", "null"], ['{"type": "null"}', None]) == [1.0, None]


def test_a_reference_elsewhere_is_not_fetched():
    with pytest.raises(Exception, match="Unresolvable"):
        json_schema([""], ["1"], [json.dumps({"$ref": "http://127.0.0.1:9/schema.json"})])


NOTHING = "asks for nothing"


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ('{"type": "intger"}', "is no JSON schema"),
        *(
            (label, NOTHING)
            for label in ("{}", "true", "false", '{"title": "x"}', '{"inputs": ["2"], "outputs": ["4"]}')
        ),
    ],
)
def test_a_label_that_is_no_schema_is_that_rows_fault_and_not_the_configurations(label, problem):
    with pytest.raises(DataError, match=problem):
        json_schema([""], ["1"], [label])
    if problem != "is no JSON":
        with pytest.raises(ConfigError, match=problem):
            json_schema([""], ["1"], [None], schema=json.loads(label))
