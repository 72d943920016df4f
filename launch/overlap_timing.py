"""Times what working ahead can hide on this machine; the same as `outrider overlap`, with its flags."""

from outrider.__main__ import main

if __name__ == "__main__":
    import sys

    raise SystemExit(main(["overlap", *sys.argv[1:]]))
