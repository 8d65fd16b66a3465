"""Generates pages of the site: from the documents at the top of the repository, and the reference of Python
(reference.py). Links to other files of the repository lead to `repo_url`; without one they are text. Doxygen makes the
reference of C++ when the pages are there, where it is installed: only then do links lead to it."""

import posixpath
import re
import shutil
import sys
from pathlib import Path

from mkdocs.structure.files import File
from mkdocs.structure.nav import Link

sys.path.insert(0, str(Path(__file__).parent))

import reference  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
#: Documents outside docs/, and the pages that are made of them.
DOCUMENTS = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files, config):
    for document, page in DOCUMENTS.items():
        text = (ROOT / document).read_text().replace("](docs/", "](")
        inside = lambda link: link[0] if (ROOT / "docs" / link[2]).exists() else link[0].replace("](", "](../", 1)
        text = _LINK.sub(lambda link: link[0] if "://" in link[2] else inside(link), text)
        files.append(File.generated(config, page, content=text))
    for page, text in {"python.md": reference.docstrings(), **reference.pages()}.items():
        files.append(File.generated(config, page, content=text))
    return files


#: Where Doxygen writes, from the root of the site, and the file that pages link to for it.
CPP, DOXYFILE = "cpp-reference/html/index.html", "docs/site/Doxyfile"


def on_nav(nav, config, files):
    if shutil.which("doxygen"):
        section = next(item for item in nav.items if item.title == "Reference")
        link = Link("C++", CPP)
        link.parent = section
        section.children.append(link)
    return nav


def on_page_markdown(markdown, page, config, files):
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def target(link):
        text, path, anchor = link[1], link[2], link[3] or ""
        name = posixpath.normpath(posixpath.join(folder, path))
        if name == DOXYFILE:
            to_root = posixpath.relpath(".", page.url or ".")
            return f'<a href="{to_root}/{CPP}">{text}</a>' if shutil.which("doxygen") else text
        if "://" in path or name.startswith("docs/"):
            return link[0]
        if name in DOCUMENTS:
            depth = posixpath.relpath("docs", folder)
            return f"[{text}]({posixpath.normpath(posixpath.join(depth, DOCUMENTS[name]))}{anchor})"
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/HEAD/{name}{anchor})" if config.repo_url else text

    return _LINK.sub(target, markdown)
