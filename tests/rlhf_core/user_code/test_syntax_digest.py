"""Words that only people read change no key where they are ours, and every key where they are a user's."""

import ast
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlhf_core.stage.code import module_digests
from rlhf_core.user_code.dependencies import user_code_digest
from rlhf_core.user_code.syntax_digest import digest_without_texts
from stages.select import Threshold
from stages.table import STAGES
from tests.support.toy_stage import ToyConfig, stage_key, toy_spec

END = '''
def added(x):
    """Do this."""
    rule = f"is {x}"
    logger.warning("%s is odd", x)
    raise ValueError(explain("key", x, rule, "mend it"))
'''
REWORDED = (
    END.replace("this", "that").replace("is {x}", "{x} is bad").replace("is odd", "looks odd").replace("mend", "fix")
)
CODE = END.replace("ValueError", "TypeError")
VALUE = END.replace("{x}", "{x + 1}")
REWARD = "rlhf_core.rewards.verifiable:final_number"


@pytest.fixture
def ends(monkeypatch) -> dict[str, str]:
    """Path of a file -> text that it seems to have at its end."""
    read, ends = Path.read_bytes, dict[str, str]()
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + ends.get(str(path), "").encode())
    return ends


def file_of(module: str) -> str:
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    return spec.origin


def digests(ends: dict[str, str], module: str, digest: Callable[[], str]) -> list[str]:
    """The digest with each of the texts above at the end of a module."""
    found = []
    for end in (END, REWORDED, CODE, VALUE):
        ends[file_of(module)] = end
        found.append(digest())
    return found


def test_words_in_the_module_of_a_strict_stage_are_not_in_its_key_and_code_is(ends):
    spec = STAGES["select"].spec(Threshold(minimum=0.0), {}, label="select", seed=0, engines={})
    assert spec.code == "strict"
    for module in (spec.module, "rlhf_core.types"):  # also of a module that it imports
        first, reworded, code, value = digests(ends, module, lambda: stage_key(spec))
        assert reworded == first and len({first, code, value}) == 3
        ends.clear()


def test_words_in_the_module_of_a_reward_of_ours_are_not_in_keys_and_code_is(ends):
    module = REWARD.partition(":")[0]
    first, reworded, code, value = digests(ends, module, lambda: user_code_digest(REWARD))
    assert reworded == first and len({first, code, value}) == 3


def test_words_of_users_count_in_functions_and_in_stages_by_path(ends, tmp_path):
    spec = toy_spec(ToyConfig(), code="strict")  # its module is in none of our packages
    assert len(set(digests(ends, spec.module, lambda: stage_key(spec)))) == 4
    (tmp_path / "mine.py").write_text(END)
    before = user_code_digest(f"{tmp_path}/mine.py:added")
    (tmp_path / "mine.py").write_text(REWORDED)
    assert user_code_digest(f"{tmp_path}/mine.py:added") != before


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('raise XError("a") from e', 'raise XError("b") from e'),
        ('raise XError(f"{x} is {y:.2f}")', 'raise XError(f"got {x}, {y:.2f}")'),
        ('raise XError("a" if x else "b")', 'raise XError("c" if x else "d")'),
        ('raise XError("%s rows" % n + ", ".join(n))', 'raise XError("rows: %s" % n + "; ".join(n))'),
        ('raise XError("{} rows".format(n))', 'raise XError("rows: {}".format(n))'),
        ('def f():\n return DataError("a")', 'def f():\n return DataError("b")'),
        ('assert x, "a"', 'assert x, "b"'),
        ('self._log.info("a", x)', 'self._log.info("b", x)'),
        ('warnings.warn("a", Z)', 'warnings.warn("b", Z)'),
        ('logging.getLogger("a")', 'logging.getLogger("a")  # b'),
        ('def f():\n rule, remedy = "a", "b"\n raise XError(rule, remedy)', 'def f():\n rule, remedy = "c", "d"\n raise XError(rule, remedy)'),
        ('class A:\n "a"\n x = 1\n "b"', 'class A:\n x = 1\n "c"'),
    ],
)  # fmt: skip
def test_messages_and_docstrings_do_not_count(one, other):
    assert digest_without_texts(ast.parse(one)) == digest_without_texts(ast.parse(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('raise XError(f"{x}")', 'raise XError(f"{y}")'),
        ('raise XError(f"{x:.2f}")', 'raise XError(f"{x:.3f}")'),
        ("raise XError(f\"{x['a']}\")", "raise XError(f\"{x['b']}\")"),
        ('raise XError(f"{x}{y}")', 'raise XError(f"{y}{x}")'),
        ('raise XError("a")', 'raise YError("a")'),
        ('raise XError(1, "a")', 'raise XError(2, "a")'),
        ('raise ERRORS["a"]', 'raise ERRORS["b"]'),
        ('raise XError(moved("a"))', 'raise XError(moved("b"))'),  # its result is in the message; its effect is not
        ('math.log("a")', 'math.log("b")'),
        ('raise RequestRefused("busy", "a")', 'raise RequestRefused("mixed", "a")'),  # a code that is answered
        ('raise StopIteration("a")', 'raise StopIteration("b")'),
        ('x = toError("a")', 'x = toError("b")'),
        ('def f():\n class A:\n  kind = "a"\n return A', 'def f():\n class A:\n  kind = "b"\n return A'),
        ('def f():\n mode = "a"\n return locals()', 'def f():\n mode = "b"\n return locals()'),
        ('def f():\n "a"\nprompt = getattr(f, "__doc__")', 'def f():\n "b"\nprompt = getattr(f, "__doc__")'),
        ('logging.getLogger("a")', 'logging.getLogger("b")'),
        ('print("a")', 'print("b")'),
        (
            'def f():\n rule = "a"\n use(rule)\n raise XError(rule)',
            'def f():\n rule = "b"\n use(rule)\n raise XError(rule)',
        ),
        ('def f():\n rule = move("a")\n raise XError(rule)', 'def f():\n rule = move("b")\n raise XError(rule)'),
        (
            'def f():\n rule = "a"\n rule += y\n raise XError(rule)',
            'def f():\n rule = "b"\n rule += y\n raise XError(rule)',
        ),
        ('def f():\n global R\n R = "a"\n raise XError(R)', 'def f():\n global R\n R = "b"\n raise XError(R)'),
        (
            'RULE = "a"\ndef f():\n raise XError(RULE)',
            'RULE = "b"\ndef f():\n raise XError(RULE)',
        ),  # others may import it
        ('def f():\n "a"\nprompt = f.__doc__', 'def f():\n "b"\nprompt = f.__doc__'),
        ('"a"\nprompt = __doc__', '"b"\nprompt = __doc__'),
        ('def f():\n "a"\nprompt = inspect.getdoc(f)', 'def f():\n "b"\nprompt = inspect.getdoc(f)'),
    ],
)
def test_code_counts_and_docstrings_that_a_module_reads(one, other):
    assert digest_without_texts(ast.parse(one)) != digest_without_texts(ast.parse(other))


def test_a_module_has_two_digests_by_whose_it_is(tmp_path, monkeypatch):
    """The cache of analyses knows both."""
    (tmp_path / "whose.py").write_text("def f():\n    'a'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert module_digests("whose") != module_digests("whose", ("whose",))
