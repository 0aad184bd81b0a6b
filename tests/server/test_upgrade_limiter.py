"""The rate limit of upgrades without a credential."""

from __future__ import annotations

import json

import pytest
from starlette.datastructures import Headers

from inferencecenter.server.connection_limits import BURST_S, REFUSAL, UpgradeLimiter
from inferencecenter.server.handshake import TrustedProxies
from inferencecenter.telemetry.metrics import DaemonMetrics

STRANGER = Headers({"host": "box"})
HERE, ELSEWHERE = "192.0.2.1", "192.0.2.2"
PER_S = 2


class Clock:
    """A clock that a test advances."""

    now_s = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


def make(clock: Clock, *, proxies: tuple[str, ...] = ()) -> UpgradeLimiter:
    """Return a fresh limiter."""
    return UpgradeLimiter(TrustedProxies(proxies), per_s=PER_S, clock=clock, metrics=DaemonMetrics())


def exhausted(clock: Clock, *, proxies: tuple[str, ...] = ()) -> UpgradeLimiter:
    """Return a limiter with one address at its limit."""
    door = make(clock, proxies=proxies)
    for _ in range(PER_S * BURST_S):
        assert door.refusal(HERE, STRANGER) is None
    return door


def test_address_over_the_limit_is_refused() -> None:
    """Other addresses are not; tokens refill with time, up to the burst."""
    clock = Clock()
    door = exhausted(clock)
    assert door.refusal(HERE, STRANGER) == REFUSAL
    assert door.refusal(ELSEWHERE, STRANGER) is None
    clock.now_s += 1
    assert [door.refusal(HERE, STRANGER) for _ in range(3)] == [None, None, REFUSAL]
    clock.now_s += 3600
    assert sum(door.refusal(HERE, STRANGER) is None for _ in range(100)) == PER_S * BURST_S


def test_refusal_has_retry_after() -> None:
    """The head and the error have it."""
    head, _, body = REFUSAL.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "HTTP/1.1 429 Too Many Requests"
    assert {"retry-after: 1", "connection: close", f"content-length: {len(body)}"} <= set(lines)
    told = json.loads(body)
    assert (told["code"], told["retryable"], told["retry_after_ms"]) == ("rate_limited", True, 1000)


def test_authenticated_upgrades_are_not_counted() -> None:
    """Thousands of one address succeed, and its budget is unchanged."""
    door = make(Clock())
    for _ in range(10 * PER_S * BURST_S):
        assert door.refusal(HERE, STRANGER) is None
        door.give_back(HERE)
    assert sum(door.refusal(HERE, STRANGER) is None for _ in range(100)) == PER_S * BURST_S


@pytest.mark.parametrize(
    "credential",
    [
        {"authorization": "Bearer ic_1_2"},
        {"x-client-id": "ada", "x-api-key": "k"},
        {"sec-websocket-protocol": "inferencecenter.v1, token.ic_1_2"},
    ],
)
def test_upgrade_with_a_credential_bypasses_the_limit(credential: dict[str, str]) -> None:
    """It uses none of the address's budget."""
    door = exhausted(Clock())
    assert door.refusal(HERE, Headers(credential)) is None
    other = make(Clock())
    for _ in range(100):
        assert other.refusal(HERE, Headers(credential)) is None
    assert other.refusal(HERE, STRANGER) is None


@pytest.mark.parametrize(
    "half", [{"authorization": "Basic x"}, {"x-client-id": "ada"}, {"sec-websocket-protocol": "x"}]
)
def test_incomplete_credential_counts_as_none(half: dict[str, str]) -> None:
    """It cannot be verified."""
    assert exhausted(Clock()).refusal(HERE, Headers(half)) == REFUSAL


def test_forwarded_address_is_limited_behind_a_trusted_proxy() -> None:
    """Headers of an untrusted peer are ignored."""
    proxied = exhausted(Clock(), proxies=(HERE,))
    assert proxied.refusal(HERE, STRANGER) == REFUSAL
    assert proxied.refusal(HERE, Headers({"x-forwarded-for": ELSEWHERE})) is None
    assert exhausted(Clock()).refusal(HERE, Headers({"x-forwarded-for": ELSEWHERE})) == REFUSAL
