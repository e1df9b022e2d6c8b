"""Parameters from a file are those that `inspect` finds in the loaded function."""

import inspect

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.user_code.modules import load_callable
from rlhf_core.user_code.signatures import Parameters, loaded_parameters, parameters_of

KNOWN = """
def plain(a, /, b, c=1, *args, d, e: "unknown" = None, **rest): ...
async def waits(completions, labels=()): ...
short = lambda completions, difficulty=0, *, k: [1.0]
"""
HIDDEN = """
import functools, helpers
from helpers import of_helpers
def plain(completions, level): return []
alias = plain
twice = plain
twice = functools.partial(twice, level=1)
partial = functools.partial(plain, level=1)
def decorated(function):
    def inner(completions): return function(completions, 1)
    return inner
@decorated
def changed(completions, level): ...
class Kind:
    def __call__(self, completions, level): ...
instance = Kind()
made = (lambda: plain)()
def rebinds():
    global late
    late = lambda a, b: []
late = lambda a: []
rebinds()
if True:
    def chosen(completions): ...
"""
NAMES = "twice partial changed Kind instance of_helpers made late chosen alias"


def shape(parameters: Parameters | None) -> list[tuple[str, str, bool]] | None:
    """Names, kinds and whether they must be given: defaults are not read."""
    if parameters is None:
        return None
    return [(one.name, one.kind.name, one.default is one.empty) for one in parameters.values()]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helpers.py").write_text("def of_helpers(completions, *, hard): return []\n")
    (tmp_path / "known.py").write_text(KNOWN)
    (tmp_path / "hidden.py").write_text(HIDDEN)
    return tmp_path


@pytest.mark.parametrize("name", ["plain", "waits", "short"])
def test_the_file_tells_what_inspect_finds_in_the_loaded_function(folder, name):
    loaded = inspect.signature(load_callable("function", f"known.py:{name}")).parameters
    assert shape(parameters_of(f"known.py:{name}")) == shape(loaded)


@pytest.mark.parametrize("name", NAMES.split())
def test_what_only_running_the_file_tells_is_not_guessed(folder, name):
    assert parameters_of(f"hidden.py:{name}") is None


@pytest.mark.parametrize(
    "line",
    [
        "plain.__signature__ = None",
        "from helpers import of_helpers as plain",
        "from helpers import *",
        "globals()['plain'] = short",
        "import sys; sys.modules[__name__].plain = short",
        "exec('plain = short')",
    ],
)
def test_a_file_that_changes_its_functions_is_not_believed(folder, line):
    (folder / "known.py").write_text(f"{KNOWN}\n{line}\n")
    assert parameters_of("known.py:plain") is None


def test_a_process_that_loads_a_function_tells_its_parameters(folder):
    wanted = inspect.signature(lambda completions: 0).parameters
    (folder / "hidden.py").write_text(f"print('loud')\n{HIDDEN}")
    assert shape(loaded_parameters("hidden.py:changed")) == shape(wanted)
    (folder / "hidden.py").write_text("globals()['made'] = lambda completions: 0")
    assert parameters_of("hidden.py:made") is None
    assert shape(loaded_parameters("hidden.py:made")) == shape(wanted)
    with pytest.raises(ConfigError, match=r"hidden\.py:mode.*: hidden\.py has no mode; did you mean made"):
        loaded_parameters("hidden.py:mode")
    (folder / "hidden.py").write_text("raise RuntimeError('no GPU')\ndef f(a): ...")
    assert loaded_parameters("hidden.py:f") is None
