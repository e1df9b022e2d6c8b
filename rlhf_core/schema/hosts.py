"""Check that a text can be the host of an address, so that no client fails on it during a run."""

import ipaddress
import re


def is_host(host: str) -> bool:
    """True for a name of ASCII letters, digits, `-`, `_` and `.`, and for an IP address without a zone.

    >>> [is_host(host) for host in ("judge-1.example", "::1", "xn--bcher-kva.example")]
    [True, True, True]
    >>> [is_host(host) for host in ("h..x", "xn--", "b\u00fccher.example", "fe80::1%eth0", "")]
    [False, False, False, False, False]
    """
    if ":" in host:
        try:
            return ipaddress.IPv6Address(host).scope_id is None
        except ValueError:
            return False
    labels = host.removesuffix(".").split(".")
    return all(re.fullmatch(r"[A-Za-z0-9_-]{1,63}", label) and _decodes(label.lower()) for label in labels)


def _decodes(label: str) -> bool:
    """True unless a label is marked as international and is none."""
    if not label.startswith("xn--"):
        return True
    import idna  # only such names need it

    try:
        idna.decode(label)
    except idna.IDNAError:
        return False
    return True
