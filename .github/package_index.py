"""Writes package indices (PEP 503) of the files of releases, for the project's pages.

    python3 .github/package_index.py releases.json build/docs   what `gh api repos/OWNER/NAME/releases` prints
    python3 .github/package_index.py dist out                   the files of a folder, before they are released

`simple/` has the wheel with CUDA kernels, `simple-cpu/` the one without, which has the same version and a build number;
each has what there is for other machines, and `simple/` the sources:

    pip install libliger --extra-index-url https://.../simple/
"""

import hashlib
import html
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

NAME = "libliger"
PYTHON = ">=3.10"
PAGE = '<!DOCTYPE html>\n<meta name="pypi:repository-version" content="1.0">\n<title>{title}</title>\n{links}\n'


class File(NamedTuple):
    name: str
    url: str
    sha256: str | None


def released(releases: list[dict]) -> list[File]:
    """The files of the releases that are public."""
    assets = [asset for release in releases if not release["draft"] for asset in release["assets"]]
    digest = lambda asset: re.fullmatch("sha256:([0-9a-f]{64})", asset.get("digest") or "")
    return [File(a["name"], a["browser_download_url"], d[1] if (d := digest(a)) else None) for a in assets]


def built(folder: Path) -> list[File]:
    """The files of a folder."""
    files = [file for file in sorted(folder.iterdir()) if file.is_file()]
    return [File(f.name, f.resolve().as_uri(), hashlib.sha256(f.read_bytes()).hexdigest()) for f in files]


def of_this_project(file: File) -> bool:
    return bool(re.fullmatch(rf"{NAME}-[^-]+(-.+\.whl|\.tar\.gz)", file.name))


def indices(files: list[File]) -> dict[str, list[File]]:
    """{name of the index: its files}. pip would take the build number for a later wheel."""
    files = [file for file in files if of_this_project(file)]
    cpu = [file for file in files if "-0cpu-" in file.name]
    elsewhere = [file for file in cpu if "x86_64" not in file.name]
    return {"simple": [file for file in files if file not in cpu] + elsewhere, "simple-cpu": cpu}


def link(file: File) -> str:
    url = file.url + (f"#sha256={file.sha256}" if file.sha256 else "")
    return f'<a href="{html.escape(url)}" data-requires-python="{html.escape(PYTHON)}">{html.escape(file.name)}</a><br>'


def write(files: list[File], out: Path) -> None:
    for index, listed in indices(files).items():
        folder = out / index / NAME
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index.html").write_text(PAGE.format(title=NAME, links="\n".join(map(link, listed))))
        link_to_it = f'<a href="{NAME}/">{NAME}</a>'
        (folder.parent / "index.html").write_text(PAGE.format(title="Packages", links=link_to_it))
        print(f"{index}: {', '.join(file.name for file in listed) or 'no files'}")


if __name__ == "__main__":
    source, out = map(Path, sys.argv[1:])
    write(built(source) if source.is_dir() else released(json.loads(source.read_text())), out)
