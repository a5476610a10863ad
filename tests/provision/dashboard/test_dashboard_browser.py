"""The dashboard in a real browser: numbers that change, a host that is down, phones, keyboards."""

import json
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_processes import make_job

from provision.dashboard.server import DashboardServer
from provision.dashboard.watch import Watch
from provision.inventory.loader import load
from provision.jobs.store import Job, JobState, ProcessState
from provision.node import process

if not (shutil.which("chromium") and shutil.which("chromedriver")):
    pytest.skip("no browser here: apt-get install chromium chromium-driver", allow_module_level=True)
webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium here: pip install selenium")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

pytestmark = pytest.mark.process
SECONDS = 120
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage"
)
INVENTORY = """\
all:
  vars: {{oeprov_cluster: ads, training_data: generate:100}}
  children:
    parameter_servers:
      hosts:
        here: {{oeprov_kind: local, ansible_connection: local, pmem_mode: none, runtime_extra: none}}
        down: {{oeprov_kind: cpu, ansible_host: 127.0.0.1, ansible_port: {port}}}
    workers:
      hosts: {{here: }}
"""
Browser = Any


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in FLAGS.split():
        options.add_argument(flag)
    # Chromium leaves its socket behind. Not in a tmp_path, which is too long for the name of one.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        env = {**os.environ, "TMPDIR": directory}
        service = webdriver.ChromeService(shutil.which("chromedriver"), env=env)
        driver = webdriver.Chrome(options=options, service=service)
        yield driver
        driver.quit()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job that seems to run: this process is its supervisor and its server."""
    made = make_job(tmp_path_factory.mktemp("cluster"))
    me, started = os.getpid(), process.start_time(os.getpid())
    server = ProcessState(name="server-0", role="parameter_server", host="here", pid=me, started=started)
    made.write_state(
        JobState(phase="running", supervisor_pid=me, supervisor_started=started, processes=[server])
    )
    say(made, event="start", steps=4000)
    for step in (20, 40, 60):
        say(made, event="step", step=step, loss=1 / step, auc=0.6, samples_per_s=1000.0 + step, eta_s=30)
    say(made, event="checkpoint", step=40, path="x", seconds=0.1, rows="files")
    return made


def say(job: Job, **event: object) -> None:
    with job.metrics_file.open("a") as file:
        file.write(json.dumps({"time": "2026-11-22T01:02:03.000+00:00", **event}) + "\n")


@pytest.fixture(scope="module")
def page(browser: Browser, job: Job) -> Iterator[Browser]:
    with socket.socket() as unused, pytest.MonkeyPatch.context() as patch:
        patch.setattr("provision.dashboard.watch.JOBS_SECONDS", 0.2)
        unused.bind(("127.0.0.1", 0))  # and nobody listens there
        directory = job.directory.parents[1]
        (directory / "inventory.yml").write_text(INVENTORY.format(port=unused.getsockname()[1]))
        inventory = load(directory / "inventory.yml", state_dir=directory)
        with Watch(inventory, directory) as watch, DashboardServer(watch.document) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            browser.get(server.url)
            until(browser, lambda: "cannot be reached" in text(browser, "#hosts"))
            yield browser
            server.shutdown()
            thread.join()


def until(browser: Browser, done: Callable[[], bool]) -> None:
    WebDriverWait(browser, SECONDS, 0.05).until(lambda _: done())


def text(browser: Browser, selector: str) -> str:
    return str(browser.find_element(By.CSS_SELECTOR, selector).text)


def screen(browser: Browser, width: int, height: int) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def test_shown_numbers_update_while_the_page_is_open(page: Browser, job: Job) -> None:
    card = f"[data-job={job.id}]"
    until(page, lambda: "step 60 of 4,000" in text(page, "#jobs"))
    assert "1,060" in text(page, card)
    assert page.title == f"{job.id} · ads · oeprov"
    opened = page.find_element(By.CSS_SELECTOR, f"{card} summary")
    opened.click()
    say(job, event="step", step=80, loss=0.25, auc=0.7, samples_per_s=54321.0, eta_s=20)
    until(page, lambda: "step 80 of 4,000" in text(page, card))
    assert "54,321" in text(page, card)
    assert "54,321" in text(page, "#tiles")
    bar = page.find_element(By.CSS_SELECTOR, f"{card} progress")
    assert bar.get_attribute("value") == "80"
    assert page.find_elements(By.CSS_SELECTOR, f"{card} details[open]"), "what was opened stays so"
    label = page.find_element(By.CSS_SELECTOR, f"{card} svg").get_attribute("aria-label")
    assert label == "Throughput, samples/s: 54,321 now, between 1,020 and 54,321 from step 20 to 80"
    assert not [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"]


def test_a_host_that_is_down_says_why_and_comes_first(page: Browser) -> None:
    rows = page.find_elements(By.CSS_SELECTOR, "#hosts tbody tr")
    assert [row.find_element(By.TAG_NAME, "th").text for row in rows] == ["down", "here"]
    assert "refuses connections; is sshd running there" in rows[0].text
    assert "1 of 2" in text(page, "#tiles .bad")


def test_layout_fits_phone_dark_and_wide_screens(page: Browser) -> None:
    grounds = set()
    for width, height, scheme in ((390, 844, "dark"), (390, 844, "light"), (1280, 800, "light")):
        screen(page, width, height)
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
        assert page.execute_script("return document.documentElement.scrollWidth") <= width
        grounds.add(page.execute_script("return getComputedStyle(document.body).backgroundColor"))
        for cell in page.find_elements(By.CSS_SELECTOR, "#hosts td:not(.empty)"):
            assert cell.is_displayed()
    assert len(grounds) == 2


def test_keyboard_and_screen_reader(page: Browser) -> None:
    page.refresh()  # what was clicked before is where Tab would begin
    until(page, lambda: "cannot be reached" in text(page, "#hosts"))
    page.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    assert page.switch_to.active_element.text == "Skip to training"
    page.switch_to.active_element.send_keys(Keys.ENTER)
    assert page.switch_to.active_element.get_attribute("id") == "training"
    tree = page.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    roles = {
        (node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if "role" in node
    }
    assert {("heading", "Training"), ("heading", "Hosts"), ("rowheader", "down")} <= roles
    assert ("columnheader", "persistent memory") in roles
    for role, name in roles:
        assert name or role not in ("img", "image", "progressbar", "progressIndicator", "link", "article")


def test_the_page_says_while_the_dashboard_does_not_answer(page: Browser) -> None:
    page.execute_cdp_cmd("Network.enable", {})
    page.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*data.json*"]})
    until(page, lambda: "does not answer any more" in text(page, "#alert"))
    page.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
    until(page, lambda: text(page, "#alert") == "")


def test_a_job_on_kubernetes_and_words_that_look_like_html(browser: Browser) -> None:
    pod = {"name": "ctr-1-0", "role": "parameter_server", "node": "re6p-1", "state": "Running", "ready": True}
    job = {
        "job": "ctr-1",
        "on": "kubernetes",
        "state": "failed",
        "message": "<b id=made>no</b>",
        "namespace": "ads",
        "claim": "deeprec",
        "run": "runs/ctr-1",
        "progress": "step 20/40  loss 0.61",
        "problem": "",
        "pods": [{**pod, "restarts": 2, "trouble": "ImagePullBackOff"}],
        "detailed": True,
    }
    nothing = {"at": None, "list": [], "trouble": "the inventory is gone"}
    found = {"cluster": "k", "inventory": "i.yml", "now": 10.0, "hosts_seconds": 30.0, "hosts": nothing}
    document = json.dumps({**found, "jobs": {"at": 9.0, "list": [job], "trouble": ""}}).encode()
    with DashboardServer(lambda _: document) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        browser.get(server.url)
        until(browser, lambda: "ImagePullBackOff" in text(browser, "#jobs"))
        assert "<b id=made>no</b>" in text(browser, "#jobs")
        assert "Kubernetes, namespace ads" in text(browser, "#jobs")
        assert "the inventory is gone" in text(browser, "#hosts")
        assert not browser.find_elements(By.CSS_SELECTOR, "#made")
        server.shutdown()
        thread.join()


def many_hosts(count: int) -> list[dict[str, Any]]:
    """Ready hosts, but every 100th is down, every 50th has a problem, and every 10th has a step to do."""
    nothing: dict[str, Any] = {
        "error": "",
        "ready": True,
        "steps": [],
        "problems": [],
        "places": [],
        "gpus": [],
    }
    seen = {
        **nothing,
        "mode": "fsdax",
        "os": "rocky",
        "kernel": "5.4",
        "dram_bytes": 1 << 38,
        "pmem_bytes": 1 << 40,
    }
    hosts = []
    for number in range(1, count + 1):
        host = {"host": f"re6p-{number:04}", "kind": "re6p", "roles": ["worker"], "wanted_mode": "fsdax"}
        if number % 100 == 0:
            host |= {"error": "refuses connections", "ready": False}
        elif number % 50 == 0:
            host |= {**seen, "ready": False, "problems": ["the module has 1008 GiB"]}
        elif number % 10 == 0:
            step = {"what": f"make ext4 on {host['host']}", "why": "", "destroys": [], "reboots": False}
            host |= {**seen, "ready": False, "steps": [step]}
        else:
            host |= seen
        hosts.append(host)
    return hosts


def test_a_thousand_hosts_are_shown_by_pages_and_filters(browser: Browser) -> None:
    hosts = many_hosts(1000)
    jobs = {"at": 9.0, "list": [], "trouble": ""}
    found = {"cluster": "big", "inventory": "i.yml", "now": 10.0, "hosts_seconds": 30.0, "jobs": jobs}

    def document(_: float | None) -> bytes:
        return json.dumps({**found, "hosts": {"at": 9.0, "list": hosts, "trouble": ""}}).encode()

    def names() -> list[str]:
        script = "return [...document.querySelectorAll('#hosts tbody th')].map((cell) => cell.textContent)"
        return list(browser.execute_script(script))

    def choose(state: str) -> None:
        Select(browser.find_element(By.ID, "state")).select_by_value(state)

    with DashboardServer(document) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        browser.get(server.url)
        screen(browser, 1280, 800)
        until(browser, lambda: len(names()) == 50)
        assert names()[:11] == [f"re6p-{number:04}" for number in [*range(100, 1001, 100), 10]]
        assert text(browser, "#shown") == "1 to 50 of 1,000"
        assert not browser.find_element(By.ID, "previous").is_enabled()
        assert [option.text for option in browser.find_elements(By.CSS_SELECTOR, "#state option")] == [
            "all (1,000)",
            "cannot be reached (10)",
            "problem (10)",
            "not what is asked for (80)",
            "ready (900)",
        ]
        browser.find_element(By.ID, "next").click()
        assert text(browser, "#shown") == "51 to 100 of 1,000"
        choose("problem")
        until(browser, lambda: names() == [f"re6p-{number:04}" for number in range(50, 1000, 100)])
        choose("not what is asked for")
        until(browser, lambda: text(browser, "#shown") == "1 to 50 of 80")
        browser.find_element(By.CSS_SELECTOR, "[data-key='re6p-0020'] summary").click()
        browser.find_element(By.ID, "words").send_keys("FSDAX 0020")
        until(browser, lambda: names() == ["re6p-0020"])
        assert browser.find_elements(By.CSS_SELECTOR, "[data-key='re6p-0020'] details[open]")
        browser.find_element(By.ID, "words").send_keys("0", Keys.ENTER)
        until(browser, lambda: text(browser, "#shown") == "no such host")
        browser.find_element(By.ID, "words").clear()
        browser.find_element(By.ID, "words").send_keys("re6p-00")
        until(browser, lambda: text(browser, "#shown") == "1 to 8 of 8")
        assert not browser.find_elements(By.CSS_SELECTOR, "#hosts details[open]"), "of another host"
        hosts[19] |= {"steps": [], "ready": True}  # what is new comes, and the filters stay
        until(browser, lambda: "re6p-0020" not in names())
        assert text(browser, "#shown") == "1 to 7 of 7"
        for width in (390, 1280):
            screen(browser, width, 800)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        tree = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        named = {
            (node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if "role" in node
        }
        assert {("searchbox", "Name or word"), ("combobox", "State"), ("button", "Next")} <= named
        assert browser.execute_script("return document.querySelectorAll('*').length") < 3000
        server.shutdown()
        thread.join()
