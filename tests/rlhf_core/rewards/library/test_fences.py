"""Code fences: which one is the program, or the JSON, of an answer."""

import re

import pytest

from rlhf_contrib.sandbox.code import read_program
from rlhf_core.rewards.library.fences import fences, last_fence

PROGRAM = "def f(x):\n    return x + 1\n"


@pytest.mark.parametrize(
    "text",
    [
        f"```Python\n{PROGRAM}```",
        f"```python3\n{PROGRAM}```",
        f"``` PY\n{PROGRAM}```",
        f"```python\n\ufeff{PROGRAM}```",
        f"```{{.python}}\n{PROGRAM}```",
        f"```python title='a.py'\n{PROGRAM}```",
        f"```python:main.py\n{PROGRAM}```",
        f"```Python 3.11\n{PROGRAM}```",
        f"~~~python\n{PROGRAM}~~~",
        f"````python\n{PROGRAM}````",
        f"The program is ```python\n{PROGRAM}```",
        f"```python\n{PROGRAM.rstrip()}```",
        f"```python\n{PROGRAM}",
        f"```python\n{PROGRAM}```\nOutput:\n```\n2\n```",
        f"```python\n{PROGRAM}```\n```text\n2\n```",
        f"```bash\npip install x\n```\nThen\n```python\n{PROGRAM}```",
        f"```bash\npip install x\n```\nThen\n```\n{PROGRAM}```",
        f"```python\n{PROGRAM}```".replace("\n", "\r\n"),
        f"```python\n{PROGRAM}```".replace("\n", "\r"),
        f"```python\nf = None\n```\nBetter:\n```py\n{PROGRAM}```",
        "1. So\n\n" + re.sub(r"(?m)^(?=.)", "   ", f"```python\n{PROGRAM}```"),
        re.sub(r"(?m)^(?=.)", "> ", f"```python\n{PROGRAM}```"),
        f"```python\n{PROGRAM}``` Done.",
        f"```python\n{PROGRAM}```.\n\n```\n2\n```",
        f"```python\n{PROGRAM.rstrip()}```\nOutput:\n```\n2\n```",
        f"<think>```python\nf = None\n```</think>\n```python\n{PROGRAM}```",
        f"```bash\npip install x\n```python\n{PROGRAM}```",
        f"````python\n{PROGRAM}```",
        f"```\n{PROGRAM}```\nOutput:\n```\n2\n```",
        f"```\n{PROGRAM}```\nOutput:\n```text\nwell done\n```",
        f"```code\n{PROGRAM}```",
        f"```language-python\n{PROGRAM}```",
        f"```src/main.py\n{PROGRAM}```",
        "- " + re.sub(r"(?m)^(?=.)", "  ", f"```python\n{PROGRAM}```").lstrip(),
        PROGRAM,
    ],
)
def test_the_program_of_an_answer_is_found(text):
    assert read_program(text).strip() == PROGRAM.strip()


@pytest.mark.parametrize("after", ["print(f(1))", "assert f(1) == 2", "# done", ""])
def test_a_program_is_its_functions_with_what_uses_them(after):
    text = f"```python\n{PROGRAM}```\nUsage:\n```python\n{after}\n```"
    used = after if "f(1)" in after else ""
    assert read_program(text).split() == (PROGRAM + used).split()


@pytest.mark.parametrize(
    "last", ["def f(n):\n    return n", "from a import f\nf(1)", "f = 1\nprint(f)", "print(1", "print(n)"]
)
def test_a_program_that_stands_alone_is_not_joined(last):
    first = "n = 1\ndef f(x):\n    return n"
    assert read_program(f"```python\n{first}\n```\nBetter:\n```python\n{last}\n```").strip() == last


def test_a_fence_inside_of_a_longer_one_or_in_a_docstring_is_content():
    inner = '"""Shows\n```\nf(1)\n```\n"""\n'
    assert fences(f"````python\n{inner}````") == [fences(f"````Python\n{inner}````")[0]]
    assert last_fence(fences(f"````python\n{inner}````"), lambda one: one.language == "python") == inner
    indented = PROGRAM.replace("    ", '    """Shows\n    ```\n    f(1)\n    ```\n    """\n    ')
    assert read_program(f"```python\n{indented}```") == indented


def test_a_fence_of_another_language_is_not_the_program():
    for text in ("```text\n2\n```", f"# ~~~ f ~~~\n{PROGRAM}"):
        assert read_program(text) == text
