"""Score sapling on held-out examples, in this process or through a running server.

python -m tools.train.evaluate                              # transformers, local files
python -m tools.train.evaluate --url http://127.0.0.1:30000 # an OpenAI-compatible server
python -m tools.train.evaluate --vision                     # sapling-vision, and pictures as well
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tools.train.data import mix
from tools.train.data.base import Example
from tools.train.judge import Answer, Table, parse_answer, score

ASSETS = Path(__file__).resolve().parents[2] / "src" / "sylvan" / "assets" / "sapling"
MAX_TOKENS = 400
_IMAGE = "<image>"


def transformers_answers(folder: Path, examples: list[Example], batch: int = 50) -> list[Answer]:
    """Greedy answers of transformers' own Llama or LLaVA, batched by prompt length."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    seeing = (folder / "preprocessor_config.json").exists()
    kind: Any = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = kind.from_pretrained(folder, dtype=torch.bfloat16).eval()
    prompts = [
        tokenizer.apply_chat_template(
            example.messages[:-1],
            tools=example.tools,
            add_generation_prompt=True,
            enable_thinking=example.thinking,
            tokenize=False,
        )
        for example in examples
    ]
    order = sorted(
        range(len(prompts)), key=lambda index: (examples[index].kind, len(prompts[index]))
    )
    answers: dict[int, Answer] = {}
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        texts = [prompts[i] for i in chosen]
        pictures = [found.image() for i in chosen if (found := examples[i]).image]
        more: dict[str, Any] = {}
        if pictures:
            more["pixel_values"] = _pixels(folder, pictures).to(torch.bfloat16)
            texts = [text.replace(_IMAGE, _IMAGE * model.config.image_seq_length) for text in texts]
        inputs = tokenizer(texts, return_tensors="pt", padding=True)
        width = inputs["input_ids"].shape[1]
        with torch.inference_mode():
            output = model.generate(
                **more,
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
            )
        for index, row in zip(chosen, output, strict=True):
            ids = row[width:].tolist()
            stopped = tokenizer.eos_token_id in ids
            if stopped:
                ids = ids[: ids.index(tokenizer.eos_token_id)]
            text = tokenizer.decode(ids, skip_special_tokens=True)
            answers[index] = parse_answer(text, stopped=stopped)
    return [answers[index] for index in range(len(examples))]


def _pixels(folder: Path, pictures: list[Any]) -> Any:
    """Return images as the checkpoint's processor prepares them."""
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    return processor(pictures, return_tensors="pt")["pixel_values"]


def _parts(text: str, picture: Any) -> list[dict[str, Any]]:
    """Return a text with its image as OpenAI clients send it: PNG in base64."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    before, _, after = text.partition(_IMAGE)
    parts = [
        {"type": "text", "text": before},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": after},
    ]
    return [part for part in parts if part.get("text") != ""]


def _wire(message: dict[str, Any], example: Example) -> dict[str, Any]:
    """Return a message as OpenAI clients send it: arguments as a JSON string, image as a part."""
    if example.image is not None and _IMAGE in message["content"]:
        return {**message, "content": _parts(message["content"], example.image())}
    calls = message.get("tool_calls")
    if not calls:
        return message
    wired = [
        {**call, "function": {**call["function"],
                              "arguments": json.dumps(call["function"]["arguments"],
                                                      ensure_ascii=False)}}
        for call in calls
    ]  # fmt: skip
    return {**message, "tool_calls": wired}


def server_answer(url: str, model: str, example: Example) -> Answer:
    """One answer of an OpenAI-compatible chat server."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [_wire(message, example) for message in example.messages[:-1]],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": example.thinking},
    }
    if example.tools:
        body["tools"] = example.tools
    request = urllib.request.Request(
        url.rstrip("/") + "/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        choice = json.load(response)["choices"][0]
    message = choice["message"]
    answer = parse_answer(message.get("content") or "", stopped=choice["finish_reason"] != "length")
    answer.thought = answer.thought or (message.get("reasoning_content") or "").strip()
    for call in message.get("tool_calls") or []:
        function = call["function"]
        try:
            answer.calls.append((function["name"], json.loads(function["arguments"])))
        except ValueError:
            answer.calls.append((function["name"], None))
    return answer


def server_answers(
    url: str, model: str, examples: list[Example], parallel: int = 8
) -> list[Answer]:
    """Answers of a server, several requests at a time."""
    with ThreadPoolExecutor(parallel) as pool:
        return list(pool.map(lambda example: server_answer(url, model, example), examples))


def format_table(table: Table) -> str:
    """The per-class table as Markdown."""
    lines = ["| class | right | of | accuracy |", "|---|---:|---:|---:|"]
    lines += [
        f"| {name} | {row['right']:.0f} | {row['total']:.0f} | {100 * row['accuracy']:.1f} % |"
        for name, row in table.items()
    ]
    return "\n".join(lines)


def show_miss(example: Example, answer: Answer) -> None:
    """Print the request, the expected answer and the actual one."""
    last = example.messages[-1]
    print(
        f"MISS {example.kind}: {example.messages[-2]['content']!r}\n"
        f"  wanted {last.get('tool_calls') or last['content']!r}\n"
        f"  got {answer}"
    )


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Score sapling on held-out examples.")
    parser.add_argument("--model", type=Path, help="model directory; default: the built-in one")
    parser.add_argument("--vision", action="store_true", help="ask about pictures as well")
    parser.add_argument(
        "--other-fonts", action="store_true", help="draw fonts that were never trained on"
    )
    parser.add_argument("--url", help="score a running server instead of the local files")
    parser.add_argument("--name", default="sapling", help="model name to send to the server")
    parser.add_argument("--per-class", type=int, default=200)
    parser.add_argument("--seed", type=int, default=20_000)
    parser.add_argument("--split", choices=("test", "dev"), default="test")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    parser.add_argument("--misses", action="store_true", help="print every miss")
    chosen = parser.parse_args(arguments)
    examples = mix.evaluation_set(chosen.seed, chosen.per_class, chosen.split)
    if chosen.vision:
        from tools.train.vision import questions
        from tools.train.vision.draw import installed_fonts

        fonts = installed_fonts(held_out=chosen.other_fonts)
        examples += questions.evaluation_set(chosen.seed, chosen.per_class, chosen.split, fonts)
    if chosen.url:
        answers = server_answers(chosen.url, chosen.name, examples)
    else:
        built_in = ASSETS.with_name("sapling-vision") if chosen.vision else ASSETS
        answers = transformers_answers(chosen.model or built_in, examples)
    on_miss: Callable[[Example, Answer], None] | None = show_miss if chosen.misses else None
    table = score(examples, answers, on_miss)
    print(format_table(table))
    if chosen.json:
        report = {"seed": chosen.seed, "split": chosen.split, "classes": table}
        chosen.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
