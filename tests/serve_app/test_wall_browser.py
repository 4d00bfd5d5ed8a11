"""The pit wall as people see it: a real Chromium before a real fleet of two replicas, under load and swaps."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Route

from serve_app.settings import parse_settings
from tests.serve_app.local_app import local_app
from tests.serve_app.running_app import ADMIN_KEY, running_app
from tests.serve_app.tiny_model import make_model_folder
from tests.serve_app.wall_browser import Watched, running_browser, watching

pytestmark = pytest.mark.slow

MODEL = "tiny"
KEY = "user-0123456789abcdef"
ENDLESS_TOKENS = 16_000
"""Of an answer that no swap is too slow for: half a minute of the tiny model, and it is stopped."""
SIZES = {"desktop": (1440, 900), "tablet": (820, 1180), "phone": (390, 844)}
MARKUP = "<img src=x onerror=\"document.title='taken'\">"
SCREENSHOTS = os.environ.get("PITSTOP_SCREENSHOTS")
"""A folder for pictures of the wall, where somebody wants to look at them."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("weights")
    return [
        make_model_folder(root / str(seed), seed=seed, max_position_embeddings=2 * ENDLESS_TOKENS) for seed in range(3)
    ]


@pytest.fixture(scope="module")
def url(folders: list[str]) -> Iterator[str]:
    settings = parse_settings(
        {
            "model": folders[0],
            "served_model_name": MODEL,
            "engine": {"page_size": 16, "num_blocks": 2 * ENDLESS_TOKENS // 16},
            "replicas": {"min": 2, "max": 2, "torch_threads": 1, "num_cpus": 0.5, "graceful_shutdown_timeout_s": 1},
        }
    )
    with running_app(settings) as found:
        yield f"{found}/"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as found:
        yield found


@contextmanager
def load(url: str) -> Iterator[None]:
    """Eight clients, one request after the other each, until the end."""
    is_over = threading.Event()
    body = {"model": MODEL, "prompt": [7] * 40, "max_tokens": 200, "ignore_eos": True, "temperature": 1.0}

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=60) as http:
            while not is_over.is_set():
                assert http.post("v1/completions", json=body).status_code == 200

    clients = [threading.Thread(target=ask) for _ in range(8)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        is_over.set()
        for client in clients:
            client.join()


def swap(url: str, folder: str, label: str) -> None:
    body = {"source": {"path": folder}, "label": label}
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    assert httpx.post(f"{url}admin/weights", json=body, headers=headers, timeout=60).status_code == 200


def say(wall: Watched, text: str, *, max_tokens: int) -> None:
    wall.page.fill("#ask textarea", text)
    wall.page.fill("#ask [name=max_tokens]", str(max_tokens))
    wall.page.fill("#ask [name=temperature]", "0")  # then the tiny model never ends by itself
    wall.page.click("#send")


def test_the_wall_follows_a_load(browser: Browser, url: str) -> None:
    with watching(browser, url) as wall:
        wall.says("Both replicas serve version 1.")
        assert wall.page.locator("#replicas .lane").count() == 2
        assert wall.page.locator("#none").is_visible()
        with load(url):
            number = "document.querySelectorAll('.tile .value span')[{}].textContent"
            wall.wait(f"Number({number.format(0)}.replace(',', '')) > 0 && Number({number.format(1)}) >= 4")
            wall.wait(f"Number({number.format(3)}) > 0 && Number({number.format(4)}) > 0")
            wall.wait(
                "[...document.querySelectorAll('.lane .speed b')].every((node) => parseFloat(node.textContent) > 0)"
            )
            wall.wait("document.querySelector('.tile .line').getAttribute('d').split('L').length > 5")
        wall.wait(f"{number.format(0)} === '0' && {number.format(1)} === '0'")


def test_a_swap_is_shown_with_its_phases_and_its_label_is_text(browser: Browser, url: str, folders: list[str]) -> None:
    with watching(browser, url) as wall:
        wall.says("serve version")
        swap(url, folders[1], MARKUP)
        wall.says("Both replicas serve version 2.")
        stop = wall.page.locator("#stops .stop").first
        assert stop.locator(".title").inner_text() == MARKUP
        assert MARKUP in wall.page.locator("#committed").inner_text()
        assert wall.page.locator("main img").count() == 0
        assert {"stage", "commit"} <= {text.split()[0] for text in stop.locator(".keys span").all_inner_texts()}
        assert stop.locator(".pause").inner_text().split("\n")[0].endswith("ms")
        widths = stop.locator(".phases").evaluate(
            "bar => [bar.clientWidth, bar.lastChild.getBoundingClientRect().right - bar.getBoundingClientRect().left]"
        )
        assert widths[0] == pytest.approx(widths[1], abs=1)  # the phases are all of the swap
        assert wall.page.locator(".lane .chip").all_inner_texts() == ["v2", "v2"]
        assert wall.page.title() == "Pitstop"


def test_a_chat_over_a_swap_has_tokens_of_two_colours(browser: Browser, url: str, folders: list[str]) -> None:
    with watching(browser, url) as wall:
        wall.says("Both replicas serve version 2.")
        say(wall, "Go on.", max_tokens=ENDLESS_TOKENS)
        wall.wait("document.querySelectorAll('.turn .token').length > 20")
        swap(url, folders[2], "step 3")
        wall.page.locator(".turn .token.v3").first.wait_for(state="attached")
        wall.page.click("#halt")
        wall.page.locator(".said").wait_for()
        assert wall.page.locator(".said .chip").all_inner_texts() == ["v2", "v3"]
        classes = wall.page.locator(".turn .token").evaluate_all("nodes => nodes.map((node) => node.className)")
        first = classes.index("token v3")
        assert first > 20
        assert set(classes[:first]) == {"token v2"}
        assert set(classes[first:]) == {"token v3"}
        colours = wall.page.locator(".turn .token").evaluate_all(
            "nodes => [...new Set(nodes.map((node) => getComputedStyle(node).borderBottomColor))]"
        )
        assert len(colours) == 2


def test_a_chat_stops_where_it_is_told_to(browser: Browser, url: str) -> None:
    with watching(browser, url) as wall:
        wall.says("Both replicas")
        say(wall, "Go on.", max_tokens=ENDLESS_TOKENS)
        wall.wait("document.querySelectorAll('.turn .token').length > 5")
        wall.page.click("#halt")
        assert "stopped" in wall.page.locator(".said").inner_text()
        wall.wait("[...document.querySelectorAll('.lane .load')].every((node) => node.textContent === '0 running')")


def test_what_a_model_writes_is_text(browser: Browser, url: str) -> None:
    entry = {"token": MARKUP, "logprob": -0.5, "bytes": None, "top_logprobs": []}
    choice = {"index": 0, "delta": {"content": MARKUP}, "logprobs": {"content": [entry]}, "finish_reason": "stop"}
    event = {"choices": [choice | {"weight_versions": [{"version": 9, "start": 0, "end": 1}]}]}
    broken = {"error": {"message": MARKUP}}

    def answer(route: Route) -> None:
        body = "".join(f"data: {json.dumps(each)}\n\n" for each in (event, broken))
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    with watching(browser, url) as wall:
        wall.says("Both replicas")
        wall.page.route("**/v1/chat/completions", answer)
        say(wall, MARKUP, max_tokens=5)
        wall.page.locator(".said").wait_for()
        assert wall.page.locator(".turn.user").inner_text() == MARKUP
        assert wall.page.locator(".turn .token").inner_text() == MARKUP
        assert MARKUP in wall.page.locator(".turn .failed").inner_text()
        assert wall.page.locator("main img").count() == 0
        assert wall.page.title() == "Pitstop"


def test_decisions_of_scaling_are_shown_with_their_reasons_as_text(browser: Browser, url: str) -> None:
    def answer(route: Route) -> None:
        data = route.fetch().json()
        decisions = [{"at": data["at"] - 90, "before": 1, "after": 2, "reason": f"first tokens take 3 s {MARKUP}"}]
        route.fulfill(json=data | {"scaling": decisions})

    with watching(browser, url) as wall:
        wall.says("Both replicas")
        wall.page.route("**/wall/data", answer)
        decision = wall.page.locator("#decisions .decision")
        decision.wait_for()
        assert decision.locator("b").inner_text() == "1 \u2192 2"
        assert decision.locator(".when").inner_text() == "1 min ago"
        assert decision.locator(".why").inner_text() == f"first tokens take 3 s {MARKUP}"
        assert wall.page.locator("main img").count() == 0


def test_an_admin_pauses_swaps_and_goes_back(browser: Browser, url: str, folders: list[str]) -> None:
    with watching(browser, url) as wall:
        page = wall.page
        wall.says("Both replicas")
        assert not page.locator("#controls").is_visible()
        page.click("#admin")
        page.fill("#key input", "a-wrong-key-for-tests")
        page.click("#key .primary")
        page.locator("#sure p", has_text="admin key is missing or wrong").wait_for()
        page.click("#sure .primary")
        assert not page.locator("#controls").is_visible()
        wall.complaints.clear()  # the browser logs the refusal
        page.click("#admin")
        page.fill("#key input", ADMIN_KEY)
        page.click("#key .primary")
        page.locator("#controls").wait_for()
        page.click("#pause button")
        page.click("#sure [value=no]")
        wall.says("Both replicas")
        page.click("#pause button")
        page.click("#sure .primary")
        wall.says("Paused for")
        page.locator("#outcome", has_text="2 replicas paused for 60 s.").wait_for()
        page.click("#resume button")
        page.click("#sure .primary")
        wall.says("Both replicas")
        page.fill("#swap [name=path]", "/nowhere")
        page.click("#swap button")
        page.click("#sure .primary")
        page.locator("#outcome.failed", has_text="/nowhere").wait_for()
        page.locator("#failures .when", has_text="/nowhere").wait_for()
        wall.complaints.clear()
        page.fill("#swap [name=path]", folders[0])
        page.fill("#swap [name=label]", "by hand")
        page.click("#swap button")
        page.click("#sure .primary")
        page.locator("#stops .stop .title", has_text="by hand").wait_for()
        assert page.locator("#failures .stop").count() == 0
        assert not page.locator("#none").is_visible()
        page.locator("#stops .when", has_text=folders[0]).wait_for()  # shown to who has the key alone
        version = page.locator("#committed .chip").inner_text()
        wall.wait("document.querySelector('#rollback select').options.length > 1")
        page.select_option("#rollback select", index=0)
        page.click("#rollback button")
        page.click("#sure .primary")
        page.locator("#stops .stop .title", has_text="rollback of").first.wait_for()
        assert page.locator("#committed .chip").inner_text() == f"v{int(version[1:]) + 1}"
        name = page.locator(".lane .name").first.inner_text()
        page.locator(".lane .drain").first.click()
        page.click("#sure .primary")
        wall.says("1 replica of 2 out of service.")
        page.locator("#outcome", has_text=f"{name}: done.").wait_for()
        page.locator(".lane .drain", has_text="Undrain").click()
        page.click("#sure .primary")
        wall.says("Both replicas")
        page.click("#lock")
        assert not page.locator("#controls").is_visible()
        assert ADMIN_KEY not in page.evaluate(
            "JSON.stringify([sessionStorage, localStorage]) + document.body.innerText"
        )


@pytest.mark.parametrize("name", SIZES)
def test_the_wall_fits_every_screen(name: str, browser: Browser, url: str) -> None:
    width, height = SIZES[name]
    with watching(browser, url, width=width, height=height, scheme="dark" if name == "desktop" else "light") as wall:
        wall.says("Both replicas")
        say(wall, "What is the capital of France?", max_tokens=40)
        wall.page.locator(".said").wait_for()
        assert wall.page.evaluate("document.documentElement.scrollWidth") == width
        small = wall.page.evaluate(
            "[...document.querySelectorAll('button, input, select')].filter((node) => node.offsetWidth)"
            ".filter((node) => node.offsetHeight < 32).map((node) => node.outerHTML)"
        )
        assert small == []
        if SCREENSHOTS is not None:
            wall.page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png", full_page=True)


def test_light_and_dark_follow_the_system_until_somebody_chooses(browser: Browser, url: str) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    with watching(browser, url, scheme="dark") as wall:
        dark = wall.page.evaluate(colour)
        wall.page.emulate_media(color_scheme="light")
        light = wall.page.evaluate(colour)
        assert light != dark
        wall.page.click("#theme")
        assert wall.page.evaluate(colour) == dark
        wall.page.reload()
        assert wall.page.evaluate(colour) == dark
        wall.page.click("#theme")
        assert wall.page.evaluate(colour) == light


def test_where_keys_are_set_the_wall_asks_for_one(
    browser: Browser, folders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PITSTOP_API_KEYS", KEY)
    settings = parse_settings({"model": folders[0], "served_model_name": MODEL, "engine": {"num_blocks": 64}})
    with local_app(settings) as app, watching(browser, f"{app.url}/") as wall:
        for key in ("a-wrong-key-for-tests", KEY):
            wall.page.locator("#key[open]").wait_for()
            wall.page.fill("#key input", key)
            wall.page.click("#key .primary")
        wall.says("The one replica serves version 1.")
        say(wall, "Hello", max_tokens=3)
        wall.page.locator(".said").wait_for()
        assert wall.page.evaluate("sessionStorage.length") == 1
        assert KEY not in wall.page.evaluate("JSON.stringify(localStorage) + location.href + document.cookie")
        assert all("401" in complaint for complaint in wall.complaints)
        wall.complaints.clear()


def test_a_router_that_is_gone_is_said_to_be(browser: Browser, url: str) -> None:
    with watching(browser, url) as wall:
        wall.says("Both replicas")
        wall.page.route("**/wall/data", lambda route: route.abort())
        wall.says("No word of the fleet for")
        wall.page.unroute("**/wall/data")
        wall.says("Both replicas")
        wall.complaints.clear()  # the browser logs each call that failed
