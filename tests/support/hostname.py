"""A process on a machine whose name leads to an address that others reach, as names mostly do."""

import ctypes
import socket

import psutil

NEW_UTS, NEW_USER = 0x04000000, 0x10000000
"""`CLONE_NEWUTS` and `CLONE_NEWUSER` of unshare(2)."""


def reachable_address() -> str:
    """Return an address of this machine that others reach, "" if it has none."""
    places = [place for interface in psutil.net_if_addrs().values() for place in interface]
    found = [place.address for place in places if place.family == socket.AF_INET]
    return next((address for address in found if not address.startswith("127.")), "")


def rename(name: str) -> bool:
    """Give this process, which must have no threads yet, a host name of its own; return whether that is permitted."""
    libc = ctypes.CDLL(None)
    if not name or (libc.unshare(NEW_UTS) and libc.unshare(NEW_USER | NEW_UTS)):
        return False
    socket.sethostname(name)
    return True


def listening() -> list[str]:
    """Return the addresses on which this process listens."""
    found = psutil.Process().net_connections("inet")
    return sorted({one.laddr.ip.removeprefix("::ffff:") for one in found if one.status == psutil.CONN_LISTEN})
