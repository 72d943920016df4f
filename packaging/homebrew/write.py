"""Writes the Homebrew formula outrider.rb from outrider.rb.in, with the wheels that pip resolves today.

    python packaging/homebrew/write.py --url ADDRESS --sdist FILE

Each wheel is a resource with its address and digest, so brew installs exactly these wheels and compiles nothing. Needs
the package index.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from string import Template

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "launch"))

from check_extras import PLATFORMS, Found, resolve  # noqa: E402

PYTHON = "3.13"
EXTRA = "serve"


def wheels() -> Found:
    """Returns the wheels that the formula installs in addition to Outrider."""
    return resolve(EXTRA, PLATFORMS[0], PYTHON)  # wheels for the oldest macOS run on later ones, too


def resources(found: Found) -> str:
    lines = []
    for name, package in sorted(found.packages.items(), key=lambda item: item[0].lower()):
        if package.digest:  # else it is this checkout
            lines += [f'  resource "{name.lower()}" do', f'    url "{package.address}", using: :nounzip']
            lines += [f'    sha256 "{package.digest}"', "  end", ""]
    return "\n".join(lines).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes the Homebrew formula.")
    parser.add_argument("--url", required=True, help="address of the sdist, which may be published later")
    parser.add_argument("--sdist", type=Path, required=True, help="the sdist as a file, for its digest")
    options = parser.parse_args()
    found = wheels()
    if found.fault:
        print(found.fault, file=sys.stderr)
        return 1
    formula = Template((HERE / "outrider.rb.in").read_text(encoding="utf-8")).substitute(
        url=options.url,
        sha256=hashlib.sha256(options.sdist.read_bytes()).hexdigest(),
        python=PYTHON,
        resources=resources(found),
    )
    (HERE / "outrider.rb").write_text(formula, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
