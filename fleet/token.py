"""The fleet's token: whoever has it may run anything on every host, so it lies in a file that only its owner reads."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from outrider.protocol.errors import KeyFault

BYTES = 32
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def default_folder() -> Path:
    """Where a host keeps what it knows of its fleet, unless something else is said."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return home / "outrider" / "fleet"


def token_file(folder: Path) -> Path:
    return folder / "token"


def made_token(folder: Path) -> Path:
    """The file of the token, which is made when there is none. Raises KeyFault when it can't be, or others read it."""
    file = token_file(folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as made:
            made.write(secrets.token_hex(BYTES))
    except FileExistsError:
        return checked_token(folder)
    except OSError as error:
        raise KeyFault(f"{file} can't be written ({error.strerror}); expected a folder of your own") from None
    return file


def checked_token(folder: Path) -> Path:
    """The file of the token that there is. Raises KeyFault when there is none, or others read it."""
    file = token_file(folder)
    try:
        mode = file.stat().st_mode
        empty = not file.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        raise KeyFault(f"there is no token at {file}; expected a copy of the head's file of that name") from None
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFault(f"{file} can't be read ({error}); expected a copy of the head's token") from None
    if mode & _OTHERS:
        raise KeyFault(
            f"{file} can be read by other users (mode {stat.S_IMODE(mode):o}); close it with `chmod"
            f" 600 {file}`, and make a new"
            " token if somebody may have read this one"
        )
    if empty:
        raise KeyFault(f"{file} is empty; expected a copy of the head's token")
    return file
