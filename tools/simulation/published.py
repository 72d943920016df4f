"""Published measurements on a profile's machine, from the field `published` of the profile's file."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from outrider.protocol.errors import InvalidRequest
from tools.simulation.profile import Amount, Count


class Published(msgspec.Struct, frozen=True):
    """Tokens per second, the K of SD and of SSD, and the number of branches."""

    ar: Amount
    sd: Amount
    ssd: Amount
    sd_depth: Count
    ssd_depth: Count
    branches: Count

    @classmethod
    def read(cls, profile: Path) -> Published | None:
        """Returns the measurements in a profile's file, which `Profile.read` accepts; None if it has none.

        Raises:
            InvalidRequest: a number is missing or out of range.
        """
        given = json.loads(profile.read_text(encoding="utf-8")).get("published")
        try:
            return msgspec.convert(given, cls | None)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"published in {profile} can't be used: {error}; see docs/simulation.md") from error
