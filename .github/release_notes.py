"""Prints the notes of a release, which are its entry in CHANGELOG.md: `python .github/release_notes.py v1.0.0`.

Fails where the tag is not the version of the package, or where the entry is missing or still says "unreleased".
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def notes(tag: str, changelog: str, version: str) -> str:
    """The entry of the version `tag` names, without its heading. Raises ValueError."""
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag}, and the version of the package is {version}")
    entry = re.search(rf"^## {re.escape(version)} \((.*?)\)\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    if entry is None:
        raise ValueError(f"CHANGELOG.md has no entry for {version}")
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", entry[1]):
        raise ValueError(f"CHANGELOG.md's entry for {version} says {entry[1]!r} where the date belongs")
    return entry[2].strip()


if __name__ == "__main__":
    source = (ROOT / "python/liger_kernel/__init__.py").read_text()
    version = re.search(r'^__version__ = "(.*)"', source, re.M)[1]
    try:
        print(notes(sys.argv[1], (ROOT / "CHANGELOG.md").read_text(), version))
    except ValueError as error:
        sys.exit(f"release: {error}")
