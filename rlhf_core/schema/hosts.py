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


def is_server(place: str) -> bool:
    """True for a host with or without a port.

    >>> [is_server(place) for place in ("judge-1.example", "10.0.0.1:80", "[::1]:80")]
    [True, True, True]
    >>> [is_server(place) for place in ("h:0", "h:65536", "x[::1]:80", "10.0.00.1", "1.2.3.400.")]
    [False, False, False, False, False]
    """
    found = re.fullmatch(r"(\[[^]]*:[^]]*\]|[^:[]*)(?::([0-9]{0,5}))?", place)
    if found is None or not is_host(host := found[1].strip("[]")) or not 0 < int(found[2] or 1) < 2**16:
        return False
    last = host.lower().removesuffix(".").rpartition(".")[2]
    if re.fullmatch(r"0x[0-9a-f]*|[0-9]+", last):  # clients take it for an IP address
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
    return True


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
