"""JSON extraction: the output fits a schema, whatever the model would rather write."""

from __future__ import annotations

import argparse
import json

import sylvan as sgl

TEXTS = ("Maria is 31 years old and lives in Lisbon.", "Karim, aged 45, is from Tunis.")
SCHEMA = json.dumps({
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "city": {"type": "string", "maxLength": 20},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
})  # fmt: skip


@sgl.function
def extract(s, text):
    s += sgl.user("Extract name, age and city as JSON: " + text)
    s += sgl.assistant(sgl.gen("json", max_tokens=96, temperature=0, json_schema=SCHEMA))


def run(texts=TEXTS):
    states = extract.run_batch([{"text": text} for text in texts])
    return [json.loads(state["json"]) for state in states]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    sgl.set_default_backend(sgl.RuntimeEndpoint(parser.parse_args().base_url))
    for record in run():
        print(record)


if __name__ == "__main__":
    main()
