import pytest

from pipelines.cli.main import main

SOURCE = '''
def exact(prompts, completions, labels, level=0, **columns):
    return {"rewards": [float(text == label) for text, label in zip(completions, labels)], "extra_logs": {"size": [len(t) for t in completions]}}

def columns(completions, level, prompts, **others):
    return [level * len(text) + len(prompt) for text, prompt in zip(completions, prompts)] if isinstance(level, int) else [l * 2 for l in level]

def forgets(completions, **columns):
    if completions == ["long"]:
        return [1.0]

def skips(completions, **columns):
    return [None]

def nan(completions, **columns):
    return [float("nan")]

def raises(completions, **columns):
    print("noise")
    return [1 / 0]

def parameters(first, second):
    return [1.0]

def plain(completions):
    return [1.0]

def hangs(completions, **columns):
    while True:
        pass
'''  # fmt: skip


@pytest.fixture
def functions(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    return tmp_path / "mine.py"


@pytest.mark.parametrize(
    ("function", "arguments", "lines"),
    [
        ("{file}:exact", ["4", "5", "--column", "label=4"], ["reward 1  '4'", "reward 0  '5'", "size 1"]),
        ("{file}:columns", ["abc", "--column", "level=3"], ["reward 6  'abc'"]),
        ("{file}:skips", ["4"], ["reward None  '4': does not apply; a run leaves out an answer without any reward"]),
        ("rlhf_core.rewards.verifiable:final_number", ["it is 7", "--column", "label=7"], ["reward 1  'it is 7'"]),
        (
            "rlhf_core.rewards.library.text:regex_match",
            ["x7", "--column", "label=7", "--arguments", '{{"pattern": "[a-z]{{label}}"}}'],
            ["reward 1  'x7'"],
        ),
    ],
)
def test_the_reward_of_answers_is_printed_with_logs_and_seconds(function, arguments, lines, functions, capsys):
    assert main(["try-reward", *(one.format(file=functions, label="{label}") for one in (function, *arguments))]) == 0
    *said, last = capsys.readouterr().out.splitlines()
    assert said == lines and " s; " in last


@pytest.mark.parametrize(
    ("function", "arguments", "error"),
    [
        ("forgets", [], "rewards.forgets = 'prompts try-reward to try-reward': {file}:forgets raised:\nTraceback"),
        ("nan", [], "rewards.nan[prompt try-reward] = nan: must be finite and within +-1e+06; fix the reward"),
        ("raises", [], "ZeroDivisionError: division by zero"),
        ("parameters", [], "rewards.parameters.function = '(first, second)': the names of its parameters match no protocol"),
        ("hangs", ["--timeout-s", "1"], "took longer than 1 s for 1 generations"),
        ("exactt", [], "did you mean exact?"),
        ("plain", ["--arguments", '{"levle": 1}'], "rewards.plain.arguments.levle = 1: is not a parameter") ,
        ("exact", ["--arguments", "3"], "--arguments = '3': is not a JSON object"),
        ("exact", ["--column", "label"], "--column = 'label': must read KEY=VALUE"),
        ("exact", ["--column", "label=1", "--column", "label=2"], "--column = 'label=2': label is given twice"),
        ("exact", ["--column", "label=1", "--column", "level=2"], "--column = ['label=1', 'level=2']: label=TEXT is the whole label"),
        ("", [], "function = '{file}:': must read package.module:function or path/to/file.py:function"),
    ],
)  # fmt: skip
def test_errors_are_those_of_a_run(function, arguments, error, functions, capsys):
    assert main(["try-reward", f"{functions}:{function}", "4", *arguments]) == 2
    assert error.replace("{file}", str(functions)) in capsys.readouterr().err
