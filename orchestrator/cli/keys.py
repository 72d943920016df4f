"""Manages the keys for endpoints that other machines reach (docs/security.md)."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from outrider.orchestrator.cli import flags, format_commands
from outrider.orchestrator.cli.terminal import say
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.keys import CLIENT, ROLES, SERVER, AllowedKey, Keyring, parse_key


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = format_commands({" ".join((name, *words)): what for name, (words, what, _) in _COMMANDS.items()})
    parser.add_argument("command", choices=list(_COMMANDS), help="one of the commands below")
    parser.add_argument("what", nargs="*", default=[], metavar="KEY|NAME|PLACE", help="depends on the command")
    role = f"with allow: what the key is accepted for (default: {CLIENT})"
    parser.add_argument("--as", dest="role", choices=ROLES, default=CLIENT, help=role)
    parser.add_argument("--force", action="store_true", help="with make: replace the existing key")
    flags.add_setting(parser.add_argument, "keys")


def run(options: argparse.Namespace) -> int:
    expected, _, act = _COMMANDS[options.command]
    if len(options.what) != len(expected):
        raise InvalidRequest(f"expected `outrider keys {' '.join((options.command, *expected))}`")
    act(Keyring(options.keys), options)
    return 0


def _make(ring: Keyring, options: argparse.Namespace) -> None:
    pair = ring.make(overwrite=options.force)
    say(f"Created a key in {ring.folder}; its public key is:")
    print(pair.public)


def _allow(ring: Keyring, options: argparse.Namespace) -> None:
    key, name = options.what
    ring.allow(AllowedKey(options.role, parse_key(key), name))
    say(f"{name} is allowed in the role {options.role}; running servers accept it at once.")


def _revoke(ring: Keyring, options: argparse.Namespace) -> None:
    for revoked in ring.revoke(options.what[0]):
        say(f"{revoked.name} is no longer allowed in the role {revoked.role}.")


def _trust(ring: Keyring, options: argparse.Namespace) -> None:
    ring.allow(AllowedKey(SERVER, parse_key(options.what[1]), _place(options)))
    say(f"The server at {_place(options)} is expected to have this key.")


def _forget(ring: Keyring, options: argparse.Namespace) -> None:
    ring.revoke(_place(options), (SERVER,))
    say(f"The server at {_place(options)} is no longer trusted.")


def _list(ring: Keyring, options: argparse.Namespace) -> None:
    rows = [("own", ring.own().public, "")] if ring.has_own else []
    rows += [(allowed.role, allowed.key, allowed.name) for allowed in ring.allowed()]
    if not rows:
        say(f"No key in {ring.folder}; {ring.command('make')} creates one.")
    for row in rows:
        print("{:8} {} {}".format(*row).rstrip())


def _place(options: argparse.Namespace) -> str:
    return str(options.what[0]).removeprefix("tcp://")


_COMMANDS: dict[str, tuple[tuple[str, ...], str, Callable[[Keyring, argparse.Namespace], None]]] = {
    "make": ((), "create this machine's key", _make),
    "show": ((), "print its public key, for other machines", lambda ring, _: print(ring.own().public)),
    "list": ((), "list all keys", _list),
    "allow": (("KEY", "NAME"), "accept this key as a client's, or in the role that --as names", _allow),
    "revoke": (("KEY|NAME",), "no longer accept an allowed key", _revoke),
    "trust": (("PLACE", "KEY"), "expect this key from the server at HOST or HOST:PORT", _trust),
    "forget": (("PLACE",), "no longer trust that server", _forget),
}
"""The arguments of each command, what it does, and its function."""
