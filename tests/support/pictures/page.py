"""Pictures of the page of `shoal ui`, of made-up systems."""

from __future__ import annotations

from playwright.sync_api import sync_playwright

from shoal.state import Store
from tests.support import browser, ui_systems
from tests.support.homes import new_home
from tests.support.pictures import FOLDER, PICTURES
from tests.support.pictures.files import compress

WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}

FORMS = {"light": (WIDE, "light"), "dark": (WIDE, "dark"), "phone": (PHONE, "light")}

PATHS = {
    "overview": "",
    "pools-retrain": "pools/retrain",
    "jobs-flights-2026-11-23": "jobs/flights-2026-11-23",
    "models-flight-delays": "models/flight-delays",
}


def make() -> None:
    """Save the pictures. The name of each consists of the system, the path on the page, and the form."""
    with sync_playwright() as playwright:
        chromium = browser.launched(playwright)
        for name in PICTURES["page"]:
            system, _, rest = name.removesuffix(".png").partition("-")
            shown, _, form = rest.rpartition("-")
            size, scheme = FORMS[form]
            with new_home():
                store = Store()
                getattr(ui_systems, system)(store)
                if shown.startswith("jobs-"):
                    with store.transaction() as session:
                        session.merge(ui_systems.metrics("flights-2026-11-23", range(86)))
                with browser.serving() as address:
                    page = chromium.new_page(viewport=size, color_scheme=scheme)
                    page.goto(address)
                    page.goto(address.partition("?")[0] + PATHS[shown])
                    page.wait_for_selector("#live.on")
                    browser.screenshot(page, FOLDER / name)
                    page.close()
            compress(FOLDER / name)
        chromium.close()
