"""Fixtures: Debian's Chromium, driven by Playwright, and the page on a server of this process."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from shoal.ui.access import Access, TokenAccess
from shoal.ui.app import create_app
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Playwright

TOKEN = "token-of-the-test"

_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


_EXPECTED = (
    "401 (Unauthorized)",  # of a tab without the token
    "/favicon.ico",  # of pages that name no icon
    "'allow-popups'",  # of a link in a frame that opens no new windows
    "net::ERR_",  # of a server that ends while a page is open
    "violates the following Content Security Policy directive 'style-src 'self''",  # Plotly's style of maps, not used
)
"""Errors in the browser's console that are no error of the page."""


def chromium() -> str | None:
    """The path of Chromium, if it is installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def launched(playwright: Playwright) -> Browser:
    """Start Chromium."""
    return playwright.chromium.launch(executable_path=chromium(), args=list(_FLAGS))


@contextmanager
def serving(access: Access | None = None, *, within: str | None = None) -> Iterator[str]:
    """Serve the page of the present store; give its address with the token.

    Args:
        access: The rule of access; that of `shoal ui` if not given.
        within: HTML of a page at `/outer` of a program that has the application mounted at `/shoal`.
    """
    inner = app = create_app(access=access or TokenAccess(TOKEN, "cli:tester@host"))
    if within is not None:
        app = FastAPI()
        app.mount("/shoal", inner)
        app.get("/outer", response_class=HTMLResponse)(lambda: within)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive(), "the server")
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}/{'shoal/' if within else ''}?token={TOKEN}"
    inner.state.reader.close()
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests of a module. Playwright keeps an event loop running in this thread until it ends, in
    which tests of other modules could not start one."""
    if chromium() is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
    pytest.importorskip("playwright", reason="Playwright is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = launched(playwright)
        yield found
        found.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open a page in a browser context of its own. At the end, no page may have had an error."""
    contexts, problems = [], []

    def open_page(address: str, **options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: (problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on(
            "console",
            lambda message: (
                problems.append(f"{message.text} {message.location['url']}") if message.type == "error" else None
            ),
        )
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    left = [problem for problem in problems if not any(known in problem for known in _EXPECTED)]
    assert left == [], left


def screenshot(page: Page, path: Path) -> None:
    """Save a picture of the whole page."""
    page.wait_for_selector("[data-plot]:not([data-drawn])", state="detached")
    page.screenshot(path=path, full_page=True)
