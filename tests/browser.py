"""A headless Chromium for tests that look at pages: its console, its network traffic, its mouse."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM = "/usr/bin/chromium"
CHROMEDRIVER = "/usr/bin/chromedriver"
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def chromium(width: int = 1280, height: int = 900) -> Iterator[WebDriver]:
    """A browser with an empty profile, closed at the end of the block; skips the test aloud where there is none."""
    absent = [path for path in (CHROMIUM, CHROMEDRIVER) if shutil.which(path) is None]
    if absent:
        _skip(f"{' and '.join(absent)} not installed")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for argument in (*QUIET, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        try:
            driver = webdriver.Chrome(options=options, service=Service(CHROMEDRIVER))
        except WebDriverException as error:
            _skip(f"Chromium does not start: {error.msg}")
        try:
            yield driver
        finally:
            driver.quit()


def open_report(driver: WebDriver, path: Path) -> None:
    """Open a report from disk and wait until its last chart is drawn."""
    driver.get_log("performance")  # of the browser's own start page
    console(driver)  # what an earlier page said is not this one's
    driver.get(path.resolve().as_uri())
    WebDriverWait(driver, 60).until(
        lambda d: d.execute_script("return document.documentElement.dataset.drawn") == "all",
        "the report did not finish drawing",
    )


def all_drawn(driver: WebDriver, path: Path, figures: Iterable[str]) -> None:
    """Open a report: every figure has marks, nothing is said on the console, nothing is asked for."""
    open_report(driver, path)
    assert console(driver) == []
    assert requests(driver) == []
    for figure in figures:
        assert len(driver.find_elements(By.CSS_SELECTOR, f"#{figure} svg.marks path[aria-label]")) > 5, figure


def console(driver: WebDriver) -> list[str]:
    """What the console was told since the last call, whatever its level."""
    return [f"{entry['level']}: {entry['message']}" for entry in driver.get_log("browser")]


def requests(driver: WebDriver) -> list[str]:
    """Addresses that the open page has asked for since the last call, but for itself and what it carries inside."""
    page = driver.current_url.split("#")[0]
    events: list[dict[str, Any]] = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    urls = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    # What comes before belongs to the browser's own start page.
    urls = urls[urls.index(page) + 1 :] if page in urls else urls
    return [url for url in urls if not url.startswith(("data:", "blob:"))]


def _skip(reason: str) -> None:
    warnings.warn(f"NO BROWSER: {reason}; pages are not tested", stacklevel=3)
    pytest.skip(f"no browser: {reason}")
