"""The page stands on its own and says what the numbers say."""

import base64
import re
from html.parser import HTMLParser
from typing import Any

from rlhf_core.evaluation.report import Sample, best_policy, render_report


def interval(mean: float, **more: Any) -> dict[str, Any]:
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, **more}


REPORT: dict[str, Any] = {
    "key": "k" * 64,
    "reference": "sft",
    "compared_by": "gold",
    "order": ["sft", "ppo"],
    "policies": {
        "sft": {"digest": "d1", "prompts": 64, "samples": 512, "gold": interval(1.0), "kl": interval(0.0, kind="estimate")},
        "best-of-8 (sft)": {"digest": "d1", "prompts": 64, "samples": 64, "gold": interval(3.0), "kl": interval(1.2, kind="bound")},
        "ppo": {
            "digest": "d2", "prompts": 64, "samples": 128, "gold": interval(2.0), "kl": interval(9.0, kind="estimate"),
            "win_rate": interval(0.7, against="sft", prompts=64),
            "sources": {"sums": {"gold": interval(0.5)}, "desk": {"gold": {"mean": 3.5}}},
        },
    },
    "lineage": [{"label": "sft", "digest": "d" * 64, "parents": ["prepare_data"], "config": {}, "key": "k", "stage": "sft"}],
    "settings": {"level": 0.95},
}  # fmt: skip
SAMPLES = [Sample("<script>alert(1)</script>", (("sft", "a < b", {"gold": 1.0}), ("ppo", "good", {"gold": 2.0})))]


def page() -> str:
    return render_report(
        REPORT,
        title="Evaluation",
        figures=[("Reward against distance", b"png")],
        samples=SAMPLES,
        colors={name: f"#{place}" for place, name in enumerate(REPORT["policies"])},
    )


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]


def test_the_page_asks_the_network_for_nothing_and_adapts_to_phones_and_the_dark():
    assert 'name="viewport" content="width=device-width' in page() and "prefers-color-scheme: dark" in page()
    links = Links()
    links.feed(page())
    assert links.sources == ["data:image/png;base64," + base64.b64encode(b"png").decode()]
    assert not {"script", "link", "iframe"} & set(links.tags)
    assert not re.search(r"https?://|url\(|@import", page())


def test_a_policy_has_one_color_in_tables_and_samples():
    of_ppo = re.findall(r'style="background:(#\d)"></i>ppo<', page())
    assert of_ppo == ["#2"] * 4  # three tables and a sample
    assert page().count("background:#2") == 6  # and the two parts of its bar


def test_policies_are_compared_by_source_too():
    (table,) = re.findall(r"<h2>By source: gold reward</h2>.*?</table>", page(), re.DOTALL)
    assert re.findall(r">(sums|desk)</th>", table) == ["sums", "desk"]
    assert re.findall(r"<td><span>(.*?)</span>", table) == ["0.500", "3.500"] and "0.400 … 0.600" in table


def test_text_of_prompts_and_answers_is_escaped():
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page()
    assert "a &lt; b" in page()


def test_the_table_shows_means_intervals_bounds_and_gaps():
    text = page()
    assert '2.000</span><span class="range">1.900 … 2.100' in text
    assert "≤ 1.20" in text
    assert '<span class="up">70.0%</span><span class="range">60.0% … 80.0% vs sft' in text  # surely above one half
    assert "<td><span>–</span></td>" in text  # sft has no win rate


def test_the_best_policy_is_no_best_of_n_row_and_the_best_answer_is_marked():
    assert best_policy(REPORT) == "ppo"
    assert '<div class="value">ppo</div>' in page()
    assert re.findall(r'class="answer( top)?"', page()) == ["", " top"]
