"""A plan that needs resources that no host offers is refused before anything is started."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from outrider.fleet.host import Resources
from outrider.fleet.plan import DrafterPlan, Placed, check_fits
from outrider.protocol.errors import InvalidRequest

MAC, LINUX = asdict(Resources(metal=1, ane=1, cpu=8)), asdict(Resources(cpu=64, memory=2**36))
METAL, ANE = Resources(metal=1), Resources(ane=1)


@pytest.mark.parametrize(
    "placed",
    [
        Placed(),
        Placed(needs=Resources(cpu=60, memory="32GiB")),
        Placed(needs=METAL, drafter=DrafterPlan("same-host", ANE)),
        Placed(needs=METAL, drafter=DrafterPlan("other-host", Resources(cpu=4))),
        Placed(replicas=9, needs=METAL),  # engines without a host wait for one that joins later
    ],
)
def test_needs_that_hosts_meet_are_accepted(placed: Placed) -> None:
    check_fits(placed, [LINUX, MAC])


@pytest.mark.parametrize(
    ("placed", "sentence"),
    [
        (Placed(needs=Resources(cuda=1)), "placed needs cuda 1, but no host of the fleet offers that; run"),
        (Placed(needs=Resources(cpu=65)), "placed needs cpu 65"),
        (Placed(needs=METAL, drafter=DrafterPlan("same-host", Resources(cpu=9))), "placed needs metal 1, cpu 9"),
        (
            Placed(needs=METAL, drafter=DrafterPlan("other-host", ANE)),
            "needs ane 1, but no host except the engine's offers",
        ),
        (Placed(drafter=DrafterPlan("other-host", Resources(cuda=1))), "placed.drafter on other-host needs cuda 1"),
    ],
)
def test_needs_that_no_host_meets_are_refused(placed: Placed, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_fits(placed, [LINUX, MAC])
    assert sentence in str(refused.value)
