"""The mix of several tables: rows drawn by shares, repeated rows, held-out prompts, and the report."""

import json
from pathlib import Path

import pytest
from datasets import Dataset, interleave_datasets
from pydantic import ValidationError

from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.shards import read_generations
from rlhf_core.data.tables import (
    Demonstration,
    Preference,
    read_demonstrations,
    read_preferences,
    read_prompts,
    write_demonstrations,
    write_preferences,
    write_prompts,
)
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import ArtifactRef, DemonstrationsRef, Message, PolicyRef, PreferencesRef, Prompt, PromptsRef
from stages.dpo import DPOConfig
from stages.dpo.run import token_pairs
from stages.generate import GenerateConfig
from stages.mix import MixConfig
from stages.reward_model import RewardModelConfig
from stages.reward_model.run import reward_pairs
from stages.score import ScoreConfig
from stages.select import Pairs
from stages.sft import SFTConfig
from tests.support.workshop import Workshop


def row(prompt: str, source: str, answer: str = "yes") -> Demonstration:
    return Demonstration(f"{prompt}-{answer}", (Message("user", prompt), Message("assistant", answer)), source)


def rows(prefix: str, count: int, source: str) -> list[Demonstration]:
    return [row(f"{prefix}{number}", source) for number in range(count)]


def demonstrations(
    store: ArtifactStore, folder: Path, train: list[Demonstration], held_out: list[Demonstration]
) -> DemonstrationsRef:
    write_demonstrations(folder / "train.parquet", train)
    write_demonstrations(folder / "eval.parquet", held_out)
    return store.external(DemonstrationsRef, folder)


def mixed(store: ArtifactStore, config: MixConfig, **tables: ArtifactRef) -> tuple[Path, dict[str, float]]:
    shop = Workshop(store)
    ref, decision = shop.run("mix", config, {"tables": tables})
    return store.path(ref), shop.metrics(decision)


@pytest.fixture
def two(store, tmp_path):
    return {
        "right": demonstrations(store, tmp_path / "right", rows("r", 6, "sums"), [row("e1", "sums")]),
        "general": demonstrations(
            store, tmp_path / "general", [*rows("g", 10, "desk"), row("e1", "desk", "no")], [row("e2", "desk")]
        ),
    }


def sources(folder: Path, split: str = "train") -> list[str]:
    return [one.source for one in read_demonstrations(folder / f"{split}.parquet")]


def test_without_shares_all_rows_are_taken_and_a_prompt_held_out_anywhere_is_held_out(store, two):
    folder, metrics = mixed(store, MixConfig(), **two)
    assert sources(folder) == ["sums"] * 6 + ["desk"] * 10
    assert sorted(one.id for one in read_demonstrations(folder / "eval.parquet")) == ["e1-no", "e1-yes", "e2-yes"]
    assert (metrics["train"], metrics["eval"], metrics["moved"], metrics["left_out"]) == (16, 3, 1, 0)


def theirs(shares: dict[str, float], stopping_strategy: str) -> list[str]:
    """The sources that `datasets` draws from 6 rows of sums and 10 of desk with the seed of the workshop."""
    tables = [Dataset.from_dict({"source": [name] * count}) for name, count in (("sums", 6), ("desk", 10))]
    found = interleave_datasets(tables, list(shares.values()), seed=17, stopping_strategy=stopping_strategy)
    return list(found["source"])


def test_shares_draw_as_datasets_does_until_the_first_table_is_exhausted(store, two):
    folder, metrics = mixed(store, MixConfig(shares={"right": 3.0, "general": 1.0}), **two)
    found = sources(folder)
    assert found == theirs({"right": 0.75, "general": 0.25}, "first_exhausted") and found.count("sums") == 6
    assert metrics["left_out"] == 16 - len(found) and metrics["repeated"] == 0


def test_shares_repeat_small_tables_until_all_are_exhausted(store, two):
    config = MixConfig(shares={"right": 3.0, "general": 1.0}, stopping_strategy="all_exhausted")
    folder, metrics = mixed(store, config, **two)
    found = read_demonstrations(folder / "train.parquet")
    taken = theirs({"right": 0.75, "general": 0.25}, "all_exhausted")
    assert [one.source for one in found] == taken and taken.count("desk") >= 10
    right, general = taken.count("sums"), taken.count("desk")
    assert metrics["repeated"] == right - 6 + general - 10
    assert len({one.id for one in found}) == len(found)
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert report["tables"]["right"]["sums"] == {"taken": right, "repeated": right - 6, "left_out": 0}
    assert report["tables"]["general"]["desk"] == {"taken": general, "repeated": general - 10, "left_out": 1}


def test_a_mix_that_is_killed_after_its_rows_ends_with_the_same_bytes(store, two, tmp_path, monkeypatch):
    config = MixConfig(shares={"right": 3.0, "general": 1.0}, stopping_strategy="all_exhausted")

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("stages.mix.run.write_json", killed)
        mixed(store, config, **two)
    other = ArtifactStore(tmp_path / "undisturbed")
    same = {name: other.external(DemonstrationsRef, tmp_path / name) for name in two}
    again, expected = mixed(store, config, **two)[0], mixed(other, config, **same)[0]
    for name in ("train.parquet", "eval.parquet", "report.json"):
        assert (again / name).read_bytes() == (expected / name).read_bytes()


def test_sources_are_chosen_and_have_shares(store, two):
    folder, _ = mixed(store, MixConfig(sources=("sums",)), **two)
    assert set(sources(folder)) == {"sums"} and sources(folder, "eval") == ["sums"]
    folder, _ = mixed(store, MixConfig(mixture={"sums": 0.5, "desk": 0.5}), **two)
    assert sources(folder) == theirs({"sums": 0.5, "desk": 0.5}, "first_exhausted")


def test_a_row_of_two_tables_counts_once_unless_both_have_a_share(store, tmp_path):
    same = rows("r", 3, "sums")
    tables = {name: demonstrations(store, tmp_path / name, same, []) for name in ("a", "b")}
    assert mixed(store, MixConfig(), **tables)[1]["train"] == 3
    config = MixConfig(shares={"a": 1.0, "b": 1.0}, stopping_strategy="all_exhausted")
    assert mixed(store, config, **tables)[1]["train"] >= 6


def test_prompts_are_mixed(store, tmp_path):
    tables = {}
    for name, count in (("a", 2), ("b", 4)):
        found = [Prompt(f"{name}{n}", (Message("user", f"{name}{n}"),), "", name) for n in range(count)]
        write_prompts(tmp_path / name, found)
        tables[name] = store.external(PromptsRef, tmp_path / name)
    config = MixConfig(kind="prompts", shares={"a": 0.5, "b": 0.5}, stopping_strategy="all_exhausted")
    folder, _ = mixed(store, config, **tables)
    assert len({one.messages for one in read_prompts(folder)}) == 6


def test_a_table_without_rows_and_with_a_share_is_refused(store, two):
    with pytest.raises(DataError, match=r"sings.*has a share and no training rows"):
        mixed(store, MixConfig(mixture={"sums": 0.5, "sings": 0.5}), **two)


THINKING = (
    "{%- for message in messages -%}{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['role'] == 'assistant' and not enable_thinking -%}{{- 'no thoughts: ' -}}{%- endif -%}"
    "{{- message['content'] + '<|end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}"
    "{%- if not enable_thinking -%}{{- 'no thoughts: ' -}}{%- endif -%}{%- endif -%}"
)
MODES = {
    "chat_template": {"sums": THINKING, "desk": THINKING},
    "chat_template_kwargs": {"sums": {"enable_thinking": True}, "desk": {"enable_thinking": False}},
}


def test_rows_of_two_sources_are_rendered_with_and_without_thoughts(store, two, policy, tmp_path):
    folder, metrics = mixed(store, MixConfig(**MODES), **two)
    assert (metrics["train"], metrics["eval"], metrics["moved"]) == (16, 3, 1), "the settings hold no prompt out"
    chat = ChatTemplate.load(policy)
    texts = {}
    for one in read_demonstrations(folder / "train.parquet"):
        prompt = chat.prompt_text(one.messages[:-1])
        texts.setdefault(one.source, set()).add(prompt.removeprefix(f"<|user|>{one.messages[0].content}<|end|>"))
        (sample,) = chat.examples(one.messages, max_length=64)
        begins = sample.loss_mask.index(1)
        assert sample.token_ids[:begins] == chat.prompt_ids(one.messages[:-1])
        assert chat.decode(sample.token_ids[begins:]) == "yes"
    assert texts == {"sums": {"<|assistant|>"}, "desk": {"<|assistant|>no thoughts: "}}
    again, _ = mixed(store, MixConfig(**MODES), first=store.external(DemonstrationsRef, folder), second=two["general"])
    assert len(read_demonstrations(again / "train.parquet")) == 26, "rows with other settings are other rows"


def test_pairs_of_two_sources_are_trained_on_with_the_template_of_each(store, policy, tmp_path):
    """`sums` has its own template, `desk` the one for tokenizers without any, `rest` that of the model."""
    names = ("sums", "desk", "rest")
    pairs = [
        Preference(f"{name}{n}", *((Message(role, text),) for role, text in turns(f"{name} {n}")), 1.0, name)
        for n in range(4)
        for name in names
    ]
    write_preferences(tmp_path / "pairs" / "train.parquet", pairs[:9])
    write_preferences(tmp_path / "pairs" / "eval.parquet", pairs[9:])
    templates = {
        "chat_template": {"sums": THINKING, "desk": "chatml"},
        "chat_template_kwargs": {"sums": {"enable_thinking": False}},
    }
    config = MixConfig(kind="preferences", **templates)
    shop = Workshop(store)
    table, _ = shop.run("mix", config, {"tables": {"one": store.external(PreferencesRef, tmp_path / "pairs")}})
    rows = read_preferences(store.path(table) / "train.parquet")
    chat = ChatTemplate.load(policy)
    asked = {
        "sums": "<|user|>{}?<|end|><|assistant|>no thoughts: ",
        "desk": "<|user|>\n{}?<|end|>\n<|assistant|>\n",
        "rest": "<|user|>{}?<|end|><|assistant|>",
    }
    judged = reward_pairs(chat, rows, RewardModelConfig(max_length=64))
    for row, (chosen, rejected), one in zip(rows, token_pairs(chat, rows, max_length=64), judged, strict=True):
        prompt = asked[row.source].format(row.prompt[0].content.rstrip("?"))
        for sample, scored, answer in ((chosen, one.pair.chosen_ids, "yes"), (rejected, one.pair.rejected_ids, "no")):
            begins, tokens = sample.loss_mask.index(1), list(sample.until_trained())
            assert chat.tokenizer.decode(tokens[:begins]) == prompt
            assert chat.tokenizer.decode(tokens[begins:]) == f"{answer}<|end|>"
            assert list(scored) == tokens
    base = {"policy": store.external(PolicyRef, policy), "preferences": table}
    _, decision = shop.run("dpo", DPOConfig(max_length=64), {**base, "reference": base["policy"]})
    assert (shop.metrics(decision)["train_pairs"], shop.metrics(decision)["dropped_pairs"]) == (9, 0)
    _, decision = shop.run("reward_model", RewardModelConfig(max_length=64), base)
    assert (shop.metrics(decision)["train_pairs"], shop.metrics(decision)["dropped_pairs"]) == (9, 0)


def turns(question: str) -> tuple[tuple[str, str], ...]:
    return ("user", f"{question}?"), ("assistant", "yes"), ("assistant", "no")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "nemotron_3",
            r"chat_template = '.*yes<\|im_end\|>.*': ends an answer without an end token of the model \(<\|end",
        ),
        (THINKING.replace("message['content']", "''"), "the template does not render the words of the role user"),
    ],
)
def test_a_template_of_a_source_without_words_or_the_models_end_token_is_refused(store, two, policy, template, message):
    """Its rows would be trained on without their words, or left out without a word."""
    folder, _ = mixed(store, MixConfig(chat_template={"desk": template}), **two)
    inputs = {"policy": store.external(PolicyRef, policy), "demonstrations": store.external(DemonstrationsRef, folder)}
    with pytest.raises(ConfigError, match=message):
        Workshop(store).run("sft", SFTConfig(max_length=64), inputs)


def test_prompts_keep_their_settings_through_sampling_and_selection(store, policy, tmp_path):
    write_prompts(tmp_path / "p", [Prompt(f"{n}", (Message("user", f"{n}"),), "", "desk") for n in range(3)])
    config = MixConfig(kind="prompts", **{name: {"desk": values["desk"]} for name, values in MODES.items()})
    shop = Workshop(store)
    prompts, _ = shop.run("mix", config, {"tables": {"one": store.external(PromptsRef, tmp_path / "p")}})
    sampling = {"sampling": {"max_tokens": 4}, "samples_per_prompt": 2}
    base = store.external(PolicyRef, policy)
    answers, _ = shop.run("generate", GenerateConfig(**sampling), {"policy": base, "prompts": prompts})
    chat = ChatTemplate.load(policy)
    for one in read_generations(store.path(answers)):
        assert chat.decode(one.prompt_ids).endswith("no thoughts: ")
    terms = {"one": {"type": "function", "function": "tests.support.token_rewards:small_is_good"}}
    rewards = {"generations": answers, "reward_models": {}}
    scored, _ = shop.run("score", ScoreConfig(rewards={"terms": terms}), rewards)
    pairs, _ = shop.run("select", Pairs(drop_truncated=False, eval_fraction=0.0), {"rollouts": scored})
    for one in read_preferences(store.path(pairs) / "train.parquet"):
        assert chat.prompt_text(one.prompt).endswith("no thoughts: ")


def test_a_variable_that_the_template_does_not_read_is_refused(store, two, policy):
    folder, _ = mixed(store, MixConfig(chat_template_kwargs={"sums": {"enable_thinkin": True}}), **two)
    row = next(one for one in read_demonstrations(folder / "train.parquet") if one.source == "sums")
    with pytest.raises(
        ConfigError, match=r"chat_template_kwargs\.enable_thinkin = True: the chat template reads no such"
    ):
        ChatTemplate.load(policy).prompt_ids(row.messages[:-1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chat_template": {"a": "chatlm"}}, r"chat_template\.a = 'chatlm': is neither .* did you mean chatml\?"),
        (
            {"chat_template_kwargs": {"a": {"thinking": "False"}}},
            r"chat_template_kwargs\.a\s+Value error, thinking = 'False': is text",
        ),
        (
            {"chat_template_kwargs": {"a": {"tools": 1}}},
            r"chat_template_kwargs\.a\s+Value error, tools = 1: is given",
        ),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        MixConfig(**settings)
