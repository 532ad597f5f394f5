"""How many examples a property is tried on where every program of a kernel takes the interpreter milliseconds."""

from hypothesis import HealthCheck, settings

# The device is the same for every example, so sharing the fixture is sound.
EXAMPLES = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
