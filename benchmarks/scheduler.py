"""Runs commands beside each other on the GPUs of a machine, each on its own GPUs, to a deadline: run_all.py's."""

import json
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from provenance import ROOT

LEAST = 90  # seconds for which a part begins that goes on where it was cut off
ENDING = 5  # seconds before the deadline at which what still runs is ended


def read(path: Path):
    """What a file of JSON has; None where it is missing or was cut off."""
    with suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return None


MARK = "LIGER_MEASURED_PART"


class Running:
    """A command that runs, and all processes that it starts: torchrun gives each rank a session of its own, so that
    they are known by a variable. `why` says why it failed, or is None."""

    def __init__(self, command: Sequence[str], seconds: float, variables: dict[str, str], log=None, cores=()):
        self.mark, self.seconds, self.began, self.why = uuid.uuid4().hex, seconds, time.monotonic(), None
        self.process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **variables, MARK: self.mark}, start_new_session=True, stdout=log,
            stderr=subprocess.STDOUT if log else None,
        )  # fmt: skip
        if cores and hasattr(os, "sched_setaffinity"):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(self.process.pid, cores)

    @property
    def taken(self) -> float:
        return time.monotonic() - self.began

    def ended(self) -> bool:
        """Whether it has; it is ended where its time is up."""
        code = self.process.poll()
        if code is None and self.taken < self.seconds:
            return False
        self.kill()
        if code is None:
            self.why = f"not done after {self.seconds:.0f} s"
        elif code:
            self.why = f"ended with status {code}"
        return True

    def kill(self) -> None:
        """Ends what is left of it, and waits until that is gone: a GPU is the next one's then."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        until = time.monotonic() + 10
        while time.monotonic() < until and (left := self._marked()):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def _marked(self) -> list[int]:
        """The processes that have the variable; those that are dead have none."""
        found, mark = [], f"{MARK}={self.mark}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in path.read_bytes():
                    found.append(int(path.parent.name))
        return found


def call(command: list[str], seconds: float, variables: dict[str, str]) -> str | None:
    """Runs a command; why it failed, or None."""
    running = Running(command, seconds, variables)
    try:
        while not running.ended():
            time.sleep(0.05)
    finally:
        running.kill()
    return running.why


@dataclass(frozen=True)
class Part:
    """A command.

    Args:
        name: of the result of which it is a part.
        arguments: of its script, as they are known whatever the machine.
        folder: where its log is, and what says whether it is done.
        path: the file that it writes.
        command: with all arguments.
        gpus: how many it needs.
        seconds: its limit.
        goes_on: whether it goes on where it was cut off.
        environment: variables.
    """

    name: str
    arguments: str
    folder: Path
    path: Path
    command: tuple[str, ...]
    gpus: int
    seconds: float
    goes_on: bool
    environment: tuple[tuple[str, str], ...]

    @property
    def done(self) -> bool:
        return (self.folder / "done").exists() and self.path.exists()

    @property
    def failed(self) -> str | None:
        """Why it failed at this commit."""
        failed = self.folder / "failed"
        return failed.read_text() if failed.exists() else None

    @property
    def key(self) -> str:
        return f"{self.name}: {self.arguments}"

    def forget(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Known:
    """How long parts take, in a file beside the folders of commits: `took` those that are done, and more than `over`
    those that were cut off before there was anything to go on from."""

    def __init__(self, path: Path):
        self.path, self.seconds = path, {"took": {}, "over": {}} | (read(path) or {})

    def expected(self, part: Part) -> float:
        """The seconds that there must be for a part to begin."""
        over = self.seconds["over"].get(part.key, 0)
        if part.goes_on:
            return max(LEAST, over)
        return max(over, self.seconds["took"].get(part.key, part.seconds))

    def note(self, what: str, part: Part, seconds: float | None) -> None:
        if seconds is None:
            self.seconds[what].pop(part.key, None)
        else:
            self.seconds[what][part.key] = round(seconds, 1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.seconds, indent=1) + "\n")


class Machine:
    """Runs parts on the GPUs of this machine; on a CPU one after another, or --gpus beside each other."""

    def __init__(self, args):
        self.args, self.known = args, Known(args.work.parent / "seconds.json")
        listed = (os.environ.get("CUDA_VISIBLE_DEVICES") or "").split(",")
        self.devices = listed[: args.gpus] if listed[0] else [str(i) for i in range(args.gpus)]
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]
        self.each = max(1, len(cores) // args.gpus)
        self.cores = {device: cores[i * self.each : (i + 1) * self.each] for i, device in enumerate(self.devices)}
        self.free, self.running = [*self.devices], {}

    @property
    def left(self) -> float:
        """Seconds to the deadline, less what it takes to end."""
        return self.args.until - time.monotonic() if self.args.until else float("inf")

    def run(self, parts: list[Part]) -> Iterator[Part]:
        """Runs parts in their order; yields each that ends."""
        waiting = [*parts]
        try:
            while waiting or self.running:
                # The first waits for its GPUs, and no other overtakes it: it would wait for ever.
                waiting = [part for part in waiting if self.known.expected(part) <= self.left]
                while waiting and waiting[0].gpus <= len(self.free):
                    self._begin(waiting.pop(0))
                    waiting = [part for part in waiting if self.known.expected(part) <= self.left]
                time.sleep(0.1)
                for part in [part for part, (running, *_) in self.running.items() if running.ended()]:
                    self._end(part)
                    yield part
        finally:
            for running, *_ in self.running.values():
                running.kill()

    def _begin(self, part):
        part.folder.mkdir(parents=True, exist_ok=True)
        (part.folder / "failed").unlink(missing_ok=True)
        mine, self.free = self.free[: part.gpus], self.free[part.gpus :]
        variables, cores = dict(part.environment), []
        if self.args.device == "cuda":
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        if len(self.devices) > 1:
            variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(self.each)
            cores = [core for device in mine for core in self.cores[device]]
        log = part.folder / "log"
        print(f"$ {' '.join(part.command)}\n  on {', '.join(mine)}, {log}", flush=True)
        with log.open("a") as file:
            running = Running(part.command, min(part.seconds, self.left), variables, file, cores)
        self.running[part] = running, mine, read(part.path)

    def _end(self, part):
        running, mine, before = self.running.pop(part)
        self.free = sorted(self.free + mine, key=self.devices.index)
        why = running.why
        if why is None and not part.path.exists():
            why = f"it wrote no {part.path.name}"
        if why is None:
            (part.folder / "done").touch()
            self.known.note("took", part, running.taken)
        elif self.left > 0:  # by itself
            (part.folder / "failed").write_text(why)
        else:
            why = "cut off by the deadline"
            self.known.note("over", part, running.taken + LEAST if read(part.path) == before else None)
        print(f"{part.folder.name}: {why or f'{running.taken:.0f} s'}", flush=True)
        if part.failed:
            print("\n".join((part.folder / "log").read_text(errors="replace").splitlines()[-20:]), flush=True)
