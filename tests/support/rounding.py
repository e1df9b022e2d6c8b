"""A pytest plugin, `-p tests.support.rounding`: how near each comparison comes to its tolerance, and unkind rounding.

Which kernel a matrix product takes, and so in which order it adds, depends on the processor, the library, the number of
threads and the shape of the batch. A test that compares two batches of different composition for equal bits may pass on
one machine and fail on the next. With `RLHF_TEST_ROUNDING=<units>` the linear layers of this process add an error to
every float32 output: at most `units` x 2^-23 of the sum of the magnitudes of its terms, and one that depends on the shape
of the output alone. Equal batches still give equal bits, and batches of any other shape differ, on every machine.

Every test that compares with a tolerance gets the property `closest`: the largest share of its tolerance that a
comparison of it took. One that is near 1 here is above it on another machine.
"""

import functools
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

VARIABLE = "RLHF_TEST_ROUNDING"
CLOSEST = "closest"
SHOWN = 5
_shares: list[float] = []


# ---------------------------------------------------------------- rounding


def round_by_batch_if_asked() -> None:
    """Change the rounding of linear layers if the environment says so; child processes of tests call it as well."""
    units = int(os.environ.get(VARIABLE, "0"))
    if units:
        torch.nn.functional.linear = _rounded(torch.nn.functional.linear, units)


def _rounded(linear: Callable[..., Tensor], units: int) -> Callable[..., Tensor]:
    @functools.wraps(linear)
    def rounded(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output = linear(input, weight, bias)
        if output.dtype != torch.float32 or output.device.type != "cpu":
            return output
        with torch.no_grad():
            magnitudes = linear(input.abs(), weight.abs())
        return output + magnitudes * _errors(tuple(output.shape), units)

    return rounded


@functools.lru_cache(maxsize=512)
def _errors(shape: tuple[int, ...], units: int) -> Tensor:
    """Return k x 2^-23 for whole k of -units to units: the same for the same shape, in every process."""
    with torch.inference_mode(False):  # what is made in inference mode cannot be used outside of it
        generator = torch.Generator().manual_seed(zlib.crc32(repr(shape).encode()))
        return torch.randint(-units, units + 1, shape, generator=generator) * torch.finfo(torch.float32).eps


# ---------------------------------------------------------------- how near


def pytest_configure(config: pytest.Config) -> None:
    """Begin to watch comparisons."""
    round_by_batch_if_asked()
    _watch_approx()
    _watch_torch()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note the share of its tolerance that the test's closest comparison took."""
    _shares.clear()
    yield
    if _shares:
        item.user_properties.append((CLOSEST, f"{max(_shares):.3f}"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show the tests that came nearest to their tolerances."""
    found = [
        (float(value), report.nodeid)
        for report in terminalreporter.stats.get("passed", [])
        for name, value in report.user_properties
        if name == CLOSEST
    ]
    for share, test in sorted(found, reverse=True)[:SHOWN]:
        terminalreporter.write_line(f"took {share:.0%} of its tolerance: {test}")


def _watch_approx() -> None:
    scalar: Any = type(pytest.approx(1.0))
    compare = scalar.__eq__

    def watched(self: Any, actual: Any) -> bool:
        equal: bool = compare(self, actual)
        if equal and isinstance(actual, int | float) and not isinstance(actual, bool) and self.tolerance:
            _note(abs(self.expected - actual) / self.tolerance)
        return equal

    scalar.__eq__ = watched


def _watch_torch() -> None:
    allclose, isclose = torch.allclose, torch.isclose

    def watched_allclose(one: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, **named: Any) -> bool:
        equal: bool = allclose(one, other, rtol, atol, **named)
        if equal:
            _note(_share(one, other, rtol, atol))
        return equal

    def watched_isclose(one: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, **named: Any) -> Tensor:
        """`torch.testing.assert_close` comes here."""
        close = isclose(one, other, rtol=rtol, atol=atol, **named)
        if bool(close.all()):
            _note(_share(one, other, rtol, atol))
        return close

    torch.allclose, torch.isclose = watched_allclose, watched_isclose


def _share(one: Tensor, other: Tensor, rtol: float, atol: float) -> float:
    """Return max |one - other| / (atol + rtol |other|), 0 where they are equal or one is infinite."""
    one, other = (x.detach().double() for x in (one, other))
    shares = (one - other).abs() / (atol + rtol * other.abs())
    return float(shares[shares.isfinite()].max()) if bool(shares.isfinite().any()) else 0.0


def _note(share: float) -> None:
    if share == share and share > 0:
        _shares.append(share)


def closest(properties: Sequence[tuple[str, str]]) -> float:
    """Return the share that a test's properties tell of, 0 if they do not."""
    return max((float(value) for name, value in properties if name == CLOSEST), default=0.0)
