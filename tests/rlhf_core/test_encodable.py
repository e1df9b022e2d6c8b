from __future__ import annotations

import json

from rlhf_core.encodable import encodable


def test_halves_of_surrogate_pairs_become_question_marks_and_the_rest_stays() -> None:
    assert encodable(json.loads('"a\\ud83d\\u00e9"')) == "a?\u00e9"
    assert encodable("\U0001f600 whole") == "\U0001f600 whole"
    assert encodable("") == ""
