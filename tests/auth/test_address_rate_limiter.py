"""The rate limit of login attempts by address."""

from __future__ import annotations

from inferencecenter.auth.rate_limits import AddressRateLimiter


class Clock:
    """Seconds that a test advances."""

    now_s = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


def exhausted(clock: Clock, address: str) -> AddressRateLimiter:
    """Return a limiter of which ``address`` has used all six attempts."""
    attempts = AddressRateLimiter(at_once=6, per_s=0.1, clock=clock)
    for _ in range(6):
        assert attempts.retry_after_ms(address) is None
        attempts.count(address)
    return attempts


def test_exhausted_address_waits() -> None:
    """It waits until one attempt is refilled."""
    attempts = exhausted(Clock(), "192.0.2.1")
    assert attempts.retry_after_ms("192.0.2.1") == 10_000


def test_attempts_refill_up_to_the_limit() -> None:
    """One attempt is refilled every ten seconds, and after an hour all are available."""
    clock = Clock()
    attempts = exhausted(clock, "192.0.2.1")
    clock.now_s = 10.0
    assert attempts.retry_after_ms("192.0.2.1") is None
    attempts.count("192.0.2.1")
    assert attempts.retry_after_ms("192.0.2.1") == 10_000
    clock.now_s = 3600.0
    for _ in range(6):
        assert attempts.retry_after_ms("192.0.2.1") is None
        attempts.count("192.0.2.1")
    assert attempts.retry_after_ms("192.0.2.1") == 10_000


def test_addresses_have_separate_limits() -> None:
    """Failures of one do not lock out another."""
    assert exhausted(Clock(), "192.0.2.1").retry_after_ms("192.0.2.2") is None


def test_ipv6_subscriber_counts_as_one_address() -> None:
    """A /64 shares its attempts, and a mapped IPv4 address is that address."""
    attempts = exhausted(Clock(), "2001:db8::1")
    assert attempts.retry_after_ms("2001:db8::ffff:2") == 10_000
    assert attempts.retry_after_ms("2001:db8:0:1::1") is None
    assert exhausted(Clock(), "::ffff:192.0.2.1").retry_after_ms("192.0.2.1") == 10_000


def test_memory_is_bounded() -> None:
    """New addresses evict the oldest."""
    attempts = AddressRateLimiter(at_once=1, per_s=1 / 60, clock=Clock())
    attempts.count("oldest")
    for number in range(10_000):
        attempts.count(f"address {number}")
    assert attempts.retry_after_ms("oldest") is None
    assert attempts.retry_after_ms("address 9999") == 60_000
