"""Draws the diagrams of docs/concepts as SVG for light and dark themes, in one style."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

STYLE = """<style>
.diagram-art { font: 14px system-ui, sans-serif; }
.diagram-art .box { fill: #f1f5f4; stroke: #5b716d; stroke-width: 1.3; }
.diagram-art .teal { fill: #cdeae5; stroke: #00796b; }
.diagram-art .amber { fill: #fdeccb; stroke: #b26a00; }
.diagram-art .blue { fill: #d9e6fb; stroke: #2f5fb3; }
.diagram-art .frame { fill: none; stroke: #8aa09c; stroke-dasharray: 5 4; }
.diagram-art text { fill: #1c2625; }
.diagram-art .small { font-size: 12px; fill: #4b5d5a; }
.diagram-art .line { fill: none; stroke: #41544f; stroke-width: 1.5; }
.diagram-art .head { fill: #41544f; }
@media (prefers-color-scheme: dark) {
.diagram-art .box { fill: #26302f; stroke: #8fa8a3; }
.diagram-art .teal { fill: #0f4740; stroke: #4db6ac; }
.diagram-art .amber { fill: #533b0c; stroke: #e0a54a; }
.diagram-art .blue { fill: #203a66; stroke: #86a9ea; }
.diagram-art text { fill: #e8efee; }
.diagram-art .small { fill: #b3c3c0; }
.diagram-art .line { stroke: #a9bab6; }
.diagram-art .head { fill: #a9bab6; }
}
</style>"""


class Drawing:
    """Boxes, arrows and texts on a canvas; x grows to the right, y down.

    Args:
        width: Width of the canvas.
        height: Height of the canvas.
        title: Description for screen readers.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = (
            f'<svg class="diagram-art" xmlns="http://www.w3.org/2000/svg" role="img" '
            f'viewBox="0 0 {width} {height}" aria-label="{escape(title)}">'
        )
        self._parts: list[str] = []

    def box(self, at: Sequence[int], lines: str = "", kind: str = "", rest: str = "") -> None:
        """A box at (x, y, width, height) with a title, and smaller lines below it."""
        x, y, width, height = at
        self._parts.append(
            f'<rect class="box {kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="7"/>'
        )
        titles, smalls = lines.splitlines(), rest.splitlines()
        top = y + height / 2 - (18 * len(titles) + 16 * len(smalls)) / 2 + 13
        for i, line in enumerate(titles):
            self.text(x + width / 2, top + 18 * i, line)
        for i, line in enumerate(smalls):
            self.text(x + width / 2, top + 18 * len(titles) + 16 * i, line, small=True)

    def frame(self, at: Sequence[int], title: str) -> None:
        """A dashed frame around others, with its title inside at the top left."""
        x, y, width, height = at
        self._parts.append(
            f'<rect class="frame" x="{x}" y="{y}" width="{width}" height="{height}" rx="10"/>'
        )
        self.text(x + 12, y + 20, title, small=True, anchor="start")

    def text(
        self, x: float, y: float, text: str, *, small: bool = False, anchor: str = "middle"
    ) -> None:
        """One line of text."""
        kind = ' class="small"' if small else ""
        self._parts.append(
            f'<text{kind} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def arrow(self, *points: tuple[int, int], both: bool = False) -> None:
        """A line through points with a head at its end, or at both."""
        path = "M" + " L".join(f"{x} {y}" for x, y in points)
        self._parts.append(f'<path class="line" d="{path}"/>')
        self._head_at(points[-1], points[-2])
        if both:
            self._head_at(points[0], points[1])

    def line(self, *points: tuple[int, int]) -> None:
        """A line without a head."""
        path = "M" + " L".join(f"{x} {y}" for x, y in points)
        self._parts.append(f'<path class="line" d="{path}"/>')

    def _head_at(self, tip: tuple[int, int], tail: tuple[int, int]) -> None:
        dx, dy = tip[0] - tail[0], tip[1] - tail[1]
        length = (dx * dx + dy * dy) ** 0.5
        ux, uy = 8 * dx / length, 8 * dy / length
        corners = [
            (tip[0], tip[1]),
            (tip[0] - ux - uy / 2, tip[1] - uy + ux / 2),
            (tip[0] - ux + uy / 2, tip[1] - uy - ux / 2),
        ]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        self._parts.append(f'<polygon class="head" points="{points}"/>')

    def svg(self) -> str:
        """The file."""
        return "\n".join([self._head, STYLE, *self._parts, "</svg>"]) + "\n"


def overview() -> str:
    """Overview of Sylvan's parts."""
    d = Drawing(900, 330, "Clients, gateway, servers and stores of Sylvan")
    d.box((20, 40, 190, 66), "HTTP clients", rest="OpenAI, Anthropic,\nOllama, SGLang APIs")
    d.box((20, 132, 190, 66), "Programs", rest="frontend language,\nsylvan.Engine")
    d.box((20, 224, 190, 66), "Web page", rest="/ui: chat, dashboard,\nprefix tree")
    d.box(
        (290, 112, 160, 106),
        "Gateway",
        "blue",
        "sylvan route (optional)\ncache-aware routing\nfailover",
    )
    d.frame((530, 14, 350, 302), "sylvan serve: one replica")
    d.box((550, 44, 150, 58), "API process", "blue", "HTTP, tokenizer")
    d.box((550, 136, 150, 66), "Scheduler", "teal", "which tokens to\ncompute next")
    d.box((550, 238, 150, 58), "Detokenizer", rest="ids to text, stops")
    d.box((730, 44, 130, 58), "Radix cache", "amber", "shared prefixes")
    d.box((730, 136, 130, 66), "Executor", "teal", "native kernels,\nTriton, PyTorch")
    d.box((730, 238, 130, 58), "KV tiers", "amber", "host memory, disk,\nRedis, S3")
    for y in (73, 165, 257):
        d.arrow((210, y), (288, 165))
    d.arrow((450, 165), (548, 60))
    d.arrow((625, 102), (625, 134))
    d.arrow((625, 202), (625, 236))
    d.arrow((700, 169), (728, 169), both=True)
    d.arrow((700, 140), (728, 98), both=True)
    d.arrow((795, 202), (795, 236), both=True)
    d.arrow((550, 267), (540, 267), (540, 90), (549, 90))
    return d.svg()


def request() -> str:
    """Draw the way of a request through the processes."""
    d = Drawing(
        900, 420, "The way of a request: client, API process, scheduler, detokenizer and back"
    )
    d.box((20, 170, 120, 70), "Client", rest="HTTP, or\nsylvan.Engine")
    d.frame((190, 20, 220, 380), "API process (asyncio)")
    d.box((210, 60, 180, 56), "HTTP endpoint", "blue", "keys, limits, body")
    d.box((210, 140, 180, 56), "TokenizerManager", "blue", "template, token ids")
    d.box((210, 220, 180, 56), "ReplicaRouter", "blue", "chooses a replica")
    d.box(
        (210, 320, 180, 60), "LiveRequest", "blue", "text until it is sent;\nreplay after a crash"
    )
    d.frame((480, 20, 400, 210), "Scheduler process")
    d.box((500, 60, 170, 64), "SchedulerLoop", "teal", "messages in, step,\nmessages out")
    d.box((500, 148, 170, 64), "Scheduler", "teal", "plan: prompts and\ndecodes in one batch")
    d.box((740, 60, 130, 64), "KVCacheManager", "amber", "radix tree, pages")
    d.box((740, 148, 130, 64), "Executor", "teal", "forward pass,\nsampling")
    d.frame((480, 270, 400, 130), "Detokenizer process")
    d.box(
        (500, 310, 360, 66),
        "DetokenizerManager",
        "",
        "text of new tokens, whole characters only;\nfinds stop strings",
    )
    d.arrow((140, 195), (170, 195), (170, 88), (208, 88))
    d.arrow((300, 116), (300, 138))
    d.arrow((300, 196), (300, 218))
    d.arrow((390, 248), (440, 248), (440, 92), (498, 92))
    d.text(436, 84, "Submit", small=True)
    d.arrow((585, 124), (585, 146), both=True)
    d.arrow((670, 162), (738, 112), both=True)
    d.arrow((670, 190), (738, 190), both=True)
    d.text(705, 182, "plan,", small=True)
    d.text(705, 206, "result", small=True)
    d.arrow((520, 212), (520, 308))
    d.text(528, 254, "TokenBatch", small=True, anchor="start")
    d.arrow((640, 308), (640, 214))
    d.text(648, 254, "StopFound", small=True, anchor="start")
    d.arrow((498, 346), (392, 346))
    d.text(445, 338, "TextBatch", small=True)
    d.arrow((208, 350), (80, 350), (80, 242))
    d.text(130, 342, "stream", small=True)
    return d.svg()


def radix() -> str:
    """Draw the prefix tree with two requests that share a prefix."""
    d = Drawing(
        900, 400, "A radix tree: two requests share the system prompt and differ in the question"
    )
    d.box((370, 16, 160, 40), "root")
    d.box(
        (300, 92, 300, 58),
        "You are a helpful assistant. ...",
        "amber",
        "system prompt: pages 0, 1, 2",
    )
    d.box((60, 196, 280, 58), "What is the capital of France?", "amber", "pages 3, 4")
    d.box((560, 196, 280, 58), "What is 17 + 25?", "amber", "page 5")
    d.box((60, 300, 130, 50), "Paris.", "teal", "page 6")
    d.box((210, 300, 130, 50), "It is Paris ...", "teal", "pages 7, 8")
    d.box((560, 300, 280, 50), "42", "teal", "page 9")
    d.line((450, 56), (450, 92))
    d.line((420, 150), (420, 172), (200, 172), (200, 196))
    d.line((480, 150), (480, 172), (700, 172), (700, 196))
    d.line((170, 254), (125, 300))
    d.line((230, 254), (275, 300))
    d.line((700, 254), (700, 300))
    d.text(375, 200, "request A", small=True)
    d.arrow((408, 196), (440, 156))
    d.text(520, 200, "request B", small=True)
    d.arrow((500, 186), (465, 156))
    d.text(450, 222, "both lock the shared pages:", small=True)
    d.text(450, 238, "computed once, read twice", small=True)
    d.text(125, 372, "evicted first: least", small=True)
    d.text(125, 388, "recently used leaf", small=True)
    return d.svg()


def step() -> str:
    """Draw one step: a mixed batch, its plan, and its result."""
    d = Drawing(
        900, 400, "A step: decodes and a chunk of a prompt in one batch, from plan to result"
    )
    d.frame((20, 16, 400, 290), "requests: tokens with KV, and tokens that lack it")
    rows = (
        ("A decodes", 9, 1),
        ("B decodes", 6, 1),
        ("C prompt, chunk 2", 4, 4),
        ("D waits", 0, 0),
    )
    for i, (name, done, new) in enumerate(rows):
        y = 54 + 58 * i
        d.text(36, y + 22, name, anchor="start")
        for k in range(done):
            d.box((170 + 22 * k, y + 6, 20, 22), kind="amber")
        for k in range(new):
            d.box((170 + 22 * (done + k), y + 6, 20, 22), kind="teal")
    for k in range(2):
        d.box((170 + 22 * (8 + k), 54 + 58 * 2 + 6, 20, 22))
    for k in range(7):
        d.box((170 + 22 * k, 54 + 58 * 3 + 6, 20, 22))
    for k, (kind, text) in enumerate(
        (("amber", "has KV"), ("teal", "computed in this step"), ("", "later"))
    ):
        x = (36, 130, 310)[k]
        d.box((x, 324, 18, 18), kind=kind)
        d.text(x + 26, 338, text, small=True, anchor="start")
    d.box(
        (470, 40, 180, 74),
        "Planner",
        "blue",
        "decodes first, then\nprompts, within\nmax_batch_tokens",
    )
    d.box((470, 150, 180, 60), "StepPlan", "", "rows, page tables,\nsampled rows")
    d.box((700, 150, 180, 60), "Executor", "teal", "one forward pass,\n6 rows")
    d.box((700, 246, 180, 60), "StepResult", "", "one new token\nfor A and for B")
    d.box((470, 246, 180, 60), "Scheduler", "blue", "appends, ends, emits;\nadmits D when it fits")
    d.arrow((420, 77), (468, 77))
    d.arrow((560, 114), (560, 148))
    d.arrow((650, 180), (698, 180))
    d.arrow((790, 210), (790, 244))
    d.arrow((700, 276), (652, 276))
    d.arrow((470, 276), (422, 276))
    d.text(
        450,
        378,
        "C samples nothing yet: its prompt is not complete. Prefill and decode are the same "
        "operation on different",
        small=True,
    )
    d.text(450, 394, "numbers of rows, so they share one batch.", small=True)
    return d.svg()


def memory() -> str:
    """Draw pages, page tables and tiers."""
    d = Drawing(900, 410, "Memory: page tables of requests, pages on the device, tiers below")
    d.frame((20, 16, 240, 200), "page tables, one per request")
    for i, (name, pages) in enumerate((("A", "0 1 2 3"), ("B", "0 1 5"), ("C", "7 8"))):
        y = 46 + 54 * i
        d.text(40, y + 26, name)
        for k, page in enumerate(pages.split()):
            d.box((60 + 44 * k, y + 4, 40, 34), page, "blue")
    d.frame((320, 16, 560, 200), "device memory: one allocation, pages of 64 tokens")
    owners = ["teal", "teal", "teal", "teal", "", "teal", "amber", "teal", "teal", "amber", "", ""]
    for k, kind in enumerate(owners):
        d.box((340 + 88 * (k % 6), 50 + 66 * (k // 6), 80, 54), str(k), kind)
    legend = (
        (340, "teal", "held by requests"),
        (500, "amber", "kept by the tree"),
        (660, "", "free"),
    )
    for x, kind, text in legend:
        d.box((x, 188, 18, 18), kind=kind)
        d.text(x + 26, 202, text, small=True, anchor="start")
    d.arrow((260, 116), (318, 116))
    d.box((320, 262, 260, 60), "Host tier", "amber", "--tiers.host-bytes")
    d.box(
        (620, 262, 260, 60),
        "Store",
        "amber",
        "--tiers.storage: disk, Redis, S3;\noutlives the server",
    )
    d.box(
        (20, 262, 240, 60),
        "Weights",
        "",
        "read once per step, by all\nrequests of the step together",
    )
    d.arrow((450, 216), (450, 260), both=True)
    d.text(462, 244, "evicted, loaded back", small=True, anchor="start")
    d.arrow((580, 292), (618, 292), both=True)
    d.text(
        450,
        360,
        "Pages 0 and 1 hold a prefix that A and B share. A page has one owner at a time: "
        "the allocator,",
        small=True,
    )
    d.text(
        450,
        378,
        "a request, the tree, or a load in progress. When a request ends, the tree keeps its pages",
        small=True,
    )
    d.text(
        450,
        396,
        "until memory is short; then the least recently used go down a tier, or are dropped.",
        small=True,
    )
    return d.svg()


DIAGRAMS: Mapping[str, Callable[[], str]] = {
    "overview": overview,
    "request": request,
    "radix": radix,
    "step": step,
    "memory": memory,
}
"""File name -> what draws it."""
