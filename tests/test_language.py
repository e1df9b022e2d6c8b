"""The language of docstrings and pages: how often habits occur that make sentences hard to read."""

import ast
import re
from collections import Counter
from functools import cache

import pytest

from tests.test_docs import PAGES
from tests.test_house import PACKAGES, ROOT

HABITS = {
    r"\b(those|ones?|that) (that|which|of)\b": 8.0,
    r"\b(what|whatever|whoever|whom)\b": 6.0,
    r"\bof (its|their|our|his) own\b": 1.0,
    r"\bas (it|they) (is|are|was|were)\b": 1.5,
    r"\bgo(es)? on\b": 0.5,
    r"\bthere (is|are) not?\b": 3.0,
    r"\bbeside\b": 1.0,
}
"""Pattern -> how often it may occur in 10,000 words."""
MOST_FIRST = {"Return": 0.15, "Give": 0.1, "Get": 0.1, "Compute": 0.1}
"""First word -> the share of docstrings that may begin with it."""
WORDS_PER_DOCSTRING = (19.9, 24.3)
"""22.1 when this was measured, and a tenth less or more."""


@cache
def docstrings() -> list[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    trees = (ast.parse(path.read_bytes()) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, kinds))
    return [text for node in nodes if (text := ast.get_docstring(node))]


def pages() -> list[str]:
    """The text of the pages without code and addresses."""
    texts = (page.read_text() for page in PAGES if page.name != "CHANGELOG.md")
    return [re.sub(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", " ", text, flags=re.DOTALL) for text in texts]


@pytest.mark.parametrize("pattern", HABITS)
@pytest.mark.parametrize("texts", [docstrings, pages])
def test_habits_are_rare(texts, pattern):
    found = texts()
    count = sum(len(re.findall(pattern, text.lower())) for text in found)
    assert 1e4 * count / sum(len(text.split()) for text in found) <= HABITS[pattern]


def test_docstrings_begin_in_many_ways_and_are_neither_cut_nor_inflated():
    first = Counter(re.split(r"\W", text, maxsplit=1)[0] for text in docstrings())
    total = len(docstrings())
    assert {word: most for word, most in MOST_FIRST.items() if first[word] > most * total} == {}
    least, most = WORDS_PER_DOCSTRING
    assert least <= sum(len(text.split()) for text in docstrings()) / total <= most
