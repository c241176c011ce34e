"""Take pictures of the page for the guides: ``python -m tests.ui.screenshots FOLDER``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from shoal.state import Store
from shoal.state.schema import Job, JobState
from tests.support import browser, ui_systems
from tests.support.homes import new_home

WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}

RUNNING = "jobs/flights-2026-11-23"

PICTURES = {
    "idle": ("", "models/flight-delays", "jobs/flights-1"),
    "busy": ("", "pools/retrain", "jobs", RUNNING),
    "broken": ("", "pools/retrain", RUNNING),
}


def _train(page: Page) -> None:
    """Let the running job report some rounds, each of which the page has to show."""
    store = Store()
    for done in (4, 12, 22, 35, 50, 68, 86):
        with store.transaction() as session:
            job = session.get_one(Job, ("flights-2026-11-23", 1))
            if job.state is not JobState.RUNNING:
                return
            job.progress, job.heartbeat_at = ui_systems.progress(done), time.time()
        page.get_by_text(f"round {done} of 200").first.wait_for()


def main(folder: Path) -> None:
    """Save each picture in light and dark, and at the width of a phone."""
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        chromium = browser.launched(playwright)
        for system, paths in PICTURES.items():
            with new_home():
                getattr(ui_systems, system)(Store())
                with browser.serving() as address:
                    for form, size, scheme in (
                        ("light", WIDE, "light"),
                        ("dark", WIDE, "dark"),
                        ("phone", PHONE, "light"),
                    ):
                        context = chromium.new_context(viewport=size, color_scheme=scheme)
                        page = context.new_page()
                        page.on("console", lambda message: print("console:", message.text))
                        page.goto(address)
                        for path in paths:
                            page.goto(address.partition("?")[0] + path)
                            page.wait_for_selector("#live.on")
                            if path == RUNNING:
                                _train(page)
                            name = path.replace("/", "-") or "overview"
                            browser.screenshot(page, folder / f"{system}-{name}-{form}.png")
                        context.close()
        chromium.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
