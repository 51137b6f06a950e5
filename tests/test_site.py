"""The site is built strictly, and its pages load in a browser: no missing link, image or console error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).parents[1]
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --remote-debugging-pipe "
    # A page that was left would live on there, and note the scheme that it shows.
    "--disable-features=BackForwardCache"
)
SIZES = {"phone": (390, 844), "desktop": (1280, 800)}

# A page that has loaded still moves for a while, until its scripts have run: what is wrong must stay wrong.
SETTLED = """(async wrong => {
    let found = wrong();
    for (let turn = 0; found && turn < 50; turn++) {
        await new Promise(done => setTimeout(done, 100));
        found = wrong();
    }
    return found;
})"""
LOOK = """({
    broken: [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src),
    links: [...document.links].map(a => a.href),
})"""
OVERFLOW = SETTLED + "(() => Math.max(0, document.documentElement.scrollWidth - innerWidth))"
NOT_OF_SCHEME = SETTLED + "(() => document.body.getAttribute('data-md-color-scheme') !== '%s')"


class Browser:
    """A Chromium without a window, spoken to over a pipe."""

    def __init__(self, profile: Path) -> None:
        (there, self._out), (self._in, back) = os.pipe(), os.pipe()
        command = f"exec {CHROMIUM} {FLAGS} --user-data-dir={profile} 3<&{there} 4>&{back}"
        self._process = subprocess.Popen(
            ["bash", "-c", command],
            pass_fds=(there, back),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there)
        os.close(back)
        self._replies = os.fdopen(self._in, "rb")
        self._left = b""
        self._count = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        page = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Have it do something, and wait for its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._count:
                assert "error" not in found, found["error"]
                answer: dict[str, Any] = found["result"]
                return answer

    def wait_for(self, event: str) -> None:
        """Wait until something has happened since the events were last forgotten."""
        while not any(found["method"] == event for found in self.events):
            self._next()

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            more = self._replies.read1(1 << 20)
            assert more, "the browser has ended"
            self._left += more
        text, _, self._left = self._left.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        if "method" in found:
            self.events.append(found)
        return found

    def resize(self, size: tuple[int, int]) -> None:
        """Make the window as large as that of a phone or of a desktop."""
        width, height = size
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def open(self, url: str, scheme: str) -> None:
        """Load a page, as if it were the first one."""
        # A page notes the scheme that it shows, even when it is about to be left.
        self.events.clear()
        self.call("Page.navigate", url="about:blank")
        self.wait_for("Page.loadEventFired")
        self.call("Storage.clearDataForOrigin", origin=url, storageTypes="local_storage")
        self.events.clear()
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Page.navigate", url=url)
        self.wait_for("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript on the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        return answer["result"]["value"]

    def complaints(self) -> list[str]:
        """What the page has written to the console as an error, and what it could not load."""
        told = []
        for event in self.events:
            method, what = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                told.append(str(what["exceptionDetails"].get("text")))
            elif method == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
                told.append(f"{what['entry']['text']} {what['entry'].get('url', '')}")
            elif method == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning"):
                told.append(str(what["args"]))
            elif method == "Network.responseReceived" and what["response"]["status"] >= 400:
                told.append(f"{what['response']['status']} {what['response']['url']}")
        return told

    def requested(self, *, but: str) -> list[str]:
        """What the page has asked for elsewhere than at an address."""
        asked = [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in asked if not url.startswith((but, "data:", "blob:"))]

    def close(self) -> None:
        """End it."""
        os.close(self._out)
        self._replies.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As ``make docs`` builds it, or has just built it."""
    pytest.importorskip("mkdocs", reason="the extra docs is not installed: make docs")
    pytest.importorskip("material", reason="the extra docs is not installed: make docs")
    if is_new(ROOT / "site/index.html"):
        return ROOT / "site"
    folder = tmp_path_factory.mktemp("site")
    arguments = ["build", "--quiet", "--strict", "-f", "website/mkdocs.yml", "-d", str(folder)]
    found = subprocess.run(
        [sys.executable, "-m", "mkdocs", *arguments],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return folder


def is_new(page: Path) -> bool:
    """Whether a page was made after the last change of anything that the site is made of."""
    sources = ("README.md", "CHANGELOG.md", "docs", "examples", "src", "website", "pyproject.toml")
    files = [file for source in sources for file in (ROOT / source, *(ROOT / source).rglob("*"))]
    changed = max(
        file.stat().st_mtime for file in files if file.is_file() and "__pycache__" not in file.parts
    )
    return page.exists() and page.stat().st_mtime > changed


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


def pages_of(site: Path) -> list[str]:
    return sorted(str(file.relative_to(site)) for file in site.rglob("*.html"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["written", pytest.param("reference", marks=pytest.mark.nightly)])
def test_every_page_loads_without_a_complaint(
    site: Path, address: str, browser: Browser, part: str
) -> None:
    """Light and dark by turns, as wide as a phone and as a desktop."""
    wrong, links = [], set()
    pages = [
        page for page in pages_of(site) if page.startswith("reference/") == (part == "reference")
    ]
    assert pages
    for page, scheme in zip(pages, cycle(["light", "dark"])):
        # On a machine that is busy a page may be looked at too early: what is wrong is so each time.
        for _ in range(3):
            told, found = look_at(page, address, browser, scheme)
            if not told:
                break
        wrong += [f"{page}: {one}" for one in told]
        links |= {(page, link) for link in found if link.startswith(address)}
    assert wrong == []
    assert [
        f"{page}: {link}" for page, link in sorted(links) if not leads(link, site, address)
    ] == []


def look_at(page: str, address: str, browser: Browser, scheme: str) -> tuple[list[str], list[str]]:
    """What is wrong with a page, and where its links lead."""
    browser.resize(SIZES["phone"])
    browser.open(f"{address}/{page}", scheme)
    found = browser.evaluate(LOOK)
    told = browser.complaints() + [f"image {one}" for one in found["broken"]]
    told += [f"asks elsewhere for {one}" for one in browser.requested(but=address)]
    if browser.evaluate(NOT_OF_SCHEME % {"light": "default", "dark": "slate"}[scheme]):
        told.append(f"is not {scheme}")
    for name, size in SIZES.items():
        browser.resize(size)
        if over := browser.evaluate(OVERFLOW):
            told.append(f"is {over} pixels wider than a {name}")
    return told, found["links"]


def leads(link: str, site: Path, address: str) -> bool:
    """Whether a link leads to a file, and to a place that is in it."""
    whole, place = urldefrag(link)
    path = unquote(whole.removeprefix(address)).lstrip("/")
    file = site / (path or "index.html")
    file = file / "index.html" if file.is_dir() else file
    if not file.is_file():
        return False
    return not place or file.suffix != ".html" or f'id="{unquote(place)}"' in text_of(file)


TEXTS: dict[Path, str] = {}


def text_of(file: Path) -> str:
    if file not in TEXTS:
        TEXTS[file] = file.read_text()
    return TEXTS[file]


@pytest.mark.slow
def test_the_search_finds_names_and_pages(address: str, browser: Browser) -> None:
    browser.resize(SIZES["desktop"])
    browser.open(f"{address}/index.html", "light")
    found = browser.evaluate(
        "fetch('search/search_index.json').then(r => r.json()).then("
        "index => index.docs.map(doc => doc.location + ' ' + doc.title).join(' '))"
    )
    for wanted in (
        "penstock.schedule.build",
        "penstock.Pipeline.step",
        "tutorial.html",
        "penstock schedule show",
    ):
        assert wanted in found
    assert browser.evaluate("!!document.querySelector('.md-search__input')")


@pytest.mark.slow
def test_a_page_from_a_folder_searches(site: Path, browser: Browser) -> None:
    browser.resize(SIZES["desktop"])
    browser.open((site / "index.html").as_uri(), "light")
    browser.evaluate(
        "(box => { box.focus(); box.value = 'zero bubble'; box.dispatchEvent(new Event('input')); "
        "box.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true})); return true })"
        "(document.querySelector('.md-search__input'))"
    )
    nothing = SETTLED + "(() => !document.querySelector('.md-search-result__link'))"
    assert not browser.evaluate(nothing)
    assert browser.complaints() == []


def test_the_site_has_a_changelog_and_says_where_pages_are(site: Path) -> None:
    assert "Unreleased" in (site / "changelog.html").read_text()
    assert "docs/training.md" in (site / "training.html").read_text()
