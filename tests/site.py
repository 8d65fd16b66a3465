"""Opens every page of the site that `make docs` built in a headless Chromium: `make test-docs`.

    python tests/site.py build/docs [--browser /usr/bin/chromium]

A page fails on an error in the console, a picture that is not shown, or a link to a page or an anchor of the site that
is not there. The search must find a page, and every public name of tests/api.json must have an anchor in the reference.
Links to elsewhere are not followed. Pages are served from this machine; requests to elsewhere are refused, and fail a
page that makes them.
"""

import argparse
import functools
import http.server
import json
import shutil
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urldefrag

from playwright.sync_api import sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
API = Path(__file__).with_name("api.json")
#: What is searched for, and what one of the results must be.
SEARCH = ("fused_linear_cross_entropy", "operators")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def serve(folder):
    """The address of a server of the folder's files, which ends with the process."""
    handler = functools.partial(Quiet, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/"


def faults_of(page, address, found):
    """What is wrong with the page at an address; `found` gets its links within the site, and its anchors."""
    faults = []
    listeners = {
        "console": lambda message: faults.append(f"console: {message.text}") if message.type == "error" else None,
        "pageerror": lambda error: faults.append(f"error: {error}"),
        "requestfailed": lambda request: faults.append(f"not loaded: {request.url}, {request.failure}"),
    }
    for name, listener in listeners.items():
        page.on(name, listener)
    response = page.goto(address, wait_until="networkidle")
    if response.status != 200:
        faults.append(f"status {response.status}")
    faults += [
        f"picture: {source}"
        for source in page.eval_on_selector_all(
            "img", "all => all.filter(i => !i.complete || i.naturalWidth === 0).map(i => i.src)"
        )
    ]
    found["links"] = page.eval_on_selector_all("a[href]", "all => all.map(a => a.href)")
    found["anchors"] = set(page.eval_on_selector_all("[id]", "all => all.map(e => e.id)"))
    for name, listener in listeners.items():
        page.remove_listener(name, listener)
    return faults


def check(folder, browser):
    """{page: faults}, of those that have any, and how many pages there are."""
    root = serve(folder)
    # Doxygen's pages are its own; links to them are checked.
    pages = [str(p.relative_to(folder)) for p in sorted(folder.rglob("*.html")) if "cpp-reference" not in p.parts]
    faults, found = {}, {}
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        context = chromium.new_context()
        context.route(lambda address: not address.startswith(root), lambda route: route.abort())
        page = context.new_page()
        for name in pages:
            if name == "404.html":
                continue
            found[name] = {}
            faults[name] = faults_of(page, root + name, found[name])
        page.goto(root, wait_until="networkidle")
        page.click("[data-md-component=search-query]")
        page.keyboard.type(SEARCH[0])
        try:
            page.wait_for_selector(f".md-search-result__link[href*={SEARCH[1]}]", timeout=30_000, state="attached")
        except Exception as error:
            faults["index.html"].append(f"search: {error}")
        chromium.close()
    anchors = set().union(*(of["anchors"] for name, of in found.items() if name.startswith("reference/")))
    names = (f"{module}.{name}" for module, of in json.loads(API.read_text()).items() for name in of)
    faults["index.html"] += [f"reference: no anchor for {name}" for name in names if name not in anchors]
    for name, of_page in found.items():
        for link in sorted(set(of_page["links"])):
            address, anchor = urldefrag(link)
            if not address.startswith(root):
                continue
            target = unquote(address.removeprefix(root)) or "index.html"
            target += "index.html" if target.endswith("/") else ""
            if not (folder / target).is_file():
                faults[name].append(f"link: {target} is not there")
            elif anchor and target in found and unquote(anchor) not in found[target]["anchors"]:
                faults[name].append(f"link: {target} has no {anchor}")
    return {name: of_page for name, of_page in faults.items() if of_page}, len(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--browser", default=next(filter(None, map(shutil.which, BROWSERS)), None))
    options = parser.parse_args()
    if options.browser is None:
        sys.exit("site: there is no Chromium. As root: apt-get install -y chromium")
    faults, count = check(options.folder.resolve(), options.browser)
    for name, of_page in faults.items():
        for fault in of_page:
            print(f"{name}: {fault}")
    if faults:
        sys.exit(f"site: {len(faults)} of {count} pages have faults")
    print(f"{count} pages: links, pictures, console and search are in order")


if __name__ == "__main__":
    main()
