"""A latency profile: measurements of a machine we don't have, in a JSON file (docs/simulation.md lists its fields).

Workers imitate it (`tools.simulation.pace`); this module only reads the numbers.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from outrider.protocol.errors import InvalidRequest
from tools.latency import Latency

PROFILES = Path(__file__).parent / "profiles"
"""The folder of the profiles that come with the project."""

# The beginning of every worker's note that its own times were longer than the profile's.
TIMES_NOT_KEPT = "the times are not the profile's"

Text = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Share = Annotated[float, Meta(ge=0, le=1)]
TimesByRows = Annotated[dict[Count, Amount], Meta(min_length=1)]
"""Milliseconds of a forward by its rows."""


class Published(msgspec.Struct, frozen=True):
    """Published tokens per second, the K of SD and of SSD, and the number of branches."""

    ar: Amount
    sd: Amount
    ssd: Amount
    sd_depth: Count
    ssd_depth: Count
    branches: Count


@dataclass(frozen=True, slots=True)
class Profile:
    """A machine we don't have. `link_ms` is the one-way time of a message to or from its drafter.

    For the replay drafter: `acceptance` by chain position (the last one also holds for all later positions), and
    `bonus_ranks`, the probability that the bonus token is the drafter's candidate 0, 1, ... after its own token was
    rejected. `sources` say where the numbers are from, `notes` how they were derived. `published`: measurements by
    others.
    """

    name: str
    sources: tuple[str, ...]
    target: Latency
    draft: Latency
    link_ms: float
    acceptance: tuple[float, ...]
    bonus_ranks: tuple[float, ...]
    notes: tuple[str, ...] = ()
    published: Published | None = None

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Reads and checks a JSON profile.

        Raises:
            InvalidRequest: the file is missing or not JSON, or a field is missing or out of range.
        """
        try:
            fields = msgspec.convert(json.loads(path.read_text(encoding="utf-8")), _ProfileFile, str_keys=True)
        except OSError as error:
            raise InvalidRequest(f"profile {path} can't be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            raise InvalidRequest(f"profile {path} can't be used: {error}; see docs/simulation.md") from error
        if sum(fields.bonus_ranks) > 1 + 1e-9:
            raise InvalidRequest(
                f"profile {path} can't be used: bonus_ranks add up to {sum(fields.bonus_ranks):g}; expected at most 1"
            )
        given = msgspec.structs.asdict(fields)
        target, draft = (Latency(tuple(sorted(given.pop(name).items()))) for name in ("target_ms", "draft_ms"))
        return cls(target=target, draft=draft, **given)


class _ProfileFile(msgspec.Struct):
    """The fields of the file, with their ranges."""

    name: Text
    sources: tuple[Text, ...]
    target_ms: TimesByRows
    draft_ms: TimesByRows
    link_ms: Amount
    acceptance: Annotated[tuple[Share, ...], Meta(min_length=1)]
    bonus_ranks: tuple[Share, ...]
    notes: tuple[Text, ...] = ()
    published: Published | None = None
