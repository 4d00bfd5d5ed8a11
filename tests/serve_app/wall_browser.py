"""A real Chromium before the pit wall, and what every look at it has to show."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, ViewportSize, sync_playwright

OPTIONS = [
    # Root runs the tests in containers, where Chromium's own sandbox cannot be had.
    "--no-sandbox",
    "--disable-gpu",
    # The browser's own calls home, which are none of the page's.
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
WAIT_MS = 60_000.0


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Starts Debian's Chromium without a window."""
    program = shutil.which("chromium")
    assert program is not None, "chromium is missing: make deps"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=OPTIONS)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Watched:
    """A page, and what it did that it should not have."""

    page: Page
    url: str
    foreign: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def says(self, text: str) -> None:
        """Waits until the verdict holds a text."""
        self.page.locator("#says", has_text=text).wait_for()

    def wait(self, script: str) -> None:
        """Waits until a script gives what is true. The page's own policy forbids it to look by itself."""
        end = time.monotonic() + WAIT_MS / 1000
        while not self.page.evaluate(script):
            assert time.monotonic() < end, f"not within {WAIT_MS} ms: {script}"
            self.page.wait_for_timeout(50)

    def check(self) -> None:
        """Nothing was said on the console, and nobody else was asked."""
        assert self.complaints == []
        assert self.foreign == []


@contextmanager
def watching(
    browser: Browser, url: str, *, width: int = 1440, height: int = 900, scheme: str = "light"
) -> Iterator[Watched]:
    """Opens the wall in a window of this size, and checks at the end that it behaved."""
    size = ViewportSize(width=width, height=height)
    context = browser.new_context(viewport=size, color_scheme="dark" if scheme == "dark" else "light")
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    watched = Watched(page, url)

    def note_request(request: Request) -> None:
        if not request.url.startswith((url, "data:")):
            watched.foreign.append(request.url)

    def note_message(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            watched.complaints.append(message.text)

    page.on("request", note_request)
    page.on("console", note_message)
    page.on("pageerror", lambda error: watched.complaints.append(str(error)))
    try:
        page.goto(url)
        yield watched
        watched.check()
    finally:
        context.close()
