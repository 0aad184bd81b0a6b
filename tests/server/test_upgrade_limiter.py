"""Tests of how often an address may make an upgrade without a credential."""

from __future__ import annotations

import json

import pytest
from starlette.datastructures import Headers

from inferencecenter.server.handshake import TrustedProxies
from inferencecenter.server.upgrade_limiter import BURST_S, REFUSAL, UpgradeLimiter
from inferencecenter.telemetry.metrics import DaemonMetrics

STRANGER = Headers({"host": "box"})
HERE, ELSEWHERE = "192.0.2.1", "192.0.2.2"
PER_S = 2


class Clock:
    """Seconds that a test moves."""

    now_s = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


def make(clock: Clock, *, proxies: tuple[str, ...] = ()) -> UpgradeLimiter:
    """Return a door at which nothing has happened."""
    return UpgradeLimiter(TrustedProxies(proxies), per_s=PER_S, clock=clock, metrics=DaemonMetrics())


def crowded(clock: Clock, *, proxies: tuple[str, ...] = ()) -> UpgradeLimiter:
    """Return a door at which strangers from one address have made all the upgrades that they may make."""
    door = make(clock, proxies=proxies)
    for _ in range(PER_S * BURST_S):
        assert door.refusal(HERE, STRANGER) is None
    return door


def test_an_address_that_makes_too_many_is_refused() -> None:
    """Its own upgrades are, and nobody else's; with time it regains some, and never more than at first."""
    clock = Clock()
    door = crowded(clock)
    assert door.refusal(HERE, STRANGER) == REFUSAL
    assert door.refusal(ELSEWHERE, STRANGER) is None
    clock.now_s += 1
    assert [door.refusal(HERE, STRANGER) for _ in range(3)] == [None, None, REFUSAL]
    clock.now_s += 3600
    assert sum(door.refusal(HERE, STRANGER) is None for _ in range(100)) == PER_S * BURST_S


def test_a_refusal_is_an_answer_that_programs_know() -> None:
    """It says when to come again, in its head and in the fields that every error has."""
    head, _, body = REFUSAL.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "HTTP/1.1 429 Too Many Requests"
    assert {"retry-after: 1", "connection: close", f"content-length: {len(body)}"} <= set(lines)
    told = json.loads(body)
    assert (told["code"], told["retryable"], told["retry_after_ms"]) == ("rate_limited", True, 1000)


def test_who_authenticates_is_not_counted() -> None:
    """Thousands of one address come in, one after the other; its strangers have what they had."""
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
def test_an_upgrade_with_a_credential_is_judged_by_that(credential: dict[str, str]) -> None:
    """It is let through where strangers are refused, and takes nothing from them."""
    door = crowded(Clock())
    assert door.refusal(HERE, Headers(credential)) is None
    other = make(Clock())
    for _ in range(100):
        assert other.refusal(HERE, Headers(credential)) is None
    assert other.refusal(HERE, STRANGER) is None


@pytest.mark.parametrize("half", [{"authorization": "Basic x"}, {"x-api-key": "k"}, {"sec-websocket-protocol": "x"}])
def test_half_a_credential_is_none(half: dict[str, str]) -> None:
    """What nobody can check lets nobody past."""
    assert crowded(Clock()).refusal(HERE, Headers(half)) == REFUSAL


def test_behind_a_trusted_proxy_the_forwarded_address_counts() -> None:
    """One visitor's flood refuses that visitor; what an untrusted peer forwards means nothing."""
    proxied = crowded(Clock(), proxies=(HERE,))
    assert proxied.refusal(HERE, STRANGER) == REFUSAL
    assert proxied.refusal(HERE, Headers({"x-forwarded-for": ELSEWHERE})) is None
    assert crowded(Clock()).refusal(HERE, Headers({"x-forwarded-for": ELSEWHERE})) == REFUSAL
