"""The codec under a fuzzer that follows its branches (`pip install atheris`, Linux): bytes become frames, and messages.

    python -m tests.harness.fuzz.guided -runs=1000000 -max_len=4096

Options are libFuzzer's. What is decoded must be a message that can be said again and is then the same; what is refused
must be refused by a ProtocolError of one line. The checks that are written out at run time (`protocol.codec`) are
followed as well.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import atheris

with atheris.instrument_imports(include=["outrider.protocol"]):
    from outrider.protocol import codec
    from outrider.protocol.codec import MESSAGES, decode_all, encode_all, loader, request_of
    from outrider.protocol.errors import ProtocolError
    from tests.harness.fuzz.chance import some

LENGTH_BYTES, EACH = 2, 3


def frames_of(data: bytes) -> Iterator[bytes]:
    """Each begins with its length."""
    while len(data) >= LENGTH_BYTES:
        end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
        yield data[LENGTH_BYTES:end]
        data = data[end:]


def one(data: bytes) -> None:
    frames = list(frames_of(data))
    request_of(frames)
    try:
        said = decode_all(frames)
    except ProtocolError as error:
        if not str(error) or "\n" in str(error):
            raise ValueError(f"{error!r} is no sentence") from error
        return
    again = [bytes(frame) for frame in encode_all(said)]
    if [bytes(frame) for frame in encode_all(decode_all(again))] != again:
        raise ValueError(f"{said} is said in two ways")


def seeds(folder: Path) -> None:
    """Every message a few times, for the fuzzer to begin with."""
    for name in MESSAGES:
        for number in range(EACH):
            frames = [bytes(frame) for frame in encode_all([some(random.Random(f"{name} {number}"), name)])]
            told = b"".join(len(frame).to_bytes(LENGTH_BYTES, "little") + frame for frame in frames)
            (folder / f"{name}-{number}").write_bytes(told)


def main() -> None:
    followed = {cls: atheris.instrument_func(loader(cls)) for cls in MESSAGES.values()}
    setattr(codec, "loader", followed.__getitem__)  # noqa: B010
    with TemporaryDirectory() as folder:
        seeds(Path(folder))
        atheris.Setup([*sys.argv, folder], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
