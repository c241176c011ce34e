"""Take pictures of the page for the guides: ``python -m tests.ui.screenshots FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from shoal.state import Store
from tests.support import browser, ui_systems
from tests.support.homes import new_home

WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}

PICTURES = {
    "idle": ("", "models/flight-delays", "jobs/flights-1"),
    "busy": ("", "pools/retrain", "jobs", "jobs/flights-2026-11-23"),
    "broken": ("", "pools/retrain", "jobs/flights-2026-11-23"),
}


def main(folder: Path) -> None:
    """Save each picture in light and dark, and at the width of a phone."""
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser.chromium(), args=list(browser._FLAGS))
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
                            name = path.replace("/", "-") or "overview"
                            browser.screenshot(page, folder / f"{system}-{name}-{form}.png")
                        context.close()
        chromium.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
