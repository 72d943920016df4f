"""The presets are what their names say, and take changes like the record itself."""

from __future__ import annotations

import pytest

from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams


def test_presets_grow_bolder() -> None:
    temps = [preset().temp for preset in (SamplingParams.greedy, SamplingParams.balanced, SamplingParams.creative)]
    assert temps[0] == 0.0 and temps == sorted(set(temps))


@pytest.mark.parametrize("preset", [SamplingParams.greedy, SamplingParams.balanced, SamplingParams.creative])
def test_presets_take_changes_and_check_them(preset) -> None:
    assert preset(max_tokens=7, seed=3).max_tokens == 7
    assert preset(temp=0.3).temp == 0.3
    with pytest.raises(InvalidRequest, match="top_p is 2"):
        preset(top_p=2)
