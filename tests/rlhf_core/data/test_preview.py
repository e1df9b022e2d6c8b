"""The preview shows what is trained."""

from __future__ import annotations

from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.tables import Demonstration, Preference, SteppedAnswer, Tables, preview
from rlhf_core.types import Message, Prompt

ASK, SAY, NAY = (Message("user", "1"),), (Message("assistant", "2"),), (Message("assistant", "3"),)


def test_trained_tokens_are_marked_in_every_table(chat: ChatTemplate) -> None:
    tables = Tables(
        (Demonstration("d", ASK + SAY, "s"),),
        (),
        (Preference("p", ASK, SAY, NAY, 0.0, "s"),),
        (),
        (),
        (Prompt("e", ASK, "", "s"),),
    )
    assert preview(tables, chat, rows=3) == (
        "# What the model sees\n\nTrained tokens are inside 【 】.\n\n"
        "## Demonstrations\n\n    <|user|>1<|end|><|assistant|>【2<|end|>】\n\n\n"
        "## Preferences (chosen, then rejected)\n\n"
        "    <|user|>1<|end|><|assistant|>【2<|end|>】\n\n    <|user|>1<|end|><|assistant|>【3<|end|>】\n\n\n"
        "## Evaluation prompts\n\n    <|user|>1<|end|><|assistant|>\n\n"
    )


def test_only_so_many_rows_are_shown(chat: ChatTemplate) -> None:
    tables = Tables(tuple(Demonstration(f"{n}", ASK + SAY, "s") for n in range(5)), (), (), (), (), ())
    assert preview(tables, chat, rows=2).count("【2") == 2


def test_steps_are_shown_with_their_labels(chat: ChatTemplate) -> None:
    row = SteppedAnswer("s", ASK, ("2", "3"), (1.0, 0.25), "s")
    text = preview(Tables((), (), (), (), (), (), steps=(row,)), chat, rows=3)
    assert text.endswith(
        "## Steps (one a line, then the label of each)\n\n"
        "    <|user|>1<|end|><|assistant|>【2\n    3<|end|>】\n\n    labels: 1, 0.25\n\n"
    )
