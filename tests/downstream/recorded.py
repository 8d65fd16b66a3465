"""A plugin of pytest that writes down what tests say about themselves by record_property("setup"), ("result")."""

import importlib.metadata
import json
import time


def pytest_addoption(parser):
    parser.addoption("--record", help="the file to write to")
    parser.addoption("--record-versions", default="", help="distributions whose versions are written down")


def pytest_configure(config):
    if file := config.getoption("--record"):
        config.pluginmanager.register(Recorder(file, config.getoption("--record-versions").split(",")))


class Recorder:
    def __init__(self, file, names):
        self.file, self.names, self.reports, self.begin = file, names, [], time.time()

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            self.reports.append((dict(report.user_properties), report.outcome, report.duration))

    def pytest_sessionfinish(self):
        told = [each for each in self.reports if "setup" in each[0]]
        others = [each for each in self.reports if "setup" not in each[0]]
        found = {
            "versions": {name: importlib.metadata.version(name) for name in ("torch", *self.names)},
            "rows": [
                {"setup": said["setup"], "result": said.get("result", outcome), "seconds": seconds}
                for said, outcome, seconds in told
            ],
            "others": [outcome for _, outcome, _ in others],
            "seconds_of_others": sum(seconds for *_, seconds in others),
            "seconds": time.time() - self.begin,
        }
        with open(self.file, "w") as out:
            json.dump(found, out, indent=1)
