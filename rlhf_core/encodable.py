"""Text that others wrote and that UTF-8 may not hold."""

from __future__ import annotations


def encodable(text: str) -> str:
    """Return `text` with a question mark for each half of a surrogate pair: no tokenizer takes one, and no file.

    JSON may hold halves, so policies, users' programs and servers may say them.

    >>> encodable("caf\u00e9 \\ud83d")
    'caf\u00e9 ?'
    """
    return text.encode(errors="replace").decode()
