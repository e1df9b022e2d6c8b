"""Make the link that signs a browser in at our Prefect server. Imports no web framework: `rlhf status` prints it."""

from __future__ import annotations

import base64

SIGN_IN = "/sign-in"


def sign_in_link(url: str, auth: str) -> str:
    """Return the address that signs a browser in at the server of `url`; anyone who reads it can sign in.

    >>> sign_in_link("http://127.0.0.1:4200", "me:word")
    'http://127.0.0.1:4200/sign-in#bWU6d29yZA=='
    """
    return f"{url}{SIGN_IN}#{basic(auth)}"


def basic(auth: str) -> str:
    """Return an auth string encoded for the header `Authorization: Basic`."""
    return base64.b64encode(auth.encode()).decode()
