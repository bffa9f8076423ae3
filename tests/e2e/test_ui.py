"""The web page in a real browser, against a real server with the built-in model."""

from __future__ import annotations

import base64
import io
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from PIL import Image

from tests.e2e.conftest import Server, running
from tests.support.browser import WAIT_MS, browser
from tests.support.multimodal import write_served

pytestmark = pytest.mark.slow

AXE = Path(__file__).parents[2] / "ui/node_modules/axe-core/axe.min.js"
DESK, PHONE = {"width": 1360, "height": 860}, {"width": 390, "height": 844}
VIEWS = ("chat", "dashboard", "cache", "requests")
CAPITAL = "What is the capital of France?"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    with browser() as made:
        yield made


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    """The built-in model, without a key."""
    with running("sapling") as made:
        yield made


class Tab:
    """A page in a profile of its own.

    Attributes:
        page: Playwright's.
        faults: Errors of the browser, above all violations of the content policy.
        hosts: Hosts that it contacted.
        sent: Bodies of chats.
    """

    def __init__(self, chrome: Any, url: str, **options: Any) -> None:
        self.context = chrome.new_context(**{"viewport": DESK, **options})
        self.context.set_default_timeout(WAIT_MS)
        self.page, self.url = self.context.new_page(), url
        self.faults: list[str] = []
        self.hosts: set[str] = set()
        self.sent: list[dict[str, Any]] = []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", self._said)
        self.page.on("request", self._asked)

    def open(self, view: str = "chat") -> Any:
        self.page.goto(f"{self.url}/ui#/{view}")
        return self.page

    def _said(self, message: Any) -> None:
        refused = message.text.startswith("Failed to load resource")  # reported by its status
        if message.type == "error" and not refused:
            self.faults.append(message.text)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(("data:", "blob:")):
            self.hosts.add(urlsplit(request.url).netloc)
        if request.url.endswith("/v1/chat/completions"):
            self.sent.append(json.loads(request.post_data))

    def say(self, text: str) -> str:
        """Sends a message; returns the answer once it is whole."""
        done = self.page.get_by_role("link", name="Inspect this request")
        before = done.count()
        box = self.page.get_by_label("Message", exact=True)
        box.fill(text)
        box.press("Enter")
        done.nth(before).wait_for()
        return self.page.locator(".turn.assistant").last.locator(".markdown").inner_text()

    def settings(self) -> Any:
        self.page.get_by_role("button", name="Settings", exact=True).click()
        return self.page.locator(".drawer")


@contextmanager
def opened(chrome: Any, url: str, **options: Any) -> Iterator[Tab]:
    tab = Tab(chrome, url, **options)
    try:
        yield tab
        assert tab.faults == []
        assert tab.hosts <= {urlsplit(url).netloc}
    finally:
        tab.context.close()


@pytest.fixture
def tab(chrome, plain) -> Iterator[Tab]:
    with opened(chrome, plain.url) as made:
        yield made


def chat(url: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": CAPITAL}], **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]


def requests(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/requests", timeout=60).json()


def eventually(page: Any, holds: Callable[[], bool]) -> None:
    for _ in range(WAIT_MS // 100):
        if holds():
            return
        page.wait_for_timeout(100)
    pytest.fail("it did not come true")


def test_the_key_stays_in_the_tab_and_opens_the_page(chrome, sapling):
    with opened(chrome, sapling.url) as tab:
        page = tab.open()
        field = page.get_by_label("Key of this server")
        field.fill("wrong")
        field.press("Enter")
        page.get_by_role("alert").get_by_text("does not know the key").wait_for()
        field.fill("secret")
        field.press("Enter")
        page.get_by_role("dialog", name="API key").wait_for(state="hidden")
        assert "Paris" in tab.say(CAPITAL)

        assert page.evaluate("sessionStorage['sylvan.key']") == "secret"
        assert "secret" not in page.evaluate("JSON.stringify(localStorage)")
        assert page.context.cookies() == []
        other = tab.context.new_page()
        other.goto(f"{sapling.url}/ui")
        other.get_by_role("dialog", name="API key").wait_for()


def test_an_answer_streams_and_is_that_of_the_api(tab, plain):
    page = tab.open()
    tab.settings().get_by_label("Temperature").fill("0")
    expected = chat(plain.url, temperature=0)["message"]["content"]

    assert tab.say(CAPITAL) == expected
    assert tab.sent[0]["stream"] is True
    assert tab.sent[0]["temperature"] == 0
    page.reload()  # the conversation is kept
    assert page.locator(".turn.assistant .markdown").inner_text() == expected


def test_stop_ends_the_request_on_the_server(tab, plain):
    page = tab.open()
    httpx.post(f"{plain.url}/pause_generation", json={"mode": "retract"}, timeout=60)
    try:  # so that no answer is too quick to be stopped
        page.get_by_label("Message", exact=True).fill("Count from 1 to 10.")
        page.get_by_role("button", name="Send").click()
        page.locator(".waiting").wait_for()
        rid = tab.sent[0]["rid"]
        eventually(page, lambda: rid in [each["rid"] for each in requests(plain.url)["running"]])
        page.get_by_role("button", name="Stop").click()
        page.locator(".footnote", has_text="stopped").wait_for()
        eventually(page, lambda: not requests(plain.url)["running"])
    finally:
        httpx.post(f"{plain.url}/continue_generation", timeout=60)
    past = requests(plain.url)["requests"][0]

    assert (past["rid"], past["finish"]) == (rid, "abort_client")
    assert page.get_by_role("button", name="Send").count() == 1


def test_messages_are_edited_and_answers_tried_again(tab):
    page = tab.open()
    tab.say("What is 17 + 25?")
    page.locator(".turn.user").hover()
    page.get_by_role("button", name="Edit").click()
    box = page.get_by_label("Edit message")
    box.fill(CAPITAL)
    box.press("Enter")
    page.locator(".turn.assistant", has_text="Paris").wait_for()
    assert page.locator(".turn.user").count() == 1
    assert [m["content"] for m in tab.sent[-1]["messages"]] == [CAPITAL]

    page.get_by_role("button", name="Earlier version").click()
    page.locator(".turn.assistant", has_text="42").wait_for()
    page.get_by_role("button", name="Try again").click()
    page.get_by_label("Version 2 of 2").wait_for()
    assert [m["content"] for m in tab.sent[-1]["messages"]] == ["What is 17 + 25?"]


def test_answers_follow_a_json_schema_and_faults_of_it_are_named(tab):
    page = tab.open()
    drawer = tab.settings()
    drawer.get_by_label("Answer as").select_option("json_schema")
    schema = drawer.get_by_label("JSON schema")
    schema.fill("{")
    drawer.get_by_role("alert").get_by_text("Expected a JSON schema").wait_for()
    schema.fill(json.dumps(SCHEMA))

    assert json.loads(tab.say("A number, please."))["n"] in (1, 2)
    schema.fill('{"type": "nonsense"}')
    page.get_by_label("Message", exact=True).fill("Again.")
    page.get_by_label("Message", exact=True).press("Enter")
    page.locator(".turn .notice.bad", has_text="nonsense").wait_for()  # as the server says it


def test_a_tool_is_called_and_its_result_goes_back(tab):
    page = tab.open()
    tab.settings().get_by_label("Tools that the model may call").fill(json.dumps([TOOL]))
    box = page.get_by_label("Message", exact=True)
    box.fill("What is the weather in Paris?")
    box.press("Enter")
    call = page.locator(".call")
    call.get_by_text("get_weather").wait_for()
    given = page.get_by_label("Result for the model")
    given.fill('{"sky": "clear"}')
    page.get_by_role("button", name="Send result").click()
    page.get_by_role("link", name="Inspect this request").nth(1).wait_for()

    roles = [message["role"] for message in tab.sent[-1]["messages"]]
    assert roles == ["user", "assistant", "tool"]
    asked, told = tab.sent[-1]["messages"][1:]
    assert json.loads(asked["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    assert told["tool_call_id"] == asked["tool_calls"][0]["id"]


def test_probabilities_are_shown_at_each_token(tab, plain):
    page = tab.open()
    drawer = tab.settings()
    drawer.get_by_label("Token probabilities").check()
    drawer.get_by_label("Temperature").fill("0")
    box = page.get_by_label("Message", exact=True)
    box.fill(CAPITAL)
    box.press("Enter")
    page.get_by_role("link", name="Inspect this request").wait_for()
    told = chat(plain.url, temperature=0, logprobs=True, top_logprobs=5)["logprobs"]["content"]
    shown = page.locator(".token")

    assert shown.all_inner_texts() == [token["token"] for token in told]
    shown.nth(2).hover()
    card = page.locator(".token-card")
    assert card.locator("li").count() == 5
    best = card.locator("li code").first.inner_text()
    assert best.replace("␣", " ") == told[2]["top_logprobs"][0]["token"]
    page.mouse.move(5, 5)
    card.wait_for(state="hidden")
    page.locator(".token-text").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".token.at").get_attribute("data-i") == "1"


def test_two_settings_answer_side_by_side(tab):
    page = tab.open()
    page.get_by_role("button", name="Compare side by side").click()
    page.locator(".drawer").get_by_label("Longest answer").fill("2")  # of side B
    box = page.get_by_label("Message", exact=True)
    box.fill(CAPITAL)
    box.press("Enter")
    page.get_by_role("link", name="Inspect this request").nth(1).wait_for()
    left, right = page.locator(".transcript .turn.assistant .markdown").all_inner_texts()

    assert "Paris" in left
    assert right in left
    assert right != left
    assert sorted(body.get("max_tokens", 0) for body in tab.sent) == [0, 2]


def test_a_model_without_eyes_is_offered_no_pictures(tab):
    with tab.page.expect_response("**/model_info"):
        page = tab.open()
    page.wait_for_timeout(300)

    assert page.get_by_role("button", name="Add pictures").count() == 0


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> Iterator[Server]:
    """A tiny model that sees."""
    folder = write_served("qwen2-vl", tmp_path_factory.mktemp("sees"))
    with running(str(folder), "--dtype", "float32") as made:
        yield made


def picture(color: str) -> dict[str, Any]:
    """A file to choose."""
    file = io.BytesIO()
    Image.new("RGB", (60, 40), color).save(file, "PNG")
    return {"name": f"{color}.png", "mimeType": "image/png", "buffer": file.getvalue()}


def data_url(file: dict[str, Any]) -> str:
    return f"data:{file['mimeType']};base64,{base64.b64encode(file['buffer']).decode()}"


def without_pictures(body: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": body["messages"][0]["content"][-1:]}]
    return {"messages": messages, "max_tokens": 1}


def test_a_model_sees_the_pictures_of_the_page(chrome, seeing):
    with opened(chrome, seeing.url) as tab:
        page = tab.open()
        settings = tab.settings()
        settings.get_by_label("Temperature").fill("0")
        settings.get_by_label("Longest answer").fill("12")
        page.get_by_role("button", name="Add pictures").wait_for()
        files = page.locator("input[type=file]")
        files.set_input_files({"name": "a.svg", "mimeType": "image/svg+xml", "buffer": b"<svg/>"})
        page.get_by_role("alert").get_by_text("a.svg is no PNG").wait_for()
        files.set_input_files([picture("red"), picture("green"), picture("blue")])
        page.get_by_alt_text("Picture 3").wait_for()
        page.get_by_role("button", name="Remove picture 2").click()
        faults = violations(page, "pictures") if AXE.exists() else []

        tab.say("What is this?")

        content = tab.sent[-1]["messages"][0]["content"]
        urls = [data_url(picture(color)) for color in ("red", "blue")]
        assert [part["image_url"]["url"] for part in content[:2]] == urls
        assert content[2] == {"type": "text", "text": "What is this?"}
        shown = page.locator(".turn.user img")
        assert shown.evaluate_all("all => all.map(each => each.naturalWidth)") == [60, 60]
        assert faults + (violations(page, "seen") if AXE.exists() else []) == []
        past = requests(seeing.url)["requests"][0]
        blind = httpx.post(f"{seeing.url}/v1/chat/completions", json=without_pictures(tab.sent[0]))
        assert past["prompt_tokens"] > blind.json()["usage"]["prompt_tokens"] + 2
        assert past["finish"] == "length"
        page.get_by_role("button", name="Try again").click()
        page.get_by_label("Version 2 of 2").wait_for()
        assert tab.sent[1]["messages"] == tab.sent[0]["messages"]


def test_what_models_write_never_becomes_markup(chrome, plain):
    evil = (
        "<img src=x onerror=alert(1)> [a](javascript:alert(2)) **b** ![c](https://evil.example/p)"
    )
    pattern = re.escape(evil)
    with opened(chrome, plain.url) as tab:
        page = tab.open()
        drawer = tab.settings()
        drawer.get_by_label("Answer as").select_option("regex")
        drawer.get_by_label("Regular expression").fill(pattern)
        said = tab.say("Repeat.")

        assert "<img src=x onerror=alert(1)>" in said
        answer = page.locator(".turn.assistant .markdown")
        assert answer.locator("img").count() == 0
        assert answer.locator("strong").inner_text() == "b"
        hrefs = [a.get_attribute("href") for a in answer.locator("a").all()]
        assert hrefs == ["https://evil.example/p"]  # a link to follow, not a picture to load


def test_a_request_is_inspected_from_its_answer(tab):
    page = tab.open()
    tab.say(CAPITAL)
    tab.say("Who are you?")
    page.get_by_role("link", name="Inspect this request").last.click()
    page.locator(".explanation", has_text="prompt tokens were cached").wait_for()
    rid = tab.sent[-1]["rid"]

    assert page.locator(".inspector .rid").inner_text() == rid
    lanes = page.locator(".inspector .span-name").all_inner_texts()
    assert any("decode" in lane for lane in lanes)
    told = httpx.get(f"{tab.url}/cache/explain", params={"rid": rid}).json()
    words = f"{told['cached_tokens']} of {told['prompt_tokens']} prompt tokens"
    assert words in page.locator(".explanation").inner_text()
    assert page.locator(".requests tbody tr.chosen").count() == 1


def test_the_tree_is_walked_with_the_keyboard(tab):
    page = tab.open()
    tab.say("What is 17 + 25?")
    tab.say("Count from 1 to 10.")
    page = tab.open("cache")
    item = page.get_by_role("treeitem").first
    item.wait_for()
    item.focus()
    for key in ("End", "Home"):
        page.keyboard.press(key)
    page.locator(".node-text").wait_for()
    tree = httpx.get(f"{tab.url}/cache/tree").json()

    assert page.get_by_role("treeitem", selected=True).count() == 1
    assert page.locator(".node-text").inner_text().strip() in {
        node["text"].strip() for node in tree["nodes"]
    }
    assert {node["owner"] for node in tree["nodes"]} == {None}
    assert page.get_by_role("rowheader", name="everyone").count() == 1


def test_the_dashboard_shows_what_happens(tab):
    page = tab.open("dashboard")
    tile = page.locator(".tile", has_text="First token")
    tile.wait_for()
    for _ in range(20):
        chat(tab.url)
        if re.search(r"\d", tile.locator(".tile-value").inner_text()):
            break
        page.wait_for_timeout(500)
    assert re.search(r"\d", tile.locator(".tile-value").inner_text())
    page.get_by_role("rowheader", name="stopped by themselves").wait_for()
    assert page.get_by_role("img", name=re.compile("^Throughput")).count() == 1
    assert page.locator(".facts", has_text="sapling").count() == 1


@pytest.mark.parametrize(("scheme", "size"), [("light", DESK), ("dark", DESK), ("light", PHONE)])
def test_every_view_is_usable_by_everyone(chrome, plain, scheme, size):
    if not AXE.exists():
        pytest.skip("needs axe-core: npm ci in ui/")
    with opened(chrome, plain.url, color_scheme=scheme, viewport=size) as tab:
        page = tab.open()
        tab.say("Count from 1 to 10.")
        tab.settings().get_by_label("Token probabilities").check()
        found = violations(page, "settings")
        page.get_by_role("button", name="Close settings").click()
        page.get_by_role("button", name="Compare side by side").click()
        page.get_by_role("button", name="Close settings").click()
        found += violations(page, "compare")
        for view in VIEWS:
            tab.open(view)
            page.locator(".card, .turn").first.wait_for()
            if view == "requests":
                page.get_by_role("button", name="Inspect").first.click()
                page.locator(".explanation").wait_for()
            found += violations(page, view)
        page.get_by_role("button", name=re.compile("^Key")).click()
        found += violations(page, "login")
        assert found == []


def violations(page: Any, where: str) -> list[str]:
    """Findings of axe-core, and elements that are wider than the screen."""
    page.evaluate(AXE.read_text())
    result = page.evaluate("axe.run()")
    wide = page.evaluate("document.documentElement.scrollWidth > innerWidth")
    return [f"{where}: wider than the screen"] * wide + [
        f"{where}: {rule['id']}: {node['html'][:160]} {node['failureSummary'][:200]}"
        for rule in result["violations"]
        for node in rule["nodes"]
    ]


def test_the_page_continues_after_the_server_was_restarted(chrome):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with running("sapling", port=port) as first:
        tab = Tab(chrome, first.url)
        page = tab.open("dashboard")
        page.locator(".tile").first.wait_for()
        first.kill()
        page.locator(".banner.bad").wait_for()
    with running("sapling", port=port) as second:
        assert second.url == tab.url
        page.locator(".banner").wait_for(state="detached")
        tab.open("chat")
        assert "Paris" in tab.say(CAPITAL)
        assert tab.faults == []
        tab.context.close()


@contextmanager
def routing(*urls: str) -> Iterator[str]:
    """`sylvan route` in front of servers."""
    code = "import sys; from sylvan.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "route", "--until-eof", "--port", "0", "--worker-urls"]
    process = subprocess.Popen(
        [*command, *urls], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.search(r"routes to .* at (http://\S+)", line):
                yield found[1]
                break
        else:
            pytest.fail("the gateway did not start")
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def test_the_gateway_has_a_page_of_its_own(chrome, plain):
    with routing(plain.url) as url, opened(chrome, url) as tab:
        for _ in range(300):
            if httpx.get(f"{url}/ready", timeout=60).status_code == 200:
                break
            tab.page.wait_for_timeout(200)
        page = tab.open("gateway")
        card = page.locator(".worker")
        card.get_by_text("breaker closed").wait_for()
        assert plain.url in card.inner_text()
        assert "healthy" in card.inner_text()
        assert page.get_by_role("link", name="Cache").count() == 0  # each worker has its own

        tab.open("chat")
        assert "Paris" in tab.say(CAPITAL)
        page.get_by_role("link", name="Inspect this request").click()
        page.locator(".inspector .span-name", has_text="decode").wait_for()
        if AXE.exists():
            tab.open("gateway")
            card.wait_for()
            assert violations(page, "gateway") == []
