"""Parameters from a file are those that `inspect` finds in the loaded function."""

import inspect

import pytest

from rlhf_core.user_code.modules import load_callable
from rlhf_core.user_code.signatures import Parameters, loaded_parameters, parameters_of

HELPERS = """
def of_helpers(completions, *, hard): return []
def own(function): return lambda a, b: []
"""
KNOWN = """
import functools
from functools import partial, wraps
def plain(a, /, b, c=1, *args, d, e: "unknown" = None, **rest): ...
async def waits(completions, labels=()): ...
short = lambda completions, difficulty=0, *, k: [1.0]
alias = plain
annotated: object = lambda a, b: []
bound = functools.partial(plain, 1, c=2)
bound_again = partial(bound, d=3)
bound_lambda = partial(lambda x, y, z: [], y=1)
bound_again_by_name = partial(functools.partial(plain, 1), b=2)
def logged(function):
    'Count calls.'
    print
    @wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    return inner
@logged
def behind(completions, difficulty): ...
@functools.lru_cache(maxsize=4)
def kept(completions, difficulty=2): ...
@functools.wraps(plain)
def looks_like_plain(*args): ...
wrapped_late = logged(short)
class Base:
    def __init__(self, weight, *, scale=1): ...
    def __call__(self, prompts, completions, **columns): ...
class Inherits(Base): ...
class Own(Inherits):
    async def __call__(self, completions, level): ...
class Empty: ...
instance = Base(3)
inherited = Inherits(weight=3)
own = Own(3)
bound_instance = partial(own, level=1)
if True:
    def chosen(completions): ...
"""
UNTOLD = """
import functools, helpers
from helpers import of_helpers
from helpers import own as partial
own_partial = partial(of_helpers)
def plain(completions, level): return []
twice = plain
twice = functools.partial(twice, level=1)
def decorated(function):
    def inner(completions): return function(completions, 1)
    return inner
@decorated
def changed(completions, level): ...
def replaces(function):
    @functools.wraps(function)
    def inner(*args): return function(*args)
    inner = lambda completions: []
    return inner
@replaces
def replaced(completions, level): ...
class Signed:
    import inspect
    __signature__ = inspect.signature(lambda completions: [])
    def __call__(self, completions, level): ...
signed = Signed()
starred = functools.partial(plain, *[[]], **{"level": 1})
made = (lambda: plain)()
of_module = helpers.of_helpers
class Meta(type):
    def __call__(cls, *args): return plain
class Odd(metaclass=Meta):
    def __call__(self, x): ...
odd = Odd()
class New:
    def __new__(cls): return plain
    def __call__(self, x): ...
new = New()
class Static:
    @staticmethod
    def __call__(completions): ...
static = Static()
too_many = functools.partial(lambda a: [], 1, 2)
def rebinds():
    global late
    late = lambda a, b: []
late = lambda a: []
rebinds()
a = plain
b = a
"""


def shape(parameters: Parameters | None) -> list[tuple[str, str, bool]] | None:
    """Names, kinds and whether they must be given: defaults are not read."""
    return (
        None
        if parameters is None
        else [(one.name, one.kind.name, one.default is one.empty) for one in parameters.values()]
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helpers.py").write_text(HELPERS)
    (tmp_path / "known.py").write_text(KNOWN)
    (tmp_path / "untold.py").write_text(UNTOLD)
    return tmp_path


TOLD = """plain waits short alias annotated bound bound_again bound_lambda bound_again_by_name logged behind kept looks_like_plain
wrapped_late Base Inherits Own Empty instance inherited own bound_instance chosen"""
HIDDEN = "twice changed replaced signed own_partial of_helpers starred made of_module odd new static too_many late"


@pytest.mark.parametrize("name", TOLD.split())
def test_the_file_tells_what_inspect_finds_in_the_loaded_function(folder, name):
    loaded = inspect.signature(load_callable("function", f"known.py:{name}")).parameters
    assert shape(parameters_of(f"known.py:{name}")) == shape(loaded)


@pytest.mark.parametrize("name", HIDDEN.split())
def test_what_only_running_the_file_tells_is_not_guessed(folder, name):
    assert parameters_of(f"untold.py:{name}") is None


def test_the_order_of_statements_does_not_matter_for_names_that_are_bound_once(folder):
    assert shape(parameters_of("untold.py:b")) == shape(inspect.signature(lambda completions, level: 0).parameters)


@pytest.mark.parametrize("line", ["plain.__signature__ = None", "plain.__defaults__ = (1,)", "from helpers import *"])
def test_a_file_that_changes_its_functions_is_not_believed(folder, line):
    (folder / "known.py").write_text(f"{KNOWN}\n{line}\n")
    assert parameters_of("known.py:plain") is None


def test_a_process_that_loads_a_function_tells_its_parameters(folder):
    wanted = inspect.signature(lambda completions: 0).parameters
    (folder / "untold.py").write_text(f"print('loud')\n{UNTOLD}")
    assert shape(loaded_parameters("untold.py:changed")) == shape(wanted)
    (folder / "untold.py").write_text("raise RuntimeError('no GPU')\ndef f(a): ...")
    assert loaded_parameters("untold.py:f") is None
