"""Checks of numbers that come from outside: one clear error that names the value and the knob."""

from math import isfinite

from layercheck.errors import ConfigError


def positive(name: str, value: float) -> float:
    """Returns `value`.

    Raises:
        ConfigError: it is not a finite number above 0.
    """
    if not isfinite(value) or value <= 0:
        raise ConfigError(f"{name}={value:g} must be a finite number above 0", **{name: value})
    return value


def not_negative(name: str, value: float) -> float:
    """Returns `value`.

    Raises:
        ConfigError: it is not a finite number of at least 0.
    """
    if not isfinite(value) or value < 0:
        raise ConfigError(f"{name}={value:g} must be a finite number of at least 0", **{name: value})
    return value
