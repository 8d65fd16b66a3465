"""Metadata of the name liger-kernel in the wheel of libliger: `Provides`, which Python's packages do not have.

Tools that use the module liger_kernel ask whether the distribution liger-kernel is installed, and which version:
transformers 4.57, LLaMA-Factory and ms-swift, and those that list it among their requirements. The wheel's data hold a
folder of metadata for them, without a list of files: pip then takes liger-kernel for installed, and refuses to install
another over it. A wheel may not have two such folders beside each other.
"""

import base64
import hashlib
import os
import re
import zipfile
from pathlib import Path

METADATA = """Metadata-Version: 2.1
Name: liger-kernel
Version: {version}
Summary: The module liger_kernel of libliger, for tools that ask for liger-kernel
"""


def files(version: str) -> dict[str, str]:
    """{path in the wheel: content} for a version of libliger."""
    folder = f"libliger-{version}.data/platlib/liger_kernel-{version}.dist-info"
    return {
        f"{folder}/METADATA": METADATA.format(version=version),
        f"{folder}/INSTALLER": "libliger\n",  # what pip names where it is asked to remove or replace this
        f"{folder}/top_level.txt": "liger_kernel\n",
    }


def _recorded(path, content):
    digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(content.encode())}\n"


def add_to(wheel: Path) -> None:
    """Adds the files to a wheel of libliger."""
    more = files(re.match(r"libliger-([^-]+)-", wheel.name)[1])
    changed = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(changed, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            content = old.read(item)
            if item.filename.endswith(".dist-info/RECORD"):
                for path, text in more.items():
                    added = zipfile.ZipInfo(path, item.date_time)  # which does not differ between builds
                    added.external_attr, added.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
                    new.writestr(added, text)
                content += "".join(_recorded(path, text) for path, text in more.items()).encode()
            new.writestr(item, content)
    os.replace(changed, wheel)
