"""Other distributions that have the module liger_kernel, and share its folder."""

import os
from collections.abc import Iterable, Iterator


def others(path: Iterable[str], version: str | None) -> Iterator[str]:
    """What to say of each distribution beside libliger that has written into the package's folders, which mixes two
    libraries; version: of the package, or None where another has overwritten it.

    importlib.metadata, which reads what every installed package says of itself, takes longer than all of the package's
    import.
    """
    for parent in {os.path.dirname(os.path.abspath(folder)) for folder in path}:
        for entry in os.listdir(parent):
            if not (entry.lower().startswith(("liger", "libliger")) and entry.endswith(".dist-info")):
                continue
            name, _, found = entry.removesuffix(".dist-info").rpartition("-")
            ours = name.lower() == "libliger"
            if version and found != version if ours else _writes_here(os.path.join(parent, entry, "RECORD")):
                name = name.replace("_", "-")
                both, here = " ".join(dict.fromkeys((name, "libliger"))), f"libliger {version or ''}".rstrip()
                yield (
                    f"{name} {found} has installed its own liger_kernel in the folder of {here}; the "
                    f"two overwrite each other's files. Run: pip uninstall -y {both}, then install the one that you "
                    "want."
                )


def _writes_here(record):
    """Whether a list of installed files names some of this package; what libliger itself provides has none."""
    if not os.path.exists(record):
        return False
    with open(record, encoding="utf-8") as files:
        return any(line.startswith("liger_kernel/") for line in files)
