"""Whether a fleet has hosts for what a plan asks of them: told at once, for Ray would wait for such a host for ever.

Compares what is asked with what each host offers as a whole; what is in use there does not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.fleet.hosts import Resources
from outrider.fleet.plan import Placed
from outrider.protocol.errors import InvalidRequest

Offers = Mapping[str, float]
"""A host's resources by Ray's names."""
BETTER = "expected `outrider fleet join` on a host that does, or to ask for less"


def check_fits(placed: Placed, hosts: Sequence[Offers]) -> None:
    """Raises InvalidRequest where not even one engine would find its place."""
    engine, drafter = placed.bundle(), placed.drafter
    engines = _with(engine, hosts)
    if not engines:
        raise InvalidRequest(f"placed needs {engine}, and no host of the fleet offers that; {BETTER}")
    if drafter.on != "other-host":
        return
    drafters = _with(drafter.needs, hosts)
    if not drafters or engines == drafters == engines[:1]:
        raise InvalidRequest(
            f"placed.drafter on other-host needs {drafter.needs}, and no host beside the engine's offers that; {BETTER}"
        )


def _with(needs: Resources, hosts: Sequence[Offers]) -> list[int]:
    """Which hosts offer that."""
    asked = needs.as_ray()
    return [n for n, offers in enumerate(hosts) if all(offers.get(name, 0) >= many for name, many in asked.items())]
