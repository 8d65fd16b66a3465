"""The set-up from nothing: `make test-fresh`. Needs root, debootstrap and the package indices.

    python tests/platforms/fresh.py [root] [user] [without-dpkg] [--stop-at REGEX] [--bind FOLDER] [--also PACKAGE]

In a root folder of Debian with git, g++, make and python3-venv alone, a clone of the last commit runs what README
names: `make train` (with a tiny model) and `make test`. Once as root, once as a user who cannot become root, and once
where there is no dpkg, as on other distributions. Prints the seconds of each; what they say is in build/fresh/*.log.
pip's settings and those of proxies and certificates are those of this machine, and --bind shows the root a folder that
they name.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
OUT = ROOT / "build" / "fresh"
PACKAGES = "git,g++,make,python3,python3-venv"
KINDS = ("root", "user", "without-dpkg")
COMMANDS = ("make train ARGS='--config tiny --steps 6 --batch 2 --length 64'", "make test")
#: What is handed on of the environment.
KEPT = r"PIP_.*|.*_proxy|.*_PROXY|SSL_CERT_.*|CCACHE_.*|CMAKE_.*"


def base(also):
    root = OUT / "debian"
    if not (root / "ready").exists():
        shutil.rmtree(root, ignore_errors=True)
        include = ",".join([PACKAGES, *also])
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={include}", "bookworm", root], check=True)
        (root / "ready").touch()
    return root


def prepare(kind, also):
    """A root folder with a clone in /home/user/liger."""
    root = OUT / kind
    subprocess.run(["rm", "-rf", "--one-file-system", root], check=True)
    subprocess.run(["cp", "-a", "--reflink=auto", base(also), root], check=True)
    clone = root / "home/user/liger"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, clone], check=True)
    subprocess.run(["chown", "-R", "1000:1000" if kind == "user" else "0:0", clone.parent], check=True)
    for file in ("resolv.conf", "hosts"):  # which an installation writes: torch.distributed looks up its host's name
        shutil.copy(f"/etc/{file}", root / "etc" / file)
    if kind == "without-dpkg":
        for program in [*root.glob("usr/bin/dpkg*"), *root.glob("usr/bin/apt*")]:
            program.unlink()
        shutil.rmtree(root / "var/lib/dpkg")
    return root


def run(kind, root, command, binds, stop_at):
    """The seconds of a command and whether it did what it should."""
    mounts = ["set -e", f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev"]
    for folder in binds:
        inside = f"{root}{folder}"
        mounts += [f"mkdir -p {inside}" if os.path.isdir(folder) else f"mkdir -p $(dirname {inside}); touch {inside}"]
        mounts += [f"mount --bind {folder} {inside}"]
    user = "1000:1000" if kind == "user" else "0:0"
    inside = f"cd /home/user/liger && {command}"
    mounts += [f'exec chroot --userspec={user} {root} bash -c "$INSIDE"']
    kept = {name: value for name, value in os.environ.items() if re.fullmatch(KEPT, name)}
    there = {**kept, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/home/user", "INSIDE": inside}
    begin = time.time()
    with (OUT / f"{kind}.log").open("a") as log:
        log.write(f"$ {command}\n")
        process = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", "\n".join(mounts)],
            env=there,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for line in process.stdout:
            log.write(line)
            log.flush()
            if stop_at and re.search(stop_at, line):
                process.kill()
                process.wait()
                return time.time() - begin, True
        return time.time() - begin, process.wait() == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[[], *KINDS], help="which of them; all")
    parser.add_argument("--stop-at", metavar="REGEX", help="a command has passed when it prints such a line")
    parser.add_argument("--bind", action="append", default=[], metavar="FOLDER", help="of this machine, seen there")
    parser.add_argument("--also", action="append", default=[], metavar="PACKAGE", help="of Debian, such as ccache")
    given = parser.parse_args()
    if os.geteuid() or not shutil.which("debootstrap"):
        sys.exit("This needs root and debootstrap (apt-get install debootstrap).")
    OUT.mkdir(parents=True, exist_ok=True)
    failed = False
    for kind in given.kinds or KINDS:
        root = prepare(kind, given.also)
        (OUT / f"{kind}.log").write_text("")
        for command in COMMANDS:
            seconds, passed = run(kind, root, command, given.bind, given.stop_at)
            failed |= not passed
            print(f"{kind:12}  {seconds:6.0f} s  {'passed' if passed else 'FAILED'}  {command}", flush=True)
            if not passed:
                break
    sys.exit(failed)


if __name__ == "__main__":
    main()
