"""A headless Chromium to look at pages with, and what it complained of."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

WAIT_S = 20.0
PROGRAMS = ("chromium", "chromedriver")


class Browser:
    """One window. `open` waits until the scripts of a page are done."""

    def __init__(self) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
            options.add_argument(word)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))

    def open(self, page: Path, width: int = 1280, height: int = 900) -> None:
        """Loads a file in a window of that size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get(page.resolve().as_uri())
        deadline = time.monotonic() + WAIT_S
        while self.run("return document.documentElement.dataset.ready") != "yes":
            assert time.monotonic() < deadline, f"{page} is not ready after {WAIT_S} s: {self.complaints()}"

    def run(self, script: str, *arguments: object) -> Any:  # noqa: ANN401 - any JSON value
        """What a script returns."""
        return self.driver.execute_script(script, *arguments)

    def complaints(self) -> list[str]:
        """What the console holds, warnings and errors, since it was last asked."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in {"WARNING", "SEVERE"}]

    def text(self, selector: str) -> str:
        """What a person reads in an element."""
        return self.driver.find_element("css selector", selector).text

    def press(self, selector: str, *keys: str) -> None:
        """Keys sent to an element."""
        self.driver.find_element("css selector", selector).send_keys(*keys)

    def mouse(self, selector: str, x: float, y: float, *, click: bool = False, shift: bool = False) -> None:
        """Moves to a place of an element, from its upper left corner; clicks there."""
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        element = self.driver.find_element("css selector", selector)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        box = element.size
        actions = ActionChains(self.driver, duration=0)
        actions.move_to_element_with_offset(element, round(x - box["width"] / 2), round(y - box["height"] / 2))
        if click:
            actions = actions.key_down(Keys.SHIFT).click().key_up(Keys.SHIFT) if shift else actions.click()
        actions.perform()


def open_browser() -> Browser:
    """A browser; skips the test where the machine has none."""
    if any(shutil.which(name) is None for name in PROGRAMS):
        pytest.skip("Chromium is absent: install Debian's chromium and chromium-driver")
    return Browser()
