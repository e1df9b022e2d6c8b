"""The site's pages: each is in the navigation, and the reference has every setting with its type, default and meaning."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs import generate_reference
from docs.generate_reference import pages
from tests.test_docs import anchors

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def reference() -> dict[str, str]:
    return pages()


def listed(entry: Any) -> list[str]:
    """Return the pages below an entry of the navigation."""
    if isinstance(entry, str):
        return [entry]
    inner = entry.values() if isinstance(entry, dict) else entry
    return [page for one in inner for page in listed(one)]


def test_every_page_is_in_the_navigation_once_and_every_entry_is_a_page() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    written |= {f"reference/{name}.md" for name in (*generate_reference.site_pages(), "walk")}
    assert sorted(listed(site["nav"])) == sorted(written)


def test_former_addresses_lead_to_pages_and_are_none() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    pages_now = set(listed(site["nav"]))
    (former,) = [plugin["redirects"]["redirect_maps"] for plugin in site["plugins"] if "redirects" in plugin]
    assert len(former) > 10 and not pages_now & set(former)
    targets = {page: page.partition("#")[2] for page in former.values()}
    assert {page.partition("#")[0] for page in targets} <= pages_now
    for page, anchor in targets.items():
        kept = ROOT / "docs" / page.partition("#")[0]
        assert not anchor or anchor in anchors(kept), page


def test_the_reference_has_a_row_for_every_key(reference: dict[str, str]) -> None:
    """A key of each kind: with bounds, of a table with changed defaults, of a union, operational, and of the top level."""
    assert (
        "| `coef` | float, >= 0 | `0.05` | yes | Weight of the KL divergence from the reference."
        in (reference["shared_tables"])
    )
    assert "| `loop` | [LoopConfig](shared_tables.md#loopconfig) | `{epochs = 2}` | yes |" in reference["sft"]
    assert "[GAEAdvantage](shared_tables.md#gaeadvantage) or [Rei" in reference["ppo"]
    assert "| `table_every` | integer, >= 1 | `10` | no |" in reference["ppo"]
    assert "| [`ppo`](ppo.md) | [PPOSection](ppo.md#pposection) | none |" in reference["index"]


def test_every_table_stands_once_with_all_of_its_keys(reference: dict[str, str]) -> None:
    tables = generate_reference.PipelineConfig.model_json_schema()["$defs"]
    sections = [part for text in reference.values() for part in re.split(r"^## ", text, flags=re.M)[1:]]
    found = sorted((part.splitlines()[0], sorted(re.findall(r"^\| `(\w+)` \|", part, flags=re.M))) for part in sections)
    expected = sorted(
        (generate_reference.class_name(name), sorted(table["properties"] if "properties" in table else []))
        for name, table in tables.items()
    )
    assert found == expected


def test_links_of_the_reference_lead_to_tables(reference: dict[str, str]) -> None:
    anchors = {
        (name, heading.lower()) for name, text in reference.items() for heading in re.findall(r"^## (\w+)", text, re.M)
    }
    for name, text in reference.items():
        for page, anchor in re.findall(r"\]\((?:(\w+)\.md)?#(\w+)\)", text):
            assert (page or name, anchor) in anchors


@pytest.mark.parametrize("module", ["agents", "data", "loop", "rewards"])
def test_every_field_is_described_by_a_whole_phrase(module: str) -> None:
    """Forms show it alone: it begins with a capital letter or code, is no "Of the intervals.", and ends with a full stop."""
    fragments = []
    for name, table in generate_reference.classes().items():
        if table.__module__ != f"rlhf_core.config.{module}" or "__" in name or name in NAMES_OF_COLUMNS:
            continue
        properties = table.model_json_schema()["properties"] if table.model_fields else {}
        for key, field in properties.items():
            text = field["description"] if "description" in field else ""
            if key != "type" and not re.fullmatch(r"(?!Of |Which |Whose )[A-Z`].*\.", text, flags=re.DOTALL):
                fragments.append(f"{name}.{key}: {text}")
    assert fragments == []


NAMES_OF_COLUMNS = ("Columns",)
"""Tables whose keys are described by the docstring of the class."""
