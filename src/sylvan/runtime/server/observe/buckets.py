"""Histogram buckets: SGLang's by default, so that its dashboards fit, or the operator's."""

from __future__ import annotations

from collections.abc import Sequence

from sylvan.protocol.errors import ConfigError

TTFT_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
E2E_S = (*TTFT_S, 600, 1200, 1800, 2400)
STAGE_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500),
)
TOKEN_S = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)
LAG_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
TOKENS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000),
    *(10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000),
)
MAX_BUCKETS = 100


def seconds(given: Sequence[float], default: Sequence[float], field: str) -> tuple[float, ...]:
    """Return the buckets of a duration histogram.

    Raises:
        ConfigError: The bounds do not increase, or are not durations.
    """
    return _checked(given, field) if given else tuple(default)


def tokens(given: Sequence[str], field: str) -> tuple[float, ...]:
    """Return the buckets of a length histogram: `default`, `tse MIDDLE BASE COUNT`, `custom N ...`.

    Raises:
        ConfigError: The value has none of these forms.
    """
    match [*given]:
        case [] | ["default"]:
            return tuple(TOKENS)
        case ["tse", *numbers] if len(numbers) == 3:
            middle, base, count = _numbers(numbers, field)
            if base <= 1 or not 1 <= count <= MAX_BUCKETS // 2 or middle <= 0:
                raise ConfigError(f"{field}: tse needs MIDDLE > 0, BASE > 1, COUNT from 1 to 50")
            steps = [base**power for power in range(int(count))]
            below = [middle - step for step in reversed(steps) if middle > step]
            return (*below, middle, *(middle + step for step in steps))
        case ["custom", *numbers] if numbers:
            return _checked(_numbers(numbers, field), field)
        case _:
            forms = "default | tse MIDDLE BASE COUNT | custom N N ..."
            raise ConfigError(f"{field}: expected {forms}, got {' '.join(given)[:80]!r}")


def _numbers(words: Sequence[str], field: str) -> list[float]:
    try:
        return [float(word) for word in words]
    except ValueError as error:
        raise ConfigError(f"{field}: expected numbers, got {' '.join(words)[:80]!r}") from error


def _checked(bounds: Sequence[float], field: str) -> tuple[float, ...]:
    if len(bounds) > MAX_BUCKETS:
        raise ConfigError(f"{field}: at most {MAX_BUCKETS} bounds, got {len(bounds)}")
    if any(low >= high for low, high in zip((0, *bounds), bounds, strict=False)):
        raise ConfigError(f"{field}: bounds must be positive, and each above the one before")
    return tuple(bounds)
