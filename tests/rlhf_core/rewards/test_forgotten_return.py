from pathlib import Path

import pytest

from rlhf_core.rewards.batches import BatchFailed
from rlhf_core.rewards.isolation import IsolatedReward
from rlhf_core.user_code.modules import load_callable
from tests.rlhf_core.rewards.test_protocols import scored
from tests.support.workshop import generation

HEAD = "import functools, helpers\nfrom helpers import *\n"
HELPERS = """
def some(text):
    if text == "b":
        return 1.0

def looped(text):
    for letter in text:
        if letter == "b":
            return 1.0

def tried(text):
    try:
        return float(text)
    except ValueError:
        print(text)

def never(text):
    len(text)

def logged(text):
    print(text)
"""


def reward_in(folder: Path, code: str) -> Path:
    (folder / "helpers.py").write_text(HELPERS)
    (folder / "mine.py").write_text(HEAD + code)
    return folder / "mine.py"


@pytest.mark.parametrize(
    ("code", "place"),
    [
        ("def f(completions): return [some(one) for one in completions]", r"some \(helpers.py, line 2\)"),
        ("def f(completions): return [helpers.looped(one) for one in completions]", r"looped \(helpers.py, line 6\)"),
        ("def f(completions): return list(map(tried, completions))", r"tried \(helpers.py, line 11\)"),
        ("def f(completions): return [never(one) for one in completions]", r"never \(helpers.py, line 17\)"),
        ("async def g(text):\n    if text == 'b': return 1.0\nasync def f(completions): return [await g(one) for one in completions]",
         r"g \(mine.py, line 3\)"),
        (("def f(completions):\n    def one(text):\n        match text:\n            case 'b': return 1.0\n"
         "    return [one(text) for text in completions]"), r"one \(mine.py, line 4\)"),
        (("class F:\n    def __call__(self, completions): return [self.one(text) for text in completions]\n"
         "    def one(self, text):\n        while text != 'a': return 1.0\nf = F()"), r"one \(mine.py, line 5\)"),
        ("def g(completions, unit): return [some(one) for one in completions]\nf = functools.partial(g, unit=1)",
         r"some \(helpers.py, line 2\)"),
        ("@functools.lru_cache\ndef g(text):\n    if text == 'b': return 1.0\ndef f(completions): return [*map(g, completions)]",
         r"g \(mine.py, line 4\)"),
        (("def timed(g):\n    @functools.wraps(g)\n    def wrapper(text):\n        g(text)\n    return wrapper\n"
         "@timed\ndef g(text): return 1.0\ndef f(completions): return [g(one) for one in completions]"), r"wrapper \(mine.py, line 5\)"),
        (("def timed(g):\n    def inner(text): g(text)\n    return inner\n"
         "@timed\ndef g(text): return 1.0\ndef f(completions): return [g(one) for one in completions]"), r"inner \(mine.py, line 4\)"),
        (("class Rules:\n    @staticmethod\n    def one(text):\n        if text == 'b': return 1.0\n"
         "def f(completions): return [Rules.one(text) for text in completions]"), r"one \(mine.py, line 5\)"),
        (("class Base:\n    def one(self, text):\n        if text == 'b': return 1.0\nclass F(Base):\n"
         "    def __call__(self, completions): return [self.one(text) for text in completions]\nf = F()"), r"one \(mine.py, line 4\)"),
        (("class Rules:\n    def one(self, text):\n        if text == 'b': return 1.0\nRULES = Rules()\n"
         "def f(completions): return [RULES.one(text) for text in completions]"), r"one \(mine.py, line 4\)"),
        (("import contextlib\ndef g(text):\n    with contextlib.suppress(ValueError):\n        return float(text)\n"
         "def f(completions): return [g(text) for text in completions]"), r"g \(mine.py, line 4\)"),
    ],
)  # fmt: skip
def test_a_function_that_can_end_without_return_is_named_where_an_answer_has_no_reward(tmp_path, code, place):
    function = load_callable("function", f"{reward_in(tmp_path, code)}:f")
    with pytest.raises(ValueError, match=rf"returned None for [12] of 2 answers, and {place} can end without `return`"):
        scored(function, generation("p", "a"), generation("q", "b"))


@pytest.mark.parametrize(
    "code",
    [
        "def f(completions): return [1.0 if one == 'b' else None for one in completions]",
        "def g(one):\n    logged(one)\n    if one == 'b': return 1.0\n    return None\ndef f(completions): return [*map(g, completions)]",
        "def f(completions): return [{'b': 1.0}.get(one) for one in completions]",
        "import re\ndef f(completions): return [re.match('b', one) and 1.0 for one in completions]",
        (
            "def g(one):\n    if one == 'b': return 1.0\n    else: raise ValueError\n"
            "def f(completions): return [g(one) if one == 'b' else None for one in completions]"
        ),
        (
            "def g(one):\n    while True:\n        if one == 'b': return 1.0\n        return None\n"
            "def f(completions): return [g(one) for one in completions]"
        ),
        (
            "def g(one):\n    for letter in one:\n        if letter == 'b': return 1.0\n    else:\n        return None\n"
            "def f(completions): return [g(one) for one in completions]"
        ),
        (
            "def g(one):\n    while 1:\n        for letter in one:\n            break\n        return 1.0 if one == 'b' else None\n"
            "def f(completions): return [g(one) for one in completions]"
        ),
        "f = lambda completions: [1.0 if one == 'b' else None for one in completions]",
        (
            "import threading\nLOCK = threading.Lock()\ndef g(one, by={'b': 1.0}, get=lambda table, key: table.get(key)):\n"
            "    with LOCK:\n        try: return get(by, one)\n        finally: pass\n"
            "def f(completions): return [g(one) for one in completions]"
        ),
    ],
)
def test_none_in_so_many_words_says_that_a_reward_does_not_apply(tmp_path, code):
    function = load_callable("function", f"{reward_in(tmp_path, code)}:f")
    assert scored(function, generation("p", "a"), generation("q", "b")).values == (None, 1.0)


def test_the_error_names_the_users_function(tmp_path):
    file = reward_in(tmp_path, "def f(completions): [1.0 for one in completions]\n")
    with (
        IsolatedReward("mine", f"{file}:f", timeout_s=60.0) as reward,
        pytest.raises(BatchFailed, match=rf"(?s)rewards.mine.*{file}:f raised.*does it end without `return`"),
    ):
        reward([generation("p", "a")])
