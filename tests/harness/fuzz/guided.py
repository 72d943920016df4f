"""Fuzzes the codec with coverage guidance (`pip install atheris`, Linux): bytes become frames, and frames messages.

    python -m tests.harness.fuzz.guided -runs=1000000 -max_len=4096

Options are libFuzzer's. Decoded frames must give a message that encodes and decodes to itself; refused frames must
raise a ProtocolError of one line.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import atheris

with atheris.instrument_imports(include=["outrider.protocol"]):
    from outrider.protocol.codec import MESSAGES, decode_all, encode_all, read_request_id
    from outrider.protocol.errors import ProtocolError
    from tests.harness.fuzz.chance import some

LENGTH_BYTES, EACH = 2, 3


def frames_of(data: bytes) -> Iterator[bytes]:
    """Yields frames, each of which begins with its length in the data."""
    while len(data) >= LENGTH_BYTES:
        end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
        yield data[LENGTH_BYTES:end]
        data = data[end:]


def one(data: bytes) -> None:
    frames = list(frames_of(data))
    read_request_id(frames)
    try:
        received = decode_all(frames)
    except ProtocolError as error:
        if not str(error) or "\n" in str(error):
            raise ValueError(f"{error!r} is not a one-line message") from error
        return
    again = [bytes(frame) for frame in encode_all(received)]
    if [bytes(frame) for frame in encode_all(decode_all(again))] != again:
        raise ValueError(f"{received} has two encodings")


def seeds(folder: Path) -> None:
    """Writes a few examples of every message as the fuzzer's corpus."""
    for name in MESSAGES:
        for number in range(EACH):
            frames = [bytes(frame) for frame in encode_all([some(random.Random(f"{name} {number}"), name)])]
            told = b"".join(len(frame).to_bytes(LENGTH_BYTES, "little") + frame for frame in frames)
            (folder / f"{name}-{number}").write_bytes(told)


def main() -> None:
    with TemporaryDirectory() as folder:
        seeds(Path(folder))
        atheris.Setup([*sys.argv, folder], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
