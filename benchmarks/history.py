"""Shows one case over the commits: each measurement in the history of benchmarks/results, in ms, the oldest first.

python benchmarks/history.py rms_norm --shape 16384,4096 --rival compile

A row names the commit that was measured. Older rows name none: they show, in brackets, the commit that added them.
"""

import argparse
import json
import subprocess
from pathlib import Path

from tabulate import tabulate

ROOT, FOLDER = Path(__file__).resolve().parents[1], "benchmarks/results"
TIMES = ("gpu forward", "gpu forward+backward", "eager forward", "eager forward+backward")


def git(*command):
    return subprocess.check_output(("git", "-C", str(ROOT), *command), text=True)


def runs():
    """(what its rows have where they do not say, a run) for each version of each file, committed or not."""
    for commit, day in map(str.split, git("log", "--reverse", "--format=%h %cs", "--", FOLDER).splitlines()):
        for file in git("ls-tree", "--name-only", commit, f"{FOLDER}/").splitlines():
            yield {"commit": f"({commit})", "date": day}, json.loads(git("show", f"{commit}:{file}"))
    for file in sorted((ROOT / FOLDER).glob("*.json")):
        yield {"commit": "(not committed)", "date": ""}, json.loads(file.read_text())


def measurements(case):
    """Each timed row of a case, once."""
    seen = set()
    for known, run in runs():
        known["machine"] = run["machine"]["device"] if isinstance(run.get("machine"), dict) else ""
        for row in run["rows"] if isinstance(run.get("rows"), list) else ():
            key = json.dumps([row.get(name) for name in ("shape", "options", "rival", *TIMES)])
            if row.get("case") == case and key not in seen and any(time in row for time in TIMES):
                seen.add(key)
                yield known | {name: value for name, value in row.items() if value is not None}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("case")
    p.add_argument("--shape", help="only this one, numbers separated by commas")
    p.add_argument("--rival", default="ours", help="default: %(default)s")
    args, lines = p.parse_args(), []
    for row in measurements(args.case):
        shape, options = ",".join(map(str, row["shape"])), " ".join(f"{k}={v}" for k, v in row["options"].items())
        if row["rival"] == args.rival and args.shape in (None, shape):
            times = (format(row[time], ".3f") if time in row else "" for time in TIMES)
            lines.append([row["date"], row["commit"], row["machine"], shape, options, *times])
    print(tabulate(lines, ["date", "commit", "machine", "shape", "options", *TIMES], "github", disable_numparse=True))


if __name__ == "__main__":
    main()
