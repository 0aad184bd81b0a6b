"""The running average by which the scheduler follows how fast the machine is."""


def moved(old: float, new: float, *, weight: float) -> float:
    """Return ``old`` moved towards ``new`` by ``weight`` of the way; ``new`` itself when there was nothing before."""
    return old + weight * (new - old) if old else new
